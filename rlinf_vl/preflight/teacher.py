"""The teacher that a config names (`algorithm.distillation.teacher_path`), looked at before anything is started."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rlinf_vl.config import Config
from rlinf_vl.config.toys import TOYS
from rlinf_vl.preflight.checkpoint import checkpoint


def teacher(config: Config) -> Iterator[str]:
    """Whether it is a checkpoint that the policy's engine need not know, and has the policy's tokens."""
    path, key = config.algorithm.distillation.teacher_path, "algorithm.distillation.teacher_path"
    if path is None:
        return
    if path in TOYS:
        yield f"{key}: {path!r} is the embedded task's model before any training; export a run's checkpoint, and name that folder"
        return
    model = replace(config.rollout.model, model_path=path, model_type="auto")
    rollout = replace(config.rollout, model=model, rollout_backend="torch")
    problems = list(checkpoint(replace(config, rollout=rollout)))
    yield from (problem.replace("rollout.model.model_path", key) for problem in problems)
    ours, theirs = (_vocabulary(name) for name in (config.rollout.model.model_path, path))
    if not problems and ours and theirs and ours != theirs:
        token = next(token for token in (*ours, *theirs) if ours.get(token) != theirs.get(token))
        yield (
            f"{key}: {path} has another tokenizer than {config.rollout.model.model_path}: {token!r} is token "
            f"{theirs.get(token, '(none)')} there and {ours.get(token, '(none)')} here; take a teacher of the policy's family"
        )


def _vocabulary(path: str) -> dict[str, int]:
    """Ids by token of a local checkpoint; empty where that isn't known without loading it."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if path not in TOYS:
            read = json.loads((Path(path) / "tokenizer.json").read_bytes())
            return read["model"]["vocab"] | {token["content"]: token["id"] for token in read["added_tokens"]}
    return {}
