"""An export that is read, merged, cast and written a block of layers at a time is, to the bit, what one of the whole model
would be."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tiny import MEMBERS, tiny_model
from tiny_tiles import write_gemma3
from transformers import AutoConfig, AutoModelForImageTextToText

from rlinf_vl.config import save_config
from rlinf_vl.config.load import parse_config
from rlinf_vl.extras.export.export import export_checkpoint, restore
from rlinf_vl.extras.toy.files import write_toy_files
from rlinf_vl.models import partial, saving
from rlinf_vl.models.families import FAMILIES, family_at, family_of
from rlinf_vl.models.loading import (
    DTYPES,
    carried_weights,
    cast_model,
    float32_in_checkpoint,
    load_model,
    saved_buffers,
)
from rlinf_vl.models.lora import add_adapters, is_adapter, merge_adapters
from rlinf_vl.models.partial import load_skeleton, load_weights, weight_groups
from rlinf_vl.runtime.checkpoints import save_checkpoint
from rlinf_vl.tools.verify.prove.member import member_of

#: A model of the general path, a mixture whose experts are stored one by one and whose routers have buffers.
BY_PATH = ("gemma3", "glm4v_moe")
ADAPTERS = ["actor.model.is_lora=true", "actor.model.lora.target_modules=[all-linear]"]
KINDS = {
    "all weights": [],
    "adapters": ADAPTERS,
}
#: peft wraps other modules of glm4v_moe than it is asked to.
CASES = [
    *((family, "all weights") for family in MEMBERS),
    *((family, "adapters") for family in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5_moe", "gemma3")),
    ("glm4v_moe", "all weights"),
]


def glm(folder):
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
    rope |= {"partial_rotary_factor": 0.5}
    marks = ["image", "video", "image_start", "image_end", "video_start", "video_end"]
    ids = {f"{mark}_token_id": 60 + i for i, mark in enumerate(marks)}
    config = AutoConfig.for_model(
        "glm4v_moe", text_config={"rope_parameters": rope, "head_dim": 128}, **ids
    )
    write_toy_files(folder)
    model = member_of(family_at(config), config, folder).model()
    for name, buffer in saved_buffers(model).items():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_()
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Family → the folder of a tiny checkpoint in bfloat16, its norms in float32, with heads if the family carries some."""
    folders = {}

    def folder(name: str) -> str:
        if name in folders:
            return folders[name]
        path = tmp_path_factory.mktemp(name)
        if name == "gemma3":
            write_gemma3(path)
        else:
            model = glm(path) if name in BY_PATH else tiny_model(family=name, tie=name != "qwen3")
            for weight_name, weight in model.named_parameters():
                is_norm = weight_name.endswith("norm.weight")
                weight.data = weight.data if is_norm else weight.data.bfloat16()
            family = FAMILIES.get(name) or family_at(model.config)
            saving.save_model(model, family, path)
            if family.carried_weights:
                heads = {"mtp.norm.weight": torch.randn(8), "mtp.fc.weight": torch.ones(4).half()}
                save_file(heads, path / "model-mtp.safetensors", {"format": "pt"})
        folders[name] = str(path)
        return folders[name]

    return folder


def run_of(folder, path: str, overrides, seed=7):
    """Write a run with a checkpoint of the model at `path`, every weight of it moved."""
    config = parse_config("toy-grpo-cpu", [f"rollout.model.model_path={path}", *overrides])
    family = family_of("auto", path)
    model = load_model(path, family, torch.float32)
    if config.actor.model.is_lora:
        add_adapters(model, family, config.actor.model.lora)
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict()
    for value in state.values():
        if value.is_floating_point():
            value.add_(torch.randn(value.shape, generator=generator), alpha=0.1)
    if config.actor.model.is_lora:
        state = {name: value for name, value in state.items() if is_adapter(name)}

    def write(target) -> dict[str, str]:
        named = {f"model.{name}": value for name, value in state.items()}
        dcp.save({"model": named}, checkpoint_id=target, no_dist=True)
        return {}

    save_config(config, folder / "config.yaml")
    save_checkpoint(folder, 2, write, {"step": 2}, keep_last=-1)


def whole_export(folder, output, dtype: str) -> None:
    """What `export_checkpoint` should write, by transformers from the whole model."""
    model, family, base, _ = restore(folder)
    merge_adapters(model)
    cast_model(model, family, DTYPES[dtype], float32_in_checkpoint(base))
    weights = dict(carried_weights(base, family))
    for name, weight in model.named_parameters():
        for engine_name, value in family.engine_names(name, weight.detach()):
            weights[engine_name] = weight.detach() if value.shape == weight.shape else value
    for part, keys in family.engine_config(model.config).items():
        getattr(model.config, part).update(keys)
    model.save_pretrained(
        output,
        state_dict=weights | saved_buffers(model),
        save_original_format=family.exports_original_format,
    )


def stored(folder) -> dict[str, torch.Tensor]:
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def assert_same_weights(folder, expected_folder) -> None:
    weights, expected = stored(folder), stored(expected_folder)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert weights[name].dtype == value.dtype, name
        assert torch.equal(weights[name], value), name


@pytest.mark.parametrize(
    ("family", "kind"), CASES, ids=[f"{kind} of {family}" for family, kind in CASES]
)
@pytest.mark.slow
@pytest.mark.quick("adapters of qwen3_5_moe", "all weights of glm4v_moe")
def test_it_is_that_of_the_whole_model(base, tmp_path, monkeypatch, family, kind):
    monkeypatch.setattr(partial, "GROUP_BYTES", 100_000)
    run_of(tmp_path / "run", base(family), KINDS[kind])
    export_checkpoint(tmp_path / "run", tmp_path / "export", "bf16")
    whole_export(tmp_path / "run", tmp_path / "whole", "bf16")
    assert_same_weights(tmp_path / "export", tmp_path / "whole")
    config, expected = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("export", "whole")
    )
    assert config == expected


@pytest.mark.slow
def test_files_are_bounded_and_indexed_as_transformers_reads_them(base, tmp_path):
    run_of(tmp_path / "run", base("qwen3_vl_moe"), ADAPTERS)
    export_checkpoint(tmp_path / "run", tmp_path / "one", "bf16")
    export_checkpoint(tmp_path / "run", tmp_path / "many", "bf16", max_file_bytes=20_000)
    assert_same_weights(tmp_path / "many", tmp_path / "one")
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "many").glob("*.safetensors")}
    largest = max(value.nbytes for value in stored(tmp_path / "one").values())
    assert len(sizes) > 3 and max(sizes.values()) < max(20_000, largest) + 10_000
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        v.nbytes for v in stored(tmp_path / "one").values()
    )
    assert set(index["weight_map"].values()) == sizes.keys()
    one, many = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / name) for name in ("one", "many")
    )
    assert index["metadata"]["total_parameters"] == one.num_parameters()
    for (name, value), other in zip(one.named_parameters(), many.parameters(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5_moe", *BY_PATH])
@pytest.mark.slow
@pytest.mark.quick("qwen3_vl")
def test_weights_read_a_group_at_a_time_are_those_of_the_whole_model(base, monkeypatch, family):
    path, made = base(family), family_of("auto", base(family))
    whole = dict(load_model(path, made, torch.bfloat16).named_parameters())
    skeleton = load_skeleton(path, made, torch.bfloat16)
    empty = dict(skeleton.named_parameters())
    assert [(n, w.shape, w.dtype, w.is_meta) for n, w in empty.items()] == [
        (n, w.shape, w.dtype, True) for n, w in whole.items()
    ]
    assert weight_groups(skeleton, made) == [list(whole)]
    monkeypatch.setattr(partial, "GROUP_BYTES", 1)
    blocks = weight_groups(skeleton, made)
    assert [name for names in blocks for name in names] == list(whole)
    layers = [names for names in blocks if names[0].startswith(f"{made.text_blocks}.")]
    assert len(layers) == len(list(skeleton.get_submodule(made.text_blocks).children()))
    for names in (blocks[0], blocks[1], layers[-1], blocks[-1]):
        weights = load_weights(path, made, torch.bfloat16, names)
        assert list(weights) == names
        for name, value in weights.items():
            assert value.dtype == whole[name].dtype and torch.equal(value, whole[name]), name


@pytest.mark.slow
def test_conversions_across_blocks_are_made_of_the_whole(monkeypatch, base):
    """Only groups that give the same stored weights one by one are converted one by one."""
    path = base("glm4v_moe")
    family = family_of("auto", path)
    model = load_skeleton(path, family, torch.bfloat16)
    monkeypatch.setattr(partial, "GROUP_BYTES", 1)
    assert len(saving._groups(model, family)) > 5
    convert = saving.revert_weight_conversion

    def across_blocks(model, weights):
        converted = convert(model, weights)
        return converted | {f"all {len(weights)}": next(iter(weights.values()))}

    monkeypatch.setattr(saving, "revert_weight_conversion", across_blocks)
    assert len(saving._groups(model, family)) == 1
