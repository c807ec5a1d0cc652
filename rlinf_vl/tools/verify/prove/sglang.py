"""A member on SGLang's CPU build: logprobs of what it samples, before and after a weight sync."""

import importlib.util
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from rlinf_vl.models.saving import save_model
from rlinf_vl.tools.verify.prove.member import Member
from rlinf_vl.tools.verify.prove.problems import SIZES, answered, random_request
from rlinf_vl.tools.verify.prove.reference import logprobs_of, pixels_of
from rlinf_vl.types import Request, SamplingParams

#: Config keys of ids to the tokens that Qwen's processors look for.
QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
PROCESSOR_FILES = {
    "preprocessor_config.json": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
    },
    "video_preprocessor_config.json": {"video_processor_type": "Qwen2VLVideoProcessor"},
}
CONTEXT_LENGTH = 512
TIMEOUT_S = 300


def reasons_against(member: Member) -> str:
    """Return why SGLang can't run the member here, "" if it can."""
    if importlib.util.find_spec("sglang") is None:
        return "SGLang is not installed"
    if torch.cuda.is_available():
        return "SGLang's CPU build needs a machine without a GPU; set CUDA_VISIBLE_DEVICES="
    return "; ".join(member.family.sglang_limits(member.config.to_dict(), on_cpu=True))


def sglang_figures(member: Member) -> tuple[float, float]:
    """Return the largest difference of a logprob of what SGLang samples from transformers'.

    The second is after a sync of other weights, with the same pictures.
    """
    rng = np.random.default_rng(4)
    sampling = SamplingParams(max_new_tokens=12)
    requests = [
        random_request(member, rng, sizes, sampling, (1, 2, 3))
        for sizes in (SIZES[:1], (), SIZES[1:3], SIZES)
    ]
    updated = replace(member, seed=member.seed + 1)
    with tempfile.TemporaryDirectory() as folder, _engine(member, Path(folder)) as engine:
        first_difference = _difference(member, engine, requests)
        weights = (
            part
            for name, weight in updated.model().named_parameters()
            for part in member.family.engine_names(name, weight.detach())
        )
        engine.load_weights([dict(weights)], version=1)
        return first_difference, _difference(updated, engine, requests)


def _difference(member: Member, engine: Any, requests: list[Request]) -> float:
    """Return the largest difference of a logprob, NaN where one is NaN."""
    model, differences = member.model(), [0.0]
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        for trajectory in answered(request, completion.samples, "sampled").trajectories:
            (sequence,) = trajectory.sequences
            assert sequence.logprobs is not None
            with torch.no_grad():
                expected = logprobs_of(member, model, sequence).numpy()
            sampled = sequence.logprobs[sequence.loss_mask]
            differences.append(float(np.abs(sampled - expected).max()))
    return float(np.max(differences))


@contextmanager
def _engine(member: Member, folder: Path) -> Iterator[Any]:
    """Yield an engine on the member, whose checkpoint is written into the folder."""
    from rlinf_vl.engines.sglang.engine import SglangEngine
    from rlinf_vl.engines.sglang.settings import Settings

    checkpoint, tokenizer = folder / "checkpoint", folder / "tokenizer"
    save_model(member.model(), member.family, checkpoint)
    _write_processor(member, tokenizer)
    settings = Settings(
        model_path=str(checkpoint),
        context_length=CONTEXT_LENGTH,
        max_running=16,
        dtype=torch.float32,
        extra_arguments={"tokenizer_path": str(tokenizer)},
    )
    engine = SglangEngine(
        settings,
        member.family,
        banned=member.banned,
        pixels=lambda image: pixels_of(member, image),
        image_tokens=member.image_tokens,
        request_timeout_s=TIMEOUT_S,
    )
    try:
        yield engine
    finally:
        engine.close()


def _write_processor(member: Member, folder: Path) -> None:
    """Write a tokenizer with a token for each id, and a processor of Qwen's kind.

    SGLang loads them, and uses neither: it gets ids and pixels.
    """
    names = {getattr(member.config, key, None): text for key, text in QWEN_TOKENS.items()}
    vocabulary = {names.get(i, f"<{i}>"): i for i in range(len(member.banned))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    # A text model's: transformers then asks the files below for the processor.
    AutoConfig.for_model("qwen2").save_pretrained(folder)
    for name, settings in PROCESSOR_FILES.items() if member.images else ():
        (folder / name).write_text(json.dumps(settings))
