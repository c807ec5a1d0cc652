"""Writes docs/models.md: `python docs/generate_models_page.py`. A test compares the page with docs/models.json.

The figures are those of tests: `RLINF_VL_FIGURES=docs/models.json` in the environment of tests/integration/test_models.py,
tests/unit/models/test_many_images.py and tests/integration/sglang/test_families.py measures them anew.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlinf_vl.models.families import FAMILIES
from rlinf_vl.tools.check.certificates import Certificate, certificates

DOCS = Path(__file__).parent
PAGE = DOCS / "models.md"
FIGURES = DOCS / "models.json"

HEAD = """\
# Model families

Qwen3-VL, Qwen3-VL mixtures of experts, Qwen3.5, Qwen2.5-VL and, text alone, Qwen3 have layers of this project's own and run on
both engines: each is one file in [`rlinf_vl/models/families/`](../rlinf_vl/models/families/__init__.py). InternVL, Gemma 3,
LLaVA, GLM-4.1V and more take [the general path](#the-general-path). `rollout.model.model_type: auto` reads the family off the
checkpoint, and fine-tunes of a supported model are taken as they are.

## The general path

```bash
bash examples/reasoning/run_main_grpo_vqa.sh qwen3-vl-2b-grpo-fsdp-geo3k rollout.model.model_path=OpenGVLab/InternVL3-2B-hf \\
    rollout.model.model_type=auto rollout.rollout_backend=torch data.image_min_pixels=null data.image_max_pixels=null
```

A model without a file is computed by transformers' modules, with everything that others have but what is named here.
transformers says which modules are its vision tower and its text model (where it can't, `actor.model.vlm`
[does](extending-engines.md#a-model-family)). It takes

- text models whose layers attend through transformers' attention interface (Llama, Qwen2, Qwen3, GLM, EXAONE, Gemma 3), to
  every earlier token or to those within a sliding window, with positions that are counted or M-RoPE's. The tokens of an image
  may see each other, as in Gemma 3;
- images as patches with grids, as Qwen2-VL's descendants have them, or as tiles of one size, as LLaVA, InternVL,
  SmolVLM and Gemma 3 have them. Tiles are those of the checkpoint's own processor; `data.image_min_pixels` and
  `…max_pixels` stay unset.

The rest is **refused** at the start, with what is missing: scaled logits (Cohere2), prompts whose tokens attend to
later ones (PaliGemma), experts of image tokens (ERNIE 4.5), images whose padding or order of rows the model must know
(LLaVA-NeXT, LLaVA-OneVision, Mistral 3), cross attention (Llama 3.2 Vision). It runs on both engines
([`RlinfVlGeneral`](../rlinf_vl/engines/sglang/models/general.py) in SGLang), on one GPU an engine
(`rollout.tensor_parallel_size: 1`); models with sliding windows, and Gemma 3, run on the torch engine. Dropout, which
some towers have, is off.

Mixtures of experts (Qwen3-MoE under InternVL) are known by their structure: `actor.model.freeze_router` holds, adapters go to
their experts (those of GLM-4.5V are refused, as peft renames them), and preflight counts what a token uses. Routing replay,
`router_aux_loss_coef` and expert parallelism need layers of this project's own.

Each row is a certificate of `rlinf-vl prove-family`: the largest of its paths' figures, which are those of the
[table below](#what-is-compared); all are in [`tools/check/certificates/`](../rlinf_vl/tools/check/certificates/). A run of a
model type without a certificate begins with a warning, `rlinf-vl doctor` says so, and a type that was proven wrong is refused.

CERTIFICATES
## A checkpoint's own words

Checkpoints write calls of tools in forms of their own. The form is found by trying out the chat template: it renders
calls with arguments of every type, two calls, calls beside a text and a thought, and results. A form is the
checkpoint's if its reader reads all of that back exactly, through the tokenizer. Types come from the tools' schemas.

| form | checkpoints |
|---|---|
| `<tool_call>` `{"name": …, "arguments": …}` `</tool_call>` | Hermes, Qwen2.5, Qwen3, Qwen3-VL |
| `<tool_call><function=NAME><parameter=KEY>` value … `</tool_call>` | Qwen3-Coder, Qwen3.5, 3.6 and 3.8, Nemotron 3 |
| `<tool_call>NAME<arg_key>` key `</arg_key><arg_value>` value … `</tool_call>` | GLM-4.5 and later, with vision or not |
| `[TOOL_CALLS] [{"name": …, "arguments": …}]` | Mistral, Pixtral |
| `[TOOL_CALLS]NAME[ARGS]{…}` | Mistral since Small 3.2, Magistral |
| `<\\|tool_call>call:NAME{key:value}<tool_call\\|>` | Gemma 4 |
| `{"name": …, "parameters": …}` as the whole reply | Llama 3.1 to 4 |
| `[name(key=value)]`, alone or between `<\\|tool_call_start\\|>` and `<\\|tool_call_end\\|>` | LFM2, LFM2-VL |

A template that shows no calls (InternVL, LLaVA, Gemma 3) has no form: environments describe the first one. Where
tools are used, a form that no reader knows is refused with the text that the template wrote. Thoughts may stand between
`<think>`, `[THINK]`, `◁think▷` or `<|channel>thought` and their ends. The forms are one file each in
[`rlinf_vl/envs/call_forms/`](../rlinf_vl/envs/call_forms/__init__.py).

## Prove a family

```bash
rlinf-vl prove-family CHECKPOINT --output certificate.json
rlinf-vl prove-family CHECKPOINT --family my_family.py:FAMILY
```

`CHECKPOINT` is a folder, a model on the hub or a model type. A random member is made of its config, with small sizes
and every kind of layer, and each path is compared with transformers' own forward of one sequence at a time: positions,
packed rows, shared prompts, trees, cached features of a frozen tower, checkpointing, LoRA, the torch engine, exports,
SGLang before and after a weight sync, two FSDP2 ranks and context parallel. It takes 40 s on two cores, and 40 s more
where SGLang is installed. The exit code is 1 where a figure is above its limit or a path fails; the certificate has the
figures, their limits, the member's config and the versions of the packages.

Run it before you train a family of your own, a model type without a certificate, or a supported family with a newer
transformers. A model type's default config need not be that of its checkpoints (GLM's rotate half of a head): a folder with a
config.json is the better argument. Where transformers names no parts, `--vision-tower` and `--text-model` do.

A checkpoint with a tokenizer has its prompts proven, too: several pictures in a message and in several turns, a system
message, tools and `enable_thinking`. Ids, placeholders and pixels must be those of its own processor in transformers:
the three figures are 0, or the path is wrong.

SGLang's path needs [its environment](sglang.md); paths are added to a certificate by naming them:

```bash
rlinf-vl prove-family internvl --paths sglang --output certificate.json
```

The path `words` makes 200 random answers with calls and thoughts, writes them by the template, and counts those that are read
back otherwise, and the next prompts that do not extend their ids.

## What is compared

Each cell is a figure that a test measures and holds to its limit: the largest difference from transformers' own code,
one sequence at a time, with tiny random members in float32 on a CPU. Two figures are of logprobs, in nats, and of an
entry of a gradient, relative to its tensor's largest where that is above 1; one is of logprobs, or for whole steps of
loss, gradient norm and weights. For prompts of several images it is how much further off they are than prompts of one,
at most 1.20.
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
Families with a gated delta net (`qwen3_5`, `qwen3_5_moe`) are further off in gradients, as transformers' float32 rule
is from a float64 run. After two optimizer steps such a model can be 1e-4 from a plain one, which moves as far when its
first weights change in their last bit. `qwen3` has no vision tower.

Measure again, SGLang's column in its own environment (`bash requirements/install.sh --dev` and `--sglang --dev` make both with
the tests' tools), and write this page:

```bash
RLINF_VL_FIGURES=docs/models.json .venv/bin/python -m pytest tests/integration/test_models.py tests/unit/models/test_many_images.py
RLINF_VL_FIGURES=docs/models.json .venv-sglang/bin/python -m pytest tests/integration/sglang/test_families.py
.venv/bin/python docs/generate_models_page.py
```
"""


def figures_text(figures: Sequence[float], form: str) -> str:
    """Return the figures of a cell, in this format."""
    return " / ".join(f"{figure:{form}}" if figure else "0" for figure in figures)


def cell(family: str, column: str, figures: Mapping[str, Sequence[float]]) -> str:
    """KeyError: the cell has neither a figure nor a reason."""
    if column in figures:
        return figures_text(figures[column], ".2f" if column.startswith("images") else ".1e")
    return REASONS[family, column]


def refusals(certificate: Certificate, paths: Sequence[str]) -> str:
    """Return which of these paths have no figure, and why."""
    reasons = {
        path: "wrong"
        if path in certificate.wrong
        else certificate.refused.get(path, "not measured")
        for path in paths
        if path not in certificate.paths
    }
    return "; ".join(f"**{path}**: {reason}" for path, reason in reasons.items())


def certificate_table() -> str:
    """Return the table of the families that have no file."""
    general = {name: c for name, c in certificates().items() if name not in FAMILIES}
    order = max((certificate.order for certificate in general.values()), key=len)
    # A path that no member has (prompts, video) is named above the table.
    measured = [path for path in order if any(path in c.paths for c in general.values())]
    absent = ", ".join(path for path in order if path not in measured)
    lines = [
        f"Paths are {', '.join(measured)}; a model type alone has no {absent}.\n",
        "| model type | largest figure | of | without a figure |\n|---|---|---|---|",
    ]
    for name, certificate in general.items():
        largest, path = max((max(figures), path) for path, figures in certificate.paths.items())
        cells = (figures_text([largest], ".1e"), path, refusals(certificate, measured))
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n"


def render() -> str:
    """The whole page."""
    cells = json.loads(FIGURES.read_text(encoding="utf-8"))
    head = HEAD.replace("CERTIFICATES\n", certificate_table())
    lines = [head, "| family | " + " | ".join(title for title, _ in COLUMNS.values()) + " |"]
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
