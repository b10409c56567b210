"""Commands that train many runs: compare, regret, study."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from fedlayers.cli import arguments
from fedlayers.cli.arguments import Set, SetEach, SetLoss, SetModel, configured, option
from fedlayers.cli.base import Command
from fl_core.config import AUTO, RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(Command):
    """Run several algorithms over several seeds and compare them.

    Finished runs are kept and interrupted ones resumed, so that the same command goes on after a stop.

    Examples:
        fedlayers compare --algorithms local fedavg playerfl --seeds 5 --out out/heart
        fedlayers compare --algorithms fedprox ditto --set fedprox.mu=0.01
    """

    algorithms: Annotated[tuple[str, ...], option("Names: fedlayers list algorithms.", "NAME [NAME ...]")] = (
        *("local", "fedavg", "fedper", "playerfl"),
    )
    seeds: Annotated[int, option("Number of seeds, counted from --seed.")] = 3
    best_val: Annotated[bool, option("Score each client at its evaluated round of lowest validation loss.")] = False
    out: Annotated[Path, option("Folder for runs, rows, table and pictures.", "DIR")] = Path("out/compare")
    config: Annotated[RunConfig, arguments.flags(without=("algorithm",))]
    set: SetEach = ()
    set_model: SetModel = ()
    set_loss: SetLoss = ()

    def main(self, line: str) -> None:
        import matplotlib as mpl

        from fedlayers.studies import study
        from fl_core.plan import LayerPlan

        mpl.use("Agg")  # pictures go to files, also where there is a screen

        plan = None
        config = configured(self.config, (), self.set_model, self.set_loss)
        if config.plan not in (None, AUTO):
            plan, config = LayerPlan.load(str(config.plan)), dataclasses.replace(config, plan=None)
        result = study.compared(
            config,
            self.algorithms,
            tuple(range(config.seed, config.seed + self.seeds)),
            self.out,
            options=arguments.by_algorithm(self.set, self.algorithms),
            plan=plan,
            best=self.best_val,
            command=line,
        )
        print(result.text())
        print(f"\nrows, table and pictures: {self.out}")

    def interrupted(self) -> str:
        return "the same command goes on"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regret(Command):
    """Train every cut, and tell what each rule's choice loses.

    Cuts are judged on the validation split; test scores stand beside. After a stop the same command goes on; with
    other rules it measures anew, after one round of local training, and trains no cut again.

    Examples:
        fedlayers regret --dataset heart --rules sensitivity_ratio cka=largest_jump vote --seeds 5 --rounds 10
    """

    rules: Annotated[
        tuple[str, ...],
        option("Read on federation_sensitivity or METRIC.", "[METRIC=]RULE [[METRIC=]RULE ...]"),
    ] = ("sensitivity_ratio", "largest_jump", "change_point", "vote")
    seeds: Annotated[int, option("Number of seeds, counted from --seed.")] = 3
    score: Annotated[str, option("macro_f1, accuracy or loss.")] = "macro_f1"
    out: Annotated[Path, option("Folder for everything.", "DIR")] = Path("out/regret")
    config: Annotated[RunConfig, arguments.flags(without=("algorithm", "plan", "rule"))]
    algorithm: Annotated[str, option("One that obeys a plan.")] = "fedper"
    set: Set = ()
    set_model: SetModel = ()
    set_loss: SetLoss = ()

    def main(self, line: str) -> None:
        import matplotlib as mpl

        from fedlayers.diagnostics import plots
        from fedlayers.diagnostics.pictures.album import figure_of
        from fedlayers.studies.regret import regret

        mpl.use("Agg")  # pictures go to files, also where there is a screen

        config = configured(self.config, self.set, self.set_model, self.set_loss)
        config = dataclasses.replace(config, algorithm=self.algorithm)
        seeds = tuple(range(config.seed, config.seed + self.seeds))
        result = regret(config, self.rules, seeds, self.out, score=self.score, command=line)
        figure = figure_of(plots.regret(result.scores, result.decisions, self.score))
        figure.savefig(self.out / "regret.png", dpi=200, bbox_inches="tight", facecolor="white")
        print(result.text())
        print(f"\ntables and picture: {self.out}")

    def interrupted(self) -> str:
        return "the same command goes on"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(Command):
    """Measure, decide, federate and compare; write a report.

    Every client trains once and its layers are measured; a rule decides which layers to federate; the
    algorithms are run over several seeds; report.html shows it all. After a stop the same command goes on.

    Examples:
        fedlayers study
        fedlayers study --dataset digits --rounds 10 --seeds 3 --out out/digits
    """

    algorithms: Annotated[tuple[str, ...], option("Registry names: fedlayers list algorithms.", "NAME [NAME ...]")] = (
        *("local", "fedavg", "fedbabu", "playerfl", "playerfl_random"),
    )
    seeds: Annotated[int, option("Number of seeds, counted from --seed.")] = 5
    out: Annotated[Path, option("Folder for everything.", "DIR")] = Path("out/study")
    config: Annotated[RunConfig, arguments.flags(without=("algorithm", "plan"))]
    set: SetEach = ()
    set_model: SetModel = ()
    set_loss: SetLoss = ()

    def main(self, line: str) -> None:
        import matplotlib as mpl

        from fedlayers.studies import study

        mpl.use("Agg")  # pictures go to files, also where there is a screen

        study.study(
            configured(self.config, (), self.set_model, self.set_loss),
            self.algorithms,
            tuple(range(self.config.seed, self.config.seed + self.seeds)),
            self.out,
            options=arguments.by_algorithm(self.set, self.algorithms),
            command=line,
            say=print,
        )

    def interrupted(self) -> str:
        return "the same command goes on"
