"""Reading a rank's shards of a checkpoint, and nothing else of it.

transformers reads of a weight that is a DTensor only the rows of this rank. So a model is made
without weights, its parameters are declared to be DTensors, and transformers fills them. FSDP2
takes plain parameters: `load_shards` returns the model with weightless parameters and the shards
beside it, and `put_in_place` gives them to the model once FSDP2 has sharded it.

A weight that transformers computes of several stored ones, in a manner that mixes the rows of
different ranks, is read whole with its block of layers, and its shard is cut out of it before the
next block is read.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from rlinf_vl.models.experts import STACKED
from rlinf_vl.models.family import Family
from rlinf_vl.models.loading import load_model, mixtures
from rlinf_vl.models.lora import unwrapped_name
from rlinf_vl.models.partial import (
    RemovedParameter,
    keep_parameters,
    load_weights,
    replace_parameters,
    restore_parameters,
    weight_groups,
)

#: By name, the weights of which this rank has the rows that FSDP2 gives it.
Shards = dict[str, DTensor]


def load_shards(
    path: str | Path,
    family: Family,
    dtype: torch.dtype,
    mesh: DeviceMesh,
    *,
    experts: DeviceMesh | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, Shards]:
    """Read this rank's rows of each weight into host memory.

    Args:
        mesh: FSDP2's: its last dimension shards, one before it replicates.
        experts: the ranks that share out the experts of mixtures, dimensions `expert` and
            `expert_shard`, and one before them replicates.

    Returns:
        The model as `load_model` makes it, with parameters that have shapes and no memory, but for
        `Family.float32_weights`, which every rank has whole; and the shards by name.

    Raises:
        ValueError: as `load_model`.
    """
    shards: Shards = {}
    mixing: list[list[str]] = []
    removed: list[RemovedParameter] = []
    shared_out = set[str]()

    def mesh_of(name: str) -> DeviceMesh:
        return experts if experts is not None and name in shared_out else mesh

    def declare(model: PreTrainedModel) -> None:
        if experts is not None:
            shared_out.update(_stacked(model, family, experts["expert"].size()))
        converted, mixing_names = _converted(model)
        for names in weight_groups(model, family):
            mixing.append([name for name in names if name in mixing_names])
        removed.extend(keep_parameters(model, lambda name: name not in mixing_names))

        def declared(name: str, weight: nn.Parameter) -> nn.Parameter:
            if family.stays_float32(name):
                return weight
            shard = _sharded(weight, mesh_of(name))
            return nn.Parameter(shard, requires_grad=weight.requires_grad)

        replace_parameters(model, declared)
        # transformers tells by a parameter's shape whether to transpose what it has read, which
        # has the rows of this rank only.
        get_parameter = model.get_parameter

        def rows_of_converted(target: str) -> Any:
            return _local(get_parameter(target)) if target in converted else get_parameter(target)

        model.get_parameter = rows_of_converted

    model = load_model(path, family, dtype, trust_remote_code=trust_remote_code, prepare=declare)
    del model.get_parameter  # the class has its own
    restore_parameters(removed)
    for names in filter(None, mixing):
        weights = load_weights(path, family, dtype, names, trust_remote_code=trust_remote_code)
        shards |= {name: _sharded(weights.pop(name), mesh_of(name)) for name in names}

    def emptied(name: str, weight: nn.Parameter) -> nn.Parameter:
        if family.stays_float32(name):
            return nn.Parameter(weight.data.clone(), requires_grad=weight.requires_grad)
        if name not in shards:
            shard = weight.data
            assert isinstance(shard, DTensor), f"{name} was read whole"
            shards[name] = _with_memory(shard)
        empty = torch.empty((), dtype=shards[name].dtype).expand(weight.shape)
        return nn.Parameter(empty, requires_grad=weight.requires_grad)

    replace_parameters(model, emptied)
    return model, shards


def drop_memory(model: nn.Module, shards: Collection[str]) -> None:
    """Move the parameters of these names to the device `meta`: FSDP2 then moves no bytes of them.

    `load_shards` leaves them on the CPU, where adapters are made beside them.
    """

    def on_meta(name: str, weight: nn.Parameter) -> nn.Parameter:
        if unwrapped_name(name) not in shards:
            return weight
        return nn.Parameter(weight.data.to("meta"), requires_grad=weight.requires_grad)

    replace_parameters(model, on_meta)


def put_in_place(model: nn.Module, shards: Shards, device: str) -> None:
    """Move the shards to `device` and into a model that FSDP2 has sharded; `shards` is emptied."""

    def filled(name: str, weight: nn.Parameter) -> nn.Parameter:
        shard = shards.pop(unwrapped_name(name), None)
        if shard is None:
            return weight
        # FSDP2 names the ranks of experts in another order.
        assert isinstance(weight, DTensor)
        value = _as_dtensor(
            shard.to_local().to(device), shard.shape, weight.device_mesh, weight.placements
        )
        return nn.Parameter(value, requires_grad=weight.requires_grad)

    replace_parameters(model, filled)
    assert not shards, f"the model has no weight for {', '.join(sorted(shards))}"


def _stacked(model: PreTrainedModel, family: Family, n_ranks: int) -> set[str]:
    """Return the names of stacked experts that so many ranks can share out equally."""
    modules = {mixture.experts for mixture in mixtures(model, family)}
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if module in modules
        for name, weight in module.named_parameters(recurse=False)
        if name in STACKED and len(weight) % n_ranks == 0
    }


def _converted(model: PreTrainedModel) -> tuple[set[str], set[str]]:
    """Return the names of weights that transformers makes of stored ones by operations; and of
    those among them whose rows follow from more than the same stored rows.

    Not among the latter are experts, [experts, out, in], that are stored one by one, side by side
    or transposed: a row is a whole expert.
    """
    converted, mixing = set[str](), set[str]()
    for converter in get_model_conversion_mapping(model):
        if not isinstance(converter, WeightConverter):
            continue
        keeps_experts = all(map(_keeps_experts, converter.operations))
        # A converter's own matching is by the stored names.
        target = re.compile(
            "|".join(p.replace("*", ".*").replace(r"\1", ".*") for p in converter.target_patterns)
        )
        for name, weight in model.named_parameters():
            if target.search(name):
                converted.add(name)
                if not (keeps_experts and weight.ndim == 3):
                    mixing.add(name)
    return converted, mixing


def _keeps_experts(operation: Any) -> bool:
    """Return whether an operation on stacked experts leaves each one in its place."""
    match operation:
        case MergeModulelist():
            return operation.dim == 0
        case Concatenate():
            return operation.dim != 0
        case Transpose():
            return 0 not in (operation.dim0, operation.dim1)
    return False


def _local(weight: nn.Parameter) -> Any:
    """Return this rank's rows of a weight; the weight where all ranks have it."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _sharded(weight: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the weight as the DTensor of this rank's rows, a copy, on the weight's device."""
    placements = _placements(mesh)
    start, end = 0, len(weight)
    for dimension, placement in enumerate(placements):
        if placement.is_shard():
            # As `torch.chunk` divides: ⌈rows / ranks⌉ each, less for the last ones.
            n_rows = -(-(end - start) // mesh.size(dimension))
            start = min(start + mesh.get_local_rank(dimension) * n_rows, end)
            end = min(start + n_rows, end)
    return _as_dtensor(weight[start:end].clone(), weight.shape, mesh, placements)


def _as_dtensor(
    rows: torch.Tensor, shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    """Return a rank's rows as the DTensor of a weight of this shape."""
    return DTensor.from_local(
        rows,
        mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _placements(mesh: DeviceMesh) -> list[Placement]:
    """Return the placements of rows: `replicate` replicates them, other dimensions shard them."""
    return [Replicate() if name == "replicate" else Shard(0) for name in mesh.mesh_dim_names or ()]


def _with_memory(shard: DTensor) -> DTensor:
    """Return a shard whose rows are alone in their memory: those read may be a view of the file."""
    rows = shard.to_local()
    if rows.untyped_storage().nbytes() == rows.nbytes:
        return shard
    return _as_dtensor(rows.clone(), shard.shape, shard.device_mesh, shard.placements)
