"""Reading one object over HTTP from a server that stalls, hangs up, answers 503 and sends too little."""

from __future__ import annotations

import gc
import multiprocessing
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import _registry

from ssl_vit.data import RemoteConfig, shards
from ssl_vit.data.shards.remote import RemoteFile, find_filesystem
from ssl_vit.interfaces import RunError, UserError

pytestmark = pytest.mark.usefixtures("no_waiting")
PATIENT, IMPATIENT = RemoteConfig(timeout=20, retries=2), RemoteConfig(timeout=0.5, retries=2)
SIZE = 300_000


@pytest.fixture
def server(serve: Callable, tmp_path: Path):
    (tmp_path / "x.tar").write_bytes(bytes(i * i % 251 for i in range(SIZE)))
    return serve(tmp_path)


def read(server, remote: RemoteConfig = PATIENT, size: int | None = None) -> bytes:
    with RemoteFile(f"{server.url}/x.tar", remote, size) as file:
        return file.readall()


def expected(server) -> bytes:
    return (server.folder / "x.tar").read_bytes()


@pytest.mark.parametrize(
    ("faults", "asked"),
    [
        ([("stall", 100_000)], [0, 100_000]),
        ([("cut", 100_000)], [0, 100_000]),
        ([("cut", 100_000), ("status", 503), ("cut", 50_000)], [0, 100_000, 100_000, 150_000]),
        ([("silent",), ("status", 500)], [0, 0, 0]),
        ([("status", 429), ("status", 408)], [0, 0, 0]),
    ],
)
def test_a_broken_transfer_goes_on_where_it_stopped(server, faults: list[tuple], asked: list[int]) -> None:
    server.faults["x.tar"] = list(faults)
    stalls = any(kind in ("stall", "silent") for kind, *_ in faults)
    assert read(server, RemoteConfig(timeout=2, retries=2) if stalls else PATIENT) == expected(server)
    assert server.gets("x.tar") == asked


def test_without_ranges_it_starts_again_and_drops_what_it_had(server) -> None:
    server.ranges = False
    server.faults["x.tar"] = [("cut", 100_000), ("cut", 200_000)]
    assert read(server) == expected(server)
    assert server.gets("x.tar") == [0, 100_000, 200_000]


def test_every_bit_of_progress_buys_new_patience(server) -> None:
    server.always["x.tar"] = ("cut", 30_000)
    assert read(server, RemoteConfig(timeout=20, retries=1)) == expected(server)
    assert len(server.gets("x.tar")) == 10


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (("stall", 0), "nothing came for 0.5 s"),
        (("silent",), "nothing came for 0.5 s"),
        (("status", 503), "HTTP status 503"),
        (("cut", 0), "not completed"),
    ],
)
def test_a_failure_that_lasts_is_a_run_error_that_says_what_to_do(server, fault: tuple, said: str) -> None:
    server.faults["x.tar"], server.always["x.tar"] = [("cut", 40_000)], fault
    with pytest.raises(RunError, match=f"x.tar: .*{said}.*3 tries in . s .*run the same command") as caught:
        read(server, IMPATIENT if fault[0] in ("stall", "silent") else PATIENT)
    assert "\n" not in str(caught.value)
    assert server.gets("x.tar") == [0, 40_000, 40_000]


def test_a_server_that_is_gone_is_a_run_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(RunError, match=f"127.0.0.1:{port}/x.tar: .*3 tries"):
        RemoteFile(f"http://127.0.0.1:{port}/x.tar", PATIENT).connect()


def test_an_object_of_another_size_is_refused_at_once(server) -> None:
    server.always["x.tar"] = ("short", 1000)
    with pytest.raises(UserError, match=f"has 1000 bytes, where {SIZE} are expected"):
        read(server, size=SIZE)
    assert len(server.log) == 1


def test_an_object_that_ends_early_without_a_word_is_asked_for_again(server) -> None:
    server.faults["x.tar"] = [("unsized", 70_000)]
    assert read(server, size=SIZE) == expected(server)
    server.always["x.tar"] = ("unsized", 0)
    with pytest.raises(RunError, match=f"ended after 0 of {SIZE} bytes"):
        read(server, size=SIZE)


def test_a_transfer_that_breaks_behind_its_last_byte_is_whole(server) -> None:
    server.ranges = True
    server.faults["x.tar"] = [("unended",)]
    assert read(server, size=SIZE) == expected(server)


def test_an_object_of_unknown_size_ends_where_it_ends(server) -> None:
    server.always["x.tar"] = ("unsized", 70_000)
    assert read(server) == expected(server)[:70_000]


@pytest.mark.parametrize(("status", "said"), [(404, "no such shard"), (403, "access is refused"), (401, "credentials")])
def test_what_asking_again_does_not_change_is_asked_once(server, status: int, said: str) -> None:
    server.always["x.tar"] = ("status", status)
    with pytest.raises(UserError, match=said):
        read(server)
    assert len(server.log) == 1


def test_a_mistake_in_the_program_is_no_network_failure(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssl_vit.data.shards.remote._HttpSource.read", lambda: b"")
    with pytest.raises(TypeError):
        read(server)
    assert len(server.log) == 1


def test_nothing_is_left_behind_by_stalled_and_abandoned_reads(server, pending: Callable) -> None:
    read(server)
    server.always["x.tar"] = ("stall", 0)
    threads, before = threading.active_count(), pending()
    for _ in range(3):
        with pytest.raises(RunError), RemoteFile(f"{server.url}/x.tar", RemoteConfig(timeout=0.05, retries=1)) as file:
            file.readall()
    server.always.clear()
    for _ in range(3):
        with RemoteFile(f"{server.url}/x.tar", PATIENT) as file:
            file.read(10)
    server.closing.set()  # the stalled threads of the server itself end
    deadline = time.monotonic() + 5
    while (threading.active_count() > threads or pending() > before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= threads and pending() <= before


def test_a_forked_process_does_not_finalize_its_parents_clients(server) -> None:
    """It would take the parent's sockets out of the event loop that both share, and the parent would hang."""
    read(server)
    client = weakref.ref(find_filesystem(server.url)[0])
    fsspec.get_filesystem_class("http").clear_instance_cache()
    assert read(server) == expected(server)  # by a client that equals the first

    def alive() -> None:
        gc.collect()
        sys.exit(0 if client() is not None else 3)

    process = multiprocessing.get_context("fork").Process(target=alive)
    process.start()
    process.join(20)
    assert process.exitcode == 0


def test_clients_of_any_protocol_are_found_and_missing_ones_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, kind in {
        "hf://datasets/someone/some/x.tar": "HfFileSystem",
        "s3://bucket/x.tar": "S3FileSystem",
        "https://host/x.tar": "HTTPFileSystem",
    }.items():
        assert type(find_filesystem(url)[0]).__name__ == kind
    for protocol, extra in {"s3": "s3", "gs": "gcs"}.items():
        monkeypatch.delitem(_registry, protocol, raising=False)
        monkeypatch.setitem(sys.modules, "s3fs", None)
        monkeypatch.setitem(sys.modules, "gcsfs", None)
        with pytest.raises(UserError, match=rf"pip install 'ssl-vit\[{extra}\]'"):
            find_filesystem(f"{protocol}://bucket/x.tar")


def test_a_client_without_asynchrony_is_read_and_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    filesystem, path = find_filesystem("memory://bucket/x.tar")
    content = bytes(range(256)) * 400
    filesystem.pipe_file(path, content)
    source = "ssl_vit.data.shards.remote._FileSource.read"
    parts = iter([content[:1000], OSError("hub busy"), content[1000:], b""])

    def flaky(self) -> bytes:
        if isinstance(part := next(parts), Exception):
            raise part
        assert self.file.tell() in (0, 1000)  # opened again at the byte reached
        return part

    with RemoteFile("memory://bucket/x.tar", PATIENT) as file:
        assert file.readall() == content
    monkeypatch.setattr(source, flaky)
    with RemoteFile("memory://bucket/x.tar", PATIENT, len(content)) as file:
        assert file.read(500) + file.readall() == content
    with pytest.raises(UserError, match="no such shard"):
        shards.open_url("memory://bucket/y.tar")
