"""Weights that stay float32 in models of half precision: in training, in what engines get, in exports."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tiny import group, tiny_collator, tiny_model, tiny_policy, tiny_trainer, transformers_logprobs
from tiny_tiles import write_internvl

from rlinf_vl.actor.mesh import Mesh
from rlinf_vl.config.schema import ActorConfig
from rlinf_vl.models.families import FAMILIES, family_of
from rlinf_vl.models.loading import cast_model, float32_in_checkpoint, load_model
from rlinf_vl.models.saving import save_model
from rlinf_vl.packing.collator import Member

HYBRIDS = [name for name, family in FAMILIES.items() if family.float32_weights]


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield Mesh.make("cpu")
    dist.destroy_process_group()


def mixed_checkpoint(family: str, folder):
    """A checkpoint as on the hub: bfloat16, but for decays, the norms of gated delta nets and routers."""
    model = tiny_model(family=family)
    for name, weight in model.named_parameters():
        stays = name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight", "mlp.gate.weight"))
        weight.data = weight.data if stays else weight.data.bfloat16()
    save_model(model, FAMILIES[family], folder)
    return folder


def dtypes(folder) -> dict[str, torch.dtype]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= {name: value.dtype for name, value in load_file(file).items()}
    return found


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_checkpoint_read_in_bfloat16_keeps_its_decays(family, tmp_path):
    folder = mixed_checkpoint(family, tmp_path)
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    model = load_model(folder, FAMILIES[family], torch.bfloat16)
    kept = {name: p for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert {name.rpartition(".")[2] for name in kept} == {"A_log", "dt_bias"}
    for name, weight in kept.items():
        assert torch.equal(weight, stored[name]), name


@pytest.mark.parametrize("family", HYBRIDS)
def test_training_in_bfloat16_computes_and_sends_decays_in_float32(family, mesh):
    """Engines get the trainer's own values, bit for bit, and the layers see the same."""
    actor = ActorConfig()
    assert actor.fsdp_config.mixed_precision.param_dtype == "bf16"
    trainer = tiny_trainer(mesh, lambda dtype: tiny_policy(dtype, model_type=family), actor=actor)
    sent = dict(trainer.weights(torch.bfloat16))
    masters = dict(tiny_model(family=family).named_parameters())
    for name, value in sent.items():
        if name.endswith(("A_log", "dt_bias")):
            assert torch.equal(value, masters[name]), name
        else:
            assert value.dtype == torch.bfloat16, name
    parts = {name: value.dtype for name, _, _, value in trainer.parts(torch.bfloat16)}
    assert parts == {name: value.dtype for name, value in sent.items()}
    seen = []
    for module in trainer.policy.modules():
        if hasattr(module, "A_log"):
            module.register_forward_pre_hook(
                lambda m, *_: seen.append((m.A_log.dtype, m.in_proj_a.weight.dtype))
            )
    g = group(np.random.default_rng(3), [(2, 3)], [9, 7])
    batch = tiny_collator()([Member(g, i, [0.0]) for i in range(2)], run_vision=True)
    with torch.no_grad():
        trainer.policy(batch)
    assert set(seen) == {(torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("family", HYBRIDS)
def test_rounded_decays_are_far_from_transformers_in_float32_and_ours_are_not(family):
    g = group(np.random.default_rng(3), [], [60])
    expected = transformers_logprobs(tiny_model(family=family), g, 0)
    batch = tiny_collator()([Member(g, 0, [0.0])], run_vision=False)
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        policy = tiny_policy(model_type=family)
        for name, weight in policy.model.named_parameters():
            if FAMILIES[family].stays_float32(name):
                weight.data = weight.data.to(dtype).float()
        with torch.no_grad():
            errors[dtype] = float((policy(batch)[0] - expected).abs().max())
    assert errors[torch.float32] < 1e-5
    assert errors[torch.bfloat16] > 1e-4, "the test would not see rounded decays"


@pytest.mark.parametrize("family", [*HYBRIDS, "qwen3_vl_moe"])
def test_an_export_has_the_dtypes_of_its_checkpoint(family, tmp_path):
    source = mixed_checkpoint(family, tmp_path / "source")
    model = load_model(source, FAMILIES[family], torch.float32)
    cast_model(model, FAMILIES[family], torch.bfloat16, float32_in_checkpoint(source))
    save_model(model, FAMILIES[family], tmp_path / "export")
    assert dtypes(tmp_path / "export") == dtypes(source)
    assert len(set(dtypes(source).values())) == 2


def test_a_checkpoint_in_one_dtype_says_nothing_of_single_weights(tmp_path):
    save_model(tiny_model(), FAMILIES["qwen3_vl"], tmp_path)
    save_file({"steps": torch.zeros(1, dtype=torch.int64)}, tmp_path / "counts.safetensors")
    assert float32_in_checkpoint(tmp_path) == set()


def test_an_export_keeps_float32_under_stored_names_that_memory_lacks(tmp_path):
    """InternVL's checkpoints name the text model otherwise than transformers' model does."""
    source = write_internvl(tmp_path)
    family = family_of("auto", source)
    (file,) = source.glob("*.safetensors")
    stored = {
        name: value if "norm" in name else value.bfloat16()
        for name, value in load_file(file).items()
    }
    save_file(stored, file, {"format": "pt"})
    model = load_model(source, family, torch.float32)
    assert not set(dict(model.named_parameters())).issuperset(stored)
    cast_model(model, family, torch.bfloat16, float32_in_checkpoint(source))
    save_model(model, family, tmp_path / "export")
    assert dtypes(tmp_path / "export") == dtypes(source)
