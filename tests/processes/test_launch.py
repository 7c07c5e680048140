"""The launch files: each opens with its command, is read by the program it is for, and runs here where it can."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from safetensors import safe_open

from ssl_vit import recipe

LAUNCH = Path(__file__).parents[2] / "recipes" / "launch"
FILES = sorted(LAUNCH.iterdir())
ACCELERATE = [path for path in FILES if path.suffix == ".yaml" and path.stem != "kubernetes"]
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}


def settings(digits: Path, run: Path, *more: str) -> list[str]:
    keys = [f"data.train={digits}/train", f"run={run}", "training.steps=12", "training.log_every=1", "encoder.depth=1"]
    return [
        "digits_ssl",
        *keys,
        "training.picture_every=0",
        "training.checkpoint_every=2",
        "training.trackers={}",
        *more,
    ]


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def saved(run: Path) -> int:
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step_*")), default=0)


def weights(run: Path) -> dict[str, bytes]:
    with safe_open(run / "encoder.safetensors", "np") as tensors:
        return {name: tensors.get_tensor(name).tobytes() for name in tensors.keys()}  # noqa: SIM118


def world_size(run: Path) -> int:
    return int(json.loads((run / "environment.json").read_text())["world_size"])


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_launch_file_opens_with_the_exact_command(file: Path) -> None:
    comment = re.match(r"(#.*\n)+", file.read_text()).group()  # type: ignore[union-attr]
    lines = [line.lstrip("# ").strip() for line in comment.splitlines() if not line.startswith("#!")]
    starts = (
        "accelerate launch ",
        "OMP_NUM_THREADS=1 accelerate launch ",
        "sh ",
        "sbatch ",
        "kubectl apply ",
        "recipes/",
    )
    command = next(line for line in lines if line.startswith(starts))
    assert f"recipes/launch/{file.name}" in shlex.split(command)
    assert lines.index(command) <= 6


@pytest.mark.parametrize("file", ACCELERATE, ids=lambda path: path.name)
def test_accelerate_reads_its_files(file: Path) -> None:
    """Its own reader, which refuses unknown keys."""
    config = load_config_from_file(str(file))
    assert config.mixed_precision == "no"  # the recipe's training.precision decides, wherever it runs
    if file.stem == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2 and not config.fsdp_config["fsdp_cpu_ram_efficient_loading"]


def test_what_is_told_to_run_sharded_can_be() -> None:
    """Every command with fsdp2.yaml: a sharded model is neither drawn nor probed, nor searched for its micro-batch."""
    folder = LAUNCH.parent
    texts = [path.read_text() for path in (folder.parent / "README.md", *folder.glob("*/*.yaml"))]
    commands = [line for text in texts for line in re.findall(r"accelerate launch [^`\n]*fsdp2\.yaml[^`\n]*", text)]
    assert len(commands) >= 6
    for command in commands:
        name, *keys = shlex.split(command.split(" train ")[1])
        settings = recipe.load_recipe(name, keys)
        training = settings.training
        assert not (training.auto_batch or training.picture_every or settings.probe), command


@pytest.mark.parametrize(
    ("file", "more", "processes"),
    [
        ("cpu", [], 2),
        pytest.param("many_gpus", ["--num_processes", "2"], 2, marks=pytest.mark.slow),
    ],
)
def test_accelerate_launch_forms_the_world(
    digits: Path, tmp_path: Path, file: str, more: list[str], processes: int
) -> None:
    command: list[str | Path] = [
        BIN / "accelerate",
        "launch",
        "--config_file",
        LAUNCH / f"{file}.yaml",
        *more,
        "--main_process_port",
        "0",
    ]
    command += ["-m", "ssl_vit", "train", *settings(digits, tmp_path / "run")]
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, timeout=250)
    assert world_size(tmp_path / "run") == processes and steps(tmp_path / "run") == list(range(1, 13))


@pytest.mark.parametrize("file", [path for path in FILES if path.suffix == ".sh"], ids=lambda path: path.name)
def test_scripts_are_shell(file: Path) -> None:
    subprocess.run(["bash", "-n", file], check=True)


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
    job |= {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3"}
    return {**ENVIRONMENT, **job, "PATH": f"{tools}:{ENVIRONMENT['PATH']}"}


def test_slurm_requeues_a_preempted_job_which_goes_on(digits: Path, tmp_path: Path, slurm: dict[str, str]) -> None:
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


@pytest.mark.slow
def test_slurm_array_gives_each_task_a_seed_and_a_directory(
    digits: Path, tmp_path: Path, slurm: dict[str, str]
) -> None:
    arguments = [key for key in settings(digits, tmp_path) if not key.startswith("run=")]
    done = subprocess.run(
        ["bash", LAUNCH / "slurm_array.sh", *arguments], env={**slurm, "SLURM_NTASKS": "1"}, cwd=tmp_path, timeout=120
    )
    run = tmp_path / "runs" / "array_77" / "seed_3"
    assert done.returncode == 0 and steps(run) == list(range(1, 13)) and not (tmp_path / "requeued").exists()
    assert yaml.safe_load((run / "recipe.yaml").read_text())["seed"] == 3


@pytest.mark.slow
def test_elastic_starts_all_processes_again_and_they_go_on(digits: Path, tmp_path: Path) -> None:
    """One of two is killed: torchrun starts both again, and the end is the undisturbed run's, bit for bit."""

    def command(run: Path) -> list[str]:
        return ["sh", str(LAUNCH / "elastic.sh"), *settings(digits, run, "training.steps=60")]

    environment = {**ENVIRONMENT, "GPUS": "2", "MAIN": "localhost:0", "RESTARTS": "3"}
    subprocess.run(command(tmp_path / "whole"), env=environment, check=True, capture_output=True, timeout=250)
    run = tmp_path / "run"
    agent = subprocess.Popen(command(run), env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not saved(run) and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = [child for child in psutil.Process(agent.pid).children() if "ssl_vit" in child.cmdline()]
    assert len(workers) == 2
    workers[1].kill()
    _, text = agent.communicate(timeout=200)
    assert agent.returncode == 0, text
    assert "resuming at step" in text and world_size(run) == 2
    assert weights(run) == weights(tmp_path / "whole") and steps(run) == list(range(1, 61))


def test_the_kubernetes_job_is_whole(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    spec, name = job["spec"], service["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert int(variables["WORLD_SIZE"]) == spec["completions"] == spec["parallelism"]
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{name}" and pod["subdomain"] == name
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    rules = {
        rule["action"]: rule.get("onExitCodes", {}).get("values") for rule in spec["podFailurePolicy"]["rules"][::-1]
    }
    assert rules["FailJob"] == [2] and pod["restartPolicy"] == "Never"
    assert spec["podFailurePolicy"]["rules"][0] == {
        "action": "Ignore",
        "onExitCodes": {"containerName": container["name"], "operator": "In", "values": [75]},
    }
    (tmp_path / "python").write_text('#!/bin/sh\necho "$RANK: $*"\n')
    (tmp_path / "python").chmod(0o755)
    environment = {"JOB_COMPLETION_INDEX": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [*container["command"], *container["args"], "run=$(id)"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert told == f"1: -m ssl_vit train {' '.join(container['args'])} run=$(id)\n"
