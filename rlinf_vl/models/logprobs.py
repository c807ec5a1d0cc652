"""The logprob head: hidden states → log-probability of each target token and entropy, in float32, a chunk of positions at a
time. No tensor is [T, vocab], in forward or backward: backward computes each chunk's logits again."""

import torch

from rlinf_vl.models.kernels import fused
from rlinf_vl.models.kernels.products import add_matmul, bfloat16_products, matmul

#: Bytes of one chunk's float32 logits by default, by device type: what fits a CPU's caches, and what keeps a GPU busy.
CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**30}


def _product(hidden_CH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """float32 logits [C, V] of one chunk."""
    if hidden_CH.dtype != torch.float32:
        return torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32)
    return matmul(hidden_CH, weight_VH.t())


def _logits(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, temperature: float, banned: torch.Tensor | None):
    """`_product`, divided by the temperature, banned ids at -inf."""
    logits = _product(hidden_CH, weight_VH)
    if temperature != 1.0:
        logits = logits.div_(temperature)
    return logits if banned is None else logits.index_fill_(1, banned, -torch.inf)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, banned, chunk, with_entropy):
        n = hidden.shape[0]
        found = hidden.new_empty(targets.shape, dtype=torch.float32)
        targets, logprobs = _columns(targets), _columns(found)
        lse = hidden.new_empty(n, 1, dtype=torch.float32)
        entropy = torch.empty_like(lse[:, 0]) if with_entropy else None
        is_fused = _is_fused(hidden, targets)
        mask = _mask(banned, weight) if is_fused else None
        with bfloat16_products(hidden):
            rows, matrix = _operands(hidden, weight)
            for start in range(0, n, chunk):
                part = slice(start, start + chunk)
                if is_fused:
                    logits = _product(rows[part], matrix)
                    lse[part], of_part = fused.head_statistics(logits, mask, temperature, with_entropy)
                    logprobs[part] = logits.gather(1, targets[part]).div_(temperature).sub_(lse[part])
                else:
                    logits = _logits(rows[part], matrix, temperature, banned)
                    logprobs[part], lse[part], of_part = _statistics(logits, banned, targets[part], with_entropy)
                if entropy is not None and of_part is not None:
                    entropy[part] = of_part
        ctx.save_for_backward(hidden, weight, targets, banned, lse, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return found, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, saved_weight, targets, banned, lse, entropy = ctx.saved_tensors
        is_fused, grad_hidden = _is_fused(saved, targets), torch.empty_like(saved)
        mask = _mask(banned, saved_weight) if is_fused else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(saved_weight.shape, dtype=torch.float32, device=saved_weight.device)
        with bfloat16_products(saved):
            hidden, weight = _operands(saved, saved_weight)
            for start in range(0, hidden.shape[0], ctx.chunk):
                part = slice(start, start + ctx.chunk)
                columns = [
                    x if x is None else _columns(x[part]) for x in (targets, lse, grad_logprobs, entropy, grad_entropy)
                ]
                # The logits are let go of: they would be 0.6 GiB of the flagship's beside the next chunk's.
                if is_fused:
                    logits = _product(hidden[part], weight)
                    grad = fused.head_gradient(logits, mask, ctx.temperature, columns, saved.dtype)
                    del logits
                else:
                    grad = _grad_logits(_logits(hidden[part], weight, ctx.temperature, banned), banned, *columns)
                    if ctx.temperature != 1.0:
                        grad.div_(ctx.temperature)
                grad_hidden[part] = matmul(grad.to(saved.dtype), saved_weight)
                if grad_weight is None:
                    continue
                if weight.dtype == torch.float32:
                    add_matmul(grad_weight, grad.t(), hidden[part])
                else:
                    grad_weight += torch.mm(grad.to(weight.dtype).t(), hidden[part], out_dtype=torch.float32)
        return grad_hidden, None if grad_weight is None else grad_weight.to(saved_weight.dtype), *[None] * 5


def _is_fused(hidden: torch.Tensor, targets_RK: torch.Tensor) -> bool:
    return fused.serves(hidden) and targets_RK.shape[1] == 1


def _mask(banned: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor | None:
    """uint8 [V], 1 where an id is banned."""
    if banned is None:
        return None
    return torch.zeros(len(weight), dtype=torch.uint8, device=weight.device).index_fill_(0, banned, 1)


def _statistics(logits, banned, targets, with_entropy: bool):
    """(logprobs of the targets [C, K], log Σ e^x [C, 1], entropy [C] or None). Overwrites the logits [C, V]."""
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
    """[R] as [R, 1]."""
    return x if x.ndim == 2 else x[:, None]


def _operands(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of the products: on CUDA the tensors themselves, on a CPU float32."""
    return (hidden, weight) if hidden.is_cuda else (hidden.float(), weight.float())


def _grad_logits(logits, banned, targets, lse, grad_logprobs, entropy, grad_entropy) -> torch.Tensor:
    """Gradient [C, V] of Σ logprob · grad_logprobs + entropy · grad_entropy; either gradient may be None. Targets and their
    gradients are [C, K], the others [C, 1].

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
        grad.mul_(factor if grad_logprobs is None else factor.sub_(grad_logprobs.sum(dim=1, keepdim=True)))
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
    """Log-probabilities of `targets`, and the entropy of the distribution they were drawn from.

    The distribution is softmax(hidden · weightᵀ / temperature) over the ids that are not banned: the sampler's own.

    Args:
        hidden: [R, H], float32 or bfloat16.
        weight: [V, H], the output embedding.
        targets: int64 [R] or, several at each position, [R, K]; none of them banned.
        temperature: the sampling temperature, > 0.
        banned: int64 [B], ids that can't be sampled; None bans nothing.
        chunk: positions whose [chunk, V] logits exist at once; None: as many as fit `CHUNK_BYTES`, 128 at least.
        with_entropy: False leaves the entropy out, which saves two passes over the logits.

    Returns:
        (logprobs, of the shape of `targets`; entropy [R] or None), float32, differentiable in `hidden` and `weight`.
    """
    sizes = float(temperature), banned, _chunk(hidden, weight, chunk)
    return _Head.apply(hidden, weight, targets, *sizes, with_entropy)


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
    """The k likeliest of the ids that are not banned, or all of them if they are fewer: int64 [R, K]; arguments as of
    `token_logprobs`."""
    k, size = min(k, weight.shape[0] - (0 if banned is None else len(banned))), _chunk(hidden, weight, chunk)
    found = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    with bfloat16_products(hidden):
        rows, matrix = _operands(hidden, weight)
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            found[part] = _logits(rows[part], matrix, temperature, banned).topk(k, dim=1).indices
    return found


def _chunk(hidden: torch.Tensor, weight: torch.Tensor, chunk: int | None) -> int:
    return int(chunk or max(128, CHUNK_BYTES[hidden.device.type] // (4 * weight.shape[0])))
