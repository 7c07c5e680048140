"""`ssl-vit demo` and `ssl-vit compare`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssl_vit.cli import complete
from ssl_vit.interfaces import UserError

if TYPE_CHECKING:
    pass

app = typer.Typer()


Overrides = Annotated[
    list[str] | None, typer.Argument(help="Recipe keys to change, as key=value.", metavar="key=value")
]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory for the demo's shards, runs and report.")] = Path("runs/demo"),
    overrides: Overrides = None,
) -> None:
    """Compare SSL, supervised and scratch on 1,797 real handwritten digits: pack, pretrain, evaluate, report. On CPU.

    Example: `ssl-vit demo`
    """
    from ssl_vit.data.packing import pack
    from ssl_vit.data.packing.sources import open_source

    for split in ("train", "test"):
        folder = out / "data" / split
        if not (folder / "info.json").exists():
            packed = pack(
                open_source("digits", split=split),
                folder,
                shards=8,
                order="source",  # in scikit-learn's order, so that others can check the few-shot rows on raw pixels
                overwrite=True,
                progress=False,
            )
            print(f"packed {packed[folder].samples} {split} digits into {folder}")
    named = [] if out == Path("runs/demo") else ["--out", str(out)]
    command = shlex.join(["ssl-vit", "demo", *named, *(overrides or [])])
    paths = [f"run={out}", *(f"data.{name}={out}/data/train" for name in ("train", "pretrain"))]
    _compare("demo_digits", [*paths, f"data.test={out}/data/test", *(overrides or [])], command)


@app.command()
def compare(
    recipe: Annotated[
        str,
        typer.Argument(help="A comparison recipe: a file or a shipped name.", autocompletion=complete.comparisons),
    ],
    overrides: Overrides = None,
    show: Annotated[
        bool, typer.Option("--list", help="Print the pieces (id, stage, done or missing) instead of running them.")
    ] = False,
    only: Annotated[str | None, typer.Option(help="Run one piece, by its id, and what it needs.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the comparison's size, memory and time, and run nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The dry run as JSON.")] = False,
) -> None:
    """Arms x seeds x label budgets: who wins, by how much, at what cost. Repeating the command runs what is missing.

    Example: `ssl-vit compare demo_digits data.train=shards/train data.test=shards/test`

    On many machines: run each id of stage 0 by `--only ID`, then those of stage 1, and so on, as
    recipes/launch/compare_slurm.sh does; `ssl-vit report RUN` shows whatever is finished.
    """
    changed = overrides or []
    command = shlex.join(["ssl-vit", "compare", recipe, *changed])
    if dry_run:
        from ssl_vit.cli import previewed
        from ssl_vit.comparison.config import load_comparison
        from ssl_vit.comparison.preview import preview

        previewed.comparison(preview(load_comparison(recipe, changed)), as_json)
        return
    if as_json:
        raise UserError("--json goes with --dry-run")
    if not show and only is None:
        _compare(recipe, changed, command)
        return
    from ssl_vit.comparison import run as comparisons
    from ssl_vit.comparison import work
    from ssl_vit.comparison.config import load_comparison
    from ssl_vit.comparison.suites import prepare

    study = load_comparison(recipe, changed)
    if only is not None:
        comparisons.run_only(comparisons.open_plan(study, command), only)
        return
    plan = comparisons.look(study, prepare(study.sets, study.folder, lambda text: print(text, file=sys.stderr)))[0]
    print(f"# run: {plan.run}")
    for piece, stage in zip(plan.pieces, comparisons.stages(plan).values(), strict=True):
        print(f"{piece.id}\t{stage}\t{'done' if work.is_done(plan, piece) else 'missing'}")


def _compare(name: str, overrides: list[str], command: str) -> None:
    from rich.console import Console

    from ssl_vit.comparison import run as comparisons
    from ssl_vit.comparison.config import load_comparison
    from ssl_vit.report import page, tables
    from ssl_vit.report.read import read_comparison
    from ssl_vit.runs import is_main_process

    study = load_comparison(name, overrides)
    say = print if is_main_process() else (lambda text: None)
    comparisons.compare(study, command, say)
    if not is_main_process():
        return
    run = study.comparison.run_directory
    Console().print(tables.terminal(read_comparison([run])))
    print(f"\nreport   {page.write_report([run], run / 'report.html')}\nresults  {run / 'results.json'}")
