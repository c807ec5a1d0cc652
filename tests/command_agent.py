"""An agent in a process of its own, without any package; its behaviour is chosen by the task's seed."""

import json
import os
import subprocess
import sys
import time
import urllib.request

task = json.load(open(os.environ["RLINF_VL_TASK"], encoding="utf-8"))
kinds = os.environ["AGENT_KINDS"].split(",")
kind = kinds[task["seed"] % len(kinds)]


def ask(messages, padding=0):
    body = {"model": "policy", "messages": messages, "user": "x" * padding}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {
            "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "content-type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


if kind == "crash":
    sys.exit(3)
if kind == "hang":
    # a child in a session of its own, which outlives its parent
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    time.sleep(1000)
if kind == "loop":
    while True:
        ask(task["messages"])
if kind == "flood":
    ask(task["messages"], padding=50_000_000)
if kind == "write":
    sys.stdout.write("x" * 2_000_000)
    sys.stdout.flush()
    time.sleep(1000)
if kind == "memory":
    data = bytearray(os.urandom(1)) * 2**30
    time.sleep(1000)
if kind == "child memory":
    code = "import time; data = bytearray(b'x') * 2**30; time.sleep(1000)"
    subprocess.run([sys.executable, "-S", "-c", code], start_new_session=True)
if kind == "orphan":
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
if kind == "segfault":
    import ctypes

    ctypes.string_at(0)

reply = ask(task["messages"])
print("some output")
if kind == "no result":
    print("not JSON")
else:
    message = reply["choices"][0]["message"]
    again = ask([*task["messages"], message, {"role": "user", "content": "x = 3"}])
    print(json.dumps({"reward": 0.25, "call_rewards": {again["id"]: 0.5}, "metrics": {"n": 2}}))
