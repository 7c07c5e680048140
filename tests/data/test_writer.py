"""Writing a shard takes memory for one image, however many and however large they are."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
from PIL import Image

from ssl_vit.data.packing import pack
from ssl_vit.data.packing.sources import open_source


def test_what_is_held_in_memory_does_not_grow_with_the_images(tmp_path: Path) -> None:
    """Peak memory with 20 and with 200 images of 0.5 MB; the files are one file under many names."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)).save(buffer, "PNG")
    assert len(buffer.getvalue()) > 450_000
    (tmp_path / "image.png").write_bytes(buffer.getvalue())
    script = (
        "import resource, sys; from pathlib import Path; from ssl_vit.data.packing import pack;"
        "from ssl_vit.data.packing.sources import open_source;"
        "pack(open_source(sys.argv[1]), Path(sys.argv[2]), shards=1, jobs=1);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for count in (20, 200):
        root = tmp_path / str(count)
        root.mkdir()
        for number in range(count):
            os.link(tmp_path / "image.png", root / f"{number}.png")
        ran = subprocess.run(
            [sys.executable, "-c", script, str(root), str(tmp_path / f"out{count}")], capture_output=True, check=True
        )
        peaks.append(int(ran.stdout) / 1024)
    assert (tmp_path / "out200" / "000000.tar").stat().st_size > 90_000_000
    assert peaks[1] - peaks[0] < 20  # MB


def test_the_headers_of_a_long_shard_are_not_kept(tmp_path: Path) -> None:
    source = open_source("digits", split="train")
    tracemalloc.start()
    pack(source, tmp_path / "out", shards=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.6e6, peak  # 1 MB is the buffer of the file; 2,000 headers would be 1.5 MB more
