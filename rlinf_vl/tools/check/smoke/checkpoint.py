"""A checkpoint with random weights of a model's true shape, written block by block.

Nothing is downloaded. Tokenizer and image settings are the model's own where its folder or the
hub's cache has them. Elsewhere the toy's stand in: its few words, and a filler for every other id
of the vocabulary.
"""

import copy
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rlinf_vl.config.schema import Config
from rlinf_vl.config.toys import TOYS
from rlinf_vl.errors import ConfigError
from rlinf_vl.extras.toy import files
from rlinf_vl.extras.toy.model import write_files
from rlinf_vl.extras.toy.task import toy_of
from rlinf_vl.models.families import family_at, family_of
from rlinf_vl.models.family import Family, submodules
from rlinf_vl.models.image_processor import processor_settings
from rlinf_vl.models.known import model_config
from rlinf_vl.models.loading import (
    DTYPES,
    copy_processor_files,
    folder_without_weights,
    saved_buffers,
)
from rlinf_vl.user_code import is_code

#: Random numbers that weights are cut from. An odd number, so that the rows of a matrix which is
#: larger than the pool are not equal.
POOL = 2**22 + 43
#: Ids that a config names, and the toy's token of each.
NAMED_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


@dataclass(frozen=True, slots=True)
class RandomCheckpoint:
    """A checkpoint that was written.

    Attributes:
        shape_source: where the model's shape is from.
        stands_in: whether tokenizer and image settings are the toy's.
        token_side: side in pixels of the square of an image token; 0: the model reads no images.
        width: hidden size of the text model.
    """

    folder: Path
    parameters: int
    nbytes: int
    shape_source: str
    stands_in: bool
    token_side: int
    width: int

    def __str__(self) -> str:
        origin = (
            "the toy's stand in for tokenizer and image settings"
            if self.stands_in
            else "tokenizer and image settings are its own"
        )
        return (
            f"{self.parameters / 1e6:,.1f} M random weights, {self.nbytes / 2**30:.2f} GiB; shape "
            f"from {self.shape_source}; {origin}"
        )


def write_checkpoint(config: Config, folder: Path) -> RandomCheckpoint:
    """Write random weights of the shape of `rollout.model` into `folder`, which is made.

    At most one block of the model is in memory.

    Raises:
        ConfigError: the shape is unknown, the disk has too little room, or there is no stand-in for
            the model's tokenizer.
    """
    rollout = config.rollout.model
    shape, source = model_config(rollout.model_path, trust_remote_code=rollout.trust_remote_code)
    shape = copy.deepcopy(shape)
    family = (
        family_of(rollout.model_type, files=config.runner.code_files)
        if is_code(rollout.model_type)
        else family_at(
            shape, config.actor.model.vlm.paths, trust_remote_code=rollout.trust_remote_code
        )
    )
    folder.mkdir(parents=True)
    own_files = _copy_own_files(rollout.model_path, folder)
    if not own_files:
        _write_stand_in(rollout.model_path, shape, family, folder)
    # The hub's checkpoints are bfloat16; a float32 run is to be compared to float32's digits.
    dtype = DTYPES["fp32" if rollout.precision == "fp32" else "bf16"]
    with torch.device("meta"):
        model = family.model_class.from_config(
            shape, dtype=dtype, trust_remote_code=rollout.trust_remote_code
        )
    _check_room(model, folder)
    _write_weights(model, family, folder)
    nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return RandomCheckpoint(
        folder,
        sum(weight.numel() for weight in model.parameters()),
        nbytes,
        source,
        stands_in=not own_files and rollout.model_path not in TOYS,
        token_side=_token_side(family, shape, folder),
        width=shape.get_text_config().hidden_size,
    )


def _token_side(family: Family, shape: Any, folder: Path) -> int:
    """Return `RandomCheckpoint.token_side`."""
    if family.vision_tower is None:
        return 0
    settings = folder / "preprocessor_config.json"
    if settings.exists() and "patch_size" in (read := json.loads(settings.read_text())):
        return family.token_side(read)
    vision = shape.vision_config.to_dict()
    if isinstance(patch := vision.get("patch_size"), list | tuple):  # its height and width
        vision["patch_size"] = patch[0]
    return family.token_side(vision)


def _copy_own_files(path: str, folder: Path) -> bool:
    """Copy the model's own files but weights and config from its folder or the hub's cache.

    Returns:
        Whether a tokenizer was among them.
    """
    if path in TOYS:
        return False
    try:
        copy_processor_files(folder_without_weights(path, local_files_only=True), folder)
    except OSError:  # neither a folder nor in the hub's cache
        return False
    names = ("tokenizer.json", "vocab.json", "tokenizer.model")
    return any((folder / name).exists() for name in names) or any(folder.glob("*.tiktoken"))


def _write_stand_in(path: str, shape: Any, family: Family, folder: Path) -> None:
    """Write the toy's tokenizer and image settings, and the ids of its tokens into the shape."""
    if path in TOYS:
        write_files(toy_of(path), folder)
        return
    if family.vision_tower is not None and family.image_token != NAMED_IDS["image_token_id"]:
        raise ConfigError(
            f"rollout.model.model_path: the hub's cache has no tokenizer of {path!r}, and for a "
            f"{family.model_type} there is no stand-in; fetch it with 'hf download {path} "
            '--include "*.json"\', or name a folder that has it'
        )
    files.write_tokenizer(folder)
    ids, text = files.special_ids(), shape.get_text_config()
    for key, token in NAMED_IDS.items():
        if getattr(shape, key, None) is not None:
            setattr(shape, key, ids[token])
    text.eos_token_id, text.pad_token_id = ids[files.EOS_TOKEN], ids[files.PAD_TOKEN]
    text.bos_token_id = None
    _fill_vocabulary(folder / "tokenizer.json", text.vocab_size)
    if family.vision_tower is not None:
        settings = processor_settings(shape) | {
            "do_convert_rgb": True,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2))


def _fill_vocabulary(path: Path, size: int) -> None:
    """Give every id below `size` a token, so that all of them may be sampled."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first_id = 1 + max([*vocabulary.values(), *(t["id"] for t in tokenizer["added_tokens"])])
    vocabulary |= {f"Ġfiller{number}": number for number in range(first_id, size)}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def _check_room(model: PreTrainedModel, folder: Path) -> None:
    """Raise ConfigError unless the disk has room for the weights."""
    needed = sum(weight.nbytes for weight in model.parameters())
    free = shutil.disk_usage(folder).free
    if free < 1.05 * needed:
        raise ConfigError(
            f"{folder}: the random weights take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} "
            "are free; set runner.output_dir to a larger disk"
        )


def _write_weights(model: PreTrainedModel, family: Family, folder: Path) -> None:
    """Write config and random weights in the format of `models.loading.save_model`."""
    disable_progress_bar()
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(POOL, generator=generator).to(model.dtype)
    for part, keys in family.engine_config(model.config).items():
        getattr(model.config, part).update(keys)
    generation_config = folder / "generation_config.json"
    generation = generation_config.read_bytes() if generation_config.exists() else None
    buffers = saved_buffers(model)
    weight_map: dict[str, str] = {}
    shards = list(_shards(model, family))
    for number, names in enumerate(shards, 1):
        weights = {}
        for name, value in _random_weights(model, names, pool, generator):
            for stored_name, stored in family.engine_names(name, value):
                # transformers recognises layouts by their shape: see `save_model`.
                weights[stored_name] = value if stored.shape == value.shape else stored.contiguous()
        if number == 1:  # such as a router's correction
            weights |= {name: _initial_value(model, name) for name in buffers}
        aside = folder / "block"
        model.save_pretrained(
            aside, state_dict=weights, save_original_format=family.exports_original_format
        )
        for position, file in enumerate(sorted(aside.glob("*.safetensors"))):
            final = folder / f"model-{number:05}-{position}.safetensors"
            file.rename(final)
            with safe_open(final, "pt") as stored_weights:
                weight_map |= dict.fromkeys(stored_weights.keys(), final.name)
        if number == len(shards):
            (aside / "config.json").rename(folder / "config.json")
            if generation is None and (aside / "generation_config.json").exists():
                (aside / "generation_config.json").rename(generation_config)
        shutil.rmtree(aside)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _shards(model: PreTrainedModel, family: Family) -> Iterator[list[str]]:
    """Yield the names of the weights of each block, and at last of all others."""
    blocks: dict[int, str] = {}
    for path in (family.text_blocks, family.vision_blocks):
        for number, _ in enumerate(submodules(model, path)[0].children() if path else ()):
            blocks[len(blocks)] = f"{path}.{number}."
    names = [name for name, _ in model.named_parameters()]
    for prefix in blocks.values():
        yield [name for name in names if name.startswith(prefix)]
    yield [name for name in names if not name.startswith(tuple(blocks.values()))]


def _random_weights(
    model: PreTrainedModel, names: list[str], pool: torch.Tensor, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of these names.

    Matrices keep the size of what they multiply, so that images and early tokens show at the head.
    Norms, biases and decays begin as transformers has them.
    """
    modules = dict(model.named_modules())
    for name in names:
        module, weight = modules[name.rpartition(".")[0]], model.get_parameter(name)
        if weight.ndim > 1:
            is_convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
            fan_in = math.prod(weight.shape[1:]) if is_convolution else weight.shape[-1]
            yield name, _cut(pool, weight.shape, fan_in**-0.5, generator)
        elif any(p.ndim > 1 for p in module.parameters(recurse=False)):
            yield name, torch.zeros(weight.shape, dtype=weight.dtype)
        else:  # a norm, or the like
            yield name, _initial_value(model, name)


@torch.no_grad()
def _initial_value(model: PreTrainedModel, name: str) -> torch.Tensor:
    """Return what the parameter or buffer of this name is at first in transformers.

    Raises:
        ConfigError: the model's initialisation leaves it as it is.
    """
    path, _, attribute = name.rpartition(".")
    # A copy, of which only what the module itself has takes memory.
    module: Any = copy.deepcopy(model.get_submodule(path))
    for tensors in (module._parameters, module._buffers):
        for own_name, tensor in tensors.items():
            if tensor is not None:
                unwritten = math.nan if tensor.is_floating_point() else 0
                value = torch.full(tensor.shape, unwritten, dtype=tensor.dtype)
                is_parameter = isinstance(tensor, nn.Parameter)
                tensors[own_name] = nn.Parameter(value, False) if is_parameter else value
    _initialising_model(model, path)._init_weights(module)
    value = getattr(module, attribute).detach()
    if value.isnan().any():
        raise ConfigError(
            f"rollout.model.model_path: {type(model).__name__} does not initialise {name} "
            f"({type(module).__name__}), so that its random weights are unknown; name a checkpoint "
            "with weights, and leave --smoke out"
        )
    return value


def _initialising_model(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """Return the innermost model that has the module at `path`: its initialisation knows it."""
    innermost, module = model, model
    for child_name in path.split(".") if path else ():
        module = module.get_submodule(child_name)
        if isinstance(module, PreTrainedModel):
            innermost = module
    return innermost


def _cut(
    pool: torch.Tensor, shape: torch.Size, std: float, generator: torch.Generator
) -> torch.Tensor:
    """Return random numbers of this standard deviation, from anywhere in the pool."""
    start = int(torch.randint(len(pool), (1,), generator=generator))
    scaled = std * torch.cat([pool[start:], pool[:start]])
    size = math.prod(shape)
    return scaled.repeat(-(-size // len(scaled)))[:size].view(shape)
