"""Metrics of curvature: the trace of a layer's Hessian, and its eigenvalues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch

from fl_core.bounds import ABOVE_0, at_least
from fl_core.errors import warn
from fl_core.rows import Row, row

from ..curvature import spectrum, trace
from ..curvature.trace import check_way
from .base import Measurement, metric

UNIT = "loss/weight^2"


@dataclass(frozen=True)
class HessianTrace:
    """The options of the Hessian trace.

    Attributes:
        estimator, probes, dtype, backend: as of :func:`diagnostics.curvature.trace.hessian_trace`.

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
    price="middle",
    description="trace of a layer's block of the loss's Hessian, exact where the network allows it",
    direction="higher = the loss curves more upwards in the layer's weights",
    how=(
        "exact where the network is piecewise linear downstream, decided layer by layer; elsewhere "
        "Hutchinson's estimate with its standard error. Layers without an exact value, as those before "
        "attention or a smooth activation, take 2 to 32 Hessian-vector products together, fewer for large models. "
        '`backend="pyhessian"` cross-checks'
    ),
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
        UsageError: as in :func:`diagnostics.curvature.trace.hessian_trace`.
    """
    rows, unclear, count = [], 0, 0
    how: dict[str, Any] = {
        name: getattr(measurement, name) for name in ("loss", "batch", "seed", "mode")
    }
    for subject in measurement.subjects:
        results = trace.hessian_trace(
            subject.model, subject.data, measurement.layers, **how, **vars(options)
        )
        unclear += sum(result.stderr > abs(result.trace) for result in results)
        count += len(results)
        for result in results:
            note = (
                "" if result.note in ("", "as asked") else f"; not exact: {result.note}"
            )
            about: dict[str, Any] = {
                "status": result.status, "client": subject.client, "layer": result.layer, "unit": UNIT,
                "n_params": result.n_params, "n_samples": result.n_samples, "n_train": subject.n_train,
                "estimator": result.estimator + note * (result.status == "ok"),
            }  # fmt: skip
            for variant, value, error in (
                ("per_parameter", result.per_parameter, result.stderr_per_parameter),
                ("absolute", result.trace, result.stderr),
            ):
                rows.append(
                    row("hessian_trace", value, variant=variant, stderr=error, **about)
                )
        measurement.tick(subject.client)
    if unclear:
        warn(
            f"hessian_trace is smaller than its standard error in {unclear} of {count} values. More probes lower "
            "it and take longer, as options={'hessian_trace': {'probes': 64}}."
        )
    return rows


@dataclass(frozen=True)
class HessianSpectrum:
    """The options of the Hessian spectrum: how many eigenvalues, and how precisely they are found.

    Attributes:
        k, tol, dtype: as in :func:`diagnostics.curvature.spectrum.hessian_spectrum`.

    Raises:
        UsageError: there is less than 1 eigenvalue, or the tolerance is not above 0.
    """

    k: Annotated[int, at_least(1)] = 3
    tol: Annotated[float, ABOVE_0] = 1e-3
    dtype: torch.dtype | None = None


@metric(
    price="dear",
    description="largest eigenvalues of a layer's block of the loss's Hessian",
    direction="higher = the loss curves more upwards along the sharpest direction of the layer's weights",
    how=("by Lanczos, each with its residual"),
    variants=("top1", "top2", "top3"),
    separable=True,
    look={
        "label": "Hessian eigenvalue",
        "meaning": "higher = sharper",
        "log": True,
    },
)
def hessian_spectrum(measurement: Measurement, options: HessianSpectrum) -> list[Row]:
    """Return ``k`` rows a client and layer, variants ``top1`` to ``topk``: the largest eigenvalues of the block.

    They are signed and in descending order. The column ``stderr`` holds the norm of the residual, a bound of the error.

    Memory: the activations of ``batch`` samples and the graph of their derivatives. The model's device holds one
    client's samples at a time. One layer at a time has Lanczos vectors, each as long as its weights. There are about
    20. A small layer has its block instead.

    Raises:
        UsageError: as in :func:`diagnostics.curvature.spectrum.hessian_spectrum`.
    """
    rows: list[Row] = []
    layers, k = measurement.layers, options.k
    how: dict[str, Any] = {
        name: getattr(measurement, name) for name in ("loss", "batch", "seed", "mode")
    }
    how["dtype"] = options.dtype
    for subject in measurement.subjects:
        results = spectrum.hessian_spectrum(
            subject.model, subject.data, layers, k=k, tol=options.tol, **how
        )
        for rank in range(k):
            for result in results:
                status = result.status
                if status == "ok" and rank >= len(result.eigenvalues):
                    status = f"layer {result.layer!r} has {len(result.eigenvalues)} eigenvalues"
                ok = status == "ok"
                rows.append(
                    row(
                        "hessian_spectrum",
                        result.eigenvalues[rank] if ok else None,
                        status=status,
                        client=subject.client,
                        layer=result.layer,
                        variant=f"top{rank + 1}",
                        stderr=result.errors[rank] if ok else None,
                        estimator=result.estimator,
                        unit="loss/weight^2",
                        n_params=result.n_params,
                        n_samples=result.n_samples,
                        n_train=subject.n_train,
                    )
                )
        measurement.tick(subject.client)
    return rows
