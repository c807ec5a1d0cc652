"""The maze: find the goal on 4×4 cells, a move a turn, each shown in a new picture. Environment, rows and demonstrations.

A row holds a maze as text, four lines of `#` (wall), `.`, `A` (the agent) and `G` (the goal). The *layout*, where the walls are,
decides the split: one in eight is held out, with all its starts and goals. Moves slip: with probability `SLIP` the agent goes
in a random direction instead, so that only a look at each picture tells where it is. Demonstrations carry a planted mistake.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from rlinf_vl.envs.base import StepResult
from rlinf_vl.toy.task import Split, Toy
from rlinf_vl.types import Message, Problem

#: Cells along a side of the picture, and pixels along a side of a cell.
SIZE = 4
CELL = 8
#: An episode ends after so many moves; it begins so many moves from the goal.
MAX_TURNS = 6
DISTANCES = (3, 4, 5)
N_WALLS = (2, 3, 4)
SLIP = 0.1
#: Probability with which a demonstration moves away from the goal: in the direction opposite to one that leads there.
FLIP_PROBABILITY = 0.3
N_ROWS: dict[Split, int] = {"train": 4096, "val": 192}
QUESTION = "Which way?"
#: Move → (rows down, columns right).
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
COLOURS = {"ground": (245, 245, 240), "wall": (70, 70, 70), "agent": (200, 40, 40), "goal": (40, 160, 60)}
BLANK = np.full((SIZE * CELL, SIZE * CELL, 3), 128, np.uint8)

Cell = tuple[int, int]
"""(row, column), counted from the top left."""
Shown = Literal["every", "none", "first", "first_repeated"]


@dataclass(frozen=True)
class Position:
    """A maze with the agent somewhere in it."""

    walls: frozenset[Cell]
    agent: Cell
    goal: Cell

    @classmethod
    def of_text(cls, text: str) -> "Position":
        """The reverse of `str`. Raises ValueError if the text is no maze."""
        cells = {(i, j): sign for i, line in enumerate(text.split("/")) for j, sign in enumerate(line)}
        found = {sign: [cell for cell in cells if cells[cell] == sign] for sign in "AG#"}
        if cells.keys() != set(_cells()) or len(found["A"]) != 1 or len(found["G"]) != 1:
            raise ValueError(f"maze: {text!r} is not {SIZE} lines of {SIZE} signs, joined by '/', with one A and one G")
        return cls(frozenset(found["#"]), found["A"][0], found["G"][0])

    def __str__(self) -> str:
        signs = dict.fromkeys(self.walls, "#") | {self.goal: "G"} | {self.agent: "A"}
        return "/".join("".join(signs.get((i, j), ".") for j in range(SIZE)) for i in range(SIZE))

    def after(self, move: str) -> "Position":
        """Where the agent then is: a wall or the rim leaves it where it was."""
        return replace(self, agent=_after(self.walls, self.agent, move))

    def right_moves(self) -> list[str]:
        """Those with which a shortest path to the goal begins."""
        left = distances(self.walls, self.goal)
        return [move for move in MOVES if left.get(self.after(move).agent, SIZE**2) < left.get(self.agent, SIZE**2)]

    def picture(self) -> np.ndarray:
        """uint8 [32, 32, 3]: cells in `COLOURS`, a line one pixel wide and a tenth darker at the left and the top of each."""
        shown = np.empty((SIZE, SIZE, 3), np.float32)
        shown[:] = COLOURS["ground"]
        for cell in self.walls:
            shown[cell] = COLOURS["wall"]
        shown[self.goal] = COLOURS["goal"]
        shown[self.agent] = COLOURS["agent"]
        pixels = shown.repeat(CELL, axis=0).repeat(CELL, axis=1)
        pixels[::CELL] *= 0.9
        pixels[:, ::CELL] *= 0.9
        return pixels.astype(np.uint8)

    def answer(self, move: str) -> str:
        """What a demonstration says: the agent's and the goal's cells, the directions that are open, the move."""
        way_open = "".join(name[0] for name in MOVES if self.after(name) != self)
        return f"{_digits(self.agent)}>{_digits(self.goal)} {way_open} \\boxed{{{move}}}"


def _cells() -> list[Cell]:
    return [(i, j) for i in range(SIZE) for j in range(SIZE)]


def _digits(cell: Cell) -> str:
    return f"{cell[0]}{cell[1]}"


def _after(walls: frozenset[Cell], cell: Cell, move: str) -> Cell:
    down, right = MOVES[move]
    there = (cell[0] + down, cell[1] + right)
    inside = 0 <= there[0] < SIZE and 0 <= there[1] < SIZE
    return there if inside and there not in walls else cell


def distances(walls: frozenset[Cell], goal: Cell) -> dict[Cell, int]:
    """Moves to the goal from each cell that has a path there."""
    found, edge = {goal: 0}, [goal]
    for cell in edge:  # which grows
        for there in (_after(walls, cell, move) for move in MOVES):
            if there not in found:
                found[there] = found[cell] + 1
                edge.append(there)
    return found


def held_out(walls: Iterable[Cell]) -> bool:
    """Whether a layout is never trained on."""
    name = "maze split " + " ".join(map(_digits, sorted(walls)))
    return hashlib.sha256(name.encode()).digest()[0] % 8 == 0


def draw_start(split: Split, rng: np.random.Generator) -> Position:
    """A maze of the split, its agent at one of `DISTANCES` from the goal, each as likely."""
    while True:
        order = [_cells()[i] for i in rng.permutation(SIZE**2)]
        n = int(rng.choice(N_WALLS))
        walls, goal, distance = frozenset(order[:n]), order[n], int(rng.choice(DISTANCES))
        if held_out(walls) != (split == "val"):
            continue
        found = distances(walls, goal)
        if starts := [cell for cell in order[n:] if found.get(cell) == distance]:
            return Position(walls, starts[0], goal)


def make_rows(split: Split) -> list[dict[str, str]]:
    """The rows of a split, all different: `id`, `problem`, `maze`, and as `answer` the moves that the shortest path has."""
    rng = np.random.default_rng([2025, split == "train"])
    starts: dict[Position, None] = {}
    while len(starts) < N_ROWS[split]:
        starts[draw_start(split, rng)] = None
    return [
        {
            "id": f"{split}-{number}",
            "problem": QUESTION,
            "maze": str(start),
            "answer": str(distances(start.walls, start.goal)[start.agent]),
        }
        for number, start in enumerate(starts)
    ]


class Maze:
    """One walk through the maze of a row. The reward is `reward_max` at the goal, else `reward_min` after `MAX_TURNS` moves.

    A response's last `\\boxed{up}`, down, left or right moves the agent; without one it stays, which is a turn too. `info` has the
    position as the state, and the metrics `success` (0 or 1), `turns` and `bumps` (moves against a wall or the rim).

    Args:
        seed: of the slips.
        shown: pictures of "every" turn; "none" of them (grey ones instead); the "first" one, grey ones then; the first one in each
            turn ("first_repeated"). All but "every" are controls: they say whether a policy needs the pictures.
    """

    def __init__(self, *, reward_max: float, reward_min: float, seed: int, shown: Shown = "every") -> None:
        if shown not in get_args(Shown):
            raise ValueError(f"shown: {shown!r} is none of {', '.join(get_args(Shown))}")
        self._reward_max, self._reward_min, self._shown = reward_max, reward_min, shown
        self._rng = np.random.default_rng(seed)
        self._over = True

    def start(self, problem: Problem) -> list[Message]:
        self.position = Position.of_text(str(problem.columns.get("maze", "")))
        self._turns = self._bumps = 0
        self._over = False
        self._first = self.position.picture()
        return [{"role": "user", "content": [self._picture(), {"type": "text", "text": QUESTION}]}]

    def step(self, response: str) -> StepResult:
        if self._over:
            raise RuntimeError("maze: step() without start(), or after the end")
        before = self.position
        slips, slipped = self._rng.random() < SLIP, list(MOVES)[self._rng.integers(len(MOVES))]
        if said := re.findall(rf"\\boxed\{{({'|'.join(MOVES)})\}}", response):
            self.position = before.after(slipped if slips else said[-1])
            self._bumps += self.position == before
        self._turns += 1
        success = self.position.agent == before.goal
        self._over = success or self._turns == MAX_TURNS
        metrics = {"success": float(success), "turns": float(self._turns), "bumps": float(self._bumps)}
        info = {"correct": success, "metrics": metrics, "state": str(before)}
        if self._over:
            return StepResult((), self._reward_max if success else self._reward_min, True, info)
        return StepResult(({"role": "user", "content": [self._picture()]},), 0.0, False, info)

    def close(self) -> None:
        pass

    def _picture(self) -> dict[str, object]:
        grey = self._shown == "none" or (self._shown == "first" and self._turns > 0)
        current = self._first if self._shown == "first_repeated" else self.position.picture()
        return {"type": "image", "image": BLANK if grey else current}


def demonstrate(rng: np.random.Generator) -> list[Message]:
    """An episode in a maze of the training split: moves on a shortest path, each reversed with `FLIP_PROBABILITY`."""
    start = draw_start("train", rng)
    env = Maze(reward_max=1.0, reward_min=0.0, seed=int(rng.integers(2**32)))
    messages = env.start(Problem("", (), "", columns={"maze": str(start)}))
    while True:
        position = env.position
        right = position.right_moves()
        move = right[rng.integers(len(right))]
        move = OPPOSITE[move] if rng.random() < FLIP_PROBABILITY else move
        messages.append({"role": "assistant", "content": position.answer(move)})
        result = env.step(messages[-1]["content"])
        if result.done:
            return messages
        messages += result.messages


def summary() -> str:
    """What the task is and what is planted in it, in plain words; shown wherever its learning curve is."""
    return (
        f"The maze asks the way to a goal on {SIZE}x{SIZE} cells with {min(N_WALLS)} to {max(N_WALLS)} walls, one move a turn; "
        f"every turn shows a new picture of {SIZE * CELL}x{SIZE * CELL} pixels. An episode begins {min(DISTANCES)} to "
        f"{max(DISTANCES)} moves from the goal and ends after {MAX_TURNS}; only being there is paid for. With probability "
        f"{SLIP} a move slips: the agent goes in a random direction. The model is a Qwen3-VL of 0.9 million parameters with "
        f"random weights, warm-started for {TOY.steps} supervised steps on whole episodes.\n"
        f"What is planted: with probability {FLIP_PROBABILITY} a move of the demonstrations is the opposite of one that leads "
        "to the goal. Before each move they name the agent's cell, the goal's and the directions that are open, and that "
        "without mistakes. The model therefore starts out seeing and formatting, and reaches the goal about one time in four; "
        "reinforcement learning has to unlearn the wrong moves from the reward at the end alone. The curve shows that the "
        "training loop works with pictures in every turn; it says nothing about how well a real model would learn a real task.\n"
        f"Validation uses {N_ROWS['val']} mazes whose layouts of walls neither the warm start nor reinforcement learning has "
        "seen: one layout in eight is held out, by a hash."
    )


_WORDS = ("Which", " way", "{up", "{down", "{left", "{right")
TOY = Toy("toy-maze", (__file__,), make_rows, demonstrate, _WORDS, 400, 16, summary)
