"""The mesh of the trainer's ranks: assign trajectories to them, and shard models over them.

With expert parallelism the ranks that share the weights are also `expert_shard` × `expert`: ranks
of one `expert` group, neighbours by number, have all experts between them, e whole experts each.
FSDP2 shards these e over the `expert_shard` ranks that have the same ones, in the unit of their
layer, so that a layer's forward gathers a rank's own experts and no others.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from rlinf_vl.actor import expert_sharding
from rlinf_vl.config.schema import FsdpConfig
from rlinf_vl.models import shards
from rlinf_vl.models.context import ContextRanks
from rlinf_vl.models.family import submodules
from rlinf_vl.models.loading import DTYPES
from rlinf_vl.models.nf4 import is_quantized
from rlinf_vl.models.policy import PolicyModel, is_trained
from rlinf_vl.transport.rendezvous import TIMEOUT, Store

#: Parameters up to which a model is one FSDP unit: gathering it at once takes less memory than
#: anything else, and less time than a round trip for each block.
ONE_UNIT = 2**24
#: Bytes of whole weights that `whole_tensors` gathers at once.
GATHERED_BYTES = 2**27


def join_ranks(device: str, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
    """Make the process group of all ranks, which meet in `store`; a single rank needs none.

    Collective.
    """
    if device == "cuda":
        torch.cuda.set_device(0)  # a rank's process sees its own GPU only
    dist.init_process_group(
        # Ranks with GPUs also reduce counts, which are CPU tensors.
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=store or dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
    )


@dataclass(frozen=True, slots=True)
class Mesh:
    """The arrangement of the ranks of the process group.

    Attributes:
        ranks: dimensions `data` (ranks with trajectories of their own) and `context` (ranks that
            share each trajectory).
        sharding: all ranks, as FSDP2 shards over them: `shard`, or `replicate` × `shard` where each
            row has whole weights.
        experts: all ranks, as stacked experts are sharded over them: `expert_shard` × `expert`,
            after `replicate` where `sharding` has it. None without expert parallelism.
    """

    ranks: DeviceMesh
    sharding: DeviceMesh
    experts: DeviceMesh | None = None

    @classmethod
    def make(
        cls, device: str, *, context: int = 1, shard: int | None = None, experts: int = 1
    ) -> "Mesh":
        """Arrange all ranks: neighbours by number share trajectories and weights. Collective.

        Args:
            device: "cpu" or "cuda".
            context: number of ranks that share each trajectory.
            shard: number of ranks that share the weights; None: all.
            experts: number of ranks that share out the experts of a mixture.
        """
        size = dist.get_world_size()
        replicas = size // (shard or size)
        ranks = init_device_mesh(
            device, (size // context, context), mesh_dim_names=("data", "context")
        )
        if replicas > 1:
            names = ("replicate", "shard")
            sharding = init_device_mesh(device, (replicas, size // replicas), mesh_dim_names=names)
        else:
            sharding = init_device_mesh(device, (size,), mesh_dim_names=("shard",))
        if experts == 1:
            return cls(ranks, sharding)
        shape, names = (size // replicas // experts, experts), ("expert_shard", "expert")
        if replicas > 1:
            shape, names = (replicas, *shape), ("replicate", *names)
        return cls(ranks, sharding, init_device_mesh(device, shape, mesh_dim_names=names))

    @property
    def device(self) -> str:
        return self.ranks.device_type

    @property
    def shards_weights(self) -> bool:
        """Whether a rank has only a part of each weight."""
        return self.sharding.size(-1) > 1

    @property
    def size(self) -> int:
        """Number of ranks in all dimensions, over which FSDP2 averages gradients."""
        return self.ranks.size()

    @property
    def data_rank(self) -> int:
        """The number of this rank's share of a step's trajectories."""
        return self.ranks.get_local_rank("data")

    @property
    def context_ranks(self) -> ContextRanks | None:
        """The ranks that share this rank's trajectories; None if it has them alone."""
        dimension = self.ranks["context"]
        if dimension.size() == 1:
            return None
        return ContextRanks(dimension.get_group(), dimension.get_local_rank(), dimension.size())

    @property
    def reports(self) -> bool:
        """Whether this rank reports for all ranks that share its trajectories; one of them does."""
        return self.ranks.get_local_rank("context") == 0

    def gathers_once(self, settings: FsdpConfig) -> bool:
        """Return whether weights stay gathered through all micro-batches of an optimizer step.

        Gradients are then reduced after the last micro-batch only. A single rank always does so: it
        has nothing to free.
        """
        return self.size == 1 or not settings.reshard_after_forward

    def shard(self, policy: PolicyModel, settings: FsdpConfig) -> PolicyModel:
        """Shard parameters in the FSDP units of the model's family, and one for the rest.

        A small model (`ONE_UNIT`) is one unit. `policy` is on the CPU. The weights that it has in
        `PolicyModel.shards` go to the mesh's device as they are. FSDP2 moves each unit of the
        others there when it shards it, and drops the whole unit then: beside the shards, a device
        has one whole unit at most. With `cpu_offload` shards are in host memory.

        Master weights stay in their dtype (float32); units compute in `param_dtype`; gradients are
        reduced in `reduce_dtype`. Quantized weights stay whole, and those of
        `Family.float32_weights`: a unit computes in one dtype. A single rank on a CPU has all
        weights whole if FSDP2 would not cast them: its hooks take a fifth of a small model's step.
        """
        unsharded_weights = self._whole_weights(policy, settings)
        shards.drop_memory(policy.model, policy.shards)
        # FSDP2 ignores these, so it does not move them either.
        unsharded = set(map(id, unsharded_weights))
        policy._apply(lambda value: value.to(self.device) if id(value) in unsharded else value)
        options: dict[str, Any] = {
            "mesh": self.sharding,
            "reshard_after_forward": not self.gathers_once(settings),
            "mp_policy": fsdp.MixedPrecisionPolicy(
                param_dtype=DTYPES[settings.mixed_precision.param_dtype],
                reduce_dtype=DTYPES[settings.mixed_precision.reduce_dtype],
                # Every layer computes in its weights' dtype by itself. A cast here would round
                # what is float32 on purpose, as in the engine: the vision blocks' rotary tables.
                cast_forward_inputs=False,
            ),
            "ignored_params": set(unsharded_weights),
            "offload_policy": fsdp.CPUOffloadPolicy()
            if settings.cpu_offload
            else fsdp.OffloadPolicy(),
        }
        shared_out = self.experts
        if shared_out is not None and not expert_sharding.can_share(policy, shared_out):
            shared_out = None
        if shared_out is not None:
            options["shard_placement_fn"] = expert_sharding.fsdp_placement(shared_out)
        small = sum(p.numel() for p in policy.parameters()) <= ONE_UNIT
        paths = () if small else policy.family.fsdp_units
        units: list[nn.Module] = []
        for path in paths:
            units += submodules(policy.model, path)
        for unit in units:
            unit_options = options
            # FSDP2 fails on gradients to reduce, in another dtype, of a unit that never ran.
            if not is_trained(unit):
                unit_options = options | {
                    "mp_policy": replace(options["mp_policy"], reduce_dtype=None)
                }
            if shared_out is not None:
                expert_sharding.share_out(policy, unit, shared_out)
            fsdp.fully_shard(unit, **unit_options)
        if shared_out is not None:
            expert_sharding.share_out(policy, policy, shared_out)
        options["reshard_after_forward"] = False  # backward starts with the root's weights
        fsdp.fully_shard(policy, **options)
        fsdp.register_fsdp_forward_method(policy, "encode")
        if policy.shards:
            shards.put_in_place(
                policy.model, policy.shards, "cpu" if settings.cpu_offload else self.device
            )
            policy._apply(lambda value: value)  # FSDP2 takes note of new parameters then
        return policy

    def _whole_weights(self, policy: PolicyModel, settings: FsdpConfig) -> list[nn.Parameter]:
        """Return the parameters that every rank has whole, outside of FSDP2."""
        named = list(policy.model.named_parameters())
        precision = settings.mixed_precision
        casts = {precision.param_dtype, precision.reduce_dtype} != {"fp32"}
        is_float32 = not casts and all(p.dtype == torch.float32 for _, p in named)
        if self.size == 1 and self.device == "cpu" and is_float32 and not settings.cpu_offload:
            return [p for _, p in named]
        return [p for name, p in named if is_quantized(p) or policy.family.stays_float32(name)]

    def average_gradients(self, weights: Sequence[nn.Parameter]) -> None:
        """Average the gradients of weights that FSDP2 leaves whole over all ranks.

        FSDP2 does so for those that it shards. Collective: every rank names the same weights.
        """
        if not weights or self.size == 1:
            return
        # A rank whose micro-batches did not use a weight has no gradient of it.
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        summed = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(summed)
        summed /= self.size
        for weight, part in zip(weights, summed.split([w.numel() for w in weights]), strict=True):
            weight.grad = part.view_as(weight)


def reduce_in_backward(policy: Any, reduce: bool) -> None:
    """Let the next backward reduce gradients and reshard weights, or leave both to a later one.

    `policy` is sharded.
    """
    policy.set_requires_gradient_sync(reduce)
    policy.set_reshard_after_backward(reduce)
    policy.set_is_last_backward(reduce)


def reshard_all(policy: nn.Module) -> None:
    """Reshard parameters left unsharded by a no-grad forward: the optimizer steps on the shards."""
    for module in policy.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def whole_tensors(values: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the values by name in order, DTensors whole. Collective; every rank must exhaust it.

    Shards are gathered many at a time: a round trip for each would take longer than its bytes,
    unless they are many. However many ranks there are, the whole weights are bounded.
    """
    pending: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, value in values:
        whole_bytes = value.numel() * value.element_size()
        if pending and (size + whole_bytes > GATHERED_BYTES or value.dtype != pending[0][1].dtype):
            yield from _gathered(pending)
            pending, size = [], 0
        pending.append((name, value))
        size += whole_bytes
    yield from _gathered(pending)


def _gathered(values: Sequence[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield values of one dtype whole, by one collective for all that have the same ranks."""
    by_mesh: dict[DeviceMesh, list[DTensor]] = {}
    for _, value in values:
        if isinstance(value, DTensor) and _has_rows(value):
            by_mesh.setdefault(value.device_mesh, []).append(value)
    gathered = {mesh: iter(_gathered_rows(mesh_values)) for mesh, mesh_values in by_mesh.items()}
    for name, value in values:
        if isinstance(value, DTensor):  # a product of sharded factors may be laid out otherwise
            value = next(gathered[value.device_mesh]) if _has_rows(value) else value.full_tensor()
        yield name, value


def _has_rows(value: DTensor) -> bool:
    """Return whether a rank has consecutive rows of this value, as FSDP2 shards it."""
    return all(p.is_replicate() or getattr(p, "dim", None) == 0 for p in value.placements)


def _gathered_rows(values: Sequence[DTensor]) -> Iterator[torch.Tensor]:
    """Yield each of these values whole; all are sharded by rows over one mesh.

    Rank r of n has rows r·⌈rows/n⌉ … of each. Where two dimensions of the mesh shard, experts are
    divided among the last one first: so the rows of the other are gathered first.
    """
    mesh, placements = values[0].device_mesh, values[0].placements
    sharding = [d for d, placement in enumerate(placements) if not placement.is_replicate()]
    rows = [x.to_local() for x in values]
    for i, dimension in enumerate(sharding):
        n_parts = math.prod(map(mesh.size, sharding[i + 1 :]))  # of which one is gathered now
        totals = [len(x) // n_parts for x in values]
        rows = _gathered_over(rows, totals, mesh.get_group(dimension))
    yield from rows


def _gathered_over(
    rows: Sequence[torch.Tensor], totals: Sequence[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Return for each of `rows` those of all ranks of the group, `totals` rows altogether."""
    n_ranks = dist.get_world_size(group)
    per_rank = [-(-total // n_ranks) for total in totals]
    local_rows = [_padded(x, n).flatten() for x, n in zip(rows, per_rank, strict=True)]
    all_rows = local_rows[0].new_empty(n_ranks * sum(map(len, local_rows)))
    # The second is its name before torch 2.13.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(all_rows, torch.cat(local_rows), group=group)
    parts = all_rows.view(n_ranks, -1).split(list(map(len, local_rows)), dim=1)
    return [
        part.reshape(-1, *x.shape[1:])[:total]
        for part, x, total in zip(parts, rows, totals, strict=True)
    ]


def _padded(local: torch.Tensor, rows: int) -> torch.Tensor:
    """Return this rank's rows, followed by zeros up to `rows`: a collective needs equal sizes."""
    n_missing = rows - len(local)
    return torch.cat([local, local.new_zeros(n_missing, *local.shape[1:])]) if n_missing else local
