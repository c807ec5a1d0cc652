"""Environments with tools. A tool is a public method of a `ToolEnv`'s subclass, with type hints and a docstring in Google's form.

The policy is told of them in the system message, and calls them in the form that Hermes and Qwen models know:

    <tool_call>
    {"name": "multiply", "arguments": {"a": 3, "b": 6}}
    </tool_call>

A response with calls is answered with their results, in order, in one message. A response without any ends the question: it is
graded. Whatever is wrong with a call (broken JSON, an unclosed tag, an unknown tool, missing, unknown or mistyped arguments, an
exception of the tool) is said in its `<tool_response>`; nothing that a policy writes raises.
"""

import inspect
import json
import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from PIL import Image

from rlinf_vl.envs.base import STRICT_JSON, Grade, StepResult
from rlinf_vl.types import Message, Problem

OPEN, CLOSE = "<tool_call>", "</tool_call>"
#: Longest error that is shown whole, in characters: it may quote what the policy wrote.
MAX_ERROR = 300

Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the policy wrote it: what its JSON says, or why it can't be read."""

    value: Any
    error: str | None


@dataclass(frozen=True, slots=True)
class Tool:
    """What the policy is told of a method, and the check of its arguments."""

    schema: dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
    arguments: Draft202012Validator


class ToolEnv:
    """Subclass it; each public method becomes a tool, named as the method is.

    A tool returns text, an image (PIL), a list that holds images, or anything that JSON can say. Overriding `answer` changes how
    an episode ends; the numbers in `metrics` are recorded with every step.

    Attributes:
        tools_prompt: what the system message says of the tools; `{tools}` stands for their schemas, one a line. "" says nothing.
        tool_response: how a result is shown; `{result}` stands for it.
        max_tool_calls: calls of one response that are run; further ones are refused.
        problem: the episode's.
        metrics: name → number; `tool_calls` and `tool_errors` count.
    """

    tools_prompt = """\
# Tools

You may call one or more functions to assist with the user query. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
    tool_response = "<tool_response>\n{result}\n</tool_response>"
    max_tool_calls = 8
    _tools: ClassVar[dict[str, Tool]] = {}

    def __init_subclass__(cls) -> None:
        """Find the tools. Raises ValueError: a public method can be none, for want of type hints or of a docstring."""
        super().__init_subclass__()
        methods = inspect.getmembers(cls, callable)
        cls._tools = {name: _tool(cls, name) for name, _ in methods if name[0] != "_" and not hasattr(ToolEnv, name)}

    def __init__(
        self,
        *,
        grade: Grade,
        reward_max: float,
        reward_min: float,
        tools_prompt: str | None = None,
        tool_response: str | None = None,
        max_tool_calls: int | None = None,
    ) -> None:
        """Settings that are None are the class's.

        Raises:
            ValueError: a setting can't be.
        """
        self.grade = grade
        self.reward_max, self.reward_min = reward_max, reward_min
        if tools_prompt is not None:
            self.tools_prompt = tools_prompt.strip()
        if tool_response is not None:
            self.tool_response = tool_response.strip("\n")
        if max_tool_calls is not None:
            self.max_tool_calls = max_tool_calls
        if self.tool_response.count("{result}") != 1:
            raise ValueError(f"tool_response: {self.tool_response!r} must hold {{result}} once")
        if self.max_tool_calls < 1:
            raise ValueError(f"max_tool_calls: {self.max_tool_calls} must be at least 1")
        self.problem = Problem("", (), "")
        self.metrics: dict[str, float] = {"tool_calls": 0.0, "tool_errors": 0.0}
        self._paid = 0.0

    def start(self, problem: Problem) -> list[Message]:
        """The problem's messages, with the tools in the system message."""
        self.problem = problem
        messages = list(problem.messages)
        schemas = "\n".join(json.dumps(tool.schema, ensure_ascii=False) for tool in self._tools.values())
        said = self.tools_prompt.replace("{tools}", schemas)
        if not said:
            return messages
        parts: list[Part] = []
        if messages and messages[0]["role"] == "system":
            content = messages.pop(0)["content"]
            parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
        _add_text(parts, "\n\n" + said if parts else said)
        return [{"role": "system", "content": parts}, *messages]

    def step(self, response: str) -> StepResult:
        """Run the calls of a response, or take it for the answer if it has none."""
        calls = parse_tool_calls(response)
        if not calls:
            result = self.answer(response)
            return replace(result, info={"metrics": dict(self.metrics), **result.info})
        parts: list[Part] = []
        facts: list[dict[str, Any]] = []
        for call in calls[: self.max_tool_calls]:
            found, fact = self._run(call)
            self._show(parts, found)
            facts.append(fact)
        if (left := len(calls) - self.max_tool_calls) > 0:
            error = f"{left} further calls were not run: at most {self.max_tool_calls} a turn"
            self._show(parts, [{"type": "text", "text": f"error: {error}"}])
            facts.append({"name": "", "arguments": {}, "error": error})
        self.metrics["tool_calls"] += len(calls)
        self.metrics["tool_errors"] += sum("error" in fact for fact in facts) + max(0, left - 1)
        info = {"tool_calls": facts, "metrics": dict(self.metrics)}
        return StepResult(({"role": "user", "content": parts},), self.pay(self.reward_min), False, info)

    def answer(self, response: str) -> StepResult:
        """What a response without calls is worth: here what the run's reward functions say; and it ends the episode."""
        return StepResult((), self.pay(0.0), True, {"answer": response})

    def pay(self, total: float) -> float:
        """The reward of this step that makes the episode worth `total` so far. A step with calls makes it worth `reward_min`, so
        that an episode which is cut short is worth no more than a wrong answer."""
        reward, self._paid = total - self._paid, total
        return reward

    def close(self) -> None:
        pass

    def _run(self, call: ToolCall) -> tuple[list[Part], dict[str, Any]]:
        """What a call returns, or what is wrong with it, as message parts; and what is recorded of it."""
        value = call.value if isinstance(call.value, dict) else {}
        name, arguments = value.get("name", ""), value.get("arguments", {})
        fact = {"name": name if isinstance(name, str) else "", "arguments": arguments}
        try:
            if call.error is not None:
                raise _CallError(call.error)
            if not isinstance(name, str) or not value.keys() <= {"name", "arguments"} or "name" not in value:
                raise _CallError('a call is an object {"name": …, "arguments": {…}} and nothing else')
            if name not in self._tools:
                raise _CallError(f"no tool {name!r}; there are {', '.join(self._tools)}")
            if problem := best_match(self._tools[name].arguments.iter_errors(arguments)):
                place = "".join(f"[{key!r}]" if isinstance(key, int) else f".{key}" for key in problem.absolute_path)
                raise _CallError(f"arguments{place}: {problem.message}")
            return _parts(getattr(self, name)(**arguments)), fact
        except Exception as error:  # the policy learns of it, also of what the tool raised
            text = str(error) if isinstance(error, _CallError) else f"{type(error).__name__}: {error}"
            if len(text) > MAX_ERROR:
                text = f"{text[: MAX_ERROR // 2]} … {text[-MAX_ERROR // 2 :]}"
            return [{"type": "text", "text": f"error: {text}"}], fact | {"error": text}

    def _show(self, parts: list[Part], result: list[Part]) -> None:
        """Append a result as `tool_response` has it."""
        before, after = self.tool_response.split("{result}")
        _add_text(parts, ("\n" if parts else "") + before)
        for part in result:
            if part["type"] == "text":
                _add_text(parts, part["text"])
            else:
                parts.append(part)
        _add_text(parts, after)


class _CallError(ValueError):
    """What is wrong with a call."""


def parse_tool_calls(response: str) -> list[ToolCall]:
    """The calls of a response, in order, broken ones among them. What stands before `</think>` is thought, not said."""
    text = response.rpartition("</think>")[2]
    calls: list[ToolCall] = []
    position = text.find(OPEN)
    while position >= 0:
        begin = end = _SPACE.match(text, position + len(OPEN)).end()  # pyright: ignore[reportOptionalMemberAccess]
        value, error = None, None
        try:
            value, end = STRICT_JSON.raw_decode(text, begin)
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
        except json.JSONDecodeError as e:
            error = f"not valid JSON: {e.msg} at character {e.pos - begin}"
        except (ValueError, RecursionError) as e:
            error = f"not valid JSON: {e}"
        tag = _TAG.search(text, end)
        if tag is None or tag[0] == OPEN:
            error = f"{OPEN} is not closed by {CLOSE}"
        elif error is None and text[end : tag.start()].strip():
            error = f"not valid JSON: there is more behind the object, at character {end - begin}"
        calls.append(ToolCall(None if error else value, error))
        position = text.find(OPEN, tag.start() if tag else len(text))
    return calls


_SPACE, _TAG = re.compile(r"\s*"), re.compile(f"{OPEN}|{CLOSE}")


def _tool(cls: type, name: str) -> Tool:
    """Raises ValueError: the method can be no tool."""
    from transformers.utils.chat_template_utils import get_json_schema  # imports torch

    method = getattr(cls, name)
    try:
        if inspect.iscoroutinefunction(method):
            raise ValueError("it is asynchronous")
        schema = get_json_schema(method)
    except Exception as error:
        raise ValueError(
            f"{cls.__name__}.{name} is public, and can be no tool: {error}. Give every argument a type hint and a line under "
            f"`Args:` of the docstring; or call the method _{name} if it is no tool"
        ) from error
    schema["function"].pop("return", None)  # nothing for the policy to write
    parameters = schema["function"]["parameters"] | {"additionalProperties": False}
    return Tool(schema, Draft202012Validator(_nullable(parameters)))


def _nullable(schema: Any) -> Any:
    """The schema with OpenAPI's `nullable` as JSON Schema says it."""
    if isinstance(schema, list):
        return [_nullable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _nullable(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [inner, {"type": "null"}]} if schema.get("nullable") is True else inner


def _parts(result: Any) -> list[Part]:
    """What a tool returned, as message parts."""
    shown = isinstance(result, (list, tuple)) and any(isinstance(item, Image.Image) for item in result)
    return [
        {"type": "image", "image": item}
        if isinstance(item, Image.Image)
        else {
            "type": "text",
            "text": item if isinstance(item, str) else json.dumps(item, ensure_ascii=False, default=str),
        }
        for item in (result if shown else [result])
    ]


def _add_text(parts: list[Part], text: str) -> None:
    """Append a text, to the last part if that is one."""
    if parts and parts[-1]["type"] == "text":
        parts[-1] = {"type": "text", "text": parts[-1]["text"] + text}
    elif text:
        parts.append({"type": "text", "text": text})
