"""How one part of attention is computed: sequences of queries against their keys, with the log-sum-exp that merging needs.

A kernel is made for one layout (boundaries of queries and keys, causal or not) and used by every layer:
`forward(q [T, H, D], k and v [U, H_kv, D], scale)` → (out [T, H, D], lse float32 [T, H]), and
`backward(grad, q, k, v, out, lse, scale)` → (dq, dk, dv), where `out` and `lse` may be those of a softmax over more keys
than this part's. The order of `KERNELS` is the order of preference.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from rlinf_vl.models.precision import bfloat16_products, has_bfloat16_units

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_varlen = torch.ops.aten._flash_attention_forward
_varlen_backward = torch.ops.aten._flash_attention_backward


class Kernel(Protocol):
    """One part of attention in one layout, for any number of layers."""

    #: Whether one call for all sequences is better than a call for each.
    many: bool

    def __init__(self, cu_q: np.ndarray, cu_k: np.ndarray, causal: bool, device: torch.device | str) -> None:
        """Sequence i's queries are those of `cu_q[i:i + 2]`, its keys those of `cu_k[i:i + 2]`."""
        ...

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [T, H, D] in q's dtype, log-sum-exp of the scores, float32 [T, H])."""
        ...

    def backward(self, grad, q, k, v, out, lse, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) of these keys' share, given the merged `out` and `lse` and the gradient of `out`."""
        ...


class FlashCpu:
    """PyTorch's flash attention for the CPU.

    Short causal sequences (up to `BATCHED`) of similar length are attended as one right-padded batch: no real query sees
    the padding behind it, so no mask is needed. Lengths within a factor `SLACK` share a batch, so the padding is bounded.
    A longer one is worth a call of its own, which needs no copies.
    """

    BATCHED, SLACK = 48, 1.3  # measured
    many = False

    def __init__(self, cu_q: np.ndarray, cu_k: np.ndarray, causal: bool, device: torch.device | str) -> None:
        self.causal = causal
        lengths = np.diff(cu_q)
        filled = np.flatnonzero(lengths)
        self.parts: list[tuple[torch.Tensor | slice, torch.Tensor | slice, torch.Tensor | None]] = []
        if not causal:
            self.parts = [(slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2]), None) for i in filled]
            return
        order = filled[np.argsort(-lengths[filled], kind="stable")]
        first = 0
        while first < len(order):
            longest, last = int(lengths[order[first]]), first + 1
            if longest <= self.BATCHED:
                last = first + int(np.searchsorted(-lengths[order[first:]] * self.SLACK, -longest, side="right"))
            members = order[first:last]
            if len(members) == 1:
                rows = slice(int(cu_q[members[0]]), int(cu_q[members[0] + 1]))
                self.parts.append((rows, rows, None))
            else:
                offsets = np.arange(longest)[None, :]
                valid = torch.from_numpy((offsets < lengths[members][:, None]).ravel())
                rows = torch.from_numpy(np.minimum(cu_q[members][:, None] + offsets, cu_q[-1] - 1).ravel())
                self.parts.append((rows.view(len(members), longest), rows.view(len(members), longest), valid))
            first = last

    def forward(self, q, k, v, scale):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        for rows, keys, valid in self.parts:
            part, part_lse = _flash_cpu(
                _heads(q, rows), _heads(k, keys), _heads(v, keys), 0.0, self.causal, scale=scale
            )
            if len(self.parts) == 1 and valid is None:
                return part[0].transpose(0, 1), part_lse[0].t()
            _put(out, rows, valid, part.transpose(1, 2))
            _put(lse, rows, valid, part_lse.transpose(1, 2))
        return out, lse

    def backward(self, grad, q, k, v, out, lse, scale):
        dtype = q.dtype
        # In float32: PyTorch's bfloat16 backward is slower on a CPU (4 times for 100 queries).
        grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for rows, keys, valid in self.parts:
            g, part_lse = _heads_of_queries(grad, lse, rows, valid)
            inputs = [g, *(_heads(x, r) for x, r in ((q, rows), (k, keys), (v, keys), (out, rows)))]
            parts = _flash_cpu_backward(*inputs, part_lse.squeeze(3), 0.0, self.causal, scale=scale)
            for total, where, part in zip(grads, (rows, keys, keys), parts, strict=True):
                _put(total, where, valid, part.transpose(1, 2))
        dq, dk, dv = (x.to(dtype) for x in grads)
        return dq, dk, dv


class AmxCpu(FlashCpu):
    """Forward as `FlashCpu`; backward as batched bfloat16 products, one batch entry per sequence and head of the keys. Scores
    are exact to float32. (PyTorch's own bfloat16 backward is up to 4 times slower than its float32 one, and that than this.)
    """

    BATCHED = 128

    def backward(self, grad, q, k, v, out, lse, scale):
        delta = (grad * out).sum(-1, keepdim=True, dtype=torch.float32).mul_(scale).to(q.dtype)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for rows, keys, valid in self.parts:
            parts = *_heads_of_queries(grad, lse, rows, valid), _heads(q, rows), _heads(delta, rows)
            g, s, queries, d = (_by_key_head(x, k.shape[1]) for x in parts)
            k_part, v_part = (_by_key_head(_heads(x, keys), k.shape[1]) for x in (k, v))
            with bfloat16_products(q):
                p = torch.baddbmm(s, queries.float(), k_part.float().transpose(1, 2), beta=-1, alpha=scale).exp_()
            if self.causal:
                p.view(-1, k_part.shape[1], k_part.shape[1]).tril_()
            p = p.to(q.dtype)
            ds = p * torch.baddbmm(d, g, v_part.transpose(1, 2), beta=-1, alpha=scale)
            parts = torch.bmm(ds, k_part), torch.bmm(ds.transpose(1, 2), queries), torch.bmm(p.transpose(1, 2), g)
            for total, where, part in zip(grads, (rows, keys, keys), parts, strict=True):
                length = where.stop - where.start if isinstance(where, slice) else where.shape[1]
                _put(total, where, valid, part.view(-1, total.shape[1], length, total.shape[2]).transpose(1, 2))
        return grads


def _by_key_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[n, H, L, D] → [n · H_kv, H / H_kv · L, D], contiguous."""
    return x.reshape(len(x) * kv_heads, -1, x.shape[-1])


def _heads(x: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    """[T, H, D] → [n, H, L, D]: a view where `rows` is a slice, gathered where it is an index [n, L]."""
    if isinstance(rows, slice):
        return x[rows].transpose(0, 1).unsqueeze(0)
    return x.index_select(0, rows.view(-1)).view(*rows.shape, *x.shape[1:]).transpose(1, 2)


def _heads_of_queries(
    grad: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor | slice, valid: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient [n, H, L, D] and log-sum-exp [n, H, L, 1]. Queries that stand in for padding have no gradient, and
    p = exp(s - inf) = 0."""
    g, s = _heads(grad, rows), _heads(lse.unsqueeze(2), rows)
    if valid is not None:
        padding = ~valid.view(len(g), 1, -1, 1)
        g, s = g.masked_fill(padding, 0.0), s.masked_fill(padding, torch.inf)
    return g, s


def _put(x: torch.Tensor, rows: torch.Tensor | slice, valid: torch.Tensor | None, part: torch.Tensor) -> None:
    """x[rows] = part [n, L, …], padding left out."""
    part = part.flatten(0, 1)
    if isinstance(rows, slice):
        x[rows] = part
    else:
        x.index_copy_(0, rows.view(-1)[valid], part[valid].to(x.dtype))


class Varlen:
    """FlashAttention for sequences of different lengths on CUDA, bfloat16 and float16: the kernel behind
    `torch.nn.attention.varlen`, called below its autograd so that its backward takes the merged log-sum-exp."""

    many = True

    def __init__(self, cu_q: np.ndarray, cu_k: np.ndarray, causal: bool, device: torch.device | str) -> None:
        self.causal = causal
        self.cu = [torch.from_numpy(cu.astype(np.int32)).to(device) for cu in (cu_q, cu_k)]
        self.longest = [int(np.diff(cu).max()) for cu in (cu_q, cu_k)]

    def forward(self, q, k, v, scale):
        out, lse, self.rng, self.unused, _ = _varlen(
            q, k, v, *self.cu, *self.longest, 0.0, self.causal, False, scale=scale
        )
        return out, lse.t().contiguous()

    def backward(self, grad, q, k, v, out, lse, scale):
        return _varlen_backward(
            grad.contiguous(), q, k, v, out, lse.t().contiguous(), *self.cu, *self.longest, 0.0, self.causal,
            self.rng, self.unused, scale=scale,
        )  # fmt: skip


class Matmul:
    """Plain matrix products, sequence by sequence, in float32: every device and dtype. What the others are tested against."""

    many = True

    def __init__(self, cu_q: np.ndarray, cu_k: np.ndarray, causal: bool, device: torch.device | str) -> None:
        self.causal = causal
        self.spans = [
            (slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])) for i in range(len(cu_q) - 1) if cu_q[i] < cu_q[i + 1]
        ]

    def _scores(self, q_KRLD, k_KUD, scale):
        scores = torch.einsum("krld,kud->krlu", q_KRLD, k_KUD) * scale
        if self.causal:
            future = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        return scores

    def forward(self, q, k, v, scale):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        for rows, keys in self.spans:
            q_KRLD, k_KUD, v_KUD = _by_kv_head(q[rows], k.shape[1]), *(x[keys].transpose(0, 1).float() for x in (k, v))
            scores = self._scores(q_KRLD, k_KUD, scale)
            top = scores.logsumexp(-1)
            lse[rows] = top.flatten(0, 1).t()
            out[rows] = _to_rows(torch.einsum("krlu,kud->krld", (scores - top[..., None]).exp(), v_KUD)).to(out.dtype)
        return out, lse

    def backward(self, grad, q, k, v, out, lse, scale):
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for rows, keys in self.spans:
            g, q_KRLD, o = (_by_kv_head(x[rows], k.shape[1]) for x in (grad, q, out))
            k_KUD, v_KUD = (x[keys].transpose(0, 1).float() for x in (k, v))
            p = (self._scores(q_KRLD, k_KUD, scale) - _by_kv_head(lse[rows][..., None], k.shape[1])).exp()
            ds = p * (torch.einsum("krld,kud->krlu", g, v_KUD) - (g * o).sum(-1, keepdim=True)) * scale
            dq[rows] = _to_rows(torch.einsum("krlu,kud->krld", ds, k_KUD)).to(dq.dtype)
            dk[keys] = torch.einsum("krlu,krld->ukd", ds, q_KRLD).to(dk.dtype)
            dv[keys] = torch.einsum("krlu,krld->ukd", p, g).to(dv.dtype)
        return dq, dk, dv


def _by_kv_head(x_LHD: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[L, H, D] → float32 [H_kv, H / H_kv, L, D]."""
    return x_LHD.transpose(0, 1).unflatten(0, (kv_heads, -1)).float()


def _to_rows(x_KRLD: torch.Tensor) -> torch.Tensor:
    return x_KRLD.flatten(0, 1).transpose(0, 1)


_HALF = (torch.bfloat16, torch.float16)
#: name → (class, whether it serves a device type and dtype).
KERNELS: dict[str, tuple[type[Kernel], Callable[[str, torch.dtype], bool]]] = {
    "varlen": (Varlen, lambda device, dtype: device == "cuda" and dtype in _HALF),
    "amx_cpu": (AmxCpu, lambda device, dtype: device == "cpu" and dtype == torch.bfloat16 and has_bfloat16_units()),
    "flash_cpu": (FlashCpu, lambda device, dtype: device == "cpu" and dtype != torch.float16),
    "matmul": (Matmul, lambda device, dtype: True),
}


def kernel_for(device: torch.device, dtype: torch.dtype, name: str | None = None) -> type[Kernel]:
    """The class of the kernel `name`, or the first of `KERNELS` that serves this device and dtype.

    Raises:
        ValueError: `name` is unknown, or does not serve them.
    """
    serving = [n for n, (_, serves) in KERNELS.items() if serves(device.type, dtype)]
    if name is not None and name not in serving:
        raise ValueError(f"attention kernel {name!r} does not serve {dtype} on {device.type}; these do: {serving}")
    return KERNELS[name or serving[0]][0]
