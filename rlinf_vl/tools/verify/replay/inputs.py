"""The inputs of a step against transformers' own chat template and image processor: prompt ids,
images in their order, grids, placeholders and pixels."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlinf_vl.data.clips import is_clip
from rlinf_vl.data.images import decode
from rlinf_vl.models.tiles import images_processor
from rlinf_vl.observe.replay_file import RecordedStep
from rlinf_vl.tools.verify.replay.quantities import Quantity, Trace
from rlinf_vl.tools.verify.replay.subject import Subject
from rlinf_vl.types import IMAGE_URL_PREFIX, Group, ImageRef, Message


def input_traces(subject: Subject, step: RecordedStep) -> tuple[Trace, Trace]:
    """Return the inputs as the run had them, and as transformers makes them."""
    ours, reference = Trace(), Trace()
    for g, group in enumerate(step.groups):
        if not group.sequences:
            continue
        _counts(subject, g, group, ours, reference)
        if subject.processor is None or subject.folder is None:
            continue
        messages = step.messages.get(g)
        if messages is not None:
            _prompt(subject, g, group, messages, ours, reference)
    return ours, reference


def _counts(subject: Subject, g: int, group: Group, ours: Trace, reference: Trace) -> None:
    """Count the placeholders of each sequence, and those that its images' grids need."""
    tokens = subject.image_tokens
    for i, trajectory in enumerate(group.trajectories):
        for k, sequence in enumerate(trajectory.sequences):
            grids = np.array([grid for _, grid in sequence.images], np.int64).reshape(-1, 3)
            counted = int(tokens.mask(sequence.ids).sum())
            quantity = Quantity.of("placeholders")
            ours.put(quantity, (g, i, k), np.array([counted]))
            reference.put(quantity, (g, i, k), np.array([int(tokens(grids).sum())]))


def _prompt(
    subject: Subject,
    g: int,
    group: Group,
    messages: Sequence[Message],
    ours: Trace,
    reference: Trace,
) -> None:
    """Render the messages of a group's first prompt with transformers, and compare."""
    assert subject.processor is not None and subject.folder is not None
    images = {image.hash: image for image, _ in group.images}
    hashes = [name for message in messages for name in _image_hashes(message)]
    if any(name not in images or is_clip(images[name]) for name in hashes):
        return  # a clip's times are text of ours, and transformers reads whole videos
    processor = images_processor(subject.folder) if hashes else subject.processor.tokenizer
    if hashes:
        _bound_pixels(processor, subject)
    template = getattr(processor, "chat_template", None)
    expected = processor.apply_chat_template(
        [_for_transformers(message, images) for message in messages],
        chat_template=template or subject.processor.tokenizer.chat_template,
        tokenize=True,
        return_dict=True,
        add_generation_prompt=True,
    )
    owner = (g, 0, 0)
    sequence = group.sequences[0]
    in_prompt = sequence.images[: len(hashes)]
    ids = np.asarray(expected["input_ids"]).reshape(-1).astype(np.int64)
    prompt_length = group.trajectories[0].turns[0].start
    own_ids = sequence.ids[:prompt_length].astype(np.int64)
    # Token by token over the longer of the two, so that one too many shows.
    length = max(len(ids), len(own_ids))
    quantity = Quantity.of("prompt ids")
    ours.put(quantity, owner, _padded(own_ids, length))
    reference.put(quantity, owner, _padded(ids, length))
    if not hashes:
        return
    order = {name: number for number, name in enumerate(dict.fromkeys(hashes))}
    own_order = np.array([order.get(image.hash, -1) for image, _ in in_prompt])
    ours.put(Quantity.of("images"), owner, _padded(own_order, len(hashes)))
    reference.put(Quantity.of("images"), owner, np.array([order[name] for name in hashes]))
    if "image_grid_thw" in expected:
        grids = np.asarray(expected["image_grid_thw"]).reshape(-1, 3)
        own_grids = np.array([grid for _, grid in in_prompt]).reshape(-1, 3)
        ours.put(Quantity.of("image grids"), owner, own_grids)
        reference.put(Quantity.of("image grids"), owner, grids)
    values = [np.asarray(value, np.float32) for value in expected["pixel_values"]]
    rows = [subject.pixels(image) for image, _ in in_prompt]
    flat = np.concatenate([value.reshape(-1) for value in values]).reshape(-1, rows[0].shape[1])
    ours.put(Quantity.of("pixels"), owner, np.concatenate(rows))
    reference.put(Quantity.of("pixels"), owner, flat)


def _bound_pixels(processor: Any, subject: Subject) -> None:
    """Give transformers' processor the run's bounds of an image's area."""
    own_processor = getattr(subject.processor.image_processor, "_processor", None)  # pyright: ignore[reportOptionalMemberAccess]
    their_processor = getattr(processor, "image_processor", None)
    if own_processor is not None and their_processor is not None and hasattr(own_processor, "size"):
        their_processor.size = own_processor.size


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([values, np.full(max(0, length - len(values)), -1)])[:length]


def _image_hashes(message: Message) -> list[str]:
    """Return the hashes of a message's images, in order."""
    content = message["content"]
    if isinstance(content, str):
        return []
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    return [url.removeprefix(IMAGE_URL_PREFIX) for url in urls]


def _for_transformers(message: Message, images: Mapping[str, ImageRef]) -> dict[str, Any]:
    """Return a message with pictures in place of their names."""
    if isinstance(message["content"], str):
        return dict(message)
    content = []
    for part in message["content"]:
        if part["type"] == "image_url":
            name = part["image_url"]["url"].removeprefix(IMAGE_URL_PREFIX)
            content.append({"type": "image", "image": decode(images[name])})
        else:
            content.append(part)
    return {**message, "content": content}
