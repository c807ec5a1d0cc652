"""`python -m rlinf_vl check-env`: plays an environment with random and hostile answers, and says what breaks the contract."""

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

#: What a policy may say, by what it is; each is said in every turn of an episode.
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
RANDOM_EPISODES = 6  # for each problem
#: Share of the calls of tools whose arguments are of their types.
TYPED_SHARE = 0.75
MOST_PROBLEMS = 4
MOST_TURNS = 100
MOST_SECONDS = 120.0  # no episode begins after that
MOST_HUNG = 2  # nor after so many calls that hung
SLOW_S = 1.0
_PROBLEM = Problem("check-env", ({"role": "user", "content": [{"type": "text", "text": "What is 6 × 7?"}]},), "42")


class Hung(Exception):
    """A call took longer than it may."""


@dataclass
class ToolCount:
    """The calls of one tool: how many there were, how many worked, and the last error of those that did not."""

    calls: int = 0
    worked: int = 0
    last_error: str = ""

    def add(self, error: Any) -> None:
        self.calls += 1
        if error is None:
            self.worked += 1
        else:
            self.last_error = shorten(str(error), 200)


@dataclass
class Check:
    """What was found.

    Attributes:
        problems: what breaks the contract, by kind: a sentence, and in which calls.
        seconds: the longest call of each method.
        file: where the class is, for the lines of its errors.
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
        begun, rng = time.monotonic(), random.Random(0)
        for problem in problems:
            self.seeds(problem)
            self.closing(problem)
            answers: list[tuple[str, Callable[[str], str]]] = [
                (what, lambda _, said=said: said) for what, said in HOSTILE.items()
            ]
            answers.append(("the reference answer", lambda _, said=problem.answer: rf"\boxed{{{said}}}"))
            answers += [("words of its own messages", lambda heard: random_answer(heard, rng))] * RANDOM_EPISODES
            answers += [("calls of its own tools", lambda heard: random_call(heard, rng))] * (RANDOM_EPISODES // 2)
            for what, answer in answers:
                if self.hung >= MOST_HUNG or time.monotonic() - begun > MOST_SECONDS:
                    self.notes.append(f"stopped after {MOST_HUNG} calls that hung, or {MOST_SECONDS:.0f} s")
                    break
                self.episode(problem, what, answer, rng.getrandbits(63))
        if self.turns and not self.endings[True]:
            self.broken(
                f"no episode was done within {MOST_TURNS} turns: say done=True at last, or set rollout.max_turns"
            )

    def episode(self, problem: Problem, what: str, answer: Callable[[str], str], seed: int) -> None:
        """Until it is done; then one step more, and close."""
        try:
            env = self.call("the constructor", self.make, problem, seed, seed)
            try:
                heard = begun = self.begin(env, problem)
                total, turns, done = 0.0, 0, False
                while heard is not None and turns < MOST_TURNS and not done:
                    result = self.step(env, problem, answer(f"{begun}\n{heard}"), what)
                    if result is None:
                        return
                    total, turns, done = total + self.worth(result, problem), turns + 1, bool(result.done)
                    if not done:
                        heard = self.messages(result.messages, problem, f"step with {what}")
                if heard is None:
                    return
                self.turns.append(turns)
                self.rewards.append(total)
                self.endings[done] += 1
                if done:
                    self.after_the_end(env)
            finally:
                self.call("close()", env.close)
        except Hung:
            pass
        except Exception as error:
            self.failed("", error)

    def worth(self, result: StepResult, problem: Problem) -> float:
        """Its reward, and what a grader finds of an answer that is left to reward functions."""
        left = result.info.get("answer")
        if left is not None and not problem.answer:
            self.broken(without_reference(self.make.name_of(problem), problem), "", "no answer")
            return float(result.reward)
        return float(result.reward) + (0.0 if left is None else float(self.make.grade(problem, left)))

    def after_the_end(self, env: Env) -> None:
        try:
            late = self.call("step after done", env.step, "again")
        except Exception:  # which is a fine answer
            return
        if isinstance(late, StepResult) and not late.done:
            self.broken("step after done returned done=False: an episode that is over stays over, or raises")

    def begin(self, env: Env, problem: Problem) -> str | None:
        try:
            return self.messages(self.call("start(problem)", env.start, problem), problem, "start(problem)")
        except Exception as error:
            return self.failed("start(problem)", error)

    def step(self, env: Env, problem: Problem, said: str, what: str) -> StepResult | None:
        where = f"step with {what}"
        try:
            result = self.call("step(response)", env.step, said)
        except GradingError:
            return StepResult((), 0.0, True)  # no verdict: the player pays what a wrong answer gets
        except Exception as error:
            return self.failed(f"{where} ({shorten(repr(said), 40)})", error)
        if not isinstance(result, StepResult):
            returned = type(result).__name__
            self.broken(f"step returned {returned}: return StepResult(messages, reward, done, info)", where)
            return None
        if isinstance(result.reward, (str, bytes)) or not np.isreal(result.reward) or not np.isfinite(result.reward):
            self.broken(f"step gave the reward {result.reward!r}: it must be a finite number", where)
            return None
        if not isinstance(result.done, (bool, np.bool_)):
            self.broken(f"step gave done={result.done!r}: it must be True or False", where)
        try:
            facts = checked(result).info
            self.named.update(f"metric {name}" for name in facts["metrics"])
            self.named.update(f"reward part {name}" for name in facts["reward_parts"])
            for called in result.info.get("tool_calls", ()):
                if not isinstance(called, Mapping) or not {"name", "arguments"} <= called.keys():
                    raise TypeError(f"the tool call {called!r} is no mapping with 'name' and 'arguments'")
                count = self.tool_calls.setdefault(str(called["name"]) or "malformed calls", ToolCount())
                count.add(called.get("error"))
        except Exception as error:
            self.broken(f"step gave an info that can't be recorded: {error}", where)
        return result

    def messages(self, messages: Any, problem: Problem, where: str) -> str | None:
        """What they say, as text; None if they can't be shown to a policy."""
        try:
            listed: list[Message] = list(messages)
            texts = [text for message in listed for text in _texts(message)]
            if where.startswith("start") and not listed:
                raise ValueError("there are none: the policy has to be shown something")
            if listed and listed[-1]["role"] not in ("user", "tool"):
                raise ValueError(f"the last is of role {listed[-1]['role']!r}: the policy answers 'user' or 'tool'")
            shown = [decode(image) for image in observe(listed, problem).images]
        except Exception as error:
            return self.broken(f"messages can't be shown: {error}", where, f"messages {type(error)}")
        self.images_per_turn.append(len(shown))
        self.images.update(f"{image.width}×{image.height}" for image in shown)
        return "\n".join(texts)

    def seeds(self, problem: Problem) -> None:
        """What start says for equal seeds, while another episode goes on; for another seed; and for another group's."""
        starts = []
        for seed, group_seed in ((1, 2), (1, 2), (3, 2), (1, 4)):
            try:
                env = self.call("the constructor", self.make, problem, seed, group_seed)
                try:
                    messages = list(self.call("start(problem)", env.start, problem))
                    images = [image.hash for image in observe(messages, problem).images]
                    starts.append((images, [(m["role"], list(_texts(m))) for m in messages]))
                finally:
                    self.call("close()", env.close)
            except Exception:  # each is told by the episodes
                return
        same, other, further = (start == starts[0] for start in starts[1:])
        if not same:
            self.broken(
                "start(problem) says something else for equal seeds: draw what is random from the keywords seed and group_seed"
            )
        elif not other:
            self.notes.append(
                "episodes of a group begin differently, so that they share no prompt: draw from group_seed"
            )
        else:
            self.notes.append(f"the start {'does not depend' if further else 'depends'} on group_seed")

    def closing(self, problem: Problem) -> None:
        """Without a start, and twice."""
        for how in ("without start", "a second time"):
            try:
                env = self.call("the constructor", self.make, problem, 0, 0)
                if how == "a second time":
                    self.call("start(problem)", env.start, problem)
                    self.call("close()", env.close)
            except Exception:  # told by the episodes
                return
            try:
                self.call("close()", env.close)
            except Exception as error:
                self.failed(f"close() {how}", error)

    def broken(self, problem: str, where: str = "", kind: str = "") -> None:
        self.problems.setdefault(kind or problem, (problem, []))[1].append(where)

    def failed(self, where: str, error: Exception) -> None:
        if not isinstance(error, Hung):
            frames = traceback.extract_tb(error.__traceback__)
            at = next((frame for frame in reversed(frames) if frame.filename == self.file), frames[-1])
            raised = f"{type(error).__name__}: {shorten(str(error), 200)}"
            method = where.partition(" with ")[0] or "the constructor"
            place = f"({at.filename}, line {at.lineno})"
            self.broken(f"{method} raised {raised} {place}", where, f"{method} {type(error)} {place}")

    def call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """What it returns, a coroutine's result included. Raises Hung, which is a problem already."""
        begun, call = time.monotonic(), self.calls.begin(function, *arguments)
        try:
            return call.result(self.limit_s)
        except (TimeoutError, CallTimeout) as error:
            if isinstance(error, TimeoutError) and call.done():  # its own
                raise
            self.broken(f"{name} did not return within {self.limit_s:g} s (rollout.turn_timeout)")
            self.hung += 1
            raise Hung from None
        finally:
            self.seconds[name] = max(self.seconds.get(name, 0.0), time.monotonic() - begun)

    def told(self) -> Iterator[str]:
        """The report, line by line."""
        turns, rewards = self.turns, self.rewards
        yield f"{len(turns)} episodes played to their end, {sum(turns)} turns"
        if turns:
            yield f"turns of an episode: {min(turns)} to {max(turns)}; {self.endings[False]} were not done after {MOST_TURNS}"
            yield f"reward of an episode: {min(rewards):g} to {max(rewards):g}, mean {statistics.fmean(rewards):.3g}"
        if self.images_per_turn:
            sizes = ", ".join(f"{size} ({n} times)" for size, n in self.images.most_common(5)) or "none"
            yield f"images a turn: {min(self.images_per_turn)} to {max(self.images_per_turn)}; sizes: {sizes}"
        if self.named:
            yield f"recorded: {', '.join(f'{name} ({n} times)' for name, n in self.named.most_common(20))}"
        for name, count in self.tool_calls.items():
            why = f"; the last error: {count.last_error}" if not count.worked else ""
            yield f"{name}: {count.calls} calls, {count.worked} worked{why}"
        yield from dict.fromkeys(self.notes)
        slowest = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in self.seconds.items())
        yield f"slowest calls: {slowest}"
        if slow := [name for name, seconds in self.seconds.items() if SLOW_S < seconds < self.limit_s]:
            yield f"slow: {', '.join(slow)} took over {SLOW_S:g} s; a step of training waits for its slowest episode"
        if not turns:
            yield "no episode was played to its end; if it is made for rows of a data set, give some with --data FILE"
        for problem, calls in self.problems.values():
            often = f", {len(calls)} times" if len(calls) > 1 else ""
            yield f"BROKEN: {problem}" + (f" [{calls[0]}{often}]" if calls[0] + often else "")


def _texts(message: Any) -> Iterator[str]:
    """The texts of a message. Raises TypeError: it is none."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES or "content" not in message:
        raise TypeError(f"{shorten(repr(message))} is no message with a role ({', '.join(ROLES)}) and content")
    content = message["content"]
    if not isinstance(content, (str, list, tuple)):
        raise TypeError(f"the content {shorten(repr(content))} is neither a text nor a list of parts")
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            yield part["text"]
        elif kind not in ("image", "image_url") or kind not in part:
            raise TypeError(f"the content part {shorten(repr(part))} is neither a text nor an image")


def random_answer(heard: str, rng: random.Random) -> str:
    """A few of the words it was told, perhaps boxed, or as a call: sooner or later an action's or a tool's name is among them."""
    words = re.findall(r"\w+", heard) or ["go"]
    word, number = rng.choice(words), rng.randint(-9, 99)
    several = " ".join(rng.choices(words, k=rng.randint(1, 8)))
    return rng.choice([word, rf"\boxed{{{word}}}", several, random_call(heard, rng), str(number)])


def tool_schemas(text: str) -> list[dict[str, Any]]:
    """Return the functions whose JSON schemas stand in a text: name, description, parameters."""
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
    """Return a call of a tool with arguments of their types, those that are not required now and then."""
    parameters = function.get("parameters") or {}
    required = parameters.get("required", ())
    arguments = {
        name: typed_value(schema, rng)
        for name, schema in parameters.get("properties", {}).items()
        if name in required or rng.random() < 0.5
    }
    return f"<tool_call>\n{json.dumps({'name': function['name'], 'arguments': arguments})}\n</tool_call>"


def typed_value(schema: Mapping[str, Any], rng: random.Random) -> Any:
    """Return a random value of a JSON schema's type. Numbers rise within a list, as corners of a box do."""
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


def random_call(heard: str, rng: random.Random) -> str:
    """Return a call of one of the tools whose JSON schemas it was told: mostly with arguments of their types, else of any."""
    functions = tool_schemas(heard)
    if functions and rng.random() < TYPED_SHARE:
        return typed_call(rng.choice(functions), rng)
    words = re.findall(r"\w+", heard) or ["go"]
    tools, keys = (re.findall(form, heard) or words for form in (r'"name": ?"(\w+)"', r'"(\w+)": ?{"type"'))
    chosen = rng.sample(keys, min(len(keys), rng.randint(0, 4)))
    given = {key: rng.choice([rng.randint(-9, 99), rng.random(), rng.choice(words), [1, 2], None]) for key in chosen}
    return f"<tool_call>\n{json.dumps({'name': rng.choice(tools), 'arguments': given})}\n</tool_call>"


def main(arguments: argparse.Namespace) -> int:
    """0 if nothing breaks the contract, 1 if something does. Raises ConfigError: there is nothing to play."""
    kwargs, form = parsed_overrides(arguments.overrides, "a keyword of the environment's constructor")
    try:
        kwargs = with_texts(kwargs)
        found = load_env_class(arguments.env_class, {})
        problems = list(keyword_problems(found, kwargs))
        problems = problems or [f"data.{name}: no such key here" for name in form.keys() - FORM_KEYS]
        if problems:
            raise ConfigError(*problems)
        played = [_PROBLEM] if arguments.data is None else problems_of(arguments.data, form, MOST_PROBLEMS)
    except (CodeError, RowError) as error:
        raise ConfigError(str(error)) from error
    make = EnvMaker(arguments.env_class, kwargs, {}, _found, 1.0, 0.0)
    check = Check(make, inspect.getfile(found), arguments.time_limit)
    check.play(played)
    print("\n".join(check.told()))
    broken = f"{arguments.env_class} breaks the contract in {len(check.problems)} ways"
    print(broken if check.problems else f"{arguments.env_class} holds the contract")
    return 1 if check.problems else 0


#: Keys of `data` that say how a row is read.
FORM_KEYS = {one.name for one in fields(RowFormat)}


def parsed_overrides(overrides: Sequence[str], meaning: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return keywords, and the keys of `data.*`, of arguments `key=value`. Raises ConfigError: one is not of this form."""
    kwargs: dict[str, Any] = {}
    form: dict[str, Any] = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        try:
            given = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{text!r}: its value is not YAML: {error}") from error
        if not equals:
            raise ConfigError(f"{text!r}: write key=value, {meaning}")
        if name.startswith("data."):
            form[name.removeprefix("data.")] = given
        else:
            kwargs[name] = given
    return kwargs, form


def _found(problem: Problem, response: str) -> bool:
    """Return whether a response holds the answer. Raises ValueError: there is none."""
    if not problem.answer:
        raise ValueError(without_reference("the environment", problem))
    return problem.answer in response


def problems_of(path: str, form: dict[str, Any], most: int) -> list[Problem]:
    """Return the first rows of a data set, at most so many."""
    try:
        columns = open_source(path, "train").rows.column_names
        given = RowFormat(**form)
        if given.for_columns(columns).format == "rlinf":  # images may be left out here
            form.setdefault("image_keys", [name for name in given.image_keys if name in columns])
        dataset = ProblemDataset([path], "train", RowFormat(**form))
    except ValueError as error:
        raise ConfigError(f"--data: {error}") from error
    return [dataset[row] for row in range(min(most, len(dataset)))]
