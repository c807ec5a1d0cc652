"""SGLang without a GPU: all that the engine needs to run on the CPU, and nothing else; never applied on CUDA.

SGLang's kernel wheels need a CUDA driver, and the kernels of its own CPU mode are in no registry. It has an official door
for other platforms, the entry-point group `sglang.srt.platforms`: a platform whose `_enum` is `OOT` takes the paths written
in plain torch. `activate` is that entry point (pyproject.toml); every process of the engine looks it up, so this package
must be installed (`pip install -e .`), not merely on the path. No SGLang code is patched.
"""

# SGLang has an environment of its own; types are checked in the other.
# pyright: reportMissingImports=false

import functools
import os
from importlib.metadata import entry_points, version
from typing import Any

#: Versions whose interfaces are known, first and last.
SUPPORTED = ("0.5.17", "0.5.23")

_GROUP, _NAME = "sglang.srt.platforms", "rlinf_vl_cpu"


def supported() -> str:
    """The installed version of SGLang; RuntimeError if it is none that this module knows."""
    found = version("sglang")
    first, last, parts = (tuple(int(p) for p in v.split(".post")[0].split(".")[:3]) for v in (*SUPPORTED, found))
    if not first <= parts <= last:
        raise RuntimeError(
            f"SGLang {found} on the CPU: known are {SUPPORTED[0]} to {SUPPORTED[1]}; "
            f"`bash requirements/install.sh --sglang {SUPPORTED[1]}` installs one"
        )
    if not any(e.name == _NAME for e in entry_points(group=_GROUP)):
        raise RuntimeError(
            f"SGLang on the CPU needs the entry point {_NAME!r} of {_GROUP}, which an older installation of rlinf_vl"
            " lacks; `bash requirements/install.sh --sglang` registers it"
        )
    return found


def cpu_environment(threads: int) -> dict[str, str]:
    """Environment variables to set before SGLang is imported; its processes inherit them.

    With torch.compile left on, or more threads than cores, decoding is several times slower.
    """
    return {
        "SGLANG_PLATFORM": _NAME,
        "SGLANG_USE_CPU_ENGINE": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONWARNINGS": "ignore:Only CUDA",  # from each process, of quantisations that need a GPU
    }


def cpu_arguments(kv_tokens: int) -> dict[str, Any]:
    """Server arguments. `kv_tokens`: size of the KV cache, which by default would take most of the memory."""
    arguments = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "mm_attention_backend": "sdpa",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "max_total_tokens": kv_tokens,
    }
    if version("sglang") == "0.5.17":
        arguments["disable_fast_image_processor"] = True
    return arguments


def activate() -> str | None:
    """The entry point: where `CpuPlatform` is; None unless `cpu_environment` is in force. It does not import SGLang."""
    return f"{__name__}:CpuPlatform" if os.environ.get("SGLANG_PLATFORM") == _NAME else None


@functools.cache
def _platform() -> type:
    import torch
    from sglang.srt.platforms.cpu import CpuSRTPlatform
    from sglang.srt.platforms.device_mixin import PlatformEnum

    def init_backend(self) -> None:
        torch.cuda.synchronize = lambda *args, **kwargs: None  # called when memory is released

    body: dict[str, Any] = {
        "_enum": PlatformEnum.OOT,
        "get_default_attention_backend": lambda self: "torch_native",
        "init_backend": init_backend,
    }
    if hasattr(CpuSRTPlatform, "get_mha_kv_pool_cls"):  # 0.5.17 asks for the in-tree classes too
        body |= _explicit_classes()
    return type("CpuPlatform", (CpuSRTPlatform,), body)


def _explicit_classes() -> dict[str, Any]:
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    def allocator(size, *, page_size, **kwargs):
        assert page_size == 1, page_size
        return TokenToKVPoolAllocator(size, **kwargs)

    return {
        "get_mha_kv_pool_cls": lambda self: MHATokenToKVPool,
        "get_paged_allocator_cls": lambda self: allocator,
        "get_graph_runner_cls": lambda self: lambda model_runner: None,
    }


def __getattr__(name: str) -> type:
    if name == "CpuPlatform":  # built when SGLang asks for it, so that importing this module does not import SGLang
        return _platform()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
