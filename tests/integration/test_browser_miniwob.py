"""Ten tasks of MiniWoB++, solved by an agent that reads the page's elements and acts with tools."""

import re
from collections.abc import Callable, Iterator

import pytest
from browser_pages import asked, browser_on, call, middle, needs_browser, problem, texts

from rlinf_vl.extras.browser.env import Browser
from rlinf_vl.extras.browser.host import HOST

pytest.importorskip("miniwob", reason="MiniWoB++ is not installed")
pytestmark = [
    pytest.mark.integration,
    needs_browser,
]


@pytest.fixture(scope="module", autouse=True)
def no_browser_left() -> Iterator[None]:
    yield
    HOST.close()


def click(env: Browser, selector: str, number: int = 0) -> str:
    return call("click", **middle(env, selector, number))


def with_text(env: Browser, selector: str, text: str) -> int:
    """The number of the element with a text, among those of a selector."""
    return asked(
        env, f"[...document.querySelectorAll('{selector}')].map(e => e.textContent.trim())"
    ).index(text)


def quoted(text: str) -> str:
    return re.findall('"([^"]*)"', text)[0]


def typed(env: Browser, selector: str, text: str) -> str:
    return click(env, selector) + call("type", text=text)


def scroll(env: Browser, text: str) -> str:
    down = 5000 if "bottom" in text else -5000
    return call("scroll", **middle(env, "#text-area"), down=down) + click(env, "#subbtn")


def drag_circle(env: Browser, text: str) -> str:
    begin = middle(env, "circle")
    across, along = {"left": (-15, 0), "right": (15, 0), "up": (0, -15), "down": (0, 15)}[
        text.split()[3]
    ]
    end = {"to_x": begin["x"] + across, "to_y": begin["y"] + along}
    return call("drag", **begin, **end) + click(env, "#subbtn")


def drag_box(env: Browser, _: str) -> str:
    end = middle(env, "#draggableLarge")
    drag = call("drag", **middle(env, "#draggableSmall"), to_x=end["x"], to_y=end["y"])
    return drag + click(env, "#subbtn")


def enter_password(env: Browser, text: str) -> str:
    fields = (typed(env, name, quoted(text)) for name in ("#password", "#verify"))
    return "".join(fields) + click(env, "#subbtn")


def login(env: Browser, text: str) -> str:
    user, password = re.findall('"([^"]*)"', text)
    fields = typed(env, "#username", user) + call("key", name="Tab") + call("type", text=password)
    return fields + call("key", name="Tab") + call("key", name="Enter")


def option(env: Browser, text: str) -> str:
    name = text.removeprefix("Select ").removesuffix(" and click Submit.")
    return click(env, "#boxes input", with_text(env, "#boxes label", name)) + click(env, "#subbtn")


SOLUTIONS: dict[str, Callable[[Browser, str], str]] = {
    "click-test": lambda env, _: click(env, "#subbtn"),
    "click-button": lambda env, text: click(
        env, "#area button", with_text(env, "#area button", quoted(text))
    ),
    "click-dialog": lambda env, _: click(env, "button.ui-button"),
    "click-tab": lambda env, text: click(env, "#area ul a", int(text[-2]) - 1),
    "click-option": option,
    "focus-text-2": lambda env, text: click(
        env, "#area input", int(re.findall("[0-9]", text)[0]) - 1
    ),
    "enter-text": lambda env, text: typed(env, "#tt", quoted(text)) + click(env, "#subbtn"),
    "enter-password": enter_password,
    "login-user": login,
    "scroll-text-2": scroll,
    "drag-circle": drag_circle,
    "drag-box": drag_box,
}


@pytest.mark.parametrize("task", SOLUTIONS)
def test_a_scripted_agent_earns_the_whole_reward(task: str) -> None:
    for seed in (1, 2):
        env = browser_on(
            None, miniwob=task, viewport=None, group_seed=seed, reward_min=-1.0, settle_s=0.3
        )
        try:
            picture, utterance = env.start(problem(""))[-1]["content"]
            result = env.step(SOLUTIONS[task](env, utterance["text"]))
            assert result.done, (utterance, result.info, texts(result))
            assert result.reward == 1.0 and result.info["correct"] is True, utterance
        finally:
            env.close()


def test_a_wrong_click_earns_the_least_and_an_episode_has_no_clock() -> None:
    # Button texts repeat; every button with another text is wrong.
    env = browser_on(None, miniwob="click-tab", viewport=None, group_seed=1, reward_min=-1.0)
    try:
        *_, question = env.start(problem(""))
        text = question["content"][1]["text"]
        assert asked(env, "core.EPISODE_MAX_TIME") > 10**9
        first = env.step(call("key", name="Shift"))
        last = env.step(click(env, "#area ul a", int(text[-2]) % 3))
        assert last.done and first.reward + last.reward == -1.0 and not last.info["correct"]
    finally:
        env.close()


def test_a_page_that_is_kept_is_the_one_that_a_new_context_shows() -> None:
    questions = []
    for keep_page, seeds in ((True, (1, 2)), (False, (2,))):
        for seed in seeds:
            env = browser_on(
                None, miniwob="click-button", viewport=None, group_seed=seed, keep_page=keep_page
            )
            questions.append(env.start(problem(""))[-1])
            env.close()
    assert questions[1] == questions[2] != questions[0]
