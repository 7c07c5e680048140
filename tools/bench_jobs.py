"""Images per second of several processes that train the same model on one device, as `jobs` of a comparison do.

    python tools/bench_jobs.py [--processes 1 2 4 8] [--models vit_tiny_patch16_224] [--image-size 32] [--patch-size 4]
                               [--batch 128] [--precision fp32|bf16] [--rows NAME ...] [--json FILE]

Rows, models and other options are those of bench_step.py. The ratio is to the first number of processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from steps import add_options, chosen, encoders, served, title

from ssl_vit.models import EncoderConfig

STEPS = 50  # of each process in a round


def measure(name: str, model: EncoderConfig, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one model by the number of processes that train it at the same time."""
    rows: list[dict[str, Any]] = []
    for count in arguments.processes:
        with served([name] * count, model, arguments) as (pipes, _, failures):
            if failures:
                raise SystemExit(f"{name} does not run: {failures[name]}")
            rates = []
            for _ in range(arguments.rounds):
                for _, pipe in pipes:
                    pipe.send(STEPS)
                rates.append(sum(arguments.batch / pipe.recv() for _, pipe in pipes))
        rows.append({"model": model.name, "name": name, "processes": count, "images_per_s": statistics.median(rates)})
        rate, first = rows[-1]["images_per_s"], rows[0]["images_per_s"]
        print(f"{name:34}{count:3} processes{rate:10.1f} images/s{rate / first:7.2f} times", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    arguments, rows = parser.parse_args(), list[dict[str, Any]]()
    for model in encoders(arguments):
        print(f"\n{title(model, arguments)}")
        rows += [row for name in chosen(arguments) for row in measure(name, model, arguments)]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
