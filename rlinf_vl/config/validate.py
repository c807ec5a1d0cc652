"""Validation: configs that can't work are refused before a GPU is used, with all problems at once.

The schema has the limits of single keys, beside each key. The rules here are for several keys.
"""

import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

import rlinf_vl.config.algorithm_rules as algorithm_rules
from rlinf_vl.code import CodeError, check_code, is_code
from rlinf_vl.config.keys import config_keys
from rlinf_vl.config.placement import check_placement, shares_slots
from rlinf_vl.config.schema import Config, RewardConfig
from rlinf_vl.config.schema.limits import OrCode
from rlinf_vl.config.toys import TOYS
from rlinf_vl.errors import ConfigError, nearest

#: A function that yields the problems of a config, each on one line.
Rule = Callable[[Config], Iterable[str]]


def validate_config(config: Config, further: Sequence[Rule] = ()) -> None:
    """Raise `ConfigError` with every problem of a typed, normalised config. `further`: additional
    rules."""
    rules: list[Rule] = [
        _values,
        _code,
        _cluster,
        _rollout,
        _thinking,
        _runner,
        _lengths,
        algorithm_rules.algorithm,
        algorithm_rules.correction,
        _data,
        _actor_and_reward,
        *further,
    ]
    # Each message once: the same data may be both trained and validated on.
    problems = list(dict.fromkeys(problem for rule in rules for problem in rule(config)))
    if problems:
        raise ConfigError(*problems)


def _values(config: Config) -> Iterator[str]:
    for name in config_keys():
        yield from value_problems(name, reduce(getattr, name.split("."), config))


#: Keys for which a name in `ALGORITHM_HINTS` gets a hint.
ALGORITHM_KEYS = {"algorithm.adv_type", "algorithm.loss_type"}
#: Hints for names of algorithms, most of which are no value of one key but several keys together.
ALGORITHM_HINTS = {
    "dapo": "DAPO is grpo with algorithm.clip_ratio_high=0.28 algorithm.loss_agg_func=token-mean "
    "algorithm.dynamic_sampling.enable=true and algorithm.overlong.*; leave adv_type and "
    "loss_type as they are",
    "ppo": "there is no critic here: PPO's clipped loss is algorithm.loss_type=actor, with algorithm.adv_type=grpo or rloo",
    "gae": "there is no critic here; set algorithm.adv_type=grpo or rloo",
    "grpo": "GRPO is algorithm.adv_type=grpo with algorithm.loss_type=actor, the defaults",
    "gspo": "GSPO is algorithm.loss_type=gspo with algorithm.adv_type=grpo",
    "cispo": "CISPO is algorithm.loss_type=cispo with algorithm.adv_type=grpo",
    "reinforce": "set algorithm.adv_type=reinforce_plus_plus or rloo",
    "reinforce++": "set algorithm.adv_type=reinforce_plus_plus",
    "drgrpo": "set algorithm.adv_type=dr_grpo",
}


def value_problems(name: str, value: Any) -> Iterator[str]:
    """Yield the violations of a key's limit or list by a value, or by the elements of a list."""
    allowed = config_keys()[name].allowed
    for element in value if isinstance(value, list) else [value]:
        if isinstance(allowed, tuple):
            if element not in (None, *allowed) and not (
                isinstance(allowed, OrCode) and (is_code(element) or not allowed)
            ):
                user_code = (
                    ", module:Name, path/to/file.py:Name" if isinstance(allowed, OrCode) else ""
                )
                hint = ALGORITHM_HINTS.get(str(element).lower()) if name in ALGORITHM_KEYS else None
                hint = f" {hint}" if hint else nearest(element, allowed)
                yield f"{name}: {element!r} is unknown; allowed: {', '.join(allowed)}{user_code};{hint}".rstrip(
                    ";"
                )
        elif isinstance(element, float) and not (
            math.isfinite(element) or (allowed and allowed.may_be_infinite and element > 0)
        ):
            yield f"{name}: {element} must be a finite number"
        elif allowed and element is not None and not allowed.holds(element):
            yield f"{name}: {element} must {allowed.must}"


def _code(config: Config) -> Iterator[str]:
    """Yield the problems of user code that can be found without running it."""
    for name, key in config_keys().items():
        if isinstance(key.allowed, OrCode) and key.allowed.signature:
            value: Any = reduce(getattr, name.split("."), config)
            for name_of_code in filter(is_code, value if isinstance(value, list) else [value]):
                try:
                    arguments = {"kind": key.allowed.kind, "signature": key.allowed.signature}
                    check_code(name_of_code, {}, config.runner.code_files, **arguments)
                except CodeError as error:
                    yield f"{name}: {error}"


def _cluster(config: Config) -> Iterator[str]:
    cluster = config.cluster
    try:
        check_placement(config)
    except ConfigError as error:
        yield from error.problems
    if cluster.num_nodes > 1 and cluster.ray_address in (None, "", "local"):
        yield (
            f"cluster.num_nodes: {cluster.num_nodes} machines need a running Ray cluster, but "
            f"cluster.ray_address is {cluster.ray_address or 'null'} (a private one); start it "
            "with ray_utils/start_ray.sh, set cluster.ray_address=auto"
        )


def _rollout(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.rollout_backend == "torch":
        for key, is_set in (
            ("tensor_parallel_size", rollout.tensor_parallel_size > 1),
            ("deterministic", rollout.deterministic),
            ("sglang.attention_backend", rollout.sglang.attention_backend is not None),
            ("sglang.server_args", rollout.sglang.server_args),
        ):
            if is_set:
                yield f"rollout.{key} is for SGLang, but rollout.rollout_backend is torch; leave it out, or set sglang"
    elif rollout.deterministic and config.cluster.device == "cpu":
        yield (
            "rollout.deterministic: true needs a GPU (cluster.device is cpu): SGLang's "
            "deterministic kernels exist for CUDA attention backends, not for torch_native, the "
            "only one on a CPU"
        )
    if target := rollout.sglang.server_args.get("rl_on_policy_target"):
        yield (
            f"rollout.sglang.server_args: rl_on_policy_target={target!r} has SGLang give prompts "
            "with images plain positions instead of M-RoPE; leave it out: rollout.deterministic "
            "has the same kernels without that"
        )


def _thinking(config: Config) -> Iterator[str]:
    mode, budget = config.rollout.thinking.mode, config.rollout.thinking.budget
    if budget is None:
        return
    if mode == "off":
        yield f"rollout.thinking.budget: {budget} with rollout.thinking.mode=off: nothing thinks; set budget=null"
    names = ("sampling_params", "val_sampling_params")
    # The budget must fit the shorter of training's and validation's answers.
    answer_tokens, name = min(
        (getattr(config.algorithm, name).max_new_tokens, name) for name in names
    )
    if budget >= answer_tokens:
        yield (
            f"rollout.thinking.budget: {budget} leaves no room for an answer in "
            f"algorithm.{name}.max_new_tokens={answer_tokens}; lower it, or raise max_new_tokens"
        )


def _runner(config: Config) -> Iterator[str]:
    runner, name = config.runner, config.runner.experiment_name
    if runner.weight_sync_interval > 1 and runner.mismatch_check_interval > 0:
        yield (
            f"runner.weight_sync_interval: {runner.weight_sync_interval} makes the engine's "
            "weights old on purpose, which runner.mismatch_check_interval would stop the run for; "
            "set runner.mismatch_check_interval=-1"
        )
    if runner.schedule in ("one_step_off", "async"):
        with suppress(ConfigError):  # `_cluster` reports it
            if shares_slots(config.cluster.component_placement):
                yield (
                    f"runner.schedule: {runner.schedule} generates while it trains, but "
                    f"cluster.component_placement={dict(config.cluster.component_placement)} has "
                    "engines and actor ranks take turns on the same slots; give each its own, as "
                    f"in {{actor: 0, rollout: 1}}, or set runner.schedule=sync"
                )
        if runner.weight_sync_interval > runner.max_staleness:
            yield (
                f"runner.weight_sync_interval: {runner.weight_sync_interval} exceeds "
                f"runner.max_staleness={runner.max_staleness}: {runner.schedule} could not "
                "generate ahead; set it 1, or raise max_staleness"
            )
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        yield f"runner.experiment_name: {name!r} is not a plain folder name; put folders into runner.output_dir"
    elif (
        size := len(os.fsencode(name))
    ) > 230:  # of 255 that a file's name may have, with what is put around it
        yield f"runner.experiment_name: {name[:20] + '…'!r} has {size} bytes; shorten it to 230 or fewer"
    if "://" in runner.output_dir:
        yield (
            f"runner.output_dir: {runner.output_dir!r} is no folder on a disk, which a run's files "
            "need; checkpoints alone may go to a URL: set runner.checkpoint_dir"
        )
    scored = (
        runner.save_interval > 0 and runner.val_check_interval > 0 and config.data.val_data_paths
    )
    if runner.keep_best and not (scored and runner.save_interval % runner.val_check_interval == 0):
        yield (
            f"runner.keep_best: {runner.keep_best} needs a validation of each step that is saved, "
            f"with runner.save_interval {runner.save_interval} and runner.val_check_interval "
            f"{runner.val_check_interval}; make the former a multiple of the latter, and name "
            "data.val_data_paths"
        )
    resume_dir = runner.resume_dir
    if (
        resume_dir not in (None, "auto")
        and "://" not in resume_dir
        and not os.path.isdir(resume_dir)
    ):
        why = why_absent(resume_dir)
        hint = "give a checkpoint's path, a run's folder (its newest checkpoint), auto or null"
        yield f"runner.resume_dir: no folder {runner.resume_dir!r}{why}; {hint}"
    for backend in {"wandb", "trackio"}.intersection(runner.logger.logger_backends):
        if importlib.util.find_spec(backend) is None:
            hint = f"pip install 'rlinf_vl[{backend}]', or leave it out"
            yield f"runner.logger.logger_backends: {backend} is not installed; {hint}"


def _lengths(config: Config) -> Iterator[str]:
    runner, prompt, micro = (
        config.runner,
        config.data.max_prompt_length,
        config.actor.micro_batch_size,
    )
    budget, longest = (
        f"runner.max_tokens_per_mbs={runner.max_tokens_per_mbs}",
        f"runner.seq_length={runner.seq_length}",
    )
    if runner.enable_dynamic_batch_size and runner.seq_length > runner.max_tokens_per_mbs:
        yield (
            f"{longest} exceeds {budget}: the longest trajectory fits in no micro-batch; raise "
            "max_tokens_per_mbs, lower seq_length"
        )
    elif (
        not runner.enable_dynamic_batch_size
        and micro * runner.seq_length > runner.max_tokens_per_mbs
    ):
        yield (
            f"actor.micro_batch_size={micro} times {longest} exceeds {budget}; lower "
            "micro_batch_size or seq_length, raise max_tokens_per_mbs, or set "
            "runner.enable_dynamic_batch_size=true"
        )
    # A problem here would be repeated by each of the checks below.
    if prompt >= runner.seq_length:
        yield f"data.max_prompt_length={prompt} leaves no room for a response in {longest}; lower it or raise seq_length"
        return
    for name in ("sampling_params", "val_sampling_params"):
        response = getattr(config.algorithm, name).max_new_tokens
        if prompt + response > runner.seq_length:
            yield (
                f"data.max_prompt_length={prompt} plus algorithm.{name}.max_new_tokens={response} "
                f"exceeds {longest}; raise seq_length, lower one of them, or set max_new_tokens to "
                "null for what is left"
            )


def _data(config: Config) -> Iterator[str]:
    data, low, high = config.data, config.data.image_min_pixels, config.data.image_max_pixels
    if not data.train_data_paths:
        yield f"data.train_data_paths: empty; name at least one file, hf://owner/name:split, or {', '.join(TOYS)}"
    for key, paths in (
        ("data.train_data_paths", data.train_data_paths),
        ("data.val_data_paths", data.val_data_paths),
    ):
        for path in paths:
            if (
                path not in TOYS
                and not path.startswith(("hf://", "seeds://"))
                and not os.path.exists(path)
            ):
                yield f"{key}: no file {path!r}{why_absent(path)}; a dataset of the hub is written hf://owner/name:split"
    if repeated := sorted({key for key in data.image_keys if data.image_keys.count(key) > 1}):
        yield f"data.image_keys: {', '.join(repeated)} named twice in {data.image_keys}; name every column once"
    if data.weights and len(data.weights) != len(data.train_data_paths):
        yield (
            f"data.weights: {len(data.weights)} for {len(data.train_data_paths)} "
            "data.train_data_paths; write one for each, or []"
        )
    if data.image_root is not None and not os.path.isdir(data.image_root):
        yield f"data.image_root: no folder {data.image_root!r}{why_absent(data.image_root)}; name the one that image paths start in"
    if low is not None and high is not None and low > high:
        yield f"data.image_min_pixels={low} exceeds data.image_max_pixels={high}; lower it"
    for host in data.image_hosts:
        if not host or set(host) & set("/:@* "):
            yield f"data.image_hosts: {host!r} is no plain host name; write it as in images.example.org, without scheme or port"


def _lora(config: Config) -> Iterator[str]:
    """Yield settings that contradict LoRA adapters, or that adapters don't support."""
    model, lora = config.actor.model, config.actor.model.lora
    for key, contradicts in (
        ("freeze_vision_tower: false", not model.freeze_vision_tower),
        ("freeze_projector: false", model.freeze_projector is False),
        ("freeze_language_model: true", model.freeze_language_model),
    ):
        if contradicts:
            yield (
                f"actor.model.{key} with actor.model.is_lora=true: only adapters are trained, "
                "those in actor.model.lora.target_modules (language, vision, projector, …); leave "
                "it out"
            )
    for key in ("target_modules", "exclude_modules"):
        for entry in getattr(lora, key):
            try:
                re.compile(entry)
            except re.error as error:
                yield f"actor.model.lora.{key}: {entry!r} is no regular expression ({error}); write it as in .*q_proj"
    if not lora.target_modules:
        yield "actor.model.lora.target_modules: empty; name language, vision, projector, all-linear or modules"
    if config.actor.fsdp_config.gradient_checkpointing_use_reentrant:
        yield (
            "actor.fsdp_config.gradient_checkpointing_use_reentrant: true with "
            "actor.model.is_lora=true: the reentrant variant has no gradients behind embeddings "
            "that are not trained; set it false"
        )
    if lora.quantization == "nf4":
        for contradicts, key, why in (
            (
                lora.sync == "adapters",
                "lora.sync=adapters",
                "engines have no quantized model to apply them to; set merged",
            ),
            (
                not lora.save_lora_only,
                "lora.save_lora_only=false",
                "the packed weights are not saved; set it true",
            ),
        ):
            if contradicts:
                yield f"actor.model.lora.quantization: nf4 with actor.model.{key}: {why}, or quantization none"
        if config.actor.fsdp_config.cpu_offload:
            yield (
                "actor.model.lora.quantization: nf4 with actor.fsdp_config.cpu_offload=true: "
                "FSDP2 does not move packed weights; set cpu_offload=false, or quantization none"
            )
    if lora.sync == "adapters" and config.rollout.rollout_backend == "sglang":
        yield (
            "actor.model.lora.sync: adapters with rollout.rollout_backend=sglang: SGLang loads "
            "adapters by name, for its language model only, and no weight sync reaches them; set "
            "it to merged, or the backend to torch"
        )


def _actor_and_reward(config: Config) -> Iterator[str]:
    actor, reward, on_cpu = config.actor, config.reward, config.cluster.device == "cpu"
    vlm = actor.model.vlm
    if (vlm.vision_encoder_attr is None) != (vlm.language_model_attr is None):
        yield (
            f"actor.model.vlm: vision_encoder_attr={vlm.vision_encoder_attr or 'null'} and "
            f"language_model_attr={vlm.language_model_attr or 'null'}; set both, or neither"
        )
    if actor.model.is_lora:
        yield from _lora(config)
    elif len(actor.model.frozen_parts) == 3:
        yield (
            "actor.model: freeze_vision_tower, freeze_projector and freeze_language_model leave "
            "nothing to train; set one of them false"
        )
    for key in ("freeze_router", "is_lora"):
        if actor.model.router_aux_loss_coef and getattr(actor.model, key):
            yield (
                f"actor.model.router_aux_loss_coef: {actor.model.router_aux_loss_coef:g} is a loss "
                f"for routers, which actor.model.{key} leaves as they are; set {key}=false, or the "
                "coefficient 0"
            )
    for part in ("vision_tower", "projector"):
        if (
            not actor.model.is_lora
            and part in actor.model.frozen_parts
            and getattr(actor.optim, f"{part}_lr") is not None
        ):
            yield f"actor.optim.{part}_lr: the {part} is frozen (actor.model.freeze_{part}); set it null, or train it"
    if actor.fsdp_config.cpu_offload and on_cpu:
        yield "actor.fsdp_config.cpu_offload: true with cluster.device=cpu has nothing to offload; set it false"
    if actor.enable_offload and on_cpu:
        yield "actor.enable_offload: true with cluster.device=cpu has nowhere to move weights to; set it false"
    if actor.enable_offload and actor.fsdp_config.cpu_offload:
        yield "actor.enable_offload: true and actor.fsdp_config.cpu_offload: true do the same at two times; set one false"
    if actor.fsdp_config.mixed_precision.param_dtype == "fp16":
        key = "actor.fsdp_config.mixed_precision.param_dtype"
        yield f"{key}: fp16 needs a loss scaler, and there is none: small gradients would vanish; use bf16"
    yield from _reward_functions(reward)
    if reward.reward_max_val <= reward.reward_min_val:
        bounds = f"reward.reward_max_val={reward.reward_max_val} must exceed reward.reward_min_val={reward.reward_min_val}"
        yield f"{bounds}: a right answer has to pay more than a wrong one"


def _reward_functions(reward: RewardConfig) -> Iterator[str]:
    for number, entry in enumerate(reward.functions):
        where = f"reward.functions[{number}]"
        for name in entry.keys() - {"function", "weight", "kwargs"}:
            entry_keys = ("function", "weight", "kwargs")
            yield f"{where}.{name}: unknown key; an entry has {', '.join(entry_keys)};{nearest(str(name), entry_keys)}".rstrip(
                ";"
            )
        if not isinstance(entry.get("function"), str):
            yield f"{where}.function: {entry.get('function')!r} is no name; write {{function: math}}, or path/to/file.py:name"
        weight, kwargs = entry.get("weight", 1.0), entry.get("kwargs", {})
        if (
            isinstance(weight, bool)
            or not isinstance(weight, int | float)
            or not math.isfinite(weight)
        ):
            yield f"{where}.weight: {weight!r} must be a finite number"
        if not isinstance(kwargs, dict):
            yield f"{where}.kwargs: {kwargs!r} must be a mapping of keywords"


def why_absent(path: str) -> str:
    """Return in brackets why a path can't be read, such as a missing permission; "" if it does not
    exist."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return ""
    except OSError as error:
        return f" ({error.strerror})"
    return ""
