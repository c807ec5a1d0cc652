"""Recipes as text and as JSON: the output of the verb, the README of a folder, the table of the docs."""

import dataclasses
from typing import Any

from omegaconf import OmegaConf

from rlinf_vl.config import Config, config_keys, load_config
from rlinf_vl.config.load import shown
from rlinf_vl.recipes.catalog import FOLDER, Recipe, Variant, estimates, recipes

COLUMNS = ("config", "GPUs", "hours", "published", "state")
NOTE = "Hours are estimated by preflight for H100 and assumed lengths; nothing of it was measured."


def changed_settings(config_name: str) -> dict[str, Any]:
    """Return the keys of a config whose values are not the defaults, by dotted name."""
    config = OmegaConf.structured(load_config(config_name))
    defaults = OmegaConf.structured(Config)
    changed = {}
    for key in config_keys():
        value = OmegaConf.select(config, key)
        if value != OmegaConf.select(defaults, key, throw_on_missing=False):
            changed[key] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    # The texts of files of Python are no settings.
    changed.pop("runner.code_files", None)
    return changed


def hours_text(config_name: str) -> str:
    """Return the estimated hours of a whole run; a dash where it does not fit."""
    hours = estimates().get(config_name, {}).get("hours")
    if hours is None:
        return "–"
    return f"~{hours:.1f}" if hours >= 0.1 else f"~{hours:.2f}"


def hardware_text(variant: Variant) -> str:
    """Return GPUs in words, such as "8 × 80 GB"."""
    machines = f"{variant.nodes} × " if variant.nodes > 1 else ""
    return f"{machines}{variant.gpus} × {variant.gpu_memory} GB"


def row_of(name: str, variant: Variant) -> tuple[str, ...]:
    """Return the cells of a variant, as in `COLUMNS`."""
    return name, hardware_text(variant), hours_text(name), variant.expected, variant.state


def list_text() -> str:
    """Return the table of all recipes."""
    rows = [COLUMNS]
    for recipe in recipes().values():
        rows += [row_of(name, variant) for name, variant in recipe.variants.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, "", NOTE, "'rlinf-vl recipes NAME' shows one and how to start it"])


def recipe_text(folder: str, names: list[str]) -> str:
    """Return a recipe: where it is from, its metric, its deviations, and each variant's settings."""
    recipe = recipes()[folder]
    lines = [recipe.title, "", *(f"source: {source}" for source in recipe.sources)]
    lines += [f"read at: {recipe.revision}", "", "metric:"]
    lines += [f"  {name}: {text}" for name, text in dataclasses.asdict(recipe.metric).items()]
    lists = {
        "deviations": recipe.deviations,
        "not found": recipe.open,
        "not to be had here": recipe.absent,
    }
    for title, texts in lists.items():
        if texts:
            lines += ["", f"{title}:", *(f"  - {text}" for text in texts)]
    for name in names:
        variant = recipe.variants[name]
        lines += ["", f"{name}: {variant.state}", f"  original: {variant.original}"]
        lines.append(f"  published: {variant.expected}")
        lines.append(f"  on {hardware_text(variant)}: {hours_text(name)} hours (estimated)")
        lines.append(f"  start: rlinf-vl train {FOLDER / folder / name}.yaml")
        if len(names) == 1:
            lines.append("  settings that are not the defaults:")
            settings = changed_settings(name)
            lines += [f"    {key} = {shown(value)}" for key, value in settings.items()]
    if len(names) > 1:
        lines += ["", f"'rlinf-vl recipes {names[0]}' shows the settings of one"]
    return "\n".join(lines)


def recipe_json(folder: str, names: list[str], with_settings: bool) -> list[dict[str, Any]]:
    """Return the variants of a recipe as JSON."""
    recipe = recipes()[folder]
    shared = dataclasses.asdict(recipe)
    del shared["variants"]
    entries = []
    for name in names:
        entry = {
            "name": name,
            "recipe": folder,
            **shared,
            **dataclasses.asdict(recipe.variants[name]),
        }
        entry["config"] = str(FOLDER / folder / f"{name}.yaml")
        estimate = estimates().get(name, {})
        entry["estimated_hours"] = estimate.get("hours")
        entry["estimated_step_seconds"] = estimate.get("seconds")
        if with_settings:
            entry["settings"] = changed_settings(name)
        entries.append(entry)
    return entries


def readme_text(folder: str, recipe: Recipe) -> str:
    """Return the README of a recipe's folder."""
    lines = [
        f"# {recipe.title}",
        "",
        "Generated from `recipe.yaml` by `python docs/generate_recipes.py`.",
        "",
    ]
    lines += [f"- Source: <{source}>" for source in recipe.sources]
    lines += [f"- Read at commit `{recipe.revision}`", ""]
    lines += _markdown_table(recipe.variants)
    first = next(iter(recipe.variants))
    lines += [
        "",
        NOTE,
        "",
        "```bash",
        f"rlinf-vl train examples/recipes/{folder}/{first}.yaml",
        "```",
    ]
    lines += ["", "## Metric", ""]
    lines += [f"- **{name}**: {text}" for name, text in dataclasses.asdict(recipe.metric).items()]
    lists = {
        "Deviations": recipe.deviations,
        "Not found": recipe.open,
        "Not to be had here": recipe.absent,
    }
    for title, texts in lists.items():
        if texts:
            lines += ["", f"## {title}", "", *(f"- {text}" for text in texts)]
    lines += ["", "## Originals", ""]
    for name, variant in recipe.variants.items():
        speed = f", {variant.published_s:g} s a step published" if variant.published_s else ""
        lines.append(f"- [`{name}`]({name}.yaml): `{variant.original}`{speed}")
    lines += [
        "",
        "## Memory, by preflight",
        "",
        "GiB of each GPU; nothing here was measured on a GPU.",
    ]
    for name in recipe.variants:
        lines += [
            "",
            f"### {name}",
            "",
            *estimates().get(name, {}).get("memory", ["not estimated"]),
        ]
    return "\n".join(lines).rstrip() + "\n"


def page_table() -> str:
    """Return the table of all recipes for docs/recipes.md."""
    lines = ["| config | GPUs | hours | published | state |", "|---|---|---:|---|---|"]
    for folder, recipe in recipes().items():
        link = f"[**{recipe.title}**](../examples/recipes/{folder}/README.md)"
        lines.append(f"| {link} | | | | |")
        lines += _markdown_rows(recipe.variants)
    return "\n".join(lines)


def _markdown_table(variants: dict[str, Variant]) -> list[str]:
    head = ["| config | GPUs | hours | published | state |", "|---|---|---:|---|---|"]
    return head + _markdown_rows(variants)


def _markdown_rows(variants: dict[str, Variant]) -> list[str]:
    rows = [row_of(name, variant) for name, variant in variants.items()]
    return [f"| `{name}` | {' | '.join(cells)} |" for name, *cells in rows]
