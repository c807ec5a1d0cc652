"""Inference with a trained policy in this process: `load_policy(folder).generate(messages)`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from rlinf_vl.config.hubs import HUB_NAME
from rlinf_vl.config.parts import load_part
from rlinf_vl.config.processing import ProcessorOptions, processor_options
from rlinf_vl.config.schema.data import VideoConfig
from rlinf_vl.config.toys import TOYS, model_folder
from rlinf_vl.driver.api import Run
from rlinf_vl.engines.torch.engine import TorchEngine
from rlinf_vl.errors import ConfigError
from rlinf_vl.models.families import family_of
from rlinf_vl.models.family import Family
from rlinf_vl.models.loading import DTYPES, load_model
from rlinf_vl.models.lora import merge_adapters
from rlinf_vl.models.processing import PixelCache, Processor
from rlinf_vl.rollout.episode.observation import observe
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.runtime.checkpoints import STATE_FILE, checkpoints
from rlinf_vl.types import Message, Problem, Request, SamplingParams

#: Maximum number of prompts decoded at once.
MAX_RUNNING = 64
#: The file by which a folder of adapters is recognized, as peft writes it.
ADAPTERS = "adapter_config.json"


class Policy:
    """A model that answers messages, with the engine, the chat template and the image processing
    that it was trained with.

    Attributes:
        engine: the engine that samples.
        renderer: renders messages by the chat template.
        context_length: most tokens of a prompt and its answer.
        video: how videos are sampled.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        processor: Processor,
        *,
        device: str,
        thinking: str = "auto",
        template_variables: Mapping[str, Any] | None = None,
        video: VideoConfig | None = None,
    ) -> None:
        self._processor = processor
        self.video = video or VideoConfig()
        # Of the text: the vision tower has positions of its own.
        text_config = model.config.get_text_config()
        self.context_length: int = text_config.max_position_embeddings
        self.renderer = Renderer(processor, thinking, template_variables)
        self.engine = TorchEngine(
            model,
            family,
            banned=processor.banned_ids(text_config.vocab_size),
            pixels=PixelCache(processor.pixels),
            image_tokens=processor.image_tokens,
            max_running=MAX_RUNNING,
            device=device,
        )

    def generate(
        self,
        messages: str | Sequence[Message],
        *,
        n: int | None = None,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
    ) -> Any:
        """Return the answer to messages as text, without special tokens; with `n`, a list of `n`
        answers.

        Args:
            messages: in OpenAI's form, {"role", "content"}; content is a text, or a list of parts:
                {"type": "text", "text": …}, {"type": "image", "image": a PIL image, bytes, an array
                or a file's path} and {"type": "image_url", "image_url": {"url": a data URI or a
                file's path}}, and videos alike as "video" (also a list of frames) or "video_url".
                A text alone is one message of the user.
            temperature: 0 is greedy.
            seed: the same seed draws the same answers.

        Raises:
            ValueError: the messages or their images make no prompt.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        observation = observe(
            [_with_files(message) for message in messages],
            Problem("", (), ""),
            video=self.video,
        )
        ids, grids = self.renderer.prompt(observation.messages, observation.images)
        sampling = SamplingParams(
            temperature, top_p, top_k, max_new_tokens, self._processor.stop_ids
        )
        seeds = tuple(range(seed, seed + (n or 1)))
        (completion,) = self.engine.generate(
            [Request(ids, observation.images, grids, sampling, seeds)]
        )
        texts = [self._processor.decode(sample.ids) for sample in completion.samples]
        return texts[0] if n is None else texts

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The token ids that end an answer."""
        return self._processor.stop_ids

    def close(self) -> None:
        """Release the memory of the model."""
        self.engine.close()


def load_policy(
    folder: "str | Path | Run",
    *,
    device: str | None = None,
    dtype: str | None = None,
    trust_run_code: bool = False,
) -> Policy:
    """Load a policy for inference.

    Args:
        folder: a run or its folder (its newest checkpoint), one of its checkpoints/global_step_N, a
            model folder that `export` wrote or transformers loads, a folder of peft's adapters, a
            model's name on the hub, or an embedded task's (`toy`).
        device: cpu or cuda; by default cuda where there is one.
        dtype: fp32, bf16 or fp16; by default bf16 on cuda and fp32 on the cpu.
        trust_run_code: execute the Python files of a model's folder, and the Python that the
            config.yaml of a run's folder brings along or names: a model family
            (`rollout.model.model_type`), and with `trust_remote_code` the files of its base model.
            A `Run` that `train` returned in this process is trusted.

    Raises:
        ConfigError: `folder` is none of these, or brings Python along that is not trusted.
    """
    path = Path(folder.folder if isinstance(folder, Run) else folder).expanduser()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model_dtype = DTYPES[dtype or ("bf16" if device == "cuda" else "fp32")]
    pixel_options: ProcessorOptions = {}
    template_options: dict[str, Any] = {}
    if (path / STATE_FILE).is_file() or checkpoints(path):
        trusted = trust_run_code or (isinstance(folder, Run) and folder.trust_run_code)
        model, family, base, config = load_part("restore-model")(path, trusted)
        merge_adapters(model)
        # Prompts must look as in training: images of the same size, the same template.
        pixel_options = processor_options(config)
        template_options = {
            "thinking": config.rollout.thinking.mode,
            "template_variables": config.rollout.chat_template_kwargs,
            "video": config.data.video,
        }
    else:
        base = _base(str(folder), path)
        family = family_of("auto", base, trust_run_code)
        pixel_options = {"trust_remote_code": trust_run_code}
        # Adapters are merged in float32, and only then rounded.
        model: Any = load_model(base, family, DTYPES["fp32"], trust_remote_code=trust_run_code)
        if base != str(path) and (path / ADAPTERS).is_file():
            model = PeftModel.from_pretrained(model, str(path)).merge_and_unload()
    processor = Processor(base, family, **pixel_options)
    return Policy(model.to(model_dtype), family, processor, device=device, **template_options)


def _base(name: str, path: Path) -> str:
    """Return the folder, or the name on the hub, that transformers loads for a name; for adapters,
    that of the model they belong to."""
    if name in TOYS:
        return model_folder(name)
    if (path / "config.json").is_file():
        return str(path)
    if (path / ADAPTERS).is_file():
        return json.loads((path / ADAPTERS).read_text())["base_model_name_or_path"]
    if not path.exists() and HUB_NAME.fullmatch(name):
        return name
    raise ConfigError(
        f"load_policy: {name!r} is no run's folder with a checkpoint (runner.save_interval writes "
        "them), no checkpoints/global_step_N, no model folder (config.json), no adapters "
        f"({ADAPTERS}) and no name on the hub"
    )


def _with_files(message: Message) -> Message:
    """Return the message with the bytes of the files that its images name."""
    if isinstance(message["content"], str):
        return message
    parts = []
    for part in message["content"]:
        value: Any = part.get("image_url", part.get("image"))
        value = value.get("url") if isinstance(value, Mapping) else value
        # Linux has no longer paths; data URIs of images usually are.
        is_path = (
            isinstance(value, Path)
            or isinstance(value, str)
            and len(value) < 4096
            and Path(value).is_file()
        )
        parts.append({"type": "image", "image": Path(value).read_bytes()} if is_path else part)
    return message | {"content": parts}
