"""One part of attention: sequences of queries against keys, with the log-sum-exp for merging.

A kernel is made for one layout (boundaries of queries and keys, causal or not), and every layer
uses it: `forward(q [T, H, D], k and v [U, H_kv, D], scale)` → (out [T, H, D], lse float32 [T, H]),
and `backward(grad, q, k, v, out, lse, scale)` → (dq, dk, dv), where `out` and `lse` may belong to a
softmax over further keys. `KERNELS` lists the kernels in order of preference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional as F

from rlinf_vl.models.kernels.products import bfloat16_products, has_bfloat16_units
from rlinf_vl.models.transfer import on_device

# Operators below autograd: its backward would use one part's log-sum-exp, ours uses the merged one.
_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_varlen = torch.ops.aten._flash_attention_forward
_varlen_backward = torch.ops.aten._flash_attention_backward


class Kernel(Protocol):
    """One part of attention in one layout, for any number of layers."""

    #: Whether one call for all sequences is better than a call for each.
    batches_sequences: bool

    def __init__(
        self, cu_q: np.ndarray, cu_k: np.ndarray, causal: bool, device: torch.device | str
    ) -> None:
        """Sequence i has queries `cu_q[i] … cu_q[i + 1]` and keys `cu_k[i] … cu_k[i + 1]`."""
        ...

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out [T, H, D] in q's dtype, log-sum-exp of the scores, float32 [T, H])."""
        ...

    def backward(
        self, grad, q, k, v, out, lse, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (dq, dk, dv) of these keys' part of attention.

        `out` and `lse` are the merged ones; `grad` is the gradient of the merged `out`.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """The sequences of one call: one sequence, or a right-padded batch of n sequences.

    Attributes:
        rows: the rows of the queries, a slice; for a batch int64 [n, L], any row for padding.
        keys: the rows of the keys, likewise.
        padding: for a batch, bool [n, 1, L, 1], True for padded queries.
        real: for a batch, int64: the numbers of those of its n · L queries that are not padding.
        real_keys: for a batch, the same of its keys.
        mask: [n, 1, 1, U], -inf for keys that are padding, else 0; None if no query sees any.
    """

    rows: torch.Tensor | slice
    keys: torch.Tensor | slice
    padding: torch.Tensor | None = None
    real: torch.Tensor | None = None
    real_keys: torch.Tensor | None = None
    mask: torch.Tensor | None = None


class FlashCpu:
    """PyTorch's flash attention for the CPU.

    Sequences of up to `BATCHED` queries whose numbers of keys lie within a factor `SLACK` are
    attended as one right-padded batch. A longer sequence gets its own call, which needs no copies.
    """

    BATCHED, SLACK = 32, 1.3  # measured
    batches_sequences = False

    def __init__(
        self, cu_q: np.ndarray, cu_k: np.ndarray, causal: bool, device: torch.device | str
    ) -> None:
        """Sort the sequences by their number of keys, and batch short ones of similar numbers."""
        self.causal = causal
        n_queries, n_keys = np.diff(cu_q), np.diff(cu_k)
        nonempty = np.flatnonzero(n_queries)
        order = nonempty[np.lexsort((-n_keys[nonempty], n_queries[nonempty] <= self.BATCHED))]
        self.parts: list[_Part] = []
        # `order` has the long sequences first, each part's by falling number of keys: a batch is a
        # run of neighbours in it.
        first = 0
        while first < len(order):
            last = first + 1
            if n_queries[order[first]] <= self.BATCHED:
                last = first + int(
                    np.searchsorted(
                        -n_keys[order[first:]] * self.SLACK, -n_keys[order[first]], "right"
                    )
                )
            members = order[first:last]
            if len(members) == 1:
                rows, keys = (
                    slice(int(cu[members[0]]), int(cu[members[0] + 1])) for cu in (cu_q, cu_k)
                )
                self.parts.append(_Part(rows, keys))
            else:
                rows, padding, real = _padded(cu_q, members)
                keys, key_padding, real_keys = (
                    (rows, padding, real) if cu_k is cu_q else _padded(cu_k, members)
                )
                # In causal attention no real query reaches the padding, which follows the real
                # keys.
                mask = None
                if not causal and key_padding.any():
                    mask = torch.zeros(key_padding.shape).masked_fill_(key_padding, -torch.inf)[
                        :, None, None
                    ]
                self.parts.append(
                    _Part(rows, keys, padding[:, None, :, None], real, real_keys, mask)
                )
            first = last

    def forward(self, q, k, v, scale):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        for part in self.parts:
            attended, part_lse = _flash_cpu(
                _heads(q, part.rows),
                _heads(k, part.keys),
                _heads(v, part.keys),
                0.0,
                self.causal,
                attn_mask=part.mask,
                scale=scale,
            )
            # One unpadded sequence is the whole layout: its result needs no copy.
            if len(self.parts) == 1 and part.real is None:
                return attended[0].transpose(0, 1), part_lse[0].t()
            _put(out, part.rows, part.real, attended.transpose(1, 2))
            _put(lse, part.rows, part.real, part_lse.transpose(1, 2))
        return out, lse

    def backward(self, grad, q, k, v, out, lse, scale):
        dtype = q.dtype
        # In float32: PyTorch's bfloat16 backward is slower on a CPU (4 times for 100 queries).
        grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for part in self.parts:
            part_grad, part_lse = _heads_of_queries(grad, lse, part)
            part_dq, part_dk, part_dv = _flash_cpu_backward(
                part_grad,
                _heads(q, part.rows),
                _heads(k, part.keys),
                _heads(v, part.keys),
                _heads(out, part.rows),
                part_lse.squeeze(3),
                0.0,
                self.causal,
                attn_mask=part.mask,
                scale=scale,
            )
            _put(dq, part.rows, part.real, part_dq.transpose(1, 2))
            _put(dk, part.keys, part.real_keys, part_dk.transpose(1, 2))
            _put(dv, part.keys, part.real_keys, part_dv.transpose(1, 2))
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)


class AmxCpu(FlashCpu):
    """`FlashCpu` with a backward of batched bfloat16 products, for CPUs with bfloat16 units.

    A batch entry is one sequence and key head. Scores are exact to float32. PyTorch's own bfloat16
    backward is up to 4 times slower than its float32 one, which in turn is slower than this.
    """

    BATCHED = 128

    def backward(self, grad, q, k, v, out, lse, scale):
        # Per call, with p = exp(scale · q kᵀ - lse) and Δ = rowsum(dO · O):
        #   dS = p · scale · (dO vᵀ - Δ),   dq = dS k,   dk = dSᵀ q,   dv = pᵀ dO
        kv_heads = k.shape[1]
        delta = (grad * out).sum(-1, keepdim=True).mul_(scale)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for part in self.parts:
            part_grad, part_lse = _heads_of_queries(grad, lse, part)
            g, s = _by_key_head(part_grad, kv_heads), _by_key_head(part_lse, kv_heads)
            queries, d = (_by_key_head(_heads(x, part.rows), kv_heads) for x in (q, delta))
            k_part, v_part = (_by_key_head(_heads(x, part.keys), kv_heads) for x in (k, v))
            # baddbmm subtracts the log-sum-exp in the pass of the product.
            with bfloat16_products(q):
                p = torch.baddbmm(
                    s, queries.float(), k_part.float().transpose(1, 2), beta=-1, alpha=scale
                ).exp_()
            # The query heads of a key head lie below each other, each an [L, L] block of its own.
            if self.causal:
                p.view(-1, k_part.shape[1], k_part.shape[1]).tril_()
            if part.mask is not None:
                p.view(len(part.mask), -1, *p.shape[1:]).masked_fill_(part.mask.isinf(), 0.0)
            p = p.to(q.dtype)
            ds = p * torch.baddbmm(d, g, v_part.transpose(1, 2), beta=-1, alpha=scale)
            _put_by_key_head(dq, part.rows, part.real, torch.bmm(ds, k_part))
            _put_by_key_head(dk, part.keys, part.real_keys, torch.bmm(ds.transpose(1, 2), queries))
            _put_by_key_head(dv, part.keys, part.real_keys, torch.bmm(p.transpose(1, 2), g))
        return dq, dk, dv


def _padded(cu: np.ndarray, members: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lay out sequences of `cu` as a right-padded batch.

    Returns the rows int64 [n, L], any row for padding; which of them are padding, bool [n, L]; and
    the numbers of those of the n · L rows that are not, int64.
    """
    lengths = np.diff(cu)[members]
    offsets = np.arange(lengths.max())
    padding = torch.from_numpy(offsets >= lengths[:, None])
    rows = torch.from_numpy(np.minimum(cu[members][:, None] + offsets, cu[-1] - 1))
    return rows, padding, (~padding).flatten().nonzero().squeeze(1)


def _by_key_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Group the query heads by key head: [n, H, L, D] → [n · H_kv, H / H_kv · L, D], contiguous."""
    return x.reshape(len(x) * kv_heads, -1, x.shape[-1])


def _heads(x: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    """Take rows as heads: [T, H, D] → [n, H, L, D].

    The result is a view where `rows` is a slice, and gathered where it is an index [n, L].
    """
    if isinstance(rows, slice):
        return x[rows].transpose(0, 1).unsqueeze(0)
    return x.index_select(0, rows.view(-1)).view(*rows.shape, *x.shape[1:]).transpose(1, 2)


def _heads_of_queries(
    grad: torch.Tensor, lse: torch.Tensor, part: _Part
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take gradient [n, H, L, D] and log-sum-exp [n, H, L, 1] of a part's queries.

    Padding has gradient 0 and log-sum-exp inf, so that p = exp(s - inf) = 0.
    """
    g, s = _heads(grad, part.rows), _heads(lse.unsqueeze(2), part.rows)
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


def _put_by_key_head(
    x: torch.Tensor, rows: torch.Tensor | slice, real: torch.Tensor | None, values: torch.Tensor
) -> None:
    """Undo the grouping of `_by_key_head`, and set x[rows] = values, padding left out."""
    length = rows.stop - rows.start if isinstance(rows, slice) else rows.shape[1]
    _put(x, rows, real, values.view(-1, x.shape[1], length, x.shape[2]).transpose(1, 2))


class Varlen:
    """FlashAttention for sequences of different lengths on CUDA, in bfloat16 and float16.

    It is the kernel behind `torch.nn.attention.varlen`, called below its autograd so that its
    backward takes the merged log-sum-exp.
    """

    batches_sequences = True

    def __init__(
        self, cu_q: np.ndarray, cu_k: np.ndarray, causal: bool, device: torch.device | str
    ) -> None:
        self.causal = causal
        # Empty sequences are left out: with grouped heads and no sequence longer than a token, the
        # kernel mistakes the number of sequences for the number of tokens.
        ends = 1 + np.flatnonzero(np.diff(cu_q) + np.diff(cu_k))
        bounds = [cu[[0, *ends]] for cu in (cu_q, cu_k)]
        self.cu = [on_device(cu.astype(np.int32), device) for cu in bounds]
        self.longest = [int(np.diff(cu).max()) for cu in bounds]

    def forward(self, q, k, v, scale):
        # Backward takes dropout's random state, though the rate is 0.
        out, lse, self.rng, self.unused, _ = _varlen(
            *map(_to_eighths, (q, k, v)),
            *self.cu,
            *self.longest,
            0.0,
            self.causal,
            False,
            scale=scale,
        )
        return out[..., : q.shape[2]], lse.t().contiguous()

    def backward(self, grad, q, k, v, out, lse, scale):
        grads = _varlen_backward(
            *map(_to_eighths, (grad.contiguous(), q, k, v, out)),
            lse.t().contiguous(),
            *self.cu,
            *self.longest,
            0.0,
            self.causal,
            self.rng,
            self.unused,
            scale=scale,
        )
        return tuple(x[..., : q.shape[2]] for x in grads)


def _to_eighths(x: torch.Tensor) -> torch.Tensor:
    """Pad each head of [T, H, D] with zeros to a multiple of 8, which the kernel requires."""
    return F.pad(x, (0, -x.shape[2] % 8)) if x.shape[2] % 8 else x


class Matmul:
    """Plain matrix products in float32, sequence by sequence, for every device and dtype.

    Tests compare the other kernels with it. Suffixes of names are dimensions: K key heads, R query
    heads per key head, L queries, U keys, D head size.
    """

    batches_sequences = True

    def __init__(
        self, cu_q: np.ndarray, cu_k: np.ndarray, causal: bool, device: torch.device | str
    ) -> None:
        self.causal = causal
        self.spans = [
            (slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2]))
            for i in range(len(cu_q) - 1)
            if cu_q[i] < cu_q[i + 1]
        ]

    def _scores(self, q_KRLD, k_KUD, scale):
        """Return the scaled scores [K, R, L, U], -inf for keys after a query if causal."""
        scores = torch.einsum("krld,kud->krlu", q_KRLD, k_KUD) * scale
        if self.causal:
            future = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        return scores

    def forward(self, q, k, v, scale):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        for rows, keys in self.spans:
            q_KRLD = _by_kv_head(q[rows], k.shape[1])
            k_KUD, v_KUD = (x[keys].transpose(0, 1).float() for x in (k, v))
            scores = self._scores(q_KRLD, k_KUD, scale)
            lse_KRL = scores.logsumexp(-1)
            lse[rows] = lse_KRL.flatten(0, 1).t()
            out[rows] = _to_rows(
                torch.einsum("krlu,kud->krld", (scores - lse_KRL[..., None]).exp(), v_KUD)
            ).to(out.dtype)
        return out, lse

    def backward(self, grad, q, k, v, out, lse, scale):
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for rows, keys in self.spans:
            g, q_KRLD, o = (_by_kv_head(x[rows], k.shape[1]) for x in (grad, q, out))
            k_KUD, v_KUD = (x[keys].transpose(0, 1).float() for x in (k, v))
            p = (
                self._scores(q_KRLD, k_KUD, scale) - _by_kv_head(lse[rows][..., None], k.shape[1])
            ).exp()
            ds = (
                p
                * (torch.einsum("krld,kud->krlu", g, v_KUD) - (g * o).sum(-1, keepdim=True))
                * scale
            )
            dq[rows] = _to_rows(torch.einsum("krlu,kud->krld", ds, k_KUD)).to(dq.dtype)
            dk[keys] = torch.einsum("krlu,krld->ukd", ds, q_KRLD).to(dk.dtype)
            dv[keys] = torch.einsum("krlu,krld->ukd", p, g).to(dv.dtype)
        return dq, dk, dv


def _by_kv_head(x_LHD: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Group the query heads by key head: [L, H, D] → float32 [H_kv, H / H_kv, L, D]."""
    return x_LHD.transpose(0, 1).unflatten(0, (kv_heads, -1)).float()


def _to_rows(x_KRLD: torch.Tensor) -> torch.Tensor:
    """Undo the grouping of `_by_kv_head`: [H_kv, H / H_kv, L, D] → [L, H, D]."""
    return x_KRLD.flatten(0, 1).transpose(0, 1)


#: name → (class, whether it serves a device type and dtype); the first that serves is used.
KERNELS: dict[str, tuple[type[Kernel], Callable[[str, torch.dtype], bool]]] = {
    "varlen": (
        Varlen,
        lambda device, dtype: device == "cuda" and dtype in (torch.bfloat16, torch.float16),
    ),
    "amx_cpu": (
        AmxCpu,
        lambda device, dtype: device == "cpu" and dtype == torch.bfloat16 and has_bfloat16_units(),
    ),
    "flash_cpu": (FlashCpu, lambda device, dtype: device == "cpu" and dtype != torch.float16),
    "matmul": (Matmul, lambda device, dtype: True),
}


def kernel_for(device: torch.device, dtype: torch.dtype, name: str | None = None) -> type[Kernel]:
    """Return the class of the kernel `name`, or the first of `KERNELS` for this device and dtype.

    Raises:
        ValueError: `name` is unknown, or does not serve this device and dtype.
    """
    serving = [n for n, (_, serves) in KERNELS.items() if serves(device.type, dtype)]
    if name is not None and name not in serving:
        raise ValueError(
            f"attention kernel {name!r} does not serve {dtype} on {device.type}; these do: "
            f"{serving}"
        )
    return KERNELS[name or serving[0]][0]
