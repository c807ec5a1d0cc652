"""Replays of sound runs: every quantity of every family agrees within the measured bounds, and the file has all of a step."""

from dataclasses import replace

import numpy as np
import pytest
from plain_step import groups_of
from recorded_step import recorded_step, tiny_groups, tiny_run, tiny_subject

from rlinf_vl.errors import ConfigError
from rlinf_vl.models.kernels import cpu
from rlinf_vl.models.vision_cache import VisionCache
from rlinf_vl.observe import replay_file
from rlinf_vl.observe.replay_file import RecordedStep
from rlinf_vl.tools.verify.replay.minimise import MAX_REPLAYS, Minimiser, part_of_step
from rlinf_vl.tools.verify.replay.quantities import Quantity
from rlinf_vl.tools.verify.replay.reasons import reasons_for
from rlinf_vl.tools.verify.replay.run import ENGINE, RUN, TRAINER, Replay

FAMILIES = ["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3", "gemma3"]


@pytest.mark.quick("fp32-qwen3_vl")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_sound_run_agrees_in_every_quantity(family, precision):
    # The tower is trained in one of the two, and its features are cached in the other.
    config = tiny_run(precision, actor__model__freeze_vision_tower=precision == "bf16")
    subject = tiny_subject(family)
    outcome = Replay(subject, config)(recorded_step(subject, config, tiny_groups(family)))
    assert not outcome.failures and not outcome.left_out
    assert [(str(a.quantity), a.sides) for a in outcome.agreements if not a.agrees] == []
    seen = {(a.quantity.stage_name, a.sides[0]) for a in outcome.agreements}
    assert {
        ("gradient", TRAINER),
        ("weight after the step", TRAINER),
        ("final norm", ENGINE),
    } <= seen
    assert {("rollout logprobs", RUN), ("old logprobs", RUN), ("gradient norm", RUN)} <= seen
    layers = {a.quantity.layer for a in outcome.agreements if a.quantity.part_name == "attention"}
    assert layers == {0, 1}


@pytest.mark.slow
def test_several_minibatches_and_aggregations_agree():
    subject = tiny_subject()
    for mode in ("seq-mean-token-mean", "seq-mean-token-sum-norm"):
        config = tiny_run(
            algorithm__n_minibatches=2 if mode == "seq-mean-token-mean" else 1,
            algorithm__loss_agg_func=mode,
            algorithm__entropy_bonus=0.01,
            algorithm__importance_sampling_level="geometric",
        )
        outcome = Replay(subject, config)(recorded_step(subject, config, tiny_groups()))
        assert outcome.sound, outcome.first


def test_the_file_has_all_of_a_step(clean_step, tmp_path):
    of_tokens = np.array([0.5, -0.25], np.float32)
    step = replace(
        clean_step,
        advantages=(((of_tokens, 1.0), *clean_step.advantages[0][1:]), *clean_step.advantages[1:]),
        config="a: 1",
        messages={1: [{"role": "user", "content": "?"}]},
        model_files={"config.json": b"{}"},
        reason="somebody asked",
    )
    file = tmp_path / "step.replay"
    step.save(file)
    read = RecordedStep.read(file)
    assert read.minibatches == step.minibatches
    assert read.advantages[0][0][0].tolist() == of_tokens.tolist()
    assert read.advantages[0][0][1] == 1.0 and read.advantages[1:] == step.advantages[1:]
    assert read.engine_weights == step.engine_weights and read.metrics == step.metrics
    assert (read.messages, read.model_files, read.reason) == (
        step.messages, step.model_files, step.reason,
    )  # fmt: skip
    for mine, theirs in zip(step.groups, read.groups, strict=True):
        assert mine.images == theirs.images and mine.prefix_length == theirs.prefix_length
        for a, b in zip(mine.sequences, theirs.sequences, strict=True):
            assert all(np.array_equal(a.arrays()[name], b.arrays()[name]) for name in a.arrays())
        assert [t.turns for t in mine.trajectories] == [t.turns for t in theirs.trajectories]
    assert all(np.array_equal(step.weights[name], read.weights[name]) for name in step.weights)
    assert read.train_logprobs.keys() == step.train_logprobs.keys()


def test_a_part_of_a_step_keeps_its_denominators(clean_step):
    config = tiny_run()
    part = part_of_step(clean_step, [(2, 0), (2, 2)])
    assert part.minibatches[0].trajectories == [(0, 0), (0, 1)]
    assert part.minibatches[0].denominator == clean_step.minibatches[0].denominator
    outcome = Replay(tiny_subject(), config)(part)
    assert outcome.sound
    # Neither the metrics of the whole step nor advantages among the whole group follow from a part.
    stages = {a.quantity.stage_name for a in outcome.agreements if a.sides[0] == RUN}
    assert "gradient norm" not in stages and "rollout logprobs" in stages


@pytest.mark.slow
def test_a_replay_with_other_weights_than_the_run_accuses_nobody(clean_step):
    """A run of two ranks that was computed again on one: its engine and trainer still agree."""
    subject, config = tiny_subject(), tiny_run()
    weights = {name: weight * 1.05 for name, weight in subject.weights.items()}
    subject = replace(subject, weights=weights)
    part = replace(part_of_step(clean_step, [(2, 0), (2, 2)]), engine_weights={})
    outcome = Replay(subject, config)(part)
    assert str(outcome.first.quantity) == "rollout logprobs" and outcome.run_gap < 1e-4
    (reason,) = reasons_for(outcome.first, outcome, config)
    assert "neither is at fault: the replay has other weights than the run" in reason


def test_no_replay_file_is_refused(tmp_path):
    file = tmp_path / "x.replay"
    file.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="replay RUN --step N"):
        RecordedStep.read(file)


def test_quantities_are_sorted_as_they_are_computed():
    first = Quantity.of("decoder layer", 0, "output")
    assert Quantity.of("embeddings") < first < Quantity.of("decoder layer", 1, "input")
    assert Quantity.of("decoder layer", 9, "mlp") < Quantity.of("logprobs")


def test_a_run_writes_replays_within_bounds(clean_step, tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("a: 1")
    monkeypatch.setattr(replay_file, "MAX_FILES", 2)
    groups = {0: clean_step.groups[0], 2: clean_step.groups[2]}
    logprobs = {(2, 1): clean_step.train_logprobs[2, 1], (1, 0): clean_step.train_logprobs[1, 0]}
    paths = [
        replay_file.write_replay(
            tmp_path,
            "",
            step,
            groups,
            clean_step.advantages,
            logprobs,
            "stale weights",
            total_steps=9,
            weights={"w": np.float32([step])},
        )
        for step in (4, 5, 6, 5)
    ]
    names = [None if path is None else path.name for path in paths]
    assert names == ["step_4.replay", "step_5.replay", None, "step_5.replay"]
    step = RecordedStep.read(tmp_path / "replays" / "step_5.replay")
    assert [group.id for group in step.groups] == ["g0", "g2"]
    assert step.minibatches[0].trajectories == [(g, i) for g in range(2) for i in range(3)]
    assert step.advantages[1] == clean_step.advantages[2] and list(step.train_logprobs) == [(1, 1)]
    assert (
        step.reason == "stale weights" and step.weights == {"w": [5]} and step.run == str(tmp_path)
    )


@pytest.mark.slow
def test_a_minimised_step_is_small_and_still_shows_the_fault(clean_step, monkeypatch):
    config, subject = tiny_run(), tiny_subject()
    bounds = Replay(subject, config)
    bounds(clean_step)
    rms_norm = cpu.rms_norm
    monkeypatch.setattr(cpu, "rms_norm", lambda x, weight, eps: rms_norm(x, weight, 1e-2))
    replay = Replay(subject, config, bounds.bounds)
    minimiser = Minimiser(lambda step: replay(step).first.quantity, subject.image_tokens)
    smallest = minimiser(clean_step)
    sequences = [s for group in smallest.groups for s in group.sequences]
    assert len(sequences) == 1 and sequences[0].loss_mask.sum() == 1 and not sequences[0].images
    assert replay(smallest).first.quantity == replay(clean_step).first.quantity
    assert minimiser.replays <= MAX_REPLAYS


@pytest.mark.slow
def test_a_fault_of_images_keeps_the_images(monkeypatch):
    config, subject = tiny_run(actor__model__freeze_vision_tower=True), tiny_subject()
    step = recorded_step(subject, config, tiny_groups())
    clean = Replay(subject, config)
    clean(step)
    get = VisionCache.get

    def swapped(self, hashes):
        return get(self, hashes[::-1]) if len(hashes) > 1 else get(self, hashes)

    monkeypatch.setattr(VisionCache, "get", swapped)
    replay = Replay(subject, config, clean.bounds)

    def first(smaller):
        found = replay(smaller).first
        return found and found.quantity

    smallest = Minimiser(first, subject.image_tokens)(step)
    # One image cannot be swapped with itself.
    images = {image.hash for group in smallest.groups for image, _ in group.images}
    assert len(images) == 2 and sum(len(group.sequences) for group in smallest.groups) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gaps", "turns sequences"])
def test_episodes_of_several_turns_agree(kind):
    """With observations between sampled tokens, and with a sequence for each turn."""
    config, subject = tiny_run(runner__max_tokens_per_mbs=400), tiny_subject()
    outcome = Replay(subject, config)(recorded_step(subject, config, tuple(groups_of(kind))))
    assert outcome.sound, outcome.first
    last = {a.sides[0]: a for a in outcome.agreements if a.quantity.stage_name == "logprobs"}
    assert last.keys() == {TRAINER, ENGINE}
