"""One part of attention: sequences of queries against keys, with the log-sum-exp for merging.

A kernel is made for one layout (boundaries of queries and keys, causal or not), and every layer
uses it: `forward(q [T, H, D], k and v [U, H_kv, D], scale)` → (out [T, H, D], lse float32 [T, H]),
and `backward(grad, q, k, v, out, lse, scale)` → (dq, dk, dv), where `out` and `lse` may belong to a
softmax over further keys. `KERNELS` lists the kernels in order of preference.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional as F

from rlinf_vl.models.kernels.attention_cpu import AmxCpu, FlashCpu
from rlinf_vl.models.kernels.products import has_bfloat16_units
from rlinf_vl.models.transfer import on_device

# Operators below autograd: its backward would use one part's log-sum-exp, ours uses the merged one.
_varlen = torch.ops.aten._flash_attention_forward
_varlen_backward = torch.ops.aten._flash_attention_backward


class Kernel(Protocol):
    """One part of attention in one layout, for any number of layers."""

    #: Whether one call for all sequences is better than a call for each.
    batches_sequences: bool

    def __init__(
        self,
        cu_q: np.ndarray,
        cu_k: np.ndarray,
        causal: bool,
        device: torch.device | str,
        window: int | None = None,
    ) -> None:
        """Lay out sequences: i has queries `cu_q[i] … cu_q[i + 1]`, keys `cu_k[i] … cu_k[i + 1]`.

        Args:
            causal: whether a query sees no keys after its own.
            window: with `causal`, the last keys that a query sees, its own among them. A sequence
                may then have further keys before those of its queries.
        """
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


class Varlen:
    """FlashAttention for sequences of different lengths on CUDA, in bfloat16 and float16.

    It is the kernel behind `torch.nn.attention.varlen`, called below its autograd so that its
    backward takes the merged log-sum-exp.
    """

    batches_sequences = True

    def __init__(
        self,
        cu_q: np.ndarray,
        cu_k: np.ndarray,
        causal: bool,
        device: torch.device | str,
        window: int | None = None,
    ) -> None:
        # PyTorch's window is the number of keys before the query's own.
        self.options = {
            "is_causal": causal,
            "window_size_left": None if window is None else window - 1,
        }
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
            dropout_p=0.0,
            return_debug_mask=False,
            scale=scale,
            **self.options,
        )
        return out[..., : q.shape[2]], lse.t().contiguous()

    def backward(self, grad, q, k, v, out, lse, scale):
        grads = _varlen_backward(
            *map(_to_eighths, (grad.contiguous(), q, k, v, out)),
            lse.t().contiguous(),
            *self.cu,
            *self.longest,
            dropout_p=0.0,
            rng_state=self.rng,
            unused=self.unused,
            scale=scale,
            **self.options,
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
        self,
        cu_q: np.ndarray,
        cu_k: np.ndarray,
        causal: bool,
        device: torch.device | str,
        window: int | None = None,
    ) -> None:
        self.causal, self.window = causal, window
        self.spans = [
            (slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2]))
            for i in range(len(cu_q) - 1)
            if cu_q[i] < cu_q[i + 1]
        ]

    def _scores(self, q_KRLD, k_KUD, scale):
        """Return the scaled scores [K, R, L, U], -inf for keys that a query does not see."""
        scores = torch.einsum("krld,kud->krlu", q_KRLD, k_KUD) * scale
        if self.causal:
            keys_before = scores.shape[3] - scores.shape[2]  # before that of the first query
            every = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device)
            hidden = every.triu(1 + keys_before)
            if self.window is not None:
                hidden |= every.tril(keys_before - self.window)
            scores = scores.masked_fill(hidden, -torch.inf)
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
