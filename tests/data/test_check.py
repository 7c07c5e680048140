"""`check_data` and `shards verify` of images: bad files, missing classes, images that two parts share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ssl_vit import check_data
from ssl_vit.interfaces import UserError
from tests.tars import encoded, packed, write_tar


def scene(seed: int) -> Image.Image:
    """A smooth random picture of 64x64 pixels."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((64, 64), Image.Resampling.BICUBIC)


def save(path: Path, image: Image.Image) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def labeled(labels: list[bytes]) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    for number, label in enumerate(labels):
        members |= {f"{number}.png": encoded(scene(number)), f"{number}.cls": label}
    return members


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    root = tmp_path / "pets"
    for number, place in enumerate(("train/bee", "train/wasp", "val/bee")):
        for n in range(6):
            save(root / place / f"{n}.png", scene(10 * number + n))
    return root


def test_a_sound_layout_has_only_its_missing_class(layout: Path) -> None:
    found = check_data(layout, progress=False)
    assert found.class_counts.to_dict() == {"train": {"bee": 6, "wasp": 6}, "val": {"bee": 6, "wasp": 0}}
    assert found.missing_classes == {"train": [], "val": ["wasp"]}
    assert found.bad_files.empty and found.leaks.empty and not found.ok


def test_bad_files_and_shared_images_are_named(layout: Path, call: Callable[..., tuple[int, str]]) -> None:
    (layout / "train/bee/broken.jpg").write_text("no image")
    save(layout / "val/wasp/same.png", scene(10))  # train/wasp/0.png
    save(layout / "val/wasp/again.jpg", scene(11).resize((50, 50)))  # train/wasp/1.png
    found = check_data(layout, progress=False)
    assert found.bad_files[["part", "file"]].to_dict("records") == [{"part": "train", "file": "bee/broken.jpg"}]
    leaks = {(row.file, row.other_file): row.kind for row in found.leaks.itertuples()}
    assert leaks == {("wasp/0.png", "wasp/same.png"): "exact", ("wasp/1.png", "wasp/again.jpg"): "near"}
    assert call("shards", "verify", layout)[0] == 1


def test_shards_are_checked_without_packing(layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(layout / "val/wasp/same.png", scene(10))
    for split in ("train", "val"):
        out = tmp_path / "shards" / split
        packed(layout, out, split, shards=2)
    (leak,) = check_data(tmp_path / "shards", progress=False).leaks.itertuples()
    assert (leak.part, leak.other_part, leak.kind) == ("train", "val", "exact")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_data("~/shards/train", jobs=2, progress=False).ok, "a set of several shards, by two processes"


def test_shards_without_the_images_that_packing_dropped_are_sound(
    layout: Path, tmp_path: Path, call: Callable[..., tuple[int, str]]
) -> None:
    (layout / "train/bee/broken.jpg").write_text("no image")
    shutil.rmtree(layout / "val")
    call("shards", "make", layout / "train", tmp_path / "shards", "--holdout", "0.3")
    for place in ("shards", "shards/train", "shards#train"):
        assert call("shards", "verify", tmp_path / place)[0] == 0
    assert call("shards", "verify", f"{layout}/train")[0] == 1
    assert 1 in {call("shards", "verify", f"{layout}/train#{part}")[0] for part in ("train", "test")}


def test_a_part_that_was_cut_or_not_finished_is_named(layout: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        packed(layout, tmp_path / split, split, shards=1)
    tar = tmp_path / "val/000000.tar"
    tar.write_bytes(tar.read_bytes()[:300])
    assert set(check_data(tmp_path, progress=False).bad_files["part"]) == {"val"}
    (tmp_path / "val/info.json").unlink()
    with pytest.raises(UserError, match="val: packing was not finished"):
        check_data(tmp_path, progress=False)


def test_a_folder_of_several_splits_is_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "both/train-0.tar", {"0.png": encoded(scene(0))})
    write_tar(tmp_path / "both/val-0.tar", {"0.png": encoded(scene(0))})
    splits = {name: {"samples": 1, "shards": [{"file": f"{name}-0.tar", "samples": 1}]} for name in ("train", "val")}
    (tmp_path / "both/about.json").write_text(json.dumps({"splits": splits}))
    with pytest.raises(UserError, match=r"several splits \(train, val\)"):
        check_data(tmp_path / "both", progress=False)


def test_places_are_compared_and_ignored_files_are_noted(
    layout: Path, tmp_path: Path, called: Callable[..., tuple[int, str, str]]
) -> None:
    save(tmp_path / "more/copy.png", scene(20))  # val/bee/0.png
    save(tmp_path / "more/new.png", scene(99))
    (tmp_path / "more/phone.heic").write_text("not read")
    assert check_data(tmp_path / "more", progress=False).ok, "two parts of a holdout"
    for _ in range(2):  # packed, and in the cache
        found = check_data(layout, tmp_path / "more", progress=False)
        (leak,) = found.leaks.itertuples()
        assert (leak.file, leak.part) == ("bee/0.png", f"{layout}#val")
        assert (leak.other_file, leak.other_part) == ("copy.png", f"{tmp_path}/more")
        (note,) = found.notes
        assert "1 .heic" in note
    assert found.missing_classes == {f"{layout}#train": [], f"{layout}#val": ["wasp"], f"{tmp_path}/more": []}
    code, shown, _ = called("shards", "verify", layout, tmp_path / "more")
    assert code == 1 and "exact copy of copy.png" in shown and "1 .heic" in shown
    assert f"{layout}#train: 12 labeled images; 2 classes of 6 to 6 images" in shown


def test_places_are_checked_before_any_is_read(layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_VIT_CACHE", str(tmp_path / "cache"))
    for other in (f"{layout}#train", f"{layout}/../{layout.name}", f"{layout}/train"):
        with pytest.raises(UserError, match="contain the same images"):
            check_data(layout, other, progress=False)
    with pytest.raises(UserError, match="nothere: no such file or folder"):
        check_data(layout, tmp_path / "nothere", progress=False)
    assert not (tmp_path / "cache").exists()


def test_different_digits_are_no_copies() -> None:
    assert check_data("digits", progress=False).ok


def test_defects_of_shards_are_listed_not_raised(layout: Path, tmp_path: Path) -> None:
    packed(layout, tmp_path / "shards", "train")
    tar = tmp_path / "shards/000000.tar"
    for content in (b"", tar.read_bytes()[:1000]):
        tar.write_bytes(content)
        assert "truncated" in " ".join(check_data(tmp_path / "shards", progress=False).bad_files["reason"])
    write_tar(tmp_path / "plain/0.tar", labeled([b"0", b"9" * 30, b"9" * 5000]))
    found = check_data(tmp_path / "plain", progress=False)
    assert [reason.split(":")[0] for reason in found.bad_files["reason"]] == ["bad_label"] * 2


def test_gray_levels_of_16_bits_are_compared(tmp_path: Path) -> None:
    levels = np.random.default_rng(0).integers(300, 2**16, (12, 6, 6), dtype=np.uint16)
    for number, part in enumerate(["train"] * 8 + ["val"] * 4):
        image = Image.fromarray(levels[number]).resize((64, 64), Image.Resampling.NEAREST)
        save(tmp_path / "scans" / part / "ab"[number % 2] / f"{number}.png", image)
    assert check_data(tmp_path / "scans", progress=False).leaks.empty


def test_labels_without_names_are_counted_by_their_numbers(tmp_path: Path) -> None:
    write_tar(tmp_path / "plain/0.tar", labeled([b"2", b"10", b"10", b"11"]))
    (counts,) = check_data(tmp_path / "plain", progress=False).class_counts.to_dict().values()
    assert counts == {"2": 1, "10": 2, "11": 1}


def test_a_part_without_labels_misses_no_class(tmp_path: Path) -> None:
    write_tar(tmp_path / "train" / "0.tar", labeled([b"0", b"1"]))
    write_tar(tmp_path / "test" / "0.tar", {f"{n}.png": encoded(scene(5 + n)) for n in range(2)})
    found = check_data(tmp_path, progress=False)
    assert found.missing_classes == {"train": [], "test": []} and found.ok


def test_a_class_without_a_readable_image_is_missing(tmp_path: Path) -> None:
    write_tar(tmp_path / "train" / "0.tar", labeled([b"0", b"1"]))
    write_tar(tmp_path / "test" / "0.tar", labeled([b"0", b"1"]) | {"1.png": b"junk"})
    assert check_data(tmp_path, progress=False).missing_classes == {"train": [], "test": ["1"]}


def test_keys_that_are_not_utf8_are_escaped(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_tar(tmp_path / part / "0.tar", {"\udce9.png": encoded(scene(0)), "bad\udce9.png": b"junk"})
    found = check_data(tmp_path, progress=False)
    assert found.bad_files["file"].tolist() == [r"0.tar bad\udce9"] * 2 and found.leaks["file"].tolist() == [r"\udce9"]


def test_an_image_with_many_copies_is_listed_once(layout: Path) -> None:
    for number in range(3):
        save(layout / f"train/bee/copy{number}.png", scene(99))
        save(layout / f"val/bee/copy{number}.png", scene(99))
    found = check_data(layout, progress=False).leaks
    assert sorted(found["file"]) == [f"bee/copy{number}.png" for number in range(3)]


def test_an_equal_image_is_named_before_a_nearly_equal_one(layout: Path) -> None:
    scene(15).save(layout / "val/bee/again.jpg", quality=90)
    save(layout / "val/bee/same.png", scene(15))  # train/wasp/5.png
    (leak,) = check_data(layout, progress=False).leaks.itertuples()
    assert (leak.file, leak.other_file, leak.kind) == ("wasp/5.png", "bee/same.png", "exact")


def test_large_parts_are_compared_in_steps(layout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssl_vit.data.check._ROWS", 8)  # one image against all of the other part
    save(layout / "val/wasp/same.png", scene(15))  # train/wasp/5.png
    (leak,) = check_data(layout, progress=False).leaks.itertuples()
    assert (leak.file, leak.other_file, leak.kind) == ("wasp/5.png", "wasp/same.png", "exact")
