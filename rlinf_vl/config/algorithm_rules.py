"""Rules for several keys of a config's `algorithm`; `rlinf_vl.config.validate` refuses configs that
break them."""

from collections.abc import Iterator
from typing import Any

from rlinf_vl.config.algorithm_files import built_ins
from rlinf_vl.config.presets import CLIPS
from rlinf_vl.config.schema import AlgorithmConfig, Config
from rlinf_vl.config.schema.algorithm import RejectionConfig
from rlinf_vl.config.schema.guidance import SELF
from rlinf_vl.user_code import is_code


def algorithm_problems(config: Config) -> Iterator[str]:
    """Yield problems of advantages, credit, groups and of guidance beside the reward."""
    algorithm, batch, running = (
        config.algorithm,
        config.data.rollout_batch_size,
        config.rollout.max_running_requests,
    )
    group, parts = (
        f"algorithm.group_size={algorithm.group_size}",
        f"algorithm.n_minibatches={algorithm.n_minibatches}",
    )
    yield from _distillation(config)
    # A run that learns from its teacher alone uses no advantages.
    distillation = algorithm.distillation
    alone = bool(distillation.labels_by_path) and not distillation.reward_weight
    # user code may not compare within groups
    estimator = built_ins("estimators").get(algorithm.adv_type)
    in_groups = not is_code(algorithm.adv_type) and (estimator is None or estimator.needs_groups)
    if algorithm.group_size == 1 and in_groups and not alone:
        yield (
            f"algorithm.group_size: 1 with algorithm.adv_type={algorithm.adv_type} makes every "
            "advantage zero (the baseline is the group's own rewards); use at least 2, or "
            "adv_type=reinforce_plus_plus"
        )
    if (
        algorithm.kl_beta > 0
        and algorithm.kl_placement == "loss"
        and algorithm.kl_penalty_type == "k1"
    ):
        yield (
            "algorithm.kl_penalty_type: k1 (kl) in the loss has an expected gradient of exactly "
            f"zero, so that algorithm.kl_beta={algorithm.kl_beta:g} would add noise and pull "
            "nowhere; use k2 or k3, or kl_placement=reward, where k1 belongs"
        )
    if algorithm.kl_placement == "reward" and not algorithm.kl_beta:
        yield "algorithm.kl_placement: reward with algorithm.kl_beta=0 subtracts nothing; set kl_beta > 0, or kl_placement=loss"
    loss = built_ins("losses").get(algorithm.loss_type)  # None for user code
    for name in CLIPS:
        if loss is not None and name not in loss.clips and getattr(algorithm, name) is not None:
            yield (
                f"algorithm.{name}: {getattr(algorithm, name):g} clips nothing with "
                f"algorithm.loss_type={algorithm.loss_type}; leave it null, or choose another loss"
            )
    yield from _overlong(algorithm)
    yield from _per_reward(algorithm)
    yield from _credit(config, estimator)
    if algorithm.n_minibatches >= 1 and batch % algorithm.n_minibatches:
        yield f"data.rollout_batch_size={batch} is not divisible by {parts}; change one of them"
    corruption = algorithm.image_corruption
    if 0 < corruption.share <= 1 and round(corruption.share * algorithm.group_size) == 0:
        yield f"algorithm.image_corruption.share: {corruption.share:g} of {group} answers is none; raise it, or set it 0"
    if running < algorithm.group_size:
        yield f"rollout.max_running_requests={running} is less than {group}: a group is decoded together; raise it"
    if algorithm.sampling_params.temperature == 0:
        yield (
            "algorithm.sampling_params.temperature: 0 must be > 0: the policy is trained at the "
            "temperature it was sampled with, and greedy groups have no spread"
        )


def _credit(config: Config, estimator: Any) -> Iterator[str]:
    """Yield settings of turns' credit that have no effect; `estimator` is None for user code."""
    algorithm = config.algorithm
    weight, one_turn = algorithm.state_advantage_weight, config.rollout.max_turns == 1
    if weight and algorithm.credit == "turn":
        yield (
            f"algorithm.state_advantage_weight: {weight:g} adds to a trajectory's advantage "
            "(GiGPO), but algorithm.credit=turn replaces that by each turn's own; set "
            "credit=trajectory, or state_advantage_weight=0"
        )
    if algorithm.credit == "token":
        yield from _token_credit(algorithm)
    if algorithm.turn_discount != 1 and not algorithm.turns_are_sequences:
        yield (
            f"algorithm.turn_discount: {algorithm.turn_discount:g} with "
            "algorithm.credit=trajectory discounts nothing; set credit=turn, "
            "state_advantage_weight > 0, or turn_discount=1"
        )
    if weight and not (estimator and estimator.compares_states):
        names = [name for name, kind in built_ins("estimators").items() if kind.compares_states]
        yield (
            f"algorithm.state_advantage_weight: {weight:g} compares turns with others of their "
            f"state, which algorithm.adv_type={algorithm.adv_type} does not; use one of "
            f"{', '.join(names)}"
        )
    for key, used in (
        ("credit: turn", algorithm.credit == "turn"),
        (f"state_advantage_weight: {weight:g}", weight > 0),
    ):
        if used and one_turn:
            yield f"algorithm.{key} with rollout.max_turns=1: an episode of one turn has no other credit; raise max_turns"


def _token_credit(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield settings that leave no place for the advantages of tokens."""
    weight = algorithm.state_advantage_weight
    for used, setting, remedy in (
        (weight > 0, f"state_advantage_weight={weight:g}", "set it 0"),
        (
            algorithm.reward_normalization == "per_reward",
            "reward_normalization=per_reward",
            "set it sum",
        ),
        (
            algorithm.kl_placement == "reward" and algorithm.adv_type == "reinforce_plus_plus",
            "kl_placement=reward and adv_type=reinforce_plus_plus, which give tokens returns of KL",
            "set kl_placement=loss",
        ),
    ):
        if used:
            yield (
                f"algorithm.credit: token adds the rewards of tokens to a trajectory's advantage, "
                f"and does not go with {setting}; {remedy}, or credit=trajectory"
            )


def _per_reward(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield settings that compare or change sums of rewards, which GDPO does not compare."""
    if algorithm.reward_normalization != "per_reward":
        return
    overlong, kl_beta = algorithm.overlong, algorithm.kl_beta
    for used, setting, remedy in (
        (
            algorithm.adv_type != "grpo",
            f"adv_type={algorithm.adv_type}: each reward is normalized as grpo does",
            "set adv_type=grpo",
        ),
        (
            algorithm.adv_type == "grpo" and not algorithm.normalize_advantages,
            "normalize_advantages=false: it divides each reward by its deviation",
            "set normalize_advantages=true",
        ),
        (
            algorithm.turns_are_sequences,
            "credit=turn or state_advantage_weight > 0: the functions pay whole trajectories",
            "set credit=trajectory and state_advantage_weight=0",
        ),
        (
            overlong.buffer > 0,
            f"overlong.buffer={overlong.buffer}: the penalty is taken off a sum of rewards",
            "set buffer=0, and add {function: overlong} to reward.functions",
        ),
        (
            algorithm.kl_placement == "reward",
            f"kl_placement=reward: kl_beta={kl_beta:g} is on the scale of a sum of rewards",
            "set kl_placement=loss",
        ),
    ):
        if used:
            yield (
                f"algorithm.reward_normalization: per_reward with algorithm.{setting}; {remedy}, "
                "or reward_normalization=sum"
            )


def _overlong(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield problems of the settings for overlong answers and for groups with equal rewards."""
    overlong, longest = algorithm.overlong, algorithm.sampling_params.max_new_tokens
    if overlong.buffer and longest and overlong.buffer >= longest:
        yield (
            f"algorithm.overlong.buffer: {overlong.buffer} leaves no response of "
            f"algorithm.sampling_params.max_new_tokens={longest} unpunished; lower it"
        )
    if overlong.filter and algorithm.kl_placement == "reward":
        yield (
            "algorithm.overlong.filter: true with algorithm.kl_placement=reward: what is left out "
            "of the loss has no KL; set one of them otherwise"
        )
    if algorithm.dynamic_sampling.enable and algorithm.group_size == 1:
        yield "algorithm.dynamic_sampling.enable: true with algorithm.group_size=1: a group of one ties with itself; set it false"


def _distillation(config: Config) -> Iterator[str]:
    """Yield settings of PAPO and distillation that have no effect."""
    papo, distillation = config.algorithm.papo, config.algorithm.distillation
    if papo.entropy_weight and not papo.weight:
        yield (
            f"algorithm.papo.entropy_weight: {papo.entropy_weight:g} guards PAPO's KL, but "
            "algorithm.papo.weight is 0; set that, or entropy_weight=0 (algorithm.entropy_bonus "
            "is the policy's own)"
        )
    if distillation.teachers and distillation.teacher_path is not None:
        yield (
            f"algorithm.distillation.teachers: {distillation.teachers} with teacher_path="
            f"{distillation.teacher_path}: a row has one teacher; set one of them"
        )
    if distillation.teachers and distillation.teacher_key is None:
        yield (
            f"algorithm.distillation.teachers: {distillation.teachers} without teacher_key; set "
            "algorithm.distillation.teacher_key to the column that has the rows' labels"
        )
    if distillation.teacher_key is not None and not distillation.teachers:
        yield (
            f"algorithm.distillation.teacher_key: {distillation.teacher_key} without teachers; set "
            "algorithm.distillation.teachers, or leave teacher_key out"
        )
    context_ranks = config.actor.context_parallel_size
    other_rows = "teachers" if distillation.teachers else "privileged_template"
    if (
        (distillation.teachers or distillation.privileged_template is not None)
        and distillation.top_k
        and context_ranks > 1
    ):
        yield (
            f"algorithm.distillation.top_k: {distillation.top_k} with {other_rows} and "
            f"actor.context_parallel_size={context_ranks}: each rank knows the candidates of its "
            "part of a row only; set top_k=0, context_parallel_size=1, or one teacher_path"
        )
    yield from _privileged(config)
    if not distillation.labels_by_path:
        # A key that was set shows that a teacher was meant.
        for key, default in vars(type(distillation)()).items():
            setting = getattr(distillation, key)
            if setting != default and key != "teacher_key":
                yield (
                    f"algorithm.distillation.{key}: {setting} without a teacher; set "
                    f"algorithm.distillation.teacher_path, or leave {key} out"
                )
    elif not distillation.weight:
        yield "algorithm.distillation.weight: 0 learns nothing from the teacher; raise it, or set teacher_path=null"


def _privileged(config: Config) -> Iterator[str]:
    """Yield problems of a teacher that sees more than the policy."""
    distillation = config.algorithm.distillation
    template = distillation.privileged_template
    if distillation.teacher_path == SELF and template is None:
        yield (
            "algorithm.distillation.teacher_path: self without privileged_template would keep the "
            "policy at its start; set algorithm.distillation.privileged_template, or use "
            "algorithm.kl_beta for that"
        )
    if template is None:
        return
    share = config.algorithm.image_corruption.share
    for used, setting, remedy in (
        (
            config.rollout.max_turns != 1,
            f"rollout.max_turns={config.rollout.max_turns or 'null'}: later turns have no "
            "privileged prompt",
            "set rollout.max_turns=1",
        ),
        (
            config.rollout.has_agents,
            "agents: they write their own prompts",
            "play an environment",
        ),
        (
            share > 0,
            f"algorithm.image_corruption.share={share:g}: the teacher sees one prompt",
            "set share=0",
        ),
        (
            not config.actor.model.variable_seq_lengths,
            "actor.model.variable_seq_lengths=false: the teacher's rows are longer than the "
            "policy's",
            "set variable_seq_lengths=true",
        ),
    ):
        if used:
            yield (
                f"algorithm.distillation.privileged_template: {template!r} with {setting}; "
                f"{remedy}, or privileged_template=null"
            )


def correction_problems(config: Config) -> Iterator[str]:
    """Yield problems of old logprobs, truncated importance sampling (TIS) and rejection."""
    algorithm, with_logprobs = config.algorithm, config.rollout.return_logprobs
    tis, old, rejection = (
        algorithm.importance_sampling_fix,
        algorithm.old_policy,
        algorithm.rejection,
    )
    if algorithm.recompute_logprobs == "false":
        cause, otherwise = "recompute_logprobs=false", "set recompute_logprobs=auto"
    else:
        cause, otherwise = f"old_policy={old}", "set old_policy=start"
    if (recompute := algorithm.recompute_logprobs) == "true" and old != "start":
        yield f"algorithm.recompute_logprobs: true with algorithm.old_policy={old} makes a pass that nothing needs; set it auto"
    elif recompute == "false" and old != "sampler":
        yield f"algorithm.recompute_logprobs: false with algorithm.old_policy={old}: it means sampler; leave one of them out"
    if tis and old == "sampler":
        yield (
            f"algorithm.importance_sampling_fix: true with algorithm.{cause}: the old logprobs are "
            f"the engine's own, so every weight would be 1; {otherwise}, or "
            "importance_sampling_fix=false"
        )
    yield from _normalization(algorithm, cause, otherwise)
    if old == "sampler" and (share := algorithm.image_corruption.share):
        yield (
            f"algorithm.image_corruption.share: {share:g} with algorithm.{cause}: the engine's "
            "logprobs are of the corrupted images, and the update is on the clean ones; "
            f"{otherwise}, or share=0"
        )
    yield from _bounds(rejection)
    # Each of these compares the engine's logprobs with the trainer's.
    for used, key, remedy in (
        (tis, "importance_sampling_fix=true", "set importance_sampling_fix=false"),
        (old != "start", cause, otherwise),
        (
            rejection.level is not None,
            f"rejection.level={rejection.level}",
            "set rejection.level=null",
        ),
        (rejection.veto is not None, f"rejection.veto={rejection.veto}", "set rejection.veto=null"),
    ):
        if used and not with_logprobs:
            yield (
                f"algorithm.{key.replace('=', ': ')} needs the engine's logprobs, but "
                f"rollout.return_logprobs is false; set it true, or {remedy}"
            )
        # Engines report logprobs before the truncation, so ratios would be off by its mass.
        for name, off in (("top_p", 1), ("top_k", 0)):
            setting = getattr(algorithm.sampling_params, name)
            if used and setting != off:
                yield (
                    f"algorithm.sampling_params.{name}: {setting} with algorithm.{key}: tokens are "
                    "then drawn from a truncated distribution, but the engine's logprobs are of "
                    "the whole one, like the trainer's, and can't correct for that; set "
                    f"{name}={off}, or {remedy}"
                )


def _normalization(algorithm: AlgorithmConfig, cause: str, otherwise: str) -> Iterator[str]:
    if (normalize := algorithm.importance_sampling_normalize) != "none":
        if not algorithm.importance_sampling_fix:
            yield (
                f"algorithm.importance_sampling_normalize: {normalize} normalizes weights that "
                "there are none of with algorithm.importance_sampling_fix=false; set that true, or "
                "importance_sampling_normalize=none"
            )
        elif algorithm.old_policy != "start":
            yield (
                f"algorithm.importance_sampling_normalize: {normalize} with algorithm.{cause}: the "
                f"weights change while the mini-batch is trained on; {otherwise}, or "
                "importance_sampling_normalize=none"
            )


def _bounds(rejection: RejectionConfig) -> Iterator[str]:
    """Yield bounds of rejection without effect, or that reject tokens on which both sides agree."""
    for name, opposite in (("low", "high"), ("high", "low")):
        bound = getattr(rejection, name)
        if bound is None:
            continue
        if rejection.level is None:
            yield f"algorithm.rejection.{name}: {bound:g} bounds nothing without algorithm.rejection.level; set that, or no {name}"
        # At the ratio 1 engine and trainer agree: bounds that leave it out would reject every
        # token.
        elif not (bound < 1 if name == "low" else bound > 1):
            yield (
                f"algorithm.rejection.{name}: {bound:g} rejects the ratio 1, of what both sides "
                f"sample alike; 1 must lie between it and algorithm.rejection.{opposite}"
            )
