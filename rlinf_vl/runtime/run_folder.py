"""Checkpoints of a run: written aside, made durable, then renamed into place, so that one that has its name is complete."""

import errno
import itertools
import json
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlinf_vl.config.keys import ConfigError
from rlinf_vl.data.cache import make_durable
from rlinf_vl.errors import RunError

log = logging.getLogger(__name__)

_NAME = re.compile(r"global_step_(\d+)$")
STATE_FILE = "controller.json"
ACTOR_FOLDER = "actor"
_REPLACED = ".replaced"


def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint of a run, oldest first."""
    found = []
    for folder in (run_dir / "checkpoints").glob("global_step_*"):
        match = _NAME.search(folder.name)
        if match and (folder / STATE_FILE).is_file():
            found.append((int(match.group(1)), folder))
    return sorted(found)


class CheckpointFailed(RunError):
    """A checkpoint could not be written. What was there before is as it was."""


def save_checkpoint(
    run_dir: Path, step: int, write_actor: Callable[[str], None], state: dict[str, Any], keep_last: int
) -> Path:
    """Write `checkpoints/global_step_{step}`: the actors' part through `write_actor(folder)`, then the controller's `state`.

    Once the new one is in place, others are deleted until `keep_last` are left (-1: none is), those of the earliest steps
    first.

    Raises:
        CheckpointFailed: the disk is full, or refuses. What was there before is there again.
    """
    final = run_dir / "checkpoints" / f"global_step_{step}"
    aside = final.with_name(f".{final.name}.tmp")
    former = [size_of(folder) for _, folder in checkpoints(run_dir)[-1:]]
    try:
        if former and shutil.disk_usage(run_dir).free < former[0]:
            raise OSError(errno.ENOSPC, "less room than the checkpoint before took")
        shutil.rmtree(aside, ignore_errors=True)
        (aside / ACTOR_FOLDER).mkdir(parents=True)
        write_actor(str(aside / ACTOR_FOLDER))
        (aside / STATE_FILE).write_text(json.dumps(state, indent=1))
        for path in aside.rglob("*"):
            make_durable(path)
        make_durable(aside)
        replaced = final.with_name(f".{final.name}{_REPLACED}")
        if final.exists():  # a resumed run that comes by a step again
            os.rename(final, replaced)
        os.rename(aside, final)  # a crash before this one: `recover_checkpoints`
        make_durable(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        needed = max([*former, size_of(aside)])
        recover_checkpoints(run_dir)
        free, kept = shutil.disk_usage(run_dir).free, [folder for _, folder in checkpoints(run_dir)]
        raise CheckpointFailed(
            f"the checkpoint of step {step} could not be written to {final.parent}: {str(error).strip().splitlines()[-1]}. "
            f"It needs {'at least ' if not former else ''}{needed / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free; with "
            f"runner.keep_last: {keep_last} there must be room for {keep_last + 1 if keep_last > 0 else 'every'} "
            f"checkpoint{'s' if keep_last else ''}. The last good one is {kept[-1] if kept else 'none'}"
        ) from error
    if keep_last > 0:
        others = [folder for _, folder in checkpoints(run_dir) if folder != final]
        for old in others[: len(others) + 1 - keep_last]:
            shutil.rmtree(old, ignore_errors=True)
    return final


def recover_checkpoints(run_dir: Path) -> None:
    """Mend what a crash in `save_checkpoint` left: a checkpoint that was about to be replaced gets its name back, and
    half-written ones go. Nobody may be writing meanwhile."""
    for replaced in (run_dir / "checkpoints").glob(f".global_step_*{_REPLACED}"):
        final = replaced.with_name(replaced.name.removeprefix(".").removesuffix(_REPLACED))
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.rename(replaced, final)
            log.warning("%s is there again: a run ended while it wrote that step anew", final)
    for half in (run_dir / "checkpoints").glob(".global_step_*.tmp"):
        shutil.rmtree(half, ignore_errors=True)


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder; 0 if it is not there."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def set_newer_aside(run_dir: Path, step: int) -> Path | None:
    """Leave the branch of a run that goes back to the checkpoint of `step`: its newer checkpoints, its trajectories and its
    lines move or are copied to `abandoned-N`, which is returned and can be read, exported and resumed from like a run's
    folder. Nothing of it is left that the run could take for its own. None: there are no newer checkpoints."""
    newer = [folder for found, folder in checkpoints(run_dir) if found > step]
    if not newer:
        return None
    aside = numbered(run_dir / "abandoned")
    recorded = [file for file in (run_dir / "trajectories").glob("step_*.parquet") if int(file.stem[5:]) > step]
    for path in [*newer, *recorded]:
        (aside / path.parent.name).mkdir(parents=True, exist_ok=True)
        os.rename(path, aside / path.parent.name / path.name)
    for file in [*run_dir.glob("*.jsonl"), *run_dir.glob("*.json"), run_dir / "config.yaml"]:
        if file.exists():
            shutil.copy2(file, aside / file.name)
    os.symlink("../images", aside / "images")
    return aside


def numbered(path: Path, suffix: str = "") -> Path:
    """The first of `path`-1, `path`-2, …, each with `suffix`, that is not there yet."""
    paths = (path.with_name(f"{path.name}-{n}{suffix}") for n in itertools.count(1))
    return next(path for path in paths if not os.path.lexists(path))


def find_checkpoint(run_dir: Path, resume_dir: str | None) -> Path | None:
    """The checkpoint to start from: None for null, the newest complete one (if any) for `auto`, else the folder named.

    Raises:
        ConfigError: the folder named is not a complete checkpoint.
    """
    if resume_dir is None:
        return None
    if resume_dir == "auto":
        found = checkpoints(run_dir)
        log.info(
            "runner.resume_dir: auto found %s", found[-1][1] if found else "no complete checkpoint; starting afresh"
        )
        return found[-1][1] if found else None
    folder = Path(resume_dir)
    if not (folder / STATE_FILE).is_file():
        raise ConfigError(
            f"runner.resume_dir: {resume_dir!r} is not a complete checkpoint (no {STATE_FILE} in it); "
            "name a checkpoints/global_step_N folder, or use `auto`"
        )
    return folder


def load_state(folder: Path) -> dict[str, Any]:
    """The controller's part of a checkpoint.

    Raises:
        ConfigError: it can't be read.
    """
    try:
        return json.loads((folder / STATE_FILE).read_text())
    except ValueError as error:
        raise ConfigError(
            f"runner.resume_dir: the checkpoint {folder} is damaged ({STATE_FILE}: {error}); move it away or name another one"
        ) from None


def write_baselines(run_dir: Path, answers: Counter[str]) -> None:
    """`baselines.json`: the accuracy of giving every validation problem the one answer that is right most often."""
    if answers:
        ((answer, count),) = answers.most_common(1)
        baselines = {f"always {answer}": count / answers.total()}
        (run_dir / "baselines.json").write_text(json.dumps(baselines, indent=1) + "\n")
