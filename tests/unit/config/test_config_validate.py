"""Validation: every key refuses values beyond its limit or its list, and what is allowed stays so."""

from typing import get_origin

import pytest

from rlinf_vl.config import config_keys, load_config
from rlinf_vl.config.schema import Limit
from rlinf_vl.errors import ConfigError

CHOICES = {
    name: key.allowed
    for name, key in config_keys().items()
    if isinstance(key.allowed, tuple) and key.allowed
}
LIMITS = {
    name: key.allowed for name, key in config_keys().items() if isinstance(key.allowed, Limit)
}
MAY_BE_INFINITE = {
    "actor.optim.clip_grad", "algorithm.importance_sampling_clip", "algorithm.rejection.high", "runner.trajectories.max_gb",
}  # fmt: skip

TOY = "toy-grpo-cpu"
NO_TIS = "algorithm.importance_sampling_fix=false"
FROM_ENGINE = "algorithm.recompute_logprobs=false"
NO_LOGPROBS = "rollout.return_logprobs=false"
STATIC = "runner.enable_dynamic_batch_size=false"


def problems(*overrides: str) -> tuple[str, ...]:
    """What loading the toy with these overrides is refused for; () if it isn't."""
    try:
        load_config(TOY, overrides)
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("key", CHOICES)
def test_unknown_choice_lists_the_allowed_ones(key):
    is_list = key == "runner.logger.logger_backends"
    (problem,) = problems(f"{key}={'[nonsense]' if is_list else 'nonsense'}")
    assert problem.startswith(f"{key}: 'nonsense' is unknown; allowed: {', '.join(CHOICES[key])}")


def beyond(key: str) -> str:
    """A value just outside of a key's limit."""
    must = LIMITS[key].must
    if must.startswith(("be > 0", "be at least 1", "be -1", "lie in (0, 1]")):
        return "0"
    beyond = {
        "be >= 0": "-1",
        "be at least 0, or -1 for all": "-2",
        "lie in [0, 1]": "1.1",
        "lie in [0, 1)": "1",
        "be true, false or auto": "never",
    }
    return (beyond | {"lie in [0, 2^63)": str(2**63)}).get(must, "1")


@pytest.mark.parametrize("key", LIMITS)
def test_number_beyond_its_limit(key):
    value = f"[{beyond(key)}]" if get_origin(config_keys()[key].type) is list else beyond(key)
    found = problems(f"{key}={value}")
    assert any(p.startswith(f"{key}: ") and f"must {LIMITS[key].must}" in p for p in found), found


@pytest.mark.parametrize(
    "key", [key for key, (kind, *_) in config_keys().items() if kind in (float, float | None)]
)
def test_nan_is_no_number_and_few_may_be_infinite(key):
    assert f"{key}: nan must be a finite number" in problems(f"{key}=nan")
    assert (f"{key}: inf must be a finite number" in problems(f"{key}=inf")) == (
        key not in MAY_BE_INFINITE
    )


def test_every_number_has_a_limit_or_needs_none():
    free = {"algorithm.entropy_bonus", "reward.reward_max_val", "reward.reward_min_val"}
    numbers = {
        key
        for key, (kind, *_) in config_keys().items()
        if kind in (int, float, int | None, float | None)
    }
    assert numbers - LIMITS.keys() == free


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.sampling_params.top_p=0.9", NO_TIS],
        ["algorithm.val_sampling_params.temperature=0", "algorithm.val_sampling_params.top_k=5"],
        [FROM_ENGINE, NO_TIS],
        [NO_LOGPROBS, NO_TIS],
        [STATIC, "actor.micro_batch_size=7"],
        ["runner.resume_dir=auto"],
        ["algorithm.sampling_params.max_new_tokens=24"],
        ["actor.optim.lr_scheduler=cosine", "actor.optim.min_lr_ratio=0.1"],
        ["cluster.num_nodes=2", "cluster.ray_address=auto"],
        ["data.image_min_pixels=4", "data.image_max_pixels=4", "data.image_keys=[]"],
        [
            "runner.max_steps=-1",
            "runner.keep_last=-1",
            "runner.val_check_interval=-1",
            "data.val_data_paths=[]",
        ],
        ["algorithm.clip_ratio_c=3", "reward.reward_min_val=-1"],
    ],
    ids=",".join,
)
def test_allowed(overrides):
    assert problems(*overrides) == ()


def test_existing_checkpoint_folder_is_accepted(tmp_path):
    assert problems(f"runner.resume_dir={tmp_path}") == ()
