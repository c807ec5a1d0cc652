"""Recipes: their files are whole, their configs load, their pages are those that the generator writes."""

import runpy
from pathlib import Path

import pytest
import yaml
from recipe_doubles import FOLDER, ON_CPU, VARIANTS, double_of, in_place_of_hub

from rlinf_vl.config import load_config
from rlinf_vl.tools.check.inputs import RULES

ROOT = Path(__file__).resolve().parents[3]
GENERATOR = runpy.run_path(str(ROOT / "docs/generate_recipes.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_recipe_passes_the_check_but_for_the_hub(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    load_config(name, [*in_place_of_hub(name), *ON_CPU], RULES)
    load_config(name, double_of(name), RULES)


def test_the_pages_are_those_that_the_generator_writes():
    assert GENERATOR["page_text"]() == (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    named = set()
    for folder, recipe in GENERATOR["recipes"]().items():
        text = (FOLDER / folder / "README.md").read_text(encoding="utf-8")
        assert text == GENERATOR["readme_text"](folder, recipe), (
            f"{folder}: run docs/generate_recipes.py"
        )
        named |= recipe["variants"].keys()
    assert named == set(VARIANTS)


def test_a_wrong_recipe_is_refused_by_name(tmp_path):
    content = yaml.safe_load((FOLDER / "rlinf-geo3k/recipe.yaml").read_text(encoding="utf-8"))
    (tmp_path / "rlinf-geo3k-2b.yaml").touch()

    def refused(**changes) -> str:
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content | changes), encoding="utf-8")
        with pytest.raises(ValueError) as error:
            GENERATOR["read_recipe"](tmp_path)
        return str(error.value)

    variant = content["variants"]["rlinf-geo3k-2b"]
    assert "sorces: no such key" in refused(sorces=["x"])
    assert "'example.org' is no address" in refused(sources=["example.org"])
    assert "no commit" in refused(revision="main")
    assert "variants.other: no config of that name" in refused(variants={"other": variant})
    wrong = {"rlinf-geo3k-2b": variant | {"state": "ran"}}
    assert "state: 'ran' is not one of" in refused(variants=wrong)
    metric = {key: text for key, text in content["metric"].items() if key != "grader"}
    assert "metric.grader: must be given" in refused(metric=metric)
