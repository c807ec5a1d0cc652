"""`python -m rlinf_vl check-env`: plays an environment with random and hostile answers.

It reports what breaks the contract of environments (exit code 1), and what the episodes were like.
"""

import argparse
import inspect
import json
import math
import random
import re
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import yaml

from rlinf_vl.code import CodeError
from rlinf_vl.config import with_texts
from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.images import decode
from rlinf_vl.data.sources import open_source
from rlinf_vl.data.unusable import RowError, shorten
from rlinf_vl.envs import Env, EnvMaker, StepResult
from rlinf_vl.envs.registry import keyword_problems, load_env_class
from rlinf_vl.errors import ConfigError
from rlinf_vl.rewards import GradingError
from rlinf_vl.rollout.calls import Calls, CallTimeout
from rlinf_vl.rollout.observation import checked, observe
from rlinf_vl.rollout.row_check import without_reference
from rlinf_vl.types import ROLES, Message, Problem

#: Answers that a policy may give, by kind; each is given in every turn of one episode.
HOSTILE = {
    "nothing": "",
    "blanks": " \n\t ",
    "100,000 characters": "word " * 20_000,
    "control tokens": "<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>",
    "JSON that breaks off": '<tool_call>\n{"name": "x", "arguments": {"a": [1, ',
    "JSON of another form": '<tool_call>[1, null, {"name": 3, "arguments": "x"}]</tool_call>',
    "numbers that are none": r"\boxed{NaN} \boxed{1e999} \boxed{} \boxed{",
    "other scripts": "答案是四十二, الجواب ٤٢, ответ",
    "odd characters": "\x00\x1b[2J\u202e\ufffd\u0301",
    "braces and percent signs": "{} {0} {x!r} %s %(x)s ${a} {{",
}
RANDOM_EPISODES = 6  # per problem
#: Share of random tool calls whose arguments have the right types.
TYPED_SHARE = 0.75
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


@dataclass
class Check:
    """The check of one environment: its calls, and the findings of all episodes.

    Attributes:
        make: makes the environment.
        file: the file of its class, to report the lines of its errors.
        limit_s: limit on each call, in seconds.
        problems: what breaks the contract, by kind: a sentence, and the calls in which it did.
        hung: the number of calls that hung.
        notes: remarks that are no problems.
        turns, rewards: of each episode that was played to its end.
        endings: the number of episodes by whether they were done within `MAX_TURNS`.
        images: the number of images by size.
        images_per_turn: the number of images of each observation.
        named: how often each metric and reward part was recorded.
        tool_calls: calls of each tool that the environment reported.
        seconds: the duration of the longest call of each method.
    """

    make: EnvMaker
    file: str
    limit_s: float
    problems: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    hung: int = 0
    notes: list[str] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    endings: Counter[bool] = field(default_factory=Counter)
    images: Counter[str] = field(default_factory=Counter)
    images_per_turn: list[int] = field(default_factory=list)
    named: Counter[str] = field(default_factory=Counter)
    tool_calls: dict[str, ToolCount] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @cached_property
    def calls(self) -> Calls:
        return Calls(self.limit_s)

    def play(self, problems: Sequence[Problem]) -> None:
        """Play all episodes of each problem."""
        start_time, rng = time.monotonic(), random.Random(0)
        for problem in problems:
            self.check_seeds(problem)
            self.check_closing(problem)
            # (kind, function from an observation's text to an answer)
            policies: list[tuple[str, Callable[[str], str]]] = [
                (kind, lambda _, answer=answer: answer) for kind, answer in HOSTILE.items()
            ]
            reference = rf"\boxed{{{problem.answer}}}"
            policies.append(("the reference answer", lambda _, answer=reference: answer))
            for _ in range(RANDOM_EPISODES):
                policies.append(
                    ("words of its own messages", lambda text: random_answer(text, rng))
                )
            for _ in range(RANDOM_EPISODES // 2):
                policies.append(("calls of its own tools", lambda text: random_call(text, rng)))
            for kind, policy in policies:
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
            env = self.call("the constructor", self.make, problem, seed, seed)
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
            result = self.call("step after done", env.step, "again")
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
                self.call("start(problem)", env.start, problem), problem, "start(problem)"
            )
        except Exception as error:
            return self.add_error("start(problem)", error)

    def step(self, env: Env, problem: Problem, answer: str, kind: str) -> StepResult | None:
        """Take a step and check its result; return None if the episode can't go on."""
        where = f"step with {kind}"
        try:
            result = self.call("step(response)", env.step, answer)
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
            info = checked(result).info
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
            images = [decode(image) for image in observe(message_list, problem).images]
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
        for seed, group_seed in ((1, 2), (1, 2), (3, 2), (1, 4)):
            try:
                env = self.call("the constructor", self.make, problem, seed, group_seed)
                try:
                    messages = list(self.call("start(problem)", env.start, problem))
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
        for case in ("without start", "a second time"):
            try:
                env = self.call("the constructor", self.make, problem, 0, 0)
                if case == "a second time":
                    self.call("start(problem)", env.start, problem)
                    self.call("close()", env.close)
            except Exception:  # the episodes report it
                return
            try:
                self.call("close()", env.close)
            except Exception as error:
                self.add_error(f"close() {case}", error)

    def add_problem(self, problem: str, where: str = "", kind: str = "") -> None:
        """Record what breaks the contract, once per kind (by default the sentence itself)."""
        self.problems.setdefault(kind or problem, (problem, []))[1].append(where)

    def add_error(self, where: str, error: Exception) -> None:
        """Record an error as a problem, with the line of the environment's file that raised it."""
        if not isinstance(error, Hung):
            frames = traceback.extract_tb(error.__traceback__)
            frame = next(
                (frame for frame in reversed(frames) if frame.filename == self.file), frames[-1]
            )
            raised = f"{type(error).__name__}: {shorten(str(error), 200)}"
            method = where.partition(" with ")[0] or "the constructor"
            line = f"({frame.filename}, line {frame.lineno})"
            self.add_problem(
                f"{method} raised {raised} {line}", where, f"{method} {type(error)} {line}"
            )

    def call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function or coroutine function with the time limit, and return its result.

        Raises:
            Hung: it exceeded the limit, which is recorded as a problem.
        """
        start_time, call = time.monotonic(), self.calls.begin(function, *arguments)
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

    def report(self) -> Iterator[str]:
        """Yield the lines of the report."""
        turns, rewards = self.turns, self.rewards
        yield f"{len(turns)} episodes played to their end, {sum(turns)} turns"
        if turns:
            yield f"turns of an episode: {min(turns)} to {max(turns)}; {self.endings[False]} were not done after {MAX_TURNS}"
            yield f"reward of an episode: {min(rewards):g} to {max(rewards):g}, mean {statistics.fmean(rewards):.3g}"
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
        for problem, calls in self.problems.values():
            repeats = f", {len(calls)} times" if len(calls) > 1 else ""
            yield f"BROKEN: {problem}" + (f" [{calls[0]}{repeats}]" if calls[0] + repeats else "")


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


def random_answer(text: str, rng: random.Random) -> str:
    """Return a few words of an observation's text, perhaps boxed, or a tool call, or a number.

    Sooner or later these are the name of an action or a tool.
    """
    words = re.findall(r"\w+", text) or ["go"]
    word, number = rng.choice(words), rng.randint(-9, 99)
    several = " ".join(rng.choices(words, k=rng.randint(1, 8)))
    return rng.choice([word, rf"\boxed{{{word}}}", several, random_call(text, rng), str(number)])


def tool_schemas(text: str) -> list[dict[str, Any]]:
    """Return the functions whose JSON schemas a text contains: name, description, parameters."""
    functions: list[dict[str, Any]] = []
    for start in re.finditer(r'\{"type": ?"function"', text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, start.start())
        except ValueError:
            continue
        function = schema.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            functions.append(function)
    return functions


def typed_call(function: Mapping[str, Any], rng: random.Random) -> str:
    """Return a tool call with arguments of the right types, optional ones in half the calls."""
    parameters = function.get("parameters") or {}
    required = parameters.get("required", ())
    arguments = {
        name: typed_value(schema, rng)
        for name, schema in parameters.get("properties", {}).items()
        if name in required or rng.random() < 0.5
    }
    return f"<tool_call>\n{json.dumps({'name': function['name'], 'arguments': arguments})}\n</tool_call>"


def typed_value(schema: Mapping[str, Any], rng: random.Random) -> Any:
    """Return a random value of a JSON schema's type.

    Numbers in a list are sorted, as the corners of a box must be.
    """
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return typed_value(rng.choice(choices), rng)
    kind = schema.get("type", "string")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    low, high = schema.get("minimum", 0), schema.get("maximum", rng.choice([1, 10, 100]))
    match kind:
        case "integer":
            return rng.randint(math.ceil(low), max(math.ceil(low), math.floor(high)))
        case "number":
            return round(rng.uniform(low, max(low, high)), 3)
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case "array":
            length = rng.choice([1, 2, 4, 4])
            length = min(max(length, schema.get("minItems", 0)), schema.get("maxItems", length))
            if isinstance(items := schema.get("prefixItems"), list):
                return [typed_value(item, rng) for item in items]
            item_schema = schema.get("items") or {"type": "integer"}
            values = [typed_value(item_schema, rng) for _ in range(length)]
            is_numeric = item_schema.get("type") in ("integer", "number")
            return sorted(values) if is_numeric else values
        case "object":
            properties = schema.get("properties", {})
            return {name: typed_value(inner, rng) for name, inner in properties.items()}
    return rng.choice(["x", "1 + 2", "left", "0", "the picture"])


def random_call(text: str, rng: random.Random) -> str:
    """Return a call of a tool whose JSON schema is in an observation's text.

    Mostly the arguments have the right types; otherwise names and arguments are random.
    """
    functions = tool_schemas(text)
    if functions and rng.random() < TYPED_SHARE:
        return typed_call(rng.choice(functions), rng)
    words = re.findall(r"\w+", text) or ["go"]
    tools = re.findall(r'"name": ?"(\w+)"', text) or words
    keys = re.findall(r'"(\w+)": ?{"type"', text) or words
    arguments: dict[str, Any] = {}
    for key in rng.sample(keys, min(len(keys), rng.randint(0, 4))):
        arguments[key] = rng.choice(
            [rng.randint(-9, 99), rng.random(), rng.choice(words), [1, 2], None]
        )
    return f"<tool_call>\n{json.dumps({'name': rng.choice(tools), 'arguments': arguments})}\n</tool_call>"


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
    check = Check(make, inspect.getfile(env_class), arguments.time_limit)
    check.play(problems)
    print("\n".join(check.report()))
    verdict = f"{arguments.env_class} breaks the contract in {len(check.problems)} ways"
    print(verdict if check.problems else f"{arguments.env_class} holds the contract")
    return 1 if check.problems else 0


#: Keys of `data` that define how a row is read.
FORM_KEYS = {key.name for key in fields(RowFormat)}


def parsed_overrides(
    overrides: Sequence[str], meaning: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse arguments `key=value`.

    Args:
        meaning: says in an error what a key is.

    Returns:
        (keywords, the keys of `data.*` without "data.").

    Raises:
        ConfigError: an argument has another form.
    """
    kwargs: dict[str, Any] = {}
    form: dict[str, Any] = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        try:
            parsed_value = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{text!r}: its value is not YAML: {error}") from error
        if not equals:
            raise ConfigError(f"{text!r}: write key=value, {meaning}")
        if name.startswith("data."):
            form[name.removeprefix("data.")] = parsed_value
        else:
            kwargs[name] = parsed_value
    return kwargs, form


def _contains_answer(problem: Problem, response: str) -> bool:
    """Return whether a response contains the problem's answer.

    Raises:
        ValueError: the problem has no answer.
    """
    if not problem.answer:
        raise ValueError(without_reference("the environment", problem))
    return problem.answer in response


def problems_of(path: str, form: dict[str, Any], limit: int) -> list[Problem]:
    """Return the first `limit` rows of a data set."""
    try:
        columns = open_source(path, "train").rows.column_names
        row_format = RowFormat(**form)
        if row_format.for_columns(columns).format == "rlinf":
            # Unlike a run, a check reads rows without images.
            form.setdefault(
                "image_keys", [name for name in row_format.image_keys if name in columns]
            )
        dataset = ProblemDataset([path], "train", RowFormat(**form))
    except ValueError as error:
        raise ConfigError(f"--data: {error}") from error
    return [dataset[row] for row in range(min(limit, len(dataset)))]
