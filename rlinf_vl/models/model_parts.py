"""A model without weights, and its vision tower and text model, by transformers' or given paths."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig

#: Dotted paths of a vision tower and a text model, and the config's keys of them.
Paths = tuple[str, str]
KEYS = "actor.model.vlm.vision_encoder_attr", "actor.model.vlm.language_model_attr"


@dataclass(frozen=True)
class Parts:
    """A model without weights, its vision tower and its text model."""

    model: Any
    tower: Any
    text: Any
    paths: Paths

    @property
    def owner_path(self) -> str:
        """The path of the module that has the tower and the text model."""
        return ".".join(os.path.commonprefix([path.split(".") for path in self.paths]))

    @property
    def owner(self) -> Any:
        """The module at `owner_path`."""
        return self.model.get_submodule(self.owner_path)

    @property
    def tower_text(self) -> str:
        """The key, path and class of the tower, which begin a message about it."""
        return f"{KEYS[0]}: {self.paths[0]} ({type(self.tower).__name__})"


def parts_of(config: PreTrainedConfig, paths: Paths | None, trust_remote_code: bool) -> Parts:
    """Return a model's parts: at these paths, or else those that transformers names.

    Raises:
        ValueError: there is no such model or module, or one module contains the other.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(
                config, trust_remote_code=trust_remote_code, attn_implementation="sdpa"
            )
    except ValueError as error:  # transformers has no such class for this config
        raise ValueError(
            f"{KEYS[0]}: {config.model_type} is no vision-language model of transformers: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error
    except Exception as error:  # a config may break what the model's own code asserts
        raise ValueError(
            f"transformers can't make a {config.model_type} of this config: "
            f"{type(error).__name__}: {error}"
        ) from error
    paths = paths or _named_paths(model)
    tower, text = (_module_at(model, key, path) for key, path in zip(KEYS, paths, strict=True))
    if paths[0].startswith(f"{paths[1]}.") or paths[1].startswith(f"{paths[0]}.") or tower is text:
        raise ValueError(
            f"{KEYS[0]}: {paths[0]!r} and {KEYS[1]}: {paths[1]!r} are not modules apart"
        )
    return Parts(model, tower, text, paths)


def _named_paths(model: Any) -> Paths:
    """Return the paths of the vision tower and the text model that transformers names.

    Raises:
        ValueError: it names none.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    vision_path = paths.get(id(model.get_encoder(modality="image")), "")
    text_path = paths.get(id(model.get_decoder()), "")
    if not vision_path or not text_path:
        raise ValueError(
            f"{type(model).__name__} does not say which module is its vision tower and which its "
            f"text model; name them: {' and '.join(KEYS)}"
        )
    return vision_path, text_path


def _module_at(model: nn.Module, key: str, path: str) -> nn.Module:
    """Return the module at a dotted path.

    Raises:
        ValueError: a segment of the path names no module; the message lists the modules there.
    """
    module, names_so_far = model, []
    for segment in path.split("."):
        submodules = dict(module.named_children())
        if segment not in submodules:
            where = f"{'.'.join(names_so_far) or 'the model'} ({type(module).__name__})"
            raise ValueError(
                f"{key}: {path!r}: {where} has no module {segment!r}; it has "
                f"{', '.join(submodules) or 'none at all'}"
            )
        module = submodules[segment]
        names_so_far.append(segment)
    return module
