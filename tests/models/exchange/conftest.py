"""A hub on this machine: as much of the Hugging Face hub's HTTP interface as its own client needs."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves the folders OWNER/NAME below `root`; keeps the files of every commit and the tokens it was shown."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.address = root, f"http://127.0.0.1:{self.server_port}"
        self.created: list[str] = []
        self.commits: dict[str, dict[str, bytes]] = {}
        self.tokens: set[str | None] = set()
        self.downloads: list[str] = []

    def stop(self) -> None:
        """Answer nobody any more."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path == "/stop":
            threading.Thread(target=self.server.stop).start()
            return self._send(200, {})
        parts = urlparse(self.path).path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            folder = self.server.root / parts[2] / parts[3]
            if not folder.is_dir() and "/".join(parts[2:4]) not in self.server.created:
                return self._send(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            files = sorted(folder.iterdir()) if folder.is_dir() else []
            if "tree" in parts:
                return self._send(200, [_entry(path) for path in files])
            siblings = [{"rfilename": path.name} for path in files]
            return self._send(200, {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": siblings})
        if len(parts) >= 5 and parts[2] == "resolve":
            file = self.server.root / parts[0] / parts[1] / parts[4]
            if not file.is_file():
                return self._send(404, {}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            content = file.read_bytes()
            if self.command == "GET":
                self.server.downloads.append("/".join([*parts[:2], parts[4]]))
            etag = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            return self._send(200, content, etag)
        return self._send(404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("Authorization"))
        path = urlparse(self.path).path
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if asked["organization"] == "forbidden":
                return self._send(403, {"error": "you may not write there"})
            self.server.created.append(name)
            return self._send(200, {"url": f"{self.server.address}/{name}", "name": name})
        if path == "/api/validate-yaml":
            bad = "license: nonsense" in json.loads(body)["content"]
            problems = [{"message": '"license" must be one of [apache-2.0, mit]'}] if bad else []
            return self._send(400 if bad else 200, {"errors": problems, "warnings": []})
        if "/preupload/" in path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self._send(200, {"files": files})
        if "/commit/" in path:
            lines = [json.loads(line) for line in body.splitlines()]
            name = "/".join(path.split("/")[3:5])
            self.server.commits[name] = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            address = f"{self.server.address}/{name}/commit/{COMMIT}"
            return self._send(200, {"success": True, "commitOid": COMMIT, "commitUrl": address})
        return self._send(404, {})

    def _send(self, code: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _entry(path: Path) -> dict[str, Any]:
    return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0" * 40}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    server = Hub(tmp_path_factory.mktemp("hub"))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.stop()
    thread.join()
