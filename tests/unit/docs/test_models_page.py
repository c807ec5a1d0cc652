"""docs/models.md tells the truth about families that are not supported."""

import re
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlinf_vl.models.families import FAMILIES, family_at

DOCS = Path(__file__).resolve().parents[3] / "docs"

#: Name in docs/models.md → model type, path of the tower and of the text model in transformers.
REFUSED = {
    "Gemma 3": ("gemma3", "model.vision_tower", "model.language_model"),
    "PaliGemma": ("paligemma", "model.vision_tower", "model.language_model"),
    "LLaVA": ("llava", "model.vision_tower", "model.language_model"),
    "LLaVA-OneVision": ("llava_onevision", "model.vision_tower", "model.language_model"),
    "InternVL": ("internvl", "model.vision_tower", "model.language_model"),
    "Idefics 3": ("idefics3", "model.vision_model", "model.text_model"),
    "SmolVLM": ("smolvlm", "model.vision_model", "model.text_model"),
    "Mistral 3": ("mistral3", "model.vision_tower", "model.language_model"),
    "Llama 3.2 Vision": ("mllama", "model.vision_model", "model.language_model"),
}


def test_the_page_names_the_families_that_are_refused():
    text = " ".join((DOCS / "models.md").read_text(encoding="utf-8").split())
    (names,) = re.findall(r"\*\*Refused\*\*, whatever the config says: (.+?)\. Their towers", text)
    assert names.split(", ") == list(REFUSED)


@pytest.mark.parametrize(("model_type", "tower", "text_model"), REFUSED.values(), ids=REFUSED)
def test_a_family_that_is_said_to_be_refused_is(model_type: str, tower: str, text_model: str):
    assert model_type not in FAMILIES
    with pytest.raises(ValueError, match="only towers that take patches and grid_thw"):
        family_at(CONFIG_MAPPING[model_type](), (tower, text_model))
