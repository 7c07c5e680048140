"""Fine-tuning (paper, table 4): zero-initialized linear head, SGD with momentum, learning rate swept on held-out train;
or MAE's recipe (`main_finetune.py`): AdamW with layer decay, mixup, cutmix and label smoothing.

The untrained encoder (training from scratch) has a separate sweep.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from timm.layers import DropPath
from torch import nn

from ssl_vit.data import DataConfig
from ssl_vit.evaluators import Budget, Seeds
from ssl_vit.evaluators.base import Classifier, LabeledConfig
from ssl_vit.evaluators.base import Evaluator as BaseEvaluator
from ssl_vit.evaluators.classifier import TrainedConfig, fit
from ssl_vit.evaluators.features import ImageSet
from ssl_vit.interfaces import UserError, errors_about
from ssl_vit.models import EncoderConfig, ImageSize, Resampling, factory
from ssl_vit.models.encoder import Encoder
from ssl_vit.recipe import Recipe


class Config(TrainedConfig, LabeledConfig):
    """By default the paper's numbers for Pets and Flowers-102 (500 steps, 100 of them warmup, four learning rates, a
    tenth held out), but at the image size and dropout of the pretraining; the paper fine-tunes at 384 pixels. For CIFAR
    and ImageNet it has other steps, warmup, held-out fractions and (ImageNet) rates, which the suite `transfer` sets.

    protocol: selects the defaults of the other keys. `paper`: those shown. `mae`: those of MAE for ViT-B (AdamW at 5e-4
        per 256 images, weight decay 0.05, layer decay 0.65, 100 epochs, batch size 1,024, mixup, CutMix, label
        smoothing, drop path 0.1, RandAugment), without a sweep. Differences from MAE: no random erasing, decay to 0
        instead of 1e-6, layer norm before pooling; `sincos2d` positions stay fixed. Training from scratch has no layer
        decay. Test images are prepared as `data.evaluation_resize` of the run says; the paper's authors do not crop
        them.
    held_out: fraction of each class's training images that are held out to score the sweep. The labeled images of a
        budget are drawn from the rest. Only the budget `all` trains on the held-out images too, after the selection,
        as in the paper.
    sweep_labels_per_class: the label budget at which settings are selected for all budgets (None: each budget has its
        own sweep).
    image_size: pixels, a side or [height, width]; another than the pretraining's (None) resamples the positions.
    position_resampling: by the method of `timm` or `google`.
    drop_path: stochastic depth rate of the last block (None: as pretrained, which may differ between the arms of a
        comparison).
    dropout: in place of `encoder.dropout` (None: as pretrained).
    """

    CHOICE: ClassVar[str] = "protocol"
    DEFAULTS: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {
            "sweep": {"optim.lr": (0.001, 0.003, 0.01, 0.03)},
            "optim": {"name": "sgd", "lr": 0.01, "warmup_steps": 100},
            "training": {"steps": 500, "batch_size": 512},
            "head": {"head": "linear"},
        },
        "mae": {
            "optim": {"lr": 5e-4, "lr_batch": 256, "weight_decay": 0.05, "layer_decay": 0.65, "clip_norm": 0.0},
            "training": {"epochs": 100, "batch_size": 1024, "auto_batch": True},
            "warmup_epochs": 5,
            "head": {"head": "linear", "pooling": "mean", "mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1},
            "augment": {"scale": (0.08, 1.0), "rand_augment": "rand-m9-mstd0.5-inc1"},
            "drop_path": 0.1,
        },
    }

    protocol: Literal["paper", "mae"] = "paper"
    held_out: float = Field(0.1, gt=0, lt=1)
    sweep_labels_per_class: Budget | None = None
    seeds: Seeds = (0, 1, 2)
    image_size: ImageSize | None = None
    position_resampling: Resampling = "timm"
    drop_path: float | None = Field(None, ge=0, lt=1)
    dropout: float | None = Field(None, ge=0, lt=1)

    @model_validator(mode="after")
    def _check_head(self) -> Self:
        if self.head.head == "probe":
            raise ValueError("head.head=probe: it would not train the encoder; use linear_probe with method=lars")
        return self


class Evaluator(BaseEvaluator):
    """A training of the whole encoder for every label budget and seed, from the trained encoder and from scratch."""

    title = "Fine-tuning"
    references = ("untrained",)
    trains_encoder = True

    def fit(self, images: ImageSet, seed: int) -> Classifier:
        c: Config = self.config
        trained = images.context.trained
        with errors_about("head"):
            trained.check_pooling(c.head.pooling)
        if images.source == "untrained":
            encoder = factory.fresh(trained, seed, c.image_size)
        else:
            encoder = factory.at_size(trained, c.image_size or trained.image_size, c.position_resampling)
        return fit(self, images, self._with_rates(encoder), seed)

    def for_source(self, source: str) -> Evaluator:
        """Training from scratch has one rate for all layers."""
        if source != "untrained":
            return self
        optim = self.config.optim.model_copy(update={"layer_decay": None})
        sweep = {key: values for key, values in self.config.sweep.items() if key != "optim.layer_decay"}
        return type(self)(self.config.model_copy(update={"optim": optim, "sweep": sweep}))

    def stage(self, data: DataConfig, encoder: EncoderConfig, images: int, seed: int) -> Recipe:
        c: Config = self.config
        sizes = encoder.model_copy(update={"image_size": c.image_size} if c.image_size else {})
        batch_size = c.training.batch_size
        if c.training.epochs is not None:  # larger batches would only mean fewer steps
            batch_size = max(min(batch_size, images) // c.lanes, 1) * c.lanes
        return c.recipe("fine_tune", data, sizes, images, seed, batch_size)

    def _with_rates(self, encoder: Encoder) -> Encoder:
        """The encoder with the configured dropout. Raises UserError for a network that has none to set."""
        c: Config = self.config
        drops = any(isinstance(module, DropPath) and module.drop_prob for module in encoder.modules())
        if c.drop_path or (c.drop_path == 0 and drops):
            encoder = encoder.with_arguments(drop_path_rate=c.drop_path)
        if c.dropout is not None:
            modules = [(name, module) for name, module in encoder.named_modules() if isinstance(module, nn.Dropout)]
            dropouts = [module for name, module in modules if not name.endswith("attn_drop")]
            if c.dropout and not dropouts:
                raise UserError(f"dropout={c.dropout:g}: {encoder.name} has no dropout; set it to null")
            for module in dropouts:
                module.p = c.dropout
        return encoder

    def check(self, encoder: Encoder, images: int) -> None:
        c: Config = self.config
        with errors_about("head"):
            encoder.check_pooling(c.head.pooling)
        with torch.device("meta"):
            self._with_rates(encoder.outline(c.image_size))
