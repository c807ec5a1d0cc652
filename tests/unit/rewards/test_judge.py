"""The judge against a real server: what it is asked, and what happens when that is slow, busy, broken or somewhere else."""

import asyncio
import base64
import io
import json
import threading
import time
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from episodes import encoded, picture
from PIL import Image

from rlinf_vl.rewards import judge as judge_module
from rlinf_vl.rewards.named import named_function
from rlinf_vl.rewards.processes import Limits
from rlinf_vl.rewards.result import Answer
from rlinf_vl.rewards.scoring import make_scorer
from rlinf_vl.types import Problem
from rlinf_vl.user_code import CodeError

PROBLEM = Problem(
    "p:0",
    ({"role": "user", "content": [{"type": "text", "text": "6 × 7?"}]},),
    "42",
    (encoded(picture(48, 32, 1)),),
)


class Server(ThreadingHTTPServer):
    """Answers each request by `replies`: (status, content or body, headers); a function of the asked text, or the same for all."""

    daemon_threads = True

    def __init__(self, reply):
        self.reply, self.asked, self.headers, self.times = reply, [], [], []
        self.running = self.most = 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, body))
            self.server.headers.append(dict(self.headers))
            self.server.times.append(time.time())
            number = len(self.server.asked)
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
        status, said, headers = self.server.reply(number, body)
        with self.server.lock:
            self.server.running -= 1
        data = json.dumps(
            {"choices": [{"message": {"content": said}}]} if isinstance(said, str) else said
        ).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve(monkeypatch, tmp_path):
    monkeypatch.setenv("RLINF_VL_CACHE", str(tmp_path / "cache"))
    # Nobody listens there.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    servers = []

    def start(reply):
        servers.append(Server(reply))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def judged(server, said, problem=PROBLEM, **kwargs):
    settings = {"url": f"http://127.0.0.1:{server.server_port}/v1", "model": "m"} | kwargs
    entries = [{"function": "judge", "kwargs": settings}]
    scorer = make_scorer(
        entries,
        reward_max=1.0,
        reward_min=0.0,
        files={},
        limits=Limits(1.0, 1.0, 1),
        hosts=["127.0.0.1"],
    )
    try:
        return asyncio.run(
            scorer(problem, [Answer(f"<think>so</think>{text}", text) for text in said])
        )
    finally:
        scorer.close()


def right(number, body):
    return 200, "1" if "RIGHT" in json.dumps(body) else "0", {}


def test_what_it_is_asked_and_that_it_is_asked_once(serve, monkeypatch):
    server = serve(right)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    said = ["RIGHT {answer}", "wrong", "RIGHT {answer}"]
    options = {"max_tokens": 8, "seed": 1}
    for order in (1, -1):  # the second time from the disk
        ordered = dict(list(options.items())[::order])
        scores = judged(server, said, key_env="JUDGE_KEY", options=ordered)
        assert [(score.reward, score.correct) for score in scores] == [
            (1.0, True),
            (0.0, False),
            (1.0, True),
        ]
    assert len(server.asked) == 2
    path, body = next((path, body) for path, body in server.asked if "RIGHT" in json.dumps(body))
    (message,) = body["messages"]
    assert (
        path == "/v1/chat/completions"
        and body["model"] == "m"
        and body["max_tokens"] == 8
        and body["temperature"] == 0
    )
    for part in ("6 × 7?", "\n42\n", "\nRIGHT {answer}\n", "from 0 (wrong) to 1 (right)"):
        assert part in message["content"]
    assert (
        "think" not in message["content"] and server.headers[0]["Authorization"] == "Bearer secret"
    )


def test_it_sees_images_and_uses_its_scale(serve):
    server = serve(lambda number, body: (200, "<think>10?</think>Score: 7", {}))
    (score,) = judged(server, ["x"], images=True, scale=10, prompt="Rate {response} to {scale}.")
    assert score.reward == pytest.approx(0.7)
    shown, text = server.asked[0][1]["messages"][0]["content"]
    data = base64.b64decode(shown["image_url"]["url"].partition("base64,")[2])
    assert Image.open(io.BytesIO(data)).size == Image.open(io.BytesIO(PROBLEM.images[0].data)).size
    assert text["text"] == "Rate x to 10."


@pytest.mark.slow
def test_what_may_pass_is_tried_again_and_what_may_not_is_no_fault_of_the_answer(serve):
    def busy(number, body):
        if number == 1:
            return 429, {"error": "slow down"}, {"Retry-After": "0.2"}
        return (503, {"error": "starting"}, {}) if number == 2 else (200, "1", {})

    server = serve(busy)
    (score,) = judged(server, ["x"])
    assert (
        score.reward == 1.0 and len(server.asked) == 3 and server.times[1] - server.times[0] >= 0.2
    )
    for reply, kwargs, requests, said in (
        ((401, {"error": "no key"}, {}), {}, 1, "status 401"),
        (
            (500, {"error": "broken"}, {}),
            {"retries": 1},
            2,
            "no answer after 2 requests; the last: status 500",
        ),
        ((302, {}, {"Location": "http://127.0.0.1:1/else"}), {}, 1, "status 302"),
        ((200, {"choices": []}, {}), {}, 1, "no chat completion"),
    ):
        server = serve(lambda number, body, reply=reply: reply)
        (score,) = judged(server, ["x"], **kwargs)
        assert score.fault is not None and said in score.fault and len(server.asked) == requests


def test_each_wait_before_another_try_is_longer(serve, monkeypatch):
    waits = []
    monkeypatch.setattr(judge_module.time, "sleep", waits.append)
    server = serve(lambda number, body: (200, "1", {}) if number == 5 else (503, {}, {}))
    (score,) = judged(server, ["x"], retries=4)
    assert score.reward == 1.0 and len(server.asked) == 5 and len(waits) == 4
    assert all(2**n / 2 <= wait <= 2**n for n, wait in enumerate(waits)), waits
    assert waits != [1, 2, 4, 8], "workers that failed at once do not come back at once"
    server = serve(lambda number, body: (503, {}, {"Retry-After": "30"}))
    (score,) = judged(server, ["x"], retries=1)
    assert score.fault is not None and len(server.asked) == 2 and waits[4:] == [30.0]


def test_requests_of_a_second_are_counted(serve, monkeypatch, tmp_path):
    """Each takes the next turn, which stands in a file that the machine's workers share."""
    server = serve(lambda number, body: (200, "1", {}))
    monkeypatch.setattr(judge_module.time, "sleep", lambda seconds: None)
    begin = time.time()
    judged(server, ["x", "y", "z"], per_second=0.1)
    (turns,) = [path for path in tmp_path.rglob("*") if path.is_file() and is_time(path)]
    assert 30 <= float(turns.read_text()) - begin <= 31
    judged(serve(lambda number, body: (200, "1", {})), ["x"])
    assert 30 <= float(turns.read_text()) - begin <= 31, "no limit, no turn"


def is_time(path):
    try:
        return float(path.read_text()) > 1e9
    except ValueError:
        return False


@pytest.mark.slow
def test_one_that_is_slow_or_gone(serve):
    server = serve(lambda number, body: time.sleep(0.5 if number > 1 else 1000) or (200, "1", {}))
    (score,) = judged(server, ["x"], timeout=2.0)
    assert score.reward == 1.0 and len(server.asked) == 2
    gone = serve(right)
    gone.shutdown()
    gone.server_close()
    (score,) = judged(gone, ["x"], retries=0)
    assert score.fault is not None and "refused" in score.fault


def test_a_reply_without_a_number_is_no_verdict_and_not_kept(serve):
    server = serve(lambda number, body: (200, ["I can't say", "7", "1"][number - 1], {}))
    for reason in ('no number from 0 to 1: "I can\'t say"', "no number from 0 to 1: '7'", None):
        (score,) = judged(server, ["x"])
        assert score.fault is None and (reason is None or reason in score.ungraded[0])
    assert score.reward == 1.0


@pytest.mark.slow
def test_requests_wait_for_their_turn(serve):
    server = serve(lambda number, body: time.sleep(0.1) or (200, "1", {}))
    judged(server, [f"answer {n}" for n in range(12)], at_once=3)
    assert 2 <= server.most <= 3
    server = serve(right)
    start_time = time.time()
    judged(server, [f"answer {n}" for n in range(8)], per_second=10)
    # The last request's turn is 0.7 s after the first one's, which the start precedes. On a busy
    # machine any of them arrives later, and none earlier.
    assert max(server.times) - start_time >= 0.7, "eight requests, a tenth of a second between two"


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"model": "m"}, "url"),
        (
            {"url": "http://api.example.org/v1", "model": "m"},
            "host 'api.example.org' is not in reward.judge_hosts",
        ),
        ({"url": "ftp://127.0.0.1", "model": "m"}, "is no address"),
        ({"url": "http://127.0.0.1@evil.org/v1", "model": "m"}, "is no address"),
        ({"url": "http://127.0.0.1/v1", "model": "m", "key_env": "NOT_THERE_AT_ALL"}, "export it"),
        ({"url": "http://127.0.0.1/v1", "model": "m", "scale": 0}, "scale: 0 must be > 0"),
        (
            {"url": "http://127.0.0.1/v1", "model": "m", "prompt": "Is it right?"},
            "must hold {response}",
        ),
        ({"url": "http://127.0.0.1/v1", "model": "m", "temperature": 1}, "temperature"),
    ],
)
def test_settings_that_cannot_work_are_refused(kwargs, said):
    with pytest.raises(CodeError, match="'judge'.*" + said.replace("{", "\\{")):
        named_function("judge", kwargs, ["127.0.0.1"])


def test_replies_kept_by_an_older_reading_are_not_read(serve, tmp_path):
    """A reply that was kept under the key of before, which had no version, is asked for anew."""
    server = serve(lambda number, body: (200, "0/1", {}))
    (score,) = judged(server, ["x"])
    assert score.reward == 0.0 and not score.ungraded
    _, body = server.asked[0]
    address = f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
    digest = sha256(
        address.encode() + b"\0" + json.dumps(body, sort_keys=True).encode()
    ).hexdigest()
    kept = tmp_path / "cache" / "judge" / digest[:2] / digest[2:]
    assert not kept.exists()
    (new,) = [
        path for path in (tmp_path / "cache" / "judge").glob("??/*") if path.read_text() == "0/1"
    ]
    assert len(new.parent.name + new.name) == 64, "the whole digest names the file"
    new.unlink()
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("1")
    (score,) = judged(server, ["x"])
    assert score.reward == 0.0 and len(server.asked) == 2
