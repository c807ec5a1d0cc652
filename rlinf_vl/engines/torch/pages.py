"""Keys and values of rows, in pages (Kwon et al. 2023, "PagedAttention"), in plain PyTorch.

A row is a sample's own tokens, or a prompt, to which no token is added. The memory of a row and the
cost of attention over it depend on its own length, not on that of the longest row. Attention is
computed for each page where it lies in the pool, and the pages of a row are merged by their
log-sum-exp, which is exact. The host has the table of which page belongs to which row; tensors on
the device mirror it and are rebuilt when it changes.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rlinf_vl.engines.torch.softmax import Partial, combine, partial

#: Tokens of a page of sampled tokens, and of a page of a prompt, by device type.
PAGE = {"cpu": 16, "cuda": 64}
PROMPT_PAGE = {"cpu": 32, "cuda": 256}
#: Bytes of keys and values up to which a compacted pool keeps the memory of its free pages.
SPARE_BYTES = 2**26


class Pages:
    """The paged keys and values of rows S in the layers `layers`.

    Attributes:
        lengths: tokens of each row, int64 [S].
    """

    def __init__(
        self,
        layers: Sequence[int],
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        size: int,
    ) -> None:
        """Make an empty pool. `size`: tokens of a page."""
        self.size = size
        self.lengths = np.zeros(0, np.int64)
        self._device = device
        self._layer_index = {layer: i for i, layer in enumerate(layers)}
        # Keys are [L, pages, H_kv, D, size], values [L, pages, H_kv, size, D]: on a CPU attention's
        # products are twice as fast where the keys of a page lie side by side.
        self._keys = torch.zeros(
            len(layers), 0, kv_heads, head_dim, size, dtype=dtype, device=device
        )
        self._values = torch.zeros(
            len(layers), 0, kv_heads, size, head_dim, dtype=dtype, device=device
        )
        self._table = np.full((0, 1), -1)  # [S, K]: the pages of each row in order, then -1
        self._free = np.zeros(0, np.int64)  # free pages, ascending
        self._table_changed = True  # since the tensors below were made from it
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        # Attention runs over pages 0 … _used - 1. A free page among them counts as one of row 0; no
        # row's pages refer to its result.
        self._used = 0
        self._one_page_each = True  # page i is the only page of row i, for all rows
        # [_used]: row of a page, position of its first token there
        self._owner = self._start = empty
        self._first = self._last = empty  # [S]: first and last page of each row
        # Rows of several pages [M], and their pages [M, K], any number where `_absent` is set.
        self._long = self._long_table = empty
        self._absent = empty.bool()  # [M, K]
        # [S]: length of each row, and offset of its newest token in its last page.
        self._row_lengths = self._offset = empty
        self._width = 0  # tokens of a page that attention covers
        self._mask = empty.float()  # [_used, 1, 1, _width]: -inf behind the end of a row, else 0

    def add(self, rows: int) -> None:
        """Append empty rows."""
        self.lengths = np.concatenate([self.lengths, np.zeros(rows, np.int64)])
        self._table = np.concatenate([self._table, np.full((rows, self._table.shape[1]), -1)])
        self._table_changed = True

    def fill(
        self, rows: np.ndarray, tokens: torch.Tensor, row_tokens: Sequence[torch.Tensor]
    ) -> None:
        """Fill empty rows.

        Args:
            rows: their numbers.
            tokens: keys and values [L, 2, T, H_kv, D].
            row_tokens: for each row, the tokens among the T that it consists of: int64, has_page
                least one.
        """
        lengths = np.array(list(map(len, row_tokens)))
        counts = -(-lengths // self.size)
        pages = self._allocate(int(counts.sum()))
        self._widen_table(int(counts.max()))
        has_page = np.arange(self._table.shape[1]) < counts[:, None]
        table_rows = np.full(has_page.shape, -1)
        table_rows[has_page] = pages
        self._table[rows] = table_rows
        self.lengths[rows] = lengths
        # Whole pages are written: the rest of a last page repeats token 0, which the mask hides.
        padded = [
            torch.nn.functional.pad(indices, (0, int(count) * self.size - len(indices)))
            for indices, count in zip(row_tokens, counts, strict=True)
        ]
        page_indices = torch.from_numpy(pages).to(self._device)
        keys, values = (
            tokens.index_select(2, torch.cat(padded)).unflatten(2, (-1, self.size)).unbind(1)
        )
        self._keys.index_copy_(1, page_indices, keys.permute(0, 1, 3, 4, 2))
        self._values.index_copy_(1, page_indices, values.transpose(2, 3))
        self._table_changed = True

    def keep(self, rows: np.ndarray) -> None:
        """Drop all rows but `rows` (ascending)."""
        self.lengths, self._table = self.lengths[rows], self._table[rows]
        self._table = self._table[:, : max(1, int((self._table >= 0).sum(1).max(initial=0)))]
        pages = self._table[self._table >= 0]
        # Attention runs over free pages between used ones too: compact the pool once they are half.
        if len(pages) * 2 <= self._used:
            self._compact(pages)
            self._table[self._table >= 0] = pages = np.arange(len(pages))
        self._free = np.setdiff1d(np.arange(self._capacity), pages)
        self._table_changed = True

    def read(
        self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> Sequence[torch.Tensor]:
        """Return keys and values [L, 2, ends[i] - starts[i], H_kv, D] of tokens `starts[i]` …
        `ends[i]` (exclusive) of each of these rows."""
        positions = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        pages = [
            self._table[row, tokens // self.size]
            for row, tokens in zip(rows, positions, strict=True)
        ]
        offsets = [tokens % self.size for tokens in positions]
        page, offset = (
            torch.from_numpy(np.concatenate(x)).to(self._device) for x in (pages, offsets)
        )
        # Advanced indices apart from each other put their dimension first: both are [·, L, H_kv,
        # D].
        keys, values = self._keys[:, page, :, :, offset], self._values[:, page, :, offset]
        keys_and_values = torch.stack((keys, values), dim=2).permute(1, 2, 0, 3, 4)
        return keys_and_values.split(list(map(len, positions)), dim=2)

    def begin_step(self) -> None:
        """Make room for one more token per row."""
        page_starters = np.flatnonzero(self.lengths % self.size == 0)
        if len(page_starters):
            page_number = self.lengths[page_starters] // self.size
            self._widen_table(int(page_number.max()) + 1)
            self._table[page_starters, page_number] = self._allocate(len(page_starters))
            self._table_changed = True
        self.lengths = self.lengths + 1
        if self._table_changed:
            self._upload_table()
        else:
            self._row_lengths = self._row_lengths + 1
            self._mask_unused_slots()
        self._offset = (self._row_lengths - 1) % self.size

    def update_device_table(self) -> None:
        """Bring the tensors on the device up to date; call before `attend_stored` without
        `begin_step`."""
        if self._table_changed:
            self._upload_table()

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scaling: float,
        mask: torch.Tensor | None = None,
    ) -> Partial:
        """Store the newest token of each row, k and v [S, H_kv, D], and attend with q [S, H_kv,
        repeat, D] to all tokens of its row, or to those of a `window_mask`."""
        layer_index = self._layer_index[layer]
        self._keys[layer_index][self._last, :, :, self._offset] = k
        self._values[layer_index][self._last, :, self._offset] = v
        return self.attend_stored(layer, q, scaling, mask)

    def window_mask(self, first: torch.Tensor) -> torch.Tensor:
        """Return a mask for queries that see no tokens of their row before a first one.

        `first` int64 [S, Q] is the number of that token for each query of each row. The mask is
        valid until a token or a row is added.
        """
        slots = self._start[:, None] + torch.arange(self._width, device=self._device)
        is_before = slots[:, None] < first[self._owner][:, :, None]
        return self._mask.masked_fill(is_before.unsqueeze(1), -torch.inf)

    def attend_stored(
        self, layer: int, q: torch.Tensor, scaling: float, mask: torch.Tensor | None = None
    ) -> Partial:
        """Attend with q [S, H_kv, Q, D] to the stored tokens of each row, or to those of a
        `window_mask`."""
        layer_index = self._layer_index[layer]
        keys = self._keys[layer_index, : self._used, :, :, : self._width].transpose(-1, -2)
        values = self._values[layer_index, : self._used, :, : self._width]
        of_pages = partial(
            q if self._one_page_each else q[self._owner],
            keys,
            values,
            self._mask if mask is None else mask,
            scaling,
        )
        if self._one_page_each:
            return of_pages
        of_rows = Partial(*(x[self._first] for x in of_pages))
        if len(self._long):
            all_pages = combine(Partial(*(x[self._long_table] for x in of_pages)), self._absent)
            for x, combined in zip(of_rows, all_pages, strict=True):
                x[self._long] = combined
        return of_rows

    @property
    def _capacity(self) -> int:
        return self._keys.shape[1]

    def _allocate(self, n: int) -> np.ndarray:
        """Take the first n free pages, and enlarge the pool if it has fewer."""
        if n > len(self._free):
            capacity = self._capacity
            # at least double, so that copies of the pool stay rare
            growth = max(n - len(self._free), capacity)
            # Zeros, because attention covers whole pages: masked values must still be numbers.
            self._keys, self._values = (
                torch.cat([pool, pool.new_zeros(len(pool), growth, *pool.shape[2:])], dim=1)
                for pool in (self._keys, self._values)
            )
            self._free = np.concatenate([self._free, np.arange(capacity, capacity + growth)])
        pages, self._free = self._free[:n], self._free[n:]
        return pages

    def _compact(self, pages: np.ndarray) -> None:
        """Move these pages to the front of the pool. The free pages behind them are given back if
        the pool is larger than `SPARE_BYTES`."""
        order = torch.from_numpy(pages).to(self._device)
        keys, values = (pool.index_select(1, order) for pool in (self._keys, self._values))
        if self._keys.nbytes + self._values.nbytes > SPARE_BYTES:
            self._keys, self._values = keys, values
        else:
            self._keys[:, : len(pages)], self._values[:, : len(pages)] = keys, values

    def _widen_table(self, pages: int) -> None:
        """Give the table columns for at least `pages` pages a row."""
        if (columns := pages - self._table.shape[1]) > 0:
            self._table = np.concatenate(
                [self._table, np.full((len(self._table), columns), -1)], axis=1
            )

    def _mask_unused_slots(self) -> None:
        """Mask the page slots behind the end of their row."""
        self._width = min(self.size, int(self.lengths.max(initial=0)))
        filled = self._row_lengths[self._owner] - self._start
        beyond = torch.arange(self._width, device=self._device) >= filled[:, None]
        self._mask = torch.zeros(beyond.shape, device=self._device).masked_fill_(
            beyond, -torch.inf
        )[:, None, None]

    def _upload_table(self) -> None:
        """Rebuild the tensors on the device from the table."""
        self._table_changed = False
        has_page = self._table >= 0
        rows, numbers = np.nonzero(has_page)
        pages, counts = self._table[has_page], has_page.sum(1)
        self._used = int(pages.max(initial=-1)) + 1
        self._one_page_each = len(pages) == len(self._table) and np.array_equal(
            self._table[:, 0], np.arange(len(pages))
        )
        owner, start = np.zeros((2, self._used), np.int64)
        owner[pages], start[pages] = rows, numbers * self.size
        long = np.flatnonzero(counts > 1)
        self._owner = self._to_device(owner)
        self._start = self._to_device(start)
        self._first = self._to_device(self._table[:, 0])
        self._last = self._to_device(self._table[np.arange(len(counts)), counts - 1])
        self._row_lengths = self._to_device(self.lengths)
        self._long = self._to_device(long)
        self._long_table = self._to_device(self._table[long])
        self._absent = self._to_device(~has_page[long])
        self._mask_unused_slots()

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
