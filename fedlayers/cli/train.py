"""Commands on single runs: run, resume, verify."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

from fedlayers.cli.options import (
    FILES,
    OF_RACE,
    Command,
    ConfiguredCommand,
    ModelCode,
    RunDirectory,
    Set,
    apply_options,
    flags,
    option,
)
from fedlayers.runs import CHOOSE
from fl_core.config import RunConfig
from fl_core.errors import plural

Log = Annotated[
    tuple[str, ...],
    option(
        "Also send scores to these loggers: see fedlayers list loggers.",
        "NAME [NAME ...]",
    ),
]
On = Annotated[
    str,
    option(
        "Train clients on a Ray cluster: ray or ray:HOST:PORT. Default: on this machine.",
        "NAME",
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(ConfiguredCommand):
    """Train one algorithm, and store a run directory.

    The run directory holds configuration, models and scores. A plan names the layers that clients share. The other
    layers stay local.

    Next: fedlayers diagnose DIR, fedlayers plot DIR, fedlayers export DIR

    Examples:
        fedlayers run --dataset heart --algorithm playerfl --out runs/playerfl
        fedlayers run --algorithm fedper --plan auto --out runs/auto
        fedlayers run --algorithm fedprox --option mu=0.01 --out runs/fedprox
        fedlayers run --dataset digits --partition dirichlet --clients 3 --out runs/digits
    """

    out: Annotated[Path, option("Run directory: new, or an empty folder.", "DIR")] = (
        Path("runs/run")
    )
    config: Annotated[RunConfig, flags()]
    set: Set = ()
    logger: Log = ()
    backend: On = ""

    def asked_config(self) -> RunConfig:
        return apply_options(self.config, self.set, self.model_option, self.loss_option)

    def own_defaults(self) -> Collection[str]:
        return OF_RACE if self.config.federation.plan == CHOOSE else ()

    def main(self, line: str) -> None:
        from fedlayers import catalogue

        config = self.asked_config()
        for name in self.logger:
            catalogue.check("logger", name)

        from fedlayers import runs

        made = runs.run(
            config, self.out, command=line, log=self.logger, backend=self.backend
        )
        print_result(made.engine, self.out)

    def interrupted(self) -> str:
        begun = (self.out / "config.json").exists()
        if not begun and self.config.federation.plan == CHOOSE:
            return "the same command continues"
        again = shlex.join(
            [
                str(self.out),
                *(["--logger", *self.logger] if self.logger else []),
                *self._files(),
            ]
        )
        return (
            f"fedlayers resume {again} continues it" if begun else super().interrupted()
        )

    def _files(self) -> list[str]:
        """Return the flags of files that a run needs again as long as it has not begun."""
        from fl_core.defaults import is_file

        if (self.out / "manifest.json").exists():
            return []
        named = {
            "data-root": self.config.data.data_root,
            "init": self.config.model.init,
        }
        if is_file(self.config.data.dataset):
            named["dataset"] = self.config.data.dataset
        return [
            word
            for flag, value in named.items()
            if value is not None
            for word in (f"--{flag}", value)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resume(Command):
    """Continue an interrupted run.

    The result has the same bits as without the interruption.

    Examples:
        fedlayers run --algorithm playerfl --out runs/playerfl
        fedlayers resume runs/playerfl
    """

    dir: RunDirectory
    allow_code: ModelCode = ()
    allow_changed_code: Annotated[
        bool,
        option(
            "Continue although your own code was edited since the run trained. The run records it."
        ),
    ] = False
    dataset: Annotated[
        str | None,
        FILES,
        option("Path of the run's data, if it stopped before it copied them."),
    ] = None
    data_root: Annotated[
        Path | None, option("Folder with the files of named datasets.", "DIR")
    ] = None
    init: Annotated[
        Path | None,
        option("Initial weights, if the run stopped before it copied them.", "PATH"),
    ] = None
    logger: Log = ()
    backend: On = ""

    def main(self, line: str) -> None:
        from fedlayers import catalogue

        for name in self.logger:
            catalogue.check("logger", name)

        from fedlayers import runs

        files: dict[str, Any] = {
            "dataset": self.dataset,
            "data_root": self.data_root,
            "init": self.init,
        }
        own: dict[str, Any] = {
            "allow_code": self.allow_code,
            "allow_changed_code": self.allow_changed_code,
            **files,
        }
        made = runs.resume(self.dir, log=self.logger, backend=self.backend, **own)
        print_result(made.engine, self.dir)

    def interrupted(self) -> str:
        return "the same command continues"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify(Command):
    """Check that the files of a run are unchanged.

    It compares SHA-256 digests. It does not check timing.jsonl, and rows after the last checkpoint.

    Examples:
        fedlayers run --algorithm playerfl --out runs/playerfl
        fedlayers verify runs/playerfl
    """

    dir: RunDirectory

    def main(self, line: str) -> None:
        from fl_core.records.store import Run as StoredRun

        print("\n".join(StoredRun(self.dir).verify()))
        print(f"{self.dir}: all files are unchanged")


def print_result(engine: Any, out: Path) -> None:
    """Print the result of a run.

    Raises:
        DivergedError: its last evaluation shows models that have diverged.
    """
    from fedlayers.cli import tables
    from fl_core import divergence, restore
    from fl_core.records import timing
    from fl_core.records.store import Run as StoredRun
    from fl_core.stopping import rule_of
    from fl_core.training.phases import Training

    stored, rule = StoredRun(out), rule_of(engine)
    best = {} if rule is None else rule.best
    times = out / "timing.jsonl"
    plan, given = (
        engine.algorithm.plan,
        stored.config.get("given") is not None,
    )  # who gave a plan knows its evidence
    notes = [] if plan is None else [f"{plan!r}\n" if given else f"{plan}\n"]
    config = restore.stored_config(stored.config)[0]
    notes.append(f"local training: {Training.of(config.training).description}\n")
    notes += [timing.read(times).line()] if times.is_file() else []
    notes += [] if rule is None else [rule.report(engine.done, engine.schedule.rounds)]
    notes.append(f"{plural(engine.done, 'round')} of {engine.algorithm.name}: {out}")
    rest = "\n".join(notes)
    print(
        tables.scores(
            stored.rows()[1], engine.done, best, tables.LINES - 2 - rest.count("\n")
        )
    )
    print(f"\n{rest}")
    divergence.check_end(
        stored, engine.done if rule is None else best.get(rule.main, engine.done)
    )
