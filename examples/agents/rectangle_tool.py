"""An agent that answers the toy's questions with a calculator: it runs the calls that the policy writes.

    rlinf-vl train toy-tool-cpu rollout.env_class=single_turn rollout.agent.function=examples/agents/rectangle_tool.py:solve

Tools and rewards are those of the environment `rectangle_tool`, so that the curve is the same. The tiny model knows its tools
from its warm start, so the calls do not show them; with a larger one send `tools=` and answer with messages of role "tool".
"""

from openai import BadRequestError

from rlinf_vl.extras.agents import AgentResult
from rlinf_vl.extras.toy.rectangle_tool import RectangleTool
from rlinf_vl.rewards import grade_math


# Without async def: grading waits, and other agents share the event loop.
def solve(task, client) -> AgentResult:
    tool = RectangleTool(grade=grade_math, reward_max=1.0, reward_min=0.0)
    tool.start(task.problem)
    messages, rewards = [*task.messages], {}
    correct, metrics, done = False, dict(tool.metrics), False
    while not done:
        try:
            completion = client.chat.completions.create(model="policy", messages=messages)
        except BadRequestError:  # the trajectory is at its limit of calls or tokens
            break
        reply = completion.choices[0].message.content
        step = tool.step(reply)
        done, metrics = step.done, step.info["metrics"]
        correct = step.info.get("correct", False)
        # What each reply has brought about, for `algorithm.credit: turn`.
        rewards[completion.id] = step.reward
        messages += [{"role": "assistant", "content": reply}, *step.messages]
    return AgentResult(0.0, call_rewards=rewards, correct=correct, metrics=metrics)
