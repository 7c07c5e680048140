"""From shards to batches: the configuration (torch-free)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from ssl_vit.interfaces import Config, LocalPath

VALIDATION = ("val", "valid", "validation")
TEST = ("test", *VALIDATION)  # names of the test part, in order of preference
MAX_PIXELS = 89_478_485  # where Pillow warns: 256 MiB of RGB


def train_and_test(place: str) -> tuple[str, str]:
    """The data arguments of the two parts of a dataset: `PLACE#train` and `PLACE#test`.

    place: PLACE, `PLACE#train` or PLACE/train. Images in `train` without `test` or `val` beside it are a dataset.
    """
    place, path = place.removesuffix("#train"), Path(os.path.expanduser(place))
    if "://" in place:
        place = place.removesuffix("/").removesuffix("/train")
    elif path.name == "train":
        images = path.is_dir() and not any(path.glob("*.tar"))
        if not images or any((path.parent / name).is_dir() for name in TEST):
            place = str(PurePosixPath(place).parent)
    return f"{place}#train", f"{place}#test"


class AugmentConfig(Config):
    """Training augmentation; every choice is drawn from a generator seeded by (seed, epoch, sample index).

    crop: `inception` (random resized crop, the paper's), `shift` (zero padding, then a random crop, for small images
        whose scale matters, such as digits) or `center` (center crop).
    scale: range of the inception crop's area, as a fraction of the image (paper, fine-tuning: 0.05 to 1).
    ratio: range of the inception crop's aspect ratio.
    padding: pixels of zero padding on each side before a `shift` crop.
    flip: random horizontal flip with probability 0.5, on the device.
    brightness: color jitter, on the device: the factor is drawn from [1 - x, 1 + x]. Color targets are computed after
        it.
    contrast: color jitter, as `brightness`.
    saturation: color jitter, as `brightness`.
    hue: color jitter: the shift is drawn from [-x, x], in turns of the color wheel (at most 0.5).
    jitter_prob: probability of color jitter.
    grayscale: probability of random grayscale, as in SimCLR and LeJEPA.
    blur: probability of a Gaussian blur (7x7 pixels, standard deviation drawn from 0.1 to 2), as in LeJEPA.
    solarize: probability of solarization (threshold 128), as in BYOL and LeJEPA.
    rand_augment: timm's RandAugment of each crop, on the host, such as rand-m9-mstd0.5-inc1 (MAE's fine-tuning) or
        rand-m10-n2 (None: none). For gray and RGB images.
    reduced_decode: decode JPEGs at 1/2, 1/4 or 1/8 of their size if the inception crop is at least that many times as
        large as the image that the network reads; off, every pixel is exactly torchvision's.
    """

    crop: Literal["inception", "shift", "center"] = "inception"
    scale: tuple[float, float] = (0.05, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    padding: int = Field(0, ge=0)
    flip: bool = True
    brightness: float = Field(0.0, ge=0, le=1)
    contrast: float = Field(0.0, ge=0, le=1)
    saturation: float = Field(0.0, ge=0, le=1)
    hue: float = Field(0.0, ge=0, le=0.5)
    jitter_prob: float = Field(1.0, ge=0, le=1)
    grayscale: float = Field(0.0, ge=0, le=1)
    blur: float = Field(0.0, ge=0, le=1)
    solarize: float = Field(0.0, ge=0, le=1)
    # Not saved as null: work that was finished before this key existed stays finished.
    rand_augment: str | None = Field(None, exclude_if=lambda value: value is None)
    reduced_decode: bool = True

    @model_validator(mode="after")
    def _ranges_rise(self) -> AugmentConfig:
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"{name} must be [low, high] with 0 < low <= high, not [{low}, {high}]")
        if self.scale[1] > 1:
            raise ValueError(f"scale: fractions of the image's area, at most 1, not {self.scale[1]}")
        return self


class RemoteConfig(Config):
    """How shards behind a URL are read; no effect on what is read, so each may change between sessions of a run.

    cache_dir: a folder on a local disk where whole shards are kept (None: downloaded again each time they are opened).
        Processes share it.
    cache_gb: maximum size of `cache_dir` (GiB); the least recently used shards are removed.
    largest_gb: maximum size of a shard that no `info.json` lists (GiB).
    retries: how often a failed request or download is repeated before the run stops; the waits double from half a
        second up to a minute.
    timeout: seconds without data before an attempt fails, for http and s3; other clients have limits of their own (hf://:
        HF_HUB_DOWNLOAD_TIMEOUT). A loader worker waits for a whole shard: `data.worker_timeout` must allow for that.
    """

    cache_dir: LocalPath | None = None
    cache_gb: float = Field(50.0, gt=0)
    largest_gb: float = Field(64.0, gt=0)
    retries: int = Field(5, ge=0)
    timeout: float = Field(60.0, gt=0)


class WeightedShards(Config):
    """One set of a mixture.

    shards: as `DataConfig.train` names one.
    weight: its share of the samples, relative to the other sets' (None, and then for all: each sample comes once per
        epoch).
    """

    shards: str
    weight: float | None = Field(None, gt=0)


def mixture(places: Sequence[str]) -> tuple[WeightedShards, ...]:
    """These data arguments together, as `data.train`."""
    return tuple(WeightedShards(shards=place) for place in places)


def _kind(train: Any) -> str:
    """Which way of naming shards a value is, for error messages."""
    return "<mixture>" if isinstance(train, (list, tuple)) else "<name>"


class DataConfig(Config):
    """Which shards feed training, and how.

    train: a folder of shards, one tar, a glob, a brace range (`shards/{000000..000099}.tar`) or such a URL: http(s)://
        (without globs), s3://, gs://, hf://datasets/USER/NAME/... or any other that fsspec knows. Or images, packed on
        first use: a folder, a parquet file, hf:NAME; `PLACE#train` is one part. Or a mixture: a list of such names, or
        of {shards: NAME, weight: NUMBER}; its epoch has as many samples as its sets together. `data=PLACE` sets it to
        `PLACE#train`.
    views: augmented views of each image in a step, drawn independently. LeJEPA compares them; other objectives treat
        each view as an image (repeated augmentation). Batch sizes count images, not views.
    samples: number of samples to train on (None: all). They are the same for every seed, and a larger number includes
        the samples of a smaller one.
    remote: retries and local cache for URLs.
    lanes: number of independent streams that the order is split into. It must divide the batch size and be a multiple
        of the number of processes; each loader worker owns at least one. Keep it fixed over a run: it fixes the order
        of the data.
    workers: loader processes of each training process; 0 decodes in the training process.
    worker_timeout: seconds after which a worker that has not delivered its part of a step counts as stuck (0: never).
    cache_mb: decoded images kept in memory by each loader process (MiB), so that small sets are decoded once
        (not JPEGs that may be decoded at a reduced size, see `augment.reduced_decode`);
        evaluation keeps as much in each process.
    max_pixels: an image with more, by its header, is a bad sample and not decoded. Packing skips those with more than
        the default, unless it scales them down.
    on_bad_sample: `skip` counts, reports and continues; `fail` stops at the first, naming shard and key; in
        training and in evaluation.
    evaluation_resize: evaluation resizes the shorter side to round(this * image size), then crops the center
        (256/224: the sizes of the paper authors' few-shot protocol, which also makes images square; 1.0 for images
        that already have the right size).
    """

    train: Annotated[
        Annotated[str, Tag("<name>")] | Annotated[tuple[WeightedShards, ...], Tag("<mixture>")], Discriminator(_kind)
    ]
    views: int = Field(1, ge=1, le=64)
    samples: int | None = Field(None, ge=1)
    remote: RemoteConfig = RemoteConfig()
    lanes: int = Field(8, ge=1, le=2**20)
    workers: int = Field(1, ge=0, le=1024)
    worker_timeout: int = Field(600, ge=0, le=10**6)
    cache_mb: int = Field(256, ge=0, le=2**20)
    max_pixels: int = Field(MAX_PIXELS, ge=1, le=2 * MAX_PIXELS)  # Pillow refuses twice as many
    on_bad_sample: Literal["skip", "fail"] = "skip"
    augment: AugmentConfig = AugmentConfig()
    evaluation_resize: float = Field(256 / 224, ge=1.0)

    @field_validator("train", mode="before")
    @classmethod
    def _names_are_sets(cls, train: Any) -> Any:
        if isinstance(train, (list, tuple)):
            return [{"shards": part} if isinstance(part, str) else part for part in train]
        return train

    @field_validator("train")
    @classmethod
    def _weights_are_whole(cls, train: str | tuple[WeightedShards, ...]) -> str | tuple[WeightedShards, ...]:
        if not isinstance(train, str):
            if not train:
                raise ValueError("the mixture is empty; name at least one shard set")
            if len({part.weight is None for part in train}) == 2:
                raise ValueError("give every set of a mixture a weight, or none")
        return train

    @property
    def places(self) -> tuple[str, ...]:
        """What `train` names: one place, or those of a mixture."""
        return (self.train,) if isinstance(self.train, str) else tuple(part.shards for part in self.train)
