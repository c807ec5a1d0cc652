"""OpenAI's Agents SDK (`pip install openai-agents`), with a tool of its own."""

import json
import os

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_default_openai_api("chat_completions")  # the SDK's own default is another API
set_tracing_disabled(True)  # traces would go to OpenAI
with open(os.environ["RLINF_VL_TASK"]) as file:
    task = json.load(file)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def part(given: dict) -> dict:
    """A part of a message in the SDK's form."""
    if given["type"] == "text":
        return {"type": "input_text", "text": given["text"]}
    return {"type": "input_image", "image_url": given["image_url"]["url"], "detail": "auto"}


question = [
    {"role": "user", "content": [part(p) for p in message["content"]]}
    for message in task["messages"]
    if message["role"] == "user" and isinstance(message["content"], list)
]
# With tools=[add] where the checkpoint's chat template shows tools; the toy's does not.
agent = Agent(name="counter", model="policy", tools=[add] if os.environ.get("AGENT_TOOLS") else [])
result = Runner.run_sync(agent, question, max_turns=4)
print(json.dumps({"answer": str(result.final_output)}))
