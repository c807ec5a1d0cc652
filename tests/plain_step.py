"""What `test_update_invariance` and `test_models` compare with: layouts of one training step, its groups, and the step written out
plainly, in one process on transformers' own unpacked forward."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from adapters import peft_model, with_values
from tiny import (
    TOWER,
    banned,
    group,
    tiny_config,
    tiny_model,
    transformers_inputs,
    transformers_logprobs,
)
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from rlinf_vl.actor.terms.papo import MASKED_SHARE
from rlinf_vl.config.schema import LoraConfig
from rlinf_vl.data.views import Mask

LR = 0.05
LONGEST = 24  # sampled tokens of a trajectory
#: Of the teacher's random weights, and of what PAPO hides.
TEACHER_SEED, MASK_SEED = 17, 23
#: The column of a group's label, and the seeds of the teachers by label.
LABEL, TEACHER_SEEDS = "kind", {"odd": 18, "even": 17}
VERSION = 4  # of the weights that are trained


@dataclass(frozen=True)
class Layout:
    ranks: int = 1
    context: int = 1  # ranks that share each row
    experts: int = 1  # ranks that share out the experts of mixtures
    budget: int = 400
    size: int | None = None
    pad: bool = False
    checkpointing: bool | str = False  # True: full
    reentrant: bool = False
    minibatches: int = 1
    aggregation: str = "token-mean"
    kl_beta: float = 0.0
    train_tower: bool = True
    old_logprobs: str = "auto"
    share: bool = True
    cache: bool | None = None  # None: where the tower is frozen
    reshard: bool = True
    one_unit: bool = False  # shard the model as one that is small
    shard: int | None = None  # ranks that have the weights between them; None: all
    tis_clip: float | None = 2.0
    tis_level: str = "token"
    rejection: tuple[str | None, float | None, float | None, float | None] = (
        None,
        None,
        None,
        None,
    )
    old_policy: str | None = None
    dtype: str = "fp32"
    family: str = "qwen3_vl"
    sizes: Mapping = field(default_factory=dict, hash=False)  # of `tiny_model`
    loss: str = "actor"
    credit: str = "trajectory"
    discount: float = 1.0
    state_weight: float = 0.0
    lora: str = ""  # what gets adapters, which alone are then trained
    quantization: str = "none"  # of what has adapters
    replay: bool = False  # of random experts
    routes: tuple[int, ...] = ()  # experts that all tokens with some go to, in place of random ones
    balance: float = 0.0  # weight of the load-balancing loss
    adv: str = "grpo"
    placement: str = "loss"  # of the KL
    papo: tuple[float, float] = (0.0, 0.0)  # weights of the KL and of the two entropies
    teacher: tuple[float, float, int] | None = None  # weights of the KL and of the reward, top_k
    tis_normalize: str = "none"
    labelled: bool = False  # whether every second group has another teacher
    privileged: bool = False  # whether the teacher sees more of the problem than the policy

    @property
    def mode(self) -> str:
        """`gradient_checkpointing`."""
        if isinstance(self.checkpointing, str):
            return self.checkpointing
        return "full" if self.checkpointing else "none"

    @property
    def turns(self) -> bool:
        """Whether a turn is a sequence of its own."""
        return self.credit == "turn" or self.state_weight > 0


MIXED = [[(2, 3)], [], [(1, 1), (3, 2), (2, 2)], []]
SHAPES = {
    "text": [[], [], [], []],
    "one image": [[(2, 2)], [], [], []],
    "tiles": [[(2, 2)], [], [(2, 2)] * 3, []],
}


def groups_of(kind: str):
    """Four groups of three. `errors`: some trajectories failed, among them a whole group but one. `gaps`: an environment's
    observations stand between sampled tokens, at the start and at the end, and one trajectory has nothing but them. `turns`: up to
    four turns with an observation between two, paid and with a state each. `sequences`: each of these begins another sequence, from
    which the first half of the answers before it is gone. `corrupted`: the last of each group saw other images."""
    rng = np.random.default_rng(3)
    lengths = [[5, 12, 1], [4, 6, 9], [7, 3, 3], [2, 20, 8]]
    shapes = next((shapes for word, shapes in SHAPES.items() if word in kind), MIXED)
    groups = [
        group(rng, s, n, name=f"g{i}") for i, (s, n) in enumerate(zip(shapes, lengths, strict=True))
    ]
    groups = _changed(groups, lambda g, i, t: _of_versions(t))
    if "errors" in kind:
        failed = {(0, 1), (2, 0), (2, 2), (3, 2)}
        groups = _changed(
            groups,
            lambda g, i, t: replace(t, error="a fault", reward=7.0) if (g, i) in failed else t,
        )
    if "corrupted" in kind:
        groups = _changed(groups, lambda g, i, t: replace(t, corrupted=i == 2))
    if "gaps" in kind:
        sampled = {k: rng.random(n) < 0.6 for k, n in np.ndenumerate(np.array(lengths))}
        sampled[1, 1][:2], sampled[2, 0][-1], sampled[3, 0][:] = False, False, False
        groups = _changed(groups, lambda g, i, t: _observed(t, sampled[g, i]))
    if "turns" in kind:
        groups = _changed(groups, lambda g, i, t: _in_turns(rng, t))
    if "sequences" in kind:
        groups = _changed(groups, lambda g, i, t: _rewritten(t))
    # Of every trajectory's prompt, what the teacher sees: eight tokens more, different in each group.
    for n, g in enumerate(groups):
        hint = tuple(range(30 + n, 38 + n))
        seen = [
            replace(t, teacher_prompt=(*t.sequences[0].ids[: t.turns[0].start].tolist(), *hint))
            if t.sequences
            else t
            for t in g.trajectories
        ]
        groups[n] = replace(g, trajectories=tuple(seen))
    labels = list(TEACHER_SEEDS)
    return [replace(g, labels={LABEL: labels[n % 2]}) for n, g in enumerate(groups)]


def _of_versions(t):
    """Sampled by weights that were exchanged on the way."""
    sequences = [
        replace(s, versions=np.where(s.loss_mask, np.arange(len(s.ids)) % VERSION, -1))
        for s in t.sequences
    ]
    return replace(t, sequences=tuple(sequences))


def routed(groups, layout: Layout):
    """The groups with random experts for their tokens, or those of the layout; some tokens have none, the last ones among them."""
    text = tiny_config(layout.family, **layout.sizes).text_config
    layers = text.num_hidden_layers - len(getattr(text, "mlp_only_layers", None) or ())
    rng = np.random.default_rng(5)

    def routes(tokens: int) -> np.ndarray:
        scores = rng.random((tokens, layers, text.num_experts))
        taken = scores.argsort(-1)[..., : text.num_experts_per_tok].astype(np.uint8)
        if layout.routes:
            taken[:] = layout.routes
        taken = taken.reshape(tokens, layers * text.num_experts_per_tok)
        taken[rng.random(tokens) < 0.2] = 0
        return taken

    def changed(t, prompt: np.ndarray):
        whole = [
            np.concatenate([prompt, routes(len(s.ids) - len(prompt) - 1), 0 * prompt[:1]])
            for s in t.sequences
        ]
        return replace(
            t,
            sequences=tuple(
                replace(s, columns={"routes": r}) for s, r in zip(t.sequences, whole, strict=True)
            ),
        )

    prompts = [routes(g.prefix_length) for g in groups]
    return _changed(groups, lambda g, i, t: changed(t, prompts[g]))


class Mixtures:
    """Watches the routers of transformers' own model, and puts other experts in their place; one sequence at a time."""

    def __init__(self, model, top_k: int) -> None:
        self.model = model
        self.routes: np.ndarray | None = None  # of the next sequence
        self.layers: list[list[tuple]] = []  # of each mixture, (logits, experts) of each forward
        self.seen = False
        gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
        for number, gate in enumerate(gates):
            self.layers.append([])
            gate.register_forward_hook(
                lambda _, __, out, number=number: self._chosen(number, top_k, *out)
            )

    def _chosen(self, number, top_k, logits, weights, taken):
        if self.routes is not None:
            given = torch.from_numpy(self.routes.astype(np.int64)).unflatten(1, (-1, top_k))[
                :, number
            ]
            taken = torch.where(torch.from_numpy(self.routes.any(1))[:, None], given, taken)
            chosen = logits.softmax(-1).gather(1, taken)
            weights = chosen / chosen.sum(-1, keepdim=True)
        if self.seen:
            self.layers[number].append((logits, taken))
        return logits, weights, taken

    def chosen(self, forward) -> np.ndarray:
        """[T, L·k], in the order of the router's probabilities, of one forward of one sequence."""
        self.seen = True
        forward()
        self.seen = False
        return torch.cat([layer.pop()[1] for layer in self.layers], dim=1).numpy()

    def balance_loss(self):
        """Equations 4 to 6 of Fedus et al. 2021, of all that was seen."""
        logits, taken = (
            torch.cat([pair[i] for layer in self.layers for pair in layer]) for i in (0, 1)
        )
        busy = torch.bincount(taken.flatten(), minlength=logits.shape[1]) / len(logits)
        loss = logits.shape[1] * (busy * logits.softmax(-1).mean(0)).sum()
        if self.routes is None:
            layers = tuple(torch.cat([logits for logits, _ in layer]) for layer in self.layers)
            torch.testing.assert_close(
                loss, load_balancing_loss_func(layers, logits.shape[1], taken.shape[1])
            )
        return loss


def _in_turns(rng, t):
    """The trajectory with every sixth token an observation, which ends a turn."""
    (turn,) = t.turns
    seen = [*range(turn.start + 5, turn.end, 6), turn.end]
    t = _observed(t, np.isin(np.arange(turn.start, turn.end), seen, invert=True))
    turns = [
        replace(
            turn,
            start=start,
            end=end,
            reward=float(rng.choice([0.0, 0.5, 1.0])),
            info=f'{{"state": "{rng.integers(2)}"}}',
        )
        for start, end in zip([turn.start, *(k + 1 for k in seen)], seen, strict=False)
    ]
    return replace(t, turns=tuple(turns), reward=sum(turn.reward for turn in turns))


def _rewritten(t):
    """The trajectory with a sequence for each turn. Former answers are shown without their first half, and carry no loss."""
    (whole,) = t.sequences
    sequences, turns = [], []
    for k, turn in enumerate(t.turns):
        gone = [n for old in t.turns[:k] for n in range(old.start, (old.start + old.end) // 2)]
        kept = np.setdiff1d(np.arange(turn.end), gone)
        own = kept >= turn.start
        arrays = {name: array[kept] for name, array in whole.arrays().items()}
        arrays["loss_mask"] &= own
        arrays["logprobs"] = np.where(own, arrays["logprobs"], 0.0).astype(np.float32)
        arrays["versions"] = np.where(own, arrays["versions"], -1).astype(np.int32)
        sequences.append(replace(whole, **arrays))
        turns.append(
            replace(turn, sequence=k, start=turn.start - len(gone), end=turn.end - len(gone))
        )
    return replace(t, sequences=tuple(sequences), turns=tuple(turns))


def _changed(groups, change):
    return [
        replace(
            group, trajectories=tuple(change(g, i, t) for i, t in enumerate(group.trajectories))
        )
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


def adapters_of(layout: Layout) -> LoraConfig:
    return LoraConfig(
        rank=4,
        alpha=6.0,
        target_modules=[layout.lora],
        sync="adapters",
        quantization=layout.quantization,
    )


def is_in_tower(name: str) -> bool:
    return any(part in name for part in TOWER)


def copy_tower(source, target) -> None:
    """Give `target` the vision tower of `source`, if there is one."""
    tower = {name: x for name, x in source.state_dict().items() if is_in_tower(name)}
    assert not target.load_state_dict(tower, strict=False).unexpected_keys


def half(model):
    """The model in bfloat16 as a checkpoint is read in it: weights, not the tables of rotary angles."""
    for p in model.parameters():
        p.data = p.data.bfloat16()
    return model


def plain_reference(layout: Layout, kind: str = "mixed", nudge: int | None = None):
    """The same step in one process: transformers' own forward a trajectory at a time, formulas written out, SGD by hand. With a
    `nudge`, of weights that are off by their last bit, at random."""
    model, reference = (
        tiny_model(seed, family=layout.family, **layout.sizes)
        for seed in (0, 0 if layout.lora else 9)
    )
    if nudge is not None:
        random = torch.Generator().manual_seed(nudge)
        for p in model.parameters():
            p.data *= 1 + 2**-24 * torch.randn(p.shape, generator=random)
    if layout.lora:
        model = with_values(peft_model(layout.family, adapters_of(layout), **layout.sizes))
        if layout.quantization != "none":
            # Whose adapters add nothing.
            reference = peft_model(layout.family, adapters_of(layout), **layout.sizes)
    elif not layout.train_tower:
        copy_tower(model, reference)
    groups = groups_of(kind)
    groups = routed(groups, layout) if layout.replay else groups
    teachers = {
        label: tiny_model(
            seed if layout.labelled else TEACHER_SEED, family=layout.family, **layout.sizes
        )
        for label, seed in TEACHER_SEEDS.items()
        if layout.teacher
    }
    hide = Mask(MASKED_SHARE)
    hidden = {
        g.id: g.with_images({image.hash: hide(image, MASK_SEED) for image, _ in g.images})
        for g in groups
    }
    mixtures = Mixtures(model, getattr(model.config.get_text_config(), "num_experts_per_tok", 0))
    tower = {id(p) for name, p in model.named_parameters() if is_in_tower(name)}
    # Of peft's model, the adapters.
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    trained = {n: p for n, p in named if layout.train_tower or layout.lora or id(p) not in tower}
    # Float32 whatever the model computes in.
    masters = {n: p.detach().clone() for n, p in trained.items()}
    if layout.dtype == "bf16":
        half(model), half(reference)

    def logprobs_of(model, g, i, seen=False):
        mixtures.seen = seen
        mixtures.routes = g.trajectories[i].sequences[0].columns.get("routes")
        found = transformers_logprobs(model, g, i, 0.7)
        mixtures.seen = False
        return found

    trained_on = {
        g.id: [i for i, t in enumerate(g.trajectories) if t.error is None and t.n_response_tokens]
        for g in groups
    }
    ref = {}
    with torch.no_grad():
        start = {(g.id, i): logprobs_of(model, g, i) for g in groups for i in trained_on[g.id]}
        if layout.kl_beta:
            ref = {
                (g.id, i): logprobs_of(reference, g, i) for g in groups for i in trained_on[g.id]
            }
    advantages = advantages_of(layout, groups, trained_on, start, ref)
    losses, norms = [], []
    for part in np.array_split(np.arange(len(groups)), layout.minibatches):
        members = [(groups[k], i) for k in part for i in trained_on[groups[k].id]]
        tokens = sum(g.trajectories[i].n_response_tokens for g, i in members)
        parts = {(g.id, i): sequences_of(layout, g.trajectories[i]) for g, i in members}
        n_sequences = sum(len(found) for found in parts.values())
        loss = torch.zeros(())
        chooses = layout.loss in COVARIANCE
        chosen = chosen_tokens(layout, members, advantages, start) if chooses else {}
        normalizes = layout.tis_normalize != "none"
        means = mean_weights(layout, members, start) if normalizes else {}
        for g, i in members:
            logp = logprobs_of(model, g, i, True)
            teacher = teachers.get(g.labels[LABEL])
            token = token_losses(
                layout,
                g,
                i,
                advantages[g.id, i],
                logp,
                start[g.id, i],
                teacher,
                chosen.get((g.id, i)),
            )
            token = token / means.get(g.id, 1.0)
            if any(layout.papo):
                token = token + perception(layout, model, g, hidden[g.id], i, logp)
            if teacher is not None and layout.teacher[2]:
                token = token + layout.teacher[0] * lesson(
                    layout.teacher[2], model, teacher, g, i, told(g) if layout.privileged else g
                )
            token = token - 0.01 * entropy_of(model, g, i)
            if layout.kl_beta and layout.placement == "loss":
                gap = ref[g.id, i] - logprobs_of(model, g, i)
                token = token + layout.kl_beta * (gap.exp() - 1 - gap)
            kept = kept_tokens(layout, g, i, start[g.id, i])
            token = token.where(kept, 0.0)
            if layout.aggregation == "token-mean":
                loss = loss + token.sum() / tokens
            else:
                for where in parts[g.id, i]:
                    own = token[where]
                    own = own.sum() / (
                        max(1, kept[where].sum())
                        if layout.aggregation == "seq-mean-token-mean"
                        else 1
                    )
                    loss = loss + own / n_sequences / (
                        LONGEST if layout.aggregation.endswith("-norm") else 1
                    )
        if layout.balance:
            loss = loss + layout.balance * mixtures.balance_loss()
        for layer in mixtures.layers:
            layer.clear()
        grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        norms.append(math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads if g is not None)))
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for (name, p), g in zip(trained.items(), grads, strict=True):
                if g is not None:
                    masters[name] -= LR * g.float()
                    p.copy_(masters[name])
    return np.mean(losses), np.mean(norms), {n: p.numpy() for n, p in masters.items()}


def sequences_of(layout: Layout, t):
    """Which of a trajectory's sampled tokens make a sequence: slices, one for each turn, or one for all."""
    lengths = t.turn_tokens if layout.turns else [t.n_response_tokens]
    ends = np.cumsum(lengths)
    return [slice(end - n, end) for n, end in zip(lengths, ends, strict=True) if n]


def relative(value: float, values: list[float]) -> float:
    return (
        0.0
        if len(set(values)) == 1
        else (value - np.mean(values)) / (np.std(values, ddof=1) + 1e-6)
    )


def advantages_of(layout: Layout, groups, trained_on, start, ref):
    """Of each sampled token of each trajectory, float32, by (group, index)."""
    kl = {key: np.zeros(len(values)) for key, values in start.items()}
    if layout.placement == "reward":
        kl = {key: layout.kl_beta * (start[key] - ref[key]).double().numpy() for key in start}
    if layout.adv != "reinforce_plus_plus":
        return {
            (g.id, i): torch.from_numpy(
                group_advantages(layout, g, i, trained_on[g.id], kl)
            ).float()
            for g in groups
            for i in trained_on[g.id]
        }
    rewards = {(g.id, i): g.trajectories[i].reward for g in groups for i in trained_on[g.id]}
    returns = {
        key: [reward - kl[key][t:].sum() for t in range(len(kl[key]))]
        for key, reward in rewards.items()
    }
    everything = [value for values in returns.values() for value in values]
    mean, std = np.mean(everything), math.sqrt(np.var(everything, ddof=1) + 1e-8)
    return {
        key: torch.tensor([(value - mean) / std for value in values]).float()
        for key, values in returns.items()
    }


def group_advantages(layout: Layout, g, i: int, trained_on: list[int], kl):
    """Of each sampled token of a trajectory, float64."""
    played = {k: g.trajectories[k].turns for k in trained_on}

    def paid_from(k: int, t: int) -> float:
        return sum(layout.discount**n * turn.reward for n, turn in enumerate(played[k][t:]))

    def of_turn(t: int) -> float:
        if layout.credit == "turn":
            return relative(
                paid_from(i, t), [paid_from(k, t) for k in trained_on if len(played[k]) > t]
            )
        rewards = {k: g.trajectories[k].reward - kl[g.id, k].sum() for k in trained_on}
        value = relative(rewards[i], list(rewards.values()))
        if layout.state_weight:
            state = played[i][t].info
            alike = [
                paid_from(k, n)
                for k in trained_on
                for n, turn in enumerate(played[k])
                if turn.info == state
            ]
            value += layout.state_weight * relative(paid_from(i, t), alike)
        return value

    t = g.trajectories[i]
    values = [of_turn(k) for k in range(len(t.turns))]
    return np.repeat(values, t.turn_tokens)


def perception(layout: Layout, model, g, hidden, i: int, logp):
    """PAPO's terms: -γ (r - 1 - log r) with r the ratio of the masked policy to the policy, + η (H + H of the masked)."""
    weight, entropy_weight = layout.papo
    with torch.set_grad_enabled(entropy_weight > 0):
        blind = transformers_logprobs(model, hidden, i, 0.7)
        entropy = entropy_of(model, hidden, i)
    log_ratio = blind - logp
    token = -weight * (log_ratio.exp() - 1 - log_ratio)
    return token + entropy_weight * (entropy_of(model, g, i) + entropy) if entropy_weight else token


def told(g):
    """The group with the teacher's prompts; logprobs of prompts are no one's."""

    def with_hint(t):
        (s,), n = t.sequences, len(t.teacher_prompt)
        answer = slice(t.turns[0].start, None)
        ids = np.array([*t.teacher_prompt, *s.ids[answer]], np.int32)
        mask = np.array([*[False] * n, *s.loss_mask[answer]])
        filler = np.zeros(len(ids), np.int32)
        sequence = replace(s, ids=ids, loss_mask=mask, logprobs=None, versions=filler, columns={})
        return replace(t, sequences=(sequence,), turns=())

    seen = tuple(with_hint(t) if t.sequences else t for t in g.trajectories)
    return replace(g, trajectories=seen, prefix_length=0)


def lesson(k: int, model, teacher, g, i: int, seen):
    """KL(policy‖teacher) at each response position over the policy's k likeliest tokens and the rest as one."""
    ours = log_distribution(model, g, i)
    with torch.no_grad():
        theirs = log_distribution(teacher, seen, i)
    top = ours.topk(min(k, ours.shape[1])).indices
    told = torch.zeros_like(ours, dtype=torch.bool).scatter(1, top, True)
    kl = (ours.exp() * (ours - theirs)).where(told, 0.0).sum(1)
    if told.all():
        return kl
    rest = [x.exp().where(~told, 0.0).sum(1) for x in (ours, theirs)]
    return kl + rest[0] * (rest[0] / rest[1]).log()


def kept_tokens(layout: Layout, g, i: int, train):
    """Which of a trajectory's sampled tokens are not rejected."""
    level, low, high, veto = layout.rejection
    t, kept = g.trajectories[i], []
    rollout = np.concatenate([sequence.logprobs[sequence.loss_mask] for sequence in t.sequences])
    ratios = np.exp(train.double().numpy() - rollout) if not t.corrupted else np.ones(len(rollout))
    for where in sequences_of(layout, t):
        own = ratios[where]
        of = {
            "token": own,
            "sequence": own.prod(),
            "geometric": own.prod() ** (1 / len(own)),
            None: 1.0,
        }[level]
        stays = np.broadcast_to((low or 0.0) <= of, len(own)) & np.broadcast_to(
            of <= (high or np.inf), len(own)
        )
        kept.append(stays & bool((own >= (veto or 0.0)).all()))
    return torch.from_numpy(np.concatenate(kept))


def mean_weights(layout: Layout, members, start):
    """By group, the mean weight of its tokens (or sequences), or of all."""
    found = {}
    for g, i in members:
        t = g.trajectories[i]
        rollout = np.concatenate([s.logprobs[s.loss_mask] for s in t.sequences])
        gap = start[g.id, i] - torch.from_numpy(rollout)
        if t.corrupted:
            gap = torch.zeros_like(gap)
        if layout.tis_level != "token":
            whole = {"sequence": torch.sum, "geometric": torch.mean}[layout.tis_level]
            gap = torch.stack([whole(gap[where]) for where in sequences_of(layout, t)])
        key = g.id if layout.tis_normalize == "group" else ""
        found.setdefault(key, []).append(gap.exp().clamp(max=layout.tis_clip))
    means = {key: torch.cat(weights).double().mean().item() for key, weights in found.items()}
    return {g.id: means[g.id if layout.tis_normalize == "group" else ""] for g, _ in members}


#: Clip-Cov's and KL-Cov's share of a mini-batch's tokens, and Clip-Cov's bounds, which choose some of these few.
COVARIANCE = {"kl_cov": {"SHARE": 0.2}, "clip_cov": {"SHARE": 1.0, "LOW": 0.05, "HIGH": 0.6}}


def chosen_tokens(layout: Layout, members, advantages, start):
    """By trajectory, the tokens that a loss chooses by their covariance among all of a mini-batch."""
    cov = {}
    flat = [torch.as_tensor(advantages[g.id, i]).expand(len(start[g.id, i])) for g, i in members]
    mean_a = torch.cat(flat).double().mean()
    mean_l = torch.cat([start[g.id, i] for g, i in members]).double().mean()
    for (g, i), adv in zip(members, flat, strict=True):
        cov[g.id, i] = (adv.double() - mean_a) * (start[g.id, i].double() - mean_l)
    settings = COVARIANCE[layout.loss]
    if layout.loss == "clip_cov":
        return {key: (x > settings["LOW"]) & (x < settings["HIGH"]) for key, x in cov.items()}
    values = torch.cat(list(cov.values())).sort(descending=True).values
    least = values[max(1, int(settings["SHARE"] * len(values))) - 1]
    return {key: x >= least for key, x in cov.items()}


def token_losses(layout: Layout, g, i: int, adv, logp, start, teacher=None, chosen=None):
    """Policy losses of a trajectory's sampled tokens, by the formulas in docs/algorithms.md and docs/credit.md."""
    sampled = [sequence.logprobs[sequence.loss_mask] for sequence in g.trajectories[i].sequences]
    rollout = torch.from_numpy(np.concatenate(sampled))
    train = start if layout.minibatches > 1 else logp.detach()
    if g.trajectories[i].corrupted:  # the engine's are of another image
        rollout = train
    if teacher is not None:
        weight, reward_weight, top_k = layout.teacher
        with torch.no_grad():
            seen = told(g) if layout.privileged else g
            taught = transformers_logprobs(teacher, seen, i, 0.7)
        adv = reward_weight * adv - (0.0 if top_k else weight) * (train - taught)
    parts = sequences_of(layout, g.trajectories[i])
    old = rollout if layout.old_logprobs == "false" or layout.old_policy == "sampler" else train
    if layout.old_policy == "interpolated":
        versions = np.concatenate(
            [sequence.versions[sequence.loss_mask] for sequence in g.trajectories[i].sequences]
        )
        d = torch.from_numpy(VERSION - versions)
        old = (rollout + d * logp.detach()) / (1 + d)
    log_ratio = logp - old
    if layout.loss == "gspo":
        log_ratio = torch.cat(
            [log_ratio[where].mean().expand(len(log_ratio[where])) for where in parts]
        )
    ratio = log_ratio.exp()
    if layout.loss == "gmpo":  # bounds of log-ratios, 0.2 and 0.28
        sign = torch.where(adv < 0, -1.0, 1.0)
        bounded = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-0.2, 0.28))
        means = [bounded[where].mean().expand(len(bounded[where])) for where in parts]
        token = -adv * torch.cat(means).exp()
    elif layout.loss == "dppo_tv":  # bounds of probabilities, and the dual clip's of the ratio
        moved = logp.detach().exp() - old.exp()
        valid = torch.where(adv > 0, moved <= 0.28, moved >= -0.2)
        token = -adv * ratio.detach().clamp(max=3.0) * logp * valid
    elif layout.loss == "gspo_token":
        means = [log_ratio[where].mean().expand(len(log_ratio[where])) for where in parts]
        ratio = torch.cat(means).detach().exp() * (logp - logp.detach()).exp()
        token = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.28))
        token = torch.where(adv < 0, torch.minimum(token, -adv * 3.0), token)
    elif layout.loss == "kl_cov":
        token = -adv * ratio + (logp - old).abs() * chosen
    elif layout.loss == "cispo":
        token = -adv * ratio.clamp(0.8, 1.28).detach() * logp
    elif layout.loss == "sapo":
        token = torch.where(
            adv > 0,
            -adv * 4 * torch.sigmoid(ratio - 1),
            -adv * 4 / 1.05 / (1 + (1.05 * (1 - ratio)).exp()),
        )
    else:
        token = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.28))
        token = torch.where(adv < 0, torch.minimum(token, -adv * 3.0), token)
    if layout.loss == "clip_cov":
        is_clipped = -adv * ratio.clamp(0.8, 1.28) > -adv * ratio  # such a token stays as it is
        token = token * ~(chosen & ~is_clipped)
    if layout.tis_clip is None:
        return token
    gap = old - rollout
    if layout.tis_level != "token":
        whole = {"sequence": torch.sum, "geometric": torch.mean}[layout.tis_level]
        gap = torch.cat([whole(gap[where]).expand(len(gap[where])) for where in parts])
    return token * gap.exp().clamp(max=layout.tis_clip)


def entropy_of(model, g, i):
    """Entropy at each response position, from transformers' logits through every candidate's logprob."""
    return torch.distributions.Categorical(logits=log_distribution(model, g, i)).entropy()


def log_distribution(model, g, i):
    """Logprobs of all tokens that can be sampled at each response position, from transformers' logits."""
    found = []
    for sequence in g.trajectories[i].sequences:
        ids, inputs = transformers_inputs(sequence, model.config.model_type)
        model.model.rope_deltas = None
        logits = (
            model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0].float()
            / 0.7
        )
        before = torch.from_numpy(np.flatnonzero(sequence.loss_mask) - 1)
        found.append(logits[before][:, torch.from_numpy(~banned())])
    return torch.cat(found).log_softmax(-1)
