"""python -m docs [--out DIR] [--execute]: builds the site and checks every link in it; nothing is fetched."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import tyro
from tyro.conf import arg

from docs import links, narrow, search, sources
from notebooks import execute as notebooks


def main(
    out: Annotated[
        Path, arg(help="Folder of the site; its pages are begun at index.html.")
    ] = Path("out/site"),
    execute: Annotated[
        bool, arg(help="Meanwhile run every notebook once. Outputs are not stored.")
    ] = False,
) -> None:
    """Build the site as HTML, every warning an error. Check its links, its search, and its pages on a narrow screen."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        ran = [
            (name, pool.submit(notebooks.executed, name, Path(folder)))
            for name in (notebooks.names() if execute else ())
        ]
        build(out)
        for name, notebook in ran:
            made = notebook.result()
            if shown := [*notebooks.errors_in(made), *notebooks.paths_in(made)]:
                sys.exit(f"{name} shows a warning or a path: {shown[0]}")
    print(
        f"site: {out / 'index.html'}; all links lead somewhere, and no page asks the network for anything"
    )


def build(out: Path) -> None:
    """Write the site, and end the program if it has a fault."""
    made = out.with_name(f"{out.name}.sources")
    for folder in (made, out):
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{sources.write(made)} pages: {made}")
    sphinx = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-jauto",
        "-b",
        "html",
        str(made),
        str(out),
    ]
    if subprocess.run(sphinx, check=False).returncode:
        sys.exit(1)
    if faults := [*links.broken(out), *narrow.too_wide(out), *search.lost(out)]:
        print("\n".join(faults), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    tyro.cli(main, prog="python -m docs")
