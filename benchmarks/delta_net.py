"""One layer of gated delta net, forward and backward: a group with its prompt shared, against transformers' own layer.

    python benchmarks/delta_net.py [--layers toy 512 1024] [--prompt 512] [--response 192] [--samples 8] [--repeats 5] [--json FILE]

All in one run and in turn, on the same weights and inputs, projections included; outputs and gradients must agree.
- shared: this project's layer on one packed row: the prompt once, then the responses, which continue from its last state.
- batch: transformers' layer on the group as a batch, each sequence with its own copy of the prompt.
- alone: transformers' layer, one sequence at a time.
- sequence: both layers on one sequence as long as the shared row, so that nothing is shared.
Times are CPU seconds of one thread, medians, with the allocator set as for a run's actors; the layout of the shared row is made
before, as it is made once for all layers. The toy's rows are shorter (a prompt of 100, responses of 60).
"""

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from rlinf_vl.models.attention import SegmentAttention
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.runtime.launch import MALLOC

#: hidden size, key heads, value heads, size of a head; prompt and response where they aren't those of the command line
LAYERS = {"toy": (64, 2, 4, 16, 100, 60), "512": (512, 8, 8, 64), "1024": (1024, 4, 8, 128)}


def make_layers(
    hidden: int, key_heads: int, value_heads: int, size: int
) -> tuple[nn.Module, nn.Module]:
    """(transformers', the same with our forwards), with decays of a trained model rather than of fresh weights."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        hidden_size=hidden,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=size,
        linear_value_head_dim=size,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    theirs: Any = Qwen3_5GatedDeltaNet(config, 0)
    theirs.A_log.data.uniform_(-3, 0)
    ours = copy.deepcopy(theirs)
    for module in ours.modules():
        if (forward := FAMILIES["qwen3_5"].layers().get(type(module).__name__)) is not None:
            module.forward = types.MethodType(forward, module)
    return theirs, ours


def timed(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each, in turn, after one round of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + repeats):
        for name, way in ways.items():
            start = time.process_time()
            way()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def measure(name: str, args: argparse.Namespace) -> dict[str, float]:
    hidden, key_heads, value_heads, size, *lengths = LAYERS[name]
    prompt_length, length = lengths or (args.prompt, args.response)
    theirs, ours = make_layers(hidden, key_heads, value_heads, size)
    prompt, responses = (
        torch.randn(1, prompt_length, hidden),
        torch.randn(args.samples, length, hidden),
    )
    row = torch.cat([prompt, responses.reshape(1, -1, hidden)], 1)
    batch = torch.cat([prompt.expand(args.samples, -1, -1), responses], 1)
    cu_seqlens = np.cumsum([0, prompt_length, *[length] * args.samples])
    prefix = np.array([-1, *[0] * args.samples])
    grad = torch.randn_like(batch)
    grad[:, :prompt_length] = 0  # what a loss on responses sends back
    shared_grad = torch.cat(
        [torch.zeros_like(prompt), grad[:, prompt_length:].reshape(1, -1, hidden)], 1
    )

    def run(
        layer: nn.Module, x: torch.Tensor, grad: torch.Tensor, **arguments: Any
    ) -> torch.Tensor:
        out = layer(x.clone().requires_grad_(), **arguments)
        out.backward(grad)
        return out.detach()

    context, whole = (
        SegmentAttention(cu_seqlens, prefix),
        SegmentAttention(np.array([0, row.shape[1]])),
    )

    def shared() -> torch.Tensor:
        return run(ours, row, shared_grad, context=context)

    def alone() -> torch.Tensor:
        return torch.cat([run(theirs, x[None], g[None]) for x, g in zip(batch, grad, strict=True)])

    found, expected = (
        shared()[0, prompt_length:].view_as(responses),
        run(theirs, batch, grad)[:, prompt_length:],
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).norm() <= 1e-4 * b.grad.norm()
    ways = {
        "shared": shared,
        "batch": lambda: run(theirs, batch, grad),
        "alone": alone,
        "plain": lambda: run(ours, row, shared_grad, context=whole),
        "sequence": lambda: run(theirs, row, shared_grad),
    }
    seconds = timed(ways, args.repeats)
    ratios = {
        "ratio_batch": seconds["batch"] / seconds["shared"],
        "ratio_alone": seconds["alone"] / seconds["shared"],
        "ratio_sequence": seconds["sequence"] / seconds["plain"],
    }
    return {f"{way}_seconds": s for way, s in seconds.items()} | ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", nargs="+", choices=tuple(LAYERS), default=list(LAYERS))
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--response", type=int, default=192, help="tokens")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not MALLOC.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    table = Table(title=f"CPU ms of one layer, forward and backward, a group of {args.samples}")
    for column in (
        "layer",
        "shared",
        "batch",
        "alone",
        "faster than batch",
        "than alone",
        "one sequence, nothing shared",
    ):
        table.add_column(column)
    figures: dict[str, float | int | str] = {}
    for name in args.layers:
        found = measure(name, args)
        figures |= {f"{key}_{name}": value for key, value in found.items()}
        times = [f"{1e3 * found[f'{way}_seconds']:.1f}" for way in ("shared", "batch", "alone")]
        table.add_row(
            name,
            *times,
            *(f"{found[f'ratio_{way}']:.2f}" for way in ("batch", "alone", "sequence")),
        )
    Console().print(table)
    figures |= {
        "prompt_tokens": args.prompt,
        "response_tokens": args.response,
        "samples": args.samples,
        "repeats": args.repeats,
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
