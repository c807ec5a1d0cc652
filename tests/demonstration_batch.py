"""The toys' demonstrations: what the warm start trains on, and, sharing no code with it, padded batches with labels for
transformers' own forward."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlinf_vl.extras.toy import files
from rlinf_vl.extras.toy.task import Toy
from rlinf_vl.extras.toy.warm_start import DemonstrationReader, recipe
from rlinf_vl.types import Message, TokenSequence


def demonstrated_sequences(
    toy: Toy, model: Path, n: int, rng: np.random.Generator
) -> list[TokenSequence]:
    """Return the first sequences that the warm start of the model in a folder trains on."""
    reader = DemonstrationReader(recipe(toy, str(model), str(model), 1, 1), str(model), toy, rng)
    results = reader.result(reader.begin("train", {f"g{k}": k for k in range(n)}))
    reader.stop()
    return [sequence for _, group in results for sequence in group.sequences]


def demonstration_batch(
    toy: Toy,
    tokenizer: PreTrainedTokenizerBase,
    processor: Qwen2VLImageProcessorPil,
    size: int,
    rng: np.random.Generator,
) -> dict[str, torch.Tensor]:
    """Draw a batch of the task's demonstrations, as keyword arguments of the model's forward: all
    conversations of `size` draws.

    The ids equal those of inference on the same conversation. Sequences are padded on the right;
    `labels` is -100 outside the answers.
    """
    pictures, sequences, labels = [], [], []
    for messages in (messages for _ in range(size) for messages in toy.demonstrate(rng)):
        ids, targets, rendered_so_far = [], [], ""
        new_pictures: list[np.ndarray] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                pictures += (new_pictures := _pictures(message))
                continue
            # Each turn is tokenized on its own, as in inference: the sampled ids of earlier answers
            # are kept there, and text joined over a boundary could be tokenized differently.
            history: Any = messages[:number]  # transformers annotates messages as text only
            rendered = str(
                tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
            )
            answer = message["content"] + files.EOS_TOKEN
            prompt_ids, answer_ids = (
                tokenizer(text, add_special_tokens=False)["input_ids"]
                for text in (
                    _expanded(rendered.removeprefix(rendered_so_far), new_pictures),
                    answer,
                )
            )
            ids += prompt_ids + answer_ids
            targets += [-100] * len(prompt_ids) + answer_ids
            rendered_so_far = rendered + answer
        sequences.append(torch.tensor(ids))
        labels.append(torch.tensor(targets))
    special = files.special_ids(toy.words)
    input_ids = pad_sequence(sequences, batch_first=True, padding_value=special[files.PAD_TOKEN])
    pixels = processor(pictures, return_tensors="pt")
    return {
        "input_ids": input_ids,
        "attention_mask": pad_sequence(
            [torch.ones_like(ids) for ids in sequences], batch_first=True
        ),
        # transformers leaves labels of -100 out of the loss.
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "mm_token_type_ids": (input_ids == special["<|image_pad|>"]).int(),
        "pixel_values": pixels["pixel_values"],
        "image_grid_thw": pixels["image_grid_thw"],
    }


def _pictures(message: Message) -> list[np.ndarray]:
    content = message["content"]
    return (
        [part["image"] for part in content if "image" in part] if isinstance(content, list) else []
    )


def _expanded(rendered: str, pictures: list[np.ndarray]) -> str:
    """Repeat each picture's placeholder in the text, once for each of its image tokens."""
    first, *following = rendered.split("<|image_pad|>")
    side = files.PATCH_SIZE * files.MERGE_SIZE
    counts = [picture.shape[0] * picture.shape[1] // side**2 for picture in pictures]
    return first + "".join(
        "<|image_pad|>" * n + text for n, text in zip(counts, following, strict=True)
    )
