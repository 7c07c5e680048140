from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image

from ssl_vit import api, cli, results
from ssl_vit import recipe as recipes
from ssl_vit.files import write_json
from ssl_vit.models import EncoderConfig, factory
from ssl_vit.models.exchange.exports import Use
from ssl_vit.report import card
from tests.report.made import SUMMARY, row

Make = Callable[..., Any]


def write(model: Any, given: Path, to: str = "timm", **options: Any) -> str:
    options = {"title": "digits", "license": None} | options
    return card.write(model, given, to, card.evaluated(given), **options)


@pytest.fixture
def run(saved: Make, tmp_path: Path, make_encoder: Make) -> Path:
    """A finished run of the shipped recipe on shards with a license, evaluated once, with one checkpoint."""
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "000000.tar").touch()
    info = {"classes": ["a", "b"], "samples": 7, "shards": [{"file": "000000.tar", "samples": 7}]}
    (shards / "info.json").write_text(json.dumps(info | {"source": "my | photographs", "license": "CC BY 4.0"}))
    folder = saved(tmp_path / "run", make_encoder())
    (folder / "results").mkdir()
    recipe = recipes.load_recipe("digits_ssl", [f"data.train={shards}", f"run={folder}", "training.batch_size=32"])
    recipes.save(recipe, folder / "recipe.yaml")
    summary = SUMMARY.model_copy(update={"name": "digits_ssl", "steps": 900, "images_seen": 28800, "seconds": 61.5})
    write_json(folder / "summary.json", summary.model_dump())
    hardware = {"gpus": ["NVIDIA H200", "NVIDIA H200"], "processor": "EPYC", "cores": 16}
    machine = {"hardware": hardware, "versions": {"torch": "2.9.1"}, "world_size": 2, "git": "abc123"}
    (folder / "environment.json").write_text(json.dumps(machine))
    rows = [
        row(arm, budget, seed, score, evaluator="few_shot", notes=("fewer than 2 images",))
        for arm, score in (("trained", 0.5), ("pixels", 0.25))
        for budget, seed in ((1, 0), (1, 1), (2, 0))
    ]
    about: dict[str, Any] = {
        "evaluator": "few_shot",
        "title": "Few-shot",
        "settings": {"l2": 32.0},
        "metric": "mean_per_class",
    }
    about |= {"data": {"train": "x", "test": "y"}, "skipped": [{"shard": "s.tar", "key": "k", "reason": "cut"}]}
    results.save(folder / "results" / "few_shot-1.json", rows, **about)
    checkpoint = saved(folder / "checkpoints" / "step_00000300", make_encoder())
    (checkpoint / "state.json").write_text(json.dumps({"progress": {"step": 300, "seconds": 20.0}}))
    return folder


def rows(text: str) -> dict[str, list[str]]:
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def test_the_card_tells_the_runs_story(run: Path, make_encoder: Make) -> None:
    text = write(make_encoder(), run, license="apache-2.0")
    found = rows(text)
    assert found["Parameters"] == [f"{sum(p.numel() for p in make_encoder().parameters()):,}"]
    assert "| Images | 16 x 16 pixels, 3 channel(s) |" in text
    assert "| Images | 7 |" in text
    assert (found["Steps"], found["Images seen"], found["Seconds"]) == (["900"], ["28,800"], ["61.5"])
    assert (found["Hardware"], found["Processes"], found["Commit"]) == (["NVIDIA H200, NVIDIA H200"], ["2"], ["abc123"])
    assert (found["Source"], found["License"]) == ([r"my \| photographs"], ["CC BY 4.0"])
    assert "**y: Few-shot. Test mean of the per-class accuracies, %, by labels per class**" in text
    assert found["digits_ssl"][0].startswith("50.0") and found["raw pixels"][0].startswith("25.0")
    assert found["raw pixels"][1] == "25.0 (1 of 2 seeds)", "one seed has no interval"
    assert "fewer than 2 images" in text and "half-width of a 95% interval" in text
    assert "1 sample(s) could not be used: s.tar: k (cut)" in text
    recipe = re.search(r"```yaml\n(.*?)\n```", text, re.DOTALL)
    assert recipe is not None
    assert recipe[1] == (run / "recipe.yaml").read_text().strip()
    assert text.endswith("The weights: apache-2.0. The training images: CC BY 4.0.\n")


def test_the_hub_reads_the_front_matter(run: Path, make_encoder: Make) -> None:
    data: Any = ModelCard(write(make_encoder(), run, license="apache-2.0", to="transformers")).data
    assert (data.license, data.library_name, data.tags) == ("apache-2.0", "transformers", ["ssl-vit"])
    assert "license" not in ModelCard(write(make_encoder(), run)).data.to_dict()


def test_a_checkpoint_has_its_own_steps_and_no_results(
    run: Path, make_encoder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = write(make_encoder(), run / "checkpoints" / "step_00000300")
    monkeypatch.chdir(run / "checkpoints" / "step_00000300")
    assert write(make_encoder(), Path()) == text, "by any path"
    monkeypatch.undo()
    checkpoints = run.rename(run.parent / "checkpoints")  # a run with this name is itself
    assert rows(write(make_encoder(), checkpoints))["Steps"] == ["900"]
    found = rows(text)
    assert (found["Steps"], found["Images seen"], found["Seconds"]) == (["300"], ["9,600"], ["20"])
    assert "Not measured" in text
    assert "Few-shot" not in text


def test_weights_in_the_folder_of_a_run_are_not_of_that_run(saved: Make, run: Path, make_encoder: Make) -> None:
    text = write(make_encoder(), saved(run / "imported" / "other", make_encoder()))
    assert "Steps" not in rows(text) and "digits_ssl" not in text


def test_shards_that_moved_are_said_to_be_out_of_reach(run: Path, make_encoder: Make) -> None:
    (run.parent / "shards").rename(run.parent / "elsewhere")
    text = write(make_encoder(), run)
    assert "the training shards could not be read when this card was written" in text
    assert "CC BY" not in text
    assert "The weights: not stated." in text


def test_the_card_shows_no_credentials_of_urls(run: Path, make_encoder: Make) -> None:
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text() + "# https://me:SECRET@host/x.tar?sig=SECRET&b=SECRET\n")
    text = write(make_encoder(), run)
    assert "SECRET" not in text and "# https://...@host/x.tar?...\n" in text


def test_imported_weights_tell_where_they_come_from(saved: Make, tmp_path: Path, make_encoder: Make) -> None:
    folder = saved(tmp_path, make_encoder())
    config = json.loads((folder / "config.json").read_text())
    config["imported"] = {"from": "some/model", "notes": ["guessed"], "skipped": ["head.bias"], "license": "mit"}
    (folder / "config.json").write_text(json.dumps(config))
    text = write(make_encoder(), folder)
    assert "imported from some/model." in text
    assert "- guessed" in text
    assert "skipped: head.bias" in text
    assert "imported under mit" in text


def test_the_pooling_is_of_an_evaluation_that_an_export_repeats(run: Path) -> None:
    def evaluate(evaluator: str, **settings: Any) -> None:
        about = {"evaluator": evaluator, "title": evaluator, "settings": settings, "metric": "accuracy"}
        rows = [row("trained", 1, 0, 0.5, evaluator=evaluator)]
        results.save(run / "results" / f"{evaluator}.json", rows, **about, data={"train": "x", "test": "y"})

    for file in (run / "results").iterdir():
        file.unlink()
    assert card.evaluated(run).pooling == "mean", "masked patch prediction does not train the class token"
    evaluate("few_shot", pooling="both")
    evaluate("knn", pooling="mean", block=6)
    evaluate("linear_probe", pooling="mean", image_size=192)
    assert card.evaluated(run).pooling == "both", "an export has the last block and the own size"
    recipe = recipes.load_recipe("digits_supervised", ["data.train=x", f"run={run}", "objective.pooling=token"])
    recipes.save(recipe, run / "recipe.yaml")
    evaluate("own_head")
    assert card.evaluated(run).pooling == "token"


@pytest.mark.parametrize("to", ["timm", "transformers"])
@pytest.mark.parametrize("pooling", ["mean", "token", "both", "patches"])
def test_the_code_in_the_card_gives_what_was_evaluated(
    saved: Make,
    run: Path,
    make_encoder: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    to: str,
    pooling: Any,
) -> None:
    """In the exported folder, as the card says: pixels, tokens and pooled features of an evaluation."""
    model = make_encoder(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)).eval()
    saved(run, model)
    rows = [row("trained", 1, 0, 0.5, evaluator="few_shot")]
    about = {"evaluator": "few_shot", "title": "Few-shot", "settings": {"pooling": pooling}, "metric": "accuracy"}
    results.save(run / "results" / "few_shot-1.json", rows, **about, data={"train": "x", "test": "y"})
    recipe = recipes.load_recipe(run, ["data.evaluation_resize=1.143"])
    recipes.save(recipe, run / "recipe.yaml")
    assert card.evaluated(run) == Use(1.143, pooling)
    monkeypatch.setattr(sys, "argv", ["ssl-vit", "export", str(run), str(tmp_path / "out"), "--to", to])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    text = (tmp_path / "out" / "README.md").read_text()
    code = re.search(r"```python\n(.*?)\n```", text, re.DOTALL)
    assert code is not None
    monkeypatch.chdir(tmp_path / "out")
    wave = np.sin(np.arange(40 * 50 * 3).reshape(40, 50, 3) / 700) * 100 + 128
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(wave.astype(np.uint8)).save("image.jpg", quality=95, exif=turned)
    names: dict[str, Any] = {}
    exec(code[1], names)
    ours: Any = api.load(run)
    np.testing.assert_allclose(np.asarray(names["images"][0]), ours.preprocess("image.jpg"), atol=3 / 255 / 0.4)
    with torch.no_grad():
        tokens = ours.forward_features(names["images"])
        np.testing.assert_allclose(np.asarray(names["tokens"]), tokens, atol=1e-4)
        np.testing.assert_allclose(np.asarray(names["features"]), model.pool(tokens, pooling), atol=1e-4)
    assert f"`tokens` is float32 (n, {', '.join(map(str, tokens.shape[1:]))}): the class token, then 4 x 4" in text
    assert "pooler" not in caplog.text


def test_a_resnet_returns_what_timm_says(saved: Make, tmp_path: Path) -> None:
    model = factory.build(EncoderConfig(name="test_resnet", image_size=(64, 96)))
    folder = saved(tmp_path, model)
    text = write(model, folder)
    assert "`forward_features` of timm's ResNet" in text and "2 x 3" in text
