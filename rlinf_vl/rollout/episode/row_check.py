"""Finds the rows of a data set that a run can use. No engine and no Ray.

It also makes the parts of a rollout worker that this needs: processor, scorer, environments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlinf_vl.config.processing import processor_options
from rlinf_vl.config.schema import Config
from rlinf_vl.config.schema.guidance import DistillationConfig
from rlinf_vl.data.dataset import FilterResult, ProblemDataset
from rlinf_vl.data.unusable import ANSWER_UNUSABLE, ENVIRONMENT_UNUSABLE, NO_TEACHER, RowError
from rlinf_vl.envs import EnvMaker
from rlinf_vl.envs.registry import SINGLE
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.rewards import GradingError
from rlinf_vl.rewards.named import NAMED
from rlinf_vl.rollout.episode.privileged import privileged_text
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.rollout.episode.request_builder import RequestBuilder
from rlinf_vl.types import Problem


def processor_of(config: Config, model_path: str) -> Processor:
    """Return the tokenizer and image processor of a run's model."""
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
        **processor_options(config),
    )


def renderer_of(config: Config, processor: Processor) -> Renderer:
    """Return the chat template with a run's options.

    Raises:
        ConfigError: as `Renderer`.
    """
    rollout = config.rollout
    thinking = rollout.thinking
    keeps_thoughts = thinking.history == "keep"
    return Renderer(processor, thinking.mode, rollout.chat_template_kwargs, keeps_thoughts)


def request_builder_of(config: Config, processor: Processor) -> RequestBuilder:
    """Return the builder of a run's requests.

    Raises:
        ConfigError: as `Renderer`.
    """
    return RequestBuilder(
        renderer_of(config, processor),
        config.runner.seq_length,
        config.data.max_prompt_length,
        config.data.overlong,
    )


def needs_reference(config: Config) -> bool:
    """Return whether a named reward function of the config compares answers with the row's answer.

    A user's own function is not counted: it may do without.
    """
    named = (NAMED.get(entry["function"]) for entry in config.reward.entries)
    return any(reward.judges for reward in named if reward is not None)


def without_reference(env_name: str, problem: Problem) -> str:
    """Return the message for an environment that grades a row that has no answer."""
    return (
        f"{env_name} grades against the row's answer, and row {problem.id} has none; give rows "
        "with answers, pay by the environment's own reward, or name a reward function that needs "
        "none"
    )


def _check_teacher(problem: Problem, distillation: DistillationConfig) -> None:
    """Raise RowError if there are several teachers, and none has the row's label."""
    teachers, key = distillation.teachers, distillation.teacher_key
    label = distillation.label_of(problem.labels)
    if not teachers or label in teachers:
        return
    teacher_labels = ", ".join(teachers)
    if label is None:
        columns = ", ".join(problem.labels) or "none"
        reason = (
            f"algorithm.distillation.teacher_key: the row has no label in column {key!r}; its "
            f"columns with short texts or numbers are {columns}, and teachers are for "
            f"{teacher_labels}"
        )
    else:
        reason = (
            f"column {key!r} holds {label!r}, and algorithm.distillation.teachers has "
            f"{teacher_labels}; add a teacher for it, or mend the row"
        )
    raise RowError(problem.id, NO_TEACHER, reason)


@dataclass(frozen=True)
class RowCheck:
    """The check whether rows can be used.

    Attributes:
        builder: None to ignore the length of prompts.
        for_training: whether the rows are trained on, and need a teacher if there are several.
    """

    config: Config
    builder: RequestBuilder | None
    make_env: EnvMaker
    for_training: bool = True

    def filter(
        self,
        dataset: ProblemDataset,
        rows: Sequence[int],
        see: Callable[[int, Problem, int], None],
    ) -> FilterResult:
        """Check which rows can be used.

        A usable row can be graded, and its prompt has at most data.max_prompt_length tokens, image
        tokens included, or can be cut to that (data.overlong). If data.filter_prompt_by_length is
        false, a row that overlong=drop drops counts as bad.

        Args:
            see: called with (row, problem, tokens of its prompt before it is cut, 0 if they aren't
                counted) for each row that could be read, once per wording of its question. The
                row's images may be damaged.
        """
        data = self.config.data
        cut_rows: dict[int, tuple[int, int]] = {}  # (tokens before the cut, images cut off)
        named = (NAMED.get(entry["function"]) for entry in self.config.reward.entries)
        answer_checks = [reward.check for reward in named if reward and reward.check]
        if self.config.rollout.verifiers_name is not None:
            # Its rubric pays, and may take answers that no reward function of ours does.
            answer_checks = []

        def length(row: int, problem: Problem) -> int:
            """Return the row's prompt length in tokens. Raises RowError: the row can't be used."""
            self._check_content(problem, answer_checks)
            if self.builder is None:
                see(row, problem, 0)
                return 0
            full_prompt = self.builder.from_row(problem, any_length=True)
            # Whoever looks wants to know how long rows are, not what a cut leaves of them.
            n_tokens = len(full_prompt.ids)
            see(row, problem, n_tokens)
            # The data set itself excludes and counts prompts that are too long.
            is_filtered = (
                data.overlong == "error" or data.overlong == "drop" and data.filter_prompt_by_length
            )
            if is_filtered or n_tokens <= data.max_prompt_length:
                return n_tokens
            # Raises RowError if the prompt may not or can't be cut, which makes the row bad.
            cut_prompt = self.builder.from_row(problem)
            cut_rows[row] = n_tokens, len(full_prompt.images) - len(cut_prompt.images)
            return len(cut_prompt.ids)

        result = dataset.filter_by_length(
            rows,
            length,
            data.max_prompt_length,
            image_only=data.image_only_mode,
            level_key=data.curriculum_key,
        )
        return replace(
            result, cut={row: cut for row, cut in cut_rows.items() if row in result.kept}
        )

    def _check_content(
        self, problem: Problem, answer_checks: Sequence[Callable[[str], object]]
    ) -> None:
        """Raise RowError if the row can't be played, graded or taught, whatever its length."""
        try:
            self.make_env.check(problem)
        except ValueError as e:
            raise RowError(problem.id, ENVIRONMENT_UNUSABLE, str(e)) from e
        # An agent may return a reward of its own.
        if (
            not problem.answer
            and not self.config.rollout.has_agents
            and needs_reference(self.config)
            and self.make_env.leaves_grading(problem)
        ):
            raise RowError(
                problem.id,
                ANSWER_UNUSABLE,
                without_reference(self.make_env.name_of(problem), problem),
            )
        try:
            # Other environments may read the row's answer in a way of their own.
            if self.make_env.name_of(problem) == SINGLE:
                for check_answer in answer_checks:
                    check_answer(problem.answer)
        except GradingError as e:
            raise RowError(problem.id, ANSWER_UNUSABLE, str(e)) from e
        if self.for_training:
            _check_teacher(problem, self.config.algorithm.distillation)
            privileged_text(problem, self.config.algorithm.distillation.privileged_template or "")
