"""The toy's questions answered with a calculator, in two to four turns about one picture.

The policy reads the sides off the picture, calls the tool `multiply` (area) or `add` (half of the
perimeter), gets the result, and gives the answer in a box. After a wrong answer the environment
says so, and the policy may try once more. Demonstrations miscount like those of the toy.
"""

import numpy as np

from rlinf_vl.envs import StepResult, tool
from rlinf_vl.envs.base import Grade
from rlinf_vl.envs.tool import ToolEnv
from rlinf_vl.extras.toy import drawings
from rlinf_vl.extras.toy.task import Toy
from rlinf_vl.types import Message, Problem

WARM_START_STEPS = 280
#: Probability with which a demonstration counts a side one cell too long, for each side alone.
MISCOUNT_PROBABILITY = 0.45
#: Reward of a right second answer, as a share of that of a right first one.
SECOND = 0.5
TOOLS: dict[drawings.Kind, str] = {"area": "multiply", "perimeter": "add"}
#: Pieces of text of the demonstrations that become one token each. Their order decides on the
#: merges of the tokenizer (`files.toy_vocabulary`).
WORDS = (
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
    "}}</",
    "</",
    "wrong",
    " again",
)


class RectangleTool(ToolEnv):
    """The environment of one question.

    A right first answer gets `reward_max`, a right second one the mean of `reward_min` and
    `reward_max`. `lie` is added to every result of a tool: a policy that is still right does not
    read the results.
    """

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
        correct, is_first = self.grade(response, self.problem.answer), self._attempts == 1
        self.metrics["correct"] = float(correct)
        if is_first:
            self.metrics["first_correct"] = float(correct)
        share = (1.0 if is_first else SECOND) if correct else 0.0
        reward = self.pay(self.reward_min + share * (self.reward_max - self.reward_min))
        retry_message: Message = {
            "role": "user",
            "content": [{"type": "text", "text": "wrong, again"}],
        }
        done = correct or not is_first
        return StepResult(() if done else (retry_message,), reward, done, {"correct": correct})


def demonstrate(rng: np.random.Generator) -> list[list[Message]]:
    """Play a demonstration in the environment itself.

    In each attempt, each side is counted one cell too long with `MISCOUNT_PROBABILITY`.
    """
    placement, kind, question = drawings.ask(rng)
    # A demonstrated answer has exactly the form of the reference, so comparing texts grades it.
    env = RectangleTool(
        grade=lambda response, answer: response == answer, reward_max=1.0, reward_min=0.0
    )
    right = drawings.solve(placement.width, placement.height, kind)
    messages = env.start(Problem("demonstration", (question,), f"\\boxed{{{right}}}"))
    done = False
    while not done:
        # A second attempt counts the sides anew, with the same chance of a mistake.
        width, height = (
            side + int(rng.random() < MISCOUNT_PROBABILITY)
            for side in (placement.width, placement.height)
        )
        call = f'{tool.OPEN}{{"name":"{TOOLS[kind]}","arguments":{{"a":{width},"b":{height}}}}}{tool.CLOSE}'
        boxed = f"\\boxed{{{drawings.solve(width, height, kind)}}}"
        for message_text in (call, boxed):
            result = env.step(message_text)
            messages += [{"role": "assistant", "content": message_text}, *result.messages]
            done = result.done
    return [messages]


def summary() -> str:
    """Describe the task and its planted mistake, in plain words."""
    return (
        "The toy's questions, answered over several turns: the model calls a tool that multiplies "
        "or adds two numbers, sees the result and answers; after a wrong answer it may try once "
        "more, for half the reward.\n"
        f"What is planted: in the demonstrations of the warm start ({WARM_START_STEPS} supervised "
        "steps), each side is counted one cell too long with probability "
        f"{MISCOUNT_PROBABILITY}, at either attempt. The tool calculates correctly with "
        "the wrong sides. Reinforcement learning has to unlearn the miscount from the reward "
        "alone.\n"
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
