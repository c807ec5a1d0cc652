"""Prompts of a checkpoint against its own processor of transformers: ids, placeholders and pixels."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from PIL import Image
from transformers import AutoTokenizer

from rlinf_vl.models.family import Family
from rlinf_vl.models.processing import Processor
from rlinf_vl.models.tiles import images_processor
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.types import ImageRef, Message

#: (width, height) of pictures in pixels: wide, high, small, and none a whole number of tokens.
SIZES = ((61, 97), (233, 40), (45, 310), (330, 251), (30, 30))
TOOL = {
    "type": "function",
    "function": {
        "name": "measure",
        "description": "Measure a side of the triangle.",
        "parameters": {
            "type": "object",
            "properties": {"side": {"type": "string", "description": "such as AB"}},
            "required": ["side"],
        },
    },
}


class Picture:
    """A picture of noise, as this project refers to it and as transformers takes it."""

    def __init__(self, index: int) -> None:
        width, height = SIZES[index]
        noise = np.random.default_rng(index).integers(0, 256, (height, width, 3), np.uint8)
        file = io.BytesIO()
        self.image = Image.fromarray(noise)
        self.image.save(file, "PNG")
        self.ref = ImageRef.of(file.getvalue())


@dataclass(frozen=True)
class Conversation:
    """A conversation that both sides render.

    Attributes:
        turns: (role, texts and pictures) of each message.
        thinking: as `Renderer` takes it.
    """

    turns: Sequence[tuple[str, Sequence[str | Picture]]]
    tools: Sequence[dict[str, Any]] = ()
    thinking: str = "auto"

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of transformers' `apply_chat_template`."""
        is_set = self.thinking != "auto"
        thinking = {"enable_thinking": self.thinking == "on"} if is_set else {}
        return {"tools": list(self.tools) or None, "add_generation_prompt": True} | thinking

    @property
    def pictures(self) -> list[Picture]:
        """The pictures, in order."""
        return [part for _, parts in self.turns for part in parts if isinstance(part, Picture)]

    def messages(self, for_transformers: bool) -> list[Message]:
        """Return the messages as transformers' processors take them, or as this project does."""
        return [
            {"role": role, "content": _content(parts, for_transformers)}
            for role, parts in self.turns
        ]


def _content(parts: Sequence[str | Picture], for_transformers: bool) -> Any:
    if all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        elif for_transformers:
            content.append({"type": "image", "image": part.image})
        else:
            content.append({"type": "image_url", "image_url": {"url": part.ref.url}})
    return content


def prompt_figures(family: Family, folder: Path) -> tuple[float, ...]:
    """Compare what this project makes of conversations with what transformers makes of them.

    Args:
        folder: a checkpoint's, with tokenizer, chat template and image processor.

    Returns:
        The largest numbers of ids that differ, and of placeholders too many or too few; with
        pictures the largest difference of a pixel, too.

    Raises:
        ValueError: the project can't render a conversation that transformers renders.
    """
    processor = Processor(folder, family)
    has_images = family.vision_tower is not None
    reference = images_processor(folder) if has_images else AutoTokenizer.from_pretrained(folder)
    template = getattr(reference, "chat_template", None) or processor.tokenizer.chat_template
    figures = [
        _figures(processor, reference, template, conversation)
        for conversation in _conversations(reference, template, has_images)
    ]
    return tuple(np.max(figures, axis=0).tolist())


def _conversations(reference: Any, template: Any, has_images: bool) -> Iterator[Conversation]:
    """Yield conversations, those with a system message, tools or options if the template has them."""
    pictures = [Picture(i) for i in range(len(SIZES))] if has_images else []
    first, last = pictures[:1], pictures[-1:]
    question = ("user", [*first, "What is the area? Größe in m², 例: 5."])
    yield Conversation([question])
    several = [
        ("user", [*pictures[:2], "Which is larger,  the first", *pictures[2:3], "or this?\n\n"]),
        ("assistant", ["The second: 3 < 4."]),
        ("user", ["Thanks.", *pictures[3:4], "And here?"]),
        ("assistant", ["It is equal."]),
        ("user", [*last, *first, "And these?"]),
    ]
    yield Conversation(several)
    with_system = [("system", ["Answer in one word."]), *several[:3]]
    try:
        _render(reference, template, Conversation(with_system))
    except TemplateError:
        pass  # the template refuses them, to a run as well
    else:
        yield Conversation(with_system)
    with_tools = Conversation([question], tools=[TOOL])
    plain_text = _render(reference, template, Conversation([question]))
    if _render(reference, template, with_tools) != plain_text:
        yield with_tools
    for thinking in ("on", "off") if "enable_thinking" in str(template) else ():
        with_option = Conversation([question], thinking=thinking)
        if _render(reference, template, with_option) != plain_text:
            yield with_option


def _render(reference: Any, template: Any, conversation: Conversation) -> str:
    """Return the text that transformers renders."""
    return reference.apply_chat_template(
        conversation.messages(for_transformers=True),
        chat_template=template,
        tokenize=False,
        **conversation.options,
    )


def _figures(
    processor: Processor, reference: Any, template: Any, conversation: Conversation
) -> list[float]:
    """Return the figures of one conversation."""
    expected = reference.apply_chat_template(
        conversation.messages(for_transformers=True),
        chat_template=template,
        tokenize=True,
        return_dict=True,
        **conversation.options,
    )
    renderer = Renderer(processor, conversation.thinking)
    pictures = conversation.pictures
    ids, _ = renderer.prompt(
        conversation.messages(for_transformers=False),
        [picture.ref for picture in pictures],
        conversation.tools,
    )
    expected_ids = np.asarray(expected["input_ids"]).reshape(-1)
    placeholder = processor.image_token_id
    counts = [int((row == placeholder).sum()) for row in (ids, expected_ids)]
    figures = [float(_ids_apart(ids, expected_ids)), float(abs(counts[0] - counts[1]))]
    if processor.family.vision_tower:
        figures.append(_pixels_apart(processor, expected, pictures))
    return figures


def _ids_apart(ids: np.ndarray, expected: np.ndarray) -> int:
    """Return the number of places at which two rows of ids differ."""
    shorter = min(len(ids), len(expected))
    return int((ids[:shorter] != expected[:shorter]).sum()) + abs(len(ids) - len(expected))


def _pixels_apart(processor: Processor, expected: Any, pictures: Sequence[Picture]) -> float:
    """Return the largest difference of a pixel.

    Raises:
        ValueError: there are more or fewer patches than transformers' processor cuts.
    """
    rows = np.concatenate([processor.pixels(picture.ref) for picture in pictures])
    values = [np.asarray(value, np.float32) for value in expected["pixel_values"]]
    flat = np.concatenate([value.reshape(-1) for value in values]).reshape(-1, rows.shape[1])
    if len(flat) > len(rows):  # pictures of fewer tiles are padded with tiles of zeros
        flat = flat[flat.any(axis=1)]
    if len(flat) != len(rows):
        raise ValueError(f"{len(rows)} patches or tiles, but transformers cuts {len(flat)}")
    return float(np.abs(rows - flat).max())
