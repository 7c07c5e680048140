"""Packing that is interrupted, repeated or run on several processes writes the same bytes."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock

from ssl_vit.data import packing
from ssl_vit.data.packing import pack, record
from ssl_vit.data.packing.plan import Options
from ssl_vit.data.packing.sources import open_source
from ssl_vit.data.packing.sources.base import Source
from ssl_vit.data.shards import open_shards
from ssl_vit.data.verify import stats, verify
from ssl_vit.interfaces import RunError, UserError

from .pictures import encoded, write

OPTIONS = Options(shards=12, resize=40, holdout=0.2, order="stratified")
COMMAND_OPTIONS = ["--shards", "12", "--resize", "40", "--holdout", "0.2", "--order", "stratified", "--jobs", "2"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of 80 JPEGs of 200 x 150 pixels, one of them broken."""
    root = tmp_path_factory.mktemp("source") / "images"
    for number in range(240):
        write(root / "abc"[number % 3] / f"{number}.jpg", encoded("JPEG", number, (200, 150)))
    (root / "b" / "4.jpg").write_bytes((root / "b" / "4.jpg").read_bytes()[:5000])
    return root


@pytest.fixture(scope="module")
def packed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, packed without interruption in one process."""
    out = tmp_path_factory.mktemp("packed") / "out"
    pack(open_source(str(images)), out, OPTIONS, jobs=1, progress=False)
    return out


def content(folder: Path) -> dict[str, bytes]:
    """Every file's bytes; the record's lines in any order, as shards finish."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: b"".join(sorted(data.splitlines())) if "json" in name else data for name, data in found.items()}


def shards(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*.tar"))}


def command(images: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "ssl_vit", "shards", "make", str(images), str(out), *COMMAND_OPTIONS]


def interrupted(source: Source, out: Path, left: int = 120, overwrite: bool = False) -> None:
    """Pack until the disk fails after so many images."""

    def read(item: Any) -> bytes:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(5, "Input/output error", str(item))
        return source.read(item)

    with pytest.raises(RunError, match=r"packing stopped: .*Input/output error.*run the same command again"):
        pack(replace(source, read=read), out, OPTIONS, jobs=1, progress=False, overwrite=overwrite)


def test_a_killed_packing_resumes_and_writes_no_shard_twice(
    images: Path, packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with subprocess.Popen(command(images, out), stderr=subprocess.DEVNULL) as running:
        while len(shards(out)) < 4:
            assert running.poll() is None
            time.sleep(0.005)
        workers = psutil.Process(running.pid).children(recursive=True)
        running.kill()
        _, alive = psutil.wait_procs(workers, timeout=45)
        assert not alive
    lines = {path.parent.name: path.read_text().splitlines()[1:] for path in out.rglob("packing.jsonl")}
    finished = {out / part / json.loads(line)["entry"]["file"] for part, found in lines.items() for line in found}
    before = {path: shards(out)[path] for path in finished}
    assert 2 <= len(before) < 15 and not list(out.rglob("info.json"))
    with pytest.raises(UserError, match="packing was not finished"):
        verify(out / "train")

    pack(open_source(str(images)), out, OPTIONS)
    assert f"{len(before)} of 15 shards are finished already" in capsys.readouterr().err
    assert before.items() <= shards(out).items()
    assert content(out) == content(packed)


def test_several_processes_write_the_same_bytes_and_a_repeated_command_nothing(
    images: Path, packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, source = tmp_path / "out", open_source(str(images))
    infos = pack(source, out, OPTIONS, jobs=3, progress=False)
    assert content(out) == content(packed)
    before = shards(out)
    assert pack(source, out, OPTIONS) == infos
    assert "15 of 15 shards are finished already" in capsys.readouterr().err
    assert shards(out) == before
    with pytest.raises(UserError, match=r"holds other shards \(different resize, seed\): pass --overwrite"):
        pack(source, out, OPTIONS.model_copy(update={"resize": 41, "seed": 1}))
    assert shards(out) == before
    pack(source, out, OPTIONS.model_copy(update={"resize": 41}), overwrite=True)
    assert stats(out / "train")["image_size"]["height"]["mean"] == 41


def test_damaged_shards_and_leftovers_are_written_again(images: Path, packed: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "out", open_source(str(images))
    interrupted(source, out)
    assert not list(out.rglob("*.tmp")) and not list(out.rglob("info.json"))
    one, two, *_ = shards(out)
    one.write_bytes(one.read_bytes()[:-1024])
    two.unlink()
    record = out / "train" / "packing.jsonl"
    record.write_bytes(record.read_bytes()[:-20] + "é".encode()[:1])
    for folder in ("train", "fold_0"):
        write(out / folder / "000099.tar.1_2.tmp", b"half")
    pack(source, out, OPTIONS)
    assert content(out) == content(packed)


def test_another_source_or_version_does_not_resume(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, copied = tmp_path / "out", tmp_path / "images"
    shutil.copytree(images, copied)
    interrupted(open_source(str(copied)), out)
    before = shards(out)
    interrupted(open_source(str(copied)), out, overwrite=True, left=50)  # the same packing: resumed, not replaced
    assert before and before.items() <= shards(out).items()
    (copied / "a" / "0.jpg").write_bytes((copied / "a" / "0.jpg").read_bytes() + b"more")
    with pytest.raises(UserError, match=r"\(different images\)"):
        pack(open_source(str(copied)), out, OPTIONS)
    (copied / "c").rename(copied / "d")
    with pytest.raises(UserError, match=r"\(different classes, images\)"):
        pack(open_source(str(copied)), out, OPTIONS)
    monkeypatch.setattr(packing.PIL, "__version__", "1.1.7")
    with pytest.raises(UserError, match="software"):
        pack(open_source(str(images)), out, OPTIONS)


def test_parts_of_two_packings_are_not_one(tmp_path: Path) -> None:
    """The test part of another holdout may hold images of this one's training part."""
    for number in range(20):
        write(tmp_path / "images" / "ab"[number % 2] / f"{number}.png", encoded("PNG", number))
    source, (one, other) = open_source(str(tmp_path / "images")), (tmp_path / "one", tmp_path / "other")
    for seed, out in enumerate((one, other)):
        pack(source, out, Options(holdout=0.2, seed=seed), progress=False)
    shutil.rmtree(one / "test")
    shutil.copytree(other / "test", one / "test")
    with pytest.raises(UserError, match=r"other shards \(different seed\)"):
        pack(source, one, Options(holdout=0.2), progress=False)


def test_an_overwriting_that_is_killed_leaves_an_unfinished_set(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = shutil.copytree(packed, tmp_path / "out")
    removed, unlink = list[str](), Path.unlink

    def killed(path: Path, missing_ok: bool = False) -> None:
        if len(removed) == 3:
            raise KeyboardInterrupt
        removed.append(path.name)
        unlink(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", killed)
        record.clear(out / "train", [out / "train"])
    assert removed[0] == "info.json" and removed[1].endswith(".tar")
    with pytest.raises(UserError, match="packing was not finished"):
        open_shards(str(out / "train"))


def test_two_at_once_are_refused(images: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".packing.lock"), pytest.raises(UserError, match="another process is packing"):
        pack(open_source(str(images)), tmp_path / "out", OPTIONS)


def test_the_unfinished_files_of_another_process_in_a_sub_folder_stay(images: Path, tmp_path: Path) -> None:
    sub = tmp_path / "out" / "train"
    sub.mkdir(parents=True)
    unfinished = sub / "000000.tar.1.tmp"
    unfinished.touch()
    with FileLock(sub / ".packing.lock"), pytest.raises(UserError, match="is not empty"):
        pack(open_source(str(images)), tmp_path / "out", OPTIONS)
    assert unfinished.exists()


def test_a_first_record_that_does_not_fit_leaves_nothing(
    images: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(RunError, match="No space left"):
        patch.setattr(record, "write_text", full)
        pack(open_source(str(images)), tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out" / "train").mkdir(parents=True)  # left by a kill
    pack(open_source(str(images)), tmp_path / "out", OPTIONS)
    assert content(tmp_path / "out") == content(packed)


def test_a_full_disk_stops_packing(images: Path, packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def little_space() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))

    full = subprocess.run(command(images, out), capture_output=True, text=True, check=False, preexec_fn=little_space)
    assert full.returncode == 1
    assert "packing stopped: " in full.stderr and "File too large" in full.stderr and "Traceback" not in full.stderr
    assert not list(out.rglob("*.tmp")) and not list(out.rglob("info.json"))
    pack(open_source(str(images)), out, OPTIONS)
    assert content(out) == content(packed)
