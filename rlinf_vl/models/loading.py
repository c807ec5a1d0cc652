"""Reading checkpoints: transformers models with our attention, and what they train."""

import re
import shutil
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils.logging import disable_progress_bar

from rlinf_vl.models.expert_modules import routers
from rlinf_vl.models.family import Family
from rlinf_vl.models.mixture import mixture_forward

#: Names of a config's shares of dropout.
DROPOUT = re.compile(r"dropout|drop_path|drop_prob|pdrop")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Names in safetensors files of dtypes in half precision.
HALF_PRECISION = {"BF16", "F16"}
#: Parts of a model that are trained or frozen, each with its learning rate. Embeddings and head are
#: in the language model.
PARTS = ("language_model", "projector", "vision_tower")

#: Endings of files of weights and of their indices, in the formats that the hub has.
WEIGHT_ENDINGS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf"),
    *(".onnx", ".onnx_data", ".npz", ".npy", ".distcp"),
    *(".safetensors.index.json", ".bin.index.json"),
)
#: Files that a written checkpoint has of its own, or lacks: its config, and a card that would
#: describe the model that training began with.
OWN_FILES = ("config.json", "README.md")


def load_model(
    path: str | Path,
    family: Family,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool = False,
    prepare: Callable[[PreTrainedModel], None] | None = None,
) -> PreTrainedModel:
    """Load the transformers model at `path` on the CPU, prepared by `use_packed_attention`.

    `prepare` is called with the model when it has no weights yet.

    Raises:
        ValueError: the checkpoint is of another family than `rollout.model.model_type` says.
    """
    disable_progress_bar()  # a bar per process would break the run's progress line
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    family.check(config, path)
    switch_dropout_off(config)
    model_class = family.model_class
    if prepare is not None:
        model_class = _prepared_class(family, config, trust_remote_code, prepare)
    with _kept_in_float32(family.float32_weights):
        model, info = model_class.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"the checkpoint at {path} lacks {len(missing)} weights of a {family.model_type}, such "
            f"as {missing[0]}; without them the model would begin with random ones"
        )
    if prepare is not None:
        model.__class__ = model_class.__base__
    return use_packed_attention(model, family)


def _prepared_class(
    family: Family,
    config: Any,
    trust_remote_code: bool,
    prepare: Callable[[PreTrainedModel], None],
) -> Any:
    """Return the class of models of this config, whose constructor calls `prepare` at its end."""
    with torch.device("meta"):
        model = family.model_class.from_config(config, trust_remote_code=trust_remote_code)
    model_class: Any = type(model)

    def construct(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        prepare(self)

    # transformers looks up its conversions of weights by the class's name and module.
    names = {"__module__": model_class.__module__, "__init__": construct}
    return type(model_class.__name__, (model_class,), names)


def switch_dropout_off(config: Any) -> None:
    """Set every share of dropout and of dropped paths in a config and its parts to 0.

    Sampling has no dropout, and a ratio of probabilities compares the same function of the weights.
    """
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            switch_dropout_off(value)
        elif DROPOUT.search(name) and isinstance(value, float):
            setattr(config, name, 0.0)


@contextmanager
def _kept_in_float32(endings: Collection[str]) -> Iterator[None]:
    """Let transformers load weights with these endings in float32, whatever the model's dtype."""
    old_modules = PreTrainedModel._keep_in_fp32_modules_strict
    PreTrainedModel._keep_in_fp32_modules_strict = {*(old_modules or ()), *endings}
    try:
        yield
    finally:
        PreTrainedModel._keep_in_fp32_modules_strict = old_modules


def float32_in_checkpoint(path: str | Path) -> set[str]:
    """Return the names of weights stored in float32 beside others in half precision.

    These are mostly norms and routers. The result is empty for a checkpoint without weights in half
    precision, which tells nothing about single weights. Integers, such as counts, do not matter.
    """
    dtypes = dict[str, str]()
    for file in _weight_files(path):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118  # the handle is no mapping
                dtypes[name] = weights.get_slice(name).get_dtype()
    stored = {name for name, dtype in dtypes.items() if dtype == "F32"}
    return stored if HALF_PRECISION.intersection(dtypes.values()) else set()


def carried_weights(path: str | Path, family: Family) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a checkpoint that the model lacks and an export keeps.

    Their names begin as `Family.carried_weights` says.
    """
    for file in _weight_files(path) if family.carried_weights else ():
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                if name.startswith(family.carried_weights):
                    yield name, weights.get_tensor(name)


def _weight_files(path: str | Path) -> list[Path]:
    """Return the weight files of a checkpoint folder or of a model on the hub, in order."""
    folder = Path(path)
    if not folder.is_dir():
        folder = Path(snapshot_download(str(path), allow_patterns=["*.safetensors", "*.json"]))
    return sorted(folder.glob("*.safetensors"))


def cast_model(
    model: PreTrainedModel, family: Family, dtype: torch.dtype, float32: Collection[str] = ()
) -> None:
    """Cast the weights to `dtype`, except those that stay in float32; buffers stay as they are.

    `Family.float32_weights` and the names in `float32`, which are those of a checkpoint, become
    float32.
    """
    float32 = {*float32, *_names_in_memory(model, float32)}
    for name, weight in model.named_parameters():
        stored = {name, *(part for part, _ in family.engine_names(name, weight.detach()))}
        stays_float32 = family.stays_float32(name) or not stored.isdisjoint(float32)
        weight.data = weight.data.to(torch.float32 if stays_float32 else dtype)


def _names_in_memory(model: PreTrainedModel, stored_names: Iterable[str]) -> Iterator[str]:
    """Yield the names that weights of a checkpoint have in transformers' model.

    A stored weight may become several, such as queries, keys and values.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    targets_by_source = {
        source: converter.target_patterns
        for converter in converters
        for source in converter.source_patterns
    }
    weights = model.state_dict()
    for stored_name in stored_names:
        name, source = rename_source_key(
            stored_name, renamings, converters, model.base_model_prefix, weights
        )
        first, *further_targets = targets_by_source.get(source or "", [""])
        yield name
        yield from (name.replace(first, target) for target in further_targets)


def weight_shapes(
    config: Any, family: Family, trust_remote_code: bool
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the transformers model's weights, without loading any."""
    with torch.device("meta"):
        model = family.model_class.from_config(config, trust_remote_code=trust_remote_code)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def stored_as_in_memory(
    path: str | Path, family: Family, shapes: Mapping[str, tuple[int, ...]]
) -> bool:
    """Return whether a checkpoint has weights in transformers' layout where SGLang's differs.

    Looked at are weights whose layout `Family.engine_names` changes; `shapes` are `weight_shapes`.
    transformers by itself saves and reads them as in memory; `save_model` writes them as SGLang
    reads them.
    """

    def changes(name: str) -> bool:
        # All sizes differ, so that a transposition shows.
        weight = torch.empty(tuple(range(2, 2 + len(shapes[name]))), device="meta")
        return all(part.shape != weight.shape for _, part in family.engine_names(name, weight))

    changed = set(filter(changes, shapes))
    for file in _weight_files(path) if changed else ():
        with safe_open(file, "pt") as weights:
            for name in changed.intersection(weights.keys()):
                if tuple(weights.get_slice(name).get_shape()) == shapes[name]:
                    return True
    return False


def use_packed_attention(model: PreTrainedModel, family: Family) -> PreTrainedModel:
    """Make a transformers model attend through an `AttentionContext`, and return it.

    It then computes by the forwards in `family.layers`. Modules and weights stay as they are.
    """
    text_config: Any = model.get_submodule(family.text_model).config
    # transformers makes no [T, T] mask for an implementation that it does not know.
    text_config._attn_implementation = "context"
    layers = family.layers()
    for module in model.modules():
        if (forward := layers.get(type(module).__name__)) is not None:
            module.forward = types.MethodType(forward, module)
    for number, mixture in enumerate(mixtures(model, family)):
        mixture.number = number
    return model


def mixtures(model: nn.Module, family: Family) -> list[Any]:
    """Return the modules of the mixtures of experts that compute by ours, by layer."""
    layers = family.layers()
    return [m for m in model.modules() if layers.get(type(m).__name__) is mixture_forward]


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that checkpoints have, such as a router's correction."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def part_of(name: str, family: Family) -> str:
    """Return the one of `PARTS` to which a weight of this name belongs."""
    if name.startswith(tuple(f"{path}." for path in family.projector)):
        return "projector"
    return "vision_tower" if name.startswith(f"{family.vision_tower}.") else "language_model"


def freeze(
    model: nn.Module,
    family: Family,
    parts: Collection[str] = ("vision_tower", "projector"),
    *,
    router: bool = False,
) -> None:
    """Train none of these `PARTS`; with `router`, nor the routers of mixtures."""
    for name, weight in model.named_parameters():
        if part_of(name, family) in parts:
            weight.requires_grad_(False)
    for module in routers(model).values() if router else ():
        module.requires_grad_(False)


def output_weight(model: PreTrainedModel) -> torch.Tensor:
    """Return the output embedding, [V, H]; V can be more than the tokenizer has tokens."""
    embedding: Any = model.get_output_embeddings()
    return embedding.weight


def vocab_size(model: PreTrainedModel) -> int:
    """Return the rows of the output embedding."""
    return output_weight(model).shape[0]


def folder_without_weights(source: str | Path, *, local_files_only: bool = False) -> Path:
    """Return the folder of a checkpoint; of one on the hub all files but weights are there.

    Raises:
        OSError: `local_files_only`, and the hub's cache does not have it.
    """
    if Path(source).is_dir():
        return Path(source)
    patterns = [f"*{ending}" for ending in WEIGHT_ENDINGS]
    folder = snapshot_download(
        str(source), ignore_patterns=patterns, local_files_only=local_files_only
    )
    return Path(folder)


def copy_processor_files(source: str | Path, target: Path) -> None:
    """Copy all files of a checkpoint but weights, their index and the model's config.

    These are tokenizer, templates, processors, generation config, licence, and the Python of a
    checkpoint that brings its own. `source` is a folder or a model of the hub.
    """
    _copy_small_files(folder_without_weights(source), target)


def _copy_small_files(folder: Path, target: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__pycache__")):
            continue
        # A folder with a config is another checkpoint, such as those of a trainer.
        if path.is_dir() and not (path / "config.json").exists():
            _copy_small_files(path, target / path.name)
        elif path.is_file() and not (path.name in OWN_FILES or path.name.endswith(WEIGHT_ENDINGS)):
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.name)
