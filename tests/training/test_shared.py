"""What processes tell each other, in one process: which errors are of another process, and the state of generators."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ssl_vit.interfaces import RunError
from ssl_vit.training import distributed, state

CRASH = """loader worker 0 of 2 of process 0:
Traceback (most recent call last):
  File "/home/gloome/nccl.py", line 5, in chunks
socket.timeout: The read operation timed out"""


@pytest.mark.parametrize(
    ("message", "another"),
    [
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1", True),
        ("NCCL error in: ProcessGroupNCCL.cpp:94, remote process exited or there was a network error", True),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3) ran for 6 ms before timing out.", True),
        ("a gloomy day", False),
        (CRASH, False),
    ],
)
def test_an_error_of_this_process_is_not_taken_for_the_end_of_another(
    monkeypatch: pytest.MonkeyPatch, message: str, another: bool
) -> None:
    monkeypatch.setattr(distributed, "several", lambda: True)
    expected = (RunError, "another process of this run") if another else (RuntimeError, message.split("\n")[-1][:9])
    with pytest.raises(expected[0], match=expected[1]), distributed.others_watched(lambda: "none"):
        raise RuntimeError(message)


def test_an_error_of_the_disk_names_its_file() -> None:
    with (
        pytest.raises(RunError, match=r"^a/log: cannot write: .*No space left"),
        distributed.shared_errors("a/log: cannot write"),
    ):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_the_generator_of_the_device_is_saved_and_restored(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    held = [torch.tensor([7])]
    module = SimpleNamespace(get_rng_state=lambda: held[-1], set_rng_state=held.append)
    monkeypatch.setattr(torch, "get_device_module", {torch.device(kind): module}.__getitem__)
    saved = state.random_state(torch.device(kind))
    held.append(torch.tensor([8]))
    state.set_random_state(saved, torch.device(kind))
    assert saved.keys() == {"cpu", kind} and held[-1] == 7
