"""docs/kept_activations.json by its effect: bytes that each mode keeps for backward, and forwards of a block, in every family and
with the versions of transformers that it was measured with. A version that bypasses checkpointing keeps other bytes."""

import importlib.util
import re
from pathlib import Path

import pytest
import transformers

from rlinf_vl.models.families import FAMILIES
from rlinf_vl.models.recompute import MODES

PATH = Path(__file__).resolve().parents[3] / "docs/generate_kept_activations.py"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate_kept_activations", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_modes_keep_what_the_file_says(family, generator):
    """Real tensors and the ledger's trace agree with each other, and with the file where it has this version."""
    found = {mode: generator.measured_family(family, mode) for mode in MODES}
    assert found == {mode: generator.measured_family(family, mode, meta=True) for mode in MODES}
    versions = generator.read()["versions"]
    if transformers.__version__ in versions:
        assert found == versions[transformers.__version__][family]


def test_every_version_recomputes_and_keeps_less(generator):
    versions = generator.read()["versions"]
    assert len(versions) >= 3
    for families in versions.values():
        assert families.keys() == FAMILIES.keys()
        for modes in families.values():
            assert [modes[mode]["forwards"] for mode in MODES] == [1, 2, 2, 2]
            none, selective, mlp, full = (modes[mode]["bytes"] for mode in MODES)
            assert none > selective >= mlp > full > 0


def test_the_page_shows_the_file(generator):
    page = PATH.with_name("memory.md").read_text(encoding="utf-8")
    assert page.endswith(re.sub(r"\n{3,}", "\n\n", generator.render()))
