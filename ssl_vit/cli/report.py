"""`ssl-vit report` and `ssl-vit recipes`."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Literal

import typer


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="One comparison directory, or one or more run directories."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write (default: report.html, .md, .tex, .csv or .json in the first directory)."),
    ] = None,
    form: Annotated[
        Literal["html", "markdown", "latex", "csv", "json"] | None,
        typer.Option(
            "--format",
            help="A page, tables for a paper, every row as CSV, or everything as JSON. Default: by the suffix of "
            "--out, or html without --out.",
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML page: verdict, curves, tables, costs, pictures, commands. For an unfinished
    comparison, it covers the tasks finished so far.

    Example: `ssl-vit report runs/demo`
    """
    from ssl_vit.files import expanded
    from ssl_vit.interfaces import UserError
    from ssl_vit.report import export, page

    by_suffix = {suffix: name for name, suffix in export.SUFFIXES.items()}
    chosen = form or by_suffix.get(out.suffix.lower() if out else ".html")
    if chosen is None:
        raise UserError(f"--out {out}: give a file name that ends in one of {', '.join(by_suffix)}, or --format")
    out = out or runs[0] / f"report{export.SUFFIXES[chosen]}"
    print(page.write_report(runs, expanded(out), chosen))


def recipes() -> None:
    """List the shipped recipes by family, and the suites of datasets: name, command (train or compare), first sentence.

    Example: `ssl-vit recipes`
    """
    from ssl_vit import recipe as recipe_files
    from ssl_vit.comparison.sets import suites

    width = max(shutil.get_terminal_size().columns, 60) if sys.stdout.isatty() else 10_000
    families: dict[str, dict[str, Path]] = {}
    for name, path in (recipe_files.shipped() | suites()).items():
        families.setdefault(path.parent.name, {})[name] = path
    for family, paths in families.items():
        print(f"\n{family}{', for --suite' if family == 'suites' else ''}:")
        column = max(map(len, paths))
        for name, path in paths.items():
            comment = takewhile(lambda line: line.startswith("# "), path.read_text().splitlines())
            head = " ".join(line[1:].strip() for line in comment)
            sentences = re.split(r"(?<=[.?])(?<!al\.)\s", head)
            about = " ".join(sentences[: 1 + sentences[0].endswith("?")])  # a question, and what it is about
            command = "" if family == "suites" else f"{_command(path):8s}"
            line, indent = f"{name:{column}s} {command}{about}", " " * (column + 1 + len(command))
            print(textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False))
    folder = recipe_files.recipes_folder()
    print(f"\nfiles: {folder}\nfiles for launchers (Accelerate, Slurm, Kubernetes): {folder / 'launch'}")


def _command(path: Path) -> str:
    """The command that runs a shipped recipe."""
    import yaml

    from ssl_vit import recipe as recipe_files

    content = yaml.safe_load(path.read_text())
    while "arms" not in content and content.get("base"):
        content = yaml.safe_load(recipe_files.shipped()[content["base"]].read_text())
    return "compare" if "arms" in content else "train"
