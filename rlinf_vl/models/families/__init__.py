"""Model families by `model_type`. A new one is a file here with a `FAMILY`, and an entry in `FAMILIES`."""

from pathlib import Path

from transformers import AutoConfig

from rlinf_vl.models.families import qwen2_5_vl, qwen3, qwen3_5, qwen3_vl
from rlinf_vl.models.families.family import DecodeState, Family, ImageProcessor, Mixture, VisionFeatures, submodules

__all__ = [
    "FAMILIES", "DecodeState", "Family", "ImageProcessor", "Mixture", "VisionFeatures", "family_of", "submodules",
]  # fmt: skip

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (qwen3_vl.FAMILY, qwen3_vl.MOE, qwen3_5.FAMILY, qwen3_5.MOE, qwen2_5_vl.FAMILY, qwen3.FAMILY)
}


def family_of(model_type: str, checkpoint: str | Path = "", trust_remote_code: bool = False) -> Family:
    """The family of `rollout.model.model_type`; "auto": of this checkpoint. ValueError names the families there are."""
    if model_type == "auto":
        model_type = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code).model_type
    if model_type not in FAMILIES:
        raise ValueError(
            f"rollout.model.model_type: {model_type!r} is not a known family; known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]
