"""Federation sensitivity: how much the layers up to one matter to a client's loss, relative to the first layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_core.bounds import OneOf, check_fields
from fl_core.errors import UsageError
from fl_core.layers import Layer
from fl_core.rows import Row, row

from ..measurement import Tensors, tensors_of
from ..null import draws, mark_resample
from .importance import (
    REDUCE,
    Result,
    SensitivityAccumulator,
    resample,
    trainable_names,
)
from .passes import Meter, Reading, why_unreadable

FROZEN = "frozen: its weights do not train"


def cumulative(importance: ArrayLike) -> NDArray[np.float64]:
    """Return S_l = F_l / F_1 with F_l = sum_{k <= l} I_k, [L].

    This is PLayer-FL, Eq. 2, relative to the first layer. S_1 = 1 and S never falls. A jump means that the layer
    matters far more to the loss than the layers before it. All values are NaN if I_1 is 0. After the first value that
    is NaN or None, all are NaN.
    """
    values = np.asarray(importance, dtype=np.float64)
    if not len(values) or not values[0] > 0:
        return np.full(len(values), np.nan)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.cumsum(values) / values[0]


def combine(s: ArrayLike, weights: ArrayLike) -> NDArray[np.float64]:
    """Return the weighted mean of clients' curves, sum_c p_c S^c with p_c = w_c / sum w.

    It takes S [C, L] and training samples [C]. A layer without a value at one of the clients is NaN.

    Raises:
        UsageError: the numbers of clients differ, or a weight is not above 0.
    """
    values, w = np.asarray(s, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    if values.ndim != 2 or w.shape != values.shape[:1]:
        raise UsageError(
            f"sensitivities must be [C, L] and weights [C]; got {values.shape} and {w.shape}."
        )
    if not np.all(w > 0):
        raise UsageError(f"clients' weights must all be above 0; got {w.min():g}.")
    with np.errstate(over="ignore", invalid="ignore"):
        return (w / w.sum()) @ values


# --- rows ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Client:
    name: str
    n_train: int
    n_samples: int
    result: Result
    fault: str = ""


@dataclass(frozen=True)
class Sensitivity:
    """The options of federation sensitivity, and the reader that makes its rows.

    There are rows of S_l (variant ``when``), for each client and combined, and of I_l (variant ``"importance"``). Both
    need gradients. A layer has no value if it has no weights or frozen ones, or is outside the forward pass. It adds
    nothing to the later layers' sums. The reference is the first layer that has trainable weights.

    Attributes:
        tensors, reduce: as in :class:`~diagnostics.gradients.importance.SensitivityAccumulator`. The
            estimator names the choice.

    Raises:
        UsageError: a choice is unknown.
    """

    tensors: Tensors = "weights"
    reduce: Annotated[str, OneOf("reduce", REDUCE)] = "pooled"

    when: ClassVar[str] = "after"
    """The rows' variant: weights stay fixed, and (w g)^2 is averaged over the data's batches."""
    estimator: ClassVar[str] = "batch_mean"
    """A description in words of the steps whose importances are averaged."""
    of_tables: ClassVar[str] = "touched rows"
    """What the estimator says of embedding tables."""

    def meter(self, layers: Sequence[Layer]) -> Meter:
        return SensitivityAccumulator(layers, self.tensors, self.reduce)

    def rows(self, layers: Sequence[Layer], readings: Sequence[Reading]) -> list[Row]:
        sizes = {}
        for reading in readings[:1]:
            sizes = {
                name: parameter.numel()
                for name, parameter in reading.subject.model.named_parameters()
            }
        clients = [
            _Client(
                r.subject.client,
                r.subject.n_train,
                r.n_samples,
                r.meter.result(),
                r.fault,
            )
            for r in readings
        ]
        return self.table(layers, clients, sizes)

    def table(
        self,
        layers: Sequence[Layer],
        clients: Sequence[_Client],
        sizes: Mapping[str, int],
    ) -> list[Row]:
        """Return rows from the clients' accumulated importances.

        Args:
            sizes: entries of each parameter, if known.
        """
        rows: list[Row] = []
        values, reasons = [], []
        for client in clients:
            i, s, why = self._client(layers, client)
            values.append(s)
            reasons.append(why)
            common = {
                "client": client.name,
                "n_samples": client.n_samples,
                "n_train": client.n_train,
            }
            for k, layer in enumerate(layers):
                rows.append(self._row(layer, s[k], why[k], self.when, sizes, **common))
                unit = "loss^2"
                status = "" if math.isfinite(i[k]) else why[k]
                rows.append(
                    self._row(
                        layer, i[k], status, "importance", sizes, unit=unit, **common
                    )
                )
        if clients:
            combined = combine(values, [client.n_train for client in clients])
            common = {
                "n_samples": sum(client.n_samples for client in clients),
                "n_train": sum(client.n_train for client in clients),
            }
            for k, layer in enumerate(layers):
                lacking = [
                    (c.name, why[k])
                    for c, why in zip(clients, reasons, strict=True)
                    if why[k]
                ]
                status = f"client {lacking[0][0]!r}: {lacking[0][1]}" if lacking else ""
                rows.append(
                    self._row(layer, combined[k], status, self.when, sizes, **common)
                )
        return rows

    def _client(
        self, layers: Sequence[Layer], client: _Client
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], list[str]]:
        """Return I [L], S [L], and why S has no value (or "") for one client."""
        reached = dict(
            zip(client.result["layers"], client.result["importance"], strict=True)
        )
        why = [self._unread(layer, layer.name in reached) for layer in layers]
        i = np.array([reached.get(layer.name) for layer in layers], dtype=np.float64)
        s = np.full(len(layers), np.nan)
        counted = [k for k, reason in enumerate(why) if not reason]
        measurable = [
            k
            for k, layer in enumerate(layers)
            if layer.used and trainable_names(layer, self.tensors)
        ]
        s[counted] = cumulative(i[counted])
        broken = ""
        if measurable and measurable[0] not in counted:
            broken = (
                f"no gradient reaches the first layer {layers[measurable[0]].name!r}"
            )
        for k in counted:
            if not broken and not math.isfinite(i[k]):
                broken = (
                    client.fault
                    or f"the importance of layer {layers[k].name!r} is not finite"
                )
            if not broken and k == counted[0] and i[k] == 0:
                broken = f"the importance of the first layer {layers[k].name!r} is 0"
            if not broken and not math.isfinite(s[k]):
                broken = f"the sum up to layer {layers[k].name!r} overflows"
            if broken:
                s[k], why[k] = np.nan, broken
        return i, s, why

    def _unread(self, layer: Layer, reached: bool) -> str:
        frozen = (
            layer.used
            and tensors_of(layer, self.tensors)
            and not trainable_names(layer, self.tensors)
        )
        return FROZEN if frozen else why_unreadable(layer, self.tensors, reached)

    def _row(
        self,
        layer: Layer,
        value: float,
        status: str,
        variant: str,
        sizes: Mapping[str, int],
        **columns: Any,
    ) -> Row:
        names = trainable_names(layer, self.tensors)
        how = [self.estimator]
        how += ["mean of tensors"] if self.reduce == "mean_of_tensors" else []
        how += ["all tensors"] if self.tensors == "all" else []
        how += [self.of_tables] if set(names) & set(layer.tables) else []
        return row(
            "federation_sensitivity",
            None if status else float(value),
            status=status or "ok",
            layer=layer.name,
            variant=variant,
            estimator=", ".join(filter(None, how)),
            n_params=sum(sizes[name] for name in names)
            if all(name in sizes for name in names)
            else None,
            **columns,
        )


class _Recorded(Sensitivity):
    """Federation sensitivity of what accumulators saw while clients trained."""

    when = "training"
    estimator = "epoch"


def recorded_rows(
    results: Mapping[str, Result],
    layers: Sequence[Layer],
    *,
    n_train: Mapping[str, int],
    sizes: Mapping[str, int] | None = None,
    tensors: str = "weights",
    reduce: str = "pooled",
    resamples: int = 0,
    seed: int = 0,
) -> list[Row]:
    """Return rows of federation sensitivity from what the clients' accumulators recorded during training.

    Args:
        results: client name -> ``SensitivityAccumulator.result()``, made with the same two choices as given here.
        n_train: training samples of each client: its weight, and the samples that one epoch saw.
        sizes: scalars of each parameter, for the rows' ``n_params``.
        resamples: how many resamples of each client's steps to add, drawn with ``seed``; see
            :mod:`diagnostics.null`. Results without ``parts`` have none.

    Raises:
        UsageError: a choice is unknown, or training cannot serve it.
    """
    metric = _Recorded(tensors, reduce)
    check_fields(metric)
    clients = [
        _Client(name, n_train[name], n_train[name], result)
        for name, result in results.items()
    ]
    rows = metric.table(layers, clients, sizes or {})
    for client in clients:
        parts = len(client.result.get("parts", ()))
        for number, times in enumerate(draws(parts, resamples, seed, client.name), 1):
            again = replace(client, result=resample(client.result, times))
            rows += mark_resample(
                metric.table(layers, [again], sizes or {}), number, parts
            )
    return rows
