"""Environments, which answer a policy's responses in an episode."""

from rlinf_vl.envs.base import Env, Grade, StepResult
from rlinf_vl.envs.registry import ENVIRONMENTS, EnvMaker

__all__ = ["ENVIRONMENTS", "Env", "EnvMaker", "Grade", "StepResult"]
