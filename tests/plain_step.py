"""What `test_update_invariance` compares with: layouts of one training step, its groups, and the step written out plainly, in one
process on transformers' own unpacked forward."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from tiny import banned, group, tiny_model, transformers_inputs, transformers_logprobs

LR = 0.05


@dataclass(frozen=True)
class Layout:
    ranks: int = 1
    budget: int = 400
    size: int | None = None
    pad: bool = False
    checkpointing: bool = False
    reentrant: bool = False
    minibatches: int = 1
    aggregation: str = "token-mean"
    kl_beta: float = 0.0
    train_tower: bool = True
    old_logprobs: str = "auto"
    share: bool = True
    cache: bool | None = None  # None: where the tower is frozen
    reshard: bool = True
    shard: int | None = None  # ranks that have the weights between them; None: all
    tis_clip: float | None = 2.0
    tis_level: str = "token"
    dtype: str = "fp32"


MIXED = [[(2, 3)], [], [(1, 1), (3, 2), (2, 2)], []]
SHAPES = {"text": [[], [], [], []], "one image": [[(2, 2)], [], [], []]}


def groups_of(kind: str):
    """Four groups of three. `errors`: some trajectories failed, among them a whole group but one. `gaps`: an environment's
    observations stand between sampled tokens, at the start and at the end, and one trajectory has nothing but them."""
    rng = np.random.default_rng(3)
    lengths = [[5, 12, 1], [4, 6, 9], [7, 3, 3], [2, 20, 8]]
    groups = [
        group(rng, s, n, name=f"g{i}") for i, (s, n) in enumerate(zip(SHAPES.get(kind, MIXED), lengths, strict=True))
    ]
    if "errors" in kind:
        failed = {(0, 1), (2, 0), (2, 2), (3, 2)}
        groups = _changed(groups, lambda g, i, t: replace(t, error="a fault", reward=7.0) if (g, i) in failed else t)
    if "gaps" in kind:
        sampled = {k: rng.random(n) < 0.6 for k, n in np.ndenumerate(np.array(lengths))}
        sampled[1, 1][:2], sampled[2, 0][-1], sampled[3, 0][:] = False, False, False
        groups = _changed(groups, lambda g, i, t: _observed(t, sampled[g, i]))
    return groups


def _changed(groups, change):
    return [
        replace(group, trajectories=tuple(change(g, i, t) for i, t in enumerate(group.trajectories)))
        for g, group in enumerate(groups)
    ]


def _observed(t, sampled):
    """The trajectory with these tokens after the prompt sampled, the others an environment's."""
    (sequence,) = t.sequences
    mask = np.append(np.zeros(len(sequence.ids) - len(sampled), bool), sampled)
    changed = replace(
        sequence, loss_mask=mask, logprobs=np.where(mask, sequence.logprobs, 0.0).astype(np.float32),
        versions=np.where(mask, sequence.versions, -1).astype(np.int32),
    )  # fmt: skip
    return replace(t, sequences=(changed,))


def half(model):
    """The model in bfloat16 as a checkpoint is read in it: weights, not the tables of rotary angles."""
    for p in model.parameters():
        p.data = p.data.bfloat16()
    return model


def plain_reference(layout: Layout, kind: str = "mixed"):
    """The same step in one process: transformers' own forward a trajectory at a time, formulas written out, SGD by hand."""
    model, reference = tiny_model(0), tiny_model(9)
    if not layout.train_tower:
        reference.model.visual.load_state_dict(model.model.visual.state_dict())
    groups = groups_of(kind)
    tower = {id(p) for p in model.model.visual.parameters()}
    trained = {n: p for n, p in model.named_parameters() if layout.train_tower or id(p) not in tower}
    masters = {n: p.detach().clone() for n, p in trained.items()}  # float32 whatever the model computes in
    if layout.dtype == "bf16":
        half(model), half(reference)

    def logprobs_of(model, g, i):
        return transformers_logprobs(model, g, i, 0.7)

    trained_on = {
        g.id: [i for i, t in enumerate(g.trajectories) if t.error is None and t.n_response_tokens] for g in groups
    }
    with torch.no_grad():
        start = {(g.id, i): logprobs_of(model, g, i) for g in groups for i in trained_on[g.id]}
    losses, norms = [], []
    for part in np.array_split(np.arange(len(groups)), layout.minibatches):
        members = [(groups[k], i) for k in part for i in trained_on[groups[k].id]]
        tokens = sum(g.trajectories[i].n_response_tokens for g, i in members)
        loss = torch.zeros(())
        for g, i in members:
            token = token_losses(layout, g, i, trained_on[g.id], logprobs_of(model, g, i), start[g.id, i])
            token = token - 0.01 * entropy_of(model, g, i)
            if layout.kl_beta:
                with torch.no_grad():
                    ref = logprobs_of(reference, g, i)
                logp = logprobs_of(model, g, i)
                token = token + layout.kl_beta * ((ref - logp).exp() - 1 - (ref - logp))
            if layout.aggregation == "token-mean":
                loss = loss + token.sum() / tokens
            else:
                per_sequence = token.mean() if layout.aggregation == "seq-mean-token-mean" else token.sum()
                loss = loss + per_sequence / len(members)
        grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        norms.append(math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads if g is not None)))
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for (name, p), g in zip(trained.items(), grads, strict=True):
                if g is not None:
                    masters[name] -= LR * g.float()
                    p.copy_(masters[name])
    return np.mean(losses), np.mean(norms), {n: p.numpy() for n, p in masters.items()}


def token_losses(layout: Layout, g, i: int, trained_on: list[int], logp, start):
    """Clipped policy losses of a trajectory's sampled tokens, by the formulas in docs/algorithms.md."""
    rewards = np.array([g.trajectories[k].reward for k in trained_on])
    tied = len(set(rewards)) == 1
    adv = 0.0 if tied else (g.trajectories[i].reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    (sequence,) = g.trajectories[i].sequences
    rollout = torch.from_numpy(sequence.logprobs[sequence.loss_mask])
    train = start if layout.minibatches > 1 else logp.detach()
    ratio = (logp - (rollout if layout.old_logprobs == "false" else train)).exp()
    token = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.28))
    if adv < 0:
        token = torch.minimum(token, torch.tensor(-adv * 3.0))
    if layout.tis_clip is None:
        return token
    gap = train - rollout
    gap = {"token": gap, "sequence": gap.sum(), "geometric": gap.mean()}[layout.tis_level]
    return token * gap.exp().clamp(max=layout.tis_clip)


def entropy_of(model, g, i):
    """Entropy at each response position, from transformers' logits through every candidate's logprob."""
    (sequence,) = g.trajectories[i].sequences
    ids, inputs = transformers_inputs(sequence)
    model.model.rope_deltas = None
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0].float() / 0.7
    before = torch.from_numpy(np.flatnonzero(sequence.loss_mask) - 1)
    return torch.distributions.Categorical(logits=logits[before][:, torch.from_numpy(~banned())]).entropy()
