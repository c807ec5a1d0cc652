"""Which rows of a data set a run can use, and the parts of a rollout worker that this takes; no engine, and no Ray."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlinf_vl.config.schema import Config
from rlinf_vl.data.dataset import FilterResult, ProblemDataset
from rlinf_vl.data.unusable import ANSWER_UNUSABLE, ENVIRONMENT_UNUSABLE, RowError
from rlinf_vl.envs import EnvMaker
from rlinf_vl.envs.registry import SINGLE
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.rewards import GradingError
from rlinf_vl.rewards.named import NAMED
from rlinf_vl.rewards.processes import Limits
from rlinf_vl.rewards.scoring import Scorer, make_scorer
from rlinf_vl.rollout.prompts import Prompts
from rlinf_vl.types import Problem, Request


def processor_of(config: Config, model_path: str) -> Processor:
    """Tokenizer and image processor of a run's model."""
    model = config.rollout.model
    return Processor(
        model_path,
        family_of(
            model.model_type,
            model_path,
            model.trust_remote_code,
            config.actor.model.vlm.paths,
            config.runner.code_files,
        ),
        min_pixels=config.data.image_min_pixels,
        max_pixels=config.data.image_max_pixels,
        trust_remote_code=model.trust_remote_code,
    )


def scorer_of(config: Config, entries: Sequence[Mapping[str, Any]] | None = None) -> Scorer:
    """Return the scorer of a run's reward functions, or of some of their entries."""
    reward = config.reward
    bounds = {"reward_max": reward.reward_max_val, "reward_min": reward.reward_min_val}
    limits = Limits(reward.timeout, reward.memory_gb, reward.workers)
    return make_scorer(
        reward.entries if entries is None else entries,
        **bounds,
        files=config.runner.code_files,
        limits=limits,
        hosts=reward.judge_hosts,
    )


def env_maker_of(config: Config, scorer: Scorer | None = None) -> EnvMaker:
    rollout, reward, scorer = config.rollout, config.reward, scorer or scorer_of(config)
    rewards: dict[str, Any] = {"reward_max": reward.reward_max_val, "reward_min": reward.reward_min_val}
    return EnvMaker(rollout.env_class, rollout.env_kwargs, config.runner.code_files, scorer.grade, **rewards)


def needs_reference(config: Config) -> bool:
    """Return whether a reward function of the config compares answers with the row's; one of the user's own may do without."""
    named = (NAMED.get(entry["function"]) for entry in config.reward.entries)
    return any(reward.judges for reward in named if reward is not None)


def without_reference(env_name: str, problem: Problem) -> str:
    """Return what to say of an environment that grades where there is nothing to grade against."""
    return (
        f"{env_name} grades against the row's answer, and row {problem.id} has none; give rows with answers, pay by the "
        "environment's own reward, or name a reward function that needs none"
    )


@dataclass(frozen=True)
class RowCheck:
    """What of a config decides whether a row can be used. Without `prompts` the length of its prompt does not matter."""

    config: Config
    prompts: Prompts | None
    make_env: EnvMaker

    def filter(
        self, dataset: ProblemDataset, rows: Sequence[int], see: Callable[[int, Problem, Request | None], None]
    ) -> FilterResult:
        """Which of `rows` can be used, graded, and have a prompt within data.max_prompt_length, expanded ids counted, or cut to that
        (data.overlong; one that is to be dropped is bad where data.filter_prompt_by_length is false).

        `see` is told the problem of each row that is one, in each of its wordings, and its prompt before it is cut; its images may
        turn out to be damaged."""
        data, overlong = self.config.data, dict[int, tuple[int, int]]()
        named = (NAMED.get(entry["function"]) for entry in self.config.reward.entries)
        checks = [reward.check for reward in named if reward and reward.check]

        def length(row: int, problem: Problem) -> int:
            try:
                self.make_env.check(problem)
            except ValueError as e:
                raise RowError(problem.id, ENVIRONMENT_UNUSABLE, str(e)) from e
            if not problem.answer and needs_reference(self.config) and self.make_env.leaves_grading(problem):
                raise RowError(problem.id, ANSWER_UNUSABLE, without_reference(self.make_env.name_of(problem), problem))
            try:  # another environment may read the answer otherwise than the grader does
                for check in checks if self.make_env.name_of(problem) == SINGLE else ():
                    check(problem.answer)
            except GradingError as e:
                raise RowError(problem.id, ANSWER_UNUSABLE, str(e)) from e
            if self.prompts is None:
                see(row, problem, None)
                return 0
            whole = self.prompts.of_row(problem, any_length=True)
            see(row, problem, whole)
            counted = data.overlong == "error" or data.overlong == "drop" and data.filter_prompt_by_length
            if counted or len(whole.ids) <= data.max_prompt_length:
                return len(whole.ids)
            cut = self.prompts.of_row(problem)
            overlong[row] = len(whole.ids), len(whole.images) - len(cut.images)
            return len(cut.ids)

        found = dataset.filter_by_length(
            rows, length, data.max_prompt_length, image_only=data.image_only_mode, level_key=data.curriculum_key
        )
        return replace(found, cut={row: overlong[row] for row in overlong if row in found.kept})
