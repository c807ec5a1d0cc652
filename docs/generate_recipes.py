"""Writes docs/recipes.md's table and the READMEs of examples/recipes: `python docs/generate_recipes.py`.

With `--estimates`, it first estimates memory and hours of every recipe again (ten minutes of a CPU), or with
names behind it those recipes' alone, and writes rlinf_vl/recipes/estimates.json. A test compares the texts.
"""

import json
import runpy
import sys
from pathlib import Path

from rlinf_vl.config.load import load_config
from rlinf_vl.config.placement import placement_of
from rlinf_vl.errors import ConfigError
from rlinf_vl.preflight.cost import estimate
from rlinf_vl.preflight.decoding import Lengths
from rlinf_vl.preflight.gpu_kinds import kind_of_size
from rlinf_vl.preflight.gpu_parts import GIB
from rlinf_vl.preflight.ledger import Hardware, ledger
from rlinf_vl.preflight.model import Model
from rlinf_vl.preflight.rates import rates_of
from rlinf_vl.preflight.table import render
from rlinf_vl.recipes.catalog import ESTIMATES, FOLDER, Variant, recipes
from rlinf_vl.recipes.render import page_table, readme_text

PAGE = Path(__file__).with_name("recipes.md")
with_tables = runpy.run_path(str(PAGE.with_name("marked_tables.py")))["with_tables"]


def estimated(name: str, variant: Variant) -> dict:
    """Memory and time of a config on the GPUs of its recipe."""
    config = load_config(name)
    hardware = Hardware.named(variant.gpus, variant.gpu_memory, variant.nodes)
    model = Model(config)
    memory = ledger(config, hardware, model)
    peak = max(gpu.peak[0] for gpu in memory.gpus)
    entry = {
        "peak_gib": round(peak / GIB, 1),
        "problems": list(memory.problems),
        "seconds": None,
        "hours": None,
        "memory": render(memory).strip().split("\n"),
    }
    lengths = variant.lengths
    lengths = Lengths(lengths.prompt, lengths.images, lengths.response, lengths.longest)
    placement = placement_of(config, (hardware.gpus,) * hardware.nodes)
    rates = rates_of(kind_of_size(variant.gpu_memory))
    try:
        time = estimate(config, model, hardware, rates, lengths, placement)
    except (ConfigError, ValueError) as error:
        entry["problems"].append(str(error))
        return entry
    if time is not None:
        entry["seconds"] = round(time.total, 1)
        entry["hours"] = round(time.total * variant.steps / 3600, 2)
    return entry


def write_estimates(names: list[str]) -> None:
    entries = json.loads(ESTIMATES.read_text(encoding="utf-8")) if ESTIMATES.exists() else {}
    for recipe in recipes().values():
        for name, variant in recipe.variants.items():
            if not names or name in names:
                entries[name] = estimated(name, variant)
                print(name, entries[name]["seconds"], entries[name]["problems"], flush=True)
                ESTIMATES.write_text(
                    json.dumps(entries, indent=1, sort_keys=True) + "\n", encoding="utf-8"
                )


def page_text() -> str:
    """The page with its table made anew."""
    return with_tables(PAGE.read_text(encoding="utf-8"), {"recipes": page_table()})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--estimates"]:
        write_estimates(sys.argv[2:])
    PAGE.write_text(page_text(), encoding="utf-8")
    for folder, recipe in recipes().items():
        (FOLDER / folder / "README.md").write_text(readme_text(folder, recipe), encoding="utf-8")
