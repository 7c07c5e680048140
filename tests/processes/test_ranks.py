"""Real processes that wait for each other: uneven shards never hang; an error is reported once and ends all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tars import packed

World = Callable[..., Any]


def test_three_ranks_with_two_workers_each_train_three_epochs_on_seven_uneven_shards(
    world: World, tmp_path: Path
) -> None:
    """360 samples, 12 lanes, 60 a step: 18 steps are three epochs; each sample must have come three times."""
    shards = packed("digits", tmp_path / "seven", "train", shards=7, subset=36)
    three = world(3, "uneven", shards, 2, 12, 60, 18)
    assert [process.wait() for process in three] == [0, 0, 0], three[0].text + three[1].text + three[2].text
    assert three[0].text.split() == ["3", "3", str(3 * 360)]


def test_two_ranks_with_two_workers_each_share_one_shard(world: World, tmp_path: Path) -> None:
    shards = packed("digits", tmp_path / "one", "train", shards=1, subset=36)
    two = world(2, "uneven", shards, 2, 12, 60, 12)
    assert [process.wait() for process in two] == [0, 0], two[0].text + two[1].text
    assert two[0].text.split() == ["2", "2", str(2 * 360)]


def test_an_error_of_every_rank_is_reported_once(world: World, tmp_path: Path) -> None:
    shards = packed("digits", tmp_path / "few", "train", shards=2, subset=2)
    keys = [f"data.train={shards}", f"run={tmp_path / 'run'}", "data.workers=0", "data.lanes=3"]
    main, other = world(2, "command_line", "train", "digits_ssl", *keys)
    assert (main.wait(100), other.wait(100)) == (2, 2)
    assert main.text.startswith("error: data.lanes=3 must be a multiple of the 2 process(es)")
    assert other.text == ""
