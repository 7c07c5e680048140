"""Training from servers: in forked loader workers, through their failures, and to the same weights as from the disk."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from ssl_vit import execution, recipe
from ssl_vit.data import AugmentConfig, DataConfig, RemoteConfig
from ssl_vit.data.evaluation import EvaluationStream, evaluation_batches
from ssl_vit.data.images import train_transform
from ssl_vit.data.order import LanePosition, SampleSet, shard_order
from ssl_vit.data.samples import Preprocess
from ssl_vit.data.shards import ShardSet, open_shards
from ssl_vit.data.stream import train_source
from ssl_vit.interfaces import RunError

from .servers import FaultyServer

CPU = torch.device("cpu")
REMOTE = RemoteConfig(timeout=20, retries=2)
VIEW = Preprocess(train_transform(8, AugmentConfig(crop="shift", padding=1)), 1, 10, seed=3)


@pytest.fixture
def server(serve: Callable, digit_shards: Path, no_waiting: None) -> FaultyServer:
    return serve(digit_shards)


def batches(shards: ShardSet, workers: int, strict: bool = False) -> Iterator:
    data = DataConfig(train="", lanes=4, workers=workers, cache_mb=0, on_bad_sample="fail" if strict else "skip")
    source = train_source(shards, VIEW, data, batch_size=64, rank=0, ranks=1, device=CPU)
    return source([LanePosition()] * 4)


def images(shards: ShardSet, workers: int, steps: int = 6) -> torch.Tensor:
    return torch.stack([batch.images for batch, _ in itertools.islice(batches(shards, workers), steps)])


@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize("cached", [False, True])
def test_forked_workers_read_after_their_parent_has(
    server: FaultyServer,
    digit_shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    cached: bool,
) -> None:
    """A plain file server is also a bucket to read from: s3fs asks it for /shards/NAME."""
    if scheme == "s3":
        (tmp_path / "web").mkdir()
        (tmp_path / "web" / "shards").symlink_to(digit_shards)
        server.folder = tmp_path / "web"
        for name, value in {"ENDPOINT_URL": server.url, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
    remote = REMOTE.model_copy(update={"cache_dir": str(tmp_path / "cache") if cached else None})
    shards = open_shards(server.url if scheme == "http" else "s3://shards", remote)
    shards.open(0)  # the parent has a client, a connection and a thread by now
    start = time.monotonic()
    found = images(shards, workers=2)
    assert time.monotonic() - start < 20
    assert torch.equal(found, images(open_shards(str(digit_shards)), workers=0))
    assert len(shards.open(1).samples) == 177  # the parent's client still works
    assert torch.equal(images(shards, workers=2), found)


def test_an_outage_is_an_error_and_never_skipped_samples(server: FaultyServer) -> None:
    shards = open_shards(server.url, REMOTE)
    for number in range(8):
        server.faults[f"{number:06d}.tar"] = [("cut", 100_000)]
        server.always[f"{number:06d}.tar"] = ("status", 503)
    for workers in (0, 2):
        with pytest.raises(RunError, match=r"tar: HTTP status 503.*3 tries") as caught:
            images(shards, workers)
        assert "Traceback" not in str(caught.value) and "\n" not in str(caught.value)
    evaluation = EvaluationStream(shards, DataConfig(train="", workers=2), 8, 1, batch_size=64)
    with pytest.raises(RunError, match=r"tar: HTTP status 503.*3 tries") as caught:
        list(evaluation_batches(evaluation, CPU))
    assert "Traceback" not in str(caught.value) and "\n" not in str(caught.value)


def test_damage_inside_a_remote_shard_is_skipped_as_in_a_local_one(
    serve: Callable, digit_shards: Path, tmp_path: Path, no_waiting: None
) -> None:
    shutil.copytree(digit_shards, tmp_path / "web")
    path = tmp_path / "web" / "000003.tar"
    path.write_bytes(path.read_bytes()[:100_000])
    info = json.loads((tmp_path / "web" / "info.json").read_text())
    for shard in info["shards"]:
        del shard["bytes"], shard["sha256"]  # so nothing says that it was longer
    (tmp_path / "web" / "info.json").write_text(json.dumps(info))
    shards = open_shards(serve(tmp_path / "web").url, REMOTE)
    skipped = [skip for _, chunk in itertools.islice(batches(shards, 2), 22) for skip in chunk.skipped]
    assert skipped and all("000003.tar" in skip.shard and "missing: the shard" in skip.reason for skip in skipped)


KEYS = ["training.steps=14", "training.checkpoint_every=2", "training.log_every=2", "training.picture_every=0"]
KEYS += ["training.batch_size=128", "optim.warmup_steps=2", "data.lanes=2", "data.workers=1", "data.cache_mb=0"]
KEYS += ["encoder.width=16", "encoder.depth=1", "encoder.heads=2", "training.trackers={}"]


def train(data: str, run: Path, *keys: str) -> None:
    execution.train(recipe.load_recipe("digits_ssl", [f"data.train={data}", f"run={run}", *KEYS, *keys]))


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert not any("event" in row for row in rows)  # such as skipped samples
    return [row["loss"] for row in rows]


def last_shard_of_the_first_epoch(digit_shards: Path) -> str:
    counts = open_shards(str(digit_shards)).counts
    return f"{shard_order(0, 0, SampleSet(counts))[-1]:06d}.tar"


def test_a_run_through_failures_and_an_outage_ends_as_one_from_the_disk(
    serve: Callable, digit_shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_waiting: None
) -> None:
    """Stalls, cuts, 503s and a garbled transfer on the way; a longer outage ends the run, which then resumes."""
    server = serve(digit_shards)
    faults = itertools.cycle([("cut", 50_000), ("status", 503), ("stall", 100_000), ("garbage",), ("silent",)])
    for number in range(8):
        server.faults[f"{number:06d}.tar"] = [next(faults)]
    server.always[last := last_shard_of_the_first_epoch(digit_shards)] = ("silent",)
    web, disk = tmp_path / "web", tmp_path / "disk"

    with pytest.raises(RunError, match=f"^{server.url}/{last}: no data for 0.7 s; 2 tries in .*$"):
        train(server.url, web, "data.remote.timeout=0.7", "data.remote.retries=1", "training.checkpoint_every=0")
    server.always.clear()
    train(server.url, web, f"data.remote.cache_dir={tmp_path}/cache")
    assert "resuming at step" in capsys.readouterr().err
    assert not any(server.faults.values())  # all of them happened
    assert list((tmp_path / "cache").glob("*.tar"))
    train(str(digit_shards), disk)
    assert losses(web)[-1] == losses(disk)[-1]
    there, here = load_file(web / "encoder.safetensors"), load_file(disk / "encoder.safetensors")
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in here)
