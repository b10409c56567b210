"""Runs notebooks in a fresh kernel, and stores them with outputs but nothing of the machine that made them."""

from __future__ import annotations

import base64
import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from fl_core.errors import RunError

if TYPE_CHECKING:  # they import for seconds, which a list of names need not wait for
    from nbformat import NotebookNode

HERE = Path(__file__).parent
SECONDS = 3600
"""That a cell may take."""
BYTES = 600_000
"""Of a stored notebook, at most."""
KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
}
_PATH = re.compile(r"(?<![\w.<])/(?:home|root|tmp|work|usr|opt|var|Users)/[\w./-]+")


def names() -> list[str]:
    """Names of all notebooks."""
    return sorted(path.stem for path in HERE.glob("*.ipynb"))


def twin(notebook: NotebookNode) -> str:
    """Return the notebook's text and code as Markdown, for reading in a review."""
    import jupytext

    return str(jupytext.writes(notebook, fmt="md"))


def executed(name: str, folder: Path, data_root: str | None = None) -> NotebookNode:
    """The notebook with outputs of a fresh kernel working in ``folder``.

    Args:
        data_root: folder of the named datasets' files; None = the kernel knows of none.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(HERE / f"{name}.ipynb", as_version=4)
    hidden = ("MPLBACKEND", "FEDLAYERS_DATA_ROOT")  # a kernel's own backend is inline
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    if data_root is not None:
        environment["FEDLAYERS_DATA_ROOT"] = data_root
    client = NotebookClient(
        notebook, timeout=SECONDS, resources={"metadata": {"path": str(folder)}}
    )
    return client.execute(env=environment)


def tidied(notebook: NotebookNode) -> NotebookNode:
    """The notebook in its stored form: numbered cells, uniform metadata, pictures in 256 colours."""
    import nbformat

    notebook.metadata = nbformat.from_dict(KERNEL)
    number = 0
    for k, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{k}", nbformat.from_dict({})
        if cell.cell_type != "code":
            continue
        number += 1
        cell.execution_count = number
        for output in cell.outputs:
            sizes = output.pop("metadata", {}).get("image/png")
            if output.output_type in ("display_data", "execute_result"):
                shown = {"image/png": sizes} if sizes else {}  # of sharp pictures
                output.metadata = nbformat.from_dict(shown)
            if output.output_type == "execute_result":
                output.execution_count = number
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = _smaller(data["image/png"])
    return notebook


def paths_in(notebook: NotebookNode) -> list[str]:
    """Paths of this machine in the outputs; there should be none."""
    return [path for text in _texts(notebook) for path in _PATH.findall(text)]


def errors_in(notebook: NotebookNode) -> list[str]:
    """Return the text that cells wrote to standard error."""
    return [
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.get("name") == "stderr"
    ]


def store(name: str, notebook: NotebookNode) -> int:
    """Store a notebook in place of the old one; returns its size in bytes.

    Raises:
        RunError: it shows a path of this machine or a warning, or is too large.
    """
    import nbformat

    found = paths_in(notebook)
    if found:
        raise RunError(f"{name} shows paths of this machine: {found[0]}")
    warned = errors_in(notebook)
    if warned:
        raise RunError(f"{name} shows a warning: {warned[0].splitlines()[0]}")
    text = nbformat.writes(notebook, version=4) + "\n"
    if len(text.encode()) > BYTES:
        raise RunError(
            f"{name} would have {len(text.encode()):,} bytes, more than {BYTES:,}"
        )
    (HERE / f"{name}.ipynb").write_text(text, encoding="utf-8")
    (HERE / f"{name}.md").write_text(twin(notebook), encoding="utf-8")
    return len(text.encode())


def _texts(notebook: NotebookNode) -> list[str]:
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            found += [output.text] if "text" in output else []
            found += [
                str(value)
                for kind, value in output.get("data", {}).items()
                if kind.startswith("text/")
            ]
    return found


def _smaller(png: str) -> str:
    """The picture with a palette if that is smaller, else unchanged."""
    image = Image.open(io.BytesIO(base64.b64decode(png)))
    if image.mode == "P":
        return png
    out = io.BytesIO()
    image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        out, "PNG", optimize=True
    )
    again = base64.b64encode(out.getvalue()).decode()
    return again if len(again) < len(png) else png
