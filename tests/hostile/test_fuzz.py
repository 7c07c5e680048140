"""Random changes of good files: their readers raise what they say, and nothing else. Minutes as `slow`."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssl_vit import recipe
from ssl_vit.data.images import open_picture
from ssl_vit.data.packing.images import to_stored
from ssl_vit.data.shards.info import Info, parse_info
from ssl_vit.data.shards.reading import ShardFile
from ssl_vit.interfaces import BadSample, UserError
from tests.hostile import corpus

Change = tuple[float, bytes]  # where, as a share of the length; what stands there instead
CHANGES = st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=12)), min_size=1, max_size=4)
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
IMAGES = {form: corpus.encoded(0, form, (9, 7)) for form in FORMATS}
Fuzz = Callable[..., Any]


def fuzzed(test: Fuzz, **values: Any) -> list[Any]:
    """The test with few examples, always the same ones, and as `slow` with many."""
    checks = [*HealthCheck]
    fast = settings(max_examples=25, deadline=5000, derandomize=True, database=None, suppress_health_check=checks)
    slow = settings(fast, max_examples=4000, derandomize=False)
    name = test.__name__
    return [
        pytest.param(fast(given(**values)(test)), id=name),
        pytest.param(slow(given(**values)(test)), id=f"{name}-long", marks=pytest.mark.slow),
    ]


def changed(data: bytes, changes: list[Change]) -> bytes:
    for share, piece in changes:
        place = int(share * len(data))
        data = data[:place] + piece + data[place + len(piece) :]
    return data


def images(form: str, changes: list[Change]) -> None:
    data = changed(IMAGES[form], changes)
    extension = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp"}.get(form)
    for channels in (1, 3) if extension else ():
        try:
            picture = open_picture({str(extension): data}, channels, max_pixels=10_000)
            assert picture.whole().shape == (channels, picture.height, picture.width)
        except BadSample:
            pass
    with contextlib.suppress(BadSample):
        assert to_stored(data, resize=8)[1]


def tars(changes: list[Change], keep: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0.tar"
        corpus.write_tar(path, {"a" * 120 + ".png": b"1" * 600, **corpus.members(0, 3)})
        data = changed(path.read_bytes(), changes)
        path.write_bytes(data[: int(keep * len(data)) + 1])
        try:
            shard = ShardFile(path.open("rb"), "0.tar")
        except UserError:  # taken for a compressed tar
            return
        for position in range(len(shard.samples) + 1):
            with contextlib.suppress(BadSample):
                assert sum(map(len, shard.read(position).values())) <= len(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
INFO = json.dumps({"classes": ["a"], "samples": 3, "shards": [{"file": "0.tar", "samples": 3, "bytes": 9}]}).encode()


def lists_of_shards(changes: list[Change], values: dict[str, Any]) -> None:
    for content in (changed(INFO, changes), json.dumps(json.loads(INFO) | values).encode()):
        for name in ("info.json", "about.json"):
            try:
                found = parse_info(content, name)
            except UserError:
                continue
            assert found is None or all("/" not in shard.file and shard.samples >= 0 for shard in found.shards)


RECIPE = b"name: x\ndata: {train: x, lanes: 4}\nobjective: {name: masked_patch}\ntraining: {steps: 3, batch_size: 8}\n"
KEYS = ("name", "seed", "data.train", "data.lanes", "encoder.width", "optim.lr", "training.steps", "objective.name")


def recipes(changes: list[Change], key: str, value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.yaml"
        for content, override in ((changed(RECIPE, changes), []), (RECIPE, [f"{key}={value}"])):
            path.write_bytes(content)
            try:
                found = recipe.load_recipe(path, override)
            except UserError:
                continue
            assert os.environ["PATH"] not in json.dumps(found.model_dump(mode="json"))


KIND = st.sampled_from(FORMATS)
VALUES = st.dictionaries(st.sampled_from(sorted(Info.model_fields)), JSON, max_size=3)
VALUE = JSON | st.text("${}[]:,&*!'\"a1 \n", max_size=20)
TESTS = [
    *fuzzed(images, form=KIND, changes=CHANGES),
    *fuzzed(tars, changes=CHANGES, keep=st.floats(0, 1)),
    *fuzzed(lists_of_shards, changes=CHANGES, values=VALUES),
    *fuzzed(recipes, changes=CHANGES, key=st.sampled_from(KEYS), value=VALUE),
]


@pytest.mark.parametrize("test", TESTS)
def test_readers_raise_what_they_say(test: Callable[[], None]) -> None:
    test()
