"""Writes docs/memory.md: `python docs/generate_memory_page.py`. A test compares the page with it.

The page shows what `preflight` prints for pretended machines, so that it is the same wherever it is made.
The GPUs that common models need take half an hour of a CPU: `python docs/generate_memory_page.py --sizes` counts them
and writes docs/memory_sizes.json, which the page is made from. A test counts some of them again. `--large` counts the
tables of larger models, in a few minutes, and writes docs/memory_large.json.
"""

import json
import re
import runpy
import sys
from pathlib import Path

from rlinf_vl.config.load import parse_config
from rlinf_vl.tools.check.machine import Machine
from rlinf_vl.tools.memory.advice import CARDS, CPU_OFFLOAD, LORA, Advisor, Fit
from rlinf_vl.tools.memory.ledger import Hardware, Ledger, ledger
from rlinf_vl.tools.memory.model import Model
from rlinf_vl.tools.memory.table import render

PAGE = Path(__file__).with_name("memory.md")
SIZES = Path(__file__).with_name("memory_sizes.json")
LARGE = Path(__file__).with_name("memory_large.json")
#: Renders the section on activations.
KEPT_ACTIVATIONS = runpy.run_path(str(PAGE.with_name("generate_kept_activations.py")))["render"]
FLAGSHIP = "qwen3-vl-2b-grpo-fsdp-geo3k"
SPLIT = "cluster.component_placement={actor: 0-5, rollout: 6-7}"
GIB = 2**30

HEAD = """\
# Memory

What `rlinf-vl preflight` says of pretended machines ([how to read it](gpu.md#preflight-does-it-fit)). Nothing here was measured on
a GPU; `python docs/generate_memory_page.py` generates the page.
"""

#: What `machine.look` found where this project's tests run.
TESTS = Machine(
    python="3.11.7",
    packages=dict(
        torch="2.14.1",
        transformers="5.19.0",
        ray="2.60.0",
        sglang="0.5.23",
        torch_memory_saver="0.0.10",
    ),
    cuda_major=13,
    driver=None,
    gpus=(),
    missing_tools=(),
    missing_libraries=("libcuda.so.1",),
    total_memory=int(23.5 * GIB),
    cores=2,
    shared_memory=int(23.5 * GIB),
    run_disk=66 * GIB,
    cache_disk=66 * GIB,
    ports=28232,
    environment={},
)


def host(gpus: int, **other) -> Machine:
    """A machine with GPUs of 80 GB, and what goes with them."""
    facts = {name: getattr(TESTS, name) for name in Machine.__slots__} | {
        "driver": "580.95.05",
        "gpus": (Hardware.named(1, 80).gpu_bytes,) * gpus,
        "missing_libraries": (),
        "total_memory": gpus * 200 * GIB,
        "cores": gpus * 16,
        "shared_memory": gpus * 100 * GIB,
        "run_disk": 2000 * GIB,
        "cache_disk": 2000 * GIB,
    }
    return Machine(**facts | other)


PREFLIGHT = {
    "1 × 80 GB": (Hardware.named(1, 80), ()),
    "8 × 80 GB": (Hardware.named(8, 80), ()),
    "8 × 80 GB split": (Hardware.named(8, 80), (SPLIT,)),
    "2 × 8 × 80 GB": (Hardware.named(8, 80, nodes=2), ()),
    "1 × 24 GB": (Hardware.named(1, 24), ()),
    "1 × 24 GB with adapters": (
        Hardware.named(1, 24),
        ("actor.model.is_lora=true", "runner.max_tokens_per_mbs=8192"),
    ),
    "4 × 24 GB": (
        Hardware.named(4, 24),
        ("actor.enable_offload=true", "runner.max_tokens_per_mbs=4096"),
    ),
}

#: Larger models: config, hardware and overrides.
LARGER = (
    (
        FLAGSHIP,
        Hardware.named(8, 80),
        ("rollout.model.model_path=Qwen/Qwen3.5-9B", "rollout.model.model_type=auto"),
    ),
    ("qwen3-vl-30b-a3b-grpo-fsdp-geo3k", Hardware.named(8, 80), ()),
    ("qwen3-vl-235b-a22b-grpo-fsdp-geo3k", Hardware.named(8, 80, nodes=8), ()),
)


LAYOUTS_HEAD = f"""
## preflight of some layouts and models

`rlinf-vl preflight` on `{FLAGSHIP}`, where no other config is named: the fullest GPU of each kind, in GiB and by phase; the KV cache
in tokens and in responses of the longest; and what `auto` chose.

| | fits | fullest GPU | KV tokens | responses | `max_tokens_per_mbs` | checkpointing | reshard |
|---|---|---|---:|---:|---:|---|---|
"""

SIZES_HEAD = f"""
## How many GPUs a model needs

Cards of 24, 48 and 80 GB, by the ledger, for `{FLAGSHIP}` with the model's name in `rollout.model.model_path`: responses of
2,048 tokens, the vision tower frozen, engines and trainer on the same GPUs (apart where an engine needs several). Tried are 1 to 8
GPUs and 2 to 16 machines of 8, with the settings that `preflight` then advises. `*`: only with `{CPU_OFFLOAD}=true`, in
which the CPU takes each optimizer step. `–`: on none of these. QLoRA of a mixture leaves its experts without adapters, and in
bfloat16. With expert parallelism and engines of several GPUs, which the table leaves out, all weights of Qwen3-VL-30B-A3B train on
8 GPUs of 80 GB ([layouts](cost.md#layouts-of-mixtures)).

"""
#: Models of the table, by the names that they have there.
SIZED = (
    *(
        "Qwen3-VL-2B-Instruct",
        "Qwen3-VL-4B-Instruct",
        "Qwen3-VL-8B-Instruct",
        "Qwen3-VL-32B-Instruct",
    ),
    *(
        "Qwen3-VL-30B-A3B-Instruct",
        "Qwen2.5-VL-3B-Instruct",
        "Qwen2.5-VL-7B-Instruct",
        "Qwen2.5-VL-32B-Instruct",
    ),
    *("Qwen2.5-VL-72B-Instruct", "Qwen3.5-2B", "Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B"),
)
METHODS = ("full", "LoRA", "QLoRA")


def gpus_needed(
    name: str, methods: tuple[str, ...] = METHODS, cards: tuple[int, ...] = CARDS
) -> dict[str, list[str]]:
    """Return the numbers of GPUs that a model needs, by method, for each size of card."""
    config = parse_config(
        FLAGSHIP, [f"rollout.model.model_path=Qwen/{name}", "rollout.model.model_type=auto"]
    )
    advisor = Advisor(config, Model(config))
    bases = {"full": (), "LoRA": LORA, "QLoRA": advisor.qlora}
    needed: dict[str, list[str]] = {}
    for method in methods:
        fits = [advisor.smallest_hardware(card, bases[method], exact=False) for card in cards]
        needed[method] = [_count(fit) if fit else "–" for fit in fits]
    return needed


def _count(fit: Fit) -> str:
    hardware = fit.ledger.hardware
    offloaded = any(change.key == CPU_OFFLOAD for change in fit.changes)
    return f"{hardware.gpus * hardware.nodes}{'*' * offloaded}"


def write_sizes() -> None:
    """Count the GPUs that every model of the table needs."""
    counted = {}
    for name in SIZED:
        counted[name] = gpus_needed(name)
        print(name, counted[name], flush=True)
    SIZES.write_text(json.dumps(counted, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_large() -> None:
    """Count the tables of larger models."""
    tables = {}
    for name, hardware, overrides in LARGER:
        config = parse_config(name, overrides)
        model = Model(config)
        model.by_layers = True
        shown = "".join(f" with `{text}`" for text in overrides)
        tables[f"{name}{shown}"] = said(ledger(config, hardware, model))
    LARGE.write_text(json.dumps(tables, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def large() -> dict[str, str]:
    """Return the tables of larger models as they were counted last."""
    return json.loads(LARGE.read_text(encoding="utf-8"))


def sizes() -> dict[str, dict[str, list[str]]]:
    """Return the numbers of GPUs that models need as they were counted last."""
    return json.loads(SIZES.read_text(encoding="utf-8"))


def sizes_table() -> str:
    """Return the table of GPUs that models need."""
    columns = [f"{method}, {card} GB" for method in METHODS for card in CARDS]
    lines = [f"| model | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for name, needed in sizes().items():
        cells = [count for method in METHODS for count in needed[method]]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return SIZES_HEAD + "\n".join(lines) + "\n"


def said(made: Ledger) -> str:
    """`render`, less what depends on the versions of torch and transformers, or on the hub's cache."""
    text = re.sub(r": \d+ operations, of which \d+ wait .*", "", render(made))
    return re.sub(r"shape is from .*", "shape is from a table", text)


def summary_row(title: str, text: str) -> str:
    """Return the row of the table of layouts for what `preflight` prints."""
    fullest = re.findall(r"^- (\w+): at most ([\d.]+) of ([\d.]+) GiB, in (\w+)", text, re.M)
    tokens, at_once = re.findall(r"a KV cache of (\d+) tokens, (\d+) responses", text)[0]
    values = [
        re.findall(rf"^- {key} (\w+)", text, re.M)[0]
        for key in (
            "runner.max_tokens_per_mbs",
            "actor.fsdp_config.gradient_checkpointing",
            "actor.fsdp_config.reshard_after_forward",
        )
    ]
    peaks = "; ".join(
        f"{group} {gib} of {usable}, {phase}" for group, gib, usable, phase in fullest
    )
    verdict = "no" if "does not fit" in text else "yes"
    return f"| {title} | {verdict} | {peaks} | {tokens} | {at_once} | {' | '.join(values)} |\n"


def render_page() -> str:
    """Return the whole page."""
    config = parse_config(FLAGSHIP)
    model = Model(config)
    assert config.rollout.model.model_path.startswith("Qwen/")
    rows = ""
    for title, (hardware, overrides) in PREFLIGHT.items():
        shown = "".join(f" `{text}`" for text in overrides)
        changed = parse_config(FLAGSHIP, overrides)
        text = said(
            ledger(changed, hardware, Model(changed) if changed.actor.model.is_lora else model)
        )
        rows += summary_row(f"{title}{shown and ','}{shown}", text)
    large_rows = (summary_row(f"{title}, {layout(text)}", text) for title, text in large().items())
    parts = [
        HEAD,
        sizes_table(),
        LAYOUTS_HEAD,
        rows,
        *large_rows,
        f"\n{KEPT_ACTIVATIONS()}",
    ]
    return re.sub(r"\n{3,}", "\n\n", "".join(parts))


def layout(text: str) -> str:
    """Return the GPUs that the first line of what `preflight` prints names, such as 8 × 8 × 80 GB."""
    gpus = re.search(r" on ((?:\d+ × )?\d+) GPUs? of 78\.8 GiB", text)
    assert gpus is not None
    return f"{gpus[1]} × 80 GB"


if __name__ == "__main__":
    if "--sizes" in sys.argv[1:]:
        write_sizes()
    if "--large" in sys.argv[1:]:
        write_large()
    PAGE.write_text(render_page(), encoding="utf-8")
