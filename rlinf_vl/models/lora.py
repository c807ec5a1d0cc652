"""LoRA (Hu et al. 2021) through peft: where adapters are put, and weights with adapters added.

peft wraps a module in place, and its weight becomes `base_layer.weight`: module paths stay, so that
all paths in a `Family` hold. Adapters are float32 whatever the model's dtype; the model under them
is not trained.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from rlinf_vl.errors import ConfigError
from rlinf_vl.models.expert_modules import routers, stacked_weights
from rlinf_vl.models.family import Family
from rlinf_vl.models.loading import PARTS, freeze, part_of
from rlinf_vl.models.nf4 import dense, is_quantized, quantize

#: Names that stand for the linear modules of some `PARTS`.
NAMED = {
    "all-linear": PARTS,
    "language": ("language_model",),
    "vision": ("vision_tower",),
    "projector": ("projector",),
}
ADAPTER = "default"  # peft's name of a model's only adapter
#: The attribute of a model by which peft chooses its modules for quantized weights.
_IN_4_BITS = "is_loaded_in_4bit"


class AdapterError(ConfigError):
    """The settings ask for adapters where none can be put."""


class LoraSettings(Protocol):
    """The section `actor.model.lora` of a config."""

    rank: int
    alpha: float
    dropout: float
    target_modules: list[str]
    exclude_modules: list[str]
    quantization: str


def train_parts(
    model: PreTrainedModel,
    family: Family,
    frozen: Collection[str],
    lora: LoraSettings | None,
    *,
    router: bool = True,
) -> None:
    """Make adapters trainable and nothing else.

    Without `lora`, everything is trained except the `frozen` ones of `PARTS`, and the routers of
    mixtures only if `router`.
    """
    if lora is None:
        freeze(model, family, frozen, router=not router)
    else:
        add_adapters(model, family, lora)


def add_adapters(model: PreTrainedModel, family: Family, lora: LoraSettings) -> None:
    """Wrap the target modules in adapters, which add nothing yet, and freeze everything else.

    The targets are quantized if the settings say so, but not on the device `meta`.

    Raises:
        AdapterError: the settings match no module, or experts get adapters with dropout or
            quantization.
    """
    from peft import LoraConfig, inject_adapter_in_model  # imported here: it takes seconds

    names = adapted_names(model, family, lora)
    modules = [name for name in names if isinstance(_module_or_parameter(model, name), nn.Module)]
    experts = [name for name in names if name not in modules]
    if experts and lora.dropout:
        raise AdapterError(
            f"actor.model.lora.dropout: {lora.dropout:g}, but adapters of experts "
            f"({_pattern(experts[0])}) have none; set it to 0, or add experts to "
            "actor.model.lora.exclude_modules"
        )
    if experts and lora.quantization != "none":
        raise AdapterError(
            f"actor.model.lora.quantization: {lora.quantization}, but bitsandbytes quantizes "
            f"linear modules only, and experts ({_pattern(experts[0])}) are stacked weights; set "
            "none, or add '.*experts.*' to actor.model.lora.exclude_modules"
        )
    # First quantize: peft chooses its kind of wrapper by the module that it finds.
    quantized = lora.quantization != "none" and not next(model.parameters()).is_meta
    if quantized:
        quantize(model, modules)
    settings = LoraConfig(
        r=lora.rank,
        # peft annotates an int, and uses it only as alpha / r.
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=lora.dropout,
        target_modules=modules,
        target_parameters=experts or None,
    )
    setattr(model, _IN_4_BITS, quantized)
    inject_adapter_in_model(settings, model)
    delattr(model, _IN_4_BITS)
    for name, weight in model.named_parameters():
        if is_adapter(name):
            weight.data = weight.data.float()
    # peft matches names by its own rules: compare what it wrapped with what was chosen.
    wrapped = set(map(unwrapped_name, adapters(model)))
    expected = {*experts, *(f"{name}.weight" for name in modules)}
    if differing := sorted(wrapped ^ expected):
        raise AdapterError(
            f"actor.model.lora.target_modules: peft adapts {len(differing)} weight(s) otherwise "
            f"than asked, such as {differing[0]}; name modules with names of their own"
        )


def adapted_names(model: PreTrainedModel, family: Family, lora: LoraSettings) -> list[str]:
    """Return the names of modules and stacked experts that get adapters, in the model's order.

    Raises:
        AdapterError: an entry matches no linear module, or all that match are excluded.
    """
    linear = {name: part_of(f"{name}.", family) for name in linear_names(model)}
    chosen = _matching("target_modules", lora.target_modules, linear)
    chosen -= _matching("exclude_modules", lora.exclude_modules, linear)
    if not chosen:
        raise AdapterError(
            f"actor.model.lora: target_modules={lora.target_modules} less "
            f"exclude_modules={lora.exclude_modules} leave no module to adapt; exclude fewer"
        )
    return [name for name in linear if name in chosen]


def linear_names(model: PreTrainedModel) -> Iterator[str]:
    """Yield the names of linear modules, and of parameters that stack the matrices of experts.

    Routers are left out, which stay as they are, and the output embedding: the logprob head
    multiplies by its weight in chunks and never calls the module.
    """
    head, stacked = model.get_output_embeddings(), set(stacked_weights(model))
    in_routers = {module for router in routers(model).values() for module in router.modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head and module not in in_routers:
            yield name
        for parameter_name, _ in module.named_parameters(recurse=False):
            if f"{name}.{parameter_name}" in stacked:
                yield f"{name}.{parameter_name}"


def _matching(key: str, entries: Sequence[str], linear: dict[str, str]) -> set[str]:
    """Return the names in `linear` that some entry matches.

    `linear` holds the part (`PARTS`) of each name. `key` is the setting, for the message.

    Raises:
        AdapterError: an entry matches no name.
    """
    matching_names: set[str] = set()
    for entry in entries:
        entry_names = {
            name
            for name, part in linear.items()
            if part in NAMED.get(entry, ())
            or f".{name}".endswith(f".{entry}")
            or re.fullmatch(entry, name)
        }
        if not entry_names:
            patterns = ", ".join(sorted({_pattern(name) for name in linear}))
            raise AdapterError(
                f"actor.model.lora.{key}: {entry!r} matches no linear module; name one of "
                f"{', '.join(NAMED)}, the end of a path or a regular expression for a whole one. "
                f"There are: {patterns}"
            )
        matching_names |= entry_names
    return matching_names


def _pattern(name: str) -> str:
    """Return a module's path with `*` for its numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _module_or_parameter(model: nn.Module, name: str) -> Any:
    """Return the module or parameter of this dotted name."""
    path, _, last = name.rpartition(".")
    return getattr(model.get_submodule(path), last)


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def unwrapped_name(name: str) -> str:
    """Return the name that a parameter had before peft wrapped its module."""
    return name.replace(".base_layer", "")


def adapters(model: nn.Module) -> dict[str, Any]:
    """Return peft's modules by the name of the parameter that each adapts."""
    modules_by_parameter = {}
    for path, module in model.named_modules():
        if isinstance(getattr(module, "lora_A", None), nn.ModuleDict):
            inner: Any = module
            while hasattr(inner, "lora_A"):
                path, inner = f"{path}.base_layer", inner.base_layer
            modules_by_parameter[f"{path}.{getattr(module, 'parameter_name', 'weight')}"] = module
    return modules_by_parameter


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Compute without adapters in this context, as the reference of a model trained by LoRA."""
    layers = list(adapters(model).values())
    try:
        for layer in layers:
            # peft's method also freezes the adapters, which FSDP's sharded parameters do not allow.
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def engine_weights(model: nn.Module, merged: bool) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """Yield (name in the engine, parameter, peft's module to add to it or None) of every weight.

    With `merged`, names are those of the model without adapters; otherwise those of a model with
    the same adapters, which are yielded as weights.
    """
    layers = adapters(model) if merged else {}
    for name, weight in model.named_parameters():
        if not (merged and is_adapter(name)):
            yield unwrapped_name(name) if merged else name, weight, layers.get(name)


def with_adapter(weight: torch.Tensor, layer: Any) -> torch.Tensor:
    """Return weight + alpha / r · B · A in float32, sharded as the weight is.

    Nothing is changed. Collective for a sharded weight.
    """
    a, b = (
        _full_weight(factor[ADAPTER].weight, weight.device)
        for factor in (layer.lora_A, layer.lora_B)
    )
    # A sharded weight needs only its own rows of the product.
    local, rows = weight, slice(None)
    if isinstance(weight, DTensor):
        (n_rows, *_), (first_row, *_) = compute_local_shape_and_global_offset(
            weight.shape, weight.device_mesh, weight.placements
        )
        local, rows = weight.to_local(), slice(first_row, first_row + n_rows)
    # peft stores the factors of experts as A [experts · r, in] and B [out, r · experts].
    if weight.ndim == 3:
        assert not getattr(layer.get_base_layer(), "is_transposed", False), (
            "experts are [experts, out, in] here"
        )
        a, b = (
            a.view(len(weight), -1, a.shape[-1])[rows],
            b.view(len(b), -1, len(weight))[..., rows],
        )
        delta = torch.bmm(b.permute(2, 0, 1), a)
    else:
        delta = b[rows] @ a
    out = delta.mul_(layer.scaling[ADAPTER]).add_(local)
    if isinstance(weight, DTensor):
        out = DTensor.from_local(
            out,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
    return out


def _full_weight(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the weight on this device, gathered from all ranks if it is sharded (collective)."""
    weight = weight.detach().to(device)
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


@torch.no_grad()
def merge_adapters(model: PreTrainedModel) -> None:
    """Add the adapters to the weights of a model on one device, and remove peft's wrappers.

    Quantized weights become float32.
    """
    layers, weights = adapters(model), dict(model.named_parameters())
    for name, layer in layers.items():
        weight = weights[name]
        if is_quantized(weight):
            base = layer.get_base_layer()
            plain = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
            plain.weight, plain.bias = nn.Parameter(with_adapter(dense(weight), layer)), base.bias
            layer.base_layer = plain
        else:
            weight.data = with_adapter(weight.data, layer).to(weight.dtype)
    remove_wrappers(model)


def remove_wrappers(model: PreTrainedModel) -> dict[str, Any]:
    """Put the modules that peft has wrapped in the wrappers' places.

    Returns:
        peft's modules by the name that the adapted parameter then has.
    """
    layers = adapters(model)
    # A module with several adapted parameters has wrappers within wrappers: replace the outer one.
    wrappers = set(layers.values())
    for path, module in list(model.named_modules()):
        if module in wrappers and ".base_layer" not in path:
            wrapper: Any = module
            model.set_submodule(path, wrapper.get_base_layer())
    return {unwrapped_name(name): layer for name, layer in layers.items()}
