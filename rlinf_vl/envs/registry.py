"""The registry of environments: the class for a name, and an environment for a problem."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, cast

from rlinf_vl.config.hubs import OPENENV
from rlinf_vl.config.parts import load_part
from rlinf_vl.envs.base import Env
from rlinf_vl.envs.call_forms import ReplyForm
from rlinf_vl.envs.single_turn import SingleTurn
from rlinf_vl.errors import nearest
from rlinf_vl.types import Problem
from rlinf_vl.user_code import check_code, load_code

#: Name of the environment that ends after one answer and begins without waiting for anything.
SINGLE = "single_turn"
#: Name (rollout.env_class) → module and class, imported on demand.
ENVIRONMENTS = {
    SINGLE: "rlinf_vl.envs.single_turn:SingleTurn",
    "picture_tool": "rlinf_vl.envs.picture_tool:PictureTool",
    "geometry_tool": "rlinf_vl.envs.geometry_tool:GeometryTool",
    "gymnasium": "rlinf_vl.extras.gymnasium:Gymnasium",
    "remote": "rlinf_vl.extras.remote.env:Remote",
    "browser": "rlinf_vl.extras.browser.env:Browser",
    "buttons": "rlinf_vl.extras.toy.buttons:Buttons",
    "maze": "rlinf_vl.extras.toy.maze:Maze",
    "rectangle_tool": "rlinf_vl.extras.toy.rectangle_tool:RectangleTool",
}
#: Keywords that the run passes to a constructor that names them.
OFFERED = ("grade", "reward_max", "reward_min", "seed", "group_seed")
_METHODS = ("start(problem)", "step(response)", "close()")


def load_env_class(name: str, files: Mapping[str, str]) -> type:
    """Return the class for a registered name, `module:Class`, `path/to/file.py:Class` or
    `openenv:ADDRESS`.

    Raises CodeError, as `load_code` does.

    Args:
        files: runner.code_files.
    """
    if name.startswith(OPENENV):
        return load_part("openenv-class")(name.removeprefix(OPENENV), files)
    return load_code(name, ENVIRONMENTS, files, kind="environment", signature=_METHODS)


def check_env_class(name: str, files: Mapping[str, str]) -> None:
    """Raise the CodeErrors of `load_env_class` that can be found without running the class's
    file."""
    if name.startswith(OPENENV):
        return  # a URL, or a class whose base class only running its file would tell
    check_code(name, ENVIRONMENTS, files, kind="environment", signature=_METHODS)


def grades_answers(cls: type) -> bool:
    """Return whether an environment rewards the rows' answers, so that one answer for all rows
    earns something."""
    return issubclass(cls, SingleTurn) or "grade" in _parameters(cls)


def leaves_grading(cls: type) -> bool:
    """Return whether an environment certainly leaves its last response to the run's reward
    functions."""
    from rlinf_vl.envs.tool import ToolEnv  # imports PIL and jsonschema

    if issubclass(cls, ToolEnv):
        return cls.answer is ToolEnv.answer
    return issubclass(cls, SingleTurn) and cls.step is SingleTurn.step


def keyword_problems(cls: type, kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each reason why a constructor doesn't accept these keywords."""
    parameters = _parameters(cls)
    accepted = [name for name in parameters if name not in OFFERED]
    for name in kwargs:
        if name in OFFERED:
            yield f"{name!r} is given by the run; leave it out"
        elif name not in parameters and not _takes_any(cls):
            accepted_list = ", ".join(accepted) or "none"
            yield f"{cls.__name__} takes no keyword {name!r}; it takes {accepted_list};{nearest(name, accepted)}".rstrip(
                ";"
            )
    for name in accepted:
        if parameters[name].default is inspect.Parameter.empty and name not in kwargs:
            yield f"{cls.__name__} needs keyword {name!r}; give it a value"


@dataclass(frozen=True)
class EnvMaker:
    """Makes the environment of each trajectory of a run.

    Attributes:
        name: rollout.env_class. A row may name another class (`Problem.env_class`).
        kwargs: rollout.env_kwargs, for the class `name` only. A row's column `env_kwargs` overrides
            them.
        files: runner.code_files.
        grade: (problem, response) → whether the response is right; environments get it as a
            `Grade`.
        reward_max, reward_min: the scale of rewards.
        reply_form: how the checkpoint writes replies, for environments with that attribute.
    """

    name: str
    kwargs: Mapping[str, Any]
    files: Mapping[str, str]
    grade: Callable[[Problem, str], bool]
    reward_max: float
    reward_min: float
    reply_form: ReplyForm = ReplyForm()

    def __call__(self, problem: Problem, seed: int, group_seed: int) -> Env:
        """Return a new environment for one trajectory.

        Raises the errors of its constructor, and ValueError as `check` does.
        """
        cls, kwargs = self._class_and_keywords(problem)
        offered = {
            "grade": partial(self._grade, problem),
            "reward_max": self.reward_max,
            "reward_min": self.reward_min,
            "seed": seed,
            "group_seed": group_seed,
        }
        names = _parameters(cls)
        env = cls(**kwargs, **{name: value for name, value in offered.items() if name in names})
        if hasattr(cls, "reply_form"):
            env.reply_form = self.reply_form
        return cast(Env, env)

    def _grade(self, problem: Problem, response: str, answer: str) -> bool:
        return self.grade(
            problem if answer == problem.answer else replace(problem, answer=answer), response
        )

    def name_of(self, problem: Problem) -> str:
        """Return the name of the problem's environment."""
        return problem.env_class or self.name

    def leaves_grading(self, problem: Problem) -> bool:
        """Return whether the problem's environment certainly leaves its last response to the run's
        reward functions."""
        return leaves_grading(load_env_class(self.name_of(problem), self.files))

    def check(self, problem: Problem) -> None:
        """Raise ValueError if a problem's environment can't be made: its class is unknown or
        refuses the keywords."""
        cls, kwargs = self._class_and_keywords(problem)
        for message in keyword_problems(cls, kwargs):
            raise ValueError(message)
        tools_prompt = kwargs.get("tools_prompt", getattr(cls, "tools_prompt", None))
        # A prompt of the user's may say how calls are written instead.
        needs_form = tools_prompt == "" or "{call}" in (tools_prompt or "")
        if self.reply_form.refusal and needs_form:
            raise ValueError(f"{cls.__name__} has tools, and {self.reply_form.refusal}")

    def _class_and_keywords(self, problem: Problem) -> tuple[type, dict[str, Any]]:
        row_kwargs = problem.columns.get("env_kwargs") or {}
        if not isinstance(row_kwargs, dict):
            raise ValueError(
                f"column 'env_kwargs' holds {row_kwargs!r}; write a mapping of keywords"
            )
        cls = load_env_class(self.name_of(problem), self.files)
        # Rows are data that may come from anywhere, so they must not choose functions or addresses.
        if refused := sorted(row_kwargs.keys() & set(getattr(cls, "config_only", ()))):
            raise ValueError(
                f"column 'env_kwargs' gives {', '.join(refused)}, which rollout.env_kwargs alone "
                "may say"
            )
        # rollout.env_kwargs are for the configured class; the class of a row may not know them.
        is_configured_class = problem.env_class is None or cls is load_env_class(
            self.name, self.files
        )
        return cls, (dict(self.kwargs) if is_configured_class else {}) | row_kwargs


@lru_cache  # inspecting takes longer than making most environments
def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    """Return the keywords that a constructor names."""
    kinds = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    return {name: p for name, p in inspect.signature(cls).parameters.items() if p.kind in kinds}


def _takes_any(cls: type) -> bool:
    return any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(cls).parameters.values()
    )
