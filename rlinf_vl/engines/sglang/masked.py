"""What SGLang's scheduler calls to write some values of weights: it loads weights that are NaN wherever nothing changes.

SGLang fuses and cuts weights while it loads them. What it makes of a NaN is a NaN, so that whatever it copies into the model has
the new values at their places, and the others are left out of the copy. Only copies into the model's own weights are changed.
"""

import json
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf_vl.transport.buckets import Entry, Label

#: By which SGLang finds `load` (its server argument custom_weight_loader).
LOADER = f"{__name__}.load"


def message(entries: tuple[Entry, ...], flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Weights end to end, uint8, as one of the named tensors that SGLang passes on to `load`."""
    return [(json.dumps(entries), flat)]


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    ((entries, flat),) = named_tensors
    label = Label(entries=tuple((name, dtype, tuple(shape)) for name, dtype, shape in json.loads(entries)))
    with _Masked(model):
        model.load_weights(list(label.views(flat).items()))


class _Masked(TorchDispatchMode):
    """Copies into a model's weights leave out what is NaN."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        held = [*model.parameters(), *model.buffers()]
        self._own = {value.untyped_storage().data_ptr() for value in held}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].untyped_storage().data_ptr() in self._own:
            target, source = args[0], args[1].to(args[0].device)
            args = target, torch.where(source.isnan(), target, source.to(target.dtype)), *args[2:]
        return func(*args, **(kwargs or {}))
