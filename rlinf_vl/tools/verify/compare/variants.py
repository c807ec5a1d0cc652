"""The table of known differences between systems: what is tried when a column differs."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlinf_vl.config.algorithm_files import built_ins
from rlinf_vl.tools.verify.compare.batch_file import Batch
from rlinf_vl.tools.verify.compare.columns import Calculation, Unavailable
from rlinf_vl.tools.verify.compare.foreign import tied_samples


@dataclass(frozen=True)
class Variant:
    """One known difference.

    Attributes:
        name: a short name, for machines.
        stage: the column in whose computation it lies.
        text: what the other system does, as the end of "they …".
        changes: keys of `algorithm` (or `temperature`, `max_new_tokens`) and their values.
        switches: formulas that no setting of ours gives, as `Calculation.switches`.
        setting: the settings of ours that do the same; "" if there is none.
    """

    name: str
    stage: str
    text: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, Any] = field(default_factory=dict)
    setting: str = ""

    def setting_text(self) -> str:
        """Return the settings of ours that do the same, or "" if none do."""
        if self.setting or self.switches:
            return self.setting
        words = []
        for key, value in self.changes.items():
            section = "sampling_params." if key in ("temperature", "max_new_tokens") else ""
            words.append(f"algorithm.{section}{key}={_shown(value)}")
        return " ".join(words)

    def fits(self, second: "Variant") -> bool:
        """Return whether both can hold at once: they set different things."""
        return not (
            self.changes.keys() & second.changes.keys()
            or self.switches.keys() & second.switches.keys()
        )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def all_variants(batch: Batch, ours: Calculation) -> list[Variant]:
    """Return the variants of all columns, with bounds and weights that this batch suggests."""
    makers = (_logprobs, _advantages, _ratio, _weights, _policy_loss, _kl, _token_loss, _loss)
    return [variant for maker in makers for variant in maker(batch, ours)]


def _logprobs(batch: Batch, _: Calculation) -> Iterator[Variant]:
    temperature = batch.algorithm.sampling_params.temperature
    stage = "logprobs"
    if temperature != 1:
        text = "take logprobs of the undivided logits, without the temperature"
        yield Variant("temperature-forgotten", stage, text, {"temperature": 1.0})
        text = f"divide the logits by the temperature twice, {temperature:g}²"
        yield Variant("temperature-twice", stage, text, {"temperature": temperature**2})
        text = f"multiply the logits by the temperature {temperature:g} instead of dividing them"
        yield Variant("temperature-inverted", stage, text, {"temperature": 1 / temperature})
    for value in (0.6, 0.7, 0.8, 0.9, 1.0, 1.2):
        if value != temperature:
            text = f"divide the logits by a temperature of {value:g}"
            yield Variant("temperature", stage, text, {"temperature": value})
    for places, side in ((1, "before"), (-1, "behind")):
        text = f"read the logits one token {side} the token's own"
        yield Variant("logprobs-shifted", stage, text, switches={"logprob_shift": places})


def _advantages(batch: Batch, _: Calculation) -> Iterator[Variant]:
    algorithm = batch.algorithm
    stage = "advantages"
    yield from _deviations(bool(algorithm.normalize_advantages))
    text = "take the mean of the group's other rewards as baseline"
    yield Variant("leave-one-out", stage, text, {"adv_type": "rloo"})
    text = "take the mean of the whole batch as baseline"
    yield Variant("baseline-batch", stage, text, switches={"baseline": "batch"})
    yield Variant("no-baseline", stage, "subtract no baseline", switches={"baseline": "none"})
    for name in built_ins("estimators"):
        if name not in (algorithm.adv_type, "rloo", "dr_grpo"):
            text = f"compute the advantages of {name}"
            yield Variant(f"adv-{name}", stage, text, {"adv_type": name})
    text = "train groups whose rewards tie on rounding noise (float32 mean, no guard)"
    yield Variant("tie-noise", stage, text, switches={"ties": "noise"})
    text = "let a group of one keep its reward as advantage"
    yield Variant("single", stage, text, switches={"single": "reward"})
    text = "whiten the advantages once more over the batch"
    yield Variant("whitened", stage, text, switches={"whiten": True})
    text = "negate the advantages"
    yield Variant("advantage-sign", stage, text, switches={"advantage_sign": -1.0})
    if "ref_logprobs" in batch.columns and algorithm.kl_beta:
        if algorithm.kl_placement == "loss":
            for estimator in ("k1", "k3", "k2"):
                changes = {"kl_placement": "reward", "kl_penalty_type": estimator}
                text = f"subtract the KL ({estimator}) from the rewards, not in the loss"
                yield Variant("kl-in-reward", stage, text, changes)
        else:
            text = "do not subtract the KL from the rewards"
            yield Variant("kl-in-loss", stage, text, {"kl_placement": "loss"})


def _deviations(normalize: bool) -> Iterator[Variant]:
    """Yield the other standard deviations by which advantages are divided, or not."""
    stage = "advantages"
    if not normalize:
        text = "divide by the group's standard deviation"
        yield Variant("std", stage, text, {"normalize_advantages": True})
        return
    text = "take the standard deviation with n instead of n - 1"
    yield Variant("std-population", stage, text, switches={"std": "population"})
    text = "do not divide by the standard deviation"
    yield Variant("no-std", stage, text, {"normalize_advantages": False})
    text = "divide by the standard deviation of the whole batch"
    yield Variant("std-batch", stage, text, switches={"std": "batch"})
    for eps in (1e-4, 1e-8, 1e-5, 1e-3, 0.0):
        text = f"add {eps:g} instead of 1e-06 to the standard deviation"
        yield Variant("eps", stage, text, switches={"eps": eps})
    for eps in (1e-6, 1e-8, 1e-5, 1e-4, 1e-3):
        switches = {"eps": eps, "eps_place": "inside"}
        text = f"add {eps:g} to the variance, inside the root"
        yield Variant("eps-inside", stage, text, switches=switches)


def _ratio(batch: Batch, _: Calculation) -> Iterator[Variant]:
    algorithm, columns = batch.algorithm, batch.columns
    stage = "ratio"
    if "rollout_logprobs" in columns and algorithm.old_policy != "sampler":
        text = "take the ratio against the sampler's (rollout) logprobs"
        yield Variant("ratio-rollout", stage, text, {"old_policy": "sampler"})
    if algorithm.old_policy == "sampler":
        text = "take the ratio against the trainer's old logprobs"
        yield Variant("ratio-old", stage, text, {"old_policy": "start"})
    text = "take the ratio against the current logprobs: it is 1"
    yield Variant("ratio-one", stage, text, switches={"ratio_base": "current"})
    if algorithm.loss_type != "gspo":
        yield Variant(
            "ratio-sequence-mean",
            stage,
            "take one ratio for a sequence, the geometric mean",
            switches={"ratio_level": "geometric"},
            setting="algorithm.loss_type=gspo",
        )
    else:
        yield Variant(
            "ratio-token",
            stage,
            "take a ratio for each token",
            switches={"ratio_level": "token"},
            setting="algorithm.loss_type=actor",
        )
    yield Variant(
        "ratio-sequence-product",
        stage,
        "take one ratio for a sequence, the product",
        switches={"ratio_level": "sequence"},
    )
    yield Variant("ratio-inverted", stage, "invert the ratio", switches={"ratio_inverted": True})
    for places, side in ((1, "before"), (-1, "behind")):
        text = f"compare each token's logprob with the old one of the token {side} it"
        yield Variant("old-shifted", stage, text, switches={"old_shift": places})
    temperature = algorithm.sampling_params.temperature
    for factor in {temperature, 1 / temperature if temperature else 1.0} - {1.0}:
        text = f"multiply the logprobs by {factor:g}, as by a temperature, before the ratio"
        yield Variant("logprobs-scaled", stage, text, switches={"log_ratio_factor": factor})


def _weights(batch: Batch, _: Calculation) -> Iterator[Variant]:
    algorithm, columns = batch.algorithm, batch.columns
    if "rollout_logprobs" not in columns:
        return
    stage = "weights"
    if not algorithm.importance_sampling_fix:
        text = "weigh tokens by truncated importance sampling"
        yield Variant("tis-on", stage, text, {"importance_sampling_fix": True})
        return
    yield Variant(
        "tis-off",
        stage,
        "apply no importance weights",
        {"importance_sampling_fix": False},
    )
    for level in ("token", "sequence", "geometric"):
        if level != algorithm.importance_sampling_level:
            text = f"take importance weights of level {level}"
            yield Variant(f"tis-{level}", stage, text, {"importance_sampling_level": level})
    clips = {1.0, 1.5, 2.0, 3.0, 5.0, 10.0, math.inf}
    if "weights" in columns:
        clips.add(_rounded(float(columns["weights"][batch.mask].max())))
    for clip in sorted(clips - {algorithm.importance_sampling_clip}):
        text = f"truncate the weights at {clip:g}" if clip < math.inf else "do not truncate them"
        yield Variant("tis-clip", stage, text, {"importance_sampling_clip": clip})
    yield Variant(
        "tis-masked",
        stage,
        "set weights above the bound to 0 instead of truncating them",
        switches={"tis_kind": "masked"},
        setting=f"algorithm.importance_sampling_clip=.inf algorithm.rejection.level="
        f"{algorithm.importance_sampling_level} algorithm.rejection.low=0 "
        f"algorithm.rejection.high={algorithm.importance_sampling_clip:g}",
    )
    yield Variant(
        "tis-normalized",
        stage,
        "divide the weights by their mean over the batch",
        switches={"tis_normalized": True},
    )
    text = "weigh by the current logprobs over the sampler's"
    yield Variant("tis-current", stage, text, switches={"tis_from": "current"})
    yield Variant("tis-inverted", stage, "invert the weights", switches={"tis_inverted": True})


def _policy_loss(batch: Batch, ours: Calculation) -> Iterator[Variant]:
    algorithm = batch.algorithm
    stage = "policy_loss"
    reads = built_ins("losses")[algorithm.loss_type].clips
    estimates = _clip_estimates(batch, ours)
    low, high, cap = algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.clip_ratio_c
    if low is not None and high is not None:
        if low != high:
            changes = {"clip_ratio_low": high, "clip_ratio_high": low}
            yield Variant("clip-swapped", stage, "swap the bounds of the clip", changes)
            for bound in (low, high):
                changes = {"clip_ratio_low": bound, "clip_ratio_high": bound}
                text = f"clip at {bound:g} on both sides"
                yield Variant("clip-symmetric", stage, text, changes)
        for key in ("clip_ratio_low", "clip_ratio_high"):
            side = key.removeprefix("clip_ratio_")
            values = {0.1, 0.2, 0.25, 0.28, 0.3, 0.4, 3e-4, 4e-4, *estimates.get(key, ())}
            for value in sorted(values - {getattr(algorithm, key)}):
                text = f"clip the ratio with {side} = {value:g}"
                yield Variant(f"clip-{side}", stage, text, {key: value})
        changes = {"clip_ratio_low": 1e9, "clip_ratio_high": 1e9}
        yield Variant("no-clip", stage, "do not clip the ratio", changes)
    if "clip_ratio_c" in reads:
        if cap is not None:
            text = "have no dual clip"
            yield Variant("no-dual-clip", stage, text, {"clip_ratio_c": None})
        caps = {2.0, 3.0, 4.0, 5.0, 10.0, *estimates.get("clip_ratio_c", ())}
        for value in sorted(caps - {cap}):
            text = f"cap the loss of negative advantages (dual clip) at c = {value:g}"
            yield Variant("dual-clip", stage, text, {"clip_ratio_c": value})
    for name in built_ins("losses"):
        if name not in (algorithm.loss_type, "cross_entropy", "gspo"):
            changes = {"loss_type": name}
            yield Variant(f"loss-{name}", stage, f"compute the loss of {name}", changes)
    if algorithm.importance_sampling_fix:
        yield Variant(
            "weights-unused",
            stage,
            "do not multiply the loss by the weights",
            switches={"unweighted": True},
            setting="algorithm.importance_sampling_fix=false",
        )
    yield Variant("policy-sign", stage, "negate the loss", switches={"policy_sign": -1.0})


def _clip_estimates(batch: Batch, ours: Calculation) -> dict[str, list[float]]:
    """Return bounds that the recorded losses of the tokens show, if there are any.

    A clipped token's loss is -A·w·bound, so the extremes of loss / (-A·w) are the bounds.
    """
    column = "policy_loss" if "policy_loss" in batch.columns else "token_loss"
    if column not in batch.columns or (column == "token_loss" and batch.algorithm.kl_beta):
        return {}
    try:
        values = ours.value("advantages")
        scale = -values * ours.value("weights")
    except Unavailable:
        return {}
    trained = batch.mask & (scale.abs() > 1e-6)
    factors = batch.columns[column] / scale.where(trained, 1.0)
    gains, losses = factors[trained & (values > 0)], factors[trained & (values < 0)]
    estimates: dict[str, list[float]] = {}
    if len(gains):
        estimates["clip_ratio_high"] = [_rounded(float(gains.max()) - 1)]
    if len(losses):
        estimates["clip_ratio_low"] = [_rounded(1 - float(losses.min()))]
        estimates["clip_ratio_c"] = [_rounded(float(losses.max()))]
    valid = {"clip_ratio_high": 0.0, "clip_ratio_low": 0.0, "clip_ratio_c": 1.0}
    return {k: [v for v in values if v > valid[k]] for k, values in estimates.items()}


def _kl(batch: Batch, _: Calculation) -> Iterator[Variant]:
    algorithm, columns = batch.algorithm, batch.columns
    if "ref_logprobs" not in columns:
        return
    stage = "kl"
    for estimator in ("k1", "k2", "k3", "abs"):
        if estimator != algorithm.kl_penalty_type:
            text = f"estimate the KL by {estimator}"
            yield Variant(f"kl-{estimator}", stage, text, {"kl_penalty_type": estimator})
        if estimator in ("k1", "k3"):
            yield Variant(
                "kl-reversed",
                stage,
                f"estimate the KL by {estimator} in the other direction, KL(reference‖policy)",
                {"kl_penalty_type": estimator},
                {"kl_reversed": True},
            )
    text = "weigh the KL by the ratio"
    yield Variant("kl-weighted", stage, text, switches={"kl_weighted": True})
    if "old_logprobs" in columns:
        text = "take the KL of the old policy, which has no gradient"
        yield Variant("kl-old", stage, text, switches={"kl_policy": "old"})


def _token_loss(batch: Batch, ours: Calculation) -> Iterator[Variant]:
    algorithm, columns = batch.algorithm, batch.columns
    stage = "token_loss"
    if "ref_logprobs" in columns or "kl" in columns:
        betas = {0.001, 0.01, 0.02, 0.04, 0.05, 0.1}
        betas |= _weight_estimate(batch, ours, "kl", 1.0)
        if algorithm.kl_beta:
            yield Variant("no-kl", stage, "leave the KL out of the loss", {"kl_beta": 0.0})
            yield Variant("kl-sign", stage, "subtract the KL", switches={"kl_sign": -1.0})
        for beta in sorted(betas - {algorithm.kl_beta}):
            yield Variant("kl-beta", stage, f"weigh the KL by {beta:g}", {"kl_beta": beta})
    if "entropy" in columns or batch.logits is not None:
        bonus = algorithm.entropy_bonus
        bonuses = {0.001, 0.01, -0.001, -0.01}
        bonuses |= _weight_estimate(batch, ours, "entropy", -1.0)
        if bonus:
            yield Variant("no-entropy", stage, "have no entropy bonus", {"entropy_bonus": 0.0})
            yield Variant("entropy-sign", stage, "add the entropy", {"entropy_bonus": -bonus})
        for value in sorted(bonuses - {bonus, -bonus}):
            text = f"have an entropy bonus of {value:g}"
            yield Variant("entropy-bonus", stage, text, {"entropy_bonus": value})


def _weight_estimate(batch: Batch, ours: Calculation, term: str, sign: float) -> set[float]:
    """Return the weight of a term of the loss that the recorded losses of the tokens show."""
    if "token_loss" not in batch.columns:
        return set()
    try:
        values = ours.value(term)[batch.mask]
        # Without the term, whatever its weight of ours is.
        bare = Calculation(batch, batch.algorithm, "", {"kl_sign": 0.0} if term == "kl" else {})
        bare_loss = bare.value("policy_loss")
        if term == "entropy" and batch.algorithm.kl_beta and batch.algorithm.kl_placement == "loss":
            bare_loss = bare_loss + batch.algorithm.kl_beta * bare.value("kl")
        if term == "kl" and batch.algorithm.entropy_bonus:
            bare_loss = bare_loss - batch.algorithm.entropy_bonus * bare.value("entropy")
    except Unavailable:
        return set()
    excess = (batch.columns["token_loss"] - bare_loss)[batch.mask]
    square = float(values.square().sum())
    if square < 1e-12:
        return set()
    weight = sign * float((excess * values).sum()) / square
    return {_rounded(weight)} if abs(weight) > 1e-7 else set()


def _loss(batch: Batch, _: Calculation) -> Iterator[Variant]:
    algorithm = batch.algorithm
    stage = "loss"
    texts = {
        "token-mean": "take the mean over all tokens",
        "seq-mean-token-mean": "take the mean over sequences of their token means",
        "seq-mean-token-sum": "take the mean over sequences of their token sums",
        "seq-mean-token-sum-norm": "divide the sums of sequences by a constant length",
    }
    for mode, text in texts.items():
        if mode == algorithm.loss_agg_func:
            continue
        if not mode.endswith("-norm") or algorithm.sampling_params.max_new_tokens:
            yield Variant(f"agg-{mode}", stage, text, {"loss_agg_func": mode})
    width = int(batch.positions.max()) + 1
    yield Variant(
        "agg-padded-length",
        stage,
        f"divide the sums of sequences by the longest response of the batch, {width} tokens",
        {"loss_agg_func": "seq-mean-token-sum-norm"},
        {"constant_length": "padded"},
    )
    yield Variant(
        "agg-token-sum",
        stage,
        "take the sum over all tokens",
        switches={"aggregation": "token-sum"},
    )
    yield Variant(
        "agg-padded-mean",
        stage,
        "divide by all tokens, padding included",
        switches={"aggregation": "padded-mean"},
    )
    for mode in ("token-mean", "seq-mean-token-mean"):
        mean = f"average the {mode} of micro-batches"
        switches: dict[str, Any] = {"aggregation": f"micro:{mode}"}
        if batch.micro_batches is not None and len(set(batch.micro_batches)) > 1:
            yield Variant("micro-batch-means", stage, mean, switches=switches)
            continue
        for size in (1, 2, 4, 8, 16, 32):
            # The mean of micro-batches of one sequence is the mean over sequences.
            if size < batch.n_samples and (size > 1):
                text = f"{mean} of {size} consecutive samples"
                yield Variant(
                    "micro-batch-means",
                    stage,
                    text,
                    switches=switches | {"micro_batch_size": size},
                )
    yield Variant("loss-sign", stage, "negate the loss", switches={"loss_sign": -1.0})
    for places, side in ((1, "late"), (-1, "early")):
        text = f"apply the response mask one token too {side}"
        yield Variant("mask-shifted", stage, text, switches={"mask": places})
    if not bool(batch.mask.all()):
        text = "train tokens that response_mask leaves out"
        yield Variant("mask-ignored", stage, text, switches={"mask": "all"})


def _rounded(value: float) -> float:
    """Return an estimate at four digits: settings are round numbers, estimates are not."""
    return float(f"{value:.4g}") if math.isfinite(value) else value


def is_tie_noise(batch: Batch, theirs: torch.Tensor, differs: torch.Tensor) -> bool:
    """Return whether advantages differ in groups whose rewards tie, and only there."""
    if "reward" not in batch.columns or not bool(differs.any()):
        return False
    tied = tied_samples(batch.columns["reward"], batch.groups)[batch.segment_ids]
    return not bool((differs & ~tied).any()) and float(theirs[differs].abs().max()) < 0.5
