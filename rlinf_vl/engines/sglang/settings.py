"""The settings of an SGLang engine, as server arguments and environment variables.

Nothing is started here and SGLang is not imported, so that the choice can be tested without a
device.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from rlinf_vl.engines.sglang import masked, receive
from rlinf_vl.engines.sglang.machine import PLATFORM, cuda_environment

#: Tokens added to the context length, because SGLang reserves a few of it.
CONTEXT_SLACK = 8
#: Memory for embeddings of images, on the engine's device: about 50 images of 400 tokens for a
#: model of 2B in bfloat16.
EMBEDDINGS_MB = 256
#: Most tokens of one prefill on the CPU, where the tower attends over the patches of all its images
#: under a dense mask.
CPU_PREFILL = 256
#: Decoding steps between two prefills, once half of the slots decode: SGLang's own figure for
#: Qwen3-VL on large Hopper GPUs, which it applies from the first request on. Below half, prompts
#: are admitted at once: a batch of rollouts begins with all of them.
PREFILL_INTERVAL = 22
#: Seconds after which SGLang ends a scheduler in the middle of a forward pass. Its own 300 can be
#: too few for the first pass on a GPU, which compiles kernels; `alive` sees one that hangs.
WATCHDOG_S = 1200
#: Threads that make the patches of images beside a GPU; on the CPU there is one.
PIXEL_THREADS = 4
#: Package of the multimodal processors that SGLang uses in place of its own.
PROCESSORS = "rlinf_vl.engines.sglang.processors"
#: Package and class of the model that runs a family of the general path, and the key of the config
#: with the paths of its vision tower and its text model.
MODELS, GENERAL_MODEL = "rlinf_vl.engines.sglang.models", "RlinfVlGeneral"
GENERAL_PATHS = "rlinf_vl_paths"


#: Server arguments that name the backend of attention: for all, for prompts, for decoding.
ATTENTION_BACKENDS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
)


def deterministic_backend() -> str:
    """Return the backend of attention in deterministic mode on this machine's GPUs.

    It is SGLang's own choice up to Hopper. On newer GPUs SGLang takes flashinfer, with which it can
    have no prefix cache in this mode.
    """
    is_newer = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)
    return "triton" if is_newer else "fa3"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of an engine, as the config has them.

    Attributes:
        context_length: most tokens of a prompt and its response together.
        max_running: most samples decoded at once.
        memory_share: of the device's memory, for weights and KV cache together (on the CPU: of free
            memory, for the cache).
        device: "cuda" or "cpu".
        shared_gpu: actor ranks use the engine's GPU, so it must be able to give its memory back.
        wakes_empty: weights are gone after a sleep, and a sync brings all of them; otherwise SGLang
            keeps a copy on the host.
        tp_size: GPUs of the engine.
        ep_size: of those, the ones among which whole experts are divided; 1: each expert is cut
            into slices.
        attn_dp_size: groups of those that each attend to requests of their own.
        cpu_threads: of each engine process, on the CPU.
        deterministic: SGLang's batch-invariant kernels: a sample depends on its request and its
            seed, not on what is decoded beside it. It costs throughput (about a third in SGLang's
            own account).
        report_routes: samples have the column `ROUTES`, if the model has mixtures of experts.
        keep_kv: `rollout.kv_after_update` is keep.
        extra_arguments: server arguments that override those chosen here.
    """

    model_path: str
    context_length: int
    max_running: int
    dtype: torch.dtype = torch.bfloat16
    memory_share: float = 0.6
    device: str = "cpu"
    shared_gpu: bool = False
    wakes_empty: bool = False
    tp_size: int = 1
    ep_size: int = 1
    attn_dp_size: int = 1
    cpu_threads: int = 1
    deterministic: bool = False
    trust_remote_code: bool = False
    report_routes: bool = False
    keep_kv: bool = False
    extra_arguments: Mapping[str, Any] = field(default_factory=dict)

    def server_arguments(
        self, kv_tokens: int, model_config: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return arguments of SGLang's `ServerArgs` (0.5.23), by its own names.

        Args:
            kv_tokens: size of the KV cache on the CPU, where SGLang by itself would take most of
                the memory.
            model_config: keys in place of those in the checkpoint's config.json.
        """
        arguments: dict[str, Any] = {
            "model_path": self.model_path,
            "trust_remote_code": self.trust_remote_code,
            "dtype": str(self.dtype).removeprefix("torch."),
            "context_length": self.context_length + CONTEXT_SLACK,
            "max_running_requests": self.max_running,
            "tp_size": self.tp_size,
            "ep_size": self.ep_size,
            "attn_dp_size": self.attn_dp_size,
            "skip_tokenizer_init": True,  # ids in, ids out
            "grammar_backend": "none",
            "skip_server_warmup": True,
            "watchdog_timeout": WATCHDOG_S,
            "weight_version": "0",
            "custom_weight_loader": [masked.LOADER, receive.LOADER],
            "log_level": "error",
            # as the trainer's; bfloat16 would round a logit of 20 by up to 0.06
            "enable_fp32_lm_head": True,
            # on large Hopper GPUs the default keeps 1 GiB of the GPU for pixels
            "mm_feature_transport": "cpu",
            "mm_preprocess_cache_size_mb": 0,  # pixels come processed
            "prefill_decode_interval": PREFILL_INTERVAL,
            "prefill_decode_interval_min_bs": max(1, self.max_running // 2),
        }
        if (self.device == "cpu" or self.shared_gpu) and self.attn_dp_size == 1:
            # An idle scheduler polls a core, which ranks need meanwhile. (With several groups of
            # attention each would sleep by itself, while the others wait for it in a collective.)
            arguments["sleep_on_idle"] = True
        if model_config:
            arguments["json_model_override_args"] = json.dumps(model_config)
        if self.device == "cpu":
            arguments |= {
                "device": "cpu",
                "attention_backend": "torch_native",
                "mm_attention_backend": "sdpa",
                "sampling_backend": "pytorch",
                "disable_cuda_graph": True,
                "disable_overlap_schedule": True,
                "max_total_tokens": kv_tokens,
                "chunked_prefill_size": CPU_PREFILL,
            }
        else:
            arguments |= {"device": "cuda", "mem_fraction_static": self.memory_share}
            if self.shared_gpu:
                arguments["enable_memory_saver"] = True
                arguments["enable_weights_cpu_backup"] = not self.wakes_empty
            if self.deterministic:
                # Without rl_on_policy_target: with it SGLang gives image prompts plain positions
                # instead of M-RoPE.
                arguments["enable_deterministic_inference"] = True
                # By itself SGLang may take one backend for prompts and another for decoding: a
                # token would depend on whether it was decoded or came back in a prompt.
                backend = self.extra_arguments.get("attention_backend", deterministic_backend())
                arguments |= dict.fromkeys(ATTENTION_BACKENDS, backend)
        # with the overlap, an update in place labels one old token too many as new
        if self.keep_kv:
            arguments["disable_overlap_schedule"] = True
        if self.report_routes:
            arguments["enable_return_routed_experts"] = True
        return arguments | dict(self.extra_arguments)

    @property
    def pixel_threads(self) -> int:
        """Threads that make the patches of images."""
        return 1 if self.device == "cpu" else PIXEL_THREADS

    def environment(self) -> dict[str, str]:
        """Return environment variables to set before SGLang is imported; its processes inherit
        them."""
        environment = {
            "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": PROCESSORS,
            "SGLANG_EXTERNAL_MODEL_PACKAGE": MODELS,
            "SGLANG_EXTERNAL_MM_MODEL_ARCH": GENERAL_MODEL,
            # This cache survives weight updates, so an image's identity depends on the tower
            # (`messages.SentImage`).
            "SGLANG_VLM_CACHE_SIZE_MB": str(EMBEDDINGS_MB),
            # for the slack; the engine checks the limit itself
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        }
        if self.device != "cpu":
            return environment | cuda_environment(
                self.shared_gpu, self.shared_gpu and not self.wakes_empty
            )
        cores = sorted(os.sched_getaffinity(0))
        return environment | {
            "SGLANG_PLATFORM": PLATFORM,
            "SGLANG_USE_CPU_ENGINE": "0",
            # With torch.compile left on, or more threads than cores, decoding is several times
            # slower.
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": str(self.cpu_threads),
            # Cores for each process; without it SGLang wants a NUMA node for each.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(
                str(cores[rank % len(cores)]) for rank in range(self.tp_size)
            ),
            # each process warns of quantisations that need a GPU
            "PYTHONWARNINGS": "ignore:Only CUDA",
        }

    def kv_tokens_that_fit(self, token_bytes: int, row_bytes: int = 0) -> int:
        """Return the size of a CPU engine's KV cache in tokens.

        It holds `max_running` samples of the greatest length, if they fit in `memory_share` of the
        free memory, after `row_bytes` for each sample whatever its length.

        Raises ValueError if not one sample fits.
        """
        cache_bytes = (
            psutil.virtual_memory().available * self.memory_share - self.max_running * row_bytes
        )
        fit = int(cache_bytes / token_bytes)
        longest = self.context_length + CONTEXT_SLACK
        if fit < longest:
            raise ValueError(
                f"free memory holds a KV cache of {fit} tokens, one sample can have {longest}"
            )
        return min(self.max_running * longest, fit)
