"""From a run, or from a dataset and a model, to a diagnosis: the functions behind the command line."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from fl_core import rows, runner, tree
from fl_core.data import FederatedData
from fl_core.decision import Instruments
from fl_core.errors import UsageError, check_known, listing
from fl_core.layers import Layer, layers_of
from fl_core.models import example
from fl_core.runner import Task

from .decide import select
from .diagnosis import DiagnosisRequest, chosen_metrics, diagnose
from .gradients.importance import SensitivityAccumulator
from .gradients.sensitivity import recorded_rows
from .metrics.base import DEFAULT, known
from .null import NULLS, check_nulls, null_data, rows_of_nulls
from .report import Report
from .representation.probe import PROBE, probe_set
from .resampling import check_resamples, parted

DEFAULT_METRICS = DEFAULT
SENSITIVITY = "federation_sensitivity"
MEASURE_BATCH = 256
"""Samples at a time while measuring, unless said otherwise."""


def instruments() -> Instruments:
    """The diagnostics that a run needs to decide in its first round, as :func:`fl_core.runner.run` takes them."""
    rules = tuple(name for name, rule in select.RULES.members().items() if rule.decides)
    return Instruments(observers={SENSITIVITY: SensitivityAccumulator}, decide=select.decide, rules=rules)


def of_run(
    path: Path | str,
    metrics: Sequence[str] = DEFAULT_METRICS,
    *,
    round: int | str = "last",
    which: str = "local",
    measure_batch: int = MEASURE_BATCH,
    data: FederatedData | None = None,
    model: nn.Module | None = None,
    model_code: str | Collection[str] | None = None,
    command: str = "",
    null: str | Sequence[str] = (),
    null_draws: int = 1,
    **options: Any,
) -> Report:
    """Diagnose the models of a run's checkpoint, each on its own client's training data.

    Clients are compared, and probes judged, on validation samples, which the rows' column ``split`` says: ``probe``
    where you give the samples yourself.

    Args:
        path: a run directory.
        metrics: registry names, or ``package.module:function``.
        round: a round with a checkpoint, or ``"last"``.
        which: ``local`` (after local training, before aggregation), ``personal`` or ``global``. Clients that have no
            such model, because they were not sampled in that round, are named in the header under ``absent``.
        measure_batch: samples at a time while measuring, whatever the run trained with.
        null: names of :data:`diagnostics.null.NULLS`: the same models are measured again on each, for the report's
            ``nulls``; nothing is trained, so that they still know the real data, which the rows say. ``fresh`` measures
            the weights that the run started from.
        data, model, model_code: your own, where the run was given them; see :func:`fl_core.runner.resume`.
        options: further arguments of :func:`diagnostics.diagnose`.

    Raises:
        UsageError, CorruptError: as :func:`fl_core.runner.load_models` and :func:`diagnostics.diagnose`.
    """
    check_known("model of a run", which, runner.MODELS)
    measure_batch = options.pop("batch", measure_batch)  # as it was called before
    nulls = check_nulls(null, null_draws)
    models, task = runner.load_models(path, round, which, data=data, model=model, model_code=model_code)
    checkpoint = runner.store.Run(path).rounds[-1] if round == "last" else int(round)
    context = {
        "run": Path(path).name,
        "algorithm": task.config.algorithm,
        "seed": task.config.seed,
        "round": checkpoint,
        "model": which,
    }
    report = _diagnosed(task, models, metrics, context, command or f"diagnose {path}", measure_batch, dict(options))
    if not nulls:
        return report

    def measured(null: str, draw: int) -> pd.DataFrame:
        of_null = replace(task, data=null_data(task.data, null, task.config.seed, draw))
        whose = models if NULLS[null].shuffle is not None else dict.fromkeys(models, task.model)
        return _diagnosed(of_null, whose, metrics, context, "", measure_batch, {**options, "resamples": 0}).frame

    return replace(report, nulls=rows_of_nulls(nulls, null_draws, measured, kept=True))


def of_task(
    task: Task,
    metrics: Sequence[str] = DEFAULT_METRICS,
    *,
    measure_batch: int = MEASURE_BATCH,
    command: str = "",
    null: str | Sequence[str] = (),
    null_draws: int = 1,
    clients: Sequence[str] | None = None,
    **options: Any,
) -> Report:
    """Diagnose after every client's first round of local training from the common start, where PLayer-FL measures.

    That is one epoch, unless the configuration has more. The rows also hold what the training itself measured in its
    first epoch (federation sensitivity, variant ``training``), which is what PLayer-FL decides on. It was measured in
    the task's own layers: where ``by`` or ``layering`` asks for others, there is no such variant.

    Args:
        measure_batch: samples at a time while measuring; the task's own ``batch`` is what it trains with.
        null: names of :data:`diagnostics.null.NULLS`: the same is measured again on each, for the report's ``nulls``.
            Each costs as much again, for each of its ``null_draws`` draws; ``fresh`` has one and costs no training.
        clients: the only ones that train and are measured, if not all are; their values are those among all.
        options: further arguments of :func:`diagnostics.diagnose`.

    Raises:
        UsageError: as :func:`diagnostics.diagnose`.
    """
    measure_batch = options.pop("batch", measure_batch)  # as it was called before
    nulls = check_nulls(null, null_draws)
    _check(task, metrics, measure_batch, options)
    report = _of_first_training(task, metrics, command or "diagnose", measure_batch, dict(options), clients)
    if not nulls:
        return report

    def measured(null: str, draw: int) -> pd.DataFrame:
        of_null = replace(task, data=null_data(task.data, null, task.config.seed, draw))
        how = _of_first_training if NULLS[null].shuffle is not None else of_start
        return how(of_null, metrics, "", measure_batch, {**options, "resamples": 0}, clients).frame

    return replace(report, nulls=rows_of_nulls(nulls, null_draws, measured))


def of_start(
    task: Task,
    metrics: Sequence[str] = DEFAULT_METRICS,
    command: str = "",
    measure_batch: int = MEASURE_BATCH,
    options: Mapping[str, Any] | None = None,
    clients: Sequence[str] | None = None,
) -> Report:
    """Measure the common start at every client, before any training.

    Args:
        options, clients: as of :func:`of_task`.

    Raises:
        UsageError: as :func:`diagnostics.diagnose`.
    """
    models = {client.name: task.model for client in task.data.clients if clients is None or client.name in clients}
    context = {"seed": task.config.seed, "round": 0, "model": "global"}
    return _diagnosed(task, models, metrics, context, command, measure_batch, dict(options or {}))


def _of_first_training(
    task: Task,
    metrics: Sequence[str],
    command: str,
    measure_batch: int,
    options: dict[str, Any],
    clients: Sequence[str] | None,
) -> Report:
    """Train every client's first round from the common start, and measure what comes of it."""
    chosen = {} if clients is None else {"clients": clients}
    models, measured = runner.first_epoch(task, instruments().observers, **chosen)
    context = {"seed": task.config.seed, "round": 0, "model": "local"}
    report = _diagnosed(task, models, metrics, context, command, measure_batch, options)
    report = replace(report, header={**report.header, "checkpoint": task.header("")["checkpoint"]})  # the common start
    if SENSITIVITY not in report.header["metrics"] or report.layers != tuple(task.layers):
        return report
    weights = {client.name: len(client.train) for client in task.data.clients}
    sizes = {name: t.numel() for name, t in tree.live(task.model).items()}
    resamples, seed = options.get("resamples", 0), task.config.seed
    seen = recorded_rows(measured, task.layers, n_train=weights, sizes=sizes, resamples=resamples, seed=seed)
    wanted = set(report.frame["layer"])
    seen = [row for row in seen if row["variant"].startswith("training") and row["layer"] in wanted]
    trained = rows.frame({**row, **context, "split": "train"} for row in seen)
    frames = zip((report.frame, report.resamples), parted(trained), strict=True)
    own, again = (pd.concat(each, ignore_index=True) if len(each[1]) else each[0] for each in frames)
    return replace(report, frame=own, resamples=again)


def _check(task: Task, metrics: str | Sequence[str], batch: int, options: Mapping[str, Any]) -> None:
    """Refuse before any training what a diagnosis would refuse after it."""
    layers = _layering(task, options) or layers_of(task.model, example(task.data.shape), by=options["by"])
    settings, _ = _settings(task, metrics, [c.name for c in task.data.clients if len(c.train)], options)
    how = {name: options[name] for name in ("probe", "layers", "mode") if name in options}
    request = DiagnosisRequest.of(metrics, settings, batch=batch, **how)
    request.check_task(task.criterion.task)
    request.check(layers)
    check_resamples(options.get("resamples", 0))


def _layering(task: Task, options: Mapping[str, Any]) -> Sequence[Layer] | None:
    """The given layers or else the task's; None if ``by`` asks for a grouping to be traced anew."""
    task_layers = task.layers if options.get("by", task.config.by) == task.config.by else None
    return options.get("layering") or task_layers


def shown_variants(report: Report, metric: str) -> list[str]:
    """The variants of a metric to show first: the default, and the ones that decisions read.

    Where options made others than the default, the first of them.
    """
    there = list(report.frame.loc[report.frame["metric"] == metric, "variant"].unique())
    kind = known(metric)
    first = kind.variant if kind.variant in there else next(iter(there), "")
    return [name for name in dict.fromkeys((first, kind.decides or first)) if name in there]


def _diagnosed(
    task: Task,
    models: Mapping[str, Any],
    metrics: Sequence[str],
    context: Mapping[str, Any],
    command: str,
    batch: int,
    options: Any,
) -> Report:
    absent = [client.name for client in task.data.clients if client.name not in models]
    if not models:
        raise UsageError(f"no models to diagnose; clients without one: {listing(absent)}")
    data = {c.name: (c.train.x, c.train.y) for c in task.data.clients if c.name in models}
    options["layering"] = _layering(task, options)
    options.setdefault("by", task.config.by)
    options["options"], splits = _settings(task, metrics, models, options)
    report = diagnose(
        models,
        data,
        metrics,
        loss=options.pop("loss", task.criterion),
        batch=batch,
        seed=task.config.seed,
        context=context,
        **options,
    )
    kept = {name: report.header[name] for name in ("layers", "checkpoint")}  # what was measured, not what was trained
    header = {**report.header, **task.header(command), **kept, "absent": absent}
    frame, redrawn = (table.assign(split=table["metric"].map(splits)) for table in (report.frame, report.resamples))
    return Report(frame, header, redrawn)


def _settings(
    task: Task, metrics: str | Sequence[str], clients: Collection[str], options: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Each metric's options with the task's facts filled in, and the split of samples that it is measured on."""
    settings = {name: dict(given) for name, given in (options.get("options") or {}).items()}
    splits = {}
    held = {c.name: (c.validation.x, c.validation.y) for c in task.data.clients if c.name in clients}
    for metric in chosen_metrics(metrics):
        name, given = metric.name, settings.setdefault(metric.name, {})
        splits[name] = "train"
        if "start" in metric.options:
            given.setdefault("start", task.model)
        if "probe" in metric.options:
            splits[name] = "probe"
            if given.get("probe") is None and options.get("probe") is None:
                given["probe"], splits[name] = probe_set(task.data, given.pop("samples", PROBE)), "validation"
        if "test" in metric.options:  # a probe is judged on what its client did not train on
            if given.get("test") is not None:
                splits[name] = "probe"
            elif not given.keys() & {"holdout", "folds"} and all(len(y) for _, y in held.values()):
                given["test"], splits[name] = held, "validation"
    return settings, splits
