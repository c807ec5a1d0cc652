"""The Python interface: `train`, `sft`, and `Run`, which reads a run's folder."""

import os
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import rlinf_vl.driver.entry
from rlinf_vl.config.imitation import imitation_problems, sampled_problems, set_imitation
from rlinf_vl.config.load import parse_config
from rlinf_vl.config.parts import load_part
from rlinf_vl.config.schema import Config
from rlinf_vl.config.toys import TOYS
from rlinf_vl.config.validate import Rule, validate_config
from rlinf_vl.data.digest import digest
from rlinf_vl.errors import ConfigError, RunError
from rlinf_vl.observe.progress import shown_log
from rlinf_vl.observe.status import read_status
from rlinf_vl.runtime.checkpoints import checkpoint_at, config_of
from rlinf_vl.runtime.files import read_lines, write_aside
from rlinf_vl.runtime.run_folder import run_folder
from rlinf_vl.runtime.stop_request import StopRequest
from rlinf_vl.user_code import CodeError, pickled

if TYPE_CHECKING:
    import datasets
    import pandas

Function = Callable[..., Any] | str | Mapping[str, Any]
Rows: TypeAlias = (
    "datasets.Dataset | Sequence[Mapping[str, Any]] | str | Path | Sequence[str | Path] | None"
)

#: Placeholder in data.*_data_paths for rows that the caller passes, until they are written to a
#: file.
_PASSED_ROWS = "given"
#: runner.save_interval of a run that would save nothing: only its last step is saved.
_ONLY_AT_THE_END = 2**31 - 1
#: Rows in memory at once while a data set is written, images included.
_ROWS_AT_ONCE = 256


def train(
    config: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] | None = None,
    *,
    reward: Function | Sequence[Function] | None = None,
    env: type | str | None = None,
    train_dataset: Rows = None,
    val_dataset: Rows = None,
) -> "Run":
    """Run one experiment in this process, and show its progress: on a terminal, in a notebook or in
    a log.

    The first Ctrl-C (or "interrupt the kernel") stops the run with a checkpoint, and `Run.state` is
    "stopped"; `runner.resume_dir: auto` resumes it. The second one ends it at once with
    KeyboardInterrupt. Ray is started once in a process: further runs use the one that a run, or a
    `ray.init` of your own, has started. The run's config.yaml has all arguments, functions
    included.

    A config that saves nothing (`runner.save_interval: -1`) saves the last step, so that there is a
    `Run.model_path`.

    Args:
        config: an example's name, or the path of a YAML file.
        overrides: as on the command line (`["runner.max_steps=3"]`), or as a mapping
            (`{"runner.max_steps": 3}`).
        reward: the reward of an answer, instead of the config's `reward.functions`: a function, a
            name that the config could have, a mapping {"function": either, "weight": 1.0, "kwargs":
            {}}; or a list of these, which are added up.
        env: a class with the methods of `rlinf_vl.envs.Env`, or a name that `rollout.env_class`
            could have.
        train_dataset, val_dataset: rows in any form of `data.format`, with images as PIL images,
            bytes or files; or paths that `data.train_data_paths` could have. Rows are written once
            to `datasets/` in `runner.output_dir`.

    Raises:
        ConfigError: with every mistake in the arguments and the config.
        RunError: the run can't go on; its folder has the reason.
    """
    all_overrides = _override_list(overrides)
    code_files: dict[str, str] = {}
    if env is not None:
        env_name = env if isinstance(env, str) else _pickled("env", env, code_files)
        all_overrides.append(("rollout.env_class", env_name))
    all_overrides += _reward_overrides(reward, code_files)
    return _launch(
        str(config),
        all_overrides,
        code_files,
        train_dataset,
        val_dataset,
        rules=[sampled_problems],
    )


def sft(
    config: str | Path,
    overrides: Sequence[str] | Mapping[str, Any] | None = None,
    *,
    reward: Function | Sequence[Function] | None = None,
    train_dataset: Rows = None,
    val_dataset: Rows = None,
) -> "Run":
    """Train on conversations (`rlinf-vl sft`) in this process, as `train` trains by rewards.

    Args:
        config, overrides: as `train`'s.
        reward: grades the answers that `data.sample_val` samples, as `train`'s.
        train_dataset, val_dataset: rows with a conversation each (docs/sft.md), or paths.

    Raises:
        ConfigError, RunError: as `train`.
    """
    code_files: dict[str, str] = {}
    all_overrides = [*_override_list(overrides), *_reward_overrides(reward, code_files)]
    return _launch(
        str(config),
        all_overrides,
        code_files,
        train_dataset,
        val_dataset,
        rules=[imitation_problems],
        prepare=set_imitation,
    )


def _override_list(
    overrides: Sequence[str] | Mapping[str, Any] | None,
) -> list[str | tuple[str, Any]]:
    return [*(overrides.items() if isinstance(overrides, Mapping) else overrides or ())]


def _reward_overrides(
    reward: Function | Sequence[Function] | None, code_files: dict[str, str]
) -> list[tuple[str, Any]]:
    """Return the override of `reward.functions`, if any; code goes to `code_files`."""
    if reward is None:
        return []
    functions = [reward] if isinstance(reward, str | Mapping) or callable(reward) else reward
    entries = [_reward_entry(function, code_files) for function in functions]
    return [("reward.functions", entries)]


def _launch(
    config: str,
    overrides: list[str | tuple[str, Any]],
    code_files: Mapping[str, str],
    train_dataset: Rows,
    val_dataset: Rows,
    rules: Sequence[Rule],
    prepare: Callable[[Config], None] = lambda config: None,
) -> "Run":
    """Run one experiment. `rules` judge its config beside those of every run, and `prepare` changes
    it before."""
    passed_rows: dict[str, Any] = {}
    for split, dataset in (("train", train_dataset), ("val", val_dataset)):
        if dataset is not None:
            paths = _paths(dataset)
            passed_rows |= {} if paths else {split: dataset}
            overrides.append((f"data.{split}_data_paths", paths or [_PASSED_ROWS]))
    run_config = parse_config(config, overrides)
    prepare(run_config)
    run_config.runner.code_files |= code_files
    if run_config.runner.save_interval == -1:
        run_config.runner.save_interval = _ONLY_AT_THE_END
    data_paths = {"train": run_config.data.train_data_paths, "val": run_config.data.val_data_paths}
    # Image paths in a program's rows are relative to its working folder; those in files, to the
    # file. One root serves both only if no file of the user is among the data: embedded tasks have
    # none.
    other_paths = [path for split in data_paths.keys() - passed_rows for path in data_paths[split]]
    if passed_rows and all(path in TOYS for path in other_paths):
        run_config.data.image_root = run_config.data.image_root or os.getcwd()
    for split, dataset in passed_rows.items():
        data_paths[split][:] = [_write_rows(dataset, run_config, split)]
    validate_config(run_config, (*rules, *load_part("start-rules")))
    stop = StopRequest()
    with stop.installed(), shown_log():
        stopped_by = rlinf_vl.driver.entry.launch_training(run_config, stop, keep_ray=True)
    # SIGTERM was meant for the whole process, of which the run was a part.
    if stopped_by == signal.SIGTERM:
        signal.raise_signal(signal.SIGTERM)
    return Run(run_folder(run_config), trust_run_code=True)


@dataclass(frozen=True)
class Run:
    """A run by its folder: one that `train` has returned, or any other, running or ended.

    Attributes:
        trust_run_code: loading the run's model may execute the Python that its config.yaml brings
            along. `train` sets it, as its caller passed that code; for a folder from elsewhere the
            reader must set it.
    """

    folder: Path
    trust_run_code: bool = False

    def __post_init__(self) -> None:
        # A frozen dataclass has no other way; callers may pass a text.
        object.__setattr__(self, "folder", Path(self.folder))

    @property
    def metrics(self) -> "pandas.DataFrame":
        """The metrics: one row for each step (the index), one column for each metric of
        docs/metrics.md; NaN where a step has no such value."""
        import pandas

        path = self.folder / "metrics.jsonl"
        rows = read_lines(path)[0] if path.exists() else []
        return pandas.DataFrame(
            {row["step"]: row for row in rows}.values(), columns=None if rows else ["step"]
        ).set_index("step")

    @property
    def state(self) -> str:
        """The state in status.json: starting, running, done, stopped, failed or gone; "" if that
        can't be read."""
        return str(read_status(self.folder).get("state", ""))

    @property
    def model_path(self) -> Path:
        """The newest checkpoint as a folder that transformers loads, LoRA merged; written at the
        first access.

        Raises:
            RunError: the run has no checkpoint.
            ConfigError: the run's folder brings Python along, and `trust_run_code` is false.
        """
        try:
            checkpoint = checkpoint_at(self.folder)
        except FileNotFoundError as error:
            raise RunError(f"{error}; set runner.save_interval") from None
        path = self.folder / "models" / checkpoint.name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            # Written aside and renamed: a folder of this name is always complete.
            with write_aside(path) as aside:
                precision = config_of(checkpoint).rollout.model.precision
                load_part("export-checkpoint")(
                    checkpoint, aside, precision, trust_run_code=self.trust_run_code
                )
        return path

    def report(self, *others: "Run | str | Path", output: str | Path | None = None) -> Path:
        """Write one HTML file on the run, or on several side by side, and return its path:
        `output`, or report.html in the run's folder."""
        folders = [
            self.folder,
            *(Path(run.folder if isinstance(run, Run) else run) for run in others),
        ]
        return load_part("report")(folders, Path(output) if output is not None else None)


def _reward_entry(function: Function, code_files: dict[str, str]) -> dict[str, Any]:
    """Return an entry of `reward.functions`; code that it needs is added to `code_files`."""
    entry = dict(function) if isinstance(function, Mapping) else {"function": function}
    if callable(entry.get("function")):
        entry["function"] = _pickled("reward", entry["function"], code_files)
    return entry


def _pickled(argument: str, code: Any, code_files: dict[str, str]) -> str:
    """Pickle a function or class into `code_files`, and return the name by which a config refers to
    it. `argument` names it in messages."""
    try:
        name, path, text = pickled(code)
    except CodeError as error:
        raise ConfigError(f"{argument}: {error}") from error
    stem, numbers = path.removesuffix(".pkl"), count(2)
    # Two functions may have one name.
    while code_files.get(path, text) != text:
        path = f"{stem}-{next(numbers)}.pkl"
    code_files[path] = text
    return f"{path}:{name.rpartition(':')[2]}"


def _paths(dataset: Any) -> list[str]:
    """Return the paths in a data set argument; none if it consists of rows."""
    entries = [dataset] if isinstance(dataset, str | Path) else dataset
    are_paths = isinstance(entries, list | tuple) and all(
        isinstance(entry, str | Path) for entry in entries
    )
    return [str(path) for path in entries] if are_paths else []


def _with_parts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows such that in a column of chat messages all contents are lists of parts if one
    of them is: the columns of a table can't mix texts with lists."""

    def contents(cell: Any) -> list[Any]:
        if not isinstance(cell, list):
            return []
        return [message.get("content") for message in cell if isinstance(message, dict)]

    def in_parts(message: Any) -> Any:
        text = message.get("content")
        return (
            message | {"content": [{"type": "text", "text": text}]}
            if isinstance(text, str)
            else message
        )

    columns_with_parts = set()
    for row in rows:
        for name, cell in row.items():
            if any(isinstance(content, list) for content in contents(cell)):
                columns_with_parts.add(name)
    converted = []
    for row in rows:
        cells = dict(row)
        for name in columns_with_parts & cells.keys():
            if contents(cells[name]):
                cells[name] = list(map(in_parts, cells[name]))
        converted.append(cells)
    return converted


def _write_rows(dataset: Any, config: Config, split: str) -> str:
    """Write rows as a parquet file, images included, and return its path; the same rows have the
    same file."""
    import datasets
    import pandas
    from datasets.table import embed_table_storage
    from pyarrow.parquet import ParquetWriter

    dataset = dataset.to_dict("records") if isinstance(dataset, pandas.DataFrame) else dataset
    if not isinstance(dataset, datasets.Dataset):
        if not isinstance(dataset, Sequence) or not all(
            isinstance(row, Mapping) for row in dataset
        ):
            type_name = type(dataset).__name__
            # A DatasetDict of the hub's library, before one has chosen a split.
            hint = (
                f"; name a split: {split}_dataset={type_name}[…]"
                if isinstance(dataset, Mapping)
                else ""
            )
            expected = "datasets.Dataset, DataFrame, list of dicts or path"
            raise ConfigError(
                f"{split}_dataset: a value of type {type_name} is no {expected}{hint}"
            )
        try:
            dataset = datasets.Dataset.from_list(_with_parts(dataset))
        # Arrow raises errors of many types for rows that fit no table.
        except Exception as error:
            raise ConfigError(
                f"{split}_dataset: the rows make no table ({type(error).__name__}: {error}); give "
                "all of them the same columns, with values of one type in each"
            ) from error
    if not len(dataset):
        raise ConfigError(f"{split}_dataset: has no rows")
    folder = run_folder(config).parent / "datasets"
    folder.mkdir(parents=True, exist_ok=True)
    for key in config.data.image_keys:
        dataset = _with_images(dataset, key)
    # The file is named by its digest, which is known when it is written.
    aside = folder / f".{uuid.uuid4().hex}.tmp"
    try:
        with ParquetWriter(aside, dataset.features.arrow_schema) as writer:
            for table in dataset.with_format("arrow").iter(_ROWS_AT_ONCE):
                writer.write_table(embed_table_storage(table))
        path = folder / f"{split}-{digest(aside)['sha256'][:12]}.parquet"
        os.replace(aside, path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{split}_dataset: no file {error.filename!r}, which an image names"
        ) from error
    finally:
        aside.unlink(missing_ok=True)
    return str(path)


def _with_images(rows: "datasets.Dataset", key: str) -> "datasets.Dataset":
    """Return the rows with a column of files, relative to the working folder, as images; a column
    of anything else stays."""
    import datasets

    text, image = datasets.Value("string"), datasets.Image()
    kinds = [(text, image), (datasets.List(text), datasets.List(image))]
    image_type = next((images for texts, images in kinds if rows.features.get(key) == texts), None)
    if image_type is None:
        return rows
    files = []
    for cell in rows[key]:
        files += [name for name in (cell if isinstance(cell, list) else [cell]) if name is not None]
    # Texts that are no files may be URLs or base64, which `rlinf_vl.data.images` reads.
    return rows.cast_column(key, image_type) if files and all(map(os.path.isfile, files)) else rows
