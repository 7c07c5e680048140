"""Natural JPEGs, from a folder of class folders to a short pretraining, without a warning.

Set SSL_VIT_TEST_IMAGES to such a folder (photographs, a few hundred): `pytest -m slow tests/processes`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

IMAGES = os.environ.get("SSL_VIT_TEST_IMAGES")


@pytest.mark.slow
@pytest.mark.skipif(IMAGES is None, reason="SSL_VIT_TEST_IMAGES names no folder of images")
def test_photographs_pretrain_without_a_warning(tmp_path: Path) -> None:
    python = [sys.executable, "-W", "error::UserWarning:ssl_vit", "-m", "ssl_vit"]

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [*python, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert IMAGES is not None
    quiet = run("shards", "make", IMAGES, "shards", "--holdout", "0.2")
    assert run("shards", "verify", "shards/train") == ""
    keys = ["data.train=shards/train", "run=run", "training.steps=30", "training.batch_size=32"]
    quiet += run("train", "pretrain_vit_tiny", *keys, "training.log_every=10", "optim.warmup_steps=5")
    assert "arning" not in quiet
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
