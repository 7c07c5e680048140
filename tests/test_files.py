"""What is written is whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from ssl_vit.files import atomic_file, checkpoints, new_folder, read_arrays, sha256, write_text


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


def test_an_encrypted_archive_of_arrays_is_a_value_error(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.arange(3))
    assert read_arrays(tmp_path / "a.npz")["a"].tolist() == [0, 1, 2]
    data = bytearray((tmp_path / "a.npz").read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + flags] |= 1
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(ValueError, match="encrypted"):
        read_arrays(tmp_path / "a.npz")


def test_two_writers_of_one_file_do_not_share_an_unfinished_one(tmp_path: Path) -> None:
    """Containers and machines on one disk may have equal process numbers."""
    path = tmp_path / "plan.json"
    with atomic_file(path) as one, atomic_file(path) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one" and list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_folder_do_not_mix_their_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with new_folder(out) as one:
        (one / "a").write_text("one")
        with pytest.raises(KeyboardInterrupt), new_folder(out) as other:
            (other / "b").write_text("other")
            raise KeyboardInterrupt
        (one / "c").write_text("one")
    assert [path.name for path in sorted(out.iterdir())] == ["a", "c"] and list(tmp_path.iterdir()) == [out]


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    steps = [500, 99_500_000, 100_000_000, 1_000_000_000]
    for step in (*steps[2:], *steps[:2]):
        (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    assert [int(path.name[5:]) for path in checkpoints(tmp_path)] == steps
