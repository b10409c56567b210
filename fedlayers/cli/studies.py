"""Commands that train many runs: choose, compare, tune, regret, study."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from fedlayers import catalogue
from fedlayers.backends.names import check_backend
from fedlayers.cli import arguments
from fedlayers.cli.arguments import Set, SetEach, SetLoss, SetModel, configured, option
from fedlayers.cli.base import Configured
from fedlayers.cli.superlinks import NOWHERE, OfSites
from fl_core.config import AUTO, RunConfig
from fl_core.errors import UsageError

Seeds = Annotated[int, option("Number of seeds, from --seed on.")]
Score = Annotated[str, option("Score that decides, such as auroc or loss; default the main score of the task.")]
On = Annotated[str, option("Train runs in N processes (local:N) or on a cluster (ray, ray:HOST:PORT).", "PLACE")]
TuneRates = Annotated[
    int | None,
    option(
        "Learning rates to try first, 2 to 5, sharing all but the last layer; 0: none. Default 4 for your own data, "
        "else 0. --lr is kept."
    ),
]
Arms = Annotated[
    tuple[str, ...],
    option(
        "Candidates: nothing, half, all_but_last, all, first_K, last_K, lora_A, lora_B, PLAN.json, an algorithm, or "
        "ALGORITHM:CUT.",
        "ARM [ARM ...]",
    ),
]


class ManyRuns(Configured):
    """The base of commands that train many runs. They can be interrupted and started again."""

    seeds: int
    backend: str
    config: RunConfig
    model_option: tuple[str, ...]
    loss_option: tuple[str, ...]

    def interrupted(self) -> str:
        return "the same command continues"

    def asked_config(self) -> RunConfig:
        return self.asked()[0]

    def asked(self, options: tuple[str, ...] = ()) -> tuple[RunConfig, tuple[int, ...]]:
        """Return the configuration and the seeds of the command line, after checks of names and numbers."""
        if self.seeds < 1:
            raise UsageError(f"--seeds must be at least 1; got {self.seeds}.")
        if self.backend:
            check_backend(self.backend)
        config = configured(self.config, options, self.model_option, self.loss_option)
        return config, tuple(range(config.seed, config.seed + self.seeds))


class OneAlgorithm(ManyRuns):
    """The base of commands whose runs all train one algorithm, which uses the plans under study."""

    algorithm: str
    set: tuple[str, ...]

    def asked_config(self) -> RunConfig:
        return self.of_one()[0]

    def of_one(self) -> tuple[RunConfig, tuple[int, ...]]:
        """Return the configuration of the algorithm and the seeds, after checks of names and numbers."""
        catalogue.check("algorithm", self.algorithm)
        config, seeds = self.asked(self.set)
        return dataclasses.replace(config, algorithm=self.algorithm), seeds


class SeveralAlgorithms(ManyRuns):
    """The base of commands that run several algorithms, each with options of its own."""

    algorithms: tuple[str, ...]
    set: tuple[str, ...]

    def of_several(self) -> tuple[RunConfig, tuple[int, ...], dict[str, dict[str, Any]]]:
        """Return the common configuration, the seeds, and the algorithms' own options, after checks."""
        config, seeds = self.asked()
        for name in self.algorithms:
            catalogue.check("algorithm", name)
        return config, seeds, arguments.by_algorithm(self.set, self.algorithms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(SeveralAlgorithms):
    """Run several algorithms over several seeds and compare them.

    After a stop the same command continues. Finished runs are kept and interrupted ones resumed.

    Next: fedlayers plot OUT/rows.jsonl.

    Examples:
        fedlayers compare --algorithms local fedavg playerfl --seeds 5 --out out/heart
        fedlayers compare --algorithms fedprox ditto --option fedprox.mu=0.01
        fedlayers compare --algorithms fedavg fedprox --tuned out/tune/tuned.json
    """

    algorithms: Annotated[tuple[str, ...], option("Names: fedlayers list algorithms.", "NAME [NAME ...]")] = (
        *("local", "fedavg", "fedper", "playerfl"),
    )
    seeds: Seeds = 3
    tuned: Annotated[Path | None, option("Settings from fedlayers tune: its tuned.json.", "FILE")] = None
    select_by: Annotated[
        Literal["last", "validation"] | None,
        option("Round to score: the last, or each model's best on validation (default with --patience)."),
    ] = None
    score: Score = ""
    baselines: Annotated[bool, option("Add the majority class, and a logistic regression on all data.")] = False
    out: Annotated[Path, option("Folder for runs, rows, table and pictures.", "DIR")] = Path("out/compare")
    backend: On = ""
    config: Annotated[RunConfig, arguments.flags(without=("algorithm", "leave_out_client"))]
    set: SetEach = ()
    model_option: SetModel = ()
    loss_option: SetLoss = ()

    def main(self, line: str) -> None:
        config, seeds, options = self.of_several()

        from fedlayers.studies import study_plots
        from fedlayers.studies.compare import compare
        from fl_core.plan import LayerPlan

        study_plots.to_files()
        plan = None
        if config.plan not in (None, AUTO):
            plan, config = LayerPlan.load(str(config.plan)), dataclasses.replace(config, plan=None)
        comparison = compare(
            config,
            self.algorithms,
            seeds,
            self.out,
            options=options,
            plan=plan,
            tuned=self.tuned,
            best=None if self.select_by is None else self.select_by == "validation",
            score=self.score,
            baselines=self.baselines,
            backend=self.backend,
            command=line,
        )
        for name, figure in study_plots.of_comparison(comparison).items():
            study_plots.save(figure, self.out / f"{name}.png")
        print(comparison.text())
        print(f"\nrows, table and pictures: {self.out}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tune(SeveralAlgorithms):
    """Search the learning rate and the options of algorithms, with equal trials for all.

    Every algorithm tries the same number of settings. Validation samples judge them. The estimated cost is printed
    first. --workers trains runs side by side. After a stop the same command continues.

    Next: fedlayers compare --tuned OUT/tuned.json.

    Examples:
        fedlayers tune --algorithms fedavg fedprox --search lr=1e-4..1e-1:log mu=0.01,0.1,1 --trials 8
        fedlayers tune --algorithms fedper ditto --search lr=0.001,0.01,0.1 ditto.lam=0.1..10:log --seeds 2 --workers 2
    """

    algorithms: Annotated[tuple[str, ...], option("Names: fedlayers list algorithms.", "NAME [NAME ...]")]
    search: Annotated[
        tuple[str, ...],
        option(
            "KEY=VALUE,VALUE or KEY=LOW..HIGH or KEY=LOW..HIGH:log. A KEY is lr, momentum, weight_decay, "
            "max_grad_norm, an algorithm's own, or ALGORITHM.KEY.",
            "KEY=SEARCH [KEY=SEARCH ...]",
        ),
    ]
    trials: Annotated[int, option("Settings per algorithm, at most all that exist.")] = 8
    seeds: Annotated[int, option("Number of seeds, from --seed + 1000 on; a comparison uses others.")] = 1
    score: Score = ""
    out: Annotated[Path, option("Folder for runs, trials.csv and tuned.json.", "DIR")] = Path("out/tune")
    backend: On = ""
    config: Annotated[RunConfig, arguments.flags(without=("algorithm", "leave_out_client"))]
    set: SetEach = ()
    model_option: SetModel = ()
    loss_option: SetLoss = ()

    def main(self, line: str) -> None:
        config, seeds, options = self.of_several()
        arguments.check_folder(self.out)
        over = arguments.texts("--search", self.search)

        from fedlayers.studies.tune import APART, tune

        asked: dict[str, Any] = {
            "trials": self.trials,
            "score": self.score,
            "options": options,
            "backend": self.backend,
            "tell": _say,
        }
        result = tune(config, self.algorithms, over, self.out, seeds=[APART + seed for seed in seeds], **asked)
        print(f"\n{result.text()}\n\nto compare by it: fedlayers compare --tuned {self.out / 'tuned.json'}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choose(OneAlgorithm):
    """Train a few ways of sharing layers, and say which to use.

    An arm is one way of sharing. A cut shares the first layers and keeps the rest local. All arms have the same data,
    start and batches. Validation samples judge them. Three or more seeds show how certain the decision is. The winner
    is trained to the end. With --patience and one seed, all arms but one stop early; --thorough trains them all.
    A shorter race (--race-fraction 0.6) chose worse in our tests. Over a federation (--superlink) sites send the
    messages of these runs and their scores.

    Next: fedlayers run --algorithm fedper --plan OUT/plan.json.

    Examples:
        fedlayers choose --dataset heart --seeds 3 --with-finetuning --out out/choose
        fedlayers choose --superlink fed.example.org:8443 --keys keys/server
        fedlayers choose --dataset digits --arms nothing half all_but_last --race-fraction 0.6 --workers 2
    """

    arms: Arms = ("nothing", "half", "all_but_last", "all")
    seeds: Seeds = 1
    race_fraction: Annotated[float, option("Share of the rounds, 0.5 to 1. Arms that fine-tune at the end need 1.")] = (
        1.0
    )
    thorough: Annotated[bool, option("Train every arm to its stop, and continue those stopped early in OUT.")] = False
    with_finetuning: Annotated[bool, option("Also try FedAvg, then a few epochs of each client alone.")] = False
    tune_rates: TuneRates = None
    mix: Annotated[
        bool, option("Also fit a mixture of all arms, each trained to its stop. A prediction needs all models.")
    ] = False
    no_final_run: Annotated[bool, option("Do not train the winner to the end.")] = False
    out: Annotated[Path, option("Folder for everything.", "DIR")] = Path("out/choose")
    backend: On = ""
    federation: OfSites = NOWHERE
    config: Annotated[RunConfig, arguments.flags(without=("algorithm", "plan", "rule", "leave_out_client"))]
    algorithm: Annotated[str, option("Algorithm of the cuts; it must use a plan.")] = "fedper"
    set: Set = ()
    model_option: SetModel = ()
    loss_option: SetLoss = ()

    def main(self, line: str) -> None:
        config, seeds = self.of_one()
        arguments.check_folder(self.out)
        if self.with_finetuning and self.no_final_run:
            raise UsageError("--with-finetuning is compared with the winner's complete run. Leave --no-final-run out.")
        over = self.federation.check(config, ["backend"] if self.backend else ())

        from fedlayers.studies.choose import choose

        asked: dict[str, Any] = {
            "arms": self.arms,
            "seeds": seeds,
            "race_fraction": self.race_fraction,
            "thorough": self.thorough,
            "complete": not self.no_final_run,
            "with_finetuning": self.with_finetuning,
            "tune_rates": self.tune_rates,
            "mix": self.mix,
            "tell": _say,
        }
        if over:
            with self.federation.linked() as link:
                choice = choose(config, self.out, link=link, timeouts=self.federation.timeouts, **asked)
            from fedlayers.remote.rpc import left

            runs = sorted(path.parent for path in self.out.glob("*/*/left.jsonl"))
            print(f"\nbytes that left the sites, all runs together:\n{left(*runs).to_string()}")
        else:
            choice = choose(config, self.out, backend=self.backend, **asked)
        print(f"\n{choice.text()}\n\nthe winner's run: {choice.run}; the decision: {self.out / 'choice.json'}")

        from fedlayers.studies import study_plots

        study_plots.to_files()
        study_plots.save(study_plots.of_race(choice.standing.rounds), self.out / "race.png")


def _say(line: str) -> None:
    bars = sys.modules.get("tqdm")
    (print if bars is None else bars.tqdm.write)(line)  # on a line of its own, above the progress bar
    sys.stdout.flush()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regret(OneAlgorithm):
    """Train every cut, and measure what each rule's choice loses.

    A cut shares the first layers and keeps the rest local. Regret is how far a choice's score lies below that of the
    best cut, the one with the best mean over the seeds. It is measured on samples that no choice has seen: the test
    split, and unused samples of the dataset. After a stop the same command continues. With other rules it measures
    again and trains no cut again.

    Examples:
        fedlayers regret --dataset heart --rules sensitivity_ratio cka=largest_jump vote --seeds 5 --rounds 10
    """

    rules: Annotated[
        tuple[str, ...],
        option("Rules, read on METRIC or federation_sensitivity.", "[METRIC=]RULE [[METRIC=]RULE ...]"),
    ] = ("sensitivity_ratio", "largest_jump", "change_point", "vote")
    seeds: Seeds = 3
    score: Score = ""
    out: Annotated[Path, option("Folder for everything.", "DIR")] = Path("out/regret")
    backend: On = ""
    config: Annotated[RunConfig, arguments.flags(without=("algorithm", "plan", "rule", "leave_out_client"))]
    algorithm: Annotated[str, option("Algorithm of the cuts; it must use a plan.")] = "fedper"
    set: Set = ()
    model_option: SetModel = ()
    loss_option: SetLoss = ()

    def main(self, line: str) -> None:
        config, seeds = self.of_one()

        from diagnostics import plots
        from diagnostics.plots.collect import figure_of
        from fedlayers.studies import study_plots
        from fedlayers.studies.regret import regret

        study_plots.to_files()
        result = regret(config, self.rules, seeds, self.out, score=self.score, backend=self.backend, command=line)
        figure = figure_of(plots.regret(result.scores, result.decisions, result.score))
        study_plots.save(figure, self.out / "regret.png")
        print(result.text())
        print(f"\ntables and picture: {self.out}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(SeveralAlgorithms):
    """Decide by a race, federate and compare; write a report.

    A few ways of sharing (arms) race in every seed. This shows how certain the decision is. Each seed's winner is
    compared with the algorithms on test samples. With --rule a rule decides instead, from one epoch of local training.
    report.html begins with the outcome. After a stop the same command continues.

    Examples:
        fedlayers study
        fedlayers study --dataset digits --rounds 10 --seeds 3 --out out/digits
        fedlayers study --dataset heart --rule sensitivity_ratio --out out/ruled
    """

    algorithms: Annotated[tuple[str, ...], option("Names: fedlayers list algorithms.", "NAME [NAME ...]")] = (
        *("local", "fedavg", "fedbabu", "playerfl", "playerfl_random"),
    )
    rule: Annotated[str | None, option("Decide by this rule from one local epoch, without a race.")] = None
    arms: Arms = ("nothing", "half", "all_but_last", "all")
    seeds: Seeds = 5
    tune_rates: TuneRates = None
    out: Annotated[Path, option("Folder for everything.", "DIR")] = Path("out/study")
    backend: On = ""
    config: Annotated[RunConfig, arguments.flags(without=("algorithm", "plan", "rule", "leave_out_client"))]
    set: SetEach = ()
    model_option: SetModel = ()
    loss_option: SetLoss = ()

    def main(self, line: str) -> None:
        config, seeds, options = self.of_several()
        if self.rule is not None:
            catalogue.check_deciding(self.rule)

        import matplotlib as mpl  # alone, which is quick: what draws is imported after the outcome

        from fedlayers.studies.study import study

        mpl.use("Agg")
        study(
            config,
            self.algorithms,
            seeds,
            self.out,
            rule=self.rule,
            arms=self.arms,
            tune_rates=self.tune_rates,
            options=options,
            backend=self.backend,
            command=line,
            say=_say,
        )
