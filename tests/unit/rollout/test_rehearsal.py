"""The rehearsal of a run: what a newcomer gets wrong is found before Ray, and takes no run's name."""

import json
import textwrap
from pathlib import Path

import pytest

from rlinf_vl.__main__ import main
from rlinf_vl.config import load_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.tools.check.rehearsal import rehearse

CODE = '''
from rlinf_vl.envs import StepResult
from rlinf_vl.envs.tool import ToolEnv


def asks_for_a_column(response, answer, rubric):
    return 1.0

def returns_text(response, answer):
    return "yes"

def fails(response, answer):
    return {}["key"]

def fails_on_words(response, answer):
    return float(int(response.strip("boxed{}<answer>/\\\\")) == int(answer))

def pays_all(response, answer):
    return 1.0


class Base:
    def start(self, problem):
        return [{"role": "user", "content": "Guess."}]

    def step(self, response):
        return StepResult((), 0.0, True)

    def close(self):
        pass

class FailsToStart(Base):
    def start(self, problem):
        return problem.nothing

class FailsToStep(Base):
    def step(self, response):
        return 1 / 0

class ReturnsNothing(Base):
    def step(self, response):
        return None

class TalksTooMuch(Base):
    def start(self, problem):
        return [{"role": "user", "content": "Guess. " * 500}]

class Hangs(Base):
    def start(self, problem):
        import time
        time.sleep(30)

class GradesItself(Base):
    def __init__(self, grade):
        self.grade = grade

    def step(self, response):
        return StepResult((), float(self.grade(response, self.problem.answer)), True)

    def start(self, problem):
        self.problem = problem
        return super().start(problem)

class Calculator(ToolEnv):
    def add(self, a: int, b: int) -> int:
        """Add.

        Args:
            a: One number.
            b: Another number.
        """
        return a + b
'''


@pytest.fixture
def prepared(tmp_path, toy_folder, monkeypatch):
    """Overrides of a config with 32 rows, whose reward and environment are then the user's."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(textwrap.dedent(CODE))
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(32)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [
        "data.train_data_paths=[rows.jsonl]",
        "data.val_data_paths=[]",
        "data.image_keys=[]",
        f"rollout.model.model_path={toy_folder}",
        "runner.output_dir=out",
    ]


def rehearsed(prepared, *overrides):
    config = load_config("toy-grpo-cpu", [*prepared, *overrides])
    return rehearse(config, config.rollout.model.model_path)


def test_a_sound_config_is_ready_in_one_line(prepared, capsys):
    assert main(["train", "--check", "toy-grpo-cpu", *prepared]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("ready: 32 rows, reward 0.0 and 1.0, first prompt ")
    assert not [path for path in Path("out").glob("*") if path.is_dir()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("asks_for_a_column", "answer, final_response, images, messages, prompt, response"),
        ("returns_text", "it returned str 'yes'; return a number"),
        ("fails", "KeyError: 'key'"),
    ],
)
def test_a_reward_that_always_fails_ends_a_start_and_takes_no_name(prepared, name, reason, capfd):
    functions = f"reward.functions=[{{function: mine.py:{name}}}]"
    assert main(["train", "toy-grpo-cpu", *prepared, functions]) == 2
    stderr = capfd.readouterr().err
    assert reason in stderr and "reward.functions[0]" in stderr
    assert stderr.count("Traceback") == (name == "fails"), (
        "one of an error in the user's function, by no means four"
    )
    assert "\x1b[" not in stderr
    assert not [path for path in Path("out").glob("*") if path.is_dir()]


@pytest.mark.slow
def test_a_reward_that_fails_on_some_answers_or_pays_all_is_told(prepared):
    (warning,) = rehearsed(
        prepared, "reward.functions=[{function: mine.py:fails_on_words}]"
    ).warnings
    assert "failed on" in warning and "of 8 answers" in warning and "ValueError" in warning
    (warning,) = rehearsed(prepared, "reward.functions=[{function: mine.py:pays_all}]").warnings
    assert "get the same reward, 1" in warning


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("FailsToStart", "AttributeError: 'Problem' object has no attribute 'nothing'"),
        ("FailsToStep", "ZeroDivisionError: division by zero"),
        ("ReturnsNothing", "step returned NoneType: return StepResult"),
        ("TalksTooMuch", "data.max_prompt_length is 512"),
    ],
)
def test_a_mistake_in_an_environment_is_found(prepared, name, reason):
    with pytest.raises(ConfigError, match=r"^rollout\.env_class: ") as caught:
        rehearsed(prepared, f"rollout.env_class=mine.py:{name}")
    assert reason in str(caught.value) and name in str(caught.value)
    if name.startswith("Fails"):
        assert "mine.py, line " in str(caught.value)


def test_an_environment_that_hangs_is_told_and_not_waited_for(prepared):
    (warning,) = rehearsed(
        prepared, "rollout.env_class=mine.py:Hangs", "rollout.turn_timeout=0.2"
    ).warnings
    assert "rollout.turn_timeout=0.2" in warning


def test_prompts_that_are_all_too_long_name_the_keys(prepared):
    limits = [
        "data.max_prompt_length=4",
        "runner.seq_length=64",
        "algorithm.sampling_params.max_new_tokens=8",
    ]
    with pytest.raises(
        ConfigError, match=r"none of 32 rows .* above data\.max_prompt_length=4: raise that"
    ) as caught:
        rehearsed(prepared, *limits)
    assert "data.overlong=cut" in str(caught.value)


@pytest.mark.slow
def test_an_environment_that_grades_against_no_answer_is_refused_by_name(prepared):
    seeds = "data.train_data_paths=['seeds://64']"
    for name in ("Calculator", "GradesItself"):
        limits = [
            "data.max_prompt_length=1024",
            "runner.seq_length=2048",
            "runner.max_tokens_per_mbs=2048",
        ]
        with pytest.raises(
            ConfigError, match=rf"{name} grades against the row's answer, and .* has none"
        ):
            rehearsed(prepared, seeds, f"rollout.env_class=mine.py:{name}", *limits)
    assert rehearsed(prepared, seeds, "rollout.env_class=mine.py:Base").rows == 64
    with pytest.raises(ConfigError, match=r"single_turn grades against the row's answer"):
        rehearsed(prepared, seeds)
    free = "reward.functions=[{function: mine.py:pays_all}]"
    assert rehearsed(prepared, seeds, free).rows == 64, (
        "a function of the user's own may need no answer"
    )
