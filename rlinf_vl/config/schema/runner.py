"""Keys of `cluster` and `runner`: machines, the run, its folder and what it records."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from rlinf_vl.config.schema.limits import (
    ALL_OR_NOT_NEGATIVE,
    AT_LEAST_1,
    NOT_NEGATIVE,
    NOT_NEGATIVE_OR_INFINITE,
    OFF_OR_POSITIVE,
    POSITIVE,
    Limit,
    OrCode,
    key,
)

TRACKERS = OrCode(("tensorboard", "wandb", "trackio"), "tracker", "open_tracker(run)")


#: Values of `runner.schedule` that generate groups of later steps while a step trains.
SCHEDULES_AHEAD = ("one_step_off", "async")


@dataclass
class ClusterConfig:
    backend: str = key("ray", ("ray", "local"))
    """ray: engines and actor ranks are processes of their own, on any number of machines. local: one
    engine and one rank in this process, without Ray, for a notebook, a debugger or a test
    (docs/local.md); component_placement is then one slot for both."""
    num_nodes: int = key(1, AT_LEAST_1)
    """Machines that the Ray cluster must have when the run starts; ray_utils/check_ray.sh waits for
    them."""
    component_placement: dict[str, Any] = field(default_factory=lambda: {"actor,rollout": "all"})
    """Slots (accelerators; on CPU, processes) of each component: `actor,rollout: 0-7` shares them,
    `actor: 0-3` with `rollout: 4-7` splits them; `all`, `nodes 0-1` and `nodes all slots 0-3` name
    them by node, `4-7:0,8-11:1-2` gives engine 0 four slots and engines 1 and 2 two each. Or one
    mode for both: collocated, disaggregated, single_node_split (docs/cluster.md)."""
    elastic_rollout: bool = False
    """Nodes that join the Ray cluster in mid-run get rollout workers on all of their slots, with
    the weights that the others have; the workers of a node that is lost leave, and others do their
    work. Engines need slots of their own."""
    on_node_loss: str = key("wait", ("wait", "shrink"))
    """Reaction of a run to the loss of a node. wait: until Ray has its slots again, there or
    elsewhere. shrink: rollout workers leave and others do their work; the actor ranks that are left
    go on from the last checkpoint, and take the others back the next time that ranks start."""
    device: str = key("auto", ("auto", "cpu", "cuda"))
    """auto, cpu or cuda."""
    ray_address: str | None = "auto"
    """host:port of a running Ray cluster; `auto` is RAY_ADDRESS if set, else the cluster that
    ray_utils/start_ray.sh started on this node, else a private one for this run; null is always
    private."""


@dataclass
class LoggerConfig:
    logger_backends: list[str] = key(["tensorboard"], TRACKERS)
    """Trackers beside metrics.jsonl, which is always written: tensorboard, wandb, trackio; or
    path/to/file.py:function, which is given a `TrackedRun`."""
    project_name: str = "rlinf_vl"
    """Project name given to wandb and trackio."""


@dataclass
class TrajectoriesConfig:
    groups: int | None = key(None, ALL_OR_NOT_NEGATIVE)
    """Groups recorded of every training step, chosen at random, and problems of every validation,
    always the same ones; -1 records all. null: 4 of a training step and 64 of a validation."""
    max_gb: float = key(2.0, NOT_NEGATIVE_OR_INFINITE)
    """GB of trajectories and images after which no more are recorded; 0 records none."""


@dataclass
class ProfileConfig:
    steps: list[int] = field(default_factory=list)
    """Training steps of which torch.profiler writes a trace of actor rank 0
    (profile/step_N-rank_0.json.gz in the run's folder)."""


@dataclass
class RunnerConfig:
    output_dir: str = "results"
    """Runs are written to ${runner.output_dir}/${runner.experiment_name}/."""
    experiment_name: str = MISSING
    """Name of the run's folder."""
    seed: int = key(1234, Limit("lie in [0, 2^63)", lambda x: 0 <= x < 2**63))  # as torch takes it
    """Seeds weights' initialisation, sampling and everything else; the data order, too, unless
    data.seed is given."""
    seq_length: int = key(2048, AT_LEAST_1)
    """Longest trajectory in tokens: prompt with expanded image placeholders, and response."""
    enable_dynamic_batch_size: bool = True
    """Pack trajectories into micro-batches under max_tokens_per_mbs; false puts
    actor.micro_batch_size in each."""
    max_tokens_per_mbs: int = key(8192, AT_LEAST_1)
    """Hard upper bound of tokens in one micro-batch of one rank."""
    max_epochs: int = key(1, AT_LEAST_1)
    """Passes over the training rows; the run ends at max_steps or max_epochs, whichever comes
    first."""
    max_steps: int = key(-1, OFF_OR_POSITIVE)
    """Training steps; -1 leaves it to max_epochs."""
    val_check_interval: int = key(10, OFF_OR_POSITIVE)
    """Validate every so many steps, and after the last; -1 never validates."""
    val_before_train: bool = True
    """Validate before the first step, too, unless val_check_interval is -1."""
    schedule: str = key("sync", ("sync", *SCHEDULES_AHEAD))
    """sync generates and trains in turn; one_step_off generates the next step's groups while it
    trains; async generates all the time, as far ahead as max_staleness allows. All but sync need
    engines that share no slot with actor ranks."""
    max_staleness: int = key(1, AT_LEAST_1)
    """Most steps that the weights which sampled a token may be behind those that sync would have
    sampled it with; for all schedules but sync. Above 1, groups with long answers carry over, and a
    step does not wait for them."""
    stale_groups: str = key("wait", ("wait", "drop"))
    """Treatment of a group that the next step could not train on within max_staleness. wait: the
    step waits for it. drop: the step trains without it, which leaves out long answers."""
    weight_sync_interval: int = key(1, AT_LEAST_1)
    """Training steps between weight syncs. Above 1 the engine samples from older weights, which TIS
    corrects for. A step that is validated is synced, too: validation is always of the step's own
    weights."""
    mismatch_check_interval: int = key(20, OFF_OR_POSITIVE)
    """Compare engine and trainer logprobs, with images and with blank ones, on the first step and
    every so many; a blind or stale engine stops the run. -1 never checks."""
    save_interval: int = key(-1, OFF_OR_POSITIVE)
    """Checkpoint every so many steps, and after the last; -1 saves only a run that is told to
    stop."""
    keep_last: int = key(2, OFF_OR_POSITIVE)
    """Complete checkpoints kept; older ones are deleted. -1 keeps all."""
    keep_best: int = key(0, NOT_NEGATIVE)
    """Checkpoints with the highest best_metric kept beside the last ones; of steps that are
    validated and saved."""
    best_metric: str = "val/accuracy"
    """The validation metric by which keep_best chooses, the higher the better: val/accuracy,
    val/accuracy_by_set, val/SET/accuracy (data.val_group_by), val/reward/PART, …"""
    async_save: bool = True
    """Write checkpoints while training goes on, from a copy in host memory of their size; false
    waits for the disk."""
    checkpoint_dir: str | None = None
    """Folder or URL that fsspec knows (s3://bucket/folder, gs://…) for checkpoints,
    CHECKPOINT_DIR/EXPERIMENT_NAME/checkpoints/; the ranks write there themselves. null: the run's
    folder."""
    resume_dir: str | None = None
    """null starts afresh (a used folder of this name is set aside first), `auto` takes the newest
    complete checkpoint of this run, a path or URL that checkpoint. What the config says now counts,
    the optimizer's settings included."""
    grace_period: float | None = key(None, POSITIVE)
    """Seconds from SIGTERM or Ctrl-C to the end of the run, such as a scheduler gives before it
    kills: a run whose checkpoint isn't written by then ends without; null waits for it."""
    heartbeat_timeout: float = key(120.0, POSITIVE)
    """Seconds without an answer after which a rollout worker or an actor rank is taken for hung,
    and replaced."""
    code_files: dict[str, str] = field(default_factory=dict)
    """Path → text of the files that names of code lead to (rollout.env_class, …), and of those
    beside them that they import. Filled in when a config is loaded, so that workers and a resumed
    run need no such file: leave it out."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    trajectories: TrajectoriesConfig = field(default_factory=TrajectoriesConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def generates_ahead(self) -> bool:
        """Whether groups of later steps are generated while a step trains."""
        return self.schedule in SCHEDULES_AHEAD
