"""The command line. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import atexit
import errno
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from ssl_vit import __version__
from ssl_vit.cli import compare, doctor, embed, evaluate, keys, pictures, report, shards, train, weights
from ssl_vit.interfaces import (
    PREEMPTED,
    RunError,
    Stopped,
    UserError,
    is_main_process,
    printable,
    printable_lines,
    world_size,
)

app = typer.Typer(
    name="ssl-vit",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Pretrain Vision Transformers and measure whether self-supervised pretraining helps on your images."
    "\n\nExample: `ssl-vit demo`",
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "demo": compare.demo,
    "compare": compare.compare,
    "train": train.train,
    "eval": evaluate.evaluate,
    "report": report.report,
    "recipes": report.recipes,
    "embed": embed.embed,
    "inspect": pictures.inspect,
    "doctor": doctor.doctor,
    "keys": keys.keys,
    "import": weights.import_weights,
    "export": weights.export,
}
for name, command in _COMMANDS.items():
    app.command(name, cls=keys.CommandWithKeys if name in ("compare", "train", "eval") else None)(command)
app.add_typer(shards.app, name="shards")


@app.callback(invoke_without_command=True)
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"ssl-vit {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line.

    Exit codes: 2 for wrong input, 75 after SIGTERM or SIGUSR1 (the same command resumes), 1 for other failures and
    Ctrl-C.
    """
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    before = {number: signal.signal(number, _preempted) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        _call(arguments)
    except (UserError, RunError) as error:
        if debug:
            raise
        if is_main_process() or not error.everywhere:
            print("error:", printable_lines(str(error)), file=sys.stderr)  # names from data may be in it
        _tell_launcher(str(error))
        _leave(2 if isinstance(error, UserError) else 1)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if debug or not (full or error.filename):
            raise
        hint = "; free disk space and run the same command to resume" if full else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        _leave(2 if error.errno == errno.ENAMETOOLONG else 1)
    except MemoryError as error:
        if debug:
            raise
        print(f"error: not enough memory ({error}); use smaller sizes or check the input files", file=sys.stderr)
        _leave(1)
    except SystemExit as stop:
        if stop.code != _INTERRUPTED and not isinstance(stop, Stopped):
            if not stop.code:
                _close_process_group()
            raise
        if is_main_process():
            print("stopped; run the same command to resume", file=sys.stderr)
        _leave(1 if stop.code == _INTERRUPTED else int(stop.code or 0))
    except Exception:
        if world_size() == 1:
            raise
        traceback.print_exc()
        _leave(1)
    finally:  # restore the handlers of a calling program
        for number, handler in before.items():
            signal.signal(number, handler)


def _call(arguments: list[str]) -> None:
    try:
        app(arguments)
    except RuntimeError:
        memory = sys.modules.get("ssl_vit.training.memory")  # it imports torch, as all that uses a GPU does
        if memory is None:
            raise
        with memory.out_of_memory(lambda: "end other programs that use it"):
            raise


_INTERRUPTED = 130  # Typer's exit code after Ctrl-C


def _preempted(number: int, frame: FrameType | None) -> None:
    """Like Ctrl-C: running code may save and clean up."""
    raise Stopped(PREEMPTED)


def _close_process_group() -> None:
    """Close the process group, as torch asks for at exit."""
    if world_size() > 1 and "torch" in sys.modules:
        from torch import distributed

        if distributed.is_initialized():
            distributed.destroy_process_group()


def _tell_launcher(text: str) -> None:
    """Write the error, in torch's format, to the file whose message torchrun and `accelerate launch` print last."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"py_callstack": printable(text), "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": printable(text), "extraInfo": details}}))


def _leave(code: int) -> NoReturn:
    """Exit. One of several processes exits at once: an orderly exit would wait for the others."""
    if world_size() > 1:
        for child in multiprocessing.active_children():
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # repeated while Python shuts down, they would change the exit code
        atexit.register(signal.signal, number, signal.SIG_IGN)
    sys.exit(code)
