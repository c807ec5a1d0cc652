"""The report in a real browser: headless Chromium, driven by Playwright."""

import io
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageDraw
from unit.observe.branches import make_branches
from unit.observe.conversations import make_conversations
from unit.report.test_report import HOSTILE, make_run
from whole_run import LOCAL, Run

from rlinf_vl.data.clips import clip_ref
from rlinf_vl.observe.alarms import ALARMS
from rlinf_vl.observe.clip_files import animated
from rlinf_vl.tools.report.build import build_report
from rlinf_vl.tools.report.look_files import WITH_BLANKS, WITH_IMAGES, write_look

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
NONE_FOUND = f"no browser: neither does CHROMIUM name one nor is {', '.join(NAMES)} in PATH"
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(CHROMIUM is None, reason=NONE_FOUND)]


class Browser:
    """One page. `problems` has every exception, console message, dialog and foreign request since it was opened."""

    def __init__(self, browser: sync_api.Browser) -> None:
        self._browser = browser
        self.page = browser.new_page()
        self.problems: list[str] = []

    def _note_request(self, request: sync_api.Request) -> None:
        if not re.match("(file|blob|data|about):", request.url):
            self.problems.append(f"requested {request.url}")

    def open(
        self,
        page: Path,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        view: str = "single",
    ) -> float:
        """Show a page; returns the seconds until everything of it works. `view`: single trajectories or groups."""
        self.page.close()
        self.page = self._browser.new_page(
            viewport={"width": width, "height": height},
            is_mobile=width < 500,
            color_scheme="dark" if dark else "light",
        )
        self.page.set_default_timeout(20_000)
        self.problems = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("dialog", lambda dialog: self.problems.append(dialog.message))
        self.page.on("request", self._note_request)
        self.page.goto(page.resolve().as_uri())
        self.wait("document.documentElement?.dataset.ready")
        seconds = self.run("Number(document.documentElement.dataset.ready)") / 1000
        if view == "single" and self.run(
            "!document.querySelector('#filters [name=view]').closest('[hidden]')"
        ):
            self.choose("view", view)
        return seconds

    def run(self, script: str):
        """The value of an expression, awaited."""
        return self.page.evaluate(script)

    def wait(self, script: str, timeout: float = 20) -> None:
        """Wait until an expression is true. Playwright's own wait calls `eval` in the page, which its policy refuses."""
        end = time.monotonic() + timeout
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}"
            self.page.wait_for_timeout(50)

    def click(self, selector: str) -> None:
        self.page.locator(selector).first.click()

    def choose(self, name: str, value: str) -> None:
        """Set a filter as a user would, and wait for the gallery."""
        field = self.page.locator(f'#filters [name="{name}"]')
        field.select_option(value) if field.evaluate(
            "field => field.tagName"
        ) == "SELECT" else field.fill(value)
        # In the page's own time, behind its timer and what it draws then: a busy machine is slow, not wrong.
        after = "() => new Promise((done) => setTimeout(() => requestAnimationFrame(() => setTimeout(done)), 250))"
        self.page.evaluate(after)

    def point_at(self, selector: str) -> None:
        element = self.page.locator(selector).first
        element.evaluate(
            "element => element.scrollIntoView({ block: 'center', behavior: 'instant' })"
        )
        x, y = element.evaluate(
            "element => { const at = element.getClientRects()[0]; return [at.x + at.width / 2, at.y + at.height / 2]; }"
        )
        self.page.mouse.move(1, 1)
        self.page.mouse.move(x, y)

    def press(self, key: str) -> None:
        self.page.keyboard.press(key)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield Browser(chromium)
        chromium.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    return build_report([make_run(tmp_path_factory.mktemp("runs") / "toy")])


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    return build_report([make_run(runs / "one"), make_run(runs / "two", problems=14, seed=1)])


@pytest.fixture(scope="module")
def talk(tmp_path_factory) -> Path:
    """Of a run with conversations."""
    return build_report([make_conversations(tmp_path_factory.mktemp("runs") / "talk")])


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    folders = [
        make_run(runs / name, steps=3, seed=seed)
        for seed, name in enumerate(("one", "two", "three", "four"))
    ]
    return build_report(folders)


CARDS = "[...document.querySelectorAll('.trajectory')]"
FACT = "(name) => (card) => Number([...card.querySelectorAll('.facts div')].find((d) => d.firstChild.textContent === name)" \
    ".lastChild.firstChild.textContent.replace('−', '-'))"  # fmt: skip


def test_curves_and_gallery_are_shown_without_a_complaint(browser, page):
    browser.open(page)
    assert browser.run("document.querySelectorAll('.chart').length") >= 15
    browser.click("#more-curves > summary")
    browser.click("#constant-curves > summary")
    browser.wait("document.querySelectorAll('#constant-curves .chart canvas').length > 0")
    browser.wait("document.querySelectorAll('#more-curves .chart canvas').length > 0")
    assert browser.run(
        "[...document.querySelectorAll('#curves .chart')].every((chart) => chart.querySelector('canvas'))"
    )
    assert browser.run(f"{CARDS}.length") == 20
    browser.run(
        "Promise.all([...document.querySelectorAll('.images img')].map((image) => image.decode()))"
    )
    assert browser.run(
        "[...document.querySelectorAll('.images img')].every((i) => i.naturalWidth > 0 && i.alt)"
    )
    assert browser.run("document.querySelectorAll('.images img').length") >= 20
    assert browser.problems == []


QUESTION = r"What is the area of $\triangle ABC$ for \(a=\frac{7}{2}\)? It costs $5 and $6."


@pytest.fixture(scope="module")
def research(tmp_path_factory) -> Path:
    """Of a run that failed, with formulas, parts of the reward, labels, and a page of a document among its images."""
    run = make_run(tmp_path_factory.mktemp("runs") / "toy", steps=9, samples=6)
    page = Image.new("RGB", (1200, 1600), "white")
    for k in range(50):
        ImageDraw.Draw(page).text(
            (40, 30 * k), f"Line {k} of a page that is unreadable when it is small", fill="black"
        )
    page.save(run / "images/page.png")
    for file in run.glob("trajectories/*.parquet"):
        rows = pq.read_table(file).to_pylist()
        for row in rows:
            number = int(row["problem_id"].removeprefix("toy-"))
            row["problem_id"] = f"{('charts', 'shapes')[number % 2]}:{number}"
            row["labels"] = json.dumps(
                {"level": number % 3, "unique": row["response"] + str(number)}
            )
            row["reward_parts"] = json.dumps(
                {"math": row["reward"], "format": 1.0 - row["sample"] % 2}
            )
            row["prompt"] = row["prompt"].replace("What is the area?", QUESTION)
            row["images"] = ["images/page.png"] if number == 3 else row["images"]
        pq.write_table(pa.Table.from_pylist(rows), file)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {
            "reward/math": 0.1 * line["step"],
            "reward/format": 0.5 + 0.01 * line["step"],
            "kept/same": 0.25,
        }
        line |= {"reward/ungradable": 0} if line["step"] else {"val/reward/math": 0.2}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (run / "status.json").write_text(
        json.dumps({"state": "failed", "reason": "CUDA out of memory", "step": 9})
    )
    alarm = {
        "time": 1.7e9,
        "step": 7,
        "kind": ALARMS[0].kind,
        "message": "entropy fell below a tenth; raise clip_ratio_high",
    }
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(alarm) + "\n")
    return build_report([run])


def test_a_group_is_one_card_with_its_answers_in_a_table(browser, research):
    browser.open(research, view="groups")
    browser.choose("split", "train")
    found = browser.run("document.getElementById('found').textContent")
    members, groups = int(found.split(" ")[0]), int(re.search(r"in (\d+) groups", found)[1])
    assert members == 6 * groups == 216
    group = "document.querySelector('.group')"
    assert browser.run(f"{group}.querySelectorAll('tbody tr:not(.detail)').length") == 6
    heads = browser.run(f"[...{group}.querySelectorAll('thead th')].map((th) => th.textContent)")
    assert heads == ["#", "Answer", "Reward", "math", "format", "Advantage", "Tokens", "End"]
    assert browser.run(f"{group}.querySelectorAll('.images img').length") == 1
    column = f"(k) => [...{group}.querySelectorAll('tbody tr:not(.detail)')].map((tr) => Number(tr.cells[k].textContent))"
    assert browser.run(f"({column})(4)") == [1, 0] * 3 and browser.run(
        f"({column})(2)"
    ) == browser.run(f"({column})(3)")
    right = browser.run(f"{group}.querySelectorAll('.badge.correct').length")
    assert f"{right} of 6 correct" in browser.run(f"{group}.querySelector('header').textContent")
    browser.click(".group tbody button")
    assert browser.run(f"{group}.querySelector('.detail .tokens span').textContent.length") > 0
    browser.choose("split", "val")
    # One answer each: as before.
    assert browser.run("document.querySelectorAll('.group').length") == 0
    assert browser.problems == []


def test_formulas_are_mathml_and_prices_are_text(browser, research):
    browser.open(research, view="groups")
    question = "document.querySelector('.group .rendered')"
    assert browser.run(f"[...{question}.querySelectorAll('math')].map((m) => m.getAttribute('aria-label'))") == [
        r"\triangle ABC", r"a=\frac{7}{2}",
    ]  # fmt: skip
    assert browser.run(f"{question}.querySelectorAll('mfrac').length") == 1
    assert "It costs $5 and $6." in browser.run(f"{question}.textContent")
    assert browser.run("document.querySelectorAll('.answers math .boxed').length") > 10
    browser.choose("view", "single")
    browser.choose("color", "text")
    assert browser.run("document.querySelectorAll('.trajectory .rendered math').length") >= 20
    assert browser.run("document.querySelectorAll('.trajectory .tokens').length") == 0
    assert browser.problems == []


def test_an_image_is_read_at_full_size(browser, research):
    browser.open(research)
    browser.choose("problem", "shapes:3")
    shown, stage = (
        "document.querySelector('.images img.zoomable')",
        "document.querySelector('#zoom .stage img')",
    )
    assert browser.run(f"{shown}.getBoundingClientRect().width") < 700
    browser.click(".images img.zoomable")
    browser.wait("document.getElementById('zoom').open")
    assert browser.run(f"[{stage}.naturalWidth, {stage}.naturalHeight]") == [1200, 1600]
    width = f"{stage}.getBoundingClientRect().width"
    fitted = browser.run(width)
    browser.click("#zoom button[aria-label='One pixel each']")
    assert fitted < 1200 == round(browser.run(width))
    browser.press("+")
    browser.page.mouse.move(600, 400)
    browser.page.mouse.wheel(0, -200)
    browser.wait(f"{width} > 1900")
    at = browser.run(f"{stage}.getBoundingClientRect().x")
    browser.run("document.querySelector('#zoom .stage').focus()")
    browser.press("ArrowRight")
    assert browser.run(f"{stage}.getBoundingClientRect().x") == at - 60
    browser.press("Escape")
    browser.wait("!document.getElementById('zoom').open")
    browser.run(f"{shown}.focus()")
    browser.press("Enter")
    browser.wait("document.getElementById('zoom').open")
    assert browser.problems == []


def test_distributions_are_of_what_is_found(browser, research):
    browser.open(research)
    browser.choose("split", "train")
    titles = browser.run(
        "[...document.querySelectorAll('#distributions h3')].map((title) => title.textContent)"
    )
    assert titles == ["Reward", "Response length", "Accuracy by source", "Accuracy by level"]
    label = browser.run("document.querySelector('#distributions svg').getAttribute('aria-label')")
    wrong, right = map(int, re.fullmatch(r"Reward: 0: (\d+), 1: (\d+)", label).groups())
    rows = [
        r
        for f in research.parent.glob("trajectories/*.parquet")
        for r in pq.read_table(f).to_pylist()
    ]
    rows = [row for row in rows if row["split"] == "train"]
    assert (wrong, right) == (
        sum(r["reward"] == 0 for r in rows),
        sum(r["reward"] == 1 for r in rows),
    )
    told = browser.run(
        "[...document.querySelectorAll('#distributions .kinds')].map((table) => table.innerText)"
    )
    graded = [row for row in rows if row["correct"] is not None and row["error"] is None]
    for kind in ("charts", "shapes"):
        of_kind = [row["correct"] for row in graded if row["problem_id"].startswith(kind)]
        share, n = round(100 * sum(of_kind) / len(of_kind)), len(of_kind)
        assert re.search(rf"{kind}\s+{share} % ± \d+ of {n}\b", told[0]), told[0]
    browser.choose("problem", "charts")
    browser.wait("!document.getElementById('distributions').innerText.includes('shapes')")


def test_parts_smoothing_and_what_stays_constant(browser, research):
    browser.open(research)
    titles = browser.run(
        "[...document.querySelectorAll('#curves > .charts h3')].map((title) => title.textContent)"
    )
    assert "Parts of the reward" in titles and "Clipped importance weights" not in titles
    parts = "[...document.querySelectorAll('#curves > .charts .chart')].find((c) => c.innerText.startsWith('Parts of the reward'))"
    assert browser.run(f"{parts}.querySelector('.legend').innerText").split() == [
        "format",
        "0.59",
        "math",
        "0.9",
    ]
    fold = browser.run("document.getElementById('constant-curves').innerText")
    assert re.match(r"\d+ that stay constant", fold)
    browser.click("#constant-curves > summary")
    browser.wait("document.querySelectorAll('#constant-curves canvas').length > 0")
    assert "Clipped importance weights: 0" in browser.run(
        "document.querySelector('#constant-curves .about').textContent"
    )
    pixels = "[...document.querySelectorAll('#curves canvas')].map((canvas) => canvas.toDataURL())"
    before = browser.run(pixels)
    browser.run("""(() => { const slider = document.getElementById('smoothing'); slider.value = 0.8;
        slider.dispatchEvent(new Event('input')); })()""")
    browser.wait(
        f"JSON.stringify({pixels}) !== {json.dumps(json.dumps(before, separators=(',', ':')))}"
    )
    assert browser.run("document.querySelector('.smoothing output').textContent") == "0.80"
    assert browser.problems == []


def test_a_reward_that_stays_zero_keeps_its_chart(browser, tmp_path):
    run_dir = tmp_path / "flat"
    run_dir.mkdir()
    rows = [
        {"step": n, "reward/mean": 0.0, "reward/std": 0.0, "rollout/truncated": 1.0}
        for n in range(1, 5)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    browser.open(build_report([run_dir]))
    titles = browser.run(
        "[...document.querySelectorAll('#curves > .charts h3')].map((title) => title.textContent)"
    )
    assert titles == ["Reward"]
    assert "Truncated responses: 1" in browser.run(
        "document.getElementById('constant-curves').textContent"
    )


def test_how_the_run_ended_stands_on_top(browser, research):
    browser.open(research)
    first = browser.run("document.querySelector('#summary .run').firstElementChild.innerText")
    assert first == "Failed at step 9 of 9: CUDA out of memory"
    assert "entropy fell below a tenth" in browser.run(
        "document.querySelector('#summary .alarm').innerText"
    )


def test_filters(browser, page):
    browser.open(page)
    browser.choose("split", "val")
    assert browser.run("document.getElementById('found').textContent").startswith("36 of 132 ")
    browser.choose("outcome", "correct")
    assert browser.run(
        f"{CARDS}.every((card) => card.querySelector('.badge').textContent === 'correct')"
    )
    browser.choose("from", "3")
    browser.choose("to", "3")
    assert browser.run(
        f"{CARDS}.length > 0 && {CARDS}.every((c) => c.querySelector('h3').textContent === 'Validation, step 3')"
    )
    browser.click("#filters [type=reset]")
    browser.wait(
        "document.getElementById('found').textContent.startsWith('132 of 132 trajectories')"
    )
    browser.choose("problem", "toy-3")
    assert browser.run(
        f"{CARDS}.length > 0 && {CARDS}.every((c) => c.querySelector('.link').textContent === 'problem toy-3')"
    )
    browser.choose("text", "nowhere to be found")
    assert browser.run(f"{CARDS}.length") == 0
    browser.choose("text", "THE RECTANGLE")
    assert browser.run(f"{CARDS}.length") > 0
    assert browser.problems == []


def test_sorting(browser, page):
    browser.open(page)
    values = {}
    for sort, fact in (
        ("best", "Reward"),
        ("worst", "Reward"),
        ("mismatch_mean", "|rollout − train|"),
    ):
        browser.choose("sort", sort)
        values[sort] = browser.run(f"{CARDS}.map(({FACT})('{fact}'))")
    assert values["best"][0] == 1 and values["worst"][0] == 0
    assert values["mismatch_mean"] == sorted(values["mismatch_mean"], reverse=True)
    browser.choose("sort", "truncated")
    assert browser.run("Boolean(document.querySelector('.trajectory .badge.truncated'))")
    browser.choose("sort", "disputed")
    labels = browser.run(
        f"{CARDS}.slice(0, 4).map((card) => card.querySelectorAll('.link')[1].textContent)"
    )
    assert labels == [f"sample {k} of 4" for k in (1, 2, 3, 4)]
    browser.choose("sort", "newest")
    assert browser.run(
        f"{CARDS}.every((card) => card.querySelector('h3').textContent.endsWith('step 6'))"
    )


def test_pages(browser, page):
    browser.open(page)
    first = browser.run("document.getElementById('gallery').innerText")
    browser.click("#pages button[value='1']")
    assert browser.run("document.querySelector('#pages span').textContent") == "page 2 of 7"
    assert browser.run("document.getElementById('gallery').innerText") != first
    assert browser.run("document.activeElement.id") == "found"


def test_tokens_are_colored_and_tell_their_numbers_to_mouse_and_keyboard(browser, page):
    browser.open(page)
    browser.choose("split", "train")
    grounds = "new Set([...document.querySelectorAll('.tokens span')].map((s) => getComputedStyle(s).backgroundColor)).size"
    assert browser.run(grounds) > 4
    browser.point_at(".trajectory .tokens span:nth-child(3)")
    browser.wait("!document.getElementById('tooltip').hidden")
    shown = browser.run("document.getElementById('tooltip').innerText")
    rollout, train = (_number_after(shown, name) for name in ("rollout logprob", "train logprob"))
    assert _number_after(shown, "rollout − train") == pytest.approx(rollout - train, abs=1e-3)
    assert "3 of 11" in shown and '" is"' in shown
    browser.run("document.querySelector('.trajectory .tokens span').focus()")
    for _ in range(4):
        browser.press("ArrowRight")
    assert browser.run("document.activeElement.dataset.n") == "4"
    assert "5 of 11" in browser.run("document.getElementById('tooltip').innerText")
    browser.run("scrollBy({ top: 30, behavior: 'instant' })")
    time.sleep(0.2)
    assert not browser.run("document.getElementById('tooltip').hidden"), (
        "scrolling to a focused token must not hide it"
    )
    browser.press("Escape")
    assert browser.run("document.getElementById('tooltip').hidden")
    browser.choose("color", "advantage")
    assert browser.run(f"""{CARDS}.every((card) => {{
        const shades = new Set([...card.querySelectorAll('.tokens span')].map((span) => span.dataset.shade?.[0]));
        const advantage = ({FACT})('Advantage')(card);
        return shades.size === 1 && shades.has(advantage > 0 ? 'p' : 'n');
    }})""")
    browser.choose("color", "")
    assert browser.run("document.querySelectorAll('.tokens [data-shade]').length") == 0
    assert browser.problems == []


def _number_after(text: str, name: str) -> float:
    return float(re.search(rf"{re.escape(name)}\s+([−\d.e]+)", text)[1].replace("−", "-"))


def test_a_curve_tells_its_values_to_mouse_and_keyboard(browser, page):
    browser.open(page)
    read = "['.legend', 'figcaption'].map((s) => document.querySelector(`.chart ${s}`).innerText).join(' ').replace(/\\s+/g, ' ')"
    assert browser.run(read).startswith("accuracy 0.85 constant answer 0.13")
    browser.point_at(".chart .u-over")
    browser.wait(f"{read}.includes('step 3')")
    assert "accuracy 0.55" in browser.run(read)
    browser.run("document.querySelector('.chart .plot').focus()")
    browser.press("ArrowLeft")
    assert "accuracy 0.25" in browser.run(read)
    assert browser.run("document.getElementById('announce').textContent").startswith(
        "step 0: accuracy 0.25"
    )


@pytest.mark.parametrize("name", ["page", "talk"])
def test_light_and_dark_have_contrast(browser, name, request):
    page = request.getfixturevalue(name)

    def worst_contrast() -> float:
        return browser.run("""(() => {
            const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
            const paint = (css) => {
                canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1);
                return canvas.getImageData(0, 0, 1, 1).data;
            };
            const ground = (e) => {
                for (; e; e = e.parentElement) { const c = paint(getComputedStyle(e).backgroundColor); if (c[3] === 255) return c; }
            };
            const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, w, i) => {
                const v = c[i] / 255; return sum + w * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); }, 0);
            const texts = [...document.querySelectorAll("main *, header *")].filter((e) => e.checkVisibility() &&
                [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && !e.disabled && !e.closest("noscript"));
            return Math.min(...texts.map((e) => {
                const [a, b] = [light(paint(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
                return (a + 0.05) / (b + 0.05); }));
        })()""")

    browser.open(page, dark=True)
    dark_ground = "getComputedStyle(document.body).backgroundColor"
    dark = browser.run(dark_ground)
    assert max(map(int, re.findall(r"\d+", dark)[:3])) < 60
    assert worst_contrast() >= 4.5
    browser.click("#theme")
    assert browser.run(dark_ground) != dark and worst_contrast() >= 4.5
    browser.open(page)
    assert browser.run(dark_ground) != dark
    assert browser.problems == []


@pytest.mark.parametrize("name", ["page", "two", "talk"])
def test_a_phone_needs_no_scrolling_sideways(browser, name, request):
    browser.open(request.getfixturevalue(name), width=360, height=740)
    browser.run("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert browser.run("document.documentElement.scrollWidth") <= 360
    inside = "[...document.querySelectorAll('.card, .chart canvas, .tokens')].every((e) => e.getBoundingClientRect().right <= 360)"
    assert browser.run(inside)


@pytest.mark.parametrize("name", ["page", "talk"])
def test_everything_has_a_name_and_a_place(browser, name, request):
    browser.open(request.getfixturevalue(name))
    nodes = browser.page.context.new_cdp_session(browser.page).send("Accessibility.getFullAXTree")[
        "nodes"
    ]
    named = [
        (n["role"]["value"], n.get("name", {}).get("value", ""))
        for n in nodes
        if not n.get("ignored") and "role" in n
    ]
    roles = {role for role, _ in named}
    assert {"main", "banner", "navigation", "search", "heading", "listbox"} <= roles
    for role, name in named:
        if role in (
            "button",
            "link",
            "combobox",
            "textbox",
            "searchbox",
            "spinbutton",
            "listbox",
            "image",
            "region",
        ):
            assert name.strip(), f"a {role} without a name"
    browser.press("Tab")
    assert browser.run("document.activeElement.className") == "skip"


def test_two_runs_are_overlaid_and_aligned_by_problem(browser, two):
    browser.open(two)
    legend = browser.run("document.querySelector('.chart .legend').innerText")
    assert "one: accuracy" in legend and "two: accuracy" in legend
    sides = browser.run("""[...document.querySelectorAll('.aligned')].map((row) =>
        [...row.querySelectorAll('.side')].map((side) => side.querySelector('.link')?.textContent ?? null))""")
    assert len(sides) == 10 and all(a == b and a is not None for a, b in sides)
    before = browser.run("document.querySelector('.side .trajectory').getAttribute('aria-label')")
    browser.click(".side-head button[aria-label^=Next]")
    assert (
        browser.run("document.querySelector('.side .trajectory').getAttribute('aria-label')")
        != before
    )
    browser.choose("problem", "toy-13")
    assert browser.run("document.querySelectorAll('.side')[0].innerText").endswith(
        "None of this problem."
    )
    assert browser.problems == []


def test_sequences_and_turns_are_marked_and_columns_are_shown(browser, tmp_path):
    run = make_run(tmp_path / "toy", steps=1)
    file = run / "trajectories/step_1.parquet"
    rows = pq.read_table(file).to_pylist()
    turns = [
        {"start": 0, "end": 2, "finish_reason": "stop", "reward": 0.5},
        {"start": 4, "end": 6, "reward": 0.25},
    ]
    for row in rows:
        row["turns"] = json.dumps({"sequences": [0, 4], "turns": turns})
        row["surprise"] = [0.125 * k for k in range(len(row["tokens"]))]
    pq.write_table(pa.Table.from_pylist(rows), file)
    browser.open(build_report([run]))
    browser.choose("split", "train")
    marks = "[...document.querySelector('.tokens').querySelectorAll('.boundary')].map((mark) => mark.textContent)"
    assert browser.run(marks) == [
        "sequence 1, turn 1, reward 0.5",
        "sequence 2, turn 2, reward 0.25",
    ]
    assert "Turns\n2" in browser.run("document.querySelector('.trajectory .facts').innerText")
    browser.run("document.querySelector('.tokens span').focus()")
    for _ in range(4):
        browser.press("ArrowRight")
    assert browser.run("document.activeElement.dataset.n") == "4"
    assert (
        _number_after(browser.run("document.getElementById('tooltip').innerText"), "surprise")
        == 0.5
    )
    browser.choose("split", "val")
    assert browser.run("document.querySelectorAll('.boundary').length") == 0
    assert browser.problems == []


def test_a_conversation_shows_its_pictures_where_they_stood(browser, talk):
    browser.open(talk)
    browser.choose("problem", "maze-0")
    card = "document.querySelector('.trajectory')"
    first = f"{card}.querySelector('.turn .message')"
    assert browser.run(f"{first}.querySelector('h4').textContent") == "user"
    parts = "[...document.querySelector('.turn .content').childNodes].map((n) => n.tagName === 'IMG' ? 'image' : n.innerText)"
    assert browser.run(parts) == [
        "Which way to the green cell? ", "image", "\nAnswer with \\boxed{up}, down, left or right.",
    ]  # fmt: skip
    turns = browser.run(f"{card}.querySelectorAll('.turn').length")
    assert turns == browser.run(f"({FACT})('Turns')({card})") >= 2
    assert browser.run(f"{card}.querySelectorAll('.filmstrip li img').length") == turns
    assert browser.run(
        f"[...{card}.querySelectorAll('.done')].every((d, k) => d.textContent.startsWith(k + 1))"
    )
    paid = browser.run(
        f"[...{card}.querySelectorAll('.turn')].map((t) => t.querySelector('.paid')?.textContent ?? '')"
    )
    assert paid == [""] * (turns - 1) + ["+1"]
    sources = f"(query) => [...{card}.querySelectorAll(query)].map((image) => image.src)"
    assert browser.run(f"({sources})('.filmstrip img')") == browser.run(
        f"({sources})('.content img')"
    )
    browser.run(f"{card}.querySelectorAll('.filmstrip button')[1].focus()")
    browser.press("Enter")
    assert browser.run("document.activeElement.getAttribute('aria-label')") == "Turn 2"
    assert browser.problems == []


def test_tokens_of_a_turn_have_its_advantage(browser, talk):
    browser.open(talk)
    browser.choose("split", "train")
    browser.choose("color", "advantage")
    turn = "document.querySelectorAll('.trajectory .turn')[1]"
    advantage = browser.run(f"{turn}.querySelector('.answer h4').textContent")
    browser.run(f"{turn}.querySelector('.tokens span').focus()")
    browser.press("ArrowRight")
    shown = browser.run("document.getElementById('tooltip').innerText")
    assert _number_after(shown, "advantage") == _number_after(advantage, "advantage")
    assert browser.run(f"document.activeElement === {turn}.querySelectorAll('.tokens span')[1]")
    browser.press("End")
    assert browser.run(
        f"document.activeElement === {turn}.querySelector('.tokens span:last-child')"
    )
    sign = "p" if _number_after(advantage, "advantage") > 0 else "n"
    assert browser.run(
        f"[...{turn}.querySelectorAll('.tokens span')].every((s) => s.dataset.shade[0] === '{sign}')"
    )


def test_tool_calls_are_cards_and_the_raw_text_is_a_fold_away(browser, talk):
    browser.open(talk)
    browser.choose("problem", "drawing-1")
    tools = browser.run(
        "[...document.querySelector('.trajectory').querySelectorAll('.tool')].map((t) => t.innerText)"
    )
    assert len(tools) == 3 and "zoom" in tools[0] and "[0,0,160,100]" in tools[0]
    assert "no JSON object" in tools[1] and "no JSON object" not in tools[2]
    assert (
        browser.run("document.querySelector('.trajectory').querySelectorAll('.tool.failed').length")
        == 1
    )
    browser.click(".trajectory details > summary")
    browser.wait("document.querySelector('.trajectory details .tokens') !== null")
    assert browser.run("document.querySelectorAll('.trajectory details .boundary').length") == 4
    assert browser.problems == []


def test_success_by_turns_and_what_the_environment_measures(browser, talk):
    browser.open(talk)
    table = browser.run("document.querySelector('.by-turns table').innerText")
    stored = pq.read_table(talk.parent / "trajectories/step_6.parquet").to_pylist()
    last = [row for row in stored if row["split"] == "val"]
    share = round(100 * sum(row["correct"] for row in last) / len(last))
    assert (
        "validation at 0" in table
        and "validation at 6" in table
        and f"{share} % of {len(last)}" in table
    )
    titles = browser.run(
        "[...document.querySelectorAll('.chart h3')].map((title) => title.textContent)"
    )
    assert "Turns" in titles and "Environment: distance_left" in titles


def test_a_history_that_was_rewritten_is_folded(browser, tmp_path):
    run = make_conversations(tmp_path / "talk", steps=0, groups=1)
    file = run / "trajectories/step_0.parquet"
    rows = pq.read_table(file).to_pylist()
    for row in rows:
        layout, (said,) = json.loads(row["turns"]), json.loads(row["messages"])
        answers = [at for at, message in enumerate(said) if "turn" in message]
        cut = answers[0] + 1
        again = [*said[: answers[0]], {"role": "assistant", "content": ["without its thoughts"]}]
        row["messages"] = json.dumps([said[:cut], again + said[cut:]])
        row["turns"] = json.dumps(layout | {"sequences": [0, layout["turns"][0]["end"]]})
    pq.write_table(pa.Table.from_pylist(rows), file)
    browser.open(build_report([run]))
    card = "document.querySelector('.trajectory')"
    before = browser.run(f"{card}.querySelectorAll('.turn').length")
    assert before == browser.run(f"({FACT})('Turns')({card})")
    assert browser.run(f"{card}.querySelectorAll('.repeated').length") == 1
    assert (
        browser.run(
            f"{card}.querySelectorAll('.turn')[1].querySelectorAll('.said .message').length"
        )
        == 1
    )
    browser.click(".repeated > summary")
    browser.wait("document.querySelectorAll('.repeated .message').length === 2")
    assert "without its thoughts" in browser.run("document.querySelector('.repeated').innerText")
    assert browser.problems == []


def test_branches_are_a_tree(browser, tmp_path, toy_folder):
    page = build_report([make_branches(tmp_path / "branches", toy_folder)])
    browser.open(page)
    tree = "document.querySelector('.trajectory .branches')"
    assert browser.run(f"{tree}.querySelector('summary').innerText") == "4 branches"
    # The second one hangs below the first, whose second turn it goes on from; the others begin anew.
    tops = browser.run(f"{tree}.querySelectorAll(':scope > ul > li').length")
    assert (tops, browser.run(f"{tree}.querySelectorAll('li li').length")) == (3, 1)
    lines = browser.run(f"[...{tree}.querySelectorAll('p')].map((line) => line.innerText)")
    assert lines[0] == "Branch 1 begins anew"
    assert re.fullmatch(r"Branch 2 goes on from turn 2, \d+ tokens shared", lines[1])
    assert [line.startswith("Branch") and "begins anew" in line for line in lines[2:]] == [True] * 2
    chips = f"[...{tree}.querySelectorAll('.chips')].map((row) => row.querySelectorAll('button').length)"
    assert browser.run(chips) == [3, 1, 1, 1]
    browser.click(".branches li li button")
    focused = "document.activeElement.getAttribute('aria-label')"
    assert browser.run(focused) == "Turn 4"
    branch = browser.run("document.activeElement.querySelector('.branch').innerText")
    assert branch == lines[1]
    assert browser.run("document.querySelectorAll('.turn').length") == 6
    browser.open(page, width=390)
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.run(overflow) <= 0
    assert browser.problems == []


def test_a_huge_conversation_is_folded(browser, tmp_path):
    run = make_conversations(tmp_path / "talk", steps=0, groups=1)
    file = run / "trajectories/step_0.parquet"
    rows = pq.read_table(file).to_pylist()
    turn = {
        "finish_reason": "stop",
        "reward": 0.0,
        "tool_calls": [{"name": "x" * 9000, "arguments": {"y": "z" * 90_000}}],
    }
    turns = [turn | {"start": k, "end": k + 1} for k in range(400)]
    said = [
        {"role": "user", "content": ["w" * 50_000, 0] * 2},
        {"role": "assistant", "content": []},
    ]
    talk = [
        message | ({"turn": k} if message["role"] == "assistant" else {})
        for k in range(400)
        for message in said
    ]
    for row in rows:
        n = len(row["tokens"])
        row |= {
            "turns": json.dumps({"sequences": [0], "turns": turns[:n]}),
            "messages": json.dumps([talk[: 2 * n]]),
        }
    pq.write_table(pa.Table.from_pylist(rows), file)
    seconds = browser.open(build_report([run]))
    assert seconds < 5
    card = "document.querySelector('.trajectory')"
    shown = f"{card}.querySelectorAll('.turn').length"
    assert browser.run(shown) == 8
    assert browser.run(f"{card}.querySelector('.content').textContent.length") < 9000
    browser.click(".content button")
    assert browser.run(f"{card}.querySelector('.content').textContent.length") > 50_000
    browser.click(".turns > button")
    assert browser.run(shown) == browser.run(f"({FACT})('Turns')({card})")
    assert browser.problems == []


def test_hostile_texts_are_shown_and_do_nothing(browser, tmp_path):
    run = make_run(tmp_path / "toy", steps=1)
    rows = pq.read_table(run / "trajectories/step_1.parquet").to_pylist()
    for row in rows:
        row |= dict.fromkeys(
            ("prompt", "response", "answer", "error", "problem_id", "reward_parts", "group_id"),
            HOSTILE,
        )
        row["tokens"] = [HOSTILE, "\ud7ff\0", *row["tokens"][2:]]
    pq.write_table(pa.Table.from_pylist(rows), run / "trajectories/step_1.parquet")
    (run / "config.yaml").write_text(json.dumps({"runner": {"experiment_name": HOSTILE}}))
    (run / "baselines.json").write_text(json.dumps({HOSTILE: 0.5}))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, HOSTILE: 1, "val/accuracy": 0.5}))
    call = {"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}, "error": HOSTILE}
    odd = [[call, None, 7, {"name": None, "arguments": [HOSTILE]}], HOSTILE, {"a": 1}, None]
    talk = [
        [{"role": HOSTILE, "content": [HOSTILE, 99, -1, 0.5, None]}, 7, {"content": 3}, None],
        HOSTILE,
        None,
    ]
    for row in rows[2:]:
        turns = [
            {"start": k, "end": k + 2, "reward": HOSTILE, "state": HOSTILE, "tool_calls": odd[k]}
            for k in range(4)
        ]
        talk[0] += [{"role": "assistant", "content": [HOSTILE], "turn": k} for k in range(4)]
        row |= {
            "turns": json.dumps({"sequences": [0], "turns": turns}),
            "messages": json.dumps(talk),
            "metrics": json.dumps({HOSTILE: 1}),
        }
    for row in rows:
        (
            row.setdefault("turns", None),
            row.setdefault("messages", HOSTILE),
            row.setdefault("metrics", HOSTILE),
        )
    pq.write_table(pa.Table.from_pylist(rows), run / "trajectories/step_1.parquet")
    browser.open(build_report([run]))
    browser.choose("split", "train")
    assert HOSTILE in browser.run("document.querySelector('.tokens span').textContent")
    for place in ("h4", ".content", ".prefix", ".tool code", ".tool dt", ".tool .why"):
        assert browser.run(
            f"[...document.querySelectorAll('.turn {place}')].some((e) => e.textContent.includes('boxed{{4}}'))"
        )
    browser.point_at(".tokens span")
    browser.run("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    time.sleep(0.2)
    assert browser.run("document.querySelectorAll('script').length") == 3
    assert browser.run("document.querySelectorAll('img[src=x]').length") == 0
    assert browser.problems == []


def test_nothing_but_its_own_scripts_can_run_or_load(browser, page):
    browser.open(page)
    refused = browser.run("""(async () => {
        const refused = [];
        addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
        document.body.append(Object.assign(document.createElement("img"), { src: "https://127.0.0.1:9/x.png" }));
        document.body.append(Object.assign(document.createElement("script"), { textContent: "window.ran = 1" }));
        await fetch("https://127.0.0.1:9/").catch(() => 0);
        await new Promise((done) => setTimeout(done, 100));
        return [refused.sort(), window.ran ?? 0];
    })()""")
    assert refused == [["connect-src", "img-src", "script-src-elem"], 0]


def test_an_empty_run_is_said_to_be_empty(browser, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    browser.open(build_report([tmp_path]))
    assert "no trajectories" in browser.run("document.getElementById('found').textContent")
    assert "no metrics" in browser.run("document.querySelector('#curves .about').textContent")
    assert browser.problems == []


def test_ten_thousand_trajectories_open_in_two_seconds(browser, tmp_path):
    run = make_run(tmp_path / "toy", steps=100, groups=12, samples=8, problems=76, val_every=10)
    page = build_report([run])
    # The best of a few: other tests take turns on the same cores.
    opened = [browser.open(page) for _ in range(4)]
    assert (
        browser.run("document.getElementById('found').textContent")
        == "10,436 of 10,436 trajectories"
    )
    assert min(opened) < 2, f"{opened} s"
    sorted_in = [
        browser.run("""(async () => {
        const start = performance.now();
        document.querySelector('#filters [name=sort]').value = 'mismatch_max';
        document.querySelector('#filters [name=sort]').dispatchEvent(new Event('input', { bubbles: true }));
        await new Promise((done) => setTimeout(() => requestAnimationFrame(() => setTimeout(done))));
        return performance.now() - start;
    })()""")
        for _ in range(8)
    ]
    assert min(sorted_in) < 1000, f"{sorted_in} ms to sort"


def test_a_video_is_a_strip_of_its_frames_and_plays(browser, tmp_path):
    run = make_run(tmp_path / "run", steps=2, problems=2, groups=1, samples=2)
    pngs = []
    for shade in (10, 90, 90, 240):
        file = io.BytesIO()
        Image.new("RGB", (48, 32), (shade, 0, 0)).save(file, "PNG")
        pngs.append(file.getvalue())
    (run / "images/clip.png").write_bytes(animated(clip_ref(pngs, [0.0, 0.1, 0.2, 0.3])))
    for file in run.glob("trajectories/*.parquet"):
        rows = pq.read_table(file).to_pylist()
        for row in rows:
            row["images"] = [*row["images"], "images/clip.png"]
        pq.write_table(pa.Table.from_pylist(rows), file)
    build_report([run], tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    clip = "document.querySelector('.trajectory .clip')"
    assert browser.run(f"{CARDS}.length") > 0 and browser.run(f"{clip} !== null")
    assert browser.run("document.querySelectorAll('.trajectory .images > img').length") > 0
    times = f"[...{clip}.querySelectorAll('ol small')].map((time) => time.textContent)"
    assert browser.run(times) == ["0.00 s", "0.10 s", "0.20 s", "0.30 s"]
    # What each frame and the player show, by the colour of a pixel.
    red = """async (image) => {
        await image.decode();
        const canvas = Object.assign(document.createElement("canvas"), { width: 48, height: 32 });
        canvas.getContext("2d").drawImage(image, 0, 0);
        return canvas.getContext("2d").getImageData(3, 3, 1, 1).data[0];
    }"""
    strip = f"Promise.all([...{clip}.querySelectorAll('ol img')].map({red}))"
    assert browser.run(strip) == [10, 90, 90, 240]
    alts = f"[...{clip}.querySelectorAll('img')].every((image) => image.alt && image.naturalWidth === 48)"
    assert browser.run(alts)
    player = f"({red})({clip}.querySelector('.player img'))"
    assert browser.run(player) == 10
    seen = f"""(async () => {{
        const image = {clip}.querySelector(".player img"), now = {clip}.querySelector(".player small");
        const seen = new Set();
        new MutationObserver(() => seen.add(now.textContent)).observe(now, {{ childList: true }});
        {clip}.querySelector("button").click();
        const button = {clip}.querySelector("button");
        for (let i = 0; i < 400 && button.textContent.includes("Stop"); i++) await new Promise((done) => setTimeout(done, 20));
        return [[...seen], button.textContent];
    }})()"""
    assert browser.run(seen) == [["0.00 s", "0.10 s", "0.20 s", "0.30 s"], "▶ Play"]
    assert browser.run(player) == 10  # it ends at its beginning
    browser.click(".trajectory .clip li img")
    browser.wait("document.getElementById('zoom').open")
    assert browser.problems == []


def test_the_toy_runs_own_report(browser, tmp_path):
    overrides = ("runner.max_steps=4", "runner.val_check_interval=2", "data.val_samples=24", LOCAL)
    run = Run(tmp_path, *overrides)
    run.finish()
    seconds = browser.open(run.folder / "report.html")
    assert seconds < 2
    browser.run(
        "Promise.all([...document.querySelectorAll('.images img')].map((image) => image.decode()))"
    )
    assert browser.run(
        "[...document.querySelectorAll('.images img')].every((i) => i.naturalWidth > 0)"
    )
    assert browser.run(f"{CARDS}.length") == 20
    browser.choose("split", "val")
    assert browser.run("document.getElementById('found').textContent") == "72 of 200 trajectories"
    browser.choose("split", "train")
    browser.choose("sort", "mismatch_max")
    browser.point_at(".trajectory .tokens span:nth-child(2)")
    browser.wait("!document.getElementById('tooltip').hidden")
    assert browser.run("document.querySelectorAll('.tokens [data-shade]').length") > 20
    assert browser.problems == []


def test_the_state_of_a_run_is_not_cut(browser, tmp_path):
    run = make_run(tmp_path / "toy", steps=1)
    (run / "status.json").write_text(json.dumps({"state": "done", "reason": "", "step": 1}))
    page = build_report([run])
    for width in (1280, 360):
        browser.open(page, width=width)
        state = "document.querySelector('#summary .state')"
        assert browser.run(f"{state}.innerText") == "Done at step 1 of 1"
        assert browser.run(f"{state}.scrollWidth <= {state}.clientWidth"), width


def test_the_crosshair_stands_on_the_step_whose_values_are_shown(browser, page):
    browser.open(page)  # validations at steps 0, 3 and 6
    over = browser.run("""(() => {
        const over = document.querySelector('.chart .u-over');
        over.scrollIntoView({ block: 'center', behavior: 'instant' });
        const { x, y, width, height } = over.getBoundingClientRect();
        return { x, y, width, height };
    })()""")
    line = "document.querySelector('.chart .u-cursor-x').getBoundingClientRect().x"
    for share, step, at in ((0.35, 3, 0.5), (0.62, 3, 0.5), (0.9, 6, 1.0), (0.1, 0, 0.0)):
        browser.page.mouse.move(over["x"] + share * over["width"], over["y"] + over["height"] / 2)
        browser.wait(
            f"document.querySelector('.chart figcaption .value').textContent === 'step {step}'"
        )
        browser.page.wait_for_timeout(50)
        assert (browser.run(line) - over["x"]) / over["width"] == pytest.approx(at, abs=0.02), share


def test_a_histogram_has_counts(browser, page):
    browser.open(page)
    histogram = "document.querySelector('#distributions .histogram')"
    counts = browser.run(
        f"[...{histogram}.querySelectorAll('.counts span')].map((count) => parseInt(count.textContent))"
    )
    assert len(counts) == 2 and sum(counts) == 132
    assert browser.run(f"{histogram}.querySelector('.axis').innerText").split() == [
        str(max(counts)),
        "0",
    ]
    assert "132 in all" in browser.run(f"{histogram}.innerText")


@pytest.mark.parametrize("recorded", [True, False], ids=["messages", "ChatML"])
def test_a_prompt_is_bubbles_and_the_reference_is_named(browser, tmp_path, recorded):
    run = make_run(tmp_path / "toy", steps=1)
    for file in run.glob("trajectories/*.parquet"):
        rows = pq.read_table(file).to_pylist()
        said = [
            {"role": "user", "content": [0, "What is the area?"]},
            {"role": "assistant", "content": [], "turn": 0},
        ]
        messages = json.dumps([said]) if recorded else None
        table = pa.Table.from_pylist([row | {"messages": messages} for row in rows])
        pq.write_table(
            table.set_column(
                table.num_columns - 1, "messages", table["messages"].cast(pa.string())
            ),
            file,
        )
    browser.open(build_report([run]))
    card = "document.querySelector('.trajectory')"
    assert "<|im_start|>" not in browser.run(f"{card}.innerText")
    bubble = browser.run(
        f"[...{card}.querySelectorAll('.bubbles .message')].map((message) => message.innerText)"
    )
    assert [re.sub(r"\s+", " ", text) for text in bubble] == ["user image 1What is the area?"]
    heads = browser.run(
        f"[...{card}.querySelectorAll('.texts > h4')].map((head) => head.textContent)"
    )
    assert heads == ["Response", "Reference answer"]
    browser.click(".trajectory details > summary")
    browser.wait(f"{card}.querySelector('details').innerText.includes('<|im_start|>user')")
    assert browser.problems == []


def test_on_a_phone_what_goes_on_beyond_the_edge_fades_out_there(browser, four):
    browser.open(four, width=360, height=740)
    for selector in (".bar nav", "#summary .scroll", "#gallery .answers"):
        element = f"document.querySelector('{selector}')"
        browser.wait(f"{element}.dataset.more === 'right'")
        assert "gradient" in browser.run(f"getComputedStyle({element}).maskImage"), selector
        browser.run(f"{element}.scrollTo({{ left: 10000, behavior: 'instant' }})")
        browser.wait(f"{element}.dataset.more === 'left'")
    assert (
        browser.run("getComputedStyle(document.querySelector('.bar .more')).visibility") == "hidden"
    )
    browser.open(four, width=1280)
    assert browser.run("document.querySelector('.bar nav').dataset.more") == ""


def test_four_runs_are_compared_in_tables_and_in_one_plot(browser, four):
    browser.open(four)
    rows = browser.run(
        "[...document.querySelectorAll('#summary tbody tr')].map((row) => row.cells[0].innerText.trim())"
    )
    assert rows == ["one", "two", "three", "four"]
    assert browser.run("document.querySelectorAll('#summary .card.run, .side').length") == 0
    legend = browser.run("document.querySelector('.chart .legend').innerText")
    assert all(f"{name}: accuracy" in legend for name in rows)
    assert legend.count("constant answer") == 1, "a baseline that all runs have is one line"
    titles = browser.run(
        "[...document.querySelectorAll('#curves > .charts h3')].map((title) => title.textContent)"
    )
    assert "Time of a step" in titles and not any(
        title.startswith("Time by phase") for title in titles
    )
    browser.choose("split", "val")
    assert browser.run("document.querySelector('.compared tbody').rows.length") == 8, (
        "a row of each run, and its fold"
    )
    browser.click(".compared tbody button")
    assert browser.run("document.querySelectorAll('.compared .detail .trajectory').length") == 1
    assert browser.problems == []


#: The patch that the planted answers depend on, of 6 × 6.
HOT = (1, 2)


@pytest.fixture(scope="module")
def looked(tmp_path_factory) -> Path:
    """A run whose last validation was looked at: the first sampled token of each answer needs the image, the others don't."""
    run = make_run(tmp_path_factory.mktemp("runs") / "looked")
    values = [[0.0] * 6 for _ in range(6)]
    values[HOT[0]][HOT[1]] = 4.0
    maps = json.dumps([{"image": 0, "values": values, "forwards": 20}])
    rows = []
    for row in pq.read_table(run / "trajectories/step_6.parquet").to_pylist():
        if row["split"] == "val":
            with_images = [-0.5] * len(row["response_ids"])
            blank = [-2.5, *with_images[1:]]
            rows.append({WITH_IMAGES: with_images, WITH_BLANKS: blank, "heat_maps": maps, "weights_step": 6}
                        | {name: row[name] for name in ("split", "group_id", "sample")})  # fmt: skip
    write_look(run, 6, rows)
    return build_report([run])


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_second_colouring_and_heat_maps_show_what_images_add(browser, looked, dark):
    browser.open(looked, dark=dark)
    browser.choose("split", "val")
    browser.choose("from", "6")
    assert browser.run("document.querySelectorAll('.tokens [data-shade=p4]').length") == 0
    browser.choose("color", "seeing")
    shaded = (
        "[...document.querySelectorAll('.trajectory .tokens')].map((tokens) => "
        "[...tokens.children].map((token) => token.dataset.shade ?? ''))"
    )
    for tokens in browser.run(shaded):
        assert tokens[0] == "p4" and not any(tokens[1:]), "the first token alone needs the image"
    assert "with blank ones" in browser.run("document.getElementById('scale').textContent")
    browser.point_at(".trajectory .tokens [data-n]")
    browser.wait("!document.getElementById('tooltip').hidden")
    assert WITH_BLANKS in browser.run("document.getElementById('tooltip').textContent")
    colour = "getComputedStyle(document.querySelector('.tokens [data-shade=p4]')).backgroundColor"
    assert browser.run(colour) != browser.run(
        "getComputedStyle(document.querySelector('.card')).backgroundColor"
    )

    # The map lies on the picture, cell by cell, and is seen once it is asked for.
    overlay = "document.querySelector('.heat canvas')"
    assert browser.run(f"getComputedStyle({overlay}).display") == "none"
    browser.click(".heat button")
    assert (
        browser.run("document.querySelector('.heat button').getAttribute('aria-pressed')") == "true"
    )
    box = "(({ x, y, width, height }) => [x, y, width, height].map(Math.round))"
    of_map = browser.run(f"{box}({overlay}.getBoundingClientRect())")
    of_picture = browser.run(f"{box}(document.querySelector('.heat img').getBoundingClientRect())")
    assert all(abs(a - b) <= 1 for a, b in zip(of_map, of_picture, strict=True)), (
        of_map,
        of_picture,
    )
    alphas = browser.run(
        f"[...{overlay}.getContext('2d').getImageData(0, 0, 6, 6).data].filter((_, k) => k % 4 === 3)"
    )
    assert [k for k, alpha in enumerate(alphas) if alpha] == [6 * HOT[0] + HOT[1]]
    # A click still opens the picture below it at full size.
    browser.click(".heat img")
    browser.wait("document.getElementById('zoom').open")
    assert browser.problems == []


def test_without_a_look_there_is_no_second_colouring(browser, page):
    browser.open(page)
    assert browser.run("document.querySelector('#filters [value=seeing]')") is None
    assert browser.run("document.querySelector('.heat')") is None
    assert browser.problems == []
