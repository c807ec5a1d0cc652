"""SGLang's platform for machines without a GPU; never applied on CUDA.

SGLang's kernel wheels need a CUDA driver, and the kernels of its own CPU mode are in no registry.
Its official hook for other platforms is the entry-point group `sglang.srt.platforms`: a platform
whose `_enum` is `OOT` uses the code paths in plain torch. `activate` is that entry point
(pyproject.toml). Every process of the engine looks it up, so this package must be installed (`pip
install -e .`), not merely on the path. No SGLang code is patched.
"""

# SGLang has an environment of its own; types are checked in the other.
# pyright: reportMissingImports=false

import functools
import os

from rlinf_vl.engines.sglang.machine import PLATFORM


def activate() -> str | None:
    """Return the path of `CpuPlatform`, or None unless `Settings.environment` chose the CPU.

    This is the entry point, and it does not import SGLang.
    """
    return f"{__name__}:CpuPlatform" if os.environ.get("SGLANG_PLATFORM") == PLATFORM else None


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
            from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

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
