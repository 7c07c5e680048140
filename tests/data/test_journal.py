"""Packing that is interrupted, split over machines or run on several processes writes the same bytes."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from filelock import FileLock
from PIL import Image

from ssl_vit.data import packing
from ssl_vit.data.packing import merge, pack
from ssl_vit.data.packing.sources import open_source
from ssl_vit.data.packing.sources.base import Source
from ssl_vit.data.verify import verify
from ssl_vit.interfaces import RunError, UserError

OPTIONS: dict[str, Any] = {"shards": 12, "resize": 40, "holdout": 0.2, "order": "stratified", "progress": False}
COMMAND_OPTIONS = ["--shards", "12", "--resize", "40", "--holdout", "0.2", "--order", "stratified"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of 100 noisy JPEGs of 200 x 150 pixels, one of them broken."""
    root = tmp_path_factory.mktemp("source") / "images"
    rng = np.random.default_rng(0)
    for number in range(300):
        path = root / "abc"[number % 3] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (150, 200, 3), dtype=np.uint8)).save(path)
    (root / "b" / "4.jpg").write_bytes((root / "b" / "4.jpg").read_bytes()[:5000])
    return root


@pytest.fixture(scope="module")
def packed(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, packed at one go in one process."""
    out = tmp_path_factory.mktemp("packed") / "out"
    info = pack(open_source(str(images)), out, jobs=1, **OPTIONS)
    assert [item["file"] for item in info["dropped"]] == ["b/4.jpg"]
    assert info["train"]["samples"] + info["test"]["samples"] == 299
    return out


def content(folder: Path) -> dict[str, bytes]:
    """Every file's bytes, but for locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.entry.json"))


def command(images: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "ssl_vit", "shards", "make", str(images), str(out), *COMMAND_OPTIONS, *more]


def test_any_number_of_processes_writes_the_same_bytes(images: Path, packed: Path, tmp_path: Path) -> None:
    source = open_source(str(images))
    info = pack(source, tmp_path / "out", jobs=3, **OPTIONS)
    assert content(tmp_path / "out") == content(packed)
    assert info["train"]["content_hash"] == json.loads((packed / "train/info.json").read_text())["content_hash"]
    assert verify(packed / "train") == verify(packed / "test") == []


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_killed_packing_goes_on_and_redoes_no_shard(
    images: Path, packed: Path, tmp_path: Path, sign: signal.Signals
) -> None:
    out = tmp_path / "out"
    with subprocess.Popen(command(images, out, "--jobs", "2"), stderr=subprocess.PIPE, text=True) as running:
        while len(entries(out)) < 3:
            assert running.poll() is None
            time.sleep(0.005)
        workers = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(sign)
        assert running.wait(15) != 0
        assert running.stderr is not None
        if sign == signal.SIGTERM:
            assert "run the same command to resume" in running.stderr.read()
    assert not psutil.wait_procs(workers, timeout=15)[1]
    done = {path: path.with_name(path.name[:6] + ".tar").stat() for path in entries(out)}
    assert 3 <= len(done) < 15
    assert not list(out.rglob("info.json"))
    with pytest.raises(UserError, match="packing was not finished"):
        verify(entries(out)[0].parent)

    again = subprocess.run(command(images, out), capture_output=True, text=True, check=True)
    assert f"{len(done)} of 15 shards are there already" in again.stderr
    for path, before in done.items():
        after = path.with_name(path.name[:6] + ".tar").stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert content(out) == content(packed)


@dataclass
class FailsAfter:
    """A reader whose disk goes away."""

    read: Any
    left: int

    def __call__(self, item: Any) -> tuple[str, bytes]:
        self.left -= 1
        if self.left < 0:
            raise OSError(5, "Input/output error", str(item))
        return self.read(item)  # type: ignore[no-any-return]


def interrupted(source: Source, out: Path, left: int = 150, **options: Any) -> None:
    with pytest.raises(RunError, match=r"packing stopped: .*Input/output error.*run the same command again"):
        pack(replace(source, read=FailsAfter(source.read, left)), out, **(OPTIONS | options))


def test_an_error_leaves_whole_shards_and_nothing_half_written(images: Path, packed: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "out", open_source(str(images))
    interrupted(source, out)
    left = [name.rpartition("/")[2] for name in content(out)]
    assert all(re.fullmatch(r"\d{6}\.(tar|entry\.json)|unfinished\.json", name) for name in left)
    assert 5 < len(entries(out)) < 10
    pack(source, out, **OPTIONS)
    assert content(out) == content(packed)


def test_damaged_shards_and_leftovers_are_written_again(images: Path, packed: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "out", open_source(str(images))
    interrupted(source, out)
    one, two, three = (path.with_name(path.name[:6] + ".tar") for path in entries(out)[:3])
    one.write_bytes(one.read_bytes()[:-1024])
    two.unlink()
    three.with_suffix(".entry.json").write_text('{"plan"')
    leftover = out / "train" / "000099.tar.1of1.tmp"
    leftover.write_bytes(b"half")

    def read(item: str) -> tuple[str, bytes]:
        assert not leftover.exists()  # its room is wanted
        return source.read(item)  # type: ignore[no-any-return]

    pack(replace(source, read=read), out, **OPTIONS)
    assert content(out) == content(packed)


def test_an_unfinished_packing_of_something_else_is_refused(images: Path, packed: Path, tmp_path: Path) -> None:
    out, copied = tmp_path / "out", tmp_path / "images"
    shutil.copytree(images, copied)
    interrupted(open_source(str(copied)), out)
    with pytest.raises(UserError, match=r"unfinished packing that differs in: resize, seed\. .*pass --overwrite"):
        pack(open_source(str(copied)), out, **(OPTIONS | {"resize": 41, "seed": 1}))
    grown = copied / "a" / "0.jpg"
    grown.write_bytes(grown.read_bytes() + b"more")
    with pytest.raises(UserError, match=r"differs in: images\. "):
        pack(open_source(str(copied)), out, **OPTIONS)
    (copied / "c").rename(copied / "d")
    with pytest.raises(UserError, match=r"differs in: images, classes\. "):
        pack(open_source(str(copied)), out, **OPTIONS)
    shutil.rmtree(copied)
    shutil.copytree(images, copied)
    first = entries(out)[0]
    before = first.stat().st_ino
    interrupted(open_source(str(copied)), out, overwrite=True, left=50)  # the same packing goes on, it is not replaced
    assert first.stat().st_ino == before
    pack(open_source(str(copied)), out, **(OPTIONS | {"resize": 41}), overwrite=True)
    info = json.loads((out / "train" / "info.json").read_text())
    assert info["mean_image_size"]["height"] == 41
    assert not entries(out)


def test_parts_in_one_folder_and_apart_give_the_same_bytes(images: Path, packed: Path, tmp_path: Path) -> None:
    source, together = open_source(str(images)), tmp_path / "together"
    shown = [pack(source, together, part=f"{number}/3", **OPTIONS) for number in (2, 1)]
    assert [part["shards"] for part in shown] == [5, 5]
    with pytest.raises(UserError, match=r"5 of 15 shards are missing: train/000002.tar, .*\(part 3/3\); pack them"):
        merge(together)
    pack(source, tmp_path / "apart", part="3/3", **OPTIONS)
    assert len(list((tmp_path / "apart").rglob("*.tar"))) == 5
    shutil.copytree(tmp_path / "apart", together, dirs_exist_ok=True)
    info = merge(together)
    assert content(together) == content(packed)
    assert info["train"] == json.loads((packed / "train" / "info.json").read_text())
    assert [item["file"] for item in info["dropped"]] == ["b/4.jpg"]
    with pytest.raises(UserError, match="is complete already"):
        merge(together)


def test_a_part_that_is_repeated_does_nothing_and_make_completes_parts(
    images: Path, packed: Path, tmp_path: Path
) -> None:
    source, out = open_source(str(images)), tmp_path / "out"
    first = pack(source, out, part="1/2", **OPTIONS)
    before = content(out)
    assert pack(source, out, part="1/2", **OPTIONS) == first
    assert content(out) == before
    pack(source, out, **OPTIONS)
    assert content(out) == content(packed)


def test_parts_may_start_at_the_same_moment(images: Path, packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    running = [subprocess.Popen(command(images, out, "--part", f"{part}/3", "--jobs", "1")) for part in (1, 2, 3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    merge(out)
    assert content(out) == content(packed)


def test_other_versions_do_not_go_on_with_it(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(open_source(str(images)), tmp_path / "out")
    monkeypatch.setattr(packing.PIL, "__version__", "1.1.7")
    with pytest.raises(UserError, match=r"differs in: software\."):
        pack(open_source(str(images)), tmp_path / "out", **OPTIONS)


def test_more_parts_than_shards(tmp_path: Path) -> None:
    source = replace(open_source("digits"), items=range(9), labels=np.arange(9))
    counts = [pack(source, tmp_path / "out", shards=2, part=f"{n}/4", progress=False)["shards"] for n in range(1, 5)]
    assert counts == [1, 1, 0, 0]
    assert merge(tmp_path / "out")["samples"] == 9


def test_parts_of_different_plans_are_not_merged(images: Path, tmp_path: Path) -> None:
    source = open_source(str(images))
    pack(source, tmp_path / "one", part="1/2", **OPTIONS)
    pack(source, tmp_path / "two", part="2/2", **(OPTIONS | {"seed": 3}))
    shutil.copytree(tmp_path / "two", tmp_path / "one", dirs_exist_ok=True)
    with pytest.raises(UserError, match=r"000000.tar belongs to another packing than unfinished.json"):
        merge(tmp_path / "one")
    with pytest.raises(UserError, match=r"another packing"):
        pack(source, tmp_path / "one", part="1/2", **(OPTIONS | {"seed": 3}))


def test_merge_of_what_is_no_packing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no unfinished\.json: name the folder"):
        merge(tmp_path)
    with pytest.raises(UserError, match=r"has no unfinished\.json"):
        merge(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "unfinished.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read; delete the folder"):
        merge(tmp_path)


def test_killed_while_tidying_up(images: Path, packed: Path, tmp_path: Path) -> None:
    source, out = open_source(str(images)), tmp_path / "out"
    pack(source, out, part="1/1", **OPTIONS)
    for part in ("train", "test"):
        shutil.copy(packed / part / "info.json", out / part)
    for path in entries(out)[:4]:
        path.unlink()
    before = (out / "train" / "000000.tar").stat().st_ino
    info = pack(source, out, **OPTIONS)
    assert info["train"] == json.loads((packed / "train" / "info.json").read_text())
    assert content(out) == content(packed)
    assert (out / "train" / "000000.tar").stat().st_ino == before


def test_two_at_once_are_refused(images: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (
        FileLock(tmp_path / "out" / ".packing-1of2.lock"),
        pytest.raises(UserError, match="another process is packing into this folder"),
    ):
        pack(open_source(str(images)), tmp_path / "out", part="1/2", **OPTIONS)
    assert pack(open_source(str(images)), tmp_path / "out", part="1/2", **OPTIONS)["shards"] == 8


def test_a_full_disk_stops_packing_and_room_lets_it_go_on(images: Path, packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))

    full = subprocess.run(
        command(images, out, "--jobs", "2"), capture_output=True, text=True, check=False, preexec_fn=little_room
    )
    assert full.returncode == 1
    assert re.fullmatch(
        r"error: .*packing stopped: .*File too large.*run the same command again to go on\n", full.stderr
    )
    assert not list(out.rglob("*.tmp")) and not list(out.rglob("info.json"))
    subprocess.run(command(images, out), capture_output=True, check=True)
    assert content(out) == content(packed)
