"""What a verdict cost: the seconds of a finished comparison, and of one with a given interval.

    python tools/bench_verdict.py RUN [RUN ...] [--half-width 1.0] [--json FILE]

RUN is the directory of a finished comparison of this version. For the headline of each dataset it prints, by part, the
task-seconds as stored and those until the half-width of the headline's interval is at most `--half-width` points: for
the whole comparison, and for the two arms of the headline alone. How many seeds (or pretrainings) that takes is what
the report's planner says, if mean and variance components stay as measured; at least 3.

- Sweeps run once. Every added seed costs what a measured fine-tuning of the same arm and label budget did on average.
- Frozen features are evaluated once per pretraining, with all seeds.
- Wall time is scaled like the task-seconds. Pauses of more than a minute, in which no task ran, do not count.
- Imports are measured now, in a new process, as processor time; each job imports once.

Seconds depend on what else ran on the machine: compare only comparisons that were run under the same conditions.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean

from ssl_vit.interfaces import UserError
from ssl_vit.records import TaskRecord
from ssl_vit.report.read import Comparison, read
from ssl_vit.report.statistics import plan, points
from ssl_vit.report.summary import Difference, summarize

PARTS = ("pretraining", "sweeps", "fine-tuning", "frozen features", "pictures")
_PAUSE = 60.0  # seconds without any task after which a comparison counts as interrupted


@dataclass(frozen=True)
class Design:
    """How many seeds a comparison has, and how many pretrainings of every pretrained arm."""

    seeds: int
    pretrainings: int

    def __str__(self) -> str:
        return f"{self.seeds} seeds, {self.pretrainings} pretraining(s) of each pretrained arm"


@dataclass(frozen=True)
class Verdict:
    """What a headline cost.

    needed: None where no number of seeds gives the wanted half-width. more_images: test images that would, instead.
    seconds: task-seconds by column (`measured`, `needed`, `needed by two arms`) and part. wall: by column.
    between_tasks: seconds in which a job had no task, over all jobs.
    """

    run: str
    comparison: str
    pair: str
    difference: str
    images: int
    jobs: int
    measured: Design
    needed: Design | None
    more_images: int | None
    seconds: dict[str, dict[str, float]]
    wall: dict[str, float]
    between_tasks: float


def needed(comparison: Comparison, head: Difference, half_width: float) -> Design | None:
    """The smallest design of the same form whose interval is at most so wide (fraction); None: no number of seeds, or
    of pretrainings, would do."""
    # Around a mean of 0, an interval within a margin is one of at most that half-width; counted from two units on.
    more, _ = plan(replace(head.estimate, mean=0.0, units=2), half_width)
    if more is None:
        return None
    units, per = 2 + more, head.seeds // head.estimate.units
    # Each unit has its own pretraining.
    own_pretraining = head.unit == "pretraining" or comparison.record.pretrainings > 1
    return Design(units * per, units if own_pretraining else comparison.record.pretrainings)


def part_of(comparison: Comparison, task: TaskRecord) -> str:
    if task.kind == "measure":
        return "fine-tuning" if comparison.record.evaluators[task.evaluator].trains_encoder else "frozen features"
    return {"pretrain": "pretraining", "sweep": "sweeps", "pictures": "pictures"}[task.kind]


def seconds(comparison: Comparison, head: Difference, design: Design, *, alone: bool = False) -> dict[str, float]:
    """Task-seconds of this design by part.

    alone: only what the two arms of the headline need.
    """
    pretrained = {arm.name for arm in comparison.record.arms if arm.kind == "pretrained"}
    repeated = design.pretrainings / comparison.record.pretrainings
    rows = {file.stem for file in comparison.measured.files}
    total, trainings = dict.fromkeys(PARTS, 0.0), defaultdict[tuple[object, ...], list[float]](list)
    for task in comparison.record.tasks:
        part = part_of(comparison, task)
        elsewhere = task.evaluator and (task.data, task.evaluator) != (head.place.data, head.place.evaluator)
        if alone and (task.arm not in (head.arm, head.against) or elsewhere or part == "pictures"):
            continue
        took = comparison.tasks[task.id].seconds
        scaled = part in ("pretraining", "frozen features") and task.arm in pretrained
        total[part] += took * (repeated if scaled else 1.0)
        if part == "fine-tuning" and task.id in rows:  # the others were trained by the sweep
            key = task.data, task.evaluator, task.arm, task.labels_per_class, task.fold
            trainings[key].append(took)
    total["fine-tuning"] += (design.seeds - head.seeds) * sum(map(fmean, trainings.values()))
    return total


def wall_seconds(comparison: Comparison) -> float:
    """From the start of the first task to the end of the last one, without pauses."""
    ends = [(datetime.fromisoformat(done.saved).timestamp(), done.seconds) for done in comparison.tasks.values()]
    spans = sorted((end - took, end) for end, took in ends)
    wall, last = 0.0, spans[0][0]
    for start, end in spans:
        if start - last > _PAUSE:
            last = start
        wall += max(0.0, end - last)
        last = max(last, end)
    return wall


def import_seconds() -> float:
    """Processor time of a new process that imports what a task needs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", "import ssl_vit.comparison.run"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def verdicts(path: Path, half_width: float) -> list[Verdict]:
    """One per headline. half_width: fraction.

    Raises UserError for a directory that holds no finished comparison of this version.
    """
    comparison = read([path])
    if comparison.separate:
        raise UserError(f"{path} is a run; give the directory of a comparison")
    if comparison.missing:
        raise UserError(f"{path}: {len(comparison.missing)} tasks are not done; run the comparison again to finish it")
    verdicts = []
    for head in summarize(comparison).headlines:
        if head.estimate.half_width is None:
            raise UserError(f"{path}: its headline has no interval; run at least 3 seeds")
        now, wanted = Design(head.seeds, comparison.record.pretrainings), needed(comparison, head, half_width)
        columns = {"measured": seconds(comparison, head, now)}
        if wanted:
            columns["needed"] = seconds(comparison, head, wanted)
            columns["needed by two arms"] = seconds(comparison, head, wanted, alone=True)
        spent, wall = sum(columns["measured"].values()), wall_seconds(comparison)
        verdicts.append(
            Verdict(
                run=str(path),
                comparison=comparison.record.name,
                pair=f"{comparison.spoken(head.arm)} minus {comparison.spoken(head.against)}",
                difference=points(head.estimate),
                images=head.estimate.images,
                jobs=comparison.record.jobs,
                measured=now,
                needed=wanted,
                more_images=plan(replace(head.estimate, mean=0.0), half_width)[1],
                seconds=columns,
                wall={name: wall * sum(column.values()) / spent for name, column in columns.items()},
                between_tasks=max(0.0, comparison.record.jobs * wall - spent),
            )
        )
    return verdicts


def show(row: Verdict, half_width: float, imports: float) -> None:
    print(f"\n{row.comparison} ({row.run}), jobs={row.jobs}: {row.pair}: {row.difference} points")
    print(f"measured: {row.measured}, {row.images:,} test images")
    images = f"{row.more_images:,} more test images would do" if row.more_images else "nor by more test images alone"
    wanted = row.needed or f"not reached by more seeds; {images}"
    print(f"needed for ± {100 * half_width:g} points: {wanted}")
    print(f"{'seconds':24}" + "".join(f"{name:>20}" for name in row.seconds))
    for part in PARTS:
        print(f"{part:24}" + "".join(f"{column[part]:20,.0f}" for column in row.seconds.values()))
    print(f"{'all tasks':24}" + "".join(f"{sum(column.values()):20,.0f}" for column in row.seconds.values()))
    print(f"{'wall':24}" + "".join(f"{wall:20,.0f}" for wall in row.wall.values()))
    print(f"{'between tasks, all jobs':24}{row.between_tasks:20,.0f}")
    processes = 1 + row.jobs * (row.jobs > 1)
    print(f"{'imports (measured now)':24}{imports * processes:20,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a finished comparison")
    parser.add_argument("--half-width", type=float, default=1.0, help="of the headline's interval, in points")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    half_width = arguments.half_width / 100
    try:
        verdict_rows = [row for path in arguments.runs for row in verdicts(path, half_width)]
    except UserError as error:
        sys.exit(f"error: {error}")
    imports = import_seconds()
    for row in verdict_rows:
        show(row, half_width, imports)
    if arguments.json:
        rows = [asdict(row) | {"imports_per_process": imports} for row in verdict_rows]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
