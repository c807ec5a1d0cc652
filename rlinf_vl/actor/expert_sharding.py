"""Shard the experts of mixtures over ranks of their own: expert parallelism's part of the mesh.

A stacked weight [E, out, in] becomes this rank's e experts, a DTensor over the dimension `expert`.
FSDP2 shards that over the other dimensions, and knows the whole shape: checkpoints, weight syncs
and optimizers see one weight of E experts. In a forward the weight is a DTensor of e whole experts.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rlinf_vl.errors import RunError
from rlinf_vl.models.experts import STACKED, ExpertRanks, stacked_experts
from rlinf_vl.models.loading import mixtures
from rlinf_vl.models.policy import PolicyModel

KEY = "actor.fsdp_config.expert_parallel_size"


def expert_ranks(mesh: DeviceMesh) -> ExpertRanks:
    """Return the ranks among which this rank's tokens find all experts."""
    dimension = mesh["expert"]
    return ExpertRanks(dimension.get_group(), dimension.get_local_rank(), dimension.size())


def reading_order(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks in the order in which they have the rows of stacked experts.

    This is the mesh with `expert` before `expert_shard`.
    """
    names = list(mesh.mesh_dim_names or ())
    names[-2:] = reversed(names[-2:])
    ranks = mesh.mesh.transpose(-2, -1)
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=tuple(names))


def can_share(policy: PolicyModel, mesh: DeviceMesh) -> bool:
    """Return whether the mixtures of this model compute by ours, and the ranks divide its experts.

    A teacher may be another model than the policy, and is then sharded without expert parallelism.
    """
    mixture = policy.mixture
    n_ranks = mesh["expert"].size()
    return mixture is not None and mixture.experts % n_ranks == 0 and bool(_mixtures(policy))


def check_policy(policy: PolicyModel, mesh: DeviceMesh) -> None:
    """Raise RunError unless expert parallelism can share out the experts of the policy."""
    if can_share(policy, mesh):
        return
    size, model_type = mesh["expert"].size(), policy.family.model_type
    if policy.mixture is None or not _mixtures(policy):
        raise RunError(
            f"{KEY}: {size}, but a {model_type} has no mixture of experts that rlinf_vl computes; "
            "set it 1"
        )
    raise RunError(
        f"{KEY}: {size} does not divide the {policy.mixture.experts} experts of this {model_type}"
    )


def share_out(policy: PolicyModel, module: nn.Module, mesh: DeviceMesh) -> None:
    """Leave in `module`, a part of the policy, only this rank's experts; on the mesh's device."""
    ranks = expert_ranks(mesh)
    for mixture in mixtures(module, policy.family):
        mixture.expert_ranks = ranks
        base, _ = stacked_experts(mixture.experts)
        for name in STACKED:
            weight = getattr(base, name)
            if isinstance(weight, DTensor):  # shared out with its layer
                continue
            rows = weight.data.chunk(ranks.size)[ranks.rank]
            # A copy, so that the memory of the whole weight is free.
            rows = rows if rows.is_meta else rows.to(mesh.device_type, copy=True)
            shard = DTensor.from_local(rows, mesh["expert"], [Shard(0)], run_check=False)
            setattr(base, name, nn.Parameter(shard, requires_grad=weight.requires_grad))


def fsdp_placement(mesh: DeviceMesh) -> Any:
    """Return FSDP2's `shard_placement_fn` that shards DTensors over the mesh's other dimensions."""
    try:
        # The ranks of single parameters have these names in PyTorch 2.12 and later.
        from torch.distributed.fsdp._fully_shard._fsdp_common import (
            FSDPMeshInfo,
            HSDPMeshInfo,
            ShardPlacementResult,
        )
    except ImportError:
        raise RunError(
            f"{KEY}: needs PyTorch 2.12 or later, whose FSDP2 shards single weights over other "
            f"ranks, and this is {torch.__version__}; update torch, or set it 1"
        ) from None
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "expert")
    info = (
        FSDPMeshInfo(mesh[names], shard_mesh_dim=0)
        if len(names) == 1
        else HSDPMeshInfo(mesh[names], shard_mesh_dim=1, replicate_mesh_dim=0)
    )
    placement = ShardPlacementResult(Shard(0), info)
    return lambda weight: placement if isinstance(weight, DTensor) else None


def _mixtures(policy: PolicyModel) -> list[Any]:
    return mixtures(policy.model, policy.family)
