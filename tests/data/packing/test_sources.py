from __future__ import annotations

import io
import os
import shutil
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from ssl_vit.data.packing.plan import Options, plan_shards
from ssl_vit.data.packing.sources import digits, open_source
from ssl_vit.data.packing.sources.base import Source
from ssl_vit.data.shards import open_shards
from ssl_vit.interfaces import BadSample, RunError, UserError
from tests.tars import packed

from .pictures import all_images, encoded, write


def test_class_folders_sorted_nested_and_bit_for_bit(tmp_path: Path) -> None:
    first = write(tmp_path / "zebra" / "1.JPG", encoded("JPEG", 1))
    nested = write(tmp_path / "ape" / "deep" / "er" / "2.webp", encoded("WEBP", 2))
    third = write(tmp_path / "ape" / "x.y.png", encoded("PNG", 3))
    write(tmp_path / "ape" / "._x.jpg", b"resource fork")
    source = open_source(str(tmp_path))
    assert source.classes == ["ape", "zebra"]
    assert all_images(source) == [nested, third, first]
    assert list(source.items) == ["ape/deep/er/2.webp", "ape/x.y.png", "zebra/1.JPG"]
    assert source.labels is not None
    assert source.labels.tolist() == [0, 0, 1]


def test_flat_folder_is_unlabeled_and_counts_other_files(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.png", encoded("PNG", number))
    write(tmp_path / "notes.txt", b"hello")
    write(tmp_path / "more.csv", b"1,2")
    with pytest.warns(UserWarning, match=r"ignored 2 files .*1 \.txt"):
        source = open_source(str(tmp_path))
    assert (source.classes, source.labels, source.count) == (None, None, 3)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"cat/1.png", "dog/readme.txt"}, r"dog: this class folder holds no images \(only 1 .txt\)"),
        ({"cat/1.png", "stray.png"}, r"both images \(stray\.png\) and sub-folders"),
        ({"readme.txt"}, "holds no images"),
        ({os.fsdecode(b"b\xe4r/1.png")}, "not UTF-8; rename it"),
        ({"train/a/1.png", "train/b/1.png", "test/a/1.png", "docs/1.png"}, r"other folders \(docs\): .* --split"),
        ({"Train/a/1.png", "Test/a/1.png"}, r"holds splits \(Test, Train\)"),
        ({"val/a/1.png", "test/a/1.png"}, r"holds splits \(test, val\)"),
        ({"caf\u00e9/1.png", "cafe\u0301/1.png"}, "NFC"),
    ],
)
def test_folders_that_would_give_other_classes_are_refused(tmp_path: Path, files: set[str], message: str) -> None:
    for file in files:
        write(tmp_path / file, encoded("PNG"))
    with pytest.raises(UserError, match=message):
        open_source(str(tmp_path))


def test_a_broken_link_to_a_class_folder_is_refused(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write(tmp_path / "pets" / name / "1.png", encoded("PNG"))
    write(tmp_path / "parts/test/cat/1.png", encoded("PNG"))
    shutil.copytree(tmp_path / "pets", tmp_path / "parts/train")
    for folder in ("pets", "parts/train"):
        (tmp_path / folder / "St. Bernard").symlink_to(tmp_path / "not_mounted")
    for place, split in (("pets", None), ("parts", "train"), ("parts", "test")):
        with pytest.raises(UserError, match="Bernard: broken link"):
            open_source(str(tmp_path / place), split=split)


def test_a_dataset_whose_name_is_not_utf8_can_be_packed_and_read(tmp_path: Path) -> None:
    root = tmp_path / os.fsdecode(b"caf\xe9")
    write(root / "cat/1.png", encoded("PNG"))
    packed(root, tmp_path / "shards")
    assert open_shards(str(tmp_path / "shards")).samples == 1


def test_split_sub_folders_share_their_class_indices(tmp_path: Path) -> None:
    for file in ("train/ape/1", "train/bee/1", "train/cow/1", "val/bee/1", "val/cow/1"):
        write(tmp_path / f"{file}.png", encoded("PNG"))
    source = open_source(str(tmp_path), split="val")
    assert source.classes == ["ape", "bee", "cow"]
    assert list(source.items) == ["bee/1.png", "cow/1.png"]
    assert source.labels is not None
    assert source.labels.tolist() == [1, 2]
    assert open_source(str(tmp_path), split="validation").count == 2
    assert open_source(str(tmp_path), split="train").count == 3
    assert source.name == f"{tmp_path.name}/val (folder)"
    with pytest.raises(UserError, match="choose split from: train, val"):
        open_source(str(tmp_path))
    for folder in (tmp_path, tmp_path / "train"):
        with pytest.raises(UserError, match=r"no splits?.*test"):
            open_source(str(folder), split="test")


def test_what_cannot_be_read_is_the_images_fault_or_the_disks(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a" / "1.png", encoded("PNG"))
    write(tmp_path / "in" / "a" / "2.png", encoded("PNG"))
    (tmp_path / "in" / "a" / "link.png").symlink_to("nowhere")
    source = open_source(str(tmp_path / "in"))
    assert [source.items[index] for index in range(source.count)] == ["a/1.png", "a/2.png", "a/link.png"]
    (tmp_path / "in" / "a" / "2.png").unlink()
    for name in ("a/2.png", "a/link.png"):
        with pytest.raises(BadSample, match="No such file"):
            source.read(name)
    (tmp_path / "in").rename(tmp_path / "away")  # as a network disk that went away: all images would seem broken
    with pytest.raises(RunError, match=r"a/1\.png: cannot be read"):
        source.read("a/1.png")


def test_pipes_and_links_in_circles_are_ignored(tmp_path: Path) -> None:
    write(tmp_path / "a" / "1.png", encoded("PNG"))
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "a" / "pipe.jpg")
    with pytest.warns(UserWarning, match="ignored 2 files"):
        assert open_source(str(tmp_path)).count == 1


def test_an_unreadable_folder_is_refused_and_an_unreadable_file_is_broken(unprivileged: Path) -> None:
    for name in ("cat", "dog", "cow/calf"):
        write(unprivileged / "in" / name / "1.png", encoded("PNG"))
    source = open_source(str(unprivileged / "in"))
    (unprivileged / "in" / "cat" / "1.png").chmod(0)
    with pytest.raises(BadSample, match="Permission denied"):
        source.read("cat/1.png")
    for locked in ("cow/calf", "dog", ""):
        (unprivileged / "in" / locked).chmod(0)
        with pytest.raises(UserError, match=f"{locked}: cannot be listed: Permission denied"):
            open_source(str(unprivileged / "in"))
        (unprivileged / "in" / locked).chmod(0o755)


def test_the_listing_tells_names_and_sizes_apart_but_not_times(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name / "1.png", encoded("PNG", 1))
    listing = open_source(str(tmp_path)).listing
    os.utime(tmp_path / "a" / "1.png", (1, 1))
    assert open_source(str(tmp_path)).listing == listing
    write(tmp_path / "a" / "1.png", encoded("PNG", 1) + b"x")
    longer = open_source(str(tmp_path)).listing
    (tmp_path / "a" / "1.png").rename(tmp_path / "a" / "2.png")
    renamed = open_source(str(tmp_path)).listing
    assert len({listing, longer, renamed}) == 3


@pytest.mark.parametrize(("split", "count", "first"), [("train", 1415, 0), ("test", 382, 1415), (None, 1797, 0)])
def test_digits(split: str | None, count: int, first: int) -> None:
    source = open_source("digits", split=split)
    known = load_digits()
    assert (source.count, source.classes) == (count, [str(digit) for digit in range(10)])
    assert source.license is not None
    assert "CC BY 4.0" in source.license
    for index in (0, count - 1):
        assert source.items[index] == first + index
        image = Image.open(io.BytesIO(source.read(source.items[index])))
        assert (image.mode, image.format) == ("L", "PNG")
        np.testing.assert_array_equal(np.asarray(image), np.round(known.images[first + index] * 255 / 16))
        assert source.labels is not None
        assert source.labels[index] == known.target[first + index]


def test_forms_of_the_digits_begin_where_their_labels_do() -> None:
    """All forms ask for the same 130 digits in the same order: each has them but for a few that are missing, and one
    that has another label. Hence the labels of a form repeat those of the first one."""
    labels = load_digits().target
    asked = labels[: digits.FORMS[1]].tolist()
    assert len(asked) == 130 and digits.FORMS[0] == 0
    for first, last in pairwise([*digits.FORMS, len(labels)]):
        form = labels[first:last].tolist()
        alike = SequenceMatcher(None, asked, form, autojunk=False).get_matching_blocks()
        assert sum(block.size for block in alike) >= len(form) - 1 >= 121, first
        assert form[:9] in (asked[:9], asked[1:10]), "it begins with the digits in order, and ends with others"


def test_parts_of_the_digits_are_whole_forms() -> None:
    train, test, every = (open_source("digits", split=split) for split in ("train", "test", None))
    found = [np.unique(np.asarray(source.groups)).tolist() for source in (train, test, every)]
    assert found == [list(range(11)), [11, 12, 13], list(range(14))]
    folds = plan_shards(every, Options(folds=4, shards=1)).values()
    starts = [min(shard.min() for shard in shards) for shards in folds]
    assert len(starts) == 4 and set(starts) <= set(digits.FORMS)


@pytest.mark.parametrize(
    "spec", ["./nowhere", "/no/such/folder", "some/deep/path", "nowhere/", "~/no_such_folder_here"]
)
def test_missing_paths_are_named(spec: str) -> None:
    with pytest.raises(UserError, match=f"{spec}: no such file or folder"):
        open_source(spec)


def test_a_slash_below_an_existing_folder_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"data/pets: no such file or folder$"):
        open_source("data/pets")


def test_names_of_sources() -> None:
    with pytest.raises(UserError, match="no split 'val'"):
        open_source("digits", split="val")
    with pytest.raises(UserError, match="unknown source 'digit'; did you mean 'digits'"):
        open_source("digit:somewhere")
    with pytest.raises(UserError, match="digits:elsewhere: the digits come with scikit-learn"):
        open_source("digits:elsewhere")
    with pytest.raises(UserError, match="are for tables"):
        open_source("digits", label_column="digit")
    with pytest.raises(UserError, match="no such file or folder"):
        open_source("s3://bucket/images")
    with pytest.raises(UserError, match="imagefolder:nowhere: no such folder"):
        open_source("imagefolder:nowhere")


@pytest.mark.parametrize(
    ("labels", "said"), [([0, -1, 1], "image 1 has the label -1"), ([0, 10, 1], "label 10"), ([0, 1], "2 labels for 3")]
)
def test_wrong_labels_are_refused(labels: list[int], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = replace(digits.open_images("", None), items=range(3), labels=np.array(labels))
    monkeypatch.setattr(digits, "open_images", lambda place, split: source)
    with pytest.raises(UserError, match=said):
        open_source("digits")


def test_labels_of_an_own_source_are_integers_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(labels: Any) -> Source:
        source = replace(digits.open_images("", None), items=range(3), labels=labels)
        monkeypatch.setattr(digits, "open_images", lambda place, split: source)
        return open_source("digits")

    for labels in ([0, 1, 0], np.array([0, 1, 0], dtype=np.uint8)):
        found = opened(labels).labels
        assert found is not None and found.dtype == np.int64 and found.tolist() == [0, 1, 0]
    with pytest.raises(UserError, match="labels are float64"):
        opened(np.array([0.0, 1.5, 0.9]))


def test_splits_with_other_folders_below_them_do_not_share_classes(tmp_path: Path) -> None:
    for place in ("train/n01/images", "train/n02/images", "val/images", "test/images"):
        write(tmp_path / "tiny" / place / "1.png", encoded("PNG"))
    assert open_source(str(tmp_path / "tiny"), split="train").classes == ["n01", "n02"]
    for place in ("train/a", "train/b", "val/b", "val/c", "test/c", "test/d"):
        write(tmp_path / "chain" / place / "1.png", encoded("PNG"))
    found = [open_source(str(tmp_path / "chain"), split=split).classes for split in ("train", "val", "test")]
    assert found == [["a", "b", "c", "d"]] * 3


def test_one_class_of_sub_folders_is_noted(tmp_path: Path) -> None:
    for file in ("data/cat/1.png", "data/dog/1.png"):
        write(tmp_path / file, encoded("PNG"))
    with pytest.warns(UserWarning, match=r"one class, data; .* classes \(cat, dog\), name .*data"):
        assert open_source(str(tmp_path)).classes == ["data"]


def test_folders_below_the_classes_are_noted(tmp_path: Path) -> None:
    for file in ("site/defect/1.png", "site/good/1.png", "unlabeled/1.png", "plain/images/1.png"):
        write(tmp_path / file, encoded("PNG"))
    with pytest.warns(UserWarning, match=r"\(plain, site, unlabeled\); .* such as site/defect and site/good, are not"):
        open_source(str(tmp_path))
