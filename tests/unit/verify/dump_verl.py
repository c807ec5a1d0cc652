"""Writes a batch that verl's own functions computed: `python dump_verl.py FOLDER_OF_VERL OUTPUT_FOLDER`.

verl is not in our environment: `pip download verl --no-deps`, unzip it into FOLDER_OF_VERL, and
`pip install --target FOLDER_OF_VERL --no-deps tensordict pyvers orjson cloudpickle`. The numbers that
go in are random; advantages, weights, KL, losses of the tokens and the loss are verl's.
"""

import importlib
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch

folder, output_folder = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, str(folder))


class Placeholder:
    """Stands for classes of configs that only annotate types."""


def stand_in(name):
    """Register a package without running its __init__, which imports Ray, workers and engines."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder.joinpath(*name.split(".")))]

    def attribute(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder if name[0].isupper() else lambda *_: lambda function: function

    module.__getattr__ = attribute
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


for package in (
    "verl", "verl.utils", "verl.trainer", "verl.trainer.config", "verl.trainer.ppo", "verl.workers",
    "verl.workers.config", "verl.workers.config.actor", "verl.utils.metric",
):  # fmt: skip
    stand_in(package)

core_algos = importlib.import_module("verl.trainer.ppo.core_algos")
corrections = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")


class Settings(dict):
    """The actor's config, as far as the loss reads it."""

    __getattr__ = dict.__getitem__


torch.manual_seed(1)
n_samples, width, kl_beta = 8, 7, 0.02
lengths = torch.tensor([7, 3, 5, 6, 2, 7, 4, 5])
mask = (torch.arange(width) < lengths[:, None]).float()
mask[3, 2] = 0.0  # a token of a tool
groups = np.array(["a", "a", "a", "a", "b", "b", "b", "b"])
scores = torch.tensor([1.0, 0.0, 0.3, 0.0, 1.0, 1.0, 0.2, 0.0])
logprobs = -torch.rand(n_samples, width) * 3 - 0.05
old = logprobs + 0.9 * torch.randn(n_samples, width)
rollout = old + 0.5 * torch.randn(n_samples, width)
reference = logprobs + 0.3 * torch.randn(n_samples, width)
rewards = torch.zeros(n_samples, width)
rewards[torch.arange(n_samples), lengths - 1] = scores

advantages, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask, groups)
weights, _ = corrections.compute_rollout_correction_weights(old - rollout, mask, "token", 1.5)
kl = core_algos.kl_penalty(logprobs, reference, "low_var_kl")
settings = Settings(
    clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0, global_batch_info={}
)
policy_loss, _ = core_algos.compute_policy_loss_vanilla(
    old, logprobs, advantages, mask, "token-mean", settings, weights
)
loss = policy_loss + kl_beta * core_algos.agg_loss(kl, mask, "token-mean")

columns = {
    "response_mask": mask, "logprobs": logprobs, "old_logprobs": old, "rollout_logprobs": rollout,
    "ref_logprobs": reference, "advantages": advantages, "weights": weights, "kl": kl,
}  # fmt: skip
samples = []
for i, n in enumerate(lengths.tolist()):
    sample = {
        "group_id": str(groups[i]),
        "response_ids": list(range(n)),
        "reward": scores[i].item(),
    }
    for name, values in columns.items():
        sample[name] = values[i, :n].tolist()
    samples.append(sample)
version = next(folder.glob("verl-*.dist-info")).name.split("-")[1].removesuffix(".dist")
document = {
    "schema": "rlinf-vl-batch/1",
    "system": f"verl {version}",
    "settings": {
        "adv_type": "grpo", "loss_agg_func": "token-mean", "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28, "clip_ratio_c": 3.0, "kl_beta": kl_beta, "kl_penalty_type": "k3",
        "importance_sampling_fix": True, "importance_sampling_clip": 1.5,
    },
    "samples": samples,
    "loss": loss.item(),
}  # fmt: skip
(output_folder / "verl.json").write_text(json.dumps(document))
