"""Prefill: prompts, or their tokens behind a cached prefix, through the model as one packed row.

The last token that a session sampled has no keys and values yet: it is prefilled with the tokens of
the next turn.
"""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from rlinf_vl.engines.torch.prefix_cache import CachedPrefix
from rlinf_vl.models.attention import Layout, Part, image_part, token_index
from rlinf_vl.models.family import Family, VisionFeatures
from rlinf_vl.models.image_tokens import ImageTokens, runs_of_images
from rlinf_vl.models.kernels.attention import kernel_for
from rlinf_vl.models.kernels.delta import Mixer, delta_rule
from rlinf_vl.models.kernels.delta_layout import DeltaLayout
from rlinf_vl.models.mixture import Routing
from rlinf_vl.models.policy import hidden_states
from rlinf_vl.models.shapes import DecodeState
from rlinf_vl.models.transfer import on_device
from rlinf_vl.types import Request


def prefill(
    model: PreTrainedModel,
    family: Family,
    requests: Sequence[Request],
    prefixes: Sequence[CachedPrefix | None],
    features: VisionFeatures | None,
    image_tokens: ImageTokens,
    device: torch.device,
    routing: Routing | None = None,
) -> tuple[torch.Tensor, torch.Tensor, "PrefillAttention"]:
    """Compute the new tokens of n requests behind their cached prefixes.

    Args:
        prefixes: the cached prefix of each request; requests without one come first.
        features: features of the images that are not in a prefix, in order.

    Returns:
        (last hidden state of each request [n, H], position of the token behind it int64 [n],
        all keys and values).
    """
    starts = [len(prefix.ids) if prefix else 0 for prefix in prefixes]
    ids = np.concatenate([r.ids[n:] for r, n in zip(requests, starts, strict=True)]).astype(
        np.int64
    )
    positions = [
        family.positions(r.ids.astype(np.int64), r.image_grids, image_tokens.with_times(r.images))
        for r in requests
    ]
    image_positions = (
        None if features is None else on_device(np.flatnonzero(image_tokens.mask(ids)), device)
    )
    lengths = [len(r.ids) - n for r, n in zip(requests, starts, strict=True)]
    runs = None
    if family.images_see_themselves:
        for request, n in zip(requests, starts, strict=True):
            assert not n or (request.ids[n - 1 : n + 1] != image_tokens.id).any(), (
                "a cached prefix ends within an image"
            )
        runs = runs_of_images(ids == image_tokens.id, np.cumsum([0, *lengths]))
    context = PrefillAttention(
        family.decode_state(model.config), prefixes, lengths, model.dtype, device, runs
    )
    new_positions = np.concatenate(
        [p[:, n:] for p, n in zip(positions, starts, strict=True)], axis=1
    )
    hidden = hidden_states(
        model,
        family,
        on_device(ids, device),
        on_device(new_positions, device),
        context,
        features,
        image_positions,
        routing,
    )
    # The next position follows the last token's: an image takes fewer positions than placeholders,
    # and a long video has later ones than the text behind it.
    next_positions = torch.tensor([int(p[1:, -1].max()) + 1 for p in positions], device=device)
    return hidden[on_device(np.cumsum(lengths) - 1, device)], next_positions, context


class PrefillAttention:
    """An `AttentionContext` for the new tokens of sequences, packed into one row, behind cached
    prefixes.

    Attributes:
        lengths: new tokens of each sequence.
        tokens: keys and values [L, 2, K + T, H_kv, D]: the cached tokens of all sequences, then the
            new ones.
        states: as `DecodeCache.states`, after the last token of each sequence.
    """

    def __init__(
        self,
        state: DecodeState,
        prefixes: Sequence[CachedPrefix | None],
        lengths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        image_runs: np.ndarray | None = None,
    ) -> None:
        """Sequence i has `prefixes[i]` before its `lengths[i]` new tokens; sequences without a
        prefix come first. `image_runs`: as in `SegmentAttention`, of the new tokens."""
        n_without_prefix = prefixes.count(None)
        self._cached_lengths = [0 if prefix is None else len(prefix.ids) for prefix in prefixes]
        self.lengths = list(lengths)
        self._n_cached = sum(self._cached_lengths)
        self._number = {layer: i for i, layer in enumerate(state.kv_layers)}
        assert all(self._cached_lengths[n_without_prefix:]) and not any(
            self._cached_lengths[:n_without_prefix]
        ), "sequences with a prefix come last"
        shape = (
            len(state.kv_layers),
            2,
            self._n_cached + sum(lengths),
            state.kv_heads,
            state.head_dim,
        )
        self.tokens = torch.empty(shape, dtype=dtype, device=device)
        self._kernel = kernel_for(device, dtype)
        self._bounds = cu_seqlens = np.cumsum([0, *lengths])
        over_new = self._kernel(cu_seqlens, cu_seqlens, True, device)
        self._image_part: list[Part] = []
        if image_runs is not None:
            self._image_part = image_part(image_runs, self._kernel, device, self._n_cached)
        # By window; the keys of all are the cached ones, then the new ones.
        self._layouts: dict[int | None, Layout] = {}
        self._delta = DeltaLayout(cu_seqlens, device=device) if state.row_shapes else None
        self.states: dict[int, list[torch.Tensor]] = {}
        self._initial: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        further = list(self._image_part)
        if self._n_cached:
            token_parts = [
                part for prefix in prefixes if prefix is not None for part in prefix.parts
            ]
            self.tokens[:, :, : self._n_cached] = torch.cat(token_parts, dim=2)
            cu_q = cu_seqlens[n_without_prefix:] - cu_seqlens[n_without_prefix]
            over_cached = self._kernel(
                cu_q, np.cumsum([0, *self._cached_lengths[n_without_prefix:]]), False, device
            )
            continued = slice(int(cu_seqlens[n_without_prefix]), int(cu_seqlens[-1]))
            further.append(Part(continued, slice(0, self._n_cached), over_cached))
            states = zip(*(prefix.states for prefix in prefixes if prefix is not None), strict=True)
            stacked = [torch.stack(x) for x in states]
            # Sequences without a prefix, which come first, start from zeros.
            padded = [torch.cat([x.new_zeros(n_without_prefix, *x.shape[1:]), x]) for x in stacked]
            # Two tensors a layer, one after the other: inputs of the convolution, and state.
            pairs = zip(padded[::2], padded[1::2], strict=True)
            self._initial = dict(zip(state.row_shapes, pairs, strict=True))

        self._layouts[None] = Layout(slice(self._n_cached, None), over_new, further)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        window: int | None = None,
    ) -> torch.Tensor:
        q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (q, k, v))
        keys, values = self.tokens[self._number[layer]]
        keys[self._n_cached :], values[self._n_cached :] = k_THD, v_THD
        out, _ = self._layout(window).forward(q_THD, keys, values, scaling)
        return out.unsqueeze(0)

    def _layout(self, window: int | None) -> Layout:
        """Return the layout of layers with this window."""
        cached, new = np.array(self._cached_lengths), np.array(self.lengths)
        if window is None or window >= (cached + new).max():
            return self._layouts[None]
        if window not in self._layouts:
            visible = np.minimum(cached, window - 1)
            # Of each sequence the end of its cached tokens, then its new tokens.
            starts = np.stack([np.cumsum(cached) - visible, self._n_cached + self._bounds[:-1]], 1)
            keys = token_index(
                starts.ravel(), np.stack([visible, new], 1).ravel(), self.tokens.device
            )
            kernel = self._kernel(
                self._bounds, np.cumsum([0, *(visible + new)]), True, self.tokens.device, window
            )
            self._layouts[window] = Layout(keys, kernel, self._image_part)
        return self._layouts[window]

    def mix(
        self, layer: int, mixer: Mixer, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        assert self._delta is not None, "the family has not said that this layer is recurrent"
        initial = self._initial.get(layer)
        out, *self.states[layer] = delta_rule(qkv[0], g[0], beta[0], mixer, self._delta, initial)
        return out.unsqueeze(0)

    def sequences(self) -> list[torch.Tensor]:
        """Return, for each sequence, the indices in `tokens` of its cached and new tokens: int64
        [P_i]."""
        cached = torch.arange(self._n_cached, device=self.tokens.device).split(self._cached_lengths)
        new = torch.arange(self._n_cached, self.tokens.shape[2], device=self.tokens.device).split(
            self.lengths
        )
        return [torch.cat(pair) for pair in zip(cached, new, strict=True)]
