"""Environments with tools. A tool is a public method of a `ToolEnv`'s subclass, with type hints and
a docstring in Google's form.

The system message describes them, and the policy calls them in the form of its checkpoint
(`call_forms`), which for Hermes and Qwen3 is

    <tool_call>
    {"name": "multiply", "arguments": {"a": 3, "b": 6}}
    </tool_call>

A response with calls is answered with their results, in order, in one message. A response without
calls ends the episode and is graded. Errors of a call (broken JSON, an unclosed tag, an unknown
tool, missing, unknown or mistyped arguments, an exception of the tool) are reported in its
`<tool_response>`; no text of a policy raises.
"""

import inspect
import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from PIL import Image

from rlinf_vl.envs.base import Grade, StepResult
from rlinf_vl.envs.call_forms import JSON_CALLS, CallForm, ReplyForm, WrittenCall, count_unread
from rlinf_vl.envs.call_forms.tagged import CLOSE, OPEN
from rlinf_vl.types import READ_CALLS, UNREAD_CALLS, Message, Problem

__all__ = ["CLOSE", "OPEN", "Tool", "ToolEnv", "ToolFailure"]

#: Length in characters up to which an error is shown uncut; it may quote the policy's text.
MAX_ERROR = 300

Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """The description of a method for the policy, and the check of its arguments."""

    # {"type": "function", "function": {"name", "description", "parameters"}}
    schema: dict[str, Any]
    arguments: Draft202012Validator


class ToolEnv:
    """A base class whose subclasses' public methods are tools, under the names of the methods.

    A tool returns text, an image (PIL), a list that holds images, or any JSON value. Overriding
    `answer` changes how an episode ends. The numbers in `metrics` are recorded with every step.

    Attributes:
        reply_form: how the checkpoint writes replies; the run sets it before `start`.
        tools_prompt: description of the tools in the system message; `{tools}` stands for their
            schemas, one a line, and `{call}` for how to write a call. "": none. Without `{call}`
            the prompt itself says how, and calls are read as JSON in <tool_call>.
        tool_response: form of a result in a message; `{result}` stands for the result.
        max_tool_calls: number of calls of one response that are run; further calls are refused.
        problem: the problem of the episode.
        metrics: name → number; `tool_calls` and `tool_errors` count calls and errors, and
            `READ_CALLS` and `UNREAD_CALLS` those whose form could be read and not.
    """

    reply_form = ReplyForm()
    tools_prompt = """\
# Tools

You may call one or more functions to assist with the user query. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

{call}"""
    tool_response = "<tool_response>\n{result}\n</tool_response>"
    max_tool_calls = 8
    _tools: ClassVar[dict[str, Tool]] = {}

    def __init_subclass__(cls) -> None:
        """Collect the tools.

        Raises ValueError if a public method has no type hints or no docstring, and so can be no
        tool.
        """
        super().__init_subclass__()
        methods = inspect.getmembers(cls, callable)
        cls._tools = {
            name: _tool(cls, name)
            for name, _ in methods
            if name[0] != "_" and not hasattr(ToolEnv, name)
        }

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
        """Override the class's settings with those that are not None.

        Raises:
            ValueError: a setting is invalid.
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
        self.metrics: dict[str, float] = dict.fromkeys(
            ("tool_calls", "tool_errors", READ_CALLS, UNREAD_CALLS), 0.0
        )
        self._reward_so_far = 0.0

    def start(self, problem: Problem) -> list[Message]:
        """Return the problem's messages, with the tools in the system message."""
        self.problem = problem
        messages = list(problem.messages)
        schemas = "\n".join(
            json.dumps(tool.schema, ensure_ascii=False) for tool in self._tools.values()
        )
        tools_text = self.tools_prompt
        if "{call}" in tools_text:
            tools_text = tools_text.replace("{call}", self.call_form.description)
        tools_text = tools_text.replace("{tools}", schemas)
        if not tools_text:
            return messages
        parts: list[Part] = []
        if messages and messages[0]["role"] == "system":
            content = messages.pop(0)["content"]
            parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
        _add_text(parts, "\n\n" + tools_text if parts else tools_text)
        return [{"role": "system", "content": parts}, *messages]

    def step(self, response: str) -> StepResult:
        """Run the calls of a response, or take it for the answer if it has none."""
        reply = response.rpartition(self.reply_form.thought_end)[2]
        calls = self.call_form.read(reply, [tool.schema for tool in self._tools.values()])
        self.metrics[READ_CALLS] += sum(call.named is not None for call in calls)
        self.metrics[UNREAD_CALLS] += count_unread(reply, calls)
        if not calls:
            result = self.answer(response)
            # What the subclass reports counts before the totals here.
            reported = result.info.get("metrics", {})
            return replace(result, info={**result.info, "metrics": {**self.metrics, **reported}})
        parts: list[Part] = []
        facts: list[dict[str, Any]] = []
        # A response with hundreds of calls would fill the context with results.
        for call in calls[: self.max_tool_calls]:
            result_parts, fact = self._run(call)
            self._append_result(parts, result_parts)
            facts.append(fact)
        if (refused := len(calls) - self.max_tool_calls) > 0:
            error = f"{refused} further calls were not run: at most {self.max_tool_calls} a turn"
            self._append_result(parts, [{"type": "text", "text": f"error: {error}"}])
            facts.append({"name": "", "arguments": {}, "error": error})
        self.metrics["tool_calls"] += len(calls)
        # All refused calls are one fact, so the others are added here.
        self.metrics["tool_errors"] += sum("error" in fact for fact in facts) + max(0, refused - 1)
        info = {"tool_calls": facts, "metrics": dict(self.metrics)}
        return StepResult(
            ({"role": "user", "content": parts},), self.pay(self.reward_min), False, info
        )

    @property
    def call_form(self) -> CallForm:
        """The form in which calls are read. Raises ValueError: the checkpoint's is not known."""
        # A prompt that describes a form of its own was written for the one that is always read.
        if self.tools_prompt and "{call}" not in self.tools_prompt:
            return JSON_CALLS
        return self.reply_form.require_calls()

    def answer(self, response: str) -> StepResult:
        """End the episode with a response without calls, and leave its reward to the run's reward
        functions."""
        return StepResult((), self.pay(0.0), True, {"answer": response})

    def pay(self, total: float) -> float:
        """Return the reward of this step that brings the episode's sum of rewards to `total`.

        A step with calls brings it to `reward_min`, so that an episode which is cut short earns no
        more than a wrong answer.
        """
        reward = total - self._reward_so_far
        self._reward_so_far = total
        return reward

    def close(self) -> None:
        pass

    def _run(self, call: WrittenCall) -> tuple[list[Part], dict[str, Any]]:
        """Run a call. Return its result or error as message parts, and the fact to record about
        it."""
        value = call.value if isinstance(call.value, dict) else {}
        name, arguments = value.get("name", ""), value.get("arguments", {})
        fact = {"name": name if isinstance(name, str) else "", "arguments": arguments}
        try:
            if call.error is not None:
                raise _CallError(call.error)
            if (
                not isinstance(name, str)
                or not value.keys() <= {"name", "arguments"}
                or "name" not in value
            ):
                raise _CallError(
                    'a call is an object {"name": …, "arguments": {…}} and nothing else'
                )
            if name not in self._tools:
                raise _CallError(f"no tool {name!r}; there are {', '.join(self._tools)}")
            if problem := best_match(self._tools[name].arguments.iter_errors(arguments)):
                place = "".join(
                    f"[{key!r}]" if isinstance(key, int) else f".{key}"
                    for key in problem.absolute_path
                )
                raise _CallError(f"arguments{place}: {problem.message}")
            return _parts(getattr(self, name)(**arguments)), fact
        except ToolFailure:
            raise
        except (
            Exception
        ) as error:  # an error is the policy's to read, also one that the tool raised
            text = (
                str(error) if isinstance(error, _CallError) else f"{type(error).__name__}: {error}"
            )
            # Both ends stay: some tools name the cause first, some last.
            if len(text) > MAX_ERROR:
                text = f"{text[: MAX_ERROR // 2]} … {text[-MAX_ERROR // 2 :]}"
            return [{"type": "text", "text": f"error: {text}"}], fact | {"error": text}

    def _append_result(self, parts: list[Part], result: list[Part]) -> None:
        """Append a result in the form of `tool_response`."""
        prefix, suffix = self.tool_response.split("{result}")
        _add_text(parts, ("\n" if parts else "") + prefix)
        for part in result:
            if part["type"] == "text":
                _add_text(parts, part["text"])
            else:
                parts.append(part)
        _add_text(parts, suffix)


class ToolFailure(Exception):
    """A failure of the environment itself, which a tool raises to end the episode with an error."""


class _CallError(ValueError):
    """An error in the form of a call, told to the policy without the name of an exception."""


def _tool(cls: type, name: str) -> Tool:
    """Return the tool of a method. Raises ValueError if the method can be no tool."""
    from transformers.utils.chat_template_utils import get_json_schema  # imports torch

    method = getattr(cls, name)
    try:
        if inspect.iscoroutinefunction(method):
            raise ValueError("it is asynchronous")
        schema = get_json_schema(method)
    except Exception as error:
        raise ValueError(
            f"{cls.__name__}.{name} is public, and can be no tool: {error}. Give every argument a "
            f"type hint and a line under `Args:` of the docstring; or call the method _{name} if "
            "it is no tool"
        ) from error
    schema["function"].pop("return", None)  # nothing for the policy to write
    # An unknown argument must fail the check, with a message that names it, not the Python call.
    parameters = schema["function"]["parameters"] | {"additionalProperties": False}
    return Tool(schema, Draft202012Validator(_nullable(parameters)))


def _nullable(schema: Any) -> Any:
    """Return the schema with OpenAPI's `nullable` in the form of JSON Schema."""
    if isinstance(schema, list):
        return [_nullable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _nullable(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [inner, {"type": "null"}]} if schema.get("nullable") is True else inner


def _parts(result: Any) -> list[Part]:
    """Return a tool's result as message parts."""
    # A list without images is data, which the policy reads as JSON.
    has_images = isinstance(result, (list, tuple)) and any(
        isinstance(item, Image.Image) for item in result
    )
    return [_part(item) for item in (result if has_images else [result])]


def _part(item: Any) -> Part:
    if isinstance(item, Image.Image):
        return {"type": "image", "image": item}
    text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False, default=str)
    return {"type": "text", "text": text}


def _add_text(parts: list[Part], text: str) -> None:
    """Append a text, to the last part if that is one."""
    if parts and parts[-1]["type"] == "text":
        parts[-1] = {"type": "text", "text": parts[-1]["text"] + text}
    elif text:
        parts.append({"type": "text", "text": text})
