"""The questions with a calculator: rewards by attempt, tools that calculate or lie, demonstrations that the environment plays."""

import re
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from rlinf_vl.config.toys import TOYS
from rlinf_vl.extras.toy import drawings, files, rectangle_tool
from rlinf_vl.extras.toy.rectangle_tool import TOY, RectangleTool, demonstrate
from rlinf_vl.rewards import math_verdict
from rlinf_vl.types import Problem

PROBLEM = Problem("p:0", ({"role": "user", "content": "What is the area?"},), "\\boxed{18}")
CALL = '<tool_call>{"name":"multiply","arguments":{"a":3,"b":6}}</tool_call>'


def env_of(**kwargs) -> RectangleTool:
    env = RectangleTool(**{"grade": math_verdict, "reward_max": 1.0, "reward_min": 0.0} | kwargs)
    assert env.start(PROBLEM) == list(PROBLEM.messages)
    return env


def said(env: RectangleTool, response: str) -> str:
    (message,) = env.step(response).messages
    return message["content"][0]["text"]


@pytest.mark.parametrize(
    ("answers", "reward", "first", "correct"),
    [(["18"], 1.0, 1.0, 1.0), (["21", "18"], 0.5, 0.0, 1.0), (["21", "28"], 0.0, 0.0, 0.0)],
)
def test_a_second_right_answer_is_worth_half_of_a_first(answers, reward, first, correct):
    for calls, least in ((0, 0.0), (1, 0.0), (1, -1.0)):
        env, paid = env_of(reward_min=least), 0.0
        for number, answer in enumerate(answers):
            for _ in range(calls):
                result = env.step(CALL)
                paid += result.reward
                assert not result.done
            result = env.step(f"\\boxed{{{answer}}}")
            paid += result.reward
            assert result.done == (number == len(answers) - 1)
            assert (
                not result.messages
                if result.done
                else result.messages[0]["content"][0]["text"] == "wrong, again"
            )
        assert paid == least + reward * (1 - least)
        assert result.info["correct"] == bool(correct)
        metrics = result.info["metrics"]
        assert (metrics["first_correct"], metrics["correct"]) == (first, correct)
        assert metrics["tool_calls"] == calls * len(answers)


def test_tools_calculate_and_a_lie_is_added():
    assert said(env_of(), CALL) == "<tool_response>18</tool_response>"
    assert said(env_of(), CALL.replace("multiply", "add")) == "<tool_response>9</tool_response>"
    assert said(env_of(lie=1), CALL) == "<tool_response>19</tool_response>"
    assert said(env_of(), CALL.replace("3", '"3"')).startswith(
        "<tool_response>error: arguments.a: "
    )


def test_demonstrations_are_conversations_with_the_environment_that_miscount_as_planned():
    rng = np.random.default_rng(0)
    calls, first, lengths = [], [], []
    for _ in range(1500):
        question, call, result, answer, *again = (
            message["content"] for message in demonstrate(rng)[0]
        )
        kind = next(
            kind for kind, text in drawings.QUESTIONS.items() if text == question[1]["text"]
        )
        filled = question[0]["image"][4::8, 4::8].min(-1) < 225
        sides = int(filled.any(0).sum()), int(filled.any(1).sum())
        name, *counted = re.fullmatch(
            r'<tool_call>\{"name":"(\w+)","arguments":\{"a":(\d),"b":(\d)\}\}</tool_call>', call
        ).groups()
        counted = [int(side) for side in counted]
        assert name == {"area": "multiply", "perimeter": "add"}[kind]
        shown = counted[0] * counted[1] if kind == "area" else sum(counted)
        assert result[0]["text"] == f"<tool_response>{shown}</tool_response>"
        assert answer == f"\\boxed{{{drawings.solve(*counted, kind)}}}"
        calls += [a - b for a, b in zip(counted, sides, strict=True)]
        first.append(answer == f"\\boxed{{{drawings.solve(*sides, kind)}}}")
        lengths.append(len(again))
    assert set(calls) == {0, 1} and np.mean(calls) == pytest.approx(
        rectangle_tool.MISCOUNT_PROBABILITY, abs=0.03
    )
    assert np.array_equal(np.array(lengths) == 0, first), (
        "a wrong answer is followed by a second attempt, and no other"
    )
    assert set(lengths) == {0, 4}


def test_its_words_are_single_tokens(tmp_path: Path):
    files.write_toy_files(tmp_path, TOY.words)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    pieces = [
        piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(CALL)
    ]
    assert tokenizer.tokenize(CALL) == pieces and len(pieces) == 20
    assert len(tokenizer.tokenize("<tool_response>18</tool_response>")) == 9
    assert tokenizer.tokenize("wrong, again") == ["wrong", ",", "Ġagain"]


def test_rows_are_the_toys():
    assert TOY.make_rows is drawings.toy_rows and TOYS["toy-tool"].columns == TOYS["toy"].columns
