"""``make federation``: four hospitals train together on this machine, with a report.

Superlink and supernodes are real processes on 127.0.0.1, with TLS and a key each. A site reads its own hospital alone.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pandas as pd

from diagnostics.plots.page import Page
from examples.local_federation import LocalFederation
from fedlayers.decision.comparison import Comparison, display_name
from fedlayers.decision.report import COMPARISON_CAPTIONS, draw_comparison
from fl_core.errors import UsageError
from fl_core.plan import LayerPlan
from fl_core.records.store import Run
from fl_core.storage import write_atomically

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
ALGORITHMS = ("local", "fedavg", "playerfl")


def main(out: Path, rounds: int) -> None:
    """Train each algorithm over four sites, and write ``report.html``."""
    began = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - began:4.0f} s  {text}", flush=True)

    remove_earlier(out)
    files = hospital_files(out)
    with LocalFederation(out / "processes", files) as federation:
        tell(f"superlink on 127.0.0.1:{federation.port}, supernodes of {len(files)}")
        for algorithm in ALGORITHMS:
            federation.run(server_file(out, algorithm, rounds))
            tell(f"{algorithm} is done")
    tell(f"report: {report(out)}")


def remove_earlier(out: Path) -> None:
    """Remove what an earlier federation made in a folder. Other files stay.

    Raises:
        UsageError: there is no earlier federation, or a link in its place. Then nothing is removed.
    """
    folders = ("processes", *ALGORITHMS, *HOSPITALS)
    links = [name for name in folders if (out / name).is_symlink()]
    if links or (out.exists() and not (out / "processes").is_dir()):
        raise UsageError(
            f"{out} must be new, or hold an earlier federation; got another folder. Choose a new one."
        )
    made = ["processes", "report.html", *ALGORITHMS]
    made += [f"{name}.png" for name in COMPARISON_CAPTIONS]
    made += [f"{name}.toml" for name in ALGORITHMS]
    for name in HOSPITALS:
        made += [f"{name}/site.toml", f"{name}/site-states"]
    for path in (out / name for name in made):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def hospital_files(out: Path) -> dict[str, Path]:
    """Write each hospital's site file in a folder of its own, and return them by name."""
    files = {name: out / name / "site.toml" for name in HOSPITALS}
    for name, file in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'name = "{name}"\npath = "heart"\n')
    return files


def server_file(out: Path, algorithm: str, rounds: int) -> Path:
    """Write the server's file of a run over all hospitals, and return it."""
    file = out / f"{algorithm}.toml"
    file.write_text(
        f'out = "{(out / algorithm).absolute()}"\nsites = {len(HOSPITALS)}\n'
        f'[config]\nalgorithm = "{algorithm}"\nrounds = {rounds}\n'
    )
    return file


def report(out: Path) -> Path:
    """Write the page on all runs."""
    runs = {name: Run(out / name) for name in ALGORITHMS}
    rows = [run.rows()[1] for run in runs.values()]
    result = Comparison(pd.concat(rows, ignore_index=True))
    plan = LayerPlan.from_json(runs["playerfl"].plan())
    page = Page(
        "A federation of four hospitals",
        "**Four hospitals trained together, and their samples stayed at their sites.** PLayer-FL shared "
        f"{', '.join(plan.shared)}. One seed: this shows that it works, not which is best.",
    )
    for name, figure in draw_comparison(result).items():
        write_atomically(
            out / f"{name}.png", page.figure(figure, COMPARISON_CAPTIONS[name])
        )
    page.table(display_name(result.table), result.legend)
    page.write(out / "report.html")
    return out / "report.html"


if __name__ == "__main__":
    main(
        Path(sys.argv[1] if len(sys.argv) > 1 else "out/federation"),
        int(sys.argv[2] if len(sys.argv) > 2 else 5),
    )
