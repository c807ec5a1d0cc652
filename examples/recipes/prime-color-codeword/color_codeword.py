"""Coloured squares over three turns, each colour a letter; the last answer must spell them all.

The task is color-codeword of verifiers. Squares are drawn from the group's seed.
"""

import random
import re

from PIL import Image

from rlinf_vl.envs.base import StepResult

#: Colour → its RGB value; their letters are A, B, C … in this order.
COLOURS = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "purple": (128, 0, 128),
    "cyan": (0, 255, 255),
    "orange": (255, 165, 0),
    "white": (255, 255, 255),
    "black": (0, 0, 0),
}
LETTERS = dict(zip(COLOURS, "ABCDEFGHI", strict=True))
SIDE = 100
SYSTEM_PROMPT = """You will be shown colored squares across multiple turns. Each color maps to a letter:

Red=A, Green=B, Blue=C, Yellow=D, Purple=E, Cyan=F, Orange=G, White=H, Black=I

Example: Turn 1 shows Red, Blue. Turn 2 shows Green, Yellow. The full codeword is "ACBD" (all 4 letters in order).

After each turn, output your accumulated codeword so far. Output ONLY the letters with NO spaces."""


def codeword_in(answer: str) -> str:
    """Return the longest word of the letters A to I; where there is none, all of these letters."""
    answer = answer.upper()
    words = re.findall(r"\b[A-I]+\b", answer)
    return max(words, key=len) if words else "".join(re.findall("[A-I]", answer))


class ColorCodeword:
    """An episode of `turns` answers; 1 for a last one that spells all squares shown, else 0."""

    def __init__(self, images_per_turn: int = 1, turns: int = 3, *, group_seed: int) -> None:
        if images_per_turn < 1 or turns < 1:
            raise ValueError(
                f"images_per_turn={images_per_turn} and turns={turns} must be at least 1"
            )
        generator = random.Random(group_seed)
        n_squares = images_per_turn * turns
        self._colours = [generator.choice(list(COLOURS)) for _ in range(n_squares)]
        self._images_per_turn, self._turns, self._answered = images_per_turn, turns, 0

    def start(self, problem):
        return [{"role": "system", "content": SYSTEM_PROMPT}, self._message()]

    def step(self, response: str) -> StepResult:
        self._answered += 1
        if self._answered < self._turns:
            return StepResult([self._message()], 0.0, False)
        expected = "".join(LETTERS[colour] for colour in self._colours)
        spelled = codeword_in(response)
        n_right = sum(a == b for a, b in zip(expected, spelled, strict=False))
        is_right = spelled == expected
        facts = {"correct": is_right, "metrics": {"partial_match": n_right / len(expected)}}
        return StepResult([], float(is_right), True, facts)

    def close(self) -> None:
        pass

    def _message(self):
        first = self._answered * self._images_per_turn
        colours = self._colours[first : first + self._images_per_turn]
        squares = [
            {"type": "image", "image": Image.new("RGB", (SIDE, SIDE), COLOURS[colour])}
            for colour in colours
        ]
        return {"role": "user", "content": [*squares, {"type": "text", "text": self._text()}]}

    def _text(self) -> str:
        count = self._images_per_turn
        if self._answered == 0:
            return f"Here are {count} squares."
        if self._answered < self._turns - 1:
            return f"Here are {count} more squares."
        return (
            f"Here are {count} more squares. Combine your previous answer with these new letters "
            f"to output all {len(self._colours)} letters."
        )
