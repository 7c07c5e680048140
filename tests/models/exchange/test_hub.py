"""Models of the hub, its client replaced by local folders, and what its errors become."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file

from ssl_vit.interfaces import RunError, UserError
from ssl_vit.models.exchange import hub
from ssl_vit.models.exchange.exports import export
from ssl_vit.models.exchange.hub import Unreachable
from ssl_vit.models.exchange.imports import import_weights
from ssl_vit.models.factory import load, state

Make = Callable[..., Any]


@pytest.mark.parametrize("name", ["someone/vit", "hf-hub:someone/vit@main", "hf_hub:someone/pickled", "someone/empty"])
def test_weights_come_from_the_hub_in_safetensors_if_possible(
    make_encoder: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ours, asked = make_encoder(), list[tuple[str, str | None, list[str]]]()
    export(ours, tmp_path / "vit", "transformers", "")

    def snapshot(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision, allow_patterns))
        return str(tmp_path / "vit")

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    weights = tmp_path / "vit" / "model.safetensors"
    if "pickled" in name:
        torch.save(load_file(weights), tmp_path / "vit" / "pytorch_model.bin")
    if "vit" not in name:
        weights.unlink()
    if "empty" in name:
        with pytest.raises(UserError, match=r"holds no model\.safetensors and no pytorch_model\.bin"):
            import_weights(name, tmp_path / "out")
        return
    import_weights(name, tmp_path / "out")
    assert all(torch.equal(tensor, state(ours)[key]) for key, tensor in state(load(tmp_path / "out")).items())
    assert asked[0][:2] == (name.partition(":")[2].partition("@")[0] or name, "main" if "@" in name else None)
    assert asked[0][2] == ["config.json", "preprocessor_config.json", "model.safetensors"]
    assert len(asked) == (2 if "pickled" in name else 1)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (errors.RepositoryNotFoundError("404", response=Mock()), UserError, "no such model"),
        (errors.LocalEntryNotFoundError("offline"), Unreachable, "the hub does not answer"),
        (ConnectionError("refused"), Unreachable, "loading failed: refused"),
        (OSError(errno.ENOSPC, "No space left on device"), RunError, "loading failed: .*No space left"),
    ],
)
def test_what_the_hub_answers_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], words: str
) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(kind, match=f"someone/nothing: {words}") as raised:
        import_weights("someone/nothing", tmp_path / "out")
    assert raised.type is kind
