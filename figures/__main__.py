"""python -m figures list [PAPER] | all | gallery | scorecard | gpu | NAME [--train] [--out DIR]."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import matplotlib as mpl
import matplotlib.pyplot as plt
import tyro
from tyro.conf import Positional, arg

from figures import (  # noqa: F401  (most of them register items)
    catalogue,
    decision,
    device,
    fedpft,
    fedra,
    gallery,
    items,
    pfedla,
    player_fl,
    scheduling,
    scorecard,
    training,
)
from figures.papers import PAPERS
from fl_core import progress
from fl_core.errors import RunError, UsageError, listing

TRAINING = ("train", "pack", "seeds", "only", "budget", "device")


@dataclass(frozen=True)
class Figures:
    """Redraw a figure or table of the papers from stored rows, next to the published values.

    Examples:
        python -m figures list player_fl
        python -m figures all
        python -m figures scheduling --out out
        python -m figures player_fl.heart_sensitivity --out out
        python -m figures player_fl.heart_sensitivity --train
        python -m figures fedpft.longer --train --only fedper fedbn --budget 30
        python -m figures fedpft.longer --pack
        python -m figures gallery
        python -m figures gpu --budget 60
    """

    name: Annotated[
        Positional[str],
        arg(
            metavar="[NAME]",
            help="Name of an item or of a paper, or list, all, gallery, scorecard or gpu.",
        ),
    ] = "list"
    paper: Annotated[
        Positional[str],
        arg(metavar="[PAPER]", help="With list: show only the items of this paper."),
    ] = ""
    train: Annotated[bool, arg(help="Train the runs and store new rows first.")] = False
    pack: Annotated[
        bool,
        arg(help="Put the stored runs of a study into the one file of the repository."),
    ] = False
    out: Annotated[
        Path | None,
        arg(
            help="Folder for everything that is written. The default is the project's own folders."
        ),
    ] = None
    seeds: Annotated[int | None, arg(help="With --train: the number of seeds.")] = None
    only: Annotated[
        tuple[str, ...], arg(help="With --train: train only these runs of a study.")
    ] = ()
    budget: Annotated[
        float | None,
        arg(help="With --train or gpu: begin no further run after this many minutes."),
    ] = None
    device: Annotated[
        str,
        arg(
            help="With --train or gpu: where models are trained, cpu or cuda. The default of gpu is cuda."
        ),
    ] = ""
    data_root: Annotated[
        str | None,
        arg(
            help="With --train or gpu: the data folder. The default is FEDLAYERS_DATA_ROOT."
        ),
    ] = None

    def main(self) -> None:
        """Run the command that the options name.

        Raises:
            UsageError: options do not go together, or something is not there; RunError: something failed.
        """
        commands: dict[str, Callable[[], None]] = {
            "list": self._list,
            "all": self._all,
            "scorecard": self._scorecard,
            "gpu": self._gpu,
            **{paper: partial(self._all, paper) for paper in PAPERS},
        }
        usable_options: tuple[str, ...] = TRAINING if self.train else ("pack",)
        if self.name in commands:
            usable_options = ("budget", "device") if self.name == "gpu" else ()
        wrong_flags = [
            f"--{option}"
            for option in TRAINING
            if getattr(self, option) != getattr(Figures, option)
            and option not in usable_options
        ]
        if wrong_flags:
            raise UsageError(
                f"{listing(wrong_flags)} must be with the name of an item, and with --train; got {self.name}. "
                "Leave it out."
            )
        if self.paper and self.name != "list":
            raise UsageError(
                f"one name must be given at a time; got {self.paper} too. A paper's name goes with list."
            )
        if self.out is not None and self.name != "list":
            _make_folder(self.out)
        commands.get(self.name, self._item)()

    def _list(self) -> None:
        print("\n".join(catalogue.lines(self.paper)))

    def _scorecard(self) -> None:
        """Renew the scorecard where the project keeps it, or write its page into a folder of the user's own."""
        path = scorecard.write(self.out or items.HERE)
        print(f"page: {path}")

    def _all(self, paper: str = "") -> None:
        """Draw everything that has rows, or all of a paper.

        A failure is reported on the error stream and stops nothing else.

        Raises:
            RunError: something failed; names it.
        """
        jobs: dict[str, Callable[[], object]] = {
            drawing_name: partial(
                items.redraw, item, item.path(), self.out or items.PICTURES
            )
            for drawing_name, item in sorted(items.REGISTRY.items())
            if item.draw is not None and item.state != "no rows"
        }
        jobs[gallery.NAME] = partial(gallery.redraw, gallery.STUDY.path(), self.out)
        if paper:
            jobs = {k: job for k, job in jobs.items() if k.startswith(f"{paper}.")}
        failed_names = []
        for drawing_name, job in jobs.items():
            try:
                job()
            except Exception as error:
                plt.close("all")
                failed_names.append(drawing_name)
                error_type = type(error).__name__
                print(f"{drawing_name}: {error_type}: {error}", file=sys.stderr)
                if not isinstance(error, (UsageError, RunError)):
                    traceback.print_exc()
            else:
                print(drawing_name)
        if failed_names:
            raise RunError(
                f"{len(failed_names)} of {len(jobs)} could not be drawn: {listing(failed_names)}"
            )
        print(f"drawn: {len(jobs)}")

    def _train(
        self,
        study: items.Item,
        device: str,
        budget: float | None,
        *,
        runs: Sequence[str],
        seeds: int | None,
    ) -> float:
        """Train a study's missing runs; return the minutes taken."""
        path = study.path(self.out)
        print(f"trains {study.name}, with rows in {path}: {study.budget}")
        seconds = training.train(
            study,
            path,
            only=runs,
            seeds=seeds,
            budget=budget,
            data_root=self.data_root,
            device=device,
        )
        print(f"took {seconds:.1f} s; rows: {path}")
        return seconds / 60

    def _gpu(self) -> None:
        """List the missing runs that wait for a GPU with their lines of the scorecard, and train within the budget."""
        minutes_left = math.inf if self.budget is None else self.budget
        if not minutes_left >= 0:
            raise UsageError(
                f"--budget must be at least 0 minutes; got {minutes_left:g}. With 0 the runs are listed alone."
            )
        for waiting in device.WAITING:
            missing_lines = list(waiting.missing(self.out))
            if missing_lines:
                print(f"{waiting.study}, for {listing(waiting.lines)}:")
            for run_text in missing_lines:
                print(f"  {run_text}")
            if missing_lines and minutes_left > 0:
                minutes_left -= self._train(
                    items.find(waiting.study),
                    self.device or "cuda",
                    minutes_left,
                    runs=waiting.runs,
                    seeds=waiting.seeds,
                )

    def _item(self) -> None:
        item = catalogue.drawn(self.name)
        study = item.study
        path = item.path(self.out if self.train or self.pack else None)
        if self.train:
            self._train(
                study,
                self.device or "cpu",
                self.budget,
                runs=self.only,
                seeds=self.seeds,
            )
        if self.pack:
            packed_path = training.pack(study, path)
            print(f"packed: {packed_path}")
        if item is gallery.STUDY:
            page_path = gallery.redraw(path, self.out)
            print(f"page: {page_path}")
            return
        out = self.out or items.PICTURES
        drawn_count, refusals = 0, list[UsageError]()
        for drawing_item in items.drawings(item) or [item] * (not self.train):
            try:
                drawing = items.redraw(drawing_item, path, out)
            except UsageError as error:
                refusals.append(error)
                continue
            drawn_count += 1
            print("\n".join([drawing.caption, *map(str, drawing.findings)]))
            print(f"page, table and picture: {out / drawing_item.name}.*")
        is_partial = bool(self.only) or self.budget is not None
        if refusals and not is_partial and (self.train or not drawn_count):
            raise refusals[0]
        for reason in refusals:
            print(f"not drawn yet: {reason}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. Exit with 2 for a usage error, 1 for a failure and 130 after Ctrl-C. One line says why."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    mpl.use("Agg")  # pictures go to files, also where there is a screen
    command = tyro.cli(Figures, prog="python -m figures", args=arguments)
    ending_text = "nothing was trained"
    if command.train:
        ending_text = "the same command goes on"
    try:
        with progress.end_on_signals(lambda: ending_text):
            command.main()
    except (UsageError, RunError) as error:
        print(f"figures: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


def _make_folder(path: Path) -> None:
    """Make a folder that can be written to.

    Raises:
        UsageError: it cannot be made, or nothing can be written to it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(
            f"--out must be a folder that can be written to; got {path} ({error.strerror}). Choose another folder."
        ) from error


if __name__ == "__main__":
    main()
