"""The recipes in examples/recipes, read and checked.

A recipe is a folder: `recipe.yaml` (the fields of `Recipe`) and one config for each of its variants.
What preflight estimates for them is in `estimates.json`, which docs/generate_recipes.py writes.
"""

import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_vl.config.load import EXAMPLES_DIR
from rlinf_vl.errors import ConfigError, nearest

FOLDER = EXAMPLES_DIR / "recipes"
FILE = "recipe.yaml"
ESTIMATES = Path(__file__).with_name("estimates.json")
#: State of a variant: trained whole by this project, two steps of its toy double on a CPU, or never.
STATES = ("run here", "CPU double run", "never run")


@dataclass
class TokenLengths:
    """Mean tokens that the estimate assumes: of a prompt, of the images in it, of a response."""

    prompt: float = MISSING
    images: float = MISSING
    response: float = MISSING
    longest: float = MISSING


@dataclass
class Metric:
    """The definition of the published figure: what is asked, how, and who grades it."""

    data: str = MISSING
    grader: str = MISSING
    prompt: str = MISSING
    pixels: str = MISSING
    sampling: str = MISSING


@dataclass
class Variant:
    """A config of a recipe.

    Attributes:
        original: the file in the other repository.
        expected: the published result.
        published_s: seconds of a step as published.
        gpus: of each machine, of `gpu_memory` GB; `nodes`: machines.
        steps: of the whole run.
        lengths: assumed for the estimate.
        state: one of `STATES`.
    """

    original: str = MISSING
    expected: str = MISSING
    published_s: float | None = None
    gpus: int = MISSING
    gpu_memory: int = 80
    nodes: int = 1
    steps: int = MISSING
    lengths: TokenLengths = field(default_factory=TokenLengths)
    state: str = "CPU double run"


@dataclass
class Recipe:
    """A published result, and how it is had here.

    Attributes:
        sources: addresses of the result and of its settings.
        revision: commit at which the settings were read.
        deviations: what is not as in the original.
        open: what could not be found.
        absent: results of the same work that can't be had here.
        variants: by the name of their config.
    """

    title: str = MISSING
    sources: list[str] = MISSING
    revision: str = MISSING
    metric: Metric = field(default_factory=Metric)
    deviations: list[str] = MISSING
    open: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    variants: dict[str, Variant] = MISSING


def read_recipe(folder: Path) -> Recipe:
    """Read and check the recipe of a folder.

    Raises:
        ConfigError: with every problem of its `recipe.yaml`.
    """
    path = folder / FILE
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        merged = OmegaConf.merge(OmegaConf.structured(Recipe), content)
    except (OSError, yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if missing := sorted(OmegaConf.missing_keys(merged)):
        raise ConfigError(*(f"{path}: {key}: must be given" for key in missing))
    recipe = OmegaConf.to_object(merged)
    assert isinstance(recipe, Recipe)
    if problems := _problems(recipe, folder):
        raise ConfigError(*(f"{path}: {problem}" for problem in problems))
    return recipe


def _problems(recipe: Recipe, folder: Path) -> list[str]:
    """Return what the types of the fields do not say."""
    problems = [
        f"sources: {source!r} is no address; write https://…"
        for source in recipe.sources
        if not source.startswith("https://")
    ]
    if not recipe.sources:
        problems.append("sources: [] names nothing; give the address of the result")
    if not re.fullmatch("[0-9a-f]{40}", recipe.revision):
        problems.append(f"revision: {recipe.revision!r} is no commit of 40 hex digits")
    configs = {path.stem for path in folder.glob("*.yaml") if path.name != FILE}
    for name in sorted(configs ^ recipe.variants.keys()):
        where = "no config of that name" if name in recipe.variants else "a config without an entry"
        problems.append(f"variants.{name}: {where}; the folder has {', '.join(sorted(configs))}")
    for name, variant in recipe.variants.items():
        key = f"variants.{name}"
        if variant.state not in STATES:
            problems.append(f"{key}.state: {variant.state!r} is not one of {', '.join(STATES)}")
        if min(variant.gpus, variant.nodes, variant.gpu_memory, variant.steps) < 1:
            problems.append(f"{key}: gpus, nodes, gpu_memory and steps must be at least 1")
        lengths = variant.lengths
        is_sound = 0 <= lengths.images <= lengths.prompt and 0 < lengths.response <= lengths.longest
        if not is_sound:
            problems.append(
                f"{key}.lengths: {lengths}; images' are at most the prompt's, the mean response at "
                "most the longest"
            )
    return problems


@cache
def recipes() -> dict[str, Recipe]:
    """Return all recipes by the names of their folders.

    Raises:
        ConfigError: one of them is wrong.
    """
    return {path.parent.name: read_recipe(path.parent) for path in sorted(FOLDER.glob(f"*/{FILE}"))}


def find_recipe(name: str) -> tuple[str, list[str]]:
    """Return the folder that a name means, and the variants: the one of that name, or all.

    Raises:
        ConfigError: there is no such recipe.
    """
    variants = {
        variant: folder for folder, recipe in recipes().items() for variant in recipe.variants
    }
    if name in recipes():
        return name, list(recipes()[name].variants)
    if name in variants:
        return variants[name], [name]
    names = [*recipes(), *variants]
    raise ConfigError(
        f"recipe {name!r}: there is none;{nearest(name, names)} there are {', '.join(recipes())}"
    )


@cache
def estimates() -> dict[str, dict]:
    """Return what preflight estimates, by config: seconds, hours, peak_gib, problems, memory."""
    return json.loads(ESTIMATES.read_text(encoding="utf-8"))
