"""What the trainer is measured against: a padded step on transformers' own model, and the floor of multiply-adds."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from rlinf_vl.models.family import Family
from rlinf_vl.models.kernels.products import matmul
from rlinf_vl.types import Group, ImageRef


def padded_step(
    model: nn.Module,
    reference: nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Group],
    advantages: Sequence[Sequence[Sequence[float]]],
    pixels: Callable[[ImageRef], np.ndarray],
    image_token_id: int,
    pad_id: int,
    *,
    clip: tuple[float, float],
    kl_beta: float,
    tis_clip: float,
) -> float:
    """One GRPO step as it is written first: a group a micro-batch, rows padded to its longest, each with its own copy of
    prompt and pixels; logits of all positions; a pass for old, one for reference logprobs, one to train. Returns the loss.

    `model` and `reference` are transformers models; the loss is clipped, truncated-importance-sampled and has a k3 penalty.
    """
    total = sum(t.n_response_tokens for g in groups for t in g.trajectories)
    device = next(model.parameters()).device
    batches = []
    for g, values in zip(groups, advantages, strict=True):
        rows = [s.ids.astype(np.int64) for s in g.sequences]
        longest, prompt = max(map(len, rows)), g.prefix_length
        ids = torch.tensor(
            np.stack([np.pad(r, (0, longest - len(r)), constant_values=pad_id) for r in rows])
        )
        lengths = torch.tensor([len(r) for r in rows])[:, None]
        mask = (torch.arange(longest) < lengths).long()
        patches = torch.from_numpy(
            np.concatenate([pixels(image) for image, _ in g.images] * len(rows))
        )
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "mm_token_type_ids": (ids == image_token_id).int(),
            "pixel_values": patches,
            "image_grid_thw": torch.tensor([grid for _, grid in g.images] * len(rows)),
        }
        answer = mask[:, 1:].bool() & (torch.arange(1, longest) >= prompt)
        rollout = torch.zeros(len(rows), longest - 1)
        for row, s in enumerate(g.sequences):
            rollout[row, prompt - 1 : len(s.ids) - 1] = torch.from_numpy(s.logprobs[prompt:])
        inputs = {name: value.to(device) for name, value in inputs.items()}
        batches.append((inputs, *(x.to(device) for x in (answer, rollout, torch.tensor(values)))))

    def logprobs(which: nn.Module, inputs: dict) -> torch.Tensor:
        which.model.rope_deltas = None
        logits = which(**inputs, use_cache=False).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(2, inputs["input_ids"][:, 1:, None]).squeeze(2)

    with torch.no_grad():
        old = [logprobs(model, inputs) for inputs, *_ in batches]
        ref = [logprobs(reference, inputs) for inputs, *_ in batches]
    whole = 0.0
    for (inputs, answer, rollout, advantage), before, base in zip(batches, old, ref, strict=True):
        logp = logprobs(model, inputs)
        ratio = (logp - before).exp()
        token = torch.maximum(
            -advantage * ratio, -advantage * ratio.clamp(1 - clip[0], 1 + clip[1])
        )
        token = token * (before - rollout).exp().clamp(max=tis_clip)
        token = token + kl_beta * ((base - logp).exp() - 1 - (base - logp))
        loss = token[answer].sum() / total
        loss.backward()
        whole += float(loss.detach())
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return whole


def floor_seconds(
    model: nn.Module,
    family: Family,
    groups: Sequence[Group],
    rows: int,
    *,
    reference: bool,
    frozen_tower: bool,
    device: str,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Seconds that the matrix products of one step take when they run alone, at their own shapes, on this device.

    Each shared thing counts once: a prompt's tokens, an image's patches. Policy: forward and two products backward
    (inputs, weights); reference and a frozen tower: forward only; the head: response positions only; attention: causal
    pairs only, two products forward, four backward. `rows` is how many micro-batches the tokens come in. Returns seconds
    and multiply-adds by part: "text", "attention", "head", "vision".
    """
    answers = sum(t.n_response_tokens for g in groups for t in g.trajectories)
    tokens = answers + sum(g.prefix_length for g in groups)
    grids = [grid for g in groups for _, grid in g.images]
    patches = sum(map(math.prod, grids))
    text, vision = model.config.text_config, model.config.vision_config
    merge2 = vision.spatial_merge_size**2
    products: Counter[tuple[str, int, int, int]] = Counter()  # (part, m, k, n) → how often

    def linear(
        part: str, m: int, k: int, n: int, times: int, forwards: int, backwards: int
    ) -> None:
        products[part, m, k, n] += forwards * times
        products[part, m, n, k] += backwards * times
        products[part, k, m, n] += backwards * times

    forwards, per_row = 1 + reference, tokens // rows
    for name, weight in model.get_submodule(family.text_blocks).named_parameters():
        if weight.ndim == 2 and name.endswith("weight"):
            linear("text", per_row, weight.shape[1], weight.shape[0], rows, forwards, 1)
    linear("head", answers // rows, text.hidden_size, text.vocab_size, rows, forwards, 1)
    encodings = 1 if frozen_tower else forwards
    for name, weight in model.get_submodule(family.vision_tower).named_parameters():
        if weight.ndim >= 2 and "pos_embed" not in name:
            m = patches // rows // (merge2 if "merger" in name else 1)
            linear(
                "vision",
                m,
                weight[0].numel(),
                weight.shape[0],
                rows,
                encodings,
                0 if frozen_tower else 1,
            )
    rates = {shape: _rate(*shape[1:], device, dtype) for shape in products}
    work = Counter()
    seconds = Counter()
    for (part, m, k, n), times in products.items():
        work[part] += m * k * n * times
        seconds[part] += 2 * m * k * n * times / rates[part, m, k, n]
    pairs = sum(_pairs(g) for g in groups)
    width = text.num_attention_heads * text.head_dim * text.num_hidden_layers
    work["attention"] = pairs * width * (2 * forwards + 4)
    mean = int(np.mean([g.prefix_length for g in groups]))
    at_once = len(groups) if device == "cuda" else 1  # a kernel for packed rows attends all of them
    seconds["attention"] = (
        2
        * work["attention"]
        / _rate(
            answers // len(groups),
            text.head_dim,
            mean,
            device,
            dtype,
            text.num_attention_heads * at_once,
        )
    )
    seen = sum(math.prod(grid) ** 2 for grid in grids)
    inside = seen * vision.hidden_size * vision.depth * (2 * encodings + (0 if frozen_tower else 4))
    work["vision"] += inside
    seconds["vision"] += (
        2
        * inside
        / _rate(512, vision.hidden_size // vision.num_heads, 512, device, dtype, 4 * at_once)
    )
    return {f"{p}_seconds": s for p, s in seconds.items()} | {
        f"{p}_multiply_adds": float(w) for p, w in work.items()
    }


def _pairs(group: Group) -> float:
    """(query, key) pairs of a group whose prompt stands once."""
    prompt, lengths = group.prefix_length, [t.n_response_tokens for t in group.trajectories]
    return prompt**2 / 2 + sum(n * prompt + n**2 / 2 for n in lengths)


def _rate(
    m: int, k: int, n: int, device: str, dtype: torch.dtype, batch: int | None = None
) -> float:
    """FLOP/s of [m, k] · [k, n] (of `batch` of them at once), the best of several runs."""
    lead = () if batch is None else (batch,)
    a, b = (torch.randn(*lead, *shape, device=device).to(dtype) for shape in ((m, k), (k, n)))
    multiply = (lambda: matmul(a, b)) if batch is None else (lambda: a @ b)
    best, flops = float("inf"), 2 * m * k * n * (batch or 1)
    at_once = 20 if device == "cuda" else 1  # a launch and a wait take as long as a small product
    until = time.perf_counter() + 0.25
    runs = 0
    while runs < 5 or time.perf_counter() < until:
        start = time.perf_counter()
        for _ in range(at_once):
            multiply()
        if device == "cuda":
            torch.cuda.synchronize()
        best, runs = min(best, (time.perf_counter() - start) / at_once), runs + 1
    return flops / best
