"""Check the checkpoint that a config names before a run: files, family, shape, chat template.

Neither torch nor Ray is imported, but where `actor.model.vlm` needs the model itself: a mistake
shows within a second.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlinf_vl.config import Config
from rlinf_vl.config.chat_template import unnamed_variables
from rlinf_vl.config.hubs import HUB_NAME
from rlinf_vl.config.toys import TOKEN_SIDE, TOYS
from rlinf_vl.config.validate import why_absent
from rlinf_vl.errors import ConfigError, nearest
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.models.family import Family
from rlinf_vl.models.image_processor import token_side
from rlinf_vl.runtime import gpus
from rlinf_vl.tools.check.certificates import proven_wrong, refused_path
from rlinf_vl.tools.check.hub import ask_hub
from rlinf_vl.user_code import is_code


def checkpoint(config: Config) -> Iterator[str]:
    """Yield the problems of `rollout.model.model_path` with what the config asks of it."""
    path, key = config.rollout.model.model_path, "rollout.model.model_path"
    hint = f"give a checkpoint's folder, a name on the Hugging Face hub (owner/name), or {', '.join(TOYS)}"
    folder = Path(path)
    in_existing_folder = folder.parent != Path(".") and os.path.isdir(folder.parent)
    if path in TOYS:
        yield from _family(config, TOYS[path].model_type)
        yield from _pixels(config, TOKEN_SIDE)
        yield from _template(config, "")
    elif not path:
        yield f"{key}: empty; {hint}"
    elif os.path.isdir(path):
        yield from _model_folder(config, folder)
    elif os.path.isfile(path):
        yield f"{key}: {path!r} is a file; {hint}"
    elif path.startswith((".", "/", "~")) or not HUB_NAME.fullmatch(path) or in_existing_folder:
        yield f"{key}: no folder {path!r}{why_absent(path)}; {hint}"
    else:
        model_type, problem = ask_hub("model", path)
        if problem:
            yield f"{key}: {path}: {problem}, or name a local folder;{nearest(path, list(TOYS))}".rstrip(
                ";"
            )
        elif model_type:
            yield from _family(config, model_type)


def _model_folder(config: Config, folder: Path) -> Iterator[str]:
    """Yield the problems of a checkpoint in a local folder."""
    key = f"rollout.model.model_path: {folder}"
    try:
        shape = json.loads((folder / "config.json").read_bytes())
        model_type = shape["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield (
            f"{key} has no config.json that names a model_type ({type(error).__name__}: {error}); "
            "name a checkpoint in Hugging Face's format, such as 'rlinf-vl export' "
            "writes"
        )
        return
    yield from _family(config, model_type, shape)
    family = FAMILIES.get(model_type)
    reads_images = family is None or family.vision_tower is not None
    missing, damaged = _missing_and_damaged(folder, with_images=reads_images)
    if missing:
        yield f"{key} lacks {', '.join(missing)}; fetch or copy the checkpoint whole"
    for name, why in damaged.items():
        yield f"{key}: {name} is damaged or fetched in part ({why}); fetch or copy it anew"
    # A missing or damaged file has been reported above.
    with suppress(OSError, ValueError, TypeError, AttributeError):
        processor = json.loads((folder / "preprocessor_config.json").read_bytes())
        side = (token_side if family is None else family.token_side)(processor)
        yield from _pixels(config, side)
    templates = (
        folder / name
        for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    )
    yield from _template(
        config, "".join(file.read_text(errors="replace") for file in templates if file.is_file())
    )


def _template(config: Config, template: str) -> Iterator[str]:
    """Yield a problem for each option that the chat template seems not to know.

    `template`: text of the files with it. The renderer later asks the template itself.
    """
    yield from unnamed_variables(config.rollout.chat_template_kwargs, template)
    mode = config.rollout.thinking.mode
    markers = ("enable_thinking", "<think>") if mode == "on" else ("enable_thinking",)
    if mode != "auto" and not any(word in template for word in markers):
        yield (
            f"rollout.thinking.mode: {mode}, but the chat template of "
            f"{config.rollout.model.model_path} doesn't know enable_thinking; set it auto, or name "
            "a checkpoint whose template knows it"
        )


def _missing_and_damaged(folder: Path, with_images: bool) -> tuple[list[str], dict[str, object]]:
    """Return the files that a checkpoint's folder lacks, and the unreadable ones with reasons.

    Of weights, only the first bytes are read.
    """
    patterns_by_part = {
        "weights (*.safetensors)": ("*.safetensors", "pytorch_model*.bin"),
        "a tokenizer (tokenizer.json)": ("tokenizer.json", "vocab.json"),
    }
    if with_images:
        patterns_by_part["an image processor (preprocessor_config.json)"] = (
            "preprocessor_config.json",
            "processor_config.json",
        )
    missing_files: list[str] = []
    for part, patterns in patterns_by_part.items():
        if all(next(folder.glob(pattern), None) is None for pattern in patterns):
            missing_files.append(part)
    damaged: dict[str, object] = {}
    for name in ("tokenizer.json", "preprocessor_config.json", "model.safetensors.index.json"):
        try:
            content = json.loads((folder / name).read_bytes())
            if name.startswith("model"):
                shards = sorted(set(content["weight_map"].values()))
                missing_files += [file for file in shards if not (folder / file).is_file()]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            damaged[name] = error
    for weights in sorted(folder.glob("*.safetensors")):
        try:
            with weights.open("rb") as file:
                start = file.read(20)
            # A file of safetensors begins with the length of its header in eight bytes. A clone
            # without Git LFS has a short text in its place.
            if len(start) < 8 or start.startswith(b"version https://"):
                damaged[weights.name] = "a pointer of Git LFS" if start else "it is empty"
        except OSError as error:
            damaged[weights.name] = error
    return missing_files, damaged


def _family(
    config: Config, checkpoint_type: str, shape: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield the problems of the checkpoint's family and shape.

    Its model_type must be a supported family, and the one that the config names, if it names one;
    the engine must be able to run a model of this shape (its config.json).
    """
    key, configured_type = "rollout.model.model_type", config.rollout.model.model_type
    checkpoint_text = (
        f"the checkpoint at {config.rollout.model.model_path} is of type {checkpoint_type!r}"
    )
    is_general = checkpoint_type not in FAMILIES and not is_code(configured_type)
    if is_general and configured_type != "auto":
        yield f"{key}: {configured_type!r}, but {checkpoint_text}; set {key}=auto"
    elif is_general and (reason := proven_wrong(checkpoint_type, _unused_paths(config))):
        yield f"rollout.model.model_path: {checkpoint_text}: {reason}"
    elif is_general or config.actor.model.vlm.paths is not None:
        yield from _general_family(config, checkpoint_type, checkpoint_text)
        if is_general and config.rollout.rollout_backend == "sglang":
            yield from _general_sglang(config, checkpoint_type)
    elif is_code(configured_type):
        pass  # the code declares itself what it supports
    elif configured_type in FAMILIES and configured_type != checkpoint_type:
        yield f"{key}: {configured_type!r}, but {checkpoint_text}; set {key}={checkpoint_type}"
    family = FAMILIES.get(checkpoint_type)
    if family is not None and family.vision_tower is None:
        checkpoint_text += ", which has no vision tower"
        if config.data.image_keys:
            yield (
                f"data.image_keys: {config.data.image_keys}, but {checkpoint_text}; "
                "set data.image_keys=[], or name a vision-language model"
            )
        for key in ("image_corruption.share", "papo.weight"):
            if attrgetter(key)(config.algorithm):
                yield f"algorithm.{key}: there are no images to corrupt: {checkpoint_text}; set it 0"
        if config.actor.model.freeze_language_model:
            yield f"actor.model.freeze_language_model: true leaves nothing to train, for {checkpoint_text}; set it false"
    # transformers reports what is wrong with a config.json of another form.
    with suppress(AttributeError, TypeError):
        text = (shape or {}).get("text_config") or shape or {}
        yield from _mixture(config, checkpoint_text, family, text)
        ranks = max(1, config.actor.context_parallel_size)
        for name in ("num_attention_heads", "linear_num_value_heads"):
            if (heads := text.get(name) or 0) % ranks:
                divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
                yield (
                    f"actor.context_parallel_size: {ranks} can't divide the {heads} heads "
                    f"({name}), but {checkpoint_text}; these can: {divisors}"
                )
    if family is not None and config.rollout.rollout_backend == "sglang":
        device = config.cluster.device
        without_gpu = device == "cpu" or (
            device == "auto" and gpus.is_private(config) and gpus.gpu_memory() == ()
        )
        with suppress(AttributeError, TypeError):  # as above
            yield from _engine_slices(config, checkpoint_text, shape or {})
            for reason in family.sglang_refusals(shape or {}, without_gpu):
                yield f"rollout.model.model_path: {config.rollout.model.model_path}: {reason}"


def _engine_slices(config: Config, checkpoint_text: str, shape: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sizes of a text model that the GPUs of an SGLang engine can't divide evenly."""
    rollout, text = config.rollout, shape.get("text_config") or shape
    sizes, tp = rollout.sglang, max(1, rollout.tensor_parallel_size)
    ep, attn_dp = sizes.ep_size, sizes.attn_dp_size
    experts, ep_key = text.get("num_experts") or 0, "rollout.sglang.server_args.ep_size"
    if ep > 1 and not experts:
        yield f"{ep_key}: {ep}, but {checkpoint_text}, which has no experts; set it 1"
    for key, size, name in (
        ("rollout.tensor_parallel_size", max(1, tp // attn_dp), "num_attention_heads"),
        ("rollout.tensor_parallel_size", max(1, tp // ep), "moe_intermediate_size"),
        (ep_key, ep, "num_experts"),
    ):
        if (text.get(name) or 0) % size:
            yield (
                f"{key}: {size} equal parts of {text[name]} ({name}) are not to be had, but "
                f"{checkpoint_text}; set a divisor"
            )


def _unused_paths(config: Config) -> list[str]:
    """Return the paths of `prove-family` that a run does not take."""
    actor, backend = config.actor, config.rollout.rollout_backend
    used = {
        "sglang": backend == "sglang",
        "torch engine": backend == "torch",
        "lora": actor.model.is_lora,
        "context parallel": actor.context_parallel_size > 1,
        "checkpointing": actor.fsdp_config.gradient_checkpointing != "none",
    }
    return [path for path, is_used in used.items() if not is_used]


def _general_sglang(config: Config, checkpoint_type: str) -> Iterator[str]:
    """Yield why SGLang can't run a model without a file."""
    rollout = config.rollout
    if rollout.tensor_parallel_size > 1:
        yield (
            f"rollout.tensor_parallel_size: {rollout.tensor_parallel_size}, but in SGLang a "
            f"{checkpoint_type} is computed by transformers' modules, on one GPU an engine; set it 1"
        )
    if reason := refused_path(checkpoint_type, "sglang"):
        yield (
            f"rollout.rollout_backend: sglang can't run models of type {checkpoint_type!r}: "
            f"{reason}; set rollout.rollout_backend=torch"
        )


def _general_family(config: Config, checkpoint_type: str, checkpoint_text: str) -> Iterator[str]:
    """Yield a problem unless the model has parts that the general path can use.

    They are those that `actor.model.vlm` or transformers names. This imports torch, and makes the
    model without its weights.
    """
    try:
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as VISION_LANGUAGE_MODELS,
        )

        from rlinf_vl.models.families import family_at
        from rlinf_vl.models.known import model_config
    except ImportError:  # the run will use another Python, which has torch
        return
    paths, model = config.actor.model.vlm.paths, config.rollout.model
    is_known = checkpoint_type in VISION_LANGUAGE_MODELS or checkpoint_type in FAMILIES
    if not is_known and not model.trust_remote_code:
        yield (
            f"rollout.model.model_path: {checkpoint_text}, which is no vision-language model of "
            f"transformers; supported: {', '.join(FAMILIES)}, and others of docs/models.md"
        )
        return
    with suppress(ConfigError):  # its shape is unknown until it is downloaded
        shape, _ = model_config(model.model_path, trust_remote_code=model.trust_remote_code)
        try:
            family = family_at(shape, paths, trust_remote_code=model.trust_remote_code)
            if family.is_general_in_sglang and config.rollout.rollout_backend == "sglang":
                yield from family.sglang_refusals(shape.to_dict(), on_cpu=False)
        except ValueError as error:
            yield (
                str(error)
                if paths
                else f"rollout.model.model_path: {checkpoint_text}, which is not supported: {error}"
            )


def _mixture(
    config: Config, checkpoint_text: str, family: Family | None, text: Mapping[str, Any]
) -> Iterator[str]:
    """Yield problems of mixtures of experts.

    Keys about them need a model that has one by layers of ours. Rows of their products must be multiples of 16 bytes.
    """
    actor, precision = config.actor, config.actor.fsdp_config.mixed_precision
    if family is None or not family.has_mixtures:
        defaults = {
            "routing_replay": "off",
            "model.router_aux_loss_coef": 0,
            "fsdp_config.expert_parallel_size": 1,
        }
        for key, off in defaults.items():
            if (value := attrgetter(key)(actor)) != off:
                yield (
                    f"actor.{key}: {value}, but {checkpoint_text}, without a mixture of experts "
                    f"that rlinf_vl computes; set it {off}"
                )
        return
    size = actor.fsdp_config.expert_parallel_size
    # An absent key has transformers' default; the ranks look once more.
    experts = text.get("num_experts") or text.get("num_local_experts") or 0
    if size > 1 and experts % size:
        divisors = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        yield (
            f"actor.fsdp_config.expert_parallel_size: {size} can't divide the {experts} experts "
            f"(num_experts), but {checkpoint_text}; these can: {divisors}"
        )
    dtypes = {"actor.fsdp_config.mixed_precision.param_dtype": precision.param_dtype}
    if config.rollout.rollout_backend == "torch":
        dtypes["rollout.model.precision"] = config.rollout.model.precision
    for key, dtype in dtypes.items():
        multiple = 4 if dtype == "fp32" else 8
        for name in ("hidden_size", "moe_intermediate_size"):
            if (size := text.get(name, 0)) % multiple:
                hint = "set it fp32" if size % 4 == 0 else "take another model"
                yield (
                    f"{key}: {dtype}, but {checkpoint_text} with {name} {size}: products of "
                    f"experts in {dtype} take multiples of {multiple}; {hint}"
                )


def _pixels(config: Config, side: int) -> Iterator[str]:
    """Yield pixel bounds below one image token of this side, or above the longest prompt."""
    min_pixels, max_pixels, max_prompt = (
        config.data.image_min_pixels,
        config.data.image_max_pixels,
        config.data.max_prompt_length,
    )
    token_pixels = side**2
    if max_pixels is not None and 0 < max_pixels < token_pixels:
        yield (
            f"data.image_max_pixels: {max_pixels} is less than one image token of this model "
            f"({token_pixels} pixels); set it to {token_pixels} or more, or null for the "
            "checkpoint's own"
        )
    if min_pixels is not None and min_pixels >= token_pixels * max_prompt:
        yield (
            f"data.image_min_pixels: {min_pixels} makes every image {min_pixels // token_pixels} "
            f"tokens, which no prompt of data.max_prompt_length={max_prompt} holds; lower the one "
            "or raise the other"
        )
