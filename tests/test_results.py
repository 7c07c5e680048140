"""Results on disk and as one table."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ssl_vit.interfaces import UserError
from ssl_vit.results import COLUMNS, KEY, Prediction, Result, Table, load, save, scored

IMAGES, LABELS = np.arange(6), np.array([0, 0, 0, 0, 2, 2])


def predicted(*classes: int, **fields: Any) -> Prediction:
    return Prediction(**({"images": IMAGES, "labels": LABELS, "predicted": np.array(classes)} | fields))


def result(prediction: Prediction, **fields: Any) -> Result:
    place: dict[str, Any] = {
        "data": "digits",
        "evaluator": "knn",
        "arm": "trained",
        "labels_per_class": "10%",
        "labels": 40,
    }
    return Result(**(place | {"seed": 0, "pretraining_seed": 0} | scored(prediction) | fields), prediction=prediction)


CONFIDENCE = np.linspace(1, 0, 6, dtype=np.float32)
ROWS = [
    result(predicted(0, 0, 0, 1, 2, 0), variant="k=5", notes=("short",), selected={"optim.lr": 0.1, "name": "sgd"}),
    result(predicted(0, 0, 0, 0, 2, 2, confidence=CONFIDENCE), seed=1, flops=2.5),
]


def test_scores_are_of_all_images_and_of_the_classes_that_have_any() -> None:
    assert scored(ROWS[0].prediction) == {"accuracy": 4 / 6, "mean_per_class": pytest.approx((3 / 4 + 1 / 2) / 2)}


def test_predictions_in_another_order_are_not_valid() -> None:
    assert predicted(0, 0, 0, 1, 2, 0).is_valid
    assert not predicted(0, 0, 0, 1, 2, 0, images=IMAGES[::-1]).is_valid
    assert not predicted(0, 0, 0, 1, 2, 0, images=np.zeros(6, dtype=int)).is_valid


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "knn.json"
    save(path, ROWS, evaluator="knn", settings={"ks": [5]})
    found, about = load(path)
    assert datetime.fromisoformat(about.pop("saved")).tzinfo
    assert found == ROWS and about == {"evaluator": "knn", "settings": {"ks": [5]}}
    for one, other in zip(found, ROWS, strict=True):
        for name, array in vars(other.prediction).items():
            np.testing.assert_array_equal(getattr(one.prediction, name), array)
    save(path, [], note="nothing measured")
    assert load(path)[0] == [] and load(path)[1]["note"] == "nothing measured"


def test_a_kill_between_both_files_leaves_the_earlier_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    save(path, ROWS)
    save(tmp_path / "rows.other.json", ROWS[:1])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("ssl_vit.results.write_json", killed)
        save(path, ROWS[:1])
    assert load(path)[0] == ROWS
    save(path, ROWS[:1])
    assert load(path)[0] == ROWS[:1] == load(tmp_path / "rows.other.json")[0]
    assert len([*tmp_path.glob("rows.*.npz")]) == 2, "those of the earlier pair are removed, others' are kept"


@pytest.mark.parametrize("damage", ["missing", "cut", "other version"])
def test_a_damaged_pair_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "rows.json"
    save(path, ROWS)
    (arrays,) = tmp_path.glob("rows.*.npz")
    if damage == "missing":
        arrays.unlink()
    elif damage == "cut":
        arrays.write_bytes(arrays.read_bytes()[:200])
    else:
        path.write_text(path.read_text().replace('"format": 1', '"format": 0'))
    with pytest.raises(UserError, match=r"rows\.json: results cannot be read"):
        load(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"labels_per_class": [1]},
        {"seed": "a"},
        {"notes": [1]},
        {"flops": None},
        {"flops": float("inf")},
        {"seconds": -1.0},
        {"labels_per_class": -3},
        {"accuracy": 0.7},
        {"accuracy": float("nan")},
        {"prediction": predicted(0, 0, 0, 1, 2, -1)},
        {"prediction": predicted(0, 0)},
        {"prediction": predicted(0, 0, 0, 1, 2, 0, confidence=CONFIDENCE[:3])},
        {"prediction": predicted(0, 0, 0, 1, 2, 0, labels=LABELS[:, None])},
    ],
    ids=str,
)
def test_rows_of_wrong_types_are_named(tmp_path: Path, fields: dict[str, Any]) -> None:
    save(tmp_path / "rows.json", [replace(ROWS[0], **fields)])
    with pytest.raises(UserError, match=r"rows\.json: results cannot be read"):
        load(tmp_path / "rows.json")


def test_a_table_has_a_row_per_key_the_later_one(tmp_path: Path) -> None:
    save(tmp_path / "old.json", ROWS)
    save(tmp_path / "new.json", [replace(ROWS[1], labels=7)])
    table = Table([row for name in ("old", "new") for row in load(tmp_path / f"{name}.json")[0]])
    assert list(table.frame.columns) == list(COLUMNS) and set(KEY) <= set(COLUMNS)
    assert table.frame["labels"].tolist() == [ROWS[0].labels, 7]
    assert Table([]).frame.empty and list(Table([]).frame.columns) == list(COLUMNS)


def test_cells_are_of_the_test_images_that_all_rows_have() -> None:
    part = predicted(1, 2, 0, images=np.array([1, 4, 9]), labels=np.array([0, 2, 0]))
    table = Table([*ROWS, result(part, seed=2)])
    labels, correct = table.cells([0, 1])
    assert labels.tolist() == LABELS.tolist()
    assert correct.tolist() == [[True, True, True, False, True, False], [True] * 6]
    labels, correct = table.cells([0, 2])
    assert labels.tolist() == [0, 2] and correct.tolist() == [[True, True], [False, True]]


def test_the_folds_of_a_cross_validation_become_one_row() -> None:
    """As if all test images had been one set; a row without all of its folds is excluded."""
    first = result(predicted(0, 0, 0, 1, 2, 0), labels=40, flops=1.0, selected={"optim.lr": 0.1, "steps": 5})
    images, labels = np.arange(3), np.array([2, 0, 2])
    second = predicted(2, 2, 2, images=images, labels=labels)
    other = result(second, fold=1, labels=43, flops=2.0, selected={"optim.lr": 0.1, "steps": 9}, notes=("short",))
    alone = result(second, fold=1, seed=1)
    table = Table([alone, other, first]).join_folds([6, 3])
    (row,) = table.results
    assert (row.accuracy, row.labels, row.flops, row.notes) == (6 / 9, 42, 3.0, ("short",))
    assert row.mean_per_class == pytest.approx((3 / 5 + 3 / 4) / 2)
    assert row.selected == {"optim.lr": 0.1}, "what all folds selected"
    assert row.prediction.images.tolist() == list(range(9))
    assert row.prediction.labels.tolist() == [*LABELS, *labels]
    assert row.prediction.confidence is None
    both = [result(predicted(0, 0, 0, 0, 2, 2, confidence=CONFIDENCE / (1 + fold)), fold=fold) for fold in (0, 1)]
    (row,) = Table(both).join_folds([6, 6]).results
    assert np.asarray(row.prediction.confidence).tolist() == [*CONFIDENCE, *CONFIDENCE / 2]
