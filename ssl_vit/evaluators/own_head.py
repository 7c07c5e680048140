"""A supervised run's own head: the accuracy on test of the very classifier that was trained."""

from __future__ import annotations

import copy
from pathlib import Path

from ssl_vit.data.shards import check_same_classes
from ssl_vit.evaluators import Seeds
from ssl_vit.evaluators.base import Classifier, Scored
from ssl_vit.evaluators.base import Evaluator as BaseEvaluator
from ssl_vit.evaluators.classifier import predict
from ssl_vit.evaluators.features import ImageSet
from ssl_vit.files import WEIGHTS, read_json, sha256
from ssl_vit.interfaces import Config as BaseConfig
from ssl_vit.interfaces import UserError
from ssl_vit.objectives import classification
from ssl_vit.recipe import run_of
from ssl_vit.training import checkpoint


class Config(BaseConfig):
    """seeds: only names the result; nothing is drawn."""

    seeds: Seeds = (0,)


class Evaluator(BaseEvaluator):
    """Nothing is trained: only a run whose objective is classification has such a head."""

    title = "The run's own head"
    references = ()
    needs_head = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scored: dict[str, list[Scored]] = {}  # by run and test set: all seeds have the same

    def fit(self, images: ImageSet, seed: int) -> Classifier:
        context = images.context
        if not isinstance(context.objective, classification.Config) or context.weights is None:
            raise UserError(
                f"{context.weights or 'a network in memory'}: own_head needs a run whose objective is classification; "
                "use another evaluator"
            )
        saved = checkpoint.newest_of(Path(context.weights))
        if saved is None:
            raise UserError(f"{context.weights}: no checkpoint with a head is kept there; use another evaluator")
        encoders = [folder / WEIGHTS for folder in (Path(context.weights), saved)]
        if len({sha256(file) for file in encoders if file.is_file()}) > 1:
            raise UserError(f"{context.weights}: its last checkpoint, with the head, is gone; use another evaluator")
        path = run_of(saved) / "summary.json"
        summary = read_json(path) if path.is_file() else {}  # a run that still trains has none
        where = f"what {context.weights} was trained on and {context.test.spec}"
        check_same_classes(checkpoint.classes_of(saved), context.test.classes, where)
        classes = len(checkpoint.classes_of(saved)) or context.classes
        objective = classification.Objective(copy.deepcopy(context.trained), context.objective, classes)
        checkpoint.load_head(saved, objective)
        objective.to(context.accelerator.device)
        labels = summary.get("samples", context.train.samples)

        def classify(others: ImageSet) -> list[Scored]:
            at = f"{context.weights} {context.test.fingerprint}"
            if at not in self.scored:
                self.scored[at] = [Scored(predict(objective, others), labels=labels)]
            return self.scored[at]

        return classify
