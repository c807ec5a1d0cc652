"""The buttons task: pages of a real browser, on which the policy clicks what it is asked to.

A page of 64×64 pixels has a red, a green and a blue button on three of 4×4 cells, and one is asked
for. The right click leads to a second page, where the buttons lie elsewhere and another one may be
asked for. The *layout*, the set of cells with buttons, decides the split: one layout in eight is
held out, with all orders of its colours. Demonstrations have a planted mistake.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_vl.envs import tool
from rlinf_vl.envs.base import Grade
from rlinf_vl.extras.browser.env import Browser
from rlinf_vl.extras.toy.task import Split, Toy, is_held_out
from rlinf_vl.types import Message, Problem

#: Cells along a side of a page, and pixels along a side of a cell, which is one image token.
SIZE = 4
CELL = 16
#: Pages of an episode. An episode ends with its first wrong click.
N_PAGES = 2
#: Probability with which a demonstration clicks another button than the one that is asked for.
MISTAKE_PROBABILITY = 0.5
N_ROWS: dict[Split, int] = {"train": 4096, "val": 192}
GROUND = (245, 245, 240)
COLOURS = {"red": (200, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 200)}
BLANK = np.full((SIZE * CELL, SIZE * CELL, 3), 128, np.uint8)
#: The page, which draws what `Page` describes.
HTML = Path(__file__).with_name("buttons.html")

Cell = tuple[int, int]
"""(row, column), counted from the top left."""


@dataclass(frozen=True)
class Page:
    """The places of the buttons on a page: `cells` holds a cell for each of `COLOURS`."""

    cells: Mapping[str, Cell]

    def __str__(self) -> str:
        return " ".join(f"{colour}{row}{column}" for colour, (row, column) in self.cells.items())

    @classmethod
    def of_text(cls, text: str) -> "Page":
        """Parse the text that `str` writes.

        Raises:
            ValueError: the text is no page.
        """
        places = re.findall(r"([a-z]+)(\d)(\d)", text)
        page = cls({colour: (int(row), int(column)) for colour, row, column in places})
        if str(page) != text or list(page.cells) != list(COLOURS):
            raise ValueError(f"pages: {text!r} must name {', '.join(COLOURS)}, each with a cell")
        return page

    def picture(self) -> np.ndarray:
        """Return what the browser shows, uint8 [64, 64, 3]."""
        pixels = np.empty((SIZE * CELL, SIZE * CELL, 3), np.uint8)
        pixels[:] = GROUND
        for colour, (row, column) in self.cells.items():
            top, left = row * CELL, column * CELL
            pixels[top : top + CELL, left : left + CELL] = COLOURS[colour]
        return pixels

    def answer(self, colour: str) -> str:
        """Return the text of a demonstrated click: it names the cells of all buttons, then the one
        to click, and calls `click` on its middle."""
        places = {name: f" {name}{row}{column}" for name, (row, column) in self.cells.items()}
        y, x = (index * CELL + CELL // 2 for index in self.cells[colour])
        call = f'{{"name":"click","arguments":{{"x":{x},"y":{y}}}}}'
        return f"{''.join(places.values())}:{places[colour]}{tool.OPEN}{call}{tool.CLOSE}"


class Buttons(Browser):
    """An episode on the pages of a row, in a browser.

    It ends after a right click on each page, or after a wrong one; each right click brings half of
    the reward. A click beside the buttons does nothing, and the turn counts.

    Args:
        blank: whether pictures are grey: a control that measures whether a policy needs to see.
        timeout_s: as in `Browser`.

    Raises:
        ImportError, ValueError: as in `Browser`.
    """

    tools_prompt = ""  # the tiny model knows its tools from the warm start
    tool_response = "{result}"

    def __init__(
        self,
        *,
        blank: bool = False,
        timeout_s: float = 20.0,
        grade: Grade,
        reward_max: float,
        reward_min: float,
        group_seed: int,
    ) -> None:
        super().__init__(
            url=HTML.name,
            folder=str(HTML.parent),
            viewport=(SIZE * CELL, SIZE * CELL),
            settle_s=0.0,  # the page draws at once
            timeout_s=timeout_s,
            keep_page=True,
            grade=grade,
            reward_max=reward_max,
            reward_min=reward_min,
            group_seed=group_seed,
        )
        self._is_blank = blank

    def start(self, problem: Problem) -> list[Message]:
        for text in str(problem.columns.get("pages", "")).split("/"):
            Page.of_text(text)  # a bad row has an error that names it
        return super().start(problem)

    def click(self, x: float, y: float) -> str:
        """Click on the page; the result is what it asks for next.

        Args:
            x: Distance from the left edge of the picture
            y: Distance from its upper edge
        """
        super().click(x, y)
        return str(self._run_page(self._page.ask("request()")))

    def _picture(self) -> dict[str, Any]:
        picture = super()._picture()
        return {"type": "image", "image": BLANK} if self._is_blank else picture


def held_out(cells: Iterable[Cell]) -> bool:
    """Return whether a layout belongs to the validation split."""
    # A hash of the layout alone: every order of its colours is in the same split.
    return is_held_out(f"buttons split {sorted(cells)}")


def draw_page(split: Split, rng: np.random.Generator) -> Page:
    """Draw a page of the split."""
    while True:
        numbers = rng.permutation(SIZE**2)[: len(COLOURS)]
        cells = [(int(number) // SIZE, int(number) % SIZE) for number in numbers]
        if held_out(cells) == (split == "val"):
            return Page(dict(zip(COLOURS, cells, strict=True)))


def draw_row(split: Split, rng: np.random.Generator) -> dict[str, str]:
    """Draw a row without its id: the columns `problem`, `pages` and `answer`, the colours."""
    colours = [str(colour) for colour in rng.choice(list(COLOURS), N_PAGES)]
    pages = [str(draw_page(split, rng)) for _ in colours]
    return {
        "problem": f"Click {colours[0]}",
        "pages": "/".join(pages),
        "answer": " ".join(colours),
    }


def make_rows(split: Split) -> list[dict[str, str]]:
    """Return the rows of a split, all with different pages."""
    # A random stream for each split: neither depends on the other.
    rng = np.random.default_rng([2026, split == "train"])
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < N_ROWS[split]:
        row = draw_row(split, rng)
        rows[row["pages"]] = row
    return [{"id": f"{split}-{number}"} | row for number, row in enumerate(rows.values())]


def demonstrate(rng: np.random.Generator) -> list[list[Message]]:
    """Return a demonstration on pages of the training split, without a browser.

    Each click is on a wrong button with `MISTAKE_PROBABILITY`.
    """
    row = draw_row("train", rng)
    messages: list[Message] = []
    for page_text, colour in zip(row["pages"].split("/"), row["answer"].split(" "), strict=True):
        page = Page.of_text(page_text)
        request = {"type": "text", "text": f"Click {colour}"}
        parts = [{"type": "image", "image": page.picture()}, request]
        # On later pages it is the result of a call, which stands before the picture.
        messages.append({"role": "user", "content": parts if not messages else parts[::-1]})
        clicked = colour
        # The planted mistake, which reinforcement learning has to unlearn.
        if rng.random() < MISTAKE_PROBABILITY:
            clicked = str(rng.choice([name for name in COLOURS if name != colour]))
        messages.append({"role": "assistant", "content": page.answer(clicked)})
        if clicked != colour:
            break
    return [messages]


def summary() -> str:
    """Describe the task and its planted mistake, for readers of its learning curve."""
    return (
        f"A real browser shows a page of {SIZE * CELL}x{SIZE * CELL} pixels with a red, a green "
        f"and a blue button on {SIZE}x{SIZE} cells, and asks for one of them. The model answers "
        "with a click at a place in pixels; a right one leads to a second page, where the buttons "
        "lie elsewhere. Each right click brings half of the reward, and two are a success. The "
        "model is a Qwen3-VL of 0.9 million parameters with random weights, warm-started for "
        f"{TOY.steps} supervised steps on pages that are drawn without a browser, pixel by pixel "
        "as it draws them.\n"
        f"What is planted: with probability {MISTAKE_PROBABILITY} a click of the demonstrations is "
        "on one of the two other buttons. Before each click they name the cells of the three "
        "buttons, and that without mistakes. The model therefore starts out seeing and formatting, "
        "and is right twice about one time in four; reinforcement learning has to unlearn the "
        "wrong clicks from the reward alone. The curve shows that the training loop "
        "works with a browser; it says nothing about how well a real model would use one.\n"
        f"Validation uses {N_ROWS['val']} rows whose layouts of buttons neither the warm start nor "
        "reinforcement learning has seen: one layout in eight is held out, by a hash."
    )


_WORDS = ("<tool", "tool", "_call", '>{"', "name", '":"', '":{"', '":', ',"', '","')
_WORDS += ("arguments", "}}</", "click", "Click", " red", " green", " blue")
TOY = Toy("toy-browser", (__file__,), make_rows, demonstrate, _WORDS, 450, 32, summary)
