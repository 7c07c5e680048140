"""Servers that fail on purpose: real sockets, programmable faults; with the fixtures that start them."""

from __future__ import annotations

import hashlib
import http.server
import re
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ssl_vit.data.shards import remote
from tests.tars import packed


class FaultyServer(http.server.ThreadingHTTPServer):
    """Serves a folder with ranges; `faults[name]` are used up by the requests for that file, one each.

    A fault: ("status", 503); ("stall", n), ("cut", n): n bytes of the body, then nothing, or the end of the connection,
    where the headers promised all; ("silent",): not even headers; ("short", n): the object has only n bytes;
    ("unsized", n): n bytes without a word on how many there are;
    ("garbage",): other bytes; ("delay", seconds).
    `always[name]` is a fault of every request. `log` holds (method, name, first byte asked for).
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.ranges = folder, True
        self.faults: dict[str, list[tuple]] = defaultdict(list)
        self.always: dict[str, tuple] = {}
        self.log: list[tuple[str, str, int]] = []
        self.key = ""  # what a client must send as Authorization
        self.closing = threading.Event()
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def next_fault(self, name: str) -> tuple:
        with self.lock:
            return self.faults[name].pop(0) if self.faults[name] else self.always.get(name, ("none",))

    def gets(self, name: str) -> list[int]:
        """The first bytes that the requests for a file's body asked for."""
        return [first for method, asked, first in self.log if (method, asked) == ("GET", name)]

    def stop(self) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that hangs up is what these tests are about


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].strip("/")
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(asked[1]) if asked and self.server.ranges else 0
        self.server.log.append((self.command, name, int(asked[1]) if asked else 0))
        kind, *rest = self.server.next_fault(name)
        amount = rest[0] if rest else 0
        path = self.server.folder / name
        if kind == "silent":
            self._stall()
        elif kind == "delay":
            time.sleep(amount)
        if self.server.key and self.headers.get("Authorization") != self.server.key:
            self._reply(401, b"")
        elif kind == "status":
            self._reply(amount, b"out of order")
        elif not path.is_file():
            self._reply(404, b"nothing here")
        else:
            last = int(asked[2]) if asked and asked[2] and self.server.ranges else None
            self._file(path.read_bytes(), first, last, asked is not None, kind, amount)

    def _file(self, whole: bytes, first: int, last: int | None, asked: bool, kind: str, amount: int) -> None:
        if kind == "short":
            whole = whole[:amount]
        if kind == "garbage":
            whole = bytes(len(whole))
        headers = {"ETag": f'"{hashlib.md5(whole).hexdigest()}"', "Content-Type": "application/x-tar"}
        body = whole[first : len(whole) if last is None else last + 1]
        if first and not body:
            self._reply(416, b"")
            return
        if asked and self.server.ranges:
            headers["Content-Range"] = f"bytes {first}-{first + len(body) - 1}/{len(whole)}"
        status = 206 if asked and self.server.ranges else 200
        if kind == "unsized":
            self._reply(status, body[:amount], headers, sized=False)
        elif kind in ("stall", "cut"):
            self._reply(status, body[:amount], headers, promised=len(body))
            if kind == "stall":
                self._stall()
            time.sleep(0.03)  # what was sent is to arrive first
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self._reply(status, body, headers)

    def _reply(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        promised: int | None = None,
        sized: bool = True,
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        if sized:
            self.send_header("Content-Length", str(len(body) if promised is None else promised))
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
            self.wfile.flush()

    def _stall(self) -> None:
        self.server.closing.wait(100)
        self.close_connection = True


@pytest.fixture(scope="session")
def digit_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight labeled shards of the embedded digits with their info.json; not to be written to."""
    out = tmp_path_factory.mktemp("digits") / "shards"
    packed("digits", out, "train", shards=8)
    return out


@pytest.fixture
def serve() -> Iterator[Callable[[Path], FaultyServer]]:
    """Start a `FaultyServer` of a folder."""
    running: list[FaultyServer] = []

    def start(folder: Path) -> FaultyServer:
        running.append(FaultyServer(folder))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other at once, in this process and in those forked from it."""
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
