"""What users get wrong and what breaks under them: a clear message and exit code, or a counted skip; nothing lost."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import ssl_vit
from tests.tars import encoded, write_tar

Call = Callable[..., tuple[int, str]]
SMALL = ("training.steps=4", "training.batch_size=8", "training.log_every=2", "training.picture_every=0")


def picture(seed: int, form: str = "JPEG", size: int = 16) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels), form)


def good_members(first: int, count: int) -> dict[str, bytes]:
    members = {}
    for n in range(first, first + count):
        members[f"{n:06d}.jpg"] = picture(n)
        members[f"{n:06d}.cls"] = str(n % 3).encode()
    return members


def write_info(folder: Path, classes: int = 3) -> None:
    shards: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            keys = {name.split(".")[0] for name in tar.getnames()}
        shards.append({"file": path.name, "samples": len(keys)})
    names = [str(n) for n in range(classes)]
    info = {"classes": names, "samples": sum(s["samples"] for s in shards), "shards": shards}
    (folder / "info.json").write_text(json.dumps(info))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two good shards of 16 RGB pictures of 16x16 pixels and three classes."""
    folder = tmp_path / "shards"
    for n in range(2):
        write_tar(folder / f"{n:06d}.tar", good_members(16 * n, 16))
    write_info(folder)
    return folder


def keys(data: Path | str, *more: str) -> list[str]:
    sizes = ["encoder.image_size=16", "encoder.channels=3", "encoder.patch_size=4", "encoder.depth=1"]
    return ["train", "digits_ssl", f"data.train={data}", "run=run", *sizes, *SMALL, *more]


def labeled_keys(data: Path | str, *more: str) -> list[str]:
    """The same sizes, trained with labels."""
    return ["train", "digits_supervised", *keys(data, *more)[2:]]


def events(run: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row.get("event") == "skipped_samples"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["data.train=nowhere"], ["nowhere", "no such shard or folder", "ssl-vit shards make"]),
        (["data.train=nowhere/{000..003}.tar"], ["nowhere/000.tar", "no such shard"]),
        (["data.train=pipe:cat x.tar"], ["pipe:", "not run"]),
        (["optim.wieght_decay=0.1"], ["optim.wieght_decay", "did you mean 'weight_decay'"]),
        (["objective.mask_ratoi=0.2"], ["objective.mask_ratoi", "did you mean 'mask_ratio'"]),
        (["objective.name=masked_path"], ["masked_path", "did you mean 'masked_patch'"]),
        (["training.steps=many"], ["training.steps", "valid integer"]),
        (["training.epochs=3"], ["training", "exactly one of steps and epochs"]),
        (["encoder.image_size=18"], ["image_size=18", "patch size 4", "16 or 20"]),
        (["encoder.name=vit_bace_patch16_224"], ["vit_bace_patch16_224", "did you mean vit_base_patch16_224"]),
        (["data.workers=2", "data.lanes=1"], ["data.workers=2", "more than the lanes", "at most 1"]),
        (["training.batch_size=9"], ["training.batch_size=9", "data.lanes=4", "[1, 3, 9]"]),
        (["optim.betas=[0.9,1.5]"], ["optim.betas.1", "less than 1"]),
        (["data.augment={crop: shift, padding: 17}"], ["data.augment.padding=17", "16x16"]),
        (["data.train=5"], ["data.train: give text"]),
        (["data.train=[{shards: a, weigth: 1}]"], ["data.train.0.weigth", "did you mean 'weight'"]),
        (["probe.labels_per_clas=3"], ["probe.labels_per_clas: unknown key; did you mean 'labels_per_class'"]),
        (["batch_size=64"], ["batch_size: unknown key; did you mean 'training.batch_size'"]),
        (["<probe=3"], ["<probe: unknown key; did you mean 'probe'"]),
        (["training.accumulate=3"], ["training.accumulate=3", "lanes"]),
        (["objective.bits=8"], ["objective.bits=8", "at most 5 bits"]),
        (["data.augment.scale=[0.5,0.1]"], ["data.augment", "scale must be [low, high]"]),
        (["encoder.channels=2"], ["encoder.channels=2", "1 (gray), 3 (RGB)"]),
        (["init_from=nowhere"], ["nowhere", "no such run"]),
        (["justaword"], ["justaword", "key=value"]),
        (["init_from="], ["init_from=", "value is missing"]),
        (['init_from=""'], ["init_from", "at least 1 character"]),
        (['name=""'], ["name", "at least 1 character"]),
        (["data.<place>=1"], ["data.<place>", "unknown key"]),
        (["optim.lr=.inf"], ["optim.lr", "finite number"]),
        (["optim.weight_decay=.nan"], ["optim.weight_decay", "finite number"]),
        (["seed=100000000000000000000000000"], ["seed", "less than 2147483648"]),
        (["training.batch_size=100000000000000"], ["training.batch_size", "less than or equal to"]),
        (["encoder.width=100000000"], ["encoder.width", "less than or equal to"]),
        (["data.cache_mb=99999999999"], ["data.cache_mb", "less than or equal to"]),
    ],
)
def test_wrong_settings_are_named_with_a_fix(call: Call, shards: Path, more: list[str], expected: list[str]) -> None:
    code, text = call(*keys(shards, *more))
    assert code == 2
    assert text.startswith("error: ") and "Traceback" not in text and len(text.splitlines()) <= 3
    for part in expected:
        assert part in text


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (["train", "digits_ssl"], "objective.mask_ratoi"),
        (["train", "digits_ssl"], "optim.wieght_decay"),
        (["compare", "demo_digits"], "seedz"),
        (["compare", "demo_digits"], "evaluators.fine_tune.training.stepz"),
        (["compare", "demo_digits"], "arms.ssl.training.stepz"),
        (["train", "digits_ssl"], "optim.betas"),
    ],
)
def test_errors_about_an_override_name_no_file_and_others_the_recipe(
    call: Call, tmp_path: Path, command: list[str], key: str
) -> None:
    wrong = [0.9, 1.5] if key == "optim.betas" else 1
    named = key.replace("arms.ssl.", "arms.ssl: ")
    _, text = call(*command, f"{key}={wrong}")
    assert text.startswith(f"error: {named}") and ".yaml" not in text
    first, *rest = reversed(key.split("."))
    content: dict[str, object] = {first: wrong}
    for name in rest:
        content = {name: content}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"base": command[1], **content}))
    _, text = call(command[0], str(tmp_path / "mine.yaml"), "name=other")
    assert named in text and ("mine.yaml: " in text or key.startswith("arms."))


def test_an_unknown_recipe_names_the_closest(call: Call) -> None:
    code, text = call("train", "digits_sll")
    assert (code, "did you mean 'digits_ssl'" in text) == (2, True)
    assert call("train", "demo_digits")[0] == 2  # a comparison
    assert call("compare", "digits_ssl")[0] == 2  # not one


def test_bad_samples_are_skipped_counted_and_named(call: Call, shards: Path, tmp_path: Path) -> None:
    members = good_members(100, 8)
    members["000100.jpg"] = picture(100)[: len(picture(100)) // 2]
    members["000101.jpg"] = b"this is text, not a picture"
    members["000102.cls"] = b"7"
    members["000103.cls"] = b"cat"
    del members["000104.jpg"]
    write_tar(shards / "000002.tar", members)
    write_info(shards)
    epoch = ("training.steps=6", "training.checkpoint_every=2", "training.keep_last=9")  # 48 of 40 samples
    code, text = call(*labeled_keys(shards, *epoch))
    assert code == 0, text
    found = {s["key"]: s["reason"] for row in events(tmp_path / "run") for s in row["samples"]}  # type: ignore[attr-defined]
    assert set(found) == {f"00010{n}" for n in range(5)}
    for key, reason in {
        "000100": "unreadable",
        "000101": "not an image",
        "000102": "outside the classes 0..2",
        "000103": "not a class index",
        "000104": "no image",
    }.items():
        assert reason in found[key]
    assert "skipped" in text and "000002.tar" in text
    totals = [row["total"] for row in events(tmp_path / "run")]
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000006")
    (tmp_path / "run/summary.json").unlink()
    assert call(*labeled_keys(shards, *epoch))[0] == 0
    assert [row["total"] for row in events(tmp_path / "run")] == totals, "a resumed run continues the count"
    code, text = call(*labeled_keys(shards, "run=strict", "data.on_bad_sample=fail"))
    assert code == 2 and "000002.tar" in text and "on_bad_sample=fail" in text


def test_a_truncated_tar_loses_only_its_tail(call: Call, shards: Path, tmp_path: Path) -> None:
    path = shards / "000001.tar"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])  # info.json still promises all of it
    code, text = call(*keys(shards))
    assert code == 0, text
    lost = [s for row in events(tmp_path / "run") for s in row["samples"]]  # type: ignore[attr-defined]
    assert lost and all("000001.tar" in s["shard"] and "missing: the shard" in s["reason"] for s in lost)


def test_shards_without_one_readable_sample_end_the_run(call: Call, tmp_path: Path) -> None:
    write_tar(tmp_path / "bad" / "000000.tar", {f"{n:06d}.jpg": b"text" for n in range(8)})
    code, text = call(*keys("bad", "data.lanes=1"))
    assert code == 2 and "cannot be used" in text and "000000.tar" in text


def test_unlabeled_images_pretrain_but_do_not_classify(call: Call, tmp_path: Path) -> None:
    write_tar(tmp_path / "plain" / "000000.tar", {f"{n:06d}.png": picture(n, "PNG") for n in range(16)})
    assert call(*keys("plain"))[0] == 0
    code, text = call(*labeled_keys("plain", "objective.classes=3", "run=classes"))
    assert code == 2 and "no label" in text


def test_labels_do_not_matter_to_pretraining(call: Call, tmp_path: Path) -> None:
    members: dict[str, bytes] = {}
    for n in range(16):
        members |= {f"{n:06d}.png": picture(n, "PNG"), f"{n:06d}.cls": b"dog"}
    write_tar(tmp_path / "words" / "000000.tar", members)
    code, text = call(*keys("words"))
    assert code == 0 and "skipped" not in text
    frame = ssl_vit.embed("run", "words", workers=0)
    assert len(frame) == 16 and set(frame["label"]) == {-1}


def test_two_processes_do_not_train_in_one_directory(call: Call, shards: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, text = call(*keys(shards))
    assert code == 2 and "another process" in text


def test_a_checkpoint_of_another_recipe_is_refused(call: Call, shards: Path, tmp_path: Path) -> None:
    assert call(*keys(shards))[0] == 0
    assert call(*keys(shards, "run=wider", "encoder.width=128", "training.steps=8"))[0] == 0
    for old in (tmp_path / "run" / "checkpoints").iterdir():
        shutil.rmtree(old)
    newest = sorted((tmp_path / "wider" / "checkpoints").iterdir())[-1]
    newest.rename(tmp_path / "run" / "checkpoints" / newest.name)
    code, text = call(*keys(shards))
    assert code == 2 and "step_00000008" in text and "does not fit" in text
    code, text = call(*keys(shards, "run=third", f"init_from={tmp_path / 'wider'}"))
    assert code == 2 and "does not fit" in text


def test_a_command_gives_the_signals_back(call: Call) -> None:
    """Else the processes that a caller starts later would not end by SIGTERM, but raise wherever they are."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    assert call("train", "no_such_recipe")[0] == 2
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
