"""Gradient boosting of each client, rebuilt as a module that is scored, stored and exported like any other model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_core.models.boosted import DEPTH, TREES, BoostedTrees
from fl_core.rows import MULTILABEL, REGRESSION, SURVIVAL

Array = NDArray[Any]

MODEL = "sklearn:boosted_trees"
"""The name of the models in descriptions of stored models."""
OPTIONS = {"trees": TREES, "depth": DEPTH}
"""The options of the models in descriptions of stored models."""
MOST_ROWS = 20_000
"""Rows in one fit, at most."""


def why_not_boosting(shape: tuple[int, ...], kind: str, rows: int) -> str:
    """Return why gradient boosting is not tried, or an empty text.

    >>> why_not_boosting((5,), "classification", 20_000), why_not_boosting((1, 8, 8), "classification", 60)
    ('', 'it is for tables')
    >>> why_not_boosting((5,), "classification", 20_001)
    'a fit has 20,001 rows, more than 20,000'

    Args:
        shape: the shape of a sample.
        kind: the task of :data:`fl_core.rows.TASKS`.
        rows: the rows of the largest fit.
    """
    if len(shape) != 1 or hasattr(shape, "tokens") or hasattr(shape, "layout"):
        return "it is for tables"
    if kind == SURVIVAL:
        return "it has no loss for survival"
    if rows > MOST_ROWS:
        return f"a fit has {rows:,} rows, more than {MOST_ROWS:,}"
    return ""


def fit_boosting(
    x: Array,
    y: Array,
    kind: str,
    n_classes: int = 0,
    class_weights: Tensor | None = None,
    seed: int = 0,
) -> BoostedTrees:
    """Fit gradient boosting, and return it as a module.

    Each tree sees half of the n samples, and each split the square root of the number
    of columns. Outputs equal those of scikit-learn up to rounding: its
    ``decision_function`` for classes, and its ``predict`` for numbers. They differ
    where a leaf is bounded: its value is at most n in size. With two classes the output
    of the first is 0. The output of an absent class is the logarithm of 1 / (n + C). If
    all samples have one class, the outputs are the logarithms of the shares (n_k + 1) /
    (n + C). Several labels have one fit each. A label with one value has the log odds
    of its shares (n_k + 1) / (n + 2). If all numbers are equal, the output is their
    value.

    Args:
        x: samples [n, d].
        y: classes [n]; labels of 0 and 1 [n, C]; or numbers [n], standardised if the task's outputs are.
        kind: the task of :data:`fl_core.rows.TASKS`.
        n_classes: the number C of classes or labels.
        class_weights: the weight of each class's samples, [C]; None for equal weights.
            Only a task with classes reads it.
        seed: draws the samples and columns of each tree.
    """
    # takes long to import
    from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor

    module = BoostedTrees(x.shape[1:], max(1, n_classes), **OPTIONS).eval()
    options: dict[str, Any] = {
        "n_estimators": TREES,
        "max_depth": DEPTH,
        "subsample": 0.5,
        "max_features": "sqrt",
        "random_state": seed,
    }
    if kind == REGRESSION:
        module.base[0] = float(y.mean(dtype=float))
        if np.ptp(y):
            model = GradientBoostingRegressor(**options).fit(x, y)
            _write(module, [0], model, model.predict, x)
        return module
    classifier = GradientBoostingClassifier(**options)
    if kind == MULTILABEL:
        for label, label_y in enumerate(y.T.astype(int)):
            shares = _log_shares(label_y, 2)
            module.base[label] = shares[1] - shares[0]
            if np.ptp(label_y):
                classifier.fit(x, label_y)
                _write(module, [label], classifier, classifier.decision_function, x)
        return module
    present_classes, shares = np.unique(y), _log_shares(y, n_classes)
    if len(present_classes) == 1:
        module.base.copy_(shares)
        return module
    weights = None if class_weights is None else class_weights.numpy()[y]
    classifier.fit(x, y, sample_weight=weights)
    # of two classes there is one output: the log odds of the second
    columns = present_classes
    if len(present_classes) == 2:
        columns = present_classes[1:]
    _write(module, columns, classifier, classifier.decision_function, x)
    module.absent.copy_(shares)
    module.absent[present_classes] = 0.0
    return module


def _log_shares(y: Array, classes: int) -> Tensor:
    counts = torch.from_numpy(np.bincount(y, minlength=classes) + 1.0)
    return (counts / counts.sum()).log()


def _write(
    module: BoostedTrees,
    columns: Sequence[int] | Array,
    model: Any,
    raw: Callable[[Array], Array],
    x: Array,
) -> None:
    """Write the trees of a fitted model into these outputs of a module.

    A leaf's value is clipped to -n to n, the number of samples, as if no probability
    were below 1/n. Newton's step has no bound: a leaf with one wrong sample of
    probability p has 1/p.

    Args:
        module: the module, which is changed in place.
        columns: numbers of the outputs.
        model: the fitted model of scikit-learn.
        raw: a function that returns the fitted model's raw outputs for samples.
        x: samples [n, d]. The module's constants are set such that its outputs for them
            equal the raw ones, except in bounded leaves.
    """
    for stage, trees in enumerate(model.estimators_):
        for column, estimator in zip(columns, trees, strict=True):
            tree = estimator.tree_
            rows = (
                tree.children_left,
                tree.children_right,
                tree.feature.clip(0),  # a leaf has -2
                tree.threshold,
                model.learning_rate * tree.value[:, 0, 0].clip(-len(x), len(x)),
            )
            nodes = torch.from_numpy(np.stack(rows))
            module.nodes[stage, column, :, : tree.node_count] = nodes
    module.base[columns] = 0.0
    outputs = torch.from_numpy(raw(x).reshape(len(x), -1))
    gaps = outputs - module(torch.from_numpy(x))[:, columns]
    # gaps of all samples are equal, but for those in bounded leaves
    module.base[columns] = gaps.median(0).values
