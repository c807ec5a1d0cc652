"""Environments: what a trajectory talks to. Importing this registers those that come with the library."""

from rlinf_vl.envs.base import ENVIRONMENTS, Env, StepResult, make_env, register_env
from rlinf_vl.envs.single_turn import SingleTurn

__all__ = ["ENVIRONMENTS", "Env", "SingleTurn", "StepResult", "make_env", "register_env"]
