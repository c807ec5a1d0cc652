"""A run's folder: its path, its lock, its checkpoints, and what happens to an earlier run's files in it.

- One process at a time writes to it (`locked`).
- It has the history of one run only: a run that starts afresh renames a used folder to `<experiment>.previous-N`, as a whole. A
  run that resumes from a checkpoint of the folder goes on in it; from any other checkpoint, it starts a folder of its own.
- A checkpoint that has its name is complete: it was written aside and renamed.
"""

import errno
import fcntl
import itertools
import json
import logging
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlinf_vl.config import Config, changed_keys, save_config
from rlinf_vl.errors import ConfigError, RunError
from rlinf_vl.runtime.files import recover, write_aside

log = logging.getLogger(__name__)

#: The controller's part of a checkpoint, and the folder of the actors' part.
STATE_FILE = "controller.json"
ACTOR_FOLDER = "actor"
#: Keys that decide which adapters there are.
ADAPTER_KEYS = (
    "actor.model.is_lora:",
    *(f"actor.model.lora.{k}:" for k in ("rank", "target_modules", "exclude_modules", "quantization")),
)


class CheckpointFailed(RunError):
    """A checkpoint could not be written. Earlier ones are as they were."""


def run_folder(config: Config) -> Path:
    return Path(config.runner.output_dir).absolute() / config.runner.experiment_name


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Reserve the run's folder for this process, or raise ConfigError: by a lock of the operating system on `.<experiment>.lock`
    beside it, which ends with the process, however that ends. The file stays.

    Other hosts see the lock where the file system has locks between hosts (NFS 4, Lustre with `-o flock`, Ceph, GPFS). On one
    that has none, a warning names the run that the file names.
    """
    path, here = run_dir.with_name(f".{run_dir.name}.lock"), platform.node()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"runner.output_dir: {path.parent} can't be written to ({error.strerror})") from None
    with file:
        file.seek(0)
        owner = file.read().strip()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{run_dir} is in use by another run: {owner or 'it has just started'}. Wait until that has ended, stop it, "
                "or give this one another runner.experiment_name or runner.output_dir"
            ) from None
        except OSError as error:
            log.warning("%s: this file system has no locks (%s), so nothing keeps two runs apart there", path, error)
        if owner and not owner.endswith(f" on {here}"):
            log.warning(
                f"the last run of {run_dir}, {owner}, did not end by itself. If it still goes on, stop one of the two: this file "
                "system then has no locks between hosts"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {here}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def open_folder(
    config: Config, run_dir: Path, checkpoint: Path | None, report: Callable[[int, str, str], None]
) -> Path | None:
    """Prepare the folder for a run that starts from `checkpoint`, write its `config.yaml`, and return the checkpoint's path, which
    may have changed. At the end, `report(step, kind, message)` is called for everything set aside, and for keys that differ
    from the resumed run's. ConfigError: the folder can't be renamed or written, or the checkpoint has other adapters."""
    step = load_state(checkpoint)["step"] if checkpoint else 0
    changed = changed_keys(config, checkpoint.parents[1] / "config.yaml") if checkpoint else []
    changed = [line for line in changed if not line.startswith("runner.resume_dir:")]
    decisive = ADAPTER_KEYS if config.actor.model.is_lora else ("actor.model.is_lora: true",)
    if other := [line for line in changed if line.startswith(decisive)]:
        raise ConfigError(
            f"runner.resume_dir: the checkpoint {checkpoint} has other adapters ({'; '.join(other)}); set those keys as they "
            "were, or start afresh"
        )
    events = []
    try:
        found = checkpoint.resolve() if checkpoint else None
        if found and found.parent == run_dir.resolve() / "checkpoints":
            if newer := _set_newer_aside(run_dir, step):
                message = f"what came after step {step} is now in {newer}, checkpoints included"
                events.append(("branch_set_aside", message))
            if changed and (run_dir / "config.yaml").exists():
                os.rename(run_dir / "config.yaml", _numbered(run_dir / "config.previous", ".yaml"))
        elif any((run_dir / name).exists() for name in ("config.yaml", "metrics.jsonl", "checkpoints")):
            aside = _numbered(run_dir.with_name(f"{run_dir.name}.previous"))
            if found and found.is_relative_to(run_dir.resolve()):
                checkpoint = aside / found.relative_to(run_dir.resolve())
            os.rename(run_dir, aside)
            events.append(("folder_set_aside", f"the run that was in {run_dir} is now in {aside}"))
        run_dir.mkdir(exist_ok=True)
        save_config(config, run_dir / "config.yaml")
    except OSError as error:
        raise ConfigError(f"runner.output_dir: {run_dir} can't be made ready for a run: {error}") from None
    if changed:
        events.append(("config_changed", f"keys that are not as they were: {'; '.join(changed)}"))
    for kind, message in events:
        report(step, kind, message)
    return checkpoint


def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint, oldest first."""
    found = [(re.fullmatch(r"global_step_(\d+)", f.name), f) for f in (run_dir / "checkpoints").glob("global_step_*")]
    return sorted((int(match[1]), folder) for match, folder in found if match and (folder / STATE_FILE).is_file())


def newest_checkpoint(run_dir: Path, start: Path | None = None) -> Path | None:
    """The newest complete checkpoint of a run; if it has none, the one that it started from."""
    found = checkpoints(run_dir)
    return found[-1][1] if found else start


def save_checkpoint(
    run_dir: Path, step: int, write_actor: Callable[[str], None], state: dict[str, Any], keep_last: int
) -> Path:
    """Write `checkpoints/global_step_{step}`: the actors' part by `write_actor(folder)`, then the controller's `state`. Then delete
    others, those of the earliest steps first, until `keep_last` are left (-1: delete none). CheckpointFailed: the disk is full, or
    refuses."""
    final = run_dir / "checkpoints" / f"global_step_{step}"
    former = [_size(folder) for _, folder in checkpoints(run_dir)[-1:]]
    needed = sum(former)
    try:
        if shutil.disk_usage(run_dir).free < needed:
            raise OSError(errno.ENOSPC, "less room than the checkpoint before took")
        with write_aside(final) as aside:
            (aside / ACTOR_FOLDER).mkdir(parents=True)
            try:
                write_actor(str(aside / ACTOR_FOLDER))
                (aside / STATE_FILE).write_text(json.dumps(state, indent=1))
            finally:
                needed = max(needed, _size(aside))
    except OSError as error:
        free = shutil.disk_usage(run_dir).free
        raise CheckpointFailed(
            f"the checkpoint of step {step} could not be written to {final.parent}: {str(error).strip().splitlines()[-1]}. "
            f"It needs {'' if former else 'at least '}{needed / 1e6:,.0f} MB, {free / 1e6:,.0f} MB are free; with "
            f"runner.keep_last: {keep_last} there must be room for {keep_last + 1 if keep_last > 0 else 'every'} "
            f"checkpoint{'s' if keep_last else ''}. The last good one is {newest_checkpoint(run_dir) or 'none'}"
        ) from error
    if keep_last > 0:
        others = [folder for _, folder in checkpoints(run_dir) if folder != final]
        for old in others[: len(others) + 1 - keep_last]:
            shutil.rmtree(old, ignore_errors=True)
    return final


def recover_checkpoints(run_dir: Path) -> None:
    """Mend what a crash in `save_checkpoint` left. Nobody may be writing meanwhile."""
    for folder in recover(run_dir / "checkpoints"):
        log.warning("%s is there again: a run ended while it wrote that step anew", folder)


def find_checkpoint(run_dir: Path, resume_dir: str | None) -> Path | None:
    """The checkpoint to start from: None for null, the newest complete one (if any) for `auto`, else the folder named, or
    ConfigError if that is not a complete checkpoint."""
    if resume_dir is None:
        return None
    if resume_dir == "auto":
        found = newest_checkpoint(run_dir)
        log.info("runner.resume_dir: auto found %s", found or "no complete checkpoint; starting afresh")
        return found
    if not (Path(resume_dir) / STATE_FILE).is_file():
        raise ConfigError(
            f"runner.resume_dir: {resume_dir!r} is not a complete checkpoint (no {STATE_FILE} in it); "
            "name a checkpoints/global_step_N folder, or use `auto`"
        )
    return Path(resume_dir)


def checkpoint_at(source: Path) -> Path:
    """A complete checkpoint: `source` itself, or the newest one of the run's folder that it is.

    Raises:
        FileNotFoundError: it is neither.
    """
    folder = source if (source / STATE_FILE).is_file() else newest_checkpoint(source)
    if folder is None:
        raise FileNotFoundError(f"{source} is neither a complete checkpoint nor a run's folder that holds one")
    return folder


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The controller's part of a checkpoint; ConfigError if it can't be read."""
    try:
        return json.loads((checkpoint / STATE_FILE).read_text())
    except ValueError as error:
        raise ConfigError(
            f"runner.resume_dir: the checkpoint {checkpoint} is damaged ({STATE_FILE}: {error}); move it away or name another one"
        ) from None


def write_baselines(run_dir: Path, answers: Counter[str]) -> None:
    """`baselines.json`: the accuracy of giving every validation problem the one answer that is right most often."""
    if answers:
        ((answer, count),) = answers.most_common(1)
        baselines = {f"always {answer}": count / answers.total()}
        (run_dir / "baselines.json").write_text(json.dumps(baselines, indent=1) + "\n")


def _set_newer_aside(run_dir: Path, step: int) -> Path | None:
    """Leave the branch of a run that goes back to the checkpoint of `step`: move its newer checkpoints and trajectories to
    `abandoned-N`, and copy its lines there, so that the folder can be read, exported and resumed from like a run's. Returns that
    folder, or None if there are no newer checkpoints."""
    newer = [folder for found, folder in checkpoints(run_dir) if found > step]
    if not newer:
        return None
    aside = _numbered(run_dir / "abandoned")
    recorded = [file for file in (run_dir / "trajectories").glob("step_*.parquet") if int(file.stem[5:]) > step]
    for path in [*newer, *recorded]:
        (aside / path.parent.name).mkdir(parents=True, exist_ok=True)
        os.rename(path, aside / path.parent.name / path.name)
    for file in [*run_dir.glob("*.jsonl"), *run_dir.glob("*.json"), run_dir / "config.yaml"]:
        if file.exists():
            shutil.copy2(file, aside / file.name)
    os.symlink("../images", aside / "images")
    return aside


def _numbered(path: Path, suffix: str = "") -> Path:
    """The first of `path`-1, `path`-2, …, each with `suffix`, that is not there yet."""
    paths = (path.with_name(f"{path.name}-{n}{suffix}") for n in itertools.count(1))
    return next(path for path in paths if not os.path.lexists(path))


def _size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
