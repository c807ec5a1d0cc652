"""What happens to a run's folder before its run: one run at a time has it, and it holds one run's history only.

A run that starts afresh finds a used folder renamed to `<experiment>.previous-1`, -2, …, as a whole. A run that resumes from
a checkpoint of the folder goes on in it; one that resumes from any other place starts a folder of its own.
"""

import fcntl
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlinf_vl.config import ConfigError, changed_keys, save_config
from rlinf_vl.config.schema import Config
from rlinf_vl.observe.lines import EventLog
from rlinf_vl.runtime.run_folder import load_state, numbered, set_newer_aside

log = logging.getLogger(__name__)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep the run's folder for this process, by a lock of the operating system on `.<experiment>.lock` beside it. It ends
    with the context, and with the process, however that ends; the file itself stays.

    Other hosts see it where the file system has locks between hosts (NFS 4, Lustre with `-o flock`, Ceph, GPFS). On one
    that has none, a warning names the run that the file names.

    Raises:
        ConfigError: another process has it, or the file can't be written.
    """
    path, here = run_dir.with_name(f".{run_dir.name}.lock"), platform.node()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"runner.output_dir: {path.parent} can't be written to ({error.strerror})") from None
    with file:
        file.seek(0)
        holder = file.read().strip()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{run_dir} is in use by another run: {holder or 'it has just started'}. Wait until that has ended, stop it, "
                "or give this one another runner.experiment_name or runner.output_dir"
            ) from None
        except OSError as error:
            log.warning("%s: this file system has no locks (%s), so nothing keeps two runs apart there", path, error)
        if holder and not holder.endswith(f" on {here}"):
            log.warning(
                "the last run of %s, %s, did not end by itself. If it still goes on, stop one of the two: this file system "
                "then has no locks between hosts",
                *(run_dir, holder),
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {here}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def open_folder(config: Config, run_dir: Path, checkpoint: Path | None) -> Path | None:
    """Make the folder ready for a run that starts from `checkpoint`, and write its `config.yaml`; returns where the checkpoint
    then is. What is set aside, and keys that are not what they were in the run that is resumed, are said in the log and
    in `events.jsonl`.

    Raises:
        ConfigError: the folder can't be renamed or written.
    """
    step = load_state(checkpoint)["step"] if checkpoint else 0
    changed = changed_keys(config, checkpoint.parents[1] / "config.yaml") if checkpoint else []
    changed = [line for line in changed if not line.startswith("runner.resume_dir:")]
    inside = None
    if checkpoint is not None and checkpoint.resolve().is_relative_to(run_dir.resolve()):
        inside = checkpoint.resolve().relative_to(run_dir.resolve())
    said = []
    try:
        if inside is not None and inside.parent == Path("checkpoints"):
            if newer := set_newer_aside(run_dir, step):
                said.append(
                    ("branch_set_aside", f"what came after step {step} is now in {newer}, checkpoints included")
                )
            if changed and (run_dir / "config.yaml").exists():
                os.rename(run_dir / "config.yaml", numbered(run_dir / "config.previous", ".yaml"))
        elif any((run_dir / name).exists() for name in ("config.yaml", "metrics.jsonl", "checkpoints")):
            aside = numbered(run_dir.with_name(f"{run_dir.name}.previous"))
            os.rename(run_dir, aside)
            said.append(("folder_set_aside", f"the run that was in {run_dir} is now in {aside}"))
            if inside is not None:
                checkpoint = aside / inside
        run_dir.mkdir(exist_ok=True)
        save_config(config, run_dir / "config.yaml")
    except OSError as error:
        raise ConfigError(f"runner.output_dir: {run_dir} can't be made ready for a run: {error}") from None
    if changed:
        said.append(("config_changed", f"keys that are not as they were: {'; '.join(changed)}"))
    events = EventLog(run_dir)
    for kind, message in said:
        events.add(step, kind, message, logging.INFO)
    return checkpoint
