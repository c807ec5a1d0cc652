"""The controller process holds no pixel and no token array: everything it takes out of Ray is looked at."""

import dataclasses
import enum
import types

import numpy as np
import pytest
import ray
import torch

from rlinf_vl.config import load_config
from rlinf_vl.rollout.episode.batch_stream import BatchReport
from rlinf_vl.types import Group, ImageRef, Problem, Sample, Trajectory

pytestmark = pytest.mark.integration


def offences(value, path="") -> list[str]:
    """Where `value` holds an array, a tensor, bytes or one of the types that carry them."""
    if isinstance(
        value,
        (np.ndarray, torch.Tensor, bytes, bytearray, Group, Trajectory, ImageRef, Problem, Sample),
    ):
        return [f"{path}: {type(value).__name__}"]
    if isinstance(value, dict):
        return [o for k, v in value.items() for o in offences(v, f"{path}[{k}]")]
    if isinstance(value, (list, tuple, set)):
        # a row of many numbers would be tokens by another name
        many = (
            [f"{path}: {len(value)} numbers"]
            if len(value) > 64 and isinstance(next(iter(value)), (int, float))
            else []
        )
        return many + [o for i, v in enumerate(value) for o in offences(v, f"{path}[{i}]")]
    if dataclasses.is_dataclass(value):
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return [
            o
            for name, v in fields
            if name not in ("kept", "too_long")
            for o in offences(v, f"{path}.{name}")
        ]
    # The labels of staged buckets name the function that opens their memory.
    numbers = (int, float, str, bool, enum.Enum, ray.ObjectRef, types.FunctionType)
    assert value is None or isinstance(value, numbers), (
        path,
        type(value),
    )
    return []


def summaries_in(value) -> int:
    """Return the number of summaries in lists of reports."""
    if isinstance(value, BatchReport):
        return len(value.groups)
    return sum(map(summaries_in, value)) if isinstance(value, (list, tuple)) else 0


def test_only_numbers_and_references_reach_the_controller(tmp_path, monkeypatch):
    from rlinf_vl.driver.backends import parts_of
    from rlinf_vl.driver.supervise import supervise
    from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path
    from rlinf_vl.observe.progress import RunProgress
    from rlinf_vl.rollout.pool import pool, worker_handle
    from rlinf_vl.runtime.stop_request import StopRequest

    overrides = [
        "runner.max_steps=1",
        "data.val_samples=8",
        "data.rollout_batch_size=4",
        f"runner.output_dir={tmp_path}",
    ]
    config = load_config("toy-grpo-cpu", overrides)
    received = []
    get = ray.get

    def watched(*args, **kwargs):
        value = get(*args, **kwargs)
        received.append(value)
        return value

    answer = worker_handle.answer

    async def watched_answer(reference):
        """What workers send the pool, the summaries of groups among it, is awaited."""
        value = await answer(reference)
        received.append(value)
        return value

    model = str(toy_checkpoint_path())
    with parts_of(config, model, tmp_path, RunProgress(), StopRequest()) as parts:
        for module in (pool, worker_handle):
            monkeypatch.setattr(module, "answer", watched_answer)
        monkeypatch.setattr(ray, "get", watched)
        metrics = supervise(parts)
        monkeypatch.setattr(ray, "get", get)
    assert metrics["reward/mean"] >= 0
    assert summaries_in(received) == 8 + 8 + 4
    found = [o for i, value in enumerate(received) for o in offences(value, f"#{i}")]
    assert not found


def test_the_watch_itself_finds_arrays():
    assert offences({"a": [np.zeros(3)]}) and offences((b"png",)) and offences(list(range(100)))
    assert not offences({"a": (1, 2.0, "x", None)})
