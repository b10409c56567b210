"""How alike the clients' models represent the same samples, layer by layer, in one pass over all pairs of clients."""

from __future__ import annotations

from collections.abc import Sequence

from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer
from fl_core.rows import Row
from fl_core.training.losses import Loss

from .capture import Data
from .gradients import Subject, Tick, quiet
from .representation import moments as moments
from .representation.gram import BANDWIDTH, ESTIMATORS, check_bandwidth, linear_cka
from .representation.passes import by_grams, by_package, by_products, by_shifts
from .representation.probe import POSITIONS, PROBE, probe_set, shared_probe
from .representation.rows import Request

__all__ = [
    "POSITIONS",
    "PROBE",
    "cca",
    "cka",
    "linear_cka",
    "probe_set",
    "procrustes",
    "rbf_cka",
    "shared_probe",
    "svcca",
]

BACKENDS = ("fedlayers", "torch_cka")
RADIAL = ("flatten", "mean")
PROCRUSTES = ("flatten", "released", "samples", "mean")
"""Treatments of positions by the Procrustes angle; ``released`` is what PLayer-FL's authors measured."""


def cka(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss | None = None,
    batch: int | None = 256,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
    probe: Data | None = None,
    estimator: str | None = None,
    samples: int = PROBE,
    positions: str = "flatten",
    against: str | Sequence[str] = (),
    backend: str = "fedlayers",
) -> list[Row]:
    """One row a layer and pair of clients (in the order given): linear CKA, 1 = same.

    See :func:`diagnostics.representation.gram.linear_cka`. Every model sees the same samples in the same order: a
    loader is read once, so it may shuffle. A module that one forward pass calls several times is represented by its
    last call.

    Memory: a forward pass of ``batch`` samples; per model and layer n x n numbers (``"minibatch"``: n x batch), or
    the features where those are fewer: d (M + 1) / 2 < n for M models; with ``positions="samples"`` M d^2 / 2.

    Args:
        batch: samples per forward pass; with ``"minibatch"`` also samples per HSIC.
        probe: the samples. Default: the first ``samples`` of the clients' own data, equally many of each.
        estimator: ``"full"`` (default) or ``"minibatch"``, which is all that torch-cka has.
        positions: of convolutions and token sequences, and the rows' variant. ``"flatten"``: channels and positions
            together are the features; ``"samples"``: samples x positions are the rows and channels the features, by
            the full estimator; ``"mean"``: channels, averaged over the positions.
        against: names of layers among ``layers``; adds rows that compare every other layer with each of them, between
            every two clients in both orders and within each, variant ``"<positions>, against <layer>"``: of
            ``client`` the row's layer, of ``client_b`` that one.
        backend: ``"torch_cka"`` has the package of that name compute the values.
        loss: not used.

    Raises:
        UsageError: an unknown name, a ``batch`` below 4 with ``"minibatch"``, a probe that does not fit, or options
            that do not go together.
    """
    check_known("backend of CKA", backend, BACKENDS)
    package = backend == "torch_cka"
    estimator = estimator or ("minibatch" if package else "full")
    check_known("estimator of CKA", estimator, ESTIMATORS)
    unbiased = estimator == "minibatch"
    request = Request(
        "cka", subjects, layers, batch, seed, mode, tick, probe, samples, positions, against, unbiased=unbiased
    )
    if package:
        needs = (("estimator", estimator, "minibatch"), ("mode", mode, "eval"), ("positions", positions, "flatten"))
        for what, given, only in needs:
            if given != only:
                raise UsageError(f"torch_cka computes with {what} {only!r} only, not {given!r}")
        return request.rows(*by_package(request), estimator="minibatch, torch_cka")
    if unbiased and positions == "samples":
        raise UsageError("positions 'samples' go with estimator 'full'; a Gram matrix over positions is too large")
    if positions == "samples":
        return request.rows(*by_products(request, moments.LINEAR_CKA), estimator=estimator)
    return request.rows(*by_grams(request, estimator), estimator=estimator)


def rbf_cka(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss | None = None,
    batch: int | None = 256,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
    probe: Data | None = None,
    estimator: str = "full",
    bandwidth: float = BANDWIDTH,
    samples: int = PROBE,
    positions: str = "flatten",
    against: str | Sequence[str] = (),
) -> list[Row]:
    """As :func:`cka` with a radial kernel, see :func:`diagnostics.representation.gram.rbf_cka`; 1 = same.

    Memory: a forward pass of ``batch`` samples; per model and layer n x n numbers (``"minibatch"``: n x batch).

    Args:
        bandwidth: of the kernel, as a fraction of the median distance between samples; stands in the estimator.
        positions: ``"flatten"`` or ``"mean"``.

    Raises:
        UsageError: as :func:`cka`, or a bandwidth that is not above 0.
    """
    check_known("estimator of CKA", estimator, ESTIMATORS)
    unbiased = estimator == "minibatch"
    request = Request(
        "rbf_cka", subjects, layers, batch, seed, mode, tick, probe, samples, positions, against, unbiased, RADIAL
    )
    found = by_grams(request, estimator, check_bandwidth(bandwidth))
    return request.rows(*found, estimator=f"{estimator}, bandwidth {bandwidth:g} x median distance")


def procrustes(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss | None = None,
    batch: int | None = 256,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
    probe: Data | None = None,
    samples: int = PROBE,
    positions: str = "flatten",
    against: str | Sequence[str] = (),
) -> list[Row]:
    """As :func:`cka`, the orthogonal Procrustes angle in radians: 0 = same up to a rotation, pi / 2 = unrelated.

    See :func:`diagnostics.representation.moments.procrustes_distance`.

    Memory: a forward pass of ``batch`` samples; per model and layer n x min(n, d) numbers.

    Args:
        positions: as in :func:`cka`, or ``"released"``, which is what PLayer-FL's authors computed under the name of
            sample similarity: of convolutions the least angle over all circular shifts of one side's maps, samples
            x positions being the rows (:func:`diagnostics.representation.shifts.shifted_procrustes`), of token
            sequences the angle of the sums over tokens (padding included; theirs was masked), else the
            plain angle. Their figures added 0.5 to layers after convolutions; this does not. It holds the
            maps of one layer of all models, and passes the probe once a layer.

    Raises:
        UsageError: as :func:`cka`.
    """
    request = Request(
        "procrustes", subjects, layers, batch, seed, mode, tick, probe, samples, positions, against, allowed=PROCRUSTES
    )
    if positions == "released":
        return request.rows(*by_shifts(request), estimator="full, least over shifts", unit="rad")
    return request.rows(*by_products(request, moments.PROCRUSTES), estimator="full", unit="rad")


def cca(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss | None = None,
    batch: int | None = 256,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
    probe: Data | None = None,
    samples: int = PROBE,
    positions: str = "flatten",
    against: str | Sequence[str] = (),
) -> list[Row]:
    """As :func:`cka`, the mean canonical correlation in [0, 1]; 1 = same up to a linear map.

    See :func:`diagnostics.representation.moments.mean_cca`. A layer with as many features as samples has no value: use
    more samples, ``positions="samples"`` or ``"mean"``, or :func:`svcca`.

    Memory: a forward pass of ``batch`` samples; per model and layer n x min(n, d) numbers; with ``positions="samples"``
    M d^2 / 2 for M models.

    Raises:
        UsageError: as :func:`cka`.
    """
    request = Request("cca", subjects, layers, batch, seed, mode, tick, probe, samples, positions, against)
    return request.rows(*by_products(request, moments.CCA), estimator="full")


def svcca(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss | None = None,
    batch: int | None = 256,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
    probe: Data | None = None,
    samples: int = PROBE,
    positions: str = "flatten",
    against: str | Sequence[str] = (),
    variance: float = moments.VARIANCE,
) -> list[Row]:
    """As :func:`cca` on the principal directions that hold ``variance`` of each side, which the estimator states.

    See :func:`diagnostics.representation.moments.svcca`.

    Memory: as of :func:`cca`.

    Raises:
        UsageError: as :func:`cka`, or a variance that is not between 0 and 1.
    """
    measure = moments.svcca_measure(variance)
    request = Request("svcca", subjects, layers, batch, seed, mode, tick, probe, samples, positions, against)
    return request.rows(*by_products(request, measure), estimator=f"full, {100 * variance:g} % of the variance")
