"""The logprob head: hidden states → log-probability of each target token and entropy, in float32.

It works on a chunk of positions at a time. No tensor is [T, vocab], in forward or backward:
backward computes each chunk's logits again.

Letters in shapes: R positions, C of them in a chunk, K targets for each, H hidden size, V
vocabulary.
"""

import torch

from rlinf_vl.models.kernels import fused
from rlinf_vl.models.kernels.products import add_matmul, bfloat16_products, matmul

#: Bytes of one chunk's float32 logits by default, by device type: few enough for a CPU's caches,
#: enough to keep a GPU busy.
CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**30}


def _product(hidden_CH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """Return the float32 logits [C, V] of one chunk."""
    if hidden_CH.dtype != torch.float32:
        return torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32)
    return matmul(hidden_CH, weight_VH.t())


def _logits(
    hidden_CH: torch.Tensor,
    weight_VH: torch.Tensor,
    temperature: float,
    banned: torch.Tensor | None,
):
    """Return the logits of `_product` over the temperature, banned ids at -inf."""
    logits = _product(hidden_CH, weight_VH)
    if temperature != 1.0:
        logits = logits.div_(temperature)
    return logits if banned is None else logits.index_fill_(1, banned, -torch.inf)


class _Head(torch.autograd.Function):
    """The autograd function of `token_logprobs`, chunk by chunk in both directions."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, banned, chunk, with_entropy):
        n = hidden.shape[0]
        logprobs_out = hidden.new_empty(targets.shape, dtype=torch.float32)
        targets, logprobs_RK = _columns(targets), _columns(logprobs_out)
        lse = hidden.new_empty(n, 1, dtype=torch.float32)
        entropy = torch.empty_like(lse[:, 0]) if with_entropy else None
        is_fused = _is_fused(hidden, targets)
        mask = _mask(banned, weight) if is_fused else None
        with bfloat16_products(hidden):
            hidden_RH, weight_VH = _operands(hidden, weight)
            for start in range(0, n, chunk):
                rows = slice(start, start + chunk)
                if is_fused:
                    logits = _product(hidden_RH[rows], weight_VH)
                    lse[rows], chunk_entropy = fused.head_statistics(
                        logits, mask, temperature, with_entropy
                    )
                    logprobs_RK[rows] = (
                        logits.gather(1, targets[rows]).div_(temperature).sub_(lse[rows])
                    )
                else:
                    logits = _logits(hidden_RH[rows], weight_VH, temperature, banned)
                    logprobs_RK[rows], lse[rows], chunk_entropy = _statistics(
                        logits, banned, targets[rows], with_entropy
                    )
                if entropy is not None and chunk_entropy is not None:
                    entropy[rows] = chunk_entropy
        ctx.save_for_backward(hidden, weight, targets, banned, lse, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)  # zeros in place of None would cost passes over memory
        return logprobs_out, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved_hidden, saved_weight, targets, banned, lse, entropy = ctx.saved_tensors
        is_fused, grad_hidden = _is_fused(saved_hidden, targets), torch.empty_like(saved_hidden)
        mask = _mask(banned, saved_weight) if is_fused else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(
                saved_weight.shape, dtype=torch.float32, device=saved_weight.device
            )
        with bfloat16_products(saved_hidden):
            hidden, weight = _operands(saved_hidden, saved_weight)
            for start in range(0, hidden.shape[0], ctx.chunk):
                rows = slice(start, start + ctx.chunk)
                chunk_targets, chunk_lse, chunk_grad_logprobs, chunk_entropy, chunk_grad_entropy = (
                    x if x is None else _columns(x[rows])
                    for x in (targets, lse, grad_logprobs, entropy, grad_entropy)
                )
                # Logits are freed at once: the flagship's would be 0.6 GiB beside the next chunk's.
                if is_fused:
                    logits = _product(hidden[rows], weight)
                    columns = [
                        chunk_targets,
                        chunk_lse,
                        chunk_grad_logprobs,
                        chunk_entropy,
                        chunk_grad_entropy,
                    ]
                    grad = fused.head_gradient(
                        logits, mask, ctx.temperature, columns, saved_hidden.dtype
                    )
                    del logits
                else:
                    grad = _grad_logits(
                        _logits(hidden[rows], weight, ctx.temperature, banned),
                        banned,
                        chunk_targets,
                        chunk_lse,
                        chunk_grad_logprobs,
                        chunk_entropy,
                        chunk_grad_entropy,
                    )
                    if ctx.temperature != 1.0:
                        grad.div_(ctx.temperature)
                grad_hidden[rows] = matmul(grad.to(saved_hidden.dtype), saved_weight)
                if grad_weight is None:
                    continue
                if weight.dtype == torch.float32:
                    add_matmul(grad_weight, grad.t(), hidden[rows])
                else:
                    grad_weight += torch.mm(
                        grad.to(weight.dtype).t(), hidden[rows], out_dtype=torch.float32
                    )
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(saved_weight.dtype),
            *[None] * 5,
        )


def _is_fused(hidden: torch.Tensor, targets_RK: torch.Tensor) -> bool:
    """Return whether `kernels.fused` computes this: on its devices, with one target each."""
    return fused.serves(hidden) and targets_RK.shape[1] == 1


def _mask(banned: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor | None:
    """Return uint8 [V], 1 where an id is banned."""
    if banned is None:
        return None
    return torch.zeros(len(weight), dtype=torch.uint8, device=weight.device).index_fill_(
        0, banned, 1
    )


def _statistics(logits, banned, targets, with_entropy: bool):
    """Return (logprobs of the targets [C, K], log Σ e^x [C, 1], entropy [C] or None).

    Overwrites the logits [C, V].
    """
    # Shifted by the maximum, so that exp cannot overflow.
    top = logits.amax(dim=1, keepdim=True)
    logits.sub_(top)
    logprobs = logits.gather(1, targets)
    if not with_entropy:
        logsum, entropy = logits.exp_().sum(dim=1, keepdim=True).log_(), None
    else:  # H = log Σ e^x - Σ e^x x / Σ e^x
        p = logits.exp()
        total = p.sum(dim=1, keepdim=True)
        if banned is not None:
            logits.index_fill_(1, banned, 0.0)  # p = 0 there; 0 · -inf would be NaN
        logsum = total.log()
        entropy = (logsum - p.mul_(logits).sum(dim=1, keepdim=True).div_(total)).squeeze(1)
    return logprobs.sub_(logsum), logsum.add_(top), entropy


def _columns(x: torch.Tensor) -> torch.Tensor:
    """Return [R] as [R, 1], and a matrix as it is."""
    return x if x.ndim == 2 else x[:, None]


def _operands(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of the products: on CUDA the tensors themselves, on a CPU float32."""
    return (hidden, weight) if hidden.is_cuda else (hidden.float(), weight.float())


def _grad_logits(
    logits, banned, targets, lse, grad_logprobs, entropy, grad_entropy
) -> torch.Tensor:
    """Return the gradient [C, V] of Σ logprob · grad_logprobs + entropy · grad_entropy.

    Either gradient may be None. Targets and their gradients are [C, K], the others [C, 1].
    Overwrites the logits.

    d logprob_t / d logit_v = [v = t] - p_v ;  d H / d logit_v = -p_v (log p_v + H)
    """
    logp = logits.sub_(lse)
    if grad_entropy is None:
        grad = logp.exp_().mul_(-grad_logprobs.sum(dim=1, keepdim=True))
    else:
        grad = logp.exp()
        if banned is not None:
            logp.index_fill_(1, banned, 0.0)
        factor = logp.add_(entropy).mul_(-grad_entropy)
        grad.mul_(
            factor if grad_logprobs is None else factor.sub_(grad_logprobs.sum(dim=1, keepdim=True))
        )
    if grad_logprobs is not None:
        grad.scatter_add_(1, targets, grad_logprobs)
    return grad


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    banned: torch.Tensor | None = None,
    chunk: int | None = None,
    with_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities of `targets`, and the entropy of their distribution.

    The distribution is softmax(hidden · weightᵀ / temperature) over the ids that are not banned,
    the one that the sampler draws from.

    Args:
        hidden: [R, H], float32 or bfloat16.
        weight: [V, H], the output embedding.
        targets: int64 [R] or, several at each position, [R, K]; none of them banned.
        temperature: the sampling temperature, > 0.
        banned: int64 [B], ids that can't be sampled; None bans nothing.
        chunk: positions whose [chunk, V] logits exist at once; None: as many as fit `CHUNK_BYTES`,
            128 at least.
        with_entropy: False leaves the entropy out, which saves two passes over the logits.

    Returns:
        (logprobs, of the shape of `targets`; entropy [R] or None), float32, differentiable in
            `hidden` and `weight`.
    """
    chunk_positions = _chunk(hidden, weight, chunk)
    return _Head.apply(
        hidden, weight, targets, float(temperature), banned, chunk_positions, with_entropy
    )


@torch.no_grad()
def likeliest(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    banned: torch.Tensor | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """Return the k likeliest of the ids that are not banned, int64 [R, K].

    K is k, or the number of ids if that is less. Arguments are those of `token_logprobs`.
    """
    k, size = (
        min(k, weight.shape[0] - (0 if banned is None else len(banned))),
        _chunk(hidden, weight, chunk),
    )
    top_ids = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    with bfloat16_products(hidden):
        hidden_RH, weight_VH = _operands(hidden, weight)
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            top_ids[rows] = (
                _logits(hidden_RH[rows], weight_VH, temperature, banned).topk(k, dim=1).indices
            )
    return top_ids


def _chunk(hidden: torch.Tensor, weight: torch.Tensor, chunk: int | None) -> int:
    """Return the positions of one chunk: `chunk`, or as many as fit `CHUNK_BYTES`, 128 at least."""
    return int(chunk or max(128, CHUNK_BYTES[hidden.device.type] // (4 * weight.shape[0])))
