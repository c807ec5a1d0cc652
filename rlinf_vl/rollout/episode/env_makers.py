"""The scorer and the environments of a run, as its config has them. Neither torch nor Ray."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlinf_vl.config.schema import Config
from rlinf_vl.envs import EnvMaker
from rlinf_vl.envs.call_forms import ReplyForm
from rlinf_vl.envs.registry import SINGLE, grades_answers, load_env_class
from rlinf_vl.errors import never_reported
from rlinf_vl.rewards.processes import MEMORY_GB, Limits, ProcessPool, UserFunctions
from rlinf_vl.rewards.scoring import Scorer, make_scorer

#: Most processes with reward functions of the user's, per rollout worker; each is started when it is
#: needed.
REWARD_PROCESSES = 4


def scorer_of(
    config: Config,
    entries: Sequence[Mapping[str, Any]] | None = None,
    first_report: Callable[[str], bool] = never_reported,
    pool_class: type[UserFunctions] = ProcessPool,
) -> Scorer:
    """Return the scorer of a run's reward functions, or of some of their entries.

    `first_report`, `pool_class`: as in `make_scorer`.
    """
    reward = config.reward
    return make_scorer(
        reward.entries if entries is None else entries,
        reward_max=reward.reward_max_val,
        reward_min=reward.reward_min_val,
        files=config.runner.code_files,
        limits=Limits(reward.timeout, MEMORY_GB, REWARD_PROCESSES),
        hosts=reward.judge_hosts,
        first_report=first_report,
        pool_class=pool_class,
    )


def env_maker_of(
    config: Config, scorer: Scorer | None = None, reply_form: ReplyForm | None = None
) -> EnvMaker:
    """Return the maker of a run's environments, which grade with `scorer` (None: the run's).

    `reply_form`: the checkpoint's (`Renderer.words`); None where no policy answers.
    """
    scorer = scorer or scorer_of(config)
    rollout = config.rollout
    # An environment of verifiers drives itself, so it is none of ours.
    is_ours = rollout.verifiers_name is None
    return EnvMaker(
        rollout.env_class if is_ours else SINGLE,
        rollout.env_kwargs if is_ours else {},
        config.runner.code_files,
        scorer.grade,
        reward_max=config.reward.reward_max_val,
        reward_min=config.reward.reward_min_val,
        reply_form=reply_form or ReplyForm(),
    )


def pays_row_answers(config: Config) -> bool:
    """Return whether a run's rewards are for the rows' answers, so that one answer for all rows
    earns something."""
    rollout = config.rollout
    # A rubric of verifiers is asked about whole rollouts.
    if rollout.verifiers_name is not None:
        return False
    return grades_answers(load_env_class(rollout.env_class, config.runner.code_files))
