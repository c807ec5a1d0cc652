"""Writes docs/models.md: `python docs/generate_models_page.py`. A test compares the page with docs/models.json.

The figures are those of tests: `RLINF_VL_FIGURES=docs/models.json` in the environment of tests/integration/test_models.py,
tests/unit/models/test_many_images.py and tests/integration/sglang/test_families.py measures them anew.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlinf_vl.models.families import FAMILIES

DOCS = Path(__file__).parent
PAGE = DOCS / "models.md"
FIGURES = DOCS / "models.json"

HEAD = """\
# Model families

Qwen3-VL, Qwen3-VL mixtures of experts, Qwen3.5, Qwen2.5-VL and, text alone, Qwen3 are supported.
`rollout.model.model_type: auto` reads the family off the checkpoint. What a family needs is one file in
[`rlinf_vl/models/families/`](../rlinf_vl/models/families/__init__.py); everything else asks it.

## Another family: Gemma, LLaVA, InternVL and others

Only the families of the table below are supported; another model type ends with "is not a known family" and their
names. What to do depends on its vision tower.

- **Refused**, whatever the config says: Gemma 3, PaliGemma, LLaVA, LLaVA-OneVision, InternVL, Idefics 3, SmolVLM,
  Mistral 3, Llama 3.2 Vision. Their towers do not take patches and grids. Take a supported family, or write [a family of
  your own](extending-engines.md#a-model-family).
- **Taken if you name its parts**: Qwen2-VL, GLM-4.1V, and what else has a tower that descends from Qwen2-VL's. Set
  `actor.model.vlm.vision_encoder_attr=model.visual`, `actor.model.vlm.language_model_attr=model.language_model` and
  `rollout.rollout_backend=torch` ([the command](extending-engines.md#a-model-family)).
- **Taken as it is**: a fine-tune of a supported model, by `rollout.model.model_path=FOLDER`.

## Prove a family

```bash
rlinf-vl prove-family CHECKPOINT --output certificate.json
rlinf-vl prove-family CHECKPOINT --vision-tower model.visual --text-model model.language_model
rlinf-vl prove-family CHECKPOINT --family my_family.py:FAMILY
```

`CHECKPOINT` is a folder, a model on the hub or a model type. From its config a random member is made with small sizes and every
kind of layer that the checkpoint has, and each path is compared with transformers' own forward of one sequence at a time:
packed rows, shared prompts, trees, cached features of a frozen tower, checkpointing, LoRA, the torch engine, exports, two FSDP2
ranks and context parallel. Pictures of odd sizes are cut by the image processor of a folder, or else by one that follows from
the config; gradients are those of all weights, the tower's included. It takes a minute or two on two cores. The exit code is 1 where a
figure is above its limit or a path fails, and the certificate has the figures, their limits, the member's config and the
versions of the packages. Run it before you train a family of your own, a tower by its path, or a supported family with a newer
transformers.

Prompts (the chat template, and how a tokenizer splits them) and SGLang are not proven by it: `rlinf-vl train --check` renders
prompts, and the table below has SGLang's figures. Qwen2-VL and GLM-4.1V, by their paths, are proven on every path.

## What is compared

Does a family compute what transformers computes? Each cell is a figure that a test measures and holds to its limit, with tiny
random members of sizes unlike any real model's, in float32 on a CPU. The reference is transformers' own code, one sequence at a
time. Two figures are the largest difference of a logprob, in nats, and of an entry of a gradient, relative to its tensor's
largest where that is above 1; one is of logprobs, or for whole steps of loss, gradient norm and weights. How prompts of several
images fare, of different sizes, is a ratio: how much further off they are than prompts of one, at most 1.20.
"""

#: Column → (its title, what is measured).
COLUMNS = {
    "packed": (
        "packed = unpacked",
        "Many sequences in one row, with images in some, text alone in others.",
    ),
    "shared": (
        "prompt shared = not",
        "The same with each prompt once in the row, its responses behind it.",
    ),
    "tree": (
        "tree",
        "Trajectories of several sequences that share parts of their histories: a row is a tree.",
    ),
    "ranks": ("1 = 2 ranks", "A training step on two FSDP2 ranks against one on one rank."),
    "frozen": (
        "frozen tower",
        "A step on two ranks, vision tower and projector frozen, against a plain one written out.",
    ),
    "trained": ("all trained", "The same with everything trained, the vision tower included."),
    "lora": (
        "LoRA",
        "Packed rows with adapters on every linear module and on experts, against peft's forward.",
    ),
    "torch": ("torch engine", "Logprobs of what the embedded engine samples."),
    "sglang": ("SGLang", "Logprobs of what SGLang's CPU build samples."),
    "images": (
        "2–8 images : 1",
        "Mean |rollout − train logprob| of the torch engine, prompts of several images by those of one.",
    ),
    "images sglang": ("SGLang, 2–8 images : 1", "The same of SGLang."),
    "export": (
        "export loads",
        "Logprobs of what transformers loads from an export, against the model before.",
    ),
}

NO_TOWER = "no tower"
TRITON = "needs a GPU: Triton"
#: Why a cell has no figure.
REASONS = {
    ("qwen3", "frozen"): NO_TOWER,
    ("qwen3", "images"): NO_TOWER,
    ("qwen3", "images sglang"): NO_TOWER,
    ("qwen3_5", "sglang"): TRITON,
    ("qwen3_5_moe", "sglang"): TRITON,
    ("qwen3_5", "images sglang"): TRITON,
    ("qwen3_5_moe", "images sglang"): TRITON,
}

FOOT = """\
Families with a gated delta net (`qwen3_5`, `qwen3_5_moe`) are further off in gradients because transformers' own rule in
float32 is that far from a float64 run; this project's sums of log decays are float64, and its rule is nearer. After two
optimizer steps such a model can be 1e-4 from a plain one: so far does a plain one move when its first weights change in their
last bit. One rank and two stay within 1e-5. On SGLang these families need a GPU: it computes the net with Triton, which has no
CPU backend. `qwen3` has no vision tower, and its column "all trained" is text alone.

Measure again, SGLang's column in its own environment (`bash requirements/install.sh --dev` and `--sglang --dev` make both with
the tests' tools), and write this page:

```bash
RLINF_VL_FIGURES=docs/models.json .venv/bin/python -m pytest tests/integration/test_models.py tests/unit/models/test_many_images.py
RLINF_VL_FIGURES=docs/models.json .venv-sglang/bin/python -m pytest tests/integration/sglang/test_families.py
.venv/bin/python docs/generate_models_page.py
```
"""


def cell(family: str, column: str, figures: Mapping[str, Sequence[float]]) -> str:
    """KeyError: the cell has neither a figure nor a reason."""
    if column in figures:
        form = ".2f" if column.startswith("images") else ".1e"
        return " / ".join(f"{figure:{form}}" if figure else "0" for figure in figures[column])
    return REASONS[family, column]


def render() -> str:
    """The whole page."""
    cells = json.loads(FIGURES.read_text(encoding="utf-8"))
    lines = [HEAD, "| family | " + " | ".join(title for title, _ in COLUMNS.values()) + " |"]
    lines.append("|---" * (1 + len(COLUMNS)) + "|")
    lines += [
        f"| `{family}` | "
        + " | ".join(cell(family, column, cells[family]) for column in COLUMNS)
        + " |"
        for family in FAMILIES
    ]
    lines += ["", *(f"- **{title}**: {meaning}" for title, meaning in COLUMNS.values()), "", FOOT]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
