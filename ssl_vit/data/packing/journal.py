"""How far a packing is, on the disk: so that it can be interrupted, split over machines, and completed.

Until a shard set is complete, `unfinished.json` in its folder is the plan, all that decides the bytes, and beside each
finished shard lies an entry that says what is in it and which plan it belongs to. A complete set has info.json instead.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from ssl_vit.data.packing.writer import entry_path
from ssl_vit.data.shards.info import INFO, UNFINISHED
from ssl_vit.files import write_json
from ssl_vit.interfaces import RunError, UserError

_HOLDOUT = "part of holdout"
_OWN_FILES = re.compile(r"(\d{6,}\.(tar|entry\.json)|info\.json|unfinished\.json)(\.\w+\.tmp)?")


@contextmanager
def writing(out: Path, tag: str) -> Iterator[None]:
    """The folder, held against others who would write under the same tag. What the disk refuses becomes a RunError."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a folder to write the shards into")
    path, created = out / f".packing-{tag}.lock", not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(path, timeout=0):
            try:
                _remove_half_written(out, tag)
                yield
            finally:
                _remove_half_written(out, tag)
                path.unlink(missing_ok=True)
                if created:  # and left empty by an error
                    _remove_empty(out)
    except Timeout:
        raise UserError(f"{out}: another process is packing into this folder; wait for it") from None
    except OSError as error:
        raise RunError(f"{out}: packing stopped: {error}; run the same command again to go on") from error


def _remove_half_written(out: Path, tag: str) -> None:
    for folder in (out, out / "train", out / "test"):
        for file in folder.glob(f"*.{tag}.tmp"):
            file.unlink()


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _is_alone(folder: Path) -> bool:
    """Whether the folder holds a set, or the beginnings of one, that is no part of a holdout."""
    if (folder / UNFINISHED).exists():
        return True
    try:
        return _HOLDOUT not in str(json.loads((folder / INFO).read_bytes())["source"])
    except FileNotFoundError:
        return False
    except (ValueError, LookupError, TypeError):
        return True


def read_plan(out: Path) -> dict[str, Any]:
    try:
        plan: dict[str, Any] = json.loads((out / UNFINISHED).read_bytes())
    except ValueError:
        raise UserError(f"{out / UNFINISHED} cannot be read; delete the folder and pack again") from None
    return plan


class Shard(NamedTuple):
    path: Path
    folder: str  # of the set's parts: "" without a holdout, else train or test
    number: int


class Journal:
    """One packing into one folder. tag: "2of4" for part 2/4; writers with other tags may be at work beside it."""

    def __init__(self, out: Path, plan: dict[str, Any], tag: str) -> None:
        self.out, self.plan, self.tag = out, plan, tag

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.plan, sort_keys=True).encode()).hexdigest()

    @cached_property
    def shards(self) -> list[Shard]:
        return [
            Shard(self.out / folder / f"{number:06d}.tar", folder, number)
            for folder, count in self.plan["layout"].items()
            for number in range(count)
        ]

    @property
    def complete(self) -> bool:
        """Whether only the tidying up was interrupted."""
        return all((self.out / folder / INFO).exists() for folder in self.plan["layout"])

    def begin(self, overwrite: bool) -> None:
        """Make the folder ready for the plan: go on with it, or clear the folder. UserError where that needs the
        user's word."""
        out, names, old = self.out, {path.name for path in self.out.iterdir()}, dict[str, Any]()
        if UNFINISHED in names:
            old = read_plan(out)
            if old == self.plan:
                return
            if not overwrite:
                changed = ", ".join(name for name in self.plan if old.get(name) != self.plan[name])
                raise UserError(
                    f"{out} holds an unfinished packing that differs in: {changed}. "
                    "Run its own command to finish it, pass --overwrite to replace it, or choose another folder"
                )
        # Other parts may be starting at this moment: their locks and the plan that they are writing do not count.
        elif not overwrite and any(not name.startswith((".packing-", UNFINISHED)) for name in names):
            raise UserError(f"{out} is not empty; choose another folder or pass --overwrite to replace its shards")
        if overwrite:
            self._refuse_others(old)
            self.clear()
        write_json(out / UNFINISHED, self.plan, self.tag)

    def _refuse_others(self, old: dict[str, Any]) -> None:
        """Sets in train/ and test/ are replaced by a holdout's, which are such a pair, and by nothing else."""
        held = [part for part in ("train", "test") if _is_alone(self.out / part)]
        if held and not {*self.plan["layout"], *old.get("layout", ())}.issuperset(held):
            sets = " and ".join(f"{self.out / part}" for part in held)
            raise UserError(
                f"{sets}: other shard sets, which this packing would not replace: remove them or name another folder"
            )

    def clear(self) -> None:
        """Remove the shard set that the folder holds, info.json first, and nothing that packing does not write."""
        for folder in (self.out, self.out / "train", self.out / "test"):
            for file in sorted(folder.glob("*"), key=lambda file: file.name != INFO):
                if file.is_file() and _OWN_FILES.fullmatch(file.name):
                    file.unlink()
            if folder != self.out:
                _remove_empty(folder)

    def entry(self, shard: Shard) -> dict[str, Any] | None:
        """What is in a finished shard; None where it is not finished, or was cut since. UserError where it belongs to
        another plan, as it can when parts were copied together."""
        try:
            entry: dict[str, Any] = json.loads(entry_path(shard.path).read_bytes())
            if entry["samples"] and shard.path.stat().st_size != entry["bytes"]:
                return None
        except (FileNotFoundError, ValueError):
            return None
        if entry["plan"] != self.fingerprint:
            raise UserError(
                f"{shard.path} belongs to another packing than {UNFINISHED} (other images or options): "
                "delete it and its .entry.json, and pack its part again"
            )
        return entry

    def finish(self) -> dict[str, Any]:
        """Write every info.json and return them, then remove the entries and, last, the plan.

        Raises UserError where shards are missing or a part has no image.
        """
        folders = list(self.plan["layout"])
        if not self.complete:
            entries = [self.entry(shard) for shard in self.shards]
            self._refuse_gaps(entries)
            found: dict[str, list[dict[str, Any]]] = {folder: [] for folder in folders}
            for shard, entry in zip(self.shards, entries, strict=True):
                found[shard.folder].append(entry or {})
            self._refuse_none(found)
            for folder in folders:
                write_json(self.out / folder / INFO, _info(folder, found[folder], self.plan), self.tag)
        for shard in self.shards:
            entry_path(shard.path).unlink(missing_ok=True)
        infos = {folder: json.loads((self.out / folder / INFO).read_bytes()) for folder in folders}
        (self.out / UNFINISHED).unlink()
        return infos.get("") or {**infos, "dropped": [item for info in infos.values() for item in info["dropped"]]}

    def _refuse_gaps(self, entries: list[dict[str, Any] | None]) -> None:
        missing = [number for number, entry in enumerate(entries) if entry is None]
        if not missing:
            return
        names = [str(self.shards[number].path.relative_to(self.out)) for number in missing]
        counts = {int(entry["tag"].partition("of")[2]) for entry in entries if entry}
        whose = {f"{number % count + 1}/{count}" for number in missing for count in counts if len(counts) == 1}
        raise UserError(
            f"{self.out}: {len(missing)} of {len(entries)} shards are missing: "
            f"{', '.join(names[:5])}{', ...' if names[5:] else ''}"
            f"{whose and f' (part {chr(44).join(sorted(whose))})'}; pack them, or copy them here with their .entry.json"
        )

    def _refuse_none(self, found: dict[str, list[dict[str, Any]]]) -> None:
        samples = {folder: sum(entry["samples"] for entry in entries) for folder, entries in found.items()}
        if not any(samples.values()):
            self.clear()
        for folder, entries in found.items():
            if not samples[folder]:
                left_out = dropped(entries)
                raise UserError(
                    f"{self.plan['source']}: none of its {len(left_out)} {folder}{folder and ' '}images can be used "
                    f"(first: {left_out[0]['file']}: {left_out[0]['reason']})"
                )


def _info(folder: str, entries: list[dict[str, Any]], plan: dict[str, Any]) -> dict[str, Any]:
    shards = [
        {key: entry[key] for key in ("file", "samples", "bytes", "sha256")} for entry in entries if entry["samples"]
    ]
    samples = sum(shard["samples"] for shard in shards)
    source = plan["source"]
    if plan["subset"] and folder != "test":
        source += f", {plan['subset']} {'images' if plan['labels'] is None else 'images a class'}"
    if folder:
        source += f", {folder} {_HOLDOUT} {plan['holdout']:g}"
    return {
        "format": 1,
        "classes": plan["classes"],
        "samples": samples,
        "labeled": plan["labels"] is not None,
        "shards": shards,
        "content_hash": content_hash(shard["sha256"] for shard in shards),
        "source": source if source == plan["source"] else f"{source}, seed {plan['seed']}",
        "license": plan["license"],
        "mean_image_size": {
            side: round(sum(entry[side] for entry in entries) / samples, 2) for side in ("height", "width")
        },
        "channels": max(entry["channels"] for entry in entries),
        "dropped": dropped(entries),
    }


def content_hash(sums: Iterable[str]) -> str:
    """One sha256 of a whole set: of its shards' (in hexadecimal, in order, end to end)."""
    return hashlib.sha256("".join(sums).encode()).hexdigest()


def dropped(entries: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The images left out, sorted by name."""
    found = chain.from_iterable(entry["dropped"] for entry in entries)
    return [{"file": file, "reason": reason} for file, reason in sorted(found)]
