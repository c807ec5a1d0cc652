"""The table of verbs."""

import argparse
from collections.abc import Callable
from typing import NamedTuple

from rlinf_vl.cli.keys import configs_and_keys
from rlinf_vl.cli.parser_parts import COMMAND
from rlinf_vl.config.parts import named
from rlinf_vl.config.systems import SYSTEMS


class Verb(NamedTuple):
    """A verb of the command line."""

    #: `module:function`, imported when the verb runs, so that verbs start fast. It is called with
    #: the parsed arguments, and returns the exit code, or None for 0.
    place: str
    summary: str
    #: The function that adds the verb's arguments by `ArgumentParser.add_argument`; imported when
    #: the command line is parsed, so its module imports little.
    arguments: str
    #: Errors that mean a mistake of the user, beside ConfigError.
    mistakes: tuple[type[Exception], ...] = ()
    #: Makes the end of the verb's help.
    epilog_text: Callable[[], str] | None = None


VERBS = {
    "train": Verb(
        "rlinf_vl.driver.verbs:train",
        "run one experiment",
        "rlinf_vl.cli.arguments:train",
        epilog_text=configs_and_keys,
    ),
    "sft": Verb(
        "rlinf_vl.driver.verbs:train",
        "imitate conversations with pictures: supervised training, with a train config",
        "rlinf_vl.cli.arguments:sft",
    ),
    "eval": Verb(
        "rlinf_vl.extras.eval.main:main",
        "measure a model: pass@k with standard errors, tables, trajectories",
        "rlinf_vl.extras.eval.verb_arguments:eval",
    ),
    "toy": Verb(
        "rlinf_vl.extras.toy.main:main",
        "make an embedded task's data and its warm-started checkpoint (cached)",
        "rlinf_vl.cli.arguments:toy",
    ),
    "export": Verb(
        "rlinf_vl.extras.export.main:main",
        "turn a checkpoint into a Hugging Face model, as a folder or on the hub",
        "rlinf_vl.extras.export.verb_arguments:export",
        mistakes=(FileNotFoundError, FileExistsError),
    ),
    "serve": Verb(
        "rlinf_vl.extras.serve.server:main",
        "answer OpenAI's chat API with a trained policy, for any client",
        "rlinf_vl.extras.serve.verb_arguments:serve",
    ),
    "watch": Verb(
        "rlinf_vl.tools.report.main:watch",
        "follow a run on this terminal",
        "rlinf_vl.tools.report.verb_arguments:watch",
        mistakes=(ValueError,),
    ),
    "timeline": Verb(
        "rlinf_vl.tools.report.timeline:main",
        "merge what every process did when into a trace for ui.perfetto.dev",
        "rlinf_vl.tools.report.verb_arguments:timeline",
        mistakes=(ValueError,),
    ),
    "report": Verb(
        "rlinf_vl.tools.report.main:report",
        "one HTML file on a run, or on several side by side",
        "rlinf_vl.tools.report.verb_arguments:report",
        mistakes=(ValueError,),
    ),
    "runs": Verb(
        "rlinf_vl.tools.report.main:runs",
        "a table of the runs in a folder, the newest first",
        "rlinf_vl.tools.report.verb_arguments:runs",
        mistakes=(ValueError,),
    ),
    "look": Verb(
        "rlinf_vl.tools.report.look.main:main",
        "score a run's answers with and without their images; heat maps",
        "rlinf_vl.tools.report.verb_arguments:look",
        mistakes=(FileNotFoundError,),
    ),
    "check-env": Verb(
        "rlinf_vl.tools.check.main:check_env",
        "play an environment or an agent with random and hostile answers; say what breaks its contract",
        "rlinf_vl.tools.check.verb_arguments:check_env",
    ),
    "prove-family": Verb(
        "rlinf_vl.tools.verify.prove.main:main",
        "compare every path of a model's family with transformers, with a tiny random member of it",
        "rlinf_vl.tools.verify.verb_arguments:prove_family",
    ),
    "replay": Verb(
        "rlinf_vl.tools.verify.replay.main:main",
        "record a step of a run as a file, or run such a file in transformers' plain code, the "
        "trainer's and the engine's, and name where they part",
        "rlinf_vl.tools.verify.verb_arguments:replay",
    ),
    "compare-batch": Verb(
        "rlinf_vl.tools.verify.compare.main:main",
        "put another system's recorded batch through our algorithm; name the first column that "
        "differs, and why",
        "rlinf_vl.tools.verify.verb_arguments:compare_batch",
    ),
    "check-reward": Verb(
        "rlinf_vl.tools.check.reward:main",
        "try a reward function on good, bad and hostile answers; say what it pays",
        "rlinf_vl.tools.check.verb_arguments:check_reward",
    ),
    "check-data": Verb(
        "rlinf_vl.tools.check.data.main:main",
        "examine a whole data set: content, damaged rows, rows beyond the limits",
        "rlinf_vl.tools.check.verb_arguments:check_data",
    ),
    "doctor": Verb(
        "rlinf_vl.tools.check.main:doctor",
        "report what this machine has and what a config needs",
        "rlinf_vl.tools.check.verb_arguments:doctor",
    ),
    "preflight": Verb(
        "rlinf_vl.tools.memory.table:main",
        "estimate the memory that a config takes of each GPU; needs no GPU",
        "rlinf_vl.tools.memory.verb_arguments:preflight",
    ),
    "config": Verb(
        "rlinf_vl.cli.keys:main",
        "show configuration keys: all of them with their defaults, or what one means and may be",
        "rlinf_vl.cli.arguments:config",
    ),
    "convert-config": Verb(
        "rlinf_vl.tools.convert.main:main",
        f"write a config of {', '.join(SYSTEMS.values())} as one of ours",
        "rlinf_vl.tools.convert.verb_arguments:convert_config",
    ),
    "new": Verb(
        "rlinf_vl.cli.new:main",
        "write a commented template of your own experiment, environment, agent, reward, loss or "
        "estimator",
        "rlinf_vl.cli.arguments:new",
    ),
    "completion": Verb(
        "rlinf_vl.cli.completion:main",
        f"print what completes '{COMMAND}' in your shell; its first lines say how to use it",
        "rlinf_vl.cli.arguments:completion",
    ),
}


def run_verb(parsed: argparse.Namespace) -> int:
    """Run a verb, and return its exit code."""
    return named(VERBS[parsed.verb].place)(parsed) or 0
