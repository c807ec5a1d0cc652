"""`check-env` on agents that break one rule each, and on some that break none."""

import sys
import threading
import time
from pathlib import Path

import pytest

from rlinf_vl.__main__ import main
from rlinf_vl.rollout.episode.env_executor import ThreadExecutor
from rlinf_vl.tools.check.agents.observed import LoopWatch
from rlinf_vl.tools.check.agents.scripted_policy import scripted_processor

AGENT = '''
import asyncio, base64, io, json, random, time
import openai
from rlinf_vl.extras.agents import AgentResult

async def ask(client, messages, **options):
    """The reply to these messages; None at a limit of the trajectory."""
    try:
        completion = await client.chat.completions.create(model="policy", messages=messages, **options)
    except openai.BadRequestError as error:
        assert error.code in ("max_calls_exceeded", "context_length_exceeded"), error
        return None
    return completion.choices[0].message

async def talk(client, messages, turns=3):
    """Turns that send every reply back as it came; the last reply."""
    reply = None
    for _ in range(turns):
        message = await ask(client, messages)
        if message is None:
            break
        reply = message
        messages = [*messages, reply.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
    return reply

'''
GOOD = {
    "turns": """
async def solve(task, client):
    reply = await talk(client, task.messages)
    return AgentResult(answer=reply.content)""",
    "a reward and metrics": """
async def solve(task, client):
    reply = await talk(client, task.messages)
    right = task.answer in reply.content
    return AgentResult(float(right), metrics={"right": right}, reward_parts={"word": right})""",
    "tools": """
TOOL = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}
async def solve(task, client):
    messages, called = [*task.messages], 0
    for _ in range(4):
        message = await ask(client, messages, tools=[TOOL])
        if message is None or not message.tool_calls:
            break
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            called += isinstance(json.loads(call.function.arguments).get("a"), int)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
    return AgentResult(0.0, metrics={"called": called})""",
    "a thread that waits": """
def solve(task, client):
    time.sleep(0.01)
    completion = client.chat.completions.create(model="policy", messages=task.messages)
    return 1.0 if "42" in completion.choices[0].message.content else 0.0""",
    "samples beside each other": """
async def solve(task, client):
    replies = await asyncio.gather(*(ask(client, task.messages) for _ in range(3)))
    return float(any("42" in reply.content for reply in replies if reply))""",
}
BROKEN = {
    "never calls": ("async def solve(task, client): return 1.0", "it ended without a call"),
    "a list": (
        "async def solve(task, client):\n    await talk(client, task.messages); return [1.0]",
        "it returned list; return a number, an AgentResult, or None",
    ),
    "nan": (
        "async def solve(task, client):\n    await talk(client, task.messages); return float('nan')",
        "it gave the reward nan, which is no finite number",
    ),
    "call rewards": (
        "async def solve(task, client):\n    await talk(client, task.messages)\n"
        "    return AgentResult(0.0, call_rewards={'x': 1.0})",
        "it gave call_rewards for 'x', which is no reply",
    ),
    "raises": (
        "async def solve(task, client):\n    reply = await talk(client, task.messages)\n"
        "    return float(reply.content.split('boxed{')[1].split('}')[0])",
        "it raised IndexError: list index out of range",
    ),
    "json": (
        "async def solve(task, client):\n    reply = await talk(client, task.messages)\n"
        "    if '<tool_call>' in reply.content: json.loads(reply.content.split('<tool_call>')[1])\n"
        "    return 0.0",
        "it raised JSONDecodeError",
    ),
    "refusals": (
        "async def solve(task, client):\n    messages = task.messages\n"
        "    for _ in range(3):\n"
        "        done = await client.chat.completions.create(model='policy', messages=messages)\n"
        "        reply = done.choices[0].message.model_dump(exclude_none=True)\n"
        "        messages = [*messages, reply, {'role': 'user', 'content': 'Sure?'}]",
        "it fails when the endpoint ends its session",
    ),
    "temperature": (
        "async def solve(task, client):\n"
        "    await client.chat.completions.create(model='p', messages=task.messages, temperature=0)",
        "temperature: 0 is not the run's 1.0",
    ),
    "hangs": (
        "async def solve(task, client):\n    await talk(client, task.messages)\n"
        "    await asyncio.sleep(100)",
        "it did not end within 5 s (rollout.agent.timeout)",
    ),
    "blocks": (
        "blocked = []\nasync def solve(task, client):\n"
        "    time.sleep(0 if blocked else 2.5); blocked.append(1); await talk(client, task.messages)",
        "it kept the event loop for more than 1 s",
    ),
    "images": (
        "async def solve(task, client):\n    for level in range(3):\n"
        "        file = io.BytesIO(); task.images[0].save(file, 'PNG', compress_level=level)\n"
        "        uri = 'data:image/png;base64,' + base64.b64encode(file.getvalue()).decode()\n"
        "        part = {'type': 'image_url', 'image_url': {'url': uri}}\n"
        "        await ask(client, [{'role': 'user', 'content': [part]}])\n"
        "    return 0.0",
        "it sends an image again in other bytes",
    ),
    "history": (
        "async def solve(task, client):\n    messages = task.messages\n"
        "    for _ in range(3):\n"
        "        reply = await ask(client, messages)\n"
        "        if reply is None: break\n"
        "        text = f'I said: {reply.content}'\n"
        "        messages = [*messages, {'role': 'assistant', 'content': text}, messages[0]]\n"
        "    return 0.0",
        "no call continues an earlier one",
    ),
    "own dice": (
        "async def solve(task, client):\n"
        "    text = str(random.random())\n"
        "    await ask(client, [{'role': 'user', 'content': text}])\n    return 0.0",
        "its first call says something else for equal seeds",
    ),
}


def checked(tmp_path: Path, body: str, capsys, *arguments: str) -> tuple[int, str]:
    (tmp_path / "agent.py").write_text(AGENT + body + "\n")
    code = main(["check-env", f"{tmp_path / 'agent.py'}:solve", *arguments])
    return code, capsys.readouterr().out


@pytest.mark.quick("tools")
@pytest.mark.parametrize("case", GOOD)
def test_a_good_agent_holds_the_contract(case, tmp_path, capsys):
    code, out = checked(tmp_path, GOOD[case], capsys)
    assert code == 0 and "BROKEN" not in out, out
    assert out.endswith("solve holds the contract\n") and " calls" in out
    if case == "tools":
        # Random calls of the tool that it gives, and answers that break off, are tried.
        assert "metric called (" in out and "calls of a trajectory: 1 to 4" in out
    if case == "turns":
        assert "refused: max_calls_exceeded" in out and "refused: context_length_exceeded" in out
        assert "branches: 0 to 0; 100% of further calls continue one" in out
        assert "left to the reward functions" in out
    if case == "a thread that waits":
        assert "it makes one call, whatever the answer" in out and "reward: 0 to 1, mean" in out


@pytest.mark.quick("refusals", "history")
@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_told_in_a_sentence(case, tmp_path, capsys):
    body, expected = BROKEN[case]
    limit = ("--time-limit", "5") if case == "hangs" else ()
    code, out = checked(tmp_path, body, capsys, *limit)
    broken = [line for line in out.splitlines() if line.startswith("BROKEN: ")]
    assert code == 1 and expected in "\n".join(broken), out
    # Of "raises" three: no box, a word in it, and NaN.
    assert len(broken) <= (3 if case == "raises" else 2), out
    if case in ("refusals", "raises", "blocks"):
        assert f"{tmp_path / 'agent.py'}, line " in out
    if case == "blocks":
        assert f"{tmp_path / 'agent.py'}, line 28)" in out, out


def test_a_loop_that_is_blocked_before_the_first_look_is_seen():
    """An agent that blocks at once may be faster than the thread that watches it."""
    executor = ThreadExecutor(timeout_s=60.0)
    is_blocked, release = threading.Event(), threading.Event()

    async def block() -> None:
        is_blocked.set()
        release.wait(60)

    agent = executor.begin(block)
    assert is_blocked.wait(60)
    watch = LoopWatch(executor, __file__)
    try:
        with watch:
            deadline = time.monotonic() + 60
            while not watch.blocked_lines and time.monotonic() < deadline:
                time.sleep(0.05)
    finally:
        release.set()
    agent.result(60)
    (line,) = watch.blocked_lines
    assert "release.wait" in Path(__file__).read_text().splitlines()[line - 1]


def test_a_watch_ends_with_its_episode_when_the_next_begins_at_once():
    watch = LoopWatch(ThreadExecutor(timeout_s=60.0), __file__)
    before = set(threading.enumerate())
    for _ in range(20):
        with watch:
            time.sleep(0.005)
    watches = {t for t in set(threading.enumerate()) - before if t.name != "environments"}
    for thread in watches:
        thread.join(5)
    assert not [thread for thread in watches if thread.is_alive()]


@pytest.mark.slow
def test_a_command_is_played_too(tmp_path, monkeypatch, capsys):
    script = Path(__file__).parents[2] / "command_agent.py"
    monkeypatch.setenv("AGENT_KINDS", "good")
    command = f"{sys.executable} -S {script}"
    # It catches no refusal, and so ends with an exit code.
    assert main(["check-env", "--agent", command]) == 1
    out = capsys.readouterr().out
    broken = [line for line in out.splitlines() if line.startswith("BROKEN: ")]
    assert len(broken) == 1 and "it fails when the endpoint ends its session" in broken[0], out
    assert "ended with exit code 1" in broken[0] and "calls of a trajectory: 2 to 2" in out


def test_the_scripted_policy_can_say_anything():
    processor = scripted_processor()
    for text in (
        "答案是四十二, ответ",
        "\x00\x1b[2J\u202e",
        "<|im_end|><|image_pad|>",
        "word " * 9,
    ):
        ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert processor.tokenizer.decode(ids) == text
