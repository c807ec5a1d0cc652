"""The newest conversation of a run for a terminal: its pictures as colored blocks with the actions below, and its turns.

What a file doesn't have, or has broken, is left out: the run may be writing it, or be of an older version.
"""

import io
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from rich.text import Text

from rlinf_vl.report.trajectories import IMAGE_FORMATS, read_image

COLUMNS = ("step", "split", "problem_id", "turns", "messages", "images", "tokens", "reward", "correct", "error")
PICTURE_LINES = 8
"""Height of a picture; a line has two rows of its pixels."""
_CONTROL = re.compile(r"<\|[\w-]{1,40}\|>")
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")


@dataclass(frozen=True)
class Turn:
    """What was said before an answer, the pictures in it, and what came of the answer."""

    said: str
    images: tuple[str, ...]  # paths in the run's folder
    answer: str
    reward: float
    calls: tuple[dict[str, Any], ...]

    @property
    def action(self) -> str:
        """What the answer boxed, else the tools that it called, else its end."""
        boxed = _BOXED.findall(self.answer)
        return (
            boxed[-1]
            if boxed
            else ", ".join(str(call.get("name") or "malformed call") for call in self.calls) or self.answer
        )


@dataclass(frozen=True)
class Newest:
    """The last conversation of the newest file, and how its episodes went by their number of turns."""

    title: str
    turns: tuple[Turn, ...]
    successes: dict[int, tuple[int, int]]  # number of turns → (right ones, all)

    def draw(self, run: Path, width: int, height: int) -> list[Text]:
        """At most `height` lines: success by turns, the filmstrip if there is room for it, then the turns."""
        shares = (f"{n}: {right / total:.0%} of {total}" for n, (right, total) in sorted(self.successes.items()))
        lines = [Text.assemble(" success by number of turns  ", (" · ".join(shares), "bold"))]
        if height > PICTURE_LINES + 4:
            lines += _filmstrip(run, self.turns, width)
        for number, turn in enumerate(self.turns, 1):
            paid = (f"  reward {turn.reward:.3g}", "green" if turn.reward > 0 else "red") if turn.reward else ""
            lines.append(
                Text.assemble((f" {number:>2} ", "bold"), (f"{turn.said}  ", "dim"), ("→ ", "cyan"), turn.answer, paid)
            )
            for call in turn.calls:
                what = f"{call.get('name') or 'malformed'} {json.dumps(call.get('arguments'))}"
                failed = (f"  {call['error']}", "red") if call.get("error") else ""
                lines.append(Text.assemble("      ", ("call ", "dim"), (what, "magenta"), failed))
        if len(lines) > height:
            lines = [*lines[: max(0, height - 1)], Text(f"    … {len(lines) - height + 1} lines more", "dim")]
        for line in lines:
            line.plain = "".join(c if c.isprintable() else " " for c in line.plain)
        return lines[:height]


def read_newest(file: Path) -> Newest | None:
    """The last trajectory of several turns in a step's file; None without one."""
    try:
        with pq.ParquetFile(file) as parquet:
            rows = parquet.read([name for name in COLUMNS if name in parquet.schema_arrow.names]).to_pylist()
    except (pa.ArrowException, OSError, ValueError):
        return None
    counted, successes = [], {}
    for row in rows:
        with suppress(ValueError, TypeError, KeyError, IndexError, AttributeError):
            counted.append((row, _turns(row)))
    for row, turns in counted:
        if turns and row["split"] == counted[-1][0]["split"] and not row["error"]:
            right, total = successes.get(len(turns), (0, 0))
            successes[len(turns)] = right + bool(row["correct"]), total + 1
    row, turns = next(((row, turns) for row, turns in reversed(counted) if len(turns) > 1), (None, ()))
    if row is None:
        return None
    where = (
        f"{'validation' if row['split'] == 'val' else 'training'} at step {row['step']}, problem {row['problem_id']}"
    )
    verdict = row["error"] or f"{'right' if row['correct'] else 'wrong'}, reward {row['reward']:.3g}"
    return Newest(f"{where}: {verdict}", turns, successes)


def _turns(row: dict[str, Any]) -> tuple[Turn, ...]:
    layout, turns = json.loads(row["turns"])["turns"], []
    said: list[Any] = []
    for message in (message for sequence in json.loads(row["messages"]) for message in sequence):
        if "turn" not in message:
            said = [*said, *message["content"]] if message["role"] not in ("assistant", "model") else []
            continue
        facts = layout[message["turn"]]
        answer = _CONTROL.sub("", "".join(row["tokens"][facts["start"] : facts["end"]])).strip()
        images = tuple(row["images"][part] for part in said if isinstance(part, int))
        text = " ".join("▣" if isinstance(part, int) else part.strip() for part in said)
        turns.append(Turn(text, images, answer, facts["reward"], tuple(facts.get("tool_calls", ()))))
        said = []
    return tuple(turns)


def _filmstrip(run: Path, turns: Iterable[Turn], width: int) -> list[Text]:
    """Pictures side by side as far as there is room, and below each what was done."""
    lines = [Text(" ") for _ in range(PICTURE_LINES + 1)]
    for number, turn in enumerate(turns, 1):
        frame = [line for name in turn.images[-1:] for line in _picture(run, name)]
        across = max([10, *(line.cell_len for line in frame)])
        if lines[0].cell_len + across > width:
            break
        done = Text(f"{number} {turn.action}", "bold")
        done.truncate(across, overflow="ellipsis")
        for line, part in zip_longest(
            lines, [*frame, *[Text()] * (PICTURE_LINES - len(frame)), done], fillvalue=Text()
        ):
            part = part.copy()
            part.pad_right(across - part.cell_len + 1)
            line.append_text(part)
    return lines


def _picture(run: Path, name: str) -> Sequence[Text]:
    """Half blocks: the upper half of a cell has the color of the letter, the lower half that of its ground."""
    try:
        with Image.open(io.BytesIO(read_image(run, name)), formats=IMAGE_FORMATS) as image:
            rows = 2 * PICTURE_LINES
            columns = min(3 * rows, max(1, round(rows * image.width / image.height)))
            pixels = np.asarray(image.convert("RGB").resize((columns, rows), Image.Resampling.BOX))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ()

    def color(x: int, y: int) -> str:
        return "#{:02x}{:02x}{:02x}".format(*pixels[y, x])

    return [
        Text.assemble(*(("▀", f"{color(x, y)} on {color(x, y + 1)}") for x in range(columns)))
        for y in range(0, rows, 2)
    ]
