"""An agent that walks the toy's maze: it calls the policy like any chat endpoint, and keeps its own loop.

    rlinf-vl train toy-maze-cpu rollout.env_class=single_turn rollout.agent.function=examples/agents/maze.py:solve

The moves and pictures are those of the environment `maze`, so that the curve is the same.
"""

import base64
import io

from openai import BadRequestError
from PIL import Image

from rlinf_vl.extras.agents import AgentResult
from rlinf_vl.extras.toy.maze import Maze


def picture(pixels) -> dict:
    """A picture as a part of a message, as a PNG in a data URI."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def shown(message) -> dict:
    """A message of the maze in OpenAI's form."""
    parts = [
        picture(part["image"]) if part["type"] == "image" else part for part in message["content"]
    ]
    return message | {"content": parts}


async def solve(task, client) -> AgentResult:
    maze = Maze(reward_max=1.0, reward_min=0.0, seed=task.seed)
    messages = [shown(message) for message in maze.start(task.problem)]
    reward, correct, metrics = 0.0, False, {}
    while True:
        try:
            completion = await client.chat.completions.create(model="policy", messages=messages)
        except BadRequestError:  # the trajectory is at its limit of calls or tokens
            break
        reply = completion.choices[0].message.content
        step = maze.step(reply)
        reward, correct, metrics = step.reward, step.info["correct"], step.info["metrics"]
        if step.done:
            break
        messages += [{"role": "assistant", "content": reply}, *map(shown, step.messages)]
    return AgentResult(reward, correct=correct, metrics=metrics)
