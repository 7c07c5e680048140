"""What strangers send: nothing of it runs, and nothing is written outside the folder that was named.

Beside this: pickles in shards and paths in info.json (tests/data/test_verify.py), hub folders (tests/models/exchange),
names in reports (tests/report), values that reach launch scripts (tests/processes/test_launch.py).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ssl_vit import recipe
from ssl_vit.data.verify import stats, verify
from ssl_vit.interfaces import UserError
from ssl_vit.training import checkpoint
from tests.hostile.corpus import Bomb
from tests.tars import packed

SMALL = (
    "encoder.depth=1",
    "encoder.width=16",
    "encoder.heads=2",
    "training.picture_every=0",
    "training.trackers={}",
)
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    packed("digits", tmp_path / "digits", "test", shards=2)
    return tmp_path / "digits"


def keys(digits: Path, *more: str) -> list[str]:
    return ["train", "digits_ssl", f"data.train={digits}", "run=run", "training.batch_size=16", *SMALL, *more]


def test_the_bomb_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "boom")))
    assert (tmp_path / "boom").exists()


def test_no_file_of_a_checkpoint_is_unpickled(call: Call, digits: Path, tmp_path: Path) -> None:
    """Each file in turn is a pickle that runs, its checksum is right, and torch's own pickled metadata lies beside."""
    mark, length = tmp_path / "boom", ("training.steps=4", "training.checkpoint_every=2", "training.ema=0.5")
    assert call(*keys(digits, *length))[0] == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")
    kept = tmp_path / "kept"
    (tmp_path / "run").rename(kept)
    names = [
        path.relative_to(kept / "checkpoints" / "step_00000002")
        for path in kept.rglob("step_00000002/**/*")
        if path.is_file()
    ]
    assert len(names) == 8
    for name in names:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(kept, tmp_path / "run")
        folder = tmp_path / "run" / "checkpoints" / "step_00000002"
        bomb = pickle.dumps(Bomb(mark))
        (folder / name).write_bytes(bomb)
        for extra in (".metadata", "__0_0.distcp", "training.pt", "extra.safetensors"):
            (folder / extra).write_bytes(bomb)
        if name.name != "SHA256SUMS":
            files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "SHA256SUMS"]
            lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n" for path in files]
            (folder / "SHA256SUMS").write_text("".join(lines))
        code, text = call(*keys(digits, *length))
        assert code in (0, 2) and "Traceback" not in text, (name, text)
        assert code == 2 or "is broken" in text or name.name == "config.json", (name, text)
        assert not mark.exists(), name


@pytest.mark.parametrize("name", ["/dev/zero", "../other", "."])
def test_checksums_of_other_files_are_not_computed(tmp_path: Path, name: str) -> None:
    (tmp_path / "other").write_text("")
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "SHA256SUMS").write_text(f"{hashlib.sha256().hexdigest()}  {name}\n")
    assert "is not a file in it" in str(checkpoint.defect(tmp_path / "step"))


def test_members_of_an_archive_are_never_written(call: Call, digits: Path, tmp_path: Path) -> None:
    """Paths that climb out, absolute ones, links and devices: training, verify and stats leave nothing behind."""
    shard = next(digits.glob("*.tar"))
    with tarfile.open(shard) as tar:
        good = [(entry, tar.extractfile(entry).read()) for entry in tar]  # type: ignore[union-attr]
    with tarfile.open(shard, "w") as tar:
        for name in ("../../climbed.png", f"{tmp_path}/absolute.png", "a/../../../climbed.cls", "..\\climbed.png"):
            entry = tarfile.TarInfo(name)
            entry.size = len(good[0][1])
            tar.addfile(entry, io.BytesIO(good[0][1]))
        for name, kind in (
            ("link.png", tarfile.SYMTYPE),
            ("hard.png", tarfile.LNKTYPE),
            ("device.png", tarfile.CHRTYPE),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/passwd"
            tar.addfile(entry)
        for entry, data in good:
            tar.addfile(entry, io.BytesIO(data))
    about = json.loads((digits / "info.json").read_text())
    entry = next(entry for entry in about["shards"] if entry["file"] == shard.name)
    entry |= {"bytes": shard.stat().st_size, "sha256": hashlib.sha256(shard.read_bytes()).hexdigest()}
    (digits / "info.json").write_text(json.dumps(about))
    before = everything(tmp_path)
    assert verify(digits)
    with pytest.raises(UserError, match="verify"):
        stats(digits)
    code, text = call(*keys(digits, "training.steps=20"))
    assert code in (0, 2) and "Traceback" not in text, text
    written = {path for path in everything(tmp_path) - before if not path.is_relative_to(tmp_path / "run")}
    assert {path.name for path in written} <= {"run"} | {path.name for path in digits.iterdir()}, written
    assert not list(tmp_path.parent.rglob("*climbed*")) and not (tmp_path / "absolute.png").exists()


def everything(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


NASTY = ["$(touch pwned) `touch pwned` ; touch pwned | touch pwned & touch pwned \n touch pwned", "pipe:touch pwned"]


@pytest.mark.parametrize("value", NASTY)
def test_recipe_values_do_not_reach_a_shell(call: Call, digits: Path, tmp_path: Path, value: str) -> None:
    quoted = json.dumps(value)
    for key in ("data.train", "run", "init_from", "name"):
        code, text = call(*keys(digits, "training.steps=1", f"{key}={quoted}"))
        assert code in (0, 2) and "Traceback" not in text, (key, text)
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("override", ["data.train=http://host/${oc.env:SECRET}/0.tar", "run=${name}"])
def test_overrides_cannot_read_the_environment(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    with pytest.raises(UserError, match="references") as raised:
        recipe.load_recipe("digits_ssl", [override])
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize("overrides", [["data=???"], ["training.steps=???", "training.steps=9"], {"objective": "???"}])
def test_an_override_is_not_ignored(overrides: recipe.Overrides) -> None:
    with pytest.raises(UserError, match="give a value"):
        recipe.load_recipe("digits_ssl", overrides)


@pytest.mark.parametrize(
    "line",
    [
        "name: !!python/object/apply:os.system ['touch pwned']",
        "name: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['pwned']]",
        "name: ${oc.eval:__import__('os').system('touch pwned')}",
        "name: ${oc.env:HOME}",
        "name: ${oc.decode:'x'}",
        "name: [x, '${run}']",
    ],
)
def test_a_recipe_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(
        f"{line}\ndata: {{train: x}}\nobjective: {{name: masked_patch}}\ntraining: {{steps: 1}}\n"
    )
    with pytest.raises(UserError, match=r"bad\.yaml"):
        recipe.load_recipe("bad.yaml")
    assert not list(tmp_path.rglob("pwned"))


def test_a_module_of_the_current_directory_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    program = str(Path(sys.executable).parent / "ssl-vit")
    command = [program, "train", "digits_ssl", "objective.name=evil:Objective", "run=run"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True)
    assert done.returncode == 2 and "evil" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["evil.py"]
