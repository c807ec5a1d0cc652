"""A per-token column takes two places: an engine that writes it, and a loss that reads it."""

from dataclasses import replace

import numpy as np
import tiny
import torch

from rlinf_vl.actor.batch_types import RankMiniBatch
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.models.families import family_of
from rlinf_vl.packing.planner import Item


class MarkingEngine(TorchEngine):
    """Writes a number of each sampled token into a column."""

    def generate(self, requests):
        completions = super().generate(requests)
        return [replace(c, samples=tuple(map(self.marked, c.samples))) for c in completions]

    def marked(self, sample):
        return replace(sample, columns={"mark": sample.ids.astype(np.float32) / 7})


def test_a_column_of_an_engine_reaches_a_loss_of_ones_own(mesh):
    engine = MarkingEngine(
        tiny.tiny_policy().model, family_of("qwen3_vl"), banned=tiny.banned(), pixels=tiny.pixels,
        image_tokens=tiny.IMAGE_TOKENS, max_running=8,
    )  # fmt: skip
    sampling = tiny.SamplingParams(max_new_tokens=9, stop_ids=(5, 6, 7))
    request = tiny.request(np.random.default_rng(0), [(2, 2)], sampling, seeds=(1, 2, 3))
    try:
        (completion,) = engine.generate([request])
    finally:
        engine.close()
    group = tiny.answered(request, completion.samples)
    marks = []

    def loss(inputs):
        marks.append(inputs.columns["mark"])
        assert len(inputs.columns) == 1 and inputs.rollout_logprobs is not None
        return inputs.columns["mark"] * inputs.logprobs

    trainer = tiny.tiny_trainer(mesh)
    trainer.loss = loss
    lengths = [len(sample.ids) for sample in completion.samples]
    items = tuple(Item(0, i, group.prefix_length, n, n) for i, n in enumerate(lengths))
    mini = RankMiniBatch((items,), (True,), sum(lengths))
    sums, logprobs = trainer.update({0: group}, [mini], {0: [[1.0]] * 3}, recorded=[0])
    ids = np.concatenate([sample.ids for sample in completion.samples])
    expected = ids.astype(np.float32) / 7
    assert torch.equal(marks[0], torch.from_numpy(expected)) and len(marks) == 1
    policy_logprobs = np.concatenate([logprobs[0][i] for i in range(3)])
    difference = sums.compute()["actor/loss"] - float((expected * policy_logprobs).mean())
    assert abs(difference) < 1e-3
