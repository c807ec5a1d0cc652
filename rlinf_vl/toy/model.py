"""The toy models, built with random weights and warm-started on a task's demonstrations.

A toy model has one to two million parameters. Its checkpoint has the format of transformers, which
loads it with its own classes; it is built once and reused.
"""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress, TextColumn
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils.logging import disable_progress_bar

from rlinf_vl.models.families import FAMILIES
from rlinf_vl.models.loading import save_model
from rlinf_vl.toy import files, task
from rlinf_vl.toy.task import Toy
from rlinf_vl.types import Message

logger = logging.getLogger(__name__)

LEARNING_RATE = 2e-3
#: Steps in which the learning rate rises at the start, and steps in which it falls to 0 at the end.
WARMUP_STEPS = 30
COOLDOWN_STEPS = 80
#: Patches along a side of the picture for which the vision tower learns positions; those of other
#: sizes are interpolated.
GRID = 6
TEXT_INIT_STD = 0.05
VISION_INIT_STD = 0.08
#: model_type → settings of its toy's text model and of its vision tower, beyond those of
#: `toy_config`.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ({}, {"deepstack_visual_indexes": [0, 1]}),
    "qwen3_vl_moe": (
        # 96 keeps the experts' matrices from being square: see `save_model`.
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
        {"deepstack_visual_indexes": [0, 1, 2]},  # SGLang expects three
    ),
    "qwen3_5": (
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "full_attention_interval": 2,
        }
        | {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 32,
        }
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
            }
            | {"mrope_interleaved": True, "partial_rotary_factor": 0.5}
        },
        {},
    ),
}


def toy_config(toy: Toy) -> Any:
    """Return the config of transformers for a toy's model.

    The text model is 128 wide; the vision tower is 64 wide with 3 layers. An image token stands for
    16×16 pixels.
    """
    ids = files.special_ids(toy.words)
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
    # The vocabulary is padded to a multiple of 8.
    text = (
        {
            "vocab_size": -(-(max(ids.values()) + 1) // 8) * 8,
            "hidden_size": 128,
            "intermediate_size": 256,
        }
        | {
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        }
        | {"max_position_embeddings": 4096, "rope_parameters": rope, "tie_word_embeddings": True}
        | {
            "pad_token_id": ids[files.PAD_TOKEN],
            "bos_token_id": None,
            "eos_token_id": ids[files.EOS_TOKEN],
        }
        | {"initializer_range": TEXT_INIT_STD}
    )
    vision = (
        {
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
        }
        | {"patch_size": files.PATCH_SIZE, "spatial_merge_size": files.MERGE_SIZE}
        | {"temporal_patch_size": files.TEMPORAL_PATCH_SIZE, "num_position_embeddings": GRID**2}
        | {"initializer_range": VISION_INIT_STD}
    )
    family_text, family_vision = MODELS[toy.model_type]
    return AutoConfig.for_model(
        toy.model_type,
        text_config=text | family_text,
        vision_config=vision | family_vision,
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def new_toy_model(toy: Toy, seed: int) -> PreTrainedModel:
    """Build the model in float32 with random weights.

    Matrices and embeddings are normal, biases 0, norms 1, and the decays of gated delta nets slow.
    """
    model = AutoModelForImageTextToText.from_config(toy_config(toy)).float()
    generator = torch.Generator().manual_seed(seed)
    initialized = set()
    for name, module in model.named_modules():
        # The head is tied to the embeddings: drawing it, too, would draw those twice.
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv3d) and name != "lm_head":
            std = VISION_INIT_STD if ".visual." in name else TEXT_INIT_STD
            nn.init.normal_(module.weight, std=std, generator=generator)
            initialized.add(module.weight)
            if (bias := getattr(module, "bias", None)) is not None:
                nn.init.zeros_(bias)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            nn.init.uniform_(weight, -3, 0, generator=generator)
        # Experts, routers and the convolutions of gated delta nets are no modules of those types.
        elif weight.ndim > 1 and weight not in initialized:
            std = 0.3 if "conv1d" in name else TEXT_INIT_STD
            nn.init.normal_(weight, std=std, generator=generator)
    return model


def demonstration_batch(
    toy: Toy,
    tokenizer: PreTrainedTokenizerBase,
    processor: Qwen2VLImageProcessorPil,
    size: int,
    rng: np.random.Generator,
) -> dict[str, torch.Tensor]:
    """Draw a batch of the task's demonstrations, as keyword arguments of the model's forward.

    The ids equal those of inference on the same conversation. Sequences are padded on the right;
    `labels` is -100 outside the answers.
    """
    pictures, sequences, labels = [], [], []
    for _ in range(size):
        ids, targets, rendered_so_far = [], [], ""
        new_pictures: list[np.ndarray] = []
        messages = toy.demonstrate(rng)
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


def warm_start(
    toy: Toy,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    processor: Qwen2VLImageProcessorPil,
    *,
    steps: int,
    seed: int,
    progress: bool,
) -> float:
    """Train the model in place on demonstrations.

    Returns:
        The loss of the last step: the mean over answer tokens, in nats.
    """
    rng = np.random.default_rng([seed, steps])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    # The learning rate rises linearly, stays at its maximum, and falls linearly to 0.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / COOLDOWN_STEPS)
    )
    loss = float("nan")
    model.train()
    with Progress(
        *Progress.get_default_columns(), TextColumn("{task.fields[loss]}"), disable=not progress
    ) as bar:
        row = bar.add_task(f"{toy.name} warm start", total=steps, loss="")
        for _ in range(steps):
            output = model(
                **demonstration_batch(toy, tokenizer, processor, toy.batch_size, rng),
                use_cache=False,
            )
            output.loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            loss = output.loss.item()
            bar.update(row, advance=1, loss=f"loss {loss:.3f}")
    model.eval()
    return loss


def build_toy_checkpoint(
    out_dir: str | os.PathLike[str],
    seed: int = task.DEFAULT_SEED,
    progress: bool = True,
    *,
    toy: str = "toy",
    steps: int | None = None,
) -> None:
    """Write a toy checkpoint into a folder.

    It has weights, config, tokenizer, image settings and a README.

    Args:
        out_dir: the folder, created if missing.
        seed: seed of the random weights and of the demonstrations.
        progress: whether to show a progress bar on the terminal.
        toy: name of the task.
        steps: supervised steps of the warm start; None for the number of the task (half a minute on
            one core for `toy`).
    """
    toy_task = task.toy_of(toy)
    steps = toy_task.steps if steps is None else steps
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_toy_files(folder, toy_task.words)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    model = new_toy_model(toy_task, seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the number of threads changes the order of sums, and so the weights
    try:
        loss = warm_start(
            toy_task, model, tokenizer, processor, steps=steps, seed=seed, progress=progress
        )
    finally:
        torch.set_num_threads(threads)
    disable_progress_bar()  # transformers would show a bar for one file of 4 MB
    model.generation_config = GenerationConfig.from_pretrained(folder)
    save_model(model, FAMILIES[model.config.model_type], folder)
    build_facts = f"Seed {seed}, {steps} steps of warm start, last loss {loss:.3f}"
    parameters = f"{model.num_parameters():,} parameters in float32"
    text = f"# Toy checkpoint\n\n{toy_task.summary()}\n\n{build_facts}, {parameters}.\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
    logger.info("%s checkpoint made: %s", toy, build_facts)
