"""Class separability of a layer's features: scatter between classes over scatter within them."""

from __future__ import annotations

import numpy as np

from .features import Array, NoValue, constant, folds_of

_GROUPS = 10
Ratio = tuple[float, float | None]
"""A ratio of scatters and its standard error."""


def scatter_ratio(x: Array, y: Array, seed: int = 0) -> Ratio:
    """Return tr(S_b) / tr(S_w) of features x [n, d] with labels y [n], and its standard error.

    Higher means more separable. With the classes' means m_c, S_b = sum_c n_c (m_c - m)(m_c - m)^T and S_w = sum_n (x_n
    - m_y)(x_n - m_y)^T (Fisher's scatter matrices). The ratio is at least 0, without an upper bound. It is invariant to
    rotation, isotropic scale and offset. Classes that do not differ at all give about (C - 1) / (n - C), not 0.

    The error is the jackknife's over ten groups of samples, with each class spread evenly over them. It is None if
    leaving out a group leaves no value.

    Raises:
        NoValue: there is one class, or features are not finite, or do not vary at all or within the classes.
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
        if (n > 0).sum() < 2:
            return None
        total = squares[:, left].sum()
        explained = np.divide(
            np.square(s).sum(axis=1), n, out=np.zeros(len(n)), where=n > 0
        ).sum()
        within = total - explained
        if within <= 1e-12 * total:
            return None
        return float((explained - np.square(s.sum(axis=0)).sum() / n.sum()) / within)

    value = ratio()
    if value is None:
        raise NoValue("no scatter within the classes")
    others = [ratio(k) for k in range(many)] if many > 2 else [None]
    ratios = np.array([other for other in others if other is not None])
    if len(ratios) < len(others):
        return value, None
    return value, float(
        np.sqrt((many - 1) / many * np.square(ratios - ratios.mean()).sum())
    )
