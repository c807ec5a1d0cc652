"""The gradient of an optimizer step: its scale, its norm over all ranks, and clipping."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlinf_vl.actor.mesh import Mesh


@torch.no_grad()
def clip_gradient(mesh: Mesh, trained: Sequence[nn.Parameter], max_norm: float) -> float:
    """Scale the gradient of the loss to a norm of at most `max_norm`; return its norm before.

    Collective. FSDP2 has averaged gradients over the ranks that share a weight. Weights that every
    rank has whole are averaged here.
    """
    unsharded = [p for p in trained if not isinstance(p, DTensor)]
    experts = [p for p in trained if isinstance(p, DTensor) and p.device_mesh == mesh.experts]
    alike = [p for p in trained if isinstance(p, DTensor) and p.device_mesh != mesh.experts]
    if not unsharded and not experts:
        norm = nn.utils.clip_grad_norm_(alike, max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    mesh.average_gradients(unsharded)
    _rescale_experts(mesh, experts)
    # torch computes a norm over DTensors of one mesh or over plain tensors, not over both at once.
    norms = [_expert_norm(mesh, experts)] if experts else []
    for params in (unsharded, alike):
        norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # Shards may be in host memory, beside whole weights on the device.
        norms.append(norm.to(mesh.device))
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for params in (unsharded, alike, experts):
        nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return float(norm)


def _rescale_experts(mesh: Mesh, experts: Sequence[nn.Parameter]) -> None:
    """Divide the gradients of experts by the number of ranks that share them out.

    The trainer multiplies the loss by the number of all ranks, over which FSDP2 averages. Those of
    an expert are fewer by this factor: the tokens of the other ranks came to them.
    """
    if experts:
        assert mesh.experts is not None
        gradients = [p.grad.to_local() for p in experts if isinstance(p.grad, DTensor)]
        if gradients:
            torch._foreach_div_(gradients, mesh.experts["expert"].size())  # pyright: ignore[reportPrivateImportUsage]


def _expert_norm(mesh: Mesh, experts: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return the norm of the experts' gradients. Collective."""
    gradients = [p.grad.to_local() for p in experts if isinstance(p.grad, DTensor)]
    square = nn.utils.get_total_norm(gradients).to(mesh.device).square()
    # The ranks that have all weights between them have every expert once, too.
    dist.all_reduce(square, group=mesh.sharding.get_group(mesh.sharding.ndim - 1))
    return square.sqrt()
