"""Run directories: what a refused, a finished and a resumed training leave in them."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from accelerate import Accelerator

import ssl_vit
from ssl_vit import execution, recipe, runs
from ssl_vit.analysis import figures
from ssl_vit.evaluators.online import OnlineProbe
from ssl_vit.interfaces import RunError, Stopped, UserError
from ssl_vit.models import factory
from ssl_vit.records import SkippedSample
from ssl_vit.training import checkpoint, loop
from ssl_vit.training.callbacks import Dropped
from ssl_vit.training.logging import RunLogger
from ssl_vit.training.loop import Trainer
from ssl_vit.training.signals import StopRequest

Train = Callable[..., Path]
PROBE = ("probe.images=20", "probe.labels_per_class=1")


def environment(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "environment.json").read_text()))


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def files(run: Path) -> dict[str, tuple[int, bytes]]:
    """When each file was written, and its content; but for the recipe, whose data may lie elsewhere now."""
    found = [path for path in run.rglob("*") if path.is_file() and path.name not in ("recipe.yaml", ".lock")]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let a SIGTERM be agreed on at one step of the trainings that follow."""

    def install(step: int) -> None:
        steps = iter(range(1, step + 1))
        monkeypatch.setattr(StopRequest, "agreed", lambda self: signal.SIGTERM if next(steps, 0) == step else 0)

    return install


def test_a_refused_start_leaves_nothing_in_the_way(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"data\.lanes"):
        train(tmp_path / "run", "data.lanes=5")
    assert not (tmp_path / "run").exists()

    def too_large(self: Trainer, *arguments: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Trainer, "train_step", too_large)
        train(tmp_path / "run", "encoder.depth=3")
    assert (tmp_path / "run" / "recipe.yaml").exists()
    train(tmp_path / "run")
    with pytest.raises(UserError, match=r"another recipe \(encoder.depth: 2 -> 3\)"):
        train(tmp_path / "run", "encoder.depth=3")


def test_a_recipe_in_a_folder_of_other_files_is_not_replaced(train: Train, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text("# by hand\nbase: digits_ssl\nname: mine\n")
    with pytest.raises(UserError, match="mine is not empty and holds no run"):
        train(tmp_path / "mine")
    assert (tmp_path / "mine" / "recipe.yaml").read_text().startswith("# by hand")
    assert len([*(tmp_path / "mine").iterdir()]) == 1


def test_a_finished_run_stays_as_it_is(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("probe.every=12", *PROBE, "training.trackers={tensorboard: {}}")
    before = files(train(tmp_path / "run", *keys))
    monkeypatch.setattr(runs, "environment", lambda accelerator: {"git": "another"})
    monkeypatch.setattr(loop, "train", None)
    assert files(train(tmp_path / "run", *keys)) == before
    execution.train(recipe.load_recipe(tmp_path / "run"))
    assert "nothing to train" in capsys.readouterr().out


@pytest.mark.parametrize("lost", ["encoder.safetensors", "config.json"])
def test_a_finished_run_gets_its_encoder_back(train: Train, tmp_path: Path, lost: str) -> None:
    file = train(tmp_path / "run", "training.steps=2") / lost
    before = file.read_bytes()
    for damaged in (before[:-1], None):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        train(tmp_path / "run", "training.steps=2")
        assert file.read_bytes() == before


def test_a_variable_rank_without_a_world_is_no_rank(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")  # of a job array
    assert saved(train(tmp_path / "run", "training.steps=2")) == ["step_00000002"]


def test_a_full_disk_names_the_log(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = RunLogger.begin

    def on_a_full_disk(self: RunLogger, *arguments: Any) -> None:
        begin(self, *arguments)
        self.file = Path("/dev/full").open("ab")

    monkeypatch.setattr(RunLogger, "begin", on_a_full_disk)
    with pytest.raises(RunError, match=r"metrics\.jsonl: cannot write.*No space left"):
        train(tmp_path / "run")


@pytest.mark.parametrize(
    ("place", "name", "named"),
    [(checkpoint, "publish_encoder", "run: cannot write the encoder"), (figures, "save_png", "picture")],
)
def test_a_full_disk_is_named_and_the_run_can_resume(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, named: str
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    keys = ("training.steps=2", "training.picture_every=2")
    with monkeypatch.context() as patch, pytest.raises(RunError, match=f"{named}.*No space left on device"):
        patch.setattr(place, name, full)
        train(tmp_path / "run", *keys)
    train(tmp_path / "run", *keys)


def test_a_resumed_run_lists_the_environments_of_all_sessions(
    train: Train, tmp_path: Path, stop_at: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(3)
    with pytest.raises(Stopped):
        train(tmp_path / "run")
    first = environment(tmp_path / "run")
    for session in (2, 3):
        monkeypatch.setattr(runs, "environment", lambda accelerator, number=session: {"git": number})
        stop_at(3)
        with pytest.raises(Stopped):
            train(tmp_path / "run")
    assert environment(tmp_path / "run") == {"git": 3, "before": [first, {"git": 2}]}


def test_a_stop_saves_before_a_probe_which_the_next_session_does(
    train: Train, tmp_path: Path, stop_at: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without the stop, every probe is done once; also one whose line was written, but no checkpoint after it."""
    keys = ["probe.every=2", *PROBE, "training.checkpoint_every=4"]
    told: list[str] = []
    save = checkpoint.save

    def saving(run: Path, step: int, state: Any, *more: Any) -> Path:
        told.append(f"saved {step}, probed {state.parts['probe'].state_dict()['step']}")
        return save(run, step, state, *more)

    monkeypatch.setattr(checkpoint, "save", saving)
    expected = (train(tmp_path / "whole", *keys) / "metrics.jsonl").read_text().splitlines()
    assert told == ["saved 4, probed 2", "saved 8, probed 6", "saved 12, probed 10"]
    told.clear()
    stop_at(6)
    with pytest.raises(Stopped):
        train(tmp_path / "run", *keys)
    assert told == ["saved 4, probed 2", "saved 6, probed 4"]
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "probe_accuracy": 0.5, "probe_best": 0.5}\n{"step": 7, "lo')
    train(tmp_path / "run", *keys)
    found = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()

    def numbers(lines: list[str]) -> list[dict[str, float]]:
        names = ("step", "loss", "probe_accuracy", "probe_best")
        return [{name: row[name] for name in names if name in row} for row in map(json.loads, lines)]

    assert numbers(found) == numbers(expected)


@pytest.mark.parametrize("positions", ["learned_2d", "relative", "none"])
def test_a_run_with_any_positions_resumes(
    train: Train, tmp_path: Path, stop_at: Callable[[int], None], positions: str
) -> None:
    """Bit for bit, with averaged weights and dropped patches."""
    keys = ("objective.name=masked_autoencoder", f"encoder.positions={positions}", "training.ema=0.9")
    train(tmp_path / "whole", *keys)
    stop_at(6)
    with pytest.raises(Stopped):
        train(tmp_path / "run", *keys)
    stop_at(99)
    train(tmp_path / "run", *keys)
    assert saved(tmp_path / "run")[-1] == "step_00000012"
    for file in ("encoder", "training", "optimizer"):
        name = f"checkpoints/step_00000012/{file}.safetensors"
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_finished_run_without_its_checkpoints_stays_as_it_is(train: Train, few_digits: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    before = files(run)
    train(run)
    assert files(run) == before
    with pytest.raises(UserError, match="trained on other shards"):
        train(run, f"data.train={few_digits}/train")
    (run / "summary.json").write_text("{")
    train(run)
    (run / "encoder.safetensors").unlink()
    with pytest.raises(UserError, match="checkpoints are gone"):
        train(run)
    assert (run / "metrics.jsonl").read_bytes() == before[str(run / "metrics.jsonl")][1]


@pytest.mark.parametrize(
    ("objective", "pooling"), [("masked_patch", "mean"), ("classification", "token"), ("lejepa", "mean")]
)
def test_timm_and_load_return_the_vector_that_was_trained(
    train: Train, tmp_path: Path, objective: str, pooling: str
) -> None:
    own = () if objective == "masked_patch" else (f"objective.name={objective}", f"objective.pooling={pooling}")
    own += ("data.evaluation_resize=1.25", *(("data.views=2",) if objective == "lejepa" else ()))
    run = train(tmp_path / "run", *own)
    about = timm.data.resolve_data_config(model=timm.create_model(f"local-dir:{run}", pretrained=True))
    side = about["input_size"][1]
    assert math.floor(side / about["crop_pct"]) == 1.25 * side, "timm prepares images as the run evaluates"
    images = torch.randn(2, 1, 8, 8)
    networks: list[Any] = [timm.create_model(f"local-dir:{run}", pretrained=True).eval(), ssl_vit.load(run)]
    for network in networks:
        with torch.no_grad():
            tokens, vector = network.forward_features(images), network(images)
        torch.testing.assert_close(vector, tokens[:, 0] if pooling == "token" else tokens[:, 1:].mean(1))
    encoders = factory.load(run), factory.build(recipe.load_recipe(run / "recipe.yaml").encoder)
    torch.testing.assert_close(*(factory.fresh(encoder, 0).state_dict() for encoder in encoders), rtol=0, atol=0)


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_finished_run_with_damaged_records_is_finished_again(train: Train, tmp_path: Path, content: str) -> None:
    run = train(tmp_path / "run", "training.checkpoint_every=6")
    encoder = (run / "encoder.safetensors").read_bytes()
    for damaged in ("summary.json", "checkpoints/step_00000012/state.json"):
        (run / damaged).write_text(content)
        train(run, "training.checkpoint_every=6")
        assert json.loads((run / "summary.json").read_bytes())["steps"] == 12
        assert (run / "encoder.safetensors").read_bytes() == encoder


def test_a_kill_between_the_last_save_and_the_last_probe_loses_nothing(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["probe.every=12", *PROBE]

    def killed(*_: object) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(OnlineProbe, "accuracy", killed)
        train(tmp_path / "run", *keys)
    (tmp_path / "run" / "checkpoints" / ".step_00000004.tmp" / "optimizer").mkdir(parents=True)  # of another kill
    monkeypatch.setattr(Trainer, "train_step", None)  # no step may be done again
    train(tmp_path / "run", *keys)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "probe_accuracy" in row] == [12]
    assert saved(tmp_path / "run") == ["step_00000012"]


def test_a_signal_while_memory_is_freed_is_not_lost(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = Accelerator.free_memory

    def signaled(self: Accelerator, *objects: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return free(self, *objects)

    monkeypatch.setattr(Accelerator, "free_memory", signaled)
    with pytest.raises(Stopped):
        train(tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").exists()


def test_too_little_memory_is_named(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Trainer, batch: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr(Trainer, "train_step", full)
    with pytest.raises(
        RunError, match=r"allocate 2 GiB\); .*training.auto_batch=true(.|\n)*last good checkpoint: none"
    ):
        train(tmp_path / "run")


def test_a_log_that_was_moved_away_stops_no_training(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.train_step

    def moved(self: Trainer, batch: Any) -> Any:
        (tmp_path / "run" / "metrics.jsonl").unlink(missing_ok=True)
        return step(self, batch)

    monkeypatch.setattr(Trainer, "train_step", moved)
    train(tmp_path / "run", "training.checkpoint_every=4")
    assert saved(tmp_path / "run")[-1] == "step_00000012"


def test_a_probe_that_cannot_decide_or_read_is_refused_at_the_start(
    settings: Callable[..., Any], tmp_path: Path
) -> None:
    keys = ["probe.every=2", *PROBE]
    with pytest.raises(UserError, match=r"probe\.patience: .* set probe\.data"):
        execution.train(settings(tmp_path / "run", *keys, "probe.patience=2", name="digits_supervised"), quiet=True)
    with pytest.raises(UserError, match="class token"):
        execution.train(
            settings(tmp_path / "run", *keys, "probe.pooling=token", "encoder.class_token=false"), quiet=True
        )


def test_torch_compile_by_the_launcher_is_refused(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(UserError, match=r"training\.compile=true"):
        train(tmp_path / "run")


def test_the_launchers_precision_is_not_ignored_without_a_word(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    train(tmp_path / "run", "training.precision=fp32")
    assert "mixed_precision=bf16 is ignored: training.precision is fp32" in capsys.readouterr().err


def test_a_run_resumes_with_the_weights_that_it_started_from(train: Train, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    for number in (1, 2):
        train(tmp_path / f"first{number}", f"seed={number}")
    shutil.copytree(tmp_path / "first1", weights)
    keys = f"init_from={weights}", "optim.lr=1e-3"
    train(tmp_path / "run", *keys)
    train(tmp_path / "run", *keys)
    train(tmp_path / "run", f"init_from={tmp_path / 'first1'}", keys[1])  # the same weights
    for name in ("encoder.safetensors", "config.json"):
        shutil.copy(tmp_path / "first2" / name, weights)
    for other in (keys, keys[1:]):
        with pytest.raises(UserError, match=r"other weights than .*weights names|init_from is not set"):
            train(tmp_path / "run", *other)
    train(tmp_path / "plain", keys[1])
    with pytest.raises(UserError, match="other weights than"):
        train(tmp_path / "plain", *keys)


def test_a_run_of_another_version_of_an_objective_is_refused(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "an_own_objective.py"
    module = "from ssl_vit.objectives import masked_patch\nclass Config(masked_patch.Config):\n    name: str\n"
    file.write_text(f"{module}class Objective(masked_patch.Objective): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    run, key = tmp_path / "run", "objective.name=an_own_objective:Objective"
    train(run, key)
    train(run, key)
    file.write_text(f"{module}class Objective(masked_patch.Objective): ...  # other\n")
    with pytest.raises(UserError, match="another version of an_own_objective:Objective"):
        train(run, key)


def test_a_checkpoint_that_was_evaluated_is_kept(train: Train, tmp_path: Path, stop_at: Callable[[int], None]) -> None:
    keys, run = ("training.checkpoint_every=2", "training.keep_last=1"), tmp_path / "run"
    stop_at(4)
    with pytest.raises(Stopped):
        train(run, *keys)
    assert saved(run) == ["step_00000004"]
    (run / "checkpoints" / "step_00000004" / checkpoint.RESULTS).mkdir()
    (half := run / "checkpoints" / "step_00000002").mkdir()  # a kill came while it was deleted
    (half / checkpoint.OPTIMIZER).write_bytes(b"0")
    train(run, *keys)
    assert saved(run) == ["step_00000004", "step_00000012"]


def test_the_same_shards_under_another_name_resume(train: Train, digits: Path, tmp_path: Path) -> None:
    run = train(tmp_path / "run")
    shutil.copytree(digits, tmp_path / "copied")
    assert train(tmp_path / "run", f"data.train={tmp_path}/copied") == run
    other = tmp_path / "copied" / "info.json"
    other.write_text(re.sub(r'"sha256": "\w+"', f'"sha256": "{"0" * 64}"', other.read_text(), count=1))
    before = (run / "recipe.yaml").read_bytes()
    assert str(tmp_path / "copied").encode() in before
    with pytest.raises(UserError, match="trained on other shards"):
        train(tmp_path / "run", f"data.train={tmp_path}/copied", "training.keep_last=7")
    assert (run / "recipe.yaml").read_bytes() == before


def test_a_run_shorter_than_its_warm_up_says_so(
    settings: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    execution.train(settings(tmp_path / "second", "training.steps=5"), quiet=False)
    captured = capsys.readouterr()
    assert "note" not in captured.err
    assert "second  1/5  loss " in captured.out + captured.err, "two runs of one recipe may print side by side"
    execution.train(settings(tmp_path / "short", "training.steps=4"), quiet=False)
    note = "note: optim.warmup_steps=5 exceeds the 4 steps of the run; lower it, or train longer"
    assert note in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_a_checkpoint_does_not_know_keeps_its_own_seed(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    keys = ("training.checkpoint_every=4", "training.keep_last=3", "encoder.dropout=0.1")
    train(tmp_path / "run", *keys)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000012")
    load, states = checkpoint.load, list[torch.Tensor]()

    def loaded(folder: Path, state: checkpoint.State) -> None:
        states.append(torch.get_rng_state())
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.distributed, "rank", lambda: rank)
            load(folder, state)
        states.append(torch.get_rng_state())

    monkeypatch.setattr(checkpoint, "load", loaded)
    train(tmp_path / "run", *keys)
    assert torch.equal(*states) == (rank == 1), "one process saved; the second has the generator that it started with"


def test_images_that_could_not_be_packed_are_counted_once_however_often_a_run_resumes() -> None:
    sample = SkippedSample(shard="images", key="cut.png", reason="cut")
    for step, counted in ((0, [sample]), (4, [])):
        trainer: Any = SimpleNamespace(progress=SimpleNamespace(step=step), skips=[])
        Dropped([sample]).start(trainer)
        assert trainer.skips == counted
