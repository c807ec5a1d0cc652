"""The double of each recipe trains two steps: the recipe's algorithm, loss, turns, environment and rewards on toys."""

import json
import math
from functools import cache
from pathlib import Path

import pytest
from recipe_doubles import VARIANTS, double_of, rewarding_variety

from rlinf_vl import train
from rlinf_vl.config import load_config
from rlinf_vl.extras.toy.warm_start import build_toy_checkpoint

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    """A function: name of a toy → its checkpoint after one step of warm start, which takes a moment."""

    @cache
    def make(toy: str) -> Path:
        folder = tmp_path_factory.mktemp(toy) / "checkpoint"
        build_toy_checkpoint(folder, progress=False, toy=toy, steps=1)
        return folder

    return make


@pytest.mark.parametrize("name", VARIANTS)
def test_the_double_of_a_recipe_trains(name, tmp_path, checkpoint_of):
    overrides = double_of(name)
    toy = load_config(name, overrides).rollout.model.model_path
    overrides.append(f"rollout.model.model_path={checkpoint_of(toy)}")
    overrides += rewarding_variety(name, tmp_path)
    run = train(name, [*overrides, f"runner.output_dir={tmp_path}"])
    assert run.state == "done" and list(run.metrics.index)[-1] == 2
    for norm in run.metrics["actor/grad_norm"]:
        assert math.isfinite(norm) and norm > 1e-4
    used = load_config(str(tmp_path / name / "config.yaml")).algorithm
    wanted = load_config(name).algorithm
    for key in (
        "adv_type",
        "loss_agg_func",
        "clip_ratio_high",
        "kl_beta",
        "papo",
        "image_corruption",
    ):
        assert getattr(used, key) == getattr(wanted, key), key
    rows = [
        json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(row.get("rollout/failed", 0) == 0 for row in rows)
