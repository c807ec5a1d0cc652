"""Pages in a browser as whole runs in one process: one that pays for the parity of an answer's length, and the embedded buttons."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from browser_pages import needs_browser
from PIL import Image
from whole_run import assert_engine_and_trainer_agree, metrics_of, played_run

from rlinf_vl.extras.toy.buttons import Page, make_rows

pytestmark = [pytest.mark.e2e, needs_browser]

#: A grey drawn from the group's seed. The untrained model calls no tool, so its first answer is its last.
PAGE = """<!doctype html><body><script>
const grey = Math.floor(Math.random() * 256);
document.body.style.background = `rgb(${grey}, ${grey}, ${grey})`;
const utterance = () => "Which way?";
const reward = (answer) => answer === undefined ? null : answer.length % 2;
</script>"""


def test_a_run_learns_from_what_pages_pay(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "index.html").write_text(PAGE)
    overrides = (
        "rollout.env_class=browser",
        f"rollout.env_kwargs={{folder: {pages}, viewport: [32, 32], tools_prompt: '', "
        "timeout_s: 200, keep_page: false}",
        "rollout.turn_timeout=240",
        "rollout.max_concurrent_rollouts=16",
        "algorithm.group_size=4",
        "data.rollout_batch_size=4",
        "data.val_samples=4",
    )
    run = played_run(tmp_path, "toy-maze", 1, *overrides)
    rows = metrics_of(run)
    assert_engine_and_trainer_agree(rows, 1)
    assert rows[1]["env/success"] == pytest.approx(rows[1]["reward/mean"])
    assert rows[1]["env/blocked_requests"] == 0
    table = pd.read_parquet(run / "trajectories").query("split == 'train'")
    for _, group in table.groupby("group_id"):
        # The page is drawn from the group's seed: its trajectories see one picture.
        assert len({tuple(paths) for paths in group.images}) == 1
        assert all(len(json.loads(turns)["turns"]) == 1 for turns in group.turns)
    assert len({tuple(paths) for paths in table.images}) > 1


@pytest.mark.nightly
def test_the_toy_clicks_in_a_browser(tmp_path: Path) -> None:
    """The model writes calls, and seldom where the buttons are."""
    run = played_run(
        tmp_path,
        "toy-browser",
        1,
        "algorithm.group_size=4",
        "data.rollout_batch_size=8",
        "data.val_samples=8",
        "rollout.env_kwargs={timeout_s: 200}",
        "rollout.turn_timeout=240",
    )
    rows = metrics_of(run)
    assert_engine_and_trainer_agree(rows, 1)
    assert rows[1]["env/blocked_requests"] == rows[1]["env/popups"] == 0
    assert rows[1]["env/tool_calls"] > 0.5
    table = pd.read_parquet(run / "trajectories").query("split == 'train'")
    pages = {f"toy-browser:{row['id']}": row["pages"] for row in make_rows("train")}
    for paths, problem_id in zip(table.images, table.problem_id, strict=True):
        first_page = Page.of_text(pages[problem_id].split("/")[0])
        assert (np.asarray(Image.open(run / paths[0])) == first_page.picture()).all()
