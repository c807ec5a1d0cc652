"""A checkpoint of a run → a Hugging Face model folder, with tokenizer, chat template and image
processor files; or its adapters."""

import io
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from transformers import PreTrainedModel

from rlinf_vl.actor.checkpoint import WeightReader, load_weights_only
from rlinf_vl.config.schema import VlmConfig
from rlinf_vl.config.toys import model_folder
from rlinf_vl.errors import ConfigError, RunError
from rlinf_vl.extras.export.run_code import refuse_code_of_run
from rlinf_vl.models.families import family_of
from rlinf_vl.models.family import Family
from rlinf_vl.models.loading import (
    DTYPES,
    carried_weights,
    cast_model,
    copy_processor_files,
    float32_in_checkpoint,
    load_model,
    saved_buffers,
)
from rlinf_vl.models.lora import (
    ADAPTER,
    LoraSettings,
    add_adapters,
    is_adapter,
    merge_adapters,
    remove_wrappers,
    unwrapped_name,
    with_adapter,
)
from rlinf_vl.models.partial import load_skeleton, load_weights, replace_parameters
from rlinf_vl.models.saving import MAX_FILE_BYTES, save_model
from rlinf_vl.runtime.checkpoints import ACTOR_FOLDER, Folder, checkpoint_at, config_of, damage

log = logging.getLogger(__name__)


class Origin(NamedTuple):
    """A checkpoint of a run, and the model that the run began with."""

    folder: Folder  # global_step_N
    family: Family
    base: str  # folder or hub name of that model
    config: DictConfig  # the run's

    @property
    def lora(self) -> LoraSettings | None:
        """The settings of the adapters that the run trained; None if it trained none."""
        return self.config.actor.model.lora if self.config.actor.model.is_lora else None

    @property
    def is_quantized(self) -> bool:
        """Whether the adapters belong to quantized weights."""
        return self.lora is not None and self.lora.quantization != "none"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model is loaded: float32 unless it is quantized.

        Adapters belong to the weights that were quantized from the dtype that the trainer loaded.
        """
        precision = self.config.actor.fsdp_config.mixed_precision
        return DTYPES[precision.param_dtype if self.is_quantized else "fp32"]

    @property
    def trust_remote_code(self) -> bool:
        return self.config.rollout.model.trust_remote_code

    @property
    def weights_folder(self) -> str:
        return str(self.folder / ACTOR_FOLDER)


class Restored(NamedTuple):
    """The model of a checkpoint, float32 unless it is quantized, with its adapters; and its
    origin."""

    model: PreTrainedModel
    family: Family
    base: str  # folder or hub name of the model that the run began with
    config: DictConfig  # the run's


def origin_of(source: Folder, trust_run_code: bool = False) -> Origin:
    """Verify a checkpoint, and return it with its origin. Arguments and errors as `restore`."""
    folder = checkpoint_at(source)
    if problems := damage(folder):
        raise RunError(
            f"the checkpoint {folder} is damaged ({'; '.join(problems)}); name another one of "
            f"{folder.parent}"
        )
    config = config_of(folder)
    refuse_code_of_run(config, folder.resolve().parents[1], trust_run_code)
    refuse_pickled_code(folder / ACTOR_FOLDER)
    model_config = config.rollout.model
    path = model_folder(model_config.model_path)
    vlm = VlmConfig(**(OmegaConf.select(config, "actor.model.vlm") or {}))
    files = dict(OmegaConf.select(config, "runner.code_files") or {})
    trust = model_config.trust_remote_code
    family = family_of(model_config.model_type, path, trust, vlm.paths, files)
    return Origin(folder, family, path, config)


def restore(source: Folder, trust_run_code: bool = False) -> Restored:
    """Load a checkpoint's model on the CPU, whole.

    Args:
        source: a run's folder, which stands for its newest complete checkpoint, or one of its
            checkpoints/global_step_N.
        trust_run_code: execute the Python that the folder's config.yaml brings along or names.

    Raises:
        ConfigError: there is such Python, and `trust_run_code` is false.
        FileNotFoundError: the folder has no complete checkpoint.
        RunError: files of the checkpoint are not as they were written.
    """
    return _restore(origin_of(source, trust_run_code))


def _restore(origin: Origin) -> Restored:
    _, family, base, config = origin
    model = load_model(base, family, origin.dtype, trust_remote_code=origin.trust_remote_code)
    if origin.lora:
        add_adapters(model, family, origin.lora)
    load_weights_only(origin.weights_folder, model)
    return Restored(model, family, base, config)


#: Classes of the objects in a checkpoint's metadata, by module.
METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"}
    | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
}


def _enum_member(kind: Any, name: Any) -> Enum:
    """Return the member of an enumeration that has this name: no other attribute of anything."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise RunError("it would run builtins.getattr, which no checkpoint of a run needs")
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that knows the classes of a checkpoint's metadata and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            # Python 3.11.0 to 3.11.3 pickle a member of an enumeration so.
            return _enum_member
        if name not in METADATA_CLASSES.get(module, ()):
            raise RunError(f"it would run {module}.{name}, which no checkpoint of a run needs")
        return super().find_class(module, name)


def refuse_pickled_code(folder: Folder) -> None:
    """Refuse the weights of a checkpoint whose pickled metadata would execute code when PyTorch
    reads them.

    Raises:
        RunError: its `.metadata` names anything but the classes that a run writes, or stores a
            weight as a pickled object.
    """
    path = folder / ".metadata"
    # The reader of the weights reports a missing file, in words of its own.
    if not path.is_file():
        return
    try:
        metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        stored = metadata.state_dict_metadata
        weights = {name: value for name, value in stored.items() if name.startswith("model.")}
    except RunError as error:
        raise RunError(f"{path} was not written by a run: {error}") from None
    except Exception as error:  # whatever damaged bytes lead to
        raise RunError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if pickled := [
        name for name, value in weights.items() if isinstance(value, BytesStorageMetadata)
    ]:
        raise RunError(
            f"{path} was not written by a run: {pickled[0]} is a pickled object, and not a tensor"
        )


def export_checkpoint(
    source: Folder,
    output: Path,
    dtype: str = "bf16",
    adapters: bool = False,
    trust_run_code: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Origin:
    """Write the weights of a checkpoint in HF format into the folder `output`, which is empty or
    absent. Adapters are merged. Returns the checkpoint's origin.

    Weights are read, merged, cast and written a block of layers at a time: beside a block there is
    one file's worth of weights in memory. Quantized models are loaded whole.

    Args:
        source: a run's folder, which stands for its newest complete checkpoint, or one of its
            checkpoints/global_step_N.
        dtype: fp32, bf16 or fp16.
        adapters: write the adapters instead, float32, in a folder that peft loads.
        trust_run_code: as in `restore`.
        max_file_bytes: size of a file of weights.

    Raises:
        ConfigError: `adapters` of a run that trained none; as `restore`.
        FileNotFoundError: `source` has no complete checkpoint.
        FileExistsError: `output` is not empty.
    """
    folder = checkpoint_at(source)
    if output.exists() and any(output.iterdir()):
        raise FileExistsError(f"{output} exists and is not empty; name another folder, or empty it")
    if adapters and not config_of(folder).actor.model.is_lora:
        raise ConfigError(
            f"--adapters: the run of {folder} trained none (actor.model.is_lora: false); leave it "
            "out"
        )
    origin = origin_of(source, trust_run_code)
    read = None
    if origin.is_quantized and not adapters:
        model = _restore(origin).model
        merge_adapters(model)
    else:
        model = _with_adapters(origin)
        read = None if adapters else _merged_weights(origin, model)
    output.mkdir(parents=True, exist_ok=True)
    if adapters:
        _save_adapters(model, output, origin.base)
        return origin
    # `use_packed_attention` has put in a name that only the trainer knows.
    model.config._attn_implementation = "sdpa"
    cast_model(model, origin.family, DTYPES[dtype], float32_in_checkpoint(origin.base))
    carried = _carried(origin)
    save_model(model, origin.family, output, carried, read=read, max_file_bytes=max_file_bytes)
    copy_processor_files(origin.base, output)
    return origin


def _with_adapters(origin: Origin) -> PreTrainedModel:
    """Return the checkpoint's model with its adapters and buffers; other weights are on `meta`."""
    model = load_skeleton(
        origin.base, origin.family, origin.dtype, trust_remote_code=origin.trust_remote_code
    )
    if origin.lora:
        add_adapters(model, origin.family, origin.lora)

    def with_memory(name: str, weight: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.empty(weight.shape)) if is_adapter(name) else weight

    replace_parameters(model, with_memory)
    reader = WeightReader(origin.weights_folder)
    adapters = {n: p.data for n, p in model.named_parameters() if is_adapter(n)}
    buffers = {
        n: b for n, b in saved_buffers(model).items() if not origin.lora or n in reader.names
    }
    reader.read(adapters | buffers)
    return model


def _merged_weights(
    origin: Origin, model: PreTrainedModel
) -> Callable[[Sequence[str]], Iterator[tuple[str, torch.Tensor]]]:
    """Return the `read` of `save_model`: the checkpoint's weights, adapters added.

    `model` is of `_with_adapters`, and loses its wrappers. Weights get the dtype that they have in
    it when they are read.
    """
    reader = WeightReader(origin.weights_folder)
    stored_names = {unwrapped_name(name): name for name, _ in model.named_parameters()}
    layers = remove_wrappers(model)

    def read(names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        # A checkpoint of adapters may lack the weights below them.
        missing_names = [n for n in names if origin.lora and stored_names[n] not in reader.names]
        base: dict[str, torch.Tensor] = {}
        if missing_names:
            base = load_weights(
                origin.base,
                origin.family,
                origin.dtype,
                missing_names,
                trust_remote_code=origin.trust_remote_code,
            )
        for name in names:
            dtype = model.get_parameter(name).dtype
            weight = base.pop(name, None)
            if weight is None:
                # Adapters are added in float32, and only then rounded.
                shape = model.get_parameter(name).shape
                weight = torch.empty(shape, dtype=origin.dtype if name in layers else dtype)
                reader.read({stored_names[name]: weight})
            if name in layers:
                weight = with_adapter(weight, layers[name]).to(weight.dtype)
            yield name, weight.to(dtype)

    return read


def _carried(origin: Origin) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights that the model lacks and its base has, and log that they are exported."""
    names: list[str] = []
    for name, value in carried_weights(origin.base, origin.family):
        names.append(name)
        yield name, value
    if names:
        log.info(
            "%d weights that are not trained are those of %s: %s …",
            len(names),
            origin.base,
            names[0],
        )


def _save_adapters(model: PreTrainedModel, folder: Path, base: str) -> None:
    """Write the adapters for `peft.PeftModel.from_pretrained` on the model at `base`."""
    config: Any = model.peft_config[ADAPTER]  # pyright: ignore[reportIndexIssue]
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(str(folder))
    weights = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": value.detach().contiguous()
        for name, value in model.named_parameters()
        if is_adapter(name)
    }
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
