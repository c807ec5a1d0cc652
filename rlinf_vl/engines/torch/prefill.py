"""Prompts, or what follows the kept part of them, through the model as one packed row.

The last token that a session sampled has no keys and values yet: it is prefilled with what the next turn adds.
"""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from rlinf_vl.engines.torch.sessions import Kept
from rlinf_vl.models.attention import merge
from rlinf_vl.models.families import DecodeState, Family, VisionFeatures
from rlinf_vl.models.kernels.attention import kernel_for
from rlinf_vl.models.kernels.delta import Mixer, delta_rule
from rlinf_vl.models.kernels.delta_layout import DeltaLayout
from rlinf_vl.models.mixture import Routing
from rlinf_vl.models.policy import hidden_states
from rlinf_vl.models.transfer import on_device
from rlinf_vl.types import Request


def prefill(
    model: PreTrainedModel,
    family: Family,
    requests: Sequence[Request],
    kept: Sequence[Kept | None],
    features: VisionFeatures | None,
    image_token_id: int,
    merge_size: int,
    device: torch.device,
    routing: Routing | None = None,
) -> tuple[torch.Tensor, torch.Tensor, "PrefillAttention"]:
    """Compute what is new of n requests behind what is kept of them.

    Args:
        kept: of each request; those without come first.
        features: of the images that are not kept, in order.

    Returns:
        (last hidden state of each request [n, H], position of the token behind it int64 [n], all keys and values).
    """
    starts = [len(k.ids) if k else 0 for k in kept]
    ids = np.concatenate([r.ids[n:] for r, n in zip(requests, starts, strict=True)]).astype(np.int64)
    positions = [family.positions(r.ids.astype(np.int64), image_token_id, r.image_grids, merge_size) for r in requests]
    image_positions = None if features is None else on_device(np.flatnonzero(ids == image_token_id), device)
    lengths = [len(r.ids) - n for r, n in zip(requests, starts, strict=True)]
    context = PrefillAttention(family.decode_state(model.config), kept, lengths, model.dtype, device)
    new_positions = np.concatenate([p[:, n:] for p, n in zip(positions, starts, strict=True)], axis=1)
    row = on_device(ids, device), on_device(new_positions, device)
    hidden = hidden_states(model, family, *row, context, features, image_positions, routing)
    following = torch.tensor([int(p[1:].max()) + 1 for p in positions], device=device)
    return hidden[on_device(np.cumsum(lengths) - 1, device)], following, context


class PrefillAttention:
    """An `AttentionContext` for new tokens, packed into one row, that each sequence has behind what is kept of it.

    Attributes:
        lengths: new tokens of each sequence.
        tokens: keys and values [L, 2, K + T, H_kv, D]: the kept tokens of all sequences, then the new ones.
        states: as `DecodeCache.states`, behind each sequence.
    """

    def __init__(
        self,
        state: DecodeState,
        kept: Sequence[Kept | None],
        lengths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`kept[i]` of sequence i stands before its `lengths[i]` new tokens; sequences with nothing kept come first."""
        fresh = kept.count(None)
        self._kept_lengths = [0 if k is None else len(k.ids) for k in kept]
        self.lengths = list(lengths)
        self._n_kept = sum(self._kept_lengths)
        self._number = {layer: i for i, layer in enumerate(state.kv_layers)}
        assert all(self._kept_lengths[fresh:]) and not any(self._kept_lengths[:fresh]), "continued ones come last"
        shape = (len(state.kv_layers), 2, self._n_kept + sum(lengths), state.kv_heads, state.head_dim)
        self.tokens = torch.empty(shape, dtype=dtype, device=device)
        make, cu_seqlens = kernel_for(device, dtype), np.cumsum([0, *lengths])
        self._own = make(cu_seqlens, cu_seqlens, True, device)
        self._delta = DeltaLayout(cu_seqlens, device=device) if state.row_shapes else None
        self.states: dict[int, list[torch.Tensor]] = {}
        self._initial: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._continued = slice(int(cu_seqlens[fresh]), int(cu_seqlens[-1]))
        if self._n_kept:
            parts = [part for k in kept if k is not None for part in k.parts]
            self.tokens[:, :, : self._n_kept] = torch.cat(parts, dim=2)
            cu_q = cu_seqlens[fresh:] - cu_seqlens[fresh]
            self._over_kept = make(cu_q, np.cumsum([0, *self._kept_lengths[fresh:]]), False, device)
            parts = [torch.stack(part) for part in zip(*(k.states for k in kept if k is not None), strict=True)]
            padded = [torch.cat([part.new_zeros(fresh, *part.shape[1:]), part]) for part in parts]
            self._initial = dict(zip(state.row_shapes, zip(padded[::2], padded[1::2], strict=True), strict=True))

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (q, k, v))
        keys, values = self.tokens[self._number[layer]]
        keys[self._n_kept :], values[self._n_kept :] = k_THD, v_THD
        out, lse = self._own.forward(q_THD, k_THD, v_THD, scaling)
        if self._n_kept:
            rows = self._continued
            inputs = q_THD[rows], keys[: self._n_kept], values[: self._n_kept]
            merge(out, lse, rows, *self._over_kept.forward(*inputs, scaling))
        return out.unsqueeze(0)

    def mix(self, layer: int, mixer: Mixer, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        assert self._delta is not None, "the family has not said that this layer is recurrent"
        row = qkv[0], g[0], beta[0], mixer, self._delta
        out, *self.states[layer] = delta_rule(*row, self._initial.get(layer))
        return out.unsqueeze(0)

    def sequences(self) -> list[torch.Tensor]:
        """Which of `tokens` each sequence consists of, kept and new: int64 [P_i]."""
        old = torch.arange(self._n_kept, device=self.tokens.device).split(self._kept_lengths)
        new = torch.arange(self._n_kept, self.tokens.shape[2], device=self.tokens.device).split(self.lengths)
        return [torch.cat(both) for both in zip(old, new, strict=True)]
