"""python -m figures list [PAPER] | all | gallery | scorecard | NAME [--train] [--out DIR]."""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import tyro
from tyro.conf import Positional, arg

from figures import (  # noqa: F401  (most of them register items)
    catalogue,
    decision,
    fedpft,
    fedra,
    gallery,
    items,
    pfedla,
    player_fl,
    scheduling,
    scorecard,
    training,
    witness,
)
from fl_core import progress
from fl_core.errors import RunError, UsageError, listing

TRAINING = ("train", "pack", "seeds", "only", "budget", "device")


@dataclass(frozen=True)
class Figures:
    """Redraw a figure or table of the papers from stored rows, next to the published values.

    Examples:
        python -m figures list player_fl
        python -m figures all
        python -m figures player_fl.heart_sensitivity --out out
        python -m figures player_fl.heart_sensitivity --train
        python -m figures fedpft.longer --train --only fedper fedbn --budget 30
        python -m figures fedpft.longer --pack
        python -m figures gallery
    """

    name: Annotated[
        Positional[str],
        arg(
            metavar="[NAME]",
            help="Name of an item, or list, all, gallery or scorecard.",
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
        arg(
            help="With --train: begin no further run of a study after this many minutes."
        ),
    ] = None
    device: Annotated[
        str, arg(help="With --train: where models are trained, cpu or cuda.")
    ] = "cpu"
    data_root: Annotated[
        str | None,
        arg(help="With --train: the data folder. The default is FEDLAYERS_DATA_ROOT."),
    ] = None

    @property
    def given(self) -> dict[str, Any]:
        """Return the options of training that differ from their defaults."""
        values = {name: getattr(self, name) for name in TRAINING}
        return {
            name: value
            for name, value in values.items()
            if value != getattr(Figures, name)
        }

    @property
    def command(self) -> str:
        """Return the command that reproduces the rows, without the paths of one machine."""
        parts = ["python", "-m", "figures", self.name]
        for name, value in self.given.items():
            words = value if isinstance(value, tuple) else (value,)
            parts += [f"--{name}", *(str(word) for word in words if word is not True)]
        return shlex.join(parts)

    def main(self) -> None:
        whole = {"list": self._list, "all": self._all, "scorecard": self._scorecard}
        given = [f"--{name}" for name in self.given]
        if given and (self.name in whole or not (self.train or given == ["--pack"])):
            raise UsageError(
                f"{listing(given)} must be with the name of an item, and with --train; got {self.name}. Leave it out."
            )
        if self.paper and self.name != "list":
            raise UsageError(
                f"one name must be given at a time; got {self.paper} too. A paper's name goes with list."
            )
        if self.out is not None and self.name != "list":
            _make_folder(self.out)
        whole.get(self.name, self._item)()

    def _list(self) -> None:
        print("\n".join(catalogue.lines(self.paper)))

    def _scorecard(self) -> None:
        """Renew the scorecard where the project keeps it, or write its tables into a folder of the user's own."""
        if self.out is None:
            page = scorecard.write()
        else:
            page = self.out / "scorecard.md"
            text = f"# The scorecard\n\n{scorecard.table()}\n"
            page.write_text(text, encoding="utf-8")
        print(f"page: {page}")

    def _all(self) -> None:
        """Draw everything that has rows. A failure is reported on the error stream and stops nothing else.

        Raises:
            RunError: something failed; names it.
        """
        jobs: dict[str, Callable[[], object]] = {
            name: partial(items.redraw, item, item.path(), self.out or items.PICTURES)
            for name, item in sorted(items.REGISTRY.items())
            if item.draw is not None and item.state != "no rows"
        }
        jobs[gallery.NAME] = partial(gallery.redraw, gallery.STUDY.path(), self.out)
        failed = []
        for name, job in jobs.items():
            try:
                job()
            except Exception as error:
                plt.close("all")
                failed.append(name)
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
                if not isinstance(error, (UsageError, RunError)):
                    traceback.print_exc()
            else:
                print(name)
        if failed:
            raise RunError(
                f"{len(failed)} of {len(jobs)} could not be drawn: {listing(failed)}"
            )
        print(f"drawn: {len(jobs)}")

    def _item(self) -> None:
        item = catalogue.drawn(self.name)
        study = item.study
        path = item.path(self.out if self.train or self.pack else None)
        if self.train:
            print(f"{self.command}\ntrains {study.name}: {study.budget}")
            seconds = training.train(
                study,
                path,
                only=self.only,
                seeds=self.seeds,
                budget=self.budget,
                data_root=self.data_root,
                device=self.device,
                command=self.command,
            )
            print(f"took {seconds:.1f} s; rows: {path}")
        if self.pack:
            print(f"packed: {training.pack(study, path)}")
        if item is gallery.STUDY:
            print(f"page: {gallery.redraw(path, self.out)}")
            return
        out = self.out or items.PICTURES
        drawn, refused = 0, None
        for each in items.drawings(item) or [item] * (not self.train):
            try:
                drawing = items.redraw(each, path, out)
            except UsageError as error:
                refused = refused or error
                print(f"{each.name} is not drawn yet: {error}")
                continue
            drawn += 1
            print("\n".join([drawing.caption, *map(str, drawing.findings)]))
            print(f"page, table and picture: {out / each.name}.*")
        some = bool(self.only) or self.budget is not None
        if refused and not some and (self.train or not drawn):
            raise refused


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. Exit with 2 for a usage error, 1 for a failure and 130 after Ctrl-C. One line says why."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    mpl.use("Agg")  # pictures go to files, also where there is a screen
    wanted = tyro.cli(Figures, prog="python -m figures", args=arguments)
    told = "the same command goes on" if wanted.train else "nothing was trained"
    try:
        with progress.end_on_signals(lambda: told):
            wanted.main()
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
