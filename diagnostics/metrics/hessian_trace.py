"""Hessian trace: how sharply the loss curves in a layer's weights (PLayer-FL, Eq. A.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fl_core.errors import UsageError, check_known
from fl_core.rows import Row, row

from ..client_model import ClientModel, placed_data
from ..curvature import hessian
from ..curvature.hessian import TraceResult, check_probes, check_way
from .base import Measurement, metric

VARIANTS = ("trace", "released")
UNIT = "loss/weight^2"


@dataclass(frozen=True)
class HessianTrace:
    """The options of the Hessian trace, as explained at :func:`diagnostics.curvature.hessian.hessian_trace`.

    Attributes:
        variant: ``"trace"``, or ``"released"``: the nuclear norm that PLayer-FL's released code computes
            (:func:`diagnostics.curvature.released.released`). It is not a trace and has no estimator or backend.

    Raises:
        UsageError: a choice is unknown, there are too few probes, or the variant lacks an option.
    """

    estimator: str = "auto"
    probes: int | None = None
    dtype: torch.dtype | None = None
    backend: str = "fedlayers"
    variant: str = "trace"

    def __post_init__(self) -> None:
        check_known("variant", self.variant, VARIANTS)
        if self.variant == "released" and (self.estimator, self.backend) != ("auto", "fedlayers"):
            raise UsageError("variant 'released' has no estimator and no backend to choose. Leave out both options.")
        if self.variant == "released":
            check_probes(self.probes, 1)
        else:
            check_way(self.estimator, self.probes, self.backend, "eval")

    def check(self, measurement: Measurement) -> None:
        """Refuse a mode that the backend does not support."""
        if self.variant != "released":
            check_way(self.estimator, self.probes, self.backend, measurement.mode)


@metric(
    description="trace of a layer's block of the loss's Hessian, exact where the network allows it",
    direction="higher = the loss curves more upwards in the layer's weights",
    how=(
        "exact where the network is piecewise linear downstream, decided layer by layer; elsewhere "
        'Hutchinson\'s estimate with its standard error; `estimator="fast"` takes one backward pass; '
        '`variant="released"` is the nuclear norm of the authors\' code; `backend="pyhessian"` or '
        '`"curvlinops"` cross-checks'
    ),
    unit="loss/weight^2",
    variants=("per_parameter", "absolute", "released"),
    look={"label": "Hessian trace", "meaning": "higher = sharper", "log": True},
)
def hessian_trace(measurement: Measurement, options: HessianTrace) -> list[Row]:
    """Return two rows a client and layer: the trace of the layer's Hessian block, per parameter and undivided.

    Both are signed. PLayer-FL's Eq. A.2 is divided by the number of parameters, as its section 5.1 says. With
    ``variant="released"`` there is one row instead, see :class:`HessianTrace`.

    Memory: the activations of ``batch`` samples and the graph of their derivatives. The model's device holds one
    client's samples at a time.

    Raises:
        UsageError: as in :func:`diagnostics.curvature.hessian.hessian_trace`.
    """
    rows: list[Row] = []
    how: dict[str, Any] = {"loss": measurement.loss, "batch": measurement.batch, "seed": measurement.seed}
    how |= {"mode": measurement.mode, "probes": options.probes, "dtype": options.dtype}
    for subject in measurement.subjects:
        data = placed_data(subject)
        if options.variant == "released":
            results = hessian.released_norm(subject.model, data, measurement.layers, **how)
        else:
            way: dict[str, Any] = {"estimator": options.estimator, "backend": options.backend}
            results = hessian.hessian_trace(subject.model, data, measurement.layers, **how, **way)
        for result in results:
            rows += _trace_rows(subject, result, options.variant)
        measurement.tick(subject.client)
    return rows


def _trace_rows(subject: ClientModel, result: TraceResult, variant: str) -> list[Row]:
    ok = result.status == "ok"
    asked = result.note in ("", "as asked")
    values = {
        "per_parameter": (result.per_parameter, result.stderr_per_parameter),
        "absolute": (result.trace, result.stderr),
    }
    if variant == "released":
        values = {"released": (result.trace, result.stderr)}
    return [
        row(
            "hessian_trace",
            value if ok else None,
            status=result.status,
            client=subject.client,
            layer=result.layer,
            variant=name,
            stderr=stderr if ok else None,
            estimator=result.estimator + ("" if asked or not ok else f"; not exact: {result.note}"),
            unit=UNIT,
            n_params=result.n_params,
            n_samples=result.n_samples,
            n_train=subject.n_train,
        )
        for name, (value, stderr) in values.items()
    ]
