"""From a YAML file and overrides to a typed, validated `Config`; every mistake in them is reported at once.

Hydra composes what was written (defaults lists, override grammar); types and known keys come from the dataclasses. So
`rlinf_vl_schema` in a YAML's defaults list is an empty node: were it typed, Hydra would stop at the first mistake and
advise to add it with '+'.
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

from rlinf_vl.code import collect_code, is_code
from rlinf_vl.config.foreign.as_is import rlinf_settings
from rlinf_vl.config.keys import config_keys, config_sections, set_key, suggestion
from rlinf_vl.config.overrides import apply_overrides, leaves
from rlinf_vl.config.presets import with_presets
from rlinf_vl.config.schema import SCHEMA_NAME, Config
from rlinf_vl.config.schema.limits import OrCode
from rlinf_vl.config.toys import TOYS
from rlinf_vl.config.validate import ALGORITHM_HINTS, Rule, validate_config
from rlinf_vl.errors import ConfigError, did_you_mean, nearest

if TYPE_CHECKING:  # a quarter of the time that loading a config takes
    from upath import UPath

_CHECKOUT = Path(__file__).resolve().parents[2]
#: The examples: in a checkout where a reader finds them, in an installed package its copy of them (setup.py).
EXAMPLES_DIR = (
    _CHECKOUT if (_CHECKOUT / "examples/reasoning").is_dir() else Path(__file__).resolve().parent
) / "examples"
KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
WEIGHT_SYNC_ALIASES = {"nccl": "broadcast", "cuda_ipc": "shared_memory"}  # its former values
ON_OFF = {"True": "on", "False": "off"}  # what YAML makes of them
_LIST_NAMES = {
    int: "a list of integers, such as [1, 2]",
    float: "a list of numbers, such as [0.7, 0.3]",
    str: "a list of strings, such as [a, b]",
    dict[str, Any]: "a list of mappings, such as [{function: math}]",
}
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "a mapping"}

ConfigStore.instance().store(name=SCHEMA_NAME, node={})


def load_config(config_name: str, overrides: Sequence[str] = (), further: Sequence[Rule] = ()) -> Config:
    """Compose, type-check, normalise and validate one run's configuration.

    Args:
        config_name: path of a YAML file, or its name (with or without `.yaml`) in the examples or the working directory.
        overrides: Hydra overrides, such as `runner.max_steps=3` or `data.train_data_paths=[/a/b.parquet]`.
        further: rules beside those of `validate_config`.

    Raises:
        ConfigError: with every problem found.
    """
    config = parse_config(config_name, overrides)
    validate_config(config, further)
    return config


def parse_config(config_name: str, overrides: Sequence[str | tuple[str, Any]] = ()) -> Config:
    """`load_config` without validation: what a config says, whether or not it can work. An override may be (key, value), too."""
    path = _find(config_name)
    written = rlinf_settings(path, examples) or _compose(path)
    typed = OmegaConf.structured(Config)
    problems = [*apply_overrides(written, overrides), *_fill(typed, written)]
    if problems:
        raise ConfigError(*problems)
    config = OmegaConf.to_object(typed)
    assert isinstance(config, Config)
    _normalise(config, path.parent)
    return config


def save_config(config: Config, path: "Path | UPath") -> None:
    """Write every key as YAML, nothing left to resolve; `load_config(path)` reads it back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")


def changed_keys(config: Config, path: "Path | UPath") -> list[str]:
    """ "key: old → new" for every key that differs from a file of `save_config`; none if the file can't be read."""
    try:
        before, now = OmegaConf.create(path.read_text(encoding="utf-8")), OmegaConf.structured(config)
    except (OSError, yaml.YAMLError, OmegaConfBaseException):
        return []
    pairs = {key: (OmegaConf.select(before, key), OmegaConf.select(now, key)) for key in config_keys()}
    changed = {key: values for key, values in pairs.items() if values[0] != values[1]}
    return [f"{key}: {' → '.join(textwrap.shorten(shown(value), 200) for value in changed[key])}" for key in changed]


def examples() -> dict[str, Path]:
    """The example configs by name, in whichever folder below `EXAMPLES_DIR`."""
    return {path.stem: path for path in sorted(EXAMPLES_DIR.rglob("*.yaml")) if _is_config(path)}


def _is_config(path: Path) -> bool:
    return (
        os.path.isfile(path)
        and re.search("^defaults:", path.read_text(encoding="utf-8", errors="ignore"), re.MULTILINE) is not None
    )


def _find(config_name: str) -> Path:
    named = Path(os.path.expanduser(config_name))
    if named.suffix != ".yaml" and os.path.isfile(named):
        theirs = named.suffix in (".sh", ".py", ".ipynb")
        way_out = f"rename it to {named.stem}.yaml" if named.suffix in (".yml", ".json") else "name one that does"
        way_out = f"one of another system is converted: rlinf-vl convert-config {named}" if theirs else way_out
        raise ConfigError(f"config {config_name!r}: a config's file ends in .yaml; {way_out}")
    if named.name != config_name:  # a path, not a bare name
        path = named.with_name(named.name.removesuffix(".yaml") + ".yaml")
        if not os.path.isfile(path):
            there = sorted(one.name for one in path.parent.glob("*.yaml") if os.path.isfile(one))
            hint = f"its folder has {', '.join(there) or 'none'};{nearest(path.name, there)}".rstrip(";")
            raise ConfigError(f"config {config_name!r}: no such .yaml file; {hint}")
        return path.resolve()
    name = config_name.removesuffix(".yaml")
    for path in (
        examples().get(name) if name == config_name else None,
        Path.cwd() / f"{name}.yaml",
        examples().get(name),
    ):
        if path and os.path.isfile(path):
            return path.resolve()
    there = sorted({*examples(), *(path.stem for path in Path.cwd().glob("*.yaml") if _is_config(path))})
    if ours := ALGORITHM_HINTS.get(name.lower()):
        raise ConfigError(
            f"config {config_name!r}: is no config but an algorithm: {ours}; name a config, such as toy-grpo-cpu"
        )
    likely = [one for one in there if one.startswith(f"{name}-")]
    likely = [one for one in likely if one.endswith("-cpu")] or likely  # which runs everywhere
    where = f"not in {EXAMPLES_DIR} or {Path.cwd()}"
    raise ConfigError(
        f"config {config_name!r}: {where};{did_you_mean(likely[:1]) or nearest(name, there)} there are: {', '.join(there)}"
    )


def _compose(path: Path) -> dict[str, Any]:
    """What a YAML file and those of its defaults list (the examples among them) say, unresolved: dotted name → value."""
    folders = sorted({f"file://{example.parent}" for example in examples().values()})
    try:
        with warnings.catch_warnings(), initialize_config_dir(config_dir=str(path.parent), version_base="1.3"):
            warnings.filterwarnings(
                "ignore", "(?s).*Defaults list is missing `_self_`"
            )  # what it then does is what is meant
            config = compose(path.stem, overrides=[f"hydra.searchpath={folders}"])
    except MissingConfigException as error:
        name = str(error.missing_cfg_file).removesuffix(".yaml")
        there = sorted({*examples(), *(one.stem for one in path.parent.glob("*.yaml"))} - {path.stem})
        way_out = f"there are {', '.join(there)}, and those in its folder;{nearest(name, there)}".rstrip(";")
        raise ConfigError(f"{path}: defaults: no config {name!r}; {way_out}") from error
    except RecursionError as error:
        way_out = f"rename it if it builds on our {path.stem!r}" if path.stem in examples() else "take the circle out"
        raise ConfigError(f"{path}: defaults: they lead back to this file; {way_out}") from error
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark
        where = f"{at.name}, line {at.line + 1}, column {at.column + 1}" if at else str(path)
        tab = "; indent with blanks" if "\\t" in str(error.problem) else "; write it as YAML"
        raise ConfigError(f"{where}: {error.problem}{tab}") from error
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        reason = " ".join(str(error).split()) or " ".join(str(error.__cause__).split())
        if isinstance(error, UnicodeDecodeError):
            raise ConfigError(f"{path}: is not UTF-8 ({error.reason}); write it as YAML in UTF-8") from error
        way_out = (
            "; write keys with values, such as defaults: [toy-grpo-cpu]"
            if re.search("defaults|DictConfig", reason)
            else ""
        )
        raise ConfigError(f"{path}: {reason}{way_out}") from error
    return dict(leaves(OmegaConf.to_container(config, resolve=False)))


def _fill(typed: DictConfig, written: dict[str, Any]) -> list[str]:
    """Fill the schema with what was written; return the problems."""
    problems: dict[str, str] = {}
    for key, value in written.items():
        if key in config_sections():
            keys = ", ".join(name.removeprefix(f"{key}.") for name in config_sections()[key])
            problems[key] = f"{key}: {shown(value)} is not a section; its keys are {keys}"
        elif key not in config_keys():
            problems[key] = f"{key}: unknown key (value {shown(value)});{suggestion(key)}"
        else:
            annotation = config_keys()[key].type
            if get_origin(annotation) is list and _is_one(value, get_args(annotation)[0]):
                value = [value]
            if key == "cluster.component_placement" and isinstance(value, (str, int)):
                value = {"actor,rollout": value}  # a mode, or slots, for both
            try:
                set_key(typed, key, value)
            except OmegaConfBaseException:
                problems[key] = f"{key}: {shown(value)} is not {type_name(annotation)}"
    for key in [key for key in config_keys() if key not in problems]:
        try:
            if OmegaConf.select(typed, key, default=MISSING) == MISSING:
                problems[key] = f"{key}: must be given ({config_keys()[key].doc})"
        except OmegaConfBaseException as error:  # an interpolation
            reason = str(error).splitlines()[0]
            target = re.search("key '(.+)' not found", reason)
            problems[key] = f"{key}: {reason};{suggestion(target[1])}" if target else f"{key}: {reason}"
    return list(problems.values())


def _is_one(value: Any, element: Any) -> bool:
    """Whether a value is one element of a list, which needs no brackets; an interpolation may be the list itself."""
    if isinstance(value, str):
        return element is str and bool(value) and not value.startswith("${")
    return not isinstance(value, bool) and isinstance(value, get_origin(element) or element)


def shown(value: Any) -> str:
    """A value as YAML writes it, strings in quotes."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def type_name(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else type_name(arg) for arg in get_args(annotation))
    if get_origin(annotation) is list:
        return _LIST_NAMES[get_args(annotation)[0]]
    return _TYPE_NAMES[get_origin(annotation) or annotation]


def with_texts(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords of an environment, with the text of a file for each value `@path`: relative to the working folder, or else to the
    examples. Raises ConfigError: there is no such file."""
    read = dict(kwargs)
    for name, value in kwargs.items():
        if isinstance(value, str) and value.startswith("@"):
            path = Path(os.path.expanduser(value[1:]))
            found = next((place for place in (path, EXAMPLES_DIR / path) if os.path.isfile(place)), None)
            if found is None:
                raise ConfigError(
                    f"rollout.env_kwargs.{name}: no file {value[1:]!r}, here or in {EXAMPLES_DIR}; give a path"
                )
            read[name] = found.read_text(encoding="utf-8", errors="replace")
    return read


def _absolute(path: str, folder: Path | None = None) -> str:
    """Relative to the working folder, or else to this one, where something is."""
    here = Path(os.path.expanduser(path)).absolute()
    beside = folder / os.path.expanduser(path) if folder else here
    return str(beside if os.path.exists(beside) and not os.path.exists(here) else here)


def _collect_code(config: Config, folders: Sequence[str]) -> None:
    """Have the files that names of code lead to travel with the config, in place."""
    for name, key in config_keys().items():
        if isinstance(key.allowed, OrCode):
            *sections, leaf = name.split(".")
            section = reduce(getattr, sections, config)
            value: Any = getattr(section, leaf)
            setattr(section, leaf, _collected(value, folders, config.runner.code_files))


def _collected(value: Any, folders: Sequence[str], files: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_collected(one, folders, files) for one in value]
    if isinstance(value, dict):
        return value | {"function": _collected(value.get("function"), folders, files)}
    return collect_code(value, folders, files) if isinstance(value, str) and is_code(value) else value


def _normalise(config: Config, folder: Path) -> None:
    """One spelling for every meaning, in place. `folder`: the config's, in which relative paths are looked for, too."""
    algorithm = config.algorithm
    algorithm.recompute_logprobs = algorithm.recompute_logprobs.lower()  # YAML's true arrives as "True"
    algorithm.kl_penalty_type = KL_ALIASES.get(algorithm.kl_penalty_type or "", algorithm.kl_penalty_type)
    with_presets(algorithm)
    rollout = config.rollout
    rollout.weight_sync = WEIGHT_SYNC_ALIASES.get(rollout.weight_sync, rollout.weight_sync)
    rollout.thinking.mode = ON_OFF.get(rollout.thinking.mode, rollout.thinking.mode)
    _collect_code(config, [os.getcwd(), str(folder)])
    rollout.env_kwargs = with_texts(rollout.env_kwargs)
    for sampling in (algorithm.sampling_params, algorithm.val_sampling_params):
        if sampling.max_new_tokens is None:
            room = config.runner.seq_length - config.data.max_prompt_length
            sampling.max_new_tokens = max(1, room)  # a rule refuses a prompt that leaves no room
    # Workers may have another working folder. A model that is no folder here is a name on the hub.
    model = rollout.model
    if model.model_path not in ("", *TOYS) and os.path.isdir(path := _absolute(model.model_path, folder)):
        model.model_path = path
    for name in ("resume_dir", "checkpoint_dir"):
        if (path := getattr(config.runner, name)) not in (None, "auto") and "://" not in path:
            setattr(config.runner, name, _absolute(path))
    for paths in (config.data.train_data_paths, config.data.val_data_paths):
        paths[:] = [path if path in ("", *TOYS) or "://" in path else _absolute(path, folder) for path in paths]
    if config.data.image_root is not None:
        config.data.image_root = _absolute(config.data.image_root, folder)
    config.runner.output_dir = os.path.expanduser(config.runner.output_dir)
