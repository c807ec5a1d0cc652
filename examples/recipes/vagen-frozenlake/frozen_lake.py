"""VAGEN's FrozenLake: a 4 × 4 lake seen from above, up to three moves an answer.

The lake is drawn from the group's seed, and does not slip. The goal pays 10, an answer of the asked form
with moves that exist 0.5.
"""

import re
from collections import deque

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

from rlinf_vl.envs.base import StepResult

MOVES = {"Left": 0, "Down": 1, "Right": 2, "Up": 3}
GOAL_REWARD = 10.0
FORMAT_REWARD = 0.5
RULES = """You are a FrozenLake solver.
FrozenLake Quick Guide
Goal: Reach the goal (G).
Symbols (If image is provided there are no symbols):
_ Frozen | O Hole | G Goal | P Player | X Player fell into hole | √ Player on goal
Rules:
1. Avoid falling into holes.
2. Frozen tiles are slippery, you may move perpendicular to your intended direction.
Actions you can take: Left, Down, Right, Up. 
"""
FORM = """You can take up to {moves} action(s) at a time, separated by ,.
You should first give your reasoning, and then your answer.
Your response should be in the format of:
<think>...</think><answer>...</answer>"""
EXAMPLE = (
    "e.g. <think>I can see the target is on my down left, I should go down then left to reach the "
    "target</think><answer>Down,Left</answer>"
)


def has_path(lake: np.ndarray) -> bool:
    """Return whether the goal can be reached from the start without a hole."""
    size = len(lake)
    start = tuple(np.argwhere(lake == "S")[0])
    reached, queue = {start}, deque([start])
    while queue:
        row, column = queue.popleft()
        for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            inside = min(cell) >= 0 and max(cell) < size
            if inside and cell not in reached and lake[cell] != "H":
                reached.add(cell)
                queue.append(cell)
    return any(lake[cell] == "G" for cell in reached)


def draw_lake(generator: np.random.Generator, size: int, frozen: float) -> list[str]:
    """Draw lakes with a start and a goal anywhere until one has a path; return its lines."""
    while True:
        lake = generator.choice(["F", "H"], (size, size), p=[frozen, 1 - frozen])
        start, goal = generator.choice(size * size, 2, replace=False)
        lake.flat[start], lake.flat[goal] = "S", "G"
        if has_path(lake):
            return ["".join(line) for line in lake]


def moves_in(response: str, most: int) -> list[str] | None:
    """Return the moves of an answer, `most` at most; None where it has not the asked form."""
    match = re.fullmatch(
        r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", response, re.DOTALL
    )
    if match is None:
        return None
    return [move.strip() for move in match[2].split(",") if move.strip()][:most]


class FrozenLake:
    """An episode; it ends at the goal, in a hole, or after `max_turns` answers."""

    def __init__(
        self,
        size: int = 4,
        frozen: float = 0.8,
        moves: int = 3,
        max_turns: int = 3,
        *,
        group_seed: int,
    ) -> None:
        self._size, self._frozen, self._moves, self._max_turns = size, frozen, moves, max_turns
        self._group_seed = group_seed
        self._answered, self._n_invalid = 0, 0
        self._env: FrozenLakeEnv | None = None

    def start(self, problem):
        lake = draw_lake(np.random.default_rng(self._group_seed), self._size, self._frozen)
        self._env = FrozenLakeEnv(render_mode="rgb_array", desc=lake, is_slippery=False)
        self._env.reset(seed=self._group_seed % 2**31)
        form = FORM.format(moves=self._moves)
        system = f"{RULES}\n{form}\n{EXAMPLE}"
        user = self._message("[Initial Observation]:\n", f"\nDecide your next action(s).\n\n{form}")
        return [{"role": "system", "content": system}, user]

    def step(self, response: str) -> StepResult:
        self._answered += 1
        moves = moves_in(response, self._moves)
        made, reward, done = [], 0.0, False
        is_valid = bool(moves)
        for move in moves or ():
            if move not in MOVES:
                is_valid = False
                break
            made.append(move)
            _, at_goal, done, *_ = self._env.step(MOVES[move])
            reward += GOAL_REWARD * float(at_goal)
            if done:
                break
        has_arrived = reward > 0
        self._n_invalid += not is_valid
        reward += FORMAT_REWARD * is_valid
        done = done or self._answered == self._max_turns
        facts = {
            "correct": has_arrived,
            "metrics": {"turns": self._answered, "invalid_answers": self._n_invalid},
        }
        if done:
            return StepResult([], reward, True, facts)
        before = (
            f"After your answer, the extracted valid action is {made}.\n"
            "After that, the observation is:\n"
        )
        after = f"\nDecide your next action(s).\n\n{FORM.format(moves=self._moves)}"
        return StepResult([self._message(before, after)], reward, False, facts)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _message(self, before: str, after: str):
        parts = [
            {"type": "text", "text": before},
            {"type": "image", "image": np.asarray(self._env.render(), np.uint8)},
            {"type": "text", "text": after},
        ]
        return {"role": "user", "content": parts}
