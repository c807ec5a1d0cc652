"""The rules for settings that other systems have in other units, or spread over several keys.

Every rule takes the quantities of a file (`Quantities`, by the roles of systems/quantities.yaml)
and yields our settings. The caller leaves out a setting that is our default and that no key of the
file is about.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlinf_vl.tools.convert.values import names_of, top_k

#: Their names of KL estimators, and ours (Schulman 2020, "Approximating KL Divergence").
KL_NAMES = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "abs": "abs",
}
#: Longest prompt, in tokens, where a system has no limit and ours needs one.
DEFAULT_PROMPT_LENGTH = 2048


class Derived(NamedTuple):
    """A setting of ours that a rule derived, and a remark on how."""

    key: str
    value: Any
    note: str = ""


class BadQuantity(ValueError):
    """The file's value of a role is no number."""

    def __init__(self, role: str, value: Any) -> None:
        super().__init__(f"{value!r} is no number")
        self.role = role


class Quantities:
    """The values of a file by role, and the defaults of its system.

    Attributes:
        file_values: role → value in the file.
        defaults: role → the system's default, for roles that the file does not set.
        find: returns the file of a name in the config, or None.
        used: the roles that were read since the caller cleared it.
        refused: role → the reason why its value can't be converted.
    """

    def __init__(
        self,
        file_values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        find: Callable[[str], Path | None],
    ) -> None:
        self.file_values = dict(file_values)
        self.defaults = dict(defaults)
        self.find = find
        self.used: set[str] = set()
        self.refused: dict[str, str] = {}

    def __call__(self, role: str, default: Any = None) -> Any:
        """Return the value of a role; `default` where neither the file nor its system has one."""
        self.used.add(role)
        for values in (self.file_values, self.defaults):
            if values.get(role) is not None:
                return values[role]
        return default

    def number(self, role: str, default: float = 0) -> float:
        """Return the value of a role as a number. Raises BadQuantity: it is none."""
        value = self(role, default)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise BadQuantity(role, value) from None

    def has(self, role: str) -> bool:
        """Return whether the file or its system has a value for a role."""
        return self(role) is not None


def lengths(q: Quantities) -> Iterator[Derived]:
    """Yield the lengths of prompts, answers and sequences, in tokens."""
    response, context = int(q.number("response_length", 0)), int(q.number("context_length", 0))
    if not response:
        return
    if q.has("input_length"):
        context = max(context, int(q.number("input_length")) + response)
    prompt = int(q.number("prompt_length", 0))
    if not prompt:
        prompt = context - response if context > response else DEFAULT_PROMPT_LENGTH
        yield Derived(
            "data.max_prompt_length",
            prompt,
            "no limit there; longer prompts are left out here: choose yours",
        )
    else:
        yield Derived("data.max_prompt_length", prompt)
    longest = max(int(q.number("val_response_length", response)), response)
    yield Derived(
        "runner.seq_length", max(context, prompt + longest), "the longest prompt and its answer"
    )
    yield Derived("algorithm.sampling_params.max_new_tokens", response)
    yield Derived(
        "algorithm.val_sampling_params.max_new_tokens",
        int(q.number("val_response_length", response)),
    )


def batches(q: Quantities, group_size: int) -> Iterator[Derived]:
    """Yield the problems of a step, its optimizer steps, and all intervals that count in these.

    Systems count problems, responses per device or optimizer steps; ours counts problems and steps.
    """
    problems, parts, note = int(q.number("prompts_per_step")), 1.0, ""
    if q.has("device_responses"):
        devices, accumulation = int(q.number("processes", 1)), q.number("accumulation", 1)
        # TRL counts responses: a device's, times devices, times steps of accumulation.
        micro = q.number("device_responses")
        generated = q("responses_per_step") or micro * devices * q.number(
            "steps_per_generation", accumulation
        )
        updated = micro * devices * accumulation
        problems, parts = (
            max(1, round(max(generated, updated) / group_size)),
            max(1, generated / updated),
        )
        note = f"{max(generated, updated):g} responses of {group_size} each, on {devices} device(s): num_processes"
    elif q.has("prompts_per_update"):
        parts = problems / q.number("prompts_per_update")
    if not problems:
        return
    minibatches = max(1, round(parts))
    # Mini-batches must be equal, so their number has to divide the problems.
    while problems % minibatches:
        minibatches -= 1
    yield Derived("data.rollout_batch_size", problems, note)
    why = (
        f"{problems} problems in {parts:g} parts: the next smaller number that divides them"
        if minibatches != parts
        else ""
    )
    yield Derived("algorithm.n_minibatches", minibatches, why)
    for role, strategy, key, never in (
        ("updates", "", "runner.max_steps", -1),
        ("save_every", "save_strategy", "runner.save_interval", -1),
        ("validate_every", "validate_strategy", "runner.val_check_interval", -1),
    ):
        if not q.has(role):
            continue
        steps = q.number(role)
        is_on = not strategy or str(q(strategy, "steps")) == "steps"
        if strategy and str(q(strategy)) == "epoch":
            q.refused[strategy] = f"per epoch: write the steps into {key}"
        unit = f"{steps:g} optimizer steps, {minibatches} to a step" if minibatches > 1 else ""
        yield Derived(key, math.ceil(steps / minibatches) if is_on and steps > 0 else never, unit)


def micro_batches(q: Quantities, longest: int) -> Iterator[Derived]:
    """Yield the tokens of a micro-batch; `longest` is the longest sequence, which must fit."""
    tokens, responses = int(q.number("micro_tokens")), int(q.number("micro_responses"))
    is_packed = q("packing", not responses)
    if tokens and (is_packed or not responses):
        note = f"raised from {tokens}: the longest sequence" if tokens < longest else ""
        yield Derived("runner.max_tokens_per_mbs", max(tokens, longest), note)
    elif responses:
        yield Derived(
            "runner.max_tokens_per_mbs",
            responses * longest,
            f"{responses} x {longest} tokens, packed",
        )


def loss(q: Quantities) -> Iterator[Derived]:
    """Yield the loss, its mean over tokens, and its clipping."""
    kind, mean = q("loss"), q("mean")
    if mean in ("cispo", "sapo"):  # TRL's loss_type names both the loss and its mean
        kind, mean = mean, "token-mean" if mean == "cispo" else "seq-mean-token-mean"
    kind = "gspo" if q("loss_level") == "sequence" else kind or "actor"
    yield Derived("algorithm.loss_type", "actor" if kind == "plain" else kind)
    if mean:
        yield Derived("algorithm.loss_agg_func", mean)
    if q.has("normalize"):
        yield Derived("algorithm.normalize_advantages", bool(q("normalize")))
    if q.has("entropy_coef"):
        yield Derived(
            "algorithm.entropy_bonus", q.number("entropy_coef") if q("entropy_on", True) else 0.0
        )
    if kind in ("sapo", "kl_cov"):  # a soft gate, or a price, instead of a clip
        return
    epsilon = q.number("clip_eps", 0.2)  # the bound of both sides, unless a side has its own
    low = q.number("clip_low", epsilon)
    high = q.number("clip_high", epsilon if q.has("clip_eps") else low)
    if kind == "cispo" and q.has("soft_clip_high"):
        low, high = q.number("soft_clip_low", low), q.number("soft_clip_high")
    elif kind == "cispo" and q("mean") == "cispo":  # TRL's bound is the ratio itself, on one side
        low, high = 1.0, max(0.0, high - 1)
    yield Derived("algorithm.clip_ratio_low", low)
    yield Derived("algorithm.clip_ratio_high", high)
    # "plain" is SkyRL's loss without it.
    if q.has("clip_dual") and kind in ("actor", "gspo", "dppo_tv", "dppo_kl", "clip_cov"):
        yield Derived("algorithm.clip_ratio_c", q.number("clip_dual"), "dual clip")


def reference_kl(q: Quantities) -> Iterator[Derived]:
    """Yield the KL term: in the loss, in the reward, or nowhere."""
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
    name = str(
        q("kl_reward_type", q("kl_loss_type", "k3")) if in_reward else q("kl_loss_type", "k3")
    )
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
    """Yield the correction of the difference of engine and trainer.

    It is rejection, and truncated importance sampling.
    """
    yield from rejection(q)
    if "tis" not in q.file_values and "tis" not in q.defaults:
        return
    level = q("tis")
    level = "token" if level is True else level
    # TRL: reject beyond the bounds instead of truncating.
    if isinstance(level, str) and level.endswith("_mask"):
        level = level.removesuffix("_mask")
        yield Derived("algorithm.rejection.level", level)
        yield Derived("algorithm.rejection.low", q.number("rejection_low", 0.0))
        yield Derived("algorithm.rejection.high", q.number("tis_clip", math.inf))
    elif (
        isinstance(bounds := q("tis_clip"), str) and "_" in bounds
    ):  # verl's IcePop bounds train / rollout
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
        if q("tis_normalize", False):
            yield Derived("algorithm.importance_sampling_normalize", "batch")
        clip = (
            "tis_sequence_clip" if level != "token" and q.has("tis_sequence_clip") else "tis_clip"
        )
        if q.has(clip):
            yield Derived("algorithm.importance_sampling_clip", q.number(clip))


def rejection(q: Quantities) -> Iterator[Derived]:
    """Yield the bounds of ratios beyond which tokens and sequences are left out of the loss.

    verl bounds rollout / train. SkyRL and ours bound train / rollout, so verl's bounds are
    inverted.
    """
    if q.has("veto"):
        yield Derived("algorithm.rejection.veto", q.number("veto"))
    if not q.has("rejection"):
        return
    level = str(q("rejection"))
    yield Derived("algorithm.rejection.level", level)
    # An inverted ratio has its bounds swapped, too.
    if q.has("rejection_bounds"):
        low, high = _bounds(q, "rejection_bounds")
        yield Derived("algorithm.rejection.low", 1 / high, f"1 / {high:g}")
        yield Derived("algorithm.rejection.high", 1 / low, f"1 / {low:g}")
    for side in ("low", "high"):
        # SkyRL has a pair of bounds for each level.
        role = f"rejection_geometric_{side}" if level == "geometric" else f"rejection_{side}"
        if q.has(role):
            yield Derived(f"algorithm.rejection.{side}", q.number(role))


def _bounds(q: Quantities, role: str) -> tuple[float, float]:
    """Return the bounds in verl's "low_high", or in one number, which bounds both sides.

    Raises:
        BadQuantity: the value is no number, or an upper bound of zero.
    """
    value = str(q(role))
    low, _, high = value.rpartition("_")
    try:
        return (float(low), float(high)) if low else (1 / float(high), float(high))
    except (ValueError, ZeroDivisionError):
        raise BadQuantity(role, value) from None


def sampling_kit(q: Quantities) -> Iterator[Derived]:
    """Yield DAPO's dynamic sampling, which replaces groups of equal rewards, and its penalty."""
    if q("refill"):
        yield Derived("algorithm.dynamic_sampling.enable", True)
        # 0 has no limit there, which a run here could hang in: our default stays.
        rounds = int(q.number("refill_rounds", 0))
        if rounds > 0:
            yield Derived("algorithm.dynamic_sampling.max_rounds", rounds)
    if q("overlong_on", q.has("overlong_buffer")) and q.has("overlong_buffer"):
        yield Derived("algorithm.overlong.buffer", int(q.number("overlong_buffer")))
        yield Derived("algorithm.overlong.penalty", q.number("overlong_penalty", 1.0))


def teacher(q: Quantities) -> Iterator[Derived]:
    """Yield on-policy distillation."""
    settings = q("teacher_models") or {}
    if not isinstance(settings, Mapping):
        q.refused["teacher_models"] = f"{settings!r} names no teachers"
        return
    # By its name in the file; settings beside paths and labels are of its engine.
    paths = {
        key.removesuffix(".model_path"): str(path)
        for key, path in settings.items()
        if key.endswith(".model_path") and path
    }
    if not q("teacher_on") or not paths:
        return
    prefix = "algorithm.distillation"
    if q("teacher_loss") not in ("k1", "kl"):
        q.refused["teacher_loss"] = (
            f"{q('teacher_loss')}: the reverse KL (k1) is what a teacher teaches here, or over "
            f"{prefix}.top_k"
        )
    if len(paths) == 1:
        yield Derived(f"{prefix}.teacher_path", *paths.values())
    else:
        by_label = {str(settings.get(f"{name}.key", name)): path for name, path in paths.items()}
        yield Derived(f"{prefix}.teachers", by_label)
        yield Derived(f"{prefix}.teacher_key", q("teacher_key"))
    yield Derived(f"{prefix}.weight", q.number("teacher_weight", 1.0))
    yield Derived(f"{prefix}.reward_weight", 1.0 if q("teacher_and_reward", True) else 0.0)


def validation(q: Quantities) -> Iterator[Derived]:
    """Yield the sampling of validation; without sampling its temperature is 0."""
    prefix = "algorithm.val_sampling_params"
    sampled = q("val_sampled", True)
    if q.has("val_temperature") or not sampled:
        # Greedy decoding is a temperature of 0 here, and a switch there.
        yield Derived(f"{prefix}.temperature", q.number("val_temperature", 1.0) if sampled else 0.0)
    if q.has("val_top_p"):
        yield Derived(f"{prefix}.top_p", q.number("val_top_p"))
    if q.has("val_top_k"):
        yield Derived(f"{prefix}.top_k", top_k(q.number("val_top_k")))


def optimizer(q: Quantities, updates: int) -> Iterator[Derived]:
    """Yield the optimizer's settings.

    `updates` is the number of optimizer steps of the run, 0 if unknown.
    """
    lr = q.number("lr", 0)
    if lr:
        yield Derived("actor.optim.lr", lr)
    if isinstance(betas := q("betas"), list) and len(betas) == 2:
        yield Derived("actor.optim.adam_beta1", betas[0])
        yield Derived("actor.optim.adam_beta2", betas[1])
    elif betas is not None:
        q.refused["betas"] = f"{betas!r} are not two numbers"
    # An absolute rate there, a share of the peak here.
    if q.number("min_lr") and lr:
        yield Derived("actor.optim.min_lr_ratio", q.number("min_lr") / lr)
    steps, ratio = q.number("warmup_steps"), q.number("warmup_ratio")
    if 0 < steps < 1:  # transformers 5: a fraction of the run
        steps, ratio = 0, steps
    if steps > 0:
        yield Derived("actor.optim.lr_warmup_steps", int(steps))
    elif ratio and updates:
        yield Derived(
            "actor.optim.lr_warmup_steps",
            round(ratio * updates),
            f"{ratio:g} of {updates} optimizer steps",
        )
    elif ratio:
        role = "warmup_ratio" if "warmup_ratio" in q.file_values else "warmup_steps"
        q.refused[role] = (
            f"{ratio:g} of the run's optimizer steps: write that number into "
            "actor.optim.lr_warmup_steps"
        )


def adapters(q: Quantities) -> Iterator[Derived]:
    """Yield LoRA's settings, or without LoRA whether the vision tower is frozen."""
    rank = int(q.number("lora_rank", 16 if q("lora_on") else 0))
    if q("lora_on", rank > 0) and rank > 0:
        yield Derived("actor.model.is_lora", True)
        yield Derived("actor.model.lora.rank", rank)
        for role, key in (("lora_alpha", "alpha"), ("lora_dropout", "dropout")):
            if q.has(role):
                yield Derived(f"actor.model.lora.{key}", q.number(role))
        # Without targets those systems adapt all linear layers.
        targets, excluded = names_of(q("lora_targets", "all-linear")), names_of(q("lora_excludes"))
        # All layers but the vision tower's have a name of their own here.
        excludes_vision = any("visual" in name or "vision" in name for name in excluded)
        if targets == ["all-linear"] and excludes_vision:
            targets, excluded = ["language"], []
        yield Derived("actor.model.lora.target_modules", targets)
        if excluded:
            yield Derived("actor.model.lora.exclude_modules", excluded)
    elif q.has("freeze_tower"):  # LoRA freezes the tower itself
        yield Derived("actor.model.freeze_vision_tower", bool(q("freeze_tower")))


def machines(q: Quantities) -> Iterator[Derived]:
    """Yield the placement on GPUs, engines' parallelism, sharding and offloading."""
    if isinstance(placement := q("placement"), Mapping):
        our_placement = {}
        for names, slots in placement.items():
            components = [name.strip() for name in str(names).split(",")]
            our_components = [name for name in components if name in ("actor", "rollout")]
            if our_components:
                our_placement[",".join(our_components)] = slots
        yield Derived("cluster.component_placement", our_placement)
    elif q.has("devices"):
        yield Derived(
            "cluster.component_placement",
            {"actor,rollout": "all"},
            f"{q('devices')} there; here all GPUs",
        )
    if q.number("engine_devices") > 1:
        yield Derived("rollout.tensor_parallel_size", int(q("engine_devices")))
    # Shards of one node's size are HSDP: sharded within a node, replicated between nodes.
    fsdp_size, devices_per_node = int(q.number("fsdp_size", -1)), q("devices")
    if fsdp_size > 0:
        yield Derived(
            "actor.fsdp_config.strategy", "hsdp" if fsdp_size == devices_per_node else "fsdp2"
        )
    if q.has("offload"):
        yield Derived("actor.enable_offload", bool(q("offload")), "while engines generate")


def resuming(q: Quantities) -> Iterator[Derived]:
    """Yield whether the run resumes from its last checkpoint; refuse another system's."""
    mode, path = q("resume"), q("resume_path")
    # TRL's one key is a path or a switch.
    if path in (True, "auto", "latest"):
        mode, path = "auto", None
    if path:
        q.refused["resume_path"] = (
            "a checkpoint of another system, which can't be gone on with; export it as a model "
            "folder there"
        )
    elif q.has("resume"):
        is_on = mode is True or str(mode) in ("auto", "latest")
        yield Derived("runner.resume_dir", "auto" if is_on else None)
