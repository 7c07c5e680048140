"""Fine-tuning (paper, table 4): zero-initialized linear head, SGD with momentum, learning rate swept on held-out train;
or MAE's recipe (`main_finetune.py`): AdamW with layer decay, mixup, cutmix and label smoothing.

Everything that is chosen is chosen on a held-out part of the training images, never on test; the untrained encoder
(training from scratch) gets the same sweep of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator
from timm.layers import DropPath, calculate_drop_path_rates
from torch import nn

from ssl_vit.data import AugmentConfig
from ssl_vit.evaluators import ALL, Budget, Budgets, Counts, Numbers, Seeds, budget_words
from ssl_vit.evaluators.base import Choice, Judge
from ssl_vit.evaluators.features import Representation, Task
from ssl_vit.evaluators.labels import choose_labeled, held_out_split
from ssl_vit.evaluators.linear_probe import measured, probe_predictions
from ssl_vit.evaluators.tuning import Cost, measurement, scores, train_classifier
from ssl_vit.interfaces import Config as BaseConfig
from ssl_vit.interfaces import Diverged, Measurement, UserError
from ssl_vit.models import ImageSize, Resampling, factory
from ssl_vit.objectives import classification
from ssl_vit.training import OptimConfig

_PROTOCOLS: dict[str, dict[str, Any]] = {
    "paper": {},
    "mae": {
        "lrs": (5e-4,),
        "lr_batch": 256,
        "epochs": (100,),
        "batch_size": 1024,
        "warmup_epochs": 5,
        "optimizer": "adamw",
        "weight_decay": 0.05,
        "layer_decay": 0.65,
        "drop_path": 0.1,
        "clip_norm": 0.0,
        "mixup": 0.8,
        "cutmix": 1.0,
        "label_smoothing": 0.1,
        "pooling": "mean",
        "augment": {"scale": (0.08, 1.0)},
    },
}
_PIXEL_CS = (1e-3, 1e-2, 1e-1, 1.0)


class Config(BaseConfig):
    """The paper's protocol by default; every number is a key, so that a recipe scales it.

    protocol: which recipe the other keys default to: `paper`, or `mae` (its ViT-B numbers; without RandAugment and
        random erasing, and with a decay to zero instead of 1e-6).
    lrs x steps: the candidates of the sweep; a single one is taken without it. epochs: lengths in passes over the
        labeled images, in place of steps. lr_batch: when set, the rates are for that batch size and scaled linearly to
        the real one.
    warmup_steps, warmup_epochs: of rising rate (epochs where lengths are epochs); at most a fifth of a run.
    held_out: share of the training images (each class's) that the sweep is scored on. No run trains on them but the
        last one with all labels, as in the paper.
    tune_labels_per_class: the label budget of the sweep (None: that of the run), so that one sweep can serve several.
    labels_per_class: label budgets: images a class chosen as few_shot does, shares such as '10%', or all.
    seeds: of the labeled subset, the head, the order and augmentation, and the untrained encoder's weights; the sweep
        uses the first.
    image_size: pixels, a side or [height, width]; another than the pretraining's (None) resamples the positions by
        `position_resampling` (`timm` or `google`). drop_path: stochastic depth of the last block; dropout: that of
        `encoder.dropout` (None: as pretrained, which may differ between the arms of a comparison).
        mixup, cutmix, label_smoothing: see `objectives/classification.py`.
    lanes: see data.lanes.
    """

    protocol: Literal["paper", "mae"] = "paper"
    lrs: Numbers = Field((0.001, 0.003, 0.01, 0.03), min_length=1)
    lr_batch: int | None = Field(None, ge=1)
    steps: Counts = Field((500,), min_length=1)
    epochs: Numbers = ()
    batch_size: int = Field(512, ge=1)
    warmup_steps: int = Field(100, ge=0)
    warmup_epochs: float = Field(0, ge=0)
    optimizer: Literal["sgd", "adamw"] = "sgd"
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    layer_decay: float | None = Field(None, gt=0, le=1)
    clip_norm: float = Field(1.0, ge=0)
    pooling: Literal["token", "mean", "patches"] = "token"
    image_size: ImageSize | None = None
    position_resampling: Resampling = "timm"
    drop_path: float | None = Field(None, ge=0, lt=1)
    dropout: float | None = Field(None, ge=0, lt=1)
    mixup: float = Field(0.0, ge=0)
    cutmix: float = Field(0.0, ge=0)
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    augment: AugmentConfig = AugmentConfig()
    lanes: int = Field(8, ge=1)
    held_out: float = Field(0.1, gt=0, lt=1)
    tune_labels_per_class: Budget | None = None
    labels_per_class: Budgets = (ALL,)
    seeds: Seeds = (0, 1, 2)

    @model_validator(mode="before")
    @classmethod
    def _protocol_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        defaults = dict(_PROTOCOLS.get(given.get("protocol", "paper"), {}))
        if given.get("steps"):
            defaults.pop("epochs", None)
        nested = {key: value | (given.get(key) or {}) for key, value in defaults.items() if isinstance(value, dict)}
        return defaults | given | nested


def labeled(labels: np.ndarray, config: Config, budget: int | str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(images to train on, held-out images) as sorted global indices; the split itself never depends on the seed."""
    kept, held = held_out_split(labels, config.held_out, seed=0)
    masked = np.full_like(labels, -1)
    masked[kept] = labels[kept]
    return np.sort(choose_labeled(masked, budget, seed, share_of=labels)), held


class Evaluator(Judge):
    """Sweep, then a fine-tuning a seed, for the trained encoder and from scratch; raw pixels get the linear probe."""

    title = "Fine-tuning"
    trains_encoder = True

    def tuned_at(self, budget: int | str) -> int | str:
        return self.config.tune_labels_per_class or budget

    def stages(self, kind: str, images: int) -> list[dict[str, Any]]:
        c: Config = self.config
        lengths = [length.get("steps") or self._steps(length["epochs"], images) for length in self._lengths()]
        keys = {
            "data": {"lanes": c.lanes, "augment": c.augment.model_dump()},
            "encoder": {"image_size": c.image_size} if c.image_size else {},
            "objective": {"name": "classification", "head": "linear", "pooling": c.pooling},
            "optim": {"name": c.optimizer, "lr": max(c.lrs), "layer_decay": c.layer_decay},
        }
        several = [steps for steps in lengths for _ in c.lrs]
        if kind != "choose":
            several = [max(lengths)]
        elif len(several) == 1:
            several = []
        return [keys | {"training": {"steps": steps, "batch_size": c.batch_size}} for steps in several]

    def choose(self, task: Task, source: str, budget: int | str, seed: int) -> Choice | None:
        """Try every (lr, length) on the seed's labeled subset; the winner is chosen on held-out train alone. A single
        candidate is taken as it is.

        Of equals the shorter wins, then the lower learning rate. Only the winner is scored on test, and its score is a
        measurement of the first label budget that equals the sweep's.
        """
        if source == "pixels":
            return None
        c: Config = self.config
        candidates = [{"lr": lr, **length} for length in self._lengths() for lr in sorted(c.lrs)]
        if len(candidates) == 1:
            return Choice(candidates, candidates[0])
        train, held = labeled(task.train_labels, c, budget, seed)
        if not len(held):
            raise UserError(
                f"fine_tune: held_out={c.held_out:g} holds none of so few images a class out, to choose by: raise it, "
                "or give one rate and one length, which need no choice (lrs=[0.01] steps=[500])"
            )
        task.say(f"{source}: {len(candidates)} trainings to choose by {len(held)} held-out images")
        tried: list[dict[str, Any]] = []
        costs: list[Cost] = []
        winner: tuple[dict[str, Any], classification.Objective, Cost] | None = None
        for candidate in candidates:
            try:
                objective, cost = self._train(task, source, candidate, seed, train)
                costs.append(cost)
                accuracy = scores(task, objective, task.train, held)[task.metric]
            except Diverged as error:  # the candidate has lost, the others go on
                costs += [error.cost] if isinstance(error.cost, Cost) else []
                tried.append({**candidate, "held_out_accuracy": 0.0})
                task.say(f"{_words(tried[-1])}: diverged")
                continue
            tried.append({**candidate, "held_out_accuracy": accuracy})
            task.say(f"{_words(tried[-1])}: {accuracy:.1%} of the held-out images, {cost.seconds:.0f} s")
            if winner is None or accuracy > winner[0]["held_out_accuracy"]:
                winner = tried[-1], objective, cost
        if winner is None:
            raise UserError(f"fine_tune: no candidate of lrs={c.lrs} trained without diverging")
        chosen, objective, cost = winner
        scored = None if budget == ALL else measurement(task, objective, cost, budget, seed, train, _settings(chosen))
        total = Cost(*(sum(values) for values in zip(*(vars(cost).values() for cost in costs), strict=True)))
        return Choice(tried, chosen, scored, **vars(total))

    def measure(
        self,
        task: Task,
        source: str,
        budgets: Sequence[int | str],
        seeds: Sequence[int],
        choice: Choice | None = None,
    ) -> Iterator[Measurement]:
        for budget in budgets:
            for seed in seeds:
                if choice is None:
                    yield self._pixels(task, budget, seed)
                elif choice.measured and (choice.measured.labels_per_class, choice.measured.seed) == (budget, seed):
                    yield choice.measured  # the sweep has trained this very model already
                else:
                    train, settings = self._images(task, budget, seed), _settings(choice.chosen)
                    objective, cost = self._chosen(task, source, settings, seed, train)
                    task.say(f"{source}, {budget_words(budget)}, seed {seed}: {cost.seconds:.0f} s")
                    yield measurement(task, objective, cost, budget, seed, train, settings)

    def _images(self, task: Task, budget: int | str, seed: int) -> np.ndarray:
        """What a measurement trains on, sorted: with all labels the held-out images too."""
        train, held = labeled(task.train_labels, self.config, budget, seed)
        return np.sort(np.concatenate([train, held])) if budget == ALL else train

    def _lengths(self) -> list[dict[str, Any]]:
        c: Config = self.config
        if c.epochs:
            return [{"epochs": epochs} for epochs in sorted(c.epochs)]
        return [{"steps": steps} for steps in sorted(c.steps)]

    def _steps(self, epochs: float, images: int) -> int:
        return math.ceil(epochs * images / self.config.batch_size)

    def _chosen(
        self, task: Task, source: str, settings: dict[str, Any], seed: int, train: np.ndarray
    ) -> tuple[classification.Objective, Cost]:
        try:
            return self._train(task, source, settings, seed, train)
        except Diverged as error:
            told = Diverged(
                f"fine_tune: {_words(settings)} diverged with seed {seed} ({source}, "
                f"{len(train)} images): {str(error).splitlines()[0]}; leave that rate out of fine_tune.lrs"
            )
            told.everywhere = error.everywhere
            raise told from None

    def _train(
        self, task: Task, source: str, settings: dict[str, Any], seed: int, train: np.ndarray
    ) -> tuple[classification.Objective, Cost]:
        """Fine-tune the `trained` encoder or a fresh `untrained` one on the `train` images (global indices). settings:
        lr, and steps or epochs."""
        c: Config = self.config
        steps, warmup = settings.get("steps", 0), float(c.warmup_steps)
        if "epochs" in settings:
            steps = self._steps(settings["epochs"], len(train))
            warmup = c.warmup_epochs * len(train) / c.batch_size
        optim = OptimConfig(
            name=c.optimizer,
            lr=settings["lr"],
            lr_batch=c.lr_batch,
            momentum=c.momentum,
            weight_decay=c.weight_decay,
            layer_decay=c.layer_decay,
            clip_norm=c.clip_norm,
            warmup_steps=min(round(warmup), steps // 5),
        )
        head = classification.Config(
            head="linear",
            pooling=c.pooling,
            label_smoothing=c.label_smoothing,
            mixup=c.mixup,
            cutmix=c.cutmix,
        )
        return train_classifier(
            task,
            self._start(task, source, seed),
            head,
            optim,
            name=f"fine-tune {source}",
            steps=steps,
            batch_size=c.batch_size,
            augment=c.augment,
            lanes=c.lanes,
            images=train,
            seed=seed,
        )

    def _start(self, task: Task, source: str, seed: int) -> factory.Encoder:
        c: Config = self.config
        if source == "untrained":
            encoder = factory.fresh(task.trained, seed, c.image_size)
        else:
            size = c.image_size or task.trained.image_size
            encoder = factory.at_size(task.trained, size, c.position_resampling)
        if c.dropout is not None:
            for name, module in encoder.named_modules():
                if isinstance(module, nn.Dropout) and not name.endswith("attn_drop"):
                    module.p = c.dropout
        if c.drop_path is not None:
            blocks = factory.require_vit(encoder, "fine_tune.drop_path").network.blocks
            for block, rate in zip(blocks, calculate_drop_path_rates(c.drop_path, len(blocks)), strict=True):
                block.drop_path1, block.drop_path2 = DropPath(rate), DropPath(rate)
        return encoder

    def _pixels(self, task: Task, budget: int | str, seed: int) -> Measurement:
        train = task.features("pixels", "train", Representation(), self._images(task, budget, seed))
        test = task.features("pixels", "test", Representation())
        fitted = probe_predictions(train.vectors, train.labels, test.vectors, cs=_PIXEL_CS, seed=seed)
        note = "raw pixels have no network to fine-tune: a linear probe"
        return measured(task, fitted, train, test, budget, seed, note)


def _settings(candidate: dict[str, Any]) -> dict[str, Any]:
    """What a sweep's candidate was trained with."""
    return {key: value for key, value in candidate.items() if key != "held_out_accuracy"}


def _words(candidate: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value:g}" for key, value in _settings(candidate).items())
