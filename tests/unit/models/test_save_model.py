"""A model that is written can be read: by transformers and SGLang alike, and by those who may read its folder."""

import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from rlinf_vl.extras.toy.files import write_toy_files
from rlinf_vl.models.families import FAMILIES, family_of
from rlinf_vl.models.loading import (
    copy_processor_files,
    stored_as_in_memory,
    weight_shapes,
)
from rlinf_vl.models.saving import save_model
from tests.tiny import tiny_model


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_files_have_the_mode_that_the_umask_gives(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        save_model(tiny_model(), family_of("qwen3_vl"), tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").is_file()
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        path.name: mode for path in tmp_path.iterdir()
    }


def test_tokenizer_and_image_processor_load_without_torchvision(tmp_path):
    """AutoProcessor, as `export` says, wants torchvision for its video processor."""
    (source := tmp_path / "source").mkdir()
    (target := tmp_path / "target").mkdir()
    write_toy_files(source)
    copy_processor_files(source, target)
    (target / "config.json").write_text('{"model_type": "qwen3_vl"}')
    assert AutoTokenizer.from_pretrained(target).eos_token_id is not None
    assert AutoImageProcessor.from_pretrained(target).patch_size == 8


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_what_is_saved_is_as_sglang_loads_it_and_transformers_reads_the_same(family, tie, tmp_path):
    model = tiny_model(3, tie, family=family.model_type, text={"moe_intermediate_size": 24})
    save_model(model, family, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    read = dict(family.model_class.from_pretrained(tmp_path).named_parameters())
    for name, value in model.named_parameters():
        assert torch.equal(read.pop(name), value), name
        for part, theirs in family.engine_names(name, value):
            assert torch.equal(stored.pop(part), theirs), part
    assert not read and not stored


@pytest.mark.parametrize("size", [16, 24, 32])
def test_experts_that_only_transformers_can_read_are_known(size, tmp_path):
    """It saves them in its own layout, and tells another by its shape: not where a matrix is square (of 32 · 32)."""
    family, model = (
        family_of("qwen3_vl_moe"),
        tiny_model(family="qwen3_vl_moe", text={"moe_intermediate_size": size}),
    )
    shapes = weight_shapes(model.config, family, False)
    for folder, save in (
        (tmp_path / "theirs", model.save_pretrained),
        (tmp_path / "ours", lambda f: save_model(model, family, f)),
    ):
        save(folder)
        read = AutoModelForImageTextToText.from_pretrained(folder)
        for (name, a), b in zip(model.named_parameters(), read.parameters(), strict=True):
            assert torch.equal(a, b), name
        assert stored_as_in_memory(folder, family, shapes) == (
            folder.name == "theirs" or size in (16, 32)
        )
    assert not stored_as_in_memory(folder, family_of("qwen3_vl"), shapes)


def test_an_export_has_every_file_but_weights_index_and_config(tmp_path):
    """Python of trusted checkpoints, tokenizers of other kinds, further templates."""
    (source := tmp_path / "source").mkdir()
    names = ["modeling_x.py", "tokenizer.model", "qwen.tiktoken", "LICENSE", "tokenizer.json"]
    names += ["additional_chat_templates/tools.jinja"]
    others = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    others += ["pytorch_model.bin", "README.md", ".cache/x.json", "__pycache__/x.pyc"]
    others += ["checkpoint-5/config.json", "checkpoint-5/tokenizer.json"]
    for name in (*names, *others):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    copy_processor_files(source, target := tmp_path / "target")
    copied = {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()}
    assert copied == set(names)
