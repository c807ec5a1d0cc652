"""Former keys of the config, with what to do instead.

A config of an older version may still have them, a run's `config.yaml` all of them. At its former
default a key says nothing and is passed over; another value is refused, since it would do nothing.
Those of SGLang's arguments are moved to where they belong now.
"""

from typing import Any, NamedTuple

#: Former names of keys whose values are read as those of the new ones.
RENAMED = {"rollout.env_files": "runner.code_files"}


class Removed(NamedTuple):
    """A former key: its default, and the sentence that says what to do instead."""

    default: Any
    hint: str


_FALL = (
    "the noise falls as in NoisyRollout, by half at two thirds of the run; leave it out, and set "
    "algorithm.image_corruption.strength"
)
REMOVED = {
    "runner.max_restarts": Removed(
        3,
        "ranks start again 3 times from one checkpoint; leave it out, and save more often "
        "(runner.save_interval) if that is too few",
    ),
    "runner.max_bad_steps": Removed(
        3,
        "a run stops after 3 steps in a row without a finite gradient; leave it out",
    ),
    "runner.trajectories.interval": Removed(
        1,
        "every step is recorded; leave it out, or set runner.trajectories.max_gb=0 to record none",
    ),
    "runner.trajectories.train_groups": Removed(
        4, "set runner.trajectories.groups, for training and validation; -1 records all"
    ),
    "runner.trajectories.val_groups": Removed(
        64, "set runner.trajectories.groups, for training and validation; -1 records all"
    ),
    "runner.logger.send_code": Removed(
        False,
        "trackers get the paths of your code, not its text; leave it out, and upload files from a "
        "tracker of your own (runner.logger.logger_backends)",
    ),
    "runner.profile.ranks": Removed(
        [0],
        "rank 0 is profiled; leave it out (`rlinf-vl timeline` compares ranks)",
    ),
    "algorithm.tau_pos": Removed(1.0, "loss_type: sapo has its paper's 1.0; leave it out"),
    "algorithm.tau_neg": Removed(1.05, "loss_type: sapo has its paper's 1.05; leave it out"),
    "algorithm.image_corruption.kind": Removed(
        "noise",
        "answers are drawn on noised images; leave it out (algorithm.papo masks images in the loss)",
    ),
    "algorithm.image_corruption.schedule": Removed("sigmoid", _FALL),
    "algorithm.image_corruption.midpoint": Removed(2 / 3, _FALL),
    "algorithm.image_corruption.steepness": Removed(30.0, _FALL),
    "algorithm.papo.kind": Removed(
        "mask", "PAPO's images are masked, as in its paper; leave it out"
    ),
    "algorithm.papo.strength": Removed(
        0.6, "60 % of an image's squares are masked, as in PAPO's paper; leave it out"
    ),
    "cluster.object_store_memory": Removed(
        None,
        "Ray takes 30 % of the memory; for another size, start it with "
        "`ray_utils/start_ray.sh --object-store-memory=BYTES`, and leave it out",
    ),
    "cluster.cpu_threads": Removed(
        None, "an actor has 1 thread on a CPU and its share of the cores beside a GPU; leave it out"
    ),
    "rollout.request_timeout": Removed(
        600.0,
        "SGLang gives up a request after 600 s, or rollout.episode_timeout where that is longer; "
        "set that",
    ),
    "rollout.agent.token_env": Removed(
        None, "export the token as TASK_APP_TOKEN before the run's Ray starts; leave it out"
    ),
    "rollout.agent.processes": Removed(1, "set rollout.env_processes"),
    "rollout.sglang.attention_backend": Removed(
        None, "set rollout.sglang.server_args.attention_backend"
    ),
    "rollout.sglang.log_level": Removed("error", "set rollout.sglang.server_args.log_level"),
    "rollout.sglang.ep_size": Removed(1, "set rollout.sglang.server_args.ep_size"),
    "rollout.sglang.attn_dp_size": Removed(1, "set rollout.sglang.server_args.attn_dp_size"),
    "data.vision_hidden_share": Removed(
        0.5, "the control cropped hides half of an image; leave it out"
    ),
    "data.max_row_faults": Removed(
        3, "a row is quarantined after 3 workers that died of it; leave it out"
    ),
    "data.turn_mask_key": Removed(
        None, "put `weight: 0` into the messages that are not imitated, and leave it out"
    ),
    "actor.share_prompts": Removed(
        True, "a group's prompt is computed once for all its responses; leave it out"
    ),
    "actor.optim.projector_lr": Removed(
        None,
        "the projector learns at actor.optim.lr; leave it out (actor.optim.vision_tower_lr is the "
        "tower's rate)",
    ),
    "actor.vision_cache_gb": Removed(
        1.0, "1 GiB of image features stays on the device, others in host memory; leave it out"
    ),
    "actor.logprob_chunk_tokens": Removed(
        None,
        "the head works in chunks that fit 1 GiB on a GPU; leave it out, and lower "
        "runner.max_tokens_per_mbs where memory is short",
    ),
    "actor.model.lora.save_lora_only": Removed(
        True,
        "checkpoints of adapters have the adapters; leave it out, and `rlinf-vl export` the whole "
        "model",
    ),
    "reward.memory_gb": Removed(
        4.0,
        "a process with functions of yours has 4 GiB beyond its imports; leave it out, and load "
        "what is large when the file is imported",
    ),
    "reward.workers": Removed(
        4, "functions of yours have up to 4 processes per rollout worker; leave it out"
    ),
}

#: Former key → the entry of `rollout.sglang.server_args` that has its value now.
SERVER_ARGS = {
    f"rollout.sglang.{name}": name
    for name in ("attention_backend", "log_level", "ep_size", "attn_dp_size")
}


def move_server_args(written: dict[str, Any]) -> None:
    """Move values of former keys to `rollout.sglang.server_args`, in place; an entry that is there
    stays."""
    for key, name in SERVER_ARGS.items():
        value = written.pop(key, REMOVED[key].default)
        if value != REMOVED[key].default:
            entries = written.get("rollout.sglang.server_args") or {}
            written["rollout.sglang.server_args"] = {name: value} | entries
