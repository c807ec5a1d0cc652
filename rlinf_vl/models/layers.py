"""Forwards for layers of text model and vision tower, for modules and weights of transformers.

Attention has its own because transformers' knows no packed rows. Norms, rotation, gated MLP and projections are those of
`kernels.cpu` or `kernels.cuda`, by the device of the tensor.
"""

from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from rlinf_vl.models.attention import SegmentAttention
from rlinf_vl.models.kernels import cpu, cuda


def kernels_for(x: torch.Tensor) -> ModuleType:
    """The module of the layers' parts for this tensor's device."""
    return cuda if x.is_cuda else cpu


def norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """`forward` of a transformers RMSNorm."""
    return kernels_for(hidden_states).rms_norm(hidden_states, self.weight, self.variance_epsilon)


def mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """`forward` of a transformers gated MLP."""
    kernels = kernels_for(x)
    (out,) = kernels.projections(kernels.swiglu(*kernels.projections(x, self.gate_proj, self.up_proj)), self.down_proj)
    return out


def attention_forward(self: Any, hidden_states, position_embeddings, *, context, **_):
    """`forward` of a transformers attention, its heads normed or not; `context` (`AttentionContext`) says who sees whom.

    hidden_states [B, T, H], position_embeddings (cos, sin) [B, T, D] → ([B, T, H], None).
    """
    kernels = kernels_for(hidden_states)
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (x.view(heads) for x in kernels.projections(hidden_states, self.q_proj, self.k_proj, self.v_proj))
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    cos, sin = (x.unsqueeze(2) for x in position_embeddings)
    q, k, v = (x.transpose(1, 2) for x in (kernels.rotate(q, cos, sin), kernels.rotate(k, cos, sin), v))
    out = context.attend(self.layer_idx, q, k, v, self.scaling)
    (out,) = kernels.projections(out.reshape(*hidden_states.shape[:-1], -1), self.o_proj)
    return out, None


def vision_attention_forward(self: Any, hidden_states, *, position_embeddings, context, **_) -> torch.Tensor:
    """`forward` of a transformers vision attention with one product for queries, keys and values.

    hidden_states [P, H], position_embeddings (cos, sin) [P, D] → [P, H]. Rotated in float32, as transformers does.
    """
    qkv = self.qkv(hidden_states).view(len(hidden_states), 3, self.num_heads, -1)
    cos, sin = (x[:, None, None].float() for x in position_embeddings)
    q, k = kernels_for(qkv).rotate(qkv[:, :2].float(), cos, sin).to(qkv.dtype).unbind(1)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, qkv[:, 2]))
    return self.proj(context.attend(-1, q, k, v, self.scaling)[0].flatten(1))


def frame_attention(grids: np.ndarray, device: torch.device, dtype: torch.dtype) -> SegmentAttention:
    """Context of a vision attention in which each patch sees its own image's frame; grids int64 [n, 3], (t, h, w)."""
    return SegmentAttention(frame_bounds(grids), causal=False, device=device, dtype=dtype)


def frame_bounds(grids: np.ndarray) -> np.ndarray:
    """int64 [frames + 1]: where the patches of each frame begin, and the last ones end."""
    return np.cumsum([0, *np.repeat(grids[:, 1] * grids[:, 2], grids[:, 0])])


def add_deepstack(hidden_states: torch.Tensor, image_positions: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """`_deepstack_process` of a transformers text model: hidden_states [1, T, H] plus features [N, H] at distinct positions,
    int64 [N]."""
    return hidden_states.index_add(1, image_positions, features.to(hidden_states.dtype).unsqueeze(0))


def patch_embed_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """`forward` of a transformers vision patch embedding: a convolution over patches of its own size is a product.

    PyTorch's three-dimensional convolutions are slower, on CUDA in bfloat16 by ten times and more (pytorch/pytorch#174051).
    """
    weight_WD = self.proj.weight.flatten(1)
    return F.linear(hidden_states.to(weight_WD.dtype).view(-1, weight_WD.shape[1]), weight_WD, self.proj.bias)
