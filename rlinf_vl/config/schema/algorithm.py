"""Keys of `algorithm`: advantages, loss, corrections, sampling."""

from dataclasses import dataclass, field

from rlinf_vl.config.schema.guidance import ImageCorruptionConfig
from rlinf_vl.config.schema.limits import AT_LEAST_1, NOT_NEGATIVE, POSITIVE_OR_INFINITE, Limit, key


@dataclass
class SamplingConfig:
    temperature: float = key(1.0, NOT_NEGATIVE)
    """Softmax temperature; training wants > 0. The trainer divides its logits by the same number."""
    top_p: float = key(1.0, Limit("lie in (0, 1]", lambda x: 0 < x <= 1))
    """Nucleus mass; below 1 tokens are drawn from a truncated distribution, which TIS can't correct for. Logprobs, and with
    them the mismatch guard, are of the whole one, in engine and trainer alike."""
    top_k: int = key(0, NOT_NEGATIVE)
    """Most likely tokens kept; 0 keeps all."""
    max_new_tokens: int | None = key(None, AT_LEAST_1)
    """Longest response; null is runner.seq_length - data.max_prompt_length."""


@dataclass
class AlgorithmConfig:
    adv_type: str = key("grpo", ("grpo", "rloo"))
    """grpo: reward minus the group's mean. rloo: reward minus the mean of the group's others. Either is divided by the group's
    standard deviation if normalize_advantages; RLOO as published is not."""
    loss_type: str = key("actor", ("actor", "gspo"))
    """actor: the clipped policy-gradient loss of PPO, dual-clipped when clip_ratio_c is set. gspo: the same with one ratio for a
    whole sequence, the geometric mean of its tokens', which stays close to 1: clip_ratio_low and _high are then about 3e-4."""
    loss_agg_func: str = key("token-mean", ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"))
    """token-mean, seq-mean-token-mean or seq-mean-token-sum, over the whole mini-batch."""
    group_size: int = key(8, AT_LEAST_1)
    """Responses sampled per problem (G)."""
    n_minibatches: int = key(1, AT_LEAST_1)
    """Optimizer steps per rollout batch."""
    normalize_advantages: bool = True
    """Divide by the group's sample standard deviation (n - 1)."""
    credit: str = key("trajectory", ("trajectory", "turn"))
    """What is compared within a group. trajectory: whole episodes by their reward; each turn has its trajectory's advantage. turn:
    equal turn numbers by what was paid from there on; each turn then is a sequence of its own, also in loss_agg_func, gspo and
    importance_sampling_level."""
    turn_discount: float = key(1.0, Limit("lie in [0, 1]", lambda x: 0 <= x <= 1))
    """What is paid n turns later counts this to the n-th power in a turn's return."""
    state_advantage_weight: float = key(0.0, NOT_NEGATIVE)
    """GiGPO's ω: adds so much of a turn's advantage among those of its group that answered to the same state, by its return; each
    turn then is a sequence of its own. For environments that name states; 0 is off."""
    clip_ratio_low: float = key(0.2, NOT_NEGATIVE)
    """The probability ratio is clipped below at 1 - this."""
    clip_ratio_high: float = key(0.2, NOT_NEGATIVE)
    """The probability ratio is clipped above at 1 + this."""
    clip_ratio_c: float | None = key(None, Limit("be > 1, or null for no dual clip", lambda x: x > 1))
    """Dual clip (> 1): bounds the loss of negative advantages at -c·A; null is off."""
    kl_beta: float = key(0.0, NOT_NEGATIVE)
    """Weight of KL(policy‖reference) in the loss; 0 loads no reference model."""
    kl_penalty_type: str = key("k3", ("k1", "k2", "k3", "abs"))
    """Estimator of that KL, by what its gradient in the loss descends on: k2 (mse) KL(policy‖reference), k3 (low_var_kl)
    KL(reference‖policy), abs their total variation. k1 (kl) has an expected gradient of zero there, and is refused."""
    entropy_bonus: float = 0.0
    """Weight of the policy's entropy, subtracted from the loss."""
    recompute_logprobs: str = key("auto", ("auto", "true", "false"))
    """Where the old logprobs of the ratio come from. true: a pass of the trainer before the first optimizer step.
    auto: the same numbers, that pass made only for the mini-batches after the first. false: the engine's logprobs."""
    importance_sampling_fix: bool = True
    """Truncated importance sampling: weigh tokens by min(exp(train - rollout logprob), importance_sampling_clip)."""
    importance_sampling_clip: float = key(2.0, POSITIVE_OR_INFINITE)
    """Upper bound of those weights."""
    importance_sampling_level: str = key("token", ("token", "sequence", "geometric"))
    """token, sequence (product over the response) or geometric (its per-token mean)."""
    image_corruption: ImageCorruptionConfig = field(default_factory=ImageCorruptionConfig)
    sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    val_sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling during validation; one response per problem."""

    @property
    def turns_are_sequences(self) -> bool:
        """Whether each turn is a sample of its own: turns of a trajectory then have different advantages."""
        return self.credit == "turn" or self.state_advantage_weight > 0
