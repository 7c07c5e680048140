"""What a shard set says about itself: the one model of `info.json`, and of `about.json` that other tools write.

Light: packing processes import this, without torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ssl_vit.interfaces import RunError, UserError

INFO = "info.json"
ABOUT = "about.json"  # one folder with the shards of several splits
TARS = "[!.]*.tar"  # shards; not the side files of macOS, such as "._a.tar"
RECORD = "packing.jsonl"  # what packing keeps beside the shards; without info.json they are not finished
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
STORED_FORMATS = ("JPEG", "PNG", "WEBP")
MAX_INFO_BYTES = 64 << 20
MAX_MEMBER_BYTES = 1 << 29  # an image file
_MOST = 1 << 48  # samples or bytes
_MOST_IN_SHARD = 1 << 26  # samples: readers hold an index of them
_HASH = r"^([0-9a-f]{64})?$"


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class ShardEntry(_Model):
    """One shard.

    file: a plain name in the same folder.
    sha256: "" where it is not known.
    """

    file: str = Field(pattern=r"^([^/\\\x00:]|:[^/\\\x00:])+:?$", max_length=255)  # fsspec chains file systems at `::`
    samples: int = Field(ge=0, le=_MOST_IN_SHARD)
    bytes: int | None = Field(None, ge=0, le=_MOST)
    sha256: str = Field("", pattern=_HASH)


class Part(_Model):
    """Shards of one split."""

    samples: int = Field(ge=0, le=_MOST)
    shards: list[ShardEntry]


class Dropped(_Model):
    """An image that packing excluded."""

    file: str
    reason: str


class Info(_Model):
    """A shard set: the fields of `info.json`, in the order in which they are written.

    labeled: every sample has a class index.
    content_hash: one sha256 of the shards' sha256 in order.
    splits: only of an `about.json`; its shards together are `shards`.
    """

    format: int = 1
    classes: list[str] | None = None
    samples: int = Field(ge=0, le=_MOST)
    labeled: bool = False
    shards: list[ShardEntry]
    content_hash: str | None = Field(None, pattern=_HASH)
    source: str | None = None
    license: str | None = None
    dropped: list[Dropped] = []
    splits: dict[str, Part] = {}

    @field_validator("shards")
    @classmethod
    def _each_once(cls, shards: list[ShardEntry]) -> list[ShardEntry]:
        names = [shard.file for shard in shards]
        if len({*names}) < len(names):
            raise ValueError(f"lists {next(name for name in names if names.count(name) > 1)} more than once")
        return shards

    @model_validator(mode="before")
    @classmethod
    def _join_splits(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(splits := data.get("splits"), dict) and splits:
            parts = [Part.model_validate_json(json.dumps(part)) for part in splits.values()]
            shards = [shard.model_dump() for part in parts for shard in part.shards]
            samples = sum(shard["samples"] for shard in shards)
            return {**data, "shards": shards, "samples": samples, "labeled": data.get("classes") is not None}
        return data


def parse_info(content: bytes, path: str) -> Info | None:
    """The content of an `info.json` or `about.json`; None for an `about.json` of another kind.

    path: for error messages, and its name tells which of the two it is. Raises UserError for anything else.
    """
    try:
        if len(content) > MAX_INFO_BYTES:
            raise ValueError(f"larger than {MAX_INFO_BYTES >> 20} MiB")
        parsed = json.loads(content)
        if path.endswith(ABOUT) and not (isinstance(parsed, dict) and isinstance(parsed.get("splits"), dict)):
            return None
        return Info.model_validate_json(content)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "content"
        raise UserError(f"{path}: {where}: {error.errors()[0]['msg']}; make the shards again") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: does not list the shards of a set ({error}); make the shards again") from None


def local_info(folder: Path) -> Info | None:
    """What the folder's info.json or about.json says; None without either. Raises UserError where packing was not
    finished."""
    for name in (INFO, ABOUT):
        try:
            with (folder / name).open("rb") as file:
                content = file.read(MAX_INFO_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise RunError(f"{folder / name}: cannot be read: {error.strerror}") from None
        if info := parse_info(content, str(folder / name)):
            return info
    if (folder / RECORD).exists():
        raise UserError(
            f"{folder}: packing was not finished, or {INFO} was deleted; run its `ssl-vit shards make` command again"
        )
    return None


def open_set(folder: Path) -> Info | None:
    """What `local_info` says of a folder with shards; None for tars from elsewhere, which have neither file.

    Raises UserError where there is no shard set, it cannot be read, or packing was not finished.
    """
    if info := local_info(folder):
        return info
    if not any(folder.glob(TARS)):
        inside = [path.parent.name for path in sorted(folder.glob(f"*/{INFO}"))]
        hint = f"name one of its parts: {', '.join(inside)}" if inside else "name a folder of .tar shards"
        if not folder.exists():
            raise UserError(f"{folder}: no such folder")
        raise UserError(f"{folder}: {'no shards here' if folder.is_dir() else 'not a folder'}; {hint}")
    return None
