"""What the trainer's benchmark asks for with `--device cuda`, seen without a GPU."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def trainer(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("trainer")
    for name, value in module.MALLOC.items():
        monkeypatch.setenv(name, value)  # otherwise it starts itself anew with them
    yield module
    for name in ("trainer", "baselines", "workload"):
        sys.modules.pop(name)


def test_its_process_group_reduces_tensors_of_both_devices(trainer, monkeypatch):
    """Ranks agree on counts that are CPU tensors; NCCL alone has no way to reduce them."""
    seen = {}
    monkeypatch.setattr(sys, "argv", ["trainer.py", "--device", "cuda"])
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **_: seen.update(backend=backend)
    )
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: seen.update(index=index))
    monkeypatch.setattr(
        trainer,
        "measure",
        lambda folder, args, figures: seen.update(device=args.device, dtype=args.dtype),
    )
    trainer.main()
    assert seen == {"backend": "cpu:gloo,cuda:nccl", "index": 0, "device": "cuda", "dtype": "bf16"}
    assert dist.BackendConfig(seen["backend"]).get_device_backend_map() == {
        "cpu": "gloo",
        "cuda": "nccl",
    }


def test_its_engine_is_built_on_the_device(trainer, monkeypatch):
    class Built(Exception):
        pass

    class Engine:
        def __init__(self, *args, device="cpu", **kwargs):
            raise Built(device)

    class Anything:
        groups, lengths, image_tokens = (), [[3]], None

        def banned_ids(self, size):
            return None

    monkeypatch.setattr(trainer, "TorchEngine", Engine)
    monkeypatch.setattr(trainer, "vocab_size", lambda model: 8)
    with pytest.raises(Built, match="cuda"):
        trainer.generation_seconds(None, Anything(), Anything(), None, 1, "cuda")


def test_a_peer_is_measured_on_the_cpu_only(trainer, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trainer.py", "--device", "cuda", "--peer-python", "python"])
    with pytest.raises(SystemExit):
        trainer.main()
    assert "--device cpu" in capsys.readouterr().err
