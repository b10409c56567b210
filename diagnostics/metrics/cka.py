"""CKA: how alike the clients' models represent the same samples, layer by layer, by the linear kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fl_core.bounds import OneOf
from fl_core.errors import UsageError
from fl_core.rows import Row

from ..representation import moments
from ..representation.comparison import LayerComparison, SimilarityOptions
from ..representation.gram import ESTIMATORS
from ..representation.passes import by_grams, by_package, by_products
from .base import Measurement, metric

BACKENDS = ("fedlayers", "torch_cka")


@dataclass(frozen=True)
class Cka(SimilarityOptions):
    """The options of CKA, in addition to :class:`~diagnostics.representation.comparison.SimilarityOptions`.

    Attributes:
        estimator: ``"full"`` (default) or ``"minibatch"``, whose HSICs are of ``batch`` samples each. The package
            torch-cka has only the latter.
        backend: with ``"torch_cka"`` the package of that name computes the values.

    Raises:
        UsageError: a name is unknown, or options do not go together.
    """

    estimator: Annotated[str | None, OneOf("estimator", ESTIMATORS)] = None
    backend: Annotated[str, OneOf("backend", BACKENDS)] = "fedlayers"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend == "torch_cka":
            self._needs("estimator", self.way, "minibatch")
            self._needs("positions", self.positions, "flatten")
        elif self.unbiased and self.positions == "samples":
            raise UsageError(
                "positions='samples' must have estimator 'full'; got 'minibatch'. Its Gram matrices are too large."
            )

    @property
    def way(self) -> str:
        """The estimator, by default the one of the backend."""
        return self.estimator or (
            "minibatch" if self.backend == "torch_cka" else "full"
        )

    @property
    def unbiased(self) -> bool:
        return self.way == "minibatch"

    def check(self, measurement: Measurement) -> None:
        super().check(measurement)
        if self.backend == "torch_cka":
            self._needs("mode", measurement.mode, "eval")

    def _needs(self, what: str, value: str, only: str) -> None:
        if value != only:
            raise UsageError(f"torch_cka must have {what} {only!r}; got {value!r}.")


@metric(
    description="linear CKA between the clients' representations of the same samples",
    direction="higher = more similar; 1 = same",
    how="all pairs of clients, full or unbiased minibatch; also of any two layers, and by torch-cka",
    variants=("flatten", "samples", "mean"),
    look={
        "label": "mean 1 − CKA to the others",
        "meaning": "0 = same representation",
        "beside": ("matrices",),
    },
    pairs=True,
    requires="samples",
    features="probe",
)
def cka(measurement: Measurement, options: Cka) -> list[Row]:
    """Return one row a layer and pair of clients (in the order given): linear CKA, 1 = same.

    See :mod:`diagnostics.representation.gram`. Every model sees the same samples in the same order. A
    loader is read once, so it may shuffle. If one forward pass calls a module several times, its last call counts.

    Memory: a forward pass of ``batch`` samples. Each model and layer has n x n numbers (``"minibatch"``: n x batch). It
        has the features instead if they are fewer: d (M + 1) / 2 < n for M models. With ``positions="samples"`` it is M
        d^2 / 2.

    Raises:
        UsageError: the probe does not fit the models.
    """
    comparison = LayerComparison("cka", measurement, options)
    if options.backend == "torch_cka":
        return comparison.rows(
            *by_package(comparison), estimator="minibatch, torch_cka"
        )
    if options.positions == "samples":
        return comparison.rows(
            *by_products(comparison, moments.LINEAR_CKA), estimator=options.way
        )
    return comparison.rows(*by_grams(comparison, options.way), estimator=options.way)
