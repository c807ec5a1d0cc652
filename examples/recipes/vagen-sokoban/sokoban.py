"""VAGEN's Sokoban: a 6 × 6 room seen from above, one box to push, up to three moves an answer.

The room is drawn from the group's seed and played in reverse from its solved states, so that it can
be solved in one to five moves. The solution pays 1, each answer with a move that exists 0.1.
"""

import re
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from rlinf_vl.envs.base import StepResult

Cell = tuple[int, int]
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
SOLVED_REWARD = 1.0
MOVE_REWARD = 0.1
WALK_STEPS_PER_SIDE = 3.4
TURN_PROBABILITY = 0.35
TILE = 16
COLOURS = {"wall": "#a0522d", "joint": "#a09890", "target": "#ff2020", "box": "#dcb400"}
COLOURS |= {"edge": "#e07000", "player": "#20c020", "floor": "#000000"}

RULES = """You play Sokoban: push every box onto a target.
You see the room from above. Boxes can be pushed, one at a time, and never pulled; walls stop you and them.
The moves are Up, Down, Left and Right."""
FORM = """Make up to {moves} moves an answer, separated by commas. An answer has this form:
<observation>...</observation><think>...</think><answer>...</answer><prediction>...</prediction>

The observation is where the target and each box are before your moves, the prediction where they will be after.
For each of them write "The box is VERTICAL and HORIZONTAL of the player", where
- VERTICAL is one of: above, below, same row
- HORIZONTAL is one of: left, right, same column
Use no other words for places, never "same" alone, and add nothing to these sentences."""
EXAMPLES = """Examples:
<observation>The box is same row and right of the player, and the target is same row and right of the player</observation>
<think>The target is two cells beyond the box, so I push it to the right twice</think>
<answer>Right,Right</answer>
<prediction>The box is same row and right of the player, and the target is same row and right of the player</prediction>

<observation>The box is above and left of the player, and the target is above and left of the player</observation>
<think>The target is above the box, so I go below the box first and then push it up</think>
<answer>Left,Up</answer>
<prediction>The box is above and same column of the player, and the target is above and same column of the player</prediction>

<observation>The box is below and same column of the player, and the target is below and right of the player</observation>
<think>The box has to go right, so I walk around to its left</think>
<answer>Left,Down</answer>
<prediction>The box is same row and right of the player, and the target is same row and right of the player</prediction>"""


@dataclass(frozen=True)
class State:
    """The cells of the player and of the boxes."""

    player: Cell
    boxes: frozenset[Cell]


@dataclass(frozen=True)
class Room:
    """A room: the cells of its floor, the targets among them, and its state at the start."""

    size: int
    floor: frozenset[Cell]
    targets: frozenset[Cell]
    start: State


def neighbour(cell: Cell, step: Cell, distance: int = 1) -> Cell:
    """Return the cell `distance` steps away; against the step's direction where it is negative."""
    return cell[0] + distance * step[0], cell[1] + distance * step[1]


def move(state: State, step: Cell, floor: frozenset[Cell]) -> State:
    """Return the state after a move, which pushes a box; the same state where it is blocked."""
    ahead = neighbour(state.player, step)
    if ahead not in floor:
        return state
    if ahead not in state.boxes:
        return State(ahead, state.boxes)
    behind_box = neighbour(ahead, step)
    if behind_box not in floor or behind_box in state.boxes:
        return state
    return State(ahead, state.boxes - {ahead} | {behind_box})


def states_before(state: State, floor: frozenset[Cell]) -> list[State]:
    """Return the states from which one move leads to this one: by steps back, and by pulls."""
    states = []
    for step in STEPS.values():
        player = neighbour(state.player, step, -1)
        if player not in floor or player in state.boxes:
            continue
        states.append(State(player, state.boxes))
        ahead = neighbour(state.player, step)
        if ahead in state.boxes:
            states.append(State(player, state.boxes - {ahead} | {state.player}))
    return states


def reverse_play(
    floor: frozenset[Cell], targets: frozenset[Cell], max_moves: int
) -> dict[State, int]:
    """Return each state that can be solved in `max_moves` moves, with the moves that it takes."""
    latest = [State(player, targets) for player in sorted(floor - targets)]
    moves = dict.fromkeys(latest, 0)
    for n_moves in range(1, max_moves + 1):
        earlier = []
        for state in latest:
            for previous in states_before(state, floor):
                if previous not in moves:
                    moves[previous] = n_moves
                    earlier.append(previous)
        latest = earlier
    return moves


def draw_floor(generator: np.random.Generator, size: int) -> frozenset[Cell]:
    """Draw the floor: the cells of a random walk inside of the walls, each with a neighbour."""
    steps = list(STEPS.values())
    cell = int(generator.integers(1, size - 1)), int(generator.integers(1, size - 1))
    step = steps[generator.integers(4)]
    cells = {cell}
    for _ in range(int(WALK_STEPS_PER_SIDE * size)):
        if generator.random() < TURN_PROBABILITY:
            step = steps[generator.integers(4)]
        row, column = neighbour(cell, step)
        cell = min(max(row, 1), size - 2), min(max(column, 1), size - 2)
        cells |= {cell, neighbour(cell, steps[generator.integers(4)])}
    return frozenset(cell for cell in cells if min(cell) >= 1 and max(cell) <= size - 2)


def distance_to_targets(boxes: frozenset[Cell], targets: frozenset[Cell]) -> int:
    """Return the steps from each box to its nearest target, summed."""
    total = 0
    for box in boxes:
        total += min(abs(box[0] - row) + abs(box[1] - column) for row, column in targets)
    return total


def can_push(state: State, floor: frozenset[Cell]) -> bool:
    """Return whether the player's next move can push a box."""
    next_states = [move(state, step, floor) for step in STEPS.values()]
    return any(next_state.boxes != state.boxes for next_state in next_states)


def draw_room(generator: np.random.Generator, size: int, n_boxes: int, max_moves: int) -> Room:
    """Draw rooms until one can be solved in one to `max_moves` moves.

    As in gym-sokoban, boxes are as far from their targets as that allows, no target is covered, and
    the player stands where a box can be pushed.
    """
    while True:
        floor = draw_floor(generator, size)
        cells = sorted(floor)
        if len(cells) < 2 * n_boxes + 1:
            continue
        places = generator.choice(len(cells), n_boxes, replace=False)
        targets = frozenset(cells[place] for place in places)
        farthest, starts = 0, []
        for state in reverse_play(floor, targets, max_moves):
            if targets & (state.boxes | {state.player}) or not can_push(state, floor):
                continue
            distance = distance_to_targets(state.boxes, targets)
            if distance > farthest:
                farthest, starts = distance, []
            if distance == farthest:
                starts.append(state)
        if starts:
            return Room(size, floor, targets, starts[generator.integers(len(starts))])


def render(room: Room, state: State) -> Image.Image:
    """Return the room as seen from above, 16 × 16 pixels a cell."""
    picture = Image.new("RGB", (room.size * TILE, room.size * TILE), COLOURS["floor"])
    draw = ImageDraw.Draw(picture)
    for row in range(room.size):
        for column in range(room.size):
            left, top = column * TILE, row * TILE
            right, bottom = left + TILE - 1, top + TILE - 1
            if (row, column) not in room.floor:
                draw.rectangle((left, top, right, bottom), COLOURS["wall"])
                draw.line((left, top + 7, right, top + 7), COLOURS["joint"])
                draw.line((left, bottom, right, bottom), COLOURS["joint"])
                draw.line((left + 11, top, left + 11, top + 7), COLOURS["joint"])
                draw.line((left + 4, top + 7, left + 4, bottom), COLOURS["joint"])
                continue
            is_target = (row, column) in room.targets
            if (row, column) in state.boxes:
                edge = COLOURS["target" if is_target else "edge"]
                draw.rectangle((left + 1, top + 1, right - 1, bottom - 1), COLOURS["box"], edge, 2)
                draw.line((left + 4, top + 4, right - 4, bottom - 4), edge)
                draw.line((left + 4, bottom - 4, right - 4, top + 4), edge)
                continue
            if is_target:
                draw.rectangle((left + 1, top + 1, right - 1, bottom - 1), None, COLOURS["target"])
                draw.rectangle((left + 6, top + 6, right - 6, bottom - 6), COLOURS["target"])
            if (row, column) == state.player:
                draw.ellipse((left + 4, top + 2, right - 4, top + 8), COLOURS["player"])
                draw.rectangle((left + 3, top + 7, right - 3, bottom - 3), COLOURS["player"])
    return picture


def moves_in(response: str, max_moves: int) -> list[str] | None:
    """Return the moves of an answer, `max_moves` at most; None where it has not the asked form."""
    parts = [rf"<{tag}>(.*?)</{tag}>" for tag in ("observation", "think", "answer", "prediction")]
    match = re.search(r"\s*".join(parts), response, re.DOTALL)
    if match is None:
        return None
    return [name.strip().lower() for name in match[3].split(",") if name.strip()][:max_moves]


class Sokoban:
    """An episode; it ends when all boxes are on targets, or after `max_turns` answers."""

    def __init__(
        self,
        size: int = 6,
        boxes: int = 1,
        solution: int = 5,
        moves: int = 3,
        max_turns: int = 5,
        *,
        group_seed: int,
    ) -> None:
        self._size, self._boxes, self._solution = size, boxes, solution
        self._moves, self._max_turns = moves, max_turns
        self._group_seed = group_seed
        self._answered, self._n_invalid = 0, 0
        self._room: Room | None = None
        self._state: State | None = None

    def start(self, problem):
        generator = np.random.default_rng(self._group_seed)
        self._room = draw_room(generator, self._size, self._boxes, self._solution)
        self._state = self._room.start
        rules = f"{RULES}\n\n{FORM.format(moves=self._moves)}\n\n{EXAMPLES}"
        return [{"role": "system", "content": rules}, self._message("The room at the start:\n")]

    def step(self, response: str) -> StepResult:
        self._answered += 1
        moves = moves_in(response, self._moves) or []
        executed: list[str] = []
        for name in moves:
            if name not in STEPS:
                break
            executed.append(name)
            self._state = move(self._state, STEPS[name], self._room.floor)
            if self._state.boxes == self._room.targets:
                break
        is_solved = self._state.boxes == self._room.targets
        is_valid = bool(executed) and (is_solved or len(executed) == len(moves))
        self._n_invalid += not is_valid
        reward = MOVE_REWARD * bool(executed) + SOLVED_REWARD * is_solved
        done = is_solved or self._answered == self._max_turns
        facts = {
            "correct": is_solved,
            "metrics": {"turns": self._answered, "invalid_answers": self._n_invalid},
        }
        if done:
            return StepResult([], reward, True, facts)
        names = ", ".join(executed) or "none"
        text = f"Moves read from your answer: {names}. The room after them:\n"
        return StepResult([self._message(text)], reward, False, facts)

    def close(self) -> None:
        pass

    def _message(self, text: str):
        parts = [
            {"type": "text", "text": text},
            {"type": "image", "image": render(self._room, self._state)},
            {"type": "text", "text": "\nChoose your next moves."},
        ]
        return {"role": "user", "content": parts}
