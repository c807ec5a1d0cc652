"""SGLang's platform for machines without a GPU; never applied on CUDA.

SGLang's kernel wheels need a CUDA driver, and the kernels of its own CPU mode are in no registry.
Its official hook for other platforms is the entry-point group `sglang.srt.platforms`: a platform
whose `_enum` is `OOT` uses the code paths in plain torch. `activate` is that entry point
(pyproject.toml). Every process of the engine looks it up, so this package must be installed (`pip
install -e .`), not merely on the path. SGLang's code stays as it is but for `experts_of_process`.
"""

# SGLang has an environment of its own; types are checked in the other.
# pyright: reportMissingImports=false

import functools
import os
from collections.abc import Callable
from typing import Any

from rlinf_vl.engines.sglang.machine import PLATFORM


def activate() -> str | None:
    """Return the path of `CpuPlatform`, or None unless `Settings.environment` chose the CPU.

    This is the entry point, and it does not import SGLang.
    """
    return f"{__name__}:CpuPlatform" if os.environ.get("SGLANG_PLATFORM") == PLATFORM else None


def experts_of_process(
    forward: Callable[..., Any], layer: Any, x: Any, topk_output: Any, config: Any
) -> Any:
    """Return the part of a mixture's output that the experts of this process make: [T, hidden].

    `forward`: SGLang's plain torch path, which knows no absent experts (id -1).
    """
    import torch
    from torch.nn.functional import linear, silu

    if len(layer.w13_weight) == layer.num_experts:
        return forward(layer, x, topk_output, config)
    assert config.activation == "silu", config.activation
    weights, ids = topk_output[0], topk_output[1]
    output = torch.zeros_like(x)
    for expert in ids[ids >= 0].unique().tolist():
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(x[tokens], layer.w13_weight[expert]).chunk(2, dim=-1)
        outputs = linear(silu(gate) * up, layer.w2_weight[expert])
        output.index_add_(0, tokens, outputs * weights[tokens, choices, None].to(x.dtype))
    return output


@functools.cache
def _platform() -> type:
    import torch
    from sglang.srt.platforms.cpu import CpuSRTPlatform
    from sglang.srt.platforms.device_mixin import PlatformEnum

    class CpuPlatform(CpuSRTPlatform):
        _enum = PlatformEnum.OOT

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def init_backend(self) -> None:
            from sglang.srt.configs import update_config
            from sglang.srt.layers.moe import fused_moe_native
            from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

            fused_moe_native.moe_forward_native = functools.partial(
                experts_of_process, fused_moe_native.moe_forward_native
            )
            # SGLang pads what a process has of an MLP for its CPU kernels, and only their loaders
            # know of it.
            update_config.DEFAULT_MOE_PADDING_SIZE = 1
            torch.cuda.synchronize = lambda *args, **kwargs: None  # called when memory is released
            # SGLang's allocator pins memory by CUDA, also for the table of routed experts.
            ALLOC_MEMORY_FUNCS["cpu"] = lambda shape, dtype, **_: torch.empty(shape, dtype=dtype)

    return CpuPlatform


def __getattr__(name: str) -> type:
    # built when SGLang asks for it, so that importing this module does not import SGLang
    if name == "CpuPlatform":
        return _platform()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
