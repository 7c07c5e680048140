from __future__ import annotations

from typing import Any

import pytest

from ssl_vit.analysis import loaded
from ssl_vit.recipe import load_recipe


def test_an_evaluation_waits_for_other_processes_as_long_as_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded, "make_accelerator", lambda *arguments, **_: arguments)
    settings = load_recipe("digits_ssl", ["training.timeout=3600", "training.precision=bf16"])
    nothing: Any = None
    assert loaded.Loaded(nothing, nothing, settings).accelerator() == ("bf16", 3600)
    assert loaded.Loaded(nothing, nothing).accelerator() == ()
