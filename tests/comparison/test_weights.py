"""Arms with weights from elsewhere: imported once, named like other arms, skipped where the hub cannot be reached."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import timm
import yaml
from huggingface_hub import constants
from safetensors.torch import save_file

from ssl_vit.comparison import weights
from ssl_vit.comparison.config import load_comparison
from ssl_vit.comparison.dry_run import dry_run_comparison
from ssl_vit.interfaces import RunError, UserError
from ssl_vit.models import factory
from ssl_vit.models.exchange import hub
from ssl_vit.report.page import write_report

from .conftest import TUNING, Mini, quietly, stamps

HUB_NAME = "test_vit.r160_in1k"
SMALL = {"few_shot": {"image_size": 32}, "fine_tune": {"image_size": 32}}


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub that does not answer; returns its cache on this machine, which is empty."""
    monkeypatch.setattr(hub, "_answers", lambda: False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def resnet(path: Path, **metadata: str) -> str:
    save_file(timm.create_model("test_resnet", num_classes=3, in_chans=1).state_dict(), path, metadata or None)
    return str(path)


def test_a_file_is_an_arm_in_one_line(mini: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    resnet(tmp_path / "my.safetensors", architecture="test_resnet")
    evaluators = {"few_shot": {"labels_per_class": [1]}, "fine_tune": TUNING | {"sweep": {"training.steps": [2]}}}
    recipe = mini(seeds=[0], evaluators=evaluators)
    override = f"arms.mine={{label: mine, weights: my.safetensors, evaluators: {json.dumps(SMALL)}}}"
    found = quietly(recipe, override)
    assert found.missing == ()
    frame = found.table.frame
    rows = {name: set(part["arm"]) for name, part in frame.groupby("evaluator")}
    assert rows == {
        "few_shot": {"ssl", "mine", "untrained", "untrained_mine", "pixels"},
        "fine_tune": {"ssl", "scratch", "mine"},
    }
    mine = next(arm for arm in found.record.arms if arm.name == "mine")
    assert (mine.kind, mine.run, mine.starts_from) == ("weights", "weights/mine", "my.safetensors")
    saved = yaml.safe_load((tmp_path / "run" / "comparison.yaml").read_text())
    assert saved["arms"]["mine"]["weights"] == "my.safetensors"
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "unknown: pretrained weights" in page and "minus mine" in page
    before = stamps(tmp_path / "run")
    quietly(recipe, override)
    assert stamps(tmp_path / "run") == before, "imported again, the weights are the same"
    resnet(tmp_path / "my.safetensors", architecture="test_resnet")
    quietly(recipe, override)
    changed = {task for task, stamp in stamps(tmp_path / "run").items() if stamp != before[task]}
    assert changed == {"few_shot-mine-0", "fine_tune-mine-2-0"}, "other weights in the same file"


def test_the_architecture_may_be_a_key(mini: Mini, tmp_path: Path) -> None:
    path = resnet(tmp_path / "bare.safetensors")
    arm: dict[str, Any] = {"label": "mine", "weights": path, "evaluators": SMALL}
    arms = {"mine": arm, "scratch": {"label": "scratch"}}
    with pytest.raises(UserError, match=r"arms\.mine: .*does not state its architecture"):
        quietly(mini(arms=arms))
    arm["architecture"] = "test_resnet"
    found = dry_run_comparison(load_comparison(mini(arms=arms)))
    assert found.not_estimated == ["mine", "untrained"]
    assert factory.load(tmp_path / "run" / "weights" / "mine").name == "test_resnet"


def test_features_that_the_weights_do_not_have_are_refused_before_the_first_task(mini: Mini, tmp_path: Path) -> None:
    path = resnet(tmp_path / "my.safetensors", architecture="test_resnet")
    arms = {"mine": {"label": "mine", "weights": path, "evaluators": {"few_shot": {"image_size": 32, "block": 1}}}}
    recipe = mini(arms=arms, seeds=[0], evaluators={"few_shot": {"labels_per_class": [1]}})
    with pytest.raises(UserError, match=r"evaluators\.few_shot, mine: block=1"):
        dry_run_comparison(load_comparison(recipe))
    assert not (tmp_path / "run" / "tasks").exists()


def test_an_optional_arm_is_skipped_where_the_hub_is_out_of_reach(
    mini: Mini, tmp_path: Path, no_hub: Path, call: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_arm = {"label": "ImageNet", "weights": f"timm:{HUB_NAME}", "optional": True, "evaluators": SMALL}
    arms = {"ssl": {"label": "SSL", "recipe": "digits_ssl", "overrides": ["training.steps=2"]}, "timm": hub_arm}
    recipe = mini(arms=arms, seeds=[0], evaluators={"few_shot": {"labels_per_class": [1]}})
    code, said = call("compare", recipe, "--list")
    assert code == 0 and "arms.timm is skipped" in said
    found = quietly(recipe)
    assert [arm.name for arm in found.record.arms] == ["ssl"] and found.missing == ()
    (note,) = found.record.notes
    assert "ImageNet was skipped" in note and HUB_NAME in note
    assert "ImageNet was skipped" in write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    required = {**arms, "timm": hub_arm | {"optional": False}}
    with pytest.raises(RunError, match=r"arms\.timm: .*the hub does not answer"):
        quietly(mini(arms=required))
    with pytest.raises(RunError, match=r"arms\.timm: .*the hub does not answer"):
        quietly(mini(arms={"timm": hub_arm}))
    for baseline in ("ssl", "timm"):
        with pytest.raises(RunError, match=r"arms\.timm: .*the hub does not answer"):
            quietly(mini(arms=arms, baseline=baseline))
    with monkeypatch.context() as full_disk:
        full_disk.setattr(weights, "import_weights", Mock(side_effect=RunError("No space left on device")))
        with pytest.raises(RunError, match=r"arms\.timm: No space left"):
            quietly(mini(arms=arms))
    fill(no_hub)
    recipe = mini(arms=arms, seeds=[0], evaluators={"few_shot": {"labels_per_class": [1]}})
    found = quietly(recipe)
    assert [arm.name for arm in found.record.arms] == ["ssl", "timm"] and found.record.notes == ()
    encoder = factory.load(tmp_path / "run" / "weights" / "timm")
    assert (encoder.mean, encoder.image_size) == ((0.5,) * 3, (160, 160)), "as timm's configuration of the name says"
    shutil.rmtree(no_hub)
    assert quietly(recipe).missing == (), "what was imported needs no hub"


def fill(cache: Path) -> None:
    """The hub's client finds these weights without asking the hub."""
    folder = cache / f"models--timm--{HUB_NAME}"
    (folder / "snapshots" / "0").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0")
    network = timm.create_model(HUB_NAME, num_classes=1000)
    save_file(network.state_dict(), folder / "snapshots" / "0" / "model.safetensors")


def test_nothing_is_imported_into_the_directory_of_a_training_run(mini: Mini, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").touch()
    override = f"arms.mine={{label: mine, weights: {resnet(tmp_path / 'my.safetensors', architecture='test_resnet')}}}"
    with pytest.raises(UserError, match="holds a training run"):
        dry_run_comparison(load_comparison(mini(), [override]))
    assert not (tmp_path / "run" / "weights").exists()
