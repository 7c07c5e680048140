"""The cache of whole shards: bounded, shared by processes, whole after kills, checked."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from ssl_vit.data import RemoteConfig
from ssl_vit.data.shards import cache as shard_cache
from ssl_vit.data.shards import open_shards, open_url
from ssl_vit.interfaces import RunError, UserError

from .servers import FaultyServer

pytestmark = pytest.mark.usefixtures("no_waiting")
FORK = multiprocessing.get_context("fork")
SIZE = 100_000


@pytest.fixture
def server(serve: Callable, tmp_path: Path) -> FaultyServer:
    folder = tmp_path / "web"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.tar").write_bytes(content(number))
    return serve(folder)


def test_a_link_in_the_place_of_a_download_is_not_followed(server: FaultyServer, tmp_path: Path) -> None:
    folder, victim = tmp_path / "cache", tmp_path / "victim"
    victim.write_bytes(b"mine")
    remote = RemoteConfig(cache_dir=str(folder))
    assert shard_cache.open_remote(f"{server.url}/0.tar", remote).read() == content(0)
    (name,) = (path.name for path in folder.iterdir() if path.is_file())
    (folder / name).unlink()
    (folder / f"{name}.{SIZE}.part").symlink_to(victim)
    assert shard_cache.open_remote(f"{server.url}/0.tar", remote).read() == content(0)
    assert victim.read_bytes() == b"mine"


def content(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest() * (SIZE // 32)


@pytest.fixture
def remote(tmp_path: Path) -> RemoteConfig:
    """Room for three of the shards."""
    return RemoteConfig(cache_dir=str(tmp_path / "cache"), cache_gb=3.5 * SIZE / 2**30, timeout=20, retries=1)


def fetch(url: str, number: int, remote: RemoteConfig, known: bool = True) -> bytes:
    """A shard's bytes through the cache, with or without what an info.json says of it."""
    expected = (len(content(number)), hashlib.sha256(content(number)).hexdigest()) if known else (None, "")
    with open_url(f"{url}/{number}.tar", remote, *expected) as file:
        return file.read()


def kept(remote: RemoteConfig) -> list[str]:
    folder = Path(remote.cache_dir or "")
    return sorted(path.name.partition("-")[2] for path in folder.iterdir() if path.is_file())


@pytest.mark.parametrize("known", [True, False])
def test_a_shard_is_downloaded_once(server: FaultyServer, remote: RemoteConfig, known: bool) -> None:
    for _ in range(3):
        assert fetch(server.url, 0, remote, known) == content(0)
    assert kept(remote) == ["0.tar"]
    if known:
        assert len(server.log) == 1
    server.stop()
    if known:
        assert fetch(server.url, 0, remote) == content(0)


def test_a_signed_url_may_be_renewed(server: FaultyServer, remote: RemoteConfig) -> None:
    expected = len(content(0)), hashlib.sha256(content(0)).hexdigest()
    for signature in range(3):
        with open_url(f"{server.url}/0.tar?Signature={signature}", remote, *expected) as file:
            assert file.read() == content(0)
    assert len(server.log) == 1 and kept(remote) == ["0.tar"]


def test_without_a_checksum_a_changed_object_is_downloaded_again(server: FaultyServer, remote: RemoteConfig) -> None:
    assert fetch(server.url, 0, remote, known=False) == content(0)
    (server.folder / "0.tar").write_bytes(content(5))
    assert fetch(server.url, 0, remote, known=False) == content(5)


def test_another_size_than_the_listed_one_is_refused(server: FaultyServer, remote: RemoteConfig) -> None:
    with pytest.raises(UserError, match=r"0\.tar"), open_url(f"{server.url}/0.tar", remote, SIZE - 32, ""):
        pass


def test_the_least_recently_used_make_room(server: FaultyServer, remote: RemoteConfig) -> None:
    for number in (0, 1, 2, 0, 3):
        assert fetch(server.url, number, remote) == content(number)
        time.sleep(0.01)
    assert kept(remote) == ["0.tar", "2.tar", "3.tar"]
    fetch(server.url, 0, remote)
    assert server.gets("0.tar") == [0]


def test_a_file_in_use_survives_its_eviction(server: FaultyServer, remote: RemoteConfig) -> None:
    with open_url(f"{server.url}/0.tar", remote) as file:
        start = file.read(10)
        for number in range(1, 6):
            fetch(server.url, number, remote)
        assert "0.tar" not in kept(remote)
        assert start + file.read() == content(0)


def test_other_files_in_the_folder_are_not_touched(server: FaultyServer, remote: RemoteConfig) -> None:
    folder = Path(remote.cache_dir or "")
    folder.mkdir()
    (folder / "thesis.tex").write_bytes(bytes(4 * SIZE))
    (folder / "old.part").write_bytes(b"mine")
    for number in range(5):
        assert fetch(server.url, number, remote) == content(number)
    assert (folder / "thesis.tex").stat().st_size == 4 * SIZE and (folder / "old.part").exists()


def test_a_shard_larger_than_the_bound_is_not_kept_and_reported_once(
    server: FaultyServer, remote: RemoteConfig, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "_said", set())
    fetch(server.url, 2, remote)
    small = remote.model_copy(update={"cache_gb": 0.5 * SIZE / 2**30})
    for number in (0, 1, 0):
        assert fetch(server.url, number, small) == content(number)
    assert kept(small) == ["2.tar"] and server.gets("0.tar") == [0, 0]
    assert capsys.readouterr().err.count("shards are downloaded again each time: data.remote.cache_gb=") == 1


def test_a_server_that_does_not_say_the_size_is_read_all_the_same(
    server: FaultyServer, remote: RemoteConfig, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "_said", set())
    server.always["0.tar"] = ("unsized", SIZE)
    assert fetch(server.url, 0, remote, known=False) == content(0)
    assert kept(remote) == [] and "does not say how large" in capsys.readouterr().err


def test_a_wrong_checksum_that_stays_wrong_is_named_and_not_kept(server: FaultyServer, remote: RemoteConfig) -> None:
    server.always["1.tar"] = ("garbage",)
    with pytest.raises(UserError, match=r"/1.tar: its sha256 is .*upload the shards and their info.json again"):
        fetch(server.url, 1, remote)
    assert kept(remote) == [] and server.gets("1.tar") == [0, 0]


def test_a_failed_download_leaves_nothing(server: FaultyServer, remote: RemoteConfig) -> None:
    server.faults["0.tar"], server.always["0.tar"] = [("cut", 30_000)], ("status", 503)
    with pytest.raises(RunError, match="HTTP status 503"):
        fetch(server.url, 0, remote)
    assert kept(remote) == []


def test_a_kept_file_that_was_cut_is_downloaded_again(server: FaultyServer, remote: RemoteConfig) -> None:
    fetch(server.url, 0, remote)
    (path,) = Path(remote.cache_dir or "").glob("*0.tar")
    os.truncate(path, 1000)
    assert fetch(server.url, 0, remote) == content(0)
    assert path.stat().st_size == len(content(0))


def test_processes_share_a_cache_and_download_nothing_twice(server: FaultyServer, remote: RemoteConfig) -> None:
    for number in range(3):
        server.always[f"{number}.tar"] = ("delay", 0.2)
    with FORK.Pool(5) as pool:
        found = pool.starmap(fetch, [(server.url, number % 3, remote) for number in range(15)], chunksize=1)
    assert found == [content(number % 3) for number in range(15)]
    assert [len(server.gets(f"{number}.tar")) for number in range(3)] == [1, 1, 1]


def test_many_processes_stay_within_the_bound(server: FaultyServer, remote: RemoteConfig) -> None:
    jobs = [(server.url, number % 6, remote) for number in range(30)]
    with FORK.Pool(4) as pool:
        running = pool.starmap_async(fetch, jobs, chunksize=1)
        most = 0
        while not running.ready():
            sizes = []
            for path in Path(remote.cache_dir or "").glob("*-*"):
                try:
                    sizes.append(path.stat().st_size)
                except FileNotFoundError:
                    continue
            most = max(most, sum(sizes))
            time.sleep(0.001)
        assert running.get() == [content(number % 6) for number in range(30)]
    assert 0 < most <= 3.5 * SIZE
    assert len(kept(remote)) == 3


def test_a_shard_may_be_removed_as_soon_as_it_is_kept(
    server: FaultyServer, remote: RemoteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(remote.cache_dir or "")

    class Crowded(FileLock):
        """Whenever the space is free to change, another process needs it all."""

        def release(self, force: bool = False) -> None:
            super().release(force)
            if Path(self.lock_file).name == "space":
                for path in folder.glob("*-0.tar"):
                    path.unlink()

    monkeypatch.setattr("ssl_vit.data.shards.cache.FileLock", Crowded)
    assert fetch(server.url, 0, remote) == content(0)
    assert not kept(remote)


def test_a_killed_download_blocks_nobody_and_is_cleaned_up(server: FaultyServer, remote: RemoteConfig) -> None:
    server.faults["0.tar"] = [("stall", 50_000)]
    process = FORK.Process(target=fetch, args=(server.url, 0, remote))
    process.start()
    folder = Path(remote.cache_dir or "")
    deadline = time.monotonic() + 10
    while not (server.log and any(folder.glob("*.part"))):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert kept(remote) == [f"0.tar.{len(content(0))}.part"]
    assert fetch(server.url, 1, remote) == content(1)  # another shard's download throws the leftover away
    assert kept(remote) == ["1.tar"]
    assert fetch(server.url, 0, remote) == content(0)
    assert server.gets("0.tar") == [0, 0]  # from the beginning, and without waiting for the one that was killed


def test_a_full_disk_is_a_run_error_that_names_the_folder(server: FaultyServer, remote: RemoteConfig) -> None:
    """A real limit on the size of files, in a process of its own."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        with pytest.raises(RunError, match=r"cache_dir=.*: cannot be written: File too large; free space"):
            fetch(server.url, 0, remote)

    process = FORK.Process(target=limited)
    process.start()
    process.join(20)
    assert process.exitcode == 0 and kept(remote) == []


def test_a_disk_that_fills_up_makes_the_cache_smaller(
    server: FaultyServer, remote: RemoteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(server.url, 0, remote)
    fetch(server.url, 1, remote)
    usage = shutil.disk_usage(remote.cache_dir or "")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=SIZE // 2))
    assert fetch(server.url, 2, remote) == content(2)
    assert kept(remote) == ["2.tar"]


def test_a_folder_that_cannot_be_used_is_named_before_anything_is_read(
    serve: Callable, digit_shards: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    server = serve(digit_shards)
    with pytest.raises(UserError, match=r"data.remote.cache_dir=.*/file/cache: cannot be used: Not a directory"):
        open_shards(server.url, RemoteConfig(cache_dir=f"{tmp_path}/file/cache"))
    assert not server.gets("000000.tar")


def test_without_a_cache_a_shard_has_no_name_on_the_disk_and_is_checked(
    serve: Callable, digit_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server = serve(digit_shards)
    shards = open_shards(server.url, RemoteConfig(timeout=20, retries=1))
    server.faults["000001.tar"] = [("garbage",)]
    with open_url(shards.urls[1], shards.remote, shards.shards[1].size, shards.shards[1].checksum) as file:
        assert file.read() == (digit_shards / "000001.tar").read_bytes()
        assert not list(tmp_path.iterdir())
    server.always["000001.tar"] = ("garbage",)
    with pytest.raises(UserError, match="its sha256 is"):
        shards.open(1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(RunError, match=r"/gone: a shard cannot be kept here.*TMPDIR or data.remote.cache_dir"):
        shards.open(2)
