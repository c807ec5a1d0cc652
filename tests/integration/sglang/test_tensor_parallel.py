"""An engine of two tensor-parallel processes on a tiny mixture of experts, in float32: it answers what transformers answers, with
images, and each process reads weights for itself: from the memory at its own place, and changes of them."""

import dataclasses
import os
import threading

import numpy as np
import pytest
import torch
from sglang_toy import Toy, engine_of, furthest, write_member

from rlinf_vl.engines.sglang import engine as engine_room
from rlinf_vl.models.families import family_of
from rlinf_vl.weights.buckets import Label, WeightsDiffer, group_by_size
from rlinf_vl.weights.delta import Delta
from rlinf_vl.weights.patch import INTEGERS
from rlinf_vl.weights.staging import Staging

pytestmark = pytest.mark.integration
TOLERANCE = 5e-5
#: Sizes of the member. Transformers saves it in a layout that SGLang can't read, so it is sent its weights at the start.
SIZES = {
    "text": {
        "num_hidden_layers": 3,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [],
    },
    "vision": {"depth": 3, "deepstack_visual_indexes": [0, 1, 2], "patch_size": 8},
}
BUCKET_BYTES = 2**15
PLACES = ("GPU 0", "GPU 1")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    family = family_of("qwen3_vl_moe")
    return Toy(
        tmp_path_factory.mktemp("moe"),
        family,
        lambda path: write_member("qwen3_vl_moe", SIZES, path),
    )


@pytest.fixture(scope="module", params=[1, 2], ids=["experts cut", "experts apart"])
def pair(request, made):
    """The engine: each process has half of every expert, or every other process's experts not at all."""
    engine = engine_of(made, tp_size=2, ep_size=request.param, wakes_empty=True)
    yield engine
    engine.close()


@pytest.fixture
def engine(pair, made):
    yield pair
    pair.load_weights([made.weights()], version=0)


def requests_of(made):
    return [made.request(k, n) for k in (0, 1, 3) for n in (1, 3)]


def buckets_of(made, weights) -> list[list[tuple[str, torch.Tensor]]]:
    return list(group_by_size(made.sent(weights), BUCKET_BYTES))


@pytest.fixture(scope="module")
def other(made):
    """A model with other weights in every part."""
    changed = made.perturbed("visual")[0].state_dict()
    text = made.perturbed("language_model")[0].state_dict()
    return made.with_weights(
        {name: text[name] if "language_model" in name else value for name, value in changed.items()}
    )


def weights_of(model):
    return [(name, value.detach()) for name, value in model.named_parameters()]


def test_logprobs_are_those_of_transformers(engine, made):
    assert furthest(engine, made, made.model, requests_of(made)) < TOLERANCE


def test_whole_weights_reach_both_processes(engine, made, other):
    engine.load_weights(map(dict, buckets_of(made, weights_of(other))), version=1)
    assert furthest(engine, made, other, requests_of(made)) < TOLERANCE


def test_each_process_reads_the_memory_at_its_own_place(engine, made, other, monkeypatch):
    """Beside two GPUs, of which memory of the node takes the place: two senders with two buckets each, acknowledged by the
    worker when its processes have read. What is staged is never more than those."""
    monkeypatch.setattr(engine_room, "places_of", lambda device, n: PLACES[:n])
    stagings = [Staging("cpu") for _ in PLACES]
    for version, model in ((1, other), (2, made.model)):
        buckets = buckets_of(made, weights_of(model))
        assert len(buckets) > 6
        labels = [
            staging.announce([Label.of(bucket, check=True) for bucket in buckets], place)
            for staging, place in zip(stagings, PLACES, strict=True)
        ]
        staged, unread = [], []

        def send(staging, buckets=buckets, staged=staged, unread=unread):
            readers = {os.getpid()}
            for bucket in buckets:
                staging.fill(bucket, readers)
                staged.append(staging.staged_bytes)
            staging.finish(readers)
            unread.append(len(readers))

        senders = [threading.Thread(target=send, args=(staging,)) for staging in stagings]
        for sender in senders:
            sender.start()
        engine.load_labels([label for place in labels for label in place], version)
        for sender in senders:
            sender.join()
        assert unread == [1, 1]
        largest = max(sum(value.nbytes for _, value in bucket) for bucket in buckets)
        total = sum(value.nbytes for bucket in buckets for _, value in bucket)
        assert max(staged) == 2 * largest < total / 3
        for staging in stagings:
            staging.release()
        assert furthest(engine, made, model, requests_of(made)) < TOLERANCE


def test_memory_of_the_node_is_read_by_both_and_what_differs_is_named(engine, made, other):
    (bucket, *_), staging = buckets_of(made, weights_of(other)), Staging("cpu")
    label = Label.of(bucket, check=True)
    wrong = dataclasses.replace(label, fingerprint=label.fingerprint ^ 1)
    for version, announced in enumerate((label, wrong), 1):
        labels = staging.announce([announced], "node")
        staging.fill(bucket, set())
        if announced is label:
            engine.load_labels(labels, version)
        else:
            with pytest.raises(WeightsDiffer, match="as received are not those the trainer sent"):
                engine.load_labels(labels, version)
        staging.release()


def deltas_of(made, old, new, base) -> list[Delta]:
    """What two ranks send, each of which has half of every weight."""
    deltas = []
    for number, ((name, new_value), (_, old_value)) in enumerate(
        zip(weights_of(new), weights_of(old), strict=True)
    ):
        flat, flat_old = (
            value.reshape(-1).view(INTEGERS[value.element_size()])
            for value in (new_value, old_value)
        )
        half = len(flat) // 2
        for start, end in ((0, half), (half, len(flat))):
            deltas.append(
                Delta.between(
                    flat_old[start:end],
                    flat[start:end],
                    number=number // 5,
                    base=base,
                    dtype="float32",
                    pieces=((name, tuple(new_value.shape), start, end - start),),
                )
            )
    return deltas


def test_changes_reach_the_process_that_has_the_weights(engine, made):
    """Of a few values of each expert, projection and tower weight; all other values stay, on either process."""
    changed, generator = made.with_weights(dict(weights_of(made.model))), torch.Generator()
    with torch.no_grad():
        for p in changed.parameters():
            chosen = torch.rand(p.shape, generator=generator.manual_seed(p.numel())) < 0.05
            p[chosen] += 0.5 * p.std(correction=0)
    deltas = deltas_of(made, made.model, changed, base=0)
    assert sum(delta.nbytes for delta in deltas) < 0.2 * sum(p.nbytes for p in changed.parameters())
    engine.load_labels(deltas, version=1)
    requests = requests_of(made)
    assert furthest(engine, made, changed, requests) < TOLERANCE
    assert furthest(engine, made, made.model, requests) > 1e-2
    engine.load_labels(deltas_of(made, changed, made.model, base=1), version=2)
    assert furthest(engine, made, made.model, requests) < TOLERANCE
    engine.load_labels(deltas_of(made, made.model, made.model, base=2), version=3)  # no change
    (completion,) = engine.generate([made.request(1)])
    assert (completion.samples[0].versions == 3).all()
    assert np.isfinite(completion.samples[0].logprobs).all()


def test_a_sync_after_a_sleep_without_a_copy_brings_every_weight(engine, made):
    """A sleep makes all weights NaN on the CPU, so that one which is not sent would show."""
    engine.release_memory()
    engine.restore_memory()
    with pytest.raises(AssertionError, match="before a sync brought the weights back"):
        engine.generate([made.request(0)])
    engine.load_weights(map(dict, buckets_of(made, weights_of(made.model))), version=1)
    assert furthest(engine, made, made.model, requests_of(made)) < TOLERANCE
