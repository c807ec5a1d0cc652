"""`check-env` on environments that break one rule each, and on some that break none."""

import json
import random
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from rlinf_vl.__main__ import main
from rlinf_vl.tools.check.policies import typed_call

ENV = '''
import asyncio, random, time
import numpy as np
from PIL import Image
from rlinf_vl.envs import StepResult
from rlinf_vl.rewards import GradingTimeout

PICTURE = np.zeros((32, 48, 3), np.uint8)

def said(*parts, role="user"):
    return {"role": role, "content": [{"type": "text", "text": part} if isinstance(part, str) else
                                      {"type": "image", "image": part} for part in parts]}

class Good:
    """Three turns with a picture each; pays for the word left."""
    def __init__(self, turns=3, *, group_seed):
        self.turns, self.cell = turns, random.Random(group_seed).randrange(9)
    def start(self, problem):
        self.left = self.turns
        return [said(f"You are in cell {self.cell}. Go left, right, up or down.", PICTURE)]
    def step(self, response):
        self.left -= 1
        if self.left < 0: raise RuntimeError("it is over")
        right = "left" in response
        info = {"metrics": {"left": self.left}, "reward_parts": {"word": right}, "state": str(self.left), "correct": right}
        return StepResult([said(Image.fromarray(PICTURE), "and now left?")], float(right), self.left == 0, info)
    def close(self): pass

class Env(Good):
'''
GOOD = {
    "as it should be": "    pass",
    "coroutines": """
    async def start(self, problem): await asyncio.sleep(0); return super().start(problem)
    async def step(self, response): await asyncio.sleep(0); return super().step(response)
    async def close(self): await asyncio.sleep(0)""",
    "no verdict": "    def step(self, response): raise GradingTimeout('in 0.5 s')",
    "an end that stays": "    def step(self, response): return StepResult((), 0, True)",
}
BROKEN = {
    "no messages": ("    def start(self, problem): return []", "messages can't be shown: there are none"),
    "none": ("    def start(self, problem): return None", "messages can't be shown: 'NoneType' object is not iterable"),
    "texts": ("    def start(self, problem): return ['go']", "messages can't be shown: 'go' is no message with a role"),
    "role": ("    def start(self, problem): return [said('go', role='world')]", "is no message with a role (system, user"),
    "assistant": ("    def start(self, problem): return [said('go', role='assistant')]", "the last is of role 'assistant'"),
    "content": ("    def start(self, problem): return [{'role': 'user', 'content': 3}]", "the content 3 is neither a text nor"),
    "part": (
        "    def start(self, problem): return [{'role': 'user', 'content': [{'type': 'video', 'video': 'x'}]}]",
        "is neither a text nor an image",
    ),
    "no image": ("    def start(self, problem): return [said(b'GIF')]", "messages can't be shown: 3 bytes beginning b'GIF'"),
    "truncated": (
        """    def start(self, problem):
        import io; file = io.BytesIO()
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)).save(file, 'PNG')
        return [said(file.getvalue()[:900])]""",
        "can't be decoded",
    ),
    "floats": ("    def start(self, problem): return [said(PICTURE / 255)]", "messages can't be shown: "),
    "too large": ("    def start(self, problem): return [said(Image.new('1', (9000, 9000)))]", "9000×9000 pixels; at most"),
    "foreign address": (
        "    def start(self, problem):\n"
        "        return [{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'image://abc'}}]}]",
        "image://abc is no image of the problem",
    ),
    "fetched": (
        "    def start(self, problem):\n"
        "        return [{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'http://127.0.0.1/x.png'}}]}]",
        "messages can't be shown: ",
    ),
    "start raises": ("    def start(self, problem): return problem.columns['map']", "start(problem) raised KeyError: 'map'"),
    "tuple": ("    def step(self, response): return [], 1.0, True", "step returned tuple: return StepResult("),
    "nan": ("    def step(self, response): return StepResult((), float('nan'), True)", "gave the reward nan"),
    "reward of text": ("    def step(self, response): return StepResult((), '1', True)", "gave the reward '1'"),
    "done": ("    def step(self, response): return StepResult((), 1, 'yes')", "gave done='yes'"),
    "metrics": (
        "    def step(self, response): return StepResult((), 1, True, {'metrics': {'x': 'many'}})",
        "gave an info that can't be recorded",
    ),
    "tool calls": (
        "    def step(self, response): return StepResult((), 1, True, {'tool_calls': [{'function': 'x'}]})",
        "the tool call {'function': 'x'} is no mapping with 'name' and 'arguments'",
    ),
    "empty answers": (
        "    def step(self, response): response[0]; return super().step(response)",
        "step raised IndexError: string index out of range",
    ),
    "json": (
        "    def step(self, response):\n"
        "        import json\n"
        "        if '<tool_call>' in response: json.loads(response.split('<tool_call>')[1])\n"
        "        return super().step(response)",
        "step raised JSONDecodeError",
    ),
    "formats": (
        "    def step(self, response): response.format(); return super().step(response)",
        "step raised ",
    ),
    "never done": (
        "    def step(self, response): return StepResult([said('go')], 0, False)",
        "no episode was done within 100 turns",
    ),
    "wakes again": (
        "    def step(self, response): self.left = (self.left or 2) - 1; return StepResult([said('go')], 0, self.left == 0)",
        "step after done returned done=False",
    ),
    "own dice": (
        "    def start(self, problem): self.left = 3; return [said(str(random.random()))]",
        "start(problem) says something else for equal seeds",
    ),
    "shared state": (
        "    cells = [0]\n"
        "    def start(self, problem): self.cells[0] += 1; self.left = 3; return [said(str(self.cells))]",
        "start(problem) says something else for equal seeds",
    ),
    "close without start": ("    def close(self): del self.left", "close() without start raised AttributeError"),
    "close twice": (
        "    closed = False\n"
        "    def close(self):\n        assert not self.closed, 'closed already'\n        self.closed = True",
        "close() a second time raised AssertionError: closed already",
    ),
    "hangs": (
        "    def step(self, response): time.sleep(30 if '<|im_end|>' in response else 0); return super().step(response)",
        "step(response) did not return within 2 s",
    ),
    "hangs for ever in a coroutine": (
        "    async def close(self): await asyncio.Event().wait()",
        "close() did not return within 2 s",
    ),
}  # fmt: skip


def checked(tmp_path: Path, body: str, capsys, *arguments: str) -> tuple[int, str]:
    (tmp_path / "env.py").write_text(ENV + body + "\n")
    code = main(["check-env", f"{tmp_path / 'env.py'}:Env", *arguments])
    return code, capsys.readouterr().out


@pytest.mark.parametrize("case", GOOD)
def test_a_good_environment_holds_the_contract(case, tmp_path, capsys):
    code, out = checked(tmp_path, GOOD[case], capsys)
    assert code == 0 and "BROKEN" not in out and out.endswith("Env holds the contract\n"), out


def test_what_was_seen_is_told(tmp_path, capsys):
    _, out = checked(tmp_path, GOOD["as it should be"], capsys, "turns=5")
    for text in (
        "turns of an episode: 5 to 5",
        "reward of an episode: 0 to ",
        "images a turn: 1 to 1; sizes: 48×32",
    ):
        assert text in out
    for text in (
        "metric left (",
        "reward part word (",
        "the start depends on group_seed",
        "slowest calls: ",
    ):
        assert text in out
    assert re.search("reward of an episode: 0 to [2-5],", out), "random answers find what pays"


@pytest.mark.slow
@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_told_in_a_sentence(case, tmp_path, capsys):
    body, expected = BROKEN[case]
    code, out = checked(tmp_path, body, capsys, "--time-limit", "2")
    broken = [line for line in out.splitlines() if line.startswith("BROKEN: ")]
    assert code == 1 and expected in "\n".join(broken), out
    assert len(broken) <= 3, out


def test_rows_of_a_file_start_it(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "Go.", "answer": "x", "map": "ab"}\n' * 3)
    body = "    def start(self, problem): self.left = 1; return [said(problem.columns['map'])]"
    code, out = checked(tmp_path, body, capsys, "--data", str(rows), "data.prompt_key=question")
    assert code == 0, out


TOOLS = '''
from PIL import Image
from rlinf_vl.envs.tool import ToolEnv

class Crops(ToolEnv):
    def crop(self, box: list[int]) -> Image.Image:
        """Crop the picture.

        Args:
            box: Left, top, right and bottom.
        """
        raise IndexError("this problem has no pictures")

    def add(self, a: int, b: float) -> float:
        """Add.

        Args:
            a: One number.
            b: Another number.
        """
        return a + b
'''


def test_tools_are_called_with_arguments_of_their_types_and_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("tools.py").write_text(TOOLS)
    assert main(["check-env", "tools.py:Crops"]) == 0
    said = capsys.readouterr().out
    crop = re.search(r"^crop: (\d+) calls, 0 worked; the last error: ", said, re.MULTILINE)
    add = re.search(r"^add: (\d+) calls, (\d+) worked$", said, re.MULTILINE)
    assert crop and int(crop[1]) > 5 and add and int(add[2]) > int(add[1]) / 2, said


def test_typed_arguments_fit_their_schemas():
    schema = {
        "type": "object",
        "properties": {
            "box": {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 4},
            "mode": {"type": "string", "enum": ["a", "b"]},
            "scale": {"type": "number", "minimum": 0.5, "maximum": 2},
            "either": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
        "required": ["box", "mode", "scale", "either"],
    }
    rng, drawn = random.Random(0), []
    for _ in range(200):
        call = json.loads(typed_call({"name": "f", "parameters": schema}, rng).split("\n")[1])
        Draft202012Validator(schema).validate(call["arguments"])
        drawn.append(call["arguments"])
    assert {arguments["either"] for arguments in drawn} == {True, False, None}
    assert {arguments["mode"] for arguments in drawn} == {"a", "b"}
    assert len({arguments["scale"] for arguments in drawn}) > 20


@pytest.mark.slow
def test_rows_without_answers_and_an_environment_that_grades_are_refused_by_name(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("tools.py").write_text(TOOLS)
    assert main(["check-env", "tools.py:Crops", "--data", "seeds://4"]) == 1
    assert (
        "BROKEN: tools.py:Crops grades against the row's answer, and row seeds-train:0 has none"
        in capsys.readouterr().out
    )


SECRET_WORDS = {
    "boxed example": ("Answer with \\boxed{north|south}.", "north"),
    "quoted": ("Say 'open sesame' or `go away`.", "open sesame"),
    "list": ("You may move left, right, or up a step.", "up"),
    "choices": ("Which?\n(A) one\n(B) two", "B"),
    "a word": ("The picture shows a zebra.", "zebra"),
}


@pytest.mark.parametrize("case", SECRET_WORDS)
def test_what_the_messages_suggest_is_played_boxed(case, tmp_path, capsys):
    text, word = SECRET_WORDS[case]
    body = f"""
    def start(self, problem): return [said({text!r})]
    def step(self, response): return StepResult((), float(response == '\\\\boxed{{{word}}}'), True)"""
    (tmp_path / "env.py").write_text(ENV + body)
    assert main(["check-env", f"{tmp_path}/env.py:Env"]) == 0
    printed = capsys.readouterr().out
    assert "reward of an episode: 0 to 1" in printed and "NOTHING" not in printed


def test_each_value_of_a_tools_enum_is_played(tmp_path, capsys):
    names = [f"door {n}" for n in range(20)]
    schema = {"type": "object", "properties": {"door": {"enum": names}, "n": {"type": "integer"}}}
    tool = {
        "type": "function",
        "function": {"name": "open", "parameters": schema | {"required": ["n"]}},
    }
    body = f"""
    def start(self, problem):
        self.left = 20
        return [said({json.dumps(tool)!r})]
    def step(self, response):
        self.left -= 1
        right = '"door 17"' in response and '"n"' in response
        self.left = 0 if right else self.left
        return StepResult([said("and now?")], float(right), self.left <= 0)"""
    (tmp_path / "env.py").write_text(ENV + body)
    assert main(["check-env", f"{tmp_path}/env.py:Env"]) == 0
    assert "reward of an episode: 0 to 1" in capsys.readouterr().out


def test_nothing_paid_is_said_and_answers_of_the_user_are_played(tmp_path, capsys):
    body = """
    def start(self, problem):
        self.turn = 0
        return [said("Guess.")]
    def step(self, response):
        self.turn += 1
        paid = self.turn == 2 and response == "second secret"
        return StepResult([said("again")], float(paid), self.turn >= 2)"""
    (tmp_path / "env.py").write_text(ENV + body)
    call = ["check-env", f"{tmp_path}/env.py:Env"]
    assert main(call) == 0
    assert "NOTHING WAS EVER PAID" in capsys.readouterr().out
    assert main([*call, "--answers", "first", "second secret"]) == 0
    assert "reward of an episode: 0 to 1" in capsys.readouterr().out
    (tmp_path / "answers.txt").write_text("wrong\n\nfirst\nsecond secret\n")
    assert main([*call, "--answers", str(tmp_path / "answers.txt")]) == 0
    assert "NOTHING" not in capsys.readouterr().out
