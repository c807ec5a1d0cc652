"""What passes between our types and SGLang's: requests, samples, weights."""

# SGLang has an environment of its own; types are checked in the other.
# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlinf_vl.types import Request, Sample, SamplingParams

#: Added to the logits of banned ids: exp of it is exactly 0.
BAN = -1e9


def bans(banned: np.ndarray) -> dict[str, float]:
    """`logit_bias` that keeps the ids of a bool [V] from being sampled; SGLang's logprobs leave them out too."""
    return {str(i): BAN for i in np.flatnonzero(banned)}


def parameters(sampling: SamplingParams, logit_bias: dict[str, float]) -> dict[str, Any]:
    """SGLang's sampling parameters. The checkpoint's own end ids (generation_config.json) stop a sample as well."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_ids),
        "logit_bias": logit_bias,
    }


def generation(request: Request, patches: Sequence[np.ndarray], sampling: dict[str, Any], cache_key: str) -> Any:
    """A `GenerateReqInput`: expanded ids, and what the image processor made of the images. (SGLang expands ids itself where
    it is given pictures; ids that are not expanded would be silently wrong with processed ones.)"""
    from sglang.srt.managers.io_struct import GenerateReqInput

    images = None
    if patches:
        images = [
            {
                "format": "processor_output",
                "pixel_values": torch.from_numpy(np.concatenate(patches)),
                "image_grid_thw": torch.from_numpy(request.image_grids.astype(np.int64)),
            }
        ]
    return GenerateReqInput(
        input_ids=request.ids.tolist(),
        image_data=images,
        sampling_params=sampling,
        return_logprob=True,
        logprob_start_len=-1,
        extra_key=cache_key,
    )


def as_sample(output: dict[str, Any], stop_ids: Sequence[int], submitted: int) -> Sample:
    """One of SGLang's outputs. `submitted`: the weight version at submission, for releases that report none per token."""
    meta = output["meta_info"]
    scored = meta.get("output_token_logprobs") or []
    ids = np.asarray(output["output_ids"], np.int32)
    assert ids.tolist() == [entry[1] for entry in scored], "ids and logprobs of a sample are not aligned"
    versions = np.full(len(ids), submitted, np.int32)
    for span in meta.get("weight_versions") or ():
        versions[span["start"] : span["end"]] = int(span["version"])
    reason = meta["finish_reason"]["type"]
    if reason == "length" and len(ids) and int(ids[-1]) in stop_ids:
        reason = "stop"
    return Sample(
        ids,
        np.asarray([entry[0] for entry in scored], np.float32),
        versions,
        reason if reason in ("stop", "length") else "error",
    )


def serialized(bucket: dict[str, torch.Tensor]) -> bytes:
    """A bucket as one flat tensor in shared memory, and the message that names it."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    flat = FlattenedTensorBucket(named_tensors=list(bucket.items()))
    return MultiprocessingSerializer.serialize(
        {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
    )


def kv_bytes_per_token(text: Any, dtype: torch.dtype) -> int:
    """Bytes of KV cache that one token takes in a model with this text config."""
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim * dtype.itemsize
