"""rlinf_vl from Python: `train`, what is in a run's folder (`Run`), and a trained policy to ask (`load_policy`)."""

import os
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rlinf_vl.running
from rlinf_vl.code import CodeError, pickled
from rlinf_vl.config.load import parse_config
from rlinf_vl.config.schema import Config
from rlinf_vl.config.toys import TOYS
from rlinf_vl.config.validate import validate_config
from rlinf_vl.data.digest import digest
from rlinf_vl.errors import ConfigError, RunError
from rlinf_vl.observe.progress import shown_log
from rlinf_vl.observe.status import read_status
from rlinf_vl.runtime.checkpoints import checkpoint_at, config_of
from rlinf_vl.runtime.files import read_lines, write_aside
from rlinf_vl.runtime.run_folder import run_folder
from rlinf_vl.runtime.stop_request import StopRequest

if TYPE_CHECKING:
    import datasets
    import pandas

Function = Callable[..., Any] | str | Mapping[str, Any]

#: Stands for the path of rows that are given as an object, until the run's folder is known.
_GIVEN = "given"
#: runner.save_interval of a run that would save nothing: its last step is saved all the same.
_ONLY_AT_THE_END = 2**31 - 1
#: Rows that are in memory at once while a data set is written, images included.
_ROWS_AT_ONCE = 256


def train(
    config: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] | None = None,
    *,
    reward: Function | Sequence[Function] | None = None,
    env: type | str | None = None,
    train_dataset: "datasets.Dataset | Sequence[Mapping[str, Any]] | str | Path | Sequence[str | Path] | None" = None,
    val_dataset: "datasets.Dataset | Sequence[Mapping[str, Any]] | str | Path | Sequence[str | Path] | None" = None,
) -> "Run":
    """Run one experiment in this process, and show how it gets on: on a terminal, in a notebook or in a log.

    The first Ctrl-C (or "interrupt the kernel") stops the run with a checkpoint, and `Run.state` is "stopped"; `runner.resume_dir:
    auto` goes on. The second one ends it at once: KeyboardInterrupt. Ray is started once in a process: further runs use what a run,
    or a `ray.init` of your own, has started. The run's config.yaml holds what was given here, functions included.

    Args:
        config: an example's name, or the path of a YAML file.
        overrides: as on the command line (`["runner.max_steps=3"]`), or as a mapping (`{"runner.max_steps": 3}`).
        reward: what answers are worth, over the config's `reward.functions`: a function, a name that the config could have, a
            mapping {"function": either, "weight": 1.0, "kwargs": {}}; or a list of these, which are added up.
        env: a class with the methods of `rlinf_vl.envs.Env`, or a name that `rollout.env_class` could have.
        train_dataset, val_dataset: rows in any form of `data.format`, with images as PIL images, bytes or files; or what
            `data.train_data_paths` could name. Rows are written once to `datasets/` in `runner.output_dir`.

    A config that saves nothing (`runner.save_interval: -1`) saves the last step, so that there is a `Run.model_path`.

    Raises:
        ConfigError: with every mistake in what is asked.
        RunError: the run can't go on; its folder says why.
    """
    from rlinf_vl.preflight.inputs import RULES, packages_missing

    pairs: list[str | tuple[str, Any]] = []
    pairs += overrides.items() if isinstance(overrides, Mapping) else overrides or ()
    files: dict[str, str] = {}
    if env is not None:
        pairs.append(("rollout.env_class", env if isinstance(env, str) else _pickled("env", env, files)))
    if reward is not None:
        given = [reward] if isinstance(reward, str | Mapping) or callable(reward) else reward
        pairs.append(("reward.functions", [_function(one, files) for one in given]))
    rows: dict[str, Any] = {}
    for split, dataset in (("train", train_dataset), ("val", val_dataset)):
        if dataset is not None:
            paths = _paths(dataset)
            rows |= {} if paths else {split: dataset}
            pairs.append((f"data.{split}_data_paths", paths or [_GIVEN]))
    made = parse_config(str(config), pairs)
    made.runner.code_files |= files
    if made.runner.save_interval == -1:
        made.runner.save_interval = _ONLY_AT_THE_END
    named = {"train": made.data.train_data_paths, "val": made.data.val_data_paths}
    if rows and all(path in TOYS for split in named.keys() - rows for path in named[split]):
        made.data.image_root = made.data.image_root or os.getcwd()  # which paths in a program's rows are relative to
    for split, dataset in rows.items():
        named[split][:] = [_write_rows(dataset, made, split)]
    validate_config(made, (packages_missing, *RULES))
    stop = StopRequest()
    with stop.installed(), shown_log():
        stopped_by = rlinf_vl.running.train(made, stop, keep_ray=True)
    if stopped_by == signal.SIGTERM:  # which was for the whole process
        signal.raise_signal(signal.SIGTERM)
    return Run(run_folder(made), trust_run_code=True)


@dataclass(frozen=True)
class Run:
    """A run by its folder: one that `train` has returned, or any other, still going or ended.

    Attributes:
        trust_run_code: loading its model may execute the Python that its config.yaml brings along. `train` sets it, whose
            caller gave that code; a folder that came from elsewhere has it only if its reader says so.
    """

    folder: Path
    trust_run_code: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))

    @property
    def metrics(self) -> "pandas.DataFrame":
        """One row for each step (the index), one column for each metric of docs/metrics.md; NaN where a step has no such value."""
        import pandas

        path = self.folder / "metrics.jsonl"
        rows = read_lines(path)[0] if path.exists() else []
        return pandas.DataFrame(
            {row["step"]: row for row in rows}.values(), columns=None if rows else ["step"]
        ).set_index("step")

    @property
    def state(self) -> str:
        """starting, running, done, stopped, failed or gone, as in its status.json; "" if that can't be read."""
        return str(read_status(self.folder).get("state", ""))

    @property
    def model_path(self) -> Path:
        """The newest checkpoint as a folder that transformers loads, LoRA merged; written when it is first asked for.

        Raises:
            RunError: the run has no checkpoint.
            ConfigError: its folder brings Python along, and `trust_run_code` is false.
        """
        from rlinf_vl.controller.export import export_checkpoint

        try:
            checkpoint = checkpoint_at(self.folder)
        except FileNotFoundError as error:
            raise RunError(f"{error}; set runner.save_interval") from None
        path = self.folder / "models" / checkpoint.name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            with write_aside(path) as aside:
                precision = config_of(checkpoint).rollout.model.precision
                export_checkpoint(checkpoint, aside, precision, trust_run_code=self.trust_run_code)
        return path

    def report(self, *others: "Run | str | Path", output: str | Path | None = None) -> Path:
        """Write one HTML file on the run, or on several side by side, and return its path: `output`, or a name in the folder."""
        from rlinf_vl.report import build_report

        folders = [self.folder, *(Path(one.folder if isinstance(one, Run) else one) for one in others)]
        return build_report(folders, Path(output) if output is not None else None)


def _function(given: Function, files: dict[str, str]) -> dict[str, Any]:
    """An entry of `reward.functions`."""
    entry = dict(given) if isinstance(given, Mapping) else {"function": given}
    if callable(entry.get("function")):
        entry["function"] = _pickled("reward", entry["function"], files)
    return entry


def _pickled(what: str, given: Any, files: dict[str, str]) -> str:
    """The name of an object that travels in `files`."""
    try:
        name, path, text = pickled(given)
    except CodeError as error:
        raise ConfigError(f"{what}: {error}") from error
    stem, others = path.removesuffix(".pkl"), count(2)
    while files.get(path, text) != text:  # two functions may have one name
        path = f"{stem}-{next(others)}.pkl"
    files[path] = text
    return f"{path}:{name.rpartition(':')[2]}"


def _paths(dataset: Any) -> list[str]:
    """The paths that these are; none if they are rows."""
    given = [dataset] if isinstance(dataset, str | Path) else dataset
    are_paths = isinstance(given, list | tuple) and all(isinstance(one, str | Path) for one in given)
    return [str(path) for path in given] if are_paths else []


def _with_parts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same rows; in a column of chat messages, all contents are lists of parts if one is: tables mix no texts with lists."""

    def contents(cell: Any) -> list[Any]:
        return [one.get("content") for one in cell if isinstance(one, dict)] if isinstance(cell, list) else []

    mixed = {
        name for row in rows for name, cell in row.items() if any(isinstance(said, list) for said in contents(cell))
    }

    def in_parts(message: Any) -> Any:
        text = message.get("content")
        return message | {"content": [{"type": "text", "text": text}]} if isinstance(text, str) else message

    return [
        {name: list(map(in_parts, cell)) if name in mixed and contents(cell) else cell for name, cell in row.items()}
        for row in rows
    ]


def _write_rows(given: Any, config: Config, split: str) -> str:
    """Write rows as a parquet file, images included, and return its path; the same rows have the same file."""
    import datasets
    import pandas
    from datasets.table import embed_table_storage
    from pyarrow.parquet import ParquetWriter

    given = given.to_dict("records") if isinstance(given, pandas.DataFrame) else given
    if not isinstance(given, datasets.Dataset):
        if not isinstance(given, Sequence) or not all(isinstance(row, Mapping) for row in given):
            of = f"; name a split: {split}_dataset={type(given).__name__}[…]" if isinstance(given, Mapping) else ""
            known = "datasets.Dataset, DataFrame, list of dicts or path"
            raise ConfigError(f"{split}_dataset: a value of type {type(given).__name__} is no {known}{of}")
        try:
            given = datasets.Dataset.from_list(_with_parts(given))
        except Exception as error:  # Arrow's own, of many kinds
            raise ConfigError(
                f"{split}_dataset: the rows make no table ({type(error).__name__}: {error}); give all of them the same columns, "
                "with values of one type in each"
            ) from error
    if not len(given):
        raise ConfigError(f"{split}_dataset: has no rows")
    folder = run_folder(config).parent / "datasets"
    folder.mkdir(parents=True, exist_ok=True)
    for key in config.data.image_keys:
        given = _with_images(given, key)
    aside = folder / f".{uuid.uuid4().hex}.tmp"
    try:
        with ParquetWriter(aside, given.features.arrow_schema) as writer:
            for table in given.with_format("arrow").iter(_ROWS_AT_ONCE):
                writer.write_table(embed_table_storage(table))
        path = folder / f"{split}-{digest(aside)['sha256'][:12]}.parquet"
        os.replace(aside, path)
    except FileNotFoundError as error:
        raise ConfigError(f"{split}_dataset: no file {error.filename!r}, which an image names") from error
    finally:
        aside.unlink(missing_ok=True)
    return str(path)


def _with_images(rows: "datasets.Dataset", key: str) -> "datasets.Dataset":
    """The same with the files that a column names, relative to the working folder, as images; a column of anything else stays."""
    import datasets

    text, image = datasets.Value("string"), datasets.Image()
    kinds = ((text, image), (datasets.List(text), datasets.List(image)))
    wanted = next((images for texts, images in kinds if rows.features.get(key) == texts), None)
    if wanted is None:
        return rows
    named = [name for cell in rows[key] for name in (cell if isinstance(cell, list) else [cell]) if name is not None]
    return rows.cast_column(key, wanted) if named and all(map(os.path.isfile, named)) else rows
