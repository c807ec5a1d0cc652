"""The path "sglang" of `prove-family`: members of the general path and planted faults on the real SGLang engine.

Each engine takes half a minute to start.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sglang_toy import Toy, engine_of
from tiny_tiles import write_internvl
from transformers import AutoConfig

from rlinf_vl.models.encoders import squares
from rlinf_vl.models.families import family_at, family_of
from rlinf_vl.models.image_tokens import mrope_positions
from rlinf_vl.tools.check.certificates import certificates, proven_wrong
from rlinf_vl.tools.verify.prove.certificate import outcomes_of
from rlinf_vl.tools.verify.prove.main import RELEASED
from rlinf_vl.tools.verify.prove.member import member_of
from rlinf_vl.tools.verify.prove.proofs import Proofs

pytestmark = pytest.mark.integration


def outcome_of(member):
    (outcome,) = outcomes_of(Proofs(member), "sglang".__eq__)
    return outcome


def member(name, folder):
    config = AutoConfig.for_model(name, **RELEASED.get(name, {}))
    return member_of(family_at(config), config, folder)


@pytest.mark.sample("qwen2_vl", "idefics3")
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_vl", "internvl", "idefics3", "cosmos3_omni"])
def test_a_member_on_sglang_is_proven(name, tmp_path):
    """Grids with M-RoPE, tiles, marks between tiles, deepstack; before a sync of other weights and after it."""
    outcome = outcome_of(member(name, tmp_path))
    assert outcome.status == "proven", outcome
    before, after = outcome.figures
    assert 0 < max(before, after) <= outcome.limit == 1e-5


def test_a_delta_net_is_refused(tmp_path):
    outcome = outcome_of(member("qwen3_5", tmp_path))
    assert outcome.status == "refused" and "need a GPU" in outcome.reason


@pytest.mark.parametrize("fault", ["positions", "lost weight", "stale features"])
def test_a_planted_fault_is_found(fault, tmp_path, monkeypatch):
    sound = member("qwen2_vl", tmp_path)
    changes = {}
    if fault == "positions":  # height and width swapped
        changes = {"positions": lambda *a: mrope_positions(*a)[[0, 1, 3, 2]]}
    elif fault == "lost weight":
        changes = {"engine_names": without_gates}
    else:  # the same identity whatever the tower's weights
        monkeypatch.setattr(
            "rlinf_vl.engines.sglang.messages._identity", lambda text: constant(text)
        )
    outcome = outcome_of(replace(sound, family=replace(sound.family, **changes)))
    assert outcome.status == "wrong", outcome
    if fault == "stale features":
        assert outcome.figures[0] <= outcome.limit < outcome.figures[1]


def without_gates(name: str, weight: torch.Tensor):
    return () if name.endswith("mlp.gate_proj.weight") else ((name, weight),)


def constant(text: str) -> bytes:
    """The identity of an image without the tower's version, which ends the text."""
    return text.rpartition(" ")[0].encode()[:32].ljust(32)


@pytest.mark.parametrize("name", ["internvl"])
def test_a_checkpoint_with_files_of_its_own_runs(name, tmp_path):
    """Its tokenizer, template and processor, loaded by SGLang as well; one picture of one tile, one of several."""
    folder = write_internvl(tmp_path / name)
    toy = Toy(folder, family_of("auto", folder), make=lambda path: None)
    rng = np.random.default_rng(0)
    pictures = toy.image(rng, (47, 50)), toy.image(rng, (60, 170))
    engine = engine_of(toy, context_length=256)
    try:
        requests = [toy.request(pictures, 3), toy.request((), 2)]
        completions = engine.generate(requests)
    finally:
        engine.close()
    for request, completion in zip(requests, completions, strict=True):
        for sample in completion.samples:
            ids = torch.from_numpy(np.concatenate([request.ids, sample.ids]).astype(np.int64))
            pixels = [torch.from_numpy(toy.pixels(image)) for image in request.images]
            inputs = {"pixel_values": squares(torch.cat(pixels))} if pixels else {}
            with torch.no_grad():
                logits = toy.model(input_ids=ids[None], **inputs).logits[0].float()
            logits[:, torch.from_numpy(toy.banned)] = -torch.inf
            rows = len(request.ids) - 1 + torch.arange(len(sample.ids))
            sampled = torch.from_numpy(sample.ids.astype(np.int64))
            expected = logits[rows].log_softmax(-1)[torch.arange(len(sampled)), sampled]
            np.testing.assert_allclose(sample.logprobs, expected.numpy(), atol=1e-5)


def test_certificates_name_sglang():
    for name, certificate in certificates().items():
        assert "sglang" in certificate.order and not proven_wrong(name)
