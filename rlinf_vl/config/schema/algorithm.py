"""Keys of `algorithm`: advantages, loss, corrections, sampling."""

from dataclasses import dataclass, field

from rlinf_vl.config.algorithm_files import built_ins
from rlinf_vl.config.schema.guidance import DistillationConfig, ImageCorruptionConfig, PapoConfig
from rlinf_vl.config.schema.limits import (
    AT_LEAST_1,
    NOT_NEGATIVE,
    POSITIVE_OR_INFINITE,
    Limit,
    OrCode,
    key,
)

ADVANTAGES = OrCode(
    built_ins("estimators"),
    "advantage",
    "advantage(inputs) or advantage(rewards, group_ids, tokens)",
)
#: The loss of six arguments is that of former releases, accepted until 0.2.
LOSSES = OrCode(
    built_ins("losses"),
    "loss",
    "loss(inputs) or loss(logprobs, old_logprobs, advantages, segment_ids, clip_low, clip_high)",
)


@dataclass
class SamplingConfig:
    temperature: float = key(1.0, NOT_NEGATIVE)
    """Softmax temperature; training wants > 0. The trainer divides its logits by the same
    number."""
    top_p: float = key(1.0, Limit("lie in (0, 1]", lambda x: 0 < x <= 1))
    """Nucleus mass; below 1 tokens are drawn from a truncated distribution, which TIS can't correct
    for. Logprobs, and with them the mismatch guard, are of the whole one, in engine and trainer
    alike."""
    top_k: int = key(0, NOT_NEGATIVE)
    """Most likely tokens kept; 0 keeps all."""
    max_new_tokens: int | None = key(None, AT_LEAST_1)
    """Longest response; null is runner.seq_length - data.max_prompt_length."""


@dataclass
class DynamicSamplingConfig:
    enable: bool = False
    """Replace groups whose rewards all tie, which teach nothing, by groups of further rows
    (DAPO)."""
    max_rounds: int = key(4, AT_LEAST_1)
    """Rollouts of one step, the first included. Each asks for as many rows as should fill what is
    missing; after the last one, tied groups fill it."""


@dataclass
class OverlongConfig:
    buffer: int = key(0, NOT_NEGATIVE)
    """DAPO's soft punishment: the last so many tokens before max_new_tokens cost ever more of the
    reward; 0 is off."""
    penalty: float = key(1.0, NOT_NEGATIVE)
    """Reward subtracted for a response of max_new_tokens."""
    filter: bool = False
    """Leave responses that max_new_tokens has cut out of the loss; their rewards stay in their
    groups' baselines."""


@dataclass
class RejectionConfig:
    level: str | None = key(None, ("token", "sequence", "geometric"))
    """Unit that is left out of the loss unless its ratio ρ = exp(train - rollout logprob) lies
    between low and high. token: each token. sequence: the whole sequence, by the product of its
    tokens' ratios. geometric: the whole sequence, by their geometric mean. Counts below the loss
    stay those of all tokens and sequences. null: none."""
    low: float | None = key(None, NOT_NEGATIVE)
    """Least ratio; 0 is no bound. null: as level says (token 0.5, sequence 0.5, geometric
    0.999)."""
    high: float | None = key(None, POSITIVE_OR_INFINITE)
    """Largest ratio; .inf is no bound. null: as level says (token 5, sequence 2, geometric
    1.001)."""
    veto: float | None = key(None, Limit("lie in (0, 1), or be null for none", lambda x: 0 < x < 1))
    """A sequence with a token whose ratio is below this is left out, with or without a level;
    usually 1e-4. null: none."""


@dataclass
class AlgorithmConfig:
    adv_type: str = key("grpo", ADVANTAGES)
    """The advantage of a response, from the rewards of its group or of all tokens.
    docs/algorithms.md has formulas, and the keys that each value sets where they are null."""
    loss_type: str = key("actor", LOSSES)
    """The loss of a token, from its advantage and its probability ratio. docs/algorithms.md has
    formulas, and the keys that each value sets where they are null."""
    loss_agg_func: str | None = key(
        None, ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    )
    """token-mean, seq-mean-token-mean, seq-mean-token-sum or seq-mean-token-sum-norm (that divided
    by max_new_tokens), over the whole mini-batch. null: as loss_type or adv_type says, else
    token-mean."""
    group_size: int = key(8, AT_LEAST_1)
    """Responses sampled per problem (G)."""
    n_minibatches: int = key(1, AT_LEAST_1)
    """Optimizer steps per rollout batch."""
    normalize_advantages: bool | None = None
    """Divide by the sample standard deviation (n - 1): of the group, or of all tokens
    (reinforce_plus_plus). null: as adv_type says."""
    reward_normalization: str = key("sum", ("sum", "per_reward"))
    """Rewards that are normalized. sum: the weighted sum of reward.functions. per_reward: each
    function's values within their group, before they are weighted and added up; the sum once more
    over all trajectories of the step (GDPO). For adv_type grpo; docs/algorithms.md has the
    formula."""
    credit: str = key("trajectory", ("trajectory", "turn", "token"))
    """Units compared within a group. trajectory: whole episodes by their reward; each turn has its
    trajectory's advantage. turn: turns of equal number by the rewards from there on; each turn
    then is a sequence of its own, also in loss_agg_func, gspo and importance_sampling_level. token:
    a trajectory's advantage, and for each token that of the rewards by span of text from there on,
    which reward functions return (`spans`)."""
    turn_discount: float = key(1.0, Limit("lie in [0, 1]", lambda x: 0 <= x <= 1))
    """A reward n turns later counts with this factor to the n-th power in a turn's return."""
    state_advantage_weight: float = key(0.0, NOT_NEGATIVE)
    """GiGPO's ω: adds so much of a turn's advantage among those of its group that answered to the
    same state, by its return; each turn then is a sequence of its own. For environments that name
    states; 0 is off."""
    clip_ratio_low: float | None = key(None, NOT_NEGATIVE)
    """The probability ratio is clipped below at 1 - this. null: as loss_type says."""
    clip_ratio_high: float | None = key(None, NOT_NEGATIVE)
    """The probability ratio is clipped above at 1 + this; DAPO has 0.28. null: as loss_type
    says."""
    clip_ratio_c: float | None = key(
        None, Limit("be > 1, or null for no dual clip", lambda x: x > 1)
    )
    """Dual clip (> 1): bounds the loss of negative advantages at -c·A; null is off."""
    kl_beta: float = key(0.0, NOT_NEGATIVE)
    """Weight of KL(policy‖reference); 0 loads no reference model."""
    kl_placement: str = key("loss", ("loss", "reward"))
    """Place of that KL. loss: added to it. reward: subtracted from it, token by token, before
    advantages are computed, by the logprobs of the weights before the step."""
    kl_penalty_type: str | None = key(None, ("k1", "k2", "k3", "abs"))
    """Estimator of that KL; null is k3 in the loss, k1 in the reward. In the loss, by what its
    gradient descends on: k2 (mse) KL(policy‖reference), k3 (low_var_kl) KL(reference‖policy), abs
    their total variation; k1 (kl) has an expected gradient of zero there, and is refused."""
    entropy_bonus: float = 0.0
    """Weight of the policy's entropy, subtracted from the loss."""
    recompute_logprobs: str = key("auto", ("auto", "true", "false"))
    """Where the old logprobs of the ratio come from. true: a pass of the trainer before the first
    optimizer step. auto: the same numbers, that pass made only for the mini-batches after the
    first. false: old_policy=sampler, a pass for algorithm.rejection only."""
    old_policy: str | None = key(None, ("start", "sampler", "interpolated"))
    """Whose probability is below the line of the ratio that is clipped. start: the weights before
    the step (decoupled PPO; TIS then leads from those that sampled each token to these). sampler:
    those that sampled each token, by the engine's logprob (plain PPO, without TIS). interpolated:
    between the sampler's and the current ones, the closer to these the staler the token (A-3PO).
    Both make a pass of their own for algorithm.rejection only. null: start, or sampler where
    recompute_logprobs is false. docs/corrections.md has formulas and presets."""
    importance_sampling_fix: bool = True
    """Truncated importance sampling: weigh tokens by min(exp(old - rollout logprob),
    importance_sampling_clip)."""
    importance_sampling_clip: float = key(2.0, POSITIVE_OR_INFINITE)
    """Upper bound of those weights."""
    importance_sampling_level: str = key("token", ("token", "sequence", "geometric"))
    """token, sequence (product over the response) or geometric (its per-token mean)."""
    importance_sampling_normalize: str = key("none", ("none", "batch", "group"))
    """Divide those weights by their mean: over the mini-batch, or over each group; over tokens, or
    over sequences where a sequence has one weight. It needs a pass for all old logprobs."""
    rejection: RejectionConfig = field(default_factory=RejectionConfig)
    image_corruption: ImageCorruptionConfig = field(default_factory=ImageCorruptionConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    papo: PapoConfig = field(default_factory=PapoConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    val_sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    """Sampling during validation; one response per problem."""

    @property
    def turns_are_sequences(self) -> bool:
        """Whether each turn is a sample of its own: turns of a trajectory then have different
        advantages."""
        return self.credit == "turn" or self.state_advantage_weight > 0
