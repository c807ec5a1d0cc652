"""Pages in a real browser: pictures, every tool, rewards, seeds, and pages that are kept."""

import datetime
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser_pages import asked, browser_on, call, middle, needs_browser, problem, texts
from PIL import Image

from rlinf_vl.extras.browser.host import HOST

pytestmark = [pytest.mark.integration, needs_browser]

#: A red square of 20 pixels at (10, 10), which pays, and a blue one at (50, 30), which does not.
SQUARES = """<!doctype html><body style="margin:0; background:#fff">
<div style="position:absolute; left:10px; top:10px; width:20px; height:20px; background:#f00"
  onclick="paid = 1"></div>
<div style="position:absolute; left:50px; top:30px; width:20px; height:20px; background:#00f"
  onclick="paid = 0"></div>
<script>
let paid = null;
function reward(answer) { return answer === "half" ? 0.5 : paid; }
function utterance() { return "Click the red square."; }
</script>"""
#: Notes what mouse and keyboard do.
NOTES = """<!doctype html><body style="margin:0; height:600px; width:900px">
<input id="field" style="position:absolute; left:5px; top:5px; width:60px">
<a id="link" href="second.html" style="position:absolute; left:5px; top:40px">on</a>
<script>
const seen = [];
for (const name of ["mousedown", "mouseup", "keydown"])
  addEventListener(name, (event) => seen.push([name, event.clientX ?? event.key, event.clientY]));
</script>"""
#: Draws a grey from Math.random, and a number of its episodes.
DRAWN = """<!doctype html><body style="margin:0"><script>
let episodes = 0;
function startEpisode(episode) {
  episodes += 1;
  const grey = Math.floor(Math.random() * 256);
  document.body.style.background = `rgb(${grey}, ${grey}, ${grey})`;
}
const utterance = () => `${episodes} ${episode.seed} ${episode.columns.level} ${episode.answer}`;
</script>"""


@pytest.fixture(scope="module", autouse=True)
def no_browser_left() -> Iterator[None]:
    yield
    HOST.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pages = {"squares": SQUARES, "notes": NOTES, "drawn": DRAWN, "second": "<title>two</title>"}
    for name, text in pages.items():
        (tmp_path / f"{name}.html").write_text(text)
    return tmp_path


@pytest.fixture
def opened(folder: Path):
    """Environments that have started, closed at the end."""
    envs = []

    def open_page(url: str, row=None, **keywords):
        env = browser_on(folder, url=url, **keywords)
        envs.append(env)
        return env, env.start(row or problem())

    yield open_page
    for env in envs:
        env.close()


def pixels(part: dict) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(part["image"])).convert("RGB"))


def test_the_first_turn_shows_the_page_and_says_what_is_asked(opened) -> None:
    env, (system, question) = opened("squares.html")
    for name in ("click", "type", "key", "scroll", "drag", "back"):
        assert f'"name": "{name}"' in system["content"][0]["text"]
    picture, *said = question["content"]
    assert [part["text"] for part in said] == ["Click the red square.", "Do it."]
    expected = np.full((60, 80, 3), 255, np.uint8)
    expected[10:30, 10:30] = (255, 0, 0)
    expected[30:50, 50:70] = (0, 0, 255)
    assert (pixels(picture) == expected).all()


@pytest.mark.parametrize(("x", "reward"), [(20, 1.0), (60, -1.0)])
def test_the_pages_reward_ends_the_episode(opened, x: int, reward: float) -> None:
    env, _ = opened("squares.html", reward_min=-1.0)
    first = env.step(call("click", x=75, y=5))
    assert not first.done and first.reward == -1.0
    assert (pixels(first.messages[0]["content"][-1])[20, 20] == (255, 0, 0)).all()
    last = env.step(call("click", x=x, y=20 if x == 20 else 40) + call("click", x=20, y=20))
    assert last.done and not last.messages and first.reward + last.reward == reward
    assert last.info["correct"] == (reward == 1.0)
    assert last.info["metrics"]["success"] == float(reward == 1.0)
    assert last.info["state"] == first.info["state"] != ""
    # what comes after the end is not done, so it can't change the reward
    assert "the episode is over" in last.info["tool_calls"][1]["error"]
    with pytest.raises(RuntimeError, match="after the end"):
        env.step(call("click", x=20, y=20))


def test_an_answer_is_for_the_page_or_for_the_reward_functions(opened) -> None:
    env, _ = opened("squares.html", reward_min=-1.0)
    result = env.step("half")
    assert result.done and result.reward == 0.0 and result.info["correct"] is False
    env, _ = opened("squares.html", reward_min=-1.0)
    assert env.step("I give up").reward == -1.0
    env, _ = opened("notes.html", problem(answer="7"))
    result = env.step("It is 7.")
    assert result.done and result.info["answer"] == "It is 7."


def test_mouse_and_keyboard_reach_the_page(opened) -> None:
    env, _ = opened("notes.html")
    env.step(call("click", x=20, y=15) + call("type", text="añ 1") + call("key", name="Backspace"))
    assert asked(env, "document.querySelector('input').value") == "añ "
    assert asked(env, "seen.slice(0, 2)") == [["mousedown", 20, 15], ["mouseup", 20, 15]]
    assert asked(env, "seen.at(-1)")[:2] == ["keydown", "Backspace"]
    asked(env, "seen.length = 0")
    env.step(call("drag", x=30, y=30, to_x=70, to_y=50))
    assert asked(env, "seen") == [["mousedown", 30, 30], ["mouseup", 70, 50]]
    env.step(call("scroll", x=40, y=30, down=120, right=40))
    assert asked(env, "[scrollX, scrollY]") == [40, 120]
    env.step(call("scroll", x=40, y=30, down=-50))
    assert asked(env, "scrollY") == 70


def test_back_leads_to_the_page_before_and_no_further(opened) -> None:
    env, _ = opened("notes.html")
    assert "there is no page before" in texts(env.step(call("back")))
    env.step(call("click", **middle(env, "#link")))
    assert asked(env, "document.title") == "two"
    env.step(call("back"))
    assert asked(env, "location.pathname") == "/notes.html"


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (call("click", x=81, y=3), "outside the picture, which ends at x=80, y=60"),
        (call("click", x=-1, y=3), "outside the picture"),
        (call("click", x=float("inf"), y=3), "not valid JSON"),
        (call("click", x="3", y=3), "is not of type 'number'"),
        (call("scroll", x=1, y=1, down=5).replace("5", "1e999"), "1e999 is too large a number"),
        (call("scroll", x=1, y=1, down=1e300), "farther than any page goes"),
        (call("key", name="Nonsense"), "Unknown key"),
        (call("type", text="x" * 2001), "2001 characters are more than 2000"),
        (call("drag", x=1, y=1, to_x=1, to_y=100), "outside the picture"),
    ],
)
def test_calls_that_cannot_be_done_are_answered(opened, made: str, reason: str) -> None:
    env, _ = opened("notes.html")
    result = env.step(made)
    assert reason in texts(result) and not result.done
    assert result.messages[0]["content"][-1]["type"] == "image"


def test_places_are_in_the_pictures_units(opened) -> None:
    for keywords, place in (
        ({"scale": 2.0}, (40, 40)),
        ({"scale": 0.5}, (10, 10)),
        ({"coordinates": "thousandths"}, (250, 333)),
    ):
        env, (_, question) = opened("squares.html", **keywords)
        assert pixels(question["content"][0]).shape[:2] == tuple(
            round(side * keywords.get("scale", 1)) for side in (60, 80)
        )
        assert env.step(call("click", x=place[0], y=place[1])).reward == 1.0


def test_equal_seeds_draw_equal_pages_and_rows_reach_them(opened) -> None:
    row = problem("", "7", level=2, due=datetime.date(2026, 1, 2))
    (env, first), (_, again), (_, different) = (
        opened("drawn.html", row, group_seed=seed) for seed in (5, 5, 2**40 + 6)
    )
    assert first == again
    assert first[-1]["content"][1]["text"] == "1 5 2 7"
    assert different[-1]["content"][1]["text"] == "1 6 2 7"
    assert asked(env, "episode.columns.due") == "2026-01-02"
    assert (pixels(first[-1]["content"][0]) != pixels(different[-1]["content"][0])).any()


def test_a_page_that_is_kept_draws_the_next_episode_as_a_new_one_does(opened) -> None:
    row = problem("", "7", level=2)
    _, fresh = opened("drawn.html", row, group_seed=8)
    shown = []
    for seed in (4, 8):
        env, messages = opened("drawn.html", row, group_seed=seed, keep_page=True)
        shown.append(messages[-1]["content"])
        env.close()
    assert [content[1]["text"] for content in shown] == ["1 4 2 7", "2 8 2 7"]
    assert shown[1][0] == fresh[-1]["content"][0]


def test_each_episode_has_a_context_of_its_own(opened) -> None:
    env, _ = opened("notes.html")
    asked(env, "localStorage.setItem('x', 1), document.cookie = 'x=1'")
    assert asked(env, "[localStorage.x, document.cookie]") == ["1", "x=1"]
    other, _ = opened("notes.html")
    assert asked(other, "[localStorage.x ?? null, document.cookie]") == [None, ""]


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"url": "none.html"}, "there is no file 'none.html'"),
        ({"viewport": [80]}, r"must be \[width, height\] in pixels"),
        ({"viewport": [4000, 4000]}, "have at most"),
        ({"scale": 0.0}, "must be > 0"),
        ({"coordinates": "inches"}, "'inches' is none of pixels, thousandths"),
        ({"timeout_s": 0.0}, "timeout_s=0.0 more than it"),
        ({"miniwob": "click-test"}, "give either miniwob, or url and folder"),
    ],
)
def test_keywords_that_cannot_be_meant_are_refused(folder: Path, keywords, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        browser_on(folder, **{"url": "squares.html"} | keywords)
