"""Commands that train: one algorithm (run, resume), or many runs (choose, compare, tune, study)."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import time
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedlayers.cli.options import Command, ConfiguredCommand, by_name, texts
from fl_core.config import KEYS, ROUNDS, RunConfig
from fl_core.errors import UsageError, check_value, plural
from fl_core.progress import say

if TYPE_CHECKING:
    from fedlayers.run_result import RunResult


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
    """Also send rows to trackio, wandb, tensorboard, or loggers of yours, as package.module:Class."""
    backend: str = ""
    """Train clients on a Ray cluster: ray or ray:HOST:PORT. Default: on this machine."""

    def main(self, line: str) -> None:
        from fedlayers import runs

        made = runs.run(
            self.asked_config(),
            self.out,
            command=line,
            log=self.logger,
            backend=self.backend,
        )
        print_result(made, self.out)

    def interrupted(self) -> str:
        if not (self.out / "config.json").exists():
            return self.after_stop
        again = [str(self.out)]
        if self.logger:
            again += ["--logger", *self.logger]
        return f"fedlayers resume {shlex.join(again)} continues it"


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
    """Also send rows to trackio, wandb, tensorboard, or loggers of yours, as package.module:Class."""
    backend: str = ""
    """Train clients on a Ray cluster: ray or ray:HOST:PORT. Default: on this machine."""

    argument = "dir"

    def main(self, line: str) -> None:
        from fedlayers import runs
        from fl_core.records.store import Run as StoredRun

        if StoredRun(self.dir).finished:
            say(f"{self.dir} is finished: these are its results")
        made = runs.resume(
            self.dir,
            backend=self.backend,
            log=self.logger,
            allow_code=self.allow_code,
            allow_changed_code=self.allow_changed_code,
            data_root=self.data_root,
        )
        print_result(made, self.dir)

    after_stop = "the same command continues"


def print_result(result: RunResult, out: Path) -> None:
    """Print the result of a run.

    Raises:
        DivergedError: its last evaluation shows models that have diverged.
    """
    from fedlayers.run_result import scores_text
    from fl_core.models.building import LIBRARIES, wants_weights
    from fl_core.records.store import Run as StoredRun
    from fl_core.rounds import recorder
    from fl_core.rounds.steering import check_end, rule_of
    from fl_core.run import restore
    from fl_core.training.phases import Training

    stored, plan, done = StoredRun(out), result.plan, result.done
    rule = rule_of(result.engine)
    best = {} if rule is None else rule.best
    config, given = restore.stored_config(stored.config)
    print(f"{scores_text(stored.rows()[1], done, best)}\n")
    if plan is not None:  # who gave a plan knows its evidence
        print(f"{plan if given is None else repr(plan)}\n")
    model = str(config.model.model)
    if model.partition(":")[0] in LIBRARIES and not (
        config.model.init or wants_weights(model, config.model.model_options)
    ):
        model += " with fresh weights"
    print(f"local training of {model}: {Training.of(config.training).description}\n")
    times = out / "timing.jsonl"
    if times.is_file():
        print(recorder.read_pace(times).line())
    if rule is not None:
        print(rule.report(done, result.engine.schedule.rounds))
    print(f"{plural(done, 'round')} of {result.engine.algorithm.name}: {out}")
    check_end(stored, done if rule is None else best.get(rule.main, done))


class ManyRuns(ConfiguredCommand):
    """The base of commands that train many runs by the function of the same name in :mod:`fedlayers.studies`.

    They can be interrupted and started again.
    """

    seeds: int
    """Number of seeds, counted from --seed."""
    backend: str = ""
    """Where runs train: local:N (N processes), ray or ray:HOST:PORT (a Ray cluster). Default: this process."""

    after_stop = "the same command continues"

    def asked_config(self) -> RunConfig:
        check_value("--seeds", self.seeds, ROUNDS)
        return super().asked_config()

    def main(self, line: str) -> Any:
        given = self.arguments()
        name = type(self).__name__.lower()
        study = getattr(import_module(f"fedlayers.studies.{name}"), name)
        told = {"command": line, "tell": say}
        for key in told.keys() & inspect.signature(study).parameters:
            given[key] = told[key]
        return self.show(study(**given), line)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the study's function: the configuration, and the flags of this command alone."""
        config = self.asked_config()
        first = config.execution.seed
        common = {field.name for field in dataclasses.fields(ConfiguredCommand)}
        given = {k: v for k, v in vars(self).items() if k not in (*common, *KEYS)}
        given["seeds"] = tuple(range(first, first + self.seeds))
        return {**given, "config": config}

    def show(self, result: object, line: str) -> Any:
        """Draw and print the study's result. By default the study has said all."""


class SeveralAlgorithms(ManyRuns):
    """The base of commands that run several algorithms, each with options of its own."""

    algorithms: tuple[str, ...]
    """Algorithms to train: see fedlayers list algorithms."""
    option: tuple[str, ...] = ()
    """An option of one algorithm, such as --option fedprox.mu=0.1. Repeatable."""

    without: ClassVar[Collection[str]] = ("algorithm", "options")

    def arguments(self) -> dict[str, Any]:
        options = by_name(self.option, "algorithm", self.algorithms)
        return {**super().arguments(), "options": options}


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

    algorithms: tuple[str, ...] = ("local", "fedavg", "fedper", "playerfl")
    seeds: int = 3
    tuned: Path | None = None
    """Settings that fedlayers tune found: its tuned.json."""
    score: str = ""
    """Score that decides, such as auroc or loss. Default: the main score of the task."""
    baselines: bool = False
    """Also score the base rate, linear models and gradient boosting."""
    out: Path = Path("out/compare")
    """Folder for the results."""

    def show(self, result: Any, line: str) -> None:
        from fedlayers.cli.measure import save
        from fedlayers.studies.report import draw_comparison

        for name, figure in draw_comparison(result).items():
            save(figure, self.out / f"{name}.png", command=line)
        print(f"{result.text()}\n\nrows, table and pictures: {self.out}")


class Tune(SeveralAlgorithms):
    """Search learning rates and options of algorithms.

    All algorithms have the same number of trials. Validation samples score them. The estimated cost is printed first.
    If it stops, type the same command again: it continues.

    Next: fedlayers compare --tuned OUT/tuned.json

    Examples:
        fedlayers tune --algorithms fedavg fedprox --search lr=1e-4..0.1:log mu=0.01,1
        fedlayers tune --algorithms fedper ditto --search lr=0.01,0.1 ditto.lam=0.1..10:log
    """

    search: tuple[str, ...]
    """Values to try: KEY=VALUE,VALUE or KEY=LOW..HIGH or KEY=LOW..HIGH:log. KEY is lr, momentum, weight_decay,
    max_grad_norm, or an option of the algorithms. ALGORITHM.KEY is for one algorithm."""
    trials: int = 8
    """Trials per algorithm, at most the number of combinations."""
    seeds: int = 1
    """Number of seeds, counted from --seed + 1000, so that compare uses others."""
    score: str = ""
    """Score that decides, such as auroc or loss. Default: the main score of the task."""
    out: Path = Path("out/tune")
    """Folder for runs, trials.csv and tuned.json."""

    def arguments(self) -> dict[str, Any]:
        from fedlayers.studies.tune import APART

        given = super().arguments()
        given["seeds"] = [APART + seed for seed in given["seeds"]]
        return {**given, "search": texts("search", self.search)}

    def show(self, result: Any, line: str) -> None:
        settings = self.out / "tuned.json"
        print(
            f"\n{result.text()}\n\nto compare by it: fedlayers compare --tuned {settings}"
        )


class Choose(ManyRuns):
    """Say whether to train together, alone, or with some layers local.

    It shares all layers first, then trains every client alone. Where clients differ, it also tries a local head and
    local first layers. After each run a client trains a few epochs of its own. Validation samples choose.

    Next: fedlayers run --algorithm fedper --plan OUT/plan.json, if the winner has a plan

    Examples:
        fedlayers choose --dataset heart --seeds 3
        fedlayers choose --dataset digits --thorough --out out/digits
        fedlayers choose --dataset heart --arms half all local_adaptation --out out/finetuning
    """

    arms: tuple[str, ...] | None = None
    """Ways to share layers, in place of the steps: all, nothing, head_local, first_half_local, half, first_K, last_K,
    frozen_K, lora_A, lora_B, PLAN.json, an algorithm, or ALGORITHM:CUT."""
    seeds: int = 1
    thorough: bool = False
    """Train every cut from both ends."""
    score: str = ""
    """Score of the task that alone selects rates, best rounds and arms, such as auroc. A name that the task lacks lists
    those that it has. Default: macro-F1 and loss together, then the calibrated loss."""
    tune_rates: int | None = None
    """Number of learning rates to try first: 2 to 5, or 0 for none. Default: 4 for your own data on this machine, else
    0; none with --lr."""
    explain: bool = False
    """Also measure how much of the clients' differences each layer can absorb, and what that cost."""
    no_baselines: bool = False
    """Fit no linear models and gradient boosting."""
    json: bool = False
    """Print one object as JSON. All else goes to stderr."""
    out: Path = Path("out/choose")
    """Folder for the results."""
    algorithm: str = "fedper"
    """Algorithm that trains all runs. It must use a plan."""

    without = ("algorithm", "plan", "rule", "monitor")

    def arguments(self) -> dict[str, Any]:
        given = super().arguments()
        from fl_core.algorithms.base import find

        if not find(self.algorithm).uses_plan:
            raise UsageError(
                f"--algorithm must use a plan; got {self.algorithm}, which uses no plan. Use fedper."
            )
        given["baselines"] = not given.pop("no_baselines")
        del given["explain"], given["json"]
        return given

    def show(self, result: Any, line: str) -> Any:
        from fedlayers.studies.report import write_page

        began = time.monotonic()
        shared = [one.job.path for one in result.runs if one.arm == "all"]
        if self.explain and shared:
            from diagnostics.measure import diagnose

            say("measuring what each layer can absorb")
            report = diagnose(
                shared[0],
                metrics=["layer_tuning"],
                model="personal",  # which all clients have in common
                options={"layer_tuning": {"rounds": result.until}},
            )
            report.write(self.out / "profile" / "rows.jsonl")
            print(report.text(["layer_tuning"]))
        say(f"drawing the report: {self.out / 'report.html'}")
        write_page(result, self.out, line)
        seconds = result.measured.seconds + time.monotonic() - began
        spent = dataclasses.replace(result.measured, seconds=seconds)
        result = dataclasses.replace(result, measured=spent)
        print(
            f"\n{result.text()}\n\nWhat to do next: {result.next_step(self.out, line)}"
        )
        return result.to_json()


class Demo(Command):
    """Show a decision on a small federation whose clients code their labels differently.

    Next: fedlayers choose --dataset YOUR_TABLE

    Examples:
        fedlayers demo
    """

    out: Path = Path("out/demo")
    """Folder for the results."""

    def main(self, line: str) -> None:
        from fedlayers.studies.choose import choose

        config = RunConfig(dataset="known_labels")
        choice = choose(config, self.out, progress=say)
        print(f"\n{choice.answers.head}\n\nAll of it: {self.out / 'choice.json'}")


class Study(SeveralAlgorithms):
    """Choose layers, compare algorithms, and write a report.

    In each seed it decides as fedlayers choose does. Validation samples choose the winner. Test samples
    compare it with the algorithms. The result is OUT/report.html. If it stops, type the same command again: it
    continues.

    Examples:
        fedlayers study
        fedlayers study --dataset digits --rounds 10 --seeds 3 --out out/digits
    """

    algorithms: tuple[str, ...] = (
        "local",
        "fedavg",
        "fedbabu",
        "playerfl",
        "playerfl_random",
    )
    arms: tuple[str, ...] | None = None
    """Ways to share layers, in place of the steps: all, nothing, head_local, first_half_local, half, first_K, last_K,
    frozen_K, lora_A, lora_B, PLAN.json, an algorithm, or ALGORITHM:CUT."""
    seeds: int = 5
    tune_rates: int | None = None
    """Number of learning rates to try first: 2 to 5, or 0 for none. Default: 4 for your own data on this machine, else
    0; none with --lr."""
    out: Path = Path("out/study")
    """Folder for the results."""

    without = ("algorithm", "options", "plan", "rule", "monitor")
