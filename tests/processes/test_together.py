"""What one of two processes meets in a step is decided by both: bad losses, memory that runs short."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ssl_vit import execution, recipe, results
from tests.processes.reading import rows
from tests.tars import encoded, write_tar

World = Callable[..., Any]


def test_a_bad_loss_of_one_process_stops_both_and_names_its_samples(world: World, digits: Path, tmp_path: Path) -> None:
    both = world(2, "bad_loss", digits, tmp_path / "run")
    assert [process.wait() for process in both] == [0, 0], both[0].text + both[1].text
    for process in both:
        assert "stop: Diverged everywhere=True the loss or its gradient was not finite at step 8;" in process.text
        assert "and 16 more" in process.text


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limit is Linux's")
def test_a_process_short_of_memory_makes_both_take_smaller_micro_batches(
    world: World, digits: Path, tmp_path: Path
) -> None:
    keys = [
        "training.batch_size=2400",
        "training.steps=2",
        "encoder.width=64",
        "encoder.depth=6",
        "encoder.dropout=0.1",
    ]
    both = world(2, "auto_batch", digits, tmp_path / "run", *keys)
    assert [process.wait() for process in both] == [0, 0], both[0].text + both[1].text
    first, *others = rows(tmp_path / "run")
    count = first["accumulate"]
    size = 1200 // count
    assert first == {"step": 0, "event": "auto_batch", "accumulate": count, "micro_batch": size} and count > 1
    assert [row["images_seen"] for row in others] == [2400, 4800]


def test_all_processes_end_with_the_running_statistics_that_are_saved(
    world: World, digits: Path, tmp_path: Path
) -> None:
    both = world(2, "statistics", digits, tmp_path / "run")
    assert [process.wait() for process in both] == [0, 0], both[0].text + both[1].text
    main, other = (dict(re.findall(r"(own|shared): (.*)", process.text)) for process in both)
    assert main["own"] != other["own"] and main["own"] == main["shared"] == other["shared"]


def test_processes_that_see_different_shards_do_not_train(world: World, digits: Path, tmp_path: Path) -> None:
    """Such as an old copy on the disk of one machine."""
    for split, folder in (("train", "0"), ("test", "1")):
        shutil.copytree(digits / split, tmp_path / folder / "shards")
    both = world(2, "own_folder", tmp_path, "train", "digits_ssl", "data.train=shards", f"run={tmp_path}/run")
    assert [process.wait() for process in both] == [2, 2], both[0].text + both[1].text
    assert "shards: the processes see different shards" in both[0].text
    assert not (tmp_path / "run").exists()


def test_a_head_that_nothing_reads_does_not_stop_two_processes(world: World, digits: Path, tmp_path: Path) -> None:
    """The norm in the head of a ConvNeXt gets no gradient where its patches are read."""
    path = tmp_path / "convnext.yaml"
    path.write_text(
        f"name: convnext\nrun: {tmp_path}/run\n"
        f"data: {{train: {digits}/train, workers: 0}}\n"
        "encoder: {name: test_convnext, image_size: 32}\n"
        "objective: {name: classification, pooling: patches}\n"
        "training: {batch_size: 16, steps: 3}\n"
    )
    both = world(2, "command_line", "train", path)
    assert [process.wait() for process in both] == [0, 0], both[0].text + both[1].text
    assert [row["step"] for row in rows(tmp_path / "run")][-1] == 3


@pytest.fixture(scope="module")
def trained(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    keys = [f"data.train={digits}/train", f"run={run}", "training.steps=9", "training.checkpoint_every=0"]
    execution.train(recipe.load_recipe("digits_supervised", [*keys, "training.trackers={}"]), quiet=True)
    return run


def test_three_processes_evaluate_as_one_does(world: World, digits: Path, trained: Path, tmp_path: Path) -> None:
    """Images that do not split evenly: none counts twice, and padding counts for nothing."""
    measured, images = {}, {}
    for count in (1, 3):
        run = shutil.copytree(trained, tmp_path / str(count))
        for name, keys in (("few_shot", ("labels_per_class=[5]", "seeds=[0]")), ("own_head", ())):
            everyone = world(count, "command_line", "eval", run, name, "--data", digits, *keys)
            assert [process.wait() for process in everyone] == [0] * count, "".join(
                process.text for process in everyone
            )
            assert " s; saved in" in everyone[0].text and not any(process.text for process in everyone[1:])
        rows = [row for file in sorted((run / "results").glob("*.json")) for row in results.load(file)[0]]
        measured[count] = {(row.evaluator, row.arm): row.accuracy for row in rows}
        images[count] = {(row.evaluator, row.arm): row.prediction.images.tolist() for row in rows}
    assert measured[3] == pytest.approx(measured[1], abs=0.003) and len(measured[1]) == 4  # one image of 382
    assert images[3] == images[1]


def test_two_processes_run_a_comparison_together(world: World, tmp_path: Path) -> None:
    """Both measure the precision, and the result names the images that any of them skipped."""
    images = [encoded(Image.fromarray(np.full((8, 8), 25 * n, dtype=np.uint8))) for n in range(10)]
    for split, shard in itertools.product(("train", "test"), range(2)):
        members: dict[str, bytes] = {}
        for n in range(5 * shard, 5 * shard + 5):
            members |= {f"{split}{n}.png": images[n], f"{split}{n}.cls": b"%d" % (n % 2)}
        if (split, shard) == ("test", 1):
            members["test9.png"] = b""
        write_tar(tmp_path / split / f"{shard}.tar", members)
    (tmp_path / "comparison.yaml").write_text(
        "name: small\nseeds: [0]\nlabels_per_class: [all]\n"
        f"data: {{train: {tmp_path}/train, test: {tmp_path}/test}}\n"
        "arms: {ssl: {label: ssl, recipe: digits_ssl, overrides: "
        "[training.steps=1, training.batch_size=8, training.precision=auto]}}\n"
        "evaluators: {fine_tune: {sweep: {}, training: {steps: 1, batch_size: 8}}}\n"
    )
    both = world(2, "command_line", "compare", tmp_path / "comparison.yaml", f"run={tmp_path}/run")
    assert [process.wait() for process in both] == [0, 0], both[0].text + both[1].text
    found = json.loads((tmp_path / "run" / "tasks" / "fine_tune-ssl-all-0.json").read_text())["skipped"]
    assert [skip["key"] for skip in found] == ["test9"]
