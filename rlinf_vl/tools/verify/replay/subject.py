"""The model of a replay: its weights, family, pixels and texts."""

import copy
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel

from rlinf_vl.config.load import parse_config
from rlinf_vl.config.schema import Config
from rlinf_vl.errors import ConfigError
from rlinf_vl.models.family import Family
from rlinf_vl.models.image_tokens import ImageTokens
from rlinf_vl.models.loading import load_model, switch_dropout_off, use_packed_attention
from rlinf_vl.models.processing import Processor
from rlinf_vl.observe.replay_file import RecordedStep
from rlinf_vl.rollout.episode.row_check import processor_of
from rlinf_vl.types import ImageRef


@dataclass
class Subject:
    """The parts that all implementations are given.

    Attributes:
        config: transformers' config of the model.
        weights: by name, float32: the weights before the step.
        banned: bool [V], ids that are never sampled.
        pixels: the project's patches of an image.
        processor: of the model's folder; None for a model without one, whose prompts are not
            compared.
        folder: the model's folder, for transformers' own processor.
    """

    family: Family
    config: Any
    weights: Mapping[str, torch.Tensor]
    banned: np.ndarray
    pixels: Callable[[ImageRef], np.ndarray]
    image_tokens: ImageTokens
    pad_id: int
    processor: Processor | None = None
    folder: Path | None = None
    decode: Callable[[int], str] = str
    _stack: ExitStack = field(default_factory=ExitStack)

    def plain_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """Return transformers' model in a dtype, with its own forwards."""
        config = copy.deepcopy(self.config)
        switch_dropout_off(config)
        model = self.family.model_class.from_config(config, attn_implementation="sdpa").eval()
        parameters = dict(model.named_parameters())
        if missing := sorted(parameters.keys() ^ self.weights.keys()):
            raise ConfigError(
                f"the file's weights are not those of a {self.family.model_type}: {missing[0]} is "
                "in one of the two alone; record the step again"
            )
        with torch.no_grad():
            for name, weight in parameters.items():
                stays_float32 = self.family.stays_float32(name)
                # The tables of rotary angles are buffers, and stay in float32.
                weight.data = self.weights[name].to(torch.float32 if stays_float32 else dtype)
                weight.data = weight.data.clone()
        return model

    def packed_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """Return the model as trainer and engine compute with it."""
        return use_packed_attention(self.plain_model(dtype), self.family)

    def close(self) -> None:
        """Remove the files that were unpacked."""
        self._stack.close()


def config_of(step: RecordedStep) -> Config:
    """Return the config of the recorded run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(step.config, encoding="utf-8")
        return parse_config(str(file))


def subject_of(step: RecordedStep, config: Config) -> Subject:
    """Return the model of a recorded step.

    Raises:
        ConfigError: neither the file nor this machine has the weights.
    """
    stack = ExitStack()
    folder = Path(step.model_path)
    if step.model_files:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replay-")))
        for name, data in step.model_files.items():
            # Names come from somebody else's file: none may leave the folder.
            (folder / Path(name).name).write_bytes(data)
    processor = processor_of(config, str(folder))
    family = processor.family
    trust = config.rollout.model.trust_remote_code
    model_config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    weights = _weights(step, family, model_config)
    text = model_config.get_text_config()
    return Subject(
        family,
        model_config,
        weights,
        processor.banned_ids(text.vocab_size),
        processor.pixels,
        processor.image_tokens,
        processor.pad_id,
        processor,
        folder,
        lambda token: processor.tokenizer.decode([token], skip_special_tokens=False),
        stack,
    )


def _weights(step: RecordedStep, family: Family, config: Any) -> dict[str, torch.Tensor]:
    """Return the weights before the step."""
    if step.weights:
        return {name: torch.from_numpy(value) for name, value in step.weights.items()}
    if step.random_weights:
        return random_weights(family, config)
    if step.version != 0:
        raise ConfigError(
            f"the file has no weights of version {step.version}, which are larger than it may be: "
            f"record the step on a machine that has the run, 'rlinf-vl replay {step.run or 'RUN'} "
            f"--step {step.step}', or with --shape-only for random weights"
        )
    try:
        model = load_model(step.model_path, family, torch.float32)
    except OSError as error:
        raise ConfigError(
            f"the file has no weights, and {step.model_path!r} can't be read: {error}"
        ) from None
    return {name: weight.detach() for name, weight in model.named_parameters()}


def random_weights(family: Family, config: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random weights of a model's shape, large enough for images to matter."""
    torch.manual_seed(seed)
    model = family.model_class.from_config(copy.deepcopy(config)).float()
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.data.uniform_(-3, 0)
        elif weight.ndim == 1:
            weight.data += 0.1 * torch.randn_like(weight)
        elif not weight.any():
            weight.data.normal_(std=weight.shape[0] ** -0.5)
    return {name: weight.detach() for name, weight in model.named_parameters()}
