"""Writes docs/coming-from.md from rlinf_vl/tools/convert/systems: `python docs/generate_coming_from.py`. A test compares them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlinf_vl.config.systems import SYSTEMS
from rlinf_vl.tools.convert.tables import Row, Table, quantities, table, written

PAGE = Path(__file__).with_name("coming-from.md")

HEAD = """\
# Coming from verl, EasyR1, TRL, RLinf or SkyRL

This page is generated from the tables in [`rlinf_vl/tools/convert/systems/`](../rlinf_vl/tools/convert/systems/quantities.yaml) by
`python docs/generate_coming_from.py`; edit those.

```bash
rlinf-vl convert-config run_qwen2_5_vl-7b.sh --output mine.yaml
```

reads a config of theirs and writes one of ours. A file may be YAML, a script with `key=value` or `--key value`, and for TRL a
Python file or notebook with `GRPOConfig(…)`. Nothing of it is run: a shell's variables are followed, then the environment's
(`NUM_GPUS=4 rlinf-vl convert-config run.sh`), and a config that a script names is read where it stands near it. Whose
config it is shows in its keys; `--from verl` says so.

Every key of theirs is one of these, and the command prints how many are which:

- **mapped**: a key of ours has the value, in our unit: problems instead of responses, steps instead of optimizer steps, the same
  estimator under its other name. The comment behind a line says where it comes from. What their system takes where the file
  says nothing is written, too, where our default is another.
- **dropped**: it needs no counterpart, for the reason told at the end of what is written.
- **refused**: it changes what is learned, and can't be had here, or its value is not in the file. The config is without it.
  A config that a script names and that stands nowhere near it is refused, too, with the keys that are guesses without it.
- **unknown**: no table has it.

What is written is accepted by our schema; what is missing on this machine (data, packages) is listed as to be done. Three more
ways in: RLinf's published YAML runs as it is (`rlinf-vl train theirs.yaml`), unless something in it is refused; an
unknown key of a config or override that one of these systems has is answered with ours; and their rows and reward functions are
taken as they are (`data.format`, [rewards](rewards.md)).

Published results of EasyR1, PAPO, NoisyRollout, NeMo RL, prime-rl, VAGEN and RLinf are [recipes](recipes.md), converted already.

Do the curves differ although the settings are equal? [Compare a batch](compare-batch.md): `compare-batch` names the first number
of a recorded batch of theirs that our algorithm computes differently, and why.
"""
NOTES = {
    "verl": "Batches are counted in prompts, as ours. Engine and trainer share all GPUs, whatever `tensor_model_parallel_size` is.",
    "easyr1": "Scripts build on the `config.yaml` of its examples: keep it near, else the defaults of the code are taken.",
    "trl": "Batches are counted in responses and lengths in optimizer steps; ours in problems, and in generations. A launcher's "
    "`--num_processes` counts. TRL has no longest prompt: choose `data.max_prompt_length`.",
    "rlinf": "Most keys are ours, too, and are not listed. `critic.*`, Megatron and robots have no place here.",
    "skyrl": "Scripts may call others (`run_gsm8k.sh key=value`): those are read, too. So is the `run` of a SkyPilot task.",
}
#: Ours of which the first table shows all systems' names.
GLANCE = """
rollout.model.model_path data.train_data_paths data.rollout_batch_size algorithm.group_size algorithm.n_minibatches
data.max_prompt_length algorithm.sampling_params.max_new_tokens runner.max_tokens_per_mbs runner.max_epochs runner.max_steps
runner.val_check_interval runner.save_interval runner.resume_dir algorithm.adv_type algorithm.loss_type algorithm.loss_agg_func
algorithm.normalize_advantages algorithm.clip_ratio_low algorithm.clip_ratio_high algorithm.clip_ratio_c algorithm.kl_beta
algorithm.kl_penalty_type algorithm.kl_placement algorithm.entropy_bonus algorithm.importance_sampling_fix
algorithm.dynamic_sampling.enable algorithm.overlong.buffer algorithm.sampling_params.temperature rollout.gpu_memory_utilization
rollout.max_turns reward.functions actor.optim.lr actor.optim.clip_grad actor.optim.lr_warmup_steps actor.model.is_lora
actor.model.freeze_vision_tower cluster.num_nodes
""".split()


def render() -> str:
    """The whole page."""
    return HEAD + "".join(_glance()) + "".join("".join(_system(name)) for name in SYSTEMS)


def _glance() -> Iterator[str]:
    yield f"\n## At a glance\n\n| here | {' | '.join(SYSTEMS.values())} |\n|{'---|' * (1 + len(SYSTEMS))}\n"
    for key in GLANCE:
        cells = []
        for name in SYSTEMS:
            theirs = [row.theirs for row in table(name).rows.values() if key in row.to]
            cells.append(
                "the same"
                if key in theirs
                else ", ".join(f"`{one.rpartition('.')[2]}`" for one in dict.fromkeys(theirs))
            )
        yield f"| {_key(key)} | {' | '.join(cells)} |\n"


def _system(name: str) -> Iterator[str]:
    known, data = table(name), written(name)
    yield f"\n## {SYSTEMS[name]}\n\n{NOTES[name]}\n\n| {SYSTEMS[name]} | here | how |\n|---|---|---|\n"
    for one in (_row(known, theirs) for theirs in data["keys"]):
        if one.kind == "mapped":
            ours = ", ".join(_key(key) for key in one.to)
            yield f"| `{one.theirs}` | {ours} | {_how(one.role, one.values, one.default, one.note)} |\n"
    yield f"\nMetrics of {SYSTEMS[name]} beside ours ([all of ours](metrics.md)):\n\n| {SYSTEMS[name]} | here |\n|---|---|\n"
    for theirs, ours in known.metrics.items():
        yield f"| `{theirs}` | `{ours}` |\n"
    reasons = written("reasons")
    for title, section, kind in (
        ("Only some values are taken, others refused", "", "refused"),
        ("Dropped", "drop", "dropped"),
        ("Refused where set", "refuse", "refused"),
    ):
        if not section:
            rows = [
                (f"`{key}`: {_values(row['is'])}", known.rows[key].why)
                for key, row in data["keys"].items()
                if _is_check(row)
            ]
        else:
            rows = [
                (", ".join(f"`{key}`" for key in keys), reasons[why])
                for why, keys in data.get(section, {}).items()
            ]
            rows += [
                (f"`{key}`", one.why)
                for key, one in known.rows.items()
                if key in data["keys"] and one.kind == kind == "dropped"
            ]
        if rows:
            yield f"\n{title}:\n\n" + "".join(
                f"- {keys}: {why.strip().rstrip('.')}.\n" for keys, why in rows
            )


def _row(known: Table, theirs: str) -> Row:
    row = known.row(theirs)
    assert row is not None
    return row


def _is_check(row: Any) -> bool:
    return isinstance(row, Mapping) and "is" in row and not row.get("drop")


def _values(values: list[Any]) -> str:
    return " or ".join(f"`{_plain(value)}`" for value in values)


def _how(role: str, values: Mapping[Any, Any] | None, default: Any, note: str) -> str:
    parts = [quantities()[role][1] if role else ""]
    changed = {
        theirs: ours
        for theirs, ours in (values or {}).items()
        if _plain(theirs) != _plain(ours) and ours is not None
    }
    parts.append(
        ", ".join(f"`{_plain(theirs)}` is `{_plain(ours)}`" for theirs, ours in changed.items())
    )
    parts.append(note)
    if isinstance(default, str | int | float | bool):
        parts.append(f"`{_plain(default)}` if not said")
    return "; ".join(part for part in parts if part).replace("|", "\\|")


def _plain(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _key(key: str) -> str:
    return f"[`{key}`](config.md#{key})"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
