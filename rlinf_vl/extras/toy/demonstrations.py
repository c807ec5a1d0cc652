"""The toy's demonstrations as a data set, for `rlinf-vl sft`, and its model before the warm start.

A row is a question with one of its worked answers, which miscount as planned. Validation rows are
about the placements that are held out. The column `answer` has the right answer of each, so that
sampled answers can be graded.
"""

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from rlinf_vl.extras.toy import drawings
from rlinf_vl.extras.toy.task import DEFAULT_SEED, Split

N_TRAINING_ROWS = 8960


def demonstration_rows(split: Split) -> list[dict[str, Any]]:
    """Make the rows of a split, deterministic: `id`, `messages` (as JSON), `problem`, `images` and
    `answer`."""
    if split == "val":
        rng = np.random.default_rng([DEFAULT_SEED, 0])
        return [
            _row(f"sft-val-{placement}-{kind}", placement, kind, drawings.draw(placement, rng), rng)
            for placement in drawings.held_out_placements()
            for kind in drawings.QUESTIONS
        ]
    rng = np.random.default_rng([DEFAULT_SEED, 1])
    rows = []
    for number in range(N_TRAINING_ROWS):
        placement, kind, question = drawings.ask(rng)
        picture = question["content"][0]["image"]
        rows.append(_row(f"sft-train-{number}", placement, kind, picture, rng))
    return rows


def _row(
    name: str,
    placement: drawings.Placement,
    kind: drawings.Kind,
    picture: np.ndarray,
    rng: np.random.Generator,
) -> dict[str, Any]:
    png = io.BytesIO()
    Image.fromarray(picture).save(png, format="PNG")
    problem = f"<image>{drawings.QUESTIONS[kind]}"
    answers = drawings.demonstrations(placement, kind)
    answer = answers[rng.integers(len(answers))]
    messages = [{"role": "user", "content": problem}, {"role": "assistant", "content": answer}]
    return {
        "id": name,
        "messages": json.dumps(messages),
        "problem": problem,
        "images": [{"bytes": png.getvalue(), "path": None}],
        "answer": f"\\boxed{{{drawings.solve(placement.width, placement.height, kind)}}}",
    }


def summary() -> str:
    """Describe the data and the model, in plain words."""
    return (
        "The demonstrations that the toy's warm start imitates: questions about the size of a "
        "rectangle with worked answers, in which each side is counted one cell too long with "
        "probability 0.5. The checkpoint is the toy's model with random weights."
    )


TOY = replace(
    drawings.TOY,
    name="toy-sft",
    sources=(__file__, drawings.__file__),
    make_rows=demonstration_rows,
    steps=0,
    summary=summary,
)
