"""Conversations in the forms of LLaVA, ShareGPT, LLaMA-Factory and ms-swift."""

import json

import pytest
from episodes import encoded, picture

from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.rows import row_to_problem
from rlinf_vl.data.unusable import RowError

PICTURE = encoded(picture(48, 32, 9)).data
LLAVA = [
    {"from": "human", "value": "<image>\nWhat is it?"},
    {"from": "gpt", "value": "A cup."},
    {"from": "human", "value": "And its colour?"},
    {"from": "gpt", "value": "Red."},
]


def problem_of(messages, column="conversations", **keys):
    row = {column: messages, "image": {"bytes": PICTURE}}
    return row_to_problem(row, "rows:7", RowFormat(**keys).for_columns(row))


def texts(problem):
    return [
        (m["role"], "".join(p.get("text", "<image>") for p in m["content"]))
        for m in problem.messages
    ]


SAID = [
    ("user", "<image>\nWhat is it?"),
    ("assistant", "A cup."),
    ("user", "And its colour?"),
    ("assistant", "Red."),
]


@pytest.mark.parametrize("messages", [LLAVA, json.dumps(LLAVA)], ids=["list", "text"])
def test_llava_s_rows_are_conversations_to_imitate(messages):
    problem = problem_of(messages, messages_key="messages")
    assert texts(problem) == SAID and len(problem.images) == 1
    assert [m["weight"] for m in problem.messages if m["role"] == "assistant"] == [1, 1]


@pytest.mark.parametrize("messages", [LLAVA, json.dumps(LLAVA)], ids=["list", "text"])
def test_the_last_answer_is_the_reference_where_the_run_says_so(messages):
    problem = problem_of(messages, answer_key="conversations")
    assert texts(problem) == SAID[:3] and problem.answer == "Red."
    with pytest.raises(
        RowError, match="'assistant', not 'user'; data.answer_key=conversations takes"
    ):
        problem_of(messages)
    # OpenAI's messages alike.
    chat = [{"role": role, "content": text} for role, text in SAID]
    assert problem_of(chat, "messages", answer_key="messages").answer == "Red."
    with pytest.raises(RowError, match="column 'messages' is empty"):
        problem_of(chat[:1], "messages", answer_key="messages")
    with pytest.raises(RowError, match="no message before the last answer"):
        problem_of(chat[1:2], "messages", answer_key="messages")


CALL = {"name": "look", "arguments": {"n": 1}}


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "a cup"},
        ),
        (
            {"role": "tool_call", "content": json.dumps([CALL])},
            {"role": "tool_response", "content": "a cup"},
        ),
    ],
)
def test_calls_and_results_in_messages_of_their_own(call, result):
    last = {"role": "assistant", "content": "A cup."}
    messages = [{"role": "user", "content": "<image>What?"}, call, result, last]
    problem = problem_of(messages, "messages", messages_key="messages")
    roles = [m["role"] for m in problem.messages]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert problem.messages[1]["tool_calls"] == [{"type": "function", "function": CALL}]
    # Behind a text of the assistant they are its calls; two in a row are two calls.
    messages[1:2] = [{"role": "assistant", "content": "I look."}, call, call]
    problem = problem_of(messages, "messages", messages_key="messages")
    assert [m["role"] for m in problem.messages] == roles
    assert texts(problem)[1] == ("assistant", "I look.")
    assert len(problem.messages[1]["tool_calls"]) == 2


def test_malformed_messages_are_named():
    with pytest.raises(RowError, match="column 'conversations': .* has 'from' and no 'value'"):
        problem_of([{"from": "human"}])
    bad = [LLAVA[0], {"from": "function_call", "value": "{"}]
    with pytest.raises(RowError, match="column 'conversations': 'content': '{' is no JSON"):
        problem_of(bad)


def test_the_format_is_recognised():
    assert RowFormat().for_columns(["conversations", "image"]).format == "sharegpt"
    assert RowFormat().for_columns(["conversations", "problem", "answer"]).format == "rlinf"
    form = RowFormat(messages_key="messages").for_columns(["conversations", "messages"])
    assert form.prompt_key == "messages"
