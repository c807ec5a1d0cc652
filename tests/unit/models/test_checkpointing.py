"""Activation checkpointing by its effect: block forwards that backward repeats, and bytes kept between forward and backward."""

from collections import Counter

import numpy as np
import pytest
import torch
from tiny import IMAGE_TOKENS, PAD, banned, group, pixels, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf_vl.models.families import FAMILIES
from rlinf_vl.models.loading import use_packed_attention
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.recompute import MODES, checkpoint_blocks
from rlinf_vl.packing.collator import Collator, Member

DEPTH = {"text": {"num_hidden_layers": 4}}
RECOMPUTING = MODES[1:]
VARIANTS = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def blocks_of(policy: PolicyModel) -> dict[str, torch.nn.Module]:
    """The blocks of text model and tower by name."""
    paths = [path for path in (policy.family.text_blocks, policy.family.vision_blocks) if path]
    named = {}
    for path in paths:
        for name, block in policy.model.get_submodule(path).named_children():
            named[f"{path}.{name}"] = block
    return named


class Products(TorchDispatchMode):
    """Counts the forwards of attention's kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.attentions += (
            func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        )
        return func(*args, **(kwargs or {}))


def step(family_name: str, mode: str, *, reentrant: bool = False, frozen: bool = False):
    """(forwards of each block's MLP, bytes kept for backward beside weights, gradients) of a step on one micro-batch."""
    family = FAMILIES[family_name]
    model = use_packed_attention(tiny_model(family=family_name, **DEPTH), family)
    policy = PolicyModel(model, family, banned(), temperature=1.0, chunk=None).train()
    if frozen:  # all but the first text block's MLP, as with adapters in it
        model.requires_grad_(False)
        first = model.get_submodule(f"{family.text_blocks}.0.mlp")
        first.requires_grad_(True)
    if mode != "none":
        checkpoint_blocks(model, family, mode, reentrant)
    calls = Counter[str]()
    for name, block in blocks_of(policy).items():
        block.mlp.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    shapes = [(2, 3)] if family.vision_tower else []
    g = group(np.random.default_rng(3), shapes, [90, 70])
    collate = Collator(family, IMAGE_TOKENS, pixels if shapes else None, PAD)
    batch = collate([Member(g, i, [0.0]) for i in range(2)], run_vision=bool(shapes))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, entropy = policy(batch)
    (logprobs.sum() + entropy.sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return calls, sum(kept.values()), gradients


def assert_equal(gradients, plain) -> None:
    assert gradients.keys() == plain.keys() and gradients
    for name, gradient in gradients.items():
        assert torch.equal(gradient, plain[name]), name


@VARIANTS
@pytest.mark.parametrize("family", FAMILIES)
def test_each_block_is_computed_twice_and_keeps_its_input_alone(family, reentrant):
    """Kept are the inputs of six blocks, and the head."""
    plain_calls, plain_bytes, plain = step(family, "none")
    calls, nbytes, gradients = step(family, "full", reentrant=reentrant)
    assert set(plain_calls.values()) == {1}
    assert calls == dict.fromkeys(plain_calls, 2)
    assert nbytes < plain_bytes / 2, f"{nbytes} of {plain_bytes} bytes kept"
    assert_equal(gradients, plain)


@VARIANTS
@pytest.mark.parametrize("mode", ["selective", "mlp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_not_computed_twice_where_it_is_kept(family, mode, reentrant):
    """Blocks run twice, and attention once; what norms and rotations make is not kept."""
    _, plain_bytes, plain = step(family, "none")
    with Products() as once:
        step(family, "none")
    with Products() as seen:
        calls, nbytes, gradients = step(family, mode, reentrant=reentrant)
    assert set(calls.values()) == {2}
    assert nbytes < plain_bytes
    assert_equal(gradients, plain)
    assert seen.attentions == once.attentions


@VARIANTS
@pytest.mark.parametrize("mode", RECOMPUTING)
@pytest.mark.parametrize("family", FAMILIES)
def test_behind_frozen_embeddings_the_first_block_learns_too(family, mode, reentrant):
    _, _, plain = step(family, "none", frozen=True)
    calls, _, gradients = step(family, mode, reentrant=reentrant, frozen=True)
    assert max(calls.values()) == 2
    assert_equal(gradients, plain)


@pytest.mark.parametrize("mode", RECOMPUTING)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_recomputed_in_passes_without_gradients(family, mode):
    calls = Counter[str]()
    model = use_packed_attention(tiny_model(family=family), FAMILIES[family]).train()
    policy = PolicyModel(model, FAMILIES[family], banned(), temperature=1.0, chunk=None).train()
    checkpoint_blocks(model, FAMILIES[family], mode)
    for name, block in blocks_of(policy).items():
        block.mlp.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    g = group(np.random.default_rng(3), [], [9])
    batch = Collator(FAMILIES[family], IMAGE_TOKENS, None, PAD)(
        [Member(g, 0, [0.0])], run_vision=False
    )
    with torch.no_grad():
        policy(batch)
    assert set(calls.values()) == {1}
