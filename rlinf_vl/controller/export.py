"""A checkpoint of a run → a Hugging Face model folder, with tokenizer, chat template and image processor files; or its adapters."""

from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedModel

from rlinf_vl.actor.checkpoint import load_weights_only
from rlinf_vl.config.schema import VlmConfig
from rlinf_vl.config.toys import TOYS
from rlinf_vl.errors import ConfigError, RunError
from rlinf_vl.models.families import Family, family_of
from rlinf_vl.models.loading import DTYPES, copy_processor_files, load_model, save_model
from rlinf_vl.models.lora import add_adapters, merge_adapters, save_adapters
from rlinf_vl.runtime.checkpoints import ACTOR_FOLDER, Folder, checkpoint_at, config_of, damage


class Restored(NamedTuple):
    """The model of a checkpoint, float32 unless it is quantized, with its adapters; and what it was made of."""

    model: PreTrainedModel
    family: Family
    base: str  # folder or hub name of the model that the run began with
    config: DictConfig  # the run's


def restore(source: Folder) -> Restored:
    """Load a checkpoint's model on the CPU.

    Args:
        source: a run's folder, which stands for its newest complete checkpoint, or one of its checkpoints/global_step_N.

    Raises:
        FileNotFoundError: no complete checkpoint is there.
        RunError: its files are not as they were written.
    """
    folder = checkpoint_at(source)
    if problems := damage(folder):
        raise RunError(
            f"the checkpoint {folder} is damaged ({'; '.join(problems)}); name another one of {folder.parent}"
        )
    config = config_of(folder)
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
    quantized = lora is not None and lora.quantization != "none"  # from what the trainer loaded
    loaded = config.actor.fsdp_config.mixed_precision.param_dtype if quantized else "fp32"
    model = load_model(path, family, DTYPES[loaded], trust_remote_code=trust)
    if lora:
        add_adapters(model, family, lora)
    load_weights_only(str(folder / ACTOR_FOLDER), model)
    return Restored(model, family, path, config)


def export_checkpoint(source: Folder, output: Path, dtype: str = "bf16", adapters: bool = False) -> Restored:
    """Write the weights of a checkpoint in HF format into the folder `output`, which is empty or absent. Adapters are merged.
    Returns what was written.

    Args:
        source: a run's folder, which stands for its newest complete checkpoint, or one of its checkpoints/global_step_N.
        dtype: fp32, bf16 or fp16.
        adapters: write the adapters instead, float32, in a folder that peft loads.

    Raises:
        ConfigError: `adapters` of a run that trained none.
        FileNotFoundError, FileExistsError: no complete checkpoint is there; `output` is not empty.
    """
    folder = checkpoint_at(source)
    if output.exists() and any(output.iterdir()):
        raise FileExistsError(f"{output} exists and is not empty; name another folder, or empty it")
    if adapters and not config_of(folder).actor.model.is_lora:
        raise ConfigError(f"--adapters: the run of {folder} trained none (actor.model.is_lora: false); leave it out")
    made = restore(folder)
    model, family, base, _ = made
    output.mkdir(parents=True, exist_ok=True)
    if adapters:
        save_adapters(model, output, base)
        return made
    merge_adapters(model)
    model.config._attn_implementation = "sdpa"
    model.to(DTYPES[dtype])  # pyright: ignore[reportArgumentType]  # its decorator hides self
    save_model(model, family, output)
    copy_processor_files(base, output)
    return made
