"""Shards in a bucket, over a real S3 API (moto's server)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from ssl_vit.data import RemoteConfig
from ssl_vit.data.shards import open_shards, open_url
from ssl_vit.data.shards.remote import find_filesystem
from ssl_vit.interfaces import UserError

from .servers import FaultyServer

pytestmark = pytest.mark.usefixtures("no_waiting")
SIZE = 6_000_000
REMOTE = RemoteConfig(timeout=20, retries=2)


@pytest.fixture(scope="module")
def bucket(digit_shards: Path) -> Iterator[None]:
    """A bucket with a shard set, a large object and one without info.json."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        nothing = {"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}
        for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", **nothing}.items():
            patch.setenv(name, value)
        patch.delenv("AWS_PROFILE", raising=False)
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        s3 = fsspec.filesystem("s3")
        s3.mkdir("bucket")
        s3.put(f"{digit_shards}/*", "bucket/digits/train/")
        s3.put(f"{digit_shards}/000000.tar", "bucket/plain/0.tar")
        s3.pipe("bucket/large.bin", content())
        yield
    server.stop()


def content() -> bytes:
    return bytes(i * i % 251 for i in range(1000)) * (SIZE // 1000)


def test_settings_of_fsspec_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"s3": {"addressing_style": "path"}, "read_timeout": 1, "retries": {"max_attempts": 9}}
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": own, "anon": True})
    filesystem, _ = find_filesystem("s3://bucket/x.tar", 60)
    settings = filesystem.config_kwargs
    assert (settings["s3"], settings["read_timeout"], settings["retries"]["max_attempts"]) == (own["s3"], 60, 1)
    assert filesystem.anon


@pytest.mark.parametrize("spec", ["digits/train", "digits/train/*.tar", "digits/train/{000000..000007}.tar"])
def test_a_set_in_a_bucket_is_the_set_on_the_disk(bucket: None, digit_shards: Path, spec: str) -> None:
    local, remote = open_shards(str(digit_shards)), open_shards(f"s3://bucket/{spec}", REMOTE)
    assert remote.urls[0] == "s3://bucket/digits/train/000000.tar"
    assert (remote.counts, remote.classes, remote.fingerprint) == (local.counts, local.classes, local.fingerprint)
    here, there = local.open(5), remote.open(5)
    assert [here.read(n) for n in range(local.counts[5])] == [there.read(n) for n in range(local.counts[5])]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("bucket/digits", "did you mean 's3://bucket/digits/train'"),
        ("bucket/nothing", "no shards"),
        ("bucket/plain/1.tar", "no such shard"),
        ("nobucket/plain", "no shards"),
        ("nobucket/*.tar", "no such shard"),
    ],
)
def test_what_is_not_there_is_named(bucket: None, spec: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_shards(f"s3://{spec}", REMOTE)


def read(remote: RemoteConfig, size: int | None = None) -> bytes:
    with open_url("s3://bucket/large.bin", remote, size) as file:
        return file.read()


def test_a_large_object_is_whole_and_of_the_expected_size(bucket: None) -> None:
    assert read(REMOTE) == content()
    with pytest.raises(UserError, match=f"has {SIZE} bytes, expected 5"):
        read(REMOTE, 5)


@pytest.fixture
def broken_bucket(
    serve: Callable[..., FaultyServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: None
) -> Iterator[FaultyServer]:
    """One object in a store that can be told how to fail."""
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "large.bin").write_bytes(content())
    server: FaultyServer = serve(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield server
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_a_store_in_trouble_is_asked_again(broken_bucket: FaultyServer) -> None:
    broken_bucket.faults["bucket/large.bin"] = [("status", 503), ("cut", 100_000), ("stall", 300_000)]
    assert read(RemoteConfig(timeout=0.7, retries=3)) == content()
    assert not broken_bucket.faults["bucket/large.bin"]


def test_refused_credentials_are_named_at_once(broken_bucket: FaultyServer) -> None:
    broken_bucket.always["bucket/large.bin"] = ("status", 403)
    with pytest.raises(UserError, match=r"large.bin: access is refused \(.*Forbidden.*\); check the credentials"):
        read(REMOTE)
    assert len(broken_bucket.log) == 1


def test_missing_credentials_are_named_at_once(bucket: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(UserError, match=r"access is refused.*credentials"):
        open_shards("s3://bucket/plain/0.tar", REMOTE)
    with pytest.raises(UserError, match=r"s3://bucket/plain: access is refused.*check the credentials$"):
        open_shards("s3://bucket/plain", REMOTE)
    fsspec.filesystem("s3").clear_instance_cache()
