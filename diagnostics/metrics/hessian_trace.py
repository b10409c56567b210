"""Hessian trace: how sharply the loss curves in a layer's weights (PLayer-FL, Eq. A.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fl_core.rows import Row, row

from ..client_model import place_data
from ..curvature import hessian
from ..curvature.hessian import TraceResult, check_way
from .base import Measurement, metric

UNIT = "loss/weight^2"
Numbers = Callable[[TraceResult], tuple[float, float]]
VARIANTS: dict[str, Numbers] = {
    "per_parameter": lambda result: (result.per_parameter, result.stderr_per_parameter),
    "absolute": lambda result: (result.trace, result.stderr),
}


@dataclass(frozen=True)
class HessianTrace:
    """The options of the Hessian trace.

    Attributes:
        estimator, probes, dtype, backend: as of :func:`diagnostics.curvature.hessian.hessian_trace`.

    Raises:
        UsageError: a choice is unknown, or there are too few probes.
    """

    estimator: str = "auto"
    probes: int | None = None
    dtype: torch.dtype | None = None
    backend: str = "fedlayers"

    def __post_init__(self) -> None:
        check_way(self.estimator, self.probes, self.backend, "eval")

    def check(self, measurement: Measurement) -> None:
        """Refuse a mode that the backend does not support."""
        check_way(self.estimator, self.probes, self.backend, measurement.mode)


@metric(
    description="trace of a layer's block of the loss's Hessian, exact where the network allows it",
    direction="higher = the loss curves more upwards in the layer's weights",
    how=(
        "exact where the network is piecewise linear downstream, decided layer by layer; elsewhere "
        'Hutchinson\'s estimate with its standard error. `estimator="fast"` takes one backward pass for all '
        "exact layers together. Every other layer, as one before attention or a smooth activation, takes 8 "
        "Hessian-vector products, or 32 where samples mix. "
        '`backend="pyhessian"` or `"curvlinops"` cross-checks'
    ),
    unit="loss/weight^2",
    variants=("per_parameter", "absolute"),
    separable=True,
    look={"label": "Hessian trace", "meaning": "higher = sharper", "log": True},
)
def hessian_trace(measurement: Measurement, options: HessianTrace) -> list[Row]:
    """Return two rows a client and layer: the trace of the layer's Hessian block, per parameter and undivided.

    Both are signed. PLayer-FL's Eq. A.2 is divided by the number of parameters, as its section 5.1 says.

    Memory: the activations of ``batch`` samples and the graph of their derivatives. The model's device holds one
    client's samples at a time.

    Raises:
        UsageError: as in :func:`diagnostics.curvature.hessian.hessian_trace`.
    """
    shared: dict[str, Any] = {
        "loss": measurement.loss,
        "batch": measurement.batch,
        "seed": measurement.seed,
    }
    find = partial(
        hessian.hessian_trace,
        layers=measurement.layers,
        mode=measurement.mode,
        **shared,
        **vars(options),
    )
    return rows_of(measurement, find)


def rows_of(
    measurement: Measurement,
    find: Callable[..., Sequence[TraceResult]],
    variants: Mapping[str, Numbers] = VARIANTS,
) -> list[Row]:
    """Return a row a client, layer and variant.

    Args:
        find: (model, its data) -> the results of all layers.
        variants: a result's value and standard error, by the row's variant.
    """
    rows = []
    for subject in measurement.subjects:
        for result in find(subject.model, place_data(subject)):
            ok, asked = result.status == "ok", result.note in ("", "as asked")
            for name, numbers in variants.items():
                value, stderr = numbers(result) if ok else (None, None)
                rows.append(
                    row(
                        "hessian_trace",
                        value,
                        status=result.status,
                        client=subject.client,
                        layer=result.layer,
                        variant=name,
                        stderr=stderr,
                        estimator=result.estimator
                        + ("" if asked or not ok else f"; not exact: {result.note}"),
                        unit=UNIT,
                        n_params=result.n_params,
                        n_samples=result.n_samples,
                        n_train=subject.n_train,
                    )
                )
        measurement.tick(subject.client)
    return rows
