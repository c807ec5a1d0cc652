"""Checkpoints of a run: `checkpoints/global_step_N` of its folder, or of one elsewhere
(`runner.checkpoint_dir`), also remote.

- A checkpoint that has its `controller.json` is complete. On a disk it is written aside and
  renamed; where nothing can be renamed at once (object stores), that file is written last. A
  checkpoint that is deleted loses its name, or that file, first.
- `SHA256SUMS` has the digest of every file, taken while the bytes were written, in the form that
  `sha256sum -c` checks.
"""

import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from upath import UPath

from rlinf_vl.config import Config
from rlinf_vl.errors import ConfigError, RunError
from rlinf_vl.runtime.files import recover, write_aside

log = logging.getLogger(__name__)

#: The controller's part of a checkpoint, the folder of the actors' part, and the digests of all
#: files.
STATE_FILE = "controller.json"
ACTOR_FOLDER = "actor"
SUMS_FILE = "SHA256SUMS"
#: Files whose digests are computed at the same time.
READERS = 8
#: A folder on a disk, or one that fsspec reaches (s3://…, gs://…, …).
Folder = Path | UPath
#: A function that writes the actors' part into a folder, and returns file name → SHA-256.
WriteActor = Callable[[str], Mapping[str, str]]


class CheckpointFailed(RunError):
    """A checkpoint could not be written. Earlier ones are as they were."""


def folder_at(text: str) -> Folder:
    """Return the folder that a path or a URL names."""
    # Without a cache of listings: other processes write to the folder, too.
    return UPath(text, use_listings_cache=False) if "://" in text else Path(text)


def checkpoint_home(config: Config, run_dir: Path) -> Folder:
    """Return the folder that has the `checkpoints` of a run: the run's own, or one of its name in
    `runner.checkpoint_dir`."""
    elsewhere = config.runner.checkpoint_dir
    return folder_at(elsewhere) / run_dir.name if elsewhere else run_dir


def checkpoints(home: Folder) -> list[tuple[int, Folder]]:
    """Return (step, folder) of every complete checkpoint, oldest first."""
    matches = [
        (re.fullmatch(r"global_step_(\d+)", f.name), f)
        for f in (home / "checkpoints").glob("global_step_*")
    ]
    return sorted(
        (
            (int(match[1]), folder)
            for match, folder in matches
            if match and (folder / STATE_FILE).is_file()
        ),
        key=lambda item: item[0],
    )


def newest_checkpoint(home: Folder, start: Folder | None = None) -> Folder | None:
    """Return the newest complete checkpoint of a run; if it has none, the one that it started
    from."""
    complete = checkpoints(home)
    return complete[-1][1] if complete else start


def save_checkpoint(
    home: Folder,
    step: int,
    write_actor: WriteActor,
    state: Mapping[str, Any],
    keep_last: int,
    keep_best: int = 0,
    accuracies: Mapping[int, float] = MappingProxyType({}),
) -> Folder:
    """Write `checkpoints/global_step_{step}`, then delete others.

    The actors' part is written by `write_actor(folder)`, then the controller's `state`. Kept are
    the checkpoints of the last `keep_last` steps (-1: all), the new one included, and those of the
    `keep_best` steps with the highest of `accuracies`, the earliest where they tie.

    Raises:
        CheckpointFailed: the disk is full, or refuses.
    """
    final = home / "checkpoints" / f"global_step_{step}"
    former: Folder | None = None
    needed = 0  # bytes
    try:
        with _as_os_errors():
            if former := newest_checkpoint(home):
                needed = _size(former)
        # the former checkpoint's size is the best estimate of the new one's
        if _free(home) < needed:
            raise OSError(errno.ENOSPC, "less room than the checkpoint before took")
        with _written(final) as folder:
            try:
                with _as_os_errors():
                    (folder / ACTOR_FOLDER).mkdir(parents=True, exist_ok=True)
                written = write_actor(str(folder / ACTOR_FOLDER))
                content = json.dumps(state, indent=1)
                sums = {f"{ACTOR_FOLDER}/{name}": digest for name, digest in written.items()}
                sums[STATE_FILE] = hashlib.sha256(content.encode()).hexdigest()
                with _as_os_errors():
                    (folder / SUMS_FILE).write_text(
                        "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
                    )
                    (folder / STATE_FILE).write_text(content)
            finally:
                needed = max(needed, _size(folder))
    except OSError as error:
        max_checkpoints = keep_last + keep_best if keep_last > 0 else 0  # 0: no limit
        room = (
            f"It needs {'' if former else 'at least '}{needed / 1e6:,.0f} MB, "
            f"{_free(home) / 1e6:,.0f} MB are free; with runner.keep_last: {keep_last} there must "
            f"be room for {max_checkpoints + 1 if max_checkpoints else 'every'} "
            f"checkpoint{'s' if max_checkpoints else ''}. "
        )
        room = room if isinstance(home, Path) else ""
        raise CheckpointFailed(
            f"the checkpoint of step {step} could not be written to {final.parent}: "
            f"{str(error).strip().splitlines()[-1]}. {room}The last good one is {former or 'none'}"
        ) from error
    if keep_last > 0:
        _delete_others(home, step, keep_last, keep_best, accuracies)
    return final


def _delete_others(
    home: Folder, step: int, keep_last: int, keep_best: int, accuracies: Mapping[int, float]
) -> None:
    """Delete the checkpoints beside that of `step` which `save_checkpoint` does not keep."""
    # The new checkpoint is kept in any case: of the others, one less than `keep_last`.
    other_checkpoints = {at: folder for at, folder in checkpoints(home) if at != step}
    scored = sorted(
        (at for at in (*other_checkpoints, step) if at in accuracies),
        key=lambda at: (-accuracies[at], at),
    )
    kept_steps = {
        *sorted(other_checkpoints)[len(other_checkpoints) + 1 - keep_last :],
        *scored[:keep_best],
    }
    for at in other_checkpoints.keys() - kept_steps:
        try:
            _remove(other_checkpoints[at])
        except OSError as error:
            log.warning("%s can't be deleted: %s", other_checkpoints[at], error)


@contextmanager
def _written(final: Folder) -> Iterator[Folder]:
    """Yield the folder to write a checkpoint into; it is complete after the block, and absent if
    the block fails."""
    if isinstance(final, Path):
        with write_aside(final) as aside:
            yield aside
        return
    _remove(final)
    try:
        yield final
    except BaseException:
        _remove(final)
        raise


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Raise the errors of a remote file system's library as OSError."""
    try:
        yield
    except (OSError, ConfigError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def recover_checkpoints(home: Folder) -> None:
    """Mend the remains of a crash in `save_checkpoint`. Nobody may be writing meanwhile.
    ConfigError: a store refuses."""
    if isinstance(home, Path):
        for folder in recover(home / "checkpoints"):
            log.warning("%s is there again: a run ended while it wrote that step anew", folder)
        return
    try:
        with _as_os_errors():
            for folder in (home / "checkpoints").glob("global_step_*"):
                if not (folder / STATE_FILE).is_file():
                    _remove(folder)
    except OSError as error:
        raise ConfigError(
            f"runner.checkpoint_dir: {home} can't be read or written: {error}"
        ) from None


def find_checkpoint(home: Folder, resume_dir: str | None) -> Folder | None:
    """Return the checkpoint to start from: None for null, the newest complete one (if any) for
    `auto`, else the folder named.

    Raises:
        ConfigError: it is not a complete checkpoint, or it is damaged; names an earlier one that is
            whole.
    """
    if resume_dir is None:
        return None
    try:
        with _as_os_errors():
            if resume_dir == "auto":
                checkpoint = newest_checkpoint(home)
                log.info(
                    "runner.resume_dir: auto found %s",
                    checkpoint or "no complete checkpoint; starting afresh",
                )
                if checkpoint is None:
                    return None
            else:
                checkpoint = folder_at(resume_dir)
                if not (
                    checkpoint / STATE_FILE
                ).is_file():  # a run's folder means its newest checkpoint
                    checkpoint = newest_checkpoint(checkpoint, checkpoint) or checkpoint
                if not (checkpoint / STATE_FILE).is_file():
                    raise ConfigError(
                        f"runner.resume_dir: {resume_dir!r} is not a complete checkpoint (no "
                        f"{STATE_FILE} in it); name a checkpoints/global_step_N folder, or use "
                        "`auto`"
                    )
            if problems := damage(checkpoint):
                earlier = next((c for c in _earlier_checkpoints(checkpoint) if not damage(c)), None)
                raise ConfigError(
                    f"runner.resume_dir: the checkpoint {checkpoint} is damaged "
                    f"({'; '.join(problems)}); "
                    + (
                        f"resume from the one before it: runner.resume_dir={earlier}"
                        if earlier
                        else "no other is whole: start afresh"
                    )
                )
            return checkpoint
    except OSError as error:
        raise ConfigError(
            f"runner.resume_dir: {resume_dir!r}: {home} can't be read: {error}"
        ) from None


def set_damaged_aside(home: Folder, report: Callable[[str], None]) -> None:
    """Rename the newest checkpoints to `damaged.global_step_N` as long as they are damaged, and
    report each."""
    while (newest := newest_checkpoint(home)) and (problems := damage(newest)):
        aside = newest.with_name(f"damaged.{newest.name}")
        _remove(aside)
        rename(newest, aside)
        report(
            f"the checkpoint {newest} is damaged ({'; '.join(problems)}); it is now {aside.name}"
        )


def damage(checkpoint: Folder) -> list[str]:
    """Return the faults in the files of a complete checkpoint, by their digests: three at most; []
    without any."""
    try:
        text = (checkpoint / SUMS_FILE).read_text(errors="replace")
    except FileNotFoundError:
        log.warning("%s has no %s, so its files can't be verified", checkpoint, SUMS_FILE)
        return []
    sums = {
        name: digest for digest, name in re.findall("^([0-9a-f]{64})  (.+)$", text, re.MULTILINE)
    }

    def problem(name: str) -> str | None:
        """Return the fault of a file, None without one."""
        try:
            with (checkpoint / name).open("rb") as file:
                actual_digest = hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} can't be read: {error}"
        return None if actual_digest == sums[name] else f"{name} is not as it was written"

    with ThreadPoolExecutor(READERS) as readers:
        problems = [text for text in readers.map(problem, sorted(sums)) if text]
    # every complete checkpoint has that line; without it the list itself is cut
    if STATE_FILE not in sums:
        problems.append(f"{SUMS_FILE} is not as it was written")
    return problems[:3] + ([f"and {len(problems) - 3} more files"] if len(problems) > 3 else [])


def checkpoint_at(source: Folder) -> Folder:
    """Return a complete checkpoint: `source` itself, or the newest one if `source` is a run's
    folder.

    Raises:
        FileNotFoundError: it is neither.
    """
    if (source / STATE_FILE).is_file():
        return source
    folder = newest_checkpoint(source)
    if folder is None and (source / "config.yaml").is_file():
        runner = config_of(source / "checkpoints/any").runner
        if elsewhere := runner.get("checkpoint_dir"):
            folder = newest_checkpoint(folder_at(elsewhere) / runner.experiment_name)
    if folder is None:
        raise FileNotFoundError(
            f"{source} is neither a complete checkpoint nor a run's folder that holds one"
        )
    return folder


def config_of(checkpoint: Folder) -> DictConfig:
    """Return the config of the run that a checkpoint is of."""
    text = (checkpoint.resolve().parents[1] / "config.yaml").read_text(encoding="utf-8")
    return cast(DictConfig, OmegaConf.create(text))


def load_state(checkpoint: Folder) -> dict[str, Any]:
    """Return the controller's part of a checkpoint; ConfigError if it can't be read."""
    try:
        return json.loads((checkpoint / STATE_FILE).read_text())
    except ValueError as error:
        raise ConfigError(
            f"runner.resume_dir: the checkpoint {checkpoint} is damaged ({STATE_FILE}: {error}); "
            "move it away or name another one"
        ) from None


def rename(path: Folder, target: Folder) -> None:
    """Rename a file or folder in the same file system: at once on a disk, by copies in a store."""
    if not (isinstance(path, UPath) and isinstance(target, UPath)):
        os.rename(str(path), str(target))
        return
    with _as_os_errors():
        files = path.fs.find(path.path)
        targets = [target.path + file.removeprefix(path.path) for file in files]
        for parent in {name.rpartition("/")[0] for name in targets}:
            path.fs.makedirs(parent, exist_ok=True)
        path.fs.copy(files, targets)
        path.fs.rm(path.path, recursive=True)


def _earlier_checkpoints(checkpoint: Folder) -> list[Folder]:
    """Return complete checkpoints of the same run and earlier steps, newest first."""
    complete = checkpoints(checkpoint.parent.parent)
    step = next((at for at, folder in complete if folder.name == checkpoint.name), 0)
    return [folder for at, folder in reversed(complete) if at < step]


def _remove(folder: Folder) -> None:
    """Delete a checkpoint if there is one. It counts as incomplete from the first moment on.

    `recover_checkpoints` deletes the remains if this is interrupted.
    """
    if isinstance(folder, Path):
        if folder.exists():
            unnamed = folder.with_name(f".{folder.name}.tmp")
            folder.rename(unnamed)
            shutil.rmtree(unnamed, ignore_errors=True)
        return
    with _as_os_errors():
        if folder.exists():
            (folder / STATE_FILE).unlink(missing_ok=True)
            folder.rmdir(recursive=True)


def _free(home: Folder) -> float:
    """Return the free bytes where checkpoints are written; infinity for a store."""
    if not isinstance(home, Path):
        return math.inf
    home.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(home).free


def _size(folder: Folder) -> int:
    """Return the bytes of the files in a folder on a disk; 0 for one in a store, where room has no
    bound."""
    if not isinstance(folder, Path):
        return 0
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
