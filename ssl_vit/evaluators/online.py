"""The few-shot probe that runs during training: does the representation still get better?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ssl_vit.data import DataConfig
from ssl_vit.data.shards import ShardSet
from ssl_vit.evaluators.features import EvalContext, Features, ImageSet, extract
from ssl_vit.evaluators.few_shot import Ridge
from ssl_vit.evaluators.labels import choose_labeled, labeled_classes, labels_of
from ssl_vit.interfaces import UserError
from ssl_vit.models.encoder import Encoder
from ssl_vit.models.objective import Objective
from ssl_vit.records import SkippedSample
from ssl_vit.training import ProbeConfig, distributed
from ssl_vit.training.logging import Window
from ssl_vit.training.loop import Callback, Trainer


class OnlineProbe(Callback):
    """Measures few-shot accuracy now and then, and ends training where it no longer improves.

    It is measured on held-out images of the same shards: `labels_per_class` images to fit to, others to score.
    """

    name = "probe"

    def __init__(
        self,
        config: ProbeConfig,
        shards: ShardSet,
        data: DataConfig,
        encoder: Encoder,
        accelerator: distributed.Engine,
        skipped: Sequence[SkippedSample] = (),
    ) -> None:
        """skipped: samples that are known to be of no use.

        Raises UserError where the shards have too few labeled images, and for a pooling that the encoder lacks.
        """
        encoder.check_pooling(config.pooling)
        self.config = config
        self.context = EvalContext(encoder, shards, shards, data, accelerator, skipped=list(skipped))
        self.reported: set[tuple[str, str]] = set()
        self.step, self.best, self.since_best = 0, 0.0, 0
        labels = labels_of(shards)
        classes = labeled_classes(shards)
        held_out = max(1, config.images // classes)
        self.labeled = choose_labeled(labels, config.labels_per_class, 0)
        self.scored = np.setdiff1d(choose_labeled(labels, config.labels_per_class + held_out, 0), self.labeled)
        if not len(self.scored) or classes < 2:
            raise UserError(
                f"probe: {shards.spec} has {classes} class(es) and no labeled image beyond "
                f"labels_per_class={config.labels_per_class} of each: lower it, or name other shards by probe.data"
            )

    def start(self, trainer: Trainer) -> None:
        self.after_step(trainer)  # where the session before ended between its checkpoint and its probe

    def ends_window(self, trainer: Trainer) -> bool:
        step = trainer.progress.step
        return step > self.step and (step % self.config.every == 0 or step == trainer.job.total_steps)

    def after_step(self, trainer: Trainer) -> None:
        if self.ends_window(trainer):
            self._measure(trainer)
        if self.config.patience and self.since_best >= self.config.patience:
            trainer.log.say(f"no improvement in {self.config.patience} probes (probe.patience): training ends early")
            trainer.finished = True

    def accuracy(self, objective: Objective) -> float:
        """Accuracy, 0..1; the objective is left in evaluation mode. Every process must call it."""
        objective.eval()
        few = self._features(objective.encoder, self.labeled).of(self.labeled)
        scored = self._features(objective.encoder, self.scored)
        predicted = Ridge(few.vectors, few.labels).predict(scored.vectors, self.config.l2)
        return float((predicted == scored.labels).mean())

    def state_dict(self) -> dict[str, Any]:
        reported = sorted(self.reported)
        return {"step": self.step, "best": self.best, "since_best": self.since_best, "reported": reported}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.best, self.since_best = state["step"], state["best"], state["since_best"]
        self.reported |= {(shard, key) for shard, key in state.get("reported", ())}  # older checkpoints have none

    def _measure(self, trainer: Trainer) -> None:
        step = trainer.progress.step
        trainer.share_buffers()
        with trainer.interruptible(), trainer.published():  # in this order: the weights that train are saved
            value = distributed.from_main(self.accuracy(trainer.objective))  # processors may differ in the last bit
        trainer.model.train()
        trainer.progress.seconds += time.perf_counter() - trainer.window.start  # since the last log line
        self.since_best = 0 if value > self.best else self.since_best + 1
        self.step, self.best = step, max(value, self.best)
        trainer.log.values(step, {"probe_accuracy": value, "probe_best": self.best})
        trainer.log.say(f"step {step}: few-shot probe {value:.1%} (best {self.best:.1%})")
        if self.config.patience and self.since_best >= self.config.patience:
            trainer.log.event(step, {"event": "early_stop", "probe_best": self.best})
        trainer.skips += self._skipped()
        trainer.log_skips()
        trainer.window = Window(trainer.progress.step)

    def _skipped(self) -> list[SkippedSample]:
        """The samples that could not be used, each reported once and by the main process."""
        fresh = [skip for skip in self.context.skipped if (skip.shard, skip.key) not in self.reported]
        self.reported |= {(skip.shard, skip.key) for skip in fresh}
        self.context.skipped.clear()
        return fresh if self.context.accelerator.is_main_process else []

    def _features(self, encoder: Encoder, images: np.ndarray) -> Features:
        wanted = ImageSet(self.context, "trained", "train", images)
        return extract(wanted, lambda batch: encoder.represent(batch.images, self.config.pooling))
