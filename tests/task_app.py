"""The example's task app in a process of its own, and a server between it and a client that does whatever a test likes."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError, URLError

FOLDER = Path(__file__).resolve().parents[1] / "examples/task_app"


class TaskApp:
    """uvicorn with the example, on one port however often it is started."""

    def __init__(self, token: str | None = None) -> None:
        # Keeps the port, with nobody listening, while there is no process.
        self._holder = socket.socket()
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("127.0.0.1", 0))
        self.port = self._holder.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.env = {"TASK_APP_TOKEN": token} if token else {}
        self.start()

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "uvicorn",
            "app:app",
            "--app-dir",
            str(FOLDER),
            "--port",
            str(self.port),
        ]
        self.process = subprocess.Popen(
            [*command, "--log-level", "warning"], env=os.environ | self.env
        )
        end = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                    assert json.load(reply) == {"status": "ok"}
                    return
            except URLError:
                assert self.process.poll() is None and time.monotonic() < end, (
                    "the task app did not start"
                )
                time.sleep(0.05)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Relay(ThreadingHTTPServer):
    """Passes requests on to an app, unless `does[path, seed]` or `does[path]` takes one (`seed`: that its episode was started with).

    Attributes:
        seen: (path, body) of each request.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, app: TaskApp) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.app = app
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.does: dict[str | tuple[str, int], Callable[[_Handler, bytes], None]] = {}
        self.seen: list[tuple[str, dict]] = []
        self.seeds: dict[str, int] = {}
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def handle_error(self, request, client_address) -> None:
        pass  # a client that hangs up is what some tests want


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Relay

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.loads(content or "{}")
        path, server = self.path.strip("/"), self.server
        server.seen.append((path, body))
        if "seed" in body:
            server.seeds[body["id"]] = body["seed"]
        does = server.does.get((path, server.seeds.get(body.get("id", ""), -1))) or server.does.get(
            path
        )
        (does or _Handler.relay)(self, content)

    do_GET = do_POST

    def relay(self, content: bytes) -> None:
        self.reply(*self.ask_app(content))

    def ask_app(self, content: bytes) -> tuple[int, bytes, str]:
        names = ("Authorization", "Accept", "Content-Type")
        headers = {name: self.headers[name] for name in names if self.headers[name]}
        request = urllib.request.Request(
            f"{self.server.app.url}{self.path}", content or None, headers
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as found:
                return found.status, found.read(), found.headers["content-type"]
        except HTTPError as error:
            return error.code, error.read(), error.headers["content-type"]

    def reply(
        self, status: int, data: bytes, kind: str = "application/json", **headers: str
    ) -> None:
        self.send_response(status)
        for name, value in (
            {"content-type": kind, "content-length": str(len(data))} | headers
        ).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        pass
