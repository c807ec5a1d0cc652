"""Keys, values and states of the rows being decoded; attention and delta nets over them.

A group's prompt is stored once, however many samples are drawn from it: the queries of its rows
attend to it as one batch (as in Juravsky et al. 2024, "Hydragen"), each row attends to its own
continuation, and the two softmax parts are merged by their log-sum-exp, which is exact. Recurrent
layers have a state for each row instead: the prompt's final state is copied to its rows, and each
step changes it in place.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlinf_vl.engines.torch.pages import PAGE, PROMPT_PAGE, Pages
from rlinf_vl.engines.torch.softmax import Partial, merge_and_normalise
from rlinf_vl.models.kernels.delta import Mixer, delta_step
from rlinf_vl.models.shapes import DecodeState


class DecodeCache:
    """The cache of S rows being decoded over N prompts; an `AttentionContext` for one token per
    row.

    Attributes:
        prompts: keys and values of the prompts.
        continuations: keys and values of the sampled tokens.
        states: recurrent layer → [the last inputs of its convolution [S, W - 1, C],
            its state float32 [S, Hv, dk, dv]].
        group: the prompt of each row, int64 [S], non-decreasing.
    """

    def __init__(self, state: DecodeState, dtype: torch.dtype, device: torch.device) -> None:
        def empty_pages(page_tokens: int) -> Pages:
            return Pages(
                state.kv_layers, state.kv_heads, state.head_dim, dtype, device, page_tokens
            )

        def no_states(shape: Sequence[int], state_dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(0, *shape, dtype=state_dtype, device=device)

        self.device = device
        self.prompts = empty_pages(PROMPT_PAGE[device.type])
        self.continuations = empty_pages(PAGE[device.type])
        self.states = {
            layer: [no_states(convolution_shape, dtype), no_states(state_shape, torch.float32)]
            for layer, (convolution_shape, state_shape) in state.row_shapes.items()
        }
        self.group = torch.zeros(0, dtype=torch.int64, device=device)
        # Prompts and their rows as a grid [N, width], where width is the most rows of any prompt.
        self._width = 0
        self._slot = self.group  # [S]: place of each row in the flattened grid
        self._dense = True  # every place of the grid is a row's
        # By window: the masks of prompts and continuations in this step.
        self._window_masks: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}

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
            tokens: keys and values [L, 2, T, H_kv, D] of the layers of `prompts`, in order.
            sequences: for each prompt, the tokens among the T that it consists of, followed by
                those that its only row has sampled: int64 [·].
            lengths: tokens of each prompt.
            samples: rows of each prompt.
            states: as `self.states`, with an entry for each sequence: the state after its last
                token.
        """
        first_prompt = len(self.prompts.lengths)
        row_counts = torch.tensor(samples, device=self.device)
        numbers = torch.arange(first_prompt, first_prompt + len(sequences), device=self.device)
        groups = numbers.repeat_interleave(row_counts)
        self.prompts.add(len(sequences))
        prompts = [sequence[:n] for sequence, n in zip(sequences, lengths, strict=True)]
        self.prompts.fill(np.arange(first_prompt, first_prompt + len(prompts)), tokens, prompts)
        for layer, old_states in self.states.items():
            new_states = [x.repeat_interleave(row_counts, dim=0) for x in states[layer]]
            self.states[layer] = [
                torch.cat(pair) for pair in zip(old_states, new_states, strict=True)
            ]
        first_row = len(self.continuations.lengths)
        self.continuations.add(len(groups))
        continued = [i for i, n in enumerate(lengths) if len(sequences[i]) > n]
        if continued:
            assert all(samples[i] == 1 for i in continued), "sampled tokens belong to one row only"
            rows = first_row + np.cumsum([0, *samples])[continued]
            self.continuations.fill(rows, tokens, [sequences[i][lengths[i] :] for i in continued])
        self.group = torch.cat([self.group, groups])
        self._index_rows()

    def restore(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        sampled: list[torch.Tensor],
        states: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Add the sampled tokens of rows (int64) that were appended without them.

        Args:
            rows: their numbers.
            tokens: as in `append`.
            sampled: for each row, its tokens among them.
            states: as in `append`, one entry for each row.
        """
        self.continuations.fill(rows.cpu().numpy(), tokens, sampled)
        for layer, layer_states in self.states.items():
            for row_states, new_states in zip(layer_states, states[layer], strict=True):
                row_states[rows] = new_states

    def copy_tokens(
        self, rows: Sequence[int], starts: Sequence[int], sampled: Sequence[int]
    ) -> list[torch.Tensor]:
        """Copy keys and values [L, 2, ·, H_kv, D] of these rows: of the prompt from token
        `starts[i]` on, then of the first `sampled[i]` tokens of the row's own."""
        groups = self.group[torch.tensor(rows, dtype=torch.int64, device=self.device)].tolist()
        prompts = self.prompts.read(groups, starts, self.prompts.lengths[groups].tolist())
        continuations = self.continuations.read(rows, [0] * len(rows), sampled)
        return [torch.cat(pair, dim=2) for pair in zip(prompts, continuations, strict=True)]

    def state(self, row: int) -> tuple[torch.Tensor, ...]:
        """Copy the states of the recurrent layers, in order, of a row: after all of its tokens but
        the last sampled one, which is not computed yet."""
        return tuple(x[row].clone() for layer_states in self.states.values() for x in layer_states)

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but `rows` (int64, ascending), and the prompts without rows."""
        groups, self.group = torch.unique(self.group[rows], return_inverse=True)
        if len(groups) < len(self.prompts.lengths):
            self.prompts.keep(groups.cpu().numpy())
        self.continuations.keep(rows.cpu().numpy())
        for layer, layer_states in self.states.items():
            self.states[layer] = [x[rows] for x in layer_states]
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
        self._window_masks.clear()
        self.continuations.begin_step()
        self.prompts.update_device_table()

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Store the newest tokens, k and v [S, H_kv, 1, D], and attend with their q [S, H, 1, D] →
        [S, 1, H, D]."""
        rows, heads, _, dim = q.shape
        q = q.reshape(rows, k.shape[1], -1, dim)
        over_prompts, over_sampled = None, None
        if window is not None:
            over_prompts, over_sampled = self._masks(window, q.shape[2])
        over_continuations = self.continuations.attend(
            layer, q, k[:, :, 0], v[:, :, 0], scaling, over_sampled
        )
        out = merge_and_normalise(
            over_continuations, self._over_prompts(layer, q, scaling, over_prompts)
        )
        return out.to(v.dtype).reshape(rows, 1, heads, dim)

    def mix(
        self, layer: int, mixer: Mixer, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        """Advance the states by the newest tokens: qkv [S, 1, C], g and beta [S, 1, Hv] → [S, 1,
        Hv, dv]."""
        return delta_step(qkv[:, 0], g[:, 0], beta[:, 0], mixer, *self.states[layer]).unsqueeze(1)

    def _masks(self, window: int, repeat: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the masks of prompts and continuations in layers with this window.

        None stands for no mask: the window of every row has all of them.
        """
        if window not in self._window_masks:
            sampled = torch.from_numpy(self.continuations.lengths).to(self.device)
            prompt = torch.from_numpy(self.prompts.lengths).to(self.device)[self.group]
            # The newest token is the last of those that it sees; the first is at most `window - 1`
            # before it.
            first = prompt + sampled - window
            grid = first.new_zeros(len(self.prompts.lengths) * self._width)
            grid[self._slot] = first
            by_query = grid.view(-1, self._width).repeat_interleave(repeat, dim=1)
            self._window_masks[window] = (
                self.prompts.window_mask(by_query) if (first > 0).any() else None,
                self.continuations.window_mask((first - prompt)[:, None])
                if (first > prompt).any()
                else None,
            )
        return self._window_masks[window]

    def _over_prompts(
        self, layer: int, q: torch.Tensor, scaling: float, mask: torch.Tensor | None
    ) -> Partial:
        """Attend with q [S, H_kv, repeat, D] to each row's prompt.

        The rows of a prompt are one batch of queries, so that its keys are read once for all of
        them.
        """
        n = len(self.prompts.lengths)
        _, kv_heads, repeat, dim = q.shape
        grid = q
        if not self._dense:
            grid = q.new_zeros(n * self._width, *q.shape[1:])
            grid[self._slot] = q
        batch = grid.reshape(n, self._width, kv_heads, repeat, dim).transpose(1, 2).flatten(2, 3)
        parts = self.prompts.attend_stored(layer, batch, scaling, mask)
        flat = (x.unflatten(2, (self._width, repeat)).transpose(1, 2).flatten(0, 1) for x in parts)
        return Partial(*(x if self._dense else x[self._slot] for x in flat))
