"""`rlinf-vl check-env my_agent.py:solve`: plays an agent against a policy that says odd things.

The endpoint, the sessions and the limits are those of a run; the policy's answers are written
beforehand. It reports what breaks the contract of agents (exit code 1), and what the trajectories
were like.
"""

import argparse
import asyncio
import inspect
import shlex

from PIL import Image, ImageDraw

from rlinf_vl.config.schema.rollout import AGENT_CALL, AgentConfig
from rlinf_vl.data.images import to_image_ref
from rlinf_vl.data.unusable import RowError
from rlinf_vl.errors import ConfigError
from rlinf_vl.extras.agents.drivers import CommandDriver, FunctionDriver
from rlinf_vl.rollout.episode.env_executor import ThreadExecutor
from rlinf_vl.tools.check.agents.check import AgentCheck
from rlinf_vl.tools.check.agents.observed import LoopWatch
from rlinf_vl.tools.check.arguments import FORM_KEYS, parsed_overrides, problems_of
from rlinf_vl.tools.check.policies import scripts_of
from rlinf_vl.types import Problem
from rlinf_vl.user_code import CodeError, is_code, load_code

MAX_PROBLEMS = 4


def is_agent(name: str) -> bool:
    """Return whether a name leads to a function, and not to a class as environments are."""
    if not is_code(name):
        return False
    try:
        loaded = load_code(name, {}, {}, kind="agent", signature="object")
    except CodeError:  # the check of environments says what is wrong with it
        return False
    return callable(loaded) and not isinstance(loaded, type)


def _problem() -> Problem:
    """Return the problem that is played if no data is given: a question with a picture."""
    picture = Image.new("RGB", (96, 64), "white")
    ImageDraw.Draw(picture).text((8, 24), "6 × 7 = ?", fill="black")
    image = to_image_ref(picture, root=None)
    parts = [
        {"type": "image_url", "image_url": {"url": image.url}},
        {"type": "text", "text": "What is it? Answer in \\boxed{}."},
    ]
    return Problem("check-env", ({"role": "user", "content": parts},), "42", (image,))


def main(arguments: argparse.Namespace) -> int:
    """Check an agent; return 0 if nothing breaks the contract, else 1.

    Raises:
        ConfigError: the agent or the data can't be loaded.
    """
    name = arguments.env_class
    kwargs, form = parsed_overrides(arguments.overrides, "data.* for --data")
    errors = [f"{key}: an agent has no keywords" for key in kwargs]
    errors += [f"data.{key}: no such key here" for key in form.keys() - FORM_KEYS]
    if errors:
        raise ConfigError(*errors)
    try:
        scripts = scripts_of(arguments.answers)
        check = _check_of(name, arguments.time_limit)
        problems = [_problem()]
        if arguments.data is not None:
            problems = problems_of(arguments.data, form, MAX_PROBLEMS)
    except (CodeError, RowError) as error:
        raise ConfigError(str(error)) from error
    # The one loop of all agents, as in a worker.
    asyncio.run(check.play(problems, scripts))
    return check.report(arguments.json)


def _check_of(name: str, limit_s: float) -> AgentCheck:
    """Return the check of an agent's function or command. Raises CodeError: there is none."""
    if not is_code(name) or " " in name:
        driver = CommandDriver(shlex.split(name), limit_s, AgentConfig().memory_gb)
        return AgentCheck(name=name, file="", driver=driver)
    # In this process, as with `cluster.backend: local`: its errors keep their lines.
    executor = ThreadExecutor(limit_s)
    driver = FunctionDriver(name, {}, executor)
    function = inspect.unwrap(load_code(name, {}, {}, kind="agent", signature=AGENT_CALL))
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    # Any other function has a thread of its own, which it may keep.
    watch = LoopWatch(executor, file) if inspect.iscoroutinefunction(function) else None
    return AgentCheck(name=name, file=file, driver=driver, watch=watch)
