"""A whole run of the toy with a model of another family."""

import pytest
import torch
from tiny_tiles import TOKENS, write_idefics3, write_internvl
from transformers import AutoModelForImageTextToText
from whole_run import assert_engine_and_trainer_agree, metrics_of, played_run

from rlinf_vl.__main__ import main
from rlinf_vl.models.tiles import images_processor

pytestmark = pytest.mark.e2e

#: The checkpoints know nothing yet; the bonus for entropy moves every weight.
MOVING = (
    "algorithm.entropy_bonus=0.1",
    "actor.optim.lr_warmup_steps=0",
    "data.rollout_batch_size=4",
)


@pytest.mark.parametrize(
    ("toy", "recipe"),
    [
        ("toy-qwen3_5", "toy-grpo-cpu-qwen3_5"),
        ("toy-internvl", "toy-grpo-cpu-internvl"),
        pytest.param("toy-gemma3", "toy-grpo-cpu-gemma3", marks=pytest.mark.nightly),
    ],
)
def test_engine_and_trainer_agree_over_updates(tmp_path, toy, recipe):
    rows = metrics_of(played_run(tmp_path, toy, 2, *MOVING, recipe=recipe))
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["actor/grad_norm"] > 0
        assert row["actor/rollout_train_abs_diff_mean"] <= 2e-5
        assert 0 < row["actor/rollout_train_abs_diff_max"] <= 2e-4
    assert rows[2]["rollout/weight_version_min"] == 1


def test_a_family_without_a_file_runs_whole(tmp_path):
    """InternVL, from a folder as the hub has it: tiles, and a projector that learns beside a frozen tower. transformers reads
    its export, with the processor."""
    folder = write_internvl(tmp_path / "checkpoint")
    overrides = (
        *MOVING,
        f"rollout.model.model_path={folder}",
        "actor.model.freeze_projector=false",
    )
    run = played_run(
        tmp_path, "toy", 2, *overrides, "runner.save_interval=2", recipe="toy-grpo-cpu"
    )
    rows = metrics_of(run)
    assert_engine_and_trainer_agree(rows, 2)
    assert all(row["actor/grad_norm"] > 0 for row in rows[1:])
    assert rows[2]["rollout/weight_version_min"] == 1
    exported = tmp_path / "exported"
    assert main(["export", str(run), str(exported), "--dtype", "fp32"]) == 0
    model, info = AutoModelForImageTextToText.from_pretrained(exported, output_loading_info=True)
    assert not any(info.values()), info
    before = AutoModelForImageTextToText.from_pretrained(folder)
    moved = [n for n, p in before.named_parameters() if not torch.equal(p, model.get_parameter(n))]
    assert any("projector" in name for name in moved)
    assert not any("vision_tower" in name for name in moved)
    assert images_processor(exported).image_seq_length == TOKENS


def test_tiles_with_text_between_them_run_over_turns(tmp_path):
    """Idefics 3 plays the maze: a picture a turn, each of several tiles, in trees of six turns."""
    folder = write_idefics3(tmp_path / "checkpoint")
    overrides = (
        *MOVING,
        f"rollout.model.model_path={folder}",
        "data.max_prompt_length=1024",
        "runner.seq_length=3000",
        "runner.max_tokens_per_mbs=6000",
    )
    rows = metrics_of(played_run(tmp_path, "toy-maze", 2, *overrides))
    assert_engine_and_trainer_agree(rows, 2)
    assert all(row["rollout/turns_mean"] > 3 and row["actor/grad_norm"] > 0 for row in rows[1:])
