"""Rows that are whole conversations: what is imitated of them, and which are refused, by name."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.rows import row_to_problem


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


QUESTION = {"role": "user", "content": "<image>What is it?"}
ANSWER = {"role": "assistant", "content": "A cat."}
TWICE = [QUESTION, ANSWER, {"role": "user", "content": "And <image>?"}, ANSWER]


def conversation(messages, **columns):
    row = {"messages": messages, "images": [{"bytes": png(1)}, {"bytes": png(2)}], **columns}
    form = RowFormat(messages_key="messages").for_columns(row)
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
def test_a_message_of_weight_0_is_left_out(off):
    assert weights(conversation([QUESTION, ANSWER | {"weight": off}, *TWICE[2:]])) == [0, 1]


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


def test_a_missing_column_is_named_with_its_key():
    form = RowFormat(messages_key="messages").for_columns(["chat", "images"])
    problem = form.missing_column(["chat", "images"], "rows.parquet")
    assert problem is not None
    assert problem.startswith("data.messages_key: column 'messages' not in rows.parquet")
