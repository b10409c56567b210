"""The type of a metric, and the decorators that register one.

A metric is a function from a measurement to rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, wraps
from numbers import Real
from typing import Any, TypeVar, cast, get_type_hints

import torch

from fl_core import tree
from fl_core.errors import (
    UsageError,
    about,
    check_fields,
    check_known,
    check_type,
    listing,
    short_value,
)
from fl_core.layers import Layer
from fl_core.registry import Registry
from fl_core.rows import CLASSIFICATION, SURVIVAL, Row, row
from fl_core.seeds import forked_random, seed_of, torch_seeded
from fl_core.training.losses import Loss
from fl_core.tree import set_mode

from ..measurement import (
    Batch,
    ClientModel,
    Measurement,
    NoValue,
    batches,
    one_line,
    row_or_reason,
    tensors_of,
)
from . import Facts, PlotStyle

DEFAULT = ("grad_variance", "hessian_trace", "cka", "federation_sensitivity")
"""Names of the metrics that are measured if none is named."""
METRIC_ALIASES = {
    "hessian_eigensum": "hessian_trace",
    "eigenvalues": "hessian_spectrum",
    "ggn": "ggn_trace",
    "probe": "linear_probe",
    "sensitivity": "federation_sensitivity",
}
"""Names of metrics by the words that papers use."""
READS = ("losses", "samples", "weights")
FEATURES = ("", "probe", "own")

Compute = TypeVar("Compute", bound=Callable[..., list[Row]])
LayerFunction = TypeVar("LayerFunction", bound=Callable[..., Any])


@dataclass(frozen=True)
class NoOptions:
    """The options of a metric that has none."""


@dataclass(frozen=True)
class Metric(Facts):
    """A metric: its facts, its options, and the function that computes its rows.

    The other attributes are those of :class:`~diagnostics.metrics.Facts`.

    Attributes:
        compute: a function (measurement) -> rows, or (measurement, options) -> rows, of
            a :class:`~diagnostics.measurement.Measurement`.
        options_type: a frozen dataclass, the type of ``options``. Types of fields may state bounds
            (:mod:`fl_core.errors`). Its ``__post_init__`` refuses other values out of range.
            Its method ``check(measurement)`` refuses values that do not fit the layers, batch or mode.

    >>> from diagnostics.metrics.base import METRICS
    >>> METRICS["cka"].direction
    'higher = more similar; 1 = same'
    >>> METRICS["grad_variance"].options
    {'reduction': 'epoch', 'tensors': 'weights'}
    """

    compute: Callable[..., list[Row]] = field(kw_only=True)
    options_type: type = NoOptions

    @property
    def options(self) -> dict[str, Any]:
        """Return the defaults of the metric's own options by name; empty without options."""
        return vars(self.options_type())

    @property
    def option_types(self) -> dict[str, Any]:
        """Return the types of the metric's own options by name, without their bounds."""
        hints = get_type_hints(self.options_type)
        return {field.name: hints[field.name] for field in fields(self.options_type)}

    def why_not(self, task: str) -> str:
        """Return why the metric has no value for a task, or "" if it can have one.

        Args:
            task: the kind of task, such as ``classification``
                (:data:`fl_core.rows.TASKS`).
        """
        if self.classes and task != CLASSIFICATION:
            return f"not applicable: it needs classes [n]; got {task}"
        if self.separable and task == SURVIVAL:
            return f"not applicable: it needs a loss of each sample alone; got {task}"
        return ""

    def settings(self, **options: Any) -> Any:
        """Return the options as an object of the metric's own type, checked.

        Args:
            options: values by name. Options that are left out have their defaults.

        Raises:
            UsageError: an option is unknown, of another type, or out of range. The
                message names the metric, the option, its value and the allowed values.
        """
        types = self.option_types
        for name, value in options.items():
            check_known(f"option of {self.name}", name, types)
            check_type(f"{self.name}: {name}", value, types[name], numpy=True)
        with about(self.name):
            settings = self.options_type(**options)
            check_fields(settings)
        return settings

    def check(self, measurement: Measurement, settings: Any) -> None:
        """Refuse options that do not fit the measurement's layers, batch or mode.

        Options of a type without a method ``check`` always fit.

        Args:
            measurement: the layers and the settings that all metrics share.
            settings: the options, as :meth:`settings` returns them.

        Raises:
            UsageError: an option does not fit. The message names the metric, the
                option, its value and the allowed values.
        """
        if hasattr(settings, "check"):
            with about(self.name):
                settings.check(measurement)

    def measure(self, measurement: Measurement, settings: Any) -> list[Row]:
        """Return the rows, for options already made by :meth:`settings` and checked by :meth:`check`.

        With fewer than two models, a metric of pairs has one row a layer, without a
        value.

        Args:
            measurement: the clients, the layers and the settings that all metrics share.
            settings: the options, as :meth:`settings` returns them.

        Raises:
            UsageError: the function does not return a list of rows of this metric.
        """
        if self.pairs and len(measurement.subjects) < 2:
            return [
                row(self.name, None, status="needs at least two models", layer=layer.name, variant=self.variant)
                for layer in measurement.layers
            ]  # fmt: skip
        if self.options_type is NoOptions:
            rows = self.compute(measurement)
        else:
            rows = self.compute(measurement, settings)
        if not isinstance(rows, list) or any(
            not isinstance(row, dict) or "metric" not in row for row in rows
        ):
            raise UsageError(
                f"metric {self.name!r} must return a list of rows, as fl.row makes them; got {rows!r:.80}."
            )
        for measured_row in rows:
            if measured_row["metric"] != self.name:
                raise UsageError(
                    f"rows of metric {self.name!r} must be named after it; got a row of metric "
                    f"{measured_row['metric']!r}."
                )
        return rows

    def __call__(self, measurement: Measurement, **options: Any) -> list[Row]:
        """Measure, and return the metric's rows.

        Torch's global random state is restored afterwards.

        Args:
            measurement: the clients, the layers and the settings that all metrics
                share.
            options: values of the metric's own options by name.

        Raises:
            UsageError: as :meth:`settings` and :meth:`check`, before any client is
                measured. Later, data do not fit, or as :meth:`measure`.
        """
        settings = self.settings(**options)
        self.check(measurement, settings)
        with forked_random():  # iterating a loader draws from it
            return self.measure(measurement, settings)


# --- the registry ----------------------------------------------------------------------------------------------


def _from_function(function: Any, path: str) -> Metric:
    """Return the metric of a user's object from outside the registry.

    A :class:`Metric` is returned unchanged. A function with the decorator
    :func:`layer_metric` gives its metric. Any other function becomes a new metric with
    default facts, described by the first line of its docstring.

    Args:
        function: the object.
        path: its place, such as ``package.module:name``, for the message.

    Raises:
        UsageError: the object is not a function, or its parameters do not fit.
    """
    if isinstance(function, Metric):
        return function
    if not inspect.isfunction(function):
        type_name = type(function).__name__
        raise UsageError(f"metric {path!r} must be a function; got {type_name}.")
    if "metric" in vars(function):  # of a layer, decorated before
        return cast(Metric, vars(function)["metric"])
    return _make(
        function, (inspect.getdoc(function) or function.__name__).partition("\n")[0]
    )


_FACTS = [field.name for field in fields(Facts) if field.name != "name"]
METRICS: Registry[Metric] = Registry("metric", "diagnostics.metrics", _from_function)


def metric(
    *, description: str, direction: str, **facts: Any
) -> Callable[[Compute], Compute]:
    """Register a function as a metric under its own name.

    Use it as a decorator, which returns the function unchanged. The function takes a
    :class:`~diagnostics.measurement.Measurement` and returns a list of rows. A function
    with options takes them as a second argument, a frozen dataclass with defaults. The
    second parameter's annotation names this class.

    Args:
        description: one line on what is measured.
        direction: one line on what a higher value means.
        facts: further attributes of :class:`~diagnostics.metrics.Facts`. ``look`` is a
            dict of attributes of :class:`~diagnostics.metrics.PlotStyle`.

    Raises:
        UsageError: another metric has the name, a keyword is not an attribute, a choice
            is unknown, the function takes other parameters, or the options are not a
            frozen dataclass.

    >>> from fl_core.rows import row
    >>> from diagnostics.metrics.base import Measurement, metric
    >>> @metric(description="number of a layer's tensors", direction="higher = more", requires="weights")
    ... def tensor_count(measurement: Measurement):
    ...     return [
    ...         row("tensor_count", len(layer.tensors), client=subject.client, layer=layer.name)
    ...         for subject in measurement.subjects
    ...         for layer in measurement.layers
    ...     ]
    >>> "tensor_count" in METRICS
    True
    """
    facts = _checked_facts(**facts)

    def add(function: Compute) -> Compute:
        made_metric = _make(function, description, direction, **facts)
        METRICS.add(made_metric.name, made_metric, function)
        return function

    return add


@dataclass(frozen=True)
class LayerProbe:
    """The samples of one client for a formula of a layer, and the loss.

    Attributes:
        subject: the client's model and data.
        measurement: settings that all metrics share.
    """

    subject: ClientModel
    measurement: Measurement

    @property
    def loss(self) -> Loss:
        """Return the loss that trained the models, a mean over samples."""
        return self.measurement.loss

    @cached_property
    def batches(self) -> list[Batch]:
        """Return the client's batches (x [n, ...], y [n, ...]) on the model's device.

        They have the size ``batch`` of the measurement, and the last one may be
        smaller. A loader keeps its own batches.
        """
        settings, client = self.measurement, self.subject
        return list(batches(client.data, settings.batch, client.model))

    @property
    def samples(self) -> Batch:
        """Return all of the client's samples as one batch (x [n, ...], y [n, ...])."""
        x, y = zip(*self.batches, strict=True)
        return torch.cat(x), torch.cat(y)


def layer_metric(
    *, description: str, direction: str, unit: str = "", **facts: Any
) -> Callable[[LayerFunction], LayerFunction]:
    """Register a formula of one layer as a metric under its own name.

    Use it as a decorator, which returns the function. The function takes (model, layer,
    probe), and options as for :func:`metric` if it has any. It is called once for each
    client and layer, with the client's model in eval mode, the layer and the client's
    :class:`LayerProbe`. It returns a finite number. If ``variants`` are named, it
    returns a dict of a number or a :class:`NoValue` for each. If a layer has no value,
    it raises ``NoValue("why")``. It may not change the model. A layer outside the
    forward pass has no value, unless only weights are read.

    Args:
        description: one line on what is measured.
        direction: one line on what a higher value means.
        unit: the unit in the rows.
        facts: further attributes of :class:`~diagnostics.metrics.Facts`, as for
            :func:`metric`.

    Raises:
        UsageError: as for :func:`metric`.

    >>> from diagnostics.metrics.base import layer_metric
    >>> @layer_metric(description="number of a layer's weights", direction="higher = more", requires="weights")
    ... def weight_count(model, layer, probe):
    ...     return sum(model.get_parameter(name).numel() for name in layer.weights)
    """
    facts = _checked_facts(**facts)

    def add(function: LayerFunction) -> LayerFunction:
        parameters = "a model", "a layer", "a probe"
        made_metric = _make(
            function, description, direction, before=parameters, **facts
        )

        @wraps(function)
        def compute(measurement: Measurement, *options: Any) -> list[Row]:
            return _layer_rows(made_metric, unit, measurement, options)

        registered_metric = vars(function)["metric"] = replace(
            made_metric, compute=compute
        )
        METRICS.add(made_metric.name, registered_metric, function)
        return function

    return add


def of_weights(tensors: str) -> dict[str, Any]:
    """Return columns of a row whose value is an exact function of a layer's tensors: ``stderr`` and ``estimator``.

    Args:
        tensors: the tensors that were read, ``weights`` or ``all``.
    """
    suffix = ""
    if tensors == "all":
        suffix = ", all tensors"
    return {"stderr": 0.0, "estimator": f"weights{suffix}"}


def variant_rows(
    metric: str, values: Mapping[str, float | NoValue], **columns: Any
) -> list[Row]:
    """Return a row for each variant, with its number or the reason that there is none.

    Args:
        metric: name of the metric.
        values: the number or the reason, by variant.
        columns: further columns of all rows, as for :func:`fl_core.rows.row`.
    """
    rows = []
    for variant, value in values.items():
        columns["variant"] = variant
        if isinstance(value, NoValue):
            rows.append(row_or_reason(metric, None, str(value), **columns))
        else:
            rows.append(row_or_reason(metric, value, "", **columns))
    return rows


def _layer_rows(
    formula: Metric, unit: str, measurement: Measurement, options: Sequence[Any]
) -> list[Row]:
    """Return the rows of a formula of one layer, for all clients and layers.

    Args:
        formula: the metric, whose ``compute`` is the formula.
        unit: the unit in the rows.
        measurement: the clients, the layers and the settings.
        options: the metric's options as a sequence of one, or an empty one.

    Raises:
        UsageError: the formula changes a model, or as :func:`_call`.
    """
    rows, is_exact = [], formula.requires == "weights"
    tensors = "weights"
    if options:
        tensors = getattr(options[0], "tensors", "weights")
    columns: dict[str, Any] = {
        "unit": unit,
        **(of_weights(tensors) if is_exact else {}),
    }
    for subject in measurement.turns():
        model, probe = subject.model, LayerProbe(subject, measurement)
        columns |= {"client": subject.client, "n_train": subject.n_train}
        with set_mode(model, "eval"):
            digest_before = tree.digest(tree.named_tensors(model))
            if not is_exact:
                columns["n_samples"] = sum(len(y) for _, y in probe.batches)
            for layer in measurement.clock.turns(measurement.layers):
                result: Any = NoValue("unused in the forward pass")
                if layer.used or is_exact:
                    result = _call(formula, layer, probe, options)
                names = formula.variants or ("",)
                if isinstance(result, dict):
                    values = result
                else:
                    values = dict.fromkeys(names, result)
                columns["layer"] = layer.name
                columns["n_params"] = sum(
                    model.get_parameter(name).numel()
                    for name in tensors_of(layer, tensors)
                )
                rows += variant_rows(formula.name, values, **columns)
            if tree.digest(tree.named_tensors(model)) != digest_before:
                raise UsageError(
                    f"metric {formula.name!r} must not change a model; got other weights of client "
                    f"{subject.client!r}. Change a copy."
                )
    return rows


def _call(
    formula: Metric, layer: Layer, probe: LayerProbe, options: Sequence[Any]
) -> Any:
    """Return a formula's result at one layer, or the :class:`NoValue` that it raises.

    The result is a number, or a dict of numbers and reasons by variant. If the time
    budget is spent, the formula is not called, and the result is a ``NoValue``.

    Raises:
        UsageError: the formula fails, or returns a value that is neither a finite
            number nor a ``NoValue``. The message names the metric, the layer and the
            client.
    """
    client, seed = probe.subject.client, probe.measurement.seed
    place = f"metric {formula.name!r} at layer {layer.name!r} of client {client!r}"
    seeded = torch_seeded(seed_of(seed, "diagnose", formula.name, client, layer.name))
    with one_line(place), seeded:
        try:
            probe.measurement.clock.check()
            result = formula.compute(probe.subject.model, layer, probe, *options)
        except NoValue as reason:
            return reason
    values = result if isinstance(result, dict) else {"": result}
    for value in values.values():
        is_finite = isinstance(value, Real) and math.isfinite(value)
        if not is_finite and not isinstance(value, NoValue):
            shown_value = short_value(value)
            raise UsageError(
                f'{place} must be a finite number; got {shown_value}. Raise fl.NoValue("why") if there is none.'
            )
    return result


def _checked_facts(
    *,
    look: Mapping[str, Any] | None = None,
    requires: str = "losses",
    features: str = "",
    **facts: Any,
) -> dict[str, Any]:
    """Return attributes of a metric from the keywords of its decorator.

    Raises:
        UsageError: a keyword is not an attribute, or a choice is unknown.
    """
    check_known("what a metric reads", requires, READS)
    check_known("whose features a metric reads", features, FEATURES)
    for name in look or {}:
        check_known(
            "attribute of a look", name, [field.name for field in fields(PlotStyle)]
        )
    for name in facts:
        check_known("attribute of a metric", name, _FACTS)
    style = PlotStyle(**(look or {}))
    return {**facts, "look": style, "requires": requires, "features": features}


def _make(
    function: Callable[..., Any],
    description: str,
    direction: str = "",
    *,
    before: Sequence[str] = ("a measurement",),
    **facts: Any,
) -> Metric:
    """Make a metric of a function, with its name and the type of its options if it has any.

    Args:
        function: the function.
        description, direction, facts: attributes of the metric.
        before: what the function takes before its options, for the message.

    Raises:
        UsageError: the function takes other parameters, or its options are not
            annotated with a frozen dataclass.
    """
    name, parameters = function.__name__, list(inspect.signature(function).parameters)
    count = len(before)
    if len(parameters) not in (count, count + 1):
        raise UsageError(
            f"metric {name!r} must take {listing(before)} and maybe options; got {len(parameters)} arguments."
        )
    options_type: Any = NoOptions
    for option in parameters[count:]:
        options_type = get_type_hints(function).get(option)
        if not (
            is_dataclass(options_type)
            and getattr(options_type, "__dataclass_params__").frozen  # noqa: B009
        ):
            raise UsageError(
                f"metric {name!r}: its {option!r} must be annotated with a frozen dataclass. Add the annotation."
            )
    return Metric(
        name,
        description,
        direction,
        **facts,
        compute=function,
        options_type=options_type,
    )
