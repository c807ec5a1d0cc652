"""FlashAttention's variable-length operations for the CPU, behind PyTorch's own registration of them.

PyTorch implements `aten::_flash_attention_forward` and its backward on CUDA only. Registered here for the CPU, they are called
through the same schema (argument order, names, types) and check what the CUDA code checks (`flash_attn/flash_api.cpp`:
`mha_varlen_fwd`, `mha_varlen_bwd`). What that code reads or writes without a check is done in the same way: the log-sum-exp
is read as a dense [H, T] from its first element, memory of no sequence is left as it was (here: NaN). float32 is let through,
so that nothing but the contract can differ from an exact result.
"""

import math
from collections.abc import Iterator

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _check(q, k, v, cu_q, cu_k, max_q, max_k) -> None:
    heads, dim = q.shape[1:]
    kv_heads = k.shape[1]
    assert q.dtype in DTYPES and k.dtype == v.dtype == q.dtype
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "contiguous last dimension"
    assert all(s % 8 == 0 for x in (q, k, v) for s in x.stride()[:-1]), (
        "rows are read 16 bytes at a time"
    )
    assert dim % 8 == 0 and dim <= 256 and heads % kv_heads == 0
    assert k.shape == v.shape and k.shape[2] == dim
    for cu, longest, tokens in ((cu_q, max_q, len(q)), (cu_k, max_k, len(k))):
        assert (
            cu.dtype == torch.int32
            and cu.is_contiguous()
            and cu.shape == cu_q.shape
            and len(cu) > 1
        )
        assert int(cu[0]) == 0 and int(cu[-1]) <= tokens
        assert cu.diff().min() >= 0 and cu.diff().max() <= longest, (
            "the grid covers the longest sequence only"
        )


def _sequences(cu_q, cu_k) -> Iterator[tuple[slice, slice]]:
    for i in range(len(cu_q) - 1):
        yield slice(*cu_q[i : i + 2].tolist()), slice(*cu_k[i : i + 2].tolist())


def _scores(q_LHD, k_UHD, causal: bool, left: int | None, scale: float) -> torch.Tensor:
    """float32 [H, L, U]; causal, and at most `left` keys before a query's own: aligned at the last query and the last key."""
    k_UHD = k_UHD.float().repeat_interleave(q_LHD.shape[1] // k_UHD.shape[1], dim=1)
    scores = torch.einsum("lhd,uhd->hlu", q_LHD.float(), k_UHD) * scale
    if causal:
        queries, keys = scores.shape[1:]
        scores = scores.masked_fill(
            torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries), -torch.inf
        )
    if left is not None:
        queries, keys = scores.shape[1:]
        before = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries - left - 1)
        scores = scores.masked_fill(before, -torch.inf)
    return scores


def forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
):  # fmt: skip
    """(out [T, H, D], log-sum-exp float32 [H, T], rng state uint64 [2], unused, debug mask)."""
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    assert dropout_p == 0.0 and not return_debug_mask
    options = (
        window_size_right,
        seqused_k,
        alibi_slopes,
        block_table,
        num_splits,
    )
    assert all(x is None for x in options)
    if max_q == 1 and query.shape[1] > key.shape[1] and window_size_left is None:
        # The kernel then takes the heads of a group for queries: it reshapes [T, H, D] by its number of sequences.
        query.reshape(
            len(cum_seq_q) - 1, key.shape[1], query.shape[1] // key.shape[1], query.shape[2]
        )
    scale = scale or 1 / math.sqrt(query.shape[2])
    out = torch.full_like(query, torch.nan)
    lse = torch.full((query.shape[1], len(query)), torch.nan)
    for rows, keys in _sequences(cum_seq_q, cum_seq_k):
        scores = _scores(query[rows], key[keys], is_causal, window_size_left, scale)
        lse[:, rows] = scores.logsumexp(-1)
        v = value[keys].float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        out[rows] = torch.einsum("hlu,uhd->lhd", scores.softmax(-1), v).to(out.dtype)
    return (
        out,
        lse,
        torch.zeros(2, dtype=torch.uint64),
        torch.zeros((), dtype=torch.uint64),
        torch.empty(0),
    )


def backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """(dq, dk, dv) of p = exp(scores - log-sum-exp) with Δ = rowsum(dO · O), whatever softmax `out` and it are of."""
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    assert grad_out.dtype == out.dtype == query.dtype and grad_out.shape == out.shape == query.shape
    assert logsumexp.dtype == torch.float32 and dropout_p == 0.0
    assert (rng_state.dtype, rng_state.shape, unused.dtype) == (torch.uint64, (2,), torch.uint64)
    assert window_size_right is None
    scale = scale or 1 / math.sqrt(query.shape[2])
    tokens, heads = query.shape[:2]
    lse = logsumexp.as_strided((heads, tokens), (tokens, 1))  # as the kernel reads it
    repeat = heads // key.shape[1]
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (query, key, value))
    for rows, keys in _sequences(cum_seq_q, cum_seq_k):
        g, o = grad_out[rows].float(), out[rows].float()
        k, v = (x[keys].float().repeat_interleave(repeat, dim=1) for x in (key, value))
        p = (
            _scores(query[rows], key[keys], is_causal, window_size_left, scale) - lse[:, rows, None]
        ).exp()
        ds = p * (torch.einsum("lhd,uhd->hlu", g, v) - (g * o).sum(-1).t()[:, :, None]) * scale
        dq[rows] = torch.einsum("hlu,uhd->lhd", ds, k).to(dq.dtype)
        for total, made in (
            (dk, torch.einsum("hlu,lhd->uhd", ds, query[rows].float())),
            (dv, torch.einsum("hlu,lhd->uhd", p, g)),
        ):
            total[keys] = made.unflatten(1, (key.shape[1], repeat)).sum(2).to(total.dtype)
    return dq, dk, dv


def register() -> torch.library.Library:
    """Make both operations run on CPU tensors for as long as the library that is returned lives."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    return library
