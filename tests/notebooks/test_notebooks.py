"""Every notebook runs from a clean kernel, and shows what it promises."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_shows_pictures(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}  # a kernel's own is inline
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute(env=environment)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert [output for output in outputs if "image/png" in output.get("data", {})], "no picture was drawn"


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
