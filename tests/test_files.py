"""What is written is whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ssl_vit.files import atomic_file, read_json, sha256, write_json, write_text


def test_a_disk_that_refuses_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "recipe.yaml"
    write_text(path, "é: 1\n")
    digest = sha256(path)

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "other: 2\n")
    assert sha256(path) == digest and path.read_text(encoding="utf-8") == "é: 1\n"
    assert list(tmp_path.iterdir()) == [path]


def test_json_comes_back(tmp_path: Path) -> None:
    content = {"a": [1, 2.5, None], "b": {"c": "ü"}}
    write_json(tmp_path / "x.json", content)
    assert read_json(tmp_path / "x.json") == content


def test_two_writers_of_one_file_do_not_share_an_unfinished_one(tmp_path: Path) -> None:
    """Containers and machines on one disk may have equal process numbers."""
    path = tmp_path / "plan.json"
    with atomic_file(path) as one, atomic_file(path) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one" and list(tmp_path.iterdir()) == [path]
