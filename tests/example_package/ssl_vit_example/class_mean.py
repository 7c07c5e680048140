"""Nearest class mean: predict the class whose mean feature has the highest cosine similarity."""

import numpy as np

from ssl_vit.evaluators.base import Classifier, LabeledConfig, Scored
from ssl_vit.evaluators.base import Evaluator as BaseEvaluator
from ssl_vit.evaluators.features import FeatureConfig, ImageSet
from ssl_vit.results import Prediction


class Config(FeatureConfig, LabeledConfig):
    pass


class Evaluator(BaseEvaluator):
    title = "Nearest class mean on frozen features"

    def fit(self, train: ImageSet, seed: int) -> Classifier:
        known = train.features(self.config)
        classes = np.unique(known.labels)
        means_KD = np.stack([known.vectors[known.labels == label].mean(0) for label in classes])
        means_KD /= np.linalg.norm(means_KD, axis=1, keepdims=True)

        def classify(images: ImageSet) -> list[Scored]:
            test = images.features(self.config)
            predicted = classes[(test.vectors @ means_KD.T).argmax(1)]
            return [Scored(Prediction(test.images, test.labels, predicted))]

        return classify
