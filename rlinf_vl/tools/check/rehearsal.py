"""Rehearses a run in this process, before Ray starts and before the run's folder exists.

It tries some rows, the reward and the environment, and so finds mistakes in a user's code within
seconds. It refuses only what fails on every row that it tries: a single failure may be chance.
"""

import asyncio
import json
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rlinf_vl.config.schema import Config
from rlinf_vl.data.dataset import FilterResult, ProblemDataset, open_datasets
from rlinf_vl.data.unusable import shorten
from rlinf_vl.envs import Env, EnvMaker, StepResult
from rlinf_vl.envs.registry import ENVIRONMENTS, SINGLE
from rlinf_vl.errors import ConfigError
from rlinf_vl.rewards.result import Answer
from rlinf_vl.rewards.scoring import Score, Scorer
from rlinf_vl.rollout.episode.env_executor import CallTimeout, ThreadExecutor
from rlinf_vl.rollout.episode.env_makers import env_maker_of, scorer_of
from rlinf_vl.rollout.episode.observation import observe, plain_result
from rlinf_vl.rollout.episode.request_builder import RequestBuilder, TooLong
from rlinf_vl.rollout.episode.row_check import (
    RowCheck,
    needs_reference,
    processor_of,
    request_builder_of,
    without_reference,
)
from rlinf_vl.tools.check.certificates import not_proven
from rlinf_vl.types import Problem, SamplingParams
from rlinf_vl.user_code import is_code

log = logging.getLogger(__name__)

#: Number of rows to read, spread evenly over the data set, and number if none of these is usable.
ROWS, MORE_ROWS = 16, 512
#: Number of rows to grade and to play.
TRIED_ROWS = 2
#: Forms of a right answer that most graders read, and an answer that is right for no row.
GOOD_ANSWERS = ("\\boxed{{{}}}", "{}", "<answer>{}</answer>")
BAD_ANSWER = "I don't know."
#: Named functions that are not tried, because they send requests to a server, which may cost money.
ASKING = {"judge"}


@dataclass
class Rehearsal:
    """The results of a rehearsal.

    Attributes:
        rows: the number of rows of the training data.
        rewards: (lowest of a bad answer, highest of a good one); None if no reward function could
            be tried.
        prompt_tokens: length of the longest first prompt among the rows tried.
    """

    rows: int
    env_name: str
    max_prompt_length: int
    rewards: tuple[float, float] | None = None
    prompt_tokens: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        """The line that the user sees."""
        rewards = (
            "reward not tried"
            if self.rewards is None
            else f"reward {self.rewards[0]:.1f} and {self.rewards[1]:.1f}"
        )
        prompt = f"first prompt {self.prompt_tokens} of {self.max_prompt_length} tokens"
        return f"ready: {self.rows} rows, {rewards}, {prompt}, environment {self.env_name}"


def rehearse(config: Config, model_path: str) -> Rehearsal:
    """Read some rows, grade good and bad answers to two of them, and begin an episode of each.

    Raises:
        ConfigError: no row can be used, or the reward or environment fails on all rows tried.
    """
    try:
        dataset = open_datasets(config.data, ENVIRONMENTS)["train"]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    processor = processor_of(config, model_path)
    builder = request_builder_of(config, processor)
    agent = config.rollout.agent
    player_name = config.rollout.env_class
    if agent.is_set:
        player_name = agent.function or " ".join(agent.command)
    rehearsal = Rehearsal(len(dataset), player_name, config.data.max_prompt_length)
    if not is_code(config.rollout.model.model_type):
        path = "sglang" if config.rollout.rollout_backend == "sglang" else ""
        rehearsal.warnings += filter(None, [not_proven(processor.family.model_type, path)])
    # A judge is a service that costs money: asking it is left to the run.
    entries = [entry for entry in config.reward.entries if entry["function"] not in ASKING]
    scorer = scorer_of(config, entries)
    make_env = env_maker_of(config, scorer, builder.renderer.words.reply_form)
    strict_env = make_env
    if needs_reference(config) and not config.rollout.has_agents:
        strict_env = replace(make_env, grade=partial(_grade, scorer, make_env))
    try:
        tokens = _usable_rows(config, dataset, RowCheck(config, builder, make_env))
        problems = [dataset[row] for row in list(tokens)[:TRIED_ROWS]]
        rehearsal.prompt_tokens = max(tokens.values(), default=0)
        has_rubric = config.rollout.verifiers_name is not None
        if entries and not has_rubric and any(problem.answer for problem in problems):
            _try_rewards(config, scorer, problems, rehearsal)
        # The single-turn environment is the project's own, and needs no rehearsal.
        env_problems = [problem for problem in problems if make_env.name_of(problem) != SINGLE]
        if env_problems:
            _try_environment(config, strict_env, builder, env_problems, rehearsal)
    finally:
        scorer.close()
    for warning in rehearsal.warnings:
        log.warning("%s", warning)
    return rehearsal


def _usable_rows(config: Config, dataset: ProblemDataset, check: RowCheck) -> dict[int, int]:
    """Return the prompt lengths of usable rows in tokens, by row.

    Raises:
        ConfigError: no row is usable.
    """
    tokens: dict[int, int] = {}

    def note_length(row: int, _: Problem, prompt_tokens: int) -> None:
        # A row has a prompt per wording of its question; the longest counts.
        tokens[row] = max(tokens.get(row, 0), prompt_tokens)

    result = FilterResult()
    # Spread over the data: files are often sorted, by length for instance. More rows are read
    # only where the first few are unusable, which may be chance.
    for n_rows in (ROWS, MORE_ROWS):
        rows = range(0, len(dataset), max(1, len(dataset) // n_rows))[:n_rows]
        result = check.filter(dataset, rows, note_length)
        if result.kept:
            return {row: tokens[row] for row in result.kept}
    reasons: list[str] = []
    if result.bad:
        first_bad = next(iter(result.bad.values()))
        reasons.append(f"{len(result.bad)} are bad, such as row {first_bad.id}: {first_bad.reason}")
    if result.too_long:
        low, high = min(result.too_long.values()), max(result.too_long.values())
        reasons.append(
            f"{len(result.too_long)} have prompts of {low} to {high} tokens, above "
            f"data.max_prompt_length={config.data.max_prompt_length}: raise that, and "
            "runner.seq_length, or set data.overlong=cut"
        )
    if result.text_only:
        reasons.append(f"{len(result.text_only)} have no image, and data.image_only_mode is true")
    raise ConfigError(
        f"data.train_data_paths: none of {len(rows)} rows can be used; {'; '.join(reasons)}"
    )


def _try_rewards(
    config: Config, scorer: Scorer, problems: Sequence[Problem], rehearsal: Rehearsal
) -> None:
    """Grade good answers and a bad one to each problem.

    Raises:
        ConfigError: a reward function fails on all answers.
    """
    scores: list[Score] = []
    pairs: list[tuple[float, float]] = []  # (reward of the bad answer, best reward of a good one)
    # In a thread, because a notebook's own thread runs an event loop already.
    with ThreadPoolExecutor(1) as thread:
        for problem in problems:
            answers = [_answer(form.format(reference_of(problem))) for form in GOOD_ANSWERS]
            answers.append(_answer(BAD_ANSWER))
            *good_scores, bad_score = thread.submit(_scores, scorer, problem, answers).result()
            scores += [*good_scores, bad_score]
            pairs.append((bad_score.reward, max(score.reward for score in good_scores)))
    lowest_bad = min(bad_reward for bad_reward, _ in pairs)
    rehearsal.rewards = lowest_bad, max(good_reward for _, good_reward in pairs)
    reward = config.reward
    reasons = [reason for score in scores for reason in _failures(score)]
    for number, part in enumerate(scorer.parts):
        failures = [reason for reason in reasons if reason.startswith(f"{part.name}: ")]
        key = f"reward.functions[{number}]" if reward.functions else "reward.reward_type"
        if len(failures) == len(scores):
            raise ConfigError(
                f"{key}: {failures[0]} (tried on rows {_ids(problems)}, good and bad answers)"
            )
        if failures:
            rehearsal.warnings.append(
                f"{key}: it failed on {len(failures)} of {len(scores)} answers, which then count "
                f"as wrong: {failures[0]}"
            )
    if all(good_reward == bad_reward for bad_reward, good_reward in pairs):
        rehearsal.warnings.append(
            f"reward: {BAD_ANSWER!r} and the reference answer (as it is, in \\boxed{{}} and in "
            f"<answer>) get the same reward, {pairs[0][0]:g}, on rows {_ids(problems)}: nothing "
            "can be learned if that is so for all answers"
        )


def _scores(scorer: Scorer, problem: Problem, answers: Sequence[Answer]) -> list[Score]:
    return asyncio.run(scorer(problem, answers))


def _failures(score: Score) -> Iterator[str]:
    """Yield the reasons why functions gave an answer no score, each "name: reason"."""
    yield from score.ungraded
    if score.fault:
        yield score.fault


def reference_of(problem: Problem) -> str:
    """Return a right answer to a problem: the reference, or the first of several."""
    if problem.answer.startswith('["'):
        with suppress(ValueError, IndexError):
            return str(json.loads(problem.answer)[0])
    return problem.answer


def _answer(text: str) -> Answer:
    return Answer(text, text, tuple(range(len(text.split()))))


def _ids(problems: Sequence[Problem]) -> str:
    return " and ".join(problem.id for problem in problems)


def _try_environment(
    config: Config,
    make_env: EnvMaker,
    builder: RequestBuilder,
    problems: Sequence[Problem],
    rehearsal: Rehearsal,
) -> None:
    """Begin an episode of each problem, and answer once.

    Raises:
        ConfigError: it fails for all problems.
    """
    executor, failures = ThreadExecutor(config.rollout.turn_timeout), list[str]()
    for problem in problems:
        try:
            rehearsal.prompt_tokens = max(
                rehearsal.prompt_tokens, _begin_episode(executor, make_env, builder, problem)
            )
        except (CallTimeout, TimeoutError):
            rehearsal.warnings.append(
                f"rollout.env_class: {make_env.name_of(problem)} did not answer within "
                f"rollout.turn_timeout={config.rollout.turn_timeout:g} s for row {problem.id}"
            )
            return  # a hung call may hold what the next one needs
        except TooLong as error:
            failures.append(
                f"the first prompt of {make_env.name_of(problem)} for row {problem.id}: {error}"
            )
        except Exception as error:
            failures.append(
                f"{make_env.name_of(problem)} for row {problem.id}: {_described(error)}"
            )
    if len(failures) == len(problems):
        raise ConfigError(f"rollout.env_class: {failures[0]}; 'rlinf-vl check-env' plays it")
    rehearsal.warnings += [f"rollout.env_class: {failure}" for failure in failures]


def _begin_episode(
    executor: ThreadExecutor, make_env: EnvMaker, builder: RequestBuilder, problem: Problem
) -> int:
    """Start an episode and give one answer; return the length of its first prompt in tokens."""

    def call(function: Callable[[], Any]) -> Any:
        return executor.begin(function).result(executor.timeout_s)

    env: Env = call(partial(make_env, problem, 0, 0))
    try:
        messages = list(call(partial(env.start, problem)))
        request, _ = builder.first(
            observe(messages, problem, tools=problem.tools), SamplingParams()
        )
        result = call(partial(env.step, BAD_ANSWER))
        if not isinstance(result, StepResult):
            returned = type(result).__name__
            raise TypeError(
                f"step returned {returned}: return StepResult(messages, reward, done, info)"
            )
        plain_result(result)
        if result.info.get("answer") is not None and not problem.answer:
            # A run's reward functions would grade it: raises that there is no reference.
            make_env.grade(problem, BAD_ANSWER)
        observe(list(result.messages), problem)
    finally:
        with suppress(Exception):  # in a run, too, a failing `close` is only logged
            call(env.close)
    return len(request.ids)


def _grade(scorer: Scorer, make_env: EnvMaker, problem: Problem, response: str) -> bool:
    """Grade a response for an environment. Raises ValueError: the problem has no reference."""
    if not problem.answer:
        raise ValueError(without_reference(make_env.name_of(problem), problem))
    return scorer.grade(problem, response)


def _described(error: Exception) -> str:
    """Return an error's type and message, and the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    line = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {shorten(str(error), 300)}{line}"
