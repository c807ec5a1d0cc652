"""What an SGLang engine is started with, as its server arguments and environment variables.

Nothing is started here and SGLang is not imported, so that the choice can be tested without a device.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from rlinf_vl.engines.sglang.machine import PLATFORM, cuda_environment
from rlinf_vl.engines.sglang.masked import LOADER

#: SGLang keeps a few tokens of its context length to itself.
CONTEXT_SLACK = 8
#: Memory for embeddings of images, on the engine's device: about 50 images of 400 tokens for a model of 2B in bfloat16.
EMBEDDINGS_MB = 256
#: Most tokens of one prefill on the CPU: there the tower attends over all patches of all images of it, under a dense mask.
CPU_PREFILL = 256
#: Package of the multimodal processors that SGLang uses in place of its own.
PROCESSORS = "rlinf_vl.engines.sglang.processors"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """
    Attributes:
        context_length: most tokens of a prompt and its response together.
        max_running: most samples decoded at once.
        memory_share: of the device's memory, for weights and KV cache together (on the CPU: of free memory, for the cache).
        device: "cuda" or "cpu".
        shared_gpu: actor ranks use the engine's GPU, so it must be able to give its memory back.
        tp_size: GPUs of the engine.
        cpu_threads: of each engine process, on the CPU.
        deterministic: SGLang's batch-invariant kernels: a sample depends on its request and its seed, not on what is decoded
            beside it. It costs throughput (about a third in SGLang's own account).
        report_routes: samples have routes; for a model with mixtures of experts.
        keep_kv: `rollout.kv_after_update` is keep.
        more: server arguments that win over those chosen here.
    """

    model_path: str
    context_length: int
    max_running: int
    dtype: torch.dtype = torch.bfloat16
    memory_share: float = 0.6
    device: str = "cpu"
    shared_gpu: bool = False
    tp_size: int = 1
    cpu_threads: int = 1
    deterministic: bool = False
    trust_remote_code: bool = False
    report_routes: bool = False
    keep_kv: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    def server_arguments(self, kv_tokens: int, model_config: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Arguments of SGLang's `ServerArgs` (0.5.23), by its own names.

        Args:
            kv_tokens: size of the KV cache on the CPU, where it would take most of the memory.
            model_config: keys in place of those in the checkpoint's config.json.
        """
        arguments: dict[str, Any] = {
            "model_path": self.model_path,
            "trust_remote_code": self.trust_remote_code,
            "dtype": str(self.dtype).removeprefix("torch."),
            "context_length": self.context_length + CONTEXT_SLACK,
            "max_running_requests": self.max_running,
            "tp_size": self.tp_size,
            "skip_tokenizer_init": True,  # ids in, ids out
            "grammar_backend": "none",
            "skip_server_warmup": True,
            "weight_version": "0",
            "custom_weight_loader": [LOADER],
            "log_level": "error",
            "enable_fp32_lm_head": True,  # as the trainer's; bfloat16 would round a logit of 20 by up to 0.06
            "mm_feature_transport": "cpu",  # on large Hopper GPUs the default keeps 1 GiB of the GPU for pixels
            "mm_preprocess_cache_size_mb": 0,  # pixels come processed
        }
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
            if self.shared_gpu:  # the backup: frozen weights are not sent again after the memory was released
                arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
            if self.deterministic:
                # Without rl_on_policy_target: with it SGLang gives image prompts plain positions instead of M-RoPE.
                arguments["enable_deterministic_inference"] = True
        if self.keep_kv:  # with it, an update in place labels a token too many as new
            arguments["disable_overlap_schedule"] = True
        if self.report_routes:
            arguments["enable_return_routed_experts"] = True
        return arguments | dict(self.more)

    def environment(self) -> dict[str, str]:
        """Environment variables to set before SGLang is imported; its processes inherit them."""
        environment = {
            "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": PROCESSORS,
            # It survives weight updates: images are named with the tower that encodes them (`messages.SentImage`).
            "SGLANG_VLM_CACHE_SIZE_MB": str(EMBEDDINGS_MB),
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the slack; the engine checks the limit itself
        }
        if self.device != "cpu":
            return environment | cuda_environment(self.shared_gpu)
        return environment | {
            "SGLANG_PLATFORM": PLATFORM,
            "SGLANG_USE_CPU_ENGINE": "0",
            # With torch.compile left on, or more threads than cores, decoding is several times slower.
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": str(self.cpu_threads),
            "PYTHONWARNINGS": "ignore:Only CUDA",  # from each process, of quantisations that need a GPU
        }

    def kv_tokens_that_fit(self, token_bytes: int, row_bytes: int = 0) -> int:
        """Tokens for the KV cache of a CPU engine: what `max_running` of the longest samples can need, within `memory_share` of
        the free memory, beside what each sample has whatever its length. ValueError: not one sample fits."""
        room = psutil.virtual_memory().available * self.memory_share - self.max_running * row_bytes
        fit = int(room / token_bytes)
        longest = self.context_length + CONTEXT_SLACK
        if fit < longest:
            raise ValueError(f"free memory holds a KV cache of {fit} tokens, one sample can have {longest}")
        return min(self.max_running * longest, fit)
