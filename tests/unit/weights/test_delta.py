"""What changed of weights: whatever changes, and wherever it was cut, what is patched equals what was sent, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf_vl.weights import delta as delta_module
from rlinf_vl.weights import object_store
from rlinf_vl.weights import sender as sender_module
from rlinf_vl.weights.buckets import read_buckets
from rlinf_vl.weights.delta import Delta, DeltaSender, patches
from rlinf_vl.weights.object_store import ObjectStoreSender
from rlinf_vl.weights.sender import Offer, Snapshot

SHAPES = {"embed": (300, 64), "norm": (64,), "proj": (96, 700), "bias": (3,)}
INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def weights_of(dtype, generator):
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }


def changed(weights, share, generator):
    """Copies in which about this share of the values differs."""
    noise = (
        (name, torch.rand(value.shape, generator=generator) < share)
        for name, value in weights.items()
    )
    return {
        name: torch.where(where, weights[name] * 1.25 + 1, weights[name]) for name, where in noise
    }


def deltas_between(old, new, ranks, base=0):
    """Of ranks that have every weight cut along its flat elements; the second bucket has the last two weights."""
    made = []
    for rank in range(ranks):
        for number, names in enumerate((("embed", "norm"), ("proj", "bias"))):
            cut = {n: [len(old[n].view(-1)) * r // ranks for r in (rank, rank + 1)] for n in names}
            ends = (torch.cat([w[n].view(-1)[slice(*cut[n])] for n in names]) for w in (old, new))
            before, after = (flat.view(INTEGERS[flat.dtype]) for flat in ends)
            pieces = tuple((n, SHAPES[n], cut[n][0], cut[n][1] - cut[n][0]) for n in names)
            dtype = str(new["bias"].dtype).removeprefix("torch.")
            made.append(
                Delta.between(before, after, number=number, base=base, dtype=dtype, pieces=pieces)
            )
    return made


def patched(weights, deltas):
    out = {name: value.clone() for name, value in weights.items()}
    for bucket in patches(reversed(deltas), "cpu"):  # buckets may come in any order
        for name, patch in bucket.items():
            patch.apply(out[name])
    return out


def same_bits(a, b):
    return all(
        torch.equal(a[n].view(INTEGERS[a[n].dtype]), b[n].view(INTEGERS[b[n].dtype]))
        for n in SHAPES
    )


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    ("share", "encodings"),
    [(0.0, {8, 16}), (2e-4, {16}), (0.03, {8}), (0.4, {"mask"}), (1.0, {"whole"})],
)
def test_what_is_patched_is_what_was_sent(dtype, share, encodings):
    generator = torch.Generator().manual_seed(1)
    old = weights_of(dtype, generator)
    new = changed(old, share, generator)
    for ranks in (1, 3):
        deltas = deltas_between(old, new, ranks)
        assert same_bits(patched(old, deltas), new)
        assert same_bits(patched(new, deltas), new), "a second time"
        size = sum(w.nbytes for w in new.values())
        assert sum(d.nbytes for d in deltas) <= (share * 1.75 + 0.05) * size
        if ranks == 1:
            assert {d.encoding for d in deltas} <= encodings


def test_bits_count_not_numbers():
    """-0 is not 0, and NaN is itself."""
    old = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    new = {name: value.clone() for name, value in old.items()}
    new["proj"][5, 7], new["norm"][3] = -0.0, torch.nan
    deltas = deltas_between(old, new, 2)
    assert sum(len(d.values) for d in deltas) == 2
    assert same_bits(patched(old, deltas), new)
    unchanged = deltas_between(new, new, 2)
    assert not sum(len(d.values) for d in unchanged)
    ((name, patch),) = next(
        patches(unchanged, "cpu")
    ).items()  # so that an engine that is written learns of the version
    assert patch.shape == SHAPES[name] and patch.masked("cpu").isnan().all()


def test_fifty_syncs_end_where_the_weights_do():
    generator = torch.Generator().manual_seed(2)
    engine = weights_of(torch.bfloat16, generator)
    master = {name: value.float() for name, value in engine.items()}
    last, sent, whole = dict(engine), 0, 0
    for step in range(50):
        for value in master.values():
            value += 3e-5 * torch.randn(value.shape, generator=generator).sign()
        now = {name: value.bfloat16() for name, value in master.items()}
        deltas = deltas_between(last, now, 1 + step % 3)
        engine, last = patched(engine, deltas), now
        sent, whole = (
            sent + sum(d.nbytes for d in deltas),
            whole + sum(v.nbytes for v in now.values()),
        )
        assert same_bits(engine, now)
    assert sent < 0.1 * whole


def test_a_patch_of_another_dtype_is_refused_and_one_with_nan_elsewhere_has_the_values():
    old = weights_of(torch.bfloat16, torch.Generator().manual_seed(3))
    new = {name: value.clone() for name, value in old.items()}
    new["proj"][2, 3:9] += 1
    (bucket,) = patches(deltas_between(old, new, 1), "cpu")
    patch = bucket["proj"]
    with pytest.raises(
        AssertionError, match=r"values of torch.bfloat16 for a weight of torch.float32"
    ):
        patch.apply(old["proj"].float())
    masked = patch.masked("cpu")
    assert np.argwhere(~masked.isnan().numpy()).tolist() == [[2, k] for k in range(3, 9)]
    assert torch.equal(torch.where(masked.isnan(), old["proj"], masked), new["proj"])


def test_senders_offer_all_weights_and_then_their_changes(monkeypatch):
    for module in (delta_module, object_store, sender_module):
        monkeypatch.setattr(module, "put", lambda value: value)
    generator = torch.Generator().manual_seed(4)
    weights, gathered = weights_of(torch.bfloat16, generator), []
    total = sum(w.nbytes for w in weights.values())

    def gather(device):
        yield from weights.items()
        gathered.append(device)

    def parts():
        return ((name, w.shape, 0, w.flatten().clone()) for name, w in weights.items())

    def sender_of(kind, rank=0):
        return kind(gather, parts, rank=rank, world_size=2, device="cpu", bucket_bytes=40_000)

    def received(offer):
        return {
            name: w for bucket in read_buckets(offer.labels, "cpu") for name, w in bucket.items()
        }

    sender = sender_of(DeltaSender)
    assert sender.snapshot() is None
    full = sender.offer(5, check=True)
    assert same_bits(received(full), weights) and len(full.labels) > 1
    assert (full.sent_bytes, full.full_bytes, sender.offered_version) == (total, total, 5)
    old = dict(weights)
    weights |= changed(weights, 0.03, generator)
    changes = sender.offer(6, check=False)
    assert same_bits(patched(old, changes.labels), weights) and not same_bits(old, weights)
    assert {label.base for label in changes.labels} == {5}
    assert [label.number for label in changes.labels] == list(range(len(changes.labels)))
    assert changes.full_bytes == total
    assert changes.sent_bytes == sum(label.nbytes for label in changes.labels) < total / 4
    snapshot = sender.snapshot()
    blank = {name: torch.zeros_like(w) for name, w in weights.items()}
    assert snapshot.version == 6 and same_bits(patched(blank, snapshot.buckets), weights)
    first = sender_of(DeltaSender).offer(7, check=False)
    assert {label.base for label in first.labels} == {None} and first.sent_bytes == total
    assert same_bits(patched(blank, first.labels), weights)

    stores = [sender_of(ObjectStoreSender, rank) for rank in (0, 1)]
    assert stores[0].snapshot() is None
    gathered.clear()
    offers = [store.offer(8, check=True) for store in stores]
    assert same_bits(received(offers[0]), weights) and not offers[1].labels
    assert gathered == ["cpu", "cpu"], "every rank comes to the end"
    snapshots = [store.snapshot() for store in stores]
    merged = Snapshot.merged(snapshots)
    assert merged.version == 8 and merged.buckets == offers[0].labels
    assert Snapshot.merged([*snapshots, None]) is None
    assert Snapshot.merged([*snapshots, Snapshot(9, [])]) is None
    metrics = Offer.metrics([replace(changes, seconds=2.0), replace(full, seconds=1.0)], [3.0, 4.0])
    assert metrics == {
        "sync/bytes": changes.sent_bytes + total,
        "sync/bytes_share": (changes.sent_bytes + total) / (2 * total),
        "sync/offer_seconds": 2.0,
        "sync/load_seconds": 4.0,
    }
    assert Offer.metrics([Offer([])], [])["sync/bytes_share"] == 0.0
