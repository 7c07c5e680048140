"""`ssl-vit doctor`: is this machine ready, and what will be slow?"""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def doctor(
    data: Annotated[str | None, typer.Option(help="Shards to check against the machine.")] = None,
    run: Annotated[str, typer.Option(help="Where runs would go (for the free space).")] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Versions, devices, disk, and whether the shards are enough for this machine's cores; exit code 1 if something
    would stop a run.

    Example: `ssl-vit doctor --data shards/train`
    """
    from ssl_vit import health

    findings = health.examine(data, run)
    if as_json:
        print(json.dumps([vars(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(f"{finding.level:5s} {finding.about:12s} {finding.text}")
    if any(finding.level == "stop" for finding in findings):
        raise typer.Exit(1)
