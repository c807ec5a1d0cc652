"""The toy's questions answered with a calculator: a conversation of two to four turns about one picture.

The policy reads the sides off the picture and calls `multiply` (area) or `add` (perimeter, half of it), sees the result, and gives
the answer in a box. After a wrong one it hears so, and may try once more. The demonstrations miscount as the toy's do.
"""

import numpy as np

from rlinf_vl.envs import StepResult, tool
from rlinf_vl.envs.base import Grade
from rlinf_vl.envs.tool import ToolEnv
from rlinf_vl.toy import drawings
from rlinf_vl.toy.task import Toy
from rlinf_vl.types import Message, Problem

WARM_START_STEPS = 280
#: What a right second answer is worth, as a share of a right first one.
SECOND = 0.5
TOOLS: dict[drawings.Kind, str] = {"area": "multiply", "perimeter": "add"}
#: Pieces of text of the demonstrations that become one token each; a word stands before those that it begins with.
WORDS = (
    *(
        "<tool",
        "tool",
        "_call",
        "_response",
        '>{"',
        "name",
        '":"',
        '":{"',
        '":',
        "multiply",
        "add",
        '","',
        ',"',
        "arguments",
    ),
    *("}}</", "</", "wrong", " again"),
)


class RectangleTool(ToolEnv):
    """Pays `reward_max` for a right first answer, half of the way to it for a right second one. `lie` is added to every result of
    a tool: a policy that is right in spite of it does not read them."""

    tools_prompt = ""  # the tiny model knows its tools from the warm start
    tool_response = "<tool_response>{result}</tool_response>"

    def __init__(self, *, grade: Grade, reward_max: float, reward_min: float, lie: int = 0) -> None:
        super().__init__(grade=grade, reward_max=reward_max, reward_min=reward_min)
        self._lie = lie
        self._attempts = 0
        self.metrics |= {"first_correct": 0.0, "correct": 0.0}

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: The first
            b: The second
        """
        return a * b + self._lie

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first
            b: The second
        """
        return a + b + self._lie

    def answer(self, response: str) -> StepResult:
        self._attempts += 1
        correct, first = self.grade(response, self.problem.answer), self._attempts == 1
        self.metrics["correct"] = float(correct)
        if first:
            self.metrics["first_correct"] = float(correct)
        share = (1.0 if first else SECOND) if correct else 0.0
        reward = self.pay(self.reward_min + share * (self.reward_max - self.reward_min))
        again: Message = {"role": "user", "content": [{"type": "text", "text": "wrong, again"}]}
        done = correct or not first
        return StepResult(() if done else (again,), reward, done, {"correct": correct})


def demonstrate(rng: np.random.Generator) -> list[Message]:
    """A conversation with the environment itself, each side counted one too long with the toy's probability, at either attempt."""
    placement, kind, question = drawings.ask(rng)
    env = RectangleTool(grade=lambda response, answer: response == answer, reward_max=1.0, reward_min=0.0)
    right = drawings.solve(placement.width, placement.height, kind)
    messages = env.start(Problem("demonstration", (question,), f"\\boxed{{{right}}}"))
    done = False
    while not done:
        width, height = (
            side + int(rng.random() < drawings.MISCOUNT_PROBABILITY) for side in (placement.width, placement.height)
        )
        call = f'{tool.OPEN}{{"name":"{TOOLS[kind]}","arguments":{{"a":{width},"b":{height}}}}}{tool.CLOSE}'
        boxed = f"\\boxed{{{drawings.solve(width, height, kind)}}}"
        for said in (call, boxed):
            result = env.step(said)
            messages += [{"role": "assistant", "content": said}, *result.messages]
            done = result.done
    return messages


def summary() -> str:
    """What the task is and what is planted in it, in plain words."""
    return (
        "The toy's questions, answered over several turns: the model calls a tool that multiplies or adds two numbers, sees the "
        "result and answers; after a wrong answer it may try once more, for half the reward.\n"
        "What is planted: in the demonstrations of the warm start "
        f"({WARM_START_STEPS} supervised steps), each side is counted one cell too long with probability "
        f"{drawings.MISCOUNT_PROBABILITY}, at either attempt. The tool calculates correctly with the wrong sides. "
        "Reinforcement learning has to unlearn the miscount from the reward alone.\n"
        "Pictures, placements and questions are the toy's, and so is the split."
    )


TOY = Toy(
    "toy-tool",
    (__file__, drawings.__file__),
    drawings.toy_rows,
    demonstrate,
    WORDS,
    WARM_START_STEPS,
    32,
    summary,
)
