"""The rules, like those of `quantities`, for rewards, prompts and data sets of other systems."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlinf_vl.tools.convert.python import OWN_MODULE
from rlinf_vl.tools.convert.quantities import Derived, Quantities
from rlinf_vl.tools.convert.values import names_of


def rewards(q: Quantities) -> Iterator[Derived]:
    """Yield the reward functions: by a file's path, or by names."""
    path, names, weights = q("reward_path"), q("reward_names"), q("reward_weights")
    if q.has("vqa_accuracy"):
        yield Derived("reward.functions", _vqa_functions(q))
        return
    if any(q.has(role) for role in ("reward_right", "reward_wrong", "reward_scale")):
        scale = q.number("reward_scale", 1.0)
        yield Derived("reward.reward_max_val", q.number("reward_right", 1.0) * scale)
        yield Derived("reward.reward_min_val", q.number("reward_wrong", 0.0) * scale)
    kwargs = q("reward_kwargs")
    kwargs = dict(kwargs) if isinstance(kwargs, Mapping) else {}
    if path:
        yield from _file_reward(q, str(path), kwargs)
    elif names:
        yield from _named_rewards(q, names_of(names), weights)


def _vqa_functions(q: Quantities) -> list[dict[str, Any]]:
    """Return the functions of RLinf's rewards for visual questions, each with its weight."""
    functions: list[dict[str, Any]] = [{"function": "choice", "weight": q.number("vqa_accuracy")}]
    for role in ("think_format", "answer_format"):
        if weight := q.number(role):
            tags = [role.partition("_")[0]]
            functions.append({"function": "format", "weight": weight, "kwargs": {"tags": tags}})
    return functions


def _file_reward(q: Quantities, path: str, kwargs: dict[str, Any]) -> Iterator[Derived]:
    """Yield the reward function in a file, `path:name`."""
    path, _, name = path.partition(":")
    name = name or q("reward_name", "main")
    if f"{path}:{name}".endswith("reward_function/math.py:compute_score"):  # EasyR1's
        form = float(kwargs.get("format_weight", 0.1))
        functions = [
            {"function": "math", "weight": 1 - form},
            {"function": "format", "weight": form, "kwargs": {"tags": ["think"], "box": True}},
        ]
        yield Derived("reward.functions", functions, "EasyR1's math.py by ours")
    elif file := q.find(path):
        function = {"function": f"{file.resolve()}:{name}"}
        yield Derived("reward.functions", [function | ({"kwargs": kwargs} if kwargs else {})])
    else:
        q.refused["reward_path"] = (
            f"no file {path!r} near the config: bring it, and name it in reward.functions"
        )


def _named_rewards(q: Quantities, reward_names: list[str], weights: Any) -> Iterator[Derived]:
    """Yield the reward functions of TRL's names."""
    functions, unknown_names = [], []
    # Without a weight for each, all functions have our default weight.
    is_weighted = isinstance(weights, list) and len(weights) == len(reward_names)
    for i, name in enumerate(reward_names):
        module, _, leaf = name.rpartition(".")
        # A function of the user's own is theirs, whatever its name.
        is_known = not module or module.partition(".")[0] in REWARD_PACKAGES
        ours = NAMED_REWARDS.get(leaf) if is_known else None
        if ours is None and module and not module.startswith((".", OWN_MODULE)):
            ours = {"function": f"{module}:{leaf}"}
        if ours is None:
            unknown_names.append(leaf)
            continue
        functions.append(ours | ({"weight": weights[i]} if is_weighted else {}))
    if functions:
        boxed = [
            name
            for name in reward_names
            if name.rpartition(".")[2] in BOXED_REWARDS
            and name.partition(".")[0] in (name, *REWARD_PACKAGES)
        ]
        note = (
            f"math pays an answer in \\boxed{{}} only; {', '.join(boxed)} reads others: "
            "ask for the box in data.prompt_suffix"
        )
        yield Derived("reward.functions", functions, note if boxed else "")
    if unknown_names:
        paths = ", ".join(f"path/to/file.py:{name}" for name in unknown_names)
        q.refused["reward_names"] = f"add {paths} to reward.functions"


#: Packages whose rewards have the names below; so has TRL's command line, without a package.
REWARD_PACKAGES = ("trl", "open_r1")
#: TRL's rewards by name, with ours.
NAMED_REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"function": "math"},
    "reasoning_accuracy_reward": {"function": "math"},
    "accuracy": {"function": "math"},  # open-r1's names
    "format": {"function": "format", "kwargs": {"tags": ["think", "answer"]}},
    "get_soft_overlong_punishment": {
        "function": "overlong",
        "kwargs": {"max_tokens": 1280, "buffer": 256},
    },
}
#: Rewards that also read formulas outside of a box, which `math` does not.
BOXED_REWARDS = {"accuracy_reward", "reasoning_accuracy_reward", "accuracy"}


def prompts(q: Quantities) -> Iterator[Derived]:
    """Yield the text that a template of EasyR1 puts around the problem."""
    if not (path := q("prompt_template")):
        return
    file = q.find(str(path))
    text = file.read_text(encoding="utf-8").rstrip("\n") if file else ""
    # Jinja: {{ content | trim }} stands for the problem. Any other tag can't be expressed here.
    parts = re.split(r"\{\{\s*content(?:\s*\|\s*trim)?\s*\}\}", text)
    if file is None:
        q.refused["prompt_template"] = (
            f"no file {path!r} near the config: write its text into data.prompt_suffix"
        )
    elif len(parts) != 2 or "{%" in text or "{{" in "".join(parts):
        q.refused["prompt_template"] = (
            f"{path} is more than a text around the problem: write it into your rows"
        )
    elif parts[0]:
        yield Derived("data.prompt_variants", ["{problem}".join(parts)])
    else:
        yield Derived("data.prompt_suffix", parts[1])


def datasets(q: Quantities) -> Iterator[Derived]:
    """Yield the paths of TRL's data set; its validation split only if it validates."""
    if not (name := q("dataset")):
        return
    is_on_hub = not os.path.exists(os.path.expanduser(str(name))) and not str(name).startswith(
        (".", "/", "~")
    )
    for role, key in (
        ("dataset_train_split", "data.train_data_paths"),
        ("dataset_val_split", "data.val_data_paths"),
    ):
        if key == "data.train_data_paths" or str(q("validate_strategy", "no")) not in (
            "no",
            "False",
        ):
            yield Derived(key, [f"hf://{name}:{q(role)}" if is_on_hub else str(name)])
