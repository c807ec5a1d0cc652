"""The embedded task of buttons in a real browser, beside what its warm start draws without one."""

import asyncio
import io
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
from browser_pages import TIMEOUT_S, needs_browser
from PIL import Image

from rlinf_vl.config.load import parse_config
from rlinf_vl.extras.browser.host import HOST
from rlinf_vl.extras.toy import buttons
from rlinf_vl.extras.toy.buttons import Buttons, Page
from rlinf_vl.rollout.episode.env_makers import env_maker_of
from rlinf_vl.rollout.episode.env_processes import ProcessEnvMaker
from rlinf_vl.types import Problem

pytestmark = [pytest.mark.integration, needs_browser]


@pytest.fixture(scope="module", autouse=True)
def browser() -> Iterator[None]:
    """End the browser after the tests."""
    yield
    HOST.close()


def new_env(**keywords) -> Buttons:
    return Buttons(
        **{"grade": lambda response, answer: False, "reward_max": 1.0, "reward_min": -1.0}
        | {"group_seed": 3, "timeout_s": TIMEOUT_S}
        | keywords
    )


def problem_of(row: dict[str, str]) -> Problem:
    content = [{"type": "text", "text": row["problem"]}]
    columns = {"pages": row["pages"]}
    return Problem("b", ({"role": "user", "content": content},), row["answer"], columns=columns)


def pixels(part) -> np.ndarray:
    image = part["image"]
    if isinstance(image, bytes):
        image = Image.open(io.BytesIO(image)).convert("RGB")
    return np.asarray(image)


def plain(messages) -> list:
    """Return messages without roles, with pixels as lists."""
    return [
        [pixels(part).tolist() if part["type"] == "image" else part["text"] for part in content]
        for content in (message["content"] for message in messages)
    ]


def test_the_browser_shows_what_the_warm_start_has_seen(monkeypatch) -> None:
    """Every message of a demonstration, pixel for pixel, and the same end."""
    rows = []
    draw_row = buttons.draw_row
    monkeypatch.setattr(
        buttons, "draw_row", lambda split, rng: rows.append(draw_row(split, rng)) or rows[-1]
    )
    rng, rights = np.random.default_rng(0), set()
    for _ in range(12):
        (messages,) = buttons.demonstrate(rng)
        row = rows[-1]
        env = new_env()
        shown, results = env.start(problem_of(row)), []
        for answer in messages[1::2]:
            results.append(env.step(answer["content"]))
            shown += results[-1].messages
        assert plain(shown) == plain(messages[::2])
        assert [result.done for result in results] == [False] * (len(results) - 1) + [True]
        last_page = Page.of_text(row["pages"].split("/")[len(results) - 1])
        asked = row["answer"].split(" ")[len(results) - 1]
        rights_of_episode = len(results) - 1
        rights_of_episode += messages[-1]["content"] == last_page.answer(asked)
        rights.add(rights_of_episode)
        # From -1 to 1, half for each right click.
        assert sum(result.reward for result in results) == rights_of_episode - 1
        assert results[-1].info["correct"] is (rights_of_episode == 2)
        env.close()
    assert rights == {0, 1, 2}


def test_a_click_beside_the_buttons_asks_again() -> None:
    row = {"problem": "Click red", "pages": "red00 green13 blue32/" * 2, "answer": "red blue"}
    env = new_env()
    start = env.start(problem_of(row | {"pages": row["pages"].rstrip("/")}))
    miss = '<tool_call>{"name":"click","arguments":{"x":40,"y":40}}</tool_call>'
    result = env.step(miss)
    # Paid at once, so that an episode that is cut short is worth a wrong answer.
    assert not result.done and result.reward == -1
    assert plain(result.messages) == [plain(start)[0][::-1]]
    env.close()


def test_grey_pictures_are_the_control_and_bad_pages_are_named() -> None:
    row = buttons.make_rows("val")[0]
    env = new_env(blank=True)
    (message,) = env.start(problem_of(row))
    assert (pixels(message["content"][0]) == 128).all()
    env.close()
    with pytest.raises(ValueError, match="pages: 'red00' must name red, green, blue"):
        new_env().start(problem_of(row | {"pages": "red00"}))


def test_a_browser_of_env_processes_shows_the_same_and_ends_with_its_process() -> None:
    overrides = (
        "rollout.env_processes=1",
        f"rollout.env_kwargs={{timeout_s: {TIMEOUT_S}}}",
        "rollout.turn_timeout=240",
    )
    config = parse_config("toy-browser-cpu", overrides)
    maker = ProcessEnvMaker(config, env_maker_of(config), 240.0)
    row = buttons.draw_row("val", np.random.default_rng(0))
    problem = problem_of(row)
    answer = Page.of_text(row["pages"].split("/")[0]).answer(row["answer"].split(" ")[0])

    async def play(env) -> tuple[list, set[psutil.Process]]:
        messages = [*await env.start(problem), *(await env.step(answer)).messages]
        processes = set(psutil.Process().children(recursive=True)) - of_other_tests
        maker.close()  # as a worker does, while the episode goes on
        return messages, processes

    of_other_tests = set(psutil.Process().children(recursive=True))
    messages, processes = asyncio.run(play(maker(problem, 1, 3)))
    assert len(processes) > 2, "a process of environments, Playwright's driver, Chromium"
    _, still_running = psutil.wait_procs(list(processes), timeout=120)
    assert not still_running
    env = new_env()
    assert plain(messages) == plain([*env.start(problem), *env.step(answer).messages])
    env.close()
