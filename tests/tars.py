"""Tars and encoded images that tests write by hand."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

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


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()
