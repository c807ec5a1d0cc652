"""The path "sglang" of `prove-family`: members of the general path and planted faults on the real SGLang engine.

Each engine takes half a minute to start.
"""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from rlinf_vl.models.certificates import certificates, proven_wrong
from rlinf_vl.models.families import family_at
from rlinf_vl.models.image_tokens import mrope_positions
from rlinf_vl.prove.certificate import outcomes_of
from rlinf_vl.prove.member import member_of
from rlinf_vl.prove.proofs import Proofs

pytestmark = pytest.mark.integration


def outcome_of(member):
    (outcome,) = outcomes_of(Proofs(member), "sglang".__eq__)
    return outcome


def member(name, folder):
    config = AutoConfig.for_model(name)
    return member_of(family_at(config), config, folder)


@pytest.mark.quick("qwen2_vl", "idefics3")
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


@pytest.mark.slow
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


def test_certificates_name_sglang():
    for name, certificate in certificates().items():
        assert "sglang" in certificate.order and not proven_wrong(name)
