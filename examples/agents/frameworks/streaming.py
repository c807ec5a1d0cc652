"""Plain `openai`, streamed: the client finds the endpoint and the key in its environment."""

import json
import os

from openai import OpenAI

with open(os.environ["RLINF_VL_TASK"]) as file:
    task = json.load(file)
text = ""
for chunk in OpenAI().chat.completions.create(
    model="policy", messages=task["messages"], stream=True
):
    text += chunk.choices[0].delta.content or "" if chunk.choices else ""
print(json.dumps({"answer": text}))
