"""Reading a checkpoint a few weights at a time, each as transformers reads it.

transformers fills the parameters that a model has. So a model is made without weights, all its
parameters but a few are taken away, and transformers reads and converts those few. Beside them
nothing of the checkpoint is in memory.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from rlinf_vl.models.family import Family
from rlinf_vl.models.loading import load_model

#: Bytes of weights that are read together. Making the model takes most of the time that reading a
#: small group needs; a block of layers is never divided.
GROUP_BYTES = 2**28


class RemovedParameter(NamedTuple):
    """A parameter that was taken away, with its module and its name there."""

    module: nn.Module
    name: str
    weight: nn.Parameter


def load_skeleton(
    path: str | Path, family: Family, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return the model that `load_model` returns, with parameters on the device `meta`.

    Buffers that checkpoints have are read; others are not computed.
    """
    removed: list[RemovedParameter] = []

    def remove(model: PreTrainedModel) -> None:
        # transformers ties weights only where the stored ones are equal, so these are read.
        removed.extend(keep_parameters(model, _tied(model).__contains__))

    model = load_model(path, family, dtype, trust_remote_code=trust_remote_code, prepare=remove)
    restore_parameters(removed)

    def on_meta(name: str, weight: nn.Parameter) -> nn.Parameter:
        stored_dtype = torch.float32 if family.stays_float32(name) else dtype
        empty = torch.empty(weight.shape, dtype=stored_dtype, device="meta")
        return nn.Parameter(empty, requires_grad=weight.requires_grad)

    replace_parameters(model, on_meta)
    return model


def load_weights(
    path: str | Path,
    family: Family,
    dtype: torch.dtype,
    names: Collection[str],
    *,
    trust_remote_code: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the weights of these names, as `load_model` reads them, and read no others.

    Raises:
        ValueError: as `load_model`.
    """

    def remove(model: PreTrainedModel) -> None:
        # A checkpoint may have a tied weight by any of its names.
        tied = _tied(model)
        if tied.isdisjoint(names):
            model.all_tied_weights_keys = {}
            tied.clear()
        keep_parameters(model, tied.union(names).__contains__)

    model = load_model(path, family, dtype, trust_remote_code=trust_remote_code, prepare=remove)
    return {name: model.get_parameter(name).detach() for name in names}


def weight_groups(model: nn.Module, family: Family) -> list[list[str]]:
    """Return the names of all parameters, in order, in groups that can be read and written alone.

    A group has whole blocks of layers. It exceeds `GROUP_BYTES` only if one block or weight does.
    """
    groups: list[list[str]] = []
    group_bytes = 0
    for _, named in groupby(model.named_parameters(), key=lambda pair: _block_of(pair[0], family)):
        weights = dict(named)
        block_bytes = sum(weight.nbytes for weight in weights.values())
        if not groups or group_bytes + block_bytes > GROUP_BYTES:
            groups.append([])
            group_bytes = 0
        groups[-1].extend(weights)
        group_bytes += block_bytes
    return groups


def replace_parameters(
    model: nn.Module, replacement: Callable[[str, nn.Parameter], nn.Parameter]
) -> None:
    """Replace every parameter by that of `replacement(name, parameter)`, also where it is tied.

    The memory of one is free before the next is replaced.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            owners.setdefault(id(weight), []).append((module, name))
    for name in [name for name, _ in model.named_parameters()]:
        old = model.get_parameter(name)
        new = replacement(name, old)
        for module, attribute in owners[id(old)]:
            setattr(module, attribute, new)


def keep_parameters(
    model: PreTrainedModel, is_kept: Callable[[str], bool]
) -> list[RemovedParameter]:
    """Take the other parameters away from a model without weights, and return them."""
    removed: list[RemovedParameter] = []
    for path, module in model.named_modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if not is_kept(f"{path}.{name}" if path else name):
                module._parameters[name] = None
                removed.append(RemovedParameter(module, name, weight))
    if removed:  # a weight that is not read is no mistake of the checkpoint
        model._keys_to_ignore_on_load_unexpected = {""}
    changed = {id(parameter.module) for parameter in removed}
    for module in model.modules():
        # transformers initialises what it has not read, by modules, which may do it for others
        # inside of them.
        if any(id(inner) in changed for inner in module.modules()):
            module._is_hf_initialized = True  # pyright: ignore[reportArgumentType]
    return removed


def restore_parameters(removed: Sequence[RemovedParameter]) -> None:
    """Give parameters back to their modules, without weights as they were."""
    for module, name, weight in removed:
        module._parameters[name] = weight


def _block_of(name: str, family: Family) -> str:
    """Return the path of the block of layers that has a parameter; its own name outside of any."""
    for path in (family.text_blocks, family.vision_blocks):
        if path is not None and name.startswith(f"{path}."):
            number, _, _ = name.removeprefix(f"{path}.").partition(".")
            return f"{path}.{number}"
    return name


def _tied(model: PreTrainedModel) -> set[str]:
    """Return the names of parameters that a model without weights may tie to each other."""
    return {name for pair in model.all_tied_weights_keys.items() for name in pair}
