"""Pages in a real browser: the policy sees pictures of them and acts with mouse and keyboard.

A page may define three functions, all optional and possibly asynchronous:

- `startEpisode(episode)` draws the task. `episode`, also `window.episode`, holds `seed` (equal for
  the trajectories of a group), `columns` and `answer` of the row. `Math.random` is seeded by it.
- `utterance()` returns what is asked, as text.
- `reward()` returns null while the episode goes on, and a number from 0 to 1 when it is over. At
  the end it gets the policy's last answer.
"""

import asyncio
import hashlib
import importlib.util
import json
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from rlinf_vl.envs.base import Grade, StepResult
from rlinf_vl.envs.tool import ToolEnv, ToolFailure
from rlinf_vl.errors import pip_install
from rlinf_vl.extras.browser.host import (
    HOST,
    LAUNCH_S,
    Tab,
    TabFailure,
    TabSettings,
    check_installed,
)
from rlinf_vl.extras.browser.pages import PageSource
from rlinf_vl.types import Message, Problem

#: Most characters of one `type`, and pixels of the picture.
MAX_TEXT, MAX_PIXELS = 2000, 2**23
#: Farthest turn of the mouse wheel in one call, in CSS pixels: browsers take no number beyond.
MAX_SCROLL = 2**20
#: Steps of the mouse on its way in a drag: pages follow it by its movements.
_DRAG_STEPS = 8
#: Milliseconds of an episode of MiniWoB++: more than any takes, within JavaScript's timers.
_MINIWOB_MS = 2**31 - 1
#: The contract of this module for pages of MiniWoB++. The rewards of wrong answers are negative
#: there. A page covers itself with a button that starts it, and `startEpisodeReal` presses it.
_MINIWOB = f"""
window.startEpisode = async (episode) => {{
  Math.seedrandom(episode.seed);
  core.EPISODE_MAX_TIME = {_MINIWOB_MS};
  core.startEpisodeReal();
  while (!WOB_TASK_READY) await new Promise((resolve) => setTimeout(resolve, 10));
}};
window.utterance = () => core.getUtterance();
window.reward = () => WOB_DONE_GLOBAL ? Math.max(0, WOB_RAW_REWARD_GLOBAL) : null;
"""
#: Width and height of a task of MiniWoB++, and of the window that its dialogs are placed in.
_MINIWOB_VIEWPORT, _MINIWOB_WINDOW = (160, 210), (500, 240)
Coordinates = Literal["pixels", "thousandths"]


# The docstrings of tools are part of the prompt: rewording or wrapping one changes what models see.
class Browser(ToolEnv):
    """An episode on a page: every turn shows a picture of it.

    It ends when the page's `reward()` returns a number, or with the first response without a call.
    The page's reward then counts, from `reward_min` (0) to `reward_max` (1); without a `reward()`
    the response is left to the run's reward functions.

    Args:
        url: the first page: a file of `folder`, or an address of `allow`.
        folder: whole path of a folder with pages. Files outside it can't be loaded.
        allow: addresses that pages may load beside the folder, with everything below them; [] for
            no network at all.
        miniwob: name of a task of MiniWoB++, such as click-test, in place of `url` and `folder`.
        viewport: [width, height] of the page in CSS pixels; None for [640, 480], or the size of
            MiniWoB++'s pages.
        scale: pixels of the picture for each CSS pixel.
        coordinates: unit of x and y in calls: "pixels" of the picture, or "thousandths" of its
            width and height.
        settle_s: seconds that a page has after an action before its picture is taken.
        timeout_s: seconds in which a page must react to the actions of a turn; exceeding them is
            an error of the episode. Less than `rollout.turn_timeout`.
        keep_page: whether the page stays loaded for later episodes, which its `startEpisode`
            begins. That takes a tenth of the time of a new page, and what a page keeps is seen in
            its later episodes.
        tools_prompt, tool_response, max_tool_calls: as in `ToolEnv`.

    Raises:
        ImportError: Playwright, Chromium or MiniWoB++ is not installed.
        ValueError: a keyword is invalid.
    """

    tool_response = "<tool_response>{result}</tool_response>\n"
    #: A row doesn't choose what a worker may read or where it may connect to.
    config_only = ("folder", "allow")

    def __init__(
        self,
        *,
        url: str = "index.html",
        folder: str | None = None,
        allow: Sequence[str] = (),
        miniwob: str | None = None,
        viewport: Sequence[int] | None = None,
        scale: float = 1.0,
        coordinates: Coordinates = "pixels",
        settle_s: float = 0.1,
        timeout_s: float = 20.0,
        keep_page: bool = False,
        grade: Grade,
        reward_max: float,
        reward_min: float,
        group_seed: int,
        tools_prompt: str | None = None,
        tool_response: str | None = None,
        max_tool_calls: int | None = None,
    ) -> None:
        super().__init__(
            grade=grade,
            reward_max=reward_max,
            reward_min=reward_min,
            tools_prompt=tools_prompt,
            tool_response=tool_response,
            max_tool_calls=max_tool_calls,
        )
        _check_turn(coordinates, settle_s, timeout_s)
        contract, window = "", (1, 1)
        if miniwob is not None:
            if folder is not None or url != "index.html":
                raise ValueError("give either miniwob, or url and folder")
            folder, url, contract = str(_miniwob_folder()), f"miniwob/{miniwob}.html", _MINIWOB
            viewport, window = viewport or _MINIWOB_VIEWPORT, _MINIWOB_WINDOW
        source = PageSource.from_settings(folder, allow)
        check_installed()
        width, height = _checked_viewport(viewport or (640, 480), scale)
        self._settings = TabSettings(
            source=source,
            address=source.address_of(url),
            viewport=(width, height),
            window=(max(width, window[0]), max(height, window[1])),
            scale=scale,
            keep=keep_page,
            contract=contract,
        )
        self._thousandths = coordinates == "thousandths"
        self._settle_s, self._timeout_s = settle_s, timeout_s
        # JavaScript's generators take 32 bits.
        self._seed = group_seed % 2**32
        self._tab: Tab | None = None
        self._share: float | None = None  # of the reward, once the page has given it
        self._over, self._has_failed = True, False
        self._state = ""
        self.metrics |= {"success": 0.0, "blocked_requests": 0.0, "popups": 0.0}

    def start(self, problem: Problem) -> list[Message]:
        messages = super().start(problem)
        self._open()
        utterance = self._run_page(self._page.ask("utterance()"))
        parts: list[dict[str, Any]] = [self._picture()]
        if utterance is not None:
            parts.append({"type": "text", "text": str(utterance)})
        if messages and messages[-1]["role"] == "user":
            content = messages.pop()["content"]
            parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
        return [*messages, {"role": "user", "content": parts}]

    def step(self, response: str) -> StepResult:
        if self._over:
            raise RuntimeError("step() without start(), or after the end")
        state = self._state  # the state in which the response was given, not the one after it
        result = super().step(response)
        tab = self._page
        self.metrics |= {"blocked_requests": float(tab.blocked), "popups": float(tab.popups)}
        if not result.done and self._share is not None:
            # Calls have brought the sum of rewards to `reward_min` already.
            end = self._end(self._share)
            result = replace(end, reward=result.reward + end.reward, info=result.info | end.info)
        elif not result.done:
            content = [*result.messages[0]["content"], *self._dialogs(), self._picture()]
            result = replace(result, messages=({"role": "user", "content": content},))
        metrics = {"metrics": dict(self.metrics)}
        self._over = result.done
        if result.done:
            # Closed at once, since the other episodes of its group may go on for long.
            self.close()
        return replace(result, info=result.info | metrics | {"state": state})

    def answer(self, response: str) -> StepResult:
        """End the episode with the page's reward, or leave it to the run's reward functions."""
        if not self._run_page(self._page.has("reward")):
            return super().answer(response)
        share = self._share
        if share is None:
            share = self._read_reward(response) or 0.0
        return self._end(share)

    def close(self) -> None:
        tab, self._tab = self._tab, None
        if tab is not None:
            HOST.call(HOST.shut(tab, is_reusable=not self._has_failed), self._timeout_s)

    def click(self, x: float, y: float) -> str:
        """Click on the page with the left mouse button.

        Args:
            x: Distance from the left edge of the picture
            y: Distance from its upper edge
        """
        mouse, point = self._page.page.mouse, self._point(x, y)
        return self._act(lambda: mouse.click(*point))

    def type(self, text: str) -> str:
        """Type a text on the keyboard. It goes where the page has its focus, so click there first.

        Args:
            text: The text
        """
        if len(text) > MAX_TEXT:
            raise ValueError(f"text: {len(text)} characters are more than {MAX_TEXT}")
        keyboard = self._page.page.keyboard
        return self._act(lambda: keyboard.type(text))

    def key(self, name: str) -> str:
        """Press a key.

        Args:
            name: Such as Enter, Tab, Backspace, ArrowDown, a, or Control+a
        """
        keyboard = self._page.page.keyboard
        return self._act(lambda: keyboard.press(name))

    def scroll(self, x: float, y: float, down: float, right: float = 0) -> str:
        """Turn the mouse wheel at a place of the page.

        Args:
            x: Distance from the left edge of the picture
            y: Distance from its upper edge
            down: How far down; negative: up
            right: How far to the right; negative: to the left
        """
        mouse, point = self._page.page.mouse, self._point(x, y)
        across, along = self._in_css(right, down)
        if max(abs(across), abs(along)) > MAX_SCROLL:
            raise ValueError(f"down={down:g}, right={right:g} is farther than any page goes")

        async def turn() -> None:
            await mouse.move(*point)
            await mouse.wheel(across, along)

        return self._act(turn)

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> str:
        """Drag what is at one place of the page to another.

        Args:
            x: Distance of the first place from the left edge of the picture
            y: Distance of the first place from its upper edge
            to_x: Distance of the second place from the left edge
            to_y: Distance of the second place from the upper edge
        """
        mouse = self._page.page.mouse
        begin, end = self._point(x, y), self._point(to_x, to_y)

        async def move() -> None:
            await mouse.move(*begin)
            await mouse.down()
            await mouse.move(*end, steps=_DRAG_STEPS)
            await mouse.up()

        return self._act(move)

    def back(self) -> str:
        """Go back to the page before."""
        page = self._page.page

        async def go_back() -> None:
            if await page.go_back() is None:
                raise ValueError("there is no page before")

        return self._act(go_back)

    def _open(self) -> None:
        """Load the page and begin the episode on it."""
        self._over, self._share = False, None
        facts = {
            "seed": self._seed,
            "columns": self.problem.columns,
            "answer": self.problem.answer,
        }
        # Starting a browser has a limit of its own.
        opening = HOST.open(self._settings, facts, self._timeout_s)
        self._tab = self._run_page(opening, self._timeout_s + LAUNCH_S)

    @property
    def _page(self) -> Tab:
        if self._tab is None:
            raise RuntimeError("no page is open")
        return self._tab

    def _act(self, action: Callable[[], Coroutine[Any, Any, Any]]) -> str:
        """Do something on the page, and ask it whether the episode is over."""
        # Pages of MiniWoB++ begin anew with a click after their end.
        if self._share is not None:
            raise ValueError("the episode is over")
        tab = self._page

        async def act_and_settle() -> None:
            await action()
            if self._settle_s:
                await asyncio.sleep(self._settle_s)
            await tab.page.wait_for_load_state()

        self._run_page(act_and_settle())
        self._share = self._read_reward(None)
        return "done"

    def _run_page(self, work: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> Any:
        """Run a coroutine of the page, within `timeout_s` or that of the episode.

        Raises:
            ToolFailure: the page or the browser has failed.
            ValueError: the call can't be done.
        """
        from playwright.async_api import Error

        try:
            return HOST.call(work, timeout_s or self._timeout_s)
        except TabFailure as error:
            self._has_failed = True
            raise ToolFailure(f"{self._settings.address}: {error}") from error
        except Error as error:
            reason = error.message.splitlines()[0]
            if "Unknown key" in reason:
                raise ValueError(reason) from error
            self._has_failed = True
            if self._tab is not None and self._tab.has_crashed:
                reason = "the page's process has crashed"
            raise ToolFailure(f"{self._settings.address}: {reason}") from error

    def _read_reward(self, answer: str | None) -> float | None:
        """Return the share of the reward that the page gives; None if the episode goes on."""
        argument = "" if answer is None else json.dumps(answer)
        share = self._run_page(self._page.ask(f"reward({argument})"))
        if share is None:
            return None
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if not is_number or not math.isfinite(share) or not 0 <= share <= 1:
            raise ToolFailure(
                f"{self._settings.address}: reward() returned {share!r}; return null, or a number "
                "from 0 to 1"
            )
        return float(share)

    def _end(self, share: float) -> StepResult:
        """End the episode with a share of the reward."""
        self._share = share
        self.metrics["success"] = float(share == 1)
        total = self.reward_min + share * (self.reward_max - self.reward_min)
        return StepResult((), self.pay(total), True, {"correct": share == 1})

    def _dialogs(self) -> list[dict[str, Any]]:
        """Return what the page's dialogs said since the last turn, for the policy to read."""
        tab = self._page
        texts = [f"A dialog was closed, {text}\n" for text in tab.dialogs]
        tab.dialogs.clear()
        return [{"type": "text", "text": text} for text in texts]

    def _picture(self) -> dict[str, Any]:
        """Return the message part with a picture of the page, and note its state."""
        picture = self._run_page(self._page.picture())
        # Turns with equal pictures count as turns in the same state (GiGPO).
        self._state = hashlib.blake2b(picture, digest_size=12).hexdigest()
        return {"type": "image", "image": picture}

    def _point(self, x: float, y: float) -> tuple[float, float]:
        """Return a place of the picture in CSS pixels.

        Raises:
            ValueError: it lies outside.
        """
        point = self._in_css(x, y)
        width, height = self._settings.viewport
        if not (0 <= point[0] <= width and 0 <= point[1] <= height):
            scale = self._settings.scale
            end = (1000, 1000) if self._thousandths else (width * scale, height * scale)
            raise ValueError(
                f"x={x:g}, y={y:g} lies outside the picture, which ends at x={end[0]:g}, "
                f"y={end[1]:g}"
            )
        return point

    def _in_css(self, x: float, y: float) -> tuple[float, float]:
        width, height = self._settings.viewport
        if self._thousandths:
            return x * width / 1000, y * height / 1000
        return x / self._settings.scale, y / self._settings.scale


def _check_turn(coordinates: str, settle_s: float, timeout_s: float) -> None:
    """Raise ValueError if a turn has no such unit of coordinates, or no such times."""
    if coordinates not in get_args(Coordinates):
        raise ValueError(
            f"coordinates: {coordinates!r} is none of {', '.join(get_args(Coordinates))}"
        )
    if not settle_s >= 0 or not timeout_s > settle_s:
        raise ValueError(
            f"settle_s={settle_s} must be at least 0, and timeout_s={timeout_s} more than it"
        )


def _checked_viewport(viewport: Sequence[int], scale: float) -> tuple[int, int]:
    """Return (width, height).

    Raises:
        ValueError: they are no numbers of pixels, or the picture is too large.
    """
    if len(viewport) != 2 or not all(isinstance(side, int) and side >= 1 for side in viewport):
        raise ValueError(f"viewport: {viewport!r} must be [width, height] in pixels")
    width, height = viewport
    if not scale > 0 or width * height * scale**2 > MAX_PIXELS:
        raise ValueError(
            f"scale: {scale} must be > 0, and a viewport of {width} x {height} with it have at "
            f"most {MAX_PIXELS:,} pixels"
        )
    return width, height


def _miniwob_folder() -> Path:
    """Return the folder with the pages of MiniWoB++.

    Raises:
        ImportError: it is not installed.
    """
    spec = importlib.util.find_spec("miniwob")
    if spec is None or spec.origin is None:
        raise ImportError(f"MiniWoB++ is not installed; {pip_install('rlinf_vl[browser]')}")
    return Path(spec.origin).parent / "html"
