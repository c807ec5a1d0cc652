"""Weights that SGLang can't read itself are sent a block of layers at a time: all of them, in its names and layouts."""

from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model

from rlinf_vl.engines.sglang.engine import SglangEngine
from rlinf_vl.models import partial
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.models.loading import load_model


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_vl"])
def test_all_weights_are_sent_in_groups(family, tmp_path, monkeypatch):
    tiny_model(family=family, tie=False).save_pretrained(tmp_path)
    monkeypatch.setattr(partial, "GROUP_BYTES", 1)
    read = []

    def load_weights(path, made, dtype, names, **options):
        read.append(len(names))
        return partial.load_weights(path, made, dtype, names, **options)

    monkeypatch.setattr("rlinf_vl.engines.sglang.engine.load_weights", load_weights)
    engine = object.__new__(SglangEngine)
    engine.settings = SimpleNamespace(
        model_path=tmp_path, dtype=torch.bfloat16, trust_remote_code=False
    )
    engine.shapes = {}
    sent: dict[str, torch.Tensor] = {}

    def take(buckets, version):
        for bucket in buckets:
            assert not sent.keys() & bucket.keys() and version == 0
            sent.update(bucket)

    engine.load_weights = take
    engine._send_all(FAMILIES[family])
    whole = load_model(tmp_path, FAMILIES[family], torch.bfloat16)
    expected = {
        part: value
        for name, weight in whole.named_parameters()
        for part, value in FAMILIES[family].engine_names(name, weight.detach())
    }
    assert list(sent) == list(expected)
    assert all(torch.equal(sent[name], value) for name, value in expected.items())
    n_weights = len(dict(whole.named_parameters()))
    assert sum(read) == n_weights and max(read) < n_weights / 2
