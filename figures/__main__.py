"""python -m figures list [PAPER] | all | gallery | scorecard | NAME [--train] [--scale quick|paper] [--out DIR]."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal

import matplotlib as mpl
import tyro
from tyro.conf import Positional, arg

from fedlayers.backends.names import check_backend
from figures import (  # noqa: F401  (most of them register items)
    catalogue,
    decision,
    fedpft,
    fedra,
    gallery,
    items,
    learning,
    pfedla,
    player_fl,
    recipe,
    redraw_all,
    scheduling,
    scorecard,
    witness,
)
from fl_core import interrupts
from fl_core.errors import RunError, UsageError


@dataclass(frozen=True)
class Figures:
    """Redraw a figure or table of the papers from stored rows, next to the published values.

    Examples:
        python -m figures list player_fl
        python -m figures all
        python -m figures player_fl.heart_sensitivity --out out
        python -m figures player_fl.heart_sensitivity --train
        python -m figures algorithms.learning_check --train --only fedper ditto --budget 30
        python -m figures algorithms.learning_check --pack
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
    scale: Annotated[
        Literal["quick", "paper"],
        arg(
            help="quick runs on two cores within an hour; paper is the papers' full setting."
        ),
    ] = "quick"
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
    backend: Annotated[
        str,
        arg(
            help="With --train: where to train: local:N (N processes), ray, or ray:HOST:PORT (a cluster)."
        ),
    ] = ""
    device: Annotated[
        str, arg(help="With --train: where models are trained, cpu or cuda.")
    ] = "cpu"
    data_root: Annotated[
        str | None,
        arg(help="With --train: the data folder. The default is FEDLAYERS_DATA_ROOT."),
    ] = None

    def main(self, command: str) -> None:
        if self.paper and self.name != "list":
            raise UsageError(
                f"one name must be given at a time; got {self.paper} too. A paper's name goes with list."
            )
        if self.name == "list":
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
            print(
                "\n".join(
                    catalogue.wrapped(catalogue.lines(self.paper, self.scale), width)
                )
            )
        elif self.name == "scorecard":
            print(f"page: {self._scorecard()}")
        elif self.name == "all":
            self._all()
        elif self.name == gallery.NAME:
            self._gallery(command)
        else:
            self._item(command)

    def _scorecard(self) -> Path:
        """Renew the scorecard where the project keeps it, or write its tables into a folder of the user's own."""
        if self.out is None:
            return scorecard.write()
        _make_folder(self.out)
        page = self.out / "scorecard.md"
        page.write_text(f"# The scorecard\n\n{scorecard.table()}\n", encoding="utf-8")
        return page

    def _item(self, command: str) -> None:
        item = catalogue.drawn(self.name).at(self.scale)
        study = item.study
        if self.seeds is not None and not self.train:
            raise UsageError(
                "--seeds must be with --train; got it alone. Add --train, or leave --seeds out."
            )
        chosen = self.only or self.budget is not None or self.device != "cpu"
        if chosen and not (self.train and isinstance(study, recipe.Recipe)):
            raise UsageError(
                "--only, --budget and --device must be with --train and a study of many runs. Leave them out."
            )
        if self.pack and not isinstance(study, recipe.Recipe):
            raise UsageError(
                "--pack must be with a study of many runs. Leave it out: other studies have one file."
            )
        if self.backend and not self.train:
            raise UsageError(
                "--backend must be with --train; got it alone. Add --train, or leave --backend out."
            )
        if self.backend:
            check_backend(self.backend)
        if self.out is not None:
            _make_folder(self.out)
        path = item.path(self.out if self.train or self.pack else None)
        if self.train:
            print(f"{command}\ntrains {study.name}: {study.budget}")
            how: dict[str, Any] = {
                "seeds": self.seeds,
                "data_root": self.data_root,
                "backend": self.backend,
                "command": command,
            }
            if isinstance(study, recipe.Recipe):
                seconds = recipe.train(
                    study,
                    path,
                    only=self.only,
                    budget=self.budget,
                    device=self.device,
                    **how,
                )
            else:
                seconds = items.train(study, path, **how)
            print(f"took {seconds:.1f} s; rows: {path}")
        if self.pack and isinstance(study, recipe.Recipe):
            print(f"packed: {recipe.pack(study, path)}")
        out = self.out or items.PICTURES
        drawn, refused = 0, None
        for each in items.drawings(item) or [item]:
            try:
                drawing = items.redraw(each, path, out)
            except UsageError as error:
                refused = refused or error
                print(f"{each.name} is not drawn yet: {error}")
                continue
            drawn += 1
            print("\n".join([drawing.caption, *map(str, drawing.findings)]))
            print(f"picture, table and page: {out / each.name}.png, .pdf, .csv, .md")
        if (
            refused
            and (self.train or not drawn)
            and not (self.only or self.budget is not None)
        ):
            raise refused
        if lacking := study.without_rows:
            print(lacking)

    def _all(self) -> None:
        chosen = (
            self.only or self.budget is not None or self.backend or self.device != "cpu"
        )
        if self.train or self.seeds is not None or chosen or self.pack:
            raise UsageError(
                "all must be alone, since it draws stored rows. "
                "Leave --train, --seeds, --only, --budget, --backend, --device and --pack out."
            )
        if self.out is not None:
            _make_folder(self.out)
        print(f"drawn: {redraw_all.redraw(self.out)}")

    def _gallery(self, command: str) -> None:
        if self.seeds is not None:
            raise UsageError("The gallery must have its own seeds. Leave --seeds out.")
        if (
            self.only
            or self.budget is not None
            or self.backend
            or self.device != "cpu"
            or self.pack
        ):
            raise UsageError(
                "The gallery must be made as a whole. Leave --only, --budget, --backend, --device and --pack out."
            )
        if self.scale != items.QUICK:
            raise UsageError("The gallery must have its one scale. Leave --scale out.")
        if self.out is not None:
            _make_folder(self.out)
        stored = gallery.folder(self.out if self.train else None)
        if self.train:
            print(f"{command}\ntrains and measures for the gallery: {gallery.BUDGET}")
            seconds = gallery.measured(
                stored, data_root=self.data_root, command=command
            )
            print(f"took {seconds:.1f} s; rows: {stored}")
        print(f"page: {gallery.redraw(stored, self.out)}")
        if lacking := gallery.load(stored).without_rows:
            print(lacking)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. Exit with 2 for a usage error, 1 for a failure and 130 after Ctrl-C. One line says why."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    mpl.use("Agg")  # pictures go to files, also where there is a screen
    wanted = tyro.cli(Figures, prog="python -m figures", args=arguments)
    try:
        with interrupts.end_on_signals(
            lambda: (
                "the same command goes on" if wanted.train else "nothing was trained"
            )
        ):
            wanted.main(_command(wanted))
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


def _command(wanted: Figures) -> str:
    """The command that reproduces these rows, without the paths of one machine."""
    parts = [
        "python",
        "-m",
        "figures",
        wanted.name,
        *(["--train"] if wanted.train else []),
    ]
    parts += ["--scale", wanted.scale] if wanted.scale != items.QUICK else []
    parts += ["--seeds", str(wanted.seeds)] if wanted.seeds is not None else []
    parts += ["--only", *wanted.only] if wanted.only else []
    parts += ["--budget", f"{wanted.budget:g}"] if wanted.budget is not None else []
    parts += ["--device", wanted.device] if wanted.device != "cpu" else []
    return shlex.join(parts)


if __name__ == "__main__":
    main()
