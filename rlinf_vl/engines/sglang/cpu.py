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
from importlib.metadata import entry_points
from typing import Any

_GROUP, _NAME = "sglang.srt.platforms", "rlinf_vl_cpu"


def require_platform() -> None:
    """RuntimeError where SGLang will not find this module."""
    if not any(e.name == _NAME for e in entry_points(group=_GROUP)):
        raise RuntimeError(
            f"SGLang on the CPU needs the entry point {_NAME!r} of {_GROUP}, which an older installation of rlinf_vl"
            " lacks; `bash requirements/install.sh --sglang` registers it"
        )


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
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "mm_attention_backend": "sdpa",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "max_total_tokens": kv_tokens,
    }


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
    return type("CpuPlatform", (CpuSRTPlatform,), body)


def __getattr__(name: str) -> type:
    if name == "CpuPlatform":  # built when SGLang asks for it, so that importing this module does not import SGLang
        return _platform()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
