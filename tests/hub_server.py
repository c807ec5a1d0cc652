"""A hub on this machine: the endpoints that huggingface_hub uploads to and downloads from, with repositories in memory.

By Hugging Face's API: /api/repos/create, preupload, commit (lines of JSON), the Git LFS batch API with basic transfers, and
resolve. Whoever has the token may write.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

TOKEN = "hf_of_the_tests"


class Hub(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}  # name → path → content
        self.created: list[dict] = []
        self.objects: dict[str, bytes] = {}  # of LFS, by sha256

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """What the clients of this hub have in their environment."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(
        repr(
            sorted((name, hashlib.sha256(data).hexdigest()) for name, data in files.items())
        ).encode()
    ).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_POST(self):
        body = self._body()
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if asked.get("organization") == "others":
                return self._answer(
                    403,
                    {
                        "error": 'You don\'t have the rights to create a model under the namespace "others"'
                    },
                )
            self.server.created.append(asked)
            there = name in self.server.repositories
            self.server.repositories.setdefault(name, {})
            return self._answer(
                409 if there else 200,
                {"url": f"{self.server.url}/{name}", "name": name, "id": name},
            )
        if path.endswith("/info/lfs/objects/batch"):
            objects = [self._batch(one) for one in json.loads(body)["objects"]]
            return self._answer(
                200, {"transfer": "basic", "objects": objects}, "application/vnd.git-lfs+json"
            )
        if path == "/api/validate-yaml":
            card = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            return self._answer(
                200 if isinstance(card, dict) else 400, {"errors": [], "warnings": []}
            )
        _, _, _, owner, model, verb, *_ = path.split("/")
        name = f"{owner}/{model}"
        files = self.server.repositories[name]
        if verb == "preupload":
            asked = json.loads(body)["files"]
            modes = [
                "lfs" if one["path"].endswith((".safetensors", ".png")) else "regular"
                for one in asked
            ]
            told = [
                {"path": a["path"], "uploadMode": m, "shouldIgnore": False}
                for a, m in zip(asked, modes, strict=True)
            ]
            return self._answer(200, {"files": told})
        if verb == "commit":
            for line in map(json.loads, body.decode().splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.server.objects[value["oid"]]
            return self._answer(
                200,
                {"commitUrl": f"{self.server.url}/{name}/commit/1", "commitOid": commit_of(files)},
            )
        return self._answer(404, {"error": "no such endpoint"})

    def do_PUT(self):
        body, oid = self._body(), self.path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.objects[oid] = body
        self._answer(200, {})

    def do_GET(self):
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name = "/".join(parts[2:4])
            if name not in self.server.repositories:
                return self._answer(404, {"error": "Repository not found"}, error="RepoNotFound")
            files = self.server.repositories[name]
            if parts[4:5] == ["tree"]:
                listed = [
                    {"type": "file", "path": path, "size": len(data), "oid": "0" * 40}
                    for path, data in files.items()
                ]
                return self._answer(200, listed)
            siblings = [{"rfilename": path} for path in files]
            about = {
                "id": name,
                "modelId": name,
                "sha": commit_of(files),
                "siblings": siblings,
                "private": False,
            }
            return self._answer(200, about | {"tags": [], "downloads": 0, "likes": 0})
        name, path = "/".join(parts[:2]), "/".join(parts[4:])
        files = self.server.repositories.get(name, {})
        if parts[2:3] != ["resolve"] or path not in files:
            return self._answer(404, {"error": "Entry not found"}, error="EntryNotFound")
        data = files[path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit_of(files))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def _batch(self, one: dict) -> dict:
        there = one["oid"] in self.server.objects
        upload = {"upload": {"href": f"{self.server.url}/objects/{one['oid']}"}}
        return {"oid": one["oid"], "size": one["size"]} | ({} if there else {"actions": upload})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        whole = b""
        while size := int(self.rfile.readline(), 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def _answer(self, status: int, value, kind: str = "application/json", error: str = "") -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass
