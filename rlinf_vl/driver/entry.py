"""One training run or one evaluation, from a validated config to the end. The command line and the
Python interface share it.

torch and Ray are imported when the config, the folder and the machine have been checked.
"""

import gc
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from rlinf_vl.config import Config, save_config
from rlinf_vl.config.parts import load_part
from rlinf_vl.config.toys import TOYS, model_folder
from rlinf_vl.data.digest import write_digests
from rlinf_vl.errors import ConfigError, RunError, reason_of, without_colors
from rlinf_vl.observe.lines import EventLog
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.observe.spans import FOLDER as SPANS
from rlinf_vl.observe.spans import record_spans
from rlinf_vl.observe.status import StatusFile, write_environment
from rlinf_vl.runtime import run_folder as folders
from rlinf_vl.runtime.checkpoints import (
    Folder,
    checkpoint_home,
    find_checkpoint,
    load_state,
    recover_checkpoints,
)
from rlinf_vl.runtime.stop_request import Interrupted, StopRequest

log = logging.getLogger("rlinf_vl")

#: Metrics of the last step that a run's last words have.
LAST_FIGURES = ("reward/mean", "val/loss", "val/accuracy")


def launch_training(
    config: Config, stop_request: StopRequest, keep_ray: bool = False
) -> int | None:
    """Train in the config's folder, from the checkpoint that `runner.resume_dir` names there;
    returns the signal that stopped the run, or None.

    Args:
        keep_ray: see `ray_cluster`.

    Raises:
        ConfigError, RunError: the run can't begin, or can't go on.
        KeyboardInterrupt: a signal ended the run at once.
    """
    run_dir = folders.run_folder(config)
    # Absolute, as actors have other working folders.
    config.runner.output_dir = str(run_dir.parent)
    with folders.locked(run_dir):
        home = checkpoint_home(config, run_dir)
        recover_checkpoints(home)
        checkpoint = find_checkpoint(home, config.runner.resume_dir)
        if checkpoint and config.runner.max_steps >= 0:
            step = load_state(checkpoint)["step"]
            if step >= config.runner.max_steps:
                log.info(
                    "nothing left: step %d of %d; raise runner.max_steps",
                    step,
                    config.runner.max_steps,
                )
                return None
        load_part("refuse-machine")(config)
        # Before the folder is opened: a start that fails here takes no run's name. A local run is
        # soon at its first step, and a breakpoint would stop in the rehearsal's threads.
        if config.cluster.backend == "ray":
            log.info(rehearse(config))
        events = EventLog(run_dir)
        checkpoint = folders.open_folder(
            config, run_dir, checkpoint, partial(events.add, level=logging.INFO)
        )
        with explained(run_dir):
            return _run(config, run_dir, checkpoint, stop_request, keep_ray)


def rehearse(config: Config) -> str:
    """Try rows, reward, environment and the user's loss and advantage in this process; returns the
    line that says the run is ready.

    Raises:
        ConfigError: the run would have failed, for the same reason.
    """
    start = time.perf_counter()
    # These parts take seconds to import: torch and transformers.
    if problems := list(load_part("algorithm-problems")(config)):
        raise ConfigError(*problems)
    if config.data.messages_key is not None:
        line = load_part("rehearse-imitation")(config, prepare_toys(config))
    else:
        line = load_part("rehearse")(config, prepare_toys(config)).line
    return f"{line} ({time.perf_counter() - start:.0f} s)"


@contextmanager
def explained(run_dir: Path) -> Iterator[None]:
    """Write the traceback of an unexpected error into the run's folder, and raise a RunError with
    its reason."""
    try:
        yield
    except (ConfigError, RunError):
        raise
    except Exception as error:
        path = run_dir / "error.txt"
        try:
            path.write_text(
                without_colors("".join(traceback.format_exception(error))), encoding="utf-8"
            )
        except OSError:
            # Without the file the traceback must go to the terminal.
            raise error from None
        raise RunError(f"{reason_of(error)}\nThe whole of it is in {path}") from error


def _run(
    config: Config,
    run_dir: Path,
    checkpoint: Folder | None,
    stop_request: StopRequest,
    keep_ray: bool,
) -> int | None:
    """Train in a folder that is ready, from a checkpoint or from the start."""
    # After the config is known to be valid: these imports and the toy's warm start take seconds.
    from rlinf_vl.driver.backends import parts_of
    from rlinf_vl.driver.supervise import supervise
    from rlinf_vl.runtime.loading import freeze_loaded

    if config.data.messages_key is not None:
        supervise = load_part("imitate")
    model_path = prepare_toys(config)
    # In a thread, as reading large data takes minutes; a daemon, as the run's end need not wait for
    # it.
    threading.Thread(
        target=write_digests, args=(run_dir, _data_files(config)), name="digests", daemon=True
    ).start()
    start = time.monotonic()
    stopped_by: int | None = None
    metrics: dict[str, float] = {}
    with (
        _report_at_end(run_dir),
        recorded(run_dir) as progress,
        parts_of(config, model_path, run_dir, progress, stop_request, keep_ray=keep_ray) as parts,
    ):
        save_config(config, run_dir / "config.yaml")  # with what was settled
        freeze_loaded()
        try:
            metrics = supervise(parts, checkpoint)
        except Interrupted as stop:
            # It has saved, so this is an end like another, with an exit code of its own.
            stopped_by, progress.end, progress.reason = stop.number, "stopped", str(stop)
        finally:
            # A notebook goes on after the run.
            gc.unfreeze()
    log.info("%.0f s from the start of its processes to their end", time.monotonic() - start)
    log.info(
        "done: %s",
        ", ".join(f"{k} {v:.4g}" for k, v in metrics.items() if k in LAST_FIGURES),
    )
    log.info("the run is in %s", run_dir)
    return stopped_by


@contextmanager
def recorded(run_dir: Path) -> Iterator[RunProgress]:
    """Yield the progress display. From then on `run_dir` has the description of the environment and
    the spans of all processes."""
    (run_dir / SPANS).mkdir(exist_ok=True)
    write_environment(run_dir)
    with RunProgress(StatusFile(run_dir)) as progress:
        record_spans(run_dir, "controller")
        yield progress


@contextmanager
def _report_at_end(run_dir: Path) -> Iterator[None]:
    """Make the run's report when it has ended or failed; not if the user ends it at once (Ctrl-C
    twice)."""
    try:
        yield
    finally:
        if (
            not isinstance(sys.exception(), KeyboardInterrupt)
            and (run_dir / "metrics.jsonl").exists()
        ):
            try:
                log.info("the report: %s", load_part("report")([run_dir]))
            # A run whose report fails has been trained all the same.
            except Exception as error:
                log.warning("no report could be made of %s: %r", run_dir, error)


def _data_files(config: Config) -> dict[str, dict[str, Path]]:
    """Return the files of the data, by split and entry of its paths."""

    def path_of(entry: str, split: Literal["train", "val"]) -> Path:
        return load_part("toy-data")(split, entry) if entry in TOYS else Path(entry)

    data = config.data
    train = {entry: path_of(entry, "train") for entry in data.train_data_paths}
    val = {entry: path_of(entry, "val") for entry in data.val_data_paths}
    return {"train": train, "val": val}


def prepare_toys(config: Config) -> str:
    """Make the data and checkpoint of the embedded tasks that the config names; returns the model's
    path."""
    for path in TOYS.keys() & {*config.data.train_data_paths, *config.data.val_data_paths}:
        for split in ("train", "val"):
            load_part("toy-data")(split, path)
    return model_folder(config.rollout.model.model_path)
