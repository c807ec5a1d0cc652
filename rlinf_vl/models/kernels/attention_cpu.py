"""Attention's kernels for a CPU, see `rlinf_vl.models.kernels.attention`."""

from dataclasses import dataclass

import numpy as np
import torch

from rlinf_vl.models.kernels.products import bfloat16_products

# Operators below autograd: its backward would use one part's log-sum-exp, ours uses the merged one.
_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class _Spans:
    """Sequences of queries and their keys, each array int64 [n]."""

    first_query: np.ndarray
    queries: np.ndarray
    first_key: np.ndarray
    keys: np.ndarray

    def select(self, members: np.ndarray) -> "_Spans":
        """Return these of the sequences."""
        return _Spans(
            self.first_query[members],
            self.queries[members],
            self.first_key[members],
            self.keys[members],
        )

    def within(self, window: int, chunk: int) -> "_Spans":
        """Split the queries into runs of at most `chunk`, each with the keys in its windows."""
        counts = -(-self.queries // chunk)
        sequence = np.repeat(np.arange(len(counts)), counts)
        # Queries of the sequence before the run.
        begin = (np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)) * chunk
        end = np.minimum(begin + chunk, self.queries[sequence])
        keys_before = (self.keys - self.queries)[sequence]
        first_key = np.maximum(keys_before + begin - window + 1, 0)
        return _Spans(
            self.first_query[sequence] + begin,
            end - begin,
            self.first_key[sequence] + first_key,
            keys_before + end - first_key,
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """The sequences of one call: one sequence, or a right-padded batch of n sequences.

    Attributes:
        rows: the rows of the queries, a slice; for a batch int64 [n, L], any row for padding.
        keys: the rows of the keys, likewise.
        padding: for a batch, bool [n, 1, L, 1], True for padded queries.
        real: for a batch, int64: the numbers of those of its n · L queries that are not padding.
        real_keys: for a batch, the same of its keys.
        mask: [n, 1, 1|L, U], -inf for keys that a query does not see, else 0; None for no such
            keys, or only those that causal attention leaves out.
        sequences: for slices, how many sequences of equal lengths lie in them, end to end.
    """

    rows: torch.Tensor | slice
    keys: torch.Tensor | slice
    padding: torch.Tensor | None = None
    real: torch.Tensor | None = None
    real_keys: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    sequences: int = 1


class FlashCpu:
    """PyTorch's flash attention for the CPU.

    Neighbours of equal lengths, such as images of one size, are attended as one batch, which is a
    view of their rows. Of others, sequences of up to `BATCHED` queries whose numbers of keys lie
    within a factor `SLACK` are attended as one right-padded batch. A longer sequence gets its own
    call. Views need no copies. Within a window, each `CHUNK` queries have a call, with the keys
    that they see.
    """

    BATCHED, SLACK = 32, 1.3  # measured
    EQUAL = 1 << 20  # longest sequences that are attended as a batch of equal lengths
    CHUNK = 256
    batches_sequences = False

    def __init__(
        self,
        cu_q: np.ndarray,
        cu_k: np.ndarray,
        causal: bool,
        device: torch.device | str,
        window: int | None = None,
    ) -> None:
        """Sort the sequences by their number of keys, and batch short ones of similar numbers."""
        # Windows are masks, and the operator takes no mask if it is causal.
        self.causal, self.window = causal and window is None, window
        self.parts: list[_Part] = []
        n_queries, n_keys = np.diff(cu_q), np.diff(cu_k)
        spans = _Spans(cu_q[:-1], n_queries, cu_k[:-1], n_keys)
        if window is not None:
            spans = spans.within(window, self.CHUNK)
        elif _all_equal(n_queries) and _all_equal(n_keys) and n_queries[0] <= self.EQUAL:
            rows, keys = (slice(int(cu[0]), int(cu[-1])) for cu in (cu_q, cu_k))
            self.parts.append(_Part(rows, keys, sequences=len(n_queries)))
            return
        nonempty = np.flatnonzero(spans.queries)
        is_short = spans.queries[nonempty] <= self.BATCHED
        order = nonempty[np.lexsort((-spans.keys[nonempty], is_short))]
        # `order` has the long sequences first, each part's by falling number of keys: a batch is a
        # run of neighbours in it.
        first = 0
        while first < len(order):
            last = first + 1
            if spans.queries[order[first]] <= self.BATCHED:
                sizes = spans.keys[order[first:]]
                last = first + int(np.searchsorted(-sizes * self.SLACK, -sizes[0], "right"))
            self.parts.append(self._part(spans.select(order[first:last])))
            first = last

    def _part(self, spans: _Spans) -> _Part:
        """Return the call of these sequences."""
        mask = None if self.window is None else _window_mask(spans, self.window)
        if len(spans.queries) == 1:
            first, first_key = int(spans.first_query[0]), int(spans.first_key[0])
            rows = slice(first, first + int(spans.queries[0]))
            return _Part(rows, slice(first_key, first_key + int(spans.keys[0])), mask=mask)
        rows, padding, real = _padded(spans.first_query, spans.queries)
        keys, key_padding, real_keys = _padded(spans.first_key, spans.keys)
        # In causal attention no real query reaches the padding, which follows the real keys.
        if mask is None and not self.causal and key_padding.any():
            mask = _minus_infinity(key_padding[:, None, None])
        return _Part(rows, keys, padding[:, None, :, None], real, real_keys, mask)

    def forward(self, q, k, v, scale):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        for part in self.parts:
            attended, part_lse = _flash_cpu(
                _heads(q, part.rows, part.sequences),
                _heads(k, part.keys, part.sequences),
                _heads(v, part.keys, part.sequences),
                0.0,
                self.causal,
                attn_mask=part.mask,
                scale=scale,
            )
            # One batch without padding is the whole layout: its result needs no copy.
            if len(self.parts) == 1 and isinstance(part.rows, slice):
                return attended.transpose(1, 2).flatten(0, 1), part_lse.transpose(1, 2).flatten(
                    0, 1
                )
            _put(out, part.rows, part.real, attended.transpose(1, 2))
            _put(lse, part.rows, part.real, part_lse.transpose(1, 2))
        return out, lse

    def backward(self, grad, q, k, v, out, lse, scale):
        dtype = q.dtype
        # In float32: PyTorch's bfloat16 backward is slower on a CPU (4 times for 100 queries).
        grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
        dq, dk, dv = torch.empty_like(q), *self._empty_gradients(k, v)
        for part in self.parts:
            part_grad, part_lse = _heads_of_queries(grad, lse, part)
            part_dq, part_dk, part_dv = _flash_cpu_backward(
                part_grad,
                _heads(q, part.rows, part.sequences),
                _heads(k, part.keys, part.sequences),
                _heads(v, part.keys, part.sequences),
                _heads(out, part.rows, part.sequences),
                part_lse.squeeze(3),
                0.0,
                self.causal,
                attn_mask=part.mask,
                scale=scale,
            )
            _put(dq, part.rows, part.real, part_dq.transpose(1, 2))
            put = _put if self.window is None else _add
            put(dk, part.keys, part.real_keys, part_dk.transpose(1, 2))
            put(dv, part.keys, part.real_keys, part_dv.transpose(1, 2))
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)

    def _empty_gradients(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return memory for gradients of keys or values.

        A key is in the windows of several calls, whose gradients are added up in float32.
        """
        if self.window is None:
            return [torch.empty_like(x) for x in tensors]
        return [torch.zeros_like(x, dtype=torch.float32) for x in tensors]


class AmxCpu(FlashCpu):
    """`FlashCpu` with a backward of batched bfloat16 products, for CPUs with bfloat16 units.

    A batch entry is one sequence and key head. Scores are exact to float32. PyTorch's own bfloat16
    backward is up to 4 times slower than its float32 one, which in turn is slower than this.
    """

    BATCHED = EQUAL = 128  # the scores of a whole batch exist at once

    def backward(self, grad, q, k, v, out, lse, scale):
        # Per call, with p = exp(scale · q kᵀ - lse) and Δ = rowsum(dO · O):
        #   dS = p · scale · (dO vᵀ - Δ),   dq = dS k,   dk = dSᵀ q,   dv = pᵀ dO
        kv_heads = k.shape[1]
        delta = (grad * out).sum(-1, keepdim=True).mul_(scale)
        dq, dk, dv = torch.empty_like(q), *self._empty_gradients(k, v)
        put = _put if self.window is None else _add
        for part in self.parts:
            part_grad, part_lse = _heads_of_queries(grad, lse, part)
            g, s = _by_key_head(part_grad, kv_heads), _by_key_head(part_lse, kv_heads)
            queries, d = (
                _by_key_head(_heads(x, part.rows, part.sequences), kv_heads) for x in (q, delta)
            )
            k_part, v_part = (
                _by_key_head(_heads(x, part.keys, part.sequences), kv_heads) for x in (k, v)
            )
            # baddbmm subtracts the log-sum-exp in the pass of the product.
            with bfloat16_products(q):
                p = torch.baddbmm(
                    s, queries.float(), k_part.float().transpose(1, 2), beta=-1, alpha=scale
                ).exp_()
            # The query heads of a key head lie below each other, each an [L, L] block of its own.
            if self.causal:
                p.view(-1, k_part.shape[1], k_part.shape[1]).tril_()
            if part.mask is not None:
                by_query = p.view(len(part.mask), -1, part_grad.shape[2], p.shape[2])
                by_query.masked_fill_(part.mask.isinf(), 0.0)
            p = p.to(q.dtype)
            ds = p * torch.baddbmm(d, g, v_part.transpose(1, 2), beta=-1, alpha=scale)
            values = (
                (_put, dq, part.rows, part.real, torch.bmm(ds, k_part)),
                (put, dk, part.keys, part.real_keys, torch.bmm(ds.transpose(1, 2), queries)),
                (put, dv, part.keys, part.real_keys, torch.bmm(p.transpose(1, 2), g)),
            )
            for put_values, x, rows, real, by_key_head in values:
                by_row = _by_row(by_key_head, x.shape[1], part.sequences, rows)
                put_values(x, rows, real, by_row)
        return dq, dk.to(k.dtype), dv.to(v.dtype)


def _all_equal(lengths: np.ndarray) -> bool:
    """Return whether there are sequences, none of them empty, and all have one length."""
    return bool(len(lengths) and lengths[0] and (lengths == lengths[0]).all())


def _padded(
    starts: np.ndarray, lengths: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lay out sequences as a right-padded batch.

    Returns the rows int64 [n, L], any row of the sequence for padding; which of them are padding,
    bool [n, L]; and the numbers of those of the n · L rows that are not, int64.
    """
    offsets = np.arange(lengths.max())
    padding = torch.from_numpy(offsets >= lengths[:, None])
    last = np.maximum(lengths - 1, 0)[:, None]
    rows = torch.from_numpy(starts[:, None] + np.minimum(offsets, last))
    return rows, padding, (~padding).flatten().nonzero().squeeze(1)


def _window_mask(spans: _Spans, window: int) -> torch.Tensor:
    """Return the mask [n, 1, L, U] of causal attention within a window, see `_Part.mask`."""
    queries, keys = np.arange(spans.queries.max()), np.arange(spans.keys.max())
    # Padded queries see what the last one sees, so that none sees nothing.
    numbers = np.minimum(queries, spans.queries[:, None] - 1)
    key_of_query = ((spans.keys - spans.queries)[:, None] + numbers)[:, :, None]
    hidden = (keys > key_of_query) | (keys <= key_of_query - window)
    return _minus_infinity(torch.from_numpy(hidden)[:, None])


def _minus_infinity(hidden: torch.Tensor) -> torch.Tensor:
    """Return float32, -inf where `hidden` is set, else 0."""
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _by_key_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Group the query heads by key head: [n, H, L, D] → [n · H_kv, H / H_kv · L, D], contiguous."""
    return x.reshape(len(x) * kv_heads, -1, x.shape[-1])


def _heads(x: torch.Tensor, rows: torch.Tensor | slice, sequences: int) -> torch.Tensor:
    """Take rows as heads: [T, H, D] → [n, H, L, D].

    The result is a view where `rows` is a slice of so many sequences, and gathered where it is an
    index [n, L].
    """
    if isinstance(rows, slice):
        return x[rows].unflatten(0, (sequences, -1)).transpose(1, 2)
    return x.index_select(0, rows.view(-1)).view(*rows.shape, *x.shape[1:]).transpose(1, 2)


def _heads_of_queries(
    grad: torch.Tensor, lse: torch.Tensor, part: _Part
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take gradient [n, H, L, D] and log-sum-exp [n, H, L, 1] of a part's queries.

    Padding has gradient 0 and log-sum-exp inf, so that p = exp(s - inf) = 0.
    """
    g, s = (_heads(x, part.rows, part.sequences) for x in (grad, lse.unsqueeze(2)))
    if part.padding is not None:
        g, s = g.masked_fill(part.padding, 0.0), s.masked_fill(part.padding, torch.inf)
    return g, s


def _put(
    x: torch.Tensor, rows: torch.Tensor | slice, real: torch.Tensor | None, values: torch.Tensor
) -> None:
    """Set x[rows] = values [n, L, …], padding left out."""
    values = values.flatten(0, 1)
    if isinstance(rows, slice) or real is None:
        x[rows] = values
    else:  # rows of padding name other rows, whose values must stay
        x.index_copy_(0, rows.view(-1)[real], values.index_select(0, real).to(x.dtype))


def _add(
    x: torch.Tensor, rows: torch.Tensor | slice, real: torch.Tensor | None, values: torch.Tensor
) -> None:
    """Add values [n, L, …] to x[rows], padding left out; a batch may name a row several times."""
    values = values.flatten(0, 1)
    if isinstance(rows, slice) or real is None:
        x[rows] += values
    else:
        x.index_add_(0, rows.view(-1)[real], values.index_select(0, real).to(x.dtype))


def _by_row(
    values: torch.Tensor, n_heads: int, sequences: int, rows: torch.Tensor | slice
) -> torch.Tensor:
    """Undo the grouping of `_by_key_head`: [n · H_kv, H / H_kv · L, D] → [n, L, H, D]."""
    n = sequences if isinstance(rows, slice) else len(rows)
    return values.view(n, n_heads, -1, values.shape[-1]).transpose(1, 2)
