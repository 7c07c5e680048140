"""The real client against a hub on this machine, which goes away in the end; one process for all commands, since the
client reads the hub's address at import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from ssl_vit.cli import weights as weights_commands
from ssl_vit.interfaces import RunError
from ssl_vit.models import EncoderConfig
from ssl_vit.models.exchange import hub as client
from ssl_vit.models.exchange.exports import export
from ssl_vit.models.factory import build, load, state

Make = Callable[..., Any]

# name: its command line; they run in this order
COMMANDS = {
    "transformers": ["import", "someone/vit", "transformers"],
    "revision": ["import", "hf-hub:someone/vit@main", "revision"],
    "timm": ["import", "test_vit.r160_in1k", "timm"],
    "pickle": ["import", "someone/pickled", "pickle"],
    "timm repository": ["import", "hf_hub:someone/timm", "timm repository"],
    "nobody": ["import", "someone/nothing", "nobody"],
    "no weights": ["import", "someone/empty", "no weights"],
    "push": ["export", "transformers", "pushed", "--to", "timm", "--push", "me/digits", "--license", "mit"],
    "forbidden": ["export", "transformers", "forbidden", "--to", "timm", "--push", "forbidden/digits"],
    "license": ["export", "transformers", "license", "--to", "timm", "--push", "me/x", "--license", "nonsense"],
    "name": ["export", "transformers", "name", "--to", "timm", "--push", "my digits"],
    "stop": [],  # from here on the hub is out of reach
    "away": ["import", "someone/other", "away"],
    "kept": ["export", "transformers", "kept", "--to", "timm", "--push", "me/digits"],
}
RUN = """
import contextlib, io, json, os, sys, urllib.request
from ssl_vit import cli
said = {}
for name, arguments in json.loads(sys.argv[1]).items():
    if name == "stop":
        with contextlib.suppress(OSError):
            while True:
                urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/stop", timeout=5)
        continue
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["ssl-vit", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
    said[name] = [code, out.getvalue(), err.getvalue()]
print(json.dumps(said))
"""


@dataclass
class Said:
    folder: Path
    answers: dict[str, tuple[int, str, str]]
    weights: dict[str, dict[str, torch.Tensor]]


def talk(folder: Path, address: str) -> dict[str, tuple[int, str, str]]:
    """What every command answered: exit code, output, errors."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_HOME": str(folder / "cache"), "HF_ENDPOINT": address, "HF_TOKEN": "hf_secret"}
    environment |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-c", RUN, json.dumps(COMMANDS)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=True)
    return {name: tuple(answer) for name, answer in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.fixture(scope="module")
def said(hub: Any, tmp_path_factory: pytest.TempPathFactory) -> Said:
    ours = build(EncoderConfig(image_size=16, patch_size=8, width=32, depth=1, heads=2))
    (hub.root / "someone").mkdir()
    export(ours, hub.root / "someone" / "vit", "transformers", "")
    export(ours, hub.root / "someone" / "timm", "timm", "")
    for name in ("tf_model.h5", "pytorch_model.bin"):  # what a repository of the hub holds besides
        (hub.root / "someone" / "vit" / name).write_text("not for us")
    pickled = hub.root / "someone" / "pickled"
    pickled.mkdir()
    for name in ("config.json", "preprocessor_config.json"):
        (pickled / name).write_bytes((hub.root / "someone" / "vit" / name).read_bytes())
    torch.save(load_file(hub.root / "someone" / "vit" / "model.safetensors"), pickled / "pytorch_model.bin")
    (hub.root / "someone" / "empty").mkdir()
    (hub.root / "someone" / "empty" / "config.json").write_text("{}")
    network = timm.create_model("test_vit")
    (hub.root / "timm" / "test_vit.r160_in1k").mkdir(parents=True)
    save_file(network.state_dict(), hub.root / "timm" / "test_vit.r160_in1k" / "model.safetensors")
    folder = tmp_path_factory.mktemp("work")
    answers = talk(folder, hub.address)
    encoder = {key: tensor for key, tensor in network.state_dict().items() if not key.startswith("head.")}
    return Said(folder, answers, {"transformers": state(ours), "timm": encoder})


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        *((name, "transformers") for name in ("transformers", "revision", "pickle", "timm repository")),
        ("timm", "timm"),
    ],
)
def test_weights_come_from_the_hub_bit_for_bit(said: Said, name: str, origin: str) -> None:
    assert said.answers[name][0] == 0, said.answers[name]
    found = state(load(said.folder / name))
    assert found.keys() == said.weights[origin].keys()
    assert all(torch.equal(tensor, said.weights[origin][key]) for key, tensor in found.items())


def test_a_timm_name_brings_its_own_normalization_and_leaves_its_head(said: Said) -> None:
    model = load(said.folder / "timm")
    assert (model.image_size, model.mean, model.std) == ((160, 160), (0.5,) * 3, (0.5,) * 3)
    assert "skipped: head.weight, head.bias" in said.answers["timm"][1]


def test_safetensors_are_preferred_and_nothing_else_is_fetched(said: Said, hub: Any) -> None:
    assert sorted({file for file in hub.downloads if file.startswith("someone/vit/")}) == [
        "someone/vit/config.json",
        "someone/vit/model.safetensors",
        "someone/vit/preprocessor_config.json",
    ]


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("nobody", 2, "someone/nothing: no such model"),
        ("no weights", 2, "its repository holds no model.safetensors and no pytorch_model.bin"),
        ("forbidden", 1, "forbidden/digits: pushing failed: 403"),
        ("license", 2, '"license" must be one of'),
        ("name", 2, "my digits: Repo id must use"),
    ],
)
def test_what_the_hub_refuses_is_said(said: Said, name: str, code: int, words: str) -> None:
    found, _, error = said.answers[name]
    assert found == code
    assert words in error
    assert "Traceback" not in error
    assert ("is complete" in error) == (name in ("forbidden", "license")) == (said.folder / name).is_dir()


def test_the_pushed_commit_is_the_folder(said: Said, hub: Any) -> None:
    code, out, error = said.answers["push"]
    assert code == 0, error
    assert f"{hub.address}/me/digits" in out
    folder = said.folder / "pushed"
    assert hub.commits == {"me/digits": {path.name: path.read_bytes() for path in folder.iterdir()}}
    assert hub.tokens == {"Bearer hf_secret"}
    card = hub.commits["me/digits"]["README.md"].decode()
    assert "license: mit" in card
    assert 'timm.create_model("hf-hub:me/digits", pretrained=True)' in card


def test_a_hub_out_of_reach(said: Said) -> None:
    away, kept = said.answers["away"], said.answers["kept"]
    assert away[0] == kept[0] == 1
    assert "someone/other: downloading needs the hub, which does not answer" in away[2]
    assert "me/digits: pushing failed" in kept[2]
    assert "hf upload me/digits kept" in kept[2]


def test_without_a_token_nothing_is_begun(
    tmp_path: Path, make_encoder: Make, saved: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "get_token", lambda: None)
    weights = saved(tmp_path / "weights", make_encoder())
    with pytest.raises(RunError, match="needs a token of the hub"):
        weights_commands.export(weights, tmp_path / "none", "timm", push="me/digits")
    assert not (tmp_path / "none").exists()
