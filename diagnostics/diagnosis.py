"""Measures metrics on models and data in one call, and returns tidy rows: :func:`diagnose`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

import fl_core
from fl_core import rows, tree
from fl_core.costs.layers import layer_bytes
from fl_core.data.federated import digest_of
from fl_core.errors import UsageError, check_known, listing
from fl_core.layers import Layer, layers_of
from fl_core.model_contexts import preserve_state
from fl_core.plan import LayerPlan
from fl_core.progress import progress_bar
from fl_core.rows import Row
from fl_core.scores import CLASSIFICATION, SURVIVAL
from fl_core.seeds import seed_of, torch_seeded
from fl_core.training import losses
from fl_core.training.losses import Loss

from .activation_cache import ActivationCache
from .gradients import passes
from .inputs import check_inputs, client_models
from .measurement import Data, Measurement, Tick, batches, to_device
from .metrics.base import DEFAULT, METRICS, Metric
from .null import (
    Retrain,
    check_nulls,
    check_resamples,
    on_null,
    rows_of_nulls,
    split_resamples,
)
from .report import Report

CONTEXT = ("run", "algorithm", "seed", "round", "model", "split")
"""Columns that only the caller knows."""


def diagnose(
    models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    data: Any,
    metrics: str | Sequence[str] = DEFAULT,
    *,
    loss: Loss | str | None = None,
    layers: str | Sequence[str] | None = None,
    probe: Data | None = None,
    by: str = "block",
    layering: Sequence[Layer] | None = None,
    batch: int = 256,
    seed: int = 0,
    mode: str = "eval",
    n_train: int | Sequence[int] | Mapping[str, int] | None = None,
    resamples: int = 0,
    progress: bool = True,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    context: Mapping[str, Any] | None = None,
    null: str | Sequence[str] = (),
    null_draws: int = 1,
    retrain: Retrain | None = None,
    start: nn.Module | None = None,
) -> Report:
    """Measure ``metrics`` on clients' models.

    The models and torch's random state are left as they were.

    >>> import torch
    >>> models = {silo: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for silo in ("north", "south")}
    >>> data = {silo: (torch.randn(40, 4), torch.arange(40) % 3) for silo in models}
    >>> report = diagnose(models, data, ["grad_norm", "cka"], progress=False)
    >>> report
    Report(grad_norm, cka; 2 layers, 2 clients, 0 rows without a value)
    >>> report.values("grad_norm").shape  # layers x clients
    (2, 2)
    >>> diagnose(models, data, "grad_norm", null="labels", progress=False).nulls["model"].unique().tolist()
    ['null labels 1, models kept']

    Args:
        models: one model, a list, or {client: model}. All must have the same tensors. Clients without names are called
            client_0, client_1 and so on.
        data: a pair (x, y), an object with such ``x`` and ``y``, or a re-iterable loader; or one of these for each
            client, as a list or {client: data}. One model may be measured on many clients' data, and many on one.
        metrics: names in :data:`METRICS`, or ``package.module:function``. All metrics of gradients share one pass over
            the data.
        loss: default cross-entropy.
        layers: exact names of the layers to report. Default: all layers of the model.
        probe: the samples on which clients' representations are compared, unless a metric's options name its own.
            Default: the first 512 samples of the clients' data, equally many of each.
        by: how tensors are grouped into layers, see :func:`fl_core.layers.layers_of`.
        layering: the models' layers, if they cannot be found from the models. An algorithm that builds adapters or a
            second head into a model keeps the plain model's layers. Default: found by ``by``.
        batch: samples at a time. A loader keeps its own batches.
        seed: seed of all random draws.
        mode: ``"eval"`` or ``"train"``.
        n_train: training samples of each client, its weight in combined rows. Default: the samples of its data.
        resamples: number of resamples of each client's batches to add. They show how certain a decision is
            (:mod:`diagnostics.null`). They exist for grad_variance, grad_norm and federation_sensitivity. They
            need no further pass. The first two metrics need memory for 10 gradients in float64 while a client is read.
        progress: show a bar.
        options: options of single metrics, {metric: {option: value}}.
        context: columns for all rows: run, algorithm, seed, round, model, split.
        null: names of :data:`diagnostics.null.NULLS`. The same is measured again on each null, for the report's
            ``nulls``. :func:`~diagnostics.decide.select.select` compares them. Data of a metric's option ``test`` are
            shuffled too. A probe is not.
        null_draws: random draws of each null that shuffles.
        retrain: a function that trains on a null's data: {client: data} -> models, in the form of ``models``. Without
            it the same models are measured on the shuffled data. They have seen the real data, and rows and decisions
            record that.
        start: the untrained model for the null ``fresh``. Default: a copy whose modules draw their weights again.

    Raises:
        UsageError: a name or option is unknown, an option is out of range, models and data differ in numbers or names,
            models differ in their tensors, data do not fit, or a null cannot be made of them.
    """
    nulls = check_nulls(null, null_draws)
    request = DiagnosisRequest.from_arguments(
        metrics, options, probe, layers, batch, mode
    )
    for name in context or {}:
        check_known("column of the context", name, CONTEXT)
    check_resamples(resamples)
    criterion = _loss(loss)
    request.check_task(criterion.task)
    subjects, n_models = client_models(models, data, n_train, seed)
    with preserve_state(*{id(s.model): s.model for s in subjects}.values()):
        check_inputs(
            subjects,
            seed,
            any(metric.requires == "losses" for metric in request.metrics),
        )
        with torch_seeded(seed_of(seed, "diagnose", "example")):
            x, _ = next(batches(subjects[0].data, 2))
        every = layering or layers_of(
            subjects[0].model, to_device(subjects[0].model, x[:2]), by=by
        )
        LayerPlan(tuple(every), ()).check_fits(subjects[0].model)
        request.check(every)  # of all metrics, before the first one takes its time
        names = [layer.name for layer in every]
        wanted = {layer.name for layer in request.layers_to_report(every)}
        readers = {
            m.name: r
            for m in request.metrics
            if (r := m.reader(request.settings[m.name])) is not None
        }
        alone = [metric for metric in request.metrics if metric.name not in readers]
        shared = Measurement(subjects, every, criterion, batch, seed, mode)
        measured: list[Row] = []
        steps = (bool(readers) + len(alone)) * len(subjects)
        with progress_bar(
            steps, "diagnose", "step", shown=progress, leave=False
        ) as bar:

            def tick(label: str) -> Tick:
                def done(client: str) -> None:
                    bar.set_postfix_str(f"{label} {client}".rstrip(), refresh=False)
                    bar.update()

                return done

            if readers:
                together = replace(shared, tick=tick(" + ".join(readers)))
                measured += passes.one_pass(together, list(readers.values()), resamples)
            for metric, kept in _share_passes(alone):
                # a single model has no pair, however many clients it is measured on
                whom = subjects[:n_models] if metric.pairs else subjects
                measurement = replace(
                    shared,
                    subjects=whom,
                    layers=request.read_by(metric, every),
                    tick=tick(metric.name),
                    kept=kept,
                )
                found = metric.measure(measurement, request.settings[metric.name])
                for name in dict.fromkeys(r.get("layer", "") for r in found):
                    check_known(
                        f"layer in the rows of metric {metric.name!r}", name, names
                    )
                measured += found
    place = {metric.name: k for k, metric in enumerate(request.metrics)}
    measured = sorted(
        (r for r in measured if r["layer"] in wanted), key=lambda r: place[r["metric"]]
    )
    columns = {"seed": seed, **(context or {})}
    header = {
        "schema": rows.SCHEMA,
        "version": fl_core.__version__,
        "command": "diagnose",
        "seed": seed,
        "model": type(subjects[0].model).__name__,
        "layers": [asdict(layer) for layer in every],
        "bytes": layer_bytes(every, subjects[0].model),
        "data": _digest({s.client: _data_digest(s.data) for s in subjects}),
        "checkpoint": _digest(
            {s.client: tree.digest(tree.named_tensors(s.model)) for s in subjects}
        ),
        "metrics": {
            name: {key: _plain(value) for key, value in measurement.items()}
            for name, measurement in request.options.items()
        },
        "loss": criterion.name,
        "mode": mode,
        "by": by,
        "measure_batch": batch,
        "pairs": {
            m.name: "distance" if m.distance else "similarity"
            for m in request.metrics
            if m.pairs
        },
    }
    frame, redrawn = split_resamples(rows.frame({**r, **columns} for r in measured))
    report = Report(
        frame.reset_index(drop=True),
        json.loads(rows.dumps(header)),
        redrawn.reset_index(drop=True),
    )
    if not nulls:
        return report
    again = partial(
        diagnose, metrics=metrics, loss=criterion, layers=layers, by=by, layering=every, batch=batch,
        seed=seed, mode=mode, n_train={s.client: s.n_train for s in subjects}, progress=progress, context=context,
    )  # fmt: skip
    whose = (
        subjects[0].model if n_models == 1 else {s.client: s.model for s in subjects}
    )
    own = {s.client: s.data for s in subjects}

    def on_draw(name: str, draw: int) -> pd.DataFrame:
        on = on_null(
            whose,
            own,
            request.options,
            name,
            draw,
            seed=seed,
            retrain=retrain,
            start=start,
        )
        return again(on[0], on[1], options=on[2]).frame

    return replace(
        report, nulls=rows_of_nulls(nulls, null_draws, on_draw, kept=retrain is None)
    )


def _share_passes(
    metrics: Sequence[Metric],
) -> Iterator[tuple[Metric, ActivationCache | None]]:
    """Yield each metric with the passes that it shares with others.

    The passes are stored from their first reader to their last.
    """
    left = Counter(metric.features for metric in metrics)
    kept = {
        features: ActivationCache()
        for features, count in left.items()
        if features and count > 1
    }
    for metric in metrics:
        yield metric, kept.get(metric.features)
        left[metric.features] -= 1
        if not left[metric.features]:
            kept.pop(metric.features, None)


@dataclass(frozen=True)
class DiagnosisRequest:
    """The requested metrics, layers and options, to be checked before models exist.

    Attributes:
        metrics: each once, in the order given.
        options: the options given for each metric, by name, including the probe for all metrics.
        settings: the same options as objects of each metric's own type.
        layers: names of the layers to report. None means all.
        batch, mode: as in :func:`diagnose`.
    """

    metrics: tuple[Metric, ...]
    options: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    layers: tuple[str, ...] | None
    batch: int
    mode: str

    @classmethod
    def from_arguments(
        cls,
        metrics: str | Sequence[str],
        options: Mapping[str, Mapping[str, Any]] | None = None,
        probe: Data | None = None,
        layers: str | Sequence[str] | None = None,
        batch: int = 256,
        mode: str = "eval",
    ) -> DiagnosisRequest:
        """Make a request from the arguments of :func:`diagnose`.

        Raises:
            UsageError: a metric or mode is unknown, an option is unknown or out of range, or both a probe and its
                number of samples are given.
        """
        chosen = chosen_metrics(metrics)
        check_known("mode", mode, ("eval", "train"))
        asked = (
            (layers,)
            if isinstance(layers, str)
            else None
            if layers is None
            else tuple(layers)
        )
        given = _options(chosen, options or {}, probe)
        settings = {
            metric.name: metric.settings(**given[metric.name]) for metric in chosen
        }
        return cls(chosen, given, settings, asked, batch, mode)

    def layers_to_report(self, every: Sequence[Layer]) -> list[Layer]:
        """Return the layers to report, out of all."""
        names = [layer.name for layer in every]
        wanted = (
            names
            if self.layers is None
            else [check_known("layer", name, names) for name in self.layers]
        )
        return [layer for layer in every if layer.name in wanted]

    def read_by(self, metric: Metric, every: Sequence[Layer]) -> Sequence[Layer]:
        """Return the layers that a metric reads.

        It reads all layers if its values are relative to the first layer or to the whole.
        """
        return (
            every
            if metric.uses_gradient_pass or metric.needs_all_layers
            else self.layers_to_report(every)
        )

    def check_task(self, task: str) -> None:
        """Refuse metrics that need classes, or single samples' losses, in a task without them.

        Raises:
            UsageError: the message names the metrics.
        """
        for what, names in (
            (
                "classes",
                [m.name for m in self.metrics if m.classes and task != CLASSIFICATION],
            ),
            (
                "a loss of each sample alone",
                [m.name for m in self.metrics if m.separable and task == SURVIVAL],
            ),
        ):
            if names:
                rest = " ".join(m.name for m in self.metrics if m.name not in names)
                advice = f"Pass --metrics {rest}." if rest else "Use other metrics."
                raise UsageError(
                    f"task must have {what} for {listing(names)}; got {task}. {advice}"
                )

    def check(self, every: Sequence[Layer]) -> None:
        """Refuse unknown layers, and options that do not fit the layers, batch or mode.

        Raises:
            UsageError: the message names the layer or the option, and the allowed values.
        """
        self.layers_to_report(every)
        for metric in self.metrics:
            measurement = Measurement(
                (), self.read_by(metric, every), batch=self.batch, mode=self.mode
            )
            metric.check(measurement, self.settings[metric.name])


def chosen_metrics(names: str | Sequence[str]) -> tuple[Metric, ...]:
    """Return the metrics by name or by ``package.module:function``, each once in the order given.

    Raises:
        UsageError: a metric is unknown (the message gives the nearest name), or two have one name.
    """
    metrics: dict[str, Metric] = {}
    for name in dict.fromkeys((names,) if isinstance(names, str) else names):
        metric = METRICS[name]
        if metrics.setdefault(metric.name, metric) is not metric:
            raise UsageError(
                f"metrics must have different names; got {metric.name!r} twice, once as {name!r}. Rename one of them."
            )
    return tuple(metrics.values())


def _options(
    chosen: Sequence[Metric],
    options: Mapping[str, Mapping[str, Any]],
    probe: Data | None,
) -> dict[str, dict[str, Any]]:
    """Return the options of each chosen metric, by its name."""
    by_name: dict[str, dict[str, Any]] = {metric.name: {} for metric in chosen}
    for name, given in options.items():
        by_name[check_known("metric with options", name, by_name)].update(given)
    for metric in chosen:
        given = by_name[metric.name]
        if (
            probe is not None
            and "probe" in metric.options
            and given.get("probe") is None
        ):
            given["probe"] = probe
        if given.get("probe") is not None and "samples" in given:
            raise UsageError(
                f"{metric.name} must have a probe or samples, not both; got a probe and samples={given['samples']!r}."
            )
    return by_name


def _loss(loss: Loss | str | None) -> Loss:
    if isinstance(loss, Loss):
        return loss
    if loss is None or isinstance(loss, str):
        return losses.build(loss or "cross_entropy")
    raise UsageError(
        f"loss must be a name or one of fl_core.training.losses; got {type(loss).__name__}."
    )


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
