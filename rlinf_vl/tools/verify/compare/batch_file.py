"""The file of a recorded batch: its schema, its checks, and the batch as tensors."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from rlinf_vl.config.algorithm_files import built_ins
from rlinf_vl.config.presets import with_presets
from rlinf_vl.config.schema import AlgorithmConfig, Limit
from rlinf_vl.errors import ConfigError, nearest

SCHEMA = "rlinf-vl-batch/1"
#: Columns of a sample by kind. A number of each token is a list as long as `response_ids`.
TOKEN_NUMBERS = (
    "logprobs",
    "old_logprobs",
    "rollout_logprobs",
    "ref_logprobs",
    "entropy",
    "ratio",
    "policy_loss",
    "kl",
    "token_loss",
)
TOKEN_FLAGS = ("response_mask", "clipped")
#: A number of each token, or one for the whole sample.
EITHER_NUMBERS = ("advantages", "weights")
SAMPLE_NUMBERS = ("reward", "group_mean", "group_std")
TEXTS = ("response", "answer", "group_id", "messages", "prompt_ids", "response_ids", "logits")
SAMPLE_KEYS = (
    *TEXTS,
    *SAMPLE_NUMBERS,
    *EITHER_NUMBERS,
    *TOKEN_FLAGS,
    *TOKEN_NUMBERS,
    "micro_batch",
)
FILE_KEYS = ("schema", "system", "dtype", "settings", "samples", "loss", "model", "grader")
DTYPES = ("float32", "bfloat16")
#: Keys of `algorithm` that a recorded batch may set: those that its columns can follow.
SETTINGS = (
    "adv_type",
    "normalize_advantages",
    "loss_type",
    "loss_agg_func",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "kl_beta",
    "kl_placement",
    "kl_penalty_type",
    "entropy_bonus",
    "old_policy",
    "importance_sampling_fix",
    "importance_sampling_clip",
    "importance_sampling_level",
)
#: Further settings, of `algorithm.sampling_params`.
SAMPLING = ("temperature", "max_new_tokens")


@dataclass
class Batch:
    """A recorded batch. Token columns are 1-D, the samples one behind the other.

    Attributes:
        columns: the recorded columns by name: `[T]` for tokens, `[N]` for samples, a scalar `loss`.
        samples: the rows as they were read.
        mask: bool `[T]`, tokens that carry loss.
        segment_ids: int64 `[T]`, the sample of each token.
        positions: int64 `[T]`, the place of each token in its sample.
        groups: the group of each sample.
        algorithm: the settings, null keys filled as in a run.
    """

    system: str
    dtype: str
    algorithm: AlgorithmConfig
    samples: list[dict[str, Any]]
    columns: dict[str, torch.Tensor]
    mask: torch.Tensor
    segment_ids: torch.Tensor
    positions: torch.Tensor
    groups: list[Any]
    token_ids: torch.Tensor
    micro_batches: list[int] | None = None
    logits: torch.Tensor | None = None
    model: str | None = None
    grader: str | None = None
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def n_samples(self) -> int:
        return len(self.samples)

    @property
    def lengths(self) -> torch.Tensor:
        """The number of tokens with loss in each sample, int64 `[N]`."""
        zeros = torch.zeros(self.n_samples, dtype=torch.int64)
        return zeros.index_add(0, self.segment_ids, self.mask.long())


def read_batch(path: Path) -> Batch:
    """Read a batch from a JSON or a Parquet file.

    Raises:
        ConfigError: the file does not follow the schema; names column, sample and shape.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; name a .json or .parquet file of one batch")
    if path.suffix == ".parquet":
        document = _parquet(path)
    else:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}: is no JSON ({error}); write it with json.dump, or as .parquet"
            ) from error
    return batch_from(document, str(path))


def _parquet(path: Path) -> dict[str, Any]:
    """Return the document of a Parquet file: a row a sample, all else in its metadata."""
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except Exception as error:  # pyarrow raises errors of many kinds for a broken file
        raise ConfigError(f"{path}: is no Parquet file ({error})") from error
    metadata = (table.schema.metadata or {}).get(b"rlinf_vl_batch")
    if metadata is None:
        raise ConfigError(
            f"{path}: has no metadata 'rlinf_vl_batch'; write the keys other than samples there, "
            "as JSON: table.replace_schema_metadata({'rlinf_vl_batch': json.dumps(…)})"
        )
    document = json.loads(metadata)
    rows = []
    for row in table.to_pylist():
        # A column that only some rows have is null in the others.
        rows.append({key: value for key, value in row.items() if value is not None})
    return document | {"samples": rows}


def batch_from(document: Any, source: str = "batch") -> Batch:
    """Return the batch of a document that was read.

    Raises:
        ConfigError: see `read_batch`.
    """
    if not isinstance(document, Mapping) or not isinstance(document.get("samples"), list):
        raise ConfigError(f"{source}: must be an object with a list 'samples', one for a response")
    if document.get("schema", SCHEMA) != SCHEMA:
        raise ConfigError(
            f"{source}: schema is {document['schema']!r}; this release reads {SCHEMA}"
        )
    _known(source, document, FILE_KEYS)
    dtype = document.get("dtype", "float32")
    if dtype not in DTYPES:
        raise ConfigError(f"{source}: dtype is {dtype!r}; it is one of {', '.join(DTYPES)}")
    samples = document["samples"]
    if not samples:
        raise ConfigError(f"{source}: samples is empty; record at least one group of responses")
    for index, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            raise ConfigError(f"{source}: samples[{index}] is no object: {sample!r:.60}")
        _known(f"{source}: samples[{index}]", sample, SAMPLE_KEYS)
    lengths = [_ids(source, index, sample) for index, sample in enumerate(samples)]
    columns = _columns(source, samples, lengths)
    mask = columns.pop("response_mask", None)
    if mask is None:
        mask = torch.ones(sum(lengths), dtype=torch.bool)
    loss = document.get("loss")
    if loss is not None:
        columns["loss"] = _numbers(source, "loss", [loss])[0]
    groups = [sample.get("group_id", 0) for sample in samples]
    present = {key for key in ("group_id", "micro_batch") if key in samples[0]}
    for key in ("group_id", "micro_batch"):
        for index, sample in enumerate(samples):
            if (key in sample) != (key in present):
                raise ConfigError(
                    f"{source}: samples[{index}]: {key} must be in all samples or none"
                )
    batch = Batch(
        system=str(document.get("system", "the other system")),
        dtype=dtype,
        algorithm=settings_of(document.get("settings", {}), source),
        samples=[dict(sample) for sample in samples],
        columns=columns,
        mask=mask,
        segment_ids=torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths)),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        groups=groups,
        token_ids=torch.tensor([i for s in samples for i in s["response_ids"]], dtype=torch.int64),
        micro_batches=[s["micro_batch"] for s in samples] if "micro_batch" in present else None,
        logits=_logits(source, samples, lengths),
        model=document.get("model"),
        grader=document.get("grader"),
    )
    if "group_id" not in present:
        batch.skipped["advantages"] = "no group_id"
    return batch


def settings_of(settings: Any, source: str = "batch") -> AlgorithmConfig:
    """Return the settings of a batch as `algorithm.*`, null keys filled as in a run.

    Raises:
        ConfigError: an unknown key or a value of the wrong type.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{source}: settings must be an object of keys of algorithm")
    settings = {key.removeprefix("algorithm."): value for key, value in settings.items()}
    algorithm = AlgorithmConfig(importance_sampling_fix=False)
    schema_fields = {item.name: item for item in fields(AlgorithmConfig)}
    for key, value in settings.items():
        name = key.removeprefix("sampling_params.")
        if name in SAMPLING:
            setattr(algorithm.sampling_params, name, value)
            continue
        if key not in SETTINGS:
            raise ConfigError(
                f"{source}: settings.{key}: is none of {', '.join((*SETTINGS, *SAMPLING))};"
                f"{nearest(key, (*SETTINGS, *SAMPLING))}".rstrip(";")
            )
        allowed = schema_fields[key].metadata.get("allowed")
        if isinstance(allowed, tuple) and value is not None and value not in allowed:
            raise ConfigError(
                f"{source}: settings.{key}: {value!r} is none of {', '.join(map(str, allowed))}"
            )
        if (
            isinstance(allowed, Limit)
            and value is not None
            and (isinstance(value, bool | str) or not allowed.holds(value))
        ):
            raise ConfigError(f"{source}: settings.{key}: {value!r} must {allowed.must}")
        setattr(algorithm, key, value)
    for key, folder in (("adv_type", "estimators"), ("loss_type", "losses")):
        if (name := getattr(algorithm, key)) not in built_ins(folder):
            raise ConfigError(
                f"{source}: settings.{key}: {name!r} is none of {', '.join(built_ins(folder))}"
            )
    if algorithm.old_policy == "interpolated":
        raise ConfigError(
            f"{source}: settings.old_policy: interpolated needs the version of each token, which "
            "the file can't hold; record old_logprobs as they were used, and write start"
        )
    return with_presets(algorithm)


def _known(place: str, document: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in document:
        if key not in keys:
            raise ConfigError(
                f"{place}: unknown key {key!r};{nearest(key, keys)} there are {', '.join(keys)}"
            )


def _ids(source: str, index: int, sample: Mapping[str, Any]) -> int:
    """Return the number of a sample's response tokens."""
    ids = sample.get("response_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise ConfigError(
            f"{source}: samples[{index}].response_ids must be a list of token ids, without padding"
        )
    return len(ids)


def _columns(
    source: str, samples: Sequence[Mapping[str, Any]], lengths: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the numbers of all samples by column."""
    columns: dict[str, torch.Tensor] = {}
    for name in (*TOKEN_NUMBERS, *TOKEN_FLAGS, *EITHER_NUMBERS, *SAMPLE_NUMBERS):
        rows = [sample.get(name) for sample in samples]
        absent = [index for index, row in enumerate(rows) if row is None]
        if len(absent) == len(rows):
            continue
        if absent:
            raise ConfigError(
                f"{source}: samples[{absent[0]}].{name} is missing, but other samples have it; "
                "record it for all, or for none"
            )
        flat: list[Any] = []
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            place = f"samples[{index}].{name}"
            if name in SAMPLE_NUMBERS:
                row, length = [row], 1
            elif name in EITHER_NUMBERS and not isinstance(row, list):
                row = [row] * length
            if not isinstance(row, list) or len(row) != length:
                shape = f"[{len(row)}]" if isinstance(row, list) else type(row).__name__
                raise ConfigError(
                    f"{source}: {place} has shape {shape}, response_ids [{length}]; write one value "
                    "for each token of response_ids, without padding"
                )
            flat += _numbers(source, place, row).tolist()
        if name in TOKEN_FLAGS:
            columns[name] = torch.tensor(flat) != 0
        else:
            columns[name] = torch.tensor(flat, dtype=torch.float64)
    return columns


def _numbers(source: str, place: str, values: Iterable[Any]) -> torch.Tensor:
    """Return finite numbers as float64."""
    numbers = []
    for index, value in enumerate(values):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(
                f"{source}: {place}: value {index} is {value!r}; it must be a finite number (mask "
                "tokens out with response_mask, and write 0 there)"
            )
        numbers.append(float(value))
    return torch.tensor(numbers, dtype=torch.float64)


def _logits(
    source: str, samples: Sequence[Mapping[str, Any]], lengths: Sequence[int]
) -> torch.Tensor | None:
    """Return the logits `[T, V]` before temperature, if the samples have them."""
    if "logits" not in samples[0]:
        return None
    try:
        rows = [torch.tensor(sample["logits"], dtype=torch.float64) for sample in samples]
        logits = torch.cat(rows)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"{source}: samples[…].logits must be a list [tokens][vocabulary] of every sample: {error}"
        ) from error
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row.ndim != 2 or len(row) != length:
            raise ConfigError(
                f"{source}: samples[{index}].logits has shape {list(row.shape)}, response_ids "
                f"[{length}]; write the row of logits that each token was drawn from"
            )
    return logits
