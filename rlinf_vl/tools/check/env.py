"""`rlinf-vl check-env`: plays an environment with random and hostile answers.

It reports what breaks the contract of environments (exit code 1), and what the episodes were like.
"""

import argparse
import inspect
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rlinf_vl.config import with_texts
from rlinf_vl.data.clips import frame_refs
from rlinf_vl.data.images import decode
from rlinf_vl.data.unusable import RowError, shorten
from rlinf_vl.envs import Env, EnvMaker, StepResult
from rlinf_vl.envs.registry import keyword_problems, load_env_class
from rlinf_vl.errors import ConfigError
from rlinf_vl.rewards import GradingError
from rlinf_vl.rollout.episode.env_executor import CallTimeout, ThreadExecutor
from rlinf_vl.rollout.episode.observation import observe, plain_result
from rlinf_vl.rollout.episode.row_check import without_reference
from rlinf_vl.tools.check.arguments import FORM_KEYS, parsed_overrides, problems_of
from rlinf_vl.tools.check.findings import ContractCheck, unpaid_lines
from rlinf_vl.tools.check.policies import policies_for, scripts_of
from rlinf_vl.types import ROLES, Message, Problem
from rlinf_vl.user_code import CodeError

MAX_PROBLEMS = 4
MAX_TURNS = 100
#: No episode begins after so many seconds, or so many calls that hung.
MAX_SECONDS = 120.0
MAX_HUNG_CALLS = 2
#: Seconds beyond which a call is reported as slow.
SLOW_S = 1.0
#: The problem that is played if no data is given.
_PROBLEM = Problem(
    "check-env", ({"role": "user", "content": [{"type": "text", "text": "What is 6 × 7?"}]},), "42"
)


class Hung(Exception):
    """A call exceeded its time limit."""


@dataclass
class ToolCount:
    """The calls of one tool: their number, how many worked, and the last error of the others."""

    calls: int = 0
    worked: int = 0
    last_error: str = ""

    def add(self, error: Any) -> None:
        """Count a call; `error` is None if it worked."""
        self.calls += 1
        if error is None:
            self.worked += 1
        else:
            self.last_error = shorten(str(error), 200)


@dataclass(kw_only=True)
class Check(ContractCheck):
    """The check of one environment: its calls, and the findings of all episodes.

    Attributes:
        make: makes the environment.
        limit_s: limit on each call, in seconds.
        hung: the number of calls that hung.
        turns, rewards: of each episode that was played to its end.
        endings: the number of episodes by whether they were done within `MAX_TURNS`.
        images: the number of images by size.
        images_per_turn: the number of images of each observation.
        named: how often each metric and reward part was recorded.
        tool_calls: calls of each tool that the environment reported.
        seconds: the duration of the longest call of each method.
    """

    make: EnvMaker
    limit_s: float
    hung: int = 0
    turns: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    endings: Counter[bool] = field(default_factory=Counter)
    images: Counter[str] = field(default_factory=Counter)
    images_per_turn: list[int] = field(default_factory=list)
    named: Counter[str] = field(default_factory=Counter)
    tool_calls: dict[str, ToolCount] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._executor = ThreadExecutor(self.limit_s)

    def play(self, problems: Sequence[Problem], scripts: Sequence[Sequence[str]] = ()) -> None:
        """Play all episodes of each problem, those with `scripts` (`scripts_of`) first."""
        # A fixed seed: a check that has failed fails again.
        start_time, rng = time.monotonic(), random.Random(0)
        for problem in problems:
            self.check_seeds(problem)
            self.check_closing(problem)
            # An environment that hangs in every call would take hours, and leave a thread each time.
            for kind, policy in policies_for(problem, rng, scripts):
                if self.hung >= MAX_HUNG_CALLS or time.monotonic() - start_time > MAX_SECONDS:
                    self.notes.append(
                        f"stopped after {MAX_HUNG_CALLS} calls that hung, or {MAX_SECONDS:.0f} s"
                    )
                    break
                self.play_episode(problem, kind, policy, rng.getrandbits(63))
        if self.turns and not self.endings[True]:
            self.add_problem(
                f"no episode was done within {MAX_TURNS} turns: say done=True at last, or set "
                "rollout.max_turns"
            )

    def play_episode(
        self, problem: Problem, kind: str, policy: Callable[[str], str], seed: int
    ) -> None:
        """Play an episode until it is done, take one more step, and close the environment.

        Args:
            kind: names the policy in the report.
            policy: returns an answer to the text of the first and the last observation.
        """
        try:
            env = self.call("the constructor", partial(self.make, problem, seed, seed))
            try:
                start_text = self.start(env, problem)
                last_text = start_text
                total, turns, done = 0.0, 0, False
                while last_text is not None and turns < MAX_TURNS and not done:
                    result = self.step(env, problem, policy(f"{start_text}\n{last_text}"), kind)
                    if result is None:
                        return
                    total += self.reward_of(result, problem)
                    turns, done = turns + 1, bool(result.done)
                    if not done:
                        last_text = self.messages(result.messages, problem, f"step with {kind}")
                if last_text is None:
                    return
                self.turns.append(turns)
                self.rewards.append(total)
                self.endings[done] += 1
                if done:
                    self.step_after_done(env)
            finally:
                self.call("close()", env.close)
        except Hung:
            pass
        except Exception as error:
            self.add_error("", error)

    def reward_of(self, result: StepResult, problem: Problem) -> float:
        """Return a step's reward, with the grade of an answer that is left to reward functions."""
        answer = result.info.get("answer")
        if answer is not None and not problem.answer:
            self.add_problem(
                without_reference(self.make.name_of(problem), problem), "", "no answer"
            )
            return float(result.reward)
        return float(result.reward) + (
            0.0 if answer is None else float(self.make.grade(problem, answer))
        )

    def step_after_done(self, env: Env) -> None:
        """Check that an episode that is done stays done; raising is fine, too."""
        try:
            result = self.call("step after done", partial(env.step, "again"))
        except Exception:
            return
        if isinstance(result, StepResult) and not result.done:
            self.add_problem(
                "step after done returned done=False: an episode that is over stays over, or raises"
            )

    def start(self, env: Env, problem: Problem) -> str | None:
        """Start the environment; return the text of its messages, or None if that fails."""
        try:
            return self.messages(
                self.call("start(problem)", partial(env.start, problem)), problem, "start(problem)"
            )
        except Exception as error:
            return self.add_error("start(problem)", error)

    def step(self, env: Env, problem: Problem, answer: str, kind: str) -> StepResult | None:
        """Take a step and check its result; return None if the episode can't go on."""
        where = f"step with {kind}"
        try:
            result = self.call("step(response)", partial(env.step, answer))
        except GradingError:
            # No verdict: a run gives it the reward of a wrong answer.
            return StepResult((), 0.0, True)
        except Exception as error:
            return self.add_error(f"{where} ({shorten(repr(answer), 40)})", error)
        if not isinstance(result, StepResult):
            returned = type(result).__name__
            self.add_problem(
                f"step returned {returned}: return StepResult(messages, reward, done, info)", where
            )
            return None
        if (
            isinstance(result.reward, (str, bytes))
            or not np.isreal(result.reward)
            or not np.isfinite(result.reward)
        ):
            self.add_problem(
                f"step gave the reward {result.reward!r}: it must be a finite number", where
            )
            return None
        if not isinstance(result.done, (bool, np.bool_)):
            self.add_problem(f"step gave done={result.done!r}: it must be True or False", where)
        try:
            info = plain_result(result).info
            self.named.update(f"metric {name}" for name in info["metrics"])
            self.named.update(f"reward part {name}" for name in info["reward_parts"])
            for tool_call in result.info.get("tool_calls", ()):
                if (
                    not isinstance(tool_call, Mapping)
                    or not {"name", "arguments"} <= tool_call.keys()
                ):
                    raise TypeError(
                        f"the tool call {tool_call!r} is no mapping with 'name' and 'arguments'"
                    )
                count = self.tool_calls.setdefault(
                    str(tool_call["name"]) or "malformed calls", ToolCount()
                )
                count.add(tool_call.get("error"))
        except Exception as error:
            self.add_problem(f"step gave an info that can't be recorded: {error}", where)
        return result

    def messages(self, messages: Any, problem: Problem, where: str) -> str | None:
        """Check messages; return their text, or None if they can't be shown to a policy."""
        try:
            message_list: list[Message] = list(messages)
            texts = [text for message in message_list for text in _texts(message)]
            if where.startswith("start") and not message_list:
                raise ValueError("there are none: the policy has to be shown something")
            if message_list and message_list[-1]["role"] not in ("user", "tool"):
                role = message_list[-1]["role"]
                raise ValueError(
                    f"the last is of role {role!r}: the policy answers 'user' or 'tool'"
                )
            images = [
                decode(frame)
                for image in observe(message_list, problem).images
                for frame in frame_refs(image)
            ]
        except Exception as error:
            return self.add_problem(
                f"messages can't be shown: {error}", where, f"messages {type(error)}"
            )
        self.images_per_turn.append(len(images))
        self.images.update(f"{image.width}×{image.height}" for image in images)
        return "\n".join(texts)

    def check_seeds(self, problem: Problem) -> None:
        """Compare the starts of episodes with equal seeds, another seed, and another group seed."""
        starts = []
        # Twice the same seeds, then another episode of that group, then another group.
        for seed, group_seed in ((1, 2), (1, 2), (3, 2), (1, 4)):
            try:
                env = self.call("the constructor", partial(self.make, problem, seed, group_seed))
                try:
                    messages = list(self.call("start(problem)", partial(env.start, problem)))
                    images = [image.hash for image in observe(messages, problem).images]
                    texts = [(message["role"], list(_texts(message))) for message in messages]
                    starts.append((images, texts))
                finally:
                    self.call("close()", env.close)
            except Exception:  # the episodes report it
                return
        is_reproducible, same_for_seed, same_for_group = (
            start == starts[0] for start in starts[1:]
        )
        if not is_reproducible:
            self.add_problem(
                "start(problem) says something else for equal seeds: draw what is random from the "
                "keywords seed and group_seed"
            )
        elif not same_for_seed:
            self.notes.append(
                "episodes of a group begin differently, so that they share no prompt: draw from "
                "group_seed"
            )
        else:
            self.notes.append(
                f"the start {'does not depend' if same_for_group else 'depends'} on group_seed"
            )

    def check_closing(self, problem: Problem) -> None:
        """Close an environment without a start, and another one twice; neither may raise."""
        # A player closes environments whose start failed, and some again after a time limit.
        for case in ("without start", "a second time"):
            try:
                env = self.call("the constructor", partial(self.make, problem, 0, 0))
                if case == "a second time":
                    self.call("start(problem)", partial(env.start, problem))
                    self.call("close()", env.close)
            except Exception:  # the episodes report it
                return
            try:
                self.call("close()", env.close)
            except Exception as error:
                self.add_error(f"close() {case}", error)

    def add_error(self, where: str, error: Exception) -> None:
        """Record an error as a problem, with the line of the environment's file that raised it."""
        if not isinstance(error, Hung):
            self.add_raised(where.partition(" with ")[0] or "the constructor", where, error)

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Call a function or coroutine function with the time limit, and return its result.

        Raises:
            Hung: it exceeded the limit, which is recorded as a problem.
        """
        start_time, call = time.monotonic(), self._executor.begin(function)
        try:
            return call.result(self.limit_s)
        except (TimeoutError, CallTimeout) as error:
            if isinstance(error, TimeoutError) and call.done():  # raised by the environment
                raise
            self.add_problem(
                f"{name} did not return within {self.limit_s:g} s (rollout.turn_timeout)"
            )
            self.hung += 1
            raise Hung from None
        finally:
            duration_s = time.monotonic() - start_time
            self.seconds[name] = max(self.seconds.get(name, 0.0), duration_s)

    def figures(self) -> Iterator[str]:
        turns, rewards = self.turns, self.rewards
        yield f"{len(turns)} episodes played to their end, {sum(turns)} turns"
        if turns:
            yield f"turns of an episode: {min(turns)} to {max(turns)}; {self.endings[False]} were not done after {MAX_TURNS}"
            yield f"reward of an episode: {min(rewards):g} to {max(rewards):g}, mean {statistics.fmean(rewards):.3g}"
            yield from unpaid_lines(rewards)
        if self.images_per_turn:
            sizes = (
                ", ".join(f"{size} ({n} times)" for size, n in self.images.most_common(5)) or "none"
            )
            yield f"images a turn: {min(self.images_per_turn)} to {max(self.images_per_turn)}; sizes: {sizes}"
        if self.named:
            yield f"recorded: {', '.join(f'{name} ({n} times)' for name, n in self.named.most_common(20))}"
        for name, count in self.tool_calls.items():
            reason = f"; the last error: {count.last_error}" if not count.worked else ""
            yield f"{name}: {count.calls} calls, {count.worked} worked{reason}"
        yield from dict.fromkeys(self.notes)
        slowest = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in self.seconds.items())
        yield f"slowest calls: {slowest}"
        if slow := [
            name for name, seconds in self.seconds.items() if SLOW_S < seconds < self.limit_s
        ]:
            yield f"slow: {', '.join(slow)} took over {SLOW_S:g} s; a step of training waits for its slowest episode"
        if not turns:
            yield "no episode was played to its end; if it is made for rows of a data set, give some with --data FILE"


def _texts(message: Any) -> Iterator[str]:
    """Yield the texts of a message. Raises TypeError if it is malformed."""
    if (
        not isinstance(message, Mapping)
        or message.get("role") not in ROLES
        or "content" not in message
    ):
        raise TypeError(
            f"{shorten(repr(message))} is no message with a role ({', '.join(ROLES)}) and content"
        )
    content = message["content"]
    if not isinstance(content, (str, list, tuple)):
        raise TypeError(
            f"the content {shorten(repr(content))} is neither a text nor a list of parts"
        )
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            yield part["text"]
        elif kind not in ("image", "image_url") or kind not in part:
            raise TypeError(
                f"the content part {shorten(repr(part))} is neither a text nor an image"
            )


def main(arguments: argparse.Namespace) -> int:
    """Check an environment; return 0 if nothing breaks the contract, else 1.

    Raises:
        ConfigError: the environment or the data can't be loaded.
    """
    kwargs, form = parsed_overrides(
        arguments.overrides, "a keyword of the environment's constructor"
    )
    try:
        kwargs = with_texts(kwargs)
        env_class = load_env_class(arguments.env_class, {})
        scripts = scripts_of(arguments.answers)
        errors = list(keyword_problems(env_class, kwargs))
        errors = errors or [f"data.{name}: no such key here" for name in form.keys() - FORM_KEYS]
        if errors:
            raise ConfigError(*errors)
        problems = (
            [_PROBLEM]
            if arguments.data is None
            else problems_of(arguments.data, form, MAX_PROBLEMS)
        )
    except (CodeError, RowError) as error:
        raise ConfigError(str(error)) from error
    make = EnvMaker(arguments.env_class, kwargs, {}, _contains_answer, 1.0, 0.0)
    check = Check(
        name=arguments.env_class,
        file=inspect.getfile(env_class),
        make=make,
        limit_s=arguments.time_limit,
    )
    check.play(problems, scripts)
    return check.report(arguments.json)


def _contains_answer(problem: Problem, response: str) -> bool:
    """Return whether a response contains the problem's answer.

    Raises:
        ValueError: the problem has no answer.
    """
    if not problem.answer:
        raise ValueError(without_reference("the environment", problem))
    return problem.answer in response
