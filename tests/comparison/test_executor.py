"""Executors: order, failures, killed processes, signals and estimates, with tasks that only sleep."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from ssl_vit.comparison import executor
from ssl_vit.interfaces import RunError, UserError
from ssl_vit.records import TaskRecord

HELD: list[bytearray] = []  # by a task that grows its process


def task(identifier: str, *after: str, arm: str = "0") -> TaskRecord:
    return TaskRecord(id=identifier, kind="measure", arm=arm, after=after)


def do(folder: Path, one: TaskRecord) -> None:
    """Write a file; first do what the arm says."""
    if one.arm == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if one.arm == "wrong":
        raise UserError("wrong input")
    if one.arm == "bug":
        raise ZeroDivisionError("a bug")
    if one.arm == "large":
        HELD.append(bytearray(os.urandom(2**20)) * 400)
    time.sleep(1.1 if one.arm == "large" else float(one.arm))  # loky looks at the memory once per second
    for need in one.after:
        assert (folder / need).exists()
    (folder / one.id).write_text(
        f"{os.getpid()} {os.environ.get('OMP_NUM_THREADS')} {os.environ.get('CUDA_VISIBLE_DEVICES')}"
    )


def done(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(("given", "expected"), [(None, "3"), ("2", "2")])
def test_jobs_share_the_tasks_the_cores_and_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.setattr(executor, "cpu_count", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    tasks = [task("a", arm="0.3"), task("b", arm="0.3"), task("c", "a"), task("d", "b", "c")]
    executor.run(tasks, partial(do, tmp_path), jobs=2, say=lambda text: None)
    found = [(tmp_path / name).read_text().split() for name in "abcd"]
    assert {gpu for _, _, gpu in found} == {"5", "7"}
    assert len({(process, gpu) for process, _, gpu in found}) == 2
    assert {threads for _, threads, _ in found} == {expected}
    assert not multiprocessing.active_children()


def test_a_process_that_grew_is_replaced_without_a_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = [task(f"{number}{slot}", arm="large") for number in range(3) for slot in "ab"]
    executor.run(tasks, partial(do, tmp_path), jobs=2, say=lambda text: None)
    assert len({(tmp_path / one.id).read_text() for one in tasks}) > 2
    assert not [str(warning.message) for warning in recwarn] and not capfd.readouterr().err


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failed_task_stops_only_those_that_need_it(tmp_path: Path, jobs: int) -> None:
    tasks = [task("a", arm="wrong"), task("b", "a"), task("c", "b"), task("d"), task("e", "d")]
    with pytest.raises(UserError, match="a: wrong input\n3 of 5 tasks"):
        executor.run(tasks, partial(do, tmp_path), jobs=jobs, say=lambda text: None)
    assert done(tmp_path) == {"d", "e"}


def test_a_killed_process_fails_its_task_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    tasks = [task("b", arm="killed"), task("a", arm="2"), task("c", "b"), *(task(name) for name in "def")]
    with pytest.raises(RunError, match="b: its process was killed"):
        executor.run(tasks, partial(do, tmp_path), jobs=2, say=lambda text: None)
    assert done(tmp_path) == {"a", "d", "e", "f"}
    gpus = {name: (tmp_path / name).read_text().split()[2] for name in "ad"}
    assert set(gpus.values()) == {"5", "7"}, "the process in place of the killed one has its GPU"


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_unexpected_error_stops_everything_at_once(tmp_path: Path, jobs: int) -> None:
    start = time.monotonic()
    tasks = [task("a", arm="bug"), task("b", arm="100")]
    with pytest.raises(ZeroDivisionError):
        executor.run(tasks, partial(do, tmp_path), jobs=jobs, say=lambda text: None)
    assert time.monotonic() - start < 30
    assert not done(tmp_path)


def test_the_time_left_is_a_lower_bound_until_a_task_of_each_kind_has_finished() -> None:
    def knn(identifier: str) -> TaskRecord:
        return TaskRecord(id=identifier, kind="measure", arm="x", evaluator="knn")

    took = [(knn("a"), 60.0)]
    assert executor._left([knn("b"), task("p")], took, 2) == ", more than 0:00:30 left"
    assert executor._left([task("p")], took, 2) == ""
    assert executor._left([knn("b"), task("p")], [*took, (task("q"), 240.0)], 2) == ", about 0:02:30 left"
    assert executor._left([knn("b")], [*took, (knn("the winner of a sweep"), 0.1)], 1) == ", about 0:01:00 left"
    assert executor._left([], took, 2) == ""


def test_the_time_left_counts_what_tasks_took(tmp_path: Path) -> None:
    said: list[str] = []
    executor.run([task("a", arm="1.1"), task("b", "a")], partial(do, tmp_path), jobs=1, say=said.append)
    assert "about 0:00:00" not in said[0] and "left)" in said[0]


def test_a_dask_cluster_runs_the_tasks(tmp_path: Path) -> None:
    dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
    with (
        dask.config.set({"distributed.worker.daemon": False}),
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
    ):
        address = cluster.scheduler_address
        tasks = [
            task("a", arm="1.1"),
            task("b", arm="1.1"),
            task("c", "a", "b"),
            task("x", arm="wrong"),
            task("y", "x"),
        ]
        said: list[str] = []
        with pytest.raises(UserError, match="x: wrong input"):
            executor.run(tasks, partial(do, tmp_path), scheduler=address, say=said.append)
        assert done(tmp_path) == {"a", "b", "c"}
        assert len({(tmp_path / name).read_text() for name in "ab"}) == 2, "both workers took part"
        assert any("about" in line for line in said)
        with pytest.MonkeyPatch.context() as patch:  # one directory that every process mounts under another path
            patch.setattr(executor, "_working_directory", lambda: (Path(f"/mounted/{os.getpid()}"), 7))
            executor.run([task("mounted")], partial(do, tmp_path), scheduler=address, say=said.append)
        assert "mounted" in done(tmp_path)
        with distributed.Client(address, set_as_default=False) as client:
            client.run(os.chdir, tmp_path)
        with pytest.raises(UserError, match=rf"workers run in {tmp_path}.*{Path.cwd()}; start them there"):
            executor.run(tasks, partial(do, tmp_path), scheduler=address, say=said.append)


def test_a_cluster_that_cannot_run_tasks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr(executor, "_SECONDS_TO_CONNECT", 1)
    with pytest.raises(UserError, match="scheduler=tcp://127"):
        executor.run([task("a")], print, scheduler="tcp://127.0.0.1:9")
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as cluster,
        pytest.raises(UserError, match="--nthreads 1"),
    ):
        executor.run([task("a")], print, scheduler=cluster.scheduler_address)
