"""Measures metrics on models and data, and returns tidy rows."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any, get_type_hints

import pandas as pd
import torch
from torch import Tensor

import fl_core
from diagnostics.metrics.base import METRIC_ALIASES
from fl_core import rows, tree
from fl_core.data.federated import digest_of
from fl_core.errors import (
    OneOf,
    UsageError,
    as_list,
    at_least,
    check_fields,
    check_known,
    check_type,
)
from fl_core.layers import Layer, layers_of
from fl_core.models.adapter import IGNORED
from fl_core.plan import LayerPlan
from fl_core.progress import progress_bar
from fl_core.rows import Row, row
from fl_core.run.costs import layer_bytes
from fl_core.tree import preserve_state

from .gradients import one_pass
from .inputs import client_models, fit_outputs
from .measurement import (
    ClientModel,
    Data,
    Measurement,
    Tick,
    example,
)
from .metrics.base import METRICS, Metric
from .null import (
    Nulls,
    on_null,
    rows_of_nulls,
)
from .report import Report

CONTEXT = ("run", "algorithm", "seed", "round", "model", "split")
"""Columns that only the caller knows."""


@dataclass(frozen=True)
class Request:
    """What to measure, and how: the arguments of :func:`~diagnostics.measure.diagnose`, and its rarely used settings.

    Attributes:
        metrics: each once, in the order given.
        loss, layers, batch, seed, samples, budget, progress: as in :func:`~diagnostics.measure.diagnose`.
        options: the options given for each metric, by name.
        probe: the samples on which clients' representations are compared, unless a metric's options name its own.
            Default: the first 512 samples of the clients' data, equally many of each.
        by: how tensors are grouped into layers, see :func:`fl_core.layers.layers_of`. Default: block.
        layering: the models' layers, if they cannot be found from the models. An algorithm that builds adapters or a
            second head into a model keeps the plain model's layers. Default: found by ``by``.
        mode: ``"eval"`` or ``"train"``.
        n_train: training samples of each client, {client: number}: its weight in combined rows. Default: the samples of
            its data.
        resamples: number of resamples of each client's batches to add. They show how certain a decision is
            (:mod:`diagnostics.null`). They exist for federation_sensitivity, and need no further pass.
        context: columns for all rows: run, algorithm, seed, round, model, split.
        class_axis: the axis of the classes in outputs of several positions, where two fit the labels.
        ignore_index: the label of positions that do not count.
    """

    metrics: tuple[Metric, ...]
    options: dict[str, dict[str, Any]]
    loss: Any = None
    layers: tuple[str, ...] | None = None
    batch: Annotated[int, at_least(1)] = 256
    seed: int | None = None
    samples: Annotated[int | None, at_least(1)] = None
    budget: Annotated[float | None, at_least(0)] = None
    progress: bool = True
    probe: Data | None = None
    by: str = ""
    layering: Sequence[Layer] | None = None
    mode: Annotated[str, OneOf("mode", ("eval", "train"))] = "eval"
    n_train: dict[str, int] | None = None
    resamples: Annotated[int, at_least(0)] = 0
    context: Mapping[str, Any] | None = None
    class_axis: int | None = None
    ignore_index: int = IGNORED

    @classmethod
    def of(cls, metrics: str | Sequence[str], given: Mapping[str, Any]) -> Request:
        """Make a request from arguments. Their ``options`` may hold settings beside the options of metrics.

        Raises:
            UsageError: a metric, an argument or an option is unknown or out of range, or both a probe and its number of
                samples are given.
        """
        chosen = chosen_metrics(metrics)
        own: dict[str, dict[str, Any]] = {metric.name: {} for metric in chosen}
        known = dict(given)
        options = known.pop("options", None) or {}
        check_type("options", options, dict)
        for name, value in options.items():
            if check_known("metric with options", name, [*own, *RARE]) in own:
                check_type(f"options of {name}", value, dict)
                own[name] |= value
            else:
                known[name] = value
        if known.get("layers") is not None:
            known["layers"] = as_list("layers", known["layers"])
        for name, value in known.items():
            check_known("argument of diagnose", name, ARGUMENTS)
            check_type(name, value, _HINTS[name], numpy=True)
        for name in known.get("context") or {}:
            check_known("column of the context", name, CONTEXT)
        for metric in chosen:
            mine, probe = own[metric.name], known.get("probe")
            if "probe" in metric.options and mine.get("probe") is None and probe is not None:  # fmt: skip
                mine["probe"] = probe
            if mine.get("probe") is not None and "samples" in mine:
                raise UsageError(
                    f"{metric.name} must have a probe or samples, not both; got a probe and "
                    f"samples={mine['samples']!r}."
                )
        made = cls(chosen, own, **known)
        check_fields(made)
        for metric in chosen:
            metric.settings(**own[metric.name])
        return made

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The options of each metric as an object of its own type, checked."""
        return {m.name: m.settings(**self.options[m.name]) for m in self.metrics}

    def layers_to_report(self, every: Sequence[Layer]) -> list[Layer]:
        """Return the layers to report, out of all."""
        names = [layer.name for layer in every]
        for name in self.layers or ():
            check_known("layer", name, names)
        return [e for e in every if self.layers is None or e.name in self.layers]

    def read_by(self, metric: Metric, every: Sequence[Layer]) -> Sequence[Layer]:
        """Return the layers that a metric reads.

        It reads all layers if its values are relative to the first layer or to the whole.
        """
        whole = metric.uses_gradient_pass or metric.needs_all_layers
        return every if whole else self.layers_to_report(every)

    @property
    def across_models(self) -> bool:
        """True if all metrics compare features alone, so that models may differ."""
        return all(m.pairs and m.features == "probe" for m in self.metrics)

    @property
    def differentiates(self) -> bool:
        """True if a metric reads losses, and so gradients."""
        return any(metric.requires == "losses" for metric in self.metrics)

    def check(self, every: Sequence[Layer]) -> None:
        """Refuse unknown layers, and options that do not fit the layers, batch or mode.

        Raises:
            UsageError: the message names the layer or the option, and the allowed values.
        """
        for metric in self.metrics:
            layers = self.read_by(metric, every)
            measurement = Measurement((), layers, batch=self.batch, mode=self.mode)
            metric.check(measurement, self.settings[metric.name])


ARGUMENTS = [each.name for each in fields(Request)][2:]
RARE = ARGUMENTS[ARGUMENTS.index("probe") :]
"""The settings that :func:`~diagnostics.measure.diagnose` takes among its options."""
_HINTS = get_type_hints(Request)


def measure_models(
    models: Any, data: Any, request: Request, null: Nulls | str | Sequence[str] = ()
) -> Report:
    """Measure clients' models, with models, data and nulls as of :func:`diagnostics.measure.diagnose`."""
    nulls = Nulls.of(null)
    request = replace(request, seed=request.seed or 0, by=request.by or "block")
    subjects, n_models = client_models(models, data, request)
    before = {s.client: s.model for s in subjects}
    unique = {id(s.model): s.model for s in subjects}
    with preserve_state(*unique.values()):
        subjects, criterion = fit_outputs(subjects, request)
        every = request.layering or _common_layers(subjects, request)
        if not request.across_models:
            LayerPlan(tuple(every), ()).check_fits(subjects[0].model)
        request.check(every)  # of all metrics, before the first one takes its time
        how = {name: getattr(request, name) for name in ("batch", "seed", "mode")}
        shared = Measurement(subjects, every, criterion, **how)
        measured = _measure_all(request, shared, n_models)
    columns = {"seed": request.seed, **(request.context or {})}
    header = {
        "schema": rows.SCHEMA,
        "version": fl_core.__version__,
        "command": "diagnose",
        "seed": request.seed,
        "model": type(subjects[0].model).__name__,
        "layers": [asdict(layer) for layer in every],
        "bytes": layer_bytes(every, subjects[0].model),
        "data": _digest({s.client: _data_digest(s.data) for s in subjects}),
        "checkpoint": _digest(
            {s.client: tree.digest(tree.named_tensors(s.model)) for s in subjects}
        ),
        "metrics": {
            name: {key: _plain(value) for key, value in given.items()}
            for name, given in request.options.items()
        },
        "loss": criterion.name,
        "mode": request.mode,
        "by": request.by,
        "measure_batch": request.batch,
        "pairs": {
            m.name: "distance" if m.distance else "similarity"
            for m in request.metrics
            if m.pairs
        },
    }
    table = rows.frame({**r, **columns} for r in measured)
    report = Report(table, json.loads(rows.dumps(header)))
    if not nulls.names:
        return report
    whose = subjects[0].model if n_models == 1 else before
    own_data = {s.client: s.data for s in subjects}
    again = replace(
        request,
        layering=every,
        n_train={s.client: s.n_train for s in subjects},
        resamples=0,
        samples=None,
    )

    def on_draw(name: str, draw: int) -> pd.DataFrame:
        own, on, options = on_null(
            whose, own_data, request.options, name, draw, seed=shared.seed, nulls=nulls
        )
        return measure_models(own, on, replace(again, options=options)).frame

    kept = nulls.retrain is None
    return report.with_rows(rows_of_nulls(nulls, on_draw, kept))


def _common_layers(
    subjects: Sequence[ClientModel], request: Request
) -> tuple[Layer, ...]:
    """Return the layers of the first model that all models have, by name and output."""
    model = subjects[0].model
    known = tree.named_tensors(model).keys()
    first, *others = (
        layers_of(
            s.model, example(s.model, s.data, request.seed or 0)[0], by=request.by
        )
        for k, s in enumerate(subjects)
        if k == 0 or tree.named_tensors(s.model).keys() != known
    )
    for other in others:
        outputs = {layer.name: layer.output for layer in other}
        first = tuple(e for e in first if outputs.get(e.name) == e.output)
    if not first:
        raise UsageError(
            "models must have a layer of the same name to be compared; got none. "
            "Pass features instead: diagnose_features({client: {layer: array}}, y)."
        )
    return first


def _measure_all(request: Request, shared: Measurement, n_models: int) -> list[Row]:
    """Return the rows of all metrics, in the order of the request."""
    subjects, every, start = shared.subjects, shared.layers, time.monotonic()
    names = [layer.name for layer in every]
    wanted = {layer.name for layer in request.layers_to_report(every)}
    reasons = {m.name: m.why_not(shared.loss.task) for m in request.metrics}
    readers = {
        m.name: request.settings[m.name]
        for m in request.metrics
        if m.uses_gradient_pass and not reasons[m.name]
    }
    alone = [
        m for m in request.metrics if m.name not in readers and not reasons[m.name]
    ]
    measured: list[Row] = []
    steps = (bool(readers) + len(alone)) * len(subjects)
    with progress_bar(
        steps, "diagnose", "step", shown=request.progress, leave=False
    ) as bar:

        def tick(label: str) -> Tick:
            def done(client: str) -> None:
                bar.set_postfix_str(f"{label} {client}".rstrip(), refresh=False)
                bar.update()

            return done

        if readers:
            together = replace(
                shared, tick=tick(" + ".join(readers)), resamples=request.resamples
            )
            measured += one_pass(together, list(readers.values()))
        for metric in alone:
            if request.budget is not None and time.monotonic() - start > request.budget:
                spent = f"left out: the budget of {request.budget:g} s was spent"
                reasons[metric.name] = spent
                continue
            # a single model has no pair, however many clients it is measured on
            whom = subjects[:n_models] if metric.pairs else subjects
            measurement = replace(
                shared,
                subjects=whom,
                layers=request.read_by(metric, every),
                tick=tick(metric.name),
            )
            found = metric.measure(measurement, request.settings[metric.name])
            for name in dict.fromkeys(r.get("layer", "") for r in found):
                of_network = metric.shared and not name
                if not of_network:
                    check_known(
                        f"layer in the rows of metric {metric.name!r}", name, names
                    )
            measured += found
    measured += [
        row(name, None, status=reason, client=s.client, layer=layer.name, variant=METRICS[name].variant)
        for name, reason in reasons.items()
        for s in subjects
        for layer in every
        if reason
    ]  # fmt: skip
    place = {metric.name: k for k, metric in enumerate(request.metrics)}
    return sorted(
        (r for r in measured if r["layer"] in wanted or not r["layer"]),
        key=lambda r: place[r["metric"]],
    )


def chosen_metrics(names: str | Sequence[str]) -> tuple[Metric, ...]:
    """Return the metrics by name or by ``package.module:function``, each once in the order given.

    Raises:
        UsageError: a metric is unknown (the message gives the nearest name), or two have one name.
    """
    metrics: dict[str, Metric] = {}
    for name in dict.fromkeys(as_list("metrics", names)):
        if name == "tsne":
            raise UsageError(
                "metrics must be numbers of layers; got the picture 'tsne'. Call fl.tsne(models, data)."
            )
        metric = METRICS[METRIC_ALIASES.get(name, name)]
        if metrics.setdefault(metric.name, metric) is not metric:
            raise UsageError(
                f"metrics must have different names; got {metric.name!r} twice, once as {name!r}. Rename one of them."
            )
    return tuple(metrics.values())


# --- the header ------------------------------------------------------------------------------------------------


def _data_digest(data: Data) -> str | None:
    """Return the SHA-256 of a pair of tensors; None for a loader, whose samples may come in any order."""
    if hasattr(data, "x") and hasattr(data, "y"):
        data = (data.x, data.y)
    if not (
        isinstance(data, (tuple, list))
        and all(isinstance(part, Tensor) for part in data)
    ):
        return None
    return tree.digest(dict(zip("xy", data, strict=True)))


def _digest(clients: Mapping[str, str | None]) -> str:
    """Return one digest over all clients' digests.

    It is empty if one is unknown, as for a loader.
    """
    known = {name: digest for name, digest in clients.items() if digest is not None}
    return digest_of(known) if len(known) == len(clients) else ""


def _plain(value: Any) -> Any:
    """Return an option as JSON.

    Data are replaced by their digest, and other values that JSON cannot hold by their type.
    """
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return (
            str(value)
            if isinstance(value, torch.dtype)
            else _data_digest(value) or type(value).__name__
        )
    return value
