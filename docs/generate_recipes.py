"""Writes docs/recipes.md's table and the READMEs of examples/recipes: `python docs/generate_recipes.py`.

A recipe is a folder: a config for each variant, and `recipe.yaml`, whose keys are those of `KEYS`. A test compares the texts.
"""

import re
import runpy
from pathlib import Path
from typing import Any

import yaml

PAGE = Path(__file__).with_name("recipes.md")
FOLDER = PAGE.parent.parent / "examples/recipes"
FILE = "recipe.yaml"
with_tables = runpy.run_path(str(PAGE.with_name("marked_tables.py")))["with_tables"]
#: State of a variant: trained whole by this project, two steps of its toy double on a CPU, or never.
STATES = ("run here", "CPU double run", "never run")
#: Keys that a recipe must have, and those that it may have.
KEYS = {"title", "sources", "revision", "metric", "deviations", "variants"}
OPTIONAL = {"open", "absent"}
METRIC = {"data", "grader", "prompt", "pixels", "sampling"}
VARIANT = {"original", "expected", "gpus"}
VARIANT_OPTIONAL = {"published_s", "gpu_memory", "nodes", "state"}
LISTS = {"deviations": "Deviations", "open": "Not found", "absent": "Not to be had here"}


def problems_of(recipe: dict[str, Any], folder: Path) -> list[str]:
    """Return what is wrong with a recipe."""
    problems = []
    parts = [("", recipe, KEYS, OPTIONAL), ("metric.", recipe.get("metric", {}), METRIC, set())]
    variants = recipe.get("variants", {})
    parts += [(f"variants.{name}.", v, VARIANT, VARIANT_OPTIONAL) for name, v in variants.items()]
    for prefix, part, required, optional in parts:
        problems += [f"{prefix}{key}: must be given" for key in sorted(required - part.keys())]
        problems += [
            f"{prefix}{key}: no such key" for key in sorted(part.keys() - required - optional)
        ]
    for source in recipe.get("sources") or [""]:
        if not source.startswith("https://"):
            problems.append(f"sources: {source!r} is no address; write https://…")
    if not re.fullmatch("[0-9a-f]{40}", recipe.get("revision", "")):
        problems.append(f"revision: {recipe.get('revision')!r} is no commit of 40 hex digits")
    configs = {path.stem for path in folder.glob("*.yaml") if path.name != FILE}
    for name in sorted(configs ^ variants.keys()):
        where = "no config of that name" if name in variants else "a config without an entry"
        problems.append(f"variants.{name}: {where}; the folder has {', '.join(sorted(configs))}")
    for name, variant in variants.items():
        if variant.get("state", STATES[1]) not in STATES:
            problems.append(
                f"variants.{name}.state: {variant['state']!r} is not one of {', '.join(STATES)}"
            )
    return problems


def read_recipe(folder: Path) -> dict[str, Any]:
    """Read and check the recipe of a folder.

    Raises:
        ValueError: with every problem of its `recipe.yaml`.
    """
    recipe = yaml.safe_load((folder / FILE).read_text(encoding="utf-8"))
    if problems := problems_of(recipe, folder):
        raise ValueError("\n".join(f"{folder / FILE}: {problem}" for problem in problems))
    return recipe


def recipes() -> dict[str, dict[str, Any]]:
    """Return all recipes by the names of their folders."""
    return {path.parent.name: read_recipe(path.parent) for path in sorted(FOLDER.glob(f"*/{FILE}"))}


def rows(variants: dict[str, dict[str, Any]]) -> list[str]:
    """Return the rows of a table of variants."""
    lines = []
    for name, variant in variants.items():
        machines = f"{variant['nodes']} × " if variant.get("nodes", 1) > 1 else ""
        gpus = f"{machines}{variant['gpus']} × {variant.get('gpu_memory', 80)} GB"
        state = variant.get("state", STATES[1])
        lines.append(f"| `{name}` | {gpus} | {variant['expected']} | {state} |")
    return lines


HEAD = ["| config | GPUs | published | state |", "|---|---|---|---|"]


def readme_text(folder: str, recipe: dict[str, Any]) -> str:
    """Return the README of a recipe's folder."""
    first = next(iter(recipe["variants"]))
    lines = [
        f"# {recipe['title']}",
        "",
        f"Generated from `{FILE}` by `python docs/generate_recipes.py`.",
        "",
    ]
    lines += [f"- Source: <{source}>" for source in recipe["sources"]]
    lines += [f"- Read at commit `{recipe['revision']}`", "", *HEAD, *rows(recipe["variants"])]
    lines += ["", "```bash", f"rlinf-vl train examples/recipes/{folder}/{first}.yaml", "```"]
    lines += ["", "## Metric", ""]
    lines += [f"- **{name}**: {text}" for name, text in recipe["metric"].items()]
    for key, title in LISTS.items():
        if recipe.get(key):
            lines += ["", f"## {title}", "", *(f"- {text}" for text in recipe[key])]
    lines += ["", "## Originals", ""]
    for name, variant in recipe["variants"].items():
        seconds = variant.get("published_s")
        speed = f", {seconds:g} s a step published" if seconds else ""
        lines.append(f"- [`{name}`]({name}.yaml): `{variant['original']}`{speed}")
    return "\n".join(lines) + "\n"


def page_text() -> str:
    """Return the page with its table made anew."""
    lines = list(HEAD)
    for folder, recipe in recipes().items():
        lines.append(f"| [**{recipe['title']}**](../examples/recipes/{folder}/README.md) | | | |")
        lines += rows(recipe["variants"])
    return with_tables(PAGE.read_text(encoding="utf-8"), {"recipes": "\n".join(lines)})


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
    for folder, recipe in recipes().items():
        (FOLDER / folder / "README.md").write_text(readme_text(folder, recipe), encoding="utf-8")
