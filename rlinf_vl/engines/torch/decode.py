"""Keys and values of the rows being decoded, and attention over them.

A group's prompt is held once, however many samples are drawn from it: the queries of its rows attend to it as one batch
(as in Juravsky et al. 2024, "Hydragen"), each row attends to its own continuation, and the two softmax parts are merged by
their log-sum-exp, which is exact.
"""

import torch

from rlinf_vl.models.kernels.products import bfloat16_products


class DecodeCache:
    """Rows S being decoded over N prompts; an `AttentionContext` for one token per row.

    Per layer: `prompt_k/v` [N, H_kv, P, D] right-padded, `own_k/v` [S, H_kv, capacity, D].
    `group` int64 [S] is each row's prompt, non-decreasing; `prompt_len` int64 [N]; `own_len` int64 [S].
    """

    def __init__(self, n_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        def empty() -> list[torch.Tensor]:
            return [torch.zeros(0, kv_heads, 0, head_dim, dtype=dtype, device=device) for _ in range(n_layers)]

        self.device = device
        self.prompt_k, self.prompt_v, self.own_k, self.own_v = empty(), empty(), empty(), empty()
        self.prompt_len = torch.zeros(0, dtype=torch.int64, device=device)
        self.own_len = torch.zeros(0, dtype=torch.int64, device=device)
        self.group = torch.zeros(0, dtype=torch.int64, device=device)
        self._index_rows()

    @property
    def rows(self) -> int:
        return len(self.group)

    def append(
        self, captured: dict[int, tuple[torch.Tensor, torch.Tensor]], prompt_lens: list[int], samples: list[int]
    ) -> None:
        """Add prompts just prefilled (`captured[layer]` = k, v [sum of prompt_lens, H_kv, D]), with `samples[i]` rows each."""
        new = torch.tensor(prompt_lens, device=self.device)
        longest = max([*prompt_lens, self.prompt_k[0].shape[2]])
        offsets = torch.arange(longest, device=self.device)
        inside = offsets < new[:, None]
        index = torch.where(inside, (new.cumsum(0) - new)[:, None] + offsets, 0)
        for layer, (k, v) in captured.items():
            for store, fresh in ((self.prompt_k, k), (self.prompt_v, v)):
                grown = _widen(store[layer], longest)
                store[layer] = torch.cat([grown, fresh[index].transpose(1, 2)])  # [N + n, H_kv, P, D]
        rows = torch.tensor(samples, device=self.device)
        fresh_group = torch.repeat_interleave(torch.arange(len(new), device=self.device), rows) + len(self.prompt_len)
        for store in (self.own_k, self.own_v):
            for layer, held in enumerate(store):
                store[layer] = torch.cat([held, held.new_zeros(len(fresh_group), *held.shape[1:])])
        self.prompt_len = torch.cat([self.prompt_len, new])
        self.own_len = torch.cat([self.own_len, torch.zeros(len(fresh_group), dtype=torch.int64, device=self.device)])
        self.group = torch.cat([self.group, fresh_group])
        self._index_rows()

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but `rows` (int64, ascending), and the prompts that no row is left of."""
        groups, self.group = torch.unique(self.group[rows], return_inverse=True)
        self.own_len = self.own_len[rows]
        own = int(self.own_len.max()) if len(rows) else 0
        for store in (self.own_k, self.own_v):
            for layer, held in enumerate(store):
                store[layer] = held[rows, :, :own]
        if len(groups) < len(self.prompt_len):
            self.prompt_len = self.prompt_len[groups]
            prompt = int(self.prompt_len.max()) if len(groups) else 0
            for store in (self.prompt_k, self.prompt_v):
                for layer, held in enumerate(store):
                    store[layer] = held[groups, :, :prompt]
        self._index_rows()

    def _index_rows(self) -> None:
        """Where each row stands in the [N, M] grid of prompts and their rows (M: most rows of a prompt)."""
        counts = torch.bincount(self.group, minlength=len(self.prompt_len))
        self.width = int(counts.max()) if len(counts) else 0
        first = counts.cumsum(0) - counts
        self.slot = self.group * self.width + torch.arange(self.rows, device=self.device) - first[self.group]
        self.dense = self.rows == len(counts) * self.width
        prompt = torch.arange(self.prompt_k[0].shape[2], device=self.device)
        beyond = prompt >= self.prompt_len[:, None]
        self.prompt_mask = beyond[:, None, None, :] if bool(beyond.any()) else None

    def begin_step(self) -> None:
        """Make room for one more token per row; call before each decoding forward."""
        self.length = int(self.own_len.max()) + 1
        if self.length > self.own_k[0].shape[2]:
            capacity = max(self.length + 15, self.length * 3 // 2)
            for store in (self.own_k, self.own_v):
                for layer, held in enumerate(store):
                    store[layer] = _widen(held, capacity)
        self.all_rows = torch.arange(self.rows, device=self.device)
        beyond = torch.arange(self.length, device=self.device) > self.own_len[:, None]
        self.own_mask = beyond[:, None, None, :] if bool(beyond.any()) else None

    def end_step(self) -> None:
        """Every row is one token longer; call after each decoding forward."""
        self.own_len = self.own_len + 1

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [S, H, 1, D], k and v [S, H_kv, 1, D] of the rows' newest tokens → [S, 1, H, D]."""
        rows, heads, _, dim = q.shape
        kv_heads = k.shape[1]
        q = q.reshape(rows, kv_heads, heads // kv_heads, dim)
        self.own_k[layer][self.all_rows, :, self.own_len] = k[:, :, 0]
        self.own_v[layer][self.all_rows, :, self.own_len] = v[:, :, 0]
        own_k, own_v = self.own_k[layer][:, :, : self.length], self.own_v[layer][:, :, : self.length]
        own = _partial(q, own_k, own_v, self.own_mask, scaling)
        shared = [self._from_grid(x, rows) for x in self._shared(layer, self._to_grid(q), scaling)]
        return _merge(own, shared).to(v.dtype).reshape(rows, 1, heads, dim)

    def _shared(self, layer: int, q_grid: torch.Tensor, scaling: float):
        n, width, kv_heads, repeat, dim = q_grid.shape
        q = q_grid.transpose(1, 2).reshape(n, kv_heads, width * repeat, dim)
        parts = _partial(q, self.prompt_k[layer], self.prompt_v[layer], self.prompt_mask, scaling)
        return [x.reshape(n, kv_heads, width, repeat, -1).transpose(1, 2) for x in parts]

    def _to_grid(self, x: torch.Tensor) -> torch.Tensor:
        shape = (len(self.prompt_len), self.width, *x.shape[1:])
        if self.dense:
            return x.reshape(shape)
        grid = x.new_zeros(shape[0] * shape[1], *shape[2:])
        grid[self.slot] = x
        return grid.reshape(shape)

    def _from_grid(self, grid: torch.Tensor, rows: int) -> torch.Tensor:
        flat = grid.reshape(-1, *grid.shape[2:])
        return flat if self.dense else flat[self.slot]


def _partial(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scaling: float):
    """Unnormalised attention over one part of the keys: (output [.., Q, D], sum of weights, maximum [.., Q, 1]), float32."""
    if q.dtype == torch.float32:
        scores = (q * scaling) @ k.transpose(-1, -2)
    else:  # a scaled query would be rounded
        scores = _product(q, k.transpose(-1, -2)).mul_(scaling)
    if mask is not None:
        scores = scores.masked_fill_(mask, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp_()
    return _product(weights.to(v.dtype), v), weights.sum(-1, keepdim=True), top


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b for [n, H_kv, ·, ·] in float32: the trainer's kernels don't round scores to bfloat16, so neither may the sampler."""
    if a.is_cuda and a.dtype != torch.float32:
        product = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return product.unflatten(0, a.shape[:2])
    with bfloat16_products(a):
        return a.float() @ b.float()


def _merge(a, b) -> torch.Tensor:
    (out_a, sum_a, top_a), (out_b, sum_b, top_b) = a, b
    top = torch.maximum(top_a, top_b)
    scale_a, scale_b = (top_a - top).exp(), (top_b - top).exp()
    return (out_a * scale_a + out_b * scale_b) / (sum_a * scale_a + sum_b * scale_b)


def _widen(x: torch.Tensor, length: int) -> torch.Tensor:
    """Pad dimension 2 with zeros to `length`."""
    if x.shape[2] >= length:
        return x
    return torch.cat([x, x.new_zeros(*x.shape[:2], length - x.shape[2], x.shape[3])], dim=2)
