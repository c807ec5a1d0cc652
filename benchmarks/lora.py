"""LoRA against full training: bytes of the optimizer's state, of a checkpoint and of a weight sync. Counted, not timed.

    python benchmarks/lora.py [--shape small] [--rank 16] [--json FILE]

A real trainer, alone, takes one optimizer step on the model (`--shape` of benchmarks/workload.py, or `toy`) and writes its
checkpoint. Full training leaves the vision tower as it is, as it does unless told otherwise; engines compute in bfloat16.
"""

import argparse
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor
from workload import SHAPES, write_model

from rlinf_vl.actor.load import load_trainer
from rlinf_vl.actor.mesh import Mesh, join_ranks
from rlinf_vl.config import load_config

ADAPTERS = "actor.model.is_lora=true"
WAYS = {
    "full": (),
    "full, tower too": ("actor.model.freeze_vision_tower=false",),
    "LoRA, language": (ADAPTERS,),
    "LoRA, language, as adapters": (ADAPTERS, "actor.model.lora.sync=adapters"),
    "LoRA, language, nf4": (ADAPTERS, "actor.model.lora.quantization=nf4"),
    "LoRA, all-linear": (ADAPTERS, "actor.model.lora.target_modules=[all-linear]"),
}


def measure(model: Path, overrides: tuple[str, ...], rank: int, mesh: Mesh) -> dict[str, int]:
    compute = "actor.fsdp_config.mixed_precision.param_dtype=bf16"
    trainer = load_trainer(
        load_config("toy-grpo-cpu", (compute, f"actor.model.lora.rank={rank}", *overrides)),
        str(model),
        mesh,
        1,
    )
    parameters = list(trainer.policy.parameters())
    trained = [p for p in parameters if p.requires_grad]
    for p in trained:
        p.grad = torch.ones_like(p)
    trainer.optimizer.step()
    states = trainer.optimizer.state.values()
    with tempfile.TemporaryDirectory() as folder:
        trainer.stage()
        trainer.write(folder)
        checkpoint = sum(path.stat().st_size for path in Path(folder).iterdir())
    return {
        "trained": sum(p.numel() for p in trained),
        "weights_bytes": sum(stored(p) for p in parameters),
        "optimizer_bytes": sum(
            v.to_local().nbytes for state in states for v in state.values() if v.ndim
        ),
        "checkpoint_bytes": checkpoint,
        "sync_bytes": sum(value.nbytes for _, value in trainer.weights(torch.bfloat16)),
    }


def stored(weight: torch.Tensor) -> int:
    """Bytes of a parameter; of a quantized one, with its scales."""
    if isinstance(weight, DTensor):
        return weight.to_local().nbytes
    state: Any = getattr(weight, "quant_state", None)
    return weight.nbytes + (state.absmax.nbytes + state.state2.absmax.nbytes if state else 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=(*SHAPES, "toy"), default="small")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    figures = {"shape": arguments.shape, "rank": arguments.rank}
    table = Table("", "trained", "weights, MB", "optimizer, MB", "checkpoint, MB", "a sync, MB")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        if arguments.shape == "toy":
            from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path

            model = toy_checkpoint_path()
        else:
            write_model(model, arguments.shape)
        join_ranks("cpu")
        mesh = Mesh.make("cpu")
        for way, overrides in WAYS.items():
            if way.endswith("nf4") and importlib.util.find_spec("bitsandbytes") is None:
                continue
            found = measure(model, overrides, arguments.rank, mesh)
            table.add_row(
                way, f"{found['trained']:,}", *(f"{n / 1e6:.2f}" for n in list(found.values())[1:])
            )
            figures |= {f"{way}: {name}": value for name, value in found.items()}
    torch.distributed.destroy_process_group()
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
