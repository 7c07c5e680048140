"""`execution.evaluate` on a real run: what is stored, replaced and refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import ssl_vit
from ssl_vit import execution, records
from ssl_vit.data.packing import pack, sources
from ssl_vit.data.packing.plan import Options
from ssl_vit.evaluators import embeddings
from ssl_vit.evaluators.features import EvalContext
from ssl_vit.evaluators.labels import choose_labeled, labels_of
from ssl_vit.files import read_json, sha256, write_json
from ssl_vit.interfaces import RunError, UserError
from ssl_vit.models import factory
from ssl_vit.models.vit import ViTEncoder
from ssl_vit.records import EvaluationRecord
from ssl_vit.results import Table, evaluations, load
from tests.tars import encoded, write_tar

TUNE = ["sweep={}", "training.steps=4", "training.batch_size=16", "labels_per_class=5", "seeds=[0,1]"]
FAST = {
    "few_shot": ["labels_per_class=[1,5]"],
    "knn": ["ks=[5,3]"],
    "linear_probe": ["sweep={}", "c=0.1", "labels_per_class=5"],
    "fine_tune": TUNE,
}


@pytest.mark.parametrize("name", FAST)
def test_every_evaluator_stores_its_rows_with_a_prediction_per_test_image(
    trained: Path, context: EvalContext, name: str
) -> None:
    run, test = trained / "run", f"{trained}/test"
    found = execution.evaluate(run, name, f"{trained}/train", test, FAST[name])
    assert found.path and evaluations(run)[0][found.path].results == found.results
    assert found.path.parent == run / "results" and found.path.name.startswith(f"{name}-")
    rows, about = load(found.path)
    stored = records.read(found.path, EvaluationRecord, about)
    assert rows == found.results and stored == found.about.model_copy(update={"saved": about["saved"]})
    assert {row.arm for row in rows} == {"trained", "untrained"} | ({"pixels"} if name != "fine_tune" else set())
    assert {(row.data, row.pretraining_seed, row.evaluator) for row in rows} == {(test, 0, name)}
    assert about["evaluator"] == name and about["sha256"] == sha256(run / "encoder.safetensors")
    assert about["shards"] == {"train": context.train.fingerprint, "test": context.test.fingerprint}
    for row in rows:
        np.testing.assert_array_equal(row.prediction.images, np.arange(100))
        np.testing.assert_array_equal(row.prediction.labels, labels_of(context.test))
        assert row.accuracy == row.prediction.correct.mean()
    assert len(Table(rows).frame) == len(rows), "the keys of all rows differ"


def test_a_rerun_replaces_its_own_file_alone(trained: Path) -> None:
    data = (f"{trained}/train", f"{trained}/test")
    first, again = (execution.evaluate(trained / "run", "knn", *data, ["ks=[7]"]) for _ in range(2))
    assert first.results == again.results and first.path == again.path
    other = execution.evaluate(trained / "run", "knn", *data, ["ks=[9]"])
    mean = execution.evaluate(trained / "run", "knn", *data, ["ks=[7]"], metric="mean_per_class")
    assert len({first.path, other.path, mean.path}) == 3
    assert all(one.path and one.path.is_file() for one in (first, other, mean))


def test_results_of_weights_that_are_gone_are_ignored(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained / "run", tmp_path / "run", ignore=shutil.ignore_patterns("results"))
    data = (f"{trained}/train", f"{trained}/test")
    old = execution.evaluate(run, "few_shot", *data, ["labels_per_class=[2]"])
    tensors = factory.state(factory.load(run))
    tensors["norm.bias"] = tensors["norm.bias"] + 1
    save_file(tensors, run / "encoder.safetensors")
    new = execution.evaluate(run, "knn", *data, ["ks=[3]"])
    found, outdated = evaluations(run)
    assert [*found] == [new.path] and outdated == [old.path]
    assert set(ssl_vit.read_results(run)["evaluator"]) == {"knn"}
    assert old.path
    write_json(old.path, read_json(old.path) | {"format": 0})
    assert evaluations(run)[1] == [old.path], "another version wrote it, which matters only to who reads it"


def test_results_of_earlier_checkpoints_of_an_unfinished_run_are_ignored(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained / "run", tmp_path / "run", ignore=shutil.ignore_patterns("results"))
    (run / "encoder.safetensors").unlink()
    data = (f"{trained}/train", f"{trained}/test")
    old = execution.evaluate(run, "few_shot", *data, ["labels_per_class=[2]"])
    (last,) = run.glob("checkpoints/step_*")
    later = shutil.copytree(last, last.with_name("step_00000999"))
    tensors = load_file(later / "encoder.safetensors")
    save_file(tensors | {"norm.bias": tensors["norm.bias"] + 1}, later / "encoder.safetensors")
    new = execution.evaluate(run, "knn", *data, ["ks=[3]"])
    found, outdated = evaluations(run)
    assert [*found] == [new.path] and outdated == [old.path]


def test_labels_of_one_class_cannot_be_evaluated(trained: Path, tmp_path: Path) -> None:
    source = sources.open_source("digits", split="train")
    one = replace(source, labels=np.zeros_like(source.labels))
    pack(one, tmp_path / "one", Options(shards=2), progress=False)
    for name, keys in FAST.items():
        with pytest.raises(
            UserError, match="one: all labeled images belong to one class; evaluation needs at least two"
        ):
            execution.evaluate(trained / "run", name, f"{tmp_path}/one", f"{tmp_path}/one", keys)


def test_unreadable_labeled_images_are_counted_or_named(trained: Path, tmp_path: Path) -> None:
    """18 images of two classes, those of one budget of 1 and another one damaged."""
    labels = np.arange(18) % 2
    (first, second), third = choose_labeled(labels, 1, 0), 17
    for name, bad in (("few", {first, second}), ("one", {third})):
        members = {
            f"{n:05d}.png": b"no image" if n in bad else encoded(Image.new("L", (8, 8), 9 * n)) for n in range(18)
        }
        members |= {f"{n:05d}.cls": b"%d" % labels[n] for n in range(18)}
        write_tar(tmp_path / name / "000000.tar", sorted(members.items()))
    for name, keys in (("few_shot", []), ("knn", ["ks=1"]), ("attentive_probe", ["steps=2"])):
        with pytest.raises(UserError, match=r"few.*none of the chosen images could be read"):
            execution.evaluate(
                trained / "run", name, f"{tmp_path}/few", f"{trained}/test", [*keys, "labels_per_class=[1,5]"]
            )
    tune = ["sweep={}", "training.steps=2", "training.batch_size=16", "held_out=0.2", "seeds=0"]
    found = execution.evaluate(trained / "run", "fine_tune", f"{tmp_path}/one", f"{trained}/test", tune)
    assert {row.labels for row in found.results} == {17}
    assert all("1 of 18 labeled images could not be read" in " ".join(row.notes) for row in found.results)
    assert found.about.trains_encoder
    few = [*tune, "labels_per_class=1"]
    found = execution.evaluate(trained / "run", "fine_tune", f"{tmp_path}/one", f"{trained}/test", few)
    assert {row.labels for row in found.results} == {2}, "the unreadable image was not asked for"


def test_training_images_without_a_valid_label_are_named_or_counted(trained: Path, tmp_path: Path) -> None:
    """Of 12 images, two have a label that is no class index, and one has none."""
    wrong = {2: b"cat", 5: b"1.5"}
    members = {f"{n:05d}.png": encoded(Image.new("L", (8, 8), 9 * n)) for n in range(12)}
    members |= {f"{n:05d}.cls": wrong.get(n, b"%d" % (n % 2)) for n in range(12) if n != 7}
    write_tar(tmp_path / "some" / "000000.tar", sorted(members.items()))
    run, sets = trained / "run", (f"{tmp_path}/some", f"{trained}/test")
    found = execution.evaluate(run, "few_shot", *sets, ["labels_per_class=all", "seeds=0"])
    assert {row.labels for row in found.results} == {9}
    assert {(skip.key, skip.reason) for skip in found.about.skipped} == {
        ("00002", "label 'cat' is not a class index"),
        ("00005", "label '1.5' is not a class index"),
    }
    assert any("3 of 12 images" in note and "no valid label" in note for note in found.about.notes)
    strict = tmp_path / "strict"
    shutil.copytree(run, strict)
    recipe = strict / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("on_bad_sample: skip", "on_bad_sample: fail"))
    with pytest.raises(UserError, match=r"00002: label 'cat' is not a class index \(data\.on_bad_sample=fail\)"):
        execution.evaluate(strict, "few_shot", *sets, ["labels_per_class=all", "seeds=0"])


@pytest.mark.parametrize(
    ("run", "name", "keys", "expected"),
    [
        ("run", "few_shots", [], "did you mean 'few_shot'"),
        ("run", "few_shot", ["labels_per_clas=[1]"], "did you mean 'labels_per_class'"),
        ("run", "few_shot", ["block=9"], "has blocks 1 to 4"),
        ("run", "few_shot", ["l2=0"], "few_shot: l2: Input should be greater than 0"),
        ("run", "knn", ["ks=[5,5]"], "ks: 5 is named twice"),
        ("run", "knn", ["seeds=[]"], "seeds: Value should have at least 1 item"),
        ("run", "knn", ["labels_per_class=[]"], "labels_per_class: Value should have at least 1 item"),
        ("run", "knn", ["ks=0"], "ks.0: Input should be greater than or equal to 1"),
        ("nowhere", "knn", [], "no such run"),
        ("train", "knn", [], r"no encoder\.safetensors"),
    ],
)
def test_wrong_input_is_named(trained: Path, run: str, name: str, keys: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        execution.evaluate(trained / run, name, f"{trained}/train", f"{trained}/test", keys)


def test_results_that_cannot_be_written_are_refused_before_anything_is_measured(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(trained / "run", tmp_path / "run", ignore=shutil.ignore_patterns("results"))
    (run / "results").write_text("a file")
    monkeypatch.setattr(execution, "make_context", None)
    with pytest.raises(RunError, match=r"results: cannot write there .*; copy the weights"):
        execution.evaluate(run, "knn", f"{trained}/train", f"{trained}/test")


def test_too_little_memory_of_a_gpu_is_named(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shutil.copytree(trained / "run", tmp_path / "run", ignore=shutil.ignore_patterns("features"))

    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr(ViTEncoder, "represent", full)
    with pytest.raises(RunError, match=r"too little memory \(.* allocate 2 GiB\); end other programs"):
        execution.evaluate(run, "knn", f"{trained}/train", f"{trained}/test", ["ks=[3]"])
    with pytest.raises(RunError, match=r"too little memory \(.* allocate 2 GiB\); lower batch_size"):
        ssl_vit.embed(run, f"{trained}/test")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a precision that only GPUs have, on a CPU")
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_a_run_that_was_trained_on_a_gpu_is_evaluated_in_fp32_on_a_cpu(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    run = shutil.copytree(trained / "run", tmp_path / "run")
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("precision: fp32", f"precision: {precision}"))
    assert precision in (run / "recipe.yaml").read_text()
    data = (f"{trained}/train", f"{trained}/test")
    here, there = (execution.evaluate(one, "few_shot", *data, ["seeds=0"]) for one in (trained / "run", run))
    assert [row.accuracy for row in here.results] == [row.accuracy for row in there.results]
    assert f"training.precision={precision} needs" in capsys.readouterr().err
    assert len(embeddings.embed(run, data[1])) == 100
    assert "evaluating in fp32" in capsys.readouterr().err


def test_parts_of_other_weights_run_again(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shutil.copytree(trained / "run", tmp_path / "run", ignore=shutil.ignore_patterns("results"))
    data, said = (f"{trained}/train", f"{trained}/test"), list[str]()

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(execution, "save", full)
        execution.evaluate(run, "knn", *data)
    tensors = factory.state(factory.load(run))
    tensors["norm.bias"] = tensors["norm.bias"] + 1
    save_file(tensors, run / "encoder.safetensors")
    execution.evaluate(run, "knn", *data, say=said.append)
    assert not [line for line in said if "already finished" in line]
