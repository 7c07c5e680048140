"""The data plan on real processes that wait for one another: uneven shards never hang, too few are refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ssl_vit.data import pack, sources

# One import of torch, then a fork for each rank: the ranks are real processes over gloo, without their start-up time.
PROGRAM = """
import os, sys, traceback
from datetime import timedelta
import torch
from ssl_vit.data import AugmentConfig, DataConfig
from ssl_vit.data.plan import LanePosition
from ssl_vit.data.samples import View
from ssl_vit.data.shards import open_shards
from ssl_vit.data.stream import train_source
from ssl_vit.data.transforms import train_transform
from ssl_vit.interfaces import UserError

folder, ranks, workers, lanes, batch_size, steps = sys.argv[1], *map(int, sys.argv[2:])

def work(rank):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    torch.distributed.barrier()  # a rank that gives up at once must not leave while others still look for it
    shards = open_shards(folder)
    data = DataConfig(train=folder, lanes=lanes, workers=workers)
    view = View(train_transform(8, AugmentConfig(crop="centre")), 1, 10)
    source = train_source(
        shards, view, data, batch_size=batch_size, rank=rank, ranks=ranks, device=torch.device("cpu")
    )
    counts = torch.zeros(shards.samples, dtype=torch.int64)
    batches = source([LanePosition()] * lanes)
    for step in range(steps):
        batch, _ = next(batches)
        here = torch.bincount(batch.indices, minlength=shards.samples)
        torch.distributed.all_reduce(here)  # every rank must come, or this waits
        counts += here
    if rank == 0:
        print(counts.min().item(), counts.max().item(), counts.sum().item())

children = []
for rank in range(ranks):
    child = os.fork()
    if child == 0:
        try:
            work(rank)
            sys.stdout.flush()
            os._exit(0)
        except UserError as error:
            print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
            os._exit(2)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
sys.exit(max(codes))
"""


def ranks(folder: Path, *numbers: int) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    command += map(str, numbers)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """360 digits in 7 shards of 51 or 52."""
    folder = tmp_path_factory.mktemp("uneven")
    pack.make(sources.open_source("digits", split="test"), folder / "shards", shards=7, progress=False)
    return folder / "shards"


def test_three_ranks_with_two_workers_each_train_three_epochs_on_seven_uneven_shards(seven: Path) -> None:
    """360 samples, 12 lanes, 60 a step: 18 steps are three epochs; each sample must have come three times."""
    done = ranks(seven, 3, 2, 12, 60, 18)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["3", "3", str(3 * 360)]


def test_eight_ranks_on_one_shard_are_refused_with_the_fix(tmp_path: Path) -> None:
    pack.make(sources.open_source("digits", split="test"), tmp_path / "one", shards=1, progress=False)
    done = ranks(tmp_path / "one", 8, 0, 8, 64, 1)
    assert done.returncode == 2, done.stderr[-3000:]
    assert done.stderr.count("1 shard(s) are too few for 8 process(es)") == 8
    assert "ssl-vit shards make SOURCE OUT --overwrite --shards 8" in done.stderr
