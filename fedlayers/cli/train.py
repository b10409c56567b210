"""Commands that train one algorithm: run, resume."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any, ClassVar

from fedlayers.cli.options import Command, ConfiguredCommand
from fl_core.errors import plural


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

    out: Path = Path("runs/run")
    """Run directory: new, or an empty folder."""
    logger: tuple[str, ...] = ()
    """Also send rows to loggers of yours, as package.module:Class."""
    backend: str = ""
    """Train clients on a Ray cluster: ray or ray:HOST:PORT. Default: on this machine."""

    def main(self, line: str) -> None:
        from fedlayers import runs

        config = self.asked_config()
        made = runs.run(
            config, self.out, command=line, log=self.logger, backend=self.backend
        )
        print_result(made.engine, self.out)

    def interrupted(self) -> str:
        if not (self.out / "config.json").exists():
            return super().interrupted()
        again = [str(self.out)]
        if self.logger:
            again += ["--logger", *self.logger]
        return f"fedlayers resume {shlex.join(again)} continues it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resume(Command):
    """Continue an interrupted run.

    The result has the same bits as without the interruption.

    Examples:
        fedlayers run --algorithm playerfl --out runs/playerfl
        fedlayers resume runs/playerfl
    """

    dir: Path
    """Run directory."""
    allow_code: tuple[str, ...] = ()
    """Custom code that this run may import and call, as package.module:name. A model option that is no size or rate
    needs it too, such as pretrained=true."""
    allow_changed_code: bool = False
    """Continue although your own code was edited since the run trained. The run records it."""
    data_root: Path | None = None
    """Folder with the files of named datasets, if it is another one now."""
    logger: tuple[str, ...] = ()
    """Also send rows to loggers of yours, as package.module:Class."""
    backend: str = ""
    """Train clients on a Ray cluster: ray or ray:HOST:PORT. Default: on this machine."""

    argument: ClassVar[str] = "dir"

    def main(self, line: str) -> None:
        from fedlayers import runs

        made = runs.resume(
            self.dir,
            backend=self.backend,
            log=self.logger,
            allow_code=self.allow_code,
            allow_changed_code=self.allow_changed_code,
            data_root=self.data_root,
        )
        print_result(made.engine, self.dir)

    def interrupted(self) -> str:
        return "the same command continues"


def print_result(engine: Any, out: Path) -> None:
    """Print the result of a run.

    Raises:
        DivergedError: its last evaluation shows models that have diverged.
    """
    from fedlayers.cli import tables
    from fl_core import recorder, restore
    from fl_core.records.store import Run as StoredRun
    from fl_core.stopping import check_end, rule_of
    from fl_core.training.phases import Training

    stored, rule, plan = StoredRun(out), rule_of(engine), engine.algorithm.plan
    best = {} if rule is None else rule.best
    config, given = restore.stored_config(stored.config)
    notes = []
    if plan is not None:  # who gave a plan knows its evidence
        notes.append(f"{plan}\n" if given is None else f"{plan!r}\n")
    notes.append(f"local training: {Training.of(config.training).description}\n")
    times = out / "timing.jsonl"
    if times.is_file():
        notes.append(recorder.read_pace(times).line())
    if rule is not None:
        notes.append(rule.report(engine.done, engine.schedule.rounds))
    notes.append(f"{plural(engine.done, 'round')} of {engine.algorithm.name}: {out}")
    print(tables.scores(stored.rows()[1], engine.done, best))
    print("", *notes, sep="\n")
    check_end(stored, engine.done if rule is None else best.get(rule.main, engine.done))
