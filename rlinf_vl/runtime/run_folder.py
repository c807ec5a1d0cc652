"""A run's folder: its path, its lock, and the treatment of an earlier run's files in it.

- One process at a time writes to it (`locked`).
- It has the history of one run only: a run that starts afresh renames a used folder to
  `<experiment>.previous-N`, as a whole. A run that resumes from a checkpoint of the folder
  continues in it; from any other checkpoint, it starts a folder of its own.
- Checkpoints that lie elsewhere (`runner.checkpoint_dir`) belong to the folder all the same, and
  move with it.
"""

import fcntl
import itertools
import json
import logging
import os
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from upath import UPath

from rlinf_vl.config import Config, changed_keys, save_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.runtime.checkpoints import Folder, checkpoint_home, checkpoints, load_state, rename

log = logging.getLogger(__name__)
#: Files that a run may have written when it fails before its first step.
START_FILES = {
    "config.yaml",
    "status.json",
    "environment.json",
    "datasets.json",
    "events.jsonl",
    "bad_rows.jsonl",
    "error.txt",
    "spans",
}
AnyFolder = TypeVar("AnyFolder", Path, UPath)

#: Keys that decide which adapters there are, as they begin a line of `changed_keys`.
ADAPTER_KEYS = (
    "actor.model.is_lora:",
    "actor.model.lora.rank:",
    "actor.model.lora.target_modules:",
    "actor.model.lora.exclude_modules:",
    "actor.model.lora.quantization:",
)


def run_folder(config: Config) -> Path:
    """Return the path of a run's folder."""
    return Path(config.runner.output_dir).absolute() / config.runner.experiment_name


def _lock_file(run_dir: Path) -> Path:
    return run_dir.with_name(f".{run_dir.name}.lock")


def is_locked(run_dir: Path) -> bool:
    """Return whether a process has reserved the run's folder (`locked`)."""
    try:
        with _lock_file(run_dir).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Reserve the run's folder for this process, or raise ConfigError.

    The lock is the operating system's, on `.<experiment>.lock` beside the folder. It ends with the
    process, however that ends; the file stays.

    Other hosts see the lock where the file system has locks between hosts (NFS 4, Lustre with `-o
    flock`, Ceph, GPFS). On one that has none, a warning names the run that the file names.
    """
    path = _lock_file(run_dir)
    host = platform.node()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"runner.output_dir: {path.parent} can't be written to ({error.strerror})"
        ) from None
    with file:
        file.seek(0)
        owner = file.read().strip()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{run_dir} is in use by another run: {owner or 'it has just started'}. Wait "
                "until that has ended, stop it, or give this one another runner.experiment_name "
                "or runner.output_dir"
            ) from None
        except OSError as error:
            log.warning(
                "%s: this file system has no locks (%s), so nothing keeps two runs apart there",
                path,
                error,
            )
        if owner and not owner.endswith(f" on {host}"):
            log.warning(
                f"the last run of {run_dir}, {owner}, did not end by itself. If it still goes on, "
                "stop one of the two: this file system then has no locks between hosts"
            )
        # The name stays in the file only if this process is killed, or still runs on a host whose
        # lock is not seen here.
        file.truncate(0)
        file.write(f"process {os.getpid()} on {host}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def open_folder(
    config: Config,
    run_dir: Path,
    checkpoint: Folder | None,
    report: Callable[[int, str, str], None],
) -> Folder | None:
    """Prepare the folder for a run that starts from `checkpoint`, and write its `config.yaml`.

    Returns the checkpoint's path, which may have changed. At the end, `report(step, kind, message)`
    is called for everything set aside, and for keys that differ from the resumed run's.

    Raises:
        ConfigError: the folder can't be renamed or written, or the checkpoint has other adapters.
    """
    home = checkpoint_home(config, run_dir)
    step = load_state(checkpoint)["step"] if checkpoint else 0
    changed_lines = (
        changed_keys(config, checkpoint.parents[1] / "config.yaml") if checkpoint else []
    )
    changed_lines = [line for line in changed_lines if not line.startswith("runner.resume_dir:")]
    adapter_prefixes = (
        ADAPTER_KEYS if config.actor.model.is_lora else ("actor.model.is_lora: true",)
    )
    adapter_lines = [line for line in changed_lines if line.startswith(adapter_prefixes)]
    if adapter_lines:
        raise ConfigError(
            f"runner.resume_dir: the checkpoint {checkpoint} has other adapters "
            f"({'; '.join(adapter_lines)}); set those keys as they were, or start afresh"
        )
    events = []
    try:
        if checkpoint and str(checkpoint.resolve().parent) == str(home.resolve() / "checkpoints"):
            if abandoned := _set_newer_aside(run_dir, home, step):
                message = f"what came after step {step} is now in {abandoned}, checkpoints included"
                events.append(("branch_set_aside", message))
            if changed_lines and (run_dir / "config.yaml").exists():
                os.rename(run_dir / "config.yaml", _numbered(run_dir / "config.previous", ".yaml"))
        else:
            if run_dir == home and _is_failed_start(run_dir):
                shutil.rmtree(run_dir)  # nothing is worth keeping, so it gets no number
            # the folder, and the one of its checkpoints if they lie elsewhere
            for folder in {run_dir, home}:
                if any(
                    (folder / name).exists()
                    for name in ("config.yaml", "metrics.jsonl", "checkpoints")
                ):
                    aside = _numbered(folder.with_name(f"{folder.name}.previous"))
                    if checkpoint and str(checkpoint.resolve()).startswith(f"{folder.resolve()}/"):
                        checkpoint = aside / str(checkpoint.resolve()).removeprefix(
                            f"{folder.resolve()}/"
                        )
                    rename(folder, aside)
                    events.append(
                        ("folder_set_aside", f"the run that was in {folder} is now in {aside}")
                    )
        for folder in {run_dir, home}:
            folder.mkdir(parents=True, exist_ok=True)
            save_config(config, folder / "config.yaml")
    except OSError as error:
        raise ConfigError(
            f"runner.output_dir: {run_dir} can't be made ready for a run: {error}"
        ) from None
    if changed_lines:
        events.append(
            ("config_changed", f"keys that are not as they were: {'; '.join(changed_lines)}")
        )
    for kind, message in events:
        report(step, kind, message)
    return checkpoint


def _is_failed_start(run_dir: Path) -> bool:
    """Return whether a folder has a run that failed before its first step, and no other files."""
    try:
        has_failed = json.loads((run_dir / "status.json").read_bytes())["state"] == "failed"
    except (OSError, ValueError, TypeError, KeyError):
        return False
    if not has_failed or not (run_dir / "config.yaml").is_file():
        return False
    return {path.name for path in run_dir.iterdir()} <= START_FILES


def write_baselines(run_dir: Path, answers: Counter[str]) -> None:
    """Write `baselines.json`: the accuracy of giving every validation problem the one answer that
    is right most often."""
    if answers:
        ((answer, count),) = answers.most_common(1)
        baselines = {f"always {answer}": count / answers.total()}
        (run_dir / "baselines.json").write_text(json.dumps(baselines, indent=1) + "\n")


def read_prior(run_dir: Path) -> float:
    """Return the accuracy in `baselines.json`; 0 if there is none."""
    try:
        baselines = json.loads((run_dir / "baselines.json").read_bytes())
        return max(map(float, baselines.values()), default=0.0)
    except (OSError, ValueError, TypeError, AttributeError):
        return 0.0


def _set_newer_aside(run_dir: Path, home: Folder, step: int) -> Path | None:
    """Set aside the newer part of a run that returns to the checkpoint of `step`.

    Its newer checkpoints and trajectories are moved to `abandoned-N`, and its lines are copied
    there, so that the folder can be read, exported and resumed from like a run's. Returns that
    folder, or None if there are no newer checkpoints.
    """
    newer = [folder for checkpoint_step, folder in checkpoints(home) if checkpoint_step > step]
    if not newer:
        return None
    aside = _numbered(run_dir / "abandoned")
    recorded = [
        file
        for file in (run_dir / "trajectories").glob("step_*.parquet")
        if int(file.stem[5:]) > step
    ]
    for path in [*newer, *recorded]:
        target = (home if path in newer else run_dir) / aside.name / path.parent.name
        target.mkdir(parents=True, exist_ok=True)
        rename(path, target / path.name)
    aside.mkdir(exist_ok=True)
    for file in [*run_dir.glob("*.jsonl"), *run_dir.glob("*.json"), run_dir / "config.yaml"]:
        if file.exists():
            shutil.copy2(file, aside / file.name)
    if home != run_dir and (home / "config.yaml").exists():
        (home / aside.name / "config.yaml").write_text((home / "config.yaml").read_text())
    os.symlink("../images", aside / "images")
    return aside


def _numbered(path: AnyFolder, suffix: str = "") -> AnyFolder:
    """Return the first of `path`-1, `path`-2, …, each with `suffix`, that doesn't exist."""
    paths = (path.with_name(f"{path.name}-{n}{suffix}") for n in itertools.count(1))
    return next(
        path
        for path in paths
        if not (os.path.lexists(path) if isinstance(path, Path) else path.exists())
    )
