"""Writes the tables of docs/cost.md: `python docs/generate_cost_page.py`. A test compares the page with it.

The steps measured on two cores are those of docs/measured_steps.json, which `python benchmarks/step_time.py --json`
writes. The estimates of steps that other systems have published take a minute or two: `python docs/generate_cost_page.py
--count` counts them and writes docs/published_steps.json, which the page is made from.
"""

import argparse
import json
import runpy
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlinf_vl.config.load import parse_config
from rlinf_vl.config.placement import placement_of
from rlinf_vl.preflight.decoding import Lengths
from rlinf_vl.preflight.gpu_kinds import GIGA, GPU_KINDS, GpuKind
from rlinf_vl.preflight.model import Model
from rlinf_vl.preflight.rates import rates_of
from rlinf_vl.preflight.step_time import PHASES, StepTime, contention_seconds, estimate_step

PAGE = Path(__file__).with_name("cost.md")
with_tables = runpy.run_path(str(PAGE.with_name("marked_tables.py")))["with_tables"]
MEASURED = PAGE.with_name("measured_steps.json")
COUNTED = PAGE.with_name("published_steps.json")
#: Steps that benchmarks/schedules.py measured on two quiet cores.
SCHEDULES = PAGE.parent.parent / "benchmarks/results/schedules-cpu.json"
#: What `calibrate` found beside a neighbour: seconds of a slot while both cores compute, over those alone.
SLOWDOWN = 1.2
FLAGSHIP = "qwen3-vl-2b-grpo-fsdp-geo3k"
#: An H100 whose NVLink has 400 GB/s in both directions together.
H800 = replace(GPU_KINDS["h100"], name="h800", node=200 * GIGA)
TASKS = {
    "toy": "`toy-grpo-cpu`",
    "maze": "`toy-maze-cpu`",
    "small": "46 M parameters",
}
SOURCES = {
    "EasyR1 v0.3.0": "https://github.com/hiyouga/EasyR1/blob/v0.3.0/assets/baselines.md",
    "EasyR1 v0.3.2": "https://github.com/hiyouga/EasyR1/blob/v0.3.2/assets/baselines.md",
    "NeMo RL 0.4": "https://github.com/NVIDIA-NeMo/RL/blob/r0.4.0/docs/about/performance-summary.md",
    "NeMo RL 0.6": "https://docs.nvidia.com/nemo/rl/0.6.0/about/performance-summary.html",
    "verl": "https://github.com/verl-project/verl/issues/7203",
}


@dataclass(frozen=True)
class Published:
    """A published step: its setting, in our keys, and its seconds.

    Attributes:
        tokens: mean of a trajectory, its prompt included; `images`: of a prompt's images.
        budget: tokens of a micro-batch; `trajectories`: of a micro-batch, where it is filled by number.
        kl: `algorithm.kl_beta`; above 0, a reference scores all tokens.
        save_interval: steps between two checkpoints, whose writing the published seconds include; -1: none.
        mfu: share of a GPU's products that the actor's update reached, as published.
    """

    system: str
    model: str
    kind: GpuKind
    gpus: int
    tp: int
    prompts: int
    group_size: int
    minibatches: int
    prompt: float
    images: float
    tokens: float
    longest: int
    seconds: float
    budget: int
    trajectories: int = 0
    kl: float = 0.01
    trains_vision: bool = False
    save_interval: int = -1
    mfu: float | None = None

    @property
    def name(self) -> str:
        """The system and the model."""
        return f"{self.system}, {self.model}"


def _easyr1(
    system: str, size: str, tp: int, seconds: float, rate: float, mfu: float, **micro: int
) -> Published:
    """Return a line of EasyR1's table. The mean length is what throughput, seconds and GPUs imply."""
    return Published(
        system, f"Qwen2.5-VL-{size}-Instruct", GPU_KINDS["h100"], 8, tp, 512, 5, 4, 375, 200,
        rate * seconds * 8 / 2560, 2048, seconds, mfu=mfu, trains_vision=True, save_interval=5, **micro,
    )  # fmt: skip


def _nemo(
    system: str, model: str, gpus: int, tp: int, prompts: int, tokens: float, longest: int, seconds: float
) -> Published:  # fmt: skip
    """Return a line of NeMo RL's table, on policy: a text model, whose VL twin has the same language model.

    Its Megatron layouts, in which weights stay where they are, have no counterpart here. The micro-batches are those that
    `preflight --search` finds for 16 GPUs.
    """
    return Published(
        system, model, GPU_KINDS["h100"], gpus, tp, prompts, 32, max(1, prompts * 32 // 512), 150, 0,
        tokens, longest, seconds, budget=12288,
    )  # fmt: skip


PUBLISHED = (
    _easyr1("EasyR1 v0.3.0", "3B", 2, 180, 1200, 0.063, budget=4096, trajectories=4),
    _easyr1("EasyR1 v0.3.2", "3B", 2, 120, 1800, 0.081, budget=4096),
    _easyr1("EasyR1 v0.3.0", "7B", 2, 180, 1200, 0.136, budget=4096, trajectories=4),
    _easyr1("EasyR1 v0.3.2", "7B", 2, 145, 1600, 0.160, budget=4096),
    _easyr1("EasyR1 v0.3.2", "7B", 2, 120, 2000, 0.232, budget=16384),
    _easyr1("EasyR1 v0.3.0", "32B", 8, 860, 360, 0.112, budget=4096, trajectories=1),
    _easyr1("EasyR1 v0.3.2", "32B", 8, 530, 620, 0.258, budget=4096),
    Published(
        "verl", "Qwen3.5-9B", H800, 8, 8, 32, 5, 1, 375, 200, 143 * 290 * 8 / 160, 2048, 290,
        budget=4096, mfu=0.025,
    ),
    _nemo("NeMo RL 0.4", "Qwen3-VL-30B-A3B-Instruct", 32, 4, 64, 3154, 4096, 225),
    _nemo("NeMo RL 0.6", "Qwen3-VL-30B-A3B-Instruct", 32, 2, 64, 3203, 4096, 192),
    _nemo("NeMo RL 0.4", "Qwen3-VL-32B-Instruct", 32, 4, 64, 3206, 4096, 393),
    _nemo("NeMo RL 0.4", "Qwen3-VL-235B-A22B-Instruct", 128, 8, 16, 5671, 8192, 506),
    _nemo("NeMo RL 0.6", "Qwen3-VL-235B-A22B-Instruct", 128, 8, 16, 5698, 8192, 395),
)  # fmt: skip


def estimated(case: Published) -> tuple[StepTime, Model]:
    """Return our estimate of a published setting: collocated, fsdp2, prompts not shared."""
    nodes = case.gpus // 8
    seq_length = case.longest + 512
    overrides = [
        f"rollout.model.model_path=Qwen/{case.model}", "rollout.model.model_type=auto", f"cluster.num_nodes={nodes}",
        f"data.rollout_batch_size={case.prompts}", f"algorithm.group_size={case.group_size}",
        f"algorithm.n_minibatches={case.minibatches}", f"algorithm.kl_beta={case.kl}",
        "algorithm.recompute_logprobs='true'", f"rollout.tensor_parallel_size={case.tp}",
        f"actor.model.freeze_vision_tower={not case.trains_vision}", "actor.enable_offload=true",
        "actor.share_prompts=false", "actor.fsdp_config.gradient_checkpointing=full",
        f"runner.save_interval={case.save_interval}", "runner.async_save=false",
        f"runner.seq_length={seq_length}", f"algorithm.sampling_params.max_new_tokens={case.longest}",
        f"runner.max_tokens_per_mbs={max(case.budget, seq_length)}", *_micro_batches(case), *_experts(case),
    ]  # fmt: skip
    config = parse_config(FLAGSHIP, overrides)
    model = Model(config)
    model.interpolates = True
    placement = placement_of(config, (8,) * nodes)
    response = case.tokens - case.prompt
    lengths = Lengths(case.prompt, case.images, response, max(case.longest, response))
    per_token = model.family.decode_state(model.shape).token_bytes(model._meta_model.dtype)
    # A KV cache of 30 GiB on each GPU of an engine.
    kv_tokens = case.tp * 30 * 2**30 // per_token
    return estimate_step(config, model, placement, rates_of(case.kind), lengths, kv_tokens), model


def _micro_batches(case: Published) -> list[str]:
    """Return the overrides for micro-batches of a number of trajectories, if they are published so."""
    if not case.trajectories:
        return []
    return [
        "runner.enable_dynamic_batch_size=false",
        f"actor.micro_batch_size={case.trajectories}",
    ]


def _experts(case: Published) -> list[str]:
    """Expert parallelism inside a machine, for a mixture."""
    return ["actor.fsdp_config.expert_parallel_size=8"] if "-A" in case.model else []


def counted(case: Published) -> dict[str, Any]:
    """Return the estimate of a published step, for the file."""
    time, model = estimated(case)
    mixture = model.family.mixture(model.shape)
    active = model.weights.total - model.weights.experts
    if mixture is not None:
        active += model.weights.experts * mixture.top_k / mixture.experts
    trained_tokens = case.prompts * case.group_size * case.tokens
    products = 6 * active * trained_tokens
    mfu = products / (time.phases["train"] * case.gpus * case.kind.products)
    phases = {name: round(seconds, 1) for name, seconds in time.phases.items()}
    setting = {name: value for name, value in asdict(case).items() if name != "kind"}
    setting |= {"gpu": case.kind.name}
    return setting | {
        "predicted": round(time.total, 1),
        "phases": phases,
        "predicted_mfu": round(mfu, 3),
    }


def published_table() -> str:
    """Return the table of predicted against published, from its file."""
    lines = [
        "| published | GPUs | tokens a trajectory | s/step | predicted | ratio | generate | logprobs | train | checkpoint | MFU "
        "| predicted |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in json.loads(COUNTED.read_text(encoding="utf-8")):
        phases = row["phases"]
        cells = [
            f"[{row['system']}]({SOURCES[row['system']]}), {row['model'].removesuffix('-Instruct')}",
            f"{row['gpus']} × {row['gpu'].upper()}", f"{row['tokens']:.0f}", f"{row['seconds']:.0f}", f"{row['predicted']:.0f}",
            f"{row['seconds'] / row['predicted']:.1f}",
            *(f"{phases[name]:.0f}" for name in ("generate", "logprobs", "train", "checkpoint")),
            f"{row['mfu']:.1%}" if row["mfu"] else "–", f"{row['predicted_mfu']:.0%}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def measured_table() -> str:
    """Return the table of predicted against measured on two cores, from its file."""
    lines = [
        "| task | schedule | predicted | measured | difference | quartiles apart | cores taken | date |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in json.loads(MEASURED.read_text(encoding="utf-8")):
        difference = f"{row['predicted'] / row['measured'] - 1:+.0%}".replace("-", "−")
        cells = [
            TASKS[row["task"]], f"`{row['schedule']}`", f"{row['predicted']:.3f} s", f"{row['measured']:.3f} s",
            difference, f"{row['spread']:.0%}", f"{row['busy']:.0%}", row["date"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def schedules_table() -> str:
    """Return the table of schedules ahead, predicted from the measured phases of sync steps."""
    rows = json.loads(SCHEDULES.read_text(encoding="utf-8"))
    lines = ["| task | schedule | predicted | measured | difference |", "|---|---|---:|---:|---:|"]
    for task in ("toy", "maze"):
        sync = mean_step(rows, task, "sync")
        generate, train = sync["generate_seconds"], sync["train_seconds"]
        phases = dict.fromkeys(PHASES, 0.0) | {"generate": generate, "train": train}
        overhead = sync["step_seconds"] - generate - train
        contention = contention_seconds(generate, SLOWDOWN, train, SLOWDOWN)
        for schedule in ("one_step_off", "async"):
            step = StepTime(phases, overhead, schedule, 0, 2, contention)
            measured = mean_step(rows, task, schedule)["step_seconds"]
            difference = f"{step.total / measured - 1:+.0%}".replace("-", "−")
            cells = [
                TASKS[task],
                f"`{schedule}`",
                f"{step.total:.3f} s",
                f"{measured:.3f} s",
                difference,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_step(rows: list[dict[str, Any]], task: str, schedule: str) -> dict[str, float]:
    """Return the mean seconds of a task's steps over its seeds, of those at most one step stale."""
    chosen = [
        row for row in rows
        if (row["task"], row["schedule"]) == (task, schedule) and row["max_staleness"] <= 1
    ]  # fmt: skip
    names = ("step_seconds", "generate_seconds", "train_seconds")
    return {name: statistics.fmean(row[name] for row in chosen) for name in names}


def render(page: str) -> str:
    """Return the page with its tables written anew."""
    tables = {
        "measured": measured_table(),
        "schedules": schedules_table(),
        "published": published_table(),
    }
    return with_tables(page, tables)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", action="store_true", help="count the estimates anew")
    if parser.parse_args().count:
        rows = [counted(case) for case in PUBLISHED]
        COUNTED.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
