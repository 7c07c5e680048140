"""On one CUDA GPU: `pytest -m gpu -s tests/gpu`. Not run by the suite; it prints the table of what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from tests.tars import packed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
FSDP2 = Path(__file__).parents[2] / "recipes" / "launch" / "fsdp2.yaml"
STEPS = 200


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """512 pictures of 224 px: colored squares on noise, so that there is something to learn."""
    folder, dice = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for number in range(512):
        pixels = dice.integers(0, 40, (224, 224, 3), dtype=np.uint8)
        y, x = dice.integers(0, 160, 2)
        pixels[y : y + 64, x : x + 64] = dice.integers(60, 256, 3)
        target = folder / "source" / str(number % 2) / f"{number}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(target, quality=90)
    packed(folder / "source", folder / "shards", shards=4)
    return folder / "shards"


def keys(pictures: Path, run: Path, *more: str) -> list[str]:
    fixed = [f"data.train={pictures}", f"run={run}", "encoder.name=vit_small_patch16_224", "encoder.image_size=224"]
    fixed += ["data.lanes=8", "data.workers=4", "training.batch_size=64", f"training.steps={STEPS}"]
    fixed += ["training.log_every=20"]
    fixed += ["training.picture_every=0", "training.checkpoint_every=100", "optim.warmup_steps=20", "optim.lr=5e-4"]
    return ["pretrain_vit_tiny", *fixed, "training.trackers={}", "training.epochs=null", *more]


def train(pictures: Path, run: Path, *more: str, launcher: tuple[str, ...] = ()) -> str:
    """In a process of its own, which reports the most memory it had allocated, in bytes, as its last line."""
    program = "import sys; from ssl_vit import recipe, api; import torch; name, *keys = sys.argv[1:]; "
    program += "api.train(recipe.load_recipe(name, keys), quiet=True); print(torch.cuda.max_memory_allocated())"
    command = [sys.executable, *launcher, *(("-m", "ssl_vit", "train") if launcher else ("-c", program))]
    command += keys(pictures, run, *more)
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def weights(run: Path) -> dict[str, torch.Tensor]:
    with safe_open(run / "encoder.safetensors", "pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118


def test_precisions_and_memory(pictures: Path, tmp_path: Path) -> None:
    """200 steps of ViT-S/16: the losses fall as in float32, and activation checkpointing takes less memory."""
    rows, last, memory = [], {}, {}
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        for again in ("false", "true"):
            run = tmp_path / f"{precision}-{again}"
            more = (f"training.precision={precision}", f"training.checkpoint_activations={again}")
            memory[precision, again] = int(train(pictures, run, *more).split()[-1])
            found = losses(run)
            assert found[-1] < 0.8 * found[0]
            last[precision, again] = found[-1]
            rows.append(f"{precision:5} {again:6} {found[-1]:8.4f} {memory[precision, again] / 2**30:8.2f} GiB")
    print("\nprecision, activation checkpointing, last loss, peak memory\n" + "\n".join(rows))
    for precision in ("tf32", "bf16", "fp16"):
        assert last[precision, "false"] == pytest.approx(last["fp32", "false"], rel=0.05)
        assert memory[precision, "true"] < 0.7 * memory[precision, "false"]


@pytest.mark.parametrize("more", [(), ("training.precision=bf16", "optim.name=sgd"), ("training.precision=fp16",)])
def test_fsdp2_exports_what_one_gpu_does(pictures: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    launcher = ("-m", "accelerate.commands.launch", "--config_file", str(FSDP2), "--num_processes", "1")
    train(pictures, tmp_path / "sharded", *more, launcher=launcher)
    assert json.loads((tmp_path / "sharded" / "environment.json").read_text())["distribution"] == "FSDP"
    train(pictures, tmp_path / "plain", *more)
    assert losses(tmp_path / "sharded") == pytest.approx(losses(tmp_path / "plain"), rel=0.02)
    assert weights(tmp_path / "sharded").keys() == weights(tmp_path / "plain").keys()


@pytest.mark.parametrize("compiled", ["", "compiled"])
@pytest.mark.parametrize("recipe", ["pretrain_vit_tiny", "supervised_vit_tiny"])
def test_a_step_waits_for_nothing_and_compiles_once(pictures: Path, tmp_path: Path, recipe: str, compiled: str) -> None:
    """Ten steps of the real loop under CUDA's sync debug mode, after two that compile."""
    program = """
import sys, torch
from torch._dynamo.utils import counters
from ssl_vit import stage
from ssl_vit.data.shards import open_training
from ssl_vit.data.order import LanePosition
from ssl_vit.recipe import load_recipe
from ssl_vit.training.distributed import make_accelerator
from ssl_vit.training.loop import Trainer

name, compiled, *keys = sys.argv[1:]
settings = load_recipe(name, [*keys, f"training.compile={bool(compiled)}"])
accelerator = make_accelerator("bf16")
job = stage.build(settings, open_training(settings.data), accelerator, quiet=True)
batches = job.batches([LanePosition()] * job.lanes)
trainer = Trainer(job)
for step in range(12):
    batch, _ = next(batches)
    if step == 2:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        before = dict(counters["stats"]), dict(counters["frames"])
    trainer.train_step(batch)
    trainer.progress.step += 1
torch.cuda.set_sync_debug_mode("default")
assert before == (dict(counters["stats"]), dict(counters["frames"])) and not counters["graph_break"]
"""
    jitter = ("data.augment.brightness=0.4", "data.augment.contrast=0.4", "data.augment.saturation=0.4")
    keys_of_run = keys(pictures, tmp_path / "run", "optim.clip_norm=1.0", "training.ema=0.9", *jitter)[1:]
    command = [sys.executable, "-c", program, recipe, compiled, *keys_of_run]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
