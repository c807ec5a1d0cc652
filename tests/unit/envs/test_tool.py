"""Environments with tools: what the policy is told, how calls are read, and that nothing it writes raises."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rlinf_vl.envs import EnvMaker, StepResult
from rlinf_vl.envs.call_forms import FORMS, JSON_CALLS, ReplyForm
from rlinf_vl.envs.tool import ToolEnv
from rlinf_vl.types import Problem

PROBLEM = Problem("p:0", ({"role": "user", "content": [{"type": "text", "text": "6 × 7?"}]},), "42")


class Desk(ToolEnv):
    """What the tests call."""

    def multiply(self, a: int, b: int = 2, digits: int | None = None) -> int:
        """Multiply two numbers.

        Args:
            a: The first
            b: The second
            digits: How many digits are kept
        """
        return a * b if digits is None else a * b % 10**digits

    def look(self, at: list[float]) -> Image.Image:
        """Show a picture.

        Args:
            at: Where
        """
        return Image.new("RGB", (len(at), 1))

    def find(self, what: str):
        """Find things.

        Args:
            what: One of those there are (choices: ["text", "dict", "both", "nothing"])
        """
        picture = Image.new("RGB", (5, 5))
        return {"text": "<b>é", "dict": {"é": 1.5}, "both": ["there", picture, 2], "nothing": None}[
            what
        ]

    def fail(self) -> str:
        """Fail."""
        raise KeyError("no fuel")

    def _no_tool(self):
        pass


def desk(**settings) -> Desk:
    env = Desk(
        grade=lambda response, answer: answer in response,
        reward_max=1.0,
        reward_min=-1.0,
        **settings,
    )
    env.start(PROBLEM)
    return env


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answered(response: str, env: Desk | None = None) -> list[dict]:
    """The parts of what the environment says to a response with calls."""
    result = (env or desk()).step(response)
    assert not result.done
    (message,) = result.messages
    assert message["role"] == "user"
    return message["content"]


def text(response: str, env: Desk | None = None) -> str:
    (part,) = answered(response, env)
    return part["text"]


def test_tools_are_the_public_methods_and_stand_in_the_system_message():
    system, *others = desk().start(PROBLEM)
    assert others == list(PROBLEM.messages)
    said = system["content"][0]["text"]
    schemas = [
        json.loads(line)["function"] for line in said.splitlines() if line.startswith('{"type"')
    ]
    assert [schema["name"] for schema in schemas] == ["fail", "find", "look", "multiply"]
    parameters = schemas[-1]["parameters"]
    assert parameters["required"] == ["a"]
    assert parameters["properties"]["a"] == {"type": "integer", "description": "The first"}
    assert schemas[1]["parameters"]["properties"]["what"]["enum"] == [
        "text",
        "dict",
        "both",
        "nothing",
    ]


def test_a_system_message_of_the_problem_comes_first_and_no_prompt_adds_none():
    problem = Problem("p", ({"role": "system", "content": "Be brief."}, *PROBLEM.messages), "42")
    system, *others = desk(tools_prompt="Tools:\n{tools}").start(problem)
    assert system["content"][0]["text"].startswith('Be brief.\n\nTools:\n{"type": "function"')
    assert others == list(PROBLEM.messages)
    assert desk(tools_prompt="").start(PROBLEM) == list(PROBLEM.messages)


def test_calls_are_read_and_described_in_the_checkpoints_form():
    form = FORMS[1]
    make = EnvMaker("desk", {}, {}, lambda *_: False, 1.0, 0.0, ReplyForm(form, "[/THINK]"))
    env = desk()
    env.reply_form = make.reply_form
    system = env.start(PROBLEM)[0]["content"][0]["text"]
    assert "<function=<function-name>>" in system and "args-json-object" not in system
    written = form.write([("multiply", {"a": 3, "b": 6})])
    result = env.step(f"[THINK]{written}[/THINK]{written}")
    assert "\n18\n" in result.messages[0]["content"][0]["text"]
    assert result.info["tool_calls"] == [{"name": "multiply", "arguments": {"a": 3, "b": 6}}]
    broken = env.step(
        "<tool_call>\n<function=multiply>\n<parameter=a>\n3\n</function>\n</tool_call>"
    )
    assert "error: '\\n<parameter=a>" in broken.messages[0]["content"][0]["text"]
    # Calls in other forms: in a tag of this one's, and in none.
    assert not env.step(call("multiply", a=3)).done
    last = env.step('[TOOL_CALLS]multiply[ARGS]{"a": 3}')
    assert last.done
    metrics = last.info["metrics"]
    assert (metrics["read_tool_calls"], metrics["unread_tool_calls"]) == (1, 3)


def test_a_prompt_that_describes_a_form_is_read_in_that_form():
    env = desk(tools_prompt="Tools:\n{tools}\nWrite JSON in <tool_call>.")
    env.reply_form = ReplyForm(FORMS[1])
    assert env.call_form is JSON_CALLS
    for tools_prompt in ("{tools} {call}", ""):
        env = desk(tools_prompt=tools_prompt)
        env.reply_form = ReplyForm(FORMS[1])
        assert env.call_form is FORMS[1]


def test_an_environment_of_a_checkpoint_with_an_unknown_form_is_refused(tmp_path):
    unknown = ReplyForm(None, "</think>", "its form is not known: '<|x|>'")
    kwargs = {}
    make = EnvMaker("picture_tool", kwargs, {}, lambda *_: False, 1.0, 0.0, unknown)
    with pytest.raises(
        ValueError, match=r"PictureTool has tools, and its form is not known: '<\|x"
    ):
        make.check(PROBLEM)
    kwargs["tools_prompt"] = "Tools: {tools}. Write JSON in <tool_call>."
    make.check(PROBLEM)
    assert make(PROBLEM, 0, 0).reply_form is unknown


def test_calls_are_answered_in_order_with_text_numbers_mappings_and_pictures():
    assert text(call("multiply", a=3, b=6)) == "<tool_response>\n18\n</tool_response>"
    assert text(call("find", what="text")) == "<tool_response>\n<b>é\n</tool_response>"
    assert text(call("find", what="dict")) == '<tool_response>\n{"é": 1.5}\n</tool_response>'
    assert text(call("find", what="nothing")) == "<tool_response>\nnull\n</tool_response>"
    first, picture, middle, again, last = answered(
        f"I look.{call('look', at=[1, 2])} And {call('find', what='both')}{call('multiply', a=21)} done"
    )
    assert first["text"] == "<tool_response>\n" and picture["image"].size == (2, 1)
    assert middle["text"] == "\n</tool_response>\n<tool_response>\nthere" and again[
        "image"
    ].size == (5, 5)
    assert last["text"] == "2\n</tool_response>\n<tool_response>\n42\n</tool_response>"


def test_the_form_of_a_response_is_a_setting():
    assert text(call("multiply", a=1), desk(tool_response="[{result}]")) == "[2]"
    for wrong in ({"tool_response": "nothing"}, {"max_tool_calls": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            desk(**wrong)


@pytest.mark.parametrize(
    ("response", "wrong"),
    [
        ('<tool_call>{"name": "multiply", </tool_call>', "not valid JSON: Expecting property name"),
        ("<tool_call></tool_call>", "not valid JSON: Expecting value"),
        ('<tool_call>{"name": "multiply", "arguments": {"a": 1}}', "<tool_call> is not closed by </tool_call>"),
        ('<tool_call>{"name": "multiply", "arguments": {"a": 1}} so</tool_call>', "there is more behind the object"),
        ('<tool_call>["multiply", 1]</tool_call>', 'a call is an object {"name"'),
        ('<tool_call>{"name": ["multiply"]}</tool_call>', 'a call is an object {"name"'),
        ('<tool_call>{"arguments": {"a": 1}}</tool_call>', 'a call is an object {"name"'),
        ('<tool_call>{"name": "multiply", "args": {"a": 1}}</tool_call>', 'a call is an object {"name"'),
        ('<tool_call>{"name": "multiply", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON"),
        ('<tool_call>{"name": "multiply", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "find", "arguments": {"what": "\\ud800"}}</tool_call>', "surrogates not allowed"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ("<tool_call>" + '{"name":' * 100_000, "not closed"),
        (call("divide", a=1), "no tool 'divide'; there are fail, find, look, multiply"),
        (call("_no_tool"), "no tool '_no_tool'"),
        (call("step", response="42"), "no tool 'step'"),
        (call("__init__"), "no tool '__init__'"),
        (call("multiply"), "arguments: 'a' is a required property"),
        (call("multiply", a=1, c=2), "arguments: Additional properties are not allowed ('c' was unexpected)"),
        (call("multiply", a="1"), "arguments.a: '1' is not of type 'integer'"),
        (call("multiply", a=True), "arguments.a: True is not of type 'integer'"),
        (call("multiply", a=None), "arguments.a: None is not of type 'integer'"),
        (call("look", at=[1, "</tool_call>"]), "arguments.at[1]: '</tool_call>' is not of type 'number'"),
        (call("find", what="x" * 5000), "is not one of ['text', 'dict', 'both', 'nothing']"),
        ('<tool_call>{"name": "multiply", "arguments": [1]}</tool_call>', "arguments: [1] is not of type 'object'"),
        (call("fail"), "KeyError: 'no fuel'"),
        (call("multiply", a=10**4000, b=10**4000), "ValueError: Exceeds the limit"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_call_is_its_response(response, wrong):
    env = desk()
    result = env.step(response)
    (part,) = result.messages[0]["content"]
    assert part["text"].startswith("<tool_response>\nerror: ") and part["text"].endswith(
        "\n</tool_response>"
    )
    assert wrong in part["text"] and len(part["text"]) < 400
    (fact,) = result.info["tool_calls"]
    assert wrong in fact["error"] and fact.keys() == {"name", "arguments", "error"}
    json.dumps(fact, ensure_ascii=False).encode()
    metrics = result.info["metrics"]
    assert metrics["tool_calls"] == metrics["tool_errors"] == 1
    # Calls that name a tool were read, whatever else is wrong with them.
    assert metrics["read_tool_calls"] + metrics["unread_tool_calls"] == 1
    assert text(call("multiply", a=4), env) == "<tool_response>\n8\n</tool_response>"


def test_a_broken_call_does_not_spoil_the_next():
    shown = text(
        f'<tool_call>{{"name": "multiply"<tool_call>oops</tool_call>{call("multiply", a=1, digits=None)}'
    )
    assert shown.count("<tool_response>") == 3
    assert (
        "not closed" in shown
        and "not valid JSON" in shown
        and shown.endswith("\n2\n</tool_response>")
    )


def test_what_is_recorded_of_calls():
    env = desk()
    info = env.step(call("multiply", a=3) + call("fail")).info
    assert info["tool_calls"] == [
        {"name": "multiply", "arguments": {"a": 3}},
        {"name": "fail", "arguments": {}, "error": "KeyError: 'no fuel'"},
    ]
    assert env.step("42").info == {
        "metrics": {
            "tool_calls": 2.0,
            "tool_errors": 1.0,
            "read_tool_calls": 2.0,
            "unread_tool_calls": 0.0,
        },
        "answer": "42",
    }


def test_a_turn_has_so_many_calls():
    env = desk(max_tool_calls=2)
    result = env.step(call("multiply", a=1) * 5)
    assert result.messages[0]["content"][0]["text"].endswith(
        "2\n</tool_response>\n<tool_response>\nerror: 3 further calls were not run: at most 2 a turn\n</tool_response>"
    )
    metrics = result.info["metrics"]
    assert metrics["tool_calls"] == metrics["read_tool_calls"] == 5
    assert metrics["tool_errors"] == 3


def test_thoughts_hold_no_calls():
    assert desk().step(f"<think>perhaps {call('multiply', a=1)}</think> 42").done
    assert text(f"<think>so</think>{call('multiply', a=1)}").count("<tool_response>") == 1


def test_an_episode_cut_short_is_worth_a_wrong_answer():
    # To which reward functions add what the answer is worth.
    for end, worth in (
        (["42"], 0.0),
        ([], -1.0),
    ):
        env = desk()
        assert (
            sum(env.step(said).reward for said in [call("multiply", a=1), call("fail"), *end])
            == worth
        )
    assert desk().step("42") == StepResult(
        (), 0.0, True, {"answer": "42", "metrics": dict(desk().metrics)}
    )


@pytest.mark.parametrize(
    "method",
    [
        lambda self, a: a,
        lambda self: 1,
    ],
)
def test_a_public_method_that_can_be_no_tool_is_named(method: Callable):
    with pytest.raises(
        ValueError, match=r"Bad\.thing is public, and can be no tool: .*; or call the method _thing"
    ):
        type("Bad", (Desk,), {"thing": method})


PIECES = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "multiply", "arguments": {"a": 1}}',
        "{",
        "}",
        '"',
    ]
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=12).map("".join))
def test_whatever_is_written_is_answered(response):
    env = desk()
    result = env.step(response)
    assert result.done == (not JSON_CALLS.read(response.rpartition("</think>")[2]))
    for message in result.messages:
        for part in message["content"]:
            part["text"].encode()
    json.dumps(result.info)
