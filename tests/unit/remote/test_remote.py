"""The `remote` environment against the example's real server, and against one that breaks every rule between them."""

import asyncio
import base64
import io
import json
import logging
import re
import sys
import threading
import zlib

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from task_app import Relay, TaskApp

from rlinf_vl.data.clips import clip_ref
from rlinf_vl.data.data_uris import data_uri
from rlinf_vl.envs import EnvMaker, app_client
from rlinf_vl.envs.registry import load_env_class
from rlinf_vl.extras.remote.client import RemoteError
from rlinf_vl.extras.remote.env import Remote
from rlinf_vl.types import ImageRef, Problem
from rlinf_vl.user_code import CodeError

TOKEN = "s3cret-of-the-tests"
VARIABLE = "RLINF_VL_TEST_TASK_APP_TOKEN"
EMPTY = Problem("p:0", (), "")


@pytest.fixture(scope="module")
def app():
    app = TaskApp(TOKEN)
    yield app
    app.stop()


@pytest.fixture
def relay(app):
    relay = Relay(app)
    yield relay
    relay.shutdown()
    relay.server_close()


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(VARIABLE, TOKEN)


def remote(url, seed=1, **settings) -> Remote:
    offered = {"seed": seed, "group_seed": 7, "reward_max": 1.0, "reward_min": 0.0}
    settings = {"token_env": VARIABLE, "retry_s": 5.0, **settings}
    return Remote(url=url, **offered, **settings)


async def played(env, *responses, problem=EMPTY):
    """Messages of the start and the results of the responses."""
    try:
        return [await env.start(problem)] + [await env.step(response) for response in responses]
    finally:
        await env.close()


def play(env, *responses, problem=EMPTY):
    return asyncio.run(played(env, *responses, problem=problem))


def shown(messages):
    """Pictures in messages."""
    return [
        Image.open(io.BytesIO(p["image"]))
        for m in messages
        for p in m["content"]
        if p["type"] == "image"
    ]


def said(messages):
    return " ".join(p["text"] for m in messages for p in m["content"] if p["type"] == "text")


def answer_of(picture, question):
    """The number of shapes of the kind asked for: connected regions of its colour, square or round by their corner."""
    color, shape = re.search(r"many (\w+) (disc|square)s", question).groups()
    rgb = {
        "red": (214, 39, 40),
        "green": (44, 160, 44),
        "blue": (31, 119, 180),
        "orange": (255, 127, 14),
    }[color]
    size = picture.width // 5
    cells = [(x * size, y * size) for x in range(5) for y in range(5)]
    middle = [picture.getpixel((x + size // 2, y + size // 2)) == rgb for x, y in cells]
    corner = [picture.getpixel((x + 7, y + 7)) == rgb for x, y in cells]
    return sum(m and c == (shape == "square") for m, c in zip(middle, corner, strict=True))


# --- the real server --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_episode_of_pictures(app):
    first, wrong, right = play(remote(app.url), "I see \\boxed{77}", "\\boxed{0} or rather nothing")
    (picture,) = shown(first)
    assert picture.size == (224, 224) and "How many" in said(first)
    assert (wrong.reward, wrong.done, wrong.info["state"], wrong.info["correct"]) == (
        0.0,
        False,
        "try 0",
        False,
    )
    assert "not 77" in said(wrong.messages) and len(shown(wrong.messages)) == 1
    count = answer_of(picture, said(first))
    _, first_try = play(remote(app.url, seed=2), f"\\boxed{{{count}}}")
    assert (first_try.reward, first_try.done, first_try.messages) == (1.0, True, [])
    _, _, second_try = play(remote(app.url, seed=3), "?", f"\\boxed{{{count}}}")
    assert (second_try.reward, second_try.info["correct"], second_try.info["metrics"]) == (
        0.5,
        True,
        {"tries": 2},
    )


def test_data_uris_and_multipart_say_the_same(app, monkeypatch):
    env = remote(app.url)
    by_parts = play(env, "7")
    plain = httpx.AsyncClient

    def no_multipart(**settings):
        return plain(**settings | {"headers": settings["headers"] | {"Accept": "application/json"}})

    monkeypatch.setattr(app_client.httpx, "AsyncClient", no_multipart)
    assert play(remote(app.url), "7") == by_parts and len(shown(by_parts[0])) == 1


def test_the_app_gets_the_row_with_its_images(app, relay):
    file = io.BytesIO()
    Image.new("RGB", (4, 3), "red").save(file, "PNG")
    image = ImageRef.of(file.getvalue())
    parts = [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": image.url}},
    ]
    problem = Problem(
        "p:3",
        ({"role": "user", "content": parts},),
        "18",
        (image,),
        columns={"level": 2, "at": b"x"},
    )
    play(remote(relay.url, seed=5), problem=problem)
    (body,) = (body for path, body in relay.seen if path == "start")
    assert (body["seed"], body["group_seed"], body["reward_max"], body["reward_min"]) == (
        5,
        7,
        1.0,
        0.0,
    )
    row = body["problem"]
    assert (row["id"], row["answer"], row["columns"]["level"]) == ("p:3", "18", 2)
    url = row["messages"][0]["content"][1]["image_url"]["url"]
    assert base64.b64decode(url.removeprefix("data:image/png;base64,")) == image.data
    assert [path for path, _ in relay.seen] == ["info", "start", "close"]


def test_a_video_of_the_row_goes_to_the_app_and_back(relay):
    clip, stranger = (clip_ref([png(8, side)], [0.0]) for side in (8, 16))
    parts = [{"type": "video_url", "video_url": {"url": clip.url}}]
    row = Problem("p:3", ({"role": "user", "content": parts},), "18", (clip,))

    def echo(handler, content):
        handler.reply(
            200, json.dumps({"messages": json.loads(content)["problem"]["messages"]}).encode()
        )

    relay.does["start"] = echo
    ((message,),) = play(remote(relay.url), problem=row)
    assert message["content"] == parts

    other = user({"type": "video_url", "video_url": {"url": data_uri(stranger)}})
    relay.does["start"] = lambda handler, _: handler.reply(
        200, json.dumps({"messages": other}).encode()
    )
    with pytest.raises(RemoteError, match="nor a video_url of the row"):
        play(remote(relay.url), problem=row)


def test_a_reply_that_is_lost_is_asked_for_again(app, relay):
    """The app has taken the step, but the connection ends before its reply: the same turn is not taken twice."""
    lost = []

    def lose_once(handler, content):
        reply = handler.ask_app(content)
        if len(lost) < 2:
            lost.append(reply)
            handler.close_connection = True
        else:
            handler.reply(*reply)

    relay.does = {"step": lose_once, "start": lose_once}
    _, first, second = play(remote(relay.url), "nothing", "nothing")
    steps = [body for path, body in relay.seen if path == "step"]
    assert len(lost) == 2 and [body["turn"] for body in steps] == [0, 1], "both were of the start"
    lost.clear()
    relay.does = {"step": lose_once}
    _, again, last = play(remote(relay.url, seed=2), "nothing", "nothing")
    assert [body["turn"] for path, body in relay.seen[-6:] if path == "step"] == [0, 0, 0, 1]
    assert (again.info, last.info) == (first.info, second.info) and last.info["metrics"] == {
        "tries": 2
    }


def test_another_response_to_a_turn_that_was_taken_is_refused(app):
    async def twice():
        env = remote(app.url)
        await env.start(EMPTY)
        await env.step("one")
        env._turn = 0
        try:
            await env.step("another")
        finally:
            await env.close()

    with pytest.raises(RemoteError, match="status 409.*turn 0"):
        asyncio.run(twice())


@pytest.mark.slow
def test_a_server_that_is_started_again_loses_its_episodes_and_no_others():
    app = TaskApp()

    async def run():
        lost, late = (remote(app.url, token_env=None, retry_s=60) for _ in range(2))
        await lost.start(EMPTY)
        await lost.step("one")
        await asyncio.to_thread(app.stop)
        waiting = asyncio.create_task(played(late, "one"))  # refused until it is up again
        interrupted = asyncio.create_task(lost.step("two"))
        await asyncio.sleep(0.5)
        assert not waiting.done() and not interrupted.done()
        await asyncio.to_thread(app.start)
        with pytest.raises(RemoteError, match="status 404; it was started again"):
            await interrupted
        await lost.close()
        assert len(await waiting) == 2

    try:
        asyncio.run(run())
        app.stop()
        with pytest.raises(
            RemoteError, match=r"info doesn't answer, asked for 0\.3 s: ConnectError"
        ):
            play(remote(app.url, token_env=None, retry_s=0.3))
    finally:
        app.stop()


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_named_by_its_variable(app, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    play(remote(app.url))
    monkeypatch.setenv(VARIABLE, "wrong-one")
    with pytest.raises(RemoteError, match=f"status 401.*{VARIABLE}") as caught:
        play(remote(app.url))
    assert "wrong-one" not in str(caught.value)
    with pytest.raises(RemoteError, match="status 401.*token_env"):
        play(remote(app.url, token_env=None))
    assert TOKEN not in caplog.text and "wrong-one" not in caplog.text


@pytest.mark.parametrize("value", ["", "two words", "line\nending", "é" * 9, "xyzzy"])
def test_a_token_that_is_none_is_refused_without_saying_it(value, monkeypatch):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=f"token_env: .*{VARIABLE}") as caught:
        remote("http://localhost")
    assert not value or value not in str(caught.value)


@pytest.mark.parametrize("path", ["info", "start", "step"])
@pytest.mark.parametrize("status", [200, 302, 500])
def test_an_app_that_sends_the_token_back_does_not_get_it_recorded(relay, path, status):
    def echo(handler, _):
        given = handler.headers["authorization"]
        said = json.dumps({"protocol": 1, "messages": [given], "you": given})
        escaped = said.replace("-", r"\u002d") if status == 200 else " " * 280 + said
        handler.reply(status, escaped.encode(), location=f"/{given}")

    relay.does[path] = echo
    with pytest.raises(RemoteError) as caught:
        play(remote(relay.url), "x")
    assert TOKEN[:8] not in str(caught.value) and (
        status != 200 or "sends the token back" in str(caught.value)
    )


def test_a_row_can_not_choose_where_the_token_goes():
    rewards = {"reward_max": 1.0, "reward_min": 0.0}
    make = EnvMaker(
        "remote",
        {"url": "http://localhost", "token_env": VARIABLE},
        {},
        lambda *_: False,
        **rewards,
    )
    make.check(Problem("p", (), "", columns={"env_kwargs": {"timeout_s": 3}}))
    for kwargs in ({"url": "http://example.org"}, {"token_env": "HOME"}):
        with pytest.raises(
            ValueError, match=f"gives {next(iter(kwargs))}, which rollout.env_kwargs alone"
        ):
            make.check(Problem("p", (), "", columns={"env_kwargs": kwargs}))


# --- hostile replies --------------------------------------------------------------------------------------------------


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def png(width, height) -> bytes:
    """A picture whose file is small however large it is."""
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


STEP = {"messages": [], "reward": 0.0, "done": False, "info": {}}
SHOWS = "is neither text nor an image_url"
MALFORMED = [
    (b"", "JSONDecodeError"),
    (b'{"messages": [', "JSONDecodeError"),
    (b"\xff\xfe{}", "UnicodeDecodeError"),
    (b"[" * 100_000, "RecursionError"),
    (b"[]", "no JSON object"),
    (json.dumps(STEP).replace("0.0", "NaN").encode(), "NaN is no JSON"),
    (STEP | {"reward": "1"}, "reward is '1'"),
    (STEP | {"reward": True}, "reward is True"),
    (STEP | {"reward": None}, "reward is None"),
    (json.dumps(STEP).replace("0.0", "1e999").encode(), "1e999 is too large a number"),
    (STEP | {"done": 0}, "done is 0"),
    (STEP | {"info": []}, r"info is \[\]"),
    (
        STEP | {"info": {"metrics": {str(n): 1 for n in range(9000)}}},
        "info has more than 65,536 characters",
    ),
    (STEP | {"info": {"state": "\ud800"}}, "UnicodeEncodeError"),
    (STEP | {"messages": user({"type": "text", "text": "\udfff"})}, "UnicodeEncodeError"),
    (STEP | {"messages": {"role": "user"}}, "no list"),
    (STEP | {"messages": ["hello"]}, "'hello' is no message"),
    (STEP | {"messages": [{"role": "user"}]}, "is no message"),
    (STEP | {"messages": [{"role": "root", "content": ""}]}, "is no message"),
    (STEP | {"messages": user("text")}, SHOWS),
    (STEP | {"messages": user({"type": "text", "text": 3})}, SHOWS),
    (STEP | {"messages": user({"type": "video_url"})}, SHOWS),
    (STEP | {"messages": user(image("http://169.254.169.254/latest/meta-data"))}, SHOWS),
    (STEP | {"messages": user(image("file:///etc/passwd"))}, SHOWS),
    (STEP | {"messages": user(image("/etc/passwd"))}, SHOWS),
    (STEP | {"messages": user(image("cid:1"))}, SHOWS),
    (STEP | {"messages": user(image(uri(b"no picture")))}, "not an image|ImageError|can't|header"),
    (
        STEP | {"messages": user(image(uri(png(5000, 5000))))},
        "5000 x 5000 has more than max_pixels",
    ),
    (STEP | {"messages": user(*[image(uri(png(8, 8)))] * 17)}, "max_images=16"),
]


@pytest.mark.parametrize("body, error", MALFORMED, ids=[str(n) for n in range(len(MALFORMED))])
def test_a_malformed_reply_ends_its_episode_and_no_other(relay, body, error):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    relay.does["step", 1] = lambda handler, _: handler.reply(200, data)

    async def both():
        plays = (played(remote(relay.url, seed=seed), "x") for seed in (1, 2))
        return await asyncio.gather(*plays, return_exceptions=True)

    bad, good = asyncio.run(both())
    assert isinstance(bad, Exception) and re.search(error, f"{type(bad).__name__} {bad}", re.S), bad
    assert not good[1].done
    assert sum(path == "step" for path, _ in relay.seen) == 2, (
        "what was answered is not asked for again"
    )


def in_parts(*parts, end="--"):
    return (
        b"".join(b"--b\r\n" + head + b"\r\n\r\n" + data + b"\r\n" for head, data in parts)
        + f"--b{end}\r\n".encode()
    )


REPLY = (b'Content-Disposition: form-data; name="reply"', json.dumps(STEP).encode())
PARTS = [
    (in_parts(REPLY, end=""), "does not end"),
    (in_parts(), "without a part named reply"),
    (in_parts((b"Content-ID: <a>", b"{}")), r"without a part named reply: \['a'\]"),
    (in_parts(REPLY, REPLY), "no name of its own"),
    (in_parts(REPLY, (b"X-Other: 1", b"")), "no name of its own"),
    (in_parts(REPLY, *[(b"Content-ID: <%d>" % n, b"") for n in range(17)]), "more than 17 parts"),
    (b"--b" * 10_000, "without a part named reply"),
    (b"", "does not end"),
]


@pytest.mark.parametrize("data, error", PARTS, ids=[str(n) for n in range(len(PARTS))])
def test_malformed_parts(relay, data, error):
    relay.does["step"] = lambda handler, _: handler.reply(200, data, "multipart/mixed; boundary=b")
    with pytest.raises(RemoteError, match=error):
        play(remote(relay.url), "x")
    relay.does["step"] = lambda handler, _: handler.reply(200, data, "multipart/mixed")
    with pytest.raises(RemoteError, match="without a boundary"):
        play(remote(relay.url), "x")


@settings(max_examples=50)
@given(
    st.lists(
        st.binary(max_size=40) | st.sampled_from([b"\r\n", b"--", b"\r\n--", b"\n\r\n\r"]),
        max_size=3,
    )
)
def test_parts_arrive_byte_for_byte(bodies):
    named = [(b"Content-ID: <%d>" % n, data) for n, data in enumerate(bodies)]
    expected = {str(n): data for n, data in enumerate(bodies)}
    boundary = b"no-such-thing-in-them"
    body = in_parts(*named).replace(b"--b", b"--" + boundary)
    if b"--b" not in b"".join(bodies):
        assert app_client._parts(b"preamble\r\n" + body, boundary, 5) == expected


def test_images_by_disposition_or_content_id(relay):
    content = STEP | {"messages": user(image("cid:a"), image("cid:b"))}
    data = in_parts(
        (REPLY[0], json.dumps(content).encode()),
        (b"Content-Type: image/png\r\nContent-ID: <a>", png(8, 8)),
        (b'Content-Disposition: form-data; name="b"; filename="x.png"', png(16, 8)),
    )
    relay.does["step"] = lambda handler, _: handler.reply(
        200, data, 'multipart/form-data; boundary="b"'
    )
    _, result = play(remote(relay.url), "x")
    assert [picture.size for picture in shown(result.messages)] == [(8, 8), (16, 8)]


@pytest.mark.parametrize("declared", [False, True])
def test_a_hundred_megabytes_are_not_read(relay, declared):
    sent = []

    def endless(handler, _):
        handler.send_response(200)
        handler.send_header("content-type", "application/json")
        handler.send_header(
            "content-length", str(100 * 2**20)
        ) if declared else handler.send_header("connection", "close")
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b" " * 2**20)
            sent.append(2**20)

    relay.does["step"] = endless
    with pytest.raises(RemoteError, match="more than max_reply_bytes=1,000,000"):
        play(remote(relay.url, max_reply_bytes=1_000_000), "x")
    assert sum(sent) < 50 * 2**20, "some of it waits in the network's buffers"
    assert sum(path == "step" for path, _ in relay.seen) == 1


def test_compressed_replies_are_refused(relay):
    bomb = zlib.compress(b" " * 2**20)
    relay.does["step"] = lambda handler, _: handler.reply(
        200, bomb, **{"content-encoding": "deflate"}
    )
    with pytest.raises(RemoteError, match="compresses its reply"):
        play(remote(relay.url), "x")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(relay, app, status):
    private = Relay(app)
    relay.does["step"] = lambda handler, _: handler.reply(
        status, b"", location=f"{private.url}/step"
    )
    try:
        with pytest.raises(
            RemoteError, match=f"status {status}: it redirects to {private.url}/step"
        ):
            play(remote(relay.url), "x")
        assert private.seen == []
    finally:
        private.shutdown()
        private.server_close()


def test_a_reply_that_drips_or_never_comes_is_given_up(relay):
    over = threading.Event()

    def drip(handler, _):
        handler.send_response(200)
        handler.send_header("content-length", "1000")
        handler.end_headers()
        while not over.is_set():
            handler.wfile.write(b" ")
            handler.wfile.flush()
            over.wait(0.05)

    relay.does["step"] = drip
    with pytest.raises(RemoteError, match=r"step doesn't answer, asked for 0\.5 s: TimeoutError"):
        play(remote(relay.url, timeout_s=0.3, retry_s=0.5), "x")
    over.set()


def test_a_busy_app_is_asked_again(relay):
    busy = [429, 503]

    def first_busy(handler, content):
        handler.reply(busy.pop(), b"") if busy else handler.relay(content)

    relay.does["start"] = relay.does["info"] = first_busy
    assert len(play(remote(relay.url), "x")) == 2 and not busy


def test_an_app_of_another_protocol(relay):
    relay.does["info"] = lambda handler, _: handler.reply(200, b'{"protocol": 2}')
    with pytest.raises(RemoteError, match="names protocol 2; 1 is spoken here"):
        play(remote(relay.url))
    relay.does["info"] = lambda handler, _: handler.reply(
        404, b"<html>none here</html>", "text/html"
    )
    with pytest.raises(RemoteError, match="info: status 404: <html>none here"):
        play(remote(relay.url))


@pytest.mark.parametrize(
    "settings, error",
    [
        ({"url": "localhost:8000"}, "url: 'localhost:8000' is no address"),
        ({"url": "ftp://host"}, "is no address of an app"),
        ({"url": 8000}, "url: 8000 is no address"),
        ({"url": "http://user:pa55@host"}, "has a user in it"),
        ({"url": "http://host/?token=3"}, "leave out what follows"),
        ({"timeout_s": 0}, "timeout_s: 0 must be > 0"),
        ({"max_pixels": -1}, "max_pixels: -1 must be > 0"),
        ({"retry_s": -1}, "retry_s: -1 must be >= 0"),
    ],
)
def test_settings_that_make_no_sense(settings, error):
    with pytest.raises(ValueError, match=re.escape(error)) as caught:
        remote(**{"url": "http://localhost"} | settings)
    assert "pa55" not in str(caught.value)


def test_without_its_client_library_the_way_out_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "rlinf_vl.extras.remote.env")
    monkeypatch.delitem(sys.modules, "rlinf_vl.extras.remote.client")
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(CodeError, match=r"'remote': .*httpx.*; .* pip install 'rlinf_vl\[envs\]'"):
        load_env_class("remote", {})


def test_closing_what_was_not_started_asks_nobody():
    asyncio.run(remote("http://192.0.2.1").close())
