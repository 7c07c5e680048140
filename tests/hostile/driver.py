"""Commands in a process of their own, forked from one that has imported everything."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Command = Sequence[object]


@dataclass(frozen=True)
class Outcome:
    """How commands ended. codes: exit codes; shorter than the commands where the process was killed or died.
    text: what all of them wrote. mib: how much the process, or one of its workers, grew. seconds: of processor time,
    with its workers'; other programs on a busy machine do not count."""

    codes: list[int]
    text: str
    mib: float
    seconds: float


def run(folder: Path, *commands: Command, limit: float = 250) -> Outcome:
    """`ssl-vit COMMAND` in `folder`, one after the other. limit: seconds until the process is killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["ssl_vit.execution", "ssl_vit.cli", "ssl_vit.comparison.run", "ssl_vit.report.page"]
    )
    process = context.Process(target=_commands, args=(str(folder), [list(map(str, command)) for command in commands]))
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
    told = json.loads((folder / "codes.json").read_text())
    return Outcome(text=(folder / "output.txt").read_text(errors="replace"), **told)


def _commands(folder: str, commands: list[list[str]]) -> None:
    import torch

    from ssl_vit import cli

    os.chdir(folder)
    os.environ["COLUMNS"] = "200"
    file = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    torch.set_num_threads(1)
    before, codes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, list[int]()
    Path("codes.json").write_text(json.dumps({"codes": codes, "mib": 0, "seconds": 0}))
    for command in commands:
        sys.argv = ["ssl-vit", *command]
        try:
            cli.main()
            codes.append(0)
        except SystemExit as stop:
            codes.append(int(stop.code or 0))
        sys.stdout.flush()
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        seconds = sum(one.ru_utime + one.ru_stime for one in used)
        grown = max(one.ru_maxrss for one in used) - before
        Path("codes.json").write_text(json.dumps({"codes": codes, "mib": grown / 1024, "seconds": seconds}))
