"""From the name of an environment to its class, and from a problem to an environment."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, cast

from rlinf_vl.code import check_code, load_code
from rlinf_vl.envs.base import Env
from rlinf_vl.envs.single_turn import SingleTurn
from rlinf_vl.errors import nearest
from rlinf_vl.types import Problem

#: The environment that ends after one answer, and begins without waiting for anything.
SINGLE = "single_turn"
#: Name (rollout.env_class) → where its class is, imported when asked for.
ENVIRONMENTS = {
    SINGLE: "rlinf_vl.envs.single_turn:SingleTurn",
    "picture_tool": "rlinf_vl.envs.picture_tool:PictureTool",
    "geometry_tool": "rlinf_vl.envs.geometry_tool:GeometryTool",
    "gymnasium": "rlinf_vl.envs.gymnasium:Gymnasium",
    "remote": "rlinf_vl.envs.remote:Remote",
    "maze": "rlinf_vl.toy.maze:Maze",
    "rectangle_tool": "rlinf_vl.toy.rectangle_tool:RectangleTool",
}
#: Keywords that a constructor gets if it names them.
OFFERED = ("grade", "reward_max", "reward_min", "seed", "group_seed")
_METHODS = ("start(problem)", "step(response)", "close()")


def load_env_class(name: str, files: Mapping[str, str]) -> type:
    """The class of a registered name, of `module:Class` or of `path/to/file.py:Class`. Raises CodeError, as `load_code`.

    Args:
        files: runner.code_files.
    """
    return load_code(name, ENVIRONMENTS, files, kind="environment", signature=_METHODS)


def check_env_class(name: str, files: Mapping[str, str]) -> None:
    """What `load_env_class` can refuse without running the class's file. Raises CodeError."""
    check_code(name, ENVIRONMENTS, files, kind="environment", signature=_METHODS)


def grades_answers(cls: type) -> bool:
    """Whether an environment pays by the rows' answers: then one answer for all rows is worth something."""
    return issubclass(cls, SingleTurn) or "grade" in _parameters(cls)


def leaves_grading(cls: type) -> bool:
    """Return whether an environment is sure to leave its last response to the run's reward functions."""
    from rlinf_vl.envs.tool import ToolEnv  # with PIL and jsonschema

    if issubclass(cls, ToolEnv):
        return cls.answer is ToolEnv.answer
    return issubclass(cls, SingleTurn) and cls.step is SingleTurn.step


def keyword_problems(cls: type, kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Why a constructor doesn't take these keywords, each problem a sentence."""
    parameters = _parameters(cls)
    taken = [name for name in parameters if name not in OFFERED]
    for name in kwargs:
        if name in OFFERED:
            yield f"{name!r} is given by the run; leave it out"
        elif name not in parameters and not _takes_any(cls):
            takes = ", ".join(taken) or "none"
            yield f"{cls.__name__} takes no keyword {name!r}; it takes {takes};{nearest(name, taken)}".rstrip(";")
    for name in taken:
        if parameters[name].default is inspect.Parameter.empty and name not in kwargs:
            yield f"{cls.__name__} needs keyword {name!r}; give it a value"


@dataclass(frozen=True)
class EnvMaker:
    """Makes the environment of each trajectory of a run.

    Attributes:
        name, kwargs: rollout.env_class and rollout.env_kwargs. A row may name another class (`Problem.env_class`), which gets none
            of `kwargs`; and a row's column `env_kwargs` has further ones, over those.
        files: runner.code_files.
        grade: (problem, response) → whether the response is right; environments get it as a `Grade`.
    """

    name: str
    kwargs: Mapping[str, Any]
    files: Mapping[str, str]
    grade: Callable[[Problem, str], bool]
    reward_max: float
    reward_min: float

    def __call__(self, problem: Problem, seed: int, group_seed: int) -> Env:
        """A fresh environment for one trajectory. Raises what its constructor raises; ValueError as `check`."""
        cls, kwargs = self._class_and_keywords(problem)
        own = {"grade": partial(self._grade, problem), "reward_max": self.reward_max, "reward_min": self.reward_min}
        offered = own | {"seed": seed, "group_seed": group_seed}
        names = _parameters(cls)
        return cast(Env, cls(**kwargs, **{name: value for name, value in offered.items() if name in names}))

    def _grade(self, problem: Problem, response: str, answer: str) -> bool:
        return self.grade(problem if answer == problem.answer else replace(problem, answer=answer), response)

    def name_of(self, problem: Problem) -> str:
        return problem.env_class or self.name

    def leaves_grading(self, problem: Problem) -> bool:
        """Return whether the problem's environment is sure to leave its last response to the run's reward functions."""
        return leaves_grading(load_env_class(self.name_of(problem), self.files))

    def check(self, problem: Problem) -> None:
        """Raise ValueError if a problem's environment can't be made: there is no such class, or it doesn't take the keywords."""
        cls, kwargs = self._class_and_keywords(problem)
        for found in keyword_problems(cls, kwargs):
            raise ValueError(found)

    def _class_and_keywords(self, problem: Problem) -> tuple[type, dict[str, Any]]:
        own = problem.columns.get("env_kwargs") or {}
        if not isinstance(own, dict):
            raise ValueError(f"column 'env_kwargs' holds {own!r}; write a mapping of keywords")
        cls = load_env_class(self.name_of(problem), self.files)
        if refused := sorted(own.keys() & set(getattr(cls, "config_only", ()))):
            raise ValueError(f"column 'env_kwargs' gives {', '.join(refused)}, which rollout.env_kwargs alone may say")
        is_the_runs = problem.env_class is None or cls is load_env_class(self.name, self.files)
        return cls, (dict(self.kwargs) if is_the_runs else {}) | own


@lru_cache  # to look takes longer than to make most environments
def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    """Keywords that a constructor names."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in inspect.signature(cls).parameters.items() if p.kind in kinds}


def _takes_any(cls: type) -> bool:
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(cls).parameters.values())
