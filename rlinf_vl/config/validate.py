"""Validation: configs that can't work are refused before a GPU is used, with all problems at once.

The schema has the limits of single keys, beside each key. The rules here are for several keys.
"""

import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

from rlinf_vl.config.actor_rules import actor_problems
from rlinf_vl.config.algorithm_rules import algorithm_problems, correction_problems
from rlinf_vl.config.chat_template import RESERVED
from rlinf_vl.config.hubs import VERIFIERS, VERIFIERS_ROWS, is_verifiers_name, parse_rows_path
from rlinf_vl.config.keys import config_keys
from rlinf_vl.config.placement import check_placement, shares_slots
from rlinf_vl.config.schema import Config, RewardConfig
from rlinf_vl.config.schema.algorithm import ADVANTAGES, LOSSES
from rlinf_vl.config.schema.limits import OrCode
from rlinf_vl.config.toys import TOYS
from rlinf_vl.config.vision_rules import vision_problems
from rlinf_vl.errors import ConfigError, nearest, pip_install
from rlinf_vl.user_code import CodeError, check_code, is_code

#: A function that yields the problems of a config, each on one line.
Rule = Callable[[Config], Iterable[str]]


def validate_config(
    config: Config, further: Sequence[Rule] = (), needs_machine: bool = True
) -> None:
    """Raise `ConfigError` with every problem of a typed, normalised config.

    Args:
        further: additional rules.
        needs_machine: whether the run is to begin on this machine, which then needs its data and packages.
    """
    rules: list[Rule] = [
        _values,
        _code,
        _cluster,
        _local,
        _rollout,
        _agent,
        _verifiers,
        _thinking,
        _chat_template,
        _runner,
        _lengths,
        algorithm_problems,
        correction_problems,
        _data,
        vision_problems,
        actor_problems,
        _reward,
        *((_data_files, _trackers) if needs_machine else ()),
        *further,
    ]
    # Each message once: the same data may be both trained and validated on.
    problems = list(dict.fromkeys(problem for rule in rules for problem in rule(config)))
    if problems:
        raise ConfigError(*problems)


def _values(config: Config) -> Iterator[str]:
    for name in config_keys():
        yield from value_problems(name, reduce(getattr, name.split("."), config))


#: Keys for which a name in `ALGORITHM_HINTS` gets a hint, and what their values are.
ALGORITHM_KEYS = {"algorithm.adv_type": ADVANTAGES, "algorithm.loss_type": LOSSES}
#: Hints for names of algorithms, most of which are no value of one key but several keys together.
ALGORITHM_HINTS = {
    "dapo": "DAPO is grpo with algorithm.clip_ratio_high=0.28 algorithm.loss_agg_func=token-mean "
    "algorithm.dynamic_sampling.enable=true and algorithm.overlong.*; leave adv_type and "
    "loss_type as they are",
    "ppo": "there is no critic here: PPO's clipped loss is algorithm.loss_type=actor, with algorithm.adv_type=grpo or rloo",
    "gae": "there is no critic here; set algorithm.adv_type=grpo or rloo",
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
                hint = _algorithm_hint(str(element).lower()) if name in ALGORITHM_KEYS else ""
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


def _algorithm_hint(element: str) -> str:
    """Return the hint for the name of an algorithm that is no value of its key; "" without one."""
    for key, names in ALGORITHM_KEYS.items():
        if element in names:
            return f"set {key}={element}"
    return ALGORITHM_HINTS.get(element, "")


def _code(config: Config) -> Iterator[str]:
    """Yield the problems of user code that can be found without running it."""
    for name, key in config_keys().items():
        if isinstance(key.allowed, OrCode) and key.allowed.signature:
            value: Any = reduce(getattr, name.split("."), config)
            # `runner.code_files` has the texts by now, so no file of the user is read twice.
            names = [name for name in (value if isinstance(value, list) else [value]) if name]
            for name_of_code in filter(is_code, names):
                try:
                    arguments = {"kind": key.allowed.kind, "signature": key.allowed.signature}
                    check_code(name_of_code, {}, config.runner.code_files, **arguments)
                except CodeError as error:
                    yield f"{name}: {error}"


def _cluster(config: Config) -> Iterator[str]:
    cluster = config.cluster
    try:
        check_placement(config)
    # All problems of a config are reported together, those of the placement among them.
    except ConfigError as error:
        yield from error.problems
    if cluster.num_nodes > 1 and cluster.ray_address in (None, "", "local"):
        yield (
            f"cluster.num_nodes: {cluster.num_nodes} machines need a running Ray cluster, but "
            f"cluster.ray_address is {cluster.ray_address or 'null'} (a private one); start it "
            "with ray_utils/start_ray.sh, set cluster.ray_address=auto"
        )


def _local(config: Config) -> Iterator[str]:
    """Yield settings that one process can't have."""
    cluster, rollout, runner = config.cluster, config.rollout, config.runner
    if cluster.backend != "local":
        return
    needs = "cluster.backend: local is one process with one embedded engine and one actor rank"
    for key, value, allowed in (
        ("cluster.num_nodes", cluster.num_nodes, 1),
        ("cluster.elastic_rollout", cluster.elastic_rollout, False),
        ("actor.context_parallel_size", config.actor.context_parallel_size, 1),
        (
            "actor.fsdp_config.expert_parallel_size",
            config.actor.fsdp_config.expert_parallel_size,
            1,
        ),
        ("rollout.rollout_backend", rollout.rollout_backend, "torch"),
        ("rollout.tensor_parallel_size", rollout.tensor_parallel_size, 1),
        ("rollout.weight_sync", rollout.weight_sync, "auto"),
    ):
        if value != allowed:
            yield (
                f"{key}: {str(value).lower()}, but {needs}; set {key}={str(allowed).lower()}, or "
                "cluster.backend=ray"
            )
    if runner.schedule == "async":
        yield (
            f"runner.schedule: async generates while it trains, but {needs}, which take turns; set "
            "runner.schedule=sync or one_step_off, or cluster.backend=ray"
        )


def _rollout(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.rollout_backend == "torch":
        for key, is_set in (
            ("tensor_parallel_size", rollout.tensor_parallel_size > 1),
            ("deterministic", rollout.deterministic),
            ("sglang.server_args", rollout.sglang.server_args),
        ):
            if is_set:
                yield (
                    f"rollout.{key} is for SGLang, but rollout.rollout_backend is torch; leave it "
                    "out, or set sglang"
                )
    elif rollout.deterministic and config.cluster.device == "cpu":
        yield (
            "rollout.deterministic: true needs a GPU (cluster.device is cpu): SGLang's "
            "deterministic kernels exist for CUDA attention backends, not for torch_native, the "
            "only one on a CPU"
        )
    # Positions without M-RoPE give wrong logprobs without any error, so this one argument is
    # refused.
    if target := rollout.sglang.server_args.get("rl_on_policy_target"):
        yield (
            f"rollout.sglang.server_args: rl_on_policy_target={target!r} has SGLang give prompts "
            "with images plain positions instead of M-RoPE; leave it out: rollout.deterministic "
            "has the same kernels without that"
        )


def _agent(config: Config) -> Iterator[str]:
    rollout = config.rollout
    agent = rollout.agent
    if not rollout.has_agents:
        return
    if config.algorithm.image_corruption.share:
        yield (
            "algorithm.image_corruption.share: agents choose the images that they send, so none "
            "can be corrupted; set it to 0"
        )
    if not agent.is_set:
        return
    ways = {"function": agent.function, "command": agent.command or None, "app": agent.app}
    names = [name for name, value in ways.items() if value is not None]
    if len(names) > 1:
        yield f"rollout.agent.{names[1]}: rollout.agent.{names[0]} is set, too; keep one of them"
    if agent.function is not None and not is_code(agent.function):
        yield (
            f"rollout.agent.function: {agent.function!r} is no code; write module:function or "
            "path/to/file.py:function"
        )
    if rollout.env_class != "single_turn":
        yield (
            f"rollout.env_class: {rollout.env_class!r} with rollout.agent: an agent drives itself; "
            "leave env_class out"
        )


def _verifiers(config: Config) -> Iterator[str]:
    name = config.rollout.verifiers_name
    if name is not None and not is_verifiers_name(name):
        yield (
            f"rollout.env_class: {config.rollout.env_class!r} names no environment; write "
            f"{VERIFIERS}NAME or {VERIFIERS}OWNER/NAME, as it is installed"
        )
        return
    for key in ("train_data_paths", "val_data_paths"):
        for path in getattr(config.data, key):
            rows_name = parse_rows_path(path)[0] if path.startswith(VERIFIERS_ROWS) else None
            # Rows are played by number, so those of another source would be other questions.
            if rows_name != name:
                written = path.partition("?")[0]
                yield (
                    f"data.{key}: {written} with rollout.env_class={config.rollout.env_class}: an "
                    "environment of verifiers is played with its own rows; write "
                    f"{VERIFIERS_ROWS}{name or rows_name} and rollout.env_class="
                    f"{VERIFIERS}{name or rows_name}"
                )


def _thinking(config: Config) -> Iterator[str]:
    mode, budget = config.rollout.thinking.mode, config.rollout.thinking.budget
    if budget is None:
        return
    if mode == "off":
        yield (
            f"rollout.thinking.budget: {budget} with rollout.thinking.mode=off: nothing thinks; "
            "set budget=null"
        )
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


def _chat_template(config: Config) -> Iterator[str]:
    for name, value in config.rollout.chat_template_kwargs.items():
        if name in RESERVED:
            hint = (
                "set rollout.thinking.mode"
                if name == "enable_thinking"
                else "the run sets it itself"
            )
            yield f"rollout.chat_template_kwargs: {name}={value!r}; leave it out: {hint}"


def _runner(config: Config) -> Iterator[str]:
    runner, name = config.runner, config.runner.experiment_name
    if runner.weight_sync_interval > 1 and runner.mismatch_check_interval > 0:
        yield (
            f"runner.weight_sync_interval: {runner.weight_sync_interval} makes the engine's "
            "weights old on purpose, which runner.mismatch_check_interval would stop the run for; "
            "set runner.mismatch_check_interval=-1"
        )
    if runner.generates_ahead:
        with suppress(ConfigError):  # `_cluster` reports it
            if config.cluster.backend == "ray" and shares_slots(config.cluster.component_placement):
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
        yield (
            f"runner.experiment_name: {name!r} is not a plain folder name; put folders into "
            "runner.output_dir"
        )
    elif (
        size := len(os.fsencode(name))
    ) > 230:  # of 255 that a file's name may have, with what is put around it
        yield f"runner.experiment_name: {name[:20] + '…'!r} has {size} bytes; shorten it to 230 or fewer"
    if "://" in runner.output_dir:
        yield (
            f"runner.output_dir: {runner.output_dir!r} is no folder on a disk, which a run's files "
            "need; checkpoints alone may go to a URL: set runner.checkpoint_dir"
        )
    yield from _best_checkpoints(config)
    resume_dir = runner.resume_dir
    if (
        resume_dir not in (None, "auto")
        and "://" not in resume_dir
        and not os.path.isdir(resume_dir)
    ):
        why = why_absent(resume_dir)
        hint = "give a checkpoint's path, a run's folder (its newest checkpoint), auto or null"
        yield f"runner.resume_dir: no folder {runner.resume_dir!r}{why}; {hint}"


def _best_checkpoints(config: Config) -> Iterator[str]:
    runner = config.runner
    # A step is ranked by its own validation, so it must have one when it is saved.
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
    if runner.best_metric != "val/accuracy" and not runner.keep_best:
        yield (
            f"runner.best_metric: {runner.best_metric} chooses nothing with runner.keep_best=0; set "
            "keep_best, or leave best_metric out"
        )


def _trackers(config: Config) -> Iterator[str]:
    for backend in {"wandb", "trackio"}.intersection(config.runner.logger.logger_backends):
        # Found and not imported: trackers take seconds to import.
        if importlib.util.find_spec(backend) is None:
            hint = f"{pip_install(f'rlinf_vl[{backend}]')}, or leave it out"
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
        yield (
            f"data.max_prompt_length={prompt} leaves no room for a response in {longest}; lower it "
            "or raise seq_length"
        )
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
        yield (
            "data.train_data_paths: empty; name at least one file, hf://owner/name:split, or "
            f"{', '.join(TOYS)}"
        )
    columns = [*data.image_keys, *(data.video_keys or ())]
    if repeated := sorted({column for column in columns if columns.count(column) > 1}):
        yield (
            f"data.image_keys: {', '.join(repeated)} named twice in {columns} (data.video_keys "
            "included); name every column once"
        )
    if data.weights and len(data.weights) != len(data.train_data_paths):
        yield (
            f"data.weights: {len(data.weights)} for {len(data.train_data_paths)} "
            "data.train_data_paths; write one for each, or []"
        )
    if data.image_root is not None and not os.path.isdir(data.image_root):
        yield (
            f"data.image_root: no folder {data.image_root!r}{why_absent(data.image_root)}; name "
            "the one that image paths start in"
        )
    if low is not None and high is not None and low > high:
        yield f"data.image_min_pixels={low} exceeds data.image_max_pixels={high}; lower it"
    low, high = data.video.min_pixels, data.video.max_pixels
    if low is not None and high is not None and low > high:
        yield f"data.video.min_pixels={low} exceeds data.video.max_pixels={high}; lower it"
    for host in data.image_hosts:
        # Hosts are compared as whole names, so a pattern or a port would never match.
        if not host or set(host) & set("/:@* "):
            yield (
                f"data.image_hosts: {host!r} is no plain host name; write it as in "
                "images.example.org, without scheme or port"
            )


def _data_files(config: Config) -> Iterator[str]:
    data = config.data
    for key, paths in (
        ("data.train_data_paths", data.train_data_paths),
        ("data.val_data_paths", data.val_data_paths),
    ):
        for path in paths:
            if (
                # Whether a data set of the hub exists takes a request, which
                # `rlinf_vl.tools.check.hub` makes.
                path not in TOYS
                and not path.startswith(("hf://", "seeds://", VERIFIERS_ROWS))
                and not os.path.exists(path)
            ):
                yield (
                    f"{key}: no file {path!r}{why_absent(path)}; a dataset of the hub is written "
                    "hf://owner/name:split"
                )


def _reward(config: Config) -> Iterator[str]:
    reward = config.reward
    yield from _reward_functions(reward)
    if reward.reward_max_val <= reward.reward_min_val:
        bounds = (
            f"reward.reward_max_val={reward.reward_max_val} must exceed "
            f"reward.reward_min_val={reward.reward_min_val}"
        )
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
            yield (
                f"{where}.function: {entry.get('function')!r} is no name; write "
                f"{{function: math}}, or path/to/file.py:name"
            )
        weight, kwargs = entry.get("weight", 1.0), entry.get("kwargs", {})
        if (
            # YAML reads `on` and `yes` as true, which Python would count as 1.
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
    # A path with a null byte is a ValueError.
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return ""
    except OSError as error:
        return f" ({error.strerror})"
    return ""
