"""check-data in processes of its own finds what training finds, each for its reason."""

import json

import pytest
from integration.test_damaged_rows import DAMAGE, EVERY, TOO_LONG, damage_of, pictures, write

from rlinf_vl.__main__ import main

pytestmark = pytest.mark.integration

N_ROWS = 30 * EVERY


def test_every_kind_of_damage_is_found_in_two_processes(tmp_path, toy_folder, capfd):
    paths = write(tmp_path, pictures(), N_ROWS)
    overrides = [
        f"data.train_data_paths={paths}",
        "data.val_data_paths=[]",
        f"rollout.model.model_path={toy_folder}",
    ]
    page = tmp_path / "out/page.html"
    assert (
        main(["check-data", "toy-grpo-cpu", *overrides, "--workers", "2", "--output", str(page)])
        == 1
    )
    train = json.loads(page.with_suffix(".json").read_text())["splits"]["train"]
    kinds = {i: DAMAGE[damage_of(i)] for i in range(N_ROWS) if damage_of(i)}
    assert {bad["row"]: bad["kind"] for bad in train["bad"]["all"]} == {
        i: kind for i, kind in kinds.items() if kind != TOO_LONG
    }
    assert [long["row"] for long in train["too_long"]] == [
        i for i, kind in kinds.items() if kind == TOO_LONG
    ]
    assert train["usable"] == N_ROWS - len(kinds)
    said = capfd.readouterr()
    assert "Traceback" not in said.err and all(
        kind in said.out for kind in DAMAGE.values() if kind != TOO_LONG
    )
