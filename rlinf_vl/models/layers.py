"""Forwards for the layers of text models and vision towers, for transformers' modules and weights.

Attention is replaced because transformers' knows no packed rows. Norms, rotation, gated MLP and
projections are those of `kernels.cpu` or `kernels.cuda`, by the device of the tensor.
"""

from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from rlinf_vl.models.attention import SegmentAttention
from rlinf_vl.models.kernels import cpu, cuda
from rlinf_vl.models.kernels.delta import Mixer


def kernels_for(x: torch.Tensor) -> ModuleType:
    """Return the module with the layers' parts for this tensor's device."""
    return cuda if x.is_cuda else cpu


def norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Run `forward` of a transformers RMSNorm."""
    return kernels_for(hidden_states).rms_norm(hidden_states, self.weight, self.variance_epsilon)


def centered_norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Run `forward` of a transformers RMSNorm whose weight is stored less 1."""
    return kernels_for(hidden_states).rms_norm(hidden_states, 1 + self.weight.float(), self.eps)


def gated_norm_forward(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Run `forward` of a transformers RMSNorm times silu(gate)."""
    kernels = kernels_for(hidden_states)
    return kernels.swiglu(gate, kernels.rms_norm(hidden_states, self.weight, self.variance_epsilon))


def mlp_forward(self: Any, x: torch.Tensor, **_) -> torch.Tensor:
    """Run `forward` of a transformers gated MLP."""
    kernels = kernels_for(x)
    (out,) = kernels.projections(
        kernels.swiglu(*kernels.projections(x, self.gate_proj, self.up_proj)), self.down_proj
    )
    return out


def attention_forward(self: Any, hidden_states, position_embeddings, *, context, **_):
    """Run `forward` of a transformers attention, its heads normed or not.

    hidden_states [B, T, H], position_embeddings (cos, sin) [B, T, D] → ([B, T, H], None).
    `context`, an `AttentionContext`, decides which keys each query sees.
    """
    kernels = kernels_for(hidden_states)
    q, k, v = kernels.projections(hidden_states, self.q_proj, self.k_proj, self.v_proj)
    q, k, v = (x.view(*hidden_states.shape[:-1], -1, self.head_dim) for x in (q, k, v))
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    cos, sin = (x.unsqueeze(2) for x in position_embeddings)
    q, k, v = (
        x.transpose(1, 2) for x in (kernels.rotate(q, cos, sin), kernels.rotate(k, cos, sin), v)
    )
    window = getattr(self, "sliding_window", None)
    out = context.attend(self.layer_idx, q, k, v, self.scaling, window)
    (out,) = kernels.projections(out.reshape(*hidden_states.shape[:-1], -1), self.o_proj)
    return out, None


def gated_attention_forward(self: Any, hidden_states, position_embeddings, *, context, **_):
    """Run `attention_forward` with a gate for each output.

    The query projection also makes the gates, [heads, query and gate]. The rotation leaves the last
    columns of a head as they are.
    """
    kernels = kernels_for(hidden_states)
    q, k, v = kernels.projections(hidden_states, self.q_proj, self.k_proj, self.v_proj)
    # The projection has query and gate of each head side by side.
    q, gate = q.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
    k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (k, v))
    cos, sin = (x.unsqueeze(2) for x in position_embeddings)
    q, k = (kernels.rotate(x, cos, sin) for x in (self.q_norm(q), self.k_norm(k)))
    out = (
        context.attend(self.layer_idx, *(x.transpose(1, 2) for x in (q, k, v)), self.scaling)
        * gate.sigmoid()
    )
    (out,) = kernels.projections(out.flatten(2), self.o_proj)
    return out, None


def delta_net_forward(self: Any, hidden_states, *, context, **_) -> torch.Tensor:
    """Run `forward` of a transformers gated delta net.

    hidden_states [B, T, H] → [B, T, H]. Decays and state are float32.
    """
    kernels = kernels_for(hidden_states)
    qkv, z, b, a = kernels.projections(
        hidden_states, self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
    )
    # g is the log of the decay: never positive, as exp and softplus are not negative.
    g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
    weight = self.conv1d.weight.squeeze(1)
    mixer = Mixer(weight, self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim)
    out = context.mix(self.layer_idx, mixer, qkv, g, b.float().sigmoid())
    (out,) = kernels.projections(self.norm(out, z.view_as(out)).flatten(2), self.out_proj)
    return out


def vision_attention_forward(
    self: Any, hidden_states, *, position_embeddings, context, **_
) -> torch.Tensor:
    """Run `forward` of a transformers vision attention that projects q, k and v at once.

    hidden_states [P, H], position_embeddings (cos, sin) [P, D] → [P, H]. The rotation is in
    float32, as in transformers.
    """
    qkv = self.qkv(hidden_states).view(len(hidden_states), 3, self.num_heads, -1)
    cos, sin = (x[:, None, None].float() for x in position_embeddings)
    q, k = kernels_for(qkv).rotate(qkv[:, :2].float(), cos, sin).to(qkv.dtype).unbind(1)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, qkv[:, 2]))
    return self.proj(context.attend(-1, q, k, v, self.scaling)[0].flatten(1))


def frame_attention(
    grids: np.ndarray, device: torch.device, dtype: torch.dtype
) -> SegmentAttention:
    """Return the context of a vision attention in which a patch attends to its image's frame.

    grids int64 [n, 3], (t, h, w).
    """
    return SegmentAttention(frame_bounds(grids), causal=False, device=device, dtype=dtype)


def frame_bounds(grids: np.ndarray) -> np.ndarray:
    """Return int64 [frames + 1]: the first patch of each frame, and the number of patches."""
    return np.cumsum([0, *np.repeat(grids[:, 1] * grids[:, 2], grids[:, 0])])


def add_deepstack(
    hidden_states: torch.Tensor, image_positions: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """Add features [N, H] to hidden_states [1, T, H] at distinct positions, int64 [N].

    It replaces `_deepstack_process` of a transformers text model.
    """
    return hidden_states.index_add(
        1, image_positions, features.to(hidden_states.dtype).unsqueeze(0)
    )


def patch_embed_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Run `forward` of a transformers vision patch embedding.

    A convolution over patches of its own size is a product. PyTorch's three-dimensional
    convolutions are slower, on CUDA in bfloat16 by ten times and more (pytorch/pytorch#174051).
    """
    weight_WD = self.proj.weight.flatten(1)
    return F.linear(
        hidden_states.to(weight_WD.dtype).view(-1, weight_WD.shape[1]), weight_WD, self.proj.bias
    )
