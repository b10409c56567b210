"""The commands that draw: plot, map."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional

from fedlayers.cli import arguments
from fedlayers.cli.arguments import apply_options, option
from fedlayers.cli.base import Command, ConfiguredCommand, ModelCode
from fl_core.config import RunConfig
from fl_core.errors import UsageError, check_known, listing

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot(Command):
    """Draw a diagnosis, the scores of a run, or a plan.

    Examples:
        fedlayers diagnose --dataset heart
        fedlayers plot diagnosis
        fedlayers plot diagnosis --metrics federation_sensitivity --where client=va
        fedlayers run --algorithm fedavg --out runs/fedavg
        fedlayers plot runs/fedavg --metrics macro_f1 --out scores
    """

    rows: Annotated[
        Positional[Path],
        option(
            "Folder of diagnose, rows.jsonl, a run directory, or a plan (.json).",
            "PATH",
        ),
    ]
    metrics: Annotated[
        tuple[str, ...],
        option("Metrics to draw. Default: all in the rows.", "NAME [NAME ...]"),
    ] = ()
    where: Annotated[
        tuple[str, ...],
        option(
            "Draw only rows with these values, such as seed=0 client=va.",
            "COLUMN=VALUE [...]",
        ),
    ] = ()
    out: Annotated[Path, option("Folder for the pictures (.png).", "DIR")] = Path(
        "pictures"
    )
    dpi: Annotated[int, option("Resolution in dots per inch, 20 to 1200.", "N")] = 200

    def main(self, line: str) -> None:
        arguments.check_folder(self.out)
        if not 20 <= self.dpi <= 1200:
            raise UsageError(f"--dpi must be from 20 to 1200; got {self.dpi}.")

        from diagnostics import plots
        from diagnostics.plots.collect import album, figure_of
        from fedlayers.studies.study_plots import save, to_files
        from fl_core.plan import LayerPlan

        to_files()
        if self.rows.suffix == ".json":
            if self.metrics or self.where:
                raise UsageError(
                    "--metrics and --where are for rows. A plan is one picture."
                )
            plan = LayerPlan.load(self.rows)
            pictures: dict[str, Callable[[], Figure]] = {
                "plan": lambda: figure_of(plots.plan(plan))
            }
        else:
            pictures = album(self._chosen(self._frame()), self.metrics)
        for name, draw in pictures.items():
            figure = draw()
            self.out.mkdir(parents=True, exist_ok=True)
            path = self.out / f"{name}.png"
            save(figure, path, self.dpi)
            print(path)

    def _frame(self) -> pd.DataFrame:
        """Return the rows of a file, a run directory or another folder. Links in a folder are not followed."""
        from fl_core.records.store import ROWS, Run
        from fl_core.rows import read
        from fl_core.storage.files import Folder

        folder = Folder(self.rows)
        if folder.has("config.json"):
            return Run(self.rows).rows()[1]
        if self.rows.is_dir():
            return read(
                self.rows / ROWS, opener=lambda path, _: folder.handle(Path(path).name)
            )[1]
        return read(self.rows)[1]

    def _chosen(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the rows that ``--where`` selects."""
        for item in sorted(self.where, key=lambda item: item.startswith("client")):
            name, equals, value = item.partition("=")
            if not equals:
                raise UsageError(f"--where must be COLUMN=VALUE; got {item!r}.")
            column = (
                frame[check_known("column of the rows", name, frame.columns)]
                .astype("string")
                .fillna("")
            )
            if name in ("client", "client_b"):
                self._check_single_clients(frame, item)
            frame = frame[
                column == check_known(name, value, filter(None, column.unique()))
            ]
        return frame

    def _check_single_clients(self, frame: pd.DataFrame, item: str) -> None:
        """Refuse to select a client from metrics of pairs. A pair has one row, so its other client would lose it."""
        from diagnostics.plots.collect import STATES

        paired = set(
            frame.loc[
                (frame["client_b"].fillna("") != "")
                & (frame["layer"].fillna("") != ""),
                "metric",
            ]
        )
        wanted = self.metrics or tuple(frame["metric"].unique())
        pairs = [name for name in wanted if name in paired and name not in STATES]
        if pairs:
            rest = " ".join(name for name in wanted if name not in pairs)
            advice = f"Pass --metrics {rest}." if rest else f"Leave {item} out."
            raise UsageError(
                f"--where {item} must be for metrics of single clients; got {listing(pairs)}. {advice}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Map(ConfiguredCommand):
    """Draw how each layer behaves over the rounds: the layer map.

    It measures the stored rounds of a run. With --dataset it trains first, and stores the run in OUT/run.

    Next: fedlayers choose --dataset NAME

    Examples:
        fedlayers map --dataset heart --rounds 5
        fedlayers map layer_map/run --out again
    """

    dir: Annotated[
        Positional[Path | None],
        option("Run directory. Leave it out with --dataset.", "[DIR]"),
    ] = None
    out: Annotated[Path, option("Folder for picture, rows and run.", "DIR")] = Path(
        "layer_map"
    )
    dataset: Annotated[
        str | None,
        arguments.FILES,
        option("Dataset: a name, package.module:function, or paths of your data."),
    ] = None
    width: Annotated[float, option("Width of the picture in cm.", "CM")] = 16.0
    draws: Annotated[
        int, option("Draws of the null: clients that do not differ.", "N")
    ] = 4
    allow_code: ModelCode = ()
    config: Annotated[RunConfig, arguments.flags(without=("dataset",))]

    def asked_config(self) -> RunConfig:
        config = apply_options(self.config, (), self.model_option, self.loss_option)
        return config.with_keys(dataset=self.dataset or config.data.dataset)

    def main(self, line: str) -> None:
        if (self.dir is None) == (self.dataset is None):
            raise UsageError(
                "map must have a run directory before the flags, or --dataset. Name one of the two."
            )
        if self.dir is not None and (given := self.changed_flags()):
            raise UsageError(
                f"{given[0]} goes with --dataset. A run has its own configuration."
            )
        arguments.check_folder(self.out)

        from diagnostics.through_time import through_time
        from fedlayers import runs
        from fedlayers.studies.study_plots import save, to_files

        to_files()
        path = self.dir or self.out / "run"
        if self.dir is None:
            runs.run(self.asked_config(), path, command=line)
        report = through_time(
            path, out=self.out, draws=self.draws, allow_code=self.allow_code
        )
        figure = report.layer_map(width=self.width)[0].get_figure(root=True)
        self.out.mkdir(parents=True, exist_ok=True)
        save(figure, self.out / "layer_map.png", 200)
        print(self.out / "layer_map.png")
