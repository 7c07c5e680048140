"""From shards to batches: configuration of the data room (torch-free; the modules below do the work)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ssl_vit.interfaces import Config


class AugmentConfig(Config):
    """Training augmentation; every choice is drawn from a generator seeded by (seed, epoch, sample index).

    crop: `inception` (random area and aspect, resized; the paper's), `shift` (zero padding, then a random crop: for
        small images whose scale carries meaning, such as digits), `affine` (small rotation, zoom, shear and shift),
        `centre` (no randomness).
    scale, ratio: area fraction and aspect range of the inception crop (paper fine-tuning: 0.05 to 1).
    padding: pixels of zero padding on each side before a `shift` crop; the largest shift of `affine`.
    degrees, zoom, shear: of `affine`: largest rotation (degrees), relative change of size, shear (degrees).
    flip: mirror half of the images, on the device.
    """

    crop: Literal["inception", "shift", "affine", "centre"] = "inception"
    scale: tuple[float, float] = (0.05, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    padding: int = Field(0, ge=0)
    degrees: float = Field(10.0, ge=0, le=180)
    zoom: float = Field(0.1, ge=0, lt=1)
    shear: float = Field(5.0, ge=0, lt=90)
    flip: bool = True

    @model_validator(mode="after")
    def _ranges_rise(self) -> AugmentConfig:
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"{name} must be two rising positive numbers, not {low}, {high}")
        return self


class DataConfig(Config):
    """Which shards feed training, and how.

    train: a folder of shards, one tar, a glob, a brace range (`shards/{000000..000099}.tar`) or such a URL.
    lanes: how many independent streams carry the order. It must divide the batch size and be a multiple of the number
        of processes; each loader worker owns at least one. Keep it fixed over a run: it fixes the order of the data.
        A lane holds the undecoded bytes of the part of a shard that it is reading.
    workers: loader processes a rank; 0 decodes in the training process.
    cache_mb: decoded images kept in memory by each loader process (MiB), so that small sets are decoded once.
    on_bad_sample: `skip` counts, reports and goes on; `fail` stops at the first, naming shard and key.
    evaluation_resize: evaluation resizes the shorter side to round(this * image size), then crops the centre
        (256/224, the paper authors' few-shot protocol; 1.0 for images that already have the right size).
    """

    train: str
    lanes: int = Field(8, ge=1)
    workers: int = Field(1, ge=0)
    cache_mb: int = Field(256, ge=0)
    on_bad_sample: Literal["skip", "fail"] = "skip"
    augment: AugmentConfig = AugmentConfig()
    evaluation_resize: float = Field(256 / 224, ge=1.0)
