"""Runs tasks that depend on each other: in this process, in local processes (loky), or on a dask cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from loky import ProcessPoolExecutor, cpu_count

from ssl_vit.data.packing.parallel import end_with
from ssl_vit.interfaces import RunError, Stopped, UserError, world_size
from ssl_vit.progress import Say
from ssl_vit.records import TaskRecord

Do = Callable[[TaskRecord], None]
_SECONDS_TO_CONNECT = 20
_SECONDS_TO_SAVE = 60  # after which a process that was asked to stop is killed


@dataclass
class _Workers:
    """Executors for tasks.

    free: one executor for each task that may run at the same time.
    new: creates an executor in place of the one that broke.
    killed: the exception of a task whose process was killed.
    """

    free: list[Executor]
    new: Callable[[Executor], Executor]
    killed: type[Exception] = BrokenExecutor


def run(tasks: Sequence[TaskRecord], do: Do, *, jobs: int = 1, scheduler: str | None = None, say: Say = print) -> None:
    """Run every task after those that it needs.

    tasks: in the order in which to start them, each after the ones that it needs. Needed tasks that are not in the list
        are done already.
    do: runs one task.
    jobs: number of local processes (1: this process). scheduler: address of a dask scheduler to use instead.
    say: prints finished tasks and an estimate of the remaining time.

    A task that fails, or whose process is killed, stops only those that need it; at the end RunError or UserError names
    it. Any other exception stops all local tasks at once, as signals do: trainings that run save a checkpoint first.
    Tasks on dask workers run to their end.
    """
    waiting, running = list(tasks), dict[Future[None], tuple[TaskRecord, Executor, float]]()
    took, errors, blocked = list[tuple[TaskRecord, float]](), list[Exception](), set[str]()
    start, here = time.monotonic(), _Workers([_Here()], lambda broken: broken)
    with _dask(scheduler) if scheduler else _processes(jobs) if jobs > 1 else nullcontext(here) as workers:
        slots = len(workers.free)
        while waiting or running:
            unfinished = {task.id for task in [*waiting, *(task for task, *_ in running.values())]}
            for task in [task for task in waiting if not unfinished.intersection(task.after)][: len(workers.free)]:
                waiting.remove(task)
                worker, begun = workers.free.pop(), time.monotonic()  # in this process `submit` does the task
                try:
                    future = worker.submit(do, task)
                except workers.killed:  # while it had nothing to do
                    worker = workers.new(worker)
                    future = worker.submit(do, task)
                running[future] = task, worker, begun
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task, worker, begun = running.pop(future)
                error = future.exception()
                workers.free.append(workers.new(worker) if isinstance(error, workers.killed) else worker)
                if error is None:
                    took.append((task, time.monotonic() - begun))
                    left = _left([*waiting, *(task for task, *_ in running.values())], took, slots)
                    spent = timedelta(seconds=round(time.monotonic() - start))
                    say(f"[{len(took)}/{len(tasks)}] {task.id}  ({spent}{left})")
                    continue
                if isinstance(error, workers.killed):
                    error = RunError("its process was killed, often for lack of memory; lower jobs or data.cache_mb")
                if not isinstance(error, UserError | RunError) or world_size() > 1:
                    raise error
                errors.append(type(error)(f"{task.id}: {error}"))
                say(f"failed  {errors[-1]}")
                blocked.add(task.id)
                for other in [*waiting]:
                    if blocked.intersection(other.after):
                        waiting.remove(other)
                        blocked.add(other.id)
    if errors:
        others = f"\n{len(blocked)} of {len(tasks)} tasks are not done; run the same command again" * (len(tasks) > 1)
        raise type(errors[0])(f"{errors[0]}{others}")


def _left(tasks: Sequence[TaskRecord], took: Sequence[tuple[TaskRecord, float]], slots: int) -> str:
    """Estimate of the remaining time, as text. A task is expected to take as long as finished tasks of its kind did on
    average. If some tasks have none of their kind, it is a lower bound; if all have none, there is no estimate.

    Tasks of less than a second do not count: a sweep leaves its winner, whose task then has nothing to do.
    """
    seconds, unknown = 0.0, 0
    long = [(done, spent) for done, spent in took if spent >= 1]
    for task in tasks:
        alike = [spent for done, spent in long if (done.kind, done.evaluator) == (task.kind, task.evaluator)]
        seconds += fmean(alike or [0.0])
        unknown += not alike
    if unknown == len(tasks):
        return ""
    return f", {'more than' if unknown else 'about'} {timedelta(seconds=round(seconds / slots))} left"


class _Here(Executor):
    """Runs each task at once, in this thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except (UserError, RunError) as error:
            traceback.clear_frames(error.__traceback__)  # they hold the failed task's model and loader processes
            future.set_exception(error.with_traceback(None))
        except Exception as error:
            future.set_exception(error)
        return future


class _Process(ProcessPoolExecutor):
    """One local process. Each is a pool of its own: one that is killed breaks no other."""

    def __init__(self, environment: dict[str, str]) -> None:
        super().__init__(1, initializer=end_with, initargs=(os.getpid(),), env=environment)
        self.environment = environment

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = super().submit(_do_in_process, fn, *args, **kwargs)
        return future


@contextmanager
def _processes(jobs: int) -> Iterator[_Workers]:
    others, gpus = set(multiprocessing.active_children()), visible_gpus()
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cpu_count() // jobs))
    pools: list[_Process] = []
    # loky replaces a process that grew by 300 MB since its first task. Tasks of another kind import more modules.
    warnings.filterwarnings("ignore", "A worker was restarted", UserWarning)

    def start(environment: dict[str, str]) -> _Process:
        pools.append(_Process({"OMP_NUM_THREADS": threads, **environment}))
        return pools[-1]

    def again(broken: Executor) -> _Process:
        assert isinstance(broken, _Process)
        return start(broken.environment)  # on the same GPU

    turns = [{"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {} for number in range(jobs)]

    try:
        yield _Workers([start(environment) for environment in turns], again)
    finally:
        started = set(multiprocessing.active_children()) - others
        for process in started:
            process.terminate()
        for process in started:
            process.join(_SECONDS_TO_SAVE)
        for pool in pools:
            pool.shutdown(kill_workers=True)


def visible_gpus() -> list[str]:
    """Names of the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    import torch  # workers import this module, and their tasks may not need it

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]


def _do_in_process(do: Do, task: TaskRecord) -> None:
    try:
        do(task)
    except Stopped:  # a training has saved: end by the signal that stopped it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _dask(scheduler: str) -> Iterator[_Workers]:
    try:
        from distributed import Client, KilledWorker
    except ImportError:
        raise UserError("scheduler: dask is not installed; run `pip install 'ssl-vit[cluster]'`") from None
    try:
        client = Client(scheduler, set_as_default=False, timeout=_SECONDS_TO_CONNECT)
    except (OSError, ValueError) as error:
        raise UserError(f"scheduler={scheduler}: no dask scheduler answers there ({error})") from None
    with client:
        threads = client.nthreads()
        daemons = client.run(_is_daemon)
        if not threads or max(threads.values()) > 1 or any(daemons.values()):
            raise UserError(
                f"scheduler={scheduler}: {len(threads)} workers; start them with one thread each, and so that they may "
                f"start loader processes: DASK_DISTRIBUTED__WORKER__DAEMON=False dask worker {scheduler} --nthreads 1"
            )
        here, inode = _working_directory()
        places = client.run(_working_directory).values()
        if elsewhere := [path for path, number in places if path != here and number != inode]:
            raise UserError(
                f"scheduler={scheduler}: workers run in {min(elsewhere)}, where relative paths name other files "
                f"than in {here}; start them there"
            )
        executor = client.get_executor(pure=False)
        yield _Workers([executor] * len(threads), lambda broken: broken, KilledWorker)


def _working_directory() -> tuple[Path, int]:
    """Its path and inode: machines may mount a shared directory under different paths."""
    return Path.cwd(), Path.cwd().stat().st_ino


def _is_daemon() -> bool:
    return multiprocessing.current_process().daemon
