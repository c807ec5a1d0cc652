"""Check the teachers that a config names (`algorithm.distillation`) before a run."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rlinf_vl.config import Config
from rlinf_vl.config.schema.guidance import SELF
from rlinf_vl.config.toys import TOYS
from rlinf_vl.tools.check.checkpoint import checkpoint


def teachers(config: Config) -> Iterator[str]:
    """Yield the problems of each teacher."""
    distillation = config.algorithm.distillation
    for path in distillation.labels_by_path:
        if path == SELF:  # the policy's own checkpoint is checked as such
            continue
        yield from _teacher(config, path, distillation.key_of(path))


def _teacher(config: Config, path: str, key: str) -> Iterator[str]:
    """Yield a teacher's problems as a checkpoint, and tokens that differ from the policy's.

    The policy's engine need not know its family. `key` is the config key that names it.
    """
    if path in TOYS:
        yield f"{key}: {path!r} is the embedded task's model before any training; export a run's checkpoint, and name that folder"
        return
    model = replace(config.rollout.model, model_path=path, model_type="auto")
    # As of the torch engine: no engine runs the teacher, so limits of SGLang do not matter.
    rollout = replace(config.rollout, model=model, rollout_backend="torch")
    problems = list(checkpoint(replace(config, rollout=rollout)))
    yield from (problem.replace("rollout.model.model_path", key) for problem in problems)
    policy_ids, teacher_ids = _vocabulary(config.rollout.model.model_path), _vocabulary(path)
    if not problems and policy_ids and teacher_ids and policy_ids != teacher_ids:
        token = next(
            token
            for token in (*policy_ids, *teacher_ids)
            if policy_ids.get(token) != teacher_ids.get(token)
        )
        yield (
            f"{key}: {path} has another tokenizer than {config.rollout.model.model_path}: "
            f"{token!r} is token {teacher_ids.get(token, '(none)')} there and "
            f"{policy_ids.get(token, '(none)')} here; take a teacher of the policy's family"
        )


def _vocabulary(path: str) -> dict[str, int]:
    """Return the ids by token of a local checkpoint.

    It is empty where they aren't known without loading the tokenizer.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if path not in TOYS:
            tokenizer = json.loads((Path(path) / "tokenizer.json").read_bytes())
            return tokenizer["model"]["vocab"] | {
                token["content"]: token["id"] for token in tokenizer["added_tokens"]
            }
    return {}
