"""`pipe:`: shell commands in place of URLs, for who allows them, and only then."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest

from ssl_vit.data import RemoteConfig
from ssl_vit.data.shards import open_shards, open_url
from ssl_vit.interfaces import RunError, UserError

ALLOWED = RemoteConfig(allow_pipe=True)


def test_a_command_runs_only_where_it_is_allowed(tmp_path: Path) -> None:
    for start in (open_shards, open_url):
        with pytest.raises(UserError, match=r"data.remote.allow_pipe=true"):
            start(f"pipe:touch {tmp_path}/ran")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="not a readable tar"):
        open_shards(f"pipe:touch {tmp_path}/ran", ALLOWED)
    assert (tmp_path / "ran").exists()


def test_no_info_json_can_smuggle_a_command_in(digit_shards: Path, tmp_path: Path) -> None:
    info = (digit_shards / "info.json").read_text().replace("000000.tar", f"pipe:touch {tmp_path}/ran")
    (tmp_path / "info.json").write_text(info)
    with pytest.raises(UserError, match="are not there"):
        open_shards(str(tmp_path), ALLOWED)
    assert not (tmp_path / "ran").exists()


def test_commands_give_the_shards(digit_shards: Path) -> None:
    local = open_shards(str(digit_shards))
    piped = open_shards(f"pipe:cat {shlex.quote(str(digit_shards))}/00000{{0..7}}.tar | cat", ALLOWED)
    assert piped.counts == local.counts and piped.classes is None
    with piped.on_disk(3) as there, local.on_disk(3) as here:
        assert there.read() == here.read()
    assert [position for position, _ in piped.read(3)] == list(range(180))


@pytest.mark.parametrize("command", ["head -c 100000 {shard}; exit 7", "false", "nosuchcommand {shard}"])
def test_a_command_that_fails_is_a_run_error_and_no_short_shard(digit_shards: Path, command: str) -> None:
    url = "pipe:" + command.format(shard=digit_shards / "000000.tar")
    with pytest.raises(RunError, match=r"the command ended with exit code (7|1|127); run the same command to go on"):
        open_shards(url, ALLOWED)


def test_a_command_of_which_no_more_is_wanted_is_ended(digit_shards: Path) -> None:
    start = time.monotonic()
    with open_url(f"pipe:cat {digit_shards}/000000.tar; sleep 60", ALLOWED) as file:
        assert len(file.read(1000)) == 1000
    assert time.monotonic() - start < 10
