"""How far apart the classes lie in a layer's features: scatter between the classes over scatter within them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fl_core.errors import UsageError
from fl_core.layers import Layer
from fl_core.rows import Row, row
from fl_core.training.losses import Loss

from .features import Array, NoValue, collect, constant, folds_of
from .gradients import Subject, Tick, quiet
from .probes import SAMPLES

_GROUPS = 10
Found = tuple[float, float | None]


def scatter_ratio(x: Array, y: Array, seed: int = 0) -> Found:
    """tr(S_b) / tr(S_w) of features x [n, d] with labels y [n], and its standard error; higher = more separable.

    S_b = sum_c n_c (m_c - m)(m_c - m)^T over the classes' means m_c, S_w = sum_n (x_n - m_y)(x_n - m_y)^T (Fisher's
    scatter matrices). At least 0, without a bound, invariant to rotation, isotropic scale and offset. Classes that do
    not differ at all give about (C - 1) / (n - C), not 0. The error is the jackknife's over ten groups of samples,
    each class dealt evenly over them; None where a group's absence leaves no value.

    Raises:
        NoValue: one class, features that do not vary, at all or within the classes, or that are not finite.
    """
    classes, at = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise NoValue("samples of one class")
    if not np.isfinite(x).all():
        raise NoValue("not finite")
    if constant(x):
        raise NoValue("constant over the samples")
    groups = folds_of(y, _GROUPS, seed)
    many = int(groups.max()) + 1
    x = x.astype(np.float64)
    x -= x.mean(axis=0)
    x /= np.abs(x).max()  # so that squares fit
    cell = at * many + groups
    member = np.zeros((len(classes) * many, len(x)))
    member[cell, np.arange(len(x))] = 1.0
    counts = member.sum(axis=1).reshape(len(classes), many)
    squares = (member @ np.square(x).sum(axis=1)).reshape(len(classes), many)
    sums = (member @ x).reshape(len(classes), many, -1)

    def ratio(without: int | None = None) -> float | None:
        left = np.arange(many) != (-1 if without is None else without)
        n, s = counts[:, left].sum(axis=1), sums[:, left].sum(axis=1)
        total = squares[:, left].sum()
        explained = np.divide(np.square(s).sum(axis=1), n, out=np.zeros(len(n)), where=n > 0).sum()
        within = total - explained
        if within <= 1e-12 * total:
            return None
        return float((explained - np.square(s.sum(axis=0)).sum() / n.sum()) / within)

    value = ratio()
    if value is None:
        raise NoValue("no scatter within the classes")
    others = [ratio(k) for k in range(many)] if many > 2 else [None]
    known = np.array([other for other in others if other is not None])
    if len(known) < len(others):
        return value, None
    return value, float(np.sqrt((many - 1) / many * np.square(known - known.mean()).sum()))


def separability(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    *,
    loss: Loss | None = None,
    batch: int | None = 256,
    seed: int = 0,
    mode: str = "eval",
    tick: Tick = quiet,
    samples: int = SAMPLES,
) -> list[Row]:
    """Scatter between the classes over scatter within them of each layer's flattened output (:func:`scatter_ratio`).

    Higher = the classes lie further apart. Variant ``"own"``: among each client's samples. ``"pooled"``, client "":
    among those of all clients, each seen by its own model; where it falls short of the clients' own values the
    clients' models place a class differently.

    Memory: a forward pass of ``batch`` samples; of one client the outputs of all layers for at most ``samples``
    samples, and of all clients together for as many again.

    Args:
        samples: at most so many of each client, drawn with the seed; of all clients together in the pooled set.
        loss: not used.

    Raises:
        UsageError: data that do not fit, fewer than 2 ``samples``.
    """
    if samples < 2:
        raise UsageError(f"samples={samples}; at least 2 are needed")
    if not subjects:
        return []
    paths = sorted({layer.output for layer in layers if layer.used})
    share = max(samples // len(subjects), 1)
    own: list[dict[str, str | Found]] = []
    kept: dict[str, list[tuple[Array, Array]]] = {path: [] for path in paths}
    faults: dict[str, str] = {}
    sizes = []
    for subject in subjects:
        given = collect(subject.model, paths, subject.data, samples=samples, batch=batch, seed=seed, mode=mode)
        few = np.flatnonzero(folds_of(given.y, -(-len(given.y) // share), seed) == 0)[:share]
        found: dict[str, str | Found] = {}
        for path in paths:
            try:
                x = given.of(path)
                kept[path].append((x[few], given.y[few]))
                found[path] = scatter_ratio(x, given.y, seed)
            except NoValue as reason:
                found[path] = f"at client {subject.client!r}: {reason}"
                if len(kept[path]) == len(own):
                    faults.setdefault(path, str(found[path]))
        own.append(found)
        sizes.append((len(given.y), len(few)))
        tick(subject.client)
    pooled = {path: faults.get(path) or _pooled(kept[path], seed) for path in paths}
    rows = []
    for layer in layers:
        rows.append(_row(layer, "pooled", pooled.get(layer.output, ""), sum(few for _, few in sizes)))
        for subject, found, (n, _) in zip(subjects, own, sizes, strict=True):
            where = {"client": subject.client, "n_train": subject.n_train}
            rows.append(_row(layer, "own", found.get(layer.output, ""), n, **where))
    return rows


def _pooled(kept: Sequence[tuple[Array, Array]], seed: int) -> str | Found:
    if len({x.shape[1] for x, _ in kept}) > 1:
        return "at all clients: features of different widths"
    try:
        x, y = (np.concatenate(arrays) for arrays in zip(*kept, strict=True))
        return scatter_ratio(x, y, seed)
    except NoValue as reason:
        return f"at all clients: {reason}"


def _row(layer: Layer, variant: str, found: str | Found, n: int, **where: object) -> Row:
    given: dict[str, Any] = {"layer": layer.name, "variant": variant, "estimator": "traces, jackknife error", **where}
    if not layer.used:
        return row("separability", None, status="unused in the forward pass", n_samples=0, **given)
    if isinstance(found, str):
        return row("separability", None, status=f"output of layer {layer.name!r} {found}", n_samples=0, **given)
    return row("separability", found[0], stderr=found[1], n_samples=n, **given)
