"""The CPU double of a recipe: its algorithm, turns, environment and rewards with a toy model and toy data."""

import shutil
from pathlib import Path

from rlinf_vl.config import load_config
from rlinf_vl.config.load import EXAMPLES_DIR
from rlinf_vl.config.toys import TOYS

FOLDER = EXAMPLES_DIR / "recipes"
VARIANTS = sorted(path.stem for path in FOLDER.glob("*/*.yaml") if path.name != "recipe.yaml")
#: Family → the toy that stands in for its models; the toy's own has the architecture of Qwen3-VL.
TOY_OF = {
    toy.model_type: name
    for name, toy in TOYS.items()
    if name in ("toy-qwen3_5", "toy-qwen3_vl_moe")
}


def in_place_of_hub(name: str) -> list[str]:
    """The overrides that put a toy where a recipe names the hub, and leave all else as it is."""
    config = load_config(name)
    model = TOY_OF.get(config.rollout.model.model_type, "toy")
    overrides = [f"rollout.model.model_path={model}", "rollout.model.model_type=auto"]
    if any(path.startswith("hf://") for path in config.data.train_data_paths):
        keys = "data.prompt_key=problem", "data.answer_key=answer", "data.image_keys=[images]"
        overrides += [f"data.train_data_paths=[{model}]", f"data.val_data_paths=[{model}]", *keys]
    return overrides


#: What a machine without a GPU and without SGLang asks for.
ON_CPU = [
    "cluster.device=cpu", "rollout.rollout_backend=torch", "rollout.tensor_parallel_size=1", "actor.enable_offload=false",
    "rollout.sglang.server_args={}", "cluster.num_nodes=1", "actor.fsdp_config.expert_parallel_size=1",
]  # fmt: skip


def double_of(name: str) -> list[str]:
    """The overrides that make a recipe small enough for one process on a CPU."""
    config = load_config(name)
    algorithm = config.algorithm
    few_seeds = []
    if config.data.train_data_paths[0].startswith("seeds://"):
        # Every row is checked at the start, which takes 10 s for 10000 rows.
        few_seeds = ["data.train_data_paths=[seeds://64]"]
    return [
        *in_place_of_hub(name), *ON_CPU, *few_seeds, "cluster.backend=local",
        "runner.schedule=sync", "runner.max_steps=2", "runner.val_before_train=false", "runner.val_check_interval=-1",
        "runner.save_interval=-1", "runner.logger.logger_backends=[]", "data.val_samples=4",
        "rollout.gpu_memory_utilization=auto", "rollout.model.precision=fp32", "actor.fsdp_config.mixed_precision.param_dtype=fp32",
        "actor.fsdp_config.mixed_precision.reduce_dtype=fp32", "actor.fsdp_config.gradient_checkpointing=none",
        "data.image_min_pixels=null", "data.image_max_pixels=null",
        f"data.rollout_batch_size={algorithm.n_minibatches * max(1, 4 // algorithm.n_minibatches)}", "algorithm.group_size=2",
        "algorithm.sampling_params.max_new_tokens=24",
        "algorithm.val_sampling_params.max_new_tokens=24",
        # The toy's tokenizer makes more tokens of a text.
        "data.max_prompt_length=2048", "runner.seq_length=4096", "runner.max_tokens_per_mbs=4096",
    ]  # fmt: skip


VARIETY = """
def variety(response, *_, **__):
    return len(set(response)) / max(1, len(response))
"""
VARIED_ENV = """
from dataclasses import replace

from {module} import {env}

class Varied{env}({env}):
    def step(self, response):
        result = super().step(response)
        return replace(result, reward=result.reward + 0.1 * len(set(response)) / max(1, len(response)))
"""


def rewarding_variety(name: str, folder: Path) -> list[str]:
    """The overrides that add a little reward for an answer's variety, by code that is written into `folder`.

    A toy that has hardly been warmed up earns nothing from a recipe's rewards: all groups would tie, and no step would train.
    """
    config = load_config(name)
    file, _, env = config.rollout.env_class.rpartition(":")
    if file:
        shutil.copy(file, folder)
        (folder / "varied.py").write_text(VARIED_ENV.format(module=Path(file).stem, env=env))
        return [f"rollout.env_class={folder}/varied.py:Varied{env}", "reward.reward_max_val=20"]
    (folder / "varied.py").write_text(VARIETY)
    functions = [*(config.reward.functions or ["math"]), f"{folder}/varied.py:variety"]
    return [f"reward.functions={_written(functions)}", "reward.reward_max_val=2"]


def _written(value: object) -> str:
    """A value as an override has it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_written(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str)
        else str(value)
    )
