"""docs/models.md tells the truth about families that are not supported."""

import re
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlinf_vl.models.families import FAMILIES, family_at
from rlinf_vl.tools.check.certificates import certificates

DOCS = Path(__file__).resolve().parents[3] / "docs"

#: Name in docs/models.md → model type, the refusal.
REFUSED = {
    "Cohere2": (
        "cohere2_vision",
        "changes its logits \\(logit_scale: 0.0625\\), which is not supported",
    ),
    "PaliGemma": (
        "paligemma",
        "tokens of model.language_model attend to all later ones",
    ),
    "ERNIE 4.5": ("ernie4_5_vl_moe", "computes image tokens by weights of their own"),
    "LLaVA-NeXT": (
        "llava_next",
        "encodes images by pixel_values, image_sizes; only patches with their",
    ),
    "LLaVA-OneVision": ("llava_onevision", "by pixel_values, image_sizes; only patches"),
    "Mistral 3": ("mistral3", "encodes images by pixel_values, image_sizes; only patches"),
    "Llama 3.2 Vision": ("mllama", "MllamaModel has no get_image_features"),
}


def test_the_page_names_the_families_that_are_refused():
    text = " ".join((DOCS / "models.md").read_text(encoding="utf-8").split())
    (sentence,) = re.findall(r"The rest is \*\*refused\*\* (.+?)\. It runs", text)
    names = re.findall(r"\(([^)]+)\)", sentence)
    assert {name for part in names for name in part.split(", ")} == set(REFUSED)


@pytest.mark.parametrize(("model_type", "said"), REFUSED.values(), ids=REFUSED)
def test_a_family_that_is_said_to_be_refused_is(model_type: str, said: str):
    assert model_type not in FAMILIES
    config = CONFIG_MAPPING[model_type]()
    text = config.get_text_config()
    text.num_hidden_layers = 2
    with pytest.raises(ValueError, match=said):
        family_at(config)


def test_the_page_has_a_row_for_each_certificate():
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "models.md").read_text(encoding="utf-8"), re.M)
    assert sorted(rows) == sorted({*FAMILIES, *certificates()})
