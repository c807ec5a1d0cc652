"""The parts of `rlinf_vl.extras` and `rlinf_vl.tools` that the core takes, by name.

The core imports neither of them, so that it can be read, and run, without them. A part is imported
when a run asks for it. `rlinf_vl.cli.verbs`, `rlinf_vl.config.toys` and
`rlinf_vl.envs.registry` have the tables of verbs, embedded tasks and environments,
`rlinf_vl.observe.tracker` that of trackers.
"""

import importlib
from typing import Any

#: Name → `module:attribute`.
PARTS = {
    # rows
    "toy-data": "rlinf_vl.extras.toy.task:toy_dataset_path",
    "verifiers-rows": "rlinf_vl.extras.verifiers.rows:verifiers_rows",
    "openenv-class": "rlinf_vl.extras.openenv:openenv_class",
    "videos-of-a-cell": "rlinf_vl.extras.video.rows:video_values",
    "clip": "rlinf_vl.extras.video.rows:to_clip_ref",
    # models
    "toy-config": "rlinf_vl.extras.toy.model:config_of_toy",
    "toy-checkpoint": "rlinf_vl.extras.toy.checkpoint:toy_checkpoint_path",
    "export-checkpoint": "rlinf_vl.extras.export.export:export_checkpoint",
    "torchvision-command": "rlinf_vl.tools.check.packages:torchvision_command",
    "restore-model": "rlinf_vl.extras.export.export:restore",
    # episodes
    "agent-player": "rlinf_vl.extras.agents.make:make_player",
    # before a run
    "input-rules": "rlinf_vl.tools.check.inputs:RULES",
    "start-rules": "rlinf_vl.tools.check.inputs:START_RULES",
    "missing-libraries": "rlinf_vl.tools.check.inputs:libraries_missing",
    "refuse-machine": "rlinf_vl.tools.check.doctor:refuse",
    "algorithm-problems": "rlinf_vl.tools.check.trial:algorithm_problems",
    "tracker-problems": "rlinf_vl.tools.check.trial:tracker_problems",
    "rehearse": "rlinf_vl.tools.check.rehearsal:rehearse",
    "rehearse-imitation": "rlinf_vl.extras.sft.demonstrations:try_rows",
    "model-without-weights": "rlinf_vl.tools.memory.model:Model",
    "memory-by-phase": "rlinf_vl.tools.memory.ledger:peak_by_phase",
    "settle-memory": "rlinf_vl.tools.memory.automatic:settle_memory",
    # a run
    "imitate": "rlinf_vl.extras.sft.supervise:supervise",
    "report": "rlinf_vl.tools.report.build:build_report",
    # several runs
    "plan-sweep": "rlinf_vl.tools.sweep.plan:plan_sweep",
    "check-sweep": "rlinf_vl.tools.sweep.plan:check_sweep",
    "run-sweep": "rlinf_vl.tools.sweep.launch:run_sweep",
    "sweep-report": "rlinf_vl.tools.report.sweep:build_sweep_report",
    # other systems' configs
    "foreign-key": "rlinf_vl.tools.convert.tables:hint",
    "foreign-config": "rlinf_vl.tools.convert.as_is:rlinf_settings",
}


def load_part(name: str) -> Any:
    """Return the function or object that `PARTS` names, and import its module first."""
    return named(PARTS[name])


def named(place: str) -> Any:
    """Return the object of a `module:attribute` of ours."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
