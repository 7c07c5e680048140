"""Training on one CUDA GPU. Prints what it measured (`-s`). Tests may run side by side, except that of auto_batch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.gpu.runs import TRAIN, keys, run, ssl_vit, train
from tests.processes.reading import losses, same, saved, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
ROOT = Path(__file__).parents[2]
ALL = ("encoder", "objective", "optimizer")


def last_loss(run: Path) -> float:
    return losses(run)[-1][1]


def test_precisions_and_memory(pictures: Path, tmp_path: Path) -> None:
    """200 steps of ViT-S/16: the losses fall as in float32, and activation checkpointing takes less memory."""
    cases = [(precision, again) for precision in ("fp32", "tf32", "bf16", "fp16") for again in ("false", "true")]

    def peak(case: tuple[str, str]) -> int:
        more = (f"training.precision={case[0]}", f"training.checkpoint_activations={case[1]}")
        return train(*keys(pictures, tmp_path / "-".join(case), *more))

    with ThreadPoolExecutor(4) as pool:
        memory = dict(zip(cases, pool.map(peak, cases), strict=True))
    last = {case: last_loss(tmp_path / "-".join(case)) for case in cases}
    print("\nprecision, activation checkpointing, last loss, peak memory")
    for case in cases:
        print(f"{case[0]:5} {case[1]:6} {last[case]:8.4f} {memory[case] / 2**30:8.2f} GiB")
        assert last[case] < 0.8 * losses(tmp_path / "-".join(case))[0][1]
    for precision in ("tf32", "bf16", "fp16"):
        assert last[precision, "false"] == pytest.approx(last["fp32", "false"], rel=0.05)
        assert memory[precision, "true"] < 0.7 * memory[precision, "false"]


@pytest.mark.parametrize("more", [(), ("training.precision=bf16", "optim.name=sgd"), ("training.precision=fp16",)])
def test_fsdp2_exports_what_one_gpu_does(pictures: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    settings = ("--config_file", str(ROOT / "recipes" / "launch" / "fsdp2.yaml"), "--num_processes", "1")
    launch = ("-m", "accelerate.commands.launch", *settings, "--main_process_port", "0")
    more = ("training.precision=fp32", *more)
    run(*launch, "-m", "ssl_vit", "train", *keys(pictures, tmp_path / "sharded", *more))
    assert json.loads((tmp_path / "sharded" / "environment.json").read_text())["distribution"] == "FSDP"
    train(*keys(pictures, tmp_path / "plain", *more))
    assert last_loss(tmp_path / "sharded") == pytest.approx(last_loss(tmp_path / "plain"), rel=0.02)
    assert weights(tmp_path / "sharded").keys() == weights(tmp_path / "plain").keys()


RECIPES = ["pretrain_vit_tiny", "pretrain_vit_tiny_mae", "pretrain_vit_tiny_lejepa", "supervised_vit_tiny"]


@pytest.mark.parametrize("compiled", ["", "compiled"])
@pytest.mark.parametrize("recipe", RECIPES)
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

compiled, name, *keys = sys.argv[1:]
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
assert before == (dict(counters["stats"]), dict(counters["frames"]))
breaks = list(counters["graph_break"])  # LeJEPA draws its directions on the CPU
assert len(breaks) == ("lejepa" in name and bool(compiled)) and all("directions" in why for why in breaks), breaks
"""
    more = ["optim.clip_norm=1.0", "training.ema=0.9", "training.precision=bf16"]
    more += [f"data.augment.{name}=0.4" for name in ("brightness", "contrast", "saturation")]
    run("-c", program, compiled, *keys(pictures, tmp_path / "run", *more, recipe=recipe))


@pytest.mark.parametrize("recipe", ["pretrain_vit_tiny", "supervised_vit_tiny"])
def test_deterministic_runs_are_equal_and_resume_exactly(pictures: Path, tmp_path: Path, recipe: str) -> None:
    """Bit for bit, also after a kill."""
    more = ("training.deterministic=true", "training.precision=bf16", "training.checkpoint_every=40")
    one, other, killed = (tmp_path / name for name in ("one", "other", "killed"))
    for folder in (one, other):
        train(*keys(pictures, folder, *more, recipe=recipe))
    command = [sys.executable, "-c", TRAIN, *keys(pictures, killed, *more, recipe=recipe)]
    process, ends = subprocess.Popen(command, stdout=subprocess.DEVNULL), time.monotonic() + 300
    while saved(killed) < 80 and process.poll() is None and time.monotonic() < ends:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert 80 <= saved(killed) < 200
    train(*keys(pictures, killed, *more, recipe=recipe))
    for folder in (other, killed):
        assert same(weights(one, *ALL), weights(folder, *ALL))
        assert losses(one) == losses(folder)


def test_auto_batch_finds_micro_batches_that_fit(pictures: Path, tmp_path: Path) -> None:
    """2,048 images of 384 pixels need more memory than a GPU has: some 150 MB each. Needs the whole GPU."""
    more = ["encoder.name=vit_base_patch16_224", "encoder.image_size=384", "training.batch_size=2048", "data.lanes=64"]
    more += ["training.steps=2", "optim.warmup_steps=1", "data.workers=8", "training.precision=bf16"]
    shown = ssl_vit("train", *keys(pictures, tmp_path / "plain", *more), fails=True)
    assert "memory" in shown and "auto_batch" in shown and "Traceback" not in shown
    peak = train(*keys(pictures, tmp_path / "auto", *more, "training.auto_batch=true"))
    lines = (tmp_path / "auto" / "metrics.jsonl").read_text().splitlines()
    found = next(json.loads(line) for line in lines if "auto_batch" in line)
    print(f"\nauto_batch: micro-batches of {found['micro_batch']} images, peak memory {peak / 2**30:.1f} GiB")
    assert found["accumulate"] > 1 and losses(tmp_path / "auto")


def test_automatic_precision_is_bf16_where_it_is_faster(pictures: Path, tmp_path: Path) -> None:
    more = ("training.precision=auto", "training.batch_size=256", "training.steps=2", "optim.warmup_steps=1")
    shown = ssl_vit("train", *keys(pictures, tmp_path / "run", *more))
    seconds = dict(re.findall(r"(tf32|bf16) ([\d.]+) s", shown))
    faster = float(seconds["bf16"]) < 0.9 * float(seconds["tf32"])
    assert f"precision=auto: {'bf16' if faster else 'tf32'}" in shown


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_dry_run_estimates_the_memory(pictures: Path, tmp_path: Path, precision: str) -> None:
    more = (f"training.precision={precision}", "training.steps=20")
    peak = train(*keys(pictures, tmp_path / "run", *more)) / 2**20
    shown = json.loads(ssl_vit("train", *keys(pictures, tmp_path / "dry", *more), "--dry-run", "--json"))
    estimate = shown["weights_mib"] + shown["activations_mib"]
    print(f"\n{precision}: peak memory {peak:.0f} MiB, dry run {estimate:.0f} MiB")
    assert 0.6 * peak < estimate < 1.4 * peak
