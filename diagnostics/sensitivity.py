"""Federation sensitivity: how much the layers up to one matter to a client's loss, relative to the first layer.

It sums the first-order importance of layers over a pass, or during training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fl_core.errors import OneOf, UsageError, check_fields, check_known, listing, warn
from fl_core.layers import Layer
from fl_core.rows import Row
from fl_core.tree import Tree

from .gradients import Reading
from .measurement import (
    TENSORS,
    Measurement,
    Tensors,
    row_or_reason,
    tensors_of,
    why_unreadable,
)
from .null import PARTS, draws, mark_resample

REDUCE = ("pooled", "mean_of_tensors")

Result = Mapping[str, Any]
"""What :meth:`SensitivityAccumulator.result` gives."""


def trainable_names(layer: Layer, tensors: str) -> tuple[str, ...]:
    """Return the names of the layer's trainable parameters that importance reads: its weights, or all."""
    return tuple(
        name for name in tensors_of(layer, tensors) if name not in layer.frozen
    )


class SensitivityAccumulator:
    """Sum of the importance I_l = (1 / n_l) sum (w g)^2 of every layer over the steps of an epoch.

    I_l is the first-order Taylor importance of Molchanov et al. per weight (PLayer-FL, Eq. 1 and 2). Weights w and
    gradients g are taken at the step, before the optimiser moves w. An update costs one product and one norm a tensor.
    Nothing is copied to the host. The sums are float64: one for each tensor and each part. Steps are assigned in turn
    to the parts. A step on a short last batch counts as any other, as it does for the weights that it moves. So I_l is
    a mean over steps, not over samples. A tensor that is frozen or that no gradient reached counts neither in the sum
    nor in n. An embedding table counts at each step with the rows that have a gradient.

    Args:
        layers: the layers, in the order of the network.
        tensors: ``"weights"`` (default) or ``"all"`` parameters.
        reduce: ``"pooled"`` sums over all entries of a layer and divides by their number (Eq. 2). With
            ``"mean_of_tensors"`` a layer is the plain mean of its tensors' own importances (the published figures).

    Raises:
        UsageError: a choice is unknown. On an update: no parameter of the layers is
            among the gradients.
    """

    def __init__(
        self, layers: Sequence[Layer], tensors: str = "weights", reduce: str = "pooled"
    ) -> None:
        self._tables = {*chain.from_iterable(layer.tables for layer in layers)}
        self._touched: Tree = {}
        self.tensors = check_known("choice of tensors", tensors, TENSORS)
        self.reduce = check_known("reduction of a layer", reduce, REDUCE)
        self._names = {layer.name: trainable_names(layer, tensors) for layer in layers}
        self._known = {*chain.from_iterable(self._names.values())}
        self._sums: Tree = {}
        self._sizes: dict[str, int] = {}
        self._steps = 0

    @torch.no_grad()
    def update(self, params: Tree, grads: Tree, n: int = 1) -> None:
        """Add one step. It counts once, whatever its number ``n`` of samples.

        Args:
            params, grads: weights and gradients by exact name, before the weights move.
            n: number of samples.

        Raises:
            UsageError: the gradients are of another model.
        """
        names = [
            name for name in grads if name in self._known and grads[name] is not None
        ]
        if grads and self._known and not self._known & grads.keys():
            names_there = listing(sorted(self._known), 3)
            raise UsageError(
                f"gradients must be of the layers' parameters, such as {names_there}; "
                f"got {listing(grads, 3)}. Pass the layers of the same model."
            )
        for name in names:
            w, g = params[name], grads[name]
            # the norm in float64 squares there too: products far below 1 do not vanish, and no copy is made
            norm = torch.linalg.vector_norm(w * g, dtype=torch.float64)
            if name in self._tables:
                touched_rows = (g != 0).flatten(1).any(1).sum()
                self._add(name, norm.square_(), w[0].numel(), touched_rows)
            else:
                self._add(name, norm.square_(), w.numel())
        self._steps += 1

    def _add(
        self, name: str, square: Tensor, size: int, rows: Tensor | int | None = None
    ) -> None:
        """Add one tensor's sum over ``size`` entries to the step's part.

        With ``rows``, ``size`` is the number of entries in each row.
        """
        if name not in self._sums:
            self._sums[name] = square.new_zeros(PARTS)
            self._sizes[name] = size
            if rows is not None:
                self._touched[name] = square.new_zeros(PARTS)
        part_number = self._steps % PARTS
        self._sums[name][part_number].add_(square)
        if rows is not None:
            self._touched[name][part_number].add_(rows)

    def _part_steps(self) -> list[int]:
        """Return the number of steps of each part that has any."""
        return [
            (self._steps - part_number - 1) // PARTS + 1
            for part_number in range(self.parts)
        ]

    def _totals(self, part_sums: Tensor) -> Tensor:
        """Return a tensor's sum over all steps, then the sum of each part that has steps, [1 + parts]."""
        return torch.cat([part_sums.sum(0, keepdim=True), part_sums[: self.parts]])

    def _layer(self, reached: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return a layer's importance over all steps and over each part's, and each one's weight, [1 + parts].

        A weight is a number of steps, or of the entries that counted at them if tables were looked up.
        """
        sums = torch.stack([self._totals(self._sums[name]) for name in reached])
        steps = sums.new_tensor([self._steps, *self._part_steps()])
        sizes = sums.new_tensor([self._sizes[name] for name in reached])
        sizes = sizes[:, None].expand_as(sums).clone()
        weights = steps
        for k, name in enumerate(reached):
            if name in self._touched:  # rows a step; a table without any has a sum of 0
                rows = self._totals(self._touched[name]) / steps
                sizes[k] *= rows.clamp_min(1.0 / self._steps)
                weights = sizes.sum(0) * steps
        if self.reduce == "pooled":
            values = sums.sum(0) / sizes.sum(0)
        else:
            values = (sums / sizes).mean(0)
        return values / steps, weights

    def result(self) -> dict[str, Any]:
        """Return the result as a dict for JSON.

        It has the ``layers`` that gradients reached, their ``importance`` and the
        number of ``steps``. An importance is None if it is not finite. For resamples,
        ``parts`` has the ``steps`` of each part. For each layer it has the part's
        ``importance``, and its ``weights`` in a draw. Steps are assigned to parts in
        turn.
        """
        values, weights = {}, []
        for layer, names in self._names.items():
            reached_names = [name for name in names if name in self._sums]
            if reached_names:
                sums, weight = self._layer(reached_names)
                values[layer] = [v if math.isfinite(v) else None for v in sums.tolist()]
                weights.append(weight.tolist())
        parts = [
            {
                "steps": steps,
                "importance": [sums[k] for sums in values.values()],
                "weights": [weight[k] for weight in weights],
            }
            for k, steps in enumerate(self._part_steps(), 1)
        ]
        return {
            "layers": [*values],
            "importance": [sums[0] for sums in values.values()],
            "steps": self._steps,
            "parts": parts,
        }

    @property
    def parts(self) -> int:
        """Return the number of parts into which steps are divided for resampling."""
        return min(self._steps, PARTS)


def resample(result: Result, times: Sequence[int]) -> dict[str, Any]:
    """Return a result with each part's steps counted t_k times: sum_k t_k w_k I^k / sum_k t_k w_k.

    The weight w_k is the part's number of steps. For a layer with embedding tables it is the number of entries that
    counted in them, since its I^k is a mean over these. The result is the importance of the steps drawn, with one
    exception: with ``reduce="mean_of_tensors"`` a layer with a table and other tensors has means with a weight each.

    Args:
        result: as :meth:`SensitivityAccumulator.result` returns it.
        times: how often each part counts, t_k.

    Returns:
        ``layers``, ``importance`` and ``steps``, as in ``result``. An importance is
        None if that of a part is None.
    """
    parts = list(zip(times, result["parts"], strict=True))
    values: list[float | None] = []
    for k in range(len(result["layers"])):
        weights = [count * part["weights"][k] for count, part in parts]
        column = [part["importance"][k] for _, part in parts]
        complete = not any(value is None for value in column)
        values.append(
            math.fsum(map(math.prod, zip(weights, column, strict=True))) / sum(weights)
            if complete
            else None
        )
    return {
        "layers": result["layers"],
        "importance": values,
        "steps": sum(c * part["steps"] for c, part in parts),
    }


# --- sensitivity -----------------------------------------------------------------------------------------------

FROZEN = "frozen: its weights do not train"


def cumulative(importance: ArrayLike) -> NDArray[np.float64]:
    """Return the sums of the layers' importances I up to each layer, S_l = F_l / F_1 with F_l = sum_{k <= l} I_k, [L].

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

    >>> combine([[1.0, 2.0, 5.0], [1.0, 4.0, np.nan]], [3, 1]).tolist()
    [1.0, 2.5, nan]
    >>> combine([[1.0], [2.0]], [1.0, 0.0])
    Traceback (most recent call last):
        ...
    fl_core.errors.UsageError: clients' weights must all be above 0; got 0.

    Raises:
        UsageError: a weight is not above 0.
    """
    values, w = np.asarray(s, dtype=np.float64), np.asarray(weights, dtype=np.float64)
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
        tensors, reduce: as in :class:`~diagnostics.sensitivity.SensitivityAccumulator`. The
            estimator names the choice.

    Raises:
        UsageError: a choice is unknown (checked by ``Metric.settings``, and by
            ``one_pass``).
    """

    tensors: Tensors = "weights"
    reduce: Annotated[str, OneOf("reduce", REDUCE)] = "pooled"

    when: ClassVar[str] = "after"
    """The rows' variant: weights stay fixed, and (w g)^2 is averaged over the data's batches."""
    estimator: ClassVar[str] = "batch_mean"
    """A description in words of the steps whose importances are averaged."""
    of_tables: ClassVar[str] = "touched rows"
    """What the estimator says of embedding tables."""
    compares: ClassVar[bool] = False
    """False, because it does not compare clients. Its combined row is a mean."""

    def meter(self, layers: Sequence[Layer]) -> SensitivityAccumulator:
        return SensitivityAccumulator(layers, self.tensors, self.reduce)

    def rows(self, measurement: Measurement, readings: Sequence[Reading]) -> list[Row]:
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
        single_batch_clients = [r.subject.client for r in readings if r.n_batches == 1]
        if measurement.resamples and single_batch_clients:
            warn(
                f"one batch cannot be resampled, and {listing(single_batch_clients)} had one: "
                "measure in smaller batches (batch)"
            )
        resampling = measurement.resamples, measurement.seed
        return self.table(measurement.layers, clients, sizes, *resampling)

    def table(
        self,
        layers: Sequence[Layer],
        clients: Sequence[_Client],
        sizes: Mapping[str, int],
        resamples: int = 0,
        seed: int = 0,
    ) -> list[Row]:
        """Return rows from the clients' accumulated importances, then those of each client's resamples.

        Args:
            layers: all layers of the network, in order.
            clients: the clients' names, numbers of samples and accumulated importances.
            sizes: number of entries of each parameter, if known.
            resamples: number of resamples of each client's steps to add.
            seed: seed of the resamples.
        """
        rows: list[Row] = []
        values, reasons = [], []
        for client in clients:
            i, s, reasons_of_client = self._client(layers, client)
            values.append(s)
            reasons.append(reasons_of_client)
            common = {
                "client": client.name,
                "n_samples": client.n_samples,
                "n_train": client.n_train,
            }
            for k, layer in enumerate(layers):
                rows.append(
                    self._row(
                        layer, s[k], reasons_of_client[k], self.when, sizes, **common
                    )
                )
                unit = "loss^2"
                status = "" if math.isfinite(i[k]) else reasons_of_client[k]
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
                missing_values = [
                    (c.name, reasons_of_client[k])
                    for c, reasons_of_client in zip(clients, reasons, strict=True)
                    if reasons_of_client[k]
                ]
                status = ""
                if missing_values:
                    status = f"client {missing_values[0][0]!r}: {missing_values[0][1]}"
                rows.append(
                    self._row(layer, combined[k], status, self.when, sizes, **common)
                )
        for client in clients if resamples else ():
            parts = len(client.result.get("parts", ()))
            counts = draws(parts, resamples, seed, client.name)
            for number, times in enumerate(counts, 1):
                resampled = replace(client, result=resample(client.result, times))
                rows_of_draw = self.table(layers, [resampled], sizes)
                rows += mark_resample(rows_of_draw, number, parts)
        return rows

    def _client(
        self, layers: Sequence[Layer], client: _Client
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], list[str]]:
        """Return one client's I [L] and S [L], and for each layer why S has no value.

        The reason is empty for a layer with a value of S. Missing values are NaN.
        """
        importance_by_layer = dict(
            zip(client.result["layers"], client.result["importance"], strict=True)
        )
        trains = [bool(trainable_names(layer, self.tensors)) for layer in layers]
        reasons = [
            FROZEN
            if layer.used and tensors_of(layer, self.tensors) and not is_trainable
            else why_unreadable(
                layer,
                self.tensors,
                bool(layer.name in importance_by_layer or client.fault),
            )
            for layer, is_trainable in zip(layers, trains, strict=True)
        ]
        i = np.array(
            [importance_by_layer.get(layer.name) for layer in layers], dtype=np.float64
        )
        s = np.full(len(layers), np.nan)
        counted_layers = [k for k, reason in enumerate(reasons) if not reason]
        measurable_layers = [
            k for k, layer in enumerate(layers) if layer.used and trains[k]
        ]
        s[counted_layers] = cumulative(i[counted_layers])
        break_reason = ""
        if measurable_layers and measurable_layers[0] not in counted_layers:
            break_reason = f"no gradient reaches the first layer {layers[measurable_layers[0]].name!r}"
        for k in counted_layers:
            if not break_reason and not math.isfinite(i[k]):
                break_reason = (
                    client.fault
                    or f"the importance of layer {layers[k].name!r} is not finite"
                )
            if not break_reason and k == counted_layers[0] and i[k] == 0:
                break_reason = (
                    f"the importance of the first layer {layers[k].name!r} is 0"
                )
            if not break_reason and not math.isfinite(s[k]):
                break_reason = f"the sum up to layer {layers[k].name!r} overflows"
            if break_reason:
                s[k], reasons[k] = np.nan, break_reason
        return i, s, reasons

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
        labels = [self.estimator]
        if self.reduce == "mean_of_tensors":
            labels += ["mean of tensors"]
        if self.tensors == "all":
            labels += ["all tensors"]
        if set(names) & set(layer.tables):
            labels += [self.of_tables]
        return row_or_reason(
            "federation_sensitivity",
            float(value),
            status,
            layer=layer.name,
            variant=variant,
            estimator=", ".join(filter(None, labels)),
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
        results: client name -> ``SensitivityAccumulator.result()``, made with the same ``tensors`` and ``reduce``.
        layers: all layers of the network, in order.
        tensors, reduce: as for :class:`SensitivityAccumulator`.
        n_train: training samples of each client: its weight, and the samples that one epoch saw.
        sizes: number of entries of each parameter, for the rows' ``n_params``. Without
            them the rows have none.
        resamples: how many resamples of each client's steps to add, drawn with ``seed``; see
            :mod:`diagnostics.null`. Results without ``parts`` have none.

    Raises:
        UsageError: a choice is unknown, or a client has no training samples.
    """
    metric = _Recorded(tensors, reduce)
    check_fields(metric)
    clients = [
        _Client(name, n_train[name], n_train[name], result)
        for name, result in results.items()
    ]
    return metric.table(layers, clients, sizes or {}, resamples, seed)
