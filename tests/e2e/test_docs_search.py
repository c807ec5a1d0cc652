"""The site's search finds the page for a task: the built documentation, in headless Chromium."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytest.importorskip("material", reason="mkdocs-material is not installed")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
NO_BROWSER = f"no browser: neither does CHROMIUM name one nor is {', '.join(BROWSERS)} in PATH"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER),
]

ROOT = Path(__file__).resolve().parents[2]
#: Words that a user types → the page that helps, which must be among the first `RESULTS`.
RESULTS = 3
PAGE_OF_WORDS = {
    "wandb": "trackers",
    "tensorboard": "trackers",
    "mlflow": "trackers",
    "learning rate": "tuning",
    "sweep": "tuning",
    "hyperparameter": "tuning",
    "gemma": "models",
    "llava": "models",
    "LoRA 24 GB": "one-small-gpu",
    "QLoRA": "lora",
    "4090": "one-small-gpu",
    "video": "video",
    "own data": "data",
    "agent": "agents",
    "tool calling": "environments",
    "own environment": "environments",
    "own reward": "rewards",
    "resume": "checkpoints",
    "out of memory": "troubleshooting",
    "OOM": "troubleshooting",
    "SGLang": "sglang",
    "slurm": "cluster",
    "multi-node": "cluster",
    "notebook": "python",
    "evaluate": "eval",
}


class _SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Build the site and serve it: a browser loads the worker of the search from a server only."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", "mkdocs.yml"]
    command += ["--site-dir", str(site)]
    build = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stderr
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_SilentHandler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/index.html"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def search_page(site_url: str) -> Iterator["sync_api.Page"]:
    with sync_api.sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(60_000)
        page.goto(site_url)
        yield page
        browser.close()


def found_pages(page: "sync_api.Page", words: str) -> list[str]:
    """Type words into the search field and return the pages that it lists, best first.

    The field is emptied before, so that no result of earlier words is taken for one of these.
    """
    field = page.locator("input.md-search__input")
    field.click()
    state = "document.querySelector('.md-search-result__meta').textContent"
    for text, condition in (("", f"!/match/.test({state})"), (words, f"/match/.test({state})")):
        field.fill(text)
        field.press("End")  # the field reacts to a released key
        page.wait_for_function(condition)
    listed = "document.querySelector('.md-search-result__item')"
    page.wait_for_function(f"/^No/.test({state}) || {listed}")
    links = page.locator(".md-search-result__item > a.md-search-result__link").evaluate_all(
        "links => links.map(link => new URL(link.href).pathname)"
    )
    return [Path(link).stem for link in links]


@pytest.mark.parametrize(("words", "wanted"), PAGE_OF_WORDS.items())
def test_search_finds_the_page_for_a_task(search_page: "sync_api.Page", words: str, wanted: str):
    assert wanted in found_pages(search_page, words)[:RESULTS]


def test_search_says_that_nothing_was_found(search_page: "sync_api.Page"):
    assert found_pages(search_page, "qqqxyzzy") == []
