"""Hostile files, made by code: images, shards, lists of shards, weights, results and recipes that attack their reader.

Each builder is a plain function of a folder or returns bytes; nothing here is read by more than one kind of program.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests import tars
from tests.tars import write_tar

ESCAPE = "\x1b]0;owned\x07\x1b[2J"  # sets the title of a terminal and clears it
CLASSES = ["0", "1", "2"]


class Bomb:
    """A pickle that leaves a file behind if it is ever loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.mark,)


def encoded(seed: int, form: str = "PNG", size: tuple[int, int] = (16, 16), mode: str = "RGB") -> bytes:
    """A sound image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return tars.encoded(Image.fromarray(pixels).convert(mode), form)


# Images ---------------------------------------------------------------------------------------------------------------


def jpeg(width: int, height: int) -> bytes:
    """A JPEG of 16 x 16 pixels whose frame header claims another size."""
    data = encoded(0, "JPEG")
    frame = data.index(b"\xff\xc0") + 5
    return data[:frame] + struct.pack(">HH", height, width) + data[frame + 4 :]


def hidden_size() -> bytes:
    """A JPEG of 30,000 x 30,000 pixels with a marker without a length, after which a careless reader finds 16 x 16."""
    frame = b"\xff\xc0" + struct.pack(">HBHHB", 17, 8, 16, 16, 3) + b"\x01\x22\x00\x02\x11\x01\x03\x11\x01"
    padding = bytes(0xFFE1 - 4) + frame  # the careless reader takes the next marker, FFE1, for the length of FFD0
    return b"\xff\xd8\xff\xd0\xff\xe1" + struct.pack(">H", len(padding) + 2) + padding + jpeg(30000, 30000)[2:]


def many_scans() -> bytes:
    """A progressive JPEG that repeats its last scan."""
    data = tars.encoded(Image.new("RGB", (16, 16)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * 1000 + data[-2:]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *, depth: int = 8, rows: bytes = b"", extra: bytes = b"") -> bytes:
    """A PNG whose header claims a size. rows: the compressed pixels; extra: chunks before them."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")


@cache
def bilevel(side: int) -> bytes:
    """A legal black PNG with one bit per pixel."""
    return png(side, side, depth=1, rows=zlib.compress(bytes((side // 8 + 1) * side), 1))


@cache
def text_bomb() -> bytes:
    """A PNG with a compressed text of 200 MB."""
    packed = zlib.compress(bytes(200_000_000), 1)
    return png(16, 16, rows=zlib.compress(bytes(17 * 16)), extra=_chunk(b"zTXt", b"Comment\0\0" + packed))


def webp(width: int, height: int) -> bytes:
    """A lossless WebP with nothing behind the header, which claims a size."""
    body = b"VP8L" + struct.pack("<I", 5) + b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + b"\0"
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def bmp(width: int, height: int) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + head


def exif_loop() -> bytes:
    """A JPEG whose EXIF directory points to itself, and claims 65,535 entries."""
    tiff = b"II*\0\x08\0\0\0" + struct.pack("<H", 65535) + struct.pack("<HHII", 0x8769, 4, 1, 8) + struct.pack("<I", 8)
    data = encoded(0, "JPEG")
    segment = b"Exif\0\0" + tiff
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + data[2:]


def images() -> dict[str, bytes]:
    """Images by file name; each must be skipped and named, in little time and memory."""
    return {
        "jpeg_header.jpg": jpeg(65500, 65500),
        "jpeg_large.jpg": jpeg(30000, 30000),
        "jpeg_zero.jpg": jpeg(0, 0),
        "jpeg_hidden.jpg": hidden_size(),
        "jpeg_scans.jpg": many_scans(),
        "png_bits.png": bilevel(13000),
        "png_header.png": png(2**31 - 1, 2**31 - 1),
        "png_short.png": png(9000, 9000),
        "png_negative.png": png(2**32 - 1, 1),
        "webp_header.webp": webp(16383, 16383),
        "no_image.jpg": b"this is no picture\n" * 9,
        "empty.jpg": b"",
        "cut.jpg": encoded(0, "JPEG")[:200],
    }


def harmless() -> dict[str, bytes]:
    """Images by file name that are odd, but may be read."""
    return {
        "png_text.png": text_bomb(),
        "exif.jpg": exif_loop(),
        "strip.png": png(1, 65000, rows=zlib.compress(bytes(2 * 65000))),
        "palette.png": encoded(1, mode="P"),
        "bilevel.png": encoded(1, mode="1"),
        "cmyk.jpg": encoded(1, "JPEG", mode="CMYK"),
    }


def other_formats() -> dict[str, bytes]:
    """What only packing reads."""
    tiff = b"II*\0\x08\0\0\0" + struct.pack("<H", 2)
    tiff += struct.pack("<HHII", 256, 4, 1, 2**31 - 1) + struct.pack("<HHII", 257, 4, 1, 2**31 - 1) + bytes(4)
    return {
        "large.bmp": bmp(2**31 - 1, 2**31 - 1),
        "large.tiff": tiff,
        "large.gif": b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b";",
        "large.pgm": b"P5 2147483647 2147483647 255\n",
        "script.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(pwned) (w) file\n",
        f"{ESCAPE}.jpg".replace("/", ""): b"named to steer a terminal",
    }


# Shards ---------------------------------------------------------------------------------------------------------------


def members(first: int, count: int) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for n in range(first, first + count):
        found |= {f"{n:06d}.png": encoded(n), f"{n:06d}.cls": b"%d" % (n % len(CLASSES))}
    return found


def info(folder: Path, **changes: Any) -> dict[str, Any]:
    """What info.json says of the shards there, 32 samples each. changes: keys that say something else."""
    shards = [{"file": path.name, "samples": 32} for path in sorted(folder.glob("*.tar"))]
    return {"classes": CLASSES, "samples": 32 * len(shards), "labeled": True, "shards": shards} | changes


def sound(folder: Path) -> Path:
    """Two shards of 32 samples."""
    for n in range(2):
        write_tar(folder / f"{n:06d}.tar", members(32 * n, 32))
    (folder / "info.json").write_text(json.dumps(info(folder)))
    return folder


def with_images(folder: Path) -> Path:
    """A sound shard, and one with every hostile image."""
    sound(folder)
    odd = [*images().items(), *harmless().items()]
    content = members(32, 32 - len(odd))
    for number, (name, data) in enumerate(odd):
        content |= {f"z{number:02d}_{name}": data, f"z{number:02d}_{name.partition('.')[0]}.cls": b"0"}
    write_tar(folder / "000001.tar", content)
    return folder


def _header(name: str, size: int | bytes, kind: bytes = b"0") -> bytes:
    """A tar header with a sound checksum."""
    entry = tarfile.TarInfo(name)
    entry.type = kind
    block = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = size if isinstance(size, bytes) else b"%011o\0" % size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def _base256(number: int) -> bytes:
    return (number & (1 << 96) - 1 | 1 << 95).to_bytes(12, "big")


def _replaced(first: bytes) -> Callable[[Path], Path]:
    """A set whose second shard begins with these blocks."""

    def build(folder: Path) -> Path:
        path = sound(folder) / "000001.tar"
        path.write_bytes(first + path.read_bytes())
        return folder

    return build


def _sparse() -> bytes:
    """GNU's old kind: 512 bytes that stand for 200 GB."""
    block = bytearray(_header("000032.png", 512, b"S"))
    block[386:410] = b"%011o\0" % 0 + b"%011o\0" % 512
    block[483:495] = _base256(200 * 10**9)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + encoded(0)[:512].ljust(512, b"\0")


def _sparse_pax() -> bytes:
    """POSIX' kind, in extended headers."""
    entry = tarfile.TarInfo("GNUSparseFile.0/000032.png")
    entry.size = 512
    entry.pax_headers = {
        "GNU.sparse.major": "0",
        "GNU.sparse.minor": "1",
        "GNU.sparse.name": "000032.png",
        "GNU.sparse.size": str(200 * 10**9),
        "GNU.sparse.map": "0,512",
        "GNU.sparse.realsize": str(200 * 10**9),
    }
    return entry.tobuf(tarfile.PAX_FORMAT) + bytes(512)


def _long_name(name: bytes) -> bytes:
    """An empty member, and one past the end."""
    blocks = (len(name) // 512 + 1) * 512
    head = _header("././@LongLink", len(name) + 1, b"L") + name.ljust(blocks, b"\0")
    return head + _header("name", 0) + _header("000032.png", 8**11 - 1)


def _pax(**headers: str) -> bytes:
    entry = tarfile.TarInfo("000032.png")
    entry.size, entry.pax_headers = 512, headers
    return entry.tobuf(tarfile.PAX_FORMAT) + bytes(512)


def _listed(content: str | bytes | Callable[[Path], Any]) -> Callable[[Path], Path]:
    """A set whose info.json is something else."""

    def build(folder: Path) -> Path:
        sound(folder)
        said = content(folder) if callable(content) else content
        said = json.dumps(said) if not isinstance(said, str | bytes) else said
        (folder / "info.json").write_bytes(said.encode() if isinstance(said, str) else said)
        return folder

    return build


def _shard_says(**changes: Any) -> Callable[[Path], Any]:
    """Of the second shard."""

    def said(folder: Path) -> Any:
        found = info(folder)
        found["shards"][1] |= changes
        found["samples"] += changes["samples"] - 32 if isinstance(changes.get("samples"), int) else 0
        return found

    return said


def _named(folder: Path) -> Path:
    """Keys that steer a terminal; their images cannot be read."""
    sound(folder)
    bad = {f"{n:03d}{ESCAPE}\n.png": b"no image" for n in range(4)}
    write_tar(folder / "000001.tar", {**members(32, 28), **bad})
    return folder


Build = Callable[[Path], Path]
# By name: the set, the words that `shards verify` must use of it (exit code 1, or 2 where it cannot be read), and
# whether training on it ends with an error (else it skips what is bad).
SETS: dict[str, tuple[Build, str, bool]] = {
    "size_huge": (_replaced(_header("000032.png", _base256(1 << 62))), "ends at byte", True),
    "size_past_end": (_replaced(_header("000032.png", 8**11 - 1)), "ends at byte", True),
    "size_negative": (_replaced(_header("000032.png", _base256(-512))), "negative", True),
    "longname_huge": (_replaced(_header("././@LongLink", 8**11 - 1, b"L")), "header of", True),
    "longname_many": (_replaced((_header("././@LongLink", 700_000, b"L") + bytes(700_416)) * 2), "header of", True),
    "longname_chain": (_replaced((_header("././@LongLink", 1, b"L") + bytes(512)) * 900), "recursion", True),
    "longname_slashes": (_replaced(_long_name(b"x" + b"/" * 400_000 + b"y")), "ends at byte", True),
    "pax_huge": (_replaced(_header("pax", 8**11 - 1, b"x")), "header of", True),
    "pax_size": (_replaced(_pax(size=str(1 << 62))), "byte", True),
    "sparse": (_replaced(_sparse()), "sparse", True),
    "sparse_pax": (_replaced(_sparse_pax()), "sparse", True),
    "garbage": (_replaced(bytes(range(256)) * 8), "truncated", True),
    "terminal": (_named, "unreadable_image", False),
    "counts_negative": (_listed(_shard_says(samples=-1)), "samples", True),
    "counts_too_large": (_listed(_shard_says(samples=10**15)), "samples", True),
    "counts_large": (_listed(_shard_says(samples=10**12)), "samples", True),
    "counts_too_few": (_listed(_shard_says(samples=5)), "info.json lists 5; make the shards again", True),
    "counts_text": (_listed(_shard_says(samples="32")), "samples", True),
    "file_outside": (_listed(_shard_says(file="../../etc/passwd")), "file", True),
    "classes_number": (_listed(lambda folder: info(folder, classes=5)), "classes", True),
    "classes_text": (_listed(lambda folder: info(folder, classes="abcd")), "classes", True),
    "classes_mixed": (_listed(lambda folder: info(folder, classes=[1, 2, None, {}])), "classes", True),
    "nested": (_listed("[" * 200_000), "info.json", True),
    "nested_key": (_listed('{"a":' * 100_000), "info.json", True),
    "digits": (_listed('{"samples": ' + "9" * 10_000 + ', "shards": []}'), "info.json", True),
    "not_utf8": (_listed(b"\xff\xfe\x00"), "info.json", True),
    "not_an_object": (_listed("[]"), "info.json", True),
    "too_large": (_listed(b"[" + b" " * (65 << 20)), "64 MiB", True),
}


# Weights, results, recipes --------------------------------------------------------------------------------------------


@cache
def _zip(name: str, size: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file, file.open(name, "w") as member:
        for _ in range(size >> 20):
            member.write(bytes(1 << 20))
    return buffer.getvalue()


def npy(shape: tuple[int, ...], kind: str = "<f4") -> bytes:
    """The header of an array file that claims a shape; no numbers."""
    head = repr({"descr": kind, "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head


def npz(**arrays: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, data in arrays.items():
            file.writestr(f"{name}.npy", data)
    return buffer.getvalue()


def safetensors(header: bytes, claimed: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if claimed is None else claimed) + header


def weights(mark: Path) -> dict[str, bytes]:
    """Files of weights by name; `ssl-vit import` must refuse each (exit code 2) and create nothing."""
    bomb, tensor = pickle.dumps(Bomb(mark)), {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
    return {
        "pickle.pth": bomb,
        "pickle.safetensors": bomb,
        "pickle.npz": npz(**{"embedding/kernel": npy((1,), "|O") + bomb}),
        "header.safetensors": safetensors(b"{}", 1 << 62),
        "nested.safetensors": safetensors(b"[" * 100_000),
        "claims.safetensors": safetensors(json.dumps({"cls_token": tensor}).encode()),
        "claims.npz": npz(**{"embedding/kernel": npy((2**40,))}),
        "header.npz": npz(**{"embedding/kernel": b"\x93NUMPY\x01\x00" + struct.pack("<H", 64) + b"((((".ljust(64)}),
        "zip.pth": _zip("archive/data.pkl", 1 << 28),
        "empty.safetensors": b"",
    }


def models() -> dict[str, dict[str, Any]]:
    """What `model_args` of a weights folder's config.json may hold beside sizes, by name; each must be refused."""
    return {
        "checkpoint_path": {"checkpoint_path": "../pickle.pth"},
        "pretrained": {"pretrained": True, "pretrained_cfg_overlay": {"file": "../pickle.pth"}},
        "width": {"embed_dim": 10**6},
        "negative": {"embed_dim": -4},
        "positions": {"img_size": 10**6},
        "depth": {"depth": 10**12},
        "layer": {"norm_layer": "__import__"},
    }


def runs(folder: Path) -> dict[str, Path]:
    """Run directories by name that `report` must refuse, or show without harm."""
    bomb, results = _zip("0/images.npy", 3 << 28), folder / "expands" / "results"
    results.mkdir(parents=True)
    digest = hashlib.sha256(bomb).hexdigest()
    (results / f"knn-0.{digest[:12]}.npz").write_bytes(bomb)
    rows = [{"data": "x"}]
    (results / "knn-0.json").write_text(json.dumps({"format": 1, "predictions": digest, "rows": rows}))
    files = {
        "metrics": ("metrics.jsonl", f'{{"a":{"[" * 50_000}\n{{"step": 1, "loss": 1e999}}\n{ESCAPE}\n[]\n1\n'),
        "summary": ("summary.json", '{"a":' * 50_000),
        "summary_kind": ("summary.json", "[]"),
        "plan": ("plan.json", "[" * 50_000),
        "plan_empty": ("plan.json", "{}"),
        "aliases": ("recipe.yaml", f"{RECIPES['aliases']}objective: {{name: *a7}}\ninit_from: *a7\n"),
        "environment": ("environment.json", json.dumps({f"<script>{ESCAPE}": {"a": [1] * 1000}})),
    }
    for name, (file, text) in files.items():
        (folder / name).mkdir()
        (folder / name / file).write_text(text)
    return {name: folder / name for name in ("expands", *files)}


RECIPES = {
    "python": "name: !!python/object/apply:os.system ['touch pwned']\n",
    "aliases": "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)),
    "itself": "a: &a [*a]\n",
    "nested": "a: " + "[" * 50_000 + "\n",
    "nested_keys": "".join(" " * n + "a:\n" for n in range(60)),
    "too_large": "name: x\n#" + " " * (1 << 20),
    "number": "name: x\nseed: " + "9" * 10_000 + "\n",
    "binary": "\x00\x01\x02",
    "base": "base: ../../../../etc/passwd\n",
    "base_itself": "base: ./recipe.yaml\n",
    "steps": "base: digits_ssl\ntraining: {steps: 10000000000000000000000000}\n",
    "sizes": "base: digits_ssl\nencoder: {width: 100000000}\n",
    "list": "- a\n- b\n",
}
