"""Keys, values and states of the rows being decoded; attention and delta nets over them.

A group's prompt is stored once, however many samples are drawn from it: the queries of its rows attend to it as one batch
(as in Juravsky et al. 2024, "Hydragen"), each row attends to its own continuation, and the two softmax parts are merged by
their log-sum-exp, which is exact. Layers that are recurrent have a state for each row instead: the prompt's final one is copied
to its rows, and each step changes it in place.
"""

from collections.abc import Mapping, Sequence

import torch

from rlinf_vl.engines.torch.pages import Pages
from rlinf_vl.engines.torch.softmax import Partial, merged, partial
from rlinf_vl.models.families import DecodeState
from rlinf_vl.models.kernels.delta import Mixer, delta_step


class DecodeCache:
    """Rows S being decoded over N prompts; an `AttentionContext` for one token per row.

    Attributes:
        prompts: layer → keys and values [2, N, H_kv, P, D], right-padded.
        own: keys and values of what was sampled.
        states: recurrent layer → [the last inputs of its convolution [S, W - 1, C], its state float32 [S, Hv, dk, dv]].
        prompt_len: int64 [N].
        group: int64 [S], each row's prompt, non-decreasing.
    """

    def __init__(self, state: DecodeState, dtype: torch.dtype, device: torch.device) -> None:
        empty = torch.zeros(2, 0, state.kv_heads, 0, state.head_dim, dtype=dtype, device=device)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        self.device = device
        self.prompts = dict.fromkeys(state.kv_layers, empty)
        self.own = Pages(state.kv_layers, state.kv_heads, state.head_dim, dtype, device)
        dtypes = dtype, torch.float32
        self.states = {
            layer: [torch.zeros(0, *shape, dtype=t, device=device) for shape, t in zip(shapes, dtypes, strict=True)]
            for layer, shapes in state.row_shapes.items()
        }
        self.prompt_len = none
        self.group = none
        self._prompt_mask: torch.Tensor | None = None
        # Where each row stands in the [N, width] grid of prompts and their rows (width: most rows of a prompt).
        self._width = 0
        self._slot = none
        self._dense = True

    def append(
        self,
        tokens: torch.Tensor,
        prompts: list[torch.Tensor],
        samples: list[int],
        states: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Add prompts just prefilled, with `samples[i]` rows each.

        Args:
            tokens: keys and values [L, 2, T, H_kv, D] of the layers `prompts` has, in order.
            prompts: which of the T tokens each prompt consists of, int64 [P_i].
            states: as `self.states`, with an entry for each prompt: of its last token.
        """
        new = torch.tensor(list(map(len, prompts)), device=self.device)
        longest = max([*map(len, prompts), *self.prompt_len.tolist()])
        index = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        rows = torch.tensor(samples, device=self.device)
        groups = torch.arange(len(new), device=self.device).repeat_interleave(rows) + len(self.prompt_len)
        for layer, keys_and_values in zip(self.prompts, tokens, strict=True):
            fresh = keys_and_values[:, index].transpose(2, 3)  # [2, n, H, P, D]
            self.prompts[layer] = torch.cat([_widen(x, longest) for x in (self.prompts[layer], fresh)], dim=1)
        for layer, old in self.states.items():
            fanned = [x.repeat_interleave(rows, dim=0) for x in states[layer]]
            self.states[layer] = [torch.cat(both) for both in zip(old, fanned, strict=True)]
        self.prompt_len = torch.cat([self.prompt_len, new])
        self.own.add(len(groups))
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

    def cut(self, row: int, group: int, start: int, own: int) -> torch.Tensor:
        """Keys and values [L, 2, ·, H_kv, D] of prompt `group` from its token `start` on, then of the first `own` tokens that
        `row` sampled; a copy."""
        length = int(self.prompt_len[group])
        parts = []
        for prompts, sampled in zip(self.prompts.values(), self.own.read(row, own), strict=True):
            of_both = prompts[:, group, :, start:length], sampled
            parts.append(torch.cat(of_both, dim=2).transpose(1, 2))
        length = length - start + own
        return torch.stack(parts) if parts else torch.zeros(0, 2, length, 0, 0, device=self.device)

    def state(self, row: int) -> tuple[torch.Tensor, ...]:
        """What the recurrent layers, in order, have of a row after all of its tokens but the last one sampled; a copy."""
        return tuple(x[row].clone() for both in self.states.values() for x in both)

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but `rows` (int64, ascending), and the prompts that no row is left of."""
        groups, self.group = torch.unique(self.group[rows], return_inverse=True)
        self.own.keep(rows.cpu().numpy())
        self.states = {layer: [x[rows] for x in both] for layer, both in self.states.items()}
        if len(groups) < len(self.prompt_len):
            self.prompt_len = self.prompt_len[groups]
            longest = max(self.prompt_len.tolist(), default=0)
            self.prompts = {layer: kv[:, groups, :, :longest] for layer, kv in self.prompts.items()}
        self._index_rows()

    def _index_rows(self) -> None:
        counts = torch.bincount(self.group, minlength=len(self.prompt_len))
        self._width = max(counts.tolist(), default=0)
        first = counts.cumsum(0) - counts
        within = torch.arange(len(self.group), device=self.device) - first[self.group]
        self._slot = self.group * self._width + within
        self._dense = len(self.group) == len(counts) * self._width
        self._prompt_mask = _mask_beyond(self.prompt_len)

    def begin_step(self) -> None:
        """Make room for one more token per row; call before each decoding forward."""
        self.own.begin_step()

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
        n, (_, kv_heads, repeat, dim) = len(self.prompt_len), q.shape
        grid = q
        if not self._dense:
            grid = q.new_zeros(n * self._width, *q.shape[1:])
            grid[self._slot] = q
        batch = grid.reshape(n, self._width, kv_heads, repeat, dim).transpose(1, 2).flatten(2, 3)
        parts = partial(batch, self.prompts[layer][0], self.prompts[layer][1], self._prompt_mask, scaling)
        flat = (x.unflatten(2, (self._width, repeat)).transpose(1, 2).flatten(0, 1) for x in parts)
        return Partial(*(x if self._dense else x[self._slot] for x in flat))


def _mask_beyond(lengths: torch.Tensor) -> torch.Tensor | None:
    """bool [n, 1, 1, longest], True from each length on; None if all are the longest."""
    beyond = torch.arange(max(lengths.tolist(), default=0), device=lengths.device) >= lengths[:, None]
    return beyond[:, None, None, :] if bool(beyond.any()) else None


def _widen(kv: torch.Tensor, length: int) -> torch.Tensor:
    """Pad [2, n, H, ·, D] with zeros to `length` tokens."""
    return torch.nn.functional.pad(kv, (0, 0, 0, length - kv.shape[3]))
