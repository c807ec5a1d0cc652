"""`rlinf-vl check-reward`: tries a reward function on right, wrong and hostile answers.

A user's function runs in processes with the limits of a run, so that one that hangs, crashes or
exits is reported and harms nothing. The report distinguishes what breaks the contract (BROKEN, exit
code 1) from what is worth a look (LOOK).
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from rlinf_vl.config import load_config
from rlinf_vl.data.dataset import ProblemDataset, open_datasets
from rlinf_vl.data.images import to_image_ref
from rlinf_vl.data.sources import FILE_FORMATS, HUB_PREFIX
from rlinf_vl.data.unusable import RowError, shorten
from rlinf_vl.envs.registry import ENVIRONMENTS
from rlinf_vl.errors import ConfigError
from rlinf_vl.rewards.named import NAMED
from rlinf_vl.rewards.processes import MEMORY_GB, Limits
from rlinf_vl.rewards.result import RIGHT, Answer, Result
from rlinf_vl.rewards.scoring import Part, Scorer, make_scorer
from rlinf_vl.tools.check.arguments import (
    FORM_KEYS,
    dataset_of,
    parsed_overrides,
    spread_problems,
)
from rlinf_vl.tools.check.findings import ContractCheck
from rlinf_vl.tools.check.policies import HOSTILE
from rlinf_vl.tools.check.rehearsal import reference_of
from rlinf_vl.types import Problem
from rlinf_vl.user_code import CodeError, is_code

#: Forms of a right answer, by kind.
RIGHT_FORMS = {
    "right, boxed": "The answer is \\boxed{{{}}}.",
    "right, bare": "{}",
    "right, in <answer>": "<answer>{}</answer>",
    "right, behind thoughts": "<think>I look at it.</think>\\boxed{{{}}}",
}
WRONG, EMPTY = "wrong, boxed", "nothing"
#: Answers that are right for no row. The last two contain the answers of many rows.
OTHERS = HOSTILE | {
    "I don't know": "I don't know.",
    "an open thought": "<think>I look at it",
    "every number to 200": " ".join(map(str, range(201))),
    "every letter": "A B C D (A) (B) (C) (D)",
}
#: The kinds that are no answer at all: to reward one like a right answer breaks the contract.
NO_ANSWERS = {
    EMPTY,
    "blanks",
    "100,000 characters",
    "control tokens",
    "I don't know",
    "odd characters",
}
#: A function is a grader if its scores of right and wrong answers differ by more than this share of
#: the range of all its scores.
GRADER_SHARE = 0.1
#: An answer that is not right is worth a look if it gets more than this share of what a right
#: answer gets beyond a wrong one.
HOLE_SHARE = 0.5
#: Answers of the group that is scored at once.
SIDE_BY_SIDE = 16
#: Rows that are tried without --rows; few for a judge, each of whose answers is paid for.
ROWS, JUDGED_ROWS = 32, 4
#: Rows up to which the table has a column for each.
TABLE_ROWS = 4
#: Rows on which a kind of answer may fail before the other rows are tried without it: a function
#: that hangs would take its limit of time on each.
MAX_FAILED_ROWS = 3
#: Seconds beyond which an answer is reported as slow.
SLOW_S = 1.0
PROCESSES = 2


def _sample(row_id: str, question: str, answer: str, **columns: Any) -> Problem:
    message = {"role": "user", "content": [{"type": "text", "text": question}]}
    picture = np.zeros((240, 320, 3), np.uint8)
    return Problem(
        row_id,
        (message,),
        answer,
        (to_image_ref(Image.fromarray(picture), root=None),),
        None,
        columns,
    )


def samples(name: str) -> list[Problem]:
    """Return the rows for a function if no data is given: numbers, or what a named one grades."""
    if name == "choice":
        options = ["square", "circle", "triangle"]
        return [_sample("sample:0", "Which shape is it?", "B", options=options)]
    if name in ("bbox_giou", "point_in_box"):
        return [_sample("sample:0", "Where is the cat?", "[20, 30, 120, 130]")]
    if name in ("exact", "exact_alnum", "anls"):
        return [_sample("sample:0", "Which colour is it?", "dark blue")]
    return [
        _sample("sample:0", "What is 6 × 7?", "42"),
        _sample("sample:1", "What is half of 7?", "3.5"),
    ]


@dataclass(kw_only=True)
class RewardCheck(ContractCheck):
    """The check of one reward function: its scores and the findings.

    Attributes:
        rows: those that are tried.
        paid: the scores by kind of answer, one per row; None if there was no score.
        failures: the last reason why there was no score, by kind.
        failed_rows: the number of rows on which there was none, by kind.
        seconds: the longest time for one answer, and the kind of that answer.
        correct: whether answers counted as right, by kind.
        unread_forms: the kinds of right answers that are paid less than others.
    """

    scorer: Scorer
    rows: Sequence[Problem]
    paid: dict[str, list[float | None]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    failed_rows: Counter[str] = field(default_factory=Counter)
    seconds: tuple[float, str] = (0.0, "")
    correct: dict[str, list[bool]] = field(default_factory=dict)
    unread_forms: list[str] = field(default_factory=list)

    @property
    def part(self) -> Part:
        return self.scorer.parts[0]

    def run(self) -> None:
        """Score all answers to all rows one by one, some in a group, and one without columns."""
        problems = self.rows
        for number, problem in enumerate(problems):
            next_problem = problems[(number + 1) % len(problems)]
            # With a single row there is no other reference to serve as a wrong answer.
            other_reference = reference_of(next_problem) if len(problems) > 1 else ""
            for kind, text in answers_to(problem, other_reference).items():
                if self.failed_rows[kind] < MAX_FAILED_ROWS:
                    self.record(kind, self.score(problem, [text], kind)[0])
                else:
                    self.paid[kind].append(None)
        self.compare_group(problems[0])
        if problems[0].columns:
            self.drop_columns(problems[0])
        self.judge([problem.id for problem in problems])

    def score(self, problem: Problem, texts: Sequence[str], kind: str) -> list[Result | Exception]:
        """Score answers at once; return the result of each, or the error."""
        start_time = time.monotonic()
        answers = [_answer(text) for text in texts]
        results = [_outcome(future) for future in self.part.begin(problem, answers)]
        elapsed_s = time.monotonic() - start_time
        # The first call includes the start of a process, which imports the function's file.
        is_first = not self.paid
        if elapsed_s > self.seconds[0] and not is_first and len(texts) == 1:
            self.seconds = elapsed_s, kind
        return results

    def record(self, kind: str, outcome: Result | Exception) -> None:
        """Record the score of an answer, or the error as a problem."""
        value = None
        if isinstance(outcome, Exception):
            self.failed_rows[kind] += 1
            self.failures[kind] = shorten(f"{type(outcome).__name__}: {outcome}", 200)
            self.add_problem(self.failures[kind], kind)
        else:
            value = outcome.value
            if outcome.correct is not None or value is not None:
                is_right = (
                    outcome.correct if outcome.correct is not None else (value or 0.0) >= RIGHT
                )
                self.correct.setdefault(kind, []).append(is_right)
        self.paid.setdefault(kind, []).append(value)

    def compare_group(self, problem: Problem) -> None:
        """Score answers in one group, and compare with their scores one by one."""
        # Some functions compare the answers of a call, and some keep state between calls.
        kinds = list(answers_to(problem, ""))[:SIDE_BY_SIDE]
        texts = [answers_to(problem, "")[kind] for kind in kinds]
        outcomes = self.score(problem, texts, "a group")
        for kind, outcome in zip(kinds, outcomes, strict=True):
            score_alone = self.paid.get(kind, [None])[0]
            if isinstance(outcome, Exception):
                if kind not in self.failures:
                    reason = f"{type(outcome).__name__}: {outcome}"
                    self.add_problem(
                        f"in a group of {len(kinds)} answers: {shorten(reason, 200)}", kind
                    )
            # The wrong answer was another row's before, so its score may differ.
            elif kind not in self.failures and kind != WRONG and outcome.value != score_alone:
                self.notes.append(
                    f"{kind!r} is paid {_number(score_alone)} alone and {_number(outcome.value)} "
                    f"in a group of {len(kinds)} answers: what a function keeps between calls, or "
                    "draws at random, changes rewards"
                )
                break

    def drop_columns(self, problem: Problem) -> None:
        """Score a right answer to a row that has only its question, answer and images."""
        kind = "right, boxed"
        (outcome,) = self.score(replace(problem, columns={}), [answers_to(problem, "")[kind]], kind)
        if isinstance(outcome, Exception) and kind not in self.failures:
            self.notes.append(
                f"without the row's other columns there is no score: {shorten(str(outcome), 160)}"
            )

    def judge(self, row_ids: Sequence[str]) -> None:
        """Compare the scores of kinds of answers; record what they say of the function."""
        scores = [value for values in self.paid.values() for value in values if value is not None]
        if not scores:
            return
        if min(scores) < 0 or max(scores) > 1:
            self.notes.append(
                f"it pays {min(scores):g} to {max(scores):g}; 0 and 1 are what "
                "reward.reward_min_val and reward.reward_max_val stand for, and other values go "
                "beyond these"
            )
        right = max(self._mean(kind) for kind in RIGHT_FORMS)
        wrong = self._mean(WRONG)
        if not is_code(self.name) and not NAMED[self.name].judges:
            return
        if right - wrong <= GRADER_SHARE * (max(scores) - min(scores)):
            self.notes.append(
                f"right and wrong answers are paid alike ({right:g} and {wrong:g}): fine for one "
                "that looks at the form only; a grader reads another form, or these rows' answers "
                "are not of its kind (--data FILE)"
            )
            return
        bar = wrong + HOLE_SHARE * (right - wrong)
        for kind in (kind for kind in self.paid if kind not in RIGHT_FORMS):
            by_row = self._by_row(kind, row_ids)
            holes = [row for row, value in by_row.items() if value > bar]
            if not holes:
                continue
            highest = max(by_row.values())
            if kind in NO_ANSWERS and highest >= right:
                problem = f"it pays {highest:g} for what is no answer, as for a right one"
                self.add_problem(problem, kind)
            else:
                self.notes.append(
                    f"it pays {highest:g} for {kind!r}, and {right:g} for a right answer: a policy "
                    f"would find that ({_rows_text(holes, row_ids)})"
                )
        best_form = max(RIGHT_FORMS, key=self._mean)
        unpaid = [row for row, value in self._by_row(best_form, row_ids).items() if value <= bar]
        if unpaid:
            self.notes.append(
                f"a right answer is paid no better than a wrong one in {_rows_text(unpaid, row_ids)}"
                ": it can't read these rows' answers, so a policy learns nothing from them"
            )
        self.unread_forms = [kind for kind in RIGHT_FORMS if self._mean(kind) < right]

    def _by_row(self, kind: str, row_ids: Sequence[str]) -> dict[str, float]:
        """Return the scores of a kind of answer, by the row's id."""
        pairs = zip(row_ids, self.paid[kind], strict=True)
        return {row_id: value for row_id, value in pairs if value is not None}

    def _mean(self, kind: str) -> float:
        values = [value for value in self.paid.get(kind, ()) if value is not None]
        return sum(values) / len(values) if values else -math.inf

    def figures(self) -> Iterator[str]:
        yield from self._table()
        yield f"slowest answer: {self.seconds[0]:.2g} s ({self.seconds[1]})"
        if self.unread_forms:
            yield (
                f"it pays less for {', '.join(map(repr, self.unread_forms))}: ask for the form that "
                "it reads in data.prompt_suffix"
            )

    def _table(self) -> Iterator[str]:
        """Yield the lines of the table of scores."""
        width = max(map(len, self.paid))
        is_short = len(self.rows) <= TABLE_ROWS
        head = (
            f"paid for {', '.join(problem.id for problem in self.rows)}"
            if is_short
            else f"{'mean':>6} {'least':>6} {'most':>6}  paid for {len(self.rows)} rows"
        )
        yield f"{'answer':<{width}}  {head}"
        for kind, values in self.paid.items():
            reason = f"  {self.failures[kind]}" if kind in self.failures else ""
            cells = " ".join(f"{_number(value):>6}" for value in _cells(values, is_short))
            yield f"{kind:<{width}}  {cells}{reason}".rstrip()

    def warnings(self) -> Iterator[str]:
        if self.seconds[0] > SLOW_S:
            yield f"an answer took over {SLOW_S:g} s; a step of training waits for its slowest answer"
        yield from self.notes
        if any("is no column of the row" in problem for problem, _ in self.problems.values()):
            yield "it reads columns that these rows lack; give rows that have them with --data FILE"

    def verdict(self) -> str:
        if self.problems:
            return super().verdict()
        count = sum(value is not None for values in self.paid.values() for value in values)
        right = max(self._mean(kind) for kind in RIGHT_FORMS)
        return (
            f"{super().verdict()}: {count} answers to {len(self.rows)} rows, a right one is paid "
            f"{right:g}, a wrong one {self._mean(WRONG):g}"
        )


def answers_to(problem: Problem, other_reference: str) -> dict[str, str]:
    """Return the answers to try, by kind; `other_reference` is the answer of another row, or ""."""
    right = reference_of(problem)
    texts = {kind: form.format(right) for kind, form in RIGHT_FORMS.items()}
    wrong = wrong_answer(right, other_reference)
    return texts | {WRONG: f"The answer is \\boxed{{{wrong}}}."} | OTHERS


def wrong_answer(right: str, other_reference: str) -> str:
    """Return a wrong answer that looks like the right one.

    It is another row's answer, or the right one with its digits or letter changed.
    """
    if other_reference.strip() and other_reference != right:
        return other_reference
    # As long and of the same kind, so that only its content can be what is graded.
    changed = right.translate(str.maketrans("0123456789ABCD", "9876012345BADC"))
    return changed if changed != right else f"no {right}"


def main(arguments: argparse.Namespace) -> int:
    """Check a reward function; return 0 if nothing breaks the contract, else 1.

    Raises:
        ConfigError: the function or the data can't be loaded, or no row has an answer.
    """
    name = arguments.function
    kwargs, form = parsed_overrides(arguments.overrides, "a keyword of the function")
    if unknown := sorted(form.keys() - FORM_KEYS):
        raise ConfigError(*(f"data.{key}: no such key here" for key in unknown))
    if arguments.rows is not None and arguments.rows < 1:
        raise ConfigError(f"--rows {arguments.rows}: try at least one row")
    try:
        bounds, rows = (1.0, 0.0), samples(name)
        if arguments.data is not None:
            n_rows = arguments.rows or (JUDGED_ROWS if name == "judge" else ROWS)
            bounds, rows = rows_of(arguments.data, form, n_rows)
        hosts = (
            [urlsplit(str(kwargs["url"])).hostname or ""]
            if name == "judge" and "url" in kwargs
            else []
        )
        entry = {"function": name, "kwargs": kwargs}
        limits = Limits(arguments.time_limit, MEMORY_GB, PROCESSES)
        scorer = make_scorer(
            [entry],
            reward_max=bounds[0],
            reward_min=bounds[1],
            files={},
            limits=limits,
            hosts=hosts,
        )
    except (CodeError, RowError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if not rows:
        raise ConfigError(f"--data: {arguments.data} has no row with an answer")
    check = RewardCheck(name=name, file="", scorer=scorer, rows=rows)
    try:
        check.run()
    finally:
        scorer.close()
    if bounds != (1.0, 0.0):
        check.notes.append(
            f"in a run of {arguments.data}, 0 is a reward of {bounds[1]:g}, and 1 is one of "
            f"{bounds[0]:g}"
        )
    if not is_code(name) and not NAMED[name].judges:
        check.notes.append(
            "it looks at the form or the length only: name a grader before it in reward.functions"
        )
    return check.report(arguments.json)


def rows_of(
    data: str, form: dict[str, Any], n_rows: int
) -> tuple[tuple[float, float], list[Problem]]:
    """Return the rewards and up to `n_rows` rows of a config or a data set.

    Returns:
        ((reward_max_val, reward_min_val), rows as in `spread_problems`; of a config, those with an
        answer)
    """
    is_data = (
        data.startswith(HUB_PREFIX) or Path(data).is_dir() or Path(data).suffix in FILE_FORMATS
    )
    if is_data:
        return (1.0, 0.0), spread_problems(dataset_of(data, form), n_rows)
    config = load_config(data, [f"data.{key}={value}" for key, value in form.items()])
    dataset: ProblemDataset = open_datasets(config.data, ENVIRONMENTS)["train"]
    return (config.reward.reward_max_val, config.reward.reward_min_val), [
        row for row in spread_problems(dataset, n_rows) if row.answer
    ]


def _answer(text: str) -> Answer:
    # Reward functions see token ids, too; one per word serves here.
    return Answer(text, text.rpartition("</think>")[2], tuple(range(len(text.split()))))


def _outcome(future: "Future[Result]") -> Result | Exception:
    try:
        return future.result()
    except Exception as error:
        return error


def _cells(values: Sequence[float | None], is_short: bool) -> list[float | None]:
    """Return a kind's cells of the table: each row's score, or their mean, least and most."""
    scores = [value for value in values if value is not None]
    if is_short or not scores:
        return list(values) if is_short else [None] * 3
    return [sum(scores) / len(scores), min(scores), max(scores)]


def _rows_text(some_ids: Sequence[str], all_ids: Sequence[str]) -> str:
    return f"{len(some_ids)} of {len(all_ids)} rows, {some_ids[0]} first"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
