"""From a name to an environment: registered ones, modules, files whose text travels; what a constructor gets, and refusals."""

import inspect
import traceback

import pytest

from rlinf_vl.config import load_config, save_config
from rlinf_vl.envs import ENVIRONMENTS, EnvMaker
from rlinf_vl.envs.registry import grades_answers, keyword_problems, load_env_class
from rlinf_vl.envs.single_turn import SingleTurn
from rlinf_vl.errors import ConfigError
from rlinf_vl.tools.check.inputs import RULES
from rlinf_vl.types import Problem

PROBLEM = Problem(
    "p:0", ({"role": "user", "content": [{"type": "text", "text": "Say yes."}]},), "yes"
)
ENVS = """
from __future__ import annotations
from dataclasses import dataclass
from rlinf_vl.envs import StepResult

@dataclass
class Size:
    width: int = 3

class One:
    def __init__(self, size=3, *, seed, group_seed, grade):
        self.got = size, seed, group_seed, grade("yes", "yes")
    def start(self, problem): return list(problem.messages)
    def step(self, response): return StepResult((), 1.0, True)
    def close(self): pass

class Other(One):
    def __init__(self): self.got = Size()
    def step(self, response): raise KeyError(response)

class Mute:
    def start(self, problem): return []

def function(): pass
"""


def maker(name, files=None, kwargs=None):
    return EnvMaker(
        name,
        kwargs or {},
        files or {},
        lambda problem, response: problem.answer in response,
        2.0,
        -1.0,
    )


@pytest.fixture
def envs(tmp_path):
    (tmp_path / "envs.py").write_text(ENVS)
    return tmp_path / "envs.py"


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_every_registered_class_is_there(name):
    assert isinstance(load_env_class(name, {}), type)


@pytest.mark.parametrize(
    ("name", "graded"), [("single_turn", True), ("rectangle_tool", True), ("maze", False)]
)
def test_whether_it_pays_by_the_rows_answers(name, graded):
    assert grades_answers(load_env_class(name, {})) is graded


def test_a_class_gets_the_keywords_that_it_names(envs):
    make = maker(f"{envs}:One", kwargs={"size": 5})
    assert make(PROBLEM, 7, 8).got == (5, 7, 8, True)
    assert isinstance(maker("rlinf_vl.envs.single_turn:SingleTurn")(PROBLEM, 0, 0), SingleTurn)
    assert maker("single_turn")(PROBLEM, 0, 0).start(PROBLEM) == list(PROBLEM.messages)


def test_a_row_names_its_own_class_and_keywords(envs):
    make = maker(f"{envs}:One", kwargs={"size": 5})
    assert (
        make(Problem("p", (), "", env_class=f"{envs}:Other"), 0, 0).got
        == load_env_class(f"{envs}:Other", {}).__init__.__globals__["Size"]()
    )
    assert make(Problem("p", (), "", columns={"env_kwargs": {"size": 9}}), 1, 2).got == (
        9,
        1,
        2,
        True,
    )
    with pytest.raises(match="no environment 'sinlge_turn'"):
        make.check(Problem("p", (), "", env_class="sinlge_turn"))
    with pytest.raises(ValueError, match="Other takes no keyword 'size'"):
        make.check(
            Problem("p", (), "", env_class=f"{envs}:Other", columns={"env_kwargs": {"size": 1}})
        )
    make.check(Problem("p", (), "", env_class=f"{envs}:Other"))


def test_a_class_is_the_runs_however_it_is_written(envs, tmp_path):
    (tmp_path / "data").mkdir()
    make = maker(f"{envs}:One", {str(envs): ENVS}, {"size": 5})
    for name in (f"{envs}:One", "envs.py:One", f"{tmp_path}/data/../envs.py:One"):
        assert make(Problem("p", (), "", env_class=name), 1, 2).got[0] == 5
    assert make(Problem("p", (), "", env_class="single_turn"), 1, 2).start(PROBLEM)


def test_a_file_travels_as_text_with_all_of_its_classes(envs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config("toy-grpo-cpu", ["rollout.env_class=envs.py:One"], RULES)
    assert config.rollout.env_class == f"{envs}:One" and config.runner.code_files == {
        str(envs): ENVS
    }
    save_config(config, tmp_path / "run/config.yaml")
    envs.unlink()
    monkeypatch.chdir("/")
    again = load_config(str(tmp_path / "run/config.yaml"), further=RULES)
    assert again == config
    make = maker(again.rollout.env_class, again.runner.code_files)
    assert make(PROBLEM, 7, 8).got[0] == 3
    other = make(Problem("p", (), "", env_class="envs.py:Other"), 0, 0)
    assert type(other).__mro__[1] is type(make(PROBLEM, 0, 0)), (
        "one module for all classes of a file"
    )
    with pytest.raises(KeyError) as error:
        other.step("what")
    assert "raise KeyError(response)" in "".join(traceback.format_exception(error.value))
    assert "class Other(One)" in inspect.getsource(type(other))


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        (
            "sinlge_turn",
            "{}",
            ["no environment 'sinlge_turn'", "did you mean 'single_turn'", "path/to/file.py:Name"],
        ),
        ("nowhere.py:One", "{}", ["no file '{here}/nowhere.py'"]),
        (
            "envs.py:Oen",
            "{}",
            ["no class 'Oen' in {here}/envs.py", "Size, One, Other, Mute", "did you mean 'One'"],
        ),
        ("envs.py:function", "{}", ["function is no class; an environment has start(problem)"]),
        ("envs.py:", "{}", ["no environment '{here}/envs.py:'"]),
        ("envs.py:Mute", "{}", ["Mute has no step(response) and no close()"]),
        ("broken.py:One", "{}", ["broken.py, line 2 can't be imported: SyntaxError"]),
        (
            "raises.py:One",
            "{}",
            ["raises.py can't be imported: ZeroDivisionError: division by zero"],
        ),
        ("exits.py:One", "{}", ["exits.py can't be imported: SystemExit: 3"]),
        (
            "lacks.py:One",
            "{}",
            [
                "lacks.py can't be imported: ModuleNotFoundError: No module named 'not_there'; install it where workers run"
            ],
        ),
        ("no_such_module:One", "{}", ["no_such_module can't be imported: ModuleNotFoundError"]),
        (
            "envs.py:One",
            "{sise: 3}",
            ["rollout.env_kwargs: One takes no keyword 'sise'; it takes size; did you mean"],
        ),
        (
            "envs.py:One",
            "{seed: 3}",
            ["rollout.env_kwargs: 'seed' is given by the run; leave it out"],
        ),
        ("needs.py:One", "{}", ["rollout.env_kwargs: One needs keyword 'size'; give it a value"]),
        (
            "needs.py:One",
            "{size: 0}",
            ["needs.py:One' can't be made: ValueError: size must be > 0"],
        ),
        ("single_turn", "{size: 0}", ["SingleTurn takes no keyword 'size'; it takes none"]),
    ],
)
def test_refusals_are_told_before_anything_starts(
    envs, tmp_path, monkeypatch, name, kwargs, expected
):
    (tmp_path / "broken.py").write_text("x = 1\nclass One(:\n")
    one = "class One:\n" + "".join(
        f"    def {name}(self, x=0): ...\n" for name in ("start", "step", "close")
    )
    (tmp_path / "raises.py").write_text(f"{one}1 / 0\n")
    (tmp_path / "exits.py").write_text(f"{one}import sys\nsys.exit(3)\n")
    (tmp_path / "lacks.py").write_text(f"{one}import not_there\n")
    needs = "def __init__(self, size):\n        if size < 1: raise ValueError('size must be > 0')\n"
    (tmp_path / "needs.py").write_text(
        ENVS.replace("class One:\n", f"class One:\n    {needs}", 1).replace("*, seed", "")
    )
    (tmp_path / "needs.py").write_text(
        f"class One:\n    {needs}    def start(self, p): ...\n    def step(self, r): ...\n    async def close(self): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_config(
            "toy-grpo-cpu", [f"rollout.env_class='{name}'", f"rollout.env_kwargs={kwargs}"], RULES
        )
    assert len(error.value.problems) == 1 and "\n" not in str(error.value)
    for text in expected:
        assert text.replace("{here}", str(tmp_path)) in str(error.value)


def test_a_constructor_may_take_any_keyword():
    class Any:
        def __init__(self, size, **further): ...

    assert list(keyword_problems(Any, {"size": 1, "colour": 2})) == []
    assert list(keyword_problems(Any, {"colour": 2})) == [
        "Any needs keyword 'size'; give it a value"
    ]
