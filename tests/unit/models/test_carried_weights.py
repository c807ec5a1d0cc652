"""Weights of a checkpoint that the trained model lacks, such as heads for multi-token prediction, are in its exports."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from transformers import AutoConfig

from rlinf_vl.config import save_config
from rlinf_vl.config.load import parse_config
from rlinf_vl.extras.export.export import export_checkpoint
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.models.loading import carried_weights, load_model
from rlinf_vl.models.saving import save_model
from rlinf_vl.runtime.checkpoints import save_checkpoint

WITH_HEADS = [name for name, family in FAMILIES.items() if family.carried_weights]


def checkpoint_with_heads(family: str, folder) -> dict[str, torch.Tensor]:
    """Write a checkpoint with a file of its own for the heads; returns these."""
    model = tiny_model(family=family)
    model.config.text_config.mtp_num_hidden_layers = 1
    save_model(model, FAMILIES[family], folder)
    random = torch.Generator().manual_seed(3)
    heads = {
        "mtp.fc.weight": torch.randn(8, 16, generator=random).bfloat16(),
        "mtp.layers.0.self_attn.q_proj.weight": torch.randn(4, 8, generator=random).bfloat16(),
        "mtp.norm.weight": torch.randn(8, generator=random),
    }
    save_file(heads, folder / "model-mtp.safetensors", {"format": "pt"})
    return heads


def stored(folder) -> dict[str, torch.Tensor]:
    weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_HEADS)
def test_an_export_has_the_heads_bit_for_bit_and_the_trained_weights_beside_them(family, tmp_path):
    heads = checkpoint_with_heads(family, tmp_path / "base")
    trained = {name: 2 * value for name, value in tiny_model(family=family).state_dict().items()}

    def write(folder) -> dict[str, str]:
        state = {"model": {f"model.{name}": value for name, value in trained.items()}}
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        return {}

    config = parse_config("toy-grpo-cpu", [f"rollout.model.model_path={tmp_path / 'base'}"])
    save_config(config, tmp_path / "run/config.yaml")
    save_checkpoint(tmp_path / "run", 2, write, {"step": 2}, keep_last=-1)
    export_checkpoint(tmp_path / "run", tmp_path / "export", "fp32")
    exported = stored(tmp_path / "export")
    assert {name: value.dtype for name, value in exported.items() if name in heads} == {
        name: value.dtype for name, value in heads.items()
    }
    assert all(torch.equal(exported[name], value) for name, value in heads.items())
    again = load_model(tmp_path / "export", FAMILIES[family], torch.float32)
    for name, weight in again.named_parameters():
        assert torch.equal(weight, trained[name]), name
    assert AutoConfig.from_pretrained(tmp_path / "export").text_config.mtp_num_hidden_layers == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_without_them_has_nothing_to_carry(family, tmp_path):
    save_model(tiny_model(family=family), FAMILIES[family], tmp_path)
    assert not list(carried_weights(tmp_path, FAMILIES[family]))
