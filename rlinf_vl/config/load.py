"""Loading: a YAML file and overrides become a typed, validated `Config`, and all mistakes are
reported at once.

Hydra composes the files (defaults lists, override grammar); types and known keys come from the
dataclasses. So `rlinf_vl_schema` in a YAML's defaults list is an empty node: were it typed, Hydra
would stop at the first mistake and advise to add it with '+'.
"""

import json
import os
import re
import textwrap
import types
import warnings
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_vl.config.automatic import SETTLED_AT_START
from rlinf_vl.config.hubs import OPENENV, with_arguments
from rlinf_vl.config.keys import config_keys, config_sections, set_key, suggestion
from rlinf_vl.config.overrides import apply_overrides, leaves
from rlinf_vl.config.parts import load_part
from rlinf_vl.config.presets import with_presets
from rlinf_vl.config.removed import REMOVED, move_server_args
from rlinf_vl.config.schema import SCHEMA_NAME, Config
from rlinf_vl.config.schema.guidance import SELF
from rlinf_vl.config.schema.limits import OrCode
from rlinf_vl.config.toys import TOYS
from rlinf_vl.config.validate import ALGORITHM_HINTS, Rule, validate_config
from rlinf_vl.errors import ConfigError, did_you_mean, nearest
from rlinf_vl.user_code import collect_code, is_code
from rlinf_vl.weights import FORMER_NAMES

if TYPE_CHECKING:  # importing it takes a quarter of the time that loading a config does
    from upath import UPath

_CHECKOUT = Path(__file__).resolve().parents[2]
#: The folder of the examples: the checkout's, or an installed package's copy of it (setup.py).
EXAMPLES_DIR = (
    _CHECKOUT if (_CHECKOUT / "examples/reasoning").is_dir() else Path(__file__).resolve().parent
) / "examples"
KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
ON_OFF = {"True": "on", "False": "off"}  # YAML reads on and off as booleans
CHECKPOINTING_SWITCH = {"true": "full", "false": "none"}  # of configs from before there were modes
#: The loader written in C, where PyYAML has it: it takes a tenth of the time.
_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_LIST_NAMES = {
    int: "a list of integers, such as [1, 2]",
    float: "a list of numbers, such as [0.7, 0.3]",
    str: "a list of strings, such as [a, b]",
    dict[str, Any]: "a list of mappings, such as [{function: math}]",
}
_TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    dict: "a mapping",
}

ConfigStore.instance().store(name=SCHEMA_NAME, node={})


def load_config(
    config_name: str,
    overrides: Sequence[str] = (),
    further: Sequence[Rule] = (),
    needs_machine: bool = True,
) -> Config:
    """Compose, type-check, normalise and validate one run's configuration.

    Args:
        config_name: path of a YAML file, or its name (with or without `.yaml`) in the examples or
            the working directory.
        overrides: Hydra overrides, such as `runner.max_steps=3` or
            `data.train_data_paths=[/a/b.parquet]`.
        further, needs_machine: as in `validate_config`.

    Raises:
        ConfigError: with every problem found.
    """
    config = parse_config(config_name, overrides)
    validate_config(config, further, needs_machine)
    return config


def parse_config(config_name: str, overrides: Sequence[str | tuple[str, Any]] = ()) -> Config:
    """Load a config without validation. An override may also be a pair (key, value)."""
    path = _find(config_name)
    written = _foreign_settings(path) or _compose(path)
    typed = OmegaConf.structured(Config)
    # One error lists the problems of overrides and of values, so that a user mends the command
    # once.
    problems = apply_overrides(written, overrides)
    move_server_args(written)
    problems += _fill(typed, written)
    if problems:
        raise ConfigError(*problems)
    config = OmegaConf.to_object(typed)
    assert isinstance(config, Config)
    _normalise(config, path.parent)
    return config


def save_config(config: Config, path: "Path | UPath") -> None:
    """Write every key as YAML, with all references resolved; `load_config(path)` reads it back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Through the schema: with its order of keys the files of two runs can be compared line by line.
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")


def changed_keys(config: Config, path: "Path | UPath") -> list[str]:
    """Return "key: old → new" for every key that differs from a file of `save_config`.

    The list is empty if the file can't be read.
    """
    try:
        old = OmegaConf.create(path.read_text(encoding="utf-8"))
        new = OmegaConf.structured(config)
    # The list only informs: a file that somebody has edited must not stop the run.
    except (OSError, yaml.YAMLError, OmegaConfBaseException):
        return []
    changes = []
    for key in config_keys():
        old_value, new_value = OmegaConf.select(old, key), OmegaConf.select(new, key)
        settled = key in SETTLED_AT_START and new_value == "auto"
        if old_value != new_value and not settled:
            # A value may be the whole text of a file, in runner.code_files.
            old_text, new_text = (
                textwrap.shorten(shown(old_value), 200),
                textwrap.shorten(shown(new_value), 200),
            )
            changes.append(f"{key}: {old_text} → {new_text}")
    return changes


def examples() -> dict[str, Path]:
    """Return the example configs by name, from all folders below `EXAMPLES_DIR`."""
    return {path.stem: path for path in sorted(EXAMPLES_DIR.rglob("*.yaml")) if _is_config(path)}


def _is_config(path: Path) -> bool:
    """Return whether a file has a defaults list, as every config does."""
    return (
        # The working folder may hold any YAML, in any encoding: only files with a defaults list
        # count.
        os.path.isfile(path)
        and re.search("^defaults:", path.read_text(encoding="utf-8", errors="ignore"), re.MULTILINE)
        is not None
    )


def _find(config_name: str) -> Path:
    """Return the path of a config. Raises ConfigError with a hint if there is none of this name."""
    named = Path(os.path.expanduser(config_name))
    # The file exists but is no YAML: its suffix tells what to advise.
    if named.suffix != ".yaml" and os.path.isfile(named):
        if named.suffix in (".sh", ".py", ".ipynb"):
            hint = f"one of another system is converted: rlinf-vl convert-config {named}"
        elif named.suffix in (".yml", ".json"):
            hint = f"rename it to {named.stem}.yaml"
        else:
            hint = "name one that does"
        raise ConfigError(f"config {config_name!r}: a config's file ends in .yaml; {hint}")
    if named.name != config_name:  # a path, not a bare name
        path = named.with_name(named.name.removesuffix(".yaml") + ".yaml")
        if not os.path.isfile(path):
            file_names = sorted(
                file.name for file in path.parent.glob("*.yaml") if os.path.isfile(file)
            )
            hint = f"its folder has {', '.join(file_names) or 'none'};{nearest(path.name, file_names)}".rstrip(
                ";"
            )
            raise ConfigError(f"config {config_name!r}: no such .yaml file; {hint}")
        return path.resolve()
    name = config_name.removesuffix(".yaml")
    # An example's bare name means the example; with .yaml, a file in the working folder comes first.
    for path in (
        examples().get(name) if name == config_name else None,
        Path.cwd() / f"{name}.yaml",
        examples().get(name),
    ):
        if path and os.path.isfile(path):
            return path.resolve()
    config_names = sorted(
        {*examples(), *(path.stem for path in Path.cwd().glob("*.yaml") if _is_config(path))}
    )
    # The first try of a newcomer is often the name of an algorithm.
    if algorithm_hint := ALGORITHM_HINTS.get(name.lower()):
        raise ConfigError(
            f"config {config_name!r}: is no config but an algorithm: {algorithm_hint}; name a "
            "config, such as toy-grpo-cpu"
        )
    # A name without its ending is more likely meant than one that is spelled alike.
    likely = [candidate for candidate in config_names if candidate.startswith(f"{name}-")]
    # One for CPUs runs everywhere.
    likely = [candidate for candidate in likely if candidate.endswith("-cpu")] or likely
    hint = did_you_mean(likely[:1]) or nearest(name, config_names)
    raise ConfigError(
        f"config {config_name!r}: not in {EXAMPLES_DIR} or {Path.cwd()};{hint} there are: "
        f"{', '.join(config_names)}"
    )


def _foreign_settings(path: Path) -> dict[str, Any] | None:
    """Return our settings for a file of RLinf's; None for a file of ours or one that can't be read.

    Raises:
        ConfigError: the file is another system's, or a key has no counterpart here.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _YAML_LOADER)  # noqa: S506
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    if not isinstance(data, dict):
        return None
    bases = {
        base.removesuffix(".yaml")
        for base in data.pop("defaults", None) or []
        if isinstance(base, str)
    }
    unknown_keys = [
        key
        for key, _ in leaves(data)
        if key not in config_keys() and key not in REMOVED and not key.startswith("hydra.")
    ]
    # Fewer than three may be typing errors, which `_fill` reports one by one.
    if len(unknown_keys) < 3 or bases & {
        SCHEMA_NAME,
        *examples(),
        *(file.stem for file in path.parent.glob("*.yaml")),
    }:
        return None
    # The converters take 60 ms to import, which a run of a config of ours need not wait for.
    return load_part("foreign-config")(path, unknown_keys)


def _compose(path: Path) -> dict[str, Any]:
    """Compose a YAML file and those of its defaults list, which may name examples.

    Returns:
        dotted name → value, with interpolations unresolved.
    """
    # A defaults list may name examples from any folder.
    folders = sorted({f"file://{example.parent}" for example in examples().values()})
    try:
        with (
            warnings.catch_warnings(),
            initialize_config_dir(config_dir=str(path.parent), version_base="1.3"),
        ):
            # Without `_self_` the file itself comes last, which is the order that we want.
            warnings.filterwarnings("ignore", "(?s).*Defaults list is missing `_self_`")
            config = compose(path.stem, overrides=[f"hydra.searchpath={folders}"])
    except MissingConfigException as error:
        name = str(error.missing_cfg_file).removesuffix(".yaml")
        config_names = sorted(
            {*examples(), *(file.stem for file in path.parent.glob("*.yaml"))} - {path.stem}
        )
        hint = f"there are {', '.join(config_names)}, and those in its folder;{nearest(name, config_names)}".rstrip(
            ";"
        )
        raise ConfigError(f"{path}: defaults: no config {name!r}; {hint}") from error
    # Hydra follows a circle of defaults until the stack overflows.
    except RecursionError as error:
        hint = (
            f"rename it if it builds on our {path.stem!r}"
            if path.stem in examples()
            else "take the circle out"
        )
        raise ConfigError(f"{path}: defaults: they lead back to this file; {hint}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = (
            f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
        )
        tab = "; indent with blanks" if "\\t" in str(error.problem) else "; write it as YAML"
        raise ConfigError(f"{where}: {error.problem}{tab}") from error
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        reason = " ".join(str(error).split()) or " ".join(str(error.__cause__).split())
        if isinstance(error, UnicodeDecodeError):
            raise ConfigError(
                f"{path}: is not UTF-8 ({error.reason}); write it as YAML in UTF-8"
            ) from error
        hint = (
            "; write keys with values, such as defaults: [toy-grpo-cpu]"
            if re.search("defaults|DictConfig", reason)
            else ""
        )
        raise ConfigError(f"{path}: {reason}{hint}") from error
    return dict(leaves(OmegaConf.to_container(config, resolve=False)))


def _fill(typed: DictConfig, written: dict[str, Any]) -> list[str]:
    """Fill the schema with the written values; return the problems."""
    problems: dict[str, str] = {}
    # Set key by key, so that all mistakes are found, not only the first.
    for key, value in written.items():
        if key in config_sections():
            keys = ", ".join(name.removeprefix(f"{key}.") for name in config_sections()[key])
            problems[key] = f"{key}: {shown(value)} is not a section; its keys are {keys}"
        elif key in REMOVED:
            if value != REMOVED[key].default:
                problems[key] = f"{key}: {shown(value)} is no longer read: {REMOVED[key].hint}"
        elif key not in config_keys():
            problems[key] = f"{key}: unknown key (value {shown(value)});{suggestion(key)}"
        else:
            annotation = config_keys()[key].type
            # A list of one needs no brackets, which a shell would want quotes for.
            if get_origin(annotation) is list and _is_element(value, get_args(annotation)[0]):
                value = [value]
            if key == "cluster.component_placement" and isinstance(value, (str, int)):
                value = {"actor,rollout": value}  # a mode, or slots, for both
            try:
                set_key(typed, key, value)
            except OmegaConfBaseException:
                default = config_keys()[key].default
                has_default = value is None and default != MISSING
                hint = f"; leave it out for its default, {shown(default)}" if has_default else ""
                problems[key] = f"{key}: {shown(value)} is not {type_name(annotation)}{hint}"
    for key in [key for key in config_keys() if key not in problems]:
        try:
            # Reading resolves the value, so this also finds broken interpolations.
            if OmegaConf.select(typed, key, default=MISSING) == MISSING:
                problems[key] = f"{key}: must be given ({config_keys()[key].doc})"
        except OmegaConfBaseException as error:  # an interpolation
            reason = str(error).splitlines()[0]
            target = re.search("key '(.+)' not found", reason)
            problems[key] = (
                f"{key}: {reason};{suggestion(target[1])}" if target else f"{key}: {reason}"
            )
    return list(problems.values())


def _is_element(value: Any, element: Any) -> bool:
    """Return whether a value is a single element of a list, written without brackets.

    An interpolation is none, as it may stand for the list.
    """
    if isinstance(value, str):
        return element is str and bool(value) and not value.startswith("${")
    return not isinstance(value, bool) and isinstance(value, get_origin(element) or element)


def shown(value: Any) -> str:
    """Return a value as YAML writes it, strings in quotes."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def type_name(annotation: Any) -> str:
    """Return the name of a type for messages, such as "a list of integers, such as [1, 2]"."""
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(
            "null" if arg is type(None) else type_name(arg) for arg in get_args(annotation)
        )
    if get_origin(annotation) is list:
        return _LIST_NAMES[get_args(annotation)[0]]
    return _TYPE_NAMES[get_origin(annotation) or annotation]


def with_texts(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an environment's keywords with each value `@path` replaced by the text of that file.

    The path is relative to the working folder, or else to the examples. Raises ConfigError if there
    is no such file.
    """
    texts = dict(kwargs)
    for name, value in kwargs.items():
        if isinstance(value, str) and value.startswith("@"):
            path = Path(os.path.expanduser(value[1:]))
            file = next(
                (place for place in (path, EXAMPLES_DIR / path) if os.path.isfile(place)), None
            )
            if file is None:
                raise ConfigError(
                    f"rollout.env_kwargs.{name}: no file {value[1:]!r}, here or in {EXAMPLES_DIR}; "
                    "give a path"
                )
            # A stray byte shows in the prompt, and is no reason to refuse the run.
            texts[name] = file.read_text(encoding="utf-8", errors="replace")
    return texts


def _absolute(path: str, folder: Path | None = None) -> str:
    """Return an absolute path: in the working folder, or in `folder` if it exists only there."""
    # As for any other program, the working folder comes first.
    in_working_folder = Path(os.path.expanduser(path)).absolute()
    in_folder = folder / os.path.expanduser(path) if folder else in_working_folder
    return str(
        in_folder
        if os.path.exists(in_folder) and not os.path.exists(in_working_folder)
        else in_working_folder
    )


def _checkpoint_path(path: str, folder: Path) -> str:
    """Return the absolute path of a checkpoint's folder, and any other name unchanged.

    What is no folder here is a name on the hub.
    """
    if path in ("", SELF, *TOYS):
        return path
    absolute_path = _absolute(path, folder)
    return absolute_path if os.path.isdir(absolute_path) else path


def _collect_code(config: Config, folders: Sequence[str]) -> None:
    """Copy the files of user code that the config names into it, in place, so that they travel with
    it."""
    for name, key in config_keys().items():
        if isinstance(key.allowed, OrCode):
            *sections, leaf = name.split(".")
            section = reduce(getattr, sections, config)
            value: Any = getattr(section, leaf)
            setattr(section, leaf, _collected(value, folders, config.runner.code_files))


def _collected(value: Any, folders: Sequence[str], files: dict[str, str]) -> Any:
    """Return a value with the paths of code in it as they are in `files`, which gets the texts."""
    if isinstance(value, list):
        return [_collected(element, folders, files) for element in value]
    if isinstance(value, dict):
        return value | {"function": _collected(value.get("function"), folders, files)}
    if isinstance(value, str) and value.startswith(OPENENV):
        # The class of a client may be in a file of the user's.
        return OPENENV + _collected(value.removeprefix(OPENENV), folders, files)
    return (
        collect_code(value, folders, files) if isinstance(value, str) and is_code(value) else value
    )


def _normalise(config: Config, folder: Path) -> None:
    """Replace aliases, null values and relative paths, in place.

    `folder`: the config's folder, in which relative paths are looked up, too.
    """
    algorithm = config.algorithm
    # YAML's true arrives as "True"
    algorithm.recompute_logprobs = algorithm.recompute_logprobs.lower()
    # Later code compares one spelling only.
    algorithm.kl_penalty_type = KL_ALIASES.get(
        algorithm.kl_penalty_type or "", algorithm.kl_penalty_type
    )
    with_presets(algorithm)
    if config.cluster.backend == "local":
        # One rank and one engine, which take turns.
        config.cluster.component_placement = {"actor,rollout": 0}
    if config.data.seed is None:
        config.data.seed = config.runner.seed
    rollout = config.rollout
    rollout.weight_sync = FORMER_NAMES.get(rollout.weight_sync, rollout.weight_sync)
    fsdp = config.actor.fsdp_config
    fsdp.gradient_checkpointing = CHECKPOINTING_SWITCH.get(
        fsdp.gradient_checkpointing.lower(), fsdp.gradient_checkpointing
    )
    rollout.thinking.mode = ON_OFF.get(rollout.thinking.mode, rollout.thinking.mode)
    # After the checks of types, since files are read; before the rules, which read the texts.
    _collect_code(config, [os.getcwd(), str(folder)])
    rollout.env_kwargs = with_texts(rollout.env_kwargs)
    for sampling in (algorithm.sampling_params, algorithm.val_sampling_params):
        if sampling.max_new_tokens is None:
            remaining = config.runner.seq_length - config.data.max_prompt_length
            # a rule refuses a prompt that leaves no room
            sampling.max_new_tokens = max(1, remaining)
    # Workers, and a resumed run, may have another working folder.
    rollout.model.model_path = _checkpoint_path(rollout.model.model_path, folder)
    distillation = algorithm.distillation
    if distillation.teacher_path is not None:
        distillation.teacher_path = _checkpoint_path(distillation.teacher_path, folder)
    for label, teacher_path in distillation.teachers.items():
        distillation.teachers[label] = _checkpoint_path(teacher_path, folder)
    # A command runs in a folder of its own. Its first word is looked up as a shell would.
    command = rollout.agent.command
    for position, word in enumerate(command[1:], 1):
        path = _absolute(word, folder)
        if os.path.isfile(path):
            command[position] = path
    for name in ("resume_dir", "checkpoint_dir"):
        # A URL has no working folder.
        if (path := getattr(config.runner, name)) not in (None, "auto") and "://" not in path:
            setattr(config.runner, name, _absolute(path))
    for paths in (config.data.train_data_paths, config.data.val_data_paths):
        paths[:] = [
            path if path in ("", *TOYS) or "://" in path else _absolute(path, folder)
            for path in paths
        ]
        paths[:] = with_arguments(paths, rollout.env_kwargs)
    if config.data.image_root is not None:
        config.data.image_root = _absolute(config.data.image_root, folder)
    config.runner.output_dir = os.path.expanduser(config.runner.output_dir)
