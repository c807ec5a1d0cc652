"""QLoRA (Dettmers et al. 2023): what adapters are on is stored in nf4 with double quantization, by bitsandbytes.

64 neighbours share a scale, and 256 scales one of theirs: a weight has `BITS`. It is computed with as a dense weight of the dtype
that it was quantized from, which `dense` returns. FSDP2 cannot cut it, so every rank has all of it.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

#: A code, an 8-bit scale for 64 of them, a float32 scale for 256 of those.
BITS = 4 + 8 / 64 + 32 / (64 * 256)

# peft imports bitsandbytes where it is installed, which then says what it lacks to decode on a CPU.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def quantize(model: nn.Module, names: Iterable[str]) -> None:
    """Replace linear modules by those of bitsandbytes, quantized where they are, so that every process gets the same codes."""
    import bitsandbytes.nn  # which takes seconds, and is optional

    made: Any = bitsandbytes.nn
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), name
        weight = linear.weight.data
        module = made.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=weight.dtype, device="meta"
        )
        packed = made.Params4bit(weight, quant_type="nf4", compress_statistics=True, module=module)
        module.weight, module.bias = packed.to(weight.device), linear.bias
        # Otherwise `eval` rounds the scales of its weights to bfloat16, for good.
        module.support_avx512bf16_for_cpu = False
        model.set_submodule(name, module.train(linear.training))


def is_quantized(weight: torch.Tensor) -> bool:
    return getattr(weight, "quant_state", None) is not None


def shape_of(weight: Any) -> torch.Size:
    """A weight's own shape, also of one that is packed."""
    return torch.Size(weight.quant_state.shape) if is_quantized(weight) else weight.shape


def dense(weight: Any) -> torch.Tensor:
    """What is computed with: a quantized weight in the dtype that it was quantized from, any other as it is."""
    if not is_quantized(weight):
        return weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)


def try_on(device: str) -> None:
    """Quantize a small module on the CPU, compute with it and its gradient on `device`; ValueError if these are wrong."""
    linear = nn.Linear(128, 64, bias=False)
    model = nn.Sequential(linear)
    quantize(model, ["0"])
    model.to(device)
    x = torch.ones(2, 128, device=device, requires_grad=True)
    y, weight = model(x), dense(model[0].weight)
    y.sum().backward()
    near = (weight.cpu() - linear.weight).abs().max() < 0.05
    if x.grad is None or not near or not torch.allclose(y, x @ weight.t(), atol=1e-3, rtol=1e-3):
        raise ValueError("a product with nf4 weights is wrong")
    if not torch.allclose(x.grad, weight.sum(0).expand_as(x), atol=1e-3, rtol=1e-3):
        raise ValueError("a gradient through nf4 weights is wrong")
