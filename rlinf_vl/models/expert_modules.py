"""Mixtures of experts in a transformers model, known by their structure and not by any name.

A mixture is a module that has experts, stacked in weights [E, …] or listed one by one, and beside
them a router, whose matrices all have E rows: one for each expert.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from rlinf_vl.models.shapes import Mixture

#: Names that routers and configs have for the number of experts of a token.
TOP_K_NAMES = ("top_k", "num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")


@dataclass(frozen=True)
class ExpertModules:
    """The modules of one mixture.

    Attributes:
        path: of the mixture in the model; `router_path`: of its router.
        experts: the module with the experts; `size`: their number.
    """

    path: str
    router_path: str
    router: Any
    experts: nn.Module
    size: int


def expert_modules(model: nn.Module) -> Iterator[ExpertModules]:
    """Yield the mixtures of a model, by layer. Adapters of peft do not matter."""
    for path, module in model.named_modules():
        children = dict(module.named_children())
        if "base_layer" in children:  # a wrapper of peft, whose factors are no router
            continue
        for experts in children.values():
            size = _number_of_experts(experts)
            for name, router in children.items():
                if size > 1 and router is not experts and _row_counts(router) == {size}:
                    router_path = f"{path}.{name}" if path else name
                    yield ExpertModules(path, router_path, router, experts, size)


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the routers of a model's mixtures by their paths."""
    return {mixture.router_path: mixture.router for mixture in expert_modules(model)}


def expert_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of all experts by their names, biases included; not their adapters."""
    ids = {id(p) for mixture in expert_modules(model) for p in mixture.experts.parameters()}
    return {
        name: p for name, p in model.named_parameters() if id(p) in ids and not _is_of_adapter(name)
    }


def stacked_weights(model: nn.Module) -> list[str]:
    """Return the names of the parameters that stack the matrices of experts, [experts, …, …]."""
    return [name for name, weight in expert_weights(model).items() if weight.ndim == 3]


def mixture_of(model: Any) -> Mixture | None:
    """Return the mixtures of experts of a transformers model; None if it has none."""
    mixtures = list(expert_modules(model))
    if not mixtures:
        return None
    owners = (mixtures[0].router, model.config.get_text_config())
    values = (getattr(owner, name, None) for owner in owners for name in TOP_K_NAMES)
    layers = {int(s) for m in mixtures for s in m.path.split(".") if s.isdecimal()}
    top_k = next((k for k in values if isinstance(k, int)), 1)
    return Mixture(tuple(sorted(layers)), mixtures[0].size, top_k)


def active_numel(model: Any, path: str) -> int:
    """Return the parameters below `path` that a token uses: of experts those that it goes to."""
    prefix, mixture, experts = f"{path}.", mixture_of(model), expert_weights(model)
    numel = sum(p.numel() for p in model.get_submodule(path).parameters())
    if mixture is None:
        return numel
    of_experts = sum(p.numel() for name, p in experts.items() if name.startswith(prefix))
    return numel - of_experts + of_experts * mixture.top_k // mixture.experts


def _number_of_experts(module: nn.Module) -> int:
    """Return the number of experts that a module may have, 0 if it can be no module of experts."""
    while hasattr(module, "base_layer"):  # a wrapper of peft
        module = module.get_submodule("base_layer")
    if isinstance(module, nn.ModuleList):
        return len(module)
    holders = [m for m in (module, *module.children()) if not _is_of_torch(m)]
    sizes = {
        len(p) for m in holders for p in m.parameters(recurse=False) if p.ndim == 3 and len(p) > 1
    }
    return sizes.pop() if len(sizes) == 1 else 0


def _row_counts(module: nn.Module) -> set[int]:
    """Return the numbers of rows of a module's matrices, adapters left out."""
    return {
        len(p) for name, p in module.named_parameters() if p.ndim == 2 and not _is_of_adapter(name)
    }


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _is_of_adapter(name: str) -> bool:
    return "lora_" in name
