"""Items: figures and tables of papers, with the runs behind them, their measurements and their drawing.

Training and drawing are separate. :mod:`figures.training` stores rows run by run. :func:`redraw` makes a picture, a
table and a page from stored rows alone. Several figures of the same runs are each an item with the same source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

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
from figures.papers import published as published, published_table as published_table
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.display import csv_bytes
from fl_core.errors import CorruptError, UsageError, check_known, listing

HERE = Path(__file__).parent
ROWS, PICTURES = HERE / "rows", HERE / "pictures"
FAILED = "finished"
"""The metric of the row, without a value, that stands for a run whose training diverged."""
RECODED = (
    "its images are re-coded as JPEG, so only differences of methods are comparable"
)
"""What to know of the CIFAR-10 behind the stored rows."""
Draw = Callable[[Mapping[str, Any], pd.DataFrame], Drawing]


def unchanged(config: RunConfig, run: str, folder: Path) -> RunConfig:
    """Return the same configuration, for runs that need no preparation."""
    return config


@dataclass(frozen=True)
class Item:
    """A figure or table, and the runs behind it. It has its own runs, or those of another item, its source.

    Attributes:
        name: ``paper.what``.
        title: one line.
        runs: configurations by name; the name stands in the column ``run`` of their rows.
        seeds: number of seeds of each, from 0 on; of a source's runs how many are drawn, 0 for all.
        budget: time that its runs take on one core, in words.
        measure: (task of one run and seed, the run's name, the item's folder) -> its rows.
        draw: (header, rows) -> drawing; it computes no measurement. None for runs that only others draw.
        own_seeds: runs that have another number of seeds than ``seeds``, and how many.
        prepare: (configuration with its seed and data root, run, folder) -> the configuration that runs; called before
            a run, to provide what it starts from.
        source: name of the item whose rows are drawn; empty for its own.
        shown: runs of the source without which there is nothing to draw; default all.
        partial: whether it is drawn although some of its runs have no rows at all.
        also: names of further figures and tables of the paper that it shows.
    """

    name: str
    title: str
    runs: Mapping[str, RunConfig] = field(default_factory=dict)
    seeds: int = 0
    budget: str = ""
    measure: Callable[[Any, str, Path], pd.DataFrame] | None = None
    draw: Draw | None = None
    own_seeds: Mapping[str, int] = field(default_factory=dict)
    prepare: Callable[[RunConfig, str, Path], RunConfig] = unchanged
    source: str = ""
    shown: Collection[str] = ()
    partial: bool = False
    also: tuple[str, ...] = ()

    @property
    def study(self) -> Item:
        """Return the item whose rows are drawn.

        Raises:
            UsageError: there is no such item.
        """
        return find(self.source) if self.source else self

    @property
    def drawn(self) -> list[RunConfig]:
        """Return the configurations of the runs that it shows."""
        runs = self.study.runs
        return [runs[run] for run in self.shown or runs]

    @property
    def command(self) -> str:
        """Return the command that makes the item's rows."""
        return f"python -m figures {self.study.name} --train"

    @property
    def state(self) -> str:
        """Return ``ready`` if all rows that it shows are stored, else the number of stored runs, or ``damaged``."""
        study = self.study
        awaited_keys = [
            run_key
            for run_key in study.planned()
            if not self.shown or run_key[0] in self.shown
        ]
        try:
            stored_count = len(study.headers(self.path()).keys() & awaited_keys)
        except CorruptError:
            return "damaged"
        if stored_count == len(awaited_keys):
            return "ready"
        return (
            f"{stored_count} of {len(awaited_keys)} runs" if stored_count else "no rows"
        )

    def planned(self, seeds: int | None = None) -> list[tuple[str, int]]:
        """Return every (run, seed), the first seed of all runs first.

        Args:
            seeds: number of seeds in place of the item's own, but for those whose own is 1.
        """
        own_counts = self.own_seeds
        seed_counts = {run: own_counts.get(run, self.seeds) for run in self.runs}
        if seeds is not None:
            seed_counts = {
                run: 1 if own_counts.get(run) == 1 else seeds for run in self.runs
            }
        planned_keys = []
        for seed in range(max(seed_counts.values(), default=0)):
            planned_keys += [
                (run, seed) for run in self.runs if seed < seed_counts[run]
            ]
        return planned_keys

    def path(self, folder: Path | None = None) -> Path:
        """Return the folder of its runs' files; the packed file is next to it."""
        return (ROWS if folder is None else folder) / self.study.name

    def headers(self, folder: Path) -> dict[tuple[str, int], packing.Header]:
        """Return the header of each stored run and seed, packed or not, as it was written; raises as :meth:`parts`."""
        with self._command_named():
            packed_headers = map(packing.headers, packed_files(folder))
            headers = list(chain.from_iterable(packed_headers))
            headers += map(rows.read_header, folder.glob("*.jsonl"))
        return {(header["run"], int(header["seed"])): header for header in headers}

    def parts(self, folder: Path) -> dict[tuple[str, int], packing.Part]:
        """Return header and rows of each stored run and seed, packed or not, in the order of their files' names.

        Raises:
            UsageError: a header is another item's; CorruptError: rows are damaged, or of another format.
        """
        with self._command_named():
            packed_parts = map(packing.read, packed_files(folder))
            stored_parts = list(chain.from_iterable(packed_parts))
            stored_parts += [rows.read(file) for file in sorted(folder.glob("*.jsonl"))]
        part_by_run = {}
        for stored_part in stored_parts:
            check_owner(self, folder, stored_part[0])
            part_by_run[stored_part[0]["run"], int(stored_part[0]["seed"])] = (
                stored_part
            )
        run_order = sorted(
            part_by_run, key=lambda run_key: rows_file(folder, *run_key).name
        )
        return {run_key: part_by_run[run_key] for run_key in run_order}

    @contextmanager
    def _command_named(self) -> Iterator[None]:
        """Add the command that makes the rows to an error about them."""
        try:
            yield
        except (CorruptError, UsageError) as error:
            raise CorruptError(f"{error} The command: {self.command}") from error

    def read(self, path: Path) -> tuple[dict[str, Any], pd.DataFrame]:
        """Read the stored runs of the study: one header, and the rows of all.

        The header has the seeds of each run that ended (``had``), are ``missing``, or ``failed`` with a reason.

        Raises:
            UsageError: no rows are stored, or they are another item's; CorruptError: they are damaged.
        """
        study = self.study
        part_by_run = study.parts(path)
        if not part_by_run:
            raise UsageError(
                f"rows of {study.name} must be at {path}; got none. Make them ({study.budget}): {self.command}"
            )
        runs: dict[str, dict[str, Any]] = {}
        reason_by_run, frame_by_run = {}, {}
        for (run, seed), (header, frame) in part_by_run.items():
            check_known("run", run, study.runs)
            runs.setdefault(run, header["about"])["data"] |= header["about"]["data"]
            reasons = frame["status"][frame["metric"] == FAILED]
            if len(reasons):
                reason_by_run[f"{run} {seed}"] = reasons.iloc[0]
            else:
                frame_by_run[run, seed] = frame
        if not frame_by_run:
            first_reason = next(iter(reason_by_run.values()))
            raise UsageError(
                f"{study.name} must have a finished run in {path}; got failures, first {first_reason}. "
                f"Train again: {self.command}"
            )
        position_by_run = {run: position for position, run in enumerate(study.runs)}
        run_keys = sorted(
            frame_by_run, key=lambda run_key: (position_by_run[run_key[0]], run_key[1])
        )
        seeds_by_run = {
            run: [seed for keyed_run, seed in run_keys if keyed_run == run]
            for run in study.runs
        }
        header = {
            "item": study.name,
            "command": self.command,
            "seeds": max(map(len, seeds_by_run.values())),
            "seconds": round(sum(header["seconds"] for header, _ in part_by_run.values()), 1),
            "runs": runs,
            "had": seeds_by_run,
            "failed": reason_by_run,
            "missing": [f"{run} {seed}" for run, seed in study.planned() if (run, seed) not in part_by_run],
        }  # fmt: skip
        return header, pd.concat(
            [frame_by_run[run_key] for run_key in run_keys], ignore_index=True
        )


REGISTRY: dict[str, Item] = {}


def register(item: Item) -> Item:
    """Add an item under its name."""
    if item.name in REGISTRY:
        raise ValueError(f"two items are called {item.name}")
    REGISTRY[item.name] = item
    return item


def by_name() -> dict[str, Item]:
    """Return all items by their names, and by those of further figures that they show."""
    items_by_name = dict(REGISTRY)
    for shown_item in REGISTRY.values():
        items_by_name |= dict.fromkeys(shown_item.also, shown_item)
    return items_by_name


def find(item_name: str) -> Item:
    """Return an item by its name, or by that of a figure that it shows.

    Raises:
        UsageError: there is no such item; names the nearest.
    """
    items_by_name = by_name()
    return items_by_name[
        check_known("figure or table", item_name, sorted(items_by_name))
    ]


def drawings(item: Item) -> list[Item]:
    """Return all drawings of an item: itself if it can be drawn, and those of which it is the source."""
    derived_items = [
        candidate for candidate in REGISTRY.values() if candidate.source == item.name
    ]
    return [*([item] if item.draw else []), *derived_items]


# --- stored rows -----------------------------------------------------------------------------------------------


def rows_file(folder: Path, run: str, seed: int) -> Path:
    """Return the file of one run's rows."""
    return folder / f"{run}-{seed}.jsonl"


def packed_file(folder: Path) -> Path:
    """Return the file of all runs of a folder, for the repository."""
    return folder.with_name(folder.name + packing.SUFFIX)


def packed_files(folder: Path) -> list[Path]:
    """Return the existing packed files: the file of all runs, and the files in the folder with some runs."""
    packed = packed_file(folder)
    return [
        *([packed] if packed.is_file() else []),
        *sorted(folder.glob(f"*.rows{packing.SUFFIX}")),
    ]


def check_owner(item: Item, path: Path, header: packing.Header) -> None:
    """Refuse the rows of another item.

    Raises:
        UsageError: the header names another item.
    """
    owner = header.get("item")
    if owner != item.name:
        raise UsageError(
            f"rows at {path} must be of {item.name!r}; got rows of {owner!r}. Make them: {item.command}"
        )


# --- pictures --------------------------------------------------------------------------------------------------


def redraw(item: Item, path: Path, out: Path) -> Drawing:
    """Draw stored rows into ``out``: NAME.png, NAME.csv, and NAME.md with the caption and the findings.

    Beneath the picture stand the page's first lines and as much of the caption as fits.

    Equal rows give equal bytes.

    Raises:
        UsageError: no rows are stored, or none of a run that it shows, they are another item's, or the item is a study
            without a drawing of its own; CorruptError: they are damaged.
    """
    if item.draw is None:
        view_names = listing([view.name for view in drawings(item)]) or "another"
        raise UsageError(
            f"{item.name} must be a figure; got a study. Draw {view_names} instead."
        )
    header, frame = item.read(path)
    required_runs = () if item.partial else item.shown or item.study.runs
    if missing_runs := [run for run in required_runs if not header["had"][run]]:
        raise UsageError(
            f"{item.name} must have rows of {listing(missing_runs)}; got none. Make them: {item.command}"
        )
    drawing = item.draw(header, frame)
    origin_text = f"Rows: `{header['command']}`, in {header['seconds']:.0f} s."
    caption = f"{drawing.caption} {origin_text}"
    if drawing.figure is not None:
        # wrapped, so that the text is no wider than the picture and moves no panel of it
        lead = " ".join(page.lead_of(item.name, drawing)).replace("**", "")
        figure, width = drawing.figure, int(drawing.figure.get_figwidth() * 19.5)
        text_look: dict[str, Any] = {
            "fontsize": 7,
            "color": "0.3",
            "ha": "left",
            "x": 0.01,
        }
        caption_artist = figure.supxlabel(beneath(lead, caption, width), **text_look)
        while caption_artist.get_window_extent().width > 0.98 * figure.bbox.width:
            width -= 2
            caption_artist.set_text(beneath(lead, caption, width))
        save_png(drawing.figure, out / f"{item.name}.png")
        plt.close(drawing.figure)
    table_bytes = csv_bytes(drawing.table, float_format="%.6g")
    (out / f"{item.name}.csv").write_bytes(table_bytes)
    settings = _settings(item, header)
    settings["rows"] = origin_text.removeprefix("Rows: ").rstrip(".")
    text = page.of_figure(item.name, item.title, drawing, settings, _notes(item))
    (out / f"{item.name}.md").write_text(text, encoding="utf-8")
    return replace(drawing, caption=caption)


def _settings(item: Item, header: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of the runs that an item shows, for its page."""
    runs = item.shown or header["runs"]
    configs = [
        run_header["config"]
        for run, run_header in header["runs"].items()
        if run in runs
    ]
    seed_count = item.seeds if item.source else 0
    return page.settings(configs, seed_count or page.seeds_behind(header, runs))


def _notes(item: Item) -> list[str]:
    """Return notes on the data that an item was trained on."""
    is_trained = "nothing is trained" not in item.study.budget
    is_recoded = any(config.data.dataset == "cifar10" for config in item.drawn)
    return [f"CIFAR-10 here: {RECODED}."] if is_trained and is_recoded else []


def table(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return an item's table from its lines; columns that a line lacks are empty."""
    return pd.DataFrame(lines, columns=list(COLUMNS))
