"""A weight loader for SGLang's scheduler that changes some values of weights: those that are not
NaN.

SGLang fuses and splits weights while it loads them. A NaN stays a NaN on that way, so each copy
into the model has the new values at their places, and NaN marks the values to leave as they are.
Only copies into the model's own weights are changed.
"""

import json
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf_vl.weights.buckets import Entry, Label

#: The path by which SGLang finds `load` (its server argument custom_weight_loader).
LOADER = f"{__name__}.load"


def message(entries: tuple[Entry, ...], flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the message that SGLang passes on to `load`: one named tensor.

    SGLang sends names and tensors only, so the name carries the entries as JSON. `flat`: the
        weights
    end to end, uint8.
    """
    return [(json.dumps(entries), flat)]


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load the weights of a `message` into the model, leaving its values wherever they are NaN."""
    ((entries, flat),) = named_tensors
    label = Label(
        entries=tuple((name, dtype, tuple(shape)) for name, dtype, shape in json.loads(entries))
    )
    load_masked(model, list(label.views(flat).items()))


def load_masked(model: Any, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Load weights into the model, leaving its values wherever they are NaN."""
    with _Masked(model):
        model.load_weights(weights)


class _Masked(TorchDispatchMode):
    """A mode in which copies into a model's weights and buffers leave out NaN values."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        tensors = [*model.parameters(), *model.buffers()]
        # By storage, because SGLang copies into views of its fused weights.
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is torch.ops.aten.copy_.default
            and args[0].untyped_storage().data_ptr() in self._storages
        ):
            target, source = args[0], args[1].to(args[0].device)
            merged = torch.where(source.isnan(), target, source.to(target.dtype))
            return func(target, merged, *args[2:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))
