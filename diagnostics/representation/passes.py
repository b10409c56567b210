"""Passes of probe samples through all clients' models that give the values of all pairs at all layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..client_model import ClientModel
from .comparison import Faults, LayerComparison, Spot, Value
from .gram import Recorder, Summary, hsic
from .moments import PROCRUSTES, Kept, Measure, Moments
from .probe import NoValue, Place, along_one, arranged, by_position
from .shifts import least_angle, unit_maps
from .torch_cka import compared


def _none(a: Spot, b: Spot) -> float | str:
    return "nothing to compare"


def _unseen(comparison: LayerComparison) -> tuple[Faults, Value]:
    for subject in comparison.subjects:
        comparison.measurement.tick(subject.client)
    return {}, _none


def by_grams(comparison: LayerComparison, estimator: str, bandwidth: float | None = None) -> tuple[Faults, Value]:
    """Return values from Gram matrices, one client after another; features are summarised as they arrive."""
    if comparison.empty:
        return _unseen(comparison)
    models = None if comparison.across else len(comparison.subjects)
    recorders = {path: Recorder(comparison.where, estimator, models, bandwidth) for path in comparison.paths}
    summaries: dict[Spot, Summary] = {}
    faults: dict[Spot, str] = {}

    def take(path: str, place: Place, module: nn.Module, output: Tensor) -> None:
        try:
            recorders[path].take(*place, arranged(module, output, place, comparison.options.positions))
        except NoValue as reason:
            recorders[path].fault = str(reason)

    for client, subject in enumerate(comparison.subjects):
        for recorder in recorders.values():
            recorder.begin()
        comparison.watch(subject, take)
        for path, recorder in recorders.items():
            kept = recorder.kept()
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
    place = {spot: (group, k) for group, spots in enumerate(together) for k, spot in enumerate(spots)}
    products = [hsic([summaries[spot] for spot in spots]).cpu() if spots else torch.empty(0, 0) for spots in together]

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
        return compared(
            models[left], path_a, models[right], path_b, comparison.x, comparison.where, comparison.measurement.seed
        )

    return faults, value


def by_products(comparison: LayerComparison, measure: Measure) -> tuple[Faults, Value]:
    """Return values from cross-products of centred features.

    The features are stored, or processed batch by batch if positions are rows.
    """
    if comparison.empty:
        return _unseen(comparison)
    clients, n, rows = len(comparison.subjects), len(comparison.x), comparison.options.positions == "samples"
    collected: dict[str, Kept | Moments] = {}
    faults: dict[Spot, str] = {}
    client = 0

    def take(path: str, place: Place, module: nn.Module, output: Tensor) -> None:
        collector = collected.get(path)
        try:
            x = arranged(module, output, place, comparison.options.positions)
            if collector is None:
                collector = collected[path] = Moments(clients, n) if x.ndim == 3 else Kept(clients, n)
            if (x.ndim == 3) != isinstance(collector, Moments):
                raise NoValue("positions in some of its outputs only")
            collector.take(client, place, x)
        except NoValue as reason:
            faults.setdefault((path, client), str(reason))

    for places in [[place] for place in comparison.where] if rows else [comparison.where]:
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
        collector = collected.setdefault(path, Kept(clients, n))
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
        assert isinstance(first, Kept)  # other layers are compared with samples as rows only
        assert isinstance(second, Kept)
        return float(measure.value(first.bases[left].T @ second.bases[right]))

    return faults, value


def by_shifts(comparison: LayerComparison) -> tuple[Faults, Value]:
    """Return Procrustes angles over shifts, as PLayer-FL's authors measured them, layer by layer."""
    if comparison.empty:
        return _unseen(comparison)
    faults: dict[Spot, str] = {}
    values: dict[tuple[Spot, Spot], float | str] = {}
    for path in comparison.paths:
        spots = [(path, client) for client in range(len(comparison.subjects))]
        maps, plain = {}, Kept(len(spots), len(comparison.x))
        for spot, subject in zip(spots, comparison.subjects, strict=True):
            try:
                seen = _seen(comparison, subject, path)
                if seen.ndim > 3 or (seen.ndim == 3 and along_one(subject.model.get_submodule(path))):
                    maps[spot] = unit_maps(seen)
                else:
                    seen = seen.sum(1) if seen.ndim == 3 else seen
                    plain.take(spot[1], (0, len(seen)), seen)
                    plain.done(spot[1])
            except NoValue as reason:
                faults[spot] = str(reason)
            if path == comparison.paths[-1]:
                comparison.measurement.tick(subject.client)
        plain.prepare(PROCRUSTES)
        faults |= {(path, client): reason for client, reason in plain.faults.items()}
        sound = [spot for spot in spots if spot not in faults]
        for k, a in enumerate(sound):
            for b in sound[k + 1 :]:
                if a in maps and b in maps and maps[a].shape[:-1] == maps[b].shape[:-1]:
                    values[a, b] = least_angle(maps[a], maps[b])
                elif a in maps or b in maps:
                    values[a, b] = "positions that differ between the two clients"
                else:
                    values[a, b] = float(PROCRUSTES.value(plain.product(a[1], b[1])))
    return faults, lambda a, b: values[a, b]


def _seen(comparison: LayerComparison, subject: ClientModel, path: str) -> Tensor:
    """Return a module's outputs for all probe samples, [n, *positions, d]."""
    parts: dict[Place, Tensor] = {}
    faults: list[NoValue] = []

    def take(path: str, place: Place, module: nn.Module, output: Tensor) -> None:
        try:
            arranged(module, output, place, "flatten")
        except NoValue as reason:
            faults.append(reason)
        else:
            x = by_position(module, output).clone()
            parts[place] = x if x.dtype in (torch.float32, torch.float64) else x.float()

    comparison.watch(subject, take, paths=[path])
    if faults:
        raise faults[0]
    if list(parts) != comparison.where:
        raise NoValue("not computed in every forward pass")
    shapes = list(dict.fromkeys(part.shape[1:] for part in parts.values()))
    if len(shapes) > 1:
        raise NoValue(f"shape {tuple(shapes[1])} after {tuple(shapes[0])} in an earlier batch")
    return torch.cat(list(parts.values()))
