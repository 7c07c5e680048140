"""Data arguments that are not shards: packed once, in parts, resumed after a kill, removed when space is needed."""

from __future__ import annotations

import fcntl
import gzip
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer
from typing import Any

import pandas as pd
import pytest
from datasets import Dataset, DatasetDict

from ssl_vit.data import places
from ssl_vit.data.check import check_data
from ssl_vit.data.packing import cache, pack
from ssl_vit.data.packing.plan import Options
from ssl_vit.data.packing.sources import open_source
from ssl_vit.data.shards import open_shards
from ssl_vit.evaluators.labels import set_notes
from ssl_vit.interfaces import UserError
from tests.tars import packed, write_tar

from .pictures import encoded, write


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SSL_VIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_held", {})
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def class_folders(root: Path, classes: str = "ab", each: int = 10, first: int = 0) -> Path:
    for number, name in enumerate(classes):
        for n in range(each):
            write(root / name / f"{n}.png", encoded("PNG", first + 100 * number + n))
    return root


def keys(spec: str) -> list[tuple[str | None, bytes]]:
    """(file, label) of every sample."""
    shards, found = open_shards(spec), []
    for number in range(len(shards.urls)):
        file = shards.open(number)
        found += [
            (file.file_name(position), file.read(position).get("cls", b"")) for position in range(len(file.samples))
        ]
    return sorted(found, key=str)


def test_without_a_home_directory_the_cache_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache.cache() == tmp_path / "cache"
    monkeypatch.delenv("SSL_VIT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(UserError, match="SSL_VIT_CACHE"):
        cache.cache()


@pytest.mark.parametrize(("size", "noted"), [((500, 400), True), ((14, 10), False)])
def test_large_images_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: tuple[int, int], noted: bool
) -> None:
    for name in "ab":
        write(tmp_path / "photos" / name / "0.png", encoded("PNG", size=size))
    cache.folder_of("photos")
    assert ("photos: 0.6 MB per image" in capsys.readouterr().err) == noted


def test_class_folders_are_packed_once_and_held_out_by_class(
    tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class_folders(tmp_path / "pets")
    train, test = keys("pets#train"), keys("pets#test")
    assert len(train) == 16 and [label for _, label in test] == [b"0", b"0", b"1", b"1"]
    assert not {file for file, _ in train} & {file for file, _ in test}
    assert len({file for file, _ in train + test}) == 20 and ("a/0.png", b"0") in train + test
    shown = capsys.readouterr().err
    assert shown.count("packing 20 images") == 1 and "a fifth of each class is held out as pets#test" in shown
    assert open_shards("pets").samples == 20 and open_shards("imagefolder:pets").samples == 20
    assert len([path for path in own_cache.iterdir() if path.is_dir()]) == 2, "whole, and in two parts"


def test_a_changed_image_is_packed_again(tmp_path: Path) -> None:
    before = open_shards(str(class_folders(tmp_path / "pets"))).fingerprint
    file = tmp_path / "pets/a/0.png"
    data = file.read_bytes()
    file.write_bytes(data)
    os.utime(file, ns=(1, time.time_ns() + 10**9))
    assert open_shards("pets").fingerprint == before, "the same bytes: the same shards"
    changed = bytearray(data)
    changed[-20] ^= 1  # of the same size
    file.write_bytes(bytes(changed))
    os.utime(file, ns=(1, time.time_ns() + 2 * 10**9))
    assert open_shards("pets").fingerprint != before


def test_a_layout_with_splits_is_packed_at_once_with_one_list_of_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class_folders(tmp_path / "pets/train", "abc", 4)
    class_folders(tmp_path / "pets/val", "bc", 2, first=50)
    assert open_shards("pets#train").classes == open_shards("pets#test").classes == ("a", "b", "c")
    assert {label for _, label in keys("pets/val")} == {b"1", b"2"}, "a path into the layout means the split"
    assert open_shards("pets#val").urls == open_shards("pets#test").urls == open_shards("pets/val").urls
    assert capsys.readouterr().err.count("packing") == 1
    with pytest.raises(UserError, match=r"several parts; name one: pets#train, pets#val"):
        open_shards("pets")


def test_flat_folders_and_tables_are_data_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(5):
        write(tmp_path / f"flat/{n}.png", encoded("PNG", n))
    assert open_shards("flat").samples == 5 and not open_shards("flat").labeled
    assert (open_shards("flat#train").samples, open_shards("flat#test").samples) == (4, 1)
    assert "a fifth of the images is held out as flat#test" in capsys.readouterr().err
    rows = [{"image": {"bytes": encoded("PNG", n), "path": None}, "label": f"c{n % 2}"} for n in range(10)]
    pd.DataFrame(rows).to_parquet("table.parquet")
    assert open_shards("table.parquet").classes == ("c0", "c1")
    assert (open_shards("table.parquet#train").samples, open_shards("table.parquet#test").samples) == (8, 2)
    assert open_shards("digits#test").samples == 382
    Path("table.parquet").rename("UP.PARQUET")
    assert open_shards("UP.PARQUET").samples == 10


def test_a_source_of_your_own_is_data_too(tmp_path: Path) -> None:
    class_folders(tmp_path / "pets", each=1)
    place = "tests.example_package.ssl_vit_example.listed:labels.csv"
    Path("labels.csv").write_text("file,label\npets/a/0.png,ape\npets/b/0.png,bee\n")
    assert open_shards(place).classes == ("ape", "bee")
    Path("labels.csv").write_text("file,label\npets/a/0.png,ape\npets/b/0.png,\n")
    with pytest.raises(UserError, match=r"image pets/b/0.png has the label -1"):
        open_shards(place)
    with pytest.raises(UserError, match=r"listed:labels\.csv has no splits; omit split=test"):
        open_source(place, split="test")
    with pytest.raises(UserError, match=r"unknown source 'listed'; .*package\.module:PLACE"):
        open_shards("listed:labels.csv")
    with pytest.raises(UserError, match=r"source 'No_such\.module' cannot be imported"):
        open_shards("No_such.module:labels.csv")


def test_a_folder_of_images_that_is_named_so_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class_folders(tmp_path / "digits")
    write(tmp_path / "digits/a/stray.parquet", b"")
    for _ in range(2):
        assert open_shards("imagefolder:digits").samples == 20
    assert capsys.readouterr().err.count("note: digits: ignored 1 files") == 1


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("pest", ["pest", "no such"]),
        ("pest#train", ["pest", "no such"]),
        ("pets#dev", ["pets has no part dev", "pets#train"]),
        ("shards#test", ["shards", "test/"]),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, spec: str, parts: list[str]) -> None:
    class_folders(tmp_path / "pets", each=2)
    write(tmp_path / "shards/train/info.json", b'{"shards": []}')
    with pytest.raises(UserError) as error:
        open_shards(spec)
    assert all(part in str(error.value) for part in parts)


def test_images_that_change_places_are_packed_again(tmp_path: Path) -> None:
    for name, number in (("a/0", 0), ("a/1", 1), ("b/0", 2), ("b/1", 3)):
        write(tmp_path / f"pets/{name}.bmp", encoded("BMP", number))  # all of one size
    before = open_shards("pets").fingerprint
    (tmp_path / "pets/a/0.bmp").rename(tmp_path / "moved")
    (tmp_path / "pets/b/1.bmp").rename(tmp_path / "pets/a/0.bmp")
    (tmp_path / "moved").rename(tmp_path / "pets/b/1.bmp")
    assert open_shards("pets").fingerprint != before


def test_shards_beside_shards_in_sub_folders_are_parts(tmp_path: Path) -> None:
    for number, out in enumerate(("shards", "shards/test")):
        source = open_source(str(class_folders(tmp_path / f"pets{number}", each=3, first=10 * number)))
        pack(source, tmp_path / out, Options(shards=1), progress=False)
    assert places.parts_of("shards") == ["shards", "shards#test"]
    tar = tmp_path / "shards/000000.tar"
    tar.write_bytes(tar.read_bytes()[:2000])
    assert "shards" in set(check_data("shards", progress=False).bad_files["part"])


def test_part_of_an_unfinished_set_is_refused(tmp_path: Path) -> None:
    packed(class_folders(tmp_path / "pets"), tmp_path / "shards", shards=4)
    (tmp_path / "shards/info.json").unlink()
    for spec in ("shards", "shards/*.tar", "shards/00000{0..1}.tar"):
        with pytest.raises(UserError, match="packing was not finished"):
            open_shards(spec)


def test_shards_are_read_where_they_are(few_digits: Path, own_cache: Path) -> None:
    assert open_shards(f"{few_digits}#train").urls == open_shards(f"{few_digits}/train").urls
    assert open_shards(f"{few_digits}/test").labeled
    assert not own_cache.exists()


def test_tars_alone_are_parts_but_no_archive_beside_images(tmp_path: Path) -> None:
    class_folders(tmp_path / "flat", each=5)
    for place in ("flat", "pets"):
        write_tar(tmp_path / f"{place}/original.tar", {"0.png": encoded("PNG", 0)})
    assert open_shards("flat").classes == ("a", "b")
    write_tar(tmp_path / "unlabeled/0.tar", {f"{n}.png": encoded("PNG", n) for n in range(3)})
    write(tmp_path / "unlabeled/._0.png", b"")  # a side file of macOS
    assert open_shards("unlabeled").samples == 3
    for n, samples in ((0, 3), (1, 2)):  # one image beside a tar of images may be a preview
        write(tmp_path / f"unlabeled/{n}.png", encoded("PNG", n))
        assert open_shards("unlabeled").samples == samples
    write_tar(tmp_path / "logged/0.tar", {"0.png": encoded("PNG", 0)})
    write(tmp_path / "logged/logs/events", b"")
    assert open_shards("logged").samples == 1, "a folder without images hides no shards"
    for part in ("train", "val"):
        write_tar(tmp_path / f"tars/{part}/0.tar", {"0.png": encoded("PNG", 0)})
        class_folders(tmp_path / f"pets/{part}", each=2)
        for place in (part, f"{part}/a"):
            write_tar(tmp_path / f"pets/{place}/archive.tar", {})
    assert [open_shards(f"tars#{part}").samples for part in ("train", "test")] == [1, 1]
    assert [open_shards(f"pets#{part}").samples for part in ("train", "test")] == [4, 4]


def test_the_set_that_was_packed_first_stays_where_it_was_used_last(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "three"):
        class_folders(tmp_path / name, each=8, first=1000 * len(name))
    for used, name in enumerate(("one", "two"), 10**9):
        open_shards(name)
        os.utime(next(own_cache.glob(f"{name}-*")), (used, used))
    cache._held.clear()  # as in another process
    open_shards("one")
    cache._held.clear()
    tars = sum(file.stat().st_size for file in own_cache.rglob("*.tar"))
    monkeypatch.setenv("SSL_VIT_CACHE_GB", str((tars + 1000) / 2**30))
    open_shards("three")
    names = {path.name.split("-")[0] for path in own_cache.iterdir() if path.is_dir()}
    assert names == {"one", "three"}


def test_the_least_recently_used_set_goes_but_none_that_a_process_uses(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "three"):
        class_folders(tmp_path / name, each=8, first=1000 * len(name))
    size = sum(file.stat().st_size for file in (tmp_path / "one").rglob("*.png"))
    open_shards("one"), open_shards("two")
    tars = sum(file.stat().st_size for file in own_cache.rglob("*.tar"))
    cache._held.clear()  # as in another process
    open_shards("two")
    monkeypatch.setenv("SSL_VIT_CACHE_GB", str((tars + size / 2) / 2**30))
    open_shards("three")
    names = {path.name.split("-")[0] for path in own_cache.iterdir() if path.is_dir()}
    assert names == {"two", "three"}
    monkeypatch.setenv("SSL_VIT_CACHE_GB", str(size / 2**30))
    with pytest.raises(UserError, match=r"one: .* do not fit .*SSL_VIT_CACHE_GB"):
        open_shards("one")


def test_a_set_that_another_process_is_packing_counts_with_its_whole_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between its parts."""
    for name in ("one/train", "one/test", "two"):
        class_folders(tmp_path / name, each=8, first=1000 * len(name))
    pack_part, seen = cache.pack, list[Path]()

    def pack(source: Any, folder: Path, *arguments: Any, **options: Any) -> None:
        if folder.parent.name.startswith("one"):
            seen.append(folder)
            with pytest.raises(UserError, match=r"two: .* do not fit"):
                open_shards("two")
        pack_part(source, folder, *arguments, **options)

    monkeypatch.setattr(cache, "pack", pack)
    monkeypatch.setenv("SSL_VIT_CACHE_GB", str(150_000 / 2**30))
    assert open_shards("one#train").samples == 16 and len(seen) == 2


def test_what_could_not_be_packed_takes_no_room(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        class_folders(tmp_path / name, each=8, first=1000 * len(name))
    for number in range(16):
        write(tmp_path / f"broken/{number % 2}/{number}.png", bytes(1000))
    open_shards("one")
    tars = sum(file.stat().st_size for file in own_cache.rglob("*.tar"))
    cache._held.clear()  # as in another process
    monkeypatch.setenv("SSL_VIT_CACHE_GB", str(2.6 * tars / 2**30))
    with pytest.raises(UserError):
        open_shards("broken")
    assert not [*own_cache.glob("broken-*")]
    open_shards("two")
    assert [*own_cache.glob("one-*")]


def test_other_folders_stay_and_nothing_goes_for_what_can_never_fit(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thesis = own_cache / "thesis/0.tar"
    write(thesis, bytes(4096))
    for name in ("one", "two"):
        class_folders(tmp_path / name, each=8, first=1000 * len(name))
    open_shards("one")
    (one,) = own_cache.glob("one-*")
    cache._held.clear()  # as in another process
    monkeypatch.setenv("SSL_VIT_CACHE_GB", "0")
    with pytest.raises(UserError, match="do not fit"):
        open_shards("two")
    assert one.exists()
    monkeypatch.setenv("SSL_VIT_CACHE_GB", str(sum(file.stat().st_size + 1 for file in one.rglob("*.tar")) / 2**30))
    open_shards("two")
    assert thesis.exists() and not one.exists()
    monkeypatch.setenv("SSL_VIT_CACHE_GB", "much")
    with pytest.raises(UserError, match="SSL_VIT_CACHE_GB=much is not a number"):
        open_shards("one")


@pytest.mark.parametrize("removed", ["*.tar", "packing.jsonl"])
def test_a_set_that_was_half_removed_is_packed_again(
    removed: str, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        class_folders(tmp_path / name, each=8, first=1000 * len(name))
    before = keys("one")
    (one,) = own_cache.glob("one-*")
    found = len(list(one.rglob(removed)))
    cache._held.clear()  # as in another process
    monkeypatch.setenv("SSL_VIT_CACHE_GB", str(sum(file.stat().st_size + 1 for file in one.rglob("*.tar")) / 2**30))

    def killed(folder: Path) -> None:
        next(folder.rglob(removed)).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cache.shutil, "rmtree", killed)
        open_shards("two")
    assert one.exists() and len(list(one.rglob(removed))) == found - 1
    assert keys("one") == before


def test_a_changed_table_of_images_of_the_same_sizes_is_packed_again(tmp_path: Path) -> None:
    found = set()
    for number in range(2):
        pd.DataFrame({"image": [encoded("BMP", number)]}).to_parquet(tmp_path / "t.parquet")
        os.utime(tmp_path / "t.parquet", ns=(10**18, 10**18 + number * 10**9))
        found.add(open_shards("t.parquet").open(0).read(0)["png"])
    assert len(found) == 2


def test_names_that_no_file_system_takes_are_named(tmp_path: Path) -> None:
    for spec in ("~nosuchuser/x", "~nosuchuser/x#train", "x" * 300, f"{'x' * 300}#train"):
        with pytest.raises(UserError, match="no such"):
            open_shards(spec)


def test_the_folder_above_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class_folders(tmp_path / "downloads" / "pets")
    (tmp_path / "downloads" / "other").mkdir()
    pd.DataFrame({"image": [encoded("PNG", 0)]}).to_parquet(tmp_path / "downloads" / "other" / "table.parquet")
    asked = []
    original = cache.list_splits

    def listed(spec: str) -> list[str]:
        asked.append(spec)
        return original(spec)

    monkeypatch.setattr(cache, "list_splits", listed)
    assert open_shards("downloads/pets").samples == 20
    assert asked and not [spec for spec in asked if spec.endswith("downloads")]


def test_an_only_split_that_is_named_is_whole(tmp_path: Path) -> None:
    class_folders(tmp_path / "only" / "train")
    assert open_shards("only/train").samples == 20
    assert (open_shards("only#train").samples, open_shards("only#test").samples) == (16, 4)
    found = check_data("only", progress=False)
    assert found.class_counts.sum().tolist() == [16, 4], "both parts are read"
    pd.DataFrame({"image": [encoded("PNG", n) for n in range(4)], "label": [0, 1] * 2}).to_parquet("a.parquet")
    DatasetDict({"validation": Dataset.from_parquet("a.parquet")}).save_to_disk("saved")
    assert (
        open_shards("saved#validation").samples
        == open_shards("saved#test").samples
        == open_shards("saved").samples
        == 4
    )
    with pytest.raises(UserError, match="saved has no part train; name one: saved#validation"):
        open_shards("saved#train")  # which would be images to test on
    assert check_data("saved", progress=False).class_counts.sum().tolist() == [4]


@pytest.mark.parametrize("file", ["info.json", "about.json", "a/info.json", "._a.tar"])
def test_a_file_of_that_name_makes_no_shards(tmp_path: Path, file: str) -> None:
    class_folders(tmp_path / "photos")
    (tmp_path / "photos" / file).write_text('{"author": "me", "splits": 2}')
    assert open_shards("photos").samples == 20


def test_a_part_of_a_part_is_refused(tmp_path: Path) -> None:
    class_folders(tmp_path / "photos")
    with pytest.raises(UserError, match="photos#test is one part; give photos, which has both"):
        open_shards("photos#test#train")  # as `data=photos#test` names it


def test_names_may_hold_the_sign_that_joins_those_of_a_mixture(tmp_path: Path) -> None:
    class_folders(tmp_path / "cats + dogs"), class_folders(tmp_path / "more", first=1000)
    both = open_shards(["cats + dogs#train", "more"])
    assert both.places == ("cats + dogs#train", "more") and len(both.sources) == 2
    assert any("in common" in note for note in set_notes(both, open_shards("cats + dogs")))


def test_a_set_that_another_process_holds_is_waited_for_and_said_so(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class_folders(tmp_path / "one", each=2)
    open_shards("one")
    (one,) = own_cache.glob("one-*")
    other = cache._held.pop(one)  # as of another process
    shutil.rmtree(one)
    Timer(0.5, other.close).start()
    assert open_shards("one").samples == 4
    assert f"waiting for another process packing or using {one}" in capsys.readouterr().err


def test_packing_by_another_process_is_waited_for_and_said_so(
    tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class_folders(tmp_path / "one", each=2)
    open_shards("one")
    (one,) = own_cache.glob("one-*")
    cache._held.pop(one).close()
    begun = f"import fcntl; f = open({str(own_cache / f'.{one.name}.lock')!r}, 'a+'); fcntl.flock(f, fcntl.LOCK_EX)"
    with subprocess.Popen([sys.executable, "-c", f"{begun}; print(flush=True); input()"], stdin=-1, stdout=-1) as other:
        assert other.stdin and other.stdout and other.stdout.readline()
        Timer(0.5, other.stdin.close).start()
        assert open_shards("one").samples == 4
    assert f"waiting for another process packing {one}" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_packing_resumes_where_a_notebook_keeps_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class_folders(tmp_path / "one", each=2)
    monkeypatch.setenv("SSL_VIT_CACHE_GB", "1e-9")
    with pytest.raises(UserError, match="do not fit") as kept:
        open_shards("one")
    monkeypatch.delenv("SSL_VIT_CACHE_GB")
    assert open_shards("one").samples == 4 and kept.tb is not None, "it does not wait for the lock of the traceback"


def test_a_set_of_another_user_is_not_removed(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        class_folders(tmp_path / name, each=8, first=1000 * len(name))
    open_shards("one")
    (one,) = own_cache.glob("one-*")
    cache._held.clear()  # as in another process
    monkeypatch.setenv("SSL_VIT_CACHE_GB", str(sum(file.stat().st_size + 1 for file in one.rglob("*.tar")) / 2**30))

    def refused(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name.startswith(".one-"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    opened = Path.open
    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(UserError, match="do not fit"):
        open_shards("two")
    assert one.exists()


def test_a_process_that_lost_the_race_to_pack_does_not_wait_for_the_other_to_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_folders(tmp_path / "one", each=2)
    begun = "from ssl_vit.data.shards import open_shards; open_shards('one'); print('packed', flush=True); input()"
    others, flock = list[subprocess.Popen[str]](), fcntl.flock
    timer = Timer(20, lambda: others[0].kill())

    def lose(lock: Any, operation: int) -> None:
        if operation == fcntl.LOCK_EX | fcntl.LOCK_NB and not others:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            others.append(subprocess.Popen([sys.executable, "-c", begun], **pipes))  # type: ignore[call-overload]
            assert others[0].stdout.readline() == "packed\n"  # type: ignore[union-attr]
            timer.start()
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", lose)
    assert open_shards("one").samples == 4
    assert others[0].poll() is None, "it still uses the set"
    timer.cancel()
    others[0].communicate("\n")


def test_two_folders_of_one_name_and_images_of_one_size_and_time_are_two_sets(tmp_path: Path) -> None:
    found = set()
    for number, name in enumerate(("red", "blue")):
        file = tmp_path / name / "images" / "a.png"
        write(file, encoded("BMP", number))
        os.utime(file, ns=(10**18, 10**18))
        found.add(open_shards(f"{name}/images").open(0).read(0)["png"])
    assert len(found) == 2


def test_a_cache_inside_the_images_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class_folders(tmp_path / "one", each=2)
    monkeypatch.setenv("SSL_VIT_CACHE", str(tmp_path / "one" / "cache"))
    with pytest.raises(UserError, match="lies inside one"):
        open_shards("one")
    assert not (tmp_path / "one" / "cache").exists()


def test_a_folder_of_compressed_shards_is_no_folder_of_images(tmp_path: Path) -> None:
    write(tmp_path / "set" / "0.tar.gz", gzip.compress(bytes(2048)))
    with pytest.raises(UserError, match="decompress"):
        open_shards("set")
