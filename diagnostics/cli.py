"""The command line: fedlayers run | resume | verify | diagnose | select | compare | study | list."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction, arg

from fl_core.config import AUTO, RunConfig
from fl_core.errors import RunError, UsageError, check_known

Set = Annotated[
    UseAppendAction[tuple[str, ...]],
    arg(name="set", metavar="KEY=VALUE", help="Configuration of the algorithm, as often as needed: --set mu=0.1."),
]
SetModel = Annotated[
    UseAppendAction[tuple[str, ...]],
    arg(name="set-model", metavar="KEY=VALUE", help="Option of the model: --set-model sizes=64,32."),
]
SetLoss = Annotated[
    UseAppendAction[tuple[str, ...]],
    arg(name="set-loss", metavar="KEY=VALUE", help="Option of the loss: --set-loss gamma=2."),
]
Debug = Annotated[bool, arg(help="Show the whole traceback of an error.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """What all commands share."""

    debug: Debug = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Command):
    """Train one algorithm on one federation, into a run directory.

    Examples:
        fedlayers run --dataset heart --algorithm playerfl --out runs/playerfl
        fedlayers run --dataset digits --algorithm fedper --plan auto --rounds 10 --out runs/fedper
        fedlayers run --dataset mine.npz --model timm:resnet18 --algorithm fedprox --set mu=0.01 --out runs/mine
    """

    out: Annotated[Path, arg(help="The run directory, new or empty.")] = Path("runs/run")
    config: OmitArgPrefixes[RunConfig] = dataclasses.field(default_factory=RunConfig)
    set: Set = ()
    set_model: SetModel = ()
    set_loss: SetLoss = ()

    def main(self) -> None:
        from diagnostics.measure import instruments
        from fl_core import runner

        config = configured(self.config, self.set, self.set_model, self.set_loss)
        engine = runner.run(config, self.out, instruments=instruments(), command=command_line())
        finished(engine, self.out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resume(Command):
    """Continue an interrupted run; it ends with the same bits as an undisturbed one.

    Examples:
        fedlayers resume runs/playerfl
    """

    dir: Positional[Path]

    def main(self) -> None:
        from diagnostics.measure import instruments
        from fl_core import runner

        finished(runner.resume(self.dir, instruments=instruments()), self.dir)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify(Command):
    """Check every stored byte of a run against its digest.

    Examples:
        fedlayers verify runs/playerfl
    """

    dir: Positional[Path]

    def main(self) -> None:
        from fl_core.store import Run as StoredRun

        print("\n".join(StoredRun(self.dir).verify()))
        print(f"{self.dir}: every byte is as it was written")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnose(Command):
    """Measure every layer on every client, of a run or of a dataset and a model after one local epoch.

    Examples:
        fedlayers diagnose runs/playerfl --round last --model local --out rows.jsonl
        fedlayers diagnose --dataset digits --model mlp --metrics federation_sensitivity cka --out rows.jsonl
    """

    out: Annotated[Path, arg(help="Where the rows go.")] = Path("rows.jsonl")
    dir: Annotated[Positional[Path | None], arg(help="A run directory; or give --dataset instead.")] = None
    metrics: Annotated[tuple[str, ...], arg(help="Registry names; default all.")] = ()
    round: Annotated[str, arg(help="Of a run: a round with a checkpoint, or last.")] = "last"
    model: Annotated[
        str | None, arg(help="Of a run: local, personal or global (default local). Of a dataset: a model's name.")
    ] = None
    dataset: Annotated[str | None, arg(help="Registered name, or path of your own data.")] = None
    clients: int | None = None
    partition: str | None = None
    alpha: float | None = None
    classes_per_client: int | None = None
    samples: int | None = None
    batch: int | None = None
    lr: float | None = None
    optimizer: str | None = None
    loss: str | None = None
    by: str = "block"
    seed: int = 0
    data_root: str | None = None
    set_model: SetModel = ()
    set_loss: SetLoss = ()

    def main(self) -> None:
        from diagnostics import measure
        from diagnostics.diagnose import METRICS
        from fl_core import runner

        if (self.dir is None) == (self.dataset is None):
            raise UsageError("diagnose needs a run directory or --dataset, one of the two")
        if not self.out.parent.is_dir():
            raise UsageError(f"there is no folder {self.out.parent}")
        metrics = self.metrics or tuple(METRICS)
        for name in metrics:
            check_known("metric", name, METRICS)
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in _CONFIG_FIELDS}
        if self.dir is not None:
            report = measure.of_run(self.dir, metrics, round=_round(self.round), which=self.model or "local")
        else:
            config = configured(RunConfig(**{**own, "dataset": str(self.dataset)}), (), self.set_model, self.set_loss)
            report = measure.of_task(runner.assemble(config), metrics, command=command_line())
        report.write(self.out)
        print(report)
        for metric in metrics:
            table = report.values(metric).to_string(float_format="{:.4g}".format)
            print(f"\n{metric} ({METRICS[metric].direction})\n{table}")
        print(f"\nrows: {self.out}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Select(Command):
    """Turn measured rows into a plan: which layers to federate, and why.

    Examples:
        fedlayers select rows.jsonl --rule sensitivity_ratio --threshold 1.2 --out plan.json
        fedlayers select rows.jsonl --rule manual --layers conv1,conv2 --out plan.json
    """

    rows: Positional[Path]
    rule: Annotated[str, arg(help="Registry name; see fedlayers list rules.")] = "sensitivity_ratio"
    metric: Annotated[str | None, arg(help="Whose values are read; default federation_sensitivity.")] = None
    variant: Annotated[str | None, arg(help="Of the metric; default what was seen in training, where it was.")] = None
    threshold: float = 1.2
    layers: Annotated[str | None, arg(help="For the rule manual: names separated by commas.")] = None
    out: Annotated[Path, arg(help="Where the plan goes.")] = Path("plan.json")

    def main(self) -> None:
        from diagnostics import select

        if not self.out.parent.is_dir():
            raise UsageError(f"there is no folder {self.out.parent}")
        plan = select.select(
            self.rows,
            self.rule,
            metric=self.metric,
            variant=self.variant,
            threshold=self.threshold,
            layers=self.layers,
        )
        plan.save(self.out)
        print(select.explain(plan))
        print(f"\nplan: {self.out}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare(Command):
    """Run several algorithms over several seeds and compare them. Finished runs are kept, interrupted ones resumed.

    Examples:
        fedlayers compare --dataset heart --algorithms local fedavg playerfl --seeds 5 --out out/compare
        fedlayers compare --dataset heart --algorithms fedprox ditto --set fedprox.mu=0.01 --out out/penalty
    """

    algorithms: tuple[str, ...] = ("local", "fedavg", "fedper", "playerfl")
    seeds: Annotated[int, arg(help="Number of seeds, counted from --seed.")] = 3
    out: Annotated[Path, arg(help="Folder for runs, rows, table and pictures.")] = Path("out/compare")
    config: OmitArgPrefixes[RunConfig] = dataclasses.field(default_factory=RunConfig)
    set: Set = ()
    set_model: SetModel = ()
    set_loss: SetLoss = ()

    def main(self) -> None:
        from diagnostics import study
        from fl_core.plan import LayerPlan

        plan = None
        config = configured(self.config, (), self.set_model, self.set_loss)
        if config.plan not in (None, AUTO):
            plan, config = LayerPlan.load(str(config.plan)), dataclasses.replace(config, plan=None)
        result = study.compared(
            config,
            self.algorithms,
            tuple(range(config.seed, config.seed + self.seeds)),
            self.out,
            options=options_by_algorithm(self.set, self.algorithms),
            plan=plan,
            command=command_line(),
        )
        print(result.text())
        print(f"\nrows, table and pictures: {self.out}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(Command):
    """The whole question on one dataset: measure, decide, federate, compare; pictures and a report.

    Examples:
        fedlayers study
        fedlayers study --dataset digits --rounds 10 --seeds 3 --out out/digits
    """

    out: Annotated[Path, arg(help="Folder for everything.")] = Path("out/study")
    algorithms: tuple[str, ...] = ("local", "fedavg", "fedbabu", "playerfl", "playerfl_random")
    seeds: Annotated[int, arg(help="Number of seeds, counted from --seed.")] = 5
    config: OmitArgPrefixes[RunConfig] = dataclasses.field(default_factory=RunConfig)
    set: Set = ()
    set_model: SetModel = ()
    set_loss: SetLoss = ()

    def main(self) -> None:
        from diagnostics import study

        study.study(
            configured(self.config, (), self.set_model, self.set_loss),
            self.algorithms,
            tuple(range(self.config.seed, self.config.seed + self.seeds)),
            self.out,
            options=options_by_algorithm(self.set, self.algorithms),
            command=command_line(),
            say=print,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class List(Command):
    """What can be named: algorithms, datasets (with their defaults), models, metrics or rules.

    Examples:
        fedlayers list algorithms
        fedlayers list datasets
    """

    what: Positional[str]

    def main(self) -> None:
        from diagnostics import listings

        print(listings.LISTINGS[check_known("listing", self.what, listings.LISTINGS)]())


COMMANDS: dict[str, Callable[..., Command]] = {
    "study": Study,
    "run": Run,
    "resume": Resume,
    "verify": Verify,
    "diagnose": Diagnose,
    "select": Select,
    "compare": Compare,
    "list": List,
}
_CONFIG_FIELDS = {f.name for f in dataclasses.fields(RunConfig)}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; exits with 2 for a usage error, 1 for a failure, with one line that says why."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.path.insert(0, "")  # so that --model package.module:callable finds a module in the working directory
    command: Any = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="fedlayers",
        description="Measure which layers of a network to federate and which to keep local, and check the choice.",
        args=arguments or ["--help"],
    )
    try:
        command.main()
    except (UsageError, RunError) as error:
        if command.debug:
            raise
        print(f"fedlayers: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        print("fedlayers: interrupted; fedlayers resume continues a run", file=sys.stderr)
        sys.exit(130)


# --- arguments -------------------------------------------------------------------------------------------------


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["fedlayers", *sys.argv[1:]])


def pairs(kind: str, given: Sequence[str]) -> dict[str, Any]:
    """``key=value`` arguments as a dictionary; a value is JSON where it reads as JSON, a list where it has commas.

    Raises:
        UsageError: an argument without ``=``.
    """
    found = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UsageError(f"{kind} takes KEY=VALUE, not {item!r}")
        found[key] = _value(value)
    return found


def _value(text: str) -> Any:
    for candidate in (text, f"[{text}]" if "," in text else text):
        try:
            return json.loads(candidate)
        except json.JSONDecodeError:
            continue
    return text


def configured(config: RunConfig, own: Sequence[str], model: Sequence[str], loss: Sequence[str]) -> RunConfig:
    """A configuration with the ``--set`` arguments in it."""
    return dataclasses.replace(
        config,
        options=pairs("--set", own),
        model_options=pairs("--set-model", model),
        loss_options=pairs("--set-loss", loss) or None,
    )


def options_by_algorithm(given: Sequence[str], algorithms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``--set algorithm.key=value`` arguments of a comparison, by algorithm.

    Raises:
        UsageError: a key that does not name an algorithm of the comparison.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, value in pairs("--set", given).items():
        name, dot, own = key.partition(".")
        if not dot:
            raise UsageError(f"in a comparison --set names the algorithm: --set {algorithms[0]}.{key}={value}")
        found.setdefault(check_known("algorithm of this comparison", name, algorithms), {})[own] = value
    return found


def _round(text: str) -> int | str:
    if text == "last":
        return text
    if not text.isdigit():
        raise UsageError(f"--round takes a number or last, not {text!r}")
    return int(text)


def finished(engine: Any, out: Path) -> None:
    """Print what a run came to."""
    from fl_core.store import Run as StoredRun

    _, frame = StoredRun(out).rows()
    last = frame[(frame["round"] == engine.done) & (frame["split"] == "test")]
    print(last.pivot_table(index=["model", "client"], columns="metric", values="value").round(4).to_string())
    if engine.algorithm.plan is not None:
        print(f"\n{engine.algorithm.plan}")
    print(f"\n{engine.done} rounds of {engine.algorithm.name}: {out}")
