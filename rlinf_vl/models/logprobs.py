"""The logprob head: hidden states → log-probability of each target token and entropy, in float32, a chunk of positions at a
time. No [T, vocab] tensor is ever whole, in forward or backward: backward computes each chunk's logits again."""

import torch


def _logits(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, temperature: float, banned_V: torch.Tensor | None):
    """float32 logits [C, V] of one chunk, divided by the temperature, banned ids at -inf."""
    if hidden_CH.dtype == torch.float32:
        logits = hidden_CH @ weight_VH.t()
    elif hidden_CH.is_cuda:
        logits = torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32)
    else:
        logits = hidden_CH.float() @ weight_VH.float().t()
    if temperature != 1.0:
        logits = logits.div_(temperature)
    return logits if banned_V is None else logits.masked_fill_(banned_V, -torch.inf)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, banned, chunk):
        n = hidden.shape[0]
        logprobs = hidden.new_empty(n, dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        for start in range(0, n, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight, temperature, banned)
            picked = logits.gather(1, targets[part, None]).squeeze(1)
            top = logits.max(dim=1, keepdim=True).values
            exps = (logits - top).exp_()
            total = exps.sum(1)
            lse = total.log() + top.squeeze(1)
            logprobs[part] = picked - lse
            if banned is not None:
                logits.masked_fill_(banned, 0.0)  # p = 0 there; 0 · -inf would be NaN
            entropy[part] = lse - (exps * logits).sum(1) / total
        ctx.save_for_backward(hidden, weight, targets, banned)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets, banned = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = (
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if ctx.needs_input_grad[1] else None
        )
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = _logits(hidden[part], weight, ctx.temperature, banned)
            logp = torch.log_softmax(logits, dim=1)
            p = logp.exp()
            # d logprob_t / d logit_v = [v = t] - p_v ;  d H / d logit_v = -p_v (log p_v + H)
            safe = logp if banned is None else logp.masked_fill(banned, 0.0)
            h = -(p * safe).sum(1, keepdim=True)
            grad = p * (-grad_logprobs[part, None] - grad_entropy[part, None] * (safe + h))
            grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad.div_(ctx.temperature)
            grad_hidden[part] = (grad.to(weight.dtype) @ weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[part].float()
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    banned: torch.Tensor | None = None,
    chunk: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of `targets`, and the entropy of the distribution they were drawn from.

    The distribution is softmax(hidden · weightᵀ / temperature) over the ids that are not banned: the sampler's own.

    Args:
        hidden: [R, H], float32 or bfloat16.
        weight: [V, H], the output embedding.
        targets: int64 [R], none of them banned.
        temperature: the sampling temperature, > 0.
        banned: bool [V], ids that can't be sampled; None bans nothing.
        chunk: positions whose [chunk, V] logits exist at once.

    Returns:
        (logprobs, entropy), both float32 [R], differentiable in `hidden` and `weight`.
    """
    return _Head.apply(hidden, weight, targets, float(temperature), banned, int(chunk))
