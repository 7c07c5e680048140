"""Finding samples in a tar and reading them one by one: as WebDataset's own reader sees them."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from webdataset.tariterators import group_by_keys, tar_file_iterator

from ssl_vit.data.shards import open_shards
from ssl_vit.data.shards.reading import OpenShards, ShardFile
from ssl_vit.interfaces import BadSample, RunError, UserError
from tests.tars import write_tar

Files = list[tuple[str, bytes]]


def samples(count: int, prefix: str = "") -> Files:
    return [
        (f"{prefix}{n:06d}.{extension}", data)
        for n in range(count)
        for extension, data in (("jpg", bytes([n % 256]) * (100 + 37 * n)), ("cls", b"%d" % n), ("json", b"{}"))
    ]


def opened(path: Path) -> ShardFile:
    return ShardFile(path.open("rb"), str(path))


LAYOUTS: dict[str, tuple[Files, dict[str, Any]]] = {
    "ustar": (samples(9), {"format": tarfile.USTAR_FORMAT}),
    "gnu": (samples(9), {"format": tarfile.GNU_FORMAT}),
    "pax": (samples(9), {"format": tarfile.PAX_FORMAT}),
    "folders in names": (samples(4, "n0123/img_") + samples(3, "n0456/img_"), {}),
    "long names": (samples(3) + samples(2, "x" * 120 + "/") + samples(3, "b"), {"format": tarfile.GNU_FORMAT}),
    "long pax names": (samples(3) + samples(2, "y" * 300 + "/"), {"format": tarfile.PAX_FORMAT}),
    "other alphabets": (samples(2) + samples(2, "猫"), {"format": tarfile.PAX_FORMAT}),
    "prefix field": (samples(2, "/".join(["folder"] * 20) + "/"), {"format": tarfile.USTAR_FORMAT}),
    "empty members": ([("0.jpg", b""), ("0.cls", b"1"), ("1.jpg", b"x" * 512), ("1.cls", b"2")], {}),
    "no sample": ([], {}),
    "several dots": ([("a.b.jpg", b"1"), ("a.b.cls", b"2"), ("a.jpg", b"3")], {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_those_that_webdataset_reads(tmp_path: Path, layout: str) -> None:
    files, options = LAYOUTS[layout]
    path = write_tar(tmp_path / "000000.tar", files, **options)
    with path.open("rb") as file:
        expected = list(group_by_keys({**member, "__url__": ""} for member in tar_file_iterator(file)))
    shard = opened(path)
    assert [sample.key for sample in shard.samples] == [sample["__key__"] for sample in expected]
    for position, sample in enumerate(expected):
        content = {name: data for name, data in sample.items() if not name.startswith("__")}
        assert shard.read(position, tuple(content)) == content
    assert not shard.damage and not shard.duplicates


def test_hidden_files_are_ignored(tmp_path: Path) -> None:
    shard = opened(
        write_tar(tmp_path / "s.tar", [("d/._0.jpg", b"x"), ("d/0.jpg", b"y"), ("._1.jpg", b"x"), ("d/.x", b"")])
    )
    assert [sample.key for sample in shard.samples] == ["d/0"]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_many_directories_in_a_row_are_ignored(tmp_path: Path, format: int) -> None:
    """`tarfile` reads their headers, of more than 1 MiB together, without a seek."""
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w", format=format) as tar:
        for number in range(2200):
            folder = tarfile.TarInfo(f"{number}/{'x' * 120}")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
        image = tarfile.TarInfo("0.jpg")
        image.size = 3
        tar.addfile(image, io.BytesIO(b"abc"))
    shard = opened(path)
    assert [sample.key for sample in shard.samples] == ["0"] and not shard.damage


def test_directories_and_links_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "0.jpg").write_bytes(b"abc")
    (tmp_path / "d" / "1.jpg").symlink_to("/etc/passwd")
    with tarfile.open(path, "w") as tar:
        tar.add(tmp_path / "d", "d")
    shard = opened(path)
    assert [shard.read(n)["jpg"] for n in range(len(shard.samples))] == [b"abc"]


@pytest.mark.parametrize("cut", range(0, 4000, 219))
def test_a_tar_cut_short_gives_what_is_whole_and_says_so(tmp_path: Path, cut: int) -> None:
    path = write_tar(tmp_path / "s.tar", samples(9))
    whole = [opened(path).read(n) for n in range(9)]
    path.write_bytes(path.read_bytes()[:cut])
    shard = opened(path)
    assert len(shard.samples) <= 9
    for n in range(len(shard.samples)):
        assert shard.read(n).items() <= whole[n].items()
    with pytest.raises(BadSample, match="missing: the shard"):
        shard.read(8)


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("size", [600, 1 << 33, 1 << 62, (1 << 63) + 5, -(1 << 40)])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.DIRTYPE, b"D"])
def test_a_header_that_declares_more_than_the_file_has_is_damage(tmp_path: Path, size: int, kind: bytes) -> None:
    """A directory and unknown kinds are passed over: what counts is that nothing is sought or allocated."""
    path = write_tar(tmp_path / "s.tar", samples(3))
    good = path.read_bytes().rstrip(b"\0")
    good += bytes(-len(good) % 512)
    path.write_bytes(good + header("000003.jpg", size, kind) + bytes(512))
    shard = opened(path)
    assert len(shard.samples) == 3 and shard.read(2)["cls"] == b"2"
    if kind != tarfile.DIRTYPE:
        assert shard.damage
        with pytest.raises(BadSample, match="missing: the shard is damaged"):
            shard.read(3)


def test_an_absurdly_large_member_is_a_bad_sample(tmp_path: Path) -> None:
    size = (1 << 29) + 1
    with (tmp_path / "s.tar").open("wb") as file:
        file.write(header("0.jpg", size))
        file.truncate(512 + size)
    with pytest.raises(BadSample, match=f"{size} bytes is too large"):
        opened(tmp_path / "s.tar").read(0)


def test_a_member_that_is_there_twice_is_noted(tmp_path: Path) -> None:
    shard = opened(write_tar(tmp_path / "s.tar", [("0.jpg", b"a"), ("0.cls", b"1"), ("0.jpg", b"b")]))
    assert shard.duplicates == ["0.jpg"] and shard.read(0) == {"jpg": b"a", "cls": b"1"}


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_a_compressed_tar_is_refused(tmp_path: Path, mode: str) -> None:
    with tarfile.open(tmp_path / "s.tar", mode) as tar:  # type: ignore[call-overload]
        tar.addfile(tarfile.TarInfo("0.jpg"))
    with pytest.raises(UserError, match=r"s\.tar: a compressed tar .* decompress it"):
        opened(tmp_path / "s.tar")


def test_a_shard_cut_while_it_is_read_is_a_bad_sample_not_a_crash(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", samples(9))
    shard = opened(path)
    assert shard.read(8)["cls"] == b"8"
    with path.open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(BadSample, match="cut short while"):
        shard.read(8)


def test_shards_are_opened_ahead_and_the_oldest_are_let_go(tmp_path: Path) -> None:
    for n in range(6):
        write_tar(tmp_path / f"{n:06d}.tar", samples(3, f"{n}_"))
    shards = open_shards(str(tmp_path))
    reader = OpenShards(shards.open, most=3)
    for n in range(6):
        reader.ahead((n + 1) % 6)
        assert reader.get(n).samples[1].key == f"{n}_000001"
        assert len(reader.open) <= 4
    assert 0 in reader.open, "asked for ahead by the last one"


def test_a_shard_that_the_disk_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = open_shards(str(write_tar(tmp_path / "000000.tar", samples(2))))
    shard = opened(tmp_path / "000000.tar")
    (tmp_path / "000000.tar").unlink()
    (tmp_path / "000000.tar").mkdir()
    with pytest.raises(RunError, match=r"000000\.tar: cannot be read: Is a directory"):
        OpenShards(shards.open, 2).get(0)

    def refuse(*arguments: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", refuse)
    with pytest.raises(RunError, match=r"000000\.tar: cannot be read: Input/output error"):
        shard.read(0)


def test_a_shard_that_is_gone_is_named(tmp_path: Path) -> None:
    for n in range(2):
        write_tar(tmp_path / f"{n:06d}.tar", samples(3))
    reader = OpenShards(open_shards(str(tmp_path)).open, most=2)
    (tmp_path / "000001.tar").unlink()
    reader.ahead(1)
    with pytest.raises(UserError, match=r"000001\.tar: no such shard"):
        reader.get(1)


@pytest.mark.parametrize("cut", [0, 100])
def test_a_damaged_header_is_not_the_end_of_a_shard(tmp_path: Path, cut: int) -> None:
    """Without info.json, only the members say how many samples there are."""
    path = write_tar(tmp_path / "000000.tar", samples(9))
    data = bytearray(path.read_bytes())
    start = data.find(b"000004.jpg")
    data[start + 150] ^= 0xFF  # the checksum
    path.write_bytes(data[: start + cut] if cut else data)
    assert opened(path).damage == f"nothing after byte {start} can be read"
    shards = open_shards(str(path))
    assert shards.samples == 5, "one more than can be read"
    with pytest.raises(BadSample, match="missing: the shard is damaged"):
        shards.open(0).read(4)


def test_a_disk_that_fails_in_the_headers_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = write_tar(tmp_path / "s.tar", samples(9)), os.pread
    for first in (0, 1536):

        def refuse(descriptor: int, size: int, offset: int, first: int = first) -> bytes:
            if offset >= first:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(descriptor, size, offset)

        with monkeypatch.context() as patch, pytest.raises(RunError, match=r"s\.tar: cannot be read: Input/output"):
            patch.setattr(os, "pread", refuse)
            opened(path)
