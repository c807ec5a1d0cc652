"""Combinations of settings that can't work, refused before a GPU is asked for; every problem is reported at once.

Single values are tables (`CHOICES`, `LIMITS`); what depends on several keys is a rule, one function per room.
"""

import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

from rlinf_vl.config.keys import config_keys, nearest
from rlinf_vl.config.placement import parse_placement
from rlinf_vl.config.schema import Config, SamplingConfig
from rlinf_vl.errors import ConfigError

#: Allowed values of every string key that isn't free text.
CHOICES: dict[str, tuple[str, ...]] = {
    "cluster.device": ("auto", "cpu", "cuda"),
    "runner.logger.logger_backends": ("tensorboard", "wandb", "trackio"),
    "algorithm.adv_type": ("grpo",),
    "algorithm.loss_type": ("actor",),
    "algorithm.loss_agg_func": ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"),
    "algorithm.kl_penalty_type": ("k1", "k2", "k3", "abs"),
    "algorithm.recompute_logprobs": ("auto", "true", "false"),
    "algorithm.importance_sampling_level": ("token", "sequence", "geometric"),
    "rollout.rollout_backend": ("torch", "sglang"),
    "rollout.weight_sync": ("auto", "object_store", "broadcast", "shared_memory"),
    "rollout.sglang.log_level": ("debug", "info", "warning", "error", "critical"),
    "rollout.model.model_type": ("qwen3_vl",),  # rows of rlinf_vl.models.families, which imports torch
    "rollout.model.precision": ("fp32", "bf16", "fp16"),
    "rollout.env_class": ("single_turn",),
    "actor.fsdp_config.strategy": ("fsdp2",),
    "actor.fsdp_config.mixed_precision.param_dtype": ("fp32", "bf16", "fp16"),
    "actor.fsdp_config.mixed_precision.reduce_dtype": ("fp32", "bf16", "fp16"),
    "actor.optim.lr_scheduler": ("constant", "linear", "cosine"),
    "reward.reward_type": ("math",),
}

_Limit = tuple[str, Callable[[Any], bool]]
_POSITIVE: _Limit = ("be > 0", lambda x: x > 0)
_NOT_NEGATIVE: _Limit = ("be >= 0", lambda x: x >= 0)
_AT_LEAST_1: _Limit = ("be at least 1", lambda x: x >= 1)
_OFF_OR_POSITIVE: _Limit = ("be -1 or at least 1", lambda x: x == -1 or x >= 1)
_ALL_OR_NOT_NEGATIVE: _Limit = ("be at least 0, or -1 for all", lambda x: x >= -1)
_SHARE: _Limit = ("lie in [0, 1]", lambda x: 0 <= x <= 1)
_SHARE_NOT_0: _Limit = ("lie in (0, 1]", lambda x: 0 < x <= 1)
_DECAY: _Limit = ("lie in [0, 1)", lambda x: 0 <= x < 1)

#: What every number must satisfy on its own; null passes where the schema allows it.
LIMITS: dict[str, _Limit] = {
    "cluster.num_nodes": _AT_LEAST_1,
    "cluster.cpu_threads": _AT_LEAST_1,
    "cluster.object_store_memory": ("be at least 78643200, Ray's minimum of 75 MiB", lambda x: x >= 75 * 2**20),
    "runner.seed": ("lie in [0, 2^63)", lambda x: 0 <= x < 2**63),  # as torch takes it
    "runner.seq_length": _AT_LEAST_1,
    "runner.max_tokens_per_mbs": _AT_LEAST_1,
    "runner.max_epochs": _AT_LEAST_1,
    "runner.max_steps": _OFF_OR_POSITIVE,
    "runner.val_check_interval": _OFF_OR_POSITIVE,
    "runner.weight_sync_interval": _AT_LEAST_1,
    "runner.mismatch_check_interval": _OFF_OR_POSITIVE,
    "runner.save_interval": _OFF_OR_POSITIVE,
    "runner.keep_last": _OFF_OR_POSITIVE,
    "runner.heartbeat_timeout": _POSITIVE,
    "runner.max_restarts": _NOT_NEGATIVE,
    "runner.max_bad_steps": _AT_LEAST_1,
    "runner.trajectories.interval": _OFF_OR_POSITIVE,
    "runner.trajectories.train_groups": _ALL_OR_NOT_NEGATIVE,
    "runner.trajectories.val_groups": _ALL_OR_NOT_NEGATIVE,
    "runner.trajectories.max_gb": _POSITIVE,
    "algorithm.group_size": _AT_LEAST_1,
    "algorithm.n_minibatches": _AT_LEAST_1,
    "algorithm.clip_ratio_low": _NOT_NEGATIVE,
    "algorithm.clip_ratio_high": _NOT_NEGATIVE,
    "algorithm.clip_ratio_c": ("be > 1, or null for no dual clip", lambda x: x > 1),
    "algorithm.kl_beta": _NOT_NEGATIVE,
    "algorithm.importance_sampling_clip": _POSITIVE,
    "algorithm.sampling_params.temperature": (
        "be > 0: the policy is trained at the temperature it was sampled with, and greedy groups have no spread",
        lambda x: x > 0,
    ),
    "algorithm.sampling_params.top_p": _SHARE_NOT_0,
    "algorithm.sampling_params.top_k": _NOT_NEGATIVE,
    "algorithm.val_sampling_params.temperature": _NOT_NEGATIVE,
    "algorithm.val_sampling_params.top_p": _SHARE_NOT_0,
    "algorithm.val_sampling_params.top_k": _NOT_NEGATIVE,
    "rollout.gpu_memory_utilization": (
        "lie in (0, 1], or be auto",
        lambda x: 0 < x <= 1 if isinstance(x, float) else x == "auto",
    ),
    "rollout.max_running_requests": _AT_LEAST_1,
    "rollout.tensor_parallel_size": _AT_LEAST_1,
    "rollout.request_timeout": _POSITIVE,
    "data.max_prompt_length": _AT_LEAST_1,
    "data.rollout_batch_size": _AT_LEAST_1,
    "data.val_samples": _OFF_OR_POSITIVE,
    "data.seed": _NOT_NEGATIVE,
    "data.image_min_pixels": _AT_LEAST_1,
    "data.image_max_pixels": _AT_LEAST_1,
    "data.max_bad_rows": _SHARE,
    "actor.micro_batch_size": _AT_LEAST_1,
    "actor.vision_cache_gb": _NOT_NEGATIVE,
    "actor.logprob_chunk_tokens": _AT_LEAST_1,
    "actor.optim.lr": _POSITIVE,
    "actor.optim.lr_warmup_steps": _NOT_NEGATIVE,
    "actor.optim.min_lr_ratio": _SHARE,
    "actor.optim.adam_beta1": _DECAY,
    "actor.optim.adam_beta2": _DECAY,
    "actor.optim.adam_eps": _POSITIVE,
    "actor.optim.weight_decay": _NOT_NEGATIVE,
    "actor.optim.clip_grad": _POSITIVE,
}


#: Bounds that infinity takes away.
MAY_BE_INFINITE = {"actor.optim.clip_grad", "algorithm.importance_sampling_clip", "runner.trajectories.max_gb"}

#: Yields the problems of a config, each on one line.
Rule = Callable[[Config], Iterable[str]]


def validate_config(config: Config, further: Sequence[Rule] = ()) -> None:
    """Raise `ConfigError` with every problem of a typed, normalised config (`load_config` makes one), those that `further`
    rules find included."""
    rules = (_values, _cluster, _rollout, _runner, _lengths, _algorithm, _correction, _data, _actor_and_reward)
    found = (problem for rule in (*rules, *further) for problem in rule(config))
    problems = list(dict.fromkeys(found))  # data that are trained and validated on are wrong once
    if problems:
        raise ConfigError(*problems)


def _values(config: Config) -> Iterator[str]:
    for key, allowed in CHOICES.items():
        value = _get(config, key)
        for one in value if isinstance(value, list) else [value]:
            if one not in allowed:
                yield f"{key}: {one!r} is unknown; allowed: {', '.join(allowed)};{nearest(one, allowed)}".rstrip(";")
    for key in config_keys():
        value = _get(config, key)
        if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and key not in MAY_BE_INFINITE)):
            yield f"{key}: {value} must be a finite number"
        elif value is not None and key in LIMITS and not LIMITS[key][1](value):
            yield f"{key}: {value} must {LIMITS[key][0]}"


def _cluster(config: Config) -> Iterator[str]:
    cluster = config.cluster
    try:
        parse_placement(cluster.component_placement)
    except ConfigError as error:
        yield from error.problems
    if cluster.num_nodes > 1 and cluster.ray_address in (None, "", "local"):
        yield (
            f"cluster.num_nodes: {cluster.num_nodes} machines need a running Ray cluster, but cluster.ray_address is "
            f"{cluster.ray_address or 'null'} (a private one, on this machine); start it with ray_utils/start_ray.sh, set "
            "cluster.ray_address=auto"
        )


def _rollout(config: Config) -> Iterator[str]:
    rollout, device = config.rollout, config.cluster.device
    if rollout.rollout_backend == "torch":
        for key, value in (
            ("tensor_parallel_size", rollout.tensor_parallel_size > 1),
            ("deterministic", rollout.deterministic),
            ("sglang.attention_backend", rollout.sglang.attention_backend is not None),
            ("sglang.server_args", bool(rollout.sglang.server_args)),
        ):
            if value:
                yield f"rollout.{key} is for SGLang, but rollout.rollout_backend is torch; leave it out, or set sglang"
    elif rollout.deterministic and device == "cpu":
        yield (
            "rollout.deterministic: true needs a GPU (cluster.device is cpu): SGLang's deterministic kernels exist for "
            "CUDA attention backends, not for torch_native, the only one on a CPU"
        )


def _runner(config: Config) -> Iterator[str]:
    runner = config.runner
    if runner.weight_sync_interval > 1 and runner.mismatch_check_interval > 0:
        yield (
            f"runner.weight_sync_interval: {runner.weight_sync_interval} makes the engine's weights old on purpose, which "
            "runner.mismatch_check_interval would stop the run for; set runner.mismatch_check_interval=-1"
        )
    name = runner.experiment_name
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        yield f"runner.experiment_name: {name!r} is not a plain folder name; put folders into runner.output_dir"
    elif len(os.fsencode(name)) > 230:  # of 255 that a file's name may have, with what is put around it
        yield f"runner.experiment_name: {name[:20] + '…'!r} has {len(os.fsencode(name))} bytes; shorten it to 230 or fewer"
    if runner.resume_dir not in (None, "auto") and not os.path.isdir(runner.resume_dir):
        why = why_absent(runner.resume_dir)
        yield f"runner.resume_dir: no folder {runner.resume_dir!r}{why}; give a checkpoint's path, auto or null"
    for backend in ("wandb", "trackio"):
        if backend in runner.logger.logger_backends and importlib.util.find_spec(backend) is None:
            yield (
                f"runner.logger.logger_backends: {backend} is not installed; pip install 'rlinf_vl[{backend}]', or leave it out"
            )


def _lengths(config: Config) -> Iterator[str]:
    runner, data = config.runner, config.data
    budget = f"runner.max_tokens_per_mbs={runner.max_tokens_per_mbs}"
    if runner.enable_dynamic_batch_size:
        if runner.seq_length > runner.max_tokens_per_mbs:
            yield (
                f"runner.seq_length={runner.seq_length} exceeds {budget}: the longest trajectory fits in no"
                f" micro-batch; raise max_tokens_per_mbs or lower seq_length"
            )
    elif config.actor.micro_batch_size * runner.seq_length > runner.max_tokens_per_mbs:
        yield (
            f"actor.micro_batch_size={config.actor.micro_batch_size} times runner.seq_length={runner.seq_length}"
            f" exceeds {budget}; lower micro_batch_size or seq_length, raise max_tokens_per_mbs,"
            f" or set runner.enable_dynamic_batch_size=true"
        )
    if data.max_prompt_length >= runner.seq_length:
        yield (
            f"data.max_prompt_length={data.max_prompt_length} leaves no room for a response in"
            f" runner.seq_length={runner.seq_length}; lower it or raise seq_length"
        )
        return
    for name in ("sampling_params", "val_sampling_params"):
        key, sampling = f"algorithm.{name}.max_new_tokens", _get(config, f"algorithm.{name}")
        if sampling.max_new_tokens is None:
            continue
        if sampling.max_new_tokens < 1:
            yield f"{key}: {sampling.max_new_tokens} must be at least 1"
        elif data.max_prompt_length + sampling.max_new_tokens > runner.seq_length:
            yield (
                f"data.max_prompt_length={data.max_prompt_length} plus {key}={sampling.max_new_tokens} exceeds"
                f" runner.seq_length={runner.seq_length}; raise seq_length, lower one of them,"
                f" or set max_new_tokens to null for what is left"
            )


def _algorithm(config: Config) -> Iterator[str]:
    algorithm, data, rollout = config.algorithm, config.data, config.rollout
    if algorithm.group_size == 1 and algorithm.adv_type == "grpo":
        yield (
            "algorithm.group_size: 1 with algorithm.adv_type=grpo makes every advantage zero (a group is its own"
            " baseline); use at least 2"
        )
    if algorithm.kl_beta > 0 and algorithm.kl_penalty_type == "k1":
        yield (
            "algorithm.kl_penalty_type: k1 (kl) in the loss has an expected gradient of exactly zero, so that"
            f" algorithm.kl_beta={algorithm.kl_beta:g} would add noise and pull nowhere (k1 belongs in the reward); use k2 or k3"
        )
    if algorithm.n_minibatches >= 1 and data.rollout_batch_size % algorithm.n_minibatches:
        yield (
            f"data.rollout_batch_size={data.rollout_batch_size} is not divisible by"
            f" algorithm.n_minibatches={algorithm.n_minibatches}; change one of them"
        )
    if rollout.max_running_requests < algorithm.group_size:
        yield (
            f"rollout.max_running_requests={rollout.max_running_requests} is less than"
            f" algorithm.group_size={algorithm.group_size}: a group is decoded together; raise it"
        )


def _correction(config: Config) -> Iterator[str]:
    """Old logprobs and truncated importance sampling (TIS): what they need, and where they'd be wrong."""
    algorithm, with_logprobs = config.algorithm, config.rollout.return_logprobs
    tis, from_engine = algorithm.importance_sampling_fix, algorithm.recompute_logprobs == "false"
    if tis and not with_logprobs:
        yield (
            "algorithm.importance_sampling_fix: true needs the engine's logprobs, but rollout.return_logprobs is false;"
            " set it true, or importance_sampling_fix=false"
        )
    if tis and from_engine:
        yield (
            "algorithm.importance_sampling_fix: true with algorithm.recompute_logprobs=false: the old logprobs are the"
            " engine's own, so every weight would be 1; set recompute_logprobs=auto, or importance_sampling_fix=false"
        )
    if from_engine and not with_logprobs:
        yield (
            "algorithm.recompute_logprobs: false takes the engine's logprobs, but rollout.return_logprobs is false;"
            " set that true, or recompute_logprobs=auto"
        )
    sampling = algorithm.sampling_params
    if tis:
        yield from _truncated(sampling, "algorithm.importance_sampling_fix=true", "set importance_sampling_fix=false")
    if from_engine:
        yield from _truncated(sampling, "algorithm.recompute_logprobs=false", "set recompute_logprobs=auto")


def _truncated(sampling: SamplingConfig, user: str, otherwise: str) -> Iterator[str]:
    for name, value, whole in (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0)):
        if value != whole:
            yield (
                f"algorithm.sampling_params.{name}: {value} with {user}: tokens are then drawn from a truncated distribution,"
                f" but the engine's logprobs are of the whole one, like the trainer's, and can't correct for that; set"
                f" {name}={whole:g}, or {otherwise}"
            )


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if not data.train_data_paths:
        yield "data.train_data_paths: empty; name at least one file, hf://owner/name:split, or toy"
    for key, paths in (("data.train_data_paths", data.train_data_paths), ("data.val_data_paths", data.val_data_paths)):
        for path in paths:
            if path != "toy" and not path.startswith("hf://") and not os.path.exists(path):
                yield f"{key}: no file {path!r}{why_absent(path)}; a dataset of the hub is written hf://owner/name:split"
    repeated = sorted({key for key in data.image_keys if data.image_keys.count(key) > 1})
    if repeated:
        yield f"data.image_keys: {', '.join(repeated)} named twice in {data.image_keys}; name every column once"
    low, high = data.image_min_pixels, data.image_max_pixels
    if low is not None and high is not None and low > high:
        yield f"data.image_min_pixels={low} exceeds data.image_max_pixels={high}; lower it"
    for host in data.image_hosts:
        if not host or set(host) & set("/:@* "):
            yield f"data.image_hosts: {host!r} is no plain host name; write it as in images.example.org, without scheme or port"


def _actor_and_reward(config: Config) -> Iterator[str]:
    actor, reward = config.actor, config.reward
    if actor.model.is_lora:
        yield "actor.model.is_lora: true is not available yet; set it false"
    if actor.fsdp_config.cpu_offload and config.cluster.device == "cpu":
        yield "actor.fsdp_config.cpu_offload: true with cluster.device=cpu has nothing to offload; set it false"
    if actor.enable_offload and config.cluster.device == "cpu":
        yield "actor.enable_offload: true with cluster.device=cpu has nowhere to move weights to; set it false"
    if actor.enable_offload and actor.fsdp_config.cpu_offload:
        yield "actor.enable_offload: true and actor.fsdp_config.cpu_offload: true do the same at two times; set one false"
    if actor.fsdp_config.mixed_precision.param_dtype == "fp16":
        yield (
            "actor.fsdp_config.mixed_precision.param_dtype: fp16 needs a loss scaler, and there is none: small"
            " gradients would vanish; use bf16"
        )
    if reward.reward_max_val <= reward.reward_min_val:
        yield (
            f"reward.reward_max_val={reward.reward_max_val} must exceed reward.reward_min_val={reward.reward_min_val}:"
            f" a right answer has to pay more than a wrong one"
        )


def why_absent(path: str) -> str:
    """In brackets, why a path can't be looked at, if not because nothing is there: no permission, a name that is too long."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return ""
    except OSError as error:
        return f" ({error.strerror})"
    return ""


def _get(config: Any, key: str) -> Any:
    return reduce(getattr, key.split("."), config)
