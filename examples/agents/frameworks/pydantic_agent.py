"""Pydantic AI (`pip install 'pydantic-ai-slim[openai]'`)."""

import base64
import json
import os

from pydantic_ai import Agent, BinaryContent

with open(os.environ["RLINF_VL_TASK"]) as file:
    task = json.load(file)
parts = [part for message in task["messages"] for part in message["content"]]
prompt = [part["text"] for part in parts if part["type"] == "text"]
for uri in task["images"]:
    head, _, data = uri.partition(",")
    prompt.append(BinaryContent(base64.b64decode(data), media_type=head[5:].partition(";")[0]))
agent = Agent("openai-chat:policy")
print(json.dumps({"answer": agent.run_sync(prompt).output}))
