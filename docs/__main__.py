"""python -m docs [--out DIR]: builds the site and checks every link in it; nothing is trained, nothing is fetched."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import arg

from docs import links, narrow, sources


def main(
    out: Annotated[
        Path, arg(help="Folder of the site; its pages are begun at index.html.")
    ] = Path("out/site"),
) -> None:
    """Build the site as HTML, every warning an error. Check its links, and its pages on a narrow screen."""
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
    if faults := [*links.broken(out), *narrow.too_wide(out)]:
        print("\n".join(faults), file=sys.stderr)
        sys.exit(1)
    print(
        f"site: {out / 'index.html'}; all links lead somewhere, and no page asks the network for anything"
    )


if __name__ == "__main__":
    tyro.cli(main, prog="python -m docs")
