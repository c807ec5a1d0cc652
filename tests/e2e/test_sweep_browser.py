"""A sweep's report in a real browser: means and bands over seeds, tables, and nothing loaded from elsewhere."""

import json

import pytest
from e2e.test_report_browser import browser, pytestmark  # noqa: F401

from rlinf_vl.config import load_config
from rlinf_vl.config.load import save_config
from rlinf_vl.tools.report.sweep import build_sweep_report

HOSTILE = '</script><script>alert("x")</script>'
#: lr → accuracies at steps 5 and 10 by seed. The third seed of the second rate was killed after step 5.
ACCURACIES = {
    "0.0001": [[0.2, 0.4], [0.3, 0.5], [0.4, 0.6]],
    "0.0005": [[0.5, 0.7], [0.5, 0.9], [0.8]],
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep") / "rates"
    runs = []
    for lr, seeds in ACCURACIES.items():
        for seed, accuracies in enumerate(seeds, 1):
            name = f"lr-{lr}_seed-{seed}"
            runs.append({"name": name, "values": {"actor.optim.lr": lr, "runner.seed": str(seed)}})
            overrides = [f"actor.optim.lr={lr}", f"runner.seed={seed}"]
            save_config(load_config("toy-grpo-cpu", overrides), folder / name / "config.yaml")
            rows = [
                {"step": 5 * i, "val/accuracy": a, "val/problems": 100, "time/step": 1.0}
                for i, a in enumerate(accuracies, 1)
            ]
            (folder / name / "metrics.jsonl").write_text(
                "".join(json.dumps(r) + "\n" for r in rows)
            )
            state = (
                {"state": "done"} if len(accuracies) > 1 else {"state": "failed", "reason": HOSTILE}
            )
            (folder / name / "status.json").write_text(json.dumps(state | {"host": "elsewhere"}))
    axes = {"actor.optim.lr": list(ACCURACIES), "runner.seed": ["1", "2", "3"]}
    content = {"config": "toy-grpo-cpu", "fixed": [], "axes": axes, "runs": runs}
    (folder / "sweep.json").write_text(json.dumps(content))
    return build_sweep_report(folder)


def cells(shown, row: str) -> list[str]:
    return shown.run(
        f"[...document.querySelectorAll('{row} > *')].map(cell => cell.textContent.trim())"
    )


@pytest.mark.parametrize("width", [1280, 400])
def test_settings_are_means_over_seeds(browser, page, width):  # noqa: F811
    browser.open(page, width=width, view="")
    # The best setting first; of its third seed the best validation is that of step 5.
    assert cells(browser, "#settings tbody tr:nth-child(1)")[:5] == [
        "0.0005", "3", "2", "0.800 ± 0.100", "0.800 ± 0.100",
    ]  # fmt: skip
    assert cells(browser, "#settings tbody tr:nth-child(2)")[:4] == [
        "0.0001",
        "3",
        "3",
        "0.500 ± 0.100",
    ]
    # The curve's last point has two of the three seeds: (0.7 + 0.9) / 2 ± √2 · 0.1.
    chart = 'figure[data-metric="val/accuracy"]'
    legend = browser.run(
        f"[...document.querySelectorAll('{chart} .legend li')].map(li => li.textContent)"
    )
    assert legend == [
        "lr 0.0005 (seeds 2 of 3): 0.8000 ± 0.14 at step 10",
        "lr 0.0001 (seeds 3): 0.5000 ± 0.10 at step 10",
    ]
    drawn = f"document.querySelector('{chart} canvas').toDataURL()"
    means_alone = browser.run(drawn)
    browser.click("#each-seed")
    assert browser.run(drawn) != means_alone
    browser.click("#theme")
    assert browser.run("document.documentElement.dataset.theme") == "dark"
    # A reason from a run is text, whatever is in it.
    assert HOSTILE in cells(browser, "#runs tbody tr:nth-child(6)")
    assert "the same" in browser.run("document.querySelector('#config .about').textContent")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.problems == []


def test_a_folder_of_a_shell_loop_has_the_keys_that_differ_as_axes(browser, page, tmp_path):  # noqa: F811
    (page.parent / "sweep.json").rename(tmp_path / "sweep.json")
    try:
        output = build_sweep_report(page.parent, tmp_path / "loop.html")
    finally:
        (tmp_path / "sweep.json").rename(page.parent / "sweep.json")
    browser.open(output, view="")
    heads = cells(browser, "#settings thead tr")
    assert heads[0] == "actor.optim.lr" and "runner.seed" not in heads
    assert cells(browser, "#settings tbody tr:nth-child(1)")[:2] == ["0.0005", "3"]
    assert browser.problems == []
