from __future__ import annotations

import io
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from ssl_vit.data.raw import BrokenImageError, RawSample, Source, decode
from ssl_vit.data.sources import open_source
from ssl_vit.interfaces import UserError


def encoded(kind: str, seed: int = 0, mode: str = "RGB", size: tuple[int, int] = (14, 10)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def write(path: Path, data: bytes) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return data


def all_samples(source: Source) -> list[RawSample]:
    return [source.sample(index) for index in range(source.count)]


def test_importing_the_packing_rooms_does_not_import_torch() -> None:
    code = "import sys, ssl_vit.data.tables, ssl_vit.data.pack, ssl_vit.data.check; assert 'torch' not in sys.modules"
    environment_root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=environment_root)


def test_class_folders_sorted_nested_and_bit_for_bit(tmp_path: Path) -> None:
    first = write(tmp_path / "zebra" / "1.JPG", encoded("JPEG", 1))
    nested = write(tmp_path / "ape" / "deep" / "er" / "2.webp", encoded("WEBP", 2))
    third = write(tmp_path / "ape" / "x.y.png", encoded("PNG", 3))
    write(tmp_path / "ape" / "._x.jpg", b"resource fork")
    source = open_source(str(tmp_path))
    samples = all_samples(source)
    assert source.classes == ["ape", "zebra"]
    assert source.count == 3
    assert [(s.key, s.extension, s.label, s.image) for s in samples] == [
        ("ape/deep/er/2.webp", "webp", 0, nested),
        ("ape/x.y.png", "png", 0, third),
        ("zebra/1.JPG", "jpg", 1, first),
    ]
    assert samples[0].meta == {"file": "ape/deep/er/2.webp"}
    assert all_samples(source) == samples
    assert source.labels is not None
    assert source.labels.tolist() == [0, 0, 1]


def test_the_content_names_the_kind_not_the_suffix(tmp_path: Path) -> None:
    data = write(tmp_path / "picture.jpg", encoded("PNG"))
    sample = open_source(str(tmp_path)).sample(0)
    assert (sample.extension, sample.image) == ("png", data)


@pytest.mark.parametrize(
    ("kind", "mode", "suffix"),
    [("BMP", "RGB", "bmp"), ("GIF", "P", "gif"), ("TIFF", "L", "tif"), ("TIFF", "CMYK", "tiff")],
)
def test_other_kinds_become_png_with_the_same_pixels(tmp_path: Path, kind: str, mode: str, suffix: str) -> None:
    data = write(tmp_path / f"a.{suffix}", encoded(kind, mode=mode))
    sample = open_source(str(tmp_path)).sample(0)
    assert sample.extension == "png"
    original = Image.open(io.BytesIO(data)).convert("RGB")
    np.testing.assert_array_equal(np.asarray(decode(sample.image, "a").convert("RGB")), np.asarray(original))


def test_flat_folder_is_unlabelled_and_counts_other_files(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.png", encoded("PNG", number))
    write(tmp_path / "notes.txt", b"hello")
    write(tmp_path / "more.csv", b"1,2")
    with pytest.warns(UserWarning, match="ignored 2 files"):
        source = open_source(str(tmp_path))
    assert (source.classes, source.labels, source.count) == (None, None, 3)
    assert [sample.label for sample in all_samples(source)] == [None] * 3


def test_empty_class_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path / "cat" / "1.png", encoded("PNG"))
    write(tmp_path / "dog" / "readme.txt", b"none yet")
    with pytest.raises(UserError, match="dog: this class folder holds no images"):
        open_source(str(tmp_path))


def test_images_beside_class_folders_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "cat" / "1.png", encoded("PNG"))
    write(tmp_path / "stray.png", encoded("PNG"))
    with pytest.raises(UserError, match=r"stray\.png"):
        open_source(str(tmp_path))


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "void").mkdir()
    with pytest.raises(UserError, match="holds no images"):
        open_source(str(tmp_path / "void"))


def test_split_sub_folders_share_their_class_indices(tmp_path: Path) -> None:
    for file in ("train/ape/1", "train/bee/1", "train/cow/1", "val/bee/1", "val/cow/1"):
        write(tmp_path / f"{file}.png", encoded("PNG"))
    source = open_source(str(tmp_path), split="val")
    assert source.classes == ["ape", "bee", "cow"]
    assert [(sample.key, sample.label) for sample in all_samples(source)] == [("bee/1.png", 1), ("cow/1.png", 2)]
    assert open_source(str(tmp_path), split="validation").count == 2
    assert open_source(str(tmp_path), split="train").count == 3
    assert source.name == f"{tmp_path.name}/val (folder)"
    with pytest.raises(UserError, match="choose split from: train, val"):
        open_source(str(tmp_path))
    with pytest.raises(UserError, match="no split 'test'"):
        open_source(str(tmp_path), split="test")


def test_a_split_of_a_folder_without_splits_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "cat" / "1.png", encoded("PNG"))
    with pytest.raises(UserError, match="no split 'train'"):
        open_source(str(tmp_path), split="train")


def test_broken_bytes_raise_with_their_name_and_reason(tmp_path: Path) -> None:
    write(tmp_path / "a.jpg", b"this is text")
    write(tmp_path / "b.jpg", b"")
    cut = write(tmp_path / "c.jpg", encoded("JPEG", size=(64, 64))[:2000])
    source = open_source(str(tmp_path))
    with pytest.raises(BrokenImageError, match=r"a\.jpg: not an image"):
        source.sample(0)
    with pytest.raises(BrokenImageError, match=r"b\.jpg: empty file"):
        source.sample(1)
    assert source.sample(2).image == cut
    with pytest.raises(BrokenImageError, match="truncated"):
        decode(cut, "c.jpg")


@pytest.mark.parametrize(("split", "count", "first"), [("train", 1437, 0), ("test", 360, 1437), (None, 1797, 0)])
def test_digits(split: str | None, count: int, first: int) -> None:
    source = open_source("digits", split=split)
    digits = load_digits()
    assert (source.count, source.classes) == (count, [str(digit) for digit in range(10)])
    assert source.licence is not None
    assert "CC BY 4.0" in source.licence
    for index in (0, count - 1):
        sample = source.sample(index)
        image = decode(sample.image, sample.key)
        assert (image.mode, sample.extension) == ("L", "png")
        np.testing.assert_array_equal(np.asarray(image), np.round(digits.images[first + index] * 255 / 16))
        assert sample.label == digits.target[first + index]


def test_digits_refuses_what_it_does_not_have() -> None:
    with pytest.raises(UserError, match="no split 'val'"):
        open_source("digits", split="val")
    with pytest.raises(UserError, match="label_column"):
        open_source("digits", label_column="label")


def test_a_metadata_file_that_names_no_images_leaves_a_folder_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "0.png", encoded("PNG"))
    (tmp_path / "metadata.csv").write_text("camera,date\nx,y\n")
    with pytest.warns(UserWarning, match="ignored 1 files"):
        assert open_source(str(tmp_path)).count == 1


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


def test_a_sound_folder_gives_no_warning(tmp_path: Path) -> None:
    write(tmp_path / "cat" / "1.png", encoded("PNG"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_source(str(tmp_path)).count == 1
