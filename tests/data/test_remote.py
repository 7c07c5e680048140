"""Downloading one object from a server that stalls, hangs up, answers 503 and sends too little or too much."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import _registry

from ssl_vit.data import RemoteConfig
from ssl_vit.data.shards.remote import download, fetch, find_filesystem
from ssl_vit.interfaces import RunError, UserError

from .servers import FaultyServer

pytestmark = pytest.mark.usefixtures("no_waiting")
REMOTE, IMPATIENT = RemoteConfig(timeout=20, retries=2), RemoteConfig(timeout=0.5, retries=2)
SIZE = 300_000


@pytest.fixture
def server(serve: Callable[[Path], FaultyServer], tmp_path: Path) -> FaultyServer:
    (tmp_path / "x.tar").write_bytes(bytes(i * i % 251 for i in range(SIZE)))
    return serve(tmp_path)


def read(server: FaultyServer, remote: RemoteConfig = REMOTE, size: int | None = None) -> bytes:
    target = server.folder / "copy"
    download(f"{server.url}/x.tar", str(target), remote, size)
    return target.read_bytes()


def expected(server: FaultyServer) -> bytes:
    return (server.folder / "x.tar").read_bytes()


@pytest.mark.parametrize(
    "faults",
    [
        [("stall", 100_000), ("silent",)],
        [("cut", 100_000), ("status", 503)],
        [("status", 429), ("status", 408)],
        [("cut", 0), ("status", 500)],
        [("unsized", 70_000)],
    ],
)
def test_a_broken_transfer_is_repeated(server: FaultyServer, faults: list[tuple]) -> None:
    server.faults["x.tar"] = list(faults)
    stalls = any(kind in ("stall", "silent") for kind, *_ in faults)
    assert read(server, RemoteConfig(timeout=0.7, retries=2) if stalls else REMOTE, SIZE) == expected(server)
    assert len(server.gets("x.tar")) == len(faults) + 1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (("stall", 0), "no data for 0.5 s"),
        (("silent",), "no data for 0.5 s"),
        (("status", 503), "HTTP status 503"),
        (("cut", 0), "not completed"),
    ],
)
def test_a_failure_that_lasts_is_a_run_error(server: FaultyServer, fault: tuple, reason: str) -> None:
    server.faults["x.tar"], server.always["x.tar"] = [("cut", 40_000)], fault
    with pytest.raises(RunError, match=f"x.tar: .*{reason}.*3 tries in . s .*run the same command") as caught:
        read(server, IMPATIENT if fault[0] in ("stall", "silent") else REMOTE)
    assert "\n" not in str(caught.value)
    assert len(server.gets("x.tar")) == 3


def test_an_object_of_another_size_is_refused_at_once(server: FaultyServer) -> None:
    for size in (SIZE + 1000, SIZE - 1000):
        with pytest.raises(UserError, match=f"has {SIZE} bytes, expected {size}"):
            read(server, size=size)
    assert len(server.log) == 2


def test_an_object_without_a_declared_size_is_bounded_by_the_expected_one(server: FaultyServer) -> None:
    server.always["x.tar"] = ("unsized", SIZE)
    assert read(server) == expected(server)
    with pytest.raises(UserError, match="expected 200000"):
        read(server, size=200_000)
    server.always["x.tar"] = ("unsized", 70_000)
    with pytest.raises(RunError, match=f"ended after 70000 of {SIZE} bytes; 3 tries"):
        read(server, size=SIZE)


def test_an_endless_object_ends_at_a_limit(server: FaultyServer) -> None:
    server.always["x.tar"] = ("unsized", SIZE)
    with pytest.raises(UserError, match=r"larger than the limit of 107374 bytes; .*data\.remote\.largest_gb"):
        read(server, REMOTE.model_copy(update={"largest_gb": 1e-4}))
    with pytest.raises(UserError, match="larger than the limit of 1000 bytes"):
        fetch(f"{server.url}/x.tar", REMOTE, 1000)
    server.faults["x.tar"] = [("cut", 200_000)]
    assert fetch(f"{server.url}/x.tar", REMOTE, SIZE) == expected(server), "what a failed try received does not count"


@pytest.mark.parametrize(("status", "reason"), [(404, "no such shard"), (403, "access is refused"), (410, "410")])
def test_client_errors_are_not_retried(server: FaultyServer, status: int, reason: str) -> None:
    server.always["x.tar"] = ("status", status)
    with pytest.raises(UserError, match=reason):
        read(server)
    assert len(server.log) == 1


def test_a_forked_process_does_not_finalize_its_parents_clients(server: FaultyServer) -> None:
    """It would take the parent's sockets out of the event loop that both share, and the parent would hang."""
    read(server)
    client = weakref.ref(find_filesystem(server.url, REMOTE.timeout)[0])
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
        assert type(find_filesystem(url, 1)[0]).__name__ == kind
    for protocol, extra in {"s3": "s3", "gs": "gcs"}.items():
        monkeypatch.delitem(_registry, protocol, raising=False)
        monkeypatch.setitem(sys.modules, "s3fs", None)
        monkeypatch.setitem(sys.modules, "gcsfs", None)
        with pytest.raises(UserError, match=rf"pip install 'ssl-vit\[{extra}\]'"):
            find_filesystem(f"{protocol}://bucket/x.tar", 1)


def test_a_synchronous_client_is_retried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    filesystem, path = find_filesystem("memory://bucket/x.tar", 1)
    filesystem.pipe_file(path, content := bytes(range(256)) * 400)
    errors, original = [OSError("hub busy"), ConnectionResetError()], type(filesystem).get_file

    def flaky(*arguments: object, **options: object) -> None:
        if errors:
            raise errors.pop()
        original(*arguments, **options)

    monkeypatch.setattr(type(filesystem), "get_file", flaky)
    download("memory://bucket/x.tar", str(tmp_path / "copy"), REMOTE, len(content))
    assert (tmp_path / "copy").read_bytes() == content and not errors
    with pytest.raises(UserError, match="no such shard"):
        download("memory://bucket/y.tar", str(tmp_path / "copy"), REMOTE)
