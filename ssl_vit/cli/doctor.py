"""`ssl-vit doctor`: is this machine ready, and what will be slow?"""

from __future__ import annotations

import json
from typing import Annotated

import typer


def doctor(
    data: Annotated[str | None, typer.Option(help="Images or shards to check as well.")] = None,
    run: Annotated[str, typer.Option(help="Folder for runs, whose free space is checked.")] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check versions, devices, disk and shards. Exit code 1 if something would stop a run.

    Example: `ssl-vit doctor --data shards/train`
    """
    from ssl_vit.health import examine

    findings = examine(data, run)
    if as_json:
        print(json.dumps([vars(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(f"{finding.level:5s} {finding.about:12s} {finding.text}")
    if any(finding.level == "stop" for finding in findings):
        raise typer.Exit(1)
