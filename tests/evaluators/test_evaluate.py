"""`eval` on a real run: every evaluator beside its two references, from the command line's function."""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torchvision.transforms import v2

from ssl_vit import api, cli, recipe
from ssl_vit.data.packing import pack
from ssl_vit.data.packing.sources import open_source
from ssl_vit.data.samples import SampleReader
from ssl_vit.data.shards import open_shards
from ssl_vit.evaluators import features, fine_tune, tuning
from ssl_vit.evaluators.labels import labels_of
from ssl_vit.files import sha256
from ssl_vit.interfaces import Diverged, RunError, UserError
from ssl_vit.models import factory
from ssl_vit.objectives import classification
from ssl_vit.training.flops import training_flops

FAST = {
    "few_shot": ["shots=[1,5]"],
    "knn": ["ks=[5]"],
    "linear_probe": ["cs=[0.1]", "labels_per_class=5"],
    "fine_tune": [
        "lrs=[0.01]",
        "steps=[4]",
        "batch_size=16",
        "labels_per_class=5",
        "seeds=[0,1]",
        "augment.flip=false",
    ],
}


@pytest.fixture(scope="module")
def trained(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    for split in ("train", "test"):
        (folder / split).symlink_to(few_digits / split)
    keys = [f"data.train={folder}/train", f"run={folder}/run", "training.steps=3", "training.batch_size=16"]
    api.train(recipe.load_recipe("digits_ssl", keys), quiet=True)
    return folder


@pytest.mark.parametrize("name", FAST)
def test_every_evaluator_shows_both_references(trained: Path, name: str) -> None:
    run = trained / "run"
    result = api.evaluate(run, name, f"{trained}/train", f"{trained}/test", FAST[name])
    assert {key.split("/")[0] for key in result["values"]} == {"trained", "untrained", "pixels"}
    accuracies = [v for k, v in result["values"].items() if k.endswith("mean")]
    assert accuracies and all(0 <= value <= 1 for value in accuracies)
    for measured in result["measurements"]:
        assert len(measured["per_class"]) == 10
        assert measured["mean_per_class"] == pytest.approx(np.mean(measured["per_class"]), abs=1e-6)
    saved = json.loads((run / "results.json").read_text())["evaluations"]
    assert [old for old in saved if old["evaluator"] == name] == [json.loads(json.dumps(result))]


def test_repeating_an_evaluation_replaces_its_result(trained: Path) -> None:
    results = [
        api.evaluate(trained / "run", "knn", f"{trained}/train", f"{trained}/test", ["ks=[7]"]) for _ in range(2)
    ]
    assert results[0]["values"] == results[1]["values"], "frozen features are the same every time"
    saved = json.loads((trained / "run" / "results.json").read_text())["evaluations"]
    assert sum(old["settings"].get("ks") == [7] for old in saved) == 1


def test_a_checkpoint_is_judged_like_a_run(trained: Path) -> None:
    newest = sorted((trained / "run" / "checkpoints").iterdir())[-1]
    run, checkpoint = (
        api.evaluate(path, "knn", f"{trained}/train", f"{trained}/test", ["ks=[5]"])["values"]
        for path in (trained / "run", newest)
    )
    assert run == checkpoint


def test_features_are_extracted_once_for_all_evaluators(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (f"{trained}/train", f"{trained}/test")
    first = api.evaluate(trained / "run", "few_shot", *data, ["shots=[2]"])
    monkeypatch.setattr(features, "extract", None)  # nothing may be extracted any more
    again = api.evaluate(trained / "run", "few_shot", *data, ["shots=[2]"])
    assert again["measurements"] == first["measurements"], "a result repeats bit for bit"
    api.evaluate(trained / "run", "knn", *data, ["ks=[3]", "labels_per_class=2", "seeds=[0,1,2]"])  # the same
    with pytest.raises(TypeError, match="NoneType"):
        api.evaluate(trained / "run", "few_shot", *data, ["shots=[2]", "pooling=token"])


def test_only_the_images_that_a_label_budget_allows_are_read(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = api.run_recipe(trained / "run")
    task = api.make_task(trained / "run", settings, f"{trained}/train", f"{trained}/test")
    read: list[int] = []
    sample = SampleReader.sample

    def counted(self: SampleReader, shard: int, *where: int) -> Any:
        read.append(shard)
        return sample(self, shard, *where)

    monkeypatch.setattr(SampleReader, "sample", counted)
    found = dict(task.labeled_features("trained", features.Representation(), (1, 3, "all"), (0, 1)))
    assert len(read) == task.train.samples, "all are asked for"
    read.clear()
    few = dict(task.labeled_features("trained", features.Representation(), (1, 3), (0, 1)))
    assert len(read) == len({int(image) for one in few.values() for image in one.images}) < 61
    for place, one in few.items():
        assert one.images.tolist() == found[place].images.tolist()
        assert one.labels.tolist() == found[place].labels.tolist() == labels_of(task.train)[one.images].tolist()
        np.testing.assert_allclose(one.vectors, found[place].vectors, rtol=1e-5, atol=1e-6)


def test_the_cache_knows_other_weights_shards_and_preparation(trained: Path, tmp_path: Path) -> None:
    settings = api.run_recipe(trained / "run")
    assert settings
    train, test = f"{trained}/train", f"{trained}/test"

    def names(**changed: Any) -> set[str]:
        arguments = {"weights": trained / "run", "settings": settings, "train": train, "test": test} | changed
        task = api.make_task(**arguments, cache=tmp_path)
        for source in ("trained", "pixels"):
            task.features(source, "test", features.Representation())
        return {path.name for path in tmp_path.glob("*.safetensors")}

    assert len(names()) == 2
    assert len(names()) == 2, "the same again"
    assert len(names(weights=None)) == 3, "other weights; the pixels are the same"
    assert len(names(test=train)) == 5, "other shards"
    larger = settings.model_copy(update={"data": settings.data.model_copy(update={"evaluation_resize": 1.5})})
    assert len(names(settings=larger)) == 7, "other preparation"
    damaged = sorted(tmp_path.glob("*.safetensors"))[0]
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    names()
    names(weights=None)
    names(test=train)
    names(settings=larger)
    assert damaged.read_bytes() == whole, "what a full disk cut short is extracted again"


def test_large_raw_pixels_are_shrunk_by_area() -> None:
    small = torch.randint(0, 256, (2, 3, 8, 20), dtype=torch.uint8)
    torch.testing.assert_close(features._pixels(small), small.flatten(1) / 127.5 - 1)
    large = small.repeat_interleave(8, dim=2).repeat_interleave(3, dim=3)  # 64 x 60
    rows = small.float().repeat_interleave(4, dim=2)  # by area: 32 rows are the halves of 64
    wide = torch.nn.functional.adaptive_avg_pool2d(rows.repeat_interleave(3, dim=3), (32, 32))
    torch.testing.assert_close(features._pixels(large), wide.flatten(1) / 127.5 - 1)


@pytest.mark.parametrize(
    "keys",
    [
        ["image_size=12"],
        ["protocol=mae", "batch_size=16", "epochs=[1]", "labels_per_class=5%"],
        ["tune_labels_per_class=2", "labels_per_class=[3,all]", "steps=[1]"],
    ],
)
def test_fine_tuning_variants(trained: Path, keys: list[str]) -> None:
    keys = [*FAST["fine_tune"], "seeds=[0]", *keys]
    result = api.evaluate(trained / "run", "fine_tune", f"{trained}/train", f"{trained}/test", keys)
    found = [m for m in result["measurements"] if m["source"] == "trained"]
    assert all(0 <= m["accuracy"] <= 1 and m["flops"] > 0 for m in found)
    if "protocol=mae" in keys:
        assert result["settings"]["layer_decay"] == 0.65
        kept = [count - round(0.1 * count) for count in np.bincount(labels_of(open_shards(f"{trained}/train")))]
        assert found[0]["labels"] == sum(max(1, round(0.05 * count)) for count in kept)
        assert found[0]["images_seen"] == math.ceil(found[0]["labels"] / 16) * 16
    if "tune_labels_per_class=2" in keys:
        assert [m["labels"] for m in found] == [30, 400], "with all labels the held-out images are trained on too"


def fine_tuned(trained: Path, *keys: str) -> list[dict[str, Any]]:
    data = (f"{trained}/train", f"{trained}/test")
    result = api.evaluate(trained / "run", "fine_tune", *data, [*FAST["fine_tune"], *keys])
    return [m for m in result["measurements"] if m["source"] == "trained"]


def test_what_a_sweep_chose_and_what_a_budget_lacked_stays_with_the_number(trained: Path) -> None:
    found = fine_tuned(trained, "labels_per_class=[30,all]", "held_out=0.3", "steps=2")
    assert [m["chosen"] for m in found] == [{"lr": 0.01, "steps": 2}] * 4
    few = [m for m in found if m["labels_per_class"] == 30]
    assert all(m["labels"] < 300 and "gave fewer than 30 images, all that could be used" in m["notes"][0] for m in few)
    assert not any(m["notes"] for m in found if m["labels_per_class"] == "all")
    data = (f"{trained}/train", f"{trained}/test")
    for name, keys in (("knn", ["ks=5"]), ("linear_probe", ["cs=0.1"])):
        result = api.evaluate(trained / "run", name, *data, [*keys, "labels_per_class=99"])
        assert "10 class(es) gave fewer than 99 images" in result["measurements"][0]["notes"][-1]


def test_a_sweep_goes_on_without_a_rate_that_diverges_and_ends_with_an_outage(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, failure = fine_tune.train_classifier, list[Exception]()

    def failing(task: Any, encoder: Any, head: Any, optim: Any, **rest: Any) -> Any:
        if optim.lr == 0.02 and failure:
            raise failure[0]
        return train(task, encoder, head, optim, **rest)

    monkeypatch.setattr(fine_tune, "train_classifier", failing)
    failure.append(Diverged("the loss was not finite"))
    assert [m["chosen"]["lr"] for m in fine_tuned(trained, "lrs=[0.02,0.01]")] == [0.01, 0.01]
    failure[0] = RunError("HTTP status 503")
    with pytest.raises(RunError, match="503"):
        fine_tuned(trained, "lrs=[0.02,0.01]")


def test_a_single_candidate_is_taken_without_a_sweep(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, images = fine_tune.train_classifier, list[int]()

    def counted(*arguments: Any, **rest: Any) -> Any:
        images.append(len(rest["images"]))
        return train(*arguments, **rest)

    monkeypatch.setattr(fine_tune, "train_classifier", counted)
    found = fine_tuned(trained, "labels_per_class=[5,all]", "lrs=[0.02]", "steps=[2]", "seeds=[0]")
    assert [m["chosen"] for m in found] == [{"lr": 0.02, "steps": 2}] * 2
    assert images == [50, 400] * 2, "the encoder and its untrained twin, each once a label budget"


def test_a_chosen_rate_that_diverges_at_another_seed_is_named(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = fine_tune.train_classifier

    def failing(*arguments: Any, **rest: Any) -> Any:
        if rest["seed"] == 1:
            raise Diverged("the loss was not finite")
        return train(*arguments, **rest)

    monkeypatch.setattr(fine_tune, "train_classifier", failing)
    with pytest.raises(Diverged, match=r"lr=0.01, steps=4 diverged .* seed 1 .*; leave that rate out of fine_tune.lrs"):
        fine_tuned(trained)


def test_dropout_and_mixup_do_not_depend_on_what_came_before(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"data.train={trained}/train", f"run={tmp_path}/run", "training.steps=2", "training.batch_size=16"]
    api.train(recipe.load_recipe("digits_supervised", [*keys, "encoder.dropout=0.5"]), quiet=True)
    heads: list[torch.Tensor] = []

    def kept(task: Any, objective: Any, *rest: Any) -> Any:
        heads.append(objective.head.weight.detach().clone())
        return measurement(task, objective, *rest)

    measurement = fine_tune.measurement
    monkeypatch.setattr(fine_tune, "measurement", kept)
    for before in (1, 2):
        torch.manual_seed(before)
        np.random.seed(before)
        more = ["seeds=[0]", "labels_per_class=5", "mixup=0.8", "cutmix=1.0"]
        data = (f"{trained}/train", f"{trained}/test")
        api.evaluate(tmp_path / "run", "fine_tune", *data, [*FAST["fine_tune"], *more])
    once, again = heads[: len(heads) // 2], heads[len(heads) // 2 :]
    assert len(once) == 2 and not torch.equal(once[0], once[1])
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


def test_fine_tuning_may_set_the_dropout_of_every_arm(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"data.train={trained}/train", f"run={tmp_path}/run", "training.steps=2", "training.batch_size=16"]
    api.train(recipe.load_recipe("digits_supervised", [*keys, "encoder.dropout=0.5"]), quiet=True)
    measurement, rates = fine_tune.measurement, list[set[float]]()

    def seen(task: Any, objective: Any, *rest: Any) -> Any:
        rates.append({module.p for module in objective.modules() if isinstance(module, torch.nn.Dropout)})
        return measurement(task, objective, *rest)

    monkeypatch.setattr(fine_tune, "measurement", seen)
    for more in ([], ["dropout=0.25"], ["dropout=0"]):
        data = (f"{trained}/train", f"{trained}/test")
        keys = [*FAST["fine_tune"], "seeds=[0]", "labels_per_class=5", "steps=1", *more]
        api.evaluate(tmp_path / "run", "fine_tune", *data, keys)
    assert rates == [{0.0, 0.5}] * 2 + [{0.0, 0.25}] * 2 + [{0.0}] * 2, "never inside the attention"


def test_a_share_of_the_labels_is_as_many_for_every_evaluator(trained: Path) -> None:
    data = (f"{trained}/train", f"{trained}/test")
    more = {"fine_tune": [*FAST["fine_tune"], "seeds=[0]", "held_out=0.3"], "knn": ["ks=[5]"]}
    counts = {
        name: api.evaluate(trained / "run", name, *data, [*keys, "labels_per_class=10%"])["measurements"][0]["labels"]
        for name, keys in more.items()
    }
    assert counts["fine_tune"] == counts["knn"] == 40
    found = api.evaluate(trained / "run", "fine_tune", *data, [*more["fine_tune"], "labels_per_class=all"])
    assert {m["labels"] for m in found["measurements"]} == {400}, "raw pixels too"


def test_maes_protocol_takes_steps_in_place_of_its_epochs() -> None:
    assert fine_tune.Config(protocol="mae").epochs == (100,)
    assert fine_tune.Config.model_validate({"protocol": "mae", "steps": [500]}).epochs == ()


def test_what_diverges_is_counted_and_leaves_the_loss_scale_as_it_was(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = api.make_task(trained / "run", api.run_recipe(trained / "run"), f"{trained}/train", f"{trained}/test")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    monkeypatch.setattr(task.accelerator, "scaler", scaler)
    train = tuning.loop.train

    def spoilt(job: Any) -> Any:
        scaler.scale(torch.ones(()))
        scaler.update(0.5)
        if job.optim.lr == 0.2:
            error = Diverged("the loss was not finite")
            error.steps = 1
            raise error
        return train(job)

    monkeypatch.setattr(tuning.loop, "train", spoilt)
    config = fine_tune.Config.model_validate({"lrs": [0.01, 0.2], "steps": [2], "batch_size": 16, "lanes": 4})
    choice = fine_tune.Evaluator(config).choose(task, "trained", 5, 0)
    assert choice is not None and choice.chosen["lr"] == 0.01
    assert choice.images_seen == (2 + 1) * 16 and choice.flops > 0
    assert scaler.get_scale() == 8.0


def test_results_of_weights_that_are_gone_are_left_out(trained: Path, tmp_path: Path) -> None:
    run, data = tmp_path / "run", (f"{trained}/train", f"{trained}/test")
    shutil.copytree(trained / "run", run)
    (run / "results.json").unlink(missing_ok=True)
    for name, keys in (("knn", ["ks=[5]"]), ("few_shot", ["shots=[2]"])):
        api.evaluate(run, name, *data, keys)
    other = factory.load(run)
    tensors = factory.state(other)
    tensors["norm.bias"] = tensors["norm.bias"] + 1
    save_file(tensors, run / "encoder.safetensors")
    api.evaluate(run, "knn", *data, ["ks=[3]"])
    saved = json.loads((run / "results.json").read_text())["evaluations"]
    assert [old["settings"].get("ks") for old in saved] == [[3]]


def test_labels_of_one_class_are_nothing_to_judge_by(trained: Path, tmp_path: Path) -> None:
    source = open_source("digits", split="train")
    one = replace(source, labels=np.zeros_like(source.labels))
    pack(one, tmp_path / "one", shards=2, progress=False)
    for name in ("few_shot", "knn", "linear_probe", "fine_tune"):
        with pytest.raises(UserError, match="one: all labeled images there are of one class"):
            api.evaluate(trained / "run", name, f"{tmp_path}/one", f"{tmp_path}/one", FAST[name])


def test_the_streaming_probe_learns_on_frozen_features(trained: Path) -> None:
    keys = [
        "method=lars",
        "lr=60",
        "labels_per_class=[4,90%]",
        "epochs=20",
        "warmup_epochs=1",
        "batch_size=64",
        "lanes=4",
        "augment.crop=center",
        "augment.flip=false",
    ]
    result = api.evaluate(trained / "run", "linear_probe", f"{trained}/train", f"{trained}/test", keys)
    found = [m for m in result["measurements"] if m["source"] == "trained"]
    labels = sum(round(0.9 * count) for count in np.bincount(labels_of(open_shards(f"{trained}/train"))))
    assert [m["labels"] for m in found] == [40, labels]
    assert [m["images_seen"] for m in found] == [20 * 40, math.ceil(20 * labels / 64) * 64]
    assert found[1]["accuracy"] > 0.35
    model = factory.load(trained / "run")
    per_image = found[1]["flops"] / found[1]["images_seen"]
    whole = training_flops(classification.Objective(model, classification.Config(head="linear", pooling="mean"), 10))
    assert per_image < 0.4 * whole, "no backward pass through the encoder"


@pytest.mark.parametrize(
    ("run", "name", "keys", "expected"),
    [
        ("run", "few_shots", [], "did you mean 'few_shot'"),
        ("run", "few_shot", ["shot=[1]"], "did you mean 'shots'"),
        ("run", "few_shot", ["block=9"], "has blocks 1 to 4"),
        ("run", "knn", ["ks=[5,5]"], "ks: 5 is named twice"),
        ("run", "knn", ["seeds=[]"], "seeds: Value should have at least 1 item"),
        ("run", "knn", ["labels_per_class=[]"], "labels_per_class: Value should have at least 1 item"),
        ("run", "knn", ["ks=0"], "ks.0: Input should be greater than or equal to 1"),
        (
            "run",
            "fine_tune",
            ["held_out=0.001", "lrs=[0.01,0.02]"],
            "held_out=0.001 holds none of so few images a class out",
        ),
        ("run", "linear_probe", ["method=lars", "pooling=both"], "token, mean or patches"),
        ("run", "linear_probe", ["method=lars", "labels_per_class=1", "lanes=16"], "lower lanes"),
        ("nowhere", "knn", [], "no such run"),
        ("train", "knn", [], "no encoder.safetensors"),
    ],
)
def test_wrong_input_is_named(trained: Path, run: str, name: str, keys: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        api.evaluate(trained / run, name, f"{trained}/train", f"{trained}/test", keys)


@pytest.mark.parametrize("method", ["timm", "google"])
def test_frozen_features_at_another_size_and_aspect_ratio(trained: Path, method: Any) -> None:
    settings = api.run_recipe(trained / "run")
    task = api.make_task(trained / "run", settings, f"{trained}/train", f"{trained}/test")
    wide = features.Representation("patches", image_size=(8, 12), position_resampling=method)
    found = task.features("trained", "test", wide)
    assert found.vectors.shape == (100, 4 * 6 * 64)
    digits = (load_digits().images[1437:1537] * 255 / 16).round()[:, None]
    # The least 12x12 that covers 8x12, cut in the middle.
    images = v2.functional.resize(torch.from_numpy(digits).to(torch.uint8), [12, 12], antialias=True)[:, :, 2:10]
    for way in ("timm", "google"):
        model = factory.at_size(factory.load(trained / "run"), (8, 12), way).eval()
        with torch.no_grad():
            expected = model.pool(model(images), "patches")
        away = torch.from_numpy(found.vectors)[:, None].sub(expected).abs().amax(-1)
        assert (away.amin(1).max() < 1e-3) == (way == method)  # packing has shuffled the digits
    assert task.features("pixels", "test", wide).vectors.shape == (100, 64)
    keys = ["image_size=[8,12]", f"position_resampling={method}", "ks=[5]"]
    result = api.evaluate(trained / "run", "knn", f"{trained}/train", f"{trained}/test", keys)
    assert result["settings"]["image_size"] == [8, 12]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["ssl-vit", "eval", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_several_data_sets_in_one_call(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "train").symlink_to(trained / "test")
    (other / "test").symlink_to(trained / "train")
    assert call(monkeypatch, trained / "run", "few_shot", "--data", trained, "--data", other, "shots=[2]") == 0
    shown = capsys.readouterr().out
    assert str(trained) in shown and str(other) in shown
    (row,) = [line for line in shown.splitlines() if "trained/2-shot" in line and "un" not in line]
    assert row.count("±") == 2
    saved = json.loads((trained / "run" / "results.json").read_text())["evaluations"]
    assert {f"{trained}/test", f"{other}/test"} <= {old["data"]["test"] for old in saved}
    places = ["--data", f"{trained}/train", "--test", f"{trained}/test"]
    assert call(monkeypatch, trained / "run", "few_shot", *places, "shots=[2]") == 0
    shown = capsys.readouterr().out
    assert f"{trained}/test" in shown and f"{trained}/train" not in shown, "the numbers are about the test images"


@pytest.mark.usefixtures("fewer_digits")
def test_a_suite_has_its_own_metric_and_settings(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "suite.yaml").write_text(f"""
name: two
folder: {tmp_path}/packed
sets:
  named: {{train: {trained}/train, test: {trained}/test, metric: mean_per_class, evaluators: {{knn: {{ks: [3]}}}}}}
  packed: {{source: digits}}
""")
    arguments = [trained / "run", "knn", "--suite", tmp_path / "suite.yaml", "labels_per_class=4"]
    assert call(monkeypatch, *arguments, "--json") == 0
    text = capsys.readouterr().out
    named, packed = json.loads(text[text.index("[\n") :])
    assert (named["metric"], named["settings"]["ks"]) == ("mean_per_class", [3])
    assert (packed["metric"], packed["settings"]["ks"]) == ("accuracy", [10, 20])
    assert named["settings"]["labels_per_class"] == packed["settings"]["labels_per_class"] == [4]
    first = next(m for m in named["measurements"] if m["source"] == "trained")
    assert named["values"]["trained/k=3, 4 labels a class/mean"] == first["mean_per_class"]
    assert json.loads((tmp_path / "packed" / "packed" / "train" / "info.json").read_text())["samples"] == 400
    assert call(monkeypatch, *arguments, "--per-class") == 0
    assert "packing" not in capsys.readouterr().out, "packed once"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "name the data: --data FOLDER"),
        (["--data", "x", "--suite", "local"], "name the data: --data FOLDER"),
        (["--suite", "transfr"], "no such suite; shipped ones: local, transfer"),
        (["--data", "a", "--data", "b", "--test", "c"], "--test goes with one --data"),
        (["--data", "/"], "/ does not hold train/ and test/"),
    ],
)
def test_wrong_data_is_named(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    assert call(monkeypatch, trained / "run", "knn", *arguments) == 2
    assert expected in capsys.readouterr().err


def test_weights_that_no_result_can_be_written_beside_are_refused_before_anything_is_measured(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(trained / "run", tmp_path / "run")
    (run / ".results.lock").unlink(missing_ok=True)
    (run / ".results.lock").mkdir()
    monkeypatch.setattr(api, "make_task", None)
    with pytest.raises(UserError, match=r"results\.json cannot be written there .*: copy the weights"):
        api.evaluate(run, "knn", f"{trained}/train", f"{trained}/test")


def test_a_label_of_astronomical_size_is_none(tmp_path: Path) -> None:
    source = open_source("digits", split="test")
    pack(source, tmp_path / "digits", shards=1, progress=False)
    with tarfile.open(tmp_path / "digits" / "000000.tar") as tar, tarfile.open(tmp_path / "0.tar", "w") as out:
        for number, member in enumerate(tar):
            content = tar.extractfile(member).read()  # type: ignore[union-attr]
            content = b"4000000000" if number < 2 and member.name.endswith("cls") else content
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))
    labels = labels_of(open_shards(str(tmp_path / "0.tar")))
    assert (labels < 0).sum() == 1 and labels.max() == 9


@pytest.mark.parametrize(("metric", "lr"), [("accuracy", 0.01), ("mean_per_class", 0.02)])
def test_a_sweep_chooses_by_the_number_that_its_set_counts_by(
    trained: Path, monkeypatch: pytest.MonkeyPatch, metric: Any, lr: float
) -> None:
    found = iter([{"accuracy": 0.9, "mean_per_class": 0.1}, {"accuracy": 0.2, "mean_per_class": 0.8}])
    monkeypatch.setattr(fine_tune, "scores", lambda *arguments: next(found))
    settings = api.run_recipe(trained / "run")
    task = api.make_task(trained / "run", settings, f"{trained}/train", f"{trained}/test", metric=metric)
    config = fine_tune.Config.model_validate({"lrs": [0.01, 0.02], "steps": [1], "batch_size": 16, "lanes": 4})
    choice = fine_tune.Evaluator(config).choose(task, "trained", 5, 0)
    assert choice is not None and choice.chosen["lr"] == lr


@pytest.mark.parametrize("name", ["few_shot", "knn", "linear_probe", "fine_tune"])
def test_weights_that_give_no_numbers_are_named(trained: Path, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    tensors = factory.state(factory.load(run))
    tensors["blocks.0.mlp.fc1.bias"][3] = torch.nan
    save_file(tensors, run / "encoder.safetensors")
    with pytest.raises(RunError, match="not finite"):
        api.evaluate(run, name, f"{trained}/train", f"{trained}/test", FAST[name])
    before = json.loads((run / "results.json").read_text())["evaluations"] if (run / "results.json").exists() else []
    assert all(row["sha256"] != sha256(run / "encoder.safetensors") for row in before)


def test_a_share_that_the_held_out_images_cut_says_so(trained: Path) -> None:
    keys = [*FAST["fine_tune"], "lrs=[0.01,0.02]", "seeds=[0]", "held_out=0.3", "labels_per_class=95%"]
    found = api.evaluate(trained / "run", "fine_tune", f"{trained}/train", f"{trained}/test", keys)
    notes = {note for row in found["measurements"] if row["source"] == "trained" for note in row["notes"]}
    assert notes == {"95% of the labels are 380 images; 279 could be used"}


def test_one_image_a_class_holds_none_out_and_the_probe_says_that_c_was_not_chosen(trained: Path) -> None:
    keys = ["cs=[0.01,0.1,1]", "labels_per_class=[1,20]", "seeds=[0]"]
    found = api.evaluate(trained / "run", "linear_probe", f"{trained}/train", f"{trained}/test", keys)
    one, twenty = (row for row in found["measurements"] if row["source"] == "trained")
    assert not one["chosen"] and one["notes"][0].startswith(
        "no image could be held out to choose C by: 0.1, the middle"
    )
    assert twenty["chosen"]["C"] in (0.01, 0.1, 1) and not twenty["notes"]
