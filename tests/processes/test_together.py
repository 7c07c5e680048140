"""What one of two processes meets in a step is decided by both: bad losses, memory that runs short."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssl_vit import api, recipe, results

World = Callable[..., Any]


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_bad_loss_of_one_process_is_taken_by_both_as_by_one_alone(world: World, digits: Path, tmp_path: Path) -> None:
    """Stopped at with that process's samples named, or skipped: with the losses of one process alone."""
    one, two = tmp_path / "1", tmp_path / "2"
    everyone = [*world(1, "bad_losses", digits, one), *world(2, "bad_losses", digits, two)]
    assert [process.wait() for process in everyone] == [0, 0, 0], "\n".join(process.text for process in everyone)
    for process in everyone:
        told = dict(line.split(": ", 1) for line in process.text.splitlines() if re.match("(stop|skip): ", line))
        assert told["stop"].startswith("Diverged everywhere=True the loss or its gradient was not finite at step 8;")
        assert f"and {48 // (1 if process is everyone[0] else 2) - 8} more" in told["stop"]
        assert told["skip"] == "done"
    skips = [[row["step"] for row in rows(run / "skip") if row.get("event") == "skipped_step"] for run in (one, two)]
    assert skips == [[8, 11], [8, 11]]
    expected, found = ({row["step"]: row["loss"] for row in rows(run / "skip") if "loss" in row} for run in (one, two))
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limit is Linux's")
def test_a_process_short_of_memory_makes_both_take_smaller_micro_batches(
    world: World, digits: Path, tmp_path: Path
) -> None:
    keys = ["training.batch_size=2400", "training.steps=2", "encoder.width=64", "encoder.depth=6"]
    both = world(2, "auto_batch", digits, tmp_path / "run", *keys)
    assert [process.wait() for process in both] == [0, 0], both[0].text + both[1].text
    first, *others = rows(tmp_path / "run")
    count = first["accumulate"]
    assert first == {"step": 0, "event": "auto_batch", "accumulate": count, "micro_batch": 1200 // count} and count > 1
    assert [row["images_seen"] for row in others] == [2400, 4800]


def test_all_processes_end_with_the_running_statistics_that_are_saved(
    world: World, digits: Path, tmp_path: Path
) -> None:
    both = world(2, "statistics", digits, tmp_path / "run")
    assert [process.wait() for process in both] == [0, 0], both[0].text + both[1].text
    main, other = (dict(re.findall(r"(own|shared): (.*)", process.text)) for process in both)
    assert main["own"] != other["own"] and main["own"] == main["shared"] == other["shared"]


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    keys = [f"data.train={digits}/train", f"run={run}", "training.steps=9", "training.checkpoint_every=0"]
    api.train(recipe.load_recipe("digits_supervised", [*keys, "training.trackers={}"]), quiet=True)
    return run


def test_three_processes_evaluate_as_one_does(world: World, digits: Path, trained: Path, tmp_path: Path) -> None:
    """Images that do not split evenly: none counts twice, and padding counts for nothing."""
    measured, images = {}, {}
    for count in (1, 3):
        run = shutil.copytree(trained, tmp_path / str(count))
        for name, keys in (("few_shot", ("shots=[5]", "seeds=[0]")), ("own_head", ())):
            everyone = world(count, "command_line", "eval", run, name, "--data", digits, *keys)
            assert [process.wait() for process in everyone] == [0] * count, "".join(one.text for one in everyone)
            assert all(" s; saved in" in one.text for one in everyone[:1]) and not any(one.text for one in everyone[1:])
        rows = results.Table.read(sorted((run / "results").glob("*.json"))).results
        measured[count] = {(row.evaluator, row.arm): row.accuracy for row in rows}
        images[count] = {(row.evaluator, row.arm): row.prediction.images.tolist() for row in rows}
    assert measured[3] == pytest.approx(measured[1], abs=0.003) and len(measured[1]) == 4  # one image of 360
    assert images[3] == images[1]


def test_an_evaluation_ends_with_its_processes(world: World, digits: Path, trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    both = world(2, "left_by_the_last", "eval", run, "few_shot", "--data", digits)
    assert [process.wait(60) for process in both] == [1, 9]
    told = "error: another process of this run is gone, or has not answered for 600 s (training.timeout)"
    assert told in both[0].text and f"{run}/results holds what was measured before" in both[0].text
    assert "Traceback" not in both[0].text
