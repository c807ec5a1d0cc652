"""Hugging Face's smolagents (`pip install 'smolagents[openai]'`): an agent that writes its actions as code."""

import base64
import io
import json
import os

from PIL import Image
from smolagents import CodeAgent, OpenAIServerModel

with open(os.environ["RLINF_VL_TASK"]) as file:
    task = json.load(file)
parts = [part for message in task["messages"] for part in message["content"]]
question = " ".join(part["text"] for part in parts if part["type"] == "text")
images = [Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) for uri in task["images"]]
model = OpenAIServerModel(
    model_id="policy",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
agent = CodeAgent(tools=[], model=model, max_steps=2, verbosity_level=0)
# Its own instructions take thousands of tokens, which a small context has no room for.
agent.prompt_templates["system_prompt"] = (
    "Write Python in <code>…</code>; end with final_answer(…)."
)
print(json.dumps({"answer": str(agent.run(question, images=images))}))
