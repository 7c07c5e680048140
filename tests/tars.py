"""Shards, tars and encoded images that tests write."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from ssl_vit.data.packing import pack
from ssl_vit.data.packing.plan import Options
from ssl_vit.data.packing.sources import open_source

Members = Mapping[str, bytes] | Iterable[tuple[str, bytes]]


def write_tar(path: Path, members: Members, **options: Any) -> Path:
    """Write a tar of these members by name, which pairs may repeat; its folder is created. options: of `tarfile`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members.items() if isinstance(members, Mapping) else members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def packed(source: str | Path, out: Path, split: str | None = None, **options: Any) -> Path:
    """Pack a source into shards; returns their folder. options: of `packing.plan.Options`."""
    pack(open_source(str(source), split=split), out, Options(**options), progress=False)
    return out
