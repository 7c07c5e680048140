"""The launch files: each is read by the program it is for, and runs here where it can."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from tests.processes.reading import losses, saved, world_size

LAUNCH = Path(__file__).parents[2] / "recipes" / "launch"
FILES = sorted(LAUNCH.iterdir())
ACCELERATE = [path for path in FILES if path.suffix == ".yaml" and path.stem != "kubernetes"]
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}


def settings(digits: Path, run: Path, *more: str) -> list[str]:
    keys = [f"data.train={digits}/train", f"run={run}", "training.steps=12", "training.log_every=1", "encoder.depth=1"]
    quick = ["training.picture_every=0", "training.checkpoint_every=2", "training.trackers={}"]
    return ["digits_ssl", *keys, *quick, *more]


@pytest.mark.parametrize("file", ACCELERATE, ids=lambda path: path.name)
def test_accelerate_reads_its_files(file: Path) -> None:
    """Its own reader, which refuses unknown keys."""
    config = load_config_from_file(str(file))
    assert config.mixed_precision == "no"  # the recipe's training.precision decides, wherever it runs
    if file.stem == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2 and not config.fsdp_config["fsdp_cpu_ram_efficient_loading"]


def test_accelerate_launch_forms_the_world(digits: Path, tmp_path: Path) -> None:
    command = [str(BIN / "accelerate"), "launch", "--config_file", str(LAUNCH / "cpu.yaml"), "--main_process_port", "0"]
    command += ["-m", "ssl_vit", "train", *settings(digits, tmp_path / "run")]
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, timeout=250)
    assert world_size(tmp_path / "run") == 2 and len(losses(tmp_path / "run")) == 12


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Stand-ins for srun, which starts the tasks on this machine, and scontrol; and what Slurm sets for a job."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(
        f"""#!{sys.executable}
import os, subprocess, sys
command = [part for part in sys.argv[1:] if not part.startswith("--kill-on")]
tasks = [subprocess.Popen(command, env={{**os.environ, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}})
         for n in range(int(os.environ["SLURM_NTASKS"]))]
open("tasks", "w").write(" ".join(str(task.pid) for task in tasks))
sys.exit(max(task.wait() for task in tasks))
"""
    )
    (tools / "scontrol").write_text(
        '#!/bin/sh\nif [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> requeued; fi\n'
    )
    for tool in tools.iterdir():
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS": "2"}
    return {**ENVIRONMENT, **job, "PATH": f"{tools}:{ENVIRONMENT['PATH']}"}


def test_slurm_requeues_a_preempted_job_which_resumes(digits: Path, tmp_path: Path, slurm: dict[str, str]) -> None:
    """USR1 to the tasks, as --signal=USR1@120 has it; a value that a shell would run stays a value."""
    run = tmp_path / "a $(touch pwned) `touch pwned`; touch pwned"
    command: list[str | Path] = ["bash", LAUNCH / "slurm.sh", *settings(digits, run, "training.steps=4000")]
    job = subprocess.Popen(command, env=slurm, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not saved(run) and time.monotonic() < deadline and job.poll() is None:
        time.sleep(0.05)
    for pid in (tmp_path / "tasks").read_text().split():
        os.kill(int(pid), signal.SIGUSR1)
    assert job.wait(60) == 75
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    assert world_size(run) == 2 and 0 < saved(run) < 4000
    assert not list(tmp_path.glob("**/pwned"))


def test_the_kubernetes_job_is_whole() -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    spec, name = job["spec"], service["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert int(variables["WORLD_SIZE"]) == spec["completions"] == spec["parallelism"]
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{name}" and pod["subdomain"] == name
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    rules = [rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules}
    assert codes == {"Ignore": [75], "FailJob": [2]} and pod["restartPolicy"] == "Never"
