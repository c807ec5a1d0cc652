"""Writes docs/coming-from.md: `python docs/generate_coming_from.py`. A test compares them."""

from pathlib import Path

from rlinf_vl.config.systems import SYSTEMS

PAGE = Path(__file__).with_name("coming-from.md")

HEAD = """\
# Coming from verl, EasyR1, TRL, RLinf or SkyRL

```bash
rlinf-vl convert-config run_qwen2_5_vl-7b.sh --output mine.yaml
```

reads a config of theirs and writes one of ours. A file may be YAML, a script with `key=value` or `--key value`, and for TRL a
Python file or notebook with `GRPOConfig(…)`. Nothing of it is run. A shell's variables are followed, then the environment's
(`NUM_GPUS=4 rlinf-vl convert-config run.sh`). A config that a script names is read if it stands near the script. The keys
show whose config it is; `--from verl` says so.

Every key of theirs is one of these, and the command prints how many are which:

- **mapped**: a key of ours has the value, in our unit: problems instead of responses, steps instead of optimizer steps, the same
  estimator under its other name. The comment behind a line says where it comes from. Where their default differs from ours, it
  is written, too.
- **dropped**: it needs no counterpart. The reason stands at the end of what is written.
- **refused**: it changes what is learned, and can't be had here, or its value is not in the file. The config is without it.
  A config that a script names and that is not found is refused, too, with the keys that are guesses without it.
- **unknown**: no table has it.

Our schema accepts what is written; what is missing on this machine (data, packages) is listed as to be done.

## One key

```bash
rlinf-vl convert-config --explain actor_rollout_ref.rollout.n
rlinf-vl convert-config --explain beta --from trl
rlinf-vl convert-config --explain actor/pg_loss
```

tells what becomes of a key or a metric: our name, the change of unit, their default, or why it is dropped or refused. The end
of a name will do. Without `--from` all systems that have it answer.

The answers come from the tables in
[`rlinf_vl/tools/convert/systems/`](../rlinf_vl/tools/convert/systems/quantities.yaml). From the same tables an unknown key of a
config or an override is answered with ours.

## Other ways in

- RLinf's published YAML runs as it is (`rlinf-vl train theirs.yaml`), unless something in it is refused.
- Rows and reward functions of these systems are taken as they are (`data.format`, [rewards](rewards.md)).
- Published results of EasyR1, PAPO, NoisyRollout, NeMo RL, prime-rl, VAGEN and RLinf are [recipes](recipes.md), converted already.
- Do the curves differ although the settings are equal? [Compare a batch](compare-batch.md): `compare-batch` names the first
  number of a recorded batch of theirs that our algorithm computes differently, and why.

## What is different

"""
NOTES = {
    "verl": "Batches are counted in prompts, as ours. Engine and trainer share all GPUs, whatever `tensor_model_parallel_size` is.",
    "easyr1": "Scripts build on the `config.yaml` of its examples: keep it near, else the defaults of the code are taken.",
    "trl": "Batches are counted in responses and lengths in optimizer steps; ours in problems, and in generations. A launcher's "
    "`--num_processes` counts. TRL has no longest prompt: choose `data.max_prompt_length`.",
    "rlinf": "Most keys are ours, too. `critic.*`, Megatron and robots have no place here.",
    "skyrl": "Scripts may call others (`run_gsm8k.sh key=value`): those are read, too. So is the `run` of a SkyPilot task.",
}


def render() -> str:
    """Return the whole page."""
    notes = (f"- **{title}**: {NOTES[name]}\n" for name, title in SYSTEMS.items())
    return HEAD + "".join(notes)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
