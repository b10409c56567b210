"""The commands that measure layers, choose among them, and draw: diagnose, select, plot."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from tyro.conf import Positional

from fedlayers import catalogue
from fedlayers.cli.options import (
    FILES,
    Command,
    ConfiguredCommand,
    ModelCode,
    SetMetric,
    apply_options,
    by_name,
    check_folder,
    check_plan_file,
    flags,
    option,
)
from fl_core.bounds import at_least, check_value
from fl_core.choices import METRIC_ALIASES
from fl_core.config import RunConfig
from fl_core.errors import UsageError, check_known, listing, warn
from fl_core.names import in_order

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import nn

    from diagnostics.metrics.base import Metric
    from fl_core.task import Task

_DTYPES = ("float32", "float64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnose(ConfiguredCommand):
    """Measure every layer on every client.

    It measures the models of a run. With --dataset it first trains each client for one epoch, and measures these
    models.

    Next: fedlayers select DIR, fedlayers plot DIR

    Examples:
        fedlayers diagnose --dataset heart
        fedlayers diagnose --dataset digits --metrics federation_sensitivity cka
        fedlayers diagnose --dataset heart --null labels fresh --out null
        fedlayers run --algorithm fedavg --out runs/fedavg
        fedlayers diagnose runs/fedavg --model global --out global
        fedlayers diagnose --models server/ --model my:Net --dataset heart
    """

    dir: Annotated[
        Positional[Path | None],
        option("Run directory. Leave it out with --dataset.", "[DIR]"),
    ] = None
    out: Annotated[Path, option("Folder for the rows, rows.jsonl.", "DIR")] = Path(
        "diagnosis"
    )
    metrics: Annotated[
        tuple[str, ...],
        option(
            "Metrics to measure: see fedlayers list metrics. Default: the four that rules use.",
            "NAME [NAME ...]",
        ),
    ] = ()
    measure_batch: Annotated[
        int,
        option(
            "Samples per batch of the measurement. --batch-size is that of training.",
            "N",
        ),
    ] = 256
    round: Annotated[
        str, option("Round of the run: one with a checkpoint, or last.", "ROUND")
    ] = "last"
    model: Annotated[
        str | None,
        option(
            "Models of the run: local, personal or global. Default: local. With --dataset: name of the model.",
            "NAME",
        ),
    ] = None
    models: Annotated[
        Path | None,
        option(
            "Folder of models trained elsewhere. Use it with --dataset and --model.",
            "DIR",
        ),
    ] = None
    pattern: Annotated[
        str,
        option(
            "Files of --models, with {client}, and {round} if there are several.",
            "NAME",
        ),
    ] = "client_{client}.pt"
    by_position: Annotated[
        bool,
        option("Take the arrays of .npz files in the order of the model's tensors."),
    ] = False
    allow_code: ModelCode = ()
    dataset: Annotated[
        str | None,
        FILES,
        option("Dataset: a name, package.module:function, or paths of your data."),
    ] = None
    resamples: Annotated[
        int,
        option(
            "Bootstrap resamples of each client's batches. select --explain then shows how certain a plan is.",
            "N",
        ),
    ] = 0
    null: Annotated[
        tuple[str, ...],
        option(
            "Also measure where there is nothing to find: labels, labels_within or clients (shuffled), or fresh (an "
            "untrained model).",
            "NULL [NULL ...]",
        ),
    ] = ()
    null_draws: Annotated[
        int | None, option("Random draws of each null. Default: 1.", "N")
    ] = None
    groups: Annotated[
        bool,
        option(
            "Also group clients by their updates of the first layer, with a test against 59 shuffles."
        ),
    ] = False
    config: Annotated[
        RunConfig,
        flags(
            without=(
                *(
                    "dataset",
                    "model",
                    "rounds",
                    "participation",
                    "keep_optimizer",
                    "workers",
                    "eval_every",
                ),
                *("checkpoint_every", "algorithm", "plan", "rule", "threshold"),
            )
        ),
    ]
    set: SetMetric = ()

    def asked_config(self) -> RunConfig:
        config = apply_options(self.config, (), self.model_option, self.loss_option)
        if self.dir is None:
            config = config.with_keys(
                dataset=self.dataset or config.data.dataset, model=self.model
            )
            catalogue.check_names(config)
        return config

    def main(self, line: str) -> None:
        if (self.dir is None) == (self.dataset is None):
            raise UsageError(
                "diagnose must have a run directory before the flags, or --dataset. Name one of the two."
            )
        for name in self.metrics:
            catalogue.check("metric", METRIC_ALIASES.get(name, name))
        if self.dir is not None:
            self._check_of_run()
        elif self.round != "last" and self.models is None:
            raise UsageError(
                "--round is for a run directory or --models. A dataset is measured after the first local training."
            )
        elif self.allow_code:
            raise UsageError(
                "--allow-code is for a run directory. With --dataset name the model with --model."
            )
        if self.null_draws is not None and not self.null:
            raise UsageError(
                "--null-draws must have a null; got none. Name one, such as --null labels."
            )
        if self.groups and self.dir is not None:
            raise UsageError(
                "--groups goes with --dataset: the clients train again on shuffled samples."
            )
        config = self.asked_config()

        from diagnostics import measure
        from diagnostics.diagnosis import chosen_metrics
        from diagnostics.metrics.base import DEFAULT
        from diagnostics.null import NULLS, Nulls, check_resamples
        from fedlayers.cli import tables
        from fl_core import runner
        from fl_core.records.store import ROWS

        nulls = Nulls(self.null, self._draws)
        check_folder(self.out)
        metrics = tuple(dict.fromkeys(self.metrics)) or DEFAULT
        chosen = {metric.name: metric for metric in chosen_metrics(metrics)}
        options = {
            name: _options(chosen[name], given)
            for name, given in by_name(
                self.set, "metric", tuple(chosen), "that is measured"
            ).items()
        }
        check_value("--measure-batch", self.measure_batch, at_least(1))
        how: dict[str, Any] = {
            "command": line,
            "options": options,
            "resamples": check_resamples(self.resamples),
        }
        how["measure_batch"] = self.measure_batch
        notes: list[str] = []
        if self.dir is not None:
            round = self.round if self.round == "last" else int(self.round)
            which, code = self.model or "local", self.allow_code
            how["null"] = nulls
            report = measure.diagnose_run(
                self.dir, metrics, round=round, which=which, allow_code=code, **how
            )
        else:
            task = runner.assemble(config)
            task.announce()
            if self.groups:
                from diagnostics.groups import client_groups

                notes.append(client_groups(task).text())
            if self.models is None:
                report = measure.diagnose_task(task, metrics, null=nulls, **how)
            else:
                number, stored = self._stored_models(task)
                context = {"round": number, "model": "local", "run": self.models.name}
                report = measure.diagnose_models(
                    task, stored, metrics, context=context, null=nulls, **how
                )
        rows = self.out / ROWS
        if rows.exists():
            warn(f"{rows} is replaced")
        self.out.mkdir(parents=True, exist_ok=True)
        report.write(rows)
        after = (
            "the first local training"
            if self.dir is None and self.models is None
            else f"round {int(report.frame['round'].max())}"
        )
        if report.header["absent"]:
            notes.append(
                f"without a model in this round: {listing(in_order(report.header['absent']))}"
            )
        if nulls.names:
            notes.append(
                f"nulls, with which select compares: {'; '.join(NULLS[name].title for name in nulls.names)}"
            )
        notes.append(f"rows: {rows}")
        shown = [
            (name, variant)
            for name in chosen
            for variant in measure.shown_variants(report, name)
        ]
        missing = int((report.frame["status"] != "ok").sum())
        title = f"{(self.dir and self.model) or 'local'} models after {after}"
        print(f"{title}{f'; {missing} rows without a value' if missing else ''}\n")
        print(tables.measurements(report, shown, tables.LINES - 3 - len(notes)))
        print("", *notes, sep="\n")

    @property
    def _draws(self) -> int:
        return 1 if self.null_draws is None else self.null_draws

    def _stored_models(self, task: Task) -> tuple[int, dict[str, nn.Module]]:
        """Return the models of the folder that --models names, and their round."""
        from diagnostics.load_weights import load_clients

        assert self.models is not None
        found = load_clients(
            self.models,
            self.pattern,
            lambda: copy.deepcopy(task.model),
            by_position=self.by_position,
        )
        number = max(found) if self.round == "last" else int(self.round)
        check_known("round of --models", str(number), map(str, found))
        return number, found[number]

    def _check_of_run(self) -> None:
        if self.round != "last" and not self.round.isdigit():
            raise UsageError(f"--round must be a number or last; got {self.round!r}.")
        if given := self.changed_flags():
            raise UsageError(
                f"{given[0]} goes with --dataset. A run has its own configuration."
            )


def _options(metric: Metric, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a metric's options of the command line, checked, with a type of numbers by its name.

    Raises:
        UsageError: an unknown option, one that has no text form (models, data), or a value of another type.
    """
    import torch

    options = dict(given)
    for key, value in given.items():
        known = check_known(f"option of {metric.name}", key, metric.options)
        hint = metric.option_types[known]
        kinds = get_args(hint) or (hint,)
        if torch.dtype in kinds and value is not None:
            name = check_known(f"{metric.name}.{key}", value, _DTYPES)
            options[key] = getattr(torch, name)
        elif {bool, int, float, str, torch.dtype}.isdisjoint(kinds):
            raise UsageError(
                f"--option {metric.name}.{key} must be given from Python: it is no text or number; got {value!r}."
            )
    metric.settings(**options)
    return options


@dataclasses.dataclass(frozen=True, kw_only=True)
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

    rows: Annotated[
        Positional[Path], option("Folder or file of fedlayers diagnose.", "DIR")
    ]
    rule: Annotated[
        str,
        option("Rule: see fedlayers list rules, or package.module:function.", "NAME"),
    ] = "sensitivity_ratio"
    metric: Annotated[
        str | None,
        option("Metric that the rule uses. Default: federation_sensitivity.", "NAME"),
    ] = None
    variant: Annotated[
        str | None,
        option(
            "Variant of the metric. Default: the one from training, if any.", "NAME"
        ),
    ] = None
    threshold: Annotated[
        float | None,
        option(
            "Threshold of the rules sensitivity_ratio and change_point. Default: 1.2."
        ),
    ] = None
    layers: Annotated[
        str | None,
        option("Layers of the rule manual, separated by commas.", "LAYER,LAYER,..."),
    ] = None
    explain: Annotated[
        bool,
        option(
            "Also show each client's values, how certain the plan is, and its costs."
        ),
    ] = False
    out: Annotated[Path, option("File of the plan to write.", "FILE")] = Path(
        "plan.json"
    )

    def main(self, line: str) -> None:
        catalogue.check("rule", self.rule)

        from diagnostics.decide import select
        from fl_core.records.store import ROWS

        self._check_threshold()
        check_plan_file(self.out)
        plan = select.select(
            self.rows / ROWS if self.rows.is_dir() else self.rows,
            self.rule,
            metric=self.metric,
            variant=self.variant,
            threshold=select.THRESHOLD if self.threshold is None else self.threshold,
            layers=self.layers,
        )
        plan.save(self.out)
        print(select.explain(plan, full=self.explain))
        print(f"\nplan: {self.out}")

    def _check_threshold(self) -> None:
        """Refuse a threshold that the rule does not read.

        Raises:
            UsageError: names the rule, and those with a threshold.
        """
        from diagnostics.decide.rules.base import RULES

        rule = RULES[self.rule]
        if (
            self.threshold is not None
            and not rule.takes_threshold
            and rule.reads != "curves"
        ):
            known = sorted(
                name for name, each in RULES.members().items() if each.takes_threshold
            )
            raise UsageError(
                f"rule must be one with a threshold: {listing(known)}; got {self.rule!r}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot(Command):
    """Draw a diagnosis, the scores of a run, or a plan.

    Examples:
        fedlayers diagnose --dataset heart
        fedlayers plot diagnosis
        fedlayers plot diagnosis --metrics federation_sensitivity --where client=va
        fedlayers run --algorithm fedavg --out runs/fedavg
        fedlayers plot runs/fedavg --metrics macro_f1 --out scores
    """

    rows: Annotated[
        Positional[Path],
        option(
            "Folder of diagnose, rows.jsonl, a run directory, or a plan (.json).",
            "PATH",
        ),
    ]
    metrics: Annotated[
        tuple[str, ...],
        option("Metrics to draw. Default: all in the rows.", "NAME [NAME ...]"),
    ] = ()
    where: Annotated[
        tuple[str, ...],
        option(
            "Draw only rows with these values, such as seed=0 client=va.",
            "COLUMN=VALUE [...]",
        ),
    ] = ()
    out: Annotated[Path, option("Folder for the pictures (.png).", "DIR")] = Path(
        "pictures"
    )
    dpi: Annotated[int, option("Resolution in dots per inch, 20 to 1200.", "N")] = 200

    def main(self, line: str) -> None:
        check_folder(self.out)
        if not 20 <= self.dpi <= 1200:
            raise UsageError(f"--dpi must be from 20 to 1200; got {self.dpi}.")

        from diagnostics import plots
        from diagnostics.plots.collect import album, figure_of
        from fedlayers.studies.study_plots import save, to_files
        from fl_core.plan import LayerPlan

        to_files()
        if self.rows.suffix == ".json":
            if self.metrics or self.where:
                raise UsageError(
                    "--metrics and --where are for rows. A plan is one picture."
                )
            plan = LayerPlan.load(self.rows)
            data = plan.why.data
            pictures: dict[str, Callable[[], Figure]] = {
                "plan": lambda: figure_of(plots.plan(plan))
            }
        else:
            header, frame = self._rows()
            data = str(header.get("data", ""))
            pictures = album(self._chosen(frame), self.metrics)
        for name, draw in pictures.items():
            figure = draw()
            self.out.mkdir(parents=True, exist_ok=True)
            path = self.out / f"{name}.png"
            save(figure, path, self.dpi, command=line, data=data)
            print(path)

    def _rows(self) -> tuple[dict[str, Any], pd.DataFrame]:
        """Return header and rows of a file, a run directory or another folder, without following links in it."""
        from fl_core.records.store import ROWS, Run
        from fl_core.rows import read
        from fl_core.storage.files import Folder

        folder = Folder(self.rows)
        if folder.has("config.json"):
            return Run(self.rows).rows()
        if self.rows.is_dir():
            return read(folder.file(ROWS))
        return read(self.rows)

    def _chosen(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the rows that ``--where`` selects."""
        for item in sorted(self.where, key=lambda item: item.startswith("client")):
            name, equals, value = item.partition("=")
            if not equals:
                raise UsageError(f"--where must be COLUMN=VALUE; got {item!r}.")
            column = (
                frame[check_known("column of the rows", name, frame.columns)]
                .astype("string")
                .fillna("")
            )
            if name in ("client", "client_b"):
                self._check_single_clients(frame, item)
            frame = frame[
                column == check_known(name, value, filter(None, column.unique()))
            ]
        return frame

    def _check_single_clients(self, frame: pd.DataFrame, item: str) -> None:
        """Refuse to select a client from metrics of pairs. A pair has one row, so its other client would lose it."""
        from diagnostics.plots.collect import STATES

        paired = set(
            frame.loc[
                (frame["client_b"].fillna("") != "")
                & (frame["layer"].fillna("") != ""),
                "metric",
            ]
        )
        wanted = self.metrics or tuple(frame["metric"].unique())
        pairs = [name for name in wanted if name in paired and name not in STATES]
        if pairs:
            rest = " ".join(name for name in wanted if name not in pairs)
            advice = f"Pass --metrics {rest}." if rest else f"Leave {item} out."
            raise UsageError(
                f"--where {item} must be for metrics of single clients; got {listing(pairs)}. {advice}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Map(ConfiguredCommand):
    """Draw how each layer behaves over the rounds: the layer map.

    It measures the stored rounds of a run. With --dataset it trains first, and stores the run in OUT/run.

    Next: fedlayers choose --dataset NAME

    Examples:
        fedlayers map --dataset heart --rounds 5
        fedlayers map layer_map/run --out again
    """

    dir: Annotated[
        Positional[Path | None],
        option("Run directory. Leave it out with --dataset.", "[DIR]"),
    ] = None
    out: Annotated[Path, option("Folder for picture, rows and run.", "DIR")] = Path(
        "layer_map"
    )
    dataset: Annotated[
        str | None,
        FILES,
        option("Dataset: a name, package.module:function, or paths of your data."),
    ] = None
    width: Annotated[float, option("Width of the picture in cm, 4 to 100.", "CM")] = (
        16.0
    )
    draws: Annotated[
        int, option("Draws of the null: clients that do not differ; at least 2.", "N")
    ] = 4
    allow_code: ModelCode = ()
    config: Annotated[RunConfig, flags(without=("dataset",))]

    def asked_config(self) -> RunConfig:
        config = apply_options(self.config, (), self.model_option, self.loss_option)
        return config.with_keys(dataset=self.dataset or config.data.dataset)

    def main(self, line: str) -> None:
        if (self.dir is None) == (self.dataset is None):
            raise UsageError(
                "map must have a run directory before the flags, or --dataset. Name one of the two."
            )
        if self.dir is not None and (given := self.changed_flags()):
            raise UsageError(
                f"{given[0]} goes with --dataset. A run has its own configuration."
            )
        check_folder(self.out)

        from diagnostics.plots.layer_map import WIDTH
        from diagnostics.through_time import LEAST_DRAWS, through_time
        from fedlayers import runs
        from fedlayers.studies.study_plots import save, to_files

        # a run may be trained before these are used
        check_value("--width", self.width, WIDTH)
        check_value("--draws", self.draws, LEAST_DRAWS)
        to_files()
        path = self.dir or self.out / "run"
        if self.dir is None:
            runs.run(self.asked_config(), path, command=line)
        report = through_time(
            path, out=self.out, draws=self.draws, allow_code=self.allow_code
        )
        figure = report.layer_map(width=self.width)[0].get_figure(root=True)
        self.out.mkdir(parents=True, exist_ok=True)
        data = str(report.header["data"])
        save(figure, self.out / "layer_map.png", command=line, data=data)
        print(self.out / "layer_map.png")
