"""Rows that are whole conversations: what is imitated of them, and which are refused, by name."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.rows import row_to_problem
from rlinf_vl.data.unusable import RowError


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


QUESTION = {"role": "user", "content": "<image>What is it?"}
ANSWER = {"role": "assistant", "content": "A cat."}
TWICE = [QUESTION, ANSWER, {"role": "user", "content": "And <image>?"}, ANSWER]


def conversation(messages, turn_mask_key=None, **columns):
    row = {"messages": messages, "images": [{"bytes": png(1)}, {"bytes": png(2)}], **columns}
    form = RowFormat(messages_key="messages", turn_mask_key=turn_mask_key).for_columns(row)
    return row_to_problem(row, "rows:7", form)


def weights(problem):
    return [m["weight"] for m in problem.messages if m["role"] == "assistant"]


def test_placeholders_get_their_images_over_all_turns():
    problem = conversation(TWICE)
    urls = [
        part["image_url"]["url"]
        for message in problem.messages
        for part in message["content"]
        if part["type"] == "image_url"
    ]
    assert urls == [image.url for image in problem.images] and len(set(urls)) == 2
    assert weights(problem) == [1, 1] and problem.answer == ""


def test_messages_may_be_json_and_a_reference_answer_stands_beside_them():
    problem = conversation(json.dumps(TWICE), answer="cat")
    assert weights(problem) == [1, 1] and problem.answer == "cat"


@pytest.mark.parametrize("off", [0, False])
def test_a_message_of_weight_0_and_a_mask_leave_answers_out(off):
    assert weights(conversation([QUESTION, ANSWER | {"weight": off}, *TWICE[2:]])) == [0, 1]
    assert weights(conversation(TWICE, "mask", mask=[1, off])) == [1, 0]


@pytest.mark.parametrize(
    "messages, columns, reason",
    [
        (TWICE[:3], {}, "the last message is of role 'user', not 'assistant'"),
        ([*TWICE[:3], ANSWER | {"content": " "}], {}, "message 2 of the assistant says nothing"),
        ([QUESTION, ANSWER | {"weight": 0.5}], {}, "has the weight 0.5: expected 0 or 1"),
        ([QUESTION, ANSWER | {"weight": 0}], {}, "no message is imitated, all weights are 0"),
        ([QUESTION, ANSWER | {"content": "<image>"}], {}, "message 1 of the assistant shows an"),
        (TWICE, {"mask": [True]}, r"holds \[True\]: expected a list of 2, one for each"),
        (TWICE, {"mask": None}, "holds None: expected a list of 2"),
        ([ANSWER], {}, "no message of role 'user' says anything"),
        ("What is it?", {}, "the last message is of role 'user'"),
        (
            [QUESTION, ANSWER | {"tool_calls": [{"id": "a"}]}],
            {},
            "'assistant' has 'tool_calls', whi",
        ),
        ([QUESTION, {"role": "assistant", "tool_calls": [{}]}], {}, "'assistant' has 'tool_calls'"),
        ([QUESTION, ANSWER | {"reasoning_content": "so"}], {}, "has 'reasoning_content', which is"),
        (
            [QUESTION, ANSWER],
            {"tools": [{"name": "f"}]},
            "column 'tools': the tools of a conversat",
        ),
    ],
)
def test_what_can_not_be_imitated_is_refused_by_row_and_reason(messages, columns, reason):
    with pytest.raises(RowError, match=f"row rows:7: .*{reason}"):
        conversation(messages, "mask" if "mask" in columns else None, **columns)


def test_keys_that_nothing_reads_are_named():
    """Empty ones aside: a table fills in the keys that other rows have."""
    empty = {"tool_calls": None, "reasoning_content": "", "function_call": {}, "refusal": None}
    part = {"type": "text", "text": "<image>?<image>", "cache_control": {"type": "ephemeral"}}
    question = QUESTION | {"content": [part], "name": "ann"}
    problem = conversation(
        [question, ANSWER | empty | {"weight": 1}], tools=[], images=[png(1), png(2)]
    )
    assert problem.unused_keys == ("content.cache_control", "name")
    problem = row_to_problem(
        {"prompt": [question | {"weight": 1}], "answer": "b", "images": [png(1), png(2)]},
        "rows:7",
        RowFormat().for_columns(["prompt", "answer", "images"]),
    )
    assert problem.unused_keys == ("content.cache_control", "name", "weight")


def test_placeholders_without_images_are_refused():
    with pytest.raises(RowError, match="the prompt has 1 <image> and the row 2 images"):
        conversation([QUESTION, ANSWER])


def test_a_missing_column_is_named_with_its_key():
    form = RowFormat(messages_key="messages").for_columns(["chat", "images"])
    problem = form.missing_column(["chat", "images"], "rows.parquet")
    assert problem is not None
    assert problem.startswith("data.messages_key: column 'messages' not in rows.parquet")
