"""Measures docs/kept_activations.json, which docs/memory.md shows: what each mode of checkpointing keeps.

`python docs/generate_kept_activations.py` measures the installed transformers and leaves what was measured with other versions,
which `PYTHONPATH=FOLDER` puts in its place after `pip install --no-deps --target FOLDER transformers==VERSION`. Bytes are those of
living tensors: computed on a CPU, and traced on the meta device. A test measures the installed version again.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from rlinf_vl.models import attention
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.models.family import Family
from rlinf_vl.models.kernels.attention import Matmul
from rlinf_vl.models.known import model_config
from rlinf_vl.models.loading import use_packed_attention
from rlinf_vl.models.recompute import MODES, checkpoint_blocks
from rlinf_vl.tools.memory.model import meta_model
from rlinf_vl.tools.memory.trace import pretend_cuda, trace_step

FILE = Path(__file__).with_name("kept_activations.json")
#: Tokens of a row, and of a sequence in it.
TOKENS, LONGEST = 96, 24
#: Depths of the models, of which the second has as many layers more. Layers of two kinds alternate in some families.
SHALLOW, DEEP = 2, 4
#: Models whose true shapes are traced, by their names on the hub.
SHAPES = tuple(f"Qwen3-VL-{size}-Instruct" for size in ("2B", "4B", "8B", "32B"))
SHAPE_TOKENS, SHAPE_LONGEST = 3072, 3072


def measured_family(name: str, mode: str, *, meta: bool = False) -> dict[str, float]:
    """Return bytes kept for a token and layer of a tiny member, and forwards of a block; by a trace if `meta`."""
    saved: list[int] = []
    calls: list[int] = []
    for depth in (SHALLOW, DEEP):
        model, counted = _tiny(name, mode, depth, meta), []
        for block in model.get_submodule(FAMILIES[name].text_blocks).children():
            block.input_layernorm.register_forward_pre_hook(lambda *_, c=counted: c.append(1))
        with mock.patch.object(attention, "kernel_for", lambda *_: Matmul):
            trace = trace_step(model, FAMILIES[name], TOKENS, longest=LONGEST, chunk=TOKENS)
        saved.append(trace.saved)
        calls.append(len(counted))
    layers = DEEP - SHALLOW
    return {
        "bytes": round((saved[1] - saved[0]) / layers / TOKENS, 1),
        "forwards": (calls[1] - calls[0]) / layers,
    }


def measured_families() -> dict[str, dict[str, dict[str, float]]]:
    """Return what every family keeps in every mode with the installed version."""
    return {name: {mode: measured_family(name, mode) for mode in MODES} for name in FAMILIES}


def _tiny(name: str, mode: str, depth: int, meta: bool) -> Any:
    """Return a tiny member in bfloat16, with weights or without."""
    from tiny import tiny_config, tiny_model

    family, text = FAMILIES[name], {"num_hidden_layers": depth, "mlp_only_layers": []}
    if not name.endswith("moe"):
        del text["mlp_only_layers"]
    if meta:
        model = meta_model(tiny_config(name, text=text), family, torch.bfloat16, frozen=())
    else:
        model = use_packed_attention(tiny_model(family=name, text=text), family).train()
        for weight in model.parameters():  # grouped products have no float32 on the meta device
            weight.data = weight.data.bfloat16()
    checkpoint_blocks(model, family, mode)
    return model


def _block_forwards(name: str, mode: str) -> float:
    """Return the number of forwards of a text block in a step."""
    calls = []
    model = _tiny(name, mode, SHALLOW, False)
    for block in model.get_submodule(FAMILIES[name].text_blocks).children():
        block.input_layernorm.register_forward_pre_hook(lambda *_: calls.append(1))
    trace_step(model, FAMILIES[name], TOKENS, longest=LONGEST, chunk=16)
    return len(calls) / SHALLOW


def measured_shape(name: str) -> dict[str, Any]:
    """Return kilobytes kept for a token and layer, and FLOPs recomputed as a share of a forward's, by mode, as on CUDA."""
    config, _ = model_config(f"Qwen/{name}")
    family = FAMILIES[config.model_type]
    traces = [_shape_traces(config, family, depth) for depth in (SHALLOW, DEEP)]
    layers = DEEP - SHALLOW
    kept, flops = {}, {}
    for mode in MODES:
        (low, low_flops), (high, high_flops) = (trace[mode] for trace in traces)
        kept[mode] = round((high - low) / layers / SHAPE_TOKENS / 1000, 1)
        flops[mode] = (high_flops - low_flops) / layers
    # Forward and backward are three products for each one of the forward.
    forward = flops["none"] / 3
    shares = {mode: round((flops[mode] - flops["none"]) / forward, 2) for mode in MODES}
    return {"kilobytes": kept, "recomputed": shares}


def _shape_traces(config: Any, family: Family, depth: int) -> dict[str, tuple[int, int]]:
    """Return (bytes that forward leaves, FLOPs of forward and backward) of the model cut to some layers, by mode."""
    config = type(config)(**config.to_dict())
    text = config.get_text_config()
    text.num_hidden_layers = depth
    config.vision_config.depth, config.vision_config.deepstack_visual_indexes = 1, [0]
    model = meta_model(config, family, torch.bfloat16, frozen=("vision_tower", "projector"))
    checkpointing = checkpoint_blocks(model, family, "none")
    found = {}
    for mode in MODES:
        checkpointing.mode = mode
        with pretend_cuda(), FlopCounterMode(display=False) as flops:
            trace = trace_step(
                model, family, SHAPE_TOKENS, longest=SHAPE_LONGEST, chunk=SHAPE_TOKENS
            )
        found[mode] = (trace.saved, flops.get_total_flops())
    return found


def write() -> None:
    """Measure the installed version and the true shapes, and write the file."""
    found = read()
    version = transformers.__version__
    found["versions"][version] = measured_families()
    order = sorted(found["versions"], key=lambda text: [int(part) for part in text.split(".")])
    found["versions"] = {key: found["versions"][key] for key in order}
    if "--shapes" in sys.argv[1:]:
        found["shapes"] = {name: measured_shape(name) for name in SHAPES}
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def read() -> dict[str, Any]:
    """Return what was measured last."""
    return (
        json.loads(FILE.read_text(encoding="utf-8"))
        if FILE.exists()
        else {"versions": {}, "shapes": {}}
    )


HEAD = """\
## Activations: kept or recomputed

`actor.fsdp_config.gradient_checkpointing` says which activations a block keeps for backward; the others are computed a second time.
`python docs/generate_kept_activations.py` measures what follows.

| value | kept of each block | recomputed |
|---|---|---|
| `none`, `false` | all | nothing |
| `selective` | its input; outputs of attention and of linear layers | norms, rotations, activations, SwiGLU, experts, delta nets |
| `mlp` | the same, but for the MLP's products | the MLP, too |
| `full`, `true` | its input | the block, but for the MLP's last product |
| `auto` (the default) | | the first of these with which training leaves a twentieth of the memory free |

Adapters' second factors and the MLP's last product, whose result backward doesn't need, are not kept. In a mixture tokens go to the
same experts in both forwards. Loss and gradients are the same in all modes.

`auto` asks the memory ledger once the run has its GPUs. Then `actor.fsdp_config.reshard_after_forward: auto` keeps weights gathered
if that fits, too. `preflight` shows both choices; a run writes them into its log and its config.yaml. On a CPU `auto` is `none`, and
weights are resharded. A run without Ray has no ledger; on a GPU it recomputes all.

Forward and backward of two layers of the 2B shape take, on one core, 1.06 times as long with `selective` as with `none`, 1.21 times
with `mlp`, 1.28 times with `full`.

### Bytes and FLOPs

Traced with CUDA's kernels in bfloat16: kilobytes kept for a token and layer, and the FLOPs that are recomputed, as a share of the
layer's forward. 75 % recomputed are a quarter of training.
"""
OFFLOAD = """
Block inputs are not offloaded to host memory; for long rows, where they are large, `actor.context_parallel_size` divides them.
"""
VERSIONS_TEXT = """
Counts on real tensors agree with such traces for every family, with transformers {}.
"""


def render() -> str:
    """Return the section of docs/memory.md."""
    found = read()
    ruler = [f"| | {' | '.join(f'`{mode}`' for mode in MODES)} |", f"|---|{'---:|' * len(MODES)}"]
    lines = [HEAD, *ruler]
    for name, shape in found["shapes"].items():
        cells = (
            f"{shape['kilobytes'][mode]:g} kB, {shape['recomputed'][mode]:.0%}" for mode in MODES
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    text = VERSIONS_TEXT.format(", ".join(found["versions"]))
    return "\n".join([*lines, OFFLOAD.rstrip("\n"), text.rstrip("\n")]) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    write()
