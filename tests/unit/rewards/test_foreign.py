"""Functions of other systems, written as they are documented there, give the numbers of a direct call."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from rlinf_vl.rewards.forms import SIGNATURE, RewardFunction, result_of
from rlinf_vl.rewards.processes import Limits
from rlinf_vl.rewards.result import Answer, Result
from rlinf_vl.rewards.scoring import make_scorer
from rlinf_vl.types import Problem
from rlinf_vl.user_code import CodeError, load_code

SAID = [
    "<think>6*7</think> \\boxed{42}",
    "42",
    "<think>long</think> The answer is \\boxed{41}, I think.",
    "",
]
ANSWERS = [
    Answer(text, text.rpartition("</think>")[2], tuple(range(len(text.split())))) for text in SAID
]
COLUMNS = {
    "solution": "42",
    "data_source": "geo",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 7, "bonus": 0.25},
    "kind": "product",
}
ASKED = ({"role": "user", "content": [{"type": "text", "text": "6 × 7?"}]},)
PROBLEM = Problem("p:0", ASKED, "42", columns=COLUMNS)
CHAT = Problem("p:0", ASKED, "42", columns=COLUMNS, chat=True)
CODE = '''
import asyncio, re
from typing import Any


def unique_words(completions: list[str], **kwargs) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]

def format_reward(completions, **kwargs):
    pattern = r"^<think>.*?</think>.*$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content) else 0.0 for content in contents]

def accuracy_reward(completions: list[list[dict[str, str]]], solution: list[str], **kwargs) -> list[float | None]:
    contents = [completion[0]["content"] for completion in completions]
    return [None if not c else 1.0 if s in c else 0.0 for c, s in zip(contents, solution)]

def by_kind(prompts, completions, completion_ids, kind, log_metric=None, **kwargs):
    log_metric("anything", 1.0)
    return [len(ids) if k == "product" else None for ids, k in zip(completion_ids, kind)]

def shortest(completions, **kwargs):
    """Compares the answers of a group."""
    lengths = [len(completion) for completion in completions]
    return [1.0 - length / max(lengths) for length in lengths]

async def later(completions, solution, **kwargs):
    await asyncio.sleep(0.01)
    return [float(s in str(c)) for c, s in zip(completions, solution)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = ground_truth in solution_str
    return {"score": right + extra_info["bonus"] * (data_source == "geo"), "acc": right, "pred": solution_str[-5:]}

def plain(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.strip() == ground_truth)

def batch(data_sources, solution_strs, ground_truths, extra_infos, factor=1.0):
    return [factor * (g in s) for s, g in zip(solution_strs, ground_truths)]

def easyr1(reward_inputs: list[dict[str, Any]], format_weight: float = 0.1) -> list[dict[str, float]]:
    scores = []
    for one in reward_inputs:
        form = 1.0 if re.fullmatch(r"<think>.*</think>.*\\\\boxed\\{.*\\}.*", one["response"], re.DOTALL) else 0.0
        accuracy = float(one["ground_truth"] in one["response"]) - 0.01 * one["response_length"]
        scores.append({"overall": (1 - format_weight) * accuracy + format_weight * form, "format": form, "accuracy": accuracy})
    return scores

def by_annotation(batch: "list[dict]") -> list:
    return [{"overall": float(one["ground_truth"] in one["response"])} for one in batch]

def sequential(reward_input: dict[str, Any]) -> dict[str, float]:
    return easyr1([reward_input])[0]

def mine(response, answer, *, kind, response_tokens, least=0, **row):
    assert row["extra_info"]["index"] == 7
    return {"right": float(answer in response), "kind": float(kind == "product"), "long": float(response_tokens > least)}

def by_place(text, truth):
    return truth in text

async def mine_later(response, answer):
    await asyncio.sleep(0.01)
    return {"score": float(answer in response), "correct": False}
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("code") / "theirs.py"
    path.write_text(CODE)
    return path


def function_of(file: Path, name: str):
    return load_code(f"{file}:{name}", {}, {}, kind="reward function", signature=SIGNATURE)


def columns(**more):
    return {name: [value] * len(SAID) for name, value in (COLUMNS | more).items()}


MESSAGES = [[{"role": "assistant", "content": text}] for text in SAID]
IDS = [list(answer.ids) for answer in ANSWERS]
TRL = partial(dict, prompts=["6 × 7?"] * len(SAID), completion_ids=IDS, log_metric=lambda *_: None)
VERL = {name: COLUMNS[name] for name in ("data_source", "extra_info")} | {"ground_truth": "42"}
INPUTS = [
    {"response": text, "response_length": len(ids), "ground_truth": "42"}
    for text, ids in zip(SAID, IDS, strict=True)
]
DIRECT = {
    "unique_words": lambda f: f(**TRL(completions=SAID), **columns()),
    "format_reward": lambda f: f(**TRL(completions=MESSAGES), **columns()),
    "accuracy_reward": lambda f: f(**TRL(completions=MESSAGES), **columns()),
    "by_kind": lambda f: f(**TRL(completions=SAID), **columns()),
    "shortest": lambda f: f(**TRL(completions=SAID), **columns()),
    "later": lambda f: asyncio.run(f(**TRL(completions=SAID), **columns())),
    "compute_score": lambda f: [f(solution_str=text, **VERL) for text in SAID],
    "plain": lambda f: [f(solution_str=text, **VERL) for text in SAID],
    "batch": lambda f: f(["geo"] * 4, SAID, ["42"] * 4, [COLUMNS["extra_info"]] * 4),
    "easyr1": lambda f: f(INPUTS),
    "by_annotation": lambda f: f(INPUTS),
    "sequential": lambda f: [f(one) for one in INPUTS],
    "mine": lambda f: [f(a.response, "42", response_tokens=len(a.ids), **COLUMNS) for a in ANSWERS],
    "by_place": lambda f: [f(text, "42") for text in SAID],
    "mine_later": lambda f: [asyncio.run(f(text, "42")) for text in SAID],
}


@pytest.mark.parametrize("name", DIRECT)
def test_numbers_are_those_of_a_direct_call(file, name):
    function = function_of(file, name)
    found = RewardFunction(function, name, {}).results(PROBLEM, ANSWERS, 10.0)
    assert found == [result_of(returned) for returned in DIRECT[name](function)]
    assert len({result.value for result in found}) > 1, "the case tells nothing"


@pytest.mark.parametrize("name", ["final_response", "said"])
def test_the_text_after_the_thoughts_is_given_by_name(name):
    function = eval(f"lambda answer, {name}: float({name} == answer)")
    answer = Answer("<think>41?</think>42", "42")
    (result,) = RewardFunction(function, "f", {}).results(PROBLEM, [answer], 10.0)
    assert result.value == 1.0


def test_completions_are_messages_where_the_row_is_a_chat(file):
    seen = RewardFunction(
        lambda completions: [len(c) * (c[0]["role"] == "assistant") for c in completions], "f", {}
    )
    assert [result.value for result in seen.results(CHAT, ANSWERS, 10.0)] == [1.0] * 4
    # Which its annotation asks for.
    with_texts = RewardFunction(function_of(file, "unique_words"), "f", {})
    assert with_texts.results(CHAT, ANSWERS, 10.0) == with_texts.results(PROBLEM, ANSWERS, 10.0)


def test_what_a_mapping_says():
    assert result_of({"score": 0.3, "acc": True, "pred": "B", "n": 2}) == Result(
        0.3, {"acc": 1.0, "n": 2.0}, True
    )
    assert result_of({"overall": 1, "format": 0.5, "accuracy": -1.0}) == Result(
        1.0, {"format": 0.5, "accuracy": -1.0}, False
    )
    assert result_of({"right": 0.75, "form": 0.5, "correct": True}) == Result(
        1.25, {"right": 0.75, "form": 0.5, "correct": 1.0}, True
    )
    spans = [[0, 4, 1], (4, 9, -0.5)]
    assert result_of({"score": 1.0, "spans": spans}).spans == ((0, 4, 1.0), (4, 9, -0.5))
    for wrong, message in (
        ([(0, 4)], r"spans with \(0, 4\); each is \(start, end, value\)"),
        ([(4, 4, 1.0)], "0 <= start < end must hold"),
        ([(0, 4, float("nan"))], "return a finite number"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            result_of({"score": 1.0, "spans": wrong})
    assert result_of(True) == Result(1.0) and result_of(None) == Result(None)
    for wrong in ("1", "right", float("nan"), [1.0], {"pred": "B"}, {}, object()):
        with pytest.raises((TypeError, ValueError), match="it returned"):
            result_of(wrong)


@pytest.mark.parametrize(
    ("function", "kwargs", "said"),
    [
        (
            lambda text: 1.0,
            {},
            r"called as none of fn\(response, answer, \*\*row\) or fn\(completions, \*\*columns\)",
        ),
        (lambda: 1.0, {}, "called as none of"),
        (lambda response, answer: 1.0, {"least": 2}, "takes no keyword 'least'"),
    ],
)
def test_another_signature_is_refused_with_those_wanted(function, kwargs, said):
    with pytest.raises(CodeError, match=said):
        RewardFunction(function, "file.py:f", kwargs)


def test_a_result_of_another_length_is_no_verdict(file):
    for returned, said in (
        ([1.0], "1 results for 4 answers"),
        (1.0, "1 results"),
        ({"overall": 1.0}, "return a list"),
    ):
        found = RewardFunction(lambda completions, returned=returned: returned, "f", {}).results(
            PROBLEM, ANSWERS, 1.0
        )
        assert len(found) == 4 and all(
            isinstance(one, TypeError) and said in str(one) for one in found
        )


def test_a_column_that_the_row_lacks_is_named(file):
    (found,) = RewardFunction(lambda response, answer, options: 1.0, "f", {}).results(
        PROBLEM, ANSWERS[:1], 1.0
    )
    assert isinstance(found, KeyError) and "'options'" in str(found) and "data_source" in str(found)


def test_through_processes_with_weights_and_kwargs(file):
    entries = [
        {"function": f"{file}:easyr1", "kwargs": {"format_weight": 0.5}},
        {"function": f"{file}:mine", "weight": 0.5, "kwargs": {"least": 3}},
        {"function": f"{file}:accuracy_reward", "weight": 2.0},
    ]
    scorer = make_scorer(
        entries, reward_max=1.0, reward_min=0.0, files={}, limits=Limits(60.0, 2.0, 2)
    )
    try:
        scores = asyncio.run(scorer(PROBLEM, ANSWERS))
    finally:
        scorer.close()
    theirs = function_of(file, "easyr1")(INPUTS, format_weight=0.5)
    for score, first, text in zip(scores, theirs, SAID, strict=True):
        parts = {
            "easyr1": first["overall"],
            "easyr1.format": first["format"],
            "easyr1.accuracy": first["accuracy"],
        }
        own = {"right": float("42" in text), "kind": 1.0, "long": float(len(text.split()) > 3)}
        parts |= {"mine": sum(own.values())} | {
            f"mine.{name}": value for name, value in own.items()
        }
        last = {"accuracy_reward": float("42" in text)} if text else {}
        assert (
            score.parts == pytest.approx(parts | last)
            and not score.ungraded
            and score.fault is None
        )
        weights = (1.0, 0.5, 2.0)
        values = (first["overall"], sum(own.values()), last.get("accuracy_reward", 0.0))
        assert score.reward == pytest.approx(
            sum(w * v for w, v in zip(weights, values, strict=True))
        )
        assert score.correct == (first["accuracy"] >= 0.5)
