"""`actor.routing_replay` from a config to the metrics: a bfloat16 engine's samples, trained on by a float32 trainer."""

import numpy as np
import pytest
import torch
from tiny import answered

from rlinf_vl.actor.batch_types import RankMiniBatch
from rlinf_vl.actor.load import load_trainer
from rlinf_vl.config import load_config
from rlinf_vl.engines.make import make_engine
from rlinf_vl.extras.toy.warm_start import build_toy_checkpoint
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.packing.planner import Item
from rlinf_vl.types import Request, SamplingParams


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "checkpoint"
    build_toy_checkpoint(folder, progress=False, steps=1, toy="toy-qwen3_vl_moe")
    return str(folder)


def config_of(mode: str):
    settings = (
        "rollout.model.precision=bf16",
        "actor.fsdp_config.mixed_precision.param_dtype=fp32",
    )
    return load_config("toy-grpo-cpu-moe", [f"actor.routing_replay={mode}", *settings])


def samples_of(mode: str, checkpoint: str):
    processor = Processor(checkpoint, family_of("auto", checkpoint))
    engine = make_engine(config_of(mode), checkpoint, processor, "cpu")
    try:
        ids = processor.tokenizer("How many red squares are there?", return_tensors="np")[
            "input_ids"
        ][0]
        sampling, nothing = SamplingParams(max_new_tokens=24), np.zeros((0, 3), np.int32)
        asked = Request(ids.astype(np.int32), (), nothing, sampling, tuple(range(32)))
        (completion,) = engine.generate([asked])
        return answered(asked, completion.samples)
    finally:
        engine.close()


def metrics_of(mode: str, group, mesh, checkpoint: str):
    torch.manual_seed(0)
    trainer = load_trainer(config_of(mode), checkpoint, mesh, 1)
    n, prompt = len(group.trajectories), group.prefix_length
    lengths = [t.n_response_tokens for t in group.trajectories]
    items = tuple(Item(0, i, prompt, lengths[i], lengths[i], 0) for i in range(n))
    mini = RankMiniBatch((items,), (False,), sum(lengths))
    sums, _ = trainer.update({0: group}, [mini], {0: [[1.0]] * n})
    return sums.compute()


@pytest.mark.slow
def test_replay_brings_the_trainer_nearer_to_the_engine(checkpoint, mesh):
    group = samples_of("replay", checkpoint)
    found = {mode: metrics_of(mode, group, mesh, checkpoint) for mode in ("record", "replay")}
    for metrics in found.values():
        assert (
            0
            < metrics["actor/routing_disagreement"]
            < metrics["actor/routing_disagreement_tokens"]
            < 0.5
        )
        assert 1 < metrics["actor/expert_load"] <= 4
    for name in ("k3", "abs_diff_mean"):
        name = f"actor/rollout_train_{name}"
        assert found["replay"][name] < found["record"][name], found


@pytest.mark.slow
def test_nothing_is_recorded_unless_it_is_asked_for(checkpoint, mesh):
    group = samples_of("off", checkpoint)
    assert not any(sequence.columns for sequence in group.sequences)
    metrics = metrics_of("off", group, mesh, checkpoint)
    assert "actor/expert_load" in metrics and not any("routing" in name for name in metrics)
