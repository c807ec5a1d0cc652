"""Keys and values of rows, in pages (Kwon et al. 2023, "PagedAttention"), without a kernel of its own: of what each has sampled, and
of prompts, which are rows to which nothing is added.

What a row takes, and what attention over it costs, goes by its own length and not by that of the longest row. Attention is computed
for each page where it lies in the pool, and the parts of a row are merged by their log-sum-exp, which is exact. The host knows which
page is whose; tensors on the device say so, too, and are made again when pages change hands.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rlinf_vl.engines.torch.softmax import Partial, partial, summed

#: Tokens of a page of what is sampled, and of a prompt's.
PAGE = {"cpu": 16, "cuda": 64}
PROMPT_PAGE = {"cpu": 32, "cuda": 256}
#: Keys and values up to which pages that nobody has any more stay for others.
SPARE_BYTES = 2**26


class Pages:
    """Of rows S, in layers of `layers`.

    Attributes:
        lengths: int64 [S], tokens of each row.
    """

    def __init__(
        self, layers: Sequence[int], kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, size: int
    ) -> None:
        """`size`: tokens of a page."""
        self.size = size
        self.lengths = np.zeros(0, np.int64)
        self._device = device
        self._number = {layer: i for i, layer in enumerate(layers)}
        shape = len(layers), 0, kv_heads
        # The products of attention are twice as fast on a CPU where the keys of a page stand side by side.
        self._keys = torch.zeros(*shape, head_dim, size, dtype=dtype, device=device)  # [L, pages, H_kv, D, size]
        self._values = torch.zeros(*shape, size, head_dim, dtype=dtype, device=device)  # [L, pages, H_kv, size, D]
        self._table = np.full((0, 1), -1)  # [S, K], pages of each row in order, then -1
        self._free = np.zeros(0, np.int64)  # pages, ascending
        self._moved = True  # the table has changed
        none = torch.zeros(0, dtype=torch.int64, device=device)
        self._used = 0  # pages from the first one on that attention looks at; one of nobody counts as row 0's
        self._in_order = True  # page i is all that row i has
        self._owner = self._start = none  # row of each page, and position of its first token there
        self._first = self._last = none  # page of each row
        self._long = self._long_table = none  # rows of several pages [M]; their pages [M, K], any number where absent
        self._absent = none.bool()  # [M, K]
        self._row_lengths = self._offset = none  # [S]: of each row, and where in its last page the newest token stands
        self._width = 0  # tokens of a page that attention looks at
        self._mask = none.float()

    def add(self, rows: int) -> None:
        """Rows that have nothing yet."""
        self.lengths = np.concatenate([self.lengths, np.zeros(rows, np.int64)])
        self._table = np.concatenate([self._table, np.full((rows, self._table.shape[1]), -1)])
        self._moved = True

    def fill(self, rows: np.ndarray, tokens: torch.Tensor, own: Sequence[torch.Tensor]) -> None:
        """Give rows that have nothing these: of `tokens` [L, 2, T, H_kv, D], `own[i]` (int64, one at least) are row i's."""
        lengths = np.array(list(map(len, own)))
        counts = -(-lengths // self.size)
        pages = self._take(int(counts.sum()))
        self._widen(int(counts.max()))
        at = np.arange(self._table.shape[1]) < counts[:, None]
        part = np.full(at.shape, -1)
        part[at] = pages
        self._table[rows] = part
        self.lengths[rows] = lengths
        padded = [
            torch.nn.functional.pad(o, (0, int(n) * self.size - len(o))) for o, n in zip(own, counts, strict=True)
        ]
        where = torch.from_numpy(pages).to(self._device)
        keys, values = tokens.index_select(2, torch.cat(padded)).unflatten(2, (-1, self.size)).unbind(1)
        self._keys.index_copy_(1, where, keys.permute(0, 1, 3, 4, 2))
        self._values.index_copy_(1, where, values.transpose(2, 3))
        self._moved = True

    def keep(self, rows: np.ndarray) -> None:
        """Drop all rows but `rows` (ascending)."""
        self.lengths, self._table = self.lengths[rows], self._table[rows]
        self._table = self._table[:, : max(1, int((self._table >= 0).sum(1).max(initial=0)))]
        pages = self._table[self._table >= 0]
        if len(pages) * 2 <= self._used:  # attention looks at as many pages again: move these together
            self._gather(pages)
            self._table[self._table >= 0] = pages = np.arange(len(pages))
        self._free = np.setdiff1d(np.arange(self._capacity), pages)
        self._moved = True

    def read(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Sequence[torch.Tensor]:
        """Keys and values [L, 2, ends[i] - starts[i], H_kv, D] of tokens `starts[i]` … `ends[i]` of these rows."""
        wanted = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        pages = [self._table[row, tokens // self.size] for row, tokens in zip(rows, wanted, strict=True)]
        places = [tokens % self.size for tokens in wanted]
        at, place = (torch.from_numpy(np.concatenate(x)).to(self._device) for x in (pages, places))
        both = self._keys[:, at, :, :, place], self._values[:, at, :, place]  # [·, L, H_kv, D]
        return torch.stack(both, dim=2).permute(1, 2, 0, 3, 4).split(list(map(len, wanted)), dim=2)

    def begin_step(self) -> None:
        """Make room for one more token per row."""
        begins = np.flatnonzero(self.lengths % self.size == 0)
        if len(begins):
            at = self.lengths[begins] // self.size
            self._widen(int(at.max()) + 1)
            self._table[begins, at] = self._take(len(begins))
            self._moved = True
        self.lengths = self.lengths + 1
        if self._moved:
            self._look_up()
        else:
            self._row_lengths = self._row_lengths + 1
            self._look_beyond()
        self._offset = (self._row_lengths - 1) % self.size

    def settle(self) -> None:
        """Call before `over` where no step is begun."""
        if self._moved:
            self._look_up()

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> Partial:
        """q [S, H_kv, repeat, D] over the rows' tokens with the newest one, k and v [S, H_kv, D]."""
        number = self._number[layer]
        self._keys[number][self._last, :, :, self._offset] = k
        self._values[number][self._last, :, self._offset] = v
        return self.over(layer, q, scaling)

    def over(self, layer: int, q: torch.Tensor, scaling: float) -> Partial:
        """q [S, H_kv, Q, D] over the rows' tokens."""
        number = self._number[layer]
        keys = self._keys[number, : self._used, :, :, : self._width].transpose(-1, -2)
        values = self._values[number, : self._used, :, : self._width]
        of_pages = partial(q if self._in_order else q[self._owner], keys, values, self._mask, scaling)
        if self._in_order:
            return of_pages
        of_rows = Partial(*(x[self._first] for x in of_pages))
        if len(self._long):
            whole = summed(Partial(*(x[self._long_table] for x in of_pages)), self._absent)
            for x, long in zip(of_rows, whole, strict=True):
                x[self._long] = long
        return of_rows

    @property
    def _capacity(self) -> int:
        return self._keys.shape[1]

    def _take(self, n: int) -> np.ndarray:
        """Pages that are nobody's, the first ones."""
        if n > len(self._free):
            capacity = self._capacity
            more = max(n - len(self._free), capacity)
            # Zeros, as attention looks at all of a page: what is masked must still be a number.
            self._keys, self._values = (
                torch.cat([pool, pool.new_zeros(len(pool), more, *pool.shape[2:])], dim=1)
                for pool in (self._keys, self._values)
            )
            self._free = np.concatenate([self._free, np.arange(capacity, capacity + more)])
        taken, self._free = self._free[:n], self._free[n:]
        return taken

    def _gather(self, pages: np.ndarray) -> None:
        """Make these the first pages; those behind them are nobody's, of which many that take much room are given up."""
        order = torch.from_numpy(pages).to(self._device)
        keys, values = (pool.index_select(1, order) for pool in (self._keys, self._values))
        if self._keys.nbytes + self._values.nbytes > SPARE_BYTES:
            self._keys, self._values = keys, values
        else:
            self._keys[:, : len(pages)], self._values[:, : len(pages)] = keys, values

    def _widen(self, pages: int) -> None:
        """Let rows have so many pages."""
        if (more := pages - self._table.shape[1]) > 0:
            self._table = np.concatenate([self._table, np.full((len(self._table), more), -1)], axis=1)

    def _look_beyond(self) -> None:
        """Of the pages' tokens, those behind their rows' ends."""
        self._width = min(self.size, int(self.lengths.max(initial=0)))
        left = self._row_lengths[self._owner] - self._start
        beyond = torch.arange(self._width, device=self._device) >= left[:, None]
        self._mask = torch.zeros(beyond.shape, device=self._device).masked_fill_(beyond, -torch.inf)[:, None, None]

    def _look_up(self) -> None:
        """What attention needs to know of the table, on the device."""
        self._moved = False
        there = self._table >= 0
        pages, (rows, numbers), counts = self._table[there], np.nonzero(there), there.sum(1)
        self._used = int(pages.max(initial=-1)) + 1
        self._in_order = len(pages) == len(self._table) and np.array_equal(self._table[:, 0], np.arange(len(pages)))
        owner, start = np.zeros((2, self._used), np.int64)
        owner[pages], start[pages] = rows, numbers * self.size
        long = np.flatnonzero(counts > 1)
        arrays = (
            owner,
            start,
            self._table[:, 0],
            self._table[np.arange(len(counts)), counts - 1],
            self.lengths,
            long,
            self._table[long],
            ~there[long],
        )
        (
            self._owner,
            self._start,
            self._first,
            self._last,
            self._row_lengths,
            self._long,
            self._long_table,
            self._absent,
        ) = (torch.from_numpy(np.ascontiguousarray(array)).to(self._device) for array in arrays)
        self._look_beyond()
