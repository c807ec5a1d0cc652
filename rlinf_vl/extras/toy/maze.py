"""The maze task: environment, dataset rows and demonstrations.

The policy finds the goal on 4×4 cells with one move a turn; every turn shows a new picture. A row
holds a maze as text, four lines of `#` (wall), `.`, `A` (the agent) and `G` (the goal). The
*layout*, the set of walls, decides the split: one layout in eight is held out, with all its starts
and goals. Moves slip: with probability `SLIP` the agent goes in a random direction instead, so that
the policy has to look at each picture to know where it is. Demonstrations have a planted mistake.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from rlinf_vl.envs.base import StepResult
from rlinf_vl.extras.toy.task import Split, Toy, is_held_out
from rlinf_vl.types import Message, Problem

#: Cells along a side of the picture, and pixels along a side of a cell.
SIZE = 4
CELL = 8
#: Maximum number of moves in an episode, and distances of its start from the goal, in moves.
MAX_TURNS = 6
DISTANCES = (3, 4, 5)
N_WALLS = (2, 3, 4)
SLIP = 0.1
#: Probability with which a demonstration makes the opposite of a right move.
FLIP_PROBABILITY = 0.3
N_ROWS: dict[Split, int] = {"train": 4096, "val": 192}
QUESTION = "Which way?"
#: Move → (rows down, columns right).
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
COLOURS = {
    "ground": (245, 245, 240),
    "wall": (70, 70, 70),
    "agent": (200, 40, 40),
    "goal": (40, 160, 60),
}
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
        """Parse the text that `str` writes.

        Raises:
            ValueError: the text is no maze.
        """
        cells = {
            (i, j): sign for i, line in enumerate(text.split("/")) for j, sign in enumerate(line)
        }
        cells_by_sign: dict[str, list[Cell]] = {"A": [], "G": [], "#": []}
        for cell, sign in cells.items():
            if sign in cells_by_sign:
                cells_by_sign[sign].append(cell)
        if (
            cells.keys() != set(_cells())
            or len(cells_by_sign["A"]) != 1
            or len(cells_by_sign["G"]) != 1
        ):
            raise ValueError(
                f"maze: {text!r} is not {SIZE} lines of {SIZE} signs, joined by '/', with one A "
                "and one G"
            )
        return cls(frozenset(cells_by_sign["#"]), cells_by_sign["A"][0], cells_by_sign["G"][0])

    def __str__(self) -> str:
        signs = dict.fromkeys(self.walls, "#") | {self.goal: "G"} | {self.agent: "A"}
        lines = []
        for i in range(SIZE):
            lines.append("".join(signs.get((i, j), ".") for j in range(SIZE)))
        return "/".join(lines)

    def after(self, move: str) -> "Position":
        """Return the position after a move; a wall or the rim keeps the agent where it is."""
        return replace(self, agent=_after(self.walls, self.agent, move))

    def right_moves(self) -> list[str]:
        """Return the moves with which a shortest path to the goal begins."""
        distance_of = distances(self.walls, self.goal)
        # SIZE**2 exceeds every distance: it stands for cells without a path to the goal.
        return [
            move
            for move in MOVES
            if distance_of.get(self.after(move).agent, SIZE**2)
            < distance_of.get(self.agent, SIZE**2)
        ]

    def picture(self) -> np.ndarray:
        """Return the picture of the position, uint8 [32, 32, 3].

        Cells have their `COLOURS`; a line at the left and the top of each cell is one pixel wide
        and 10 % darker.
        """
        colours = np.empty((SIZE, SIZE, 3), np.float32)
        colours[:] = COLOURS["ground"]
        for cell in self.walls:
            colours[cell] = COLOURS["wall"]
        colours[self.goal] = COLOURS["goal"]
        colours[self.agent] = COLOURS["agent"]
        pixels = colours.repeat(CELL, axis=0).repeat(CELL, axis=1)
        pixels[::CELL] *= 0.9
        pixels[:, ::CELL] *= 0.9
        return pixels.astype(np.uint8)

    def answer(self, move: str) -> str:
        """Return the text of a demonstrated move.

        It names the agent's cell, the goal's cell, the open directions and the move.
        """
        open_moves = "".join(name[0] for name in MOVES if self.after(name) != self)
        return f"{_digits(self.agent)}>{_digits(self.goal)} {open_moves} \\boxed{{{move}}}"


def _cells() -> list[Cell]:
    return [(i, j) for i in range(SIZE) for j in range(SIZE)]


def _digits(cell: Cell) -> str:
    return f"{cell[0]}{cell[1]}"


def _after(walls: frozenset[Cell], cell: Cell, move: str) -> Cell:
    down, right = MOVES[move]
    row, column = cell[0] + down, cell[1] + right
    inside = 0 <= row < SIZE and 0 <= column < SIZE
    return (row, column) if inside and (row, column) not in walls else cell


def distances(walls: frozenset[Cell], goal: Cell) -> dict[Cell, int]:
    """Return the number of moves to the goal from each cell with a path to it."""
    # Breadth-first search: `frontier` grows while the loop reads it.
    distance_of, frontier = {goal: 0}, [goal]
    for cell in frontier:
        for neighbour in (_after(walls, cell, move) for move in MOVES):
            if neighbour not in distance_of:
                distance_of[neighbour] = distance_of[cell] + 1
                frontier.append(neighbour)
    return distance_of


def held_out(walls: Iterable[Cell]) -> bool:
    """Return whether a layout belongs to the validation split."""
    # A hash of the layout alone: every start and goal of a layout is in the same split.
    return is_held_out("maze split " + " ".join(map(_digits, sorted(walls))))


def draw_start(split: Split, rng: np.random.Generator) -> Position:
    """Draw a maze of the split; each of `DISTANCES` from agent to goal is equally likely."""
    while True:
        # One permutation gives walls, goal and the order in which cells are tried as the start.
        order = [_cells()[i] for i in rng.permutation(SIZE**2)]
        n = int(rng.choice(N_WALLS))
        walls, goal, distance = frozenset(order[:n]), order[n], int(rng.choice(DISTANCES))
        if held_out(walls) != (split == "val"):
            continue
        distance_of = distances(walls, goal)
        if starts := [cell for cell in order[n:] if distance_of.get(cell) == distance]:
            return Position(walls, starts[0], goal)


def make_rows(split: Split) -> list[dict[str, str]]:
    """Return the rows of a split, all with different mazes.

    Columns are `id`, `problem`, `maze`, and `answer`: the number of moves of the shortest path.
    """
    # A random stream for each split: neither depends on the other.
    rng = np.random.default_rng([2025, split == "train"])
    starts: dict[Position, None] = {}  # a set in order of insertion, so that rows are reproducible
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
    """One episode in the maze of a row.

    The reward is `reward_max` at the goal, and `reward_min` if `MAX_TURNS` moves did not lead
    there. The last `\\boxed{up}`, down, left or right of a response moves the agent. Without one,
    the agent stays, and the turn counts. `info` has the position before the move as the state, and
    the metrics `success` (0 or 1), `turns` and `bumps` (moves against a wall or the rim).

    Args:
        seed: seed of the slips.
        shown: which pictures the policy sees: "every" turn's; "none" (grey pictures instead);
            "first", then grey ones; "first_repeated", the first picture in every turn. All values
            but "every" are controls that measure whether a policy needs the pictures.
    """

    def __init__(
        self, *, reward_max: float, reward_min: float, seed: int, shown: Shown = "every"
    ) -> None:
        if shown not in get_args(Shown):
            raise ValueError(f"shown: {shown!r} is none of {', '.join(get_args(Shown))}")
        self._reward_max, self._reward_min, self._picture_mode = reward_max, reward_min, shown
        self._rng = np.random.default_rng(seed)
        self._over = True

    def start(self, problem: Problem) -> list[Message]:
        self.position = Position.of_text(str(problem.columns.get("maze", "")))
        self._turns = self._bumps = 0
        self._over = False
        self._first_picture = self.position.picture()
        return [{"role": "user", "content": [self._picture(), {"type": "text", "text": QUESTION}]}]

    def step(self, response: str) -> StepResult:
        if self._over:
            raise RuntimeError("maze: step() without start(), or after the end")
        previous = self.position
        # Drawn in every turn, with and without a move: the slips then depend on the seed alone.
        slips, slip_move = self._rng.random() < SLIP, list(MOVES)[self._rng.integers(len(MOVES))]
        if boxed_moves := re.findall(rf"\\boxed\{{({'|'.join(MOVES)})\}}", response):
            self.position = previous.after(slip_move if slips else boxed_moves[-1])
            self._bumps += self.position == previous
        self._turns += 1
        success = self.position.agent == previous.goal
        self._over = success or self._turns == MAX_TURNS
        metrics = {
            "success": float(success),
            "turns": float(self._turns),
            "bumps": float(self._bumps),
        }
        info = {"correct": success, "metrics": metrics, "state": str(previous)}
        if self._over:
            return StepResult((), self._reward_max if success else self._reward_min, True, info)
        return StepResult(({"role": "user", "content": [self._picture()]},), 0.0, False, info)

    def close(self) -> None:
        pass

    def _picture(self) -> dict[str, object]:
        """Return the part of the next message that shows the maze, as `shown` says."""
        grey = self._picture_mode == "none" or (self._picture_mode == "first" and self._turns > 0)
        current = (
            self._first_picture
            if self._picture_mode == "first_repeated"
            else self.position.picture()
        )
        return {"type": "image", "image": BLANK if grey else current}


def demonstrate(rng: np.random.Generator) -> list[list[Message]]:
    """Play a demonstration in a maze of the training split.

    Its moves follow a shortest path, each reversed with `FLIP_PROBABILITY`.
    """
    start = draw_start("train", rng)
    env = Maze(reward_max=1.0, reward_min=0.0, seed=int(rng.integers(2**32)))
    messages = env.start(Problem("", (), "", columns={"maze": str(start)}))
    while True:
        position = env.position
        right_moves = position.right_moves()
        move = right_moves[rng.integers(len(right_moves))]
        # The planted mistake, which reinforcement learning has to unlearn.
        move = OPPOSITE[move] if rng.random() < FLIP_PROBABILITY else move
        messages.append({"role": "assistant", "content": position.answer(move)})
        result = env.step(messages[-1]["content"])
        if result.done:
            return [messages]
        messages += result.messages


def summary() -> str:
    """Describe the task and its planted mistake, for readers of its learning curve."""
    return (
        f"The maze asks the way to a goal on {SIZE}x{SIZE} cells with {min(N_WALLS)} to "
        f"{max(N_WALLS)} walls, one move a turn; every turn shows a new picture of "
        f"{SIZE * CELL}x{SIZE * CELL} pixels. An episode begins {min(DISTANCES)} to "
        f"{max(DISTANCES)} moves from the goal and ends after {MAX_TURNS}; only being there is "
        f"paid for. With probability {SLIP} a move slips: the agent goes in a random direction. "
        "The model is a Qwen3-VL of 0.9 million parameters with random weights, warm-started for "
        f"{TOY.steps} supervised steps on whole episodes.\n"
        f"What is planted: with probability {FLIP_PROBABILITY} a move of the demonstrations is the "
        "opposite of one that leads to the goal. Before each move they name the agent's cell, the "
        "goal's and the directions that are open, and that without mistakes. The model therefore "
        "starts out seeing and formatting, and reaches the goal about one time in four; "
        "reinforcement learning has to unlearn the wrong moves from the reward at the end alone. "
        "The curve shows that the training loop works with pictures in every turn; it says "
        "nothing about how well a real model would learn a real task.\n"
        f"Validation uses {N_ROWS['val']} mazes whose layouts of walls neither the warm start nor "
        "reinforcement learning has seen: one layout in eight is held out, by a hash."
    )


_WORDS = ("Which", " way", "{up", "{down", "{left", "{right")
TOY = Toy("toy-maze", (__file__,), make_rows, demonstrate, _WORDS, 400, 16, summary)
