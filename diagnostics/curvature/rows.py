"""Rows of the curvature metrics: the trace of each layer's Hessian block, and its largest eigenvalues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fl_core.errors import RunError, UsageError, check_known
from fl_core.layers import Layer
from fl_core.rows import Row, row
from fl_core.training.losses import Loss

from ..capture import Batch, Data, batches, whole
from ..gradients import Subject, Tick, placed, quiet
from ..hessian import TraceResult, check_probes, check_way, hessian_trace, released_norm
from ..spectrum import AT, Density, check_wanted, hessian_spectrum, spectral_density

VARIANTS = ("trace", "released")
UNIT = "loss/weight^2"


def hessian_rows(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss,
    batch: int = 256,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
    estimator: str = "auto",
    probes: int | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "fedlayers",
    variant: str = "trace",
) -> list[Row]:
    """Two rows a client and layer: the trace of the layer's Hessian block over its parameters' number, and undivided.

    Both are signed; PLayer-FL, Eq. A.2, divided by the number of parameters as its section 5.1 says. The options are
    those of :func:`diagnostics.hessian.hessian_trace`. With ``variant="released"``, one row instead: the nuclear norm
    that the authors' released code computes (:func:`diagnostics.curvature.released.released`), which is no trace.

    Memory: the activations of ``batch`` samples and the graph of their derivatives; where the model is, one client's
    samples at a time.

    Raises:
        UsageError: an unknown option, or one that the variant does not have.
    """
    check_known("variant of hessian_trace", variant, VARIANTS)
    if variant == "released" and (estimator, backend) != ("auto", "fedlayers"):
        raise UsageError("variant 'released' is one computation: it has no estimator and no backend to choose")
    if variant == "released":
        check_probes(probes, 1)
    else:
        check_way(estimator, probes, backend, mode)
    found: list[Row] = []
    for subject in subjects:
        data = _data_of(subject)
        options: dict[str, Any] = {"loss": loss, "batch": batch, "seed": seed, "mode": mode}
        options |= {"probes": probes, "dtype": dtype}
        if variant == "released":
            results = released_norm(subject.model, data, layers, **options)
        else:
            options |= {"estimator": estimator, "backend": backend}
            results = hessian_trace(subject.model, data, layers, **options)
        for result in results:
            found += _trace_rows(subject, result, variant)
        tick(subject.client)
    return found


def _trace_rows(subject: Subject, result: TraceResult, variant: str) -> list[Row]:
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


def spectrum_rows(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss,
    batch: int = 256,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
    k: int = 3,
    tol: float = 1e-3,
    density: int = 0,
    dtype: torch.dtype | None = None,
) -> list[Row]:
    """``k`` rows a client and layer, variants ``top1`` to ``topk``: the largest eigenvalues of the layer's block.

    Signed, in descending order. ``stderr`` holds the norm of the residual, which bounds the error. The options are
    those of :func:`diagnostics.spectrum.hessian_spectrum`, and ``density``: with so many Lanczos steps (50 are usual; 0
    for none) :func:`diagnostics.spectrum.spectral_density` adds how all eigenvalues are distributed, rows with variant
    ``at`` and an eigenvalue, whose value in [0, 1] is the share of the layer's eigenvalues there. They sum to 1.

    Memory: the activations of ``batch`` samples and the graph of their derivatives; where the model is, one client's
    samples at a time; of one layer at a time the Lanczos vectors, each as long as its weights: about 20, with
    ``density`` as many as steps; of a small layer its block.

    Raises:
        UsageError: a density of 1 step or less than none, and as in :func:`diagnostics.spectrum.hessian_spectrum`.
    """
    if density < 0 or density == 1:
        raise UsageError(f"a density of {density} steps; at least 2 are needed, or 0 for none")
    check_wanted(k, tol)
    found: list[Row] = []
    for subject in subjects:
        data = _data_of(subject)
        results = hessian_spectrum(
            subject.model, data, layers, loss=loss, k=k, tol=tol, batch=batch, seed=seed, mode=mode,
            dtype=dtype,
        )  # fmt: skip
        for rank in range(k):
            for result in results:
                status = result.status
                if status == "ok" and rank >= len(result.eigenvalues):
                    status = f"layer {result.layer!r} has {len(result.eigenvalues)} eigenvalues"
                ok = status == "ok"
                found.append(
                    row(
                        "hessian_spectrum",
                        result.eigenvalues[rank] if ok else None,
                        status=status,
                        client=subject.client,
                        layer=result.layer,
                        variant=f"top{rank + 1}",
                        stderr=result.errors[rank] if ok else None,
                        estimator=result.estimator,
                        unit=UNIT,
                        n_params=result.n_params,
                        n_samples=result.n_samples,
                        n_train=subject.n_train,
                    )
                )
        if density:
            by_name = {layer.name: layer for layer in layers}
            for result in results:
                about: dict[str, Any] = {
                    "client": subject.client, "layer": result.layer, "unit": "share", "n_params": result.n_params,
                    "n_samples": result.n_samples, "n_train": subject.n_train,
                    "estimator": f"lanczos quadrature(steps={density})",
                }  # fmt: skip
                shares, status = {}, result.status
                if status == "ok":
                    try:
                        shares = _shares(
                            spectral_density(
                                subject.model, data, by_name[result.layer], loss=loss, steps=density,
                                batch=batch, seed=seed, mode=mode, dtype=dtype,
                            )
                        )  # fmt: skip
                    except RunError as error:
                        status = str(error)
                found += [row("hessian_spectrum", share, variant=f"{AT}{at}", **about) for at, share in shares.items()]
                if status != "ok":
                    found.append(row("hessian_spectrum", None, status=status, variant=AT.strip(), **about))
        tick(subject.client)
    return found


def _shares(density: Density) -> dict[str, float]:
    """The share of the eigenvalues at each node of the quadrature, in six digits, from the smallest."""
    found: dict[str, float] = {}
    for node, weight in sorted(zip(density.nodes.ravel(), density.weights.ravel(), strict=True)):
        if weight > 0:
            at = f"{node:.6g}"
            found[at] = found.get(at, 0.0) + float(weight) / len(density.nodes)
    return found


def _data_of(subject: Subject) -> Data:
    """A subject's data where its model is and in the model's type: a pair, or a loader's batches as they come."""
    pair = whole(subject.data)
    if pair is None:
        return _Loaded(subject)
    x = placed(subject.model, pair[0])
    return x, pair[1].to(x.device)


class _Loaded:
    """A loader's batches, where the subject's model is and in the model's type."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def __iter__(self) -> Iterator[Batch]:
        for x, y in batches(self._subject.data):
            x = placed(self._subject.model, x)
            yield x, y.to(x.device)
