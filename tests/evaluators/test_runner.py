"""Label budgets, selection, scores and notes, with an evaluator of a few lines on arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import Field

from ssl_vit.data import DataConfig
from ssl_vit.evaluators import runner, selection
from ssl_vit.evaluators.base import Classifier, LabeledConfig, Scored, SweepConfig
from ssl_vit.evaluators.base import Evaluator as BaseEvaluator
from ssl_vit.evaluators.features import EvalContext, FeatureConfig, ImageSet
from ssl_vit.evaluators.labels import choose_labeled, held_out_split, named
from ssl_vit.evaluators.parts import Parts
from ssl_vit.interfaces import Diverged, UserError
from ssl_vit.models import EncoderConfig
from ssl_vit.recipe import Recipe, load_recipe
from ssl_vit.records import Cost, SweepRecord
from ssl_vit.results import Prediction, Result, Table

Build = Callable[..., EvalContext]
LABELS = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [80, 40, 20]))
TEST_LABELS = np.repeat([0, 1, 2], [50, 30, 20])
TRAIN = (LABELS[:, None] + np.zeros((140, 4)), LABELS)  # features that are the class
TEST = (TEST_LABELS[:, None] + np.zeros((100, 4)), TEST_LABELS)


class Config(LabeledConfig, SweepConfig):
    """right: classes below it are predicted correctly, the others as 0. fails: at this value of `right`."""

    right: int = 3
    fails: int = Field(-1)
    sweep_labels_per_class: int | None = None


class Evaluator(BaseEvaluator):
    title = "Classes below a threshold"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.failure: Exception = Diverged("the loss is not finite")
        self.failure.cost = Cost(images_seen=1)

    def fit(self, train: ImageSet, seed: int) -> Classifier:
        c, known = self.config, train.features(FeatureConfig())
        fitted.append((c.right, train.source, len(known.labels), seed))
        if c.right == c.fails:
            raise self.failure

        def classify(images: ImageSet) -> list[Scored]:
            found = images.features(FeatureConfig())
            predicted = np.where(found.labels < c.right, found.labels, 0)
            cost = Cost(images_seen=10, flops=20.0)
            return [Scored(Prediction(found.images, found.labels, predicted), cost=cost, labels=len(known.labels))]

        return classify


class Trainer(Evaluator):
    """The same as an evaluator that trains the encoder."""

    references = ("untrained",)
    trains_encoder = True


fitted: list[tuple[int, str, int, int]] = []


@pytest.fixture(autouse=True)
def _nothing_fitted() -> None:
    fitted.clear()


@pytest.fixture
def context(array_context: Build) -> EvalContext:
    return array_context(TRAIN, TEST)


def config(**values: Any) -> Config:
    return Config.model_validate(values)


def test_every_source_budget_and_seed_is_a_row(context: EvalContext) -> None:
    rows, sweeps = runner.evaluate(
        Evaluator(config(labels_per_class=[1, "10%", "all"], seeds=[0, 4], right=2)), context
    )
    places = [(row.arm, row.labels_per_class, row.seed) for row in rows]
    assert places == [
        (source, budget, seed)
        for source in ("trained", "untrained", "pixels")
        for budget in (1, "10%", "all")
        for seed in (0, 4)
    ]
    assert not sweeps
    assert [row.labels for row in rows[:6]] == [3, 3, 14, 14, 140, 140]
    for row in rows:
        assert row.accuracy == 0.8 and row.mean_per_class == pytest.approx(2 / 3)
        assert (row.images_seen, row.flops, row.selected) == (10, 20.0, {})
        np.testing.assert_array_equal(row.prediction.images, np.arange(100))
    assert len(Table(rows).frame) == len(rows), "the keys of all rows differ"


def test_a_sweep_and_a_training_have_the_settings_of_their_source(context: EvalContext) -> None:
    class Lower(Trainer):
        def for_source(self, source: str) -> BaseEvaluator:
            one = self.config.model_copy(update={"right": 1, "sweep": {}})
            return Lower(one) if source == "untrained" else self

    trainer = Lower(config(sweep={"right": [2, 3]}, labels_per_class=[5], seeds=[0, 1]))
    rows, (sweep,) = runner.evaluate(trainer, context)
    assert sweep.source == "trained"
    assert {row.arm: row.selected for row in rows} == {"trained": sweep.best, "untrained": {}}
    assert {right for right, source, *_ in fitted if source == "untrained"} == {1}
    fitted.clear()
    record, _ = runner.sweep(trainer, context, "untrained", 5, 0)
    assert [right for right, *_ in fitted] == [1] and record.best == {}


def test_only_images_that_some_budget_allows_are_extracted_and_at_once(context: EvalContext) -> None:
    list(runner.measure(Evaluator(config()), context, "trained", (1, 5), (0, 1)))
    wanted = np.unique(np.concatenate([choose_labeled(LABELS, 5, seed) for seed in (0, 1)]))
    asked = {key[3] for key in context.features.asked if key[1] == "train"}  # type: ignore[attr-defined]
    assert asked == {wanted.tobytes()}
    context.features.asked.clear()  # type: ignore[attr-defined]
    list(runner.measure(Evaluator(config()), context, "trained", (1, "all"), (0,)))
    assert {key[3] for key in context.features.asked} == {None}  # type: ignore[attr-defined]


def test_what_a_budget_lacks_is_noted(array_context: Build) -> None:
    broken = int(choose_labeled(LABELS, 30, 0)[12])
    context = array_context(TRAIN, TEST, (broken,))
    few, many = runner.measure(Evaluator(config()), context, "trained", (5, 30), (0,))
    assert many.labels == 79 and few.labels == 15 and few.notes == ()
    assert "1 class(es) have fewer than 30 usable images" in many.notes[0] and many.notes[0].endswith(": 2")
    assert "1 of 80 labeled images could not be read" in many.notes[1]


def test_test_images_of_classes_without_training_images_are_noted(array_context: Build) -> None:
    labels = np.repeat([0, 2], 20)
    context = array_context((labels[:, None] + np.zeros((40, 4)), labels), TEST)
    (row,) = runner.measure(Evaluator(config()), context, "trained", (5,), (0,))
    assert row.notes == ("30 test image(s) have a class without any training image and count as wrong: 1",)
    assert named([0, 2], ["bee", "wasp", "ant"]) == "bee, ant"


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (lambda predicted: predicted[:-1], r"it predicted int64 \(99,\) for 100 images"),
        (torch.from_numpy, "predicted of its predictions must be NumPy arrays"),
        (lambda predicted: None, "predicted of its predictions must be NumPy arrays"),
    ],
)
def test_predictions_that_are_no_array_of_the_images_are_named(
    context: EvalContext, changed: Callable[[np.ndarray], Any], what: str
) -> None:
    class Other(Evaluator):
        def fit(self, train: ImageSet, seed: int) -> Classifier:
            (one,) = super().fit(train, seed)(ImageSet(train.context, "trained", "test"))
            other = replace(one.prediction, predicted=changed(one.prediction.predicted))
            return lambda images: [replace(one, prediction=other)]

    with pytest.raises(UserError, match=f"Classes below a threshold: {what}"):
        next(runner.measure(Other(config()), context, "trained", (5,), (0,)))


def test_a_classifier_that_returns_nothing_is_named(context: EvalContext) -> None:
    class Empty(Evaluator):
        def fit(self, train: ImageSet, seed: int) -> Classifier:
            return lambda images: []

    with pytest.raises(UserError, match="Classes below a threshold: its classifier must return"):
        next(runner.measure(Empty(config()), context, "trained", (5,), (0,)))


def test_a_trainer_sweeps_on_held_out_training_images(context: EvalContext) -> None:
    trainer = Trainer(config(sweep={"right": [1, 2]}, held_out=0.25))
    assert runner.has_sweep(trainer) and not runner.has_sweep(Evaluator(trainer.config))
    record, rows = runner.sweep(trainer, context, "trained", 10, 3)
    held = held_out_split(LABELS, 0.25, 0)[1]
    share = float((LABELS[held] < 2).mean())
    assert record.candidates[1] == {"right": 2, "held_out_accuracy": pytest.approx(share), "held_out_parts": 1}
    assert record.best == {"right": 2} and record.cost.images_seen == 20
    (row,) = rows
    assert (row.labels, row.seed, row.accuracy, row.selected) == (30, 3, 0.8, {"right": 2})
    assert [*runner.measure(trainer, context, "trained", (10,), (3,), record.best)] == rows, "not trained again"
    for key in context.features.asked:  # type: ignore[attr-defined]
        if key[1] == "train" and key[3] != np.sort(held).tobytes():
            assert not set(np.frombuffer(key[3], dtype=np.int64)) & set(held), "nothing trains on held-out images"


def test_a_trainer_without_a_sweep_needs_no_held_out_images(context: EvalContext) -> None:
    class Plain(LabeledConfig):
        right: int = 2
        fails: int = -1

    class Staged(Trainer):
        def stage(self, data: DataConfig, encoder: EncoderConfig, images: int, seed: int) -> Recipe:
            return like

    like = load_recipe("digits_ssl")
    trainer = Staged(Plain(labels_per_class=[5, "all"]))  # type: ignore[arg-type]
    rows, sweeps = runner.evaluate(trainer, context)
    assert [(row.arm, row.labels) for row in rows] == [(arm, n) for arm in ("trained", "untrained") for n in (15, 140)]
    assert not sweeps and runner.training_recipes(trainer, like, 15, sweep=True) == [like]


def test_a_sweep_that_was_stopped_resumes(context: EvalContext, tmp_path: Path) -> None:
    class Stopping(Trainer):
        def fit(self, train: ImageSet, seed: int) -> Classifier:
            if len(fitted) == stop:
                raise KeyboardInterrupt
            return super().fit(train, seed)

    def swept() -> tuple[SweepRecord, list[Result]]:
        evaluator = Stopping(config(sweep={"right": [1, 2, 3]}, held_out_repeats=2))
        return runner.sweep(evaluator, context, "trained", 10, 3, Parts(tmp_path / "parts", "", context))

    stop = 4
    with pytest.raises(KeyboardInterrupt):
        swept()
    assert [right for right, *_ in fitted] == [1, 2, 3, 2]
    fitted.clear()
    stop = -1
    resumed = swept()
    assert [right for right, *_ in fitted] == [3, 3], "the last one, then the winner for the test images"
    undisturbed = Trainer(config(sweep={"right": [1, 2, 3]}, held_out_repeats=2))
    assert resumed == runner.sweep(undisturbed, context, "trained", 10, 3)


def test_all_variants_of_the_winner_are_kept(context: EvalContext) -> None:
    class Two(Trainer):
        def fit(self, train: ImageSet, seed: int) -> Classifier:
            classify = super().fit(train, seed)
            return lambda images: [one for first in classify(images) for one in (first, replace(first, variant="b"))]

    evaluator = Two(config(sweep={"right": [1, 2]}, labels_per_class=[5], seeds=[0, 1]))
    rows, _ = runner.evaluate(evaluator, context)
    assert [(row.arm, row.seed, row.variant) for row in rows] == [
        (source, seed, variant) for source in ("trained", "untrained") for seed in (0, 1) for variant in ("", "b")
    ]


def test_a_sweep_may_average_over_several_held_out_parts(context: EvalContext) -> None:
    trainer = Trainer(config(sweep={"right": [1, 2, 3]}, held_out_repeats=3))
    record, rows = runner.sweep(trainer, context, "trained", 10, 3)
    splits = [held_out_split(context.train_labels, 0.2, 0, repeat) for repeat in range(3)]
    assert record.held_out == len(np.unique(np.concatenate([held for _, held in splits]))) > len(splits[0][1])
    used = [runner._train_images(trainer, context, "trained", 10, 3, repeat=repeat)[0].images for repeat in range(3)]
    assert record.labels == len(np.unique(np.concatenate([*used, *(held for _, held in splits)])))
    assert [right for right, *_ in fitted] == [1, 2, 3, 2, 3, 2, 3], "the worst one is not tried on the second part"
    assert record.cost.images_seen == 70
    for tried, splits_tried in zip(record.candidates, (splits[:1], splits, splits), strict=True):
        shares = [(context.train_labels[held] < tried["right"]).mean() for _, held in splits_tried]
        assert tried["held_out_accuracy"] == pytest.approx(np.mean(shares))
        assert tried["held_out_parts"] == len(splits_tried)
    once, _ = runner.sweep(Trainer(config(sweep={"right": [1, 2, 3]})), context, "trained", 10, 3)
    assert once.held_out == len(splits[0][1])
    assert rows == runner.sweep(Trainer(config(sweep={"right": [1, 2, 3]})), context, "trained", 10, 3)[1]


@pytest.mark.parametrize(
    ("candidates", "parts", "counts"),
    [(6, 1, [6]), (6, 3, [6, 3, 2]), (12, 3, [12, 6, 3]), (5, 4, [5, 3, 2, 2]), (2, 3, [2, 2, 2])],
)
def test_the_better_half_is_tried_on_the_next_held_out_part(candidates: int, parts: int, counts: list[int]) -> None:
    assert selection.halved(candidates, parts) == counts


def test_a_candidate_that_diverges_on_a_later_part_loses(context: EvalContext) -> None:
    class Later(Trainer):
        def fit(self, train: ImageSet, seed: int) -> Classifier:
            self.config = self.config.model_copy(update={"fails": self.config.right if len(fitted) == 4 else -1})
            return super().fit(train, seed)

    record, rows = runner.sweep(
        Later(config(sweep={"right": [1, 2, 3]}, held_out_repeats=2)), context, "trained", 10, 3
    )
    assert [right for right, *_ in fitted] == [1, 2, 3, 2, 3]
    assert record.best == {"right": 2} and rows[0].selected == {"right": 2}
    assert record.candidates[2] == {"right": 3, "held_out_accuracy": 0.0, "held_out_parts": 0}


def test_the_best_of_the_others_wins_where_all_that_were_kept_diverge(context: EvalContext) -> None:
    class Later(Trainer):
        def fit(self, train: ImageSet, seed: int) -> Classifier:
            later = len(fitted) in (4, 5)
            self.config = self.config.model_copy(update={"fails": self.config.right if later else -1})
            return super().fit(train, seed)

    swept = config(sweep={"right": [1, 2, 3, 4]}, held_out_repeats=2)
    record, rows = runner.sweep(Later(swept), context, "trained", 10, 3)
    assert [right for right, *_ in fitted] == [1, 2, 3, 4, 3, 4, 2]
    assert record.best == {"right": 2} and rows[0].selected == {"right": 2}
    assert record.cost.images_seen == 4 * 10 + 2 * 1 + 10


def test_settings_are_not_selected_on_one_class(array_context: Build) -> None:
    labels = np.repeat([0, 1, 2], [60, 4, 4])
    context = array_context((labels[:, None] + np.zeros((68, 4)), labels), TEST)
    with pytest.raises(UserError, match=r"held_out=0.1 of 4 to 60 images per class .* raise it"):
        runner.sweep(Trainer(config(sweep={"right": [1, 2]}, held_out=0.1)), context, "trained", 2, 0)


def test_candidates_of_one_length_come_together() -> None:
    class Long(Config):
        training: dict[str, int] = Field({"steps": 1})
        warmup_epochs: int = 0

    swept = Long(sweep={"training.steps": [1, 2], "warmup_epochs": [0, 5]})
    assert [candidate["training.steps"] for candidate in swept.candidates] == [1, 1, 2, 2]


def test_all_labels_are_trained_on_after_a_sweep_without_the_held_out_ones(context: EvalContext) -> None:
    trainer = Trainer(config(sweep={"right": [2, 3]}, labels_per_class=[5, "all"], seeds=[0, 1], held_out=0.25))
    rows, sweeps = runner.evaluate(trainer, context)
    assert [(right, labels, seed) for right, source, labels, seed in fitted if source == "trained"] == [
        (2, 15, 0),
        (3, 15, 0),
        (2, 105, 0),
        (3, 105, 0),
        (3, 15, 1),
        (3, 140, 0),
        (3, 140, 1),
    ]
    assert [(row.arm, row.labels) for row in rows] == [
        (source, labels) for source in ("trained", "untrained") for labels in (15, 15, 140, 140)
    ]
    assert [(sweep.source, sweep.labels_per_class, sweep.best["right"]) for sweep in sweeps] == [
        (source, budget, 3) for source in ("trained", "untrained") for budget in (5, "all")
    ]


@pytest.mark.parametrize("metric", ["accuracy", "mean_per_class"])
def test_selection_is_by_the_metric_of_the_data_set(
    array_context: Build, monkeypatch: pytest.MonkeyPatch, metric: str
) -> None:
    found = iter([{"accuracy": 0.9, "mean_per_class": 0.1}, {"accuracy": 0.2, "mean_per_class": 0.8}])
    monkeypatch.setattr(selection, "scored", lambda prediction: next(found, {"accuracy": 0.0, "mean_per_class": 0.0}))
    context = array_context(TRAIN, TEST, metric=metric)
    record, _ = runner.sweep(Trainer(config(sweep={"right": [1, 2]})), context, "trained", 10, 0)
    assert record.best == {"right": 1 if metric == "accuracy" else 2}


def test_of_equals_the_first_wins_and_a_candidate_that_diverges_loses(context: EvalContext) -> None:
    record, _ = runner.sweep(Trainer(config(sweep={"right": [5, 4, 3]}, fails=3)), context, "trained", 10, 0)
    assert record.best == {"right": 4}
    assert record.candidates[0] == {"right": 3, "held_out_accuracy": 0.0, "held_out_parts": 0}
    assert record.cost.images_seen == 1 + 10 + 10, "what diverged has cost something too"
    with pytest.raises(UserError, match="every candidate of the sweep diverged"):
        runner.sweep(Trainer(config(sweep={"right": [3]}, fails=3)), context, "trained", 10, 0)


def test_the_middle_of_each_key_where_nothing_can_be_held_out(context: EvalContext) -> None:
    swept = config(sweep={"right": [3, 4, 5, 6], "fails": [7, 8, 9]})
    (row,) = runner.measure(Evaluator(swept), context, "trained", (1,), (0,))
    assert row.selected == {"right": 5, "fails": 8} and "held out" in " ".join(row.notes)


def test_nothing_is_selected_on_images_of_one_class(array_context: Build) -> None:
    labels = np.repeat([0, 1, 2], [300, 120, 120])
    context = array_context((labels[:, None] + np.zeros((540, 4)), labels), TEST)
    (row,) = runner.measure(Evaluator(config(sweep={"right": [1, 2, 3]})), context, "trained", ("1%",), (0,))
    assert row.labels == 5 and row.selected == {"right": 2}
    assert "images of one class alone could be held out" in " ".join(row.notes)


def test_the_cost_of_a_selection_on_frozen_features_is_counted(context: EvalContext) -> None:
    few, more = (
        list(runner.measure(Evaluator(config(sweep=sweep)), context, "trained", (10,), (0,)))
        for sweep in ({}, {"right": [3, 4]})
    )
    assert [row.images_seen for row in few] == [10]
    assert [(row.images_seen, row.flops) for row in more] == [(30, 60.0)], "two candidates, and the classifier itself"


def test_a_selected_value_that_diverges_later_is_named(context: EvalContext) -> None:
    with pytest.raises(Diverged, match=r"right=2 diverged with seed 1 .*not finite; remove that value") as caught:
        list(runner.measure(Trainer(config(fails=2)), context, "trained", (5,), (1,), {"right": 2}))
    assert isinstance(caught.value.cost, Cost)


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ({"wrong": [1]}, "sweep.wrong: this evaluator has no such key"),
        ({"right": ["x"]}, "sweep.right=x"),
        ({"right": [1, 1]}, "sweep.right: give different values"),
        ({"right": []}, "sweep.right: give different values"),
        ({"right": [1, "x"]}, "sweep.right=x"),
        ({"right": [None, 1]}, "sweep.right=null"),
        ({"right": None}, "sweep.right: give numbers"),
        ({"right": [[1], [2]]}, "sweep.right: give numbers"),
    ],
)
def test_wrong_candidates_are_refused_when_the_settings_are_read(sweep: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        config(sweep=sweep)


def test_the_winner_is_the_best_on_all_held_out_parts_and_its_classifier_that_of_the_first(
    context: EvalContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Traced(Trainer):
        """Its classifier tells which images it was fitted to."""

        def fit(self, train: ImageSet, seed: int) -> Classifier:
            classify, images = super().fit(train, seed), train.images
            assert images is not None
            return lambda others: [replace(one, notes=(str(images.tolist()),)) for one in classify(others)]

    scores = iter([0.5, 0.9, 0.8, 0.6])  # of both candidates on the first part, then on the second one
    monkeypatch.setattr(selection, "scored", lambda prediction: {"accuracy": next(scores)})
    swept = config(sweep={"right": [1, 2]}, held_out_repeats=2)
    record, rows = runner.sweep(Traced(swept), context, "trained", 10, 3)
    assert record.best == {"right": 2}, "0.75 on average, against 0.65"
    first = runner._train_images(Traced(swept), context, "trained", 10, 3)[0].images
    assert first is not None and rows[0].notes[0] == str(first.tolist())


def test_a_share_counts_the_held_out_images_too(context: EvalContext) -> None:
    rows, _ = runner.evaluate(Trainer(config(sweep={"right": [1, 3]}, labels_per_class=["50%"])), context)
    assert {row.labels for row in rows} == {70}


def test_each_seed_selects_on_its_own_held_out_images(context: EvalContext) -> None:
    class Noted(Evaluator):
        def fit(self, train: ImageSet, seed: int) -> Classifier:
            used.append(train.images)
            return super().fit(train, seed)

    used: list[Any] = []
    list(runner.measure(Noted(config(sweep={"right": [1, 3]}, held_out=0.25)), context, "trained", ("all",), (3, 4)))
    for seed, images in zip((3, 4), used[::3], strict=True):  # two candidates, and the classifier itself
        np.testing.assert_array_equal(images, held_out_split(LABELS, 0.25, seed)[0])


def test_classes_that_only_the_test_set_names_count(context: EvalContext) -> None:
    test: Any = SimpleNamespace(classes=tuple("abcde"))
    context.test = test
    assert context.classes == 5
