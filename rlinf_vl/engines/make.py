"""The construction of the engine that `rollout.rollout_backend` names, and its warm-up."""

import dataclasses
import io
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from transformers import AutoConfig

from rlinf_vl.config.engines import wakes_empty
from rlinf_vl.config.schema import Config
from rlinf_vl.engines.base import Engine
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import DTYPES, load_model
from rlinf_vl.models.lora import add_adapters
from rlinf_vl.models.processing import PixelCache, Processor
from rlinf_vl.types import ImageRef, Message, Request, SamplingParams

if TYPE_CHECKING:
    from rlinf_vl.engines.sglang.settings import Settings

log = logging.getLogger(__name__)
#: Seconds after which SGLang gives up one request, unless an episode may take longer.
REQUEST_TIMEOUT_S = 600.0


def make_engine(
    config: Config, model_path: str, processor: Processor, device: str, shared_gpu: bool = False
) -> Engine:
    """Start the configured engine on a checkpoint. Both kinds of engine get the same pixels.

    Args:
        config: the run's config.
        model_path: folder of the checkpoint.
        processor: of the model.
        device: "cuda" or "cpu".
        shared_gpu: actor ranks use the engine's GPU, so it must be able to release its memory.
    """
    rollout = config.rollout
    trust = rollout.model.trust_remote_code
    memory_share = rollout.gpu_memory_utilization
    assert isinstance(memory_share, float), f"{memory_share!r} is resolved before an engine starts"
    family = family_of(
        rollout.model.model_type,
        model_path,
        trust,
        config.actor.model.vlm.paths,
        config.runner.code_files,
    )
    vocab = (
        AutoConfig.from_pretrained(model_path, trust_remote_code=trust).get_text_config().vocab_size
    )
    banned = processor.banned_ids(vocab)
    if rollout.rollout_backend == "torch":
        from rlinf_vl.engines.torch.engine import TorchEngine

        dtype = DTYPES[rollout.model.precision]
        model = load_model(model_path, family, dtype, trust_remote_code=trust)
        if (lora := config.actor.model.adapters) and lora.sync == "adapters":
            add_adapters(model, family, lora)
        return TorchEngine(
            model,
            family,
            banned=banned,
            pixels=PixelCache(processor.pixels),
            image_tokens=processor.image_tokens,
            max_running=rollout.max_running_requests,
            memory_share=memory_share,
            device=device,
            report_routes=config.actor.routing_replay != "off",
            keep_kv=rollout.kv_after_update == "keep",
        )
    from rlinf_vl.engines.sglang.engine import SglangEngine

    return SglangEngine(
        _sglang_settings(config, model_path, memory_share, device, shared_gpu),
        family,
        banned=banned,
        pixels=processor.pixels,
        image_tokens=processor.image_tokens,
        request_timeout_s=max(REQUEST_TIMEOUT_S, rollout.episode_timeout or 0.0),
    )


def _sglang_settings(
    config: Config, model_path: str, memory_share: float, device: str, shared_gpu: bool
) -> "Settings":
    """Return the settings of an SGLang engine; arguments as in `make_engine`."""
    from rlinf_vl.engines.sglang.settings import Settings

    rollout = config.rollout
    return Settings(
        model_path=model_path,
        context_length=config.runner.seq_length,
        max_running=rollout.max_running_requests,
        dtype=DTYPES[rollout.model.precision],
        memory_share=memory_share,
        device=device,
        shared_gpu=shared_gpu,
        wakes_empty=shared_gpu and wakes_empty(config),
        tp_size=rollout.tensor_parallel_size,
        ep_size=rollout.sglang.ep_size,
        attn_dp_size=rollout.sglang.attn_dp_size,
        deterministic=rollout.deterministic,
        report_routes=config.actor.routing_replay != "off",
        keep_kv=rollout.kv_after_update == "keep",
        trust_remote_code=rollout.model.trust_remote_code,
        extra_arguments=rollout.sglang.server_args,
    )


def warm_up(
    engine: Engine,
    prompt: Callable[[Sequence[Message], Sequence[ImageRef]], tuple[np.ndarray, np.ndarray]],
    samplings: Iterable[SamplingParams],
    longest: int,
    with_image: bool = True,
) -> None:
    """Generate two tokens with each sampling, alone and as a group, without an image and with one.

    SGLang compiles kernels on first use, which takes minutes: without this the first rollout would
        look
    like a hang.

    Args:
        engine: the engine.
        prompt: renders messages, as `rlinf_vl.rollout.episode.renderer.Renderer.prompt`.
        samplings: sampling parameters that the run will use.
        longest: most tokens of a prompt and its response together; longer requests are left out.
        with_image: the model reads images.
    """
    log.info(
        "the engine is warming up; on a GPU that never ran this model it compiles kernels, which "
        "takes minutes"
    )
    picture = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(picture, "PNG")
    image = ImageRef.of(picture.getvalue())
    image_part = {"type": "image_url", "image_url": {"url": image.url}}
    requests = []
    prompts = [((), "?"), ((image,), [image_part, {"type": "text", "text": "?"}])]
    for images, content in prompts if with_image else prompts[:1]:
        ids, grids = prompt([{"role": "user", "content": content}], images)
        for sampling in samplings:
            brief = dataclasses.replace(sampling, max_new_tokens=2, stop_ids=())
            requests += [Request(ids, images, grids, brief, seeds) for seeds in ((0,), (0, 1))]
    engine.generate([request for request in requests if len(request.ids) + 2 <= longest])
