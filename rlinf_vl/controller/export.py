"""A checkpoint of a run → a Hugging Face model folder, with tokenizer, chat template and image
processor files; or its adapters."""

import io
import logging
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from transformers import PreTrainedModel

from rlinf_vl.actor.checkpoint import load_weights_only
from rlinf_vl.config.schema import VlmConfig
from rlinf_vl.config.toys import TOYS
from rlinf_vl.errors import ConfigError, RunError
from rlinf_vl.models.families import family_of
from rlinf_vl.models.family import Family
from rlinf_vl.models.loading import (
    DTYPES,
    carried_weights,
    cast_model,
    copy_processor_files,
    float32_in_checkpoint,
    load_model,
    save_model,
)
from rlinf_vl.models.lora import add_adapters, merge_adapters, save_adapters
from rlinf_vl.runtime.checkpoints import ACTOR_FOLDER, Folder, checkpoint_at, config_of, damage
from rlinf_vl.runtime.run_code import refuse_code_of_run

log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """The model of a checkpoint, float32 unless it is quantized, with its adapters; and its
    origin."""

    model: PreTrainedModel
    family: Family
    base: str  # folder or hub name of the model that the run began with
    config: DictConfig  # the run's


def restore(source: Folder, trust_run_code: bool = False) -> Restored:
    """Load a checkpoint's model on the CPU.

    Args:
        source: a run's folder, which stands for its newest complete checkpoint, or one of its
            checkpoints/global_step_N.
        trust_run_code: execute the Python that the folder's config.yaml brings along or names.

    Raises:
        ConfigError: there is such Python, and `trust_run_code` is false.
        FileNotFoundError: the folder has no complete checkpoint.
        RunError: files of the checkpoint are not as they were written.
    """
    folder = checkpoint_at(source)
    if problems := damage(folder):
        raise RunError(
            f"the checkpoint {folder} is damaged ({'; '.join(problems)}); name another one of "
            f"{folder.parent}"
        )
    config = config_of(folder)
    refuse_code_of_run(config, folder.resolve().parents[1], trust_run_code)
    refuse_pickled_code(folder / ACTOR_FOLDER)
    lora = config.actor.model.lora if config.actor.model.is_lora else None
    model_config = config.rollout.model
    path = model_config.model_path
    if path in TOYS:
        from rlinf_vl.toy.checkpoint import toy_checkpoint_path

        path = str(toy_checkpoint_path(path))
    trust = model_config.trust_remote_code
    vlm = VlmConfig(**(OmegaConf.select(config, "actor.model.vlm") or {}))
    files = dict(OmegaConf.select(config, "runner.code_files") or {})
    family = family_of(model_config.model_type, path, trust, vlm.paths, files)
    # A quantized model is loaded in the dtype that the trainer loaded: adapters belong to the
    # weights that were quantized from it.
    quantized = lora is not None and lora.quantization != "none"
    load_dtype = config.actor.fsdp_config.mixed_precision.param_dtype if quantized else "fp32"
    model = load_model(path, family, DTYPES[load_dtype], trust_remote_code=trust)
    if lora:
        add_adapters(model, family, lora)
    load_weights_only(str(folder / ACTOR_FOLDER), model)
    return Restored(model, family, path, config)


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


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that knows the classes of a checkpoint's metadata and no others."""

    def find_class(self, module: str, name: str) -> Any:
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
) -> Restored:
    """Write the weights of a checkpoint in HF format into the folder `output`, which is empty or
    absent. Adapters are merged. Returns the model as written.

    Args:
        source: a run's folder, which stands for its newest complete checkpoint, or one of its
            checkpoints/global_step_N.
        dtype: fp32, bf16 or fp16.
        adapters: write the adapters instead, float32, in a folder that peft loads.
        trust_run_code: as in `restore`.

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
    restored = restore(folder, trust_run_code)
    model, family, base, _ = restored
    output.mkdir(parents=True, exist_ok=True)
    if adapters:
        save_adapters(model, output, base)
        return restored
    merge_adapters(model)
    # `use_packed_attention` has put in a name that only the trainer knows.
    model.config._attn_implementation = "sdpa"
    cast_model(model, family, DTYPES[dtype], float32_in_checkpoint(base))
    if carried := carried_weights(base, family):
        log.info(
            "%d weights that are not trained are those of %s: %s …",
            len(carried),
            base,
            next(iter(carried)),
        )
    save_model(model, family, output, carried)
    copy_processor_files(base, output)
    return restored
