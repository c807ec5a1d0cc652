"""QLoRA (Dettmers et al. 2023): weights under adapters, stored in nf4 by bitsandbytes.

Quantization is double: 64 neighbours share a scale, and 256 scales share one, so a weight takes
`BITS`. Products use a dense weight of the dtype that it was quantized from, which `dense` returns.
FSDP2 cannot shard such a weight, so every rank has all of it.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

#: A code, an 8-bit scale for 64 of them, a float32 scale for 256 of those.
BITS = 4 + 8 / 64 + 32 / (64 * 256)

# peft imports bitsandbytes where it is installed, and that warns of a missing 4-bit kernel for
# CPUs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def quantize(model: nn.Module, names: Iterable[str]) -> None:
    """Replace linear modules by those of bitsandbytes.

    Weights are quantized on the device where they are, so that every process gets the same codes.
    """
    import bitsandbytes.nn  # imported here: it takes seconds, and is optional

    bnb_nn: Any = bitsandbytes.nn
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), name
        weight = linear.weight.data
        module = bnb_nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=False,
            compute_dtype=weight.dtype,
            device="meta",
        )
        packed = bnb_nn.Params4bit(
            weight, quant_type="nf4", compress_statistics=True, module=module
        )
        module.weight, module.bias = packed.to(weight.device), linear.bias
        # Otherwise `eval` rounds the scales of its weights to bfloat16, for good.
        module.support_avx512bf16_for_cpu = False
        model.set_submodule(name, module.train(linear.training))


def is_quantized(weight: torch.Tensor) -> bool:
    """Return whether a weight is stored in nf4."""
    return getattr(weight, "quant_state", None) is not None


def shape_of(weight: Any) -> torch.Size:
    """Return a weight's shape, that of the dense weight if it is packed."""
    return torch.Size(weight.quant_state.shape) if is_quantized(weight) else weight.shape


def dense(weight: Any) -> torch.Tensor:
    """Return the weight for products: a quantized one in the dtype that it was quantized from.

    Any other weight is returned as it is.
    """
    if not is_quantized(weight):
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)


def try_on(device: str) -> None:
    """Quantize a small module on the CPU, and check it and its gradient on `device`.

    Raises:
        ValueError: a product or a gradient is wrong.
    """
    linear = nn.Linear(128, 64, bias=False)
    model = nn.Sequential(linear)
    quantize(model, ["0"])
    model.to(device)
    x = torch.ones(2, 128, device=device, requires_grad=True)
    y, weight = model(x), dense(model[0].weight)
    y.sum().backward()
    is_close = (weight.cpu() - linear.weight).abs().max() < 0.05
    if (
        x.grad is None
        or not is_close
        or not torch.allclose(y, x @ weight.t(), atol=1e-3, rtol=1e-3)
    ):
        raise ValueError("a product with nf4 weights is wrong")
    if not torch.allclose(x.grad, weight.sum(0).expand_as(x), atol=1e-3, rtol=1e-3):
        raise ValueError("a gradient through nf4 weights is wrong")
