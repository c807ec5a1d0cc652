"""Verbs that have two kinds of subjects: `check-env` and `doctor`."""

import argparse


def check_env(arguments: argparse.Namespace) -> int:
    """Check an environment or an agent: a class is an environment, a function can only be an
    agent's."""
    from rlinf_vl.tools.check import env
    from rlinf_vl.tools.check.agents import main as agents

    if arguments.agent or agents.is_agent(arguments.env_class):
        return agents.main(arguments)
    return env.main(arguments)


def doctor(arguments: argparse.Namespace) -> int:
    """Check this machine, or with `--smoke` each part of a run, once."""
    if arguments.smoke:
        from rlinf_vl.tools.check.smoke.main import main as smoke  # imports torch

        return smoke(arguments)
    from rlinf_vl.tools.check.doctor import main

    return main(arguments)
