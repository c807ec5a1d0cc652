"""What SGLang is started with: server arguments and environment variables, from what the engine was asked for.

Pure functions: nothing is started and SGLang is not imported, so that the choice can be tested without a device.
"""

from collections.abc import Mapping
from typing import Any

import torch

from rlinf_vl.engines.sglang import cpu as sglang_cpu
from rlinf_vl.engines.sglang.cuda import cuda_environment

#: SGLang keeps a few tokens of its context length to itself.
CONTEXT_SLACK = 8
#: Package of the multimodal processors that SGLang takes in place of its own.
PROCESSORS = "rlinf_vl.engines.sglang.processors"


def server_arguments(
    model_path: str,
    *,
    context_length: int,
    max_running: int,
    dtype: torch.dtype,
    memory_share: float,
    device: str,
    tp_size: int,
    shared_gpu: bool,
    deterministic: bool,
    trust_remote_code: bool,
    kv_tokens: int | None,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Arguments of SGLang's `ServerArgs` (0.5.23), by its own names.

    Args:
        context_length: most tokens of a prompt and its response together.
        max_running: most samples decoded at once.
        memory_share: of a GPU's memory, for weights and KV cache together.
        device: "cuda" or "cpu".
        shared_gpu: actor ranks use the same GPU, so the engine must be able to give its memory back.
        deterministic: batch-invariant kernels, and samples that follow their seeds.
        kv_tokens: size of the KV cache in tokens, where device is "cpu".
        more: arguments that win over those chosen here.
    """
    arguments: dict[str, Any] = {
        "model_path": str(model_path),
        "trust_remote_code": trust_remote_code,
        "dtype": str(dtype).removeprefix("torch."),
        "context_length": context_length + CONTEXT_SLACK,
        "max_running_requests": max_running,
        "tp_size": tp_size,
        "skip_tokenizer_init": True,  # ids in, ids out
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "weight_version": "0",
        "log_level": "error",
        "enable_fp32_lm_head": True,  # as the trainer's; bfloat16 would round a logit of 20 by up to 0.06
        "mm_feature_transport": "cpu",  # on large Hopper GPUs the default keeps 1 GiB of the GPU for pixels
        "mm_preprocess_cache_size_mb": 0,  # pixels come processed
    }
    if device == "cpu":
        assert kv_tokens is not None, "the KV cache would take most of the memory"
        arguments |= sglang_cpu.cpu_arguments(kv_tokens)
    else:
        arguments |= {"device": "cuda", "mem_fraction_static": memory_share}
        if shared_gpu:  # the backup: weights that are frozen are not sent again after the memory was released
            arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        if deterministic:
            # Without rl_on_policy_target: with it SGLang gives image prompts plain positions instead of M-RoPE.
            arguments["enable_deterministic_inference"] = True
    return arguments | dict(more)


def engine_environment(device: str, cpu_threads: int, shared_gpu: bool) -> dict[str, str]:
    """Environment variables to set before SGLang is imported; its processes inherit them."""
    environment = {
        "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": PROCESSORS,
        # Embeddings of images seen before would survive a weight update: wrong as soon as the tower trains.
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the slack; the engine checks the limit itself
    }
    return environment | (sglang_cpu.cpu_environment(cpu_threads) if device == "cpu" else cuda_environment(shared_gpu))
