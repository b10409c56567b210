"""Measures metrics on models and data, and returns tidy rows."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import fl_core
from diagnostics.request import NETWORK, Request
from fl_core import rows, tree
from fl_core.data.federated import digest_of
from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer, layers_of
from fl_core.plan import LayerPlan
from fl_core.progress import progress_bar, say
from fl_core.rows import Row, row
from fl_core.run.costs import layer_bytes
from fl_core.tree import preserve_state

from .gradients import one_pass
from .inputs import client_models, fit_outputs
from .measurement import (
    SPENT,
    ClientModel,
    Clock,
    Data,
    Measurement,
    example,
    no_progress,
)
from .metrics.base import METRICS
from .null import NO_NULLS, on_null, rows_of_nulls
from .report import Report


def measure_models(models: Any, data: Any, request: Request) -> Report:
    """Measure the metrics of a request on clients' models, and return the report.

    If the request has nulls, the report also has the rows of their draws. The models
    are left as they were.

    Args:
        models, data: as for :func:`diagnostics.measure.diagnose`.
        request: the other arguments, checked. Its seed is 0 and its layers are blocks
            unless it says otherwise.

    Raises:
        UsageError: as for :func:`diagnostics.measure.diagnose`.
    """
    request = replace(request, seed=request.seed or 0, by=request.by or "block")
    subjects, n_models = client_models(models, data, request)
    models_before = {s.client: s.model for s in subjects}
    models_by_id = {id(s.model): s.model for s in subjects}
    with preserve_state(*models_by_id.values()):
        subjects, criterion = fit_outputs(subjects, request)
        layers = request.layering or _common_layers(subjects, request)
        if request.layers == (NETWORK,):
            layers = request.layers_to_report(layers)
        if not request.across_models:
            LayerPlan(tuple(layers), ()).check_fits(subjects[0].model)
        request.check(layers)  # of all metrics, before the first one takes its time
        settings = {name: getattr(request, name) for name in ("batch", "seed", "mode")}
        if request.budget is not None:
            settings["clock"] = Clock(until=time.monotonic() + request.budget)
        measurement = Measurement(subjects, layers, criterion, **settings)
        measured_rows = _measure_all(request, measurement, n_models)
    columns = {"seed": request.seed, **(request.context or {})}
    header = {
        "schema": rows.SCHEMA,
        "version": fl_core.__version__,
        "command": "diagnose",
        "seed": request.seed,
        "model": type(subjects[0].model).__name__,
        "layers": [asdict(layer) for layer in layers],
        "bytes": layer_bytes(layers, subjects[0].model),
        "data": _digest({s.client: _data_digest(s.data) for s in subjects}),
        "checkpoint": _digest(
            {s.client: tree.digest(tree.named_tensors(s.model)) for s in subjects}
        ),
        "metrics": {
            name: {key: _plain(value) for key, value in options.items()}
            for name, options in request.options.items()
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
    if difference := _different(subjects):
        header["different"] = difference
    table = rows.frame({**r, **columns} for r in measured_rows)
    report = Report(table, json.loads(rows.dumps(header)))
    nulls = request.null
    if not nulls.names:
        return report
    start_models = subjects[0].model if n_models == 1 else models_before
    own_data = {s.client: s.data for s in subjects}
    null_request = replace(
        request,
        layering=layers,
        n_train={s.client: s.n_train for s in subjects},
        resamples=0,
        samples=None,
        null=NO_NULLS,
    )

    def on_draw(name: str, draw: int) -> pd.DataFrame:
        null_models, null_data, options = on_null(
            start_models,
            own_data,
            request.options,
            name,
            draw,
            seed=measurement.seed,
            nulls=nulls,
        )
        return measure_models(
            null_models, null_data, replace(null_request, options=options)
        ).frame

    trained_again = nulls.retrain is None
    return report.with_rows(rows_of_nulls(nulls, on_draw, trained_again))


def _common_layers(
    subjects: Sequence[ClientModel], request: Request
) -> tuple[Layer, ...]:
    """Return the layers of the first model that all models have, by name and output.

    Raises:
        UsageError: the models have no layer in common.
    """
    model = subjects[0].model
    names = tree.named_tensors(model).keys()
    first_layers, *other_models_layers = (
        layers_of(
            s.model, example(s.model, s.data, request.seed or 0)[0], by=request.by
        )
        for k, s in enumerate(subjects)
        if k == 0 or tree.named_tensors(s.model).keys() != names
    )
    for other_layers in other_models_layers:
        outputs = {layer.name: layer.output for layer in other_layers}
        first_layers = tuple(e for e in first_layers if outputs.get(e.name) == e.output)
    if not first_layers:
        raise UsageError(
            "models must have a layer of the same name to be compared; got none. "
            "Pass features instead: diagnose_features({client: {layer: array}}, y)."
        )
    return first_layers


def _measure_all(request: Request, shared: Measurement, n_models: int) -> list[Row]:
    """Return the rows of all metrics, in the order of the request.

    If the task or the spent budget rules a metric out, its rows have no value. Their
    status has the reason.

    Args:
        request: the metrics with their options, and the layers to report.
        shared: the settings that all metrics share.
        n_models: the number of models that were given. Metrics of pairs compare these
            alone: one model has no pairs, however many clients' data it is measured on.
    """
    subjects, layers = shared.subjects, shared.layers
    names = [layer.name for layer in layers]
    reported_layers = {layer.name for layer in request.layers_to_report(layers)}
    reasons = {m.name: m.why_not(shared.loss.task) for m in request.metrics}
    readers = {
        m.name: request.settings[m.name]
        for m in request.metrics
        if m.uses_gradient_pass
        and not reasons[m.name]
        and not (m.pairs and len(subjects) < 2)
    }
    single_metrics = [
        m for m in request.metrics if m.name not in readers and not reasons[m.name]
    ]
    measured_rows: list[Row] = []
    steps = (bool(readers) + len(single_metrics)) * len(subjects)
    with progress_bar(
        steps, "diagnose", "step", shown=request.progress, leave=False
    ) as bar:

        def timed(label: str) -> dict[str, Any]:
            waiting_clients = [s.client for s in subjects]

            def done(client: str) -> None:
                bar.set_postfix_str(f"{label} {client}".rstrip(), refresh=False)
                if client in waiting_clients:
                    waiting_clients.remove(client)
                    bar.update()

            tell = say if request.progress else no_progress
            return {"tick": done, "clock": Clock(label, shared.clock.until, tell)}

        if readers:
            pass_measurement = replace(
                shared, **timed(" + ".join(readers)), resamples=request.resamples
            )
            measured_rows += one_pass(pass_measurement, list(readers.values()))
        for metric in single_metrics:
            if shared.clock.over:
                reasons[metric.name] = SPENT
                continue
            # a single model has no pair, however many clients it is measured on
            metric_subjects = subjects
            if metric.pairs:
                metric_subjects = subjects[:n_models]
            measurement = replace(
                shared,
                subjects=metric_subjects,
                layers=request.read_by(metric, layers),
                **timed(metric.name),
            )
            rows = metric.measure(measurement, request.settings[metric.name])
            for subject in subjects:
                measurement.tick(subject.client)
            for name in dict.fromkeys(r.get("layer", "") for r in rows):
                of_network = metric.shared and not name
                if not of_network:
                    check_known(
                        f"layer in the rows of metric {metric.name!r}", name, names
                    )
            measured_rows += rows
    for name, reason in reasons.items():
        if reason:
            of_metric = {"status": reason, "variant": METRICS[name].variant}
            for subject in subjects:
                client = subject.client
                measured_rows += [
                    row(name, None, client=client, layer=layer.name, **of_metric)
                    for layer in layers
                ]
    place = {metric.name: k for k, metric in enumerate(request.metrics)}
    return sorted(
        (r for r in measured_rows if r["layer"] in reported_layers or not r["layer"]),
        key=lambda r: place[r["metric"]],
    )


# --- the header ------------------------------------------------------------------------------------------------


def _different(subjects: Sequence[ClientModel]) -> str:
    """Return how the tensors of the clients' models differ in names or shapes; empty if they do not."""
    first_subject, *other_subjects = subjects
    for other_subject in other_subjects:
        descriptions = (
            f"the model of client {first_subject.client!r}",
            f"that of {other_subject.client!r}",
        )
        try:
            tree.check_same(
                tree.named_tensors(first_subject.model),
                tree.named_tensors(other_subject.model),
                *descriptions,
            )
        except UsageError as error:
            return str(error)
    return ""


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
    digests = {name: digest for name, digest in clients.items() if digest is not None}
    if len(digests) == len(clients):
        return digest_of(digests)
    return ""


def _plain(value: Any) -> Any:
    """Return an option as a value that JSON can hold.

    A torch type becomes its name, and a pair of tensors its digest. Any other value
    that JSON cannot hold becomes the name of its class.
    """
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        if isinstance(value, torch.dtype):
            return str(value)
        return _data_digest(value) or type(value).__name__
    return value
