"""What `plan.json` tells the report about the data of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from ssl_vit.comparison import run as comparison
from ssl_vit.comparison.config import load_comparison
from ssl_vit.comparison.record import record_of
from ssl_vit.interfaces import UserError
from ssl_vit.models import factory
from ssl_vit.recipe import load_recipe, save
from tests.report.made import SUMMARY
from tests.tars import encoded, write_tar

FEW = ("evaluators.fine_tune=null", "seeds=[0]", "frozen_seeds=[0]", "pretrainings=1")


def pretrained_elsewhere(*keys: str) -> set[str]:
    """Arms whose pretraining data is recorded beside the data of the evaluation."""
    study = load_comparison("demo_digits", [*FEW, *keys])
    checked = comparison.check(study, pack=False)
    data = record_of(checked.plan, checked.shards, "").data
    assert {"data train", "data test"} <= set(data)
    return {name.removeprefix("pretraining of ") for name in data if name.startswith("pretraining of ")}


def test_every_arm_that_pretrains_on_other_data_is_recorded(few_digits: Path, tmp_path: Path) -> None:
    train, test = (f"{few_digits}/{part}" for part in ("train", "test"))
    keys = [f"run={tmp_path}", f"data={{train: {train}, test: {test}, folds: []}}"]
    assert pretrained_elsewhere(*keys) == set()
    assert pretrained_elsewhere(*keys, "arms.supervised.data.samples=100") == {"supervised"}
    other = tmp_path / "other"
    other.mkdir()
    (other / "0.tar").symlink_to(next(Path(train).glob("*.tar")))
    classes = "arms.supervised.objective.classes=10"
    assert pretrained_elsewhere(*keys, f"data.pretrain={other}", classes) == {"ssl", "supervised"}


def test_every_arm_that_saw_training_images_is_recorded(
    few_digits: Path, saved: Callable[..., Path], tmp_path: Path
) -> None:
    train, test = (f"{few_digits}/{part}" for part in ("train", "test"))
    (tmp_path / "other").mkdir()
    members = {f"{n}.png": encoded(Image.new("L", (8, 8), n)) for n in range(8)}
    write_tar(tmp_path / "other/0.tar", sorted(members.items()))
    settings = load_recipe("digits_ssl", [f"data.train={train}", f"run={tmp_path}/given"])
    saved(tmp_path / "given", factory.build(settings.encoder))
    save(settings, tmp_path / "given" / "recipe.yaml")
    (tmp_path / "given" / "summary.json").write_text(SUMMARY.model_dump_json())
    keys = [f"run={tmp_path}", f"data={{train: {train}, test: {test}, folds: []}}", "arms.supervised.data.samples=100"]
    keys += [f"arms.given={{label: given, weights: {tmp_path}/given}}", f"arms.ssl.data.train={tmp_path}/other"]
    checked = comparison.check(load_comparison("demo_digits", [*FEW, *keys]), pack=False)
    record = record_of(checked.plan, checked.shards, "")
    saw = {arm.name: arm.saw for arm in record.arms}
    assert saw == {"ssl": (), "scratch": (), "supervised": ("data",), "given": ("data",)}
    assert [record.data[f"data {part}"].labeled_classes for part in ("train", "test")] == [10, None]
    assert [record.data[name].samples for name in ("data train", "pretraining of supervised")] == [400, 100]
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep/er")
    checked = comparison.check(
        load_comparison("demo_digits", [*FEW, f"run={tmp_path}/link/run", *keys[1:]]), pack=False
    )
    (given,) = [arm for arm in record_of(checked.plan, checked.shards, "").arms if arm.name == "given"]
    assert given.run and (tmp_path / "deep/er/run" / given.run).resolve() == (tmp_path / "given").resolve()


def test_pretraining_on_test_images_is_refused(few_digits: Path, saved: Callable[..., Path], tmp_path: Path) -> None:
    train, test = (f"{few_digits}/{part}" for part in ("train", "test"))
    keys = [f"run={tmp_path}", f"data={{train: {train}, test: {test}, folds: []}}"]
    for same in (test, f"{test}/", f"{few_digits}/./test", f"{test}/*.tar", f"[{train},{test}]"):
        with pytest.raises(UserError, match=r"arms\.supervised: .*includes images of the test set"):
            pretrained_elsewhere(*keys, f"arms.supervised.data.train={same}")
    settings = load_recipe("digits_ssl", [f"data.train={test}/*.tar", f"run={tmp_path}/given"])
    (tmp_path / "given").mkdir()
    save(settings, tmp_path / "given" / "recipe.yaml")
    saved(tmp_path / "given", factory.build(settings.encoder))
    with pytest.raises(UserError, match=r"arms\.given: .*includes images of the test set"):
        pretrained_elsewhere(*keys, f"arms.given={{label: given, weights: {tmp_path}/given}}")
    for number in range(40):
        path = tmp_path / "mine" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(path)
    keys[1] = "data={{train: {0}#train, test: {0}#test, folds: [], pretrain: {0}}}".format(mine := tmp_path / "mine")
    with pytest.raises(UserError, match=f"{mine} includes images of the test set {mine}#test"):
        pretrained_elsewhere(*keys)
    with pytest.raises(UserError, match=f"imagefolder:{mine} includes images of the test set"):
        pretrained_elsewhere(*keys, f"data.pretrain=imagefolder:{mine}")
