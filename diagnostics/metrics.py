"""The metrics by name: what each computes, what a high value means, and which variants it has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diagnostics import gradients, sensitivity, similarity
from diagnostics.capture import Batch, batches
from diagnostics.gradients import GradientMetric, Subject, Tick, placed, quiet
from diagnostics.hessian import hessian_trace
from fl_core.layers import Layer
from fl_core.losses import Loss
from fl_core.rows import Row, row

_COMMON = ("subjects", "layers", "loss", "batch", "seed", "mode", "tick")


@dataclass(frozen=True)
class Metric:
    """A metric by name.

    Attributes:
        compute: ``compute(subjects, layers, *, loss, batch, seed, mode, tick, **options) -> list[Row]``.
        description, direction: one line each; the direction says what a higher value means.
        variants: of its rows, the default first.
        shared: gives, for the same options, what reads a pass over the gradients together with other metrics.
        pairs: whether a value belongs to two clients.
    """

    name: str
    compute: Callable[..., list[Row]]
    description: str
    direction: str
    variants: tuple[str, ...]
    shared: Callable[..., GradientMetric | None] | None = None
    pairs: bool = False

    @property
    def variant(self) -> str:
        """The default variant."""
        return self.variants[0]

    @property
    def options(self) -> dict[str, Any]:
        """Names and defaults of the metric's own options."""
        parameters = inspect.signature(self.compute).parameters
        return {name: p.default for name, p in parameters.items() if name not in _COMMON}


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
    probes: int = 32,
    dtype: torch.dtype | None = None,
) -> list[Row]:
    """Two rows a client and layer: the trace of the layer's Hessian block over its parameters' number, and undivided.

    Both are signed; PLayer-FL, Eq. A.2, divided by the number of parameters as its section 5.1 says. The options are
    those of :func:`diagnostics.hessian.hessian_trace`.
    """
    found: list[Row] = []
    for subject in subjects:
        options: dict[str, Any] = {"estimator": estimator, "probes": probes, "dtype": dtype, "mode": mode}
        data = _Placed(subject, batch)
        for result in hessian_trace(subject.model, data, layers, loss=loss, batch=batch, seed=seed, **options):
            ok = result.status == "ok"
            for variant, value, stderr in (
                ("per_parameter", result.per_parameter, result.stderr_per_parameter),
                ("absolute", result.trace, result.stderr),
            ):
                found.append(
                    row(
                        "hessian_trace",
                        value if ok else None,
                        status=result.status,
                        client=subject.client,
                        layer=result.layer,
                        variant=variant,
                        stderr=stderr if ok else None,
                        estimator=result.estimator,
                        unit="loss/weight^2",
                        n_params=result.n_params,
                        n_samples=result.n_samples,
                        n_train=subject.n_train,
                    )
                )
        tick(subject.client)
    return found


class _Placed:
    """A subject's batches, where its model is and in the model's type."""

    def __init__(self, subject: Subject, batch: int) -> None:
        self._subject, self._batch = subject, batch

    def __iter__(self) -> Iterator[Batch]:
        for x, y in batches(self._subject.data, self._batch):
            x = placed(self._subject.model, x)
            yield x, y.to(x.device)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "grad_variance",
            gradients.grad_variance,
            "variance over the entries of a layer's weight gradient",
            "higher = the entries of the gradient are spread wider",
            gradients.REDUCTIONS,
            shared=gradients.GradVariance,
        ),
        Metric(
            "hessian_trace",
            hessian_rows,
            "trace of a layer's block of the loss's Hessian, exact where the network allows it",
            "higher = the loss curves more upwards in the layer's weights",
            ("per_parameter", "absolute"),
        ),
        Metric(
            "cka",
            similarity.cka,
            "linear CKA between the clients' representations of the same samples",
            "higher = more similar; 1 = same",
            ("flatten",),
            pairs=True,
        ),
        Metric(
            "federation_sensitivity",
            sensitivity.federation_sensitivity,
            "importance of the layers up to one, relative to the first layer",
            "higher = the layers up to here matter more to the loss; 1 at the first layer",
            (*sensitivity.WHEN, "importance"),
            shared=sensitivity.sharing,
        ),
    )
}
