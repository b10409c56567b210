"""The probes: classifiers trained on a layer's features and tested on other samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import numpy as np

from fl_core.data.arrays import nested_groups
from fl_core.errors import at_least, check_known
from fl_core.layers import Layer
from fl_core.rows import Row
from fl_core.statistics import design_effect

from ..measurement import ClientModel, Data, Measurement, NoValue, row_or_reason
from .features import Array, features_of, folds_of, reduce_to_span, standardise

SAMPLES = 2000
"""Samples that a probe reads at most: of a client, and of all clients together for the pooled one."""

Classify = Callable[[Array, Array, Array], Array]
"""A function (training features, training labels, test features) -> predicted labels."""


class Score(NamedTuple):
    """A value, its standard error, its number of samples, and a note on how it was found.

    Attributes:
        value: the value. None if there is none.
        error: its standard error. None if it is unknown.
        n_samples: number of samples that gave the value.
        note: text that is added to the rows' column ``estimator``. It may be empty.
        others: numbers to compare it with, by the end of a variant's name.
    """

    value: float | None
    error: float | None
    n_samples: int
    note: str
    others: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Part:
    """One client's features at one layer, with the fold of each sample.

    Attributes:
        client: the client's name.
        x, y: features [n, d], and labels [n].
        fold: the round of cross-validation that tests the sample; -1 for samples that only train.
        groups: the group of each sample, such as a patient, [n]. None without groups.
    """

    client: str
    x: Array
    y: Array
    fold: Array
    groups: Array | None = None

    def tested(self) -> Array:
        """Return the indices of the samples that are tested, in the order of the rounds."""
        order = np.argsort(self.fold, kind="stable")
        return order[self.fold[order] >= 0]

    def rounds(self, folds: int) -> Iterator[tuple[Array, Array, Array, Array]]:
        """Yield a tuple (x, y, x to test, y to test) for each fold. All samples of other folds are x and y."""
        for number in range(folds):
            in_fold = self.fold == number
            yield self.x[~in_fold], self.y[~in_fold], self.x[in_fold], self.y[in_fold]


def logistic(
    x: Array,
    y: Array,
    test: Array,
    C: float = 1.0,  # noqa: N803
) -> Array:
    """Return labels [m] predicted for test [m, d] by multinomial logistic regression on x [n, d], y [n].

    Features are standardised by the means and deviations of the training samples. The
    objective is (1/2) ||W||^2 + C sum_n cross-entropy, with a free intercept. For two
    classes W is one vector. The objective does not change under a rotation. So features
    are reduced to the training samples' span if d > n. If all training samples have one
    class, all test samples get it.

    Args:
        x, y: features and labels of the training samples.
        test: features of the test samples.
        C: inverse strength of the regularisation. Higher means weaker.

    Warns:
        ConvergenceWarning: 1000 iterations were not enough.
    """
    if len(np.unique(y)) == 1:
        return np.full(len(test), y[0])
    from sklearn.linear_model import LogisticRegression

    x, test = standardise(x, test)
    if x.shape[1] > len(x):
        x, test = reduce_to_span(x, test)
    return np.asarray(
        LogisticRegression(C=C, max_iter=1000, tol=1e-6).fit(x, y).predict(test)
    )


@dataclass(frozen=True, eq=False)
class ProbeOptions:
    """The options of probes: which samples train them, and which test them.

    Attributes:
        test: {client: data} that the probe is tested on. The subjects' data then only train.
        folds: number of folds of the cross-validation without test data. With fewer
            samples there are as many folds as samples.
        samples: maximum number of samples of each client, drawn with the seed. The
            pooled set has at most this many of all clients together, equally many of
            each, but at least one of each. The same limit holds for test data.

    Raises:
        UsageError: there are fewer than 2 folds or samples (checked by
            ``Metric.settings``).
    """

    test: Mapping[str, Data] | None = None
    folds: Annotated[int, at_least(2)] = 5
    samples: Annotated[int, at_least(2)] = SAMPLES


def probe_rows(
    metric: str,
    classify: Classify,
    estimator: str,
    measurement: Measurement,
    options: ProbeOptions,
) -> list[Row]:
    """Return the rows of a probe by :func:`pooled_rows`.

    Variant ``"own"`` is each client's probe on its own data. Variant ``"pooled"`` is one probe for the features of all
    clients, each from its own model. Its accuracy is on each client's samples and, for client "", on all of them. The
    error is that of :func:`accuracy_error`. Each has two more variants: ``..._balanced``, the mean recall of
    the classes, and ``..._guessing``, the share of the largest class, which a constant prediction has.

    Args:
        metric: name in the rows.
        classify: (features [n, d], labels [n], features to test [m, d]) -> predicted labels [m].
        estimator: how the values are computed, for the rows.
        measurement: the clients, the layers and the settings.
        options: how samples are divided into training and test.

    Raises:
        UsageError: a client has no test data, or data do not fit.
    """
    for subject in measurement.subjects if options.test is not None else ():
        check_known("client with test data", subject.client, options.test or {})

    def judge(parts: Sequence[Part]) -> tuple[Score, list[Score]]:
        hits, note = _hits(parts, classify)
        places = [part.tested() for part in parts]
        pairs = list(zip(parts, places, strict=True))
        labels = [part.y[place] for part, place in pairs]
        groups = [
            None if part.groups is None else part.groups[place] for part, place in pairs
        ]
        all_groups = None
        if all(group is not None for group in groups):
            all_groups = nested_groups(groups)
        scores = [
            _accuracy(*client_hits, note)
            for client_hits in zip(hits, labels, groups, strict=True)
        ]
        all_results = np.concatenate(hits), np.concatenate(labels)
        return _accuracy(*all_results, all_groups, note), scores

    test_note = "given test data"
    if options.test is None:
        test_note = f"{options.folds} folds"
    label = f"{estimator}, {test_note}"
    return pooled_rows(metric, judge, label, measurement, options, options)


def pooled_rows(
    metric: str,
    judge: Callable[[Sequence[Part]], tuple[Score, list[Score]]],
    estimator: str,
    measurement: Measurement,
    options: Any,
    probe: ProbeOptions | None = None,
) -> list[Row]:
    """Return rows of each client's own features (``own``), and of those of all clients (``pooled``).

    Args:
        metric: name in the rows.
        judge: clients' features -> the score of all, and each client's. It may raise :class:`NoValue`.
        estimator: how the values are computed, for the rows.
        measurement: the clients, the layers and the settings.
        options: options of the metric, with the number of ``samples``.
        probe: options of a probe, which say how samples are held out. The pool then has a row for each client, too.
    """
    subjects, seed, clock = measurement.subjects, measurement.seed, measurement.clock
    used_layers = [layer for layer in measurement.layers if layer.used]
    paths = sorted({layer.output for layer in used_layers})
    samples_of_client = max(options.samples // max(len(subjects), 1), 1)
    own_scores: list[dict[str, str | tuple[Score, list[Score]]]] = []
    pool: dict[str, list[Part | str]] = {path: [] for path in paths}

    def judged(parts: Sequence[Part]) -> tuple[Score, list[Score]]:
        clock.check()
        return judge(parts)

    for subject in measurement.turns():
        train = features_of(measurement, subject, paths, options.samples)
        y, groups = train.y, subject.groups
        if groups is not None:
            groups = groups[train.sample]
        fold, test_features = np.full(len(y), -1), None
        if probe is not None and probe.test is not None:
            test_split = probe.test[subject.client]
            test_features = features_of(
                measurement, subject, paths, options.samples, test_split
            )
            groups = getattr(test_split, "groups", None)
            if groups is not None:  # those of training samples are not read
                groups = np.concatenate([fold, groups[test_features.sample]])
            fold = np.concatenate([fold, np.zeros(len(test_features.y), int)])
            y = np.concatenate([y, test_features.y])
        elif probe is not None:
            fold = folds_of(y, probe.folds, seed, groups)
        own_scores.append({})
        for path in clock.turns(paths):
            part: Part | str
            try:
                x = train.at(path)
                if test_features is not None:
                    x = np.concatenate([x, test_features.at(path)])
                part = Part(subject.client, x, y, fold, groups)
            except NoValue as reason:
                part = f"at client {subject.client!r}: {reason}"
            own_scores[-1][path] = _judged(judged, [part])
            if isinstance(part, Part):
                part = _first(part, samples_of_client, probe, seed)
            pool[path].append(part)
    rows = []
    common: dict[str, Any] = {"metric": metric, "estimator": estimator}
    pooled = {path: _judged(judged, parts) for path, parts in clock.turns(pool.items())}
    for layer in measurement.layers if subjects else ():
        common["layer"] = layer
        for subject, scores in zip(subjects, own_scores, strict=True):
            rows += _rows(scores.get(layer.output), None, "own", subject, **common)
        pooled_scores = pooled.get(layer.output)
        for k, subject in enumerate(subjects if probe is not None else ()):
            rows += _rows(pooled_scores, k, "pooled", subject, **common)
        rows += _rows(pooled_scores, None, "pooled", None, **common)
    return rows


def _judged(
    judge: Callable[[Sequence[Part]], tuple[Score, list[Score]]],
    parts: Sequence[Part | str],
) -> str | tuple[Score, list[Score]]:
    """Return the scores of some clients' features, or why there are none.

    Args:
        judge: clients' features -> the score of all, and each client's.
        parts: the features of each client, or why it has none. One such reason is the
            result.
    """
    parts_with_features = [part for part in parts if isinstance(part, Part)]
    for part in parts:
        if isinstance(part, str):
            return part
    client_text = "at all clients"
    if len(parts_with_features) == 1:
        client_text = f"at client {parts_with_features[0].client!r}"
    if len({part.x.shape[1] for part in parts_with_features}) > 1:
        return f"{client_text}: features of different widths"
    try:
        return judge(parts_with_features)
    except NoValue as reason:
        return f"{client_text}: {reason}"


def _first(part: Part, count: int, probe: ProbeOptions | None, seed: int) -> Part:
    """Return some of a client's samples, at most ``count``, and as many of given test data.

    They are drawn at random, and each class keeps about its share. Without test data
    they get new folds.

    Args:
        part: the client's samples.
        count: maximum number of samples, at least 1.
        probe: how samples are held out. None means no folds.
        seed: seed of the draw.
    """
    has_test = probe is not None and probe.test is not None
    rows = []
    for number in (-1, 0) if has_test else (None,):
        place = np.flatnonzero((part.fold == number) | (number is None))
        # one of so many alike parts
        folds = folds_of(part.y[place], -(-len(place) // count), seed)
        rows.append(place[folds == 0][:count])
    chosen_samples = np.concatenate(rows)
    y, groups = (
        part.y[chosen_samples],
        None if part.groups is None else part.groups[chosen_samples],
    )
    fold = part.fold[chosen_samples]
    if probe is not None and not has_test:
        fold = folds_of(y, probe.folds, seed, groups)
    return Part(part.client, part.x[chosen_samples], y, fold, groups)


def _hits(parts: Sequence[Part], classify: Classify) -> tuple[list[Array], str]:
    """Return which predictions of a probe are right, [n] of bool for each part, and a note on its fits.

    The predictions of a part are in the order of :meth:`Part.tested`. The note is empty
    if all fits converged.

    Raises:
        NoValue: there are fewer than two samples, no training samples, or only one
            class in all or in the training samples of every fold.
    """
    from sklearn.exceptions import ConvergenceWarning

    labels = np.concatenate([part.y for part in parts])
    if len(labels) < 2:
        raise NoValue(f"{len(labels)} samples, at least 2 are needed")
    if len(np.unique(labels)) < 2:
        raise NoValue("samples of one class")
    folds = 1 + max(int(part.fold.max()) for part in parts)
    right_of: list[list[Array]] = [[np.zeros(0, dtype=bool)] for _ in parts]
    classes = 0  # that train at once
    with warnings.catch_warnings(record=True) as warnings_caught:
        warnings.simplefilter("always", ConvergenceWarning)
        for rounds in zip(*(part.rounds(folds) for part in parts), strict=True):
            arrays = [np.concatenate(column) for column in zip(*rounds, strict=True)]
            x, y, test, expected = arrays
            if not len(y):
                raise NoValue("no samples to train on beside those held out")
            classes = max(classes, len(np.unique(y)))
            is_right = classify(x, y, test) == expected
            ends = np.cumsum([len(fold[3]) for fold in rounds])[:-1]
            for hits, client_hits in zip(
                right_of, np.split(is_right, ends), strict=True
            ):
                hits.append(client_hits)
    if classes == 1:
        raise NoValue("samples of one class train in every fold")
    n_unconverged = sum(
        issubclass(warning.category, ConvergenceWarning) for warning in warnings_caught
    )
    n_fits = len(right_of[0]) - 1
    note = ""
    if n_unconverged:
        note = f", {n_unconverged} of {n_fits} fits not converged"
    return [np.concatenate(hits) for hits in right_of], note


def _accuracy(hits: Array, labels: Array, groups: Array | None, note: str) -> Score:
    _, number, counts = np.unique(labels, return_inverse=True, return_counts=True)
    comparison_scores = {
        "balanced": float((np.bincount(number, hits) / counts).mean()),
        "guessing": float(counts.max() / len(labels)),
    }
    error = accuracy_error(hits, groups)
    return Score(float(hits.mean()), error, len(hits), note, comparison_scores)


def _rows(
    scores_or_reason: str | tuple[Score, list[Score]] | None,
    k: int | None,
    variant: str,
    subject: ClientModel | None,
    *,
    metric: str,
    estimator: str,
    layer: Layer,
) -> list[Row]:
    """Return the row of one score at a layer, and a row of each number to compare it with.

    Args:
        scores_or_reason: the score of all clients and each client's. A text is the
            reason that there is none. None means that the layer is unused.
        k: number of the client whose score is taken. None means that of all clients.
        variant: variant of the first row.
        subject: the client of the rows. None means all clients (client "").
        metric, estimator: columns of the rows.
        layer: the layer.
    """
    columns: dict[str, Any] = {"layer": layer.name, "variant": variant}
    if subject is not None:
        columns |= {"client": subject.client, "n_train": subject.n_train}
    reason = ""
    score = Score(None, None, 0, "")
    if not layer.used or scores_or_reason is None:
        reason = "unused in the forward pass"
    elif isinstance(scores_or_reason, str):
        reason = f"output of layer {layer.name!r} {scores_or_reason}"
    else:
        if k is None:
            score = scores_or_reason[0]
        else:
            score = scores_or_reason[1][k]
    columns |= {"n_samples": score.n_samples, "estimator": estimator + score.note}
    rows = [row_or_reason(metric, score.value, reason, stderr=score.error, **columns)]
    for name, value in score.others.items():
        columns["variant"] = f"{variant}_{name}"
        rows.append(row_or_reason(metric, value, "", **columns))
    return rows


def accuracy_error(hits: Array, groups: Array | None = None) -> float:
    """Return the standard deviation of an accuracy of k right in n.

    It is sqrt(p (1 - p) / (n + 3)) with p = (k + 1) / (n + 2), as of a beta
    distribution. With ``groups`` [n], such as patients, n and k are divided by
    :func:`fl_core.statistics.design_effect`. ``hits`` [n] says which predictions are
    right.

    >>> hits = np.repeat([True, False], 50)
    >>> round(accuracy_error(hits), 3), round(accuracy_error(hits, np.arange(100) // 10), 3)
    (0.049, 0.139)
    """
    if groups is None:
        effect = 1.0
    else:
        effect = design_effect(hits, groups)
    n, n_right = len(hits) / effect, float(hits.sum()) / effect
    p = (n_right + 1) / (n + 2)
    return float(np.sqrt(p * (1 - p) / (n + 3)))
