"""A model that is written can be read by those who may read its folder."""

import os

import pytest
from transformers import AutoImageProcessor, AutoTokenizer

from rlinf_vl.models.loading import copy_processor_files, save_model
from rlinf_vl.toy.files import write_toy_files
from tests.tiny import tiny_model


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_files_have_the_mode_that_the_umask_gives(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        save_model(tiny_model(), tmp_path)
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
