"""Help answers at once and carries examples; wrong words are the user's mistake."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from ssl_vit import cli
from ssl_vit import recipe as recipes
from ssl_vit.interfaces import UserError

TOP: Any = get_command(cli.app)
SHARDS = TOP.commands["shards"]
COMMANDS = [[name] for name in TOP.commands if name != "shards"] + [["shards", name] for name in SHARDS.commands]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ssl_vit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_has_an_example(command: list[str]) -> None:
    done = CliRunner().invoke(cli.app, [*command, "--help"])
    assert done.exit_code == 0
    assert "Example: ssl-vit " + " ".join(command) in done.stdout


@pytest.mark.parametrize("command", ["", "train", "compare", "eval"])
def test_help_answers_in_under_a_second(command: str) -> None:
    """In processor time, the best of three: a busy machine may be slow, the command may not."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run(*command.split(), "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    assert any(seconds() < 1 for _ in range(3))


def test_a_wrong_option_is_the_users_mistake(call: Callable[..., tuple[int, str]]) -> None:
    assert call("train")[0] == 2
    assert call("nonsense")[0] == 2


def test_debug_shows_the_traceback(call: Callable[..., tuple[int, str]]) -> None:
    assert "Traceback" not in call("train", "nothing")[1]
    with pytest.raises(UserError):  # which Python shows
        call("train", "nothing", "--debug")


REPEATED = """
import atexit, os, signal, sys
from ssl_vit import cli
stop = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
atexit.register(stop)  # called last
cli.app = stop
cli.main()
"""


def test_a_signal_that_is_repeated_while_python_shuts_down_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", REPEATED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 75 and done.stderr == "stopped; run the same command to resume\n"


def test_a_launcher_shows_the_error_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: Callable[..., tuple[int, str]]
) -> None:
    """torchrun and `accelerate launch --multi_gpu` print what torch makes of the error file."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ErrorHandler, ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    error = call("train", "digits_ssl", f"data.train={tmp_path}/no\x1bwhere")[1].strip().removeprefix("error: ")
    failed = ChildFailedError("ssl_vit", {0: ProcessFailure(0, 99, 2, str(file))})
    assert str(failed).splitlines()[-2] == f"  traceback : {error}" and "no such shard or folder" in error
    ErrorHandler().dump_error_file(str(file), 2)
    assert json.loads(file.read_text())["message"]["errorCode"] == 2, "torch knows the file's format"


def test_a_gpu_that_others_filled_is_named(
    called: Callable[..., tuple[int, str, str]], few_digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's own error, when the process asks for the device."""
    from ssl_vit import execution

    def full(*arguments: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")

    monkeypatch.setattr(execution, "make_accelerator", full)
    command = ("train", "digits_ssl", f"data.train={few_digits}/train", f"run={tmp_path}/run")
    code, _, shown = called(*command)
    assert code == 1 and "GPU" in shown and "out of memory" in shown and shown.count("\n") == 1


def test_a_path_on_the_command_line_is_taken_as_it_stands() -> None:
    for path in ("runs/a #2", "{000000..000001}.tar", "[draft"):
        assert recipes.load_recipe("digits_ssl", [f"run={path}"]).run == path
    with pytest.raises(UserError, match=r"objective 'a\.b' cannot be imported"):
        recipes.load_recipe("digits_ssl", ["objective.name=a.b"])


def test_the_demo_deletes_no_shards_of_others(called: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "000000.tar").write_bytes(b"mine")
    code, _, told = called("demo", "--out", tmp_path)
    assert code == 2 and "is not empty" in told
    assert (tmp_path / "data" / "000000.tar").read_bytes() == b"mine"
