"""The verbs `train` and `sft`: one run, several of one config, or their checks alone."""

import argparse
import importlib.util
import logging
from collections.abc import Sequence

from rlinf_vl.config import load_config
from rlinf_vl.config.imitation import imitation_config, sampled_problems
from rlinf_vl.config.parts import load_part
from rlinf_vl.config.validate import Rule
from rlinf_vl.driver import entry
from rlinf_vl.errors import ConfigError

log = logging.getLogger("rlinf_vl")


def train(arguments: argparse.Namespace) -> int:
    """Train, or with `--check` only check; returns the exit code."""
    # A check may run where SGLang and torch are not installed. A Python without torch is not the
    # one that will train: what else it lacks says nothing, and there is nothing to rehearse.
    has_torch = importlib.util.find_spec("torch") is not None
    if arguments.check:
        libraries = [load_part("missing-libraries")] if has_torch else []
        rules = [*libraries, *load_part("input-rules")]
    else:
        rules = load_part("start-rules")
    if arguments.verb == "sft":
        config = imitation_config(arguments.config, arguments.overrides, rules)
    elif arguments.multirun:
        return _sweep(arguments, [sampled_problems, *rules])
    else:
        config = load_config(arguments.config, arguments.overrides, [sampled_problems, *rules])
    if arguments.check:
        if has_torch:
            # Not before a run, which opens its trackers itself: they may write to a server.
            if problems := list(load_part("tracker-problems")(config)):
                raise ConfigError(*problems)
            print(entry.rehearse(config))
        return 0
    stopped_by = entry.launch_training(config, arguments.stop_request)
    return 128 + stopped_by if stopped_by else 0


def _sweep(arguments: argparse.Namespace, rules: Sequence[Rule]) -> int:
    """Run each combination of the overrides' values; returns the exit code."""
    sweep = load_part("plan-sweep")(arguments.config, arguments.overrides)
    load_part("check-sweep")(sweep, rules)
    if arguments.check:
        print(f"{sweep.folder}: {len(sweep.runs)} runs; each of them can begin")
        return 0
    code = load_part("run-sweep")(sweep, arguments.parallel, arguments.stop_request)
    log.info("the sweep's report: %s", load_part("sweep-report")(sweep.folder))
    return code
