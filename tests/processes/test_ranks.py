"""Real processes that wait for each other: uneven shards never hang; an error is reported once and ends all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ssl_vit.data.packing import pack
from ssl_vit.data.packing.plan import Options
from ssl_vit.data.packing.sources import open_source

World = Callable[..., Any]


def packed(folder: Path, shards: int) -> Path:
    """360 digits."""
    pack(open_source("digits", split="train"), folder, Options(shards=shards, subset=36), progress=False)
    return folder


def test_three_ranks_with_two_workers_each_train_three_epochs_on_seven_uneven_shards(
    world: World, tmp_path: Path
) -> None:
    """360 samples, 12 lanes, 60 a step: 18 steps are three epochs; each sample must have come three times."""
    three = world(3, "uneven", packed(tmp_path / "seven", 7), 2, 12, 60, 18)
    assert [process.wait() for process in three] == [0, 0, 0], three[0].text + three[1].text + three[2].text
    assert three[0].text.split() == ["3", "3", str(3 * 360)]


def test_two_ranks_on_one_shard_are_refused_with_the_fix(world: World, tmp_path: Path) -> None:
    keys = [f"data.train={packed(tmp_path / 'one', 1)}", f"run={tmp_path / 'run'}", "data.workers=0", "data.lanes=8"]
    main, other = world(2, "command_line", "train", "digits_ssl", *keys)
    assert (main.wait(100), other.wait(100)) == (2, 2)
    assert main.text.startswith("error: 1 shard(s) are too few for 2 process(es)")
    assert "ssl-vit shards make SOURCE OUT --overwrite --shards 2" in main.text
    assert other.text == ""
