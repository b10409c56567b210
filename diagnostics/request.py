"""What to measure, and how: the arguments of a diagnosis, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, get_type_hints

from diagnostics.measurement import Data, Measurement
from diagnostics.metrics.base import METRIC_ALIASES, METRICS, Metric
from diagnostics.null import NO_NULLS, Nulls
from fl_core.errors import (
    OneOf,
    UsageError,
    as_list,
    at_least,
    check_fields,
    check_known,
    check_type,
    python_number,
)
from fl_core.layers import Layer
from fl_core.models.adapter import IGNORED
from fl_core.plan import parameters_in

NETWORK = "network"
"""The name of the whole network as one layer."""
CONTEXT = ("run", "algorithm", "seed", "round", "model", "split")
"""Columns that only the caller knows."""


@dataclass(frozen=True)
class Request:
    """The arguments of :func:`~diagnostics.measure.diagnose`, checked, with its rarely used settings.

    Attributes:
        metrics: the metrics, each once, in the order given.
        loss, layers, batch, seed, samples, budget, progress, null: as in :func:`~diagnostics.measure.diagnose`.
        options: the options given for each metric, by name.
        probe: the samples on which clients' representations are compared, unless a metric's options name its own.
            Default: the first 512 samples of the clients' data, equally many of each.
            In a run they are validation samples.
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
    null: Nulls = NO_NULLS
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
        """Make a request from the arguments of :func:`~diagnostics.measure.diagnose`.

        Args:
            metrics: names of metrics, or ``package.module:function``.
            given: the other arguments by name. Their ``options`` may also hold rarely used settings of a request.

        Raises:
            UsageError: a metric, an argument or an option is unknown or out of range, or both a probe and its number of
                samples are given.
        """
        chosen = chosen_metrics(metrics)
        options_of: dict[str, dict[str, Any]] = {metric.name: {} for metric in chosen}
        values = {name: python_number(value) for name, value in given.items()}
        options = values.pop("options", None) or {}
        check_type("options", options, dict)
        for name, value in options.items():
            if (
                check_known("metric with options", name, [*options_of, *RARE])
                in options_of
            ):
                check_type(f"options of {name}", value, dict)
                options_of[name] |= value
            else:
                values[name] = value
        values["null"] = Nulls.of(values.get("null", ()))
        if values.get("layers") is not None:
            values["layers"] = as_list("layers", values["layers"])
        for name, value in values.items():
            check_known("argument of diagnose", name, ARGUMENTS)
            check_type(name, value, _HINTS[name], numpy=True)
        for name in values.get("context") or {}:
            check_known("column of the context", name, CONTEXT)
        for metric in chosen:
            metric_options, probe = options_of[metric.name], values.get("probe")
            if "probe" in metric.options and metric_options.get("probe") is None and probe is not None:  # fmt: skip
                metric_options["probe"] = probe
            if metric_options.get("probe") is not None and "samples" in metric_options:
                raise UsageError(
                    f"{metric.name} must have a probe or samples, not both; got a probe and "
                    f"samples={metric_options['samples']!r}."
                )
        request = cls(chosen, options_of, **values)
        check_fields(request)
        for metric in chosen:
            metric.settings(**options_of[metric.name])
        return request

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return the checked options of each metric, as an object of the metric's own type."""
        return {m.name: m.settings(**self.options[m.name]) for m in self.metrics}

    def layers_to_report(self, every: Sequence[Layer]) -> list[Layer]:
        """Return the layers to report, out of all. The name :data:`NETWORK` alone joins all to one.

        Args:
            every: all layers of the model.

        Raises:
            UsageError: a requested layer is unknown.
        """
        if self.layers == (NETWORK,):
            buffers = chain.from_iterable(layer.buffers for layer in every)
            return [Layer(NETWORK, tuple(parameters_in(every)), tuple(buffers))]
        names = [layer.name for layer in every]
        for name in self.layers or ():
            check_known("layer", name, names)
        return [e for e in every if self.layers is None or e.name in self.layers]

    def read_by(self, metric: Metric, every: Sequence[Layer]) -> Sequence[Layer]:
        """Return the layers that a metric reads, out of all layers ``every``.

        It reads all of them if its values are relative to the first layer or to the whole.
        """
        reads_all = metric.uses_gradient_pass or metric.needs_all_layers
        if reads_all:
            return every
        return self.layers_to_report(every)

    @property
    def across_models(self) -> bool:
        """Return whether all metrics compare features alone, so that models may differ."""
        return all(m.pairs and m.features == "probe" for m in self.metrics)

    @property
    def differentiates(self) -> bool:
        """Return whether a metric reads losses. The loss is then differentiated."""
        return any(metric.requires == "losses" for metric in self.metrics)

    def check(self, every: Sequence[Layer]) -> None:
        """Refuse unknown layers, and options that do not fit the layers, batch or mode.

        Args:
            every: all layers of the model.

        Raises:
            UsageError: an option does not fit, or a layer is unknown. The message names
                it and the allowed values.
        """
        self.layers_to_report(every)
        for metric in self.metrics:
            layers = self.read_by(metric, every)
            measurement = Measurement((), layers, batch=self.batch, mode=self.mode)
            metric.check(measurement, self.settings[metric.name])


ARGUMENTS = [field.name for field in fields(Request)][2:]

RARE = ARGUMENTS[ARGUMENTS.index("probe") :]
"""The settings that :func:`~diagnostics.measure.diagnose` takes among its options."""

_HINTS = get_type_hints(Request)


ELSEWHERE = {
    "tsne": "Call fl.tsne(models, data).",
    "fisher": "Use grad_noise, the covariance of the samples' gradients.",
}
"""Advice for words that are no metrics, by word."""


def chosen_metrics(names: str | Sequence[str]) -> tuple[Metric, ...]:
    """Return the metrics by name or ``package.module:function``, in the order given.

    Each metric is there once. Words of ``METRIC_ALIASES`` are names, too.

    Raises:
        UsageError: a metric is unknown (the message gives the nearest name), or two have one name.
    """
    metrics: dict[str, Metric] = {}
    for name in dict.fromkeys(as_list("metrics", names)):
        if name in ELSEWHERE:
            raise UsageError(
                f"metrics must be among those of fedlayers list metrics; got {name!r}. {ELSEWHERE[name]}"
            )
        metric = METRICS[METRIC_ALIASES.get(name, name)]
        if metrics.setdefault(metric.name, metric) is not metric:
            raise UsageError(
                f"metrics must have different names; got {metric.name!r} twice, once as {name!r}. Rename one of them."
            )
    return tuple(metrics.values())
