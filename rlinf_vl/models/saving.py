"""Writing models in HF format, weight by weight."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rlinf_vl.models.family import Family
from rlinf_vl.models.loading import saved_buffers
from rlinf_vl.models.partial import weight_groups

#: Bytes after which a file of weights is written, as on the hub. Weights wait for it in memory.
MAX_FILE_BYTES = 5 * 10**9

Weights = Iterable[tuple[str, torch.Tensor]]


class WeightFiles:
    """Weights that are added one after another, in safetensors files and their index.

    A file exceeds `max_bytes` only if one weight does.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._names_by_file: list[list[str]] = []
        self._bytes = 0

    def add(self, name: str, value: torch.Tensor) -> None:
        """Add a weight, which may be written later."""
        if self._pending and self._pending_bytes + value.nbytes > self._max_bytes:
            self._write()
        self._pending[name] = value.contiguous()
        self._pending_bytes += value.nbytes

    def close(self, parameters: int) -> None:
        """Write what is left, and the index if there are several files.

        `parameters`: the number in the model, for the index.
        """
        self._write()
        n = len(self._names_by_file)
        if n == 1:
            (self._folder / _part(1)).replace(self._folder / SAFE_WEIGHTS_NAME)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._names_by_file, 1):
            file = SAFE_WEIGHTS_NAME.replace(".", f"-{number:05d}-of-{n:05d}.")
            (self._folder / _part(number)).replace(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        metadata = {"total_parameters": parameters, "total_size": self._bytes}
        index = {"metadata": metadata, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True)
        (self._folder / SAFE_WEIGHTS_INDEX_NAME).write_text(f"{text}\n")

    def _write(self) -> None:
        self._names_by_file.append(list(self._pending))
        file = self._folder / _part(len(self._names_by_file))
        save_file(self._pending, file, {"format": "pt"})
        file.chmod((self._folder / "config.json").stat().st_mode)  # only its owner could read it
        self._bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0


def _part(number: int) -> str:
    """Return the name of a file while the number of all files is not known."""
    return f"{SAFE_WEIGHTS_NAME}.part{number}"


def save_model(
    model: PreTrainedModel,
    family: Family,
    folder: Path,
    carried: Weights = (),
    *,
    read: Callable[[Sequence[str]], Weights] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write weights and config in HF format, as both transformers and SGLang load it.

    Names and layouts are those of `Family.engine_names`. transformers recognises layouts by their
    shape, so a square matrix stays in its own layout: SGLang would read that transposed.

    Args:
        carried: further weights, written as they are (`carried_weights`).
        read: yields the values of parameters of these names; None: they are the model's own. It is
            called for one group of `weight_groups` after another.
        max_file_bytes: size of a file.
    """

    def read_own(names: Sequence[str]) -> Weights:
        return [(name, model.get_parameter(name).detach()) for name in names]

    read = read or read_own
    for part, keys in family.engine_config(model.config).items():
        getattr(model.config, part).update(keys)
    # transformers writes the config, and an empty file of weights, which is replaced.
    model.save_pretrained(folder, state_dict={})
    files = WeightFiles(folder, max_file_bytes)
    for name, value in carried:
        files.add(name, value)
    for names in _groups(model, family):
        for name, value in _converted(model, family, read(names)):
            files.add(name, value)
    for name, value in _converted(model, family, saved_buffers(model).items()):
        files.add(name, value)
    files.close(model.num_parameters())


def _groups(model: PreTrainedModel, family: Family) -> list[list[str]]:
    """Return the names of all parameters in groups that can be converted alone."""
    groups = weight_groups(model, family)
    if not family.exports_original_format:
        return groups
    shapes = {
        name: torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        for name, weight in model.named_parameters()
    }
    # A conversion may need weights of several blocks.
    by_group: list[tuple[str, torch.Tensor]] = []
    for names in groups:
        converted = revert_weight_conversion(model, {name: shapes[name] for name in names})
        by_group.extend(converted.items())
    at_once = revert_weight_conversion(model, shapes).items()
    if sorted((n, x.shape) for n, x in by_group) == sorted((n, x.shape) for n, x in at_once):
        return groups
    return [[*shapes]]


def _converted(model: PreTrainedModel, family: Family, weights: Weights) -> Weights:
    """Yield weights by the names and in the layouts in which they are stored."""
    if family.exports_original_format:
        yield from revert_weight_conversion(model, dict(weights)).items()
        return
    for name, weight in weights:
        for engine_name, value in family.engine_names(name, weight):
            yield engine_name, weight if value.shape == weight.shape else value
