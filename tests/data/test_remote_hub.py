"""hf:// against a server on this machine that speaks as much of the hub's API as reading needs."""

from __future__ import annotations

import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from ssl_vit.data import RemoteConfig
from ssl_vit.data.shards import open_shards
from ssl_vit.interfaces import UserError

pytestmark = pytest.mark.usefixtures("no_waiting")
REMOTE = RemoteConfig(timeout=20, retries=2)


class Hub(http.server.ThreadingHTTPServer):
    """One dataset repository, someone/digits, whose folder `shards` is a folder here."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.folder, self.gated = folder, False
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


class _HubHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        path = self.path.partition("?")[0]
        if path == "/api/datasets/someone/digits":
            self._json({"id": "someone/digits", "sha": "0" * 40, "private": False, "siblings": []})
        elif path.startswith("/api/datasets/someone/digits/paths-info/main"):
            # Newer clients ask in JSON, older ones by a form.
            wanted = json.loads(asked)["paths"] if asked.startswith("{") else urllib.parse.parse_qs(asked)["paths"]
            self._json([self._about(name) for name in wanted if (self.server.folder.parent / name).exists()])
        elif path == "/api/datasets/someone/digits/tree/main":
            self._json([self._about("shards")])
        elif path == "/api/datasets/someone/digits/tree/main/shards":
            self._json([self._about(f"shards/{entry.name}") for entry in sorted(self.server.folder.iterdir())])
        elif found := re.fullmatch("/datasets/someone/digits/resolve/main/(shards/.*)", path):
            self._file(self.server.folder.parent / found[1])
        else:
            self._reply(404, b"", {})

    def _about(self, name: str) -> dict[str, object]:
        path = self.server.folder.parent / name
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "1" * 40, "size": 0}
        return {"type": "file", "path": name, "size": path.stat().st_size, "oid": "2" * 40}

    def _file(self, path: Path) -> None:
        if not path.exists():
            self._reply(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        if self.server.gated:
            self._reply(403, b"", {"X-Error-Code": "GatedRepo"})
            return
        whole = path.read_bytes()
        if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            part = whole[int(asked[1]) : int(asked[2]) + 1]
            self._reply(206, part, {"Content-Range": f"bytes {asked[1]}-{asked[2]}/{len(whole)}"})
        else:
            self._reply(200, whole, {})

    def _json(self, content: object) -> None:
        self._reply(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(digit_shards: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(digit_shards) as server:
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": f"http://127.0.0.1:{server.server_port}"})
        yield server
        server.shutdown()


@pytest.mark.parametrize("spec", ["shards", "shards/*.tar", "shards/{000000..000007}.tar"])
def test_a_set_on_the_hub_is_the_set_on_the_disk(hub: Hub, digit_shards: Path, spec: str) -> None:
    local, remote = open_shards(str(digit_shards)), open_shards(f"hf://datasets/someone/digits/{spec}", REMOTE)
    assert remote.urls[7] == "hf://datasets/someone/digits/shards/000007.tar"
    assert (remote.counts, remote.classes, remote.fingerprint) == (local.counts, local.classes, local.fingerprint)
    with remote.open(5).file as there, local.open(5).file as here:
        assert there.read() == here.read()


def test_what_the_hub_does_not_have_or_give_is_named(hub: Hub) -> None:
    with pytest.raises(UserError, match="hf://datasets/someone/other: no shards"):
        open_shards("hf://datasets/someone/other", REMOTE)
    with pytest.raises(UserError, match=r"shards/99.tar: no such shard"):
        open_shards("hf://datasets/someone/digits/shards/99.tar", REMOTE)
    shards = open_shards("hf://datasets/someone/digits/shards", REMOTE)
    hub.gated = True
    with pytest.raises(UserError, match=r"000000.tar: access is refused.*credentials"):
        shards.open(0)
