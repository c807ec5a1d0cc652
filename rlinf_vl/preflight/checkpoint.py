"""The checkpoint that a config names, looked at before anything is started: files, family, shape, chat template.

Neither torch nor Ray is imported, but where `actor.model.vlm` needs the model itself: a mistake is told within a second.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlinf_vl.code import is_code
from rlinf_vl.config import Config
from rlinf_vl.config.schema.limits import FAMILIES, MIXTURE_FAMILIES, TEXT_FAMILIES
from rlinf_vl.config.toys import TOYS
from rlinf_vl.config.validate import why_absent
from rlinf_vl.engines.sglang.checkpoint import refusals
from rlinf_vl.errors import ConfigError, nearest
from rlinf_vl.preflight import gpus
from rlinf_vl.preflight.hub import HUB_NAME, ask_hub


def checkpoint(config: Config) -> Iterator[str]:
    """`rollout.model.model_path` and what the config asks of it."""
    path, key = config.rollout.model.model_path, "rollout.model.model_path"
    way_out = f"give a checkpoint's folder, a name on the Hugging Face hub (owner/name), or {', '.join(TOYS)}"
    folder = Path(path)
    in_a_folder = folder.parent != Path(".") and os.path.isdir(folder.parent)
    if path in TOYS:
        yield from _family(config, TOYS[path].model_type)
        yield from _pixels(config, {"patch_size": 8, "merge_size": 2})
        yield from _thinking(config, "")
    elif not path:
        yield f"{key}: empty; {way_out}"
    elif os.path.isdir(path):
        yield from _model_folder(config, folder)
    elif os.path.isfile(path):
        yield f"{key}: {path!r} is a file; {way_out}"
    elif path.startswith((".", "/", "~")) or not HUB_NAME.fullmatch(path) or in_a_folder:
        yield f"{key}: no folder {path!r}{why_absent(path)}; {way_out}"
    else:
        known, problem = ask_hub("model", path)
        if problem:
            yield f"{key}: {path}: {problem}, or name a local folder;{nearest(path, list(TOYS))}".rstrip(";")
        elif known:
            yield from _family(config, known)


def _model_folder(config: Config, folder: Path) -> Iterator[str]:
    key = f"rollout.model.model_path: {folder}"
    try:
        known = (shape := json.loads((folder / "config.json").read_bytes()))["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield (
            f"{key} has no config.json that names a model_type ({type(error).__name__}: {error}); name a checkpoint in "
            "Hugging Face's format, such as 'python -m rlinf_vl export' writes"
        )
        return
    yield from _family(config, known, shape)
    missing, damaged = _missing_and_damaged(folder, with_images=known not in TEXT_FAMILIES)
    if missing:
        yield f"{key} lacks {', '.join(missing)}; fetch or copy the checkpoint whole"
    for name, why in damaged.items():
        yield f"{key}: {name} is damaged or fetched in part ({why}); fetch or copy it anew"
    with suppress(OSError, ValueError, TypeError, AttributeError):
        yield from _pixels(config, json.loads((folder / "preprocessor_config.json").read_bytes()))
    templates = (folder / name for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"))
    yield from _thinking(config, "".join(file.read_text(errors="replace") for file in templates if file.is_file()))


def _thinking(config: Config, template: str) -> Iterator[str]:
    """What files with a chat template spell; the renderer asks the template itself."""
    mode = config.rollout.thinking.mode
    known = ("enable_thinking", "<think>") if mode == "on" else ("enable_thinking",)
    if mode != "auto" and not any(word in template for word in known):
        yield (
            f"rollout.thinking.mode: {mode}, but the chat template of {config.rollout.model.model_path} doesn't know "
            "enable_thinking; set it auto, or name a checkpoint whose template knows it"
        )


def _missing_and_damaged(folder: Path, with_images: bool) -> tuple[list[str], dict[str, object]]:
    """What a checkpoint's folder lacks; and the files that their readers would stumble over, with what is wrong. Of weights only
    what shows in the first bytes."""
    parts = {
        "weights (*.safetensors)": ("*.safetensors", "pytorch_model*.bin"),
        "a tokenizer (tokenizer.json)": ("tokenizer.json", "vocab.json"),
    }
    if with_images:
        parts["an image processor (preprocessor_config.json)"] = ("preprocessor_config.json", "processor_config.json")
    missing = [what for what, names in parts.items() if not any(any(folder.glob(name)) for name in names)]
    damaged: dict[str, object] = {}
    for name in ("tokenizer.json", "preprocessor_config.json", "model.safetensors.index.json"):
        try:
            read = json.loads((folder / name).read_bytes())
            if name.startswith("model"):
                missing += [file for file in sorted(set(read["weight_map"].values())) if not (folder / file).is_file()]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            damaged[name] = error
    for weights in sorted(folder.glob("*.safetensors")):
        try:
            with weights.open("rb") as file:
                start = file.read(20)
            if len(start) < 8 or start.startswith(b"version https://"):
                damaged[weights.name] = "a pointer of Git LFS" if start else "it is empty"
        except OSError as error:
            damaged[weights.name] = error
    return missing, damaged


def _family(config: Config, of_checkpoint: str, shape: Mapping[str, Any] | None = None) -> Iterator[str]:
    """The checkpoint's model_type must be a family of ours, and the one that the config says, if it says one; and the engine must
    be able to run a model of this shape (its config.json)."""
    key, said = "rollout.model.model_type", config.rollout.model.model_type
    where = f"the checkpoint at {config.rollout.model.model_path} is of type {of_checkpoint!r}"
    if config.actor.model.vlm.paths is not None:
        yield from _paths(config)
        if of_checkpoint not in FAMILIES and config.rollout.rollout_backend == "sglang":
            yield (
                f"rollout.rollout_backend: sglang has names of its own for weights, which are not known of {of_checkpoint!r}; set "
                "rollout.rollout_backend=torch"
            )
    elif is_code(said):
        pass  # whoever wrote it says what it can
    elif of_checkpoint not in FAMILIES:
        yield (
            f"rollout.model.model_path: {where}, which is not supported; supported: {', '.join(FAMILIES)}. If it has a tower like "
            "Qwen2-VL's, name its parts: actor.model.vlm.vision_encoder_attr and language_model_attr"
        )
    elif said in FAMILIES and said != of_checkpoint:
        yield f"{key}: {said!r}, but {where}; set {key}={of_checkpoint}"
    if of_checkpoint in TEXT_FAMILIES:
        where += ", which has no vision tower"
        if config.data.image_keys:
            yield f"data.image_keys: {config.data.image_keys}, but {where}; set data.image_keys=[], or name a vision-language model"
        for key in ("image_corruption.share", "papo.weight"):
            if attrgetter(key)(config.algorithm):
                yield f"algorithm.{key}: there are no images to corrupt: {where}; set it 0"
        if config.actor.model.freeze_language_model:
            yield f"actor.model.freeze_language_model: true leaves nothing to train, for {where}; set it false"
    with suppress(AttributeError, TypeError):  # transformers will say what is wrong with such a config.json
        text = (shape or {}).get("text_config") or shape or {}
        windows = text.get("layer_types") or ["sliding_attention"] * bool(text.get("use_sliding_window"))
        if "sliding_attention" in windows:
            yield (
                f"rollout.model.model_path: the config.json in {config.rollout.model.model_path} has layers that attend within a "
                "sliding window, which is not supported; set use_sliding_window to false in it if the model was trained without"
            )
        yield from _mixture(config, where, of_checkpoint, text)
        ranks = max(1, config.actor.context_parallel_size)
        for name in ("num_attention_heads", "linear_num_value_heads"):
            if (heads := text.get(name) or 0) % ranks:
                fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
                yield f"actor.context_parallel_size: {ranks} can't divide the {heads} heads ({name}), but {where}; these can: {fits}"
    if config.rollout.rollout_backend == "sglang":
        device = config.cluster.device
        no_gpu = device == "cpu" or (device == "auto" and gpus.is_private(config) and gpus.gpu_memory() == ())
        with suppress(AttributeError, TypeError):  # transformers will say what is wrong with such a config.json
            for reason in list(refusals(shape or {"model_type": of_checkpoint}, no_gpu)):
                yield f"rollout.model.model_path: {config.rollout.model.model_path}: {reason}"


def _paths(config: Config) -> Iterator[str]:
    """Whether `actor.model.vlm` leads to modules that can be used. This imports torch, and makes the model without its weights."""
    try:
        from rlinf_vl.models.families import family_at
        from rlinf_vl.preflight.model import model_config
    except ImportError:  # not the Python that will run it
        return
    paths, model = config.actor.model.vlm.paths, config.rollout.model
    assert paths is not None
    with suppress(ConfigError):  # its shape isn't known here
        shape, _ = model_config(model.model_path, trust_remote_code=model.trust_remote_code)
        try:
            family_at(shape, paths, trust_remote_code=model.trust_remote_code)
        except ValueError as error:
            yield str(error)


def _mixture(config: Config, where: str, of_checkpoint: str, text: Mapping[str, Any]) -> Iterator[str]:
    """Mixtures of experts: that there are any where a key is about them, and that rows of their products have whole 16 bytes."""
    actor, precision = config.actor, config.actor.fsdp_config.mixed_precision
    if of_checkpoint not in MIXTURE_FAMILIES:
        asked = {"routing_replay": "off", "model.router_aux_loss_coef": 0}
        for key, off in asked.items():
            if (value := attrgetter(key)(actor)) != off:
                yield f"actor.{key}: {value}, but {where}, without a mixture of experts; set it {off}"
        return
    dtypes = {"actor.fsdp_config.mixed_precision.param_dtype": precision.param_dtype}
    if config.rollout.rollout_backend == "torch":
        dtypes["rollout.model.precision"] = config.rollout.model.precision
    for key, dtype in dtypes.items():
        whole = 4 if dtype == "fp32" else 8
        for name in ("hidden_size", "moe_intermediate_size"):
            if (size := text.get(name, 0)) % whole:
                yield (
                    f"{key}: {dtype}, but {where} with {name} {size}: products of experts in {dtype} take multiples of {whole}"
                    f"{'; set it fp32' if size % 4 == 0 else ', in fp32 of 4; take another model'}"
                )


def _pixels(config: Config, processor: dict[str, Any]) -> Iterator[str]:
    """Pixel bounds against one image token's square, and against the longest prompt."""
    low, high, prompt = config.data.image_min_pixels, config.data.image_max_pixels, config.data.max_prompt_length
    token = (int(processor.get("patch_size") or 16) * int(processor.get("merge_size") or 2)) ** 2
    if high is not None and 0 < high < token:
        yield (
            f"data.image_max_pixels: {high} is less than one image token of this model ({token} pixels); set it to {token} or more, "
            "or null for the checkpoint's own"
        )
    if low is not None and low >= token * prompt:
        yield (
            f"data.image_min_pixels: {low} makes every image {low // token} tokens, which no prompt of data.max_prompt_length="
            f"{prompt} holds; lower the one or raise the other"
        )
