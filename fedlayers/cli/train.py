"""Commands that train: one algorithm (run, resume), or many runs.

Those are choose, compare, tune, study and demo.
"""

from __future__ import annotations

import dataclasses
import inspect
import shlex
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedlayers.cli.options import Command, ConfiguredCommand, by_name, texts
from fl_core.config import KEYS, ROUNDS, RunConfig
from fl_core.errors import UsageError, as_list, at_least, check_value, plural
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

        result = runs.run(
            self.asked_config(),
            self.out,
            command=line,
            log=self.logger,
            backend=self.backend,
        )
        print_result(result, self.out)

    def interrupted(self) -> str:
        if not (self.out / "config.json").exists():
            return self.after_stop
        words = [str(self.out)]
        if self.logger:
            words += ["--logger", *self.logger]
        command = shlex.join(words)
        return f"fedlayers resume {command} continues it"


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
        result = runs.resume(
            self.dir,
            backend=self.backend,
            log=self.logger,
            allow_code=self.allow_code,
            allow_changed_code=self.allow_changed_code,
            data_root=self.data_root,
        )
        print_result(result, self.dir)

    after_stop = "the same command continues"


def print_result(result: RunResult, out: Path) -> None:
    """Print the scores, the plan and the training settings of a run.

    Args:
        result: the run's result.
        out: the run directory.

    Raises:
        DivergedError: models have diverged at the last evaluation, or under a stopping
            rule at the best round. The scores are printed before.
    """
    from fedlayers.run_result import scores_text
    from fl_core.models.building import LIBRARIES, wants_weights
    from fl_core.records.store import Run as StoredRun
    from fl_core.rounds import recorder
    from fl_core.rounds.steering import check_end, rule_of
    from fl_core.run import restore
    from fl_core.training.phases import Training

    stored_run, plan, done = StoredRun(out), result.plan, result.done
    rule = rule_of(result.engine)
    best_rounds = {} if rule is None else rule.best
    config, plan_given = restore.stored_config(stored_run.config)
    scores = scores_text(stored_run.rows()[1], done, best_rounds)
    print(f"{scores}\n")
    if plan is not None:  # who gave a plan knows its evidence
        plan_text = plan if plan_given is None else repr(plan)
        print(f"{plan_text}\n")
    model = str(config.model.model)
    if model.partition(":")[0] in LIBRARIES and not (
        config.model.init or wants_weights(model, config.model.model_options)
    ):
        model += " with fresh weights"
    optimizer = Training.of(config.training).description
    print(f"local training of {model}: {optimizer}\n")
    timing_file = out / "timing.jsonl"
    if timing_file.is_file():
        print(recorder.read_pace(timing_file).line())
    if rule is not None:
        print(rule.report(done, result.engine.schedule.rounds))
    print(f"{plural(done, 'round')} of {result.engine.algorithm.name}: {out}")
    check_end(stored_run, done if rule is None else best_rounds.get(rule.main, done))


class ManyRuns(ConfiguredCommand):
    """The base of commands that train many runs by the function of the same name in :mod:`fedlayers.decision`.

    They can be interrupted and started again.
    """

    seeds: tuple[int, ...] | None
    """Number of seeds, counted from --seed. Two or more numbers are the seeds themselves."""
    backend: str = ""
    """Where runs train: local:N (N processes), ray or ray:HOST:PORT (a Ray cluster). Default: this process."""

    after_stop = "the same command continues"
    module: ClassVar[str] = ""
    """The module of the function, if it has another name."""

    def asked_config(self) -> RunConfig:
        if self.seeds is not None:
            if len(as_list("--seeds", self.seeds, distinct=True)) == 1:
                check_value("--seeds", self.seeds[0], ROUNDS)
            for seed in self.seeds:
                check_value("--seeds", seed, at_least(0))
        return super().asked_config()

    def main(self, line: str) -> Any:
        arguments = self.arguments()
        name = type(self).__name__.lower()
        module = self.module or name
        study = getattr(import_module(f"fedlayers.decision.{module}"), name)
        command_arguments = {"command": line, "tell": say}
        for key in command_arguments.keys() & inspect.signature(study).parameters:
            arguments[key] = command_arguments[key]
        return self.show(study(**arguments), line)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the study's function: the configuration, and the flags of this command alone."""
        config = self.asked_config()
        first_seed = config.execution.seed
        common_fields = {field.name for field in dataclasses.fields(ConfiguredCommand)}
        arguments = {
            k: v for k, v in vars(self).items() if k not in (*common_fields, *KEYS)
        }
        if self.seeds is not None and len(self.seeds) == 1:
            arguments["seeds"] = tuple(range(first_seed, first_seed + self.seeds[0]))
        return {**arguments, "config": config}

    def show(self, result: object, line: str) -> Any:
        """Draw and print the study's result, and return what ``--json`` prints. The base class does nothing.

        Args:
            result: what the study's function returned.
            line: the command as it was typed.
        """


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
    seeds: tuple[int, ...] = (3,)
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
        from fedlayers.decision.report import draw_comparison

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

    module = "compare"

    search: tuple[str, ...]
    """Values to try: KEY=VALUE,VALUE or KEY=LOW..HIGH or KEY=LOW..HIGH:log. KEY is lr, momentum, weight_decay,
    max_grad_norm, or an option of the algorithms. ALGORITHM.KEY is for one algorithm."""
    trials: int = 8
    """Trials per algorithm, at most the number of combinations."""
    seeds: tuple[int, ...] = (1,)
    """Number of seeds, counted from --seed + 1000, so that compare uses others. Two or more numbers are seeds, to
    which 1000 is added."""
    score: str = ""
    """Score that decides, such as auroc or loss. Default: the main score of the task."""
    out: Path = Path("out/tune")
    """Folder for runs, trials.csv and tuned.json."""

    def arguments(self) -> dict[str, Any]:
        from fedlayers.decision.compare import APART

        arguments = super().arguments()
        arguments["seeds"] = [APART + seed for seed in arguments["seeds"]]
        return {**arguments, "search": texts("search", self.search)}

    def show(self, result: Any, line: str) -> None:
        settings = self.out / "tuned.json"
        print(
            f"\n{result.text()}\n\nto compare by it: fedlayers compare --tuned {settings}"
        )


class Choose(ManyRuns):
    """Say whether to train together, alone, or with some layers local.

    It trains the network with all layers shared, with none and with a local head, a linear model with all of it shared,
    and simple models of each client. Clients may fine-tune after it. Validation samples choose, and test samples judge.
    If it stops, type the same command again: it continues.

    Next: fedlayers export OUT --out OUT_models

    Examples:
        fedlayers choose --dataset heart
        fedlayers choose --dataset digits --seeds 1 --out out/digits
        fedlayers choose --dataset heart --arms half first_half_local --out out/halves
    """

    arms: tuple[str, ...] | None = None
    """Further ways to share layers: first_half_local, half, first_K, last_K, frozen_K, lora_A, lora_B, groups,
    PLAN.json, an algorithm, or ALGORITHM:CUT."""
    seeds: tuple[int, ...] | None = None
    """Number of seeds, counted from --seed. Two or more numbers are the seeds themselves. Default: 3, or 1 where a run
    is long."""
    score: str = ""
    """Score of the task that alone selects rates, best rounds and ways, such as auroc. A name that the task lacks lists
    those that it has. Default: macro-F1 and loss together, then the calibrated loss."""
    tune_rates: int | None = None
    """Number of learning rates to try first: 2 to 5, or 0 for none. Default: 4 for your own data on this machine, else
    0; none with --lr."""
    no_baselines: bool = False
    """Try no simple models."""
    dry_run: bool = False
    """Say what would be trained and what it costs, and train nothing."""
    table: bool = False
    """Print the table of all ways, too."""
    quiet: bool = False
    """Print the answer alone."""
    json: bool = False
    """Print one object as JSON. All else goes to stderr."""
    out: Path = Path("out/choose")
    """Folder for the results."""
    algorithm: str = "fedper"
    """Algorithm that trains the plans. It must use a plan."""

    without = ("algorithm", "plan", "rule", "monitor")

    def arguments(self) -> dict[str, Any]:
        arguments = super().arguments()
        from fl_core.algorithms.base import find

        if not find(self.algorithm).uses_plan:
            raise UsageError(
                f"--algorithm must use a plan; got {self.algorithm}, which uses no plan. Use fedper."
            )
        arguments["baselines"] = not arguments.pop("no_baselines")
        if self.quiet:
            arguments["progress"] = False
        del arguments["table"], arguments["quiet"], arguments["json"]
        return arguments

    def show(self, result: Any, line: str) -> Any:
        if self.dry_run:
            if self.quiet:
                print(result.rates)
            return {"price": result.rates, "not_tried": dict(result.not_tried)}
        from fedlayers.decision.answer import legend
        from fedlayers.decision.report import write_page

        page = write_page(result, self.out, line)
        print(result.text())
        if self.table:
            explanation = legend(result)
            print(f"\n{result.shown().to_string(index=False)}\n\n{explanation}")
        if not self.quiet:
            print(f"Report: {page}")
            if result.next:
                print(f"Next: {result.next}")
        return result.to_json()


DEMO = {
    "known_neither": "Clients that are alike",
    "known_labels": "Clients that code their labels differently",
    "heart": "Four hospitals",
}
"""The federations of the demo, in words."""


class Demo(Command):
    """Show three decisions: share all layers, share some, and do not federate.

    Next: fedlayers choose --dataset YOUR_TABLE

    Examples:
        fedlayers demo
    """

    out: Path = Path("out/demo")
    """Folder for the results."""

    def main(self, line: str) -> None:
        from fedlayers.decision.choose import choose

        for name, description in DEMO.items():
            print(f"{description}:")
            config = RunConfig(dataset=name, workers=2)
            answer = choose(config, self.out / name, seeds=3, progress=False)
            print(f"{answer.text()}\n")
        print(f"Tables and models: {self.out}")


class Study(ManyRuns):
    """Decide in every seed, and judge each decision on the seed's test samples.

    In each seed it decides as fedlayers choose does, by a split of its own. The regret says how much worse the named
    way is than the best single way. If it stops, type the same command again: it continues.

    Examples:
        fedlayers study --dataset heart
        fedlayers study --dataset digits --rounds 10 --seeds 3 --out out/digits
    """

    arms: tuple[str, ...] | None = None
    """Further ways, such as ditto or first_half_local."""
    seeds: tuple[int, ...] = (5,)
    score: str = ""
    """Score of the task that alone selects, such as auroc."""
    tune_rates: int | None = None
    """Number of learning rates to try first: 2 to 5, or 0 for none. Default: 4 for your own data on this machine, else
    0; none with --lr."""
    no_baselines: bool = False
    """Try no simple models."""
    out: Path = Path("out/study")
    """Folder for the results."""

    without = ("options", "plan", "rule", "monitor")

    def arguments(self) -> dict[str, Any]:
        arguments = super().arguments()
        arguments["baselines"] = not arguments.pop("no_baselines")
        return arguments

    def show(self, result: Any, line: str) -> None:
        print(f"{result.text()}\n\ntable: {self.out / 'table.csv'}")
