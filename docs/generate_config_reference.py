"""Writes docs/config.md from the schema: `python docs/generate_config_reference.py`. A test compares the page with it."""

import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from omegaconf import MISSING

from rlinf_vl.config import Key, config_keys
from rlinf_vl.config.keys import config_sections
from rlinf_vl.config.schema import Limit
from rlinf_vl.config.schema.limits import OrCode

PAGE = Path(__file__).with_name("config.md")

HEAD = """\
# Configuration keys

Every key there is. This page is generated from
[`rlinf_vl/config/schema/`](../rlinf_vl/config/schema/__init__.py) by `python docs/generate_config_reference.py`; edit that.

A config is a YAML file whose `defaults` list begins with `rlinf_vl_schema` or another config; the examples are in
[`examples/`](../examples). On the command line a key is set by its dotted name, as
in `runner.max_steps=40`. A section can be given as a mapping and is merged: `actor.optim={lr: 1e-5, clip_grad: 2}`. Lists are
replaced.

Unknown keys, wrong types, values out of range and combinations that cannot work are refused before Ray starts, all at once,
each with the way out. This page lists what one key allows by itself; combinations are rules in
[`rlinf_vl/config/validate.py`](../rlinf_vl/config/validate.py).
"""

ABOUT = {
    "cluster": "Machines, devices, and which component runs where.",
    "runner": "The run: its length, folder, budgets, checkpoints and limits.",
    "runner.logger": "Where metrics go beside `metrics.jsonl`.",
    "runner.trajectories": "What is recorded of samples; see [observing a run](observing.md).",
    "runner.profile": "Traces of the trainer's operators and kernels.",
    "algorithm": "Advantages, loss, KL and importance correction; see [algorithms](algorithms.md) and [concepts](concepts.md).",
    "algorithm.dynamic_sampling": "Groups that teach nothing; see [DAPO](algorithms.md#dapo).",
    "algorithm.overlong": "Responses that are too long; see [DAPO](algorithms.md#dapo).",
    "algorithm.sampling_params": "Sampling in training.",
    "algorithm.val_sampling_params": "Sampling in validation; one response per problem.",
    "rollout": "The engine that samples, and the environment it talks to.",
    "rollout.sglang": "Passed to SGLang; see [SGLang as the rollout engine](sglang.md).",
    "rollout.model": "The checkpoint, and the engine's precision.",
    "data": "Data sets, columns, prompts and images.",
    "actor": "The trainer: batching, caches, memory.",
    "actor.model": "What of the model is trained, and in which shapes.",
    "actor.fsdp_config": "Sharding and memory of the trainer.",
    "actor.fsdp_config.mixed_precision": "Dtypes of the trainer.",
    "actor.optim": "AdamW and the learning-rate schedule. Steps here are optimizer steps.",
    "reward": "The grader and its scale.",
}


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for section in config_sections():
        keys = {k: key for k, key in config_keys().items() if k.rpartition(".")[0] == section}
        about = f"{ABOUT[section]}\n\n" if section in ABOUT else ""
        parts.append(
            f"\n## {section}\n\n{about}| key | type | default | meaning |\n|---|---|---|---|\n"
        )
        parts += [f"| {' | '.join(_row(k, key))} |\n" for k, key in keys.items()]
    return "".join(parts)


def _row(name: str, key: Key) -> tuple[str, ...]:
    must = ""
    if isinstance(key.allowed, Limit):
        must = f" *Must* {key.allowed.must}."
    elif key.allowed:
        code = ("module:Name", "path/to/file.py:Name") if isinstance(key.allowed, OrCode) else ()
        must = f" *Allowed:* {', '.join(f'`{value}`' for value in (*key.allowed, *code))}."
    anchor = f'<a id="{name}"></a>`{name.rpartition(".")[2]}`'
    default = "must be given" if key.default == MISSING else f"`{_yaml(key.default)}`"
    meaning = key.doc if key.doc.endswith((".", "!")) else f"{key.doc}."
    return anchor, _type(key.type), default, (meaning + must).replace("|", "\\|")


def _yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).strip()
    return text.removesuffix("...").strip() if value != "" else '""'


def _type(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(
            "null" if arg is type(None) else _type(arg) for arg in get_args(annotation)
        )
    if get_origin(annotation) is list:
        return f"list of {_type(get_args(annotation)[0])}"
    return "mapping" if get_origin(annotation) is dict else annotation.__name__


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
