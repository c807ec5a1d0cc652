"""Keys, values and states of the rows being decoded; attention and delta nets over them.

A group's prompt is stored once, however many samples are drawn from it: the queries of its rows attend to it as one batch
(as in Juravsky et al. 2024, "Hydragen"), each row attends to its own continuation, and the two softmax parts are merged by
their log-sum-exp, which is exact. Layers that are recurrent have a state for each row instead: the prompt's final one is copied
to its rows, and each step changes it in place.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlinf_vl.engines.torch.pages import PAGE, PROMPT_PAGE, Pages
from rlinf_vl.engines.torch.softmax import Partial, merged
from rlinf_vl.models.families import DecodeState
from rlinf_vl.models.kernels.delta import Mixer, delta_step


class DecodeCache:
    """Rows S being decoded over N prompts; an `AttentionContext` for one token per row.

    Attributes:
        prompts: keys and values of the prompts.
        own: keys and values of what was sampled.
        states: recurrent layer → [the last inputs of its convolution [S, W - 1, C], its state float32 [S, Hv, dk, dv]].
        group: int64 [S], each row's prompt, non-decreasing.
    """

    def __init__(self, state: DecodeState, dtype: torch.dtype, device: torch.device) -> None:
        none = torch.zeros(0, dtype=torch.int64, device=device)
        shape = state.kv_layers, state.kv_heads, state.head_dim
        self.device = device
        self.prompts = Pages(*shape, dtype, device, PROMPT_PAGE[device.type])
        self.own = Pages(*shape, dtype, device, PAGE[device.type])
        dtypes = dtype, torch.float32
        self.states = {
            layer: [torch.zeros(0, *shape, dtype=t, device=device) for shape, t in zip(shapes, dtypes, strict=True)]
            for layer, shapes in state.row_shapes.items()
        }
        self.group = none
        # Where each row stands in the [N, width] grid of prompts and their rows (width: most rows of a prompt).
        self._width = 0
        self._slot = none
        self._dense = True

    def append(
        self,
        tokens: torch.Tensor,
        sequences: Sequence[torch.Tensor],
        lengths: Sequence[int],
        samples: Sequence[int],
        states: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Add prompts just prefilled, with `samples[i]` rows each.

        Args:
            tokens: keys and values [L, 2, T, H_kv, D] of the layers `prompts` has, in order.
            sequences: which of the T tokens each prompt consists of, and what its only row has sampled behind it: int64 [·].
            lengths: tokens of each prompt.
            states: as `self.states`, with an entry for each sequence: of its last token.
        """
        rows, first = torch.tensor(samples, device=self.device), len(self.prompts.lengths)
        groups = torch.arange(first, first + len(sequences), device=self.device).repeat_interleave(rows)
        self.prompts.add(len(sequences))
        prompts = [sequence[:n] for sequence, n in zip(sequences, lengths, strict=True)]
        self.prompts.fill(np.arange(first, first + len(prompts)), tokens, prompts)
        for layer, old in self.states.items():
            fanned = [x.repeat_interleave(rows, dim=0) for x in states[layer]]
            self.states[layer] = [torch.cat(both) for both in zip(old, fanned, strict=True)]
        first_row = len(self.own.lengths)
        self.own.add(len(groups))
        begun = [i for i, n in enumerate(lengths) if len(sequences[i]) > n]
        if begun:
            assert all(samples[i] == 1 for i in begun), "what one row has sampled is not the others'"
            numbers = first_row + np.cumsum([0, *samples])[begun]
            self.own.fill(numbers, tokens, [sequences[i][lengths[i] :] for i in begun])
        self.group = torch.cat([self.group, groups])
        self._index_rows()

    def restore(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        own: list[torch.Tensor],
        states: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Give rows (int64) that were just appended what they have sampled: of the tokens of `append`, `own[i]` are row i's."""
        self.own.fill(rows.cpu().numpy(), tokens, own)
        for layer, both in self.states.items():
            for old, new in zip(both, states[layer], strict=True):
                old[rows] = new

    def cut(self, rows: Sequence[int], starts: Sequence[int], own: Sequence[int]) -> list[torch.Tensor]:
        """For each of these rows keys and values [L, 2, ·, H_kv, D] of its prompt from token `starts[i]` on, then of the first
        `own[i]` tokens that it sampled; copies."""
        groups = self.group[torch.tensor(rows, dtype=torch.int64, device=self.device)].tolist()
        prompts = self.prompts.read(groups, starts, self.prompts.lengths[groups].tolist())
        sampled = self.own.read(rows, [0] * len(rows), own)
        return [torch.cat(both, dim=2) for both in zip(prompts, sampled, strict=True)]

    def state(self, row: int) -> tuple[torch.Tensor, ...]:
        """What the recurrent layers, in order, have of a row after all of its tokens but the last one sampled; a copy."""
        return tuple(x[row].clone() for both in self.states.values() for x in both)

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but `rows` (int64, ascending), and the prompts that no row is left of."""
        groups, self.group = torch.unique(self.group[rows], return_inverse=True)
        if len(groups) < len(self.prompts.lengths):
            self.prompts.keep(groups.cpu().numpy())
        self.own.keep(rows.cpu().numpy())
        self.states = {layer: [x[rows] for x in both] for layer, both in self.states.items()}
        self._index_rows()

    def _index_rows(self) -> None:
        counts = torch.bincount(self.group, minlength=len(self.prompts.lengths))
        self._width = max(counts.tolist(), default=0)
        first = counts.cumsum(0) - counts
        within = torch.arange(len(self.group), device=self.device) - first[self.group]
        self._slot = self.group * self._width + within
        self._dense = len(self.group) == len(counts) * self._width

    def begin_step(self) -> None:
        """Make room for one more token per row; call before each decoding forward."""
        self.own.begin_step()
        self.prompts.settle()

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [S, H, 1, D], k and v [S, H_kv, 1, D] of the rows' newest tokens → [S, 1, H, D]."""
        rows, heads, _, dim = q.shape
        q = q.reshape(rows, k.shape[1], -1, dim)
        own = self.own.attend(layer, q, k[:, :, 0], v[:, :, 0], scaling)
        return merged(own, self._over_prompts(layer, q, scaling)).to(v.dtype).reshape(rows, 1, heads, dim)

    def mix(self, layer: int, mixer: Mixer, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """qkv [S, 1, C], g and beta [S, 1, Hv] of the rows' newest tokens → [S, 1, Hv, dv]."""
        return delta_step(qkv[:, 0], g[:, 0], beta[:, 0], mixer, *self.states[layer]).unsqueeze(1)

    def _over_prompts(self, layer: int, q: torch.Tensor, scaling: float) -> Partial:
        """`partial` of q [S, H_kv, repeat, D] over each row's prompt: the rows of a prompt are one batch of queries."""
        n, (_, kv_heads, repeat, dim) = len(self.prompts.lengths), q.shape
        grid = q
        if not self._dense:
            grid = q.new_zeros(n * self._width, *q.shape[1:])
            grid[self._slot] = q
        batch = grid.reshape(n, self._width, kv_heads, repeat, dim).transpose(1, 2).flatten(2, 3)
        parts = self.prompts.over(layer, batch, scaling)
        flat = (x.unflatten(2, (self._width, repeat)).transpose(1, 2).flatten(0, 1) for x in parts)
        return Partial(*(x if self._dense else x[self._slot] for x in flat))
