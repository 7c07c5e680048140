"""The notebook runs from its first cell to its last."""

from __future__ import annotations

from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from PIL import Image

NOTEBOOK = Path(__file__).parent.parent.parent / "recipes/own_images/from_python.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for name in ("bee", "wasp"):
        (tmp_path / "my_images" / name).mkdir(parents=True)
        for n in range(30):
            pixels = generator.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "my_images" / name / f"{n}.jpg")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "stored without outputs"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    shown = [str(cell.get("outputs")) for cell in notebook.cells if cell.cell_type == "code"]
    assert "bee" in shown[0] and "loss" in shown[2] and ".jpg" in shown[3] and "trained" in shown[4]
    assert "torch.Size([1, 17, 32])" in shown[5]
    assert "scratch" in shown[6] and "fine_tune" in shown[7]
    assert (tmp_path / "runs/notebook_comparison/report.html").is_file()
