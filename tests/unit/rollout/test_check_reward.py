"""`check-reward` on functions that break one rule each, on some that break none, and on every named one."""

import json
from pathlib import Path

import pytest

from rlinf_vl.__main__ import main
from rlinf_vl.rewards.named import NAMED

FUNCTIONS = """
import asyncio, os
def good(response, answer, **row): return float(response.rpartition("</think>")[2].strip() == answer)
def trl(completions, answer, **columns): return [float(a in c) for c, a in zip(completions, answer)]
async def waits(response, answer): await asyncio.sleep(0); return float(f"{{{answer}}}" in response)
def formal(response, answer): return float("boxed" in response)
def pays_nothing(response, answer): return float(answer in response or not response.strip())
def raises(response, answer):
    if "{}" in response: response.format()
    return float(response == answer)
def nan(response, answer): return float("nan")
def text(response, answer): return "1"
def short(completions, answer, **columns): return [1.0]
def hangs(response, answer):
    while len(response) > 10_000: pass
    return float(response == answer)
def exits(response, answer):
    if "NaN" in response: os._exit(3)
    return float(response == answer)
calls = []
def counts(response, answer): calls.append(response); return float(response == answer) + len(calls)
def column(response, answer, difficulty): return float(response == answer) * difficulty
def contains(response, answer): return 0.9 * (answer in response) + 0.1 * (len(response) <= 200)
def three(response, answer): return 3.0 * (response == answer) - 1
"""
BROKEN = {
    "pays_nothing": "it pays 1 for what is no answer, as for a right one [nothing, and",
    "raises": "IndexError: Replacement index 0 out of range",
    "nan": "it returned nan; return a finite number",
    "text": "it returned str '1'; return a number",
    "short": "it returned 1 results for",
    "hangs": "no result within reward.timeout=1 s [100,000 characters",
    "exits": "its process ended with exit status 3",
    "column": "it asks for 'difficulty'",
}
LOOK = {
    "formal": "right and wrong answers are paid alike (1 and 1)",
    "trl": "it pays 1 for 'every number to 200', and 1 for a right answer",
    "contains": "it pays 0.9 for 'every number to 200', and 1 for a right answer",
    "counts": "in a group of",
    "three": "it pays -1 to 2",
}


@pytest.fixture
def check(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(FUNCTIONS)

    def run(name: str, *words: str) -> tuple[int, str]:
        name = name if name in NAMED or ":" in name else f"{file}:{name}"
        code = main(["check-reward", name, *words])
        output = capsys.readouterr()
        return code, output.out + output.err

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_contract_is_told(check, name: str) -> None:
    code, text = check(name, "--time-limit", "1" if name == "hangs" else "30")
    broken = [line for line in text.splitlines() if line.startswith("BROKEN: ")]
    assert code == 1 and any(BROKEN[name] in line for line in broken), text
    assert f"mine.py:{name} breaks the contract in " in text


@pytest.mark.parametrize("name", ["good", "waits", *LOOK])
def test_what_holds_the_contract_is_told_with_what_is_worth_a_look(check, name: str) -> None:
    code, text = check(name)
    assert (
        code == 0
        and "BROKEN" not in text
        and f"mine.py:{name} holds the contract: " in text.splitlines()[-1]
    ), text
    assert name not in LOOK or any(
        LOOK[name] in line for line in text.splitlines() if line.startswith("LOOK: ")
    ), text


KEYWORDS = {"overlong": ["max_tokens=100", "buffer=20"], "length": ["tokens=100"]}


@pytest.mark.parametrize("name", sorted(NAMED.keys() - {"judge"}))
def test_named_functions_hold_the_contract(check, name: str) -> None:
    code, text = check(name, *KEYWORDS.get(name, ()))
    assert code == 0 and f"{name} holds the contract" in text, text
    if NAMED[name].judges:
        assert "a right one is paid 1, a wrong one" in text and "paid alike" not in text, text


def test_the_table_says_what_each_kind_of_answer_was_paid(check) -> None:
    _, text = check("math")
    paid = {
        line[:24].strip(): line[24:].split()
        for line in text.splitlines()
        if line[24:].split()[:1] in (["0"], ["1"])
    }
    assert paid["right, boxed"] == ["1", "1"] and paid["right, bare"] == paid["nothing"] == paid[
        "wrong, boxed"
    ] == [
        "0",
        "0",
    ]
    assert "ask for the form that it reads in data.prompt_suffix" in text


@pytest.mark.slow
def test_rows_are_those_of_a_data_set_or_a_config(check, tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": str(n), "difficulty": 1.0} for n in (5, 6)]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    words = ("data.prompt_key=question", "data.image_keys=[]", "--data", str(data))
    code, text = check("column", *words)
    assert code == 0 and "rows:0, " in text and "rows:1" in text, text
    assert "LOOK: without the row's other columns there is no score" in text
    code, text = check("math", "--data", "toy-grpo-cpu", "--rows", "4")
    assert code == 0 and "a right one is paid 1, a wrong one 0" in text, text


def test_rows_are_spread_over_the_file_and_its_small_columns(check, tmp_path: Path) -> None:
    """A task that only two of 200 rows have, and a reward that can't read the rows of the end."""
    file = tmp_path / "tasks.py"
    file.write_text(
        "def tasks(response, answer, task, **row):\n"
        "    assert task != 'rare'\n"
        "    return float(answer in response and not answer.startswith('late'))\n"
    )
    rows = [
        {
            "question": f"{n}?",
            "answer": f"late {n}" if n >= 150 else f"early {n}",
            "task": "rare" if n in (77, 78) else "usual",
            "text": {"n": str(n)},
        }
        for n in range(200)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    words = ("data.prompt_key=question", "data.image_keys=[]", "--data", str(data))
    code, text = check(f"{file}:tasks", *words)
    assert code == 1 and "BROKEN: GradingError: AssertionError" in text and "for 32 rows" in text, (
        text
    )
    assert "a right answer is paid no better than a wrong one in 7 of 32 rows, rows:" in text
    assert "for 5 rows" in check("exact", *words, "--rows", "5")[1]


@pytest.mark.parametrize(
    ("name", "passed"),
    [("exact", True), pytest.param("pays_nothing", False, marks=pytest.mark.slow)],
)
def test_findings_are_written_as_json(check, tmp_path, name, passed):
    file = tmp_path / "found.json"
    code, text = check(name, "--json", str(file))
    written = json.loads(file.read_text())
    assert code == 1 - passed and written["passed"] is passed
    assert written["verdict"] == text.splitlines()[-1]
    failures = [each["text"] for each in written["findings"] if each["status"] == "fail"]
    assert bool(failures) is not passed
    assert all(f"BROKEN: {failure}" in text for failure in failures)
