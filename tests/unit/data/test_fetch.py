"""Images by URL, from a server of this machine: whom it is asked of, what it may send, and that it is asked once."""

import io
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from rlinf_vl.config import load_config
from rlinf_vl.data import fetch as fetching
from rlinf_vl.data import images
from rlinf_vl.data.images import to_image_ref
from rlinf_vl.data.unusable import ImageError

BUFFER = io.BytesIO()
Image.new("RGB", (6, 4), (200, 30, 30)).save(BUFFER, "PNG")
PNG = BUFFER.getvalue()


class Server(ThreadingHTTPServer):
    """Answers as its address's first part says; `asked` lists the paths."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.over = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}/{path}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        verb, _, rest = self.path[1:].partition("/")
        if verb in ("to", "loop"):
            self.send_response(302)
            self.send_header("Location", rest or self.path)
            self.end_headers()
            return
        if verb == "slow-header":
            self.drip(b"HTTP/1.0 200 OK\r\n" + b"X: y\r\n" * 9999)
            return
        self.send_response(404 if verb == "missing" else 200)
        self.send_header(
            "Content-Length", str({"short": len(PNG) + 5, "endless": 10**9}.get(verb, len(PNG)))
        )
        self.end_headers()
        match verb:
            case "slow-body":
                self.drip(PNG)
            case "endless":
                self.drip(bytes(10**9), 10**6, 0)
            case "text":
                self.wfile.write(b"x" * len(PNG))
            case _:
                self.wfile.write(PNG)

    def drip(self, data: bytes, piece: int = 1, wait: float = 0.05) -> None:
        try:
            for i in range(0, len(data), piece):
                self.wfile.write(data[i : i + piece])
                if self.server.over.wait(wait):
                    return
        except OSError:
            return  # nobody listens any longer


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("RLINF_VL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def get(url: str, *hosts: str) -> bytes:
    return to_image_ref(url, root=None, hosts=hosts or ("127.0.0.1",)).data


def test_an_image_of_a_listed_host_is_fetched_once(server: Server) -> None:
    for _ in range(2):
        assert get(server.url("a.png")) == PNG
        assert get(server.url("a.png", "LOCALHOST"), "Localhost") == PNG
    assert server.asked == ["/a.png"] * 2  # once for each of the two names


def test_what_threads_ask_for_at_once_is_fetched_once(server: Server) -> None:
    threads = [threading.Thread(target=get, args=(server.url("a.png"),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.asked == ["/a.png"]


@pytest.mark.parametrize(
    "url",
    [
        "http://{host}:{port}/a.png",
        "http://images.test@{host}:{port}/a.png",
        "http://images.test:80@{host}:{port}/a.png",
        "http://images.test%40{host}:{port}/a.png",
        "http://{host}:{port}\\@images.test/a.png",
        "http://{host}:{port}%2f@images.test/a.png",
        "http://{host}:{port}#@images.test/a.png",
        "http://user@images.test/a.png",
        "http://images.test.{host}:{port}/a.png",
        "http://[::1/a.png",
        "https:///a.png",
    ],
)
def test_no_other_host_is_asked(server: Server, url: str) -> None:
    with pytest.raises(ImageError) as caught:
        get(url.format(host="127.0.0.1", port=server.server_port), "images.test")
    assert (
        caught.value.kind == "image not fetched" and "can't be fetched" not in caught.value.reason
    )
    assert not server.asked and not list(fetching.cache_root().glob("**/*"))


def test_redirects_stay_with_listed_hosts(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    there = server.url("a.png", "localhost")
    assert get(server.url(f"to/{there}"), "127.0.0.1", "localhost") == PNG
    server.asked.clear()
    for to in (
        there,
        f"http://127.0.0.1@localhost:{server.server_port}/a.png",
        "//localhost/a.png",
    ):
        with pytest.raises(ImageError, match="hosts in data.image_hosts only"):
            get(server.url(f"to/{to}?"))
    for to in (f"file://{tmp_path}/a.png", "ftp://127.0.0.1/a.png", "data:image/png;base64,AAAA"):
        with pytest.raises(ImageError, match="can't be fetched|hosts in data.image_hosts"):
            get(server.url(f"to/{to}"))
    assert all(path.startswith("/to/") for path in server.asked)
    with pytest.raises(ImageError, match="redirect"):
        get(server.url("loop"))


@pytest.mark.parametrize("path", ["slow-header/a.png", "slow-body/a.png"])
def test_the_whole_takes_limited_time(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(fetching, "TIMEOUT_S", 0.4)
    start = time.monotonic()
    with pytest.raises(ImageError, match="not complete after 0.4 s|bytes early") as caught:
        get(server.url(path))
    assert time.monotonic() - start < 3 and caught.value.kind == "image not fetched"


def test_no_more_is_taken_than_an_image_may_have(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "MAX_BYTES", 3 * 10**6)
    with pytest.raises(ImageError, match="more than 3,000,000 bytes"):
        get(server.url("endless/a.png"))


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("missing/a.png", "image not fetched", "404"),
        ("short/a.png", "image not fetched", "5 bytes early"),
        ("text/a.png", "not an image", "beginning b'xxx"),
        ("a b.png", "image not fetched", "can't be fetched"),
        ("bild-ä.png", "image not fetched", "can't be fetched"),
    ],
)
def test_what_is_no_image_is_not_kept(server: Server, path: str, kind: str, message: str) -> None:
    for _ in range(2):
        with pytest.raises(ImageError, match=message) as caught:
            get(server.url(path))
        assert caught.value.kind == kind
    kept = fetching.cache_root() / "fetched"
    assert [file for file in kept.iterdir() if not file.name.endswith(".lock")] == []


def test_hosts_of_the_config_are_plain_names() -> None:
    assert load_config("toy-grpo-cpu", ["data.image_hosts=[images.example.org]"]).data.image_hosts
