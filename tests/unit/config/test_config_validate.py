"""Validation: every rule refuses what it is there for, with the keys, the values and the way out in its message."""

import importlib.util
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
LORA = "actor.model.is_lora=true"
NF4 = "actor.model.lora.quantization=nf4"
REENTRANT = "actor.fsdp_config.gradient_checkpointing_use_reentrant=true"
STATIC = "runner.enable_dynamic_batch_size=false"


def problems(*overrides: str) -> tuple[str, ...]:
    """What loading the toy with these overrides is refused for; () if it isn't."""
    try:
        load_config(TOY, overrides)
    except ConfigError as error:
        return error.problems
    return ()


RULES = [
    (
        ["algorithm.sampling_params.temperature=0"],
        ["algorithm.sampling_params.temperature: 0 must be > 0", "greedy groups have no spread"],
    ),
    (
        ["runner.weight_sync_interval=4"],
        ["runner.weight_sync_interval: 4", "runner.mismatch_check_interval=-1"],
    ),
    (
        ["runner.schedule=async"],
        ["runner.schedule: async", "take turns", "{actor: 0, rollout: 1}", "runner.schedule=sync"],
    ),
    (
        [
            "runner.schedule=one_step_off",
            "cluster.component_placement={actor: 0, rollout: 1}",
            "runner.weight_sync_interval=2",
            "runner.mismatch_check_interval=-1",
        ],
        ["runner.weight_sync_interval: 2 exceeds runner.max_staleness=1", "raise max_staleness"],
    ),
    (
        ["actor.context_parallel_size=3"],
        ["actor.context_parallel_size: 3", "does not divide the 2 slots of actor"],
    ),
    (
        ["actor.fsdp_config.expert_parallel_size=4"],
        ["actor.fsdp_config.expert_parallel_size: 4 does not divide the 2 slots of actor"],
    ),
    (
        [
            "actor.fsdp_config.expert_parallel_size=2",
            "actor.model.is_lora=true",
            "actor.model.lora.quantization=nf4",
        ],
        ["actor.fsdp_config.expert_parallel_size: 2", "quantized weights whole; set it 1"],
    ),
    (["rollout.tensor_parallel_size=2"], ["rollout.tensor_parallel_size", "SGLang", "torch"]),
    (
        ["rollout.sglang.server_args={disable_radix_cache: true}"],
        ["rollout.sglang.server_args", "SGLang"],
    ),
    (
        [
            "rollout.rollout_backend=sglang",
            "rollout.sglang.server_args={rl_on_policy_target: fsdp}",
        ],
        [
            "rollout.sglang.server_args",
            "rl_on_policy_target='fsdp'",
            "M-RoPE",
            "rollout.deterministic",
        ],
    ),
    (["actor.enable_offload=true"], ["actor.enable_offload", "cluster.device=cpu"]),
    (["rollout.deterministic=true"], ["rollout.deterministic", "SGLang"]),
    (
        ["rollout.weight_sync=brodcast"],
        [
            "rollout.weight_sync",
            "'brodcast'",
            "auto, shared_memory, broadcast, delta, object_store",
            "'broadcast'?",
        ],
    ),
    (["rollout.rollout_backend=sglag"], ["rollout.rollout_backend", "'sglag'", "torch, sglang"]),
    (
        ["rollout.thinking.mode=of"],
        ["rollout.thinking.mode: 'of' is unknown; allowed: auto, on, off"],
    ),
    (
        ["rollout.thinking={mode: off, budget: 8}"],
        ["rollout.thinking.budget: 8 with rollout.thinking.mode=off", "null"],
    ),
    (
        ["rollout.thinking.budget=24"],
        [
            "rollout.thinking.budget: 24",
            "no room",
            "algorithm.sampling_params.max_new_tokens=24",
            "raise max_new_tokens",
        ],
    ),
    (
        ["runner.max_tokens_per_mbs=535"],
        ["runner.seq_length=536", "runner.max_tokens_per_mbs=535", "raise"],
    ),
    (
        [STATIC, "actor.micro_batch_size=8"],
        ["actor.micro_batch_size=8", "runner.seq_length=536", "=4096", "lower"],
    ),
    (
        ["data.max_prompt_length=536"],
        ["data.max_prompt_length=536", "runner.seq_length=536", "lower it"],
    ),
    (
        ["algorithm.sampling_params.max_new_tokens=25"],
        ["algorithm.sampling_params.max_new_tokens=25", "=512", "=536"],
    ),
    (
        ["algorithm.val_sampling_params.max_new_tokens=25"],
        ["algorithm.val_sampling_params.max_new_tokens=25", "null"],
    ),
    (
        ["algorithm.sampling_params.max_new_tokens=0"],
        ["algorithm.sampling_params.max_new_tokens: 0", "at least 1"],
    ),
    (
        ["algorithm.group_size=1"],
        ["algorithm.group_size: 1", "algorithm.adv_type=grpo", "zero", "at least 2"],
    ),
    (
        ["algorithm.kl_beta=0.01", "algorithm.kl_penalty_type=kl"],
        [
            "algorithm.kl_penalty_type: k1 (kl)",
            "gradient of exactly zero",
            "algorithm.kl_beta=0.01",
            "use k2 or k3",
        ],
    ),
    (
        ["algorithm.kl_placement=reward"],
        ["algorithm.kl_placement: reward with algorithm.kl_beta=0", "kl_placement=loss"],
    ),
    (
        ["algorithm.loss_type=sapo", "algorithm.clip_ratio_low=0.2"],
        [
            "algorithm.clip_ratio_low: 0.2 clips nothing with algorithm.loss_type=sapo",
            "leave it null",
        ],
    ),
    (
        ["algorithm.loss_type=cispo", "algorithm.clip_ratio_c=3"],
        ["algorithm.clip_ratio_c: 3 clips nothing with algorithm.loss_type=cispo"],
    ),
    (
        ["algorithm.overlong.buffer=24"],
        ["algorithm.overlong.buffer: 24", "max_new_tokens=24", "lower it"],
    ),
    (
        [
            "algorithm.overlong.filter=true",
            "algorithm.kl_placement=reward",
            "algorithm.kl_beta=0.1",
        ],
        ["algorithm.overlong.filter: true with algorithm.kl_placement=reward"],
    ),
    *(
        (
            ["algorithm.reward_normalization=per_reward", *keys],
            ["algorithm.reward_normalization: per_reward with algorithm." + setting, remedy],
        )
        for keys, setting, remedy in (
            (["algorithm.adv_type=rloo"], "adv_type=rloo", "set adv_type=grpo"),
            (
                ["algorithm.normalize_advantages=false"],
                "normalize_advantages=false",
                "set normalize_advantages=true",
            ),
            (
                ["algorithm.credit=turn", "rollout.max_turns=2"],
                "credit=turn or",
                "credit=trajectory",
            ),
            (
                ["algorithm.state_advantage_weight=1", "rollout.max_turns=2"],
                "credit=turn or state_advantage_weight > 0",
                "state_advantage_weight=0",
            ),
            (["algorithm.overlong.buffer=4"], "overlong.buffer=4", "{function: overlong}"),
            (
                ["algorithm.kl_placement=reward", "algorithm.kl_beta=0.1"],
                "kl_placement=reward: kl_beta=0.1",
                "set kl_placement=loss",
            ),
        )
    ),
    (
        [
            "algorithm.dynamic_sampling.enable=true",
            "algorithm.group_size=1",
            "algorithm.adv_type=reinforce_plus_plus",
        ],
        ["algorithm.dynamic_sampling.enable: true with algorithm.group_size=1", "ties with itself"],
    ),
    (
        [
            "algorithm.state_advantage_weight=1",
            "rollout.max_turns=2",
            "algorithm.adv_type=reinforce_plus_plus_baseline",
        ],
        [
            "algorithm.state_advantage_weight: 1",
            "algorithm.adv_type=reinforce_plus_plus_baseline",
            "use one of dr_grpo, grpo, rloo",
        ],
    ),
    (
        ["algorithm.dynamic_sampling.max_rounds=0"],
        ["algorithm.dynamic_sampling.max_rounds: 0 must be at least 1"],
    ),
    (["algorithm.tau_pos=0"], ["algorithm.tau_pos: 0.0 must be > 0"]),
    (
        ["algorithm.loss_type=sapoo"],
        ["algorithm.loss_type: 'sapoo' is unknown", "path/to/file.py", "'sapo'?"],
    ),
    (
        ["algorithm.adv_type=/no/such.py:mine"],
        ["algorithm.adv_type: '/no/such.py:mine': no file '/no/such.py'"],
    ),
    (
        ["algorithm.n_minibatches=3"],
        ["data.rollout_batch_size=16", "algorithm.n_minibatches=3", "change one"],
    ),
    (
        ["rollout.max_running_requests=7"],
        ["rollout.max_running_requests=7", "algorithm.group_size=8", "raise it"],
    ),
    (
        [NO_LOGPROBS],
        [
            "algorithm.importance_sampling_fix: true",
            "rollout.return_logprobs is false",
            "set it true",
        ],
    ),
    (
        [FROM_ENGINE],
        ["importance_sampling_fix: true", "recompute_logprobs=false", "weight would be 1", "auto"],
    ),
    (
        [NO_TIS, FROM_ENGINE, NO_LOGPROBS],
        ["algorithm.recompute_logprobs: false", "rollout.return_logprobs is false"],
    ),
    (
        ["algorithm.sampling_params.top_p=0.9"],
        ["sampling_params.top_p: 0.9", "truncated", "trainer's", "top_p=1"],
    ),
    (["algorithm.sampling_params.top_k=20"], ["sampling_params.top_k: 20", "truncated", "top_k=0"]),
    (
        [NO_TIS, FROM_ENGINE, "algorithm.sampling_params.top_p=0.9"],
        [
            "sampling_params.top_p: 0.9",
            "algorithm.recompute_logprobs=false",
            "set recompute_logprobs=auto",
        ],
    ),
    (
        [NO_TIS, FROM_ENGINE, "algorithm.sampling_params.top_k=2"],
        ["sampling_params.top_k: 2", "recompute_logprobs"],
    ),
    (
        [LORA, "actor.model.freeze_vision_tower=false"],
        ["freeze_vision_tower: false", "only adapters are trained"],
    ),
    (
        [LORA, "actor.model.freeze_projector=false"],
        ["actor.model.freeze_projector: false", "leave it out"],
    ),
    (
        [LORA, "actor.model.freeze_language_model=true"],
        ["actor.model.freeze_language_model: true", "target_modules"],
    ),
    (
        [LORA, "actor.model.lora.target_modules=[]"],
        ["actor.model.lora.target_modules: empty", "all-linear"],
    ),
    (
        [LORA, "actor.model.lora.target_modules=['*_proj']"],
        ["target_modules: '*_proj' is no regular expression", ".*q"],
    ),
    (
        [LORA, NF4, "actor.model.lora.sync=adapters"],
        ["lora.quantization: nf4", "lora.sync=adapters", "set merged"],
    ),
    (
        [LORA, NF4, "actor.model.lora.save_lora_only=false"],
        ["quantization: nf4", "save_lora_only=false", "set it true"],
    ),
    (
        [LORA, NF4, "actor.fsdp_config.cpu_offload=true", "cluster.device=cuda"],
        [
            "lora.quantization: nf4",
            "cpu_offload=true",
            "FSDP2 does not move",
            "set cpu_offload=false",
        ],
    ),
    (
        [LORA, "actor.model.lora.sync=adapters", "rollout.rollout_backend=sglang"],
        ["actor.model.lora.sync: adapters", "no weight sync reaches them", "merged"],
    ),
    (
        [LORA, REENTRANT],
        ["gradient_checkpointing_use_reentrant: true", "embeddings", "set it false"],
    ),
    ([LORA, "actor.model.lora.rank=0"], ["actor.model.lora.rank: 0 must be at least 1"]),
    (
        ["actor.model.router_aux_loss_coef=0.01"],
        ["router_aux_loss_coef: 0.01", "freeze_router leaves", "freeze_router=false"],
    ),
    (
        ["actor.routing_replay=r3"],
        ["actor.routing_replay: 'r3' is unknown; allowed: off, record, replay"],
    ),
    (
        ["actor.fsdp_config.cpu_offload=true"],
        ["cpu_offload: true", "cluster.device=cpu", "set it false"],
    ),
    (
        ["actor.fsdp_config.mixed_precision.param_dtype=fp16"],
        ["param_dtype: fp16", "loss scaler", "use bf16"],
    ),
    (
        ["reward.reward_min_val=1"],
        ["reward.reward_max_val=1.0", "reward.reward_min_val=1.0", "exceed"],
    ),
    (
        ["data.image_min_pixels=9", "data.image_max_pixels=4"],
        ["data.image_min_pixels=9", "data.image_max_pixels=4", "lower it"],
    ),
    (["data.image_keys=[a,b,a]"], ["data.image_keys: a named twice", "['a', 'b', 'a']"]),
    (["data.image_keys=[a,b]", "data.video_keys=[b]"], ["data.image_keys: b named twice"]),
    (
        ["data.video={min_pixels: 9, max_pixels: 8}"],
        ["data.video.min_pixels=9 exceeds data.video.max_pixels=8"],
    ),
    (["data.video.fps=0"], ["data.video.fps"]),
    (["data.video.max_frames=0"], ["data.video.max_frames"]),
    (["data.train_data_paths=[]"], ["data.train_data_paths: empty", "hf://"]),
    (
        ["data.train_data_paths=[/no/such.parquet]"],
        ["data.train_data_paths: no file '/no/such.parquet'"],
    ),
    (
        ["data.val_data_paths=[toy,/no/such.parquet]"],
        ["data.val_data_paths: no file '/no/such.parquet'"],
    ),
    (["runner.resume_dir=/no/such"], ["runner.resume_dir: no folder '/no/such'", "auto or null"]),
    (["runner.output_dir=s3://a/b"], ["runner.output_dir: 's3://a/b'", "runner.checkpoint_dir"]),
    (
        ["runner.keep_best=1", "runner.save_interval=-1"],
        ["runner.keep_best: 1", "runner.save_interval -1"],
    ),
    (
        ["runner.keep_best=1", "runner.save_interval=15", "runner.val_check_interval=10"],
        ["runner.keep_best", "multiple"],
    ),
    (["runner.experiment_name=a/b"], ["runner.experiment_name: 'a/b'", "runner.output_dir"]),
    (["runner.experiment_name='..'"], ["runner.experiment_name: '..'"]),
    (["runner.experiment_name="], ["runner.experiment_name: ''"]),
    (
        ["cluster.num_nodes=2", "cluster.ray_address=null"],
        ["cluster.num_nodes: 2", "cluster.ray_address=auto"],
    ),
    (
        ["cluster.component_placement={actor: 0, rolout: 1}"],
        ["cluster.component_placement", "did you mean 'rollout'?"],
    ),
    (
        ["cluster.component_placement={actor: 0}"],
        ["cluster.component_placement", "no place for 'rollout'"],
    ),
    (
        ["runner.logger.logger_backends=[tensorbord]"],
        ["'tensorbord' is unknown", "did you mean 'tensorboard'?"],
    ),
]


@pytest.mark.parametrize(
    ("overrides", "expected"), RULES, ids=[",".join(overrides) for overrides, _ in RULES]
)
def test_rule(overrides, expected):
    (problem,) = problems(*overrides)
    for text in expected:
        assert text in problem


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


def test_every_problem_is_reported():
    wrong = (
        "actor.optim.lr=-1",
        "algorithm.adv_type=gae",
        "algorithm.group_size=1",
        "algorithm.kl_beta=-1",
    )
    assert len(problems(*wrong)) == 4


def test_a_zero_does_not_break_the_rules_beside_it():
    assert problems("algorithm.n_minibatches=0") == (
        "algorithm.n_minibatches: 0 must be at least 1",
    )


@pytest.mark.parametrize("installed", [True, False])
def test_wandb_must_be_installed(monkeypatch, installed):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    found = problems("runner.logger.logger_backends=[wandb]")
    assert found == () if installed else "pip install 'rlinf_vl[wandb]'" in found[0]


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


def test_sglang_is_not_deterministic_on_a_cpu():
    (problem,) = problems("rollout.rollout_backend=sglang", "rollout.deterministic=true")
    assert "rollout.deterministic: true needs a GPU (cluster.device is cpu)" in problem
