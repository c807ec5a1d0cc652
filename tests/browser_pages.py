"""What the tests of browsers share: whether there is one, an environment on pages, and calls."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from rlinf_vl.envs import StepResult
from rlinf_vl.extras.browser.env import Browser
from rlinf_vl.extras.browser.host import PROGRAMS, find_program
from rlinf_vl.types import Problem

HAS_BROWSER = importlib.util.find_spec("playwright") is not None and find_program() is not None
needs_browser = pytest.mark.skipif(
    not HAS_BROWSER,
    reason=f"no browser: no Playwright, or neither CHROMIUM nor {', '.join(PROGRAMS)} in PATH",
)
#: Generous: machines that run tests are busy.
TIMEOUT_S = 200.0


def browser_on(folder: Path | None, cls: type[Browser] = Browser, **keywords: Any) -> Browser:
    settings = {
        "grade": lambda response, answer: answer in response,
        "reward_max": 1.0,
        "reward_min": 0.0,
        "group_seed": 3,
        "viewport": [80, 60],
        "settle_s": 0.0,
        "timeout_s": TIMEOUT_S,
    }
    return cls(**settings | ({"folder": str(folder)} if folder else {}) | keywords)


def problem(text: str = "Do it.", answer: str = "", **columns: Any) -> Problem:
    messages = ({"role": "user", "content": [{"type": "text", "text": text}]},) if text else ()
    return Problem("p:0", messages, answer, columns=columns)


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def texts(result: StepResult) -> str:
    return "".join(
        part.get("text", "") for message in result.messages for part in message["content"]
    )


def asked(env: Browser, expression: str) -> Any:
    """The value of an expression in the page, which the policy can't ask for."""
    return env._run_page(env._page.page.evaluate(expression))


def middle(env: Browser, selector: str, number: int = 0) -> dict[str, int]:
    """Where an element is, as arguments of a click."""
    x, y = asked(
        env,
        f"(() => {{ const box = document.querySelectorAll({json.dumps(selector)})[{number}]"
        ".getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2] })()",
    )
    return {"x": round(x), "y": round(y)}
