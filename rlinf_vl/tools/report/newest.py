"""The newest conversation of a run for a terminal: its pictures as colored blocks with the actions
below, and its turns.

Missing and broken parts of a file are left out: the run may be writing it, or be of an older
version.
"""

import io
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from rich.text import Text

from rlinf_vl.tools.report.trajectories import IMAGE_FORMATS, read_image

COLUMNS = (
    "step",
    "split",
    "problem_id",
    "turns",
    "messages",
    "images",
    "tokens",
    "reward",
    "correct",
    "error",
)
#: Height of a picture; a line has two rows of its pixels.
PICTURE_LINES = 8
#: Control tokens, such as <|im_end|>, which mean nothing to a reader.
_CONTROL = re.compile(r"<\|[\w-]{1,40}\|>")
#: An answer in a box, without braces in it.
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")


@dataclass(frozen=True)
class Turn:
    """A turn of a conversation: the observation, the pictures in it, the answer, and its reward."""

    observation: str  # texts before the answer, a ▣ for each picture
    images: tuple[str, ...]  # paths in the run's folder
    answer: str
    reward: float
    calls: tuple[dict[str, Any], ...]

    @property
    def action(self) -> str:
        """Return the answer's boxed text, else the tools that it called, else the answer."""
        boxed = _BOXED.findall(self.answer)
        if boxed:
            return boxed[-1]
        return (
            ", ".join(str(call.get("name") or "malformed call") for call in self.calls)
            or self.answer
        )


@dataclass(frozen=True)
class Newest:
    """The last conversation of the newest file, and the successes of its episodes by their number
    of turns."""

    title: str
    turns: tuple[Turn, ...]
    successes: dict[int, tuple[int, int]]  # number of turns → (right ones, all)

    def draw(self, run: Path, width: int, height: int) -> list[Text]:
        """Return at most `height` lines: success by turns, the filmstrip if there is room for it,
        then the turns."""
        shares = (
            f"{n}: {right / total:.0%} of {total}"
            for n, (right, total) in sorted(self.successes.items())
        )
        lines = [Text.assemble(" success by number of turns  ", (" · ".join(shares), "bold"))]
        if height > PICTURE_LINES + 4:
            lines += _filmstrip(run, self.turns, width)
        for number, turn in enumerate(self.turns, 1):
            reward = (
                (f"  reward {turn.reward:.3g}", "green" if turn.reward > 0 else "red")
                if turn.reward
                else ""
            )
            lines.append(
                Text.assemble(
                    (f" {number:>2} ", "bold"),
                    (f"{turn.observation}  ", "dim"),
                    ("→ ", "cyan"),
                    turn.answer,
                    reward,
                )
            )
            for call in turn.calls:
                call_text = f"{call.get('name') or 'malformed'} {json.dumps(call.get('arguments'))}"
                failed = (f"  {call['error']}", "red") if call.get("error") else ""
                lines.append(
                    Text.assemble("      ", ("call ", "dim"), (call_text, "magenta"), failed)
                )
        if len(lines) > height:
            lines = [
                *lines[: max(0, height - 1)],
                Text(f"    … {len(lines) - height + 1} lines more", "dim"),
            ]
        # A model's text must not steer the terminal.
        for line in lines:
            line.plain = "".join(c if c.isprintable() else " " for c in line.plain)
        return lines[:height]


def read_newest(file: Path) -> Newest | None:
    """Return the last trajectory of several turns in a step's file; None without one."""
    try:
        with pq.ParquetFile(file) as parquet:
            rows = parquet.read(
                [name for name in COLUMNS if name in parquet.schema_arrow.names]
            ).to_pylist()
    except (pa.ArrowException, OSError, ValueError):
        return None
    readable_rows, successes = [], {}
    for row in rows:
        with suppress(ValueError, TypeError, KeyError, IndexError, AttributeError):
            readable_rows.append((row, _turns(row)))
    # Successes are counted over the split of the newest row only: training and validation differ.
    for row, turns in readable_rows:
        if turns and row["split"] == readable_rows[-1][0]["split"] and not row["error"]:
            right, total = successes.get(len(turns), (0, 0))
            successes[len(turns)] = right + bool(row["correct"]), total + 1
    row, turns = next(
        ((row, turns) for row, turns in reversed(readable_rows) if len(turns) > 1), (None, ())
    )
    if row is None:
        return None
    place = f"{'validation' if row['split'] == 'val' else 'training'} at step {row['step']}, problem {row['problem_id']}"
    verdict = (
        row["error"] or f"{'right' if row['correct'] else 'wrong'}, reward {row['reward']:.3g}"
    )
    return Newest(f"{place}: {verdict}", turns, successes)


def _turns(row: dict[str, Any]) -> tuple[Turn, ...]:
    """Return the turns of a trajectory's row."""
    layout = json.loads(row["turns"])["turns"]
    turns = []
    observation: list[Any] = []  # texts and numbers of images since the last answer
    for message in chain.from_iterable(json.loads(row["messages"])):
        if "turn" not in message:
            # the template's beginning of an answer, and an answer of the prompt, are no observation
            observation = (
                [*observation, *message["content"]]
                if message["role"] not in ("assistant", "model")
                else []
            )
            continue
        facts = layout[message["turn"]]
        answer = _CONTROL.sub("", "".join(row["tokens"][facts["start"] : facts["end"]])).strip()
        images = tuple(row["images"][part] for part in observation if isinstance(part, int))
        text = " ".join("▣" if isinstance(part, int) else part.strip() for part in observation)
        turns.append(
            Turn(text, images, answer, facts["reward"], tuple(facts.get("tool_calls", ())))
        )
        observation = []
    return tuple(turns)


def _filmstrip(run: Path, turns: Iterable[Turn], width: int) -> list[Text]:
    """Return pictures side by side as far as there is room, and below each the action taken."""
    lines = [Text(" ") for _ in range(PICTURE_LINES + 1)]
    for number, turn in enumerate(turns, 1):
        frame = [line for name in turn.images[-1:] for line in _picture(run, name)]
        frame_width = max([10, *(line.cell_len for line in frame)])
        if lines[0].cell_len + frame_width > width:
            break
        caption = Text(f"{number} {turn.action}", "bold")
        caption.truncate(frame_width, overflow="ellipsis")
        padding = [Text()] * (PICTURE_LINES - len(frame))
        for line, part in zip_longest(lines, [*frame, *padding, caption], fillvalue=Text()):
            part = part.copy()
            part.pad_right(frame_width - part.cell_len + 1)
            line.append_text(part)
    return lines


def _picture(run: Path, name: str) -> Sequence[Text]:
    """Return an image as lines of half blocks.

    The upper half of a cell has the color of the letter, the lower half that of its ground.
    """
    try:
        with Image.open(io.BytesIO(read_image(run, name)), formats=IMAGE_FORMATS) as image:
            rows = 2 * PICTURE_LINES
            columns = min(3 * rows, max(1, round(rows * image.width / image.height)))
            pixels = np.asarray(image.convert("RGB").resize((columns, rows), Image.Resampling.BOX))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ()

    def color(x: int, y: int) -> str:
        return "#{:02x}{:02x}{:02x}".format(*pixels[y, x])

    lines = []
    for y in range(0, rows, 2):
        line = Text()
        for x in range(columns):
            line.append("▀", f"{color(x, y)} on {color(x, y + 1)}")
        lines.append(line)
    return lines
