"""The commands that measure layers, choose among them, score rules, and draw.

They are diagnose, select, regret, plot and map.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlayers.cli.options import Command, ConfiguredCommand, by_name, check_file, load
from fl_core.config import RunConfig
from fl_core.data.registry import DATASETS
from fl_core.display import in_order
from fl_core.errors import UsageError, check_known, check_value, listing, plural, warn
from fl_core.kinds import Kind, kind_of, wrong_kind
from fl_core.storage import check_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


NEEDS = {
    "round": ("dir", "models"),
    "allow_code": ("dir",),
    "models": ("dataset",),
    "pattern": ("models",),
    "by_position": ("models",),
    "null_draws": ("null",),
    "groups": ("dir",),
}
"""Flags of diagnose that need another flag, each with those of which one is enough."""


class OfRun(ConfiguredCommand):
    """Base of commands that measure a run, or else train on a dataset first."""

    dir: Path | None = None
    """Run directory. Leave it out with --dataset."""
    dataset: str | None = None
    """Dataset: a name, package.module:function, or paths of your data."""
    allow_code: tuple[str, ...] = ()
    """Custom code that this run may import and call, as package.module:name. A model option that is no size or rate
    needs it too, such as pretrained=true."""

    argument = "dir"

    def check_source(self) -> None:
        """Check that the command has either a run or a dataset, and that a run has no options of training.

        Raises:
            UsageError: it has both, neither, or options of training for a run.
        """
        if (self.dir is None) == (self.dataset is None):
            raise UsageError(
                "the command must have a run directory before the flags, or --dataset. Name one of the two."
            )
        kind = Kind.RUN if self.dir is None else kind_of(self.dir)
        is_dataset = kind is Kind.NOTHING and str(self.dir) in DATASETS
        if is_dataset or kind is Kind.SAMPLES:
            command_name = type(self).__name__.lower()
            raise UsageError(
                f"DIR must be a run directory; got the dataset {str(self.dir)!r}. "
                f"Write fedlayers {command_name} --dataset {self.dir}."
            )
        if self.dir is not None and (
            self.keys != RunConfig() or self.model_option or self.loss_option
        ):
            raise UsageError(
                "options of training go with --dataset. A run has its own configuration."
            )


class Diagnose(OfRun):
    """Measure every layer on every client.

    It measures the models of a run. With --dataset it first trains each client for one
    round, and measures these models.

    Next: fedlayers select DIR, fedlayers plot DIR

    Examples:
        fedlayers diagnose --dataset heart
        fedlayers diagnose --dataset digits --metrics federation_sensitivity cka
        fedlayers diagnose --dataset heart --null labels fresh --out null
        fedlayers run --algorithm fedavg --out runs/fedavg
        fedlayers diagnose runs/fedavg --model global --out global
        fedlayers diagnose --models server/ --model my:Net --dataset heart
    """

    out: Path = Path("diagnosis")
    """Folder for the rows, rows.jsonl."""
    metrics: tuple[str, ...] = ()
    """Metrics: see fedlayers list metrics. Default: grad_variance hessian_trace cka federation_sensitivity."""
    measure_batch: int = 256
    """Samples per batch of the measurement. --batch-size is that of training."""
    round: str = ""
    """Round of the run: one with a checkpoint, last or best. Default: best under a stopping rule, else last.
    With --models: one of its files, or last."""
    model: str | None = None
    """Models of the run: local, personal or global. Default: local. With --dataset: name of the model."""
    models: Path | None = None
    """Folder of models trained elsewhere. Use it with --dataset and --model."""
    pattern: str = "client_{client}.pt"
    """Files of --models, with {client}, and {round} if there are several."""
    by_position: bool = False
    """Take the arrays of .npz files in the order of the model's tensors."""
    resamples: int = 0
    """Bootstrap resamples of each client's batches. select --explain then shows how certain a plan is."""
    null: tuple[str, ...] = ()
    """Also measure where there is nothing to find: labels, labels_within or clients (shuffled), or fresh (an untrained
    model)."""
    null_draws: int = 1
    """Random draws of each null."""
    groups: bool = False
    """Also say which clients form groups, by their own models on each other's validation samples."""
    option: tuple[str, ...] = ()
    """An option of a metric, such as --option hessian_spectrum.k=5. Repeatable."""
    json: bool = False
    """Print one object as JSON. All else goes to stderr."""

    without = (
        *("dataset", "model", "rounds", "participation", "keep_optimizer", "workers"),
        *("eval_every", "checkpoint_every", "algorithm", "plan", "rule", "threshold"),
        "options",
    )

    def main(self, line: str) -> Any:
        self.check_source()
        for flag, requirement in NEEDS.items():
            is_given = getattr(self, flag) != getattr(type(self), flag)
            if is_given and not any(
                getattr(self, required_flag) for required_flag in requirement
            ):
                flag_texts = [
                    "a run directory"
                    if required_flag == "dir"
                    else f"--{required_flag}"
                    for required_flag in requirement
                ]
                option = flag.replace("_", "-")
                ways_text = " or ".join(flag_texts)
                raise UsageError(f"--{option} goes with {ways_text}; got none.")
        check_folder(self.out)
        load("diagnostics.measure")
        from diagnostics import measure
        from diagnostics.metrics.base import DEFAULT
        from diagnostics.null import NULLS, Nulls
        from diagnostics.request import Request, chosen_metrics
        from fl_core.records.store import ROWS
        from fl_core.rows import records
        from fl_core.run import runner

        metrics = self.metrics or DEFAULT
        metrics_by_name = {metric.name: metric for metric in chosen_metrics(metrics)}
        options = by_name(self.option, "metric", tuple(metrics_by_name))
        for name, metric_options in options.items():
            if samples := {"probe", "test"} & metric_options.keys():
                raise UsageError(
                    f"samples must be given from Python; got --option {name}.{min(samples)}."
                )
        arguments: dict[str, Any] = {
            "options": options,
            "resamples": self.resamples,
            "batch": self.measure_batch,
            "null": Nulls(self.null, self.null_draws),
        }
        nulls = Request.of(metrics, arguments).null  # refuses them before any work
        arguments |= {"command": line}
        notes: list[str] = []
        if self.dir is not None:
            report = measure.diagnose_run(
                self.dir,
                metrics,
                round=self.round,
                which=self.model or "local",
                allow_code=self.allow_code,
                **arguments,
            )
            if self.groups:
                notes.append(self.alike())
        else:
            task = runner.assemble(self.asked_config())
            task.announce()
            if self.models is None:
                report = measure.diagnose_task(task, metrics, **arguments)
            else:
                from diagnostics.load_weights import load_clients

                rounds = load_clients(
                    self.models,
                    self.pattern,
                    lambda: copy.deepcopy(task.model),
                    by_position=self.by_position,
                )
                number_of = {str(number): number for number in sorted(rounds)}
                number_of["last"] = max(rounds)
                name = self.round or "last"
                number = number_of[check_known("round of --models", name, number_of)]
                context = {"round": number, "model": "local", "run": self.models.name}
                report = measure.diagnose_models(
                    task, rounds[number], metrics, context=context, **arguments
                )
        rows = self.out / ROWS
        if rows.exists():
            warn(f"{rows} will be replaced")
        report.write(rows)
        if absent_clients := report.header["absent"]:
            absent_names = listing(in_order(absent_clients))
            notes.append(f"without a model in this round: {absent_names}")
        if nulls.names:
            titles = "; ".join(NULLS[name].title for name in nulls.names)
            notes.append(f"nulls, with which select compares: {titles}")
        training_text = "the first local training"
        if self.dir is not None or self.models is not None:
            training_text = f"round {int(report.frame['round'].max())}"
        model_kind = (self.dir and self.model) or "local"
        title = f"{model_kind} models after {training_text}"
        missing = report.frame.loc[report.frame["status"] != "ok", "status"]
        if len(missing):
            reason = listing(missing.unique(), 3)
            notes.append(f"{plural(len(missing), 'row')} without a value: {reason}")
        text = report.text(list(metrics_by_name))
        print(f"{title}\n\n{text}\n")
        if conclusion := report.conclusion():
            notes.append(conclusion)
        print(*notes, f"rows: {rows}", sep="\n")
        return {"notes": notes, "rows": records(report.frame)}

    def alike(self) -> str:
        """Return a text on groups of similar clients.

        They are found from the losses of the last round's local models on each other's
        validation samples. Clients without a model or without such samples are left
        out.
        """
        from diagnostics.cross_scores import cross_scores
        from fl_core.run.restore import load_models

        models, task = load_models(
            self.dir or "", "last", "local", allow_code=self.allow_code
        )
        clients = [client for client in task.data.clients if len(client.validation)]
        pair_scores = cross_scores(
            {
                client.name: models[client.name]
                for client in clients
                if client.name in models
            },
            {
                client.name: client.validation
                for client in clients
                if client.name in models
            },
            loss=task.criterion,
        )
        return pair_scores.alike(task.config.execution.seed).text()


class Select(Command):
    """Choose the layers to share from a diagnosis.

    A rule decides, and a plan is written. A plan is a file that names the layers that clients share. The other layers
    stay local.

    Next: fedlayers run --algorithm fedper --plan PLAN

    Examples:
        fedlayers diagnose --dataset heart
        fedlayers select diagnosis --explain
        fedlayers select diagnosis --rule manual --layers fc1,fc2
    """

    dir: Path
    """Folder or file of fedlayers diagnose."""
    rule: str | None = None
    """Rule: see fedlayers list rules, or package.module:function. Default: sensitivity_ratio for
    federation_sensitivity, else largest_rise."""
    metric: str | None = None
    """Metric that the rule uses. Default: federation_sensitivity."""
    variant: str | None = None
    """Variant of the metric. Default: the one from training, if any."""
    threshold: float | None = None
    """Threshold of the rule sensitivity_ratio. Default: 1.2."""
    k: int = 1
    """Number of local layers of the rule top."""
    layers: str | None = None
    """Layers of the rule manual, separated by commas."""
    explain: bool = False
    """Also show each client's values, how certain the plan is, and its costs."""
    out: Path = Path("plan.json")
    """File of the plan to write."""

    argument = "dir"

    def main(self, line: str) -> None:
        from diagnostics import select
        from diagnostics.report import explain
        from diagnostics.select import RULES
        from fl_core.records.store import ROWS

        if kind_of(self.dir) is Kind.RUN:
            raise wrong_kind(self.dir, "diagnosis", "what fedlayers diagnose wrote")
        name = self.rule or select.default_rule(self.metric)
        rule = RULES[name]
        if self.threshold is not None and not rule.takes_threshold:
            members = RULES.members().items()
            takers = sorted(name for name, rule in members if rule.takes_threshold)
            raise UsageError(
                f"rule must be one with a threshold: {listing(takers)}; got {name!r}."
            )
        with warnings.catch_warnings():
            # the printed plan says so, too
            warnings.filterwarnings("ignore", "the plan, by ")
            plan = select.select(
                self.dir / ROWS if self.dir.is_dir() else self.dir,
                name,
                metric=self.metric,
                variant=self.variant,
                threshold=select.THRESHOLD
                if self.threshold is None
                else self.threshold,
                k=self.k,
                layers=self.layers,
            )
        check_file(self.out, "an earlier plan", r'\{\s*"format":\s*"fedlayers\.plan')
        plan.save(self.out)
        print(explain(plan, full=self.explain))
        print(f"\nplan: {self.out}")


class Regret(Command):
    """Score a rule where the best plan is known.

    It trains small federations, measures, lets the rule choose layers, and looks the plan up in a stored table of all
    subsets of layers. No plan is trained.

    Examples:
        fedlayers regret sensitivity_ratio
        fedlayers regret my_rule:half_way --metric hessian_trace
        fedlayers regret top --metric cka --rounds 5 --k 2
    """

    rule: str
    """Rule: see fedlayers list rules, or package.module:function."""
    metric: str | None = None
    """Metric that the rule reads. Default: federation_sensitivity."""
    rounds: int = 1
    """Rounds of FedAvg before the measurement."""
    federations: tuple[str, ...] = ()
    """Federations of the table. Default: all."""
    seeds: int = 3
    """Seeds of each federation."""
    k: int = 1
    """Number of local layers of the rule top."""

    argument = "rule"

    def main(self, line: str) -> None:
        load("diagnostics.measure")
        from fedlayers.rule_benchmark import regret

        print(
            regret(
                self.rule,
                metric=self.metric,
                rounds=self.rounds,
                federations=self.federations,
                seeds=self.seeds,
                k=self.k,
            )
        )


class Plot(Command):
    """Draw a diagnosis, the scores of a run, or a plan.

    Examples:
        fedlayers diagnose --dataset heart
        fedlayers plot diagnosis
        fedlayers plot diagnosis --metrics federation_sensitivity
        fedlayers run --algorithm fedavg --out runs/fedavg
        fedlayers plot runs/fedavg --metrics macro_f1 --out scores
    """

    path: Path
    """Folder of diagnose, rows.jsonl, a run directory, or a plan (.json)."""
    metrics: tuple[str, ...] = ()
    """Metrics to draw. Default: all in the rows."""
    out: Path = Path("pictures")
    """Folder for the pictures (.png)."""
    dpi: int = 200
    """Resolution in dots per inch, 20 to 1200."""

    argument = "path"

    def main(self, line: str) -> None:
        check_folder(self.out)
        if not 20 <= self.dpi <= 1200:
            raise UsageError(f"--dpi must be from 20 to 1200; got {self.dpi}.")

        from diagnostics import plots
        from diagnostics.plots.page import Page, album, figure_of
        from diagnostics.report import Report
        from fl_core.plan import LayerPlan
        from fl_core.records.store import ROWS, Run
        from fl_core.rows import read
        from fl_core.storage import Folder

        page: Page | None = None
        if self.path.suffix == ".json":
            if self.metrics:
                raise UsageError("--metrics is for rows. A plan is one picture.")
            plan = LayerPlan.load(self.path)
            data = plan.why.data
            pictures: dict[str, Callable[[], Figure]] = {
                "plan": lambda: figure_of(plots.plan(plan))
            }
        else:
            folder = Folder(self.path)  # which follows no link
            if folder.has("config.json"):
                header, frame = Run(self.path).rows()
            else:
                path = self.path
                if self.path.is_dir():
                    path = folder.file(ROWS)
                header, frame = read(path)
            if "layers" in header:  # their names as people read them
                frame = Report(frame, header).table
            data = str(header.get("data", ""))
            pictures = album(frame, self.metrics)
            if "layers" in header and not folder.has("config.json"):
                from diagnostics.report_page import report_page  # imports torch

                chosen_rows = frame[
                    frame["metric"].isin(self.metrics or frame["metric"])
                ]
                page = report_page(
                    Report(chosen_rows, header), f"Diagnosis: {self.path}"
                )
        for name, draw in pictures.items():
            figure = draw()
            self.out.mkdir(parents=True, exist_ok=True)
            path = self.out / f"{name}.png"
            save(figure, path, self.dpi, command=line, data=data)
            print(path)
        if page is not None:
            page.write(self.out / "report.html")
            print(self.out / "report.html")


class Map(OfRun):
    """Draw how each layer behaves over the rounds: the layer map.

    It measures the stored rounds of a run. With --dataset it trains first, and stores the run in OUT/run.

    Next: fedlayers choose --dataset NAME

    Examples:
        fedlayers map --dataset heart --rounds 5
        fedlayers map layer_map/run --out again
    """

    out: Path = Path("layer_map")
    """Folder for picture, rows and run."""
    width: float = 16.0
    """Width of the picture in cm, 4 to 100."""
    draws: int = 4
    """Draws of the null: clients that do not differ; at least 2."""

    without = ("dataset",)

    def main(self, line: str) -> None:
        self.check_source()
        check_folder(self.out)

        from diagnostics.plots.maps import WIDTH
        from diagnostics.through_time import LEAST_DRAWS, through_time
        from fedlayers import runs

        # a run may be trained before these are used
        check_value("--width", self.width, WIDTH)
        check_value("--draws", self.draws, LEAST_DRAWS)
        path = self.dir or self.out / "run"
        if self.dir is None:
            runs.run(self.asked_config(), path, command=line)
        report = through_time(
            path, out=self.out, draws=self.draws, allow_code=self.allow_code
        )
        figure = report.layer_map(width=self.width)
        self.out.mkdir(parents=True, exist_ok=True)
        data = str(report.header["data"])
        save(figure, self.out / "layer_map.png", command=line, data=data)
        print(self.out / "layer_map.png")


def save(figure: Figure, path: Path, dpi: int = 200, **facts: str) -> None:
    """Save a figure on white without a margin, and close it.

    Args:
        path: the file. Its ending names the format.
        dpi: dots per inch.
        facts: metadata of the file, such as the command and the data's digest. The commit is added.
    """
    import matplotlib.pyplot as plt

    from fl_core.records.store import commit

    figure.savefig(
        path,
        dpi=dpi,
        bbox_inches="tight",
        facecolor="white",
        metadata=facts | {"commit": commit()},
    )
    plt.close(figure)
