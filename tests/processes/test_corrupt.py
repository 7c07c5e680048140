"""Twenty thousand samples, one in a hundred broken in one of ten ways: training goes through and tells of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.tars import encoded, write_tar

SAMPLES, SHARDS, EVERY = 20_000, 16, 100

Members = dict[str, bytes]
World = Callable[..., Any]


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (12, 12), dtype=np.uint8))


JPEG, PNG = encoded(picture(0), "JPEG"), encoded(picture(0))
BROKEN: list[Callable[[Members], Members]] = [
    lambda sample: {**sample, "jpg": b""},
    lambda sample: {**sample, "jpg": b"this is no picture\n" * 9},
    lambda sample: {**sample, "jpg": JPEG[: len(JPEG) // 2]},
    lambda sample: {**sample, "jpg": JPEG[:2] + bytes(60) + JPEG[62:]},
    lambda sample: {"cls": sample["cls"], "png": PNG[:-30]},
    lambda sample: {"cls": sample["cls"], "txt": b"a caption"},
    lambda sample: {"jpg": JPEG},
    lambda sample: {**sample, "cls": b"cat"},
    lambda sample: {**sample, "cls": b"10"},
    lambda sample: {**sample, "cls": b"-1"},
]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corrupt")
    pictures = [encoded(picture(n), "JPEG") for n in range(50)]
    listed = []
    for shard in range(SHARDS):
        numbers = range(shard * SAMPLES // SHARDS, (shard + 1) * SAMPLES // SHARDS)
        members: Members = {}
        for n in numbers:
            sample = {"jpg": pictures[n % 50], "cls": b"%d" % (n % 10)}
            if n % EVERY == 7:
                sample = BROKEN[n // EVERY % len(BROKEN)](sample)
            members |= {f"{n:08d}.{extension}": data for extension, data in sample.items()}
        write_tar(folder / f"{shard:06d}.tar", members)
        listed.append({"file": f"{shard:06d}.tar", "samples": len(numbers)})
    info = {"classes": [str(n) for n in range(10)], "samples": SAMPLES, "shards": listed}
    (folder / "info.json").write_text(json.dumps(info))
    return folder


RECIPE = [
    "encoder.width=16",
    "encoder.depth=1",
    "encoder.heads=1",
    "data.augment.crop=center",
    "training.log_every=10",
]


def test_an_epoch_goes_through_and_every_broken_sample_is_reported(world: World, shards: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys = ["training.batch_size=400", "training.steps=50", "data.workers=2", "data.lanes=8", *RECIPE]
    process = world(1, "command_line", "train", "digits_supervised", f"data.train={shards}", f"run={run}", *keys)[0]
    assert process.wait() == 0, process.text[-3000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(row["step"] == 50 for row in rows)
    events = [row for row in rows if row.get("event") == "skipped_samples"]
    skipped = [sample for row in events for sample in row["samples"]]
    # Broken samples are passed over, so 50 steps of 400 go a little way into the second epoch, and count there again.
    first_epoch = {sample["key"]: sample for sample in skipped}
    assert {int(key) for key in first_epoch} == {n for n in range(SAMPLES) if n % EVERY == 7}
    assert len(first_epoch) == len(skipped), "each is listed once"
    for key, sample in first_epoch.items():
        assert f"{int(key) * SHARDS // SAMPLES:06d}.tar" in sample["shard"]
    assert len({sample["reason"] for sample in skipped}) >= 7
    total = events[-1]["total"]
    assert total == sum(row["count"] for row in events) > len(skipped)
    assert f"{total} in total" in process.text and "sample 0" in process.text
