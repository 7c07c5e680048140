"""What a comparison says about its data before the first task."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
from PIL import Image

from ssl_vit.comparison import run as comparison
from ssl_vit.comparison.config import load_comparison
from ssl_vit.interfaces import UserError
from ssl_vit.models import factory
from ssl_vit.recipe import load_recipe, save
from tests.report.made import SUMMARY

from .conftest import STEPS, Mini

HALF = "flowers (folder), {} part of holdout 0.5, seed 0"


@pytest.mark.parametrize(("pretraining", "test", "noted"), [
    ("flowers (folder)", HALF.format("test"), True),  # all of them, packed once more
    ("flowers (folder), 5 images per class, seed 0", HALF.format("test"), True),
    (HALF.format("train").replace("seed 0", "seed 1"), HALF.format("test"), True),
    (HALF.format("train"), HALF.format("test"), False),
    ("flowers (folder), fold_1 of 3, seed 0", "flowers (folder), fold_0 of 3, seed 0", False),
    ("flowers/train (folder)", "flowers/test (folder)", False),
    ("digits (scikit-learn)", "digits (scikit-learn), split test", True),
    ("flowers", "flowers, split train.clean", True),
    ("digits (scikit-learn), split train", "digits (scikit-learn), split test", False),
    (None, None, False),
])  # fmt: skip
def test_pretraining_data_that_may_include_test_images_are_noted(
    few_digits: Path, tmp_path: Path, pretraining: str | None, test: str | None, noted: bool
) -> None:
    """The same images have other checksums in shards of another packing."""
    for part, source in (("train", pretraining), ("test", test)):
        copytree(few_digits / part, tmp_path / part)
        info = tmp_path / part / "info.json"
        info.write_text(json.dumps(json.loads(info.read_text()) | {"source": source}))
    keys = [f"run={tmp_path}/run", f"data={{train: {tmp_path}/train, test: {tmp_path}/test, folds: []}}"]
    study, said = load_comparison("demo_digits", keys), list[str]()
    comparison.check(study, said.append, pack=False)
    assert any("arms.ssl" in note and "pretrained on test images" in note for note in said) == noted
    assert any("the evaluators train on test images" in note for note in said) == noted


@pytest.mark.parametrize(("folders", "labeled"), [(("images",), False), (("2023", "2024"), True)])
def test_folders_of_pretraining_images_are_labels_only_if_there_are_several(
    mini: Mini, few_digits: Path, tmp_path: Path, folders: tuple[str, ...], labeled: bool
) -> None:
    for number in range(40):
        path = tmp_path / "more" / folders[number % len(folders)] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(path)
    sets = {part: f"{few_digits}/{part}" for part in ("train", "test")}
    supervised = {"label": "all labels", "recipe": "digits_supervised", "overrides": STEPS}
    recipe = mini(data=sets | {"pretrain": f"{tmp_path}/more"}, arms={"supervised": supervised})
    study, said = load_comparison(recipe), list[str]()
    plan = comparison.check(study, said.append).plan
    recipes, notes = plan.recipes, plan.study.comparison.notes
    assert recipes["supervised"].data.places == ((f"{tmp_path}/more",) if labeled else (f"{few_digits}/train",))
    for shown in (said, notes):
        assert any("has 2 classes of its own, such as 2023:" in note for note in shown) == labeled


def test_a_run_that_labels_may_have_stopped_is_refused(
    mini: Mini, few_digits: Path, saved: Callable[..., Path], tmp_path: Path
) -> None:
    keys = [f"data.train={few_digits}/train", f"run={tmp_path}/given", "probe.every=2", "probe.patience=3"]
    settings = load_recipe("digits_ssl", keys)
    given = saved(tmp_path / "given", factory.build(settings.encoder))
    save(settings, given / "recipe.yaml")
    (given / "summary.json").write_text(SUMMARY.model_dump_json())
    arms = {"given": {"label": "given", "weights": str(given)}}
    with pytest.raises(UserError, match=r"arms\.given: .*stopped early using labels"):
        comparison.check(load_comparison(mini(arms=arms)), pack=False)


@pytest.mark.parametrize("part", ["train", "test"])
def test_unreadable_images_stop_a_comparison_where_none_may_be_skipped(mini: Mini, tmp_path: Path, part: str) -> None:
    for number in range(12):
        path = tmp_path / "images" / ("train", "test")[number % 2] / "ab"[number % 3 // 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(path)
    (tmp_path / "images" / part / "a" / "cut.png").write_bytes(path.read_bytes()[:-40])
    recipe = mini(data={name: f"{tmp_path}/images#{name}" for name in ("train", "test")})
    comparison.check(load_comparison(recipe))
    with pytest.raises(UserError, match=r"a/cut\.png: .*data\.on_bad_sample=fail"):
        comparison.check(load_comparison(recipe, ["arms.*.data.on_bad_sample=fail"]))
