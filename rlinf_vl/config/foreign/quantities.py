"""From what other systems say in other units, or with several keys, to our keys: batches, lengths, clipping, KL, LoRA, rewards.

Every rule takes the quantities of a file (`Quantities`, by the roles of systems/quantities.yaml) and yields our settings. A rule
that a file says nothing of, and whose result is our default, is left out by the caller.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlinf_vl.config.foreign.values import names_of, top_k

KL_NAMES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs"}
#: Longest prompt where a system has no limit.
NO_LIMIT = 2048


class Derived(NamedTuple):
    """A value of ours, and a remark on how it came about."""

    key: str
    value: Any
    note: str = ""


class BadQuantity(ValueError):
    """What a file says of a role is no number."""

    def __init__(self, role: str, value: Any) -> None:
        super().__init__(f"{value!r} is no number")
        self.role = role


class Quantities:
    """What a file says by role, and what its system takes where it says nothing. `used` has the roles asked for since `begin`."""

    def __init__(
        self, said: Mapping[str, Any], defaults: Mapping[str, Any], find: Callable[[str], Path | None]
    ) -> None:
        self.said = dict(said)
        self.defaults = dict(defaults)
        self.find = find
        self.used: set[str] = set()
        self.refused: dict[str, str] = {}

    def __call__(self, role: str, otherwise: Any = None) -> Any:
        self.used.add(role)
        for values in (self.said, self.defaults):
            if values.get(role) is not None:
                return values[role]
        return otherwise

    def number(self, role: str, otherwise: float = 0) -> float:
        value = self(role, otherwise)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise BadQuantity(role, value) from None

    def has(self, role: str) -> bool:
        """Whether the file or the system has it at all."""
        return self(role) is not None


def lengths(q: Quantities) -> Iterator[Derived]:
    response, context = int(q.number("response_length", 0)), int(q.number("context_length", 0))
    if not response:
        return
    if q.has("input_length"):
        context = max(context, int(q.number("input_length")) + response)
    prompt = int(q.number("prompt_length", 0))
    if not prompt:
        prompt = context - response if context > response else NO_LIMIT
        yield Derived(
            "data.max_prompt_length", prompt, "no limit there; longer prompts are left out here: choose yours"
        )
    else:
        yield Derived("data.max_prompt_length", prompt)
    longest = max(int(q.number("val_response_length", response)), response)
    yield Derived("runner.seq_length", max(context, prompt + longest), "the longest prompt and its answer")
    yield Derived("algorithm.sampling_params.max_new_tokens", response)
    yield Derived("algorithm.val_sampling_params.max_new_tokens", int(q.number("val_response_length", response)))


def batches(q: Quantities, group_size: int) -> Iterator[Derived]:
    """Problems of a step, and optimizer steps made of them."""
    problems, parts, note = int(q.number("prompts_per_step")), 1.0, ""
    if q.has("device_responses"):
        devices, accumulation = int(q.number("processes", 1)), q.number("accumulation", 1)
        micro = q.number("device_responses")
        generated = q("responses_per_step") or micro * devices * q.number("steps_per_generation", accumulation)
        updated = micro * devices * accumulation
        problems, parts = max(1, round(max(generated, updated) / group_size)), max(1, generated / updated)
        note = f"{max(generated, updated):g} responses of {group_size} each, on {devices} device(s): num_processes"
    elif q.has("prompts_per_update"):
        parts = problems / q.number("prompts_per_update")
    if not problems:
        return
    whole = max(1, round(parts))
    while problems % whole:
        whole -= 1
    yield Derived("data.rollout_batch_size", problems, note)
    why = f"{problems} problems in {parts:g} parts: the next smaller number that divides them" if whole != parts else ""
    yield Derived("algorithm.n_minibatches", whole, why)
    for role, strategy, key, never in (
        ("updates", "", "runner.max_steps", -1),
        ("save_every", "save_strategy", "runner.save_interval", -1),
        ("validate_every", "validate_strategy", "runner.val_check_interval", -1),
    ):
        if not q.has(role):
            continue
        steps, on = q.number(role), not strategy or str(q(strategy, "steps")) == "steps"
        if strategy and str(q(strategy)) == "epoch":
            q.refused[strategy] = f"per epoch: write the steps into {key}"
        unit = f"{steps:g} optimizer steps, {whole} to a step" if whole > 1 else ""
        yield Derived(key, math.ceil(steps / whole) if on and steps > 0 else never, unit)


def micro_batches(q: Quantities, longest: int) -> Iterator[Derived]:
    tokens, responses = int(q.number("micro_tokens")), int(q.number("micro_responses"))
    packed = q("packing", not responses)
    if tokens and (packed or not responses):
        note = f"raised from {tokens}: the longest sequence" if tokens < longest else ""
        yield Derived("runner.max_tokens_per_mbs", max(tokens, longest), note)
    elif responses:
        yield Derived("runner.max_tokens_per_mbs", responses * longest, f"{responses} x {longest} tokens, packed")


def loss(q: Quantities) -> Iterator[Derived]:
    kind, mean = q("loss"), q("mean")
    if mean in ("cispo", "sapo"):  # TRL's loss_type is both
        kind, mean = mean, "token-mean" if mean == "cispo" else "seq-mean-token-mean"
    kind = "gspo" if q("loss_level") == "sequence" else kind or "actor"
    yield Derived("algorithm.loss_type", "actor" if kind == "plain" else kind)
    if mean:
        yield Derived("algorithm.loss_agg_func", mean)
    if q.has("normalize"):
        yield Derived("algorithm.normalize_advantages", bool(q("normalize")))
    if q.has("entropy_coef"):
        yield Derived("algorithm.entropy_bonus", q.number("entropy_coef") if q("entropy_on", True) else 0.0)
    if kind == "sapo":  # a gate, no clip
        return
    both = q.number("clip_eps", 0.2)
    low = q.number("clip_low", both)
    high = q.number("clip_high", both if q.has("clip_eps") else low)
    if kind == "cispo" and q.has("soft_clip_high"):
        low, high = q.number("soft_clip_low", low), q.number("soft_clip_high")
    elif kind == "cispo" and q("mean") == "cispo":  # TRL's bound is of the ratio itself, above only
        low, high = 1.0, max(0.0, high - 1)
    yield Derived("algorithm.clip_ratio_low", low)
    yield Derived("algorithm.clip_ratio_high", high)
    if q.has("clip_dual") and kind in ("actor", "gspo"):  # plain: SkyRL's loss without
        yield Derived("algorithm.clip_ratio_c", q.number("clip_dual"), "dual clip")


def reference_kl(q: Quantities) -> Iterator[Derived]:
    """The KL term: in the loss, in the reward, or nowhere."""
    if not any(q.has(role) for role in ("kl_loss", "kl_loss_coef", "kl_reward", "kl_reward_coef")):
        return
    in_reward = bool(q("kl_reward", False))
    in_loss = bool(q("kl_loss", not in_reward and q.has("kl_loss_coef")))
    if q.has("kl_off"):  # EasyR1: in the reward unless in the loss
        in_reward, in_loss = not q("kl_off") and not in_loss, not q("kl_off") and in_loss
    role = "kl_reward_coef" if in_reward and q.has("kl_reward_coef") else "kl_loss_coef"
    beta = q.number(role) if in_reward or in_loss else 0.0
    yield Derived("algorithm.kl_beta", beta)
    if not beta:
        return
    name = str(q("kl_reward_type", q("kl_loss_type", "k3")) if in_reward else q("kl_loss_type", "k3"))
    role = "kl_reward_type" if in_reward and q.has("kl_reward_type") else "kl_loss_type"
    if name not in KL_NAMES:
        q.refused[role] = f"{name!r}: estimators are {', '.join(KL_NAMES)}"
    elif KL_NAMES[name] == "k1" and not in_reward:
        q.refused[role] = "k1 (kl) in the loss has an expected gradient of zero: k3 is written"
        yield Derived("algorithm.kl_penalty_type", "k3")
    else:
        yield Derived("algorithm.kl_penalty_type", KL_NAMES[name])
    if in_reward:
        yield Derived("algorithm.kl_placement", "reward")


def correction(q: Quantities) -> Iterator[Derived]:
    """Truncated importance sampling for the difference of engine and trainer, and rejection."""
    yield from rejection(q)
    if "tis" not in q.said and "tis" not in q.defaults:
        return
    level = q("tis")
    level = "token" if level is True else level
    if isinstance(level, str) and level.endswith("_mask"):  # TRL: rejected beyond the bounds, and not truncated
        level = level.removesuffix("_mask")
        yield Derived("algorithm.rejection.level", level)
        yield Derived("algorithm.rejection.low", q.number("rejection_low", 0.0))
        yield Derived("algorithm.rejection.high", q.number("tis_clip", math.inf))
    elif isinstance(bounds := q("tis_clip"), str) and "_" in bounds:  # verl's IcePop, of train / rollout
        low, high = _bounds(q, "tis_clip")
        yield Derived("algorithm.rejection.level", str(level))
        yield Derived("algorithm.rejection.low", low)
        yield Derived("algorithm.rejection.high", high)
        yield Derived("algorithm.importance_sampling_fix", True)
        yield Derived("algorithm.importance_sampling_level", str(level))
        yield Derived("algorithm.importance_sampling_clip", high, "beyond it is rejected")
        return
    note = "" if level else "off there; true corrects for the difference of engine and trainer"
    yield Derived("algorithm.importance_sampling_fix", bool(level), note)
    if level:
        yield Derived("algorithm.importance_sampling_level", str(level))
        clip = "tis_sequence_clip" if level != "token" and q.has("tis_sequence_clip") else "tis_clip"
        if q.has(clip):
            yield Derived("algorithm.importance_sampling_clip", q.number(clip))


def rejection(q: Quantities) -> Iterator[Derived]:
    """Tokens and sequences that are left out by their ratio. verl bounds rollout / train, SkyRL train / rollout."""
    if q.has("veto"):
        yield Derived("algorithm.rejection.veto", q.number("veto"))
    if not q.has("rejection"):
        return
    level = str(q("rejection"))
    yield Derived("algorithm.rejection.level", level)
    if q.has("rejection_bounds"):
        low, high = _bounds(q, "rejection_bounds")
        yield Derived("algorithm.rejection.low", 1 / high, f"1 / {high:g}")
        yield Derived("algorithm.rejection.high", 1 / low, f"1 / {low:g}")
    for side in ("low", "high"):
        role = f"rejection_geometric_{side}" if level == "geometric" else f"rejection_{side}"
        if q.has(role):
            yield Derived(f"algorithm.rejection.{side}", q.number(role))


def _bounds(q: Quantities, role: str) -> tuple[float, float]:
    """Of verl's "low_high", or of one number, which bounds both sides."""
    value = str(q(role))
    low, _, high = value.rpartition("_")
    try:
        return (float(low), float(high)) if low else (1 / float(high), float(high))
    except (ValueError, ZeroDivisionError):
        raise BadQuantity(role, value) from None


def sampling_kit(q: Quantities) -> Iterator[Derived]:
    """DAPO's: groups that tie are refilled, answers near the limit pay."""
    if q("refill"):
        yield Derived("algorithm.dynamic_sampling.enable", True)
        rounds = int(q.number("refill_rounds", 0))
        if rounds > 0:
            yield Derived("algorithm.dynamic_sampling.max_rounds", rounds)
    if q("overlong_on", q.has("overlong_buffer")) and q.has("overlong_buffer"):
        yield Derived("algorithm.overlong.buffer", int(q.number("overlong_buffer")))
        yield Derived("algorithm.overlong.penalty", q.number("overlong_penalty", 1.0))


def teacher(q: Quantities) -> Iterator[Derived]:
    """On-policy distillation."""
    if not q("teacher_on") or not q.has("teacher_path"):
        return
    prefix = "algorithm.distillation"
    if q("teacher_loss") not in ("k1", "kl"):
        q.refused["teacher_loss"] = (
            f"{q('teacher_loss')}: the reverse KL (k1) is what a teacher teaches here, or over {prefix}.top_k"
        )
    yield Derived(f"{prefix}.teacher_path", str(q("teacher_path")))
    yield Derived(f"{prefix}.weight", q.number("teacher_weight", 1.0))
    yield Derived(f"{prefix}.reward_weight", 1.0 if q("teacher_and_reward", True) else 0.0)


def validation(q: Quantities) -> Iterator[Derived]:
    prefix = "algorithm.val_sampling_params"
    sampled = q("val_sampled", True)
    if q.has("val_temperature") or not sampled:
        yield Derived(f"{prefix}.temperature", q.number("val_temperature", 1.0) if sampled else 0.0)
    if q.has("val_top_p"):
        yield Derived(f"{prefix}.top_p", q.number("val_top_p"))
    if q.has("val_top_k"):
        yield Derived(f"{prefix}.top_k", top_k(q.number("val_top_k")))


def optimizer(q: Quantities, updates: int) -> Iterator[Derived]:
    """Args: updates: optimizer steps of the run; 0 if unknown."""
    lr = q.number("lr", 0)
    if lr:
        yield Derived("actor.optim.lr", lr)
    if isinstance(betas := q("betas"), list) and len(betas) == 2:
        yield Derived("actor.optim.adam_beta1", betas[0])
        yield Derived("actor.optim.adam_beta2", betas[1])
    elif betas is not None:
        q.refused["betas"] = f"{betas!r} are not two numbers"
    if q.number("min_lr") and lr:
        yield Derived("actor.optim.min_lr_ratio", q.number("min_lr") / lr)
    steps, ratio = q.number("warmup_steps"), q.number("warmup_ratio")
    if 0 < steps < 1:  # transformers 5: a share
        steps, ratio = 0, steps
    if steps > 0:
        yield Derived("actor.optim.lr_warmup_steps", int(steps))
    elif ratio and updates:
        yield Derived("actor.optim.lr_warmup_steps", round(ratio * updates), f"{ratio:g} of {updates} optimizer steps")
    elif ratio:
        role = "warmup_ratio" if "warmup_ratio" in q.said else "warmup_steps"
        q.refused[role] = f"{ratio:g} of the run's optimizer steps: write that number into actor.optim.lr_warmup_steps"


def adapters(q: Quantities) -> Iterator[Derived]:
    rank = int(q.number("lora_rank", 16 if q("lora_on") else 0))
    if q("lora_on", rank > 0) and rank > 0:
        yield Derived("actor.model.is_lora", True)
        yield Derived("actor.model.lora.rank", rank)
        for role, key in (("lora_alpha", "alpha"), ("lora_dropout", "dropout")):
            if q.has(role):
                yield Derived(f"actor.model.lora.{key}", q.number(role))
        targets, excluded = names_of(q("lora_targets", "all-linear")), names_of(q("lora_excludes"))
        if targets == ["all-linear"] and any(word in x for x in excluded for word in ("visual", "vision")):
            targets, excluded = ["language"], []
        yield Derived("actor.model.lora.target_modules", targets)
        if excluded:
            yield Derived("actor.model.lora.exclude_modules", excluded)
    elif q.has("freeze_tower"):
        yield Derived("actor.model.freeze_vision_tower", bool(q("freeze_tower")))


def machines(q: Quantities) -> Iterator[Derived]:
    apart = False
    if isinstance(placement := q("placement"), Mapping):
        kept = {}
        for names, slots in placement.items():
            ours = [name for name in str(names).split(",") if name.strip() in ("actor", "rollout")]
            if ours:
                kept[",".join(name.strip() for name in ours)] = slots
        apart = len(kept) > 1
        yield Derived("cluster.component_placement", kept)
    elif q.has("devices"):
        yield Derived("cluster.component_placement", {"actor,rollout": "all"}, f"{q('devices')} there; here all GPUs")
    if q.number("engine_devices") > 1:
        if apart:
            yield Derived("rollout.tensor_parallel_size", int(q("engine_devices")))
        else:
            q.refused["engine_devices"] = "dropped: engines that share GPUs with the trainer have one each here"
    size, node = int(q.number("fsdp_size", -1)), q("devices")
    if size > 0:
        yield Derived("actor.fsdp_config.strategy", "hsdp" if size == node else "fsdp2")
    if q.has("offload"):
        yield Derived("actor.enable_offload", bool(q("offload")), "while engines generate")


def resuming(q: Quantities) -> Iterator[Derived]:
    mode, path = q("resume"), q("resume_path")
    if path in (True, "auto", "latest"):
        mode, path = "auto", None
    if path:
        q.refused["resume_path"] = (
            "a checkpoint of another system, which can't be gone on with; export it as a model folder there"
        )
    elif q.has("resume"):
        on = mode is True or str(mode) in ("auto", "latest")
        yield Derived("runner.resume_dir", "auto" if on else None)
