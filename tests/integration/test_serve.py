"""A trained policy behind `rlinf-vl serve`, asked by OpenAI's own client and by the line that it prints."""

import base64
import io
import json
import re
import signal
import subprocess
import sys

import openai
import pytest
from PIL import Image

import rlinf_vl
from rlinf_vl.__main__ import main

pytestmark = pytest.mark.integration


class Server:
    """`rlinf-vl serve toy` in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlinf_vl", "serve", "toy", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.curl = self.process.stdout.readline()
        assert self.curl, self.process.communicate()[1]
        self.url = re.search(r"http://[\d.:]+/v1", self.curl)[0]

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def server():
    server = Server("--key", "secret", "--max-new-tokens", "12")
    yield server
    server.process.kill()
    server.process.communicate()


def picture() -> str:
    data = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(data, "png")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": picture()}},
            {"type": "text", "text": "How many red shapes are there?"},
        ],
    }
]


def test_answers_are_those_of_the_policy(server):
    client = server.client("secret")
    served = client.chat.completions.create(model="toy", messages=MESSAGES, temperature=0.0)
    policy = rlinf_vl.load_policy("toy")
    assert served.choices[0].message.content == policy.generate(MESSAGES, max_new_tokens=12).strip()
    assert [model.id for model in client.models.list()] == ["toy"]
    pieces = client.chat.completions.create(
        model="toy", messages=MESSAGES, temperature=0.0, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices)
    assert text == served.choices[0].message.content


def test_a_conversation_goes_on_and_two_may_run_at_once(server):
    client = server.client("secret")
    reply = {"role": "assistant", "content": "2"}
    longer = [*MESSAGES, reply, {"role": "user", "content": "Are you sure?"}]
    first = client.chat.completions.create(model="toy", messages=longer, temperature=0.0)
    assert first.usage.prompt_tokens > 20
    texts = {
        client.chat.completions.create(model="toy", messages=longer).choices[0].message.content
        for _ in range(8)
    }
    assert len(texts) > 1, "at the temperature 1 replies differ"


def test_other_keys_and_endless_prompts_are_refused(server):
    with pytest.raises(openai.AuthenticationError):
        server.client("guess").chat.completions.create(model="toy", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="the model's context"):
        long = [{"role": "user", "content": "How many? " * 20_000}]
        server.client("secret").chat.completions.create(model="toy", messages=long)


def test_the_printed_line_works_in_a_shell(server):
    done = subprocess.run(["bash", "-c", server.curl], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant", done.stderr


def test_a_port_in_use_is_named_and_ctrl_c_ends_it(server, capsys):
    port = server.url.rpartition(":")[2].partition("/")[0]
    assert main(["serve", "toy", "--port", port]) == 2
    assert f"can't listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
    server.process.send_signal(signal.SIGINT)
    _, errors = server.process.communicate(timeout=60)
    assert server.process.returncode == 130 and "Traceback" not in errors, errors


def test_what_is_no_policy_is_named(capsys):
    assert main(["serve", "no/such/run/here"]) == 2
    assert "no/such/run/here" in capsys.readouterr().err
