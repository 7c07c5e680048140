"""The Tab key: `ssl-vit --install-completion` hands the words to this program, which answers without torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = "import sys; sys.argv[0] = 'ssl-vit'; from ssl_vit.cli import main; main()"


def offered(words: str, code: str = PROGRAM) -> list[str]:
    """What bash would offer at the end of `words`."""
    asked = {"_SSL_VIT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True, timeout=60, check=False
    )
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "some"),
    [
        ("ssl-vit t", {"train"}),
        ("ssl-vit shards m", {"make"}),
        ("ssl-vit train supervised_vit_l", {"supervised_vit_large", "supervised_vit_large_21k"}),
        ("ssl-vit train own", set()),
        ("ssl-vit compare own", {"own_images", "own_images_cpu"}),
        ("ssl-vit compare pretrain", set()),
        ("ssl-vit eval runs/ssl ", {"few_shot", "fine_tune", "knn", "linear_probe", "own_head"}),
        ("ssl-vit eval runs/ssl few_shot --suite v", {"vtab_like"}),
    ],
)  # fmt: skip
def test_names_are_offered(words: str, some: set[str]) -> None:
    assert set(offered(words)) == some


def test_the_answer_needs_no_torch() -> None:
    """Each press of the key starts the program anew."""
    watch = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {PROGRAM}"
    assert offered("ssl-vit eval runs/ssl few", watch) == ["few_shot", "False"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str) -> None:
    asked = os.environ | {"_SSL_VIT_COMPLETE": f"source_{shell}"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=asked, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert f"complete_{shell}" in done.stdout
