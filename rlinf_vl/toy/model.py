"""The toy model: a Qwen3-VL of 0.9 million parameters, random weights, then a short warm start on demonstrations.

The demonstrations carry a planted mistake (`toy_summary`), so that there is something for reinforcement learning to
unlearn. The checkpoint is an ordinary one, which transformers loads with its own classes; it is built once and reused.
"""

import logging
import os
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress, TextColumn
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.utils.logging import disable_progress_bar

from rlinf_vl.data.cache import build_once, cache_root, source_version
from rlinf_vl.models.loading import save_model
from rlinf_vl.toy import drawings as task
from rlinf_vl.toy import files

logger = logging.getLogger(__name__)

#: Seed of the checkpoint that the examples start from: an ordinary one among those tried, not the best.
DEFAULT_SEED = 1
WARM_START_STEPS = 280
BATCH_SIZE = 32
LEARNING_RATE = 2e-3
#: Steps over which the learning rate rises at the start and falls to 0 at the end.
WARMUP_STEPS = 30
COOLDOWN_STEPS = 80
#: Probability with which a demonstration counts a side one cell too long, for each side on its own.
MISCOUNT_PROBABILITY = 0.45
TEXT_INIT_STD = 0.05
VISION_INIT_STD = 0.08
_IMAGE_TOKENS = (task.GRID // files.MERGE_SIZE) ** 2


def toy_summary() -> str:
    """What the toy is and what is planted in it, in plain words; shown wherever its learning curve is."""
    return (
        "The toy task asks for the area or the perimeter of a filled rectangle on a 6x6 grid, in a 48x48 picture. Its "
        "model is a Qwen3-VL of 0.9 million parameters with random weights, warm-started for "
        f"{WARM_START_STEPS} supervised steps before reinforcement learning begins.\n"
        "What is planted: the demonstrations of the warm start count each side one cell too long with probability "
        f"{MISCOUNT_PROBABILITY} (a fencepost error), and then calculate correctly with the wrong sides. The model "
        "therefore starts out seeing, formatting and calculating, but answers about one question in four correctly; "
        "reinforcement learning has to unlearn the miscount from the reward alone. The curve shows that the training "
        "loop works; it says nothing about how well a real model would learn a real task.\n"
        f"Validation uses {task.N_HELD_OUT} of the {len(task.all_placements())} placements (size and position), which "
        "neither the warm start nor reinforcement learning has seen; the sizes (width x height) "
        f"{' and '.join(f'{w}x{h}' for w, h in task.HELD_OUT_SIZES)} are among them whole. The best constant answer to "
        f"each question is right for {task.best_constant_accuracy(task.toy_rows('val')):.0%} of the validation rows."
    )


def toy_config() -> Qwen3VLConfig:
    """The architecture: text 128 wide with 3 layers, vision 64 wide with 3, 9 image tokens for a 48×48 picture."""
    ids = files.special_ids()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = (
        {"vocab_size": -(-(max(ids.values()) + 1) // 8) * 8, "hidden_size": 128, "intermediate_size": 256}
        | {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        | {"max_position_embeddings": 4096, "rope_parameters": rope, "tie_word_embeddings": True}
        | {"pad_token_id": ids[files.PAD_TOKEN], "bos_token_id": None, "eos_token_id": ids[files.EOS_TOKEN]}
        | {"initializer_range": TEXT_INIT_STD}
    )
    vision = (
        {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128}
        | {"patch_size": files.PATCH_SIZE, "spatial_merge_size": files.MERGE_SIZE}
        | {"temporal_patch_size": files.TEMPORAL_PATCH_SIZE, "num_position_embeddings": task.GRID**2}
        | {"deepstack_visual_indexes": [0, 1], "initializer_range": VISION_INIT_STD}
    )
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def new_toy_model(seed: int) -> Qwen3VLForConditionalGeneration:
    """The model in float32 with random weights: matrices and embeddings normal, biases 0, norms 1."""
    model = Qwen3VLForConditionalGeneration(toy_config()).float()
    generator = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv3d) and name != "lm_head":  # tied to the embeddings
            std = VISION_INIT_STD if ".visual." in name else TEXT_INIT_STD
            nn.init.normal_(module.weight, std=std, generator=generator)
            if (bias := getattr(module, "bias", None)) is not None:
                nn.init.zeros_(bias)
    return model


def demonstration(width: int, height: int, kind: task.Kind, rng: np.random.Generator) -> str:
    """A worked answer, `3*6=18 \\boxed{18}` or `2*(6+1)=14 \\boxed{14}`, with the planted miscount."""
    width, height = (side + int(rng.random() < MISCOUNT_PROBABILITY) for side in (width, height))
    result = task.solve(width, height, kind)
    working = f"{width}*{height}" if kind == "area" else f"2*({width}+{height})"
    return f"{working}={result} \\boxed{{{result}}}"


def demonstration_batch(
    tokenizer: PreTrainedTokenizerBase, processor: Qwen2VLImageProcessorPil, size: int, rng: np.random.Generator
) -> dict[str, torch.Tensor]:
    """A batch of demonstrations on training placements, as keyword arguments of the model's forward.

    Sizes are drawn evenly (a large rectangle has few placements and would hardly be seen), then one of the size's
    placements. The prompt is the one that inference renders. Sequences are padded on the right; `labels` is -100
    outside the answer.
    """
    by_size = [list(same) for _, same in groupby(task.training_placements(), key=lambda p: (p.width, p.height))]
    pictures, sequences, labels = [], [], []
    for _ in range(size):
        placements = by_size[rng.integers(len(by_size))]
        placement = placements[rng.integers(len(placements))]
        kind = list(task.QUESTIONS)[rng.integers(len(task.QUESTIONS))]
        pictures.append(task.draw(placement, rng))
        parts = [{"type": "image"}, {"type": "text", "text": task.QUESTIONS[kind]}]
        messages: Any = [{"role": "user", "content": parts}]  # transformers' annotation knows text alone
        rendered = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        prompt = rendered.replace("<|image_pad|>", "<|image_pad|>" * _IMAGE_TOKENS)
        answer = demonstration(placement.width, placement.height, kind, rng) + files.EOS_TOKEN
        prompt_ids, answer_ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
        sequences.append(torch.tensor(prompt_ids + answer_ids))
        labels.append(torch.tensor([-100] * len(prompt_ids) + answer_ids))
    input_ids = pad_sequence(sequences, batch_first=True, padding_value=files.special_ids()[files.PAD_TOKEN])
    pixels = processor(pictures, return_tensors="pt")
    return {
        "input_ids": input_ids,
        "attention_mask": pad_sequence([torch.ones_like(ids) for ids in sequences], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "mm_token_type_ids": (input_ids == files.special_ids()["<|image_pad|>"]).int(),
        "pixel_values": pixels["pixel_values"],
        "image_grid_thw": pixels["image_grid_thw"],
    }


def warm_start(
    model: Qwen3VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    processor: Qwen2VLImageProcessorPil,
    *,
    steps: int,
    seed: int,
    progress: bool,
) -> float:
    """Train the model in place on demonstrations; return the last step's loss (mean over answer tokens, in nats)."""
    rng = np.random.default_rng([seed, steps])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / COOLDOWN_STEPS)
    )
    loss = float("nan")
    model.train()
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[loss]}"), disable=not progress) as bar:
        row = bar.add_task("toy warm start", total=steps, loss="")
        for _ in range(steps):
            output = model(**demonstration_batch(tokenizer, processor, BATCH_SIZE, rng), use_cache=False)
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
    out_dir: str | os.PathLike[str], seed: int = DEFAULT_SEED, progress: bool = True, *, steps: int = WARM_START_STEPS
) -> None:
    """Write a toy checkpoint into the folder `out_dir`: weights, config, tokenizer, image settings, README.

    Args:
        seed: of the random weights and of the demonstrations.
        progress: show a progress bar on the terminal.
        steps: supervised steps of the warm start (half a minute of one core for the default).
    """
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_toy_files(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    model = new_toy_model(seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in another order make another checkpoint
    try:
        loss = warm_start(model, tokenizer, processor, steps=steps, seed=seed, progress=progress)
    finally:
        torch.set_num_threads(threads)
    disable_progress_bar()  # transformers' bar for one file of 4 MB
    model.generation_config = GenerationConfig.from_pretrained(folder)
    save_model(model, folder)
    made = f"Seed {seed}, {steps} steps of warm start, last loss {loss:.3f}"
    text = f"# Toy checkpoint\n\n{toy_summary()}\n\n{made}, {model.num_parameters():,} parameters in float32.\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
    logger.info("toy checkpoint made: %s", made)


def toy_checkpoint_path(
    *, seed: int = DEFAULT_SEED, cache_dir: str | os.PathLike[str] | None = None, progress: bool = True
) -> Path:
    """Folder of the toy checkpoint of a seed, built on first use under `cache_root(cache_dir)`."""
    version = source_version(task.__file__, files.__file__, __file__)
    target = cache_root(cache_dir) / f"toy-{version}" / f"checkpoint-seed{seed}"
    return build_once(target, lambda folder: build_toy_checkpoint(folder, seed, progress))
