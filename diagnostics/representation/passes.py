"""Passes of probe samples through all clients' models that give the values of all pairs at all layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .comparison import Faults, LayerComparison, Spot, Value
from .gram import Recorder, Summary, hsic
from .moments import Measure, Moments, StoredFeatures
from .probe import NoValue, Place, arrange_positions
from .torch_cka import compare_layers


def _none(a: Spot, b: Spot) -> float | str:
    return "nothing to compare"


def unseen(comparison: LayerComparison) -> tuple[Faults, Value]:
    """Return no values, as for fewer than two models, and tell the progress of every client."""
    for subject in comparison.subjects:
        comparison.measurement.tick(subject.client)
    return {}, _none


def by_grams(
    comparison: LayerComparison, estimator: str, bandwidth: float | None = None
) -> tuple[Faults, Value]:
    """Return values from Gram matrices, one client after another; features are summarised as they arrive."""
    if comparison.empty:
        return unseen(comparison)
    models = None if comparison.across else len(comparison.subjects)
    recorders = {
        path: Recorder(comparison.where, estimator, models, bandwidth)
        for path in comparison.paths
    }
    summaries: dict[Spot, Summary] = {}
    faults: dict[Spot, str] = {}

    def take(path: str, place: Place, module: nn.Module, output: Tensor) -> None:
        try:
            recorders[path].take(
                *place,
                arrange_positions(module, output, place, comparison.options.positions),
            )
        except NoValue as reason:
            recorders[path].fault = str(reason)

    for client, subject in enumerate(comparison.subjects):
        for recorder in recorders.values():
            recorder.begin()
        comparison.watch(subject, take)
        for path, recorder in recorders.items():
            kept = recorder.summarise()
            if isinstance(kept, str):
                faults[path, client] = kept
            else:
                summaries[path, client] = kept
        comparison.measurement.tick(subject.client)
    together = (
        [list(summaries)]
        if comparison.across
        else [[s for s in summaries if s[0] == path] for path in comparison.paths]
    )
    place = {
        spot: (group, k)
        for group, spots in enumerate(together)
        for k, spot in enumerate(spots)
    }
    products = [
        hsic([summaries[spot] for spot in spots]).cpu() if spots else torch.empty(0, 0)
        for spots in together
    ]

    def value(a: Spot, b: Spot) -> float:
        (group, i), (_, j) = place[a], place[b]
        h = products[group]
        return float(h[i, j] / (h[i, i] * h[j, j]).sqrt())

    return faults, value


def by_package(comparison: LayerComparison) -> tuple[Faults, Value]:
    """Return CKA computed by the package torch-cka, for features that this package's own pass finds sound."""
    faults, _ = by_grams(comparison, "minibatch")

    def value(a: Spot, b: Spot) -> float | str:
        (path_a, left), (path_b, right) = a, b
        models = comparison.subjects
        return compare_layers(
            models[left],
            path_a,
            models[right],
            path_b,
            comparison.x,
            comparison.where,
            comparison.measurement.seed,
        )

    return faults, value


def by_products(comparison: LayerComparison, measure: Measure) -> tuple[Faults, Value]:
    """Return values from cross-products of centred features.

    The features are stored, or processed batch by batch if positions are rows.
    """
    if comparison.empty:
        return unseen(comparison)
    clients, n, rows = (
        len(comparison.subjects),
        len(comparison.x),
        comparison.options.positions == "samples",
    )
    collected: dict[str, StoredFeatures | Moments] = {}
    faults: dict[Spot, str] = {}
    client = 0

    def take(path: str, place: Place, module: nn.Module, output: Tensor) -> None:
        collector = collected.get(path)
        try:
            x = arrange_positions(module, output, place, comparison.options.positions)
            if collector is None:
                collector = collected[path] = (
                    Moments(clients, n) if x.ndim == 3 else StoredFeatures(clients, n)
                )
            if (x.ndim == 3) != isinstance(collector, Moments):
                raise NoValue("positions in some of its outputs only")
            collector.take(client, place, x)
        except NoValue as reason:
            faults.setdefault((path, client), str(reason))

    for places in (
        [[place] for place in comparison.where] if rows else [comparison.where]
    ):
        for client, subject in enumerate(comparison.subjects):
            comparison.watch(subject, take, places)
            if not rows:
                for collector in collected.values():
                    collector.done(client)
                comparison.measurement.tick(subject.client)
        if rows:
            for collector in collected.values():
                collector.flush()
    for path in comparison.paths:
        collector = collected.setdefault(path, StoredFeatures(clients, n))
        for k in range(clients):
            collector.done(k)
        collector.prepare(measure)
        for k, reason in collector.faults.items():
            faults.setdefault((path, k), reason)
    if rows:
        for subject in comparison.subjects:
            comparison.measurement.tick(subject.client)

    def value(a: Spot, b: Spot) -> float:
        (path_a, left), (path_b, right) = a, b
        first, second = collected[path_a], collected[path_b]
        if path_a == path_b:
            return float(measure.value(first.product(left, right)))
        assert isinstance(
            first, StoredFeatures
        )  # other layers are compared with samples as rows only
        assert isinstance(second, StoredFeatures)
        return float(measure.value(first.bases[left].T @ second.bases[right]))

    return faults, value
