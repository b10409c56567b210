"""The probes: classifiers trained on a layer's features and tested on other samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import normalize

from fl_core.bounds import INSIDE, at_least
from fl_core.data.arrays import nested_groups
from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer
from fl_core.rows import Row, row
from fl_core.statistics import design_effect

from ..measurement import ClientModel, Data, Measurement
from .features import (
    Array,
    Features,
    NoValue,
    features_of,
    folds_of,
    holdout_of,
    reduce_to_span,
    standardise,
)

SAMPLES = 2000
"""Samples that a probe reads at most: of a client, and of all clients together for the pooled one."""

Classify = Callable[[Array, Array, Array], Array]
"""(training features, training labels, test features) -> predicted labels"""


@dataclass(frozen=True, eq=False)
class _Hits:
    """Which held-out samples of a client were classified right, bool [n], their groups, and a note on the fits."""

    right: Array
    note: str = ""
    groups: Array | None = None


@dataclass(frozen=True, eq=False)
class _Part:
    """One client's features at one layer: training samples with their folds, and test samples if there are any."""

    client: str
    x: Array
    y: Array
    fold: Array
    test: tuple[Array, Array] | None = None
    groups: Array | None = None
    test_groups: Array | None = None

    def tested_groups(self) -> Array | None:
        """Return the groups of the samples that all rounds test, in their order."""
        if self.test is not None or self.groups is None:
            return self.test_groups
        order = np.argsort(self.fold, kind="stable")
        return self.groups[order[self.fold[order] >= 0]]

    def rounds(self, folds: int) -> Iterator[tuple[Array, Array, Array, Array]]:
        """Yield (x, y) to train on and (x, y) to test on, for each fold."""
        if self.test is not None:
            yield self.x, self.y, *self.test
            return
        for number in range(folds):
            held = self.fold == number
            yield self.x[~held], self.y[~held], self.x[held], self.y[held]


def logistic(
    x: Array,
    y: Array,
    test: Array,
    C: float = 1.0,  # noqa: N803
    reduce: bool | None = None,
    tol: float = 1e-6,
) -> Array:
    """Return labels [m] predicted for test [m, d] by multinomial logistic regression on x [n, d], y [n].

    Features are standardised by the training samples'. The objective is (1/2) ||W||^2 + C sum_n cross-entropy, with a
    free intercept. It does not change under a rotation. So features are reduced to the training samples' span if d > n
    (``reduce`` None). If all training samples have one class, all test samples get it.

    Warns:
        ConvergenceWarning: 1000 iterations were not enough.
    """
    if len(np.unique(y)) == 1:
        return np.full(len(test), y[0])
    x, test = standardise(x, test)
    if x.shape[1] > len(x) if reduce is None else reduce:
        x, test = reduce_to_span(x, test)
    return np.asarray(
        LogisticRegression(C=C, max_iter=1000, tol=tol).fit(x, y).predict(test)
    )


def nearest_labels(
    x: Array, y: Array, test: Array, neighbours: int = 5, distance: str = "cosine"
) -> Array:
    """Return the most frequent label among the nearest training samples; of ties the lowest."""
    x, test = x.astype(np.float64), test.astype(np.float64)
    if distance == "cosine":
        x, test = normalize(x), normalize(test)
    far = (x * x).sum(axis=1) - 2 * test @ x.T  # squared, without what x leaves alone
    near = np.argsort(far, axis=1, kind="stable")[:, :neighbours]
    labels, codes = np.unique(y, return_inverse=True)
    votes = (codes[near][..., None] == np.arange(len(labels))).sum(axis=1)
    return np.asarray(labels[votes.argmax(axis=1)])


@dataclass(frozen=True, eq=False)
class ProbeOptions:
    """The options of probes: which samples train them, and which test them.

    Attributes:
        test: {client: data} that the probe is tested on. The subjects' data then only train.
        holdout: fraction of each client's samples to hold out.
        folds: number of folds of the cross-validation, at most the number of samples.
        samples: maximum number of samples of each client, drawn with the seed. The pooled set has equally many of each.

    Raises:
        UsageError: a number is out of its range, or both test data and a fraction to hold out are given.
    """

    test: Mapping[str, Data] | None = None
    holdout: Annotated[float | None, INSIDE] = None
    folds: Annotated[int, at_least(2)] = 5
    samples: Annotated[int, at_least(2)] = SAMPLES

    def __post_init__(self) -> None:
        if self.test is not None and self.holdout is not None:
            raise UsageError(
                "test and holdout must not both be set; got both. Pass one of the two."
            )

    @property
    def judged_by(self) -> str:
        """The test samples, in words for the rows' estimator."""
        if self.test is not None:
            return "given test data"
        return (
            f"{self.folds} folds"
            if self.holdout is None
            else f"holdout {self.holdout:g}"
        )

    def folds_of(self, y: Array, seed: int, groups: Array | None) -> Array:
        """Return the fold of each sample with labels y [n], as in :class:`_Part`. A group is in one fold."""
        if self.test is not None:
            return np.full(len(y), -1)
        return (
            folds_of(y, self.folds, seed, groups)
            if self.holdout is None
            else holdout_of(y, self.holdout, seed, groups)
        )


def probe_rows(
    metric: str,
    classify: Classify,
    estimator: str,
    measurement: Measurement,
    options: ProbeOptions,
) -> list[Row]:
    """Return the rows of a probe, layer by layer: each client's own, then all clients pooled.

    Variant ``"own"`` is each client's probe on its own data. Variant ``"pooled"`` is one probe for the features of all
    clients, each from its own model. Its accuracy is on each client's samples and, for client "", on all of them. The
    error is that of :func:`accuracy_error`.

    Raises:
        UsageError: a client has no test data, or data do not fit.
    """
    subjects, layers, seed = measurement.subjects, measurement.layers, measurement.seed
    if not subjects:
        return []
    for subject in subjects if options.test is not None else ():
        check_known("client with test data", subject.client, options.test or {})
    paths = sorted({layer.output for layer in layers if layer.used})
    share = max(options.samples // len(subjects), 1)
    hits_of: list[dict[str, str | _Hits]] = []
    kept: dict[str, list[_Part | str]] = {path: [] for path in paths}
    for subject in subjects:
        train = features_of(measurement, subject, paths, options.samples)
        tested = None
        if options.test is not None:
            tested = features_of(
                measurement,
                subject,
                paths,
                options.samples,
                options.test[subject.client],
            )
        groups = None if subject.groups is None else subject.groups[train.sample]
        of_test = getattr((options.test or {}).get(subject.client), "groups", None)
        if tested is not None and of_test is not None:
            of_test = of_test[tested.sample]
        folds, hits_at = options.folds_of(train.y, seed, groups), {}
        for path in paths:
            part = _part(subject.client, path, train, tested, folds, groups, of_test)
            hits_at[path] = part if isinstance(part, str) else _hits([part], classify)
            kept[path].append(
                part if isinstance(part, str) else _first(part, share, options, seed)
            )
        hits_of.append(
            {
                path: value if isinstance(value, str) else value[0]
                for path, value in hits_at.items()
            }
        )
        measurement.tick(subject.client)
    pooled: dict[str, str | list[_Hits]] = {}
    for path in paths:
        faults = [part for part in kept[path] if isinstance(part, str)]
        pooled[path] = (
            faults[0]
            if faults
            else _hits([p for p in kept[path] if isinstance(p, _Part)], classify)
        )
    common = {"metric": metric, "estimator": f"{estimator}, {options.judged_by}"}
    rows = []
    for layer in layers:
        together = pooled.get(layer.output, "") if layer.used else ""
        hits = [
            _of(hits_of[k].get(layer.output, "") if layer.used else "", layer)
            for k in range(len(subjects))
        ]
        rows += [
            _row(s, layer, "own", h, common)
            for s, h in zip(subjects, hits, strict=True)
        ]
        pooled_hits = [
            together if isinstance(together, str) else together[k]
            for k in range(len(subjects))
        ]
        rows += [
            _row(s, layer, "pooled", _of(h, layer), common)
            for s, h in zip(subjects, pooled_hits, strict=True)
        ]
        whole = together if isinstance(together, str) else _joined(together)
        rows.append(_row(None, layer, "pooled", _of(whole, layer), common))
    return rows


def _part(
    client: str,
    path: str,
    train: Features,
    tested: Features | None,
    folds: Array,
    groups: Array | None,
    test_groups: Array | None,
) -> _Part | str:
    try:
        test = None if tested is None else (tested.at(path), tested.y)
        return _Part(client, train.at(path), train.y, folds, test, groups, test_groups)
    except NoValue as reason:
        return f"at client {client!r}: {reason}"


def _first(part: _Part, count: int, options: ProbeOptions, seed: int) -> _Part:
    """Return a client's first samples with folds, and its first test samples, at most ``count`` of each.

    Each class keeps its share.
    """

    def few(y: Array) -> Array:
        fold = folds_of(y, -(-len(y) // count), seed)  # one of so many alike parts
        return np.flatnonzero(fold == 0)[:count]

    if len(part.y) <= count and (part.test is None or len(part.test[1]) <= count):
        return part
    rows = few(part.y)
    test, test_groups = part.test, part.test_groups
    if test is not None:
        others = few(test[1])
        test = test[0][others], test[1][others]
        test_groups = None if test_groups is None else test_groups[others]
    groups = None if part.groups is None else part.groups[rows]
    return replace(
        part,
        x=part.x[rows],
        y=part.y[rows],
        fold=options.folds_of(part.y[rows], seed, groups),
        test=test,
        groups=groups,
        test_groups=test_groups,
    )


def _joined(hits: Sequence[_Hits]) -> _Hits:
    """Return the hits of all clients together."""
    groups = None
    if all(each.groups is not None for each in hits):
        groups = nested_groups(each.groups for each in hits)
    return _Hits(np.concatenate([each.right for each in hits]), hits[0].note, groups)


def _hits(parts: Sequence[_Part], classify: Classify) -> str | list[_Hits]:
    """Return the correct predictions of a probe on each part, or why there are none."""
    client = (
        f"at client {parts[0].client!r}: " if len(parts) == 1 else "at all clients: "
    )
    labels = np.concatenate([part.y for part in parts])
    if len({part.x.shape[1] for part in parts}) > 1:
        return client + "features of different widths"
    if len(labels) < 2 and parts[0].test is None:
        return client + f"{len(labels)} samples, at least 2 are needed"
    if len(np.unique(labels)) < 2:
        return client + "samples of one class"
    folds = 1 + max(int(part.fold.max()) for part in parts)
    right_of: list[list[Array]] = [[] for _ in parts]
    classes = 0  # that train at once
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", ConvergenceWarning)
            for rounds in zip(*(part.rounds(folds) for part in parts), strict=True):
                x, y, test, wanted = (
                    np.concatenate(arrays) for arrays in zip(*rounds, strict=True)
                )
                if not len(y):
                    raise NoValue("no samples to train on beside those held out")
                classes = max(classes, len(np.unique(y)))
                right = classify(x, y, test) == wanted
                ends = np.cumsum([len(own[3]) for own in rounds])[:-1]
                for hits, some in zip(right_of, np.split(right, ends), strict=True):
                    hits.append(some)
    except NoValue as reason:
        return client + str(reason)
    if classes == 1:
        return client + "samples of one class train in every fold"
    late = sum(issubclass(warning.category, ConvergenceWarning) for warning in seen)
    note = f", {late} of {len(right_of[0])} fits not converged" if late else ""
    return [
        _Hits(
            np.concatenate([np.zeros(0, dtype=bool), *hits]), note, part.tested_groups()
        )
        for part, hits in zip(parts, right_of, strict=True)
    ]


def _of(found: str | _Hits, layer: Layer) -> str | _Hits:
    """Return the hits, or a status on why there is no value."""
    if not layer.used:
        return "unused in the forward pass"
    if isinstance(found, str):
        return f"output of layer {layer.name!r} {found}"
    return found if len(found.right) else "no held-out samples"


def _row(
    subject: ClientModel | None,
    layer: Layer,
    variant: str,
    hits: str | _Hits,
    common: Mapping[str, str],
) -> Row:
    where = (
        {"client": subject.client, "n_train": subject.n_train}
        if subject is not None
        else {}
    )
    columns: dict[str, Any] = {"layer": layer.name, "variant": variant, **where}
    if isinstance(hits, str):
        return row(
            common["metric"],
            None,
            status=hits,
            n_samples=0,
            estimator=common["estimator"],
            **columns,
        )
    numbers: dict[str, Any] = {
        "stderr": accuracy_error(hits.right, hits.groups),
        "n_samples": len(hits.right),
    }
    return row(
        common["metric"],
        float(hits.right.mean()),
        estimator=common["estimator"] + hits.note,
        **numbers,
        **columns,
    )


def accuracy_error(hits: Array, groups: Array | None = None) -> float:
    """Return the standard deviation of an accuracy of k right in n.

    It is sqrt(p (1 - p) / (n + 3)) with p = (k + 1) / (n + 2). With ``groups`` [n], such as patients, n and k are
    divided by :func:`fl_core.statistics.design_effect`.

    >>> hits = np.repeat([True, False], 50)
    >>> round(accuracy_error(hits), 3), round(accuracy_error(hits, np.arange(100) // 10), 3)
    (0.049, 0.139)
    """
    effect = 1.0 if groups is None else design_effect(hits, groups)
    n, right = len(hits) / effect, float(hits.sum()) / effect
    p = (right + 1) / (n + 2)
    return float(np.sqrt(p * (1 - p) / (n + 3)))
