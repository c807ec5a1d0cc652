"""Writes the generated part of docs/cost.md: `python docs/generate_cost_page.py`, in a minute or two.

Predicted against published: our estimate of a step, by the assumed rates of an H100, for settings that
other systems have published.
"""

import re
from pathlib import Path
from typing import NamedTuple

from rlinf_vl.config.load import parse_config
from rlinf_vl.config.placement import placement_of
from rlinf_vl.preflight.decoding import Lengths
from rlinf_vl.preflight.gpu_kinds import GPU_KINDS
from rlinf_vl.preflight.model import Model
from rlinf_vl.preflight.rates import rates_of
from rlinf_vl.preflight.step_time import estimate_step

PAGE = Path(__file__).with_name("cost.md")
FLAGSHIP = "qwen3-vl-2b-grpo-fsdp-geo3k"
EASYR1 = "https://github.com/hiyouga/EasyR1/blob/main/assets/baselines.md"
NEMO = "https://github.com/NVIDIA-NeMo/RL/blob/main/docs/about/performance-summary.md"


class Published(NamedTuple):
    """A published step: its setting, in our keys, and its seconds."""

    name: str
    source: str
    model: str
    gpus: int
    tp: int
    prompts: int
    group_size: int
    minibatches: int
    prompt: float
    images: float
    tokens: float  # mean of a trajectory, prompt included
    longest: float
    seconds: float
    tokens_per_gpu: float
    kl: float = 0.01
    trains_vision: bool = True
    schedule: str = "sync"


def _easyr1(size: str, tp: int, seconds: float, rate: float) -> Published:
    # 512 prompts × 5 answers a step; the mean length is what throughput, seconds and GPUs imply.
    return Published(
        f"EasyR1 v0.3.0, Qwen2.5-VL-{size}, geometry3k", "EasyR1", f"Qwen/Qwen2.5-VL-{size}-Instruct",
        8, tp, 512, 5, 4, 375, 200, rate * seconds * 8 / 2560, 2048, seconds, rate,
    )  # fmt: skip


PUBLISHED = [
    _easyr1("3B", 2, 180, 1200),
    _easyr1("7B", 2, 180, 1200),
    _easyr1("32B", 8, 860, 360),
    Published(
        "NeMo RL 0.4, Qwen3-32B, on policy", "NeMo", "Qwen/Qwen3-VL-32B-Instruct",
        32, 4, 64, 32, 4, 150, 0, 3206, 4096, 393, 540, trains_vision=False,
    ),
    Published(
        "NeMo RL 0.4, Qwen3-30B-A3B, on policy", "NeMo", "Qwen/Qwen3-VL-30B-A3B-Instruct",
        32, 4, 64, 32, 4, 150, 0, 3154, 4096, 225, 925, trains_vision=False,
    ),
    Published(
        "NeMo RL 0.4, Qwen3-235B-A22B, on policy", "NeMo", "Qwen/Qwen3-VL-235B-A22B-Instruct",
        128, 8, 16, 32, 1, 150, 0, 5671, 8192, 506, 45.7, trains_vision=False,
    ),
]  # fmt: skip


def predicted(case: Published):
    """Return our estimate of a published setting: collocated, fsdp2, full recomputation."""
    nodes = case.gpus // 8
    overrides = [
        f"rollout.model.model_path={case.model}", "rollout.model.model_type=auto", f"cluster.num_nodes={nodes}",
        f"data.rollout_batch_size={case.prompts}", f"algorithm.group_size={case.group_size}",
        f"algorithm.n_minibatches={case.minibatches}", f"algorithm.kl_beta={case.kl}",
        "algorithm.recompute_logprobs='true'", f"rollout.tensor_parallel_size={case.tp}",
        f"actor.model.freeze_vision_tower={not case.trains_vision}", "actor.enable_offload=true",
        f"runner.seq_length={round(case.longest) + 512}", f"algorithm.sampling_params.max_new_tokens={round(case.longest)}",
        f"runner.max_tokens_per_mbs={round(case.longest) + 512}", *_experts(case),
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
    return estimate_step(config, model, placement, rates_of(GPU_KINDS["h100"]), lengths, kv_tokens)


def _experts(case: Published) -> list[str]:
    """Expert parallelism inside a machine, for a mixture."""
    return ["actor.fsdp_config.expert_parallel_size=8"] if "-A" in case.model else []


def table() -> str:
    """Return the table of predicted against published."""
    links = {"EasyR1": EASYR1, "NeMo": NEMO}
    lines = [
        "| published | GPUs | tokens a trajectory | published s/step | predicted | ratio | generate | logprobs | train |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in PUBLISHED:
        time = predicted(case)
        cells = [
            f"[{case.name}]({links[case.source]})", str(case.gpus), f"{case.tokens:.0f}", f"{case.seconds:.0f}",
            f"{time.total:.0f}", f"{case.seconds / time.total:.1f}", f"{time.phases['generate']:.0f}",
            f"{time.phases['logprobs']:.0f}", f"{time.phases['train']:.0f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- published -->", "<!-- /published -->"
    text = re.sub(f"{begin}.*?{end}", f"{begin}\n\n{table()}\n\n{end}", text, flags=re.S)
    PAGE.write_text(text, encoding="utf-8")
