"""The columns of a batch in the order of computation, each by the functions that the trainer calls.

`Calculation.value` reads a column where the file has it and computes it where it has not. The column
that is being compared is always computed, from the recorded ones before it: a difference therefore
shows in the column where it arises, and in no later one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlinf_vl.algorithms import (
    advantages,
    aggregate,
    divergence,
    importance_weights,
)
from rlinf_vl.algorithms.losses import LossInputs, TokenLoss, formula_of, weighted_loss
from rlinf_vl.config.schema import AlgorithmConfig
from rlinf_vl.tools.verify.compare.batch_file import Batch
from rlinf_vl.tools.verify.compare.foreign import (
    ADVANTAGE_SWITCHES,
    foreign_advantages,
    foreign_loss,
    group_deviations,
    group_means,
    shifted,
)

#: Numeric columns in the order of computation.
ORDER = (
    "logprobs",
    "entropy",
    "group_mean",
    "group_std",
    "advantages",
    "ratio",
    "weights",
    "clipped",
    "policy_loss",
    "kl",
    "token_loss",
    "loss",
)


class Unavailable(Exception):
    """A column can't be computed: the message names what the file lacks."""


@dataclass
class Calculation:
    """One computation of a column.

    Attributes:
        compared: the column that is computed although the file has it.
        switches: formulas of other systems, by name (see `variants`).
        computed: the columns that were computed and not read, `compared` included.
    """

    batch: Batch
    algorithm: AlgorithmConfig
    compared: str
    switches: Mapping[str, Any] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)
    _cache: dict[str, torch.Tensor] = field(default_factory=dict)

    def value(self, name: str) -> torch.Tensor:
        """Return a column, read or computed.

        Raises:
            Unavailable: it is not in the file, and neither is what it is computed from.
        """
        if name != self.compared and name in self.batch.columns:
            return self.batch.columns[name]
        if name not in self._cache:
            compute = getattr(self, f"_{name}", None)
            if compute is None:
                raise Unavailable(f"no {name}")
            self.computed.add(name)
            self._cache[name] = compute()
        return self._cache[name]

    def _logprobs(self) -> torch.Tensor:
        logprobs = self._all_logprobs("logprobs")
        ids = self.batch.token_ids
        if int(ids.max()) >= logprobs.shape[1]:
            raise Unavailable("logits of the whole vocabulary: a response id is beyond them")
        if places := self.switches.get("logprob_shift"):
            logprobs = shifted(logprobs, self.batch.segment_ids, places)
        return logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)

    def _entropy(self) -> torch.Tensor:
        logprobs = self._all_logprobs("entropy")
        return -(logprobs.exp() * logprobs).sum(1)

    def _all_logprobs(self, column: str) -> torch.Tensor:
        if self.batch.logits is None:
            raise Unavailable("no logits" if column == self.compared else f"no {column}")
        # The sampler's temperature: the trainer divides its logits by the same number.
        temperature = self.algorithm.sampling_params.temperature
        return (self.batch.logits / (temperature or 1.0)).log_softmax(1)

    def _group_mean(self) -> torch.Tensor:
        baseline = self.switches.get("baseline", "group")
        rewards = self._shaped_rewards()
        if baseline == "batch":
            return rewards.mean().expand_as(rewards)
        return group_means(rewards, self._groups(), baseline == "others")

    def _group_std(self) -> torch.Tensor:
        kind = self.switches.get("std", "sample")
        return group_deviations(self._shaped_rewards(), self._groups(), kind)

    def _groups(self) -> list[Any]:
        if reason := self.batch.skipped.get("advantages"):
            raise Unavailable(reason)
        return self.batch.groups

    def _shaped_rewards(self) -> torch.Tensor:
        """Return the rewards less the KL in them."""
        rewards, algorithm = self.value("reward"), self.algorithm
        if algorithm.kl_placement != "reward" or not algorithm.kl_beta:
            return rewards
        if algorithm.adv_type == "reinforce_plus_plus":
            raise Unavailable("a formula: this estimator gives every token a KL of its own")
        old = self.value("old_logprobs" if "old_logprobs" in self.batch.columns else "logprobs")
        assert algorithm.kl_penalty_type is not None
        kl = divergence(self.value("ref_logprobs"), old, self.batch.mask, algorithm.kl_penalty_type)
        sums = torch.zeros_like(rewards).index_add(0, self.batch.segment_ids, kl)
        return rewards - algorithm.kl_beta * sums

    def _advantages(self) -> torch.Tensor:
        groups, algorithm = self._groups(), self.algorithm
        rewards = self._shaped_rewards()
        lengths = self.batch.lengths
        if foreign := {k: v for k, v in self.switches.items() if k in ADVANTAGE_SWITCHES}:
            ours = {
                "std": "sample" if algorithm.normalize_advantages else "none",
                "eps": 1e-6,
                "eps_place": "outside",
                "baseline": "others" if algorithm.adv_type == "rloo" else "group",
                "ties": "zero",
                "single": "zero",
                "whiten": False,
            }
            values = foreign_advantages(rewards, groups, foreign, ours)
        else:
            values = advantages(
                algorithm.adv_type,
                rewards,
                groups,
                lengths,
                normalize=bool(algorithm.normalize_advantages),
            )
        return self.switches.get("advantage_sign", 1.0) * values[self.batch.segment_ids]

    def _ratio(self) -> torch.Tensor:
        logprobs, base = self._pair()
        if places := self.switches.get("old_shift"):
            base = shifted(base, self.batch.segment_ids, places)
        if self.switches.get("ratio_inverted"):
            logprobs, base = base, logprobs
        if factor := self.switches.get("log_ratio_factor"):
            logprobs, base = logprobs * factor, base * factor
        level = self.switches.get("ratio_level")
        if level == "sequence":
            return importance_weights(logprobs, base, level="sequence", clip=None, **self._segments)
        inputs = LossInputs(logprobs=logprobs, old_logprobs=base, advantages=base, **self._segments)
        if level == "token" or (level is None and self.algorithm.loss_type != "gspo"):
            return inputs.ratio()
        return inputs.sequence_ratio()

    def _pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logprobs of the policy, and those in the denominator of the ratio."""
        logprobs = self.value("logprobs")
        if self.switches.get("ratio_base") == "current":
            return logprobs, logprobs
        if self.algorithm.old_policy == "sampler":
            return logprobs, self.value("rollout_logprobs")
        # Without old logprobs it is the only update of its step: the ratio is 1.
        return logprobs, self.batch.columns.get("old_logprobs", logprobs)

    @property
    def _segments(self) -> dict[str, Any]:
        return {"mask": self.batch.mask, "segment_ids": self.batch.segment_ids}

    def _weights(self) -> torch.Tensor:
        algorithm = self.algorithm
        if not algorithm.importance_sampling_fix:
            return torch.ones_like(self.batch.mask, dtype=torch.float64)
        # TIS leads from the sampler to the ratio's denominator.
        old = (
            self._pair()[1]
            if self.switches.get("tis_from") != "current"
            else self.value("logprobs")
        )
        rollout = self.value("rollout_logprobs")
        if self.switches.get("tis_inverted"):
            old, rollout = rollout, old
        clip, level = algorithm.importance_sampling_clip, algorithm.importance_sampling_level
        is_masked = self.switches.get("tis_kind") == "masked"
        weights = importance_weights(
            old, rollout, clip=None if is_masked else clip, level=level, **self._segments
        )
        if is_masked:
            weights = weights.where(weights <= clip, 0.0)
        if self.switches.get("tis_normalized"):
            weights = weights / weights[self.batch.mask].mean()
        return weights

    def _formula(self) -> tuple[LossInputs, TokenLoss]:
        # The ratio is a column of its own, so the denominator is what leads to it.
        log_ratio = self.value("ratio").clamp(min=1e-30).log()
        try:
            logprobs = self.value("logprobs")
        except Unavailable:
            if self.algorithm.loss_type == "cispo":
                raise
            logprobs = torch.zeros_like(log_ratio)
        values = self.value("advantages")
        algorithm = self.algorithm
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=logprobs - log_ratio,
            advantages=values,
            weights=self.value("weights"),
            clip_low=algorithm.clip_ratio_low,
            clip_high=algorithm.clip_ratio_high,
            clip_c=algorithm.clip_ratio_c,
            **self._segments,
        )
        result = formula_of(algorithm.loss_type)(inputs)
        assert isinstance(result, TokenLoss)
        return inputs, result

    def _clipped(self) -> torch.Tensor:
        _, result = self._formula()
        if result.clipped is None:
            raise Unavailable(f"a clip: loss_type={self.algorithm.loss_type} has none")
        return result.clipped & self.batch.mask

    def _policy_loss(self) -> torch.Tensor:
        inputs, result = self._formula()
        if self.switches.get("unweighted"):
            return result.loss.where(self.batch.mask, 0.0)
        loss, _ = weighted_loss(inputs, formula_of(self.algorithm.loss_type))
        return self.switches.get("policy_sign", 1.0) * loss

    def _kl(self) -> torch.Tensor:
        log_p, log_q = self.value("ref_logprobs"), self.value("logprobs")
        if self.switches.get("kl_policy") == "old":
            log_q = self.value("old_logprobs")
        if self.switches.get("kl_reversed"):
            log_p, log_q = log_q, log_p
        estimator = self.algorithm.kl_penalty_type
        assert estimator is not None
        kl = divergence(log_p, log_q, self.batch.mask, estimator)
        return kl * self.value("ratio") if self.switches.get("kl_weighted") else kl

    def _token_loss(self) -> torch.Tensor:
        algorithm = self.algorithm
        loss = self.value("policy_loss")
        if algorithm.kl_beta and algorithm.kl_placement == "loss":
            loss = loss + self.switches.get("kl_sign", 1.0) * algorithm.kl_beta * self.value("kl")
        if algorithm.entropy_bonus:
            loss = loss - algorithm.entropy_bonus * self.value("entropy")
        return loss

    def _loss(self) -> torch.Tensor:
        values, mask = self.value("token_loss"), self.batch.mask
        segment_ids = self.batch.segment_ids
        kind = self.switches.get("mask")
        if kind == "all":
            mask = torch.ones_like(mask)
        elif kind:
            mask = shifted(mask, segment_ids, kind)
        return self.switches.get("loss_sign", 1.0) * self._aggregated(values, mask)

    def _aggregated(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        segment_ids = self.batch.segment_ids
        width = int(self.batch.positions.max()) + 1
        if kind := self.switches.get("aggregation"):
            size = self.switches.get("micro_batch_size")
            micro_batches = self.batch.micro_batches or [0] * self.batch.n_samples
            if size:
                micro_batches = [index // size for index in range(self.batch.n_samples)]
            return foreign_loss(
                values, mask, segment_ids, kind, micro_batches=micro_batches, width=width
            )
        mode = self.algorithm.loss_agg_func
        assert mode is not None
        loss = aggregate(values, mask, segment_ids, mode.removesuffix("-norm"))
        if mode.endswith("-norm"):
            longest = self.switches.get("constant_length") == "padded"
            tokens = width if longest else self.algorithm.sampling_params.max_new_tokens
            if tokens is None:
                raise Unavailable(
                    "no settings.max_new_tokens, the constant that the sum is divided by"
                )
            loss = loss / tokens
        return loss
