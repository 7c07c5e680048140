"""Which shards a folder says it has: by info.json, by about.json, or by what lies there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from ssl_vit.data.packing.journal import ABOUT, INFO
from ssl_vit.interfaces import UserError


class ShardEntry(BaseModel):
    """One shard as it is listed; file is a plain name in the same folder."""

    file: str = Field(pattern=r"^[^/\\]+$")
    samples: int
    sha256: str
    bytes: int | None = None


class Part(BaseModel):
    samples: int
    shards: list[ShardEntry]


class Info(Part):
    """What is read of info.json here."""

    classes: list[str] | None
    labeled: bool
    content_hash: str | None = None  # sets from before it was written have none


class About(BaseModel):
    """What is read of about.json: one folder with the shards of several splits."""

    classes: list[str] | None
    splits: dict[str, Part]


@dataclass(frozen=True)
class ShardList:
    """The shards of a set by file name, in order, and what `file` (info.json or about.json) says of them. Tars from
    elsewhere have neither file: each entry is None, and parts (by split; "" where there is one only) is empty."""

    shards: Mapping[str, ShardEntry | None]
    parts: Mapping[str, Part]
    classes: list[str] | None = None
    labeled: bool = False
    file: str = INFO


def open_set(folder: Path) -> ShardList:
    """Raises UserError where there is no shard set, it cannot be read, or packing was not finished."""
    try:
        if (file := folder / INFO).exists():
            info = Info.model_validate_json(file.read_bytes())
            entries = {entry.file: entry for entry in info.shards}
            return ShardList(entries, {"": info}, info.classes, info.labeled)
        if (file := folder / ABOUT).exists():
            about = About.model_validate_json(file.read_bytes())
            entries = {entry.file: entry for part in about.splits.values() for entry in part.shards}
            return ShardList(entries, about.splits, about.classes, about.classes is not None, ABOUT)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "it"
        raise UserError(f"{file}: {where}: {error.errors()[0]['msg']}; make the shards again") from None
    if next(folder.glob("*.entry.json"), None):
        raise UserError(
            f"{folder}: packing was not finished; run its `ssl-vit shards make` command again "
            "(or, for parts, `ssl-vit shards merge-info`)"
        )
    present = sorted(path.name for path in folder.glob("*.tar"))
    if not present:
        inside = [path.parent.name for path in sorted(folder.glob(f"*/{INFO}"))]
        hint = f"name one of its parts: {', '.join(inside)}" if inside else "name a folder of .tar shards"
        raise UserError(f"{folder}: {'no shards here' if folder.is_dir() else 'no such folder'}; {hint}")
    return ShardList(dict.fromkeys(present), {})
