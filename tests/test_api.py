"""The Python API as a user calls it: a plain script from another directory, and one call at a time."""

from __future__ import annotations

import gc
import io
import json
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import ssl_vit
from ssl_vit.comparison.config import load_comparison
from ssl_vit.data import train_and_test
from ssl_vit.data.overlap import saw_images
from ssl_vit.data.packing import pack
from ssl_vit.data.packing.plan import Options
from ssl_vit.data.packing.sources import open_source
from ssl_vit.interfaces import UserError
from ssl_vit.recipe import load_recipe

SMALL: dict[str, Any] = {"encoder": {"image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "heads": 2}}
SHORT: dict[str, Any] = {
    "training": {"steps": 4, "batch_size": 32, "picture_every": 0, "log_every": 2, "precision": "fp32"},
}
SCRIPT = """
import multiprocessing

multiprocessing.set_start_method("spawn")
import ssl_vit

print("started")
small = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "heads": 2}
short = {"steps": 4, "batch_size": 32, "picture_every": 0, "precision": "fp32"}
run = ssl_vit.train("pretrain_vit_tiny", data="my_images", encoder=small, training=short, run="runs/small")
print(len(ssl_vit.embed(run, "my_images")))
print(len(ssl_vit.evaluate(run, "few_shot", labels_per_class=[1], seeds=[0], pooling="mean").table))
arms = [f"encoder.{key}={value}" for key, value in small.items()]
arms += ["training.steps=2", "training.batch_size=16", "data.workers=1", "data.lanes=8", "training.precision=fp32"]
found = ssl_vit.compare(
    "own_images_cpu", data="my_images", run="runs/compared", jobs=2, seeds=[0], labels_per_class=[1],
    pretrainings=1, frozen_seeds=[0],
    arms={"ssl": {"overrides": arms}, "supervised": None}, evaluators={"fine_tune": None}, pictures=False,
    controls=False,
)
print(found.headline)
"""


@pytest.fixture
def my_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    generator = np.random.default_rng(0)
    for name in ("bee", "wasp"):
        (tmp_path / "my_images" / name).mkdir(parents=True)
        for n in range(20):
            pixels = generator.integers(0, 256, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "my_images" / name / f"{n}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "my_images"


@pytest.fixture
def run(my_images: Path) -> Any:
    return ssl_vit.train("pretrain_vit_tiny", data=my_images, run="runs/r", quiet=True, **SMALL, **SHORT)


def test_a_script_without_a_main_guard_runs(my_images: Path) -> None:
    (my_images.parent / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("started") == 1 and {"40", "3"} <= set(lines)


def test_a_run_is_an_object_that_other_functions_take(run: Any, my_images: Path) -> None:
    assert run.dir == Path("runs/r") and (run.dir / "encoder.safetensors").is_file() and run.summary.samples == 32
    assert run.metrics["step"].tolist() == [2, 4] and "loss" in run.metrics
    found = ssl_vit.evaluate(run, "knn", ks=[1], say=lambda text: None)
    assert found.about.data == {"train": f"{my_images}#train", "test": f"{my_images}#test"}, "the run's own data"
    assert set(found.table["arm"]) == {"trained", "untrained", "pixels"} and "accuracy" in found._repr_html_()
    assert set(ssl_vit.read_results(run)["evaluator"]) == {"knn"}
    with pytest.raises(UserError, match="either data, or train and test"):
        ssl_vit.evaluate(run, "knn", data=my_images, train=my_images)


def test_paths_may_be_objects_and_start_at_home(
    run: Any, my_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ssl_vit.train(run, quiet=True).dir == run.dir
    again = ssl_vit.train(
        "pretrain_vit_tiny", data=my_images, run=Path("~/again"), init_from=run, quiet=True, **SMALL, **SHORT
    )
    assert again.dir == tmp_path / "again" and (again.dir / "encoder.safetensors").is_file()
    frame = ssl_vit.embed("~/again", "~/my_images", workers=0, out="~/e.npz")
    assert len(frame) == 40 and (tmp_path / "e.npz").is_file()
    assert ssl_vit.load("~/again").num_features == 16 and len(ssl_vit.read_results("~/again")) == 0


def test_wrong_arguments_are_named(run: Any, my_images: Path) -> None:
    settings = load_recipe(run.dir)
    for keys in ({"data": my_images}, {"run": "elsewhere"}, {"training": {"steps": 7}}):
        with pytest.raises(UserError, match=f"{next(iter(keys))}: a loaded recipe takes no keys"):
            ssl_vit.train(settings, **keys)
    study = load_comparison("own_images_cpu", ["data=my_images"])
    with pytest.raises(UserError, match="seeds: a loaded comparison takes no keys"):
        ssl_vit.compare(study, seeds=[0])
    with pytest.raises(UserError, match="max_seeds requires until_decided"):
        ssl_vit.compare("own_images_cpu", data=my_images, max_seeds=9)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"pooling": "cls"}, "pooling=cls: choose one of token, mean"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"workers": -1}, "workers=-1"),
    ]
    for arguments, message in wrong:
        with pytest.raises(UserError, match=message):
            ssl_vit.embed(run, my_images, **arguments)
    with pytest.raises(UserError, match="tpyo: no such run"):
        ssl_vit.evaluate("tpyo", "few_shot")
    metric: Any = "balanced"
    with pytest.raises(UserError, match="metric=balanced: choose one of accuracy, mean_per_class"):
        ssl_vit.evaluate(run, "knn", metric=metric)
    to: Any = "onnx"
    with pytest.raises(UserError, match="to=onnx: choose one of timm, transformers"):
        ssl_vit.export(run, "out", to)
    assert not Path("out").exists()
    compiled: Any = torch.compile(ssl_vit.load(run))
    with pytest.raises(UserError, match=r"compiled .*that torch\.compile was called with"):
        ssl_vit.embed(compiled)
    for place in ("nowhere", my_images, run.dir / "metrics.jsonl"):
        with pytest.raises(UserError, match="neither a run nor a comparison"):
            ssl_vit.read_results(place)


def test_all_training_images_leave_none_to_test_on(my_images: Path) -> None:
    run = ssl_vit.train(
        "pretrain_vit_tiny", data={"train": str(my_images)}, run="runs/all", quiet=True, **SMALL, **SHORT
    )
    assert run.summary.samples == 40
    for given in (None, my_images, f"{my_images}/", f"{my_images.parent}/./{my_images.name}"):
        with pytest.raises(UserError, match=r"on images of the test set .*my_images"):
            ssl_vit.evaluate(run, "knn", data=given)
    with pytest.raises(UserError, match="on images of the test set"):
        ssl_vit.evaluate(run, "knn", train=f"{my_images}#train", test=f"{my_images.parent}/./{my_images.name}")


def test_classifiers_on_test_images_are_noted(run: Any, my_images: Path) -> None:
    for train, noted in ((my_images, True), (f"{my_images}#train", False)):
        found = ssl_vit.evaluate(run, "knn", train=train, test=f"{my_images}#test", ks=[1])
        assert any("images in common" in note for note in found.about.notes) == noted


def test_a_run_inside_the_images_is_refused(my_images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pictures would be images of another class."""
    monkeypatch.chdir(my_images)
    with pytest.raises(UserError, match="runs/pretrain_vit_tiny lies inside"):
        ssl_vit.train("pretrain_vit_tiny", data=".", quiet=True, **SMALL, **SHORT)
    with pytest.raises(UserError, match="runs/own_images_cpu lies inside"):
        ssl_vit.compare("own_images_cpu", data=".")
    assert not Path("runs").exists()


def test_a_holdout_that_was_drawn_again_is_not_evaluated_on(my_images: Path) -> None:
    run = ssl_vit.train(
        "pretrain_vit_tiny", data={"train": f"{my_images}#train"}, run="runs/held", quiet=True, **SMALL, **SHORT
    )
    assert len(ssl_vit.evaluate(run, "knn", data=my_images).table)
    Image.new("RGB", (32, 32)).save(my_images / "bee" / "new.png")
    arms = {"held": {"label": "held", "weights": str(run.dir)}}
    with pytest.raises(UserError, match="trained on other shards"):
        ssl_vit.compare("own_images_cpu", data=my_images, arms=arms)
    with pytest.raises(UserError, match="trained on other shards"):
        ssl_vit.evaluate(run, "knn", data=my_images)
    second = ssl_vit.train(
        "pretrain_vit_tiny",
        data={"train": f"{my_images}#train"},
        run="runs/second",
        init_from=str(run.dir),
        quiet=True,
        **SMALL,
        **SHORT,
    )
    with pytest.raises(UserError, match=r"runs/held.*trained on other shards"):  # by the run that it starts from
        ssl_vit.evaluate(second, "knn", data=my_images)
    started = {"ssl": {"overrides": [f"init_from={run.dir}"]}}
    with pytest.raises(UserError, match="trained on other shards"):
        ssl_vit.compare("own_images_cpu", data=my_images, arms=started)


def test_a_holdout_of_shards_that_was_drawn_again_is_not_evaluated_on(my_images: Path) -> None:
    def make(**how: bool) -> None:
        pack(open_source(str(my_images)), Path("shards"), Options(holdout=0.5), progress=False, **how)

    make()
    settings = {"data": {"train": "shards/train"}, "run": "runs/held", **SMALL, **SHORT}
    run = ssl_vit.train("pretrain_vit_tiny", quiet=True, **settings)
    assert len(ssl_vit.evaluate(run, "knn", data="shards").table)
    Image.new("RGB", (32, 32)).save(my_images / "bee" / "new.png")
    make(overwrite=True)
    for _ in range(2):
        with pytest.raises(UserError, match="trained on other shards"):
            ssl_vit.evaluate(run, "knn", data="shards")
        shutil.rmtree(run.dir / "checkpoints", ignore_errors=True)  # the second time from its summary
    shutil.rmtree("shards/train")
    with pytest.raises(UserError, match=r"the part that runs/held was trained on cannot be read .* restore it"):
        ssl_vit.evaluate(run, "knn", train="shards/test", test="shards/test")


def test_a_train_folder_without_a_test_folder_is_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "train" / "bee").mkdir(parents=True)
    (tmp_path / "raw").mkdir()
    train = f"{tmp_path}/train"
    assert train_and_test(train) == (f"{train}#train", f"{train}#test")
    (tmp_path / "train" / "0.tar").touch()
    assert train_and_test(train) == (f"{tmp_path}#train", f"{tmp_path}#test"), "shards are the part itself"
    (tmp_path / "train" / "0.tar").unlink()
    (tmp_path / "val").mkdir()
    assert train_and_test(train) == (f"{tmp_path}#train", f"{tmp_path}#test")
    for place in ("s3://b/x", "s3://b/x/train", "s3://b/x#train"):
        assert train_and_test(place) == ("s3://b/x#train", "s3://b/x#test")


@pytest.mark.parametrize(
    ("trained", "test", "seen"),
    [
        ("flat", "flat#test", True),
        ("imagefolder:flat", "flat#test", True),
        ("flat#train", "flat#test", False),
        ("flat#train", "flat", True),
        ("hf:some/images#train", "hf:some/images", True),
        ("parts", "flat#test", False),
        ("parts#val", "parts#test", True),
        ("parts/val", "parts#test", True),
        ("parts#train", "parts#test", False),
        ("alone/train", "alone#test", True),  # a holdout of these images
        ("s3://b/x/test/", "s3://b/x#test", True),
        ("s3://b/x/train", "s3://b/x#test", False),
        (".", "flat#test", True),  # images in folders below are images of the whole
        ("imagefolder:.", "parts/val", True),
        ("flat/bee", "flat", True),
        ("flat/bee", "parts", False),
        (".", "hf:some/images#test", False),
    ],
)
def test_names_of_the_test_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: str, test: str, seen: bool
) -> None:
    """`#test` is a holdout of images without splits, and `val` where there is no `test`."""
    monkeypatch.chdir(tmp_path)
    for folder in ("flat/bee", "parts/train/bee", "parts/val/bee", "alone/train/bee"):
        Path(folder).mkdir(parents=True)
    assert saw_images([trained], test) == seen


def test_embeddings_name_their_files_and_preprocess_gives_the_same_pixels(run: Any, my_images: Path) -> None:
    frame = ssl_vit.embed(run, my_images, pooling="patches", workers=0)
    assert set(frame["file"]) == {f"{name}/{n}.png" for name in ("bee", "wasp") for n in range(20)}
    assert (frame["file"].str.startswith("wasp") == (frame["label"] == 1)).all()
    network: Any = ssl_vit.load(run)
    with torch.no_grad():
        for image in (my_images / frame["file"][7], Image.open(my_images / frame["file"][7])):
            tokens_1ND = network.forward_features(network.preprocess(image)[None])[:, network.num_prefix_tokens :]
            ours = frame["embedding"][7].reshape(*frame.attrs["grid"], -1)
            np.testing.assert_allclose(ours.reshape(tokens_1ND[0].shape), tokens_1ND[0], atol=1e-5)
    with pytest.raises(UserError, match="not a readable image"):
        network.preprocess(b"no image")
    with pytest.raises(UserError, match=r"none\.png: cannot be read: No such file"):
        network.preprocess("none.png")
    lying, exif = Image.fromarray(np.arange(20 * 30 * 3, dtype=np.uint8).reshape(20, 30, 3)), Image.Exif()
    exif[0x0112] = 6
    for file in (my_images.parent / "lying.jpg", my_images.parent / "lying.tif"):
        lying.save(file, exif=exif)
        with Image.open(file) as image:
            torch.testing.assert_close(network.preprocess(image), network.preprocess(file))
    lying.save(damaged := io.BytesIO(), "PNG", exif=b"Exif\0\0JUNKJUNKJUNK")
    torch.testing.assert_close(network.preprocess(Image.open(damaged)), network.preprocess(lying))
    gray = Image.fromarray((np.arange(20 * 30).reshape(20, 30) * 100).astype(">u2"))
    gray.save(my_images.parent / "gray.tif")
    torch.testing.assert_close(network.preprocess(gray), network.preprocess(my_images.parent / "gray.tif"))
    for values in (np.asarray(gray, np.float32) / 6e4, np.asarray(gray, np.int32) * 2):
        with pytest.raises(UserError, match=r"mode F.*scale them to 8 or 16 bits|outside 16 bits"):
            network.preprocess(Image.fromarray(values))
    assert network.preprocess(lying.convert("CMYK")).shape == network.preprocess(lying).shape
    assert len(ssl_vit.embed(run, workers=0)) == 32, "by default the run's training images"


def test_a_network_is_freed_with_its_last_reference(run: Any) -> None:
    network = ssl_vit.load(run)
    freed = weakref.ref(network)
    gc.disable()
    del network
    gc.enable()
    assert freed() is None


def test_a_wrong_key_is_refused_before_torch_is_imported() -> None:
    calls = {
        "train('pretrain_vit_tiny', training={'stepz': 1})": "training.stepz: unknown key; did you mean 'steps'",
        "train('pretrain_vit_tiny', trainings={})": "trainings: unknown key; did you mean 'training'",
        "compare('own_images', data='x', seedz=[0])": "seedz: unknown key; did you mean 'seeds'",
        "train('pretrain_vit_tinny')": "did you mean 'pretrain_vit_tiny'",
    }
    each = "try: ssl_vit.{}\nexcept Exception as error: print(' '.join(str(error).split()), 'torch' in sys.modules)"
    code = "\n".join(["import sys, ssl_vit", *map(each.format, calls)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    for line, message in zip(done.stdout.splitlines(), calls.values(), strict=True):
        assert message in line and line.endswith("False"), done.stderr


def test_few_labels_and_many_unlabeled_images(my_images: Path, tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    (tmp_path / "unlabeled").mkdir()
    for n in range(24):
        Image.fromarray(generator.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(tmp_path / f"unlabeled/{n}.png")
    arm = [f"encoder.{key}={value}" for key, value in SMALL["encoder"].items()]
    arm += ["training.steps=2", "training.batch_size=16", "data.workers=0", "data.lanes=8"]
    found = ssl_vit.compare(
        "own_images_cpu",
        data={"train": "my_images", "pretrain": "unlabeled"},
        run="runs/few",
        seeds=[0],
        frozen_seeds=[0],
        pretrainings=1,
        labels_per_class=[1],
        pictures=False,
        arms={name: {"overrides": arm} for name in ("ssl", "supervised")},
        evaluators={
            "few_shot": {"labels_per_class": [1]},
            "fine_tune": {"sweep": {"training.steps": [1], "optim.lr": [0.001]}, "training": {"batch_size": 8}},
        },
        say=lambda text: None,
    )
    samples = {arm: made.samples for arm in ("ssl", "supervised") if (made := found.comparison.pretraining(arm))}
    assert samples == {"ssl": 24 + 32, "supervised": 32}
    assert isinstance(found.table, pd.DataFrame) and found.report() == Path("runs/few/report.html")
    assert found.headline in found.report().read_text()


@pytest.mark.parametrize("place", ["2024", "0123", "true", "null", "a: b", "~x", "&x", "[x].jpg"[1:]])
def test_a_place_may_look_like_another_value(place: str) -> None:
    assert load_recipe("pretrain_vit_tiny", [f"data={place}"]).data.train == f"{place}#train"
    with pytest.raises(UserError, match="data=2024: name a folder"):
        load_recipe("pretrain_vit_tiny", {"data": 2024})


@pytest.mark.parametrize("order", [1, -1])
def test_a_place_and_other_keys_of_data_do_not_replace_each_other(order: int) -> None:
    keys = ["data=x", "data.workers=0", "data.lanes=8"][::order]
    data = load_recipe("pretrain_vit_tiny", keys).data
    assert (data.train, data.workers, data.lanes, data.augment.crop) == ("x#train", 0, 8, "inception")
    assert load_recipe("pretrain_vit_tiny", {"data": "x", "data.workers": 0}).data == data.model_copy(
        update={"lanes": 32}
    )
    compared = load_comparison("photos_cpu", ["data=x", "data.remote.retries=1"][::order]).comparison.data
    assert (compared.train, compared.test, compared.pretrain) == ("x#train", "x#test", None)
    assert compared.remote and compared.remote.retries == 1
    few = load_comparison("own_images", ["data.pretrain=u", "data.train=x"][::order]).comparison.data
    assert (few.train, few.test, few.pretrain) == ("x#train", "x#test", "u")
    own = load_comparison("own_images", ["data.pretrain=u"]).comparison.data
    assert (own.train, own.test, own.pretrain) == ("shards#train", "shards#test", "u")


def test_the_own_data_of_a_run_are_the_images_that_it_was_trained_on(
    my_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another directory, a relative name may lead to other images, or to none."""
    ssl_vit.train("pretrain_vit_tiny", data="my_images", run="runs/r", quiet=True, **SMALL, **SHORT)
    run, other = tmp_path / "runs" / "r", tmp_path / "other"
    shutil.copytree(my_images, other / "my_images")
    Image.new("RGB", (20, 20)).save(other / "my_images" / "bee" / "new.png")
    calls = (lambda: ssl_vit.embed(run)), (lambda: ssl_vit.evaluate(run, "few_shot"))
    monkeypatch.chdir(other)
    for call in calls:
        with pytest.raises(UserError, match=r"does not name the images that .*runs/r was trained on"):
            call()
    monkeypatch.chdir(run)
    for call in calls:
        with pytest.raises(UserError, match=r"training data of .*runs/r cannot be read.*data\.train=my_images#train"):
            call()
    written = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(written.replace("train: my_images#train", "train: [{shards: my_images#train}]"))
    for call in calls:
        with pytest.raises(UserError, match=r"runs/r: data\.train of its recipe is a list; name"):
            call()


def test_images_that_cannot_be_packed_are_reported_by_every_command(my_images: Path) -> None:
    (my_images / "bee" / "text.jpg").write_text("hello")
    (my_images / "wasp" / "cut.png").write_bytes((my_images / "wasp" / "0.png").read_bytes()[:-40])
    train: dict[str, Any] = {"data": "my_images", **SMALL, **SHORT}
    names = {"bee/text.jpg", "wasp/cut.png"}
    for run in ("runs/first", "runs/from_the_cache"):
        ssl_vit.train("pretrain_vit_tiny", run=run, **train)
        events = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        logged = [sample["key"] for one in events if "samples" in one for sample in one["samples"]]
        frame = ssl_vit.embed(run, "my_images#test")
        found = logged + [sample["key"] for sample in frame.attrs["skipped"]]
        assert sorted(found) == sorted(names), "each is in one of the two parts"
        about = ssl_vit.evaluate(run, "knn", labels_per_class=5, ks=[3]).about
        assert {sample.key for sample in about.skipped} == names
    for part in ("train", "test"):
        with pytest.raises(UserError, match=r"(text\.jpg: not an image|cut\.png: .*) \(data\.on_bad_sample=fail\)"):
            strict = {**train, "data": {"train": f"my_images#{part}", "on_bad_sample": "fail"}}
            ssl_vit.train("pretrain_vit_tiny", run="runs/strict", **strict)


def test_unlabeled_images_cannot_be_trained_on_with_labels(my_images: Path) -> None:
    with pytest.raises(UserError, match="the images have no labels; put them into one subfolder per class"):
        ssl_vit.train("supervised_vit_tiny", data="my_images/bee", run="runs/a", **SMALL, **SHORT)
