"""The command line: fedlayers study | run | resume | verify | diagnose | select | compare | regret | list."""

from __future__ import annotations

import dataclasses
import inspect
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro
from tyro.conf import Positional

from diagnostics import arguments
from diagnostics.arguments import Set, SetEach, SetLoss, SetModel, configured, option
from fl_core.config import AUTO, RunConfig
from fl_core.errors import RunError, UsageError, check_known

RunDirectory = Annotated[Positional[Path], option("A run directory.", "DIR")]
ModelCode = Annotated[
    str | None,
    option("Of a run whose model is code: its package.module:callable again, since that code is imported and called."),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """What all commands share."""

    debug: Annotated[bool, option("Show the whole traceback of an error.")] = False

    def main(self, line: str) -> None:
        """Do it; ``line`` is the command as it was typed.

        Raises:
            UsageError, RunError: with the reason.
        """
        raise NotImplementedError

    def interrupted(self) -> str:
        """What to know after Ctrl-C."""
        return "nothing was written"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Command):
    """Train one algorithm on one federation, into a run directory.

    Examples:
        fedlayers run --dataset heart --algorithm playerfl --out runs/playerfl
        fedlayers run --dataset digits --algorithm fedper --plan auto --rounds 10
        fedlayers run --dataset digits --partition dirichlet --alpha 0.1 --clients 3
        fedlayers run --dataset mine.npz --model timm:resnet18 --out runs/mine
        fedlayers run --model my_models:network --algorithm fedprox --set mu=0.01
    """

    out: Annotated[Path, option("The run directory, new or empty.", "DIR")] = Path("runs/run")
    config: Annotated[RunConfig, arguments.flags()]
    set: Set = ()
    set_model: SetModel = ()
    set_loss: SetLoss = ()

    def main(self, line: str) -> None:
        from diagnostics.measure import instruments
        from fl_core import runner

        config = configured(self.config, self.set, self.set_model, self.set_loss)
        engine = runner.run(config, self.out, instruments=instruments(), command=line)
        finished(engine, self.out)

    def interrupted(self) -> str:
        begun = (self.out / "config.json").exists()
        return f"fedlayers resume {shlex.quote(str(self.out))} goes on" if begun else super().interrupted()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resume(Command):
    """Continue an interrupted run, to the same bits in the end.

    Examples:
        fedlayers resume runs/playerfl
    """

    dir: RunDirectory
    model_code: ModelCode = None

    def main(self, line: str) -> None:
        from diagnostics.measure import instruments
        from fl_core import runner

        finished(runner.resume(self.dir, instruments=instruments(), model_code=self.model_code), self.dir)

    def interrupted(self) -> str:
        return "the same command goes on"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify(Command):
    """Check every covered byte of a run against its digest.

    Not covered are timing.jsonl and the rows after the last checkpoint.

    Examples:
        fedlayers verify runs/playerfl
    """

    dir: RunDirectory

    def main(self, line: str) -> None:
        from fl_core.store import Run as StoredRun

        print("\n".join(StoredRun(self.dir).verify()))
        print(f"{self.dir}: every covered byte is as it was written")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnose(Command):
    """Measure every layer on every client.

    Either the models of a run are measured, or those of a dataset and a model after every client's first
    local training, one epoch unless --epochs says more.
    The rows are what fedlayers select reads.

    Examples:
        fedlayers diagnose runs/playerfl --round last --model local
        fedlayers diagnose --dataset heart --model heart_mlp --out rows.jsonl
        fedlayers diagnose --dataset digits --metrics federation_sensitivity cka
    """

    dir: Annotated[Positional[Path | None], option("A run directory; or give --dataset instead.", "[DIR]")] = None
    out: Annotated[Path, option("Where the rows go.", "FILE")] = Path("rows.jsonl")
    metrics: Annotated[tuple[str, ...], option("Registry names; default the four that decide.", "NAME [NAME ...]")] = ()
    round: Annotated[str, option("Of a run: a round with a checkpoint, or last.", "N|last")] = "last"
    model: Annotated[
        str | None, option("Of a run: local, personal or global (default local). Of a dataset: a model's name.")
    ] = None
    model_code: ModelCode = None
    dataset: Annotated[str | None, option("Registered name, or the path of your own data.")] = None
    config: Annotated[
        RunConfig,
        arguments.flags(
            without=(
                *("dataset", "model", "rounds", "participation", "keep_optimizer", "workers", "eval_every"),
                *("checkpoint_every", *arguments.GROUPS["algorithm"]),
            )
        ),
    ]
    set_model: SetModel = ()
    set_loss: SetLoss = ()

    def main(self, line: str) -> None:
        from diagnostics import measure
        from diagnostics.metrics import DEFAULT, METRICS
        from fl_core import runner

        if (self.dir is None) == (self.dataset is None):
            raise UsageError("diagnose needs a run directory, before the flags, or --dataset: one of the two")
        arguments.check_output(self.out)
        metrics = tuple(dict.fromkeys(self.metrics)) or DEFAULT
        for name in metrics:
            check_known("metric", name, METRICS)
        if self.dir is not None:
            self._check_of_run()
            round = self.round if self.round == "last" else int(self.round)
            which, code = self.model or "local", self.model_code
            report = measure.of_run(self.dir, metrics, round=round, which=which, model_code=code, command=line)
        else:
            if self.round != "last":
                raise UsageError("--round is for a run directory; a dataset is measured after the first local training")
            config = configured(self.config, (), self.set_model, self.set_loss)
            config = dataclasses.replace(config, dataset=str(self.dataset), model=self.model)
            report = measure.of_task(runner.assemble(config), metrics, command=line)
        report.write(self.out)
        print(report)
        for metric in metrics:
            for variant in measure.shown_variants(report, metric):
                table = report.values(metric, variant).to_string(float_format="{:.4g}".format)
                print(f"\n{metric}, {variant} ({METRICS[metric].direction})\n{table}")
        if report.header["absent"]:
            print(f"\nwithout a model in this round: {', '.join(report.header['absent'])}")
        print(f"\nrows: {self.out}")

    def _check_of_run(self) -> None:
        if self.round != "last" and not self.round.isdigit():
            raise UsageError(f"--round takes a number or last, not {self.round!r}")
        given = [f.name for f in dataclasses.fields(RunConfig) if getattr(self.config, f.name) != f.default]
        given = [name for name in given if name not in ("options", "model_options")]
        given += [name for name in ("set_model", "set_loss") if getattr(self, name)]
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} goes with --dataset; a run has its own configuration")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Select(Command):
    """Turn measured rows into a plan: the layers to federate, and why.

    Examples:
        fedlayers select rows.jsonl --rule sensitivity_ratio --threshold 1.2
        fedlayers select rows.jsonl --rule vote --metrics federation_sensitivity cka=largest_jump --explain
        fedlayers select rows.jsonl --rule budget_bytes --budget 40000
        fedlayers select rows.jsonl --rule manual --layers conv1,conv2 --out plan.json
    """

    rows: Annotated[Positional[Path], option("What fedlayers diagnose wrote.", "ROWS")]
    rule: Annotated[str, option("Registry name: fedlayers list rules.")] = "sensitivity_ratio"
    metric: Annotated[str | None, option("Whose values are read; default federation_sensitivity.")] = None
    variant: Annotated[str | None, option("Of the metric; default what was seen in training, where it was.")] = None
    threshold: Annotated[float, option("Of sensitivity_ratio and change_point.")] = 1.2
    metrics: Annotated[
        tuple[str, ...], option("For the rule vote: who votes.", "METRIC[=RULE] [METRIC[=RULE] ...]")
    ] = ()
    budget: Annotated[float | None, option("For the budget rules: bytes up a client and round, or FLOPs a sample.")] = (
        None
    )
    layers: Annotated[str | None, option("For the rule manual: names separated by commas.")] = None
    explain: Annotated[bool, option("Also show every client's curve, how sure the decision is, and its costs.")] = False
    out: Annotated[Path, option("Where the plan goes.", "FILE")] = Path("plan.json")

    def main(self, line: str) -> None:
        from diagnostics import select

        arguments.check_output(self.out)
        plan = select.select(
            self.rows,
            self.rule,
            metric=self.metric,
            variant=self.variant,
            threshold=self.threshold,
            layers=self.layers,
            metrics=self.metrics or None,
            budget=self.budget,
            costs=True,
        )
        plan.save(self.out)
        print(select.explain(plan, full=self.explain))
        print(f"\nplan: {self.out}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(Command):
    """Run several algorithms over several seeds and compare them.

    Finished runs are kept and interrupted ones resumed, so that the same command goes on after a stop.

    Examples:
        fedlayers compare --algorithms local fedavg playerfl --seeds 5 --out out/heart
        fedlayers compare --algorithms fedprox ditto --set fedprox.mu=0.01
    """

    algorithms: Annotated[tuple[str, ...], option("Registry names: fedlayers list algorithms.", "NAME [NAME ...]")] = (
        *("local", "fedavg", "fedper", "playerfl"),
    )
    seeds: Annotated[int, option("Number of seeds, counted from --seed.")] = 3
    out: Annotated[Path, option("Folder for runs, rows, table and pictures.", "DIR")] = Path("out/compare")
    config: Annotated[RunConfig, arguments.flags(without=("algorithm",))]
    set: SetEach = ()
    set_model: SetModel = ()
    set_loss: SetLoss = ()

    def main(self, line: str) -> None:
        import matplotlib as mpl

        from diagnostics import study
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
            command=line,
        )
        print(result.text())
        print(f"\nrows, table and pictures: {self.out}")

    def interrupted(self) -> str:
        return "the same command goes on"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regret(Command):
    """Train every cut, and tell what each rule's choice loses.

    Cuts are judged on the validation split; test scores stand beside. After a stop the same command goes on, and with
    other rules it trains nothing anew.

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

        from diagnostics import plots
        from diagnostics.regret import regret

        mpl.use("Agg")  # pictures go to files, also where there is a screen

        config = configured(self.config, self.set, self.set_model, self.set_loss)
        config = dataclasses.replace(config, algorithm=self.algorithm)
        seeds = tuple(range(config.seed, config.seed + self.seeds))
        result = regret(config, self.rules, seeds, self.out, score=self.score, command=line)
        figure = plots.regret(result.scores, result.decisions, self.score).get_figure(root=True)
        assert figure is not None
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

        from diagnostics import study

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class List(Command):
    """What can be named, with defaults and one line each.

    Examples:
        fedlayers list algorithms
        fedlayers list datasets
    """

    what: Annotated[Positional[str], option("algorithms, datasets, models, metrics or rules.", "WHAT")]

    def main(self, line: str) -> None:
        from diagnostics import listings

        print(listings.LISTINGS[check_known("listing", self.what, listings.LISTINGS)]())


COMMANDS: dict[str, type[Command]] = {
    "study": Study,
    "run": Run,
    "resume": Resume,
    "verify": Verify,
    "diagnose": Diagnose,
    "select": Select,
    "compare": Compare,
    "regret": Regret,
    "list": List,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with 2 for a usage error, 1 for a failure, 130 after Ctrl-C, with one line that says why."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        command = parsed(given)
    except UsageError as error:
        _leave(2, str(error))
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _Notes()
            command.main(shlex.join(["fedlayers", *given]))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        _leave(130, f"interrupted; {command.interrupted()}")
    except Exception as error:
        if command.debug:
            traceback.print_exc()
        foreseen = isinstance(error, (UsageError, RunError, OSError))
        reason = str(error) if foreseen else f"{type(error).__name__}: {error} (--debug shows where)"
        _leave(2 if isinstance(error, UsageError) else 1, reason)


def parsed(given: Sequence[str]) -> Command:
    """The command that the arguments ask for; help and flags that do not parse end the program.

    Raises:
        UsageError: an unknown command.
    """
    name = given[0] if given else "--help"
    if name.startswith("-"):
        about = "Measure which layers of a network to federate and which to keep local, and check the choice."
        brief: Any = {name: _brief(kind) for name, kind in COMMANDS.items()}
        tyro.extras.subcommand_cli_from_dict(brief, prog="fedlayers", description=about, args=[name])
    kind = COMMANDS[check_known("command", name, COMMANDS)]
    text = inspect.getdoc(kind)
    return tyro.cli(kind, prog=f"fedlayers {name}", description=text, args=given[1:], config=arguments.MARKERS)


def _brief(kind: type[Command]) -> Any:
    """A stand-in for a command in the overview: its first line."""

    def command() -> None: ...

    command.__doc__ = (inspect.getdoc(kind) or "").partition("\n")[0]
    return command


class _Notes:
    """Shows each warning once, in a line."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, message: Warning | str, *_: Any, **__: Any) -> None:
        text = " ".join(str(message).split())
        if text not in self.seen:
            self.seen.add(text)
            print(f"fedlayers: note: {text}", file=sys.stderr)


def _leave(code: int, reason: str) -> NoReturn:
    print(f"fedlayers: {' '.join(reason.split())}", file=sys.stderr)
    sys.exit(code)


def finished(engine: Any, out: Path) -> None:
    """Print what a run came to."""
    from fl_core.store import Run as StoredRun

    _, frame = StoredRun(out).rows()
    last = frame[(frame["round"] == engine.done) & (frame["split"] == "test")]
    print(last.pivot_table(index=["model", "client"], columns="metric", values="value").round(4).to_string())
    if engine.algorithm.plan is not None:
        print(f"\n{engine.algorithm.plan}")
    print(f"\n{engine.done} rounds of {engine.algorithm.name}: {out}")
