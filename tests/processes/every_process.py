"""What every process of a small world does; `conftest.world` starts it with a scenario's name and arguments."""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

from ssl_vit import cli, execution, recipe
from ssl_vit import stage as builder
from ssl_vit.data import AugmentConfig, DataConfig
from ssl_vit.data.images import train_transform
from ssl_vit.data.order import LanePosition
from ssl_vit.data.samples import Preprocess
from ssl_vit.data.shards import open_shards
from ssl_vit.data.stream import train_source
from ssl_vit.evaluators import classifier
from ssl_vit.interfaces import RunError, StepOutput, UserError, is_main_process
from ssl_vit.objectives import masked_patch
from ssl_vit.training import checkpoint, distributed, loop, memory, signals
from ssl_vit.training.distributed import gather, make_accelerator

FSDP2 = Path(__file__).parents[2] / "recipes" / "launch" / "fsdp2.yaml"
TINY = ("encoder.width=32", "encoder.depth=2", "encoder.heads=2", "training.picture_every=0", "training.trackers={}")
STAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "pretraining": ("digits_ssl", ()),
    "masked_autoencoder": ("digits_ssl", ("objective.name=masked_autoencoder",)),
    "supervised": ("digits_supervised", ()),
    "fine_tuning": ("digits_supervised", ("objective.head=linear", "optim.name=sgd")),
}


def train(digits: str, run: Path, stage: str, *more: str) -> None:
    """20 steps of 48 of the 1,415 digits (two thirds of an epoch) in 12 lanes, every step logged."""
    name, keys = STAGES[stage]
    fixed = [f"data.train={digits}/train", f"run={run}", "data.lanes=12", "training.batch_size=48", "training.steps=20"]
    fixed += ["training.log_every=1", "training.checkpoint_every=0", "optim.lr=1e-3", "optim.warmup_steps=5"]
    execution.train(recipe.load_recipe(name, [*fixed, *TINY, *keys, *more]), quiet=True)


def same_training(digits: str, out: Path, first: Path, accumulate: int) -> None:
    """The stages, in so many micro-batches, into OUT/STAGE-ACCUMULATE; fine-tuning starts from FIRST."""
    for stage in STAGES:
        start = [f"init_from={first}"] if stage == "fine_tuning" else []
        train(digits, out / f"{stage}-{accumulate}", stage, f"training.accumulate={accumulate}", *start)


def sharding_accelerator(*arguments: Any, **options: Any) -> Any:
    """The engine with Accelerate's FSDP2, set as in the launch file; by itself it offers that on accelerators alone."""
    accelerator = make_accelerator(*arguments, **options)
    given = yaml.safe_load(FSDP2.read_text())["fsdp_config"]
    same = ("auto_wrap_policy", "reshard_after_forward", "cpu_ram_efficient_loading", "state_dict_type")
    keywords = {name: given[f"fsdp_{name}"] for name in same}
    keywords["transformer_cls_names_to_wrap"] = [given["fsdp_transformer_layer_cls_to_wrap"]]
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **keywords)
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState().distributed_type = DistributedType.FSDP  # which a later engine copies
    accelerator.state.fsdp_plugin, prepare = plugin, accelerator.prepare

    def checked(objective: Any, optimizer: torch.optim.Optimizer) -> Any:
        prepared = prepare(objective, optimizer)
        assert all(isinstance(parameter, DTensor) for parameter in prepared[0].parameters())
        assert isinstance(accelerator.no_sync(prepared[0]), nullcontext), "else each process keeps whole gradients"
        return prepared

    accelerator.prepare = checked
    return accelerator


SHARDED = (
    "training.accumulate=2",
    "training.ema=0.9",
    "training.checkpoint_every=12",
    "training.keep_last=9",
    "optim.lr=1e-4",
)


FINE_TUNE = (
    "labels_per_class=20",
    "seeds=[0]",
    "sweep={optim.lr: [0.01, 0.003]}",
    "training.steps=60",
    "augment.crop=center",
    "augment.flip=false",
    "training.batch_size=24",
    "optim.name=adamw",
)


def sharded(digits: str, out: Path) -> None:
    """A sharded run in OUT/sharded, fine-tuned; one resumed from its step 12, OUT/again; and one with a scaled loss."""
    execution.make_accelerator = sharding_accelerator
    train(digits, out / "sharded", "pretraining", *SHARDED)
    back_before(20, out / "sharded", out / "again")
    train(digits, out / "again", "pretraining", *SHARDED)
    evaluation = execution.evaluate(out / "sharded", "fine_tune", f"{digits}/train", f"{digits}/test", list(FINE_TUNE))
    if is_main_process():
        (out / "fine_tuned.json").write_text(json.dumps([row.accuracy for row in evaluation.results]))
    predict, means = classifier.predict, list[bool]()

    def seen(objective: Any, images: Any) -> Any:
        first, *others = gather(objective.head[0].running_mean.clone())
        means.append(bool(first.any()) and all(first.equal(other) for other in others))
        return predict(objective, images)

    classifier.predict = seen
    probe = ["method=lars", "training.epochs=2", "training.batch_size=32", "training.auto_batch=false"]
    execution.evaluate(
        out / "sharded", "linear_probe", f"{digits}/train", f"{digits}/test", [*probe, "labels_per_class=8"]
    )
    classifier.predict = predict
    if is_main_process():
        (out / "same_statistics.json").write_text(json.dumps(means))
    try:
        train(digits, out / "one_block", "pretraining", *SHARDED, "encoder.depth=1")
    except UserError as error:
        (out / "one_block.txt").write_text(str(error))
    scaler: Any = torch.amp.GradScaler
    torch.amp.GradScaler = lambda *_, **__: scaler("cpu")  # type: ignore[misc, assignment]  # as fp16 has on a GPU
    train(digits, out / "scaled", "pretraining", *SHARDED)


def sharded_on_three(digits: str, out: Path) -> None:
    """OUT/sharded, which two processes trained, resumes from its step 12 in OUT/three."""
    execution.make_accelerator = sharding_accelerator
    back_before(20, out / "sharded", out / "three")
    train(digits, out / "three", "pretraining", *SHARDED)


def back_before(step: int, run: Path, copy: Path) -> None:
    """A copy of a run as it was before it saved its checkpoint of this step; the main process makes it."""
    if is_main_process():
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns(f"step_{step:08d}"))
    distributed.gather(None)


def resumed(digits: str, out: str) -> None:
    """A run of 4 steps in OUT/whole; another resumes from its step 2 in OUT/again."""
    whole, again, keys = Path(out) / "whole", Path(out) / "again", ("training.steps=4", "training.checkpoint_every=2")
    train(digits, whole, "pretraining", *keys)
    back_before(4, whole, again)
    train(digits, again, "pretraining", *keys)


def two(digits: str, out: str, first: str) -> None:
    same_training(digits, Path(out) / "2", Path(first), 2)
    sharded(digits, Path(out))


def three(digits: str, out: str, first: str) -> None:
    same_training(digits, Path(out) / "3", Path(first), 1)
    sharded_on_three(digits, Path(out))


def outcome(action: Callable[[], Any]) -> str:
    """How a call ends, in words: of an error, its kind, whether every process raises it, and its message."""
    try:
        action()
    except (UserError, RunError) as error:
        return f"{type(error).__name__} everywhere={error.everywhere} {error}"
    return "done"


def errors_of_one(digits: str, out: str, bad: str) -> None:
    """What happens to each process when one alone has an error: the main one at the start, at a checkpoint, and at
    last the other one, which reads a bad sample from the shards BAD."""
    folder = Path(out)
    if is_main_process():
        (folder / "occupied").mkdir()
        (folder / "occupied" / "thesis.tex").write_text("mine")
    print("occupied:", outcome(lambda: train(digits, folder / "occupied", "pretraining")), flush=True)
    save = checkpoint.flush

    def full(path: Path) -> None:
        if "step_00000012" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(path)

    checkpoint.flush = full
    keys = ("training.checkpoint_every=4", "training.keep_last=9")
    print("full:", outcome(lambda: train(digits, folder / "full", "pretraining", *keys)), flush=True)
    checkpoint.flush = save
    keys = ("data.on_bad_sample=fail", "training.checkpoint_every=1")
    print("bad:", outcome(lambda: train(bad, folder / "bad", "pretraining", *keys)), flush=True)
    os._exit(0)


def uneven(shards: str, workers: str, lanes: str, batch_size: str, steps: str) -> None:
    """The main process reports how often samples come: the least and the most often seen one, and all together."""
    accelerator = make_accelerator()
    found = open_shards(shards)
    data = DataConfig(train=shards, lanes=int(lanes), workers=int(workers))
    preprocess = Preprocess(train_transform(8, AugmentConfig(crop="center")), 1, 10)
    where = {"rank": accelerator.process_index, "ranks": accelerator.num_processes, "device": accelerator.device}
    source = train_source(found, preprocess, data, batch_size=int(batch_size), **where)
    counts = torch.zeros(found.samples, dtype=torch.int64)
    batches = source([LanePosition()] * int(lanes))
    for _ in range(int(steps)):  # every process must come to every step, or this waits
        counts += distributed.total(torch.bincount(next(batches)[0].indices, minlength=found.samples))
    if accelerator.is_main_process:
        print(counts.min().item(), counts.max().item(), counts.sum().item(), flush=True)


def bad_loss(digits: str, run: str) -> None:
    """The loss of step 8 is not finite on the last process alone."""
    make_accelerator()
    forward, seen = masked_patch.Objective.forward, [0]
    last = distributed.rank() == torch.distributed.get_world_size() - 1

    def spoiled(self: Any, batch: Any) -> StepOutput:
        output = forward(self, batch)
        if last and self.training and batch.images.device.type != "meta":  # where operations are only counted
            seen[0] += 1
            output.loss = output.loss * (math.nan if seen[0] == 8 else 1)
        return output

    masked_patch.Objective.forward = spoiled  # type: ignore[method-assign]
    print("stop:", outcome(lambda: train(digits, Path(run), "pretraining")), flush=True)


def statistics(digits: str, run: str) -> None:
    """A batch norm's running statistics on each process, before and after they are shared at the end of training."""
    share = loop.Trainer.share_buffers

    def told(self: loop.Trainer) -> None:
        print("own:", sum(float(buffer.sum()) for buffer in self.objective.buffers()), flush=True)
        share(self)
        print("shared:", sum(float(buffer.sum()) for buffer in self.objective.buffers()), flush=True)

    loop.Trainer.share_buffers = told  # type: ignore[method-assign]
    train(digits, Path(run), "supervised", "objective.head=probe", "training.steps=3")


def auto_batch(digits: str, run: str, *keys: str) -> None:
    """The last process may map 100 MB more than it has mapped when the search begins: a real refusal by the kernel."""
    search = memory.find_accumulation

    def limited(*arguments: Any, **options: Any) -> int:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        last = not distributed.several() or distributed.rank() == torch.distributed.get_world_size() - 1
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (100 << 20) if last else soft, hard))
        try:
            return search(*arguments, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    memory.find_accumulation = limited
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # it has other words for a refusal
    train(digits, Path(run), "pretraining", "training.auto_batch=true", *keys)


def disk(digits: str, out: str) -> None:
    """Fill, remount read-only and enlarge a real small disk, in a mount namespace of this process."""
    run, keys = Path(out) / "run", ("training.checkpoint_every=2", "training.keep_last=99")
    assert ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS

    def mount(*options: str) -> None:
        subprocess.run(["mount", *options], check=True)

    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", out)
    print("full:", outcome(lambda: train(digits, run, "pretraining", *keys)), flush=True)
    print("left:", *sorted(path.name for path in (run / "checkpoints").iterdir()), flush=True)
    mount("-o", "remount,ro", out)
    print("read-only:", outcome(lambda: train(digits, run, "pretraining", *keys)), flush=True)
    mount("-o", "remount,rw,size=99m", out)
    print("fixed:", outcome(lambda: train(digits, run, "pretraining", *keys)), flush=True)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    print("steps:", *steps, flush=True)


def command_line(*arguments: str) -> None:
    """`ssl-vit ARGUMENTS`."""
    sys.argv = ["ssl-vit", *arguments]
    cli.main()


def own_folder(folder: str, *arguments: str) -> None:
    """`ssl-vit ARGUMENTS` in FOLDER/RANK."""
    os.chdir(Path(folder) / os.environ["RANK"])
    command_line(*arguments)


def signaled(number: str, rank: str, step: str, *arguments: str) -> None:
    """`ssl-vit ARGUMENTS`; process RANK and its loader workers get a signal when it has saved step STEP."""
    save = checkpoint.save

    def told(*state: Any) -> Path:
        folder = save(*state)
        if folder.name == f"step_{int(step):08d}" and os.environ.get("RANK", "0") == rank:
            os.killpg(os.getpid(), int(number))
        return folder

    checkpoint.save = told  # type: ignore[assignment]
    command_line(*arguments)


def stalled(step: str, *arguments: str) -> None:
    """`ssl-vit ARGUMENTS`; after STEP steps no sample comes any more, and the process gets SIGTERM."""
    source = builder.train_source

    def stalling(*given: Any, **options: Any) -> Any:
        batches = source(*given, **options)

        def found(positions: Any) -> Any:
            yield from itertools.islice(batches(positions), int(step))
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(100)

        return found

    builder.train_source = stalling
    signals._GRACE_SECONDS = 0.2
    command_line(*arguments)


def main(output: str, environment: dict[str, str], arguments: list[str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    torch.set_num_threads(1)
    globals()[arguments[0]](*arguments[1:])


if __name__ == "__main__":
    main(globals()["output"], globals()["environment"], globals()["arguments"])
