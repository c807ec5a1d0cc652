"""One line of override is an algorithm as published: what a choice brings, and what it leaves alone."""

import re
from pathlib import Path

import pytest

from rlinf_vl.algorithms.estimators import ESTIMATORS
from rlinf_vl.algorithms.losses import LOSS_TYPES
from rlinf_vl.config import load_config, save_config
from rlinf_vl.config.algorithm_files import built_ins
from rlinf_vl.config.load import parse_config
from rlinf_vl.config.presets import CLIPS, PRESETS
from rlinf_vl.config.schema.algorithm import ADVANTAGES, LOSSES

ROOT = Path(__file__).parents[3]
FLAGSHIP = (
    "qwen3-vl-2b-grpo-fsdp-geo3k"  # whose YAML sets clips, the aggregation and the normalisation
)
AS_PUBLISHED = {
    "adv_type=grpo": {"normalize_advantages": True, "loss_agg_func": "token-mean"},
    "adv_type=dr_grpo": {"normalize_advantages": False, "loss_agg_func": "seq-mean-token-sum-norm"},
    "adv_type=rloo": {"normalize_advantages": False},
    "adv_type=reinforce_plus_plus": {"normalize_advantages": True},
    "loss_type=gspo": {
        "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4,
        "loss_agg_func": "seq-mean-token-mean",
    },
    "loss_type=cispo": {
        "clip_ratio_low": 1.0,
        "clip_ratio_high": 4.0,
        "loss_agg_func": "token-mean",
    },
    "loss_type=sapo": {
        "clip_ratio_low": None,
        "clip_ratio_high": None,
        "loss_agg_func": "seq-mean-token-mean",
    },
}


@pytest.mark.parametrize("config", ["toy-grpo-cpu", FLAGSHIP])
@pytest.mark.parametrize("choice", AS_PUBLISHED)
def test_one_override_is_enough(choice, config):
    algorithm = parse_config(config, [f"algorithm.{choice}"]).algorithm
    assert {name: getattr(algorithm, name) for name in AS_PUBLISHED[choice]} == AS_PUBLISHED[choice]


def test_what_is_written_stays():
    assert load_config("toy-grpo-cpu").algorithm.clip_ratio_high == 0.2
    assert parse_config(FLAGSHIP).algorithm.clip_ratio_high == 0.28
    chosen_already = parse_config(
        FLAGSHIP, ["algorithm.loss_type=actor", "algorithm.adv_type=grpo"]
    ).algorithm
    assert chosen_already.clip_ratio_high == 0.28
    overrides = [
        "algorithm.clip_ratio_high=0.1",
        "algorithm.loss_type=gspo",
        "algorithm.loss_agg_func=token-mean",
    ]
    algorithm = parse_config(FLAGSHIP, overrides).algorithm
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.loss_agg_func) == (
        3e-4,
        0.1,
        "token-mean",
    )
    section = parse_config(FLAGSHIP, ["algorithm={loss_type: cispo, clip_ratio_high: 7}"]).algorithm
    assert (section.clip_ratio_low, section.clip_ratio_high) == (1.0, 7.0)


def test_a_loss_and_an_advantage_may_be_chosen_together():
    algorithm = load_config(
        "toy-grpo-cpu", ["algorithm.adv_type=dr_grpo", "algorithm.loss_type=gspo"]
    ).algorithm
    assert (algorithm.normalize_advantages, algorithm.loss_agg_func) == (
        False,
        "seq-mean-token-mean",
    )


@pytest.mark.parametrize(("placement", "estimator"), [("loss", "k3"), ("reward", "k1")])
def test_each_place_of_the_kl_has_its_estimator(placement, estimator):
    where = ["algorithm.kl_beta=0.1", f"algorithm.kl_placement={placement}"]
    assert load_config("toy-grpo-cpu", where).algorithm.kl_penalty_type == estimator
    assert (
        load_config(
            "toy-grpo-cpu", [*where, "algorithm.kl_penalty_type=mse"]
        ).algorithm.kl_penalty_type
        == "k2"
    )


def test_what_is_saved_says_the_values(tmp_path):
    before = load_config("toy-grpo-cpu", ["algorithm.loss_type=sapo", "algorithm.adv_type=dr_grpo"])
    save_config(before, tmp_path / "config.yaml")
    assert "loss_agg_func: seq-mean-token-mean" in (tmp_path / "config.yaml").read_text()
    assert load_config(str(tmp_path / "config.yaml")) == before


def test_every_file_of_a_folder_is_a_choice():
    """A new built-in loss is one file: the config, the formulas and the presets have its name by its being there."""
    assert set(PRESETS["adv_type"]) == set(ADVANTAGES) == set(ESTIMATORS)
    assert set(PRESETS["loss_type"]) == set(LOSSES) == set(LOSS_TYPES)


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_a_loss_sets_every_clip_that_it_needs_and_none_that_it_does_not_read(name):
    loss = built_ins("losses")[name]
    assert set(loss.clips) <= set(CLIPS)
    required = set(loss.clips) - {"clip_ratio_c"}  # None is no dual clip
    assert {key for key in loss.defaults if key in CLIPS} - {"clip_ratio_c"} == required


def test_code_travels_and_has_ppos_clips(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("def mine(inputs): ...")
    config = load_config("toy-grpo-cpu", [f"algorithm.loss_type={path}:mine"])
    assert (config.algorithm.clip_ratio_low, config.algorithm.clip_ratio_high) == (0.2, 0.2)
    assert config.runner.code_files[str(path)] == path.read_text()


PRESETS_OF_CORRECTIONS = dict(
    re.findall(
        r"^\| ([^|]+) \| `(algorithm\.[^`]+)` \|$", (ROOT / "docs/corrections.md").read_text(), re.M
    )
)


@pytest.mark.parametrize("name", PRESETS_OF_CORRECTIONS)
def test_every_preset_of_the_page_on_corrections_is_accepted(name):
    rejection = load_config(
        "toy-grpo-cpu", PRESETS_OF_CORRECTIONS[name].split()
    ).algorithm.rejection
    bounds = re.search(r"in ([\d.]+) … ([\d.]+)", name)
    assert bounds is None or [rejection.low, rejection.high] == [
        float(bound) for bound in bounds.groups()
    ]


def test_the_page_on_corrections_has_the_presets_that_are_known_by_name():
    assert len(PRESETS_OF_CORRECTIONS) > 8
    assert all(
        any(name in preset for preset in PRESETS_OF_CORRECTIONS)
        for name in ("TIS", "MIS", "IcePop")
    )
