"""Recipes: their files are whole, their configs load, their pages are those that the generator writes."""

import json
import runpy
from pathlib import Path

import pytest
import yaml
from recipe_doubles import ON_CPU, VARIANTS, double_of, in_place_of_hub

from rlinf_vl.__main__ import main
from rlinf_vl.config import load_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.preflight.inputs import RULES
from rlinf_vl.recipes.catalog import FOLDER, estimates, read_recipe, recipes
from rlinf_vl.recipes.render import changed_settings, readme_text

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_recipe_passes_the_check_but_for_the_hub(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    load_config(name, [*in_place_of_hub(name), *ON_CPU], RULES)
    load_config(name, double_of(name), RULES)


def test_the_pages_are_those_that_the_generator_writes():
    generator = runpy.run_path(str(ROOT / "docs/generate_recipes.py"))
    assert generator["page_text"]() == (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    for folder, recipe in recipes().items():
        text = (FOLDER / folder / "README.md").read_text(encoding="utf-8")
        assert text == readme_text(folder, recipe), f"{folder}: run docs/generate_recipes.py"


def test_every_recipe_has_its_estimate():
    assert estimates().keys() == set(VARIANTS)
    for name, estimate in estimates().items():
        assert bool(estimate["hours"]) != bool(estimate["problems"]), name


def test_a_wrong_recipe_is_refused_by_name(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    content = yaml.safe_load((FOLDER / "rlinf-geo3k/recipe.yaml").read_text(encoding="utf-8"))
    (folder / "rlinf-geo3k-2b.yaml").touch()

    def refused(**changes) -> str:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(content | changes), encoding="utf-8")
        with pytest.raises(ConfigError) as error:
            read_recipe(folder)
        return str(error.value)

    variant = content["variants"]["rlinf-geo3k-2b"]
    assert "sorces" in refused(sorces=["x"])
    assert "'example.org' is no address" in refused(sources=["example.org"])
    assert "no commit" in refused(revision="main")
    assert "variants.other: no config of that name" in refused(variants={"other": variant})
    assert "state: 'ran' is not one of" in refused(
        variants={"rlinf-geo3k-2b": variant | {"state": "ran"}}
    )
    too_long = variant | {"lengths": variant["lengths"] | {"response": 5000}}
    assert "lengths" in refused(variants={"rlinf-geo3k-2b": too_long})
    metric = {key: text for key, text in content["metric"].items() if key != "grader"}
    assert "metric.grader: must be given" in refused(metric=metric)


def test_the_verb_lists_and_shows(capsys):
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in VARIANTS) and "estimated" in listed
    assert main(["recipes", "easyr1-geo3k-7b-dapo"]) == 0
    one = capsys.readouterr().out
    assert "algorithm.clip_ratio_high = 0.28" in one and "runner.max_epochs = 15" in one
    assert "rlinf-vl train" in one and "deviations:" in one and "clip_ratio_low = null" not in one
    assert main(["recipes", "papo"]) == 0
    assert "papo-3b-dapo" in capsys.readouterr().out
    assert main(["recipes", "papo-3d"]) == 2
    assert "did you mean 'papo-3b'" in capsys.readouterr().err


def test_the_json_has_the_settings(capsys):
    assert main(["recipes", "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == VARIANTS
    assert main(["recipes", "papo-7b", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["settings"]["algorithm.papo.entropy_weight"] == 0.05
    assert entry["settings"] == json.loads(json.dumps(changed_settings("papo-7b")))
    assert Path(entry["config"]).is_file() and entry["metric"]["grader"]


def test_settings_are_those_that_differ_from_the_defaults():
    settings = changed_settings("easyr1-geo3k-7b-grpo")
    assert (
        settings["algorithm.kl_beta"] == 0.01 and "algorithm.sampling_params.top_p" not in settings
    )
