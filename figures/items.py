"""Items: a figure or table of a paper with its runs, measurements and drawing.

Training and drawing are separate. :func:`train` makes rows from an item's runs. :func:`redraw` makes a picture, a table
and a page from stored rows alone. The table has published and measured values. An item whose runs are long keeps a file
of rows for each of them (:mod:`figures.recipe`). Runs behind several figures form a study. Each figure is a
:class:`View` of it. An item may also have the papers' own setting, in addition to its quick one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd

from fedlayers.backends.base import Backend, Result, carry_out
from fedlayers.backends.names import open_backend
from figures import packing, page
from figures.drawing import (
    COLUMNS as COLUMNS,
    VERDICTS as VERDICTS,
    Drawing as Drawing,
    Finding as Finding,
    beneath,
    save_png,
    set_apart as set_apart,
)
from figures.making import Making
from figures.papers import published as published, published_table as published_table
from fl_core import __version__, rows, runner
from fl_core.config import RunConfig
from fl_core.errors import UsageError, check_known, listing
from fl_core.names import csv_bytes

HERE = Path(__file__).parent
ROWS, PICTURES = HERE / "rows", HERE / "pictures"
FORMATS = ("png", "pdf")
QUICK = "quick"
SCALES = (QUICK, "paper")
"""What runs on two cores within an hour, and the papers' full setting."""
ELSEWHERE = (
    "data_root",
    "device",
    "workers",
    "download",
)  # where a run was made, which does not change its rows

RECODED = (
    "its images are re-coded as JPEG, so only differences of methods are comparable"
)
"""What to know of the CIFAR-10 behind the stored rows."""


def at_paper(header: Mapping[str, Any]) -> bool:
    """Return whether rows were made at the papers' scale, by their header."""
    return str(header.get("item", "")).endswith("@paper")


@dataclass(frozen=True)
class Item:
    """A figure or table, or a study from which several are drawn.

    Attributes:
        name: ``paper.what``.
        title: one line.
        runs: configurations by name; the name stands in the column ``run`` of their rows.
        seeds: number of seeds of each, from 0 on.
        budget: time that ``train`` takes on one core, in words.
        measure: (task of one run and seed, the run's name) -> its rows.
        draw: (header, rows) -> drawing; it computes no measurement. A study of which there are only views has none.
        paper: the papers' full setting of runs, under their names here; without it the item has no scale ``paper``.
        paper_seeds: number of seeds at that scale; 0 for ``seeds``.
        paper_rounds: of an item without that scale, how many rounds the paper's runs have; 0 if it does not say.
    """

    name: str
    title: str
    runs: Mapping[str, RunConfig]
    seeds: int
    budget: str
    measure: Callable[..., pd.DataFrame]
    draw: Callable[[Mapping[str, Any], pd.DataFrame], Drawing] | None = None
    paper: Mapping[str, RunConfig] = field(default_factory=dict)
    paper_seeds: int = 0
    paper_rounds: int = 0

    @property
    def study(self) -> Item:
        """The item whose rows are drawn: itself."""
        return self

    @property
    def command(self) -> str:
        """The command that makes the item's rows."""
        name, _, scale = self.name.partition("@")
        return f"python -m figures {name}{f' --scale {scale}' if scale else ''} --train"

    @property
    def without_rows(self) -> str:
        """A line on what could be drawn but has no rows yet; empty if there is nothing."""
        return ""

    @property
    def state(self) -> str:
        """``ready`` where rows are stored, else ``no rows``."""
        return self.state_of(())

    def state_of(self, runs: Collection[str]) -> str:
        """The state as far as it concerns some runs, by their names; of none, all of them. Here it is that of all."""
        return "ready" if self.path().is_file() else "no rows"

    def at(self, scale: str) -> Self:
        """The item at a scale of :data:`SCALES`: ``quick`` is itself, ``paper`` an item of its own, ``NAME@paper``.

        Raises:
            UsageError: an unknown scale, or one that it does not have.
        """
        if check_known("scale", scale, SCALES) == QUICK:
            return self
        if not self.paper:
            raise UsageError(f"scale of {self.name} must be {QUICK!r}; got {scale!r}.")
        return replace(
            self,
            name=_scaled(self.name, scale),
            runs=self.paper,
            seeds=self.paper_seeds or self.seeds,
            budget="the paper's own setting, which was not timed here",
            paper={},
        )

    def make(self, run: str, seed: int, folder: Path, data_root: str | None) -> Any:
        """The rows of one run and seed, and its description (:func:`about`) with the digest of its data."""
        task = runner.assemble(self.runs[run].with_keys(seed=seed, data_root=data_root))
        return self.measure(task, run).assign(run=run), described(task)

    def path(self, folder: Path | None = None) -> Path:
        """The path of its stored rows."""
        return rows_path(self.name, folder)

    def read(self, path: Path) -> tuple[dict[str, Any], pd.DataFrame]:
        """Read the stored header and rows.

        Raises:
            UsageError: no rows are stored, or they are another item's; CorruptError: they are damaged.
        """
        if not path.is_file():
            raise UsageError(
                f"{self.name} has no rows at {path}. Make them with --train ({self.budget})."
            )
        ((header, frame),) = packing.read(path)
        if header.get("item") != self.name:
            raise UsageError(
                f"rows at {path} must be of {self.name!r}; got rows of {header.get('item')!r}."
            )
        return header, frame


@dataclass(frozen=True)
class View:
    """A figure or table that is drawn from the rows of another item, its source.

    Attributes:
        name, title: as an :class:`Item`'s.
        source: name of the item whose rows are drawn.
        draw: (header, rows of the source) -> drawing; it computes no measurement.
        scale: of the source.
        settings: whether it shows how the source's runs are set, and nothing that was measured on them.
        runs: those of the source without which there is nothing to draw, where not all are drawn.
        seeds: how many of the source's seeds are drawn; 0 for all.
        beside: name of another item whose rows stand beside, those of training where the source's trains nothing.
    """

    name: str
    title: str
    source: str
    draw: Callable[[Mapping[str, Any], pd.DataFrame], Drawing]
    scale: str = QUICK
    settings: bool = False
    runs: Collection[str] = ()
    seeds: int = 0
    beside: str = ""

    @property
    def study(self) -> Item:
        """The item whose rows are drawn: the view's source, at the view's scale.

        Raises:
            UsageError: there is no such item, or not at this scale.
        """
        return find(self.source).study.at(self.scale)

    @property
    def state(self) -> str:
        return self.study.state_of(self.runs)

    def at(self, scale: str) -> View:
        """The view of the source at a scale; raises as :meth:`Item.at`."""
        find(self.source).study.at(scale)
        return replace(self, name=_scaled(self.name, scale), scale=scale)

    def path(self, folder: Path | None = None) -> Path:
        """The path of the source's stored rows."""
        return self.study.path(folder)

    def read(self, path: Path) -> tuple[dict[str, Any], pd.DataFrame]:
        """The source's header and rows; raises as :meth:`Item.read`."""
        return self.study.read(path)


Drawn = Item | View
REGISTRY: dict[str, Drawn] = {}
Registered = TypeVar("Registered", bound=Drawn)


def register(item: Registered) -> Registered:
    """Add an item or a view under its name."""
    if item.name in REGISTRY:
        raise ValueError(f"two items are called {item.name}")
    if isinstance(item, Item) and (unknown := set(item.paper) - set(item.runs)):
        raise ValueError(
            f"{item.name}: the papers' setting of runs that there are not: {listing(sorted(unknown))}"
        )
    REGISTRY[item.name] = item
    return item


def find(name: str) -> Drawn:
    """An item by name.

    Raises:
        UsageError: there is no such item; names the nearest.
    """
    return REGISTRY[check_known("figure or table", name, sorted(REGISTRY))]


def drawings(item: Drawn) -> list[Drawn]:
    """All drawings of an item: itself if it can be drawn, and the views of it at the same scale."""
    name, _, scale = item.name.partition("@")
    views = [
        each
        for each in REGISTRY.values()
        if isinstance(each, View) and each.source == name
    ]
    return [
        *([item] if item.draw else []),
        *(each.at(scale or QUICK) for each in views),
    ]


def _scaled(name: str, scale: str) -> str:
    return name if scale == QUICK else f"{name}@{scale}"


def rows_path(name: str, folder: Path | None = None) -> Path:
    """Return the path of an item's stored rows."""
    return (ROWS if folder is None else folder) / f"{name}{packing.SUFFIX}"


# --- rows ------------------------------------------------------------------------------------------------------


def train(
    item: Item,
    path: Path,
    *,
    seeds: int | None = None,
    data_root: str | None = None,
    backend: Backend | str = "",
    command: str = "",
    progress: bool = True,
) -> float:
    """Make an item's rows again and store them. Return the seconds taken.

    Args:
        seeds: number of seeds in place of the item's own.
        backend: where runs are trained (:mod:`fedlayers.backends.names`); default this process.

    Raises:
        UsageError: data that are not there, or no seed at all; RunError: a run failed.
    """
    count = item.seeds if seeds is None else seeds
    if count < 1:
        raise UsageError(f"seeds of {item.name} must be at least 1; got {count}.")
    if not path.parent.is_dir():
        raise UsageError(f"folder {path.parent} must exist; got none. Make it first.")
    began = time.perf_counter()
    wanted = [
        Making(item, name, seed, path.parent / item.name, data_root)
        for name in item.runs
        for seed in range(count)
    ]
    made: dict[tuple[str, int], tuple[pd.DataFrame, dict[str, Any]]] = {}

    def keep(result: Result, _: int) -> None:
        if result.error is not None:
            raise result.error
        made[result.work.run, result.work.seed] = result.value

    with open_backend(backend) as place:
        carry_out(
            wanted, place, keep, total=len(wanted), what=item.name, progress=progress
        )
    parts: list[pd.DataFrame] = []
    runs: dict[str, dict[str, Any]] = {}
    for each in wanted:  # in this order, whichever came first
        frame, of_run = made[each.run, each.seed]
        parts.append(frame)
        runs.setdefault(each.run, of_run)["data"] |= of_run["data"]
    seconds = time.perf_counter() - began
    header = {
        "item": item.name,
        "version": __version__,
        "command": command,
        "seeds": count,
        "seconds": round(seconds, 1),
        "runs": runs,
    }
    packing.write(path, [(header, pd.concat(parts, ignore_index=True))])
    return seconds


def about(task: runner.Task) -> dict[str, Any]:
    """A run's description for the rows' header: configuration, layers and data, nothing of this machine."""
    config = {
        k: v for k, v in task.config.to_json().items() if k not in (*ELSEWHERE, "seed")
    }
    config["init"] = config["init"] and Path(config["init"]).name
    return {
        "config": config,
        "layers": [asdict(layer) for layer in task.layers],
        "data": {},
    }


def described(task: runner.Task) -> dict[str, Any]:
    """:func:`about`, with the digest of its data by its seed."""
    return {**about(task), "data": {str(task.config.execution.seed): task.data.digest}}


def records(frame: pd.DataFrame) -> Iterator[rows.Row]:
    """The rows of a frame as records to be written."""
    table = frame.astype(object).where(frame.notna(), None)
    return (
        {str(name): value for name, value in record.items()}
        for record in table.to_dict("records")
    )


# --- pictures --------------------------------------------------------------------------------------------------


def redraw(item: Drawn, path: Path, out: Path) -> Drawing:
    """Draw stored rows into ``out``: NAME.png, NAME.pdf, NAME.csv, and NAME.md with the caption and the findings.

    Equal rows give equal bytes.

    Raises:
        UsageError: no rows are stored, they are another item's, or the item is a study without a drawing of its own;
            CorruptError: they are damaged.
    """
    if item.draw is None:
        views = [each.name for each in drawings(item)]
        raise UsageError(
            f"{item.name} must be a figure; got a study. Draw {listing(views) or 'it by a View'} instead."
        )
    header, frame = item.read(path)
    if not out.is_dir():
        raise UsageError(f"folder {out} must exist; got none. Make it first.")
    drawing = item.draw(header, frame)
    caption = f"{drawing.caption} {origin(header)}"
    # wrapped, so that the caption is no wider than the picture and moves no panel of it
    shown = beneath(caption, int(drawing.figure.get_figwidth() * 19.5))
    drawing.figure.supxlabel(shown, fontsize=7, color="0.3", ha="left", x=0.01)
    with mpl.rc_context({"pdf.fonttype": 42}):  # letters stay letters, as journals ask
        for suffix in FORMATS:
            if suffix == "pdf":
                drawing.figure.savefig(
                    out / f"{item.name}.pdf", metadata={"CreationDate": None}
                )
            else:
                save_png(drawing.figure, out / f"{item.name}.png")
    plt.close(drawing.figure)
    (out / f"{item.name}.csv").write_bytes(
        csv_bytes(drawing.table, float_format="%.6g")
    )
    write_page(item, header, drawing, out)
    return replace(drawing, caption=caption)


def write_page(
    item: Drawn, header: Mapping[str, Any], drawing: Drawing, out: Path
) -> None:
    """Write the page of a drawing, NAME.md, into ``out``."""
    runs = (item.runs if isinstance(item, View) else ()) or header["runs"]
    settings = page.settings(
        [about["config"] for run, about in header["runs"].items() if run in runs],
        (item.seeds if isinstance(item, View) else 0)
        or page.seeds_behind(header, runs),
    )
    settings["rows"] = origin(header).removeprefix("Rows: ").rstrip(".")
    text = page.of_figure(item.name, item.title, drawing, settings, _notes(item))
    (out / f"{item.name}.md").write_text(text, encoding="utf-8")


def runs_behind(item: Drawn) -> tuple[Item, list[RunConfig]]:
    """The study behind an item, and the runs of it that the item shows, without newly added ones."""
    study, chosen = item.study, item.runs if isinstance(item, View) else ()
    if isinstance(item, View) and item.beside:
        study, chosen = find(item.beside).study, ()
    added = getattr(study, "newcomers", ())
    return study, [
        each
        for run, each in study.runs.items()
        if (not chosen or run in chosen) and run not in added
    ]


def _notes(item: Drawn) -> list[str]:
    """Return notes on the data that an item was trained on."""
    study, runs = runs_behind(item)
    settings = isinstance(item, View) and item.settings
    trained = not settings and "nothing is trained" not in study.budget
    return (
        [f"CIFAR-10 here: {RECODED}."]
        if trained and any(each.data.dataset == "cifar10" for each in runs)
        else []
    )


def origin(header: Mapping[str, Any]) -> str:
    """The last sentence of a caption: the command that made the rows, and its time."""
    return f"Rows: `{header['command']}`, in {header['seconds']:.0f} s."


def table(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """An item's table from its lines; columns that a line lacks are empty."""
    for line in lines:
        for name in line:
            check_known("column of the table", name, COLUMNS)
    return pd.DataFrame(lines, columns=list(COLUMNS))
