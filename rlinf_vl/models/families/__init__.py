"""Model families by `model_type`.

A family is a file here, named by its `model_type`, with a `FAMILY`; nothing else lists it.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from rlinf_vl.models.family import Family
from rlinf_vl.user_code import is_code, load_code

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from rlinf_vl.models.model_parts import Paths

FAMILIES: dict[str, Family] = {
    module.name: import_module(f"{__name__}.{module.name}").FAMILY
    for module in iter_modules(__path__)
}


def family_of(
    model_type: str,
    checkpoint: str | Path = "",
    trust_remote_code: bool = False,
    paths: "Paths | None" = None,
    files: Mapping[str, str] | None = None,
) -> Family:
    """Return the family of `rollout.model.model_type`; for "auto", the one of this checkpoint.

    Args:
        model_type: a name in `FAMILIES`, "auto", or a user's code (`rlinf_vl.user_code`).
        checkpoint: the folder or hub model whose config names the family.
        paths: those of `actor.model.vlm`, see `family_at`.
        files: `runner.code_files`.

    Raises:
        ValueError: the family is unknown; the message names the known ones.
    """
    if is_code(model_type):
        return load_code(model_type, {}, files or {}, kind="model family", signature="Family")
    from transformers import AutoConfig

    if paths is None and model_type in FAMILIES:
        return FAMILIES[model_type]
    if paths is None and model_type != "auto":
        raise ValueError(
            f"rollout.model.model_type: {model_type!r} is not a known family; known: "
            f"{', '.join(FAMILIES)}; auto takes others as transformers computes them"
        )
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    return family_at(config, paths, checkpoint, trust_remote_code)


def family_at(
    config: "PreTrainedConfig",
    paths: "Paths | None" = None,
    checkpoint: str | Path = "",
    trust_remote_code: bool = False,
) -> Family:
    """Return a model's family by its config: the table's, else that of the general path.

    Args:
        paths: of its vision tower and its text model; None for those that the table or transformers
            names.

    Raises:
        ValueError: see `parts_of` and `family_by_path`; or the table has others at these paths.
    """
    from rlinf_vl.models.by_path import family_by_path
    from rlinf_vl.models.model_parts import KEYS, parts_of

    family = FAMILIES.get(config.model_type)
    if family is None:
        parts = parts_of(config, paths, trust_remote_code)
        return family_by_path(config, parts, checkpoint, trust_remote_code)
    if paths is None:
        return family
    parts_of(config, paths, trust_remote_code)  # modules that are not there are named first
    for key, path, family_path in zip(
        KEYS, paths, (family.vision_tower, family.text_model), strict=True
    ):
        if path != family_path:
            raise ValueError(
                f"{key}: {path!r}, but that of {config.model_type} is {family_path!r}; leave "
                f"{' and '.join(KEYS)} out"
            )
    return family
