"""Commands that train many runs: choose, compare, tune, regret, study."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from fedlayers import catalogue
from fedlayers.backends.names import check_backend
from fedlayers.cli.options import (
    OF_RACE,
    ConfiguredCommand,
    Set,
    SetEach,
    apply_options,
    by_name,
    flags,
    option,
    texts,
)
from fl_core.bounds import at_least, check_value
from fl_core.config import AUTO, RunConfig
from fl_core.errors import UsageError
from fl_core.progress import say

Algorithms = Annotated[
    tuple[str, ...],
    option("Algorithms to train: see fedlayers list algorithms.", "NAME [NAME ...]"),
]
Seeds = Annotated[int, option("Number of seeds, counted from --seed.", "N")]
Score = Annotated[
    str,
    option(
        "Score that decides, such as auroc or loss. Default: the main score of the task.",
        "NAME",
    ),
]
On = Annotated[
    str,
    option(
        "Where runs train: local:N (N processes), ray or ray:HOST:PORT (a Ray cluster). Default: this process.",
        "NAME",
    ),
]
TuneRates = Annotated[
    int | None,
    option(
        "Number of learning rates to try first: 2 to 5, or 0 for none. Default: 4 for your own data on this machine, "
        "else 0; none with --lr.",
        "N",
    ),
]
Arms = Annotated[
    tuple[str, ...],
    option(
        "Layers to share, one candidate each: nothing, half, all_but_last, all, first_K, last_K, lora_A, lora_B, "
        "PLAN.json, an algorithm, or ALGORITHM:CUT.",
        "ARM [ARM ...]",
    ),
]
WithoutPlan = Annotated[
    RunConfig, flags(without=("algorithm", "plan", "rule", "monitor"))
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManyRuns(ConfiguredCommand):
    """The base of commands that train many runs. They can be interrupted and started again."""

    seeds: Seeds
    backend: On = ""

    def interrupted(self) -> str:
        return "the same command continues"

    def asked_config(self) -> RunConfig:
        return self.asked()[0]

    def own_defaults(self) -> Collection[str]:
        return ("checkpoint_every",)

    def asked(self, options: tuple[str, ...] = ()) -> tuple[RunConfig, tuple[int, ...]]:
        """Return the configuration and the seeds of the command line, after checks of names and numbers."""
        check_value("--seeds", self.seeds, at_least(1))
        if self.backend:
            check_backend(self.backend)
        config = apply_options(
            self.config, options, self.model_option, self.loss_option
        )
        return config, tuple(
            range(config.execution.seed, config.execution.seed + self.seeds)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneAlgorithm(ManyRuns):
    """Base of commands whose runs all train one algorithm with the plans under study."""

    config: WithoutPlan
    algorithm: Annotated[
        str, option("Algorithm that trains all runs. It must use a plan.", "NAME")
    ] = "fedper"
    set: Set = ()

    def asked_config(self) -> RunConfig:
        return self.of_one()[0]

    def of_one(self) -> tuple[RunConfig, tuple[int, ...]]:
        """Return the configuration of the algorithm and the seeds, after checks of names and numbers."""
        from fl_core.algorithms.base import find

        catalogue.check("algorithm", self.algorithm)
        if not find(self.algorithm).uses_plan:
            raise UsageError(
                f"--algorithm must use a plan; got {self.algorithm}, which uses no plan. Use fedper."
            )
        config, seeds = self.asked(self.set)
        return config.with_keys(algorithm=self.algorithm), seeds


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeveralAlgorithms(ManyRuns):
    """The base of commands that run several algorithms, each with options of its own."""

    algorithms: Algorithms
    config: Annotated[RunConfig, flags(without=("algorithm",))]
    set: SetEach = ()

    def of_several(
        self,
    ) -> tuple[RunConfig, tuple[int, ...], dict[str, dict[str, Any]]]:
        """Return the common configuration, the seeds, and the algorithms' own options, after checks."""
        config, seeds = self.asked()
        for name in self.algorithms:
            catalogue.check("algorithm", name)
        return (
            config,
            seeds,
            by_name(self.set, "algorithm", self.algorithms, "of this comparison"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(SeveralAlgorithms):
    """Train several algorithms, and compare their scores.

    If it stops, type the same command again: it continues.

    Next: fedlayers plot OUT/rows.jsonl

    Examples:
        fedlayers compare --algorithms local fedavg playerfl --seeds 5
        fedlayers compare --algorithms fedprox ditto --option fedprox.mu=0.01
        fedlayers tune --algorithms fedavg fedprox --search lr=0.01,0.1 --trials 2
        fedlayers compare --algorithms fedavg fedprox --tuned out/tune/tuned.json --out out/tuned
    """

    algorithms: Algorithms = (*("local", "fedavg", "fedper", "playerfl"),)
    seeds: Seeds = 3
    tuned: Annotated[
        Path | None,
        option("Settings that fedlayers tune found: its tuned.json.", "FILE"),
    ] = None
    select_by: Annotated[
        Literal["last", "validation"] | None,
        option(
            "Round to score: the last, or the best on validation. Default: last; validation with --patience."
        ),
    ] = None
    score: Score = ""
    baselines: Annotated[
        bool,
        option("Also score the base rate, linear models and gradient boosting."),
    ] = False
    out: Annotated[Path, option("Folder for the results.", "DIR")] = Path("out/compare")

    def own_defaults(self) -> Collection[str]:
        from fedlayers.studies.spaces import TRAINING

        return *super().own_defaults(), *(() if self.tuned is None else TRAINING)

    def main(self, line: str) -> None:
        config, seeds, options = self.of_several()

        from fedlayers.studies import study_plots
        from fedlayers.studies.compare import compare
        from fl_core.plan import LayerPlan

        study_plots.to_files()
        plan = None
        if config.federation.plan not in (None, AUTO):
            plan, config = (
                LayerPlan.load(str(config.federation.plan)),
                config.with_keys(plan=None),
            )
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
        for name, figure in study_plots.draw_comparison(comparison).items():
            study_plots.save(figure, self.out / f"{name}.png", command=line)
        print(comparison.text())
        print(f"\nrows, table and pictures: {self.out}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tune(SeveralAlgorithms):
    """Search learning rates and options of algorithms.

    All algorithms have the same number of trials. Validation samples score them. The estimated cost is printed first.
    If it stops, type the same command again: it continues.

    Next: fedlayers compare --tuned OUT/tuned.json

    Examples:
        fedlayers tune --algorithms fedavg fedprox --search lr=1e-4..0.1:log mu=0.01,1
        fedlayers tune --algorithms fedper ditto --search lr=0.01,0.1 ditto.lam=0.1..10:log
    """

    algorithms: Algorithms
    search: Annotated[
        tuple[str, ...],
        option(
            "Values to try: KEY=VALUE,VALUE or KEY=LOW..HIGH or KEY=LOW..HIGH:log. KEY is lr, momentum, weight_decay, "
            "max_grad_norm, or an option of the algorithms. ALGORITHM.KEY is for one algorithm.",
            "KEY=SEARCH [KEY=SEARCH ...]",
        ),
    ]
    trials: Annotated[
        int, option("Trials per algorithm, at most the number of combinations.", "N")
    ] = 8
    seeds: Annotated[
        int,
        option(
            "Number of seeds, counted from --seed + 1000, so that compare uses others.",
            "N",
        ),
    ] = 1
    score: Score = ""
    out: Annotated[
        Path, option("Folder for runs, trials.csv and tuned.json.", "DIR")
    ] = Path("out/tune")

    def own_defaults(self) -> Collection[str]:
        from fedlayers.studies.spaces import TRAINING

        searched = {text.partition("=")[0].rpartition(".")[2] for text in self.search}
        return *super().own_defaults(), *searched.intersection(TRAINING)

    def main(self, line: str) -> None:
        config, seeds, options = self.of_several()
        over = texts("--search", self.search)

        from fedlayers.studies.tune import APART, tune

        asked: dict[str, Any] = {
            "trials": self.trials,
            "score": self.score,
            "options": options,
            "backend": self.backend,
            "tell": say,
        }
        result = tune(
            config,
            self.algorithms,
            over,
            self.out,
            seeds=[APART + seed for seed in seeds],
            **asked,
        )
        print(
            f"\n{result.text()}\n\nto compare by it: fedlayers compare --tuned {self.out / 'tuned.json'}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choose(OneAlgorithm):
    """Try a few ways to share layers, and say which to use.

    Each candidate (arm) shares some layers and keeps the others local. All arms train on the same data and batches.
    Validation samples choose the winner. Three or more seeds show how certain the choice is.

    Next: fedlayers run --algorithm fedper --plan OUT/plan.json, if the winner has a plan

    Examples:
        fedlayers choose --dataset heart --seeds 3
        fedlayers choose --dataset digits --arms nothing half all --out out/digits
        fedlayers choose --dataset heart --arms half all local_adaptation --out out/finetuning
    """

    arms: Arms = ("nothing", "half", "all_but_last", "all")
    seeds: Seeds = 1
    thorough: Annotated[
        bool,
        option(
            "Train all arms fully. Without it, --patience with one seed stops losing arms early."
        ),
    ] = False
    score: Annotated[
        str,
        option(
            "Score of the task that alone selects rates, best rounds and arms, such as auroc. A name that the task "
            "lacks lists those that it has. Default: macro-F1 and loss together, then the loss after a temperature.",
            "NAME",
        ),
    ] = ""
    tune_rates: TuneRates = None
    baselines: Annotated[
        bool, option("For tables, also fit linear models and gradient boosting.")
    ] = True
    out: Annotated[Path, option("Folder for the results.", "DIR")] = Path("out/choose")

    def own_defaults(self) -> Collection[str]:
        return *super().own_defaults(), *OF_RACE

    def main(self, line: str) -> None:
        config, seeds = self.of_one()

        from fedlayers.studies.choose import choose

        asked: dict[str, Any] = {
            "arms": self.arms,
            "seeds": seeds,
            "thorough": self.thorough,
            "score": self.score,
            "tune_rates": self.tune_rates,
            "baselines": self.baselines,
            "backend": self.backend,
        }
        choice = choose(config, self.out, **asked)
        print(
            f"\n{choice.text()}\n\nthe recommended model: {choice.run or 'none'}; "
            f"the report: {self.out / 'report.html'}"
        )

        from fedlayers.studies.study_page import write_choice
        from fedlayers.studies.study_plots import to_files

        to_files()
        write_choice(choice, self.out, line)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regret(OneAlgorithm):
    """Train all cuts, and measure what each rule loses.

    A cut shares the first layers and keeps the others local. Regret is the score of the best cut minus that of the
    rule's cut. It is measured on samples that no rule has seen: the test split, and unused samples of the dataset.
    If it stops, type the same command again: it continues.

    Examples:
        fedlayers regret --dataset heart --rules sensitivity_ratio largest_jump --rounds 10
        fedlayers regret --dataset heart --rules cka=largest_jump --rounds 10
    """

    rules: Annotated[
        tuple[str, ...],
        option(
            "Rules to test: see fedlayers list rules. METRIC defaults to federation_sensitivity.",
            "[METRIC=]RULE [...]",
        ),
    ] = ("sensitivity_ratio", "largest_jump", "change_point")
    seeds: Seeds = 3
    score: Score = ""
    out: Annotated[Path, option("Folder for the results.", "DIR")] = Path("out/regret")

    def main(self, line: str) -> None:
        config, seeds = self.of_one()

        from diagnostics import plots
        from diagnostics.plots.collect import figure_of
        from fedlayers.studies import study_plots
        from fedlayers.studies.regret import regret

        study_plots.to_files()
        result = regret(
            config,
            self.rules,
            seeds,
            self.out,
            score=self.score,
            backend=self.backend,
            command=line,
        )
        figure = figure_of(plots.regret(result.scores, result.decisions, result.score))
        study_plots.save(figure, self.out / "regret.png", command=line)
        print(result.text())
        print(f"\ntables and picture: {self.out}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(SeveralAlgorithms):
    """Choose layers, compare algorithms, and write a report.

    In each seed it trains a few ways of sharing layers (arms). Validation samples choose the winner. Test samples
    compare it with the algorithms. The result is OUT/report.html. If it stops, type the same command again: it
    continues.

    Examples:
        fedlayers study
        fedlayers study --dataset digits --rounds 10 --seeds 3 --out out/digits
        fedlayers study --dataset heart --rule sensitivity_ratio --out out/rule
    """

    algorithms: Algorithms = (
        *("local", "fedavg", "fedbabu", "playerfl", "playerfl_random"),
    )
    rule: Annotated[
        str | None,
        option(
            "Choose by this rule instead of a race, after one local epoch: see fedlayers list rules.",
            "NAME",
        ),
    ] = None
    arms: Arms = ("nothing", "half", "all_but_last", "all")
    seeds: Seeds = 5
    tune_rates: TuneRates = None
    out: Annotated[Path, option("Folder for the results.", "DIR")] = Path("out/study")
    config: WithoutPlan

    def asked_config(self) -> RunConfig:
        config = super().asked_config()
        return config if self.rule is None else config.with_keys(rule=self.rule)

    def own_defaults(self) -> Collection[str]:
        return *super().own_defaults(), *OF_RACE, "rule"

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
            say=say,
        )
