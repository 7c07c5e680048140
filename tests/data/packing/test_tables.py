from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path

import datasets
import huggingface_hub.constants
import pandas as pd
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from PIL import Image

from ssl_vit.data.packing.sources import open_source
from ssl_vit.data.packing.sources.base import Source
from ssl_vit.interfaces import BadSample, UserError

from .pictures import all_images, encoded


def labels(source: Source) -> list[int] | None:
    return None if source.labels is None else source.labels.tolist()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def table(labels: list[int], names: list[str], kinds: tuple[str, ...] = ("JPEG", "PNG")) -> datasets.Dataset:
    images = [{"bytes": encoded(kinds[i % len(kinds)], i), "path": None} for i in range(len(labels))]
    features = datasets.Features(
        {"img": datasets.Image(), "id": datasets.Value("int64"), "label": datasets.ClassLabel(names=names)}
    )
    return datasets.Dataset.from_dict({"img": images, "id": [7] * len(labels), "label": labels}, features=features)


def test_parquet_file_keeps_bytes_and_class_names(tmp_path: Path) -> None:
    table([1, 0, 1], ["no", "yes"]).to_parquet(str(tmp_path / "part.parquet"))
    source = open_source(str(tmp_path / "part.parquet"))
    assert (source.classes, labels(source)) == (["no", "yes"], [1, 0, 1])
    assert all_images(source) == [encoded("JPEG", 0), encoded("PNG", 1), encoded("JPEG", 2)]
    assert source.name == "part.parquet (datasets)"


def test_parquet_that_datasets_did_not_write(tmp_path: Path) -> None:
    images = [encoded("PNG", number) for number in range(3)]
    file = tmp_path / "plain.parquet"
    pq.write_table(pa.table({"png": images, "kind": ["wolf", "ape", "wolf"], "id": [5, 6, 7]}), file)
    source = open_source(str(file), label_column="kind")
    assert source.classes == ["ape", "wolf"]
    assert (all_images(source), labels(source)) == (images, [1, 0, 1])
    unlabeled = open_source(str(file))
    assert (unlabeled.classes, labels(unlabeled)) == (None, None)
    by_number = open_source(str(file), label_column="id", image_column="png")
    assert (by_number.classes, labels(by_number)) == (["5", "6", "7"], [0, 1, 2])
    with pytest.raises(UserError, match="no column 'color'"):
        open_source(str(file), label_column="color")
    with pytest.raises(UserError, match="does not hold images"):
        open_source(str(file), image_column="id")


def test_load_from_disk_layouts(tmp_path: Path) -> None:
    table([1, 0, 1], ["no", "yes"]).save_to_disk(str(tmp_path / "one"))
    parts = {"train": table([0, 1], ["no", "yes"]), "validation": table([1], ["no", "yes"])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "many"))
    one = open_source(str(tmp_path / "one"))
    assert labels(one) == [1, 0, 1]
    assert all_images(one)[1] == encoded("PNG", 1)
    assert open_source(str(tmp_path / "many"), split="val").count == 1
    with pytest.raises(UserError, match="without splits"):
        open_source(str(tmp_path / "one"), split="train")
    arrow = next((tmp_path / "one").glob("*.arrow"))
    assert labels(open_source(str(arrow))) == [1, 0, 1]


def test_string_classes_agree_between_splits(tmp_path: Path) -> None:
    def named(labels: list[str]) -> datasets.Dataset:
        images = [{"bytes": encoded("PNG", i), "path": None} for i in range(len(labels))]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
        return datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)

    parts = {"train": named(["cow", "ape", "bee"]), "test": named(["cow"])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "set"))
    source = open_source(str(tmp_path / "set"), split="test")
    assert (source.classes, labels(source)) == (["ape", "bee", "cow"], [2])


def test_hidden_labels_are_no_labels_and_missing_ones_are_refused(tmp_path: Path) -> None:
    table([-1, -1], ["no", "yes"]).save_to_disk(str(tmp_path / "hidden"))
    assert open_source(str(tmp_path / "hidden")).labels is None
    table([1, -1], ["no", "yes"]).save_to_disk(str(tmp_path / "some"))
    with pytest.raises(UserError, match="1 of 2 rows have no 'label'"):
        open_source(str(tmp_path / "some"))


def test_a_split_of_minus_ones_is_unlabeled_and_adds_no_class(tmp_path: Path) -> None:
    def split(labels: list[int]) -> datasets.Dataset:
        images = [{"bytes": encoded("PNG", i), "path": None} for i in range(len(labels))]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        return datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)

    hidden = datasets.DatasetDict({"train": split([3, 5, 3]), "test": split([-1, -1])})
    hidden.save_to_disk(str(tmp_path / "hidden"))
    train, test = (open_source(str(tmp_path / "hidden"), split=name) for name in ("train", "test"))
    assert (train.classes, labels(train)) == (["3", "5"], [0, 1, 0]) and test.labels is None
    signs = datasets.DatasetDict({"train": split([-1, 1]), "test": split([1, -1])})
    signs.save_to_disk(str(tmp_path / "signs"))
    assert labels(open_source(str(tmp_path / "signs"), split="test")) == [1, 0]


def test_a_row_without_image_is_broken_not_fatal(tmp_path: Path) -> None:
    rows = {"image": [{"bytes": encoded("PNG"), "path": None}, None]}
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "gap"))
    source = open_source(str(tmp_path / "gap"))
    assert source.read(0) == encoded("PNG")
    with pytest.raises(BadSample, match="no image"):
        source.read(1)


def test_several_label_columns_must_be_chosen_from(tmp_path: Path) -> None:
    label = datasets.ClassLabel(names=["a", "b"])
    features = datasets.Features({"image": datasets.Image(), "coarse": label, "fine": label})
    rows = {"image": [{"bytes": encoded("PNG"), "path": None}], "coarse": [0], "fine": [1]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(UserError, match="coarse, fine"):
        open_source(str(tmp_path / "two"))
    assert open_source(str(tmp_path / "two"), label_column="fine").read(0) == encoded("PNG")
    assert labels(open_source(str(tmp_path / "two"), label_column="fine")) == [1]


def test_imagefolder_with_a_metadata_file(tmp_path: Path) -> None:
    data = [encoded("PNG", number) for number in range(2)]
    (tmp_path / "set").mkdir()
    for number, image in enumerate(data):
        (tmp_path / "set" / f"{number}.png").write_bytes(image)
    (tmp_path / "set" / "metadata.csv").write_text("file_name,label\n1.png,oak\n0.png,elm\n")
    for prefix in ("", "imagefolder:"):
        source = open_source(f"{prefix}{tmp_path / 'set'}")
        assert source.classes == ["elm", "oak"]
        assert dict(zip(all_images(source), labels(source) or [], strict=True)) == {data[0]: 0, data[1]: 1}


def test_images_that_a_metadata_file_omits_are_noted(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(encoded("PNG", number))
    (tmp_path / "metadata.csv").write_text("file_name,label\n0.png,oak\n2.png,elm\n")
    with pytest.warns(UserWarning, match="does not list 1 of its images"):
        assert labels(open_source(str(tmp_path))) == [1, 0]


def test_a_folder_may_have_the_name_of_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` would read text files of the working directory."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "0.png").write_bytes(encoded("PNG"))
    (tmp_path / "text" / "metadata.csv").write_text("file_name,label\n0.png,oak\n")
    monkeypatch.chdir(tmp_path)
    assert open_source("text").classes == ["oak"]


def test_the_listing_tells_tables_apart_without_reading_them(tmp_path: Path) -> None:
    listings = set()
    for number, images in enumerate(([b"one", b"three"], [b"three", b"one"], [b"one", b"thre2"], [b"one", None])):
        pq.write_table(pa.table({"png": pa.array(images, pa.binary())}), tmp_path / f"{number}.parquet")
        listings.add(open_source(str(tmp_path / f"{number}.parquet")).listing)
    assert len(listings) == 3  # same sizes in the same order are the same to it


def test_a_table_travels_to_another_process_without_its_images(tmp_path: Path) -> None:
    images = [encoded("PNG", number) * 50 for number in range(9)]
    pq.write_table(pa.table({"png": images}), tmp_path / "p.parquet")
    read = open_source(str(tmp_path / "p.parquet")).read
    traveling = pickle.dumps(read)
    assert len(traveling) < len(images[0])
    assert pickle.loads(traveling)(8) == images[8]


@pytest.mark.parametrize("spec", ["cifar10", "uoft-cs/cifar10"])
def test_hub_names_offline_say_so(
    spec: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=rf"{spec}: no such file or folder, and .* cannot be reached"):
        open_source(spec)
    assert f"{spec}: looking for this dataset" in capsys.readouterr().err


def test_a_configuration_of_a_hub_dataset_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("gray", "color")):
        rows = {
            "image": [{"bytes": encoded("PNG"), "path": None}] * (number + 2),
            "label": ["a", "b", "b"][: number + 2],
        }
        (tmp_path / name).mkdir()
        pq.write_table(pa.table(rows), tmp_path / name / "train.parquet")
    configs = [{"config_name": name, "data_files": f"{name}/*.parquet"} for name in ("gray", "color")]
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *config: load(str(tmp_path), *config))
    with pytest.raises(UserError, match=r"some/pets has several configurations; .*hf:NAME:CONFIG: \['gray', 'color'\]"):
        open_source("hf:some/pets")
    assert open_source("hf:some/pets:color", split="train").count == 3
    with pytest.raises(UserError, match="cannot be read as a dataset"):
        open_source("hf:some/pets:blue")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "archive.zip").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"\.parquet and \.arrow"):
        open_source(str(tmp_path / "archive.zip"))
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(UserError, match="cannot be read as a dataset"):
        open_source(str(tmp_path / "bad.parquet"))


def test_paths_in_a_table_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "set/img").mkdir(parents=True)
    (tmp_path / "set/img/0.png").write_bytes(encoded("PNG"))
    cells = [{"bytes": None, "path": path} for path in ("img/0.png", str(tmp_path / "set/img/0.png"), "img/1.png")]
    pq.write_table(pa.table({"image": cells}), tmp_path / "set/t.parquet")
    source = open_source(str(tmp_path / "set/t.parquet"))
    assert [source.read(row) for row in range(2)] == [encoded("PNG")] * 2
    with pytest.raises(BadSample, match="No such file"):
        source.read(2)


def test_columns_that_hold_no_labels_are_ignored(tmp_path: Path) -> None:
    rows = {"image": [{"bytes": encoded("PNG"), "path": None}] * 2, "labels": [[0, 1], [2]], "target": [0.5, 0.1]}
    features = datasets.Features({
        "image": datasets.Image(),
        "labels": datasets.List(datasets.Value("int64")),
        "target": datasets.Value("float32"),
    })  # fmt: skip
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "several"))
    with pytest.warns(UserWarning, match="'labels' holds neither integers nor strings"):
        assert labels(open_source(str(tmp_path / "several"))) is None
    rows = {"image": rows["image"], "Class": [1.0, 0.0]}  # integers, one of them missing, as pandas writes them
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "floats"))
    with pytest.warns(UserWarning, match="'Class' holds neither integers nor strings"):
        assert labels(open_source(str(tmp_path / "floats"), image_column=None)) is None
    with pytest.raises(UserError, match="'labels' cannot be a label"):
        open_source(str(tmp_path / "several"), label_column="labels")


def test_a_metadata_file_without_labels_is_noted(tmp_path: Path) -> None:
    for name in ("elm", "oak"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(encoded("PNG"))
    (tmp_path / "metadata.csv").write_text("file_name,author\nelm/1.png,me\noak/1.png,you\n")
    with pytest.warns(UserWarning, match="no label column"):
        assert labels(open_source(str(tmp_path))) is None


def test_a_folder_with_a_loading_script_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "old.py").write_text("")
    datasets.Dataset.from_dict({"x": [1]}).to_parquet(str(folder / "t.parquet"))
    with pytest.raises(UserError, match="cannot be read as a dataset"):
        open_source(str(folder))


def test_a_table_behind_a_link_has_the_time_of_what_it_names(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"image": [{"bytes": encoded("PNG"), "path": None}]})
    table.cast_column("image", datasets.Image()).to_parquet(str(tmp_path / "there.parquet"))
    (tmp_path / "link.parquet").symlink_to("there.parquet")
    before = open_source(str(tmp_path / "link.parquet")).modified
    os.utime(tmp_path / "there.parquet", ns=(10**18, 10**18))
    assert open_source(str(tmp_path / "link.parquet")).modified != before


def described(folder: Path, labels: Sequence[str], header: str = "file_name,label") -> str:
    """A folder of images with a metadata.csv."""
    folder.mkdir()
    for number in range(len(labels)):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    rows = [f"{number}.png,{label}" for number, label in enumerate(labels)]
    (folder / "metadata.csv").write_text("\n".join([header, *rows]) + "\n")
    return str(folder)


def test_classes_of_a_metadata_file_keep_their_leading_zeros(tmp_path: Path) -> None:
    source = open_source(described(tmp_path / "codes", ["007", "012", "007", "100"]))
    assert source.classes == ["007", "012", "100"]
    assert source.labels is not None and source.labels.tolist() == [0, 1, 0, 2]
    spaced = open_source(described(tmp_path / "spaced", [" -1", " 012"]))
    assert spaced.classes == ["-1", "012"]
    mixed = open_source(described(tmp_path / "mixed", ["01", "1", "oak", "01"]))
    assert mixed.classes is not None and set(mixed.classes) == {"01", "1", "oak"}
    with pytest.raises(UserError, match=r"'01' and '1' in metadata\.csv are one number"):
        open_source(described(tmp_path / "merged", ["01", "1", "2", "2"]))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["1", "2", "", "2"], r"column 'label' holds neither integers nor strings \(it was read as float64"),
        (["1.5", "2.0"], "column 'label' holds neither integers nor strings"),
        (["None", "null"], "column 'label' holds neither integers nor strings"),
        (["oak", "NA"], r"1 of 2 rows have no 'label'.*NA, None and null in a CSV file mean empty"),
        ([], "cannot be read as a dataset"),
    ],
)
def test_a_metadata_file_with_unusable_labels_is_an_error(tmp_path: Path, labels: list[str], message: str) -> None:
    spec = described(tmp_path / "set", labels)
    if not labels:
        Image.new("RGB", (8, 8)).save(tmp_path / "set" / "other.png")
    with pytest.raises(UserError, match=message):
        open_source(spec)


def test_labels_too_large_for_an_integer(tmp_path: Path) -> None:
    """pandas 2 reads the column as strings, pandas 3 not at all."""
    spec = described(tmp_path / "set", large := ["1", "100000000000000000000"])
    if pd.__version__ < "3":
        assert open_source(spec).classes == large
    else:
        with pytest.raises(UserError, match="cannot be read as a dataset"):
            open_source(spec)


def test_the_metadata_file_of_a_split_has_to_have_labels_too(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "set").mkdir(exist_ok=True)
        described(tmp_path / "set" / split, ["1", ""])
    with pytest.raises(UserError, match="column 'label' holds neither integers nor strings"):
        open_source(str(tmp_path / "set"), split="train")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("../elsewhere.png,oak\n", r"cannot be read as a dataset: .*elsewhere\.png"),
        ("1.png,oak\n1.png,elm\n", r"lists 1 of the images more than once \(first: 1\.png\)"),
    ],
)
def test_a_metadata_file_that_names_an_image_elsewhere_or_twice_is_an_error(
    tmp_path: Path, rows: str, message: str
) -> None:
    spec = described(tmp_path / "set", ["oak", "elm"])
    with (tmp_path / "set" / "metadata.csv").open("a") as file:
        file.write(rows)
    with pytest.raises(UserError, match=message):
        open_source(spec)


def test_a_metadata_file_without_file_names_is_noted(tmp_path: Path) -> None:
    spec = described(tmp_path / "set", ["oak", "elm"], header="File_Name,Label")
    with pytest.warns(UserWarning, match=r"metadata\.csv was not read: it has no column file_name"):
        assert open_source(spec).labels is None
