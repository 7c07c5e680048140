from __future__ import annotations

import io
import subprocess
import sys
import warnings
from pathlib import Path

import datasets
import huggingface_hub.constants
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from ssl_vit.data.sources import BrokenImageError, decode, open_source
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


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_importing_the_packing_rooms_does_not_import_torch() -> None:
    code = "import sys, ssl_vit.data.sources, ssl_vit.data.pack; assert 'torch' not in sys.modules"
    environment_root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=environment_root)


def test_class_folders_sorted_nested_and_bit_for_bit(tmp_path: Path) -> None:
    first = write(tmp_path / "zebra" / "1.JPG", encoded("JPEG", 1))
    nested = write(tmp_path / "ape" / "deep" / "er" / "2.webp", encoded("WEBP", 2))
    third = write(tmp_path / "ape" / "x.y.png", encoded("PNG", 3))
    write(tmp_path / "ape" / "._x.jpg", b"resource fork")
    source = open_source(str(tmp_path))
    samples = list(source.samples())
    assert source.classes == ["ape", "zebra"]
    assert source.count == 3
    assert [(s.key, s.extension, s.label, s.image) for s in samples] == [
        ("ape/deep/er/2.webp", "webp", 0, nested),
        ("ape/x.y.png", "png", 0, third),
        ("zebra/1.JPG", "jpg", 1, first),
    ]
    assert samples[0].meta == {"file": "ape/deep/er/2.webp"}
    assert list(source.samples()) == samples
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
    assert [sample.label for sample in source.samples()] == [None] * 3


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
    assert [(sample.key, sample.label) for sample in source.samples()] == [("bee/1.png", 1), ("cow/1.png", 2)]
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


def table(labels: list[int], names: list[str], kinds: tuple[str, ...] = ("JPEG", "PNG")) -> datasets.Dataset:
    images = [{"bytes": encoded(kinds[i % len(kinds)], i), "path": None} for i in range(len(labels))]
    features = datasets.Features(
        {"img": datasets.Image(), "id": datasets.Value("int64"), "label": datasets.ClassLabel(names=names)}
    )
    return datasets.Dataset.from_dict({"img": images, "id": [7] * len(labels), "label": labels}, features=features)


def test_parquet_file_keeps_bytes_and_class_names(tmp_path: Path) -> None:
    table([1, 0, 1], ["no", "yes"]).to_parquet(str(tmp_path / "part.parquet"))
    source = open_source(str(tmp_path / "part.parquet"))
    samples = list(source.samples())
    assert source.classes == ["no", "yes"]
    assert [(s.key, s.extension, s.label) for s in samples] == [
        ("row 0", "jpg", 1),
        ("row 1", "png", 0),
        ("row 2", "jpg", 1),
    ]
    assert [s.image for s in samples] == [encoded("JPEG", 0), encoded("PNG", 1), encoded("JPEG", 2)]
    assert source.name == "part.parquet (datasets)"


def test_parquet_directory_has_splits(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table([1, 0, 1], ["no", "yes"]).to_parquet(str(tmp_path / "data" / "train-00000-of-00001.parquet"))
    table([1], ["no", "yes"]).to_parquet(str(tmp_path / "data" / "test-00000-of-00001.parquet"))
    assert open_source(str(tmp_path), split="train").count == 3
    assert open_source(str(tmp_path), split="test").count == 1
    with pytest.raises(UserError, match="choose split from: train, test"):
        open_source(str(tmp_path))


def test_parquet_that_datasets_did_not_write(tmp_path: Path) -> None:
    images = [encoded("PNG", number) for number in range(3)]
    file = tmp_path / "plain.parquet"
    pq.write_table(pa.table({"png": images, "kind": ["wolf", "ape", "wolf"], "id": [5, 6, 7]}), file)
    source = open_source(str(file), label_column="kind")
    assert source.classes == ["ape", "wolf"]
    assert [(s.image, s.label) for s in source.samples()] == list(zip(images, [1, 0, 1], strict=True))
    unlabelled = open_source(str(file))
    assert (unlabelled.classes, unlabelled.sample(0).label) == (None, None)
    by_number = open_source(str(file), label_column="id", image_column="png")
    assert (by_number.classes, by_number.sample(2).label) == (["5", "6", "7"], 2)
    with pytest.raises(UserError, match="no column 'colour'"):
        open_source(str(file), label_column="colour")
    with pytest.raises(UserError, match="does not hold images"):
        open_source(str(file), image_column="id")


def test_load_from_disk_layouts(tmp_path: Path) -> None:
    table([1, 0, 1], ["no", "yes"]).save_to_disk(str(tmp_path / "one"))
    parts = {"train": table([0, 1], ["no", "yes"]), "validation": table([1], ["no", "yes"])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "many"))
    one = open_source(str(tmp_path / "one"))
    assert [s.label for s in one.samples()] == [1, 0, 1]
    assert one.sample(1).image == encoded("PNG", 1)
    assert open_source(str(tmp_path / "many"), split="val").count == 1
    with pytest.raises(UserError, match="without splits"):
        open_source(str(tmp_path / "one"), split="train")
    arrow = next((tmp_path / "one").glob("*.arrow"))
    assert [s.label for s in open_source(str(arrow)).samples()] == [1, 0, 1]


def test_string_classes_agree_between_splits(tmp_path: Path) -> None:
    def named(labels: list[str]) -> datasets.Dataset:
        images = [{"bytes": encoded("PNG", i), "path": None} for i in range(len(labels))]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
        return datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)

    parts = {"train": named(["cow", "ape", "bee"]), "test": named(["cow"])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "set"))
    source = open_source(str(tmp_path / "set"), split="test")
    assert (source.classes, source.sample(0).label) == (["ape", "bee", "cow"], 2)


def test_hidden_labels_are_no_labels_and_missing_ones_are_refused(tmp_path: Path) -> None:
    table([-1, -1], ["no", "yes"]).save_to_disk(str(tmp_path / "hidden"))
    assert open_source(str(tmp_path / "hidden")).labels is None
    table([1, -1], ["no", "yes"]).save_to_disk(str(tmp_path / "some"))
    with pytest.raises(UserError, match="1 of 2 rows have no 'label'"):
        open_source(str(tmp_path / "some"))


def test_a_row_without_image_is_broken_not_fatal(tmp_path: Path) -> None:
    rows = {"image": [{"bytes": encoded("PNG"), "path": None}, None]}
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "gap"))
    source = open_source(str(tmp_path / "gap"))
    assert source.sample(0).image == encoded("PNG")
    with pytest.raises(BrokenImageError, match="row 1: no image"):
        source.sample(1)


def test_several_label_columns_must_be_chosen_from(tmp_path: Path) -> None:
    label = datasets.ClassLabel(names=["a", "b"])
    features = datasets.Features({"image": datasets.Image(), "coarse": label, "fine": label})
    rows = {"image": [{"bytes": encoded("PNG"), "path": None}], "coarse": [0], "fine": [1]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(UserError, match="coarse, fine"):
        open_source(str(tmp_path / "two"))
    assert open_source(str(tmp_path / "two"), label_column="fine").sample(0).label == 1


def test_imagefolder_with_a_metadata_file(tmp_path: Path) -> None:
    data = [write(tmp_path / "set" / f"{number}.png", encoded("PNG", number)) for number in range(2)]
    (tmp_path / "set" / "metadata.csv").write_text("file_name,label\n1.png,oak\n0.png,elm\n")
    source = open_source(str(tmp_path / "set"))
    assert source.classes == ["elm", "oak"]
    assert {(s.image, s.label) for s in source.samples()} == {(data[0], 0), (data[1], 1)}


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


@pytest.mark.parametrize("spec", ["cifar10", "uoft-cs/cifar10"])
def test_hub_names_offline_say_so(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=rf"{spec}: no such file or folder here, and .* cannot be reached"):
        open_source(spec)


def test_other_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "archive.zip", b"PK")
    with pytest.raises(UserError, match=r"\.parquet or \.arrow"):
        open_source(str(tmp_path / "archive.zip"))
    write(tmp_path / "bad.parquet", b"not parquet at all")
    with pytest.raises(UserError, match="cannot be read as a dataset"):
        open_source(str(tmp_path / "bad.parquet"))


def test_a_sound_folder_gives_no_warning(tmp_path: Path) -> None:
    write(tmp_path / "cat" / "1.png", encoded("PNG"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_source(str(tmp_path)).count == 1
