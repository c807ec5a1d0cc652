"""The functions of the verbs. Each is imported when its verb runs, so that verbs start fast."""

import argparse

from rlinf_vl.config.parts import named

#: Verb → `module:function`, called with the verb's arguments. It returns the exit code, or None
#: for 0.
VERBS = {
    "train": "rlinf_vl.driver.verbs:train",
    "sft": "rlinf_vl.driver.verbs:train",
    "eval": "rlinf_vl.extras.eval.main:main",
    "config": "rlinf_vl.cli.keys:main",
    "new": "rlinf_vl.cli.new:main",
    "convert-config": "rlinf_vl.tools.convert.main:main",
    "completion": "rlinf_vl.cli.completion:main",
    "toy": "rlinf_vl.extras.toy.main:main",
    "export": "rlinf_vl.extras.export.main:main",
    "serve": "rlinf_vl.extras.serve.server:main",
    "watch": "rlinf_vl.tools.report.main:watch",
    "timeline": "rlinf_vl.tools.report.main:timeline",
    "report": "rlinf_vl.tools.report.main:report",
    "runs": "rlinf_vl.tools.report.main:runs",
    "look": "rlinf_vl.tools.report.look.main:main",
    "check-env": "rlinf_vl.tools.check.main:check_env",
    "check-reward": "rlinf_vl.tools.check.reward:main",
    "check-data": "rlinf_vl.tools.check.data.main:main",
    "prove-family": "rlinf_vl.tools.verify.prove.main:main",
    "replay": "rlinf_vl.tools.verify.replay.main:main",
    "compare-batch": "rlinf_vl.tools.verify.compare.main:main",
    "doctor": "rlinf_vl.tools.check.main:doctor",
    "preflight": "rlinf_vl.tools.memory.table:main",
}

#: Verb → its errors that mean a mistake of the user, beside ConfigError: a folder that is not a
#: run's, or not as it must be.
MISTAKES: dict[str, tuple[type[Exception], ...]] = {
    "watch": (ValueError,),
    "timeline": (ValueError,),
    "report": (ValueError,),
    "runs": (ValueError,),
    "export": (FileNotFoundError, FileExistsError),
    "look": (FileNotFoundError,),
}


def run_verb(arguments: argparse.Namespace) -> int:
    """Run a verb, and return its exit code."""
    return named(VERBS[arguments.verb])(arguments) or 0
