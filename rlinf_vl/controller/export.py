"""A checkpoint of a run → a Hugging Face model folder, with tokenizer, chat template and image processor files; or its adapters."""

from pathlib import Path

from omegaconf import OmegaConf

from rlinf_vl.actor.checkpoint import load_weights_only
from rlinf_vl.config.schema import VlmConfig
from rlinf_vl.config.toys import TOYS
from rlinf_vl.errors import ConfigError
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import DTYPES, copy_processor_files, load_model, save_model
from rlinf_vl.models.lora import add_adapters, merge_adapters, save_adapters
from rlinf_vl.runtime.run_folder import ACTOR_FOLDER, checkpoint_at


def export_checkpoint(source: Path, output: Path, dtype: str = "bf16", adapters: bool = False) -> None:
    """Write the weights of a checkpoint in HF format into the folder `output`, which is empty or absent. Adapters are merged.

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
    run_config = OmegaConf.load(folder.resolve().parents[1] / "config.yaml")
    lora = run_config.actor.model.lora if run_config.actor.model.is_lora else None
    if adapters and lora is None:
        raise ConfigError(f"--adapters: the run of {folder} trained none (actor.model.is_lora: false); leave it out")
    model_config = run_config.rollout.model
    path = model_config.model_path
    if path in TOYS:
        from rlinf_vl.toy.model import toy_checkpoint_path

        path = str(toy_checkpoint_path(path))
    trust = model_config.trust_remote_code
    vlm = VlmConfig(**(OmegaConf.select(run_config, "actor.model.vlm") or {}))
    family = family_of(model_config.model_type, path, trust, vlm.paths)
    quantized = lora is not None and lora.quantization != "none"  # from what the trainer loaded
    loaded = run_config.actor.fsdp_config.mixed_precision.param_dtype if quantized else "fp32"
    model = load_model(path, family, DTYPES[loaded], trust_remote_code=trust)
    if lora:
        add_adapters(model, family, lora)
    load_weights_only(folder / ACTOR_FOLDER, model)
    output.mkdir(parents=True, exist_ok=True)
    if adapters:
        save_adapters(model, output, path)
        return
    merge_adapters(model)
    model.config._attn_implementation = "sdpa"
    model.to(DTYPES[dtype])  # pyright: ignore[reportArgumentType]  # its decorator hides self
    save_model(model, family, output)
    copy_processor_files(path, output)
