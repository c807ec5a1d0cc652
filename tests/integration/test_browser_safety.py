"""What pages can't do: read other files, reach the network, stop the worker; and browsers that die."""

import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from browser_pages import asked, browser_on, call, middle, needs_browser, problem, texts

from rlinf_vl.envs.tool import ToolFailure
from rlinf_vl.extras.browser import host as browser_host
from rlinf_vl.extras.browser.host import HOST

pytestmark = [pytest.mark.integration, needs_browser]

PAGE = '<!doctype html><body style="margin:0"><p id="text">here</p>'


@pytest.fixture(scope="module", autouse=True)
def no_browser_left() -> Iterator[None]:
    yield
    HOST.close()


class Site(http.server.BaseHTTPRequestHandler):
    """A site whose /open/ may be loaded. The paths that were asked for are in `server.paths`."""

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        target = self.path.partition("?to=")[2]
        self.send_response(302 if target else 200)
        if target:
            self.send_header("Location", target)
        self.send_header("Content-Type", "text/html")
        self.send_header("Access-Control-Allow-Origin", "*")
        self.end_headers()
        self.wfile.write(f"<title>{self.path}</title>".encode())

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.paths = []
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def opened(tmp_path: Path):
    envs = []

    def open_page(html: str = PAGE, **keywords):
        (tmp_path / "index.html").write_text(html)
        env = browser_on(tmp_path, **keywords)
        envs.append(env)
        env.start(problem())
        return env

    yield open_page
    for env in envs:
        env.close()


def test_no_way_out_is_open_without_an_allowed_address(opened, site, tmp_path: Path) -> None:
    """Each attempt is made from the page; the site, a bare socket and a datagram socket hear nothing."""
    (tmp_path / "secret.txt").write_text("secret")
    stream, datagrams = (
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(type=socket.SOCK_DGRAM),
    )
    datagrams.bind(("127.0.0.1", 0))
    port, udp_port = stream.getsockname()[1], datagrams.getsockname()[1]
    url, bare = f"{site.address}/open/x", f"http://127.0.0.1:{port}/x"
    # Insecure content is refused by https pages before it is asked for: both kinds are tried.
    secure = bare.replace("http:", "https:")
    attempts = f"""
      const outcomes = {{}};
      const tried = async (name, attempt) => {{
        try {{ outcomes[name] = String(await attempt()); }}
        catch (error) {{ outcomes[name] = "refused"; }}
      }};
      const element = (tag, fields) => new Promise((resolve, reject) => {{
        const node = Object.assign(document.createElement(tag), fields);
        node.onload = resolve; node.onerror = reject;
        document.body.append(node);
        setTimeout(reject, 2000);
      }});
      for (const url of ["{url}", "{bare}", "{secure}", "http://localhost:{port}/"]) {{
        await tried("fetch " + url, () => fetch(url, {{mode: "no-cors"}}));
        await tried("img " + url, () => element("img", {{src: url}}));
        navigator.sendBeacon(url, "x");
        for (const rel of ["preconnect", "dns-prefetch", "prefetch", "preload", "stylesheet"])
          document.head.append(Object.assign(document.createElement("link"),
            {{rel, href: url, as: "image"}}));
      }}
      await tried("file", () => fetch("file://{tmp_path}/secret.txt"));
      await tried("frame", () => element("iframe", {{src: "file://{tmp_path}/secret.txt"}}).then(() => {{
        if (!document.querySelector("iframe").contentDocument) throw 0; }}));
      await tried("socket", () => new Promise((resolve, reject) => {{
        const socket = new WebSocket("wss://127.0.0.1:{port}");
        socket.onopen = resolve; socket.onerror = reject; }}));
      await tried("worker", () => navigator.serviceWorker.register("worker.js"));
      const peer = new RTCPeerConnection({{iceServers: [{{urls: "stun:127.0.0.1:{udp_port}"}}]}});
      peer.createDataChannel("x");
      await peer.setLocalDescription(await peer.createOffer());
      await new Promise((resolve) => setTimeout(resolve, 1000));
      return outcomes;
    """
    env = opened()
    outcomes = asked(env, f"(async () => {{ {attempts} }})()")
    assert len(outcomes) == 12
    # Registering a service worker is no error: nothing is registered.
    assert outcomes.pop("worker") == "undefined"
    assert set(outcomes.values()) == {"refused"}, outcomes
    assert site.paths == []
    for listening in (stream, datagrams):
        listening.setblocking(False)
    with pytest.raises(BlockingIOError):
        stream.accept()
    with pytest.raises(BlockingIOError):
        datagrams.recv(100)
    stream.close(), datagrams.close()
    env.step(call("key", name="Shift"))
    assert env.metrics["blocked_requests"] > 0


def test_links_lead_to_allowed_addresses_and_no_others(opened, site) -> None:
    """Redirects included: an allowed address can't send the page elsewhere on the same host."""
    address = site.address
    links = ("/open/1", "/closed", "/open/2?to=/closed", f"/open/3?to={address}/open/4")
    html = PAGE + "".join(
        f'<a href="{address}{link}" style="display:block; width:70px">x</a>' for link in links
    )
    env = opened(html, allow=[f"{address}/open/"], settle_s=1.0, viewport=[80, 200])
    places = [middle(env, "a", number) for number in range(len(links))]
    titles = []
    for place in places:
        env.step(call("click", **place))
        titles.append(asked(env, "document.title"))
        if asked(env, "location.host") != "pages.invalid":
            env.step(call("back"))
    assert titles[0] == "/open/1" and titles[3] == "/open/4"
    assert set(titles[1:3]) <= {"", "127.0.0.1"}
    assert "/closed" not in site.paths
    assert env.metrics["blocked_requests"] >= 2


def test_dialogs_are_closed_and_told_popups_closed_and_counted(opened) -> None:
    env = opened(
        PAGE
        + """<script>onclick = () => {
          alert("Mind the gap"); answers = [confirm("Sure?"), prompt("Name?")];
          open("index.html"); }; onbeforeunload = () => "stay";</script>""",
        settle_s=0.5,
    )
    result = env.step(call("click", x=40, y=50))
    for said in ("alert: Mind the gap", "confirm: Sure?", "prompt: Name?"):
        assert f"A dialog was closed, {said}" in texts(result)
    assert asked(env, "answers") == [False, None]
    assert result.info["metrics"]["popups"] == 1 and len(env._page.page.context.pages) == 1
    assert "dialog" not in texts(env.step(call("key", name="Shift")))


def test_nothing_is_downloaded(opened, tmp_path: Path) -> None:
    (tmp_path / "big.bin").write_bytes(bytes(1000))
    env = opened(f'{PAGE}<a href="big.bin" download>x</a>', settle_s=0.5)
    before = set(Path.home().rglob("big*.bin")) | set(Path("/tmp").glob("*/big*.bin"))
    assert not env.step(call("click", **middle(env, "a"))).done
    assert set(Path.home().rglob("big*.bin")) | set(Path("/tmp").glob("*/big*.bin")) == before


@pytest.mark.parametrize(
    ("html", "reason"),
    [
        (PAGE + "<script>onclick = () => { for (;;); };</script>", "did not react within 3 s"),
        (PAGE + "<script>reward = () => new Promise(() => {});</script>", "did not react within"),
        (PAGE + "<script>reward = () => 7;</script>", "reward\\(\\) returned 7; return null"),
        (PAGE + "<script>reward = () => 'x';</script>", "reward\\(\\) returned 'x'"),
        (PAGE + "<script>reward = () => { throw Error('oops'); };</script>", "oops"),
    ],
)
def test_a_page_that_fails_is_its_episodes_error(opened, html: str, reason: str) -> None:
    neighbour, env = opened(timeout_s=200.0), opened(html)
    env._timeout_s = 3.0  # once it has started: that may take its time
    with pytest.raises(ToolFailure, match=reason):
        env.step(call("click", x=40, y=50))
    env._timeout_s = 200.0
    env.close()
    assert not neighbour.step(call("click", x=40, y=50)).done


def test_a_page_whose_process_crashes_is_its_episodes_error(opened) -> None:
    neighbour, env = opened(), opened()
    with pytest.raises(ToolFailure, match="crash"):
        env._run_page(env._page.page.goto("chrome://crash"))
    with pytest.raises(ToolFailure, match="crash"):
        env.step(call("click", x=40, y=50))
    env.close()
    assert not neighbour.step(call("click", x=40, y=50)).done


def chromium() -> psutil.Process:
    """The browser's first process, a child of Playwright's driver."""
    drivers = [child for child in psutil.Process().children() if "run-driver" in child.cmdline()]
    (driver,) = drivers
    (browser,) = driver.children()
    return browser


@pytest.mark.parametrize("struck", ["browser", "driver"])
def test_a_browser_that_dies_ends_its_episodes_and_is_replaced(opened, struck: str) -> None:
    first, second = opened(), opened(keep_page=True)
    browser = chromium()
    (browser if struck == "browser" else browser.parent()).kill()
    psutil.wait_procs([browser], timeout=60)
    for env in (first, second):
        with pytest.raises(ToolFailure):
            env.step(call("click", x=40, y=50))
        env.close()
    for keywords in ({}, {"keep_page": True}):
        assert not opened(**keywords).step(call("click", x=40, y=50)).done


def test_a_browser_that_stands_still_is_ended_and_replaced(
    opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened()
    monkeypatch.setattr(browser_host, "LAUNCH_S", 3.0)
    browser = chromium()
    processes = [browser, *browser.children(recursive=True)]
    for process in processes:
        process.suspend()
    assert not opened().step(call("click", x=40, y=50)).done
    assert not psutil.wait_procs(processes, timeout=120)[1]


WORKER = """
import sys
from pathlib import Path
from browser_pages import browser_on, problem
env = browser_on(Path(sys.argv[1]))
env.start(problem())
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("ending", ["killed", "ended"])
def test_no_process_outlives_the_worker(tmp_path: Path, ending: str) -> None:
    (tmp_path / "index.html").write_text(PAGE)
    tests = Path(__file__).parents[1]
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{tests}:{tests.parent}"},
    )
    assert worker.stdout.readline() == b"open\n"
    children = psutil.Process(worker.pid).children(recursive=True)
    assert len(children) > 3
    if ending == "killed":
        worker.send_signal(signal.SIGKILL)
    worker.stdin.close()
    worker.wait(120)
    worker.stdout.close()
    assert not psutil.wait_procs(children, timeout=120)[1]
