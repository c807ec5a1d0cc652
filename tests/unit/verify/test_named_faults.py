"""Planted faults: `replay` names the quantity and the layer of each, from a file of a few MB."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded_step import recorded_step, tiny_groups, tiny_run, tiny_subject

from rlinf_vl.actor import loss as loss_module
from rlinf_vl.actor import trainer as trainer_module
from rlinf_vl.controller import step_plan
from rlinf_vl.engines.torch import batch as batch_module
from rlinf_vl.engines.torch.batch import Batch
from rlinf_vl.engines.torch.decode import DecodeCache
from rlinf_vl.engines.torch.sampling import Sampler
from rlinf_vl.models import layers
from rlinf_vl.models import policy as policy_module
from rlinf_vl.models.family import VisionFeatures
from rlinf_vl.models.image_tokens import counted_positions
from rlinf_vl.models.kernels import cpu
from rlinf_vl.models.mixture import Routing
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.vision_cache import VisionCache
from rlinf_vl.observe.replay_file import RecordedStep
from rlinf_vl.tools.verify.replay.reasons import reasons_for
from rlinf_vl.tools.verify.replay.run import Replay
from rlinf_vl.tools.verify.replay.subject import Subject
from rlinf_vl.tools.verify.replay.trained import TracedCollator

Patch = Callable[[pytest.MonkeyPatch], None]
MAX_BYTES = 5_000_000


@dataclass
class Fault:
    """A planted fault, and what names it.

    Attributes:
        named: stage, layer and part, as the quantity is written; sides: the first of them.
        code: plants it in the code that replays.
        sampling, training: plant it in the run that is recorded.
        weights: changes the weights of the run's engine.
        model: what the model is; keys: of the config.
        subject: changes the parts of the replay.
        reason: a word of the likely reasons. owner: a part of the weight's name.
    """

    named: str
    side: str
    code: Patch | None = None
    sampling: Patch | None = None
    training: Patch | None = None
    weights: Callable[[str, torch.Tensor], torch.Tensor] | None = None
    family: str = "qwen3_vl"
    sizes: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    subject: Callable[[Subject], None] | None = None
    reason: str = ""
    owner: str = ""


@contextmanager
def planted(patch: Patch | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if patch is not None:
            patch(monkeypatch)
        yield


def wrapped(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """Replaces `owner.name` by `change(original, *arguments)`."""
    return lambda patch: patch.setattr(owner, name, partial_of(getattr(owner, name), change))


def partial_of(original: Any, change: Callable[..., Any]) -> Callable[..., Any]:
    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    return changed


# --- the faults -------------------------------------------------------------------------------------


def no_features(encode, *args):
    features = encode(*args)
    return VisionFeatures(
        torch.zeros_like(features.tokens), tuple(map(torch.zeros_like, features.deepstack))
    )


def first_page_dropped(append, self, tokens, sequences, lengths, samples, states):
    tokens = tokens.clone()
    tokens[:, :, sequences[0][:4]] = 0.0
    return append(self, tokens, sequences, lengths, samples, states)


def next_position_late(draw, self, first, logits, sampler, version):
    if first == 0 and self.rows[0].ids and len(self.rows[0].ids) == 2:
        self.next_positions = self.next_positions + 1
    return draw(self, first, logits, sampler, version)


def off_by_one(swiglu, gate, up):
    return swiglu(gate.roll(1, -1), up)


def wide_epsilon(rms_norm, x, weight, eps):
    return rms_norm(x, weight, 1e-2)


def untempered(init, self, params, banned):
    init(self, [replace(p, temperature=1.0) for p in params], banned)


def rounded_angles(packed_model, self, dtype):
    model = packed_model(self, dtype)
    for name, table in model.named_buffers():
        if name.endswith("inv_freq"):
            table.copy_(table.bfloat16())
    return model


def without_head(weights, self, *args):
    return ((name, value) for name, value in weights(self, *args) if name != "lm_head.weight")


def leaking(attention, bounds, prefix=None, *args, **kwargs):
    if prefix is not None and len(prefix) > 2 and prefix[2] == prefix[1] >= 0:
        prefix = prefix.copy()
        prefix[2] = 1  # the second answer goes on from the first
    return attention(bounds, prefix, *args, **kwargs)


def late_mask(reject, train, rollout, mask, *args, **kwargs):
    kept, sums = reject(train, rollout, mask, *args, **kwargs)
    shifted = kept.roll(1)
    shifted[:1] = False
    return shifted, sums


def with_n(advantages, kind, rewards, group_ids, **options):
    values = advantages(kind, rewards, group_ids, **options)
    counts = torch.tensor([group_ids.count(g) for g in group_ids], dtype=values.dtype)
    return values * (counts / (counts - 1)).sqrt()


def unclipped(weights, *args, clip, **kwargs):
    return weights(*args, clip=float("inf"), **kwargs)


def micro_batch_mean(aggregate, per_token, mask, segment_ids, mode, *, denominator, n_segments):
    return aggregate(per_token, mask, segment_ids, mode, n_segments=n_segments) / 2


def stale_features(get, self, hashes):
    features = get(self, hashes)
    return VisionFeatures(1.01 * features.tokens, features.deepstack)


def swapped_features(get, self, hashes):
    return get(self, hashes[::-1]) if len(hashes) > 1 else get(self, hashes)


def nothing_banned(init, self, model, family, banned, **options):
    init(self, model, family, np.zeros_like(banned), **options)


def likely_left_out(call, self, number, probs, k):
    _, experts = call(self, number, probs, k)
    return probs, probs.topk(2 * k, dim=-1).indices[:, k:]


def a_layer_late(patch):
    late: list[torch.Tensor] = []
    add = layers.add_deepstack

    def added(hidden, positions, features):
        if not late:
            late.append(features)
            return hidden
        first = late.pop()
        return add(add(hidden, positions, first), positions, features)

    patch.setattr(layers, "add_deepstack", added)


def other_weights(update, self, *args, **kwargs):
    with torch.no_grad():
        for p in self.policy.parameters():
            p.mul_(1.02)
    return update(self, *args, **kwargs)


def all_trained(train_parts, model, family, frozen, *args, **kwargs):
    return train_parts(model, family, (), *args, **kwargs)


def all_decay(make_optimizer, policy, optim):
    optimizer = make_optimizer(policy, optim)
    for group in optimizer.param_groups:
        group["weight_decay"] = optim.weight_decay
    return optimizer


def second_without_gradient(patch):
    calls: list[int] = []
    compute = trainer_module.micro_batch_loss

    def loss(*args, **kwargs):
        calls.append(1)
        value, sums = compute(*args, **kwargs)
        # A rank whose gradient does not reach the others: its loss is reported all the same.
        return (value if len(calls) % 2 else value.detach() + 0.0 * value), sums

    patch.setattr(trainer_module, "micro_batch_loss", loss)


def one_frame(bounds, grids):
    return bounds(grids)[[0, -1]]


def off_by_a_target(call, self, members, **kwargs):
    batch = call(self, members, **kwargs)
    shifted = replace(batch, targets=np.roll(batch.targets, -1))
    self.rows[id(shifted)] = (shifted, self.rows[id(batch)][1])
    return shifted


def plain_positions(subject: Subject) -> None:
    subject.family = replace(subject.family, positions=counted_positions)


def nudged(name: str, weight: torch.Tensor) -> torch.Tensor:
    return weight * 1.01


def unadapted(name: str, weight: torch.Tensor) -> torch.Tensor:
    return weight + 0.01 * torch.ones_like(weight) if "q_proj" in name else weight


FROZEN = {"actor__model__freeze_vision_tower": True}
FAULTS = {
    "stale weights": Fault("engine weights", "run", weights=nudged),
    "LoRA unsynced": Fault("engine weights", "run", weights=unadapted, owner="q_proj"),
    "wrong tie": Fault(
        "engine weights", "engine", code=wrapped(trainer_module.Trainer, "weights", without_head),
        sizes={"tie": False}, owner="lm_head",
    ),
    "blind engine": Fault(
        "vision features", "engine",
        code=wrapped(batch_module, "encode_images", no_features),
    ),
    "dropped KV page": Fault(
        "decoder layer 0, attention", "engine", code=wrapped(DecodeCache, "append", first_page_dropped)
    ),
    "engine position off by one": Fault(
        "positions", "engine", code=wrapped(Batch, "_draw", next_position_late)
    ),
    "fused MLP off by one": Fault(
        "decoder layer 0, mlp", "trainer", code=wrapped(cpu, "swiglu", off_by_one)
    ),
    "epsilon of a fused norm": Fault(
        "decoder layer 0, attention", "trainer", code=wrapped(cpu, "rms_norm", wide_epsilon)
    ),
    "temperature forgotten by the run's engine": Fault(
        "rollout logprobs", "run", sampling=wrapped(Sampler, "__init__", untempered), reason="temperature 1"
    ),
    "banned ids not masked": Fault(
        "logprobs", "trainer", code=wrapped(PolicyModel, "__init__", nothing_banned), reason="banned ids left in"
    ),
    "bf16 rotary": Fault(
        "rotary angles", "trainer", code=wrapped(Subject, "packed_model", rounded_angles)
    ),
    "1-D positions": Fault("positions", "trainer", subject=plain_positions),
    "packed rows leak": Fault(
        "decoder layer 0, attention", "trainer",
        code=wrapped(policy_module, "SegmentAttention", leaking),
    ),
    "mask shifted by one": Fault(
        "loss mask", "trainer", code=wrapped(loss_module, "reject", late_mask)
    ),
    "targets shifted by one": Fault(
        "logprobs", "trainer",
        code=wrapped(TracedCollator, "__call__", off_by_a_target),
    ),
    "deviation with n": Fault(
        "advantages", "trainer", training=wrapped(step_plan, "advantages", with_n), reason="with n, not n - 1"
    ),
    "TIS clip ignored": Fault(
        "correction weights", "trainer", keys={"algorithm__importance_sampling_clip": 0.9},
        code=wrapped(loss_module, "importance_weights", unclipped),
    ),
    "mean of micro-batch means": Fault(
        "loss", "trainer", code=wrapped(loss_module, "aggregate", micro_batch_mean)
    ),
    "stale features in the cache": Fault(
        "vision features", "trainer", keys=FROZEN, code=wrapped(VisionCache, "get", stale_features)
    ),
    "features of another image": Fault(
        "vision features", "trainer", keys=FROZEN, code=wrapped(VisionCache, "get", swapped_features)
    ),
    "router chooses other experts": Fault(
        "decoder layer 1, experts", "trainer", family="qwen3_vl_moe", code=wrapped(Routing, "__call__", likely_left_out)
    ),
    "deepstack a layer late": Fault(
        "decoder layer 1, input", "trainer", code=a_layer_late,
        sizes={"text": {"num_hidden_layers": 3}, "vision": {"deepstack_visual_indexes": [0, 1]}},
    ),
    "images see each other": Fault(
        "vision layer 0, output", "trainer", code=wrapped(layers, "frame_bounds", one_frame)
    ),
    "old logprobs of other weights": Fault(
        "old logprobs", "run", training=wrapped(trainer_module.Trainer, "update", other_weights)
    ),
    "frozen tower trained": Fault(
        "trained weights", "trainer", keys=FROZEN, code=wrapped(trainer_module, "train_parts", all_trained), owner="visual"
    ),
    "decay of norms": Fault(
        "weight after the step", "trainer", code=wrapped(trainer_module, "make_optimizer", all_decay), owner="norm"
    ),
    "gradient of one rank missing": Fault("gradient", "trainer", code=second_without_gradient),
    "gradient of one rank missing in the run": Fault(
        "gradient norm", "run", training=second_without_gradient
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound():
    """The subject, the config and the replay of sound code by (family, sizes, keys), with a clean step."""
    known: dict[str, tuple] = {}

    def of(fault: Fault) -> tuple:
        key = repr((fault.family, fault.sizes, fault.keys))
        if key not in known:
            subject = tiny_subject(fault.family, **fault.sizes)
            config = tiny_run(**fault.keys)
            step = recorded_step(subject, config, tiny_groups(fault.family))
            replay = Replay(subject, config)
            assert replay(step).sound
            known[key] = subject, config, step, replay
        return known[key]

    return of


@pytest.mark.quick("packed rows leak", "stale weights")
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name, sound, tmp_path):
    fault = FAULTS[name]
    subject, config, step, clean = sound(fault)
    if fault.sampling or fault.training or fault.weights:
        sampler = None
        if fault.weights:
            changed = {n: fault.weights(n, w) for n, w in subject.weights.items()}
            sampler = replace(subject, weights=changed)
        step = recorded_step(
            subject, config, tiny_groups(fault.family), sampler=sampler,
            sampling=partial(planted, fault.sampling), training=partial(planted, fault.training),
        )  # fmt: skip
    file = Path(tmp_path / "step.replay")
    step.save(file)
    assert file.stat().st_size <= MAX_BYTES
    step = RecordedStep.read(file)
    if fault.subject is not None:
        subject = replace(subject)
        fault.subject(subject)
    with planted(fault.code):
        outcome = Replay(subject, config, bounds=clean.bounds)(step)
    first = outcome.first
    assert first is not None, outcome.failures
    assert (str(first.quantity), first.sides[0]) == (fault.named, fault.side)
    assert fault.owner in str(first.owner)
    assert fault.reason in " ".join(reasons_for(first, outcome, config))
