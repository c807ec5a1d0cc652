"""LoRA (Hu et al. 2021) through peft: where adapters go, and the weights with adapters added.

peft wraps a module in place, and its weight becomes `base_layer.weight`: module paths stay, so that everything that a family says
of them holds. Adapters are float32 whatever the model's dtype; the model below them is not trained.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from rlinf_vl.errors import ConfigError
from rlinf_vl.models.families import Family
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
_IN_4_BITS = "is_loaded_in_4bit"  # by which peft knows that it must use its modules for quantized weights


class AdapterError(ConfigError):
    """Adapters can't be put where the settings say."""


class LoraSettings(Protocol):
    """Section `actor.model.lora` of a config."""

    rank: int
    alpha: float
    dropout: float
    target_modules: list[str]
    exclude_modules: list[str]
    quantization: str


def train_parts(
    model: PreTrainedModel, family: Family, frozen: Collection[str], lora: LoraSettings | None, *, router: bool = True
) -> None:
    """Let adapters be trained and nothing else; without `lora` everything but the `frozen` ones of `PARTS`, and the routers of
    mixtures unless `router` lets them."""
    if lora is None:
        freeze(model, family, frozen, router=not router)
    else:
        add_adapters(model, family, lora)


def add_adapters(model: PreTrainedModel, family: Family, lora: LoraSettings) -> None:
    """Wrap the targets, quantized if the settings say so, in adapters that add nothing yet, and freeze everything else. On the
    device `meta` nothing is quantized.

    Raises:
        AdapterError: the settings name nothing that is there, or experts get adapters with dropout or quantization.
    """
    from peft import LoraConfig, inject_adapter_in_model  # which takes seconds

    names = adapted_names(model, family, lora)
    modules = [name for name in names if isinstance(_get(model, name), nn.Module)]
    experts = [name for name in names if name not in modules]
    if experts and lora.dropout:
        raise AdapterError(
            f"actor.model.lora.dropout: {lora.dropout:g}, but adapters of experts ({_pattern(experts[0])}) have none; set it to 0, "
            "or add experts to actor.model.lora.exclude_modules"
        )
    if experts and lora.quantization != "none":
        raise AdapterError(
            f"actor.model.lora.quantization: {lora.quantization}, but bitsandbytes quantizes linear modules only, and experts "
            f"({_pattern(experts[0])}) are stacked weights; set none, or add '.*experts.*' to actor.model.lora.exclude_modules"
        )
    quantized = lora.quantization != "none" and not next(model.parameters()).is_meta
    if quantized:
        quantize(model, modules)
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # of no use but as alpha / r
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
    wrapped = set(map(_original, adapters(model)))
    expected = {*experts, *(f"{name}.weight" for name in modules)}
    assert wrapped == expected, f"peft adapts {sorted(wrapped ^ expected)} otherwise than asked"


def adapted_names(model: PreTrainedModel, family: Family, lora: LoraSettings) -> list[str]:
    """Names of the modules, and of the stacked matrices of experts, that get adapters, in the model's order.

    Raises:
        AdapterError: an entry matches no linear module, or all that match are excluded.
    """
    linear = {name: part_of(f"{name}.", family) for name in linear_names(model)}
    chosen = _matching("target_modules", lora.target_modules, linear)
    chosen -= _matching("exclude_modules", lora.exclude_modules, linear)
    if not chosen:
        raise AdapterError(
            f"actor.model.lora: target_modules={lora.target_modules} less exclude_modules={lora.exclude_modules} leave no module "
            "to adapt; exclude fewer"
        )
    return [name for name in linear if name in chosen]


def linear_names(model: PreTrainedModel) -> Iterator[str]:
    """Names of linear modules, and of parameters that stack the matrices of experts, [experts, out, in]. The output embedding is
    left out: its logits are never whole, and so not a module's."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name
        elif not type(module).__module__.startswith("torch."):
            for own, weight in module.named_parameters(recurse=False):
                if weight.ndim == 3 and len(weight) > 1:
                    yield f"{name}.{own}"


def _matching(key: str, entries: Sequence[str], linear: dict[str, str]) -> set[str]:
    """Those of `linear` (names, and the part of each) that some entry names."""
    found: set[str] = set()
    for entry in entries:
        hits = {
            name
            for name, part in linear.items()
            if part in NAMED.get(entry, ()) or f".{name}".endswith(f".{entry}") or re.fullmatch(entry, name)
        }
        if not hits:
            there = ", ".join(sorted({_pattern(name) for name in linear}))
            raise AdapterError(
                f"actor.model.lora.{key}: {entry!r} matches no linear module; name one of {', '.join(NAMED)}, the end of a path or "
                f"a regular expression for a whole one. There are: {there}"
            )
        found |= hits
    return found


def _pattern(name: str) -> str:
    """A module's path without its numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _get(model: nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    return getattr(model.get_submodule(path), last)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def _original(name: str) -> str:
    return name.replace(".base_layer", "")


def adapters(model: nn.Module) -> dict[str, Any]:
    """peft's module by the name of the parameter that it adapts."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(getattr(module, "lora_A", None), nn.ModuleDict):
            inner: Any = module
            while hasattr(inner, "lora_A"):
                path, inner = f"{path}.base_layer", inner.base_layer
            found[f"{path}.{getattr(module, 'parameter_name', 'weight')}"] = module
    return found


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Compute as the model without its adapters: the reference of a model that is trained by LoRA."""
    layers = list(adapters(model).values())
    try:
        for layer in layers:
            layer._disable_adapters = True  # peft's own call also freezes, which FSDP's sharded parameters must not be
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def engine_weights(model: nn.Module, merged: bool) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """(name in the engine, parameter, peft's module to add to it or None) of every weight. `merged`: names are those of the model
    without adapters; otherwise those of a model with the same adapters, whose own come along."""
    layers = adapters(model) if merged else {}
    for name, weight in model.named_parameters():
        if not (merged and is_adapter(name)):
            yield _original(name) if merged else name, weight, layers.get(name)


def with_adapter(weight: torch.Tensor, layer: Any) -> torch.Tensor:
    """weight + alpha / r · B · A in float32, sharded as the weight is; nothing is changed. Collective for a sharded weight."""
    a, b = (_whole(factor[ADAPTER].weight, weight.device) for factor in (layer.lora_A, layer.lora_B))
    local, rows = weight, slice(None)
    if isinstance(weight, DTensor):
        (count, *_), (first, *_) = compute_local_shape_and_global_offset(
            weight.shape, weight.device_mesh, weight.placements
        )
        local, rows = weight.to_local(), slice(first, first + count)
    if weight.ndim == 3:  # peft: A [experts · r, in], B [out, r · experts]
        assert not getattr(layer.get_base_layer(), "is_transposed", False), "experts are [experts, out, in] here"
        a, b = a.view(len(weight), -1, a.shape[-1])[rows], b.view(len(b), -1, len(weight))[..., rows]
        delta = torch.bmm(b.permute(2, 0, 1), a)
    else:
        delta = b[rows] @ a
    out = delta.mul_(layer.scaling[ADAPTER]).add_(local)
    if isinstance(weight, DTensor):
        out = DTensor.from_local(
            out, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
    return out


def _whole(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    weight = weight.detach().to(device)
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


@torch.no_grad()
def merge_adapters(model: PreTrainedModel) -> None:
    """Add the adapters to the weights of a model on one device, and take the wrappers away. Quantized weights become float32."""
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
    wrappers = set(layers.values())
    for path, module in list(model.named_modules()):
        if module in wrappers and ".base_layer" not in path:
            wrapper: Any = module
            model.set_submodule(path, wrapper.get_base_layer())


def save_adapters(model: PreTrainedModel, folder: Path, base: str) -> None:
    """Write the adapters for `peft.PeftModel.from_pretrained` on the transformers model at `base`."""
    config: Any = model.peft_config[ADAPTER]  # pyright: ignore[reportIndexIssue]
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(str(folder))
    weights = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": value.detach().contiguous()
        for name, value in model.named_parameters()
        if is_adapter(name)
    }
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
