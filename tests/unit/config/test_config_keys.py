"""The schema's keys: those users know are there, each is documented, each is read."""

import re
from pathlib import Path

import pytest
from omegaconf import MISSING

import rlinf_vl.config
from rlinf_vl.config import config_keys

KNOWN = {
    "runner": "seq_length enable_dynamic_batch_size max_tokens_per_mbs max_steps max_epochs val_check_interval "
    "save_interval resume_dir output_dir experiment_name seed logger.logger_backends",
    "algorithm": "adv_type loss_type loss_agg_func group_size n_minibatches kl_beta kl_penalty_type clip_ratio_low "
    "clip_ratio_high clip_ratio_c entropy_bonus normalize_advantages recompute_logprobs importance_sampling_fix "
    "importance_sampling_clip sampling_params.temperature sampling_params.top_p sampling_params.top_k "
    "sampling_params.max_new_tokens",
    "rollout": "rollout_backend return_logprobs gpu_memory_utilization max_running_requests model.model_path "
    "model.model_type model.precision",
    "data": "train_data_paths val_data_paths prompt_key answer_key image_keys system_prompt max_prompt_length "
    "filter_prompt_by_length rollout_batch_size shuffle seed",
    "actor": "model.variable_seq_lengths model.is_lora fsdp_config.strategy fsdp_config.gradient_checkpointing "
    "fsdp_config.gradient_checkpointing_use_reentrant fsdp_config.cpu_offload fsdp_config.mixed_precision.param_dtype "
    "fsdp_config.mixed_precision.reduce_dtype optim.lr",
    "reward": "reward_type reward_max_val reward_min_val",
    "cluster": "num_nodes component_placement",
}

#: Keys that loading alone decides: one value is taken, or (seq_length) it bounds the prompt, the response and the budget.
DECIDED_BY_VALIDATION = {
    name
    for name, key in config_keys().items()
    if isinstance(key.allowed, tuple) and len(key.allowed) == 1
} | {
    "runner.seq_length",
}

PACKAGE = Path(rlinf_vl.config.__file__).parents[1]


def source_outside_config() -> str:
    files = (path for path in PACKAGE.rglob("*.py") if path.parent.name != "config")
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@pytest.mark.parametrize(
    "key", [f"{section}.{name}" for section, names in KNOWN.items() for name in names.split()]
)
def test_known_key_paths_keep_their_place(key):
    assert key in config_keys()


@pytest.mark.parametrize("key", config_keys())
def test_every_key_is_documented(key):
    assert len(config_keys()[key].doc) > 3


def test_types_and_defaults():
    keys = config_keys()
    assert keys["runner.seed"][:2] == (int, 1234)
    assert keys["runner.resume_dir"][:2] == (str | None, None)
    assert keys["runner.experiment_name"].default == MISSING
    assert keys["data.image_keys"].default == ["images"]
    assert (
        keys["runner.output_dir"].doc
        == "Runs are written to ${runner.output_dir}/${runner.experiment_name}/."
    )
    assert (
        "null is off" in keys["algorithm.clip_ratio_c"].doc
        and "\n" not in keys["algorithm.recompute_logprobs"].doc
    )


def test_every_key_is_read():
    """A key that does nothing is a bug. Reading is attribute access; the config room itself doesn't count."""
    source = source_outside_config()
    leaves = {key: key.rpartition(".")[2] for key in config_keys().keys() - DECIDED_BY_VALIDATION}
    unread = sorted(key for key, leaf in leaves.items() if not re.search(rf"\.{leaf}\b", source))
    assert not unread, f"keys that nothing reads: {unread}"
