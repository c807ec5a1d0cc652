"""Supervised training on conversations with pictures: tokens a processor second, beside TRL's SFTTrainer on the same rows.

    python benchmarks/sft.py [--shape small] [--batch 16] [--steps 3] [--same-rows] [--peer-python PYTHON] [--json FILE]

Each conversation is a drawn picture with a question and an answer of random letters, whose length is log-normal, cut to
20 … 300. Both train the language model in float32 on the CPU with a frozen vision tower, and take whole steps: reading and
decoding a row, its tokens and pixels, forward, backward, AdamW. With --same-rows every step has the rows of the first, as the
second epoch and later ones have: features of a frozen tower are then in the cache. Tokens are those of
the conversations, images included and padding not. TRL is another process, which runs right after, so its ratio is of processor
seconds: with one thread they do not depend on what else the machine does. --peer-python is an interpreter that has trl and
torchvision; benchmarks/peers/trl_sft.py says which packages.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", str(min(os.cpu_count() or 1, 8)))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from workload import SHAPES, drawn_problems, write_model

from rlinf_vl.actor.load import load_trainer
from rlinf_vl.actor.mesh import Mesh, join_ranks
from rlinf_vl.config.imitation import imitation_config
from rlinf_vl.controller.batch import plan_of
from rlinf_vl.extras.sft.demonstrations import Demonstrations
from rlinf_vl.extras.sft.imitate import demonstrated
from rlinf_vl.runtime.launch import MALLOC
from rlinf_vl.types import GroupSummary

LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz     "))
PEER = Path(__file__).with_name("peers") / "trl_sft.py"


def write_rows(folder: Path, count: int) -> list[dict[str, str]]:
    """Write the conversations as parquet and as pictures beside it; returns question and answer of each."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir()
    table, rows = [], []
    for number, problem in enumerate(drawn_problems(count, rng)):
        png = bytes(problem.images[0].data)
        name = f"images/{number}.png"
        (folder / name).write_bytes(png)
        text = problem.messages[0]["content"][1]["text"]
        length = int(np.clip(rng.lognormal(4.6, 0.6), 20, 300))
        answer = "x" + "".join(rng.choice(LETTERS, length - 2)) + "x"
        messages = [
            {"role": "user", "content": f"<image>{text}"},
            {"role": "assistant", "content": answer},
        ]
        table.append({"messages": messages, "images": [{"bytes": png, "path": None}]})
        rows.append({"image": name, "text": text, "answer": answer})
    pq.write_table(pa.Table.from_pylist(table), folder / "rows.parquet")
    return rows


class OurSteps:
    """Steps of `rlinf-vl sft` on one rank in this process, rows and all."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.config = imitation_config(
            "toy-sft-cpu",
            [
                f"rollout.model.model_path={folder / 'model'}",
                f"data.train_data_paths=[{folder / 'rows.parquet'}]",
                "data.val_data_paths=[]",
                "data.sample_val=false",
                "runner.seq_length=1024",
                f"runner.max_tokens_per_mbs={args.budget}",
                f"data.rollout_batch_size={args.batch}",
                "actor.model.freeze_vision_tower=true",
                "actor.model.freeze_projector=null",
                "actor.optim.lr=1e-6",
            ],
            (),
        )
        model = str(folder / "model")
        self.rows = Demonstrations(self.config, model)
        self.trainer = load_trainer(self.config, model, Mesh.make("cpu"), args.steps + 1)
        family = self.trainer.policy.family
        self.prices = family.prices(self.trainer.policy.model.config, self.trainer.trains_vision)
        self.data_size = 1
        self.batch = args.batch
        self.same_rows = args.same_rows
        self.tokens = self.loss_tokens = 0

    def __call__(self, number: int) -> float:
        """Train step `number` on its rows; returns the loss."""
        first = 0 if self.same_rows else number * self.batch
        rows = range(first, first + self.batch)
        groups = {k: self.rows.group("train", row, f"g{row}") for k, row in enumerate(rows)}
        summaries = [GroupSummary.of(g, self.rows.placeholder_ids) for g in groups.values()]
        plan = plan_of(number, summaries, self.config, self)
        (((minibatch),),) = plan.minibatches
        sums, _ = self.trainer.update(groups, [minibatch], demonstrated(summaries))
        self.tokens += sum(t.tokens for s in summaries for t in s.trajectories)
        self.loss_tokens += sum(t.response_tokens for s in summaries for t in s.trajectories)
        return sums.compute()["actor/loss"]


def measure(folder: Path, args: argparse.Namespace) -> dict[str, float | str]:
    write_model(folder / "model", args.shape)
    n_batches = args.steps + 1
    rows = write_rows(folder, args.batch * (1 if args.same_rows else n_batches))
    step, seconds, cpu_seconds, losses = OurSteps(folder, args), [], [], []
    for number in range(args.steps + 1):
        start, cpu_start = time.perf_counter(), time.process_time()
        losses.append(step(number))
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    tokens = step.tokens / (args.steps + 1)
    figures: dict[str, float | str] = {
        "shape": args.shape,
        "threads": torch.get_num_threads(),
        "batch": args.batch,
        "same_rows": args.same_rows,
        "tokens": tokens,
        "loss_tokens": step.loss_tokens / (args.steps + 1),
        "loss": losses[0],
        "step_seconds": statistics.median(seconds[1:]),
        "step_cpu_seconds": statistics.median(cpu_seconds[1:]),
        "tokens_per_cpu_second": tokens / statistics.median(cpu_seconds[1:]),
    }
    if not args.peer_python:
        return figures
    settings = {
        "rows": rows * n_batches if args.same_rows else rows,
        "batch": args.batch,
        "micro_batch": args.peer_micro_batch,
        "threads": torch.get_num_threads(),
        "steps": args.steps,
    }
    (folder / "rows.json").write_text(json.dumps(settings))
    subprocess.run([args.peer_python, str(PEER), str(folder)], check=True)
    peer = json.loads((folder / "peer.json").read_text())
    peer_seconds = statistics.median(peer["step_seconds"])
    peer_cpu_seconds = statistics.median(peer["step_cpu_seconds"])
    # The same rows: TRL's answers have a line break more each, and image tokens are equal.
    assert abs(peer["sequence_tokens"] - tokens) <= args.batch, (peer["sequence_tokens"], tokens)
    assert abs(peer["losses"][0] - losses[0]) < 0.02 * losses[0], (peer["losses"][0], losses[0])
    return figures | {
        "peer": f"TRL {peer['trl']}",
        "peer_micro_batch": args.peer_micro_batch,
        "peer_loss": peer["losses"][0],
        "peer_step_seconds": peer_seconds,
        "peer_step_cpu_seconds": peer_cpu_seconds,
        "peer_tokens_per_cpu_second": tokens / peer_cpu_seconds,
        "peer_padded_tokens": peer["padded_tokens"],
        "ratio": peer_cpu_seconds / statistics.median(cpu_seconds[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--batch", type=int, default=16, help="conversations in a step")
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed, after one")
    parser.add_argument("--budget", type=int, default=8192, help="tokens per micro-batch")
    parser.add_argument(
        "--same-rows", action="store_true", help="every step has the rows of the first"
    )
    parser.add_argument(
        "--peer-micro-batch", type=int, default=4, help="conversations in a device batch of TRL"
    )
    parser.add_argument("--peer-python", help="interpreter with TRL")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not MALLOC.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)
    join_ranks("cpu")
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), args)
    dist.destroy_process_group()
    table = Table("figure", "value", title=f"{args.shape} on the CPU, fp32")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
