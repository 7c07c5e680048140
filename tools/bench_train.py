"""Throughput of `ssl-vit train`, compared with its step on one batch only and with its loader only.

    python tools/bench_train.py RECIPE [key=value ...] [--steps 40] [--rounds 3] [--json FILE]

Each runs in its own process; they alternate. The first `--warm` steps do not count (compilation, caches, prefetched
batches). The last line is the throughput of the command divided by that of the slower of the two. Start-up is the time
of a command that takes one step, minus the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PHASES = ("train", "step", "loader", "start")


def settings_of(arguments: argparse.Namespace, run: Path, steps: int) -> Any:
    from ssl_vit.recipe import load_recipe

    fixed = [f"run={run}", f"training.steps={steps}", "training.checkpoint_every=0"]
    return load_recipe(arguments.recipe, [*arguments.keys, *fixed, f"training.log_every={arguments.warm}"])


def phase_seconds(arguments: argparse.Namespace, run: Path) -> float:
    """Seconds per step of the step only or the loader only."""
    from ssl_vit import stage
    from ssl_vit.data.order import LanePosition
    from ssl_vit.data.shards import open_training
    from ssl_vit.training.distributed import make_accelerator
    from ssl_vit.training.loop import Trainer

    settings = settings_of(arguments, run, arguments.steps)
    training = settings.training
    accelerator = make_accelerator(training.precision, training.timeout)
    job = stage.build(settings, open_training(settings.data), accelerator, quiet=True)
    batches = job.batches([LanePosition()] * job.lanes)
    if arguments.phase == "loader":

        def act(step: int) -> None:
            next(batches)

    else:
        batch, _ = next(batches)
        batches.close()
        trainer = Trainer(job)
        trainer.model.train()

        def act(step: int) -> None:
            trainer.progress.step = step
            trainer.train_step(batch)

    def wait() -> None:
        if accelerator.device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    for step in range(arguments.warm):
        act(step)
    wait()
    start = time.perf_counter()
    for step in range(arguments.warm, arguments.steps):
        act(step)
    wait()
    return (time.perf_counter() - start) / (arguments.steps - arguments.warm)


def command_seconds(arguments: argparse.Namespace, run: Path, steps: int) -> tuple[float, float]:
    """The real command: seconds per step after the warm-up, seconds of the whole process."""
    fixed = [f"run={run}", f"training.steps={steps}", "training.checkpoint_every=0"]
    command = [sys.executable, "-m", "ssl_vit", "train", arguments.recipe, *arguments.keys, *fixed]
    start = time.perf_counter()
    subprocess.run(
        [*command, f"training.log_every={arguments.warm}"], check=True, stdout=sys.stderr, stderr=subprocess.STDOUT
    )
    whole = time.perf_counter() - start
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "seconds" in row]
    if len(rows) == 1:
        return rows[0]["seconds"] * (1 - rows[0]["data_wait"]), whole
    return (rows[-1]["seconds"] - rows[0]["seconds"]) / (rows[-1]["step"] - rows[0]["step"]), whole


def measured(arguments: argparse.Namespace, phase: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        if phase == "train":
            return command_seconds(arguments, run, arguments.steps)[0]
        if phase == "start":
            first, whole = command_seconds(arguments, run, 1)
            return whole - first
        options = ["--phase", phase, "--steps", str(arguments.steps), "--warm", str(arguments.warm)]
        command = [sys.executable, __file__, arguments.recipe, *arguments.keys, *options]
        return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("keys", nargs="*", metavar="key=value", help="recipe keys, as `ssl-vit train` takes them")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm", type=int, default=10, help="steps that do not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_intermixed_args()
    if arguments.steps < 2 * arguments.warm:
        parser.error("--steps must be at least twice --warm")
    if arguments.phase:
        with tempfile.TemporaryDirectory() as folder:
            print(phase_seconds(arguments, Path(folder) / "run"))
        return
    from ssl_vit.precision import resolve

    settings = resolve(settings_of(arguments, Path("unused"), arguments.steps), print)
    arguments.keys.append(f"training.precision={settings.training.precision}")  # the same in all phases
    taken: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(arguments.rounds):
        for phase in PHASES:
            taken[phase].append(measured(arguments, phase))
    batch = settings.training.batch_size
    medians = {phase: statistics.median(times) for phase, times in taken.items()}
    for phase, name in (("train", "ssl-vit train"), ("step", "its step alone"), ("loader", "its loader alone")):
        print(f"{name:18}{1000 * medians[phase]:9.1f} ms per step{batch / medians[phase]:10.1f} images/s")
    print(f"start-up to the first step {medians['start']:.1f} s")
    slower = max(("step", "loader"), key=lambda phase: medians[phase])
    share = statistics.median(a / b for a, b in zip(taken[slower], taken["train"], strict=True))
    print(f"the command reaches {share:.1%} of its {slower} only, the slower of the two")
    if arguments.json:
        arguments.json.write_text(json.dumps({"batch": batch, "seconds": taken, "share": share}, indent=1) + "\n")


if __name__ == "__main__":
    main()
