"""A comparison in real processes: killed again and again it ends as an undisturbed one; Slurm's script runs it."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ssl_vit.report.read import read_comparison
from tests.tars import packed

from .conftest import rows

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SLURM = Path(__file__).parents[2] / "recipes" / "launch" / "compare_slurm.sh"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    for split in ("train", "test"):
        packed("digits", folder / split, split, shards=4)
    steps = ["training.steps=60", "training.batch_size=32", "training.checkpoint_every=10"]
    tuning = {
        "sweep": {"optim.lr": [0.003, 0.01], "training.steps": [15]},
        "optim": {"warmup_steps": 2},
        "training": {"batch_size": 16},
        "lanes": 4,
    }
    content = {
        "name": "small",
        "seeds": [0, 1],
        "labels_per_class": [3, "2%"],
        "jobs": 2,
        "pictures": False,
        "data": {split: f"{folder}/{split}" for split in ("train", "test")},
        "arms": {
            "ssl": {"label": "SSL", "recipe": "digits_ssl", "overrides": steps},
            "scratch": {"label": "scratch"},
        },
        "evaluators": {"few_shot": {"labels_per_class": [1, 5]}, "fine_tune": tuning},
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return folder / "small.yaml"


def command(recipe: Path, run: Path) -> list[str]:
    return [sys.executable, "-m", "ssl_vit", "compare", str(recipe), f"run={run}"]


@pytest.mark.slow
def test_killed_five_times_at_random_it_ends_as_an_undisturbed_one(recipe: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    start = time.monotonic()
    subprocess.run(command(recipe, whole), env=ENVIRONMENT, check=True, capture_output=True, timeout=600)
    length = time.monotonic() - start
    kills, chance = 0, random.Random(0)
    for _ in range(30):
        process = subprocess.Popen(
            command(recipe, broken),
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(timeout=chance.uniform(0.1, 0.3) * length if kills < 5 else 600)
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
    assert kills == 5 and process.returncode == 0
    found = [read_comparison(run) for run in (whole, broken)]
    assert rows(found[0]) == rows(found[1])
    assert found[1].missing == ()


SBATCH = """#!{python}
import os, re, subprocess, sys
arguments = sys.argv[1:]
script = arguments[arguments.index("--wrap") + 1]
first, last = next((re.findall(r"\\d+", a) for a in arguments if a.startswith("--array=")), ("0", "0"))
with open("{log}", "a") as log:
    log.write(" ".join(a for a in arguments if a != script) + "\\n")
for task in range(int(first), int(last) + 1):
    environment = dict(os.environ, SLURM_ARRAY_TASK_ID=str(task))
    subprocess.run(["/bin/sh", "-c", script], check=True, env=environment, stdout=subprocess.DEVNULL)
print("4711;cluster")
"""


@pytest.mark.slow
def test_slurms_script_runs_every_task_and_writes_the_report(recipe: Path, tmp_path: Path) -> None:
    """With an sbatch that runs the array's tasks one after the other, by /bin/sh as Slurm does."""
    tools = tmp_path / "bin"
    tools.mkdir()
    scripts = {
        "sbatch": SBATCH.format(python=sys.executable, log=tmp_path / "log"),
        "ssl-vit": f'#!/bin/sh\nexec {sys.executable} -m ssl_vit "$@"\n',
    }
    for name, text in scripts.items():
        (tools / name).write_text(text)
        (tools / name).chmod((tools / name).stat().st_mode | stat.S_IXUSR)
    environment = {**ENVIRONMENT, "PATH": f"{tools}:{os.environ['PATH']}"}
    run = tmp_path / "a run"
    overrides = [f"run={run}", "labels_per_class=[3]", "controls=false"]
    done = subprocess.run(
        [str(SLURM), str(recipe), *overrides], env=environment, capture_output=True, text=True, timeout=900, check=True
    )
    assert "level 0: 4 task(s), job 4711;cluster" in done.stdout
    submitted = (tmp_path / "log").read_text().splitlines()
    assert [("afterok:4711" in line, "afterany:4711" in line) for line in submitted] == [
        (False, False),
        (True, False),
        (True, False),
        (False, True),
    ]
    assert "has not finished" not in (run / "report.html").read_text()
    again = subprocess.run(
        [str(SLURM), str(recipe), *overrides], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert "level " not in again.stdout, "nothing is left to do but the report"
