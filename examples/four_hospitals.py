"""``make federation``: four hospitals train together on this machine, with a report.

Superlink and sites are real processes on 127.0.0.1, with TLS and keys. Each site reads only its own hospital's samples.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from diagnostics.plots.page import Page
from examples.local_federation import FEDLAYERS, Local
from fedlayers.studies.comparison import Comparison, display_name
from fedlayers.studies.federation_report import NEVER, add_left
from fedlayers.studies.study_page import COMPARISON_CAPTIONS
from fedlayers.studies.study_plots import draw_comparison
from fl_core import __version__, interrupts
from fl_core.errors import RunError, UsageError, listing
from fl_core.plan import LayerPlan
from fl_core.records.store import Run
from fl_core.storage.files import write_atomically

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
ALGORITHMS = ("local", "fedavg", "playerfl")
WORDS = {
    "local": "each hospital alone",
    "fedavg": "all layers shared",
    "playerfl": "the layers shared that PLayer-FL decides on, from numbers that the sites measure",
}
PARTS = ("keys", "sites", "runs")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Demo:
    """A demonstration below ``out``: keys, sites, runs and the report."""

    out: Path
    rounds: int = 10

    def run(self, say: Say = print) -> Path:
        """Run all steps. Return the report.

        Raises:
            UsageError: ``out`` has other contents. RunError: a process failed; its log has the reason.
        """
        self._clear()
        began = time.monotonic()

        def tell(line: str) -> None:
            say(f"{time.monotonic() - began:4.0f} s  {line}")

        with Local(self.out, HOSPITALS) as local:
            tell(f"keys for the server and {len(HOSPITALS)} hospitals in {self.out / 'keys'}")
            tell(f"superlink on {local.start_superlink()}")
            for name in HOSPITALS:
                local.start_site(
                    name, [*FEDLAYERS, "federation", "site", str(self._site_file(local, name))], wait=False
                )
            for name in HOSPITALS:
                local.until(name, "is connected to")
            tell(f"sites {', '.join(HOSPITALS)} are connected")
            for algorithm in ALGORITHMS:
                local.start(algorithm, self._command(local, algorithm))
            for algorithm in ALGORITHMS:
                local.until(algorithm, f"of {algorithm}: ", patience=1200)
                tell(f"{algorithm} is done: {WORDS[algorithm]}")
        tell("all processes are stopped")
        page = self._report()
        tell(f"report: {page}")
        return page

    def _clear(self) -> None:
        there = {path.name for path in self.out.iterdir()} if self.out.is_dir() else set()
        if there and not {"keys", "sites"} <= there:
            raise UsageError(
                f"out must be an empty folder or an earlier demo; got {self.out} with other files. Name another folder."
            )
        for part in PARTS:
            shutil.rmtree(self.out / part, ignore_errors=True)
        (self.out / "sites").mkdir(parents=True)

    def _site_file(self, local: Local, name: str) -> Path:
        folder = self.out / "sites" / name
        folder.mkdir()
        own = f'name = "{name}"\n\n[data]\ndataset = "heart"\n'
        return write(folder / "site.toml", f"{own}\n{local.connection(name)}")

    def _command(self, local: Local, algorithm: str) -> Sequence[str]:
        flags = ["--superlink", local.place, "--keys", str(local.server_keys), "--out", str(self._path(algorithm))]
        what = ["--dataset", "heart", "--algorithm", algorithm, "--rounds", str(self.rounds)]
        return [*FEDLAYERS, "federation", "run", *what, *flags]

    def _path(self, algorithm: str) -> Path:
        return self.out / "runs" / algorithm

    def _report(self) -> Path:
        runs = {name: Run(self._path(name)) for name in ALGORITHMS}
        result = Comparison(pd.concat([run.rows()[1] for run in runs.values()], ignore_index=True))
        plan = LayerPlan.load(self._path("playerfl") / "plan.json")
        score = result.table.set_index("algorithm")[result.score]
        lead = (
            f"**{len(HOSPITALS)} hospitals trained together and kept their samples.** PLayer-FL shared "
            f"{listing(plan.shared)} and kept {listing(layer.name for layer in plan.head)} at each hospital; "
            "macro-F1 on test samples: "
            + ", ".join(f"{name} {100 * score[name]:.1f} %" for name in ALGORITHMS)
            + ". One seed: this shows that it works, not which is best."
        )
        page = Page("A federation of four hospitals", lead)
        self._add_traffic(page)
        page.text("## What it comes to\n\nTest samples, the last round.")
        for name, figure in draw_comparison(result).items():
            write_atomically(self.out / f"{name}.png", page.figure(figure, COMPARISON_CAPTIONS[name]))
            plt.close(figure)
        page.table(display_name(result.table), result.legend)
        page.text("## How it was made")
        rounds = runs["fedavg"].config["rounds"]
        page.text(
            f"- a superlink and {len(HOSPITALS)} sites as processes on this machine, over TLS, with one key a site\n"
            f"- {rounds} rounds; the same bits as `fedlayers run --stack off`\n"
            f"- fedlayers {__version__}\n"
            "- next to this page: `keys/`, `sites/` (what each hospital has), `runs/`, the processes' logs"
        )
        page.write(self.out / "report.html")
        return self.out / "report.html"

    def _add_traffic(self, page: Page) -> None:
        page.text(f"## What left each hospital\n\n{NEVER}")
        for algorithm in ALGORITHMS:
            add_left(page, self._path(algorithm), f"`{algorithm}`: {WORDS[algorithm]}.")


def write(file: Path, text: str) -> Path:
    """Write a small file and return its path."""
    file.write_text(text)
    return file


def main(words: Sequence[str]) -> None:
    """Run ``python -m examples.four_hospitals [OUT [ROUNDS]]``."""
    demo = Demo(Path(words[0] if words else "out/federation"), *map(int, words[1:]))
    with interrupts.end_on_signals(lambda: "all processes are stopped"):
        try:
            demo.run()
        except (UsageError, RunError) as error:
            sys.exit(f"federation: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main(sys.argv[1:])
