"""Metrics of features: similarities of representations, probes, and the separability of classes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from fl_core.data.arrays import nested_groups
from fl_core.errors import ABOVE_0, SHARE, OneOf, UsageError, at_least
from fl_core.rows import Row

from ..measurement import NoValue, row_or_reason
from ..representation import similarity as measures
from ..representation.features import Array, constant, flattened, scatter_ratio
from ..representation.probes import (
    SAMPLES,
    Part,
    ProbeOptions,
    Score,
    logistic,
    pooled_rows,
    probe_rows,
)
from ..representation.similarity import (
    POSITIONS,
    CommonSamples,
    LayerComparison,
    SimilarityOptions,
    by_directions,
    by_grams,
)
from .base import Measurement, metric

similarity = partial(
    metric, variants=POSITIONS, pairs=True, requires="samples", features="probe"
)
"""A decorator that registers a metric of pairs of clients on the same samples."""
of_classes = partial(
    metric,
    variants=("own", "pooled"),
    classes=True,
    features="own",
)
"""A decorator that registers a metric of classes.

The metric reads each client's samples (``own``), and those of all clients (``pooled``).
"""
of_probes = partial(
    of_classes,
    variants=(
        *("own", "own_balanced", "own_guessing"),
        *("pooled", "pooled_balanced", "pooled_guessing"),
    ),
)
"""A decorator that registers a probe.

Next to each accuracy stand the balanced accuracy and that of guessing.
"""


@dataclass(frozen=True)
class KernelOptions(SimilarityOptions):
    """The options of CKA with any kernel, in addition to those of all similarities.

    Attributes:
        estimator: ``"full"`` compares all samples at once. ``"minibatch"`` averages
            unbiased HSICs of the measurement's ``batch`` samples each.

    Raises:
        UsageError: ``positions`` is unknown, or options do not go together. Also an
            unknown estimator (checked by ``Metric.settings``).
    """

    estimator: Annotated[str, OneOf("estimator", measures.ESTIMATORS)] = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimator == "minibatch" and self.positions == "samples":
            raise UsageError(
                "positions='samples' must have estimator 'full'; got 'minibatch'. Its Gram matrices are too large."
            )

    def check(self, measurement: Measurement) -> None:
        """Check that a batch is large enough for the estimator ``"minibatch"``.

        Raises:
            UsageError: the estimator is ``"minibatch"``, and the measurement's batch
                has fewer than 4 samples.
        """
        if self.estimator == "minibatch":
            measures.batch_bounds(0, measurement.batch or measures.LEAST_SAMPLES)


@dataclass(frozen=True)
class Cka(KernelOptions):
    """The options of linear CKA.

    Attributes:
        backend: ``"fedlayers"``, or ``"torch_cka"`` as a cross-check by that package: minibatches of one size, and
            positions ``"flatten"``. It rounds more, see :mod:`diagnostics.representation.similarity`.

    Raises:
        UsageError: ``positions`` is unknown, or options do not go together. Also an
            unknown estimator or backend (checked by ``Metric.settings``).
    """

    backend: Annotated[str, OneOf("backend", measures.BACKENDS)] = "fedlayers"

    def __post_init__(self) -> None:
        super().__post_init__()
        estimator_and_positions = self.estimator, self.positions
        if self.backend == "torch_cka" and estimator_and_positions != (
            "minibatch",
            "flatten",
        ):
            raise UsageError(
                "backend 'torch_cka' must have estimator 'minibatch' and positions 'flatten'; "
                f"got {self.estimator!r} and {self.positions!r}."
            )

    def check(self, measurement: Measurement) -> None:
        """Check that the measurement's batch and mode fit the estimator and the backend.

        Raises:
            UsageError: the batch is too small, or the mode is not ``"eval"`` with backend ``"torch_cka"``.
        """
        super().check(measurement)
        if self.backend == "torch_cka" and measurement.mode != "eval":
            raise UsageError(
                f"mode must be 'eval' with backend 'torch_cka'; got {measurement.mode!r}."
            )


@similarity(
    description="linear CKA between the clients' representations of the same samples",
    direction="higher = more similar; 1 = same",
    how='all pairs of clients, full or unbiased minibatch. `backend="torch_cka"` cross-checks',
    look={
        "label": "mean 1 − CKA to the others",
        "meaning": "0 = same representation",
    },
)
def cka(measurement: Measurement, options: Cka) -> list[Row]:
    """Return one row a layer and pair of clients (in the order given): linear CKA, 1 = same.

    Values are in [0, 1], but those of ``"minibatch"`` may fall below 0. The module
    :mod:`diagnostics.representation.similarity` has the formulas, and says when there
    is no value. With the option ``variant="pairs"`` each layer of one client is also
    compared with each layer of the other.
    :func:`~diagnostics.plots.layers.cka_matrices` draws these.

    Every model sees the same samples in the same order. A loader is read once, so it
    may shuffle. If one forward pass calls a module several times, its last call counts.

    Memory: one model's features of all layers. Each model and layer has n x n numbers (``"minibatch"``: n x batch).
    With ``positions="samples"`` it is the features of one layer and all models.

    Raises:
        UsageError: the probe does not fit the models, or the batch does not fit the
            backend.
    """
    comparison = LayerComparison("cka", measurement, options)
    estimator = options.estimator
    if options.positions == "samples":
        values = by_directions(comparison, measures.LINEAR_CKA)
    elif options.backend == "torch_cka":
        values, estimator = measures.by_torch_cka(comparison), "minibatch, torch_cka"
    else:
        values = by_grams(comparison, estimator)
    return comparison.rows(*values, estimator=estimator)


@dataclass(frozen=True)
class RbfCka(KernelOptions):
    """The options of CKA with a radial kernel; ``positions`` are ``"flatten"`` or ``"mean"``.

    Attributes:
        bandwidth: the kernel's bandwidth as a fraction of the median distance between
            samples. The rows' column ``estimator`` has it.

    Raises:
        UsageError: ``positions`` is unknown. Also an unknown estimator, or a bandwidth
            that is not above 0 (checked by ``Metric.settings``).
    """

    bandwidth: Annotated[float, ABOVE_0] = measures.BANDWIDTH

    treatments: ClassVar[tuple[str, ...]] = ("flatten", "mean")


@similarity(
    description="CKA with a radial kernel between the clients' representations of the same samples",
    direction="higher = more similar; 1 = same",
    how="a bandwidth relative to the median distance",
    variants=("flatten", "mean"),
    look={
        "label": "mean 1 − RBF CKA to the others",
        "meaning": "0 = same representation",
    },
)
def rbf_cka(measurement: Measurement, options: RbfCka) -> list[Row]:
    """Return one row a layer and pair of clients: CKA with a radial kernel; 1 = same.

    Values are at most 1. :mod:`diagnostics.representation.similarity` has the kernel,
    and says when there is no value.

    Memory: as for :func:`~diagnostics.metrics.of_features.cka`.

    Raises:
        UsageError: the probe does not fit the models.
    """
    comparison = LayerComparison("rbf_cka", measurement, options)
    values = by_grams(comparison, options.estimator, options.bandwidth)
    return comparison.rows(
        *values,
        estimator=f"{options.estimator}, bandwidth {options.bandwidth:g} x median distance",
    )


@similarity(
    description="mean canonical correlation between the clients' representations of the same samples",
    direction="higher = more similar; 1 = same up to a linear map",
    how="mean canonical correlation of all directions",
    look={
        "label": "mean 1 − CCA to the others",
        "meaning": "0 = same up to a linear map",
    },
)
def cca(measurement: Measurement, options: SimilarityOptions) -> list[Row]:
    """Return one row a layer and pair of clients: the mean canonical correlation in [0, 1].

    A value of 1 means same up to a linear map. See
    :data:`diagnostics.representation.similarity.CCA`. A layer whose features span n - 1
    directions on n samples has no value. Layers with n - 1 features or more usually do.
    Use more samples, ``positions="samples"`` or ``"mean"``, or svcca.

    Memory: one model's features of all layers. Each model and layer has n x min(n, d) numbers. With
    ``positions="samples"`` it is the features of one layer and all models.

    Raises:
        UsageError: the probe does not fit the models.
    """
    comparison = LayerComparison("cca", measurement, options)
    return comparison.rows(*by_directions(comparison, measures.CCA), estimator="full")


@dataclass(frozen=True)
class Svcca(SimilarityOptions):
    """The options of SVCCA: the samples, and how much variance the compared directions hold.

    Attributes:
        variance: share of each client's variance that the principal directions hold,
            above 0 and at most 1. The rows' column ``estimator`` has it.

    Raises:
        UsageError: ``positions`` is unknown, or does not go with ``variant``. Also a
            variance out of range (checked by ``Metric.settings``).
    """

    variance: Annotated[float, SHARE] = measures.VARIANCE


@similarity(
    description="mean canonical correlation of the principal directions that hold 99 % of the variance",
    direction="higher = more similar; 1 = same up to a linear map of these",
    how="mean canonical correlation of the directions that hold 99 % of the variance",
    look={
        "label": "mean 1 − SVCCA to the others",
        "meaning": "0 = same up to a linear map",
    },
)
def svcca(measurement: Measurement, options: Svcca) -> list[Row]:
    """Return one row a layer and pair of clients: the mean canonical correlation of the main directions, in [0, 1].

    The main directions are the principal ones that hold the share ``variance`` of each client's variance. See
    :func:`~diagnostics.metrics.of_features.cca` and :func:`diagnostics.representation.similarity.svcca_measure`.

    Memory: as for :func:`~diagnostics.metrics.of_features.cca`.

    Raises:
        UsageError: the probe does not fit the models.
    """
    comparison = LayerComparison("svcca", measurement, options)
    values = by_directions(comparison, measures.svcca_measure(options.variance))
    return comparison.rows(
        *values, estimator=f"full, {100 * options.variance:g} % of the variance"
    )


@similarity(
    description="orthogonal Procrustes angle between the clients' representations of the same samples",
    direction="higher = less similar; 0 = same up to a rotation, pi/2 = unrelated",
    how="the best rotation",
    look={
        "label": "mean Procrustes angle to the others",
        "meaning": "0 = same representation",
    },
    distance=True,
)
def procrustes(measurement: Measurement, options: SimilarityOptions) -> list[Row]:
    """Return one row a layer and pair of clients: the orthogonal Procrustes angle in radians; 0 = same.

    0 means same up to a rotation, pi / 2 unrelated. See :data:`diagnostics.representation.similarity.PROCRUSTES`.

    Memory: as for :func:`~diagnostics.metrics.of_features.cca`.

    Raises:
        UsageError: the probe does not fit the models.
    """
    comparison = LayerComparison("procrustes", measurement, options)
    return comparison.rows(
        *by_directions(comparison, measures.PROCRUSTES), estimator="full", unit="rad"
    )


@dataclass(frozen=True, eq=False)
class LinearProbe(ProbeOptions):
    """The options of the linear probe: how it is trained and tested.

    Attributes:
        C: inverse strength of the regularisation, see :func:`diagnostics.representation.probes.logistic`.

    Raises:
        UsageError: C is not above 0, or there are fewer than 2 folds or samples
            (checked by ``Metric.settings``).
    """

    C: Annotated[float, ABOVE_0] = 1.0


@of_probes(
    description="accuracy of a logistic regression on a layer's output, on samples that it was not trained on",
    direction="higher = a linear classifier tells the classes apart better; 1 = all right",
    how="judged on validation samples or by folds; for each client and for all together, one fit a layer and fold",
    look={"label": "accuracy of a linear probe", "meaning": "1 = all right"},
)
def linear_probe(measurement: Measurement, options: LinearProbe) -> list[Row]:
    """Return the accuracy, from 0 to 1, of a logistic regression on each layer's flattened output.

    Higher means that a linear classifier separates the classes better. The probe is never tested on samples that
    trained it. The samples of ``test`` are used if given. Else each sample is tested once in cross-validation over
    folds that are stratified by class. The column ``estimator`` says which. For variants and error see
    :func:`diagnostics.representation.probes.probe_rows`. The error does not include the variation of the training
    samples.

    Memory: a forward pass of ``batch`` samples. The outputs of all layers are stored for at most ``samples`` samples of
    one client, and for ``samples`` of all clients together. One layer at a time has a float64 copy. If a sample has
    more than n features, that layer has n x n numbers instead.

    Raises:
        UsageError: a client has no test data, or data do not fit.
    """

    def classify(x: Array, y: Array, others: Array) -> Array:
        return logistic(x, y, others, options.C)

    return probe_rows(
        "linear_probe",
        classify,
        f"logistic regression, C={options.C:g}",
        measurement,
        options,
    )


DISTANCES = ("cosine", "euclidean")


@dataclass(frozen=True, eq=False)
class KnnProbe(ProbeOptions):
    """The options of the nearest-neighbour probe: neighbours, distance, and the samples to classify.

    Attributes:
        neighbours: the number of neighbours that vote. There is no value unless the training samples are more than
            these.
        distance: ``"cosine"`` or ``"euclidean"``.

    Raises:
        UsageError: there are no neighbours, the distance is unknown, or there are fewer
            than 2 folds or samples (checked by ``Metric.settings``).
    """

    neighbours: Annotated[int, at_least(1)] = 5
    distance: Annotated[str, OneOf("distance", DISTANCES)] = "cosine"


@of_probes(
    description="accuracy of the vote of the nearest neighbours by a layer's output",
    direction="higher = neighbours are of one class more often; 1 = all right",
    how="judged on validation samples or by folds; for each client and for all together",
    look={"label": "accuracy of nearest neighbours", "meaning": "1 = all right"},
)
def knn_probe(measurement: Measurement, options: KnnProbe) -> list[Row]:
    """Return the accuracy, from 0 to 1, of the vote of the nearest neighbours by a layer's flattened output.

    The output is not standardised. Higher means that neighbours are of one class more
    often. Variants, samples and error are those of
    :func:`~diagnostics.metrics.of_features.linear_probe`. The column ``estimator`` has
    the number of neighbours and the distance. A layer whose output is constant over the
    samples has no value.

    Memory: as for the linear probe, with n x m distances instead of the n x n numbers.

    Raises:
        UsageError: a client has no test data, or data do not fit.
    """

    def classify(x: Array, y: Array, others: Array) -> Array:
        if constant(np.concatenate([x, others])):
            raise NoValue("constant over the samples")
        if len(x) <= options.neighbours:
            raise NoValue(
                f"{len(x)} samples train, more than {options.neighbours} neighbours are needed"
            )
        from sklearn.neighbors import KNeighborsClassifier

        classifier = KNeighborsClassifier(
            options.neighbours, metric=options.distance, algorithm="brute"
        )
        return np.asarray(
            classifier.fit(x.astype(float), y).predict(others.astype(float))
        )

    estimator = f"{options.neighbours} nearest, {options.distance}"
    return probe_rows("knn_probe", classify, estimator, measurement, options)


@dataclass(frozen=True)
class Separability:
    """The options of separability: how many samples are read.

    Attributes:
        samples: maximum number of samples of each client, drawn with the seed, and of all clients together in the
            pooled set.

    Raises:
        UsageError: there are fewer than 2 samples (checked by ``Metric.settings``).
    """

    samples: Annotated[int, at_least(2)] = SAMPLES


@of_classes(
    description="scatter between the classes over scatter within them, of a layer's output",
    direction="higher = the classes lie further apart",
    how="scatter between the classes over scatter within them, with a jackknife error",
    look={
        "label": "class scatter, between / within",
        "meaning": "higher = classes further apart",
        "log": True,
    },
)
def separability(measurement: Measurement, options: Separability) -> list[Row]:
    """Return the scatter between the classes over the scatter within them, for each layer's flattened output.

    See :func:`diagnostics.representation.features.scatter_ratio`. Higher means that the
    classes lie further apart. Variant ``"own"`` uses each client's samples. Variant
    ``"pooled"``, client "", uses the samples of all clients, each with its own model.
    If the pooled value is below the clients' own values, the clients' models place a
    class differently. A client with samples of one class has no value.

    Memory: a forward pass of ``batch`` samples. The outputs of all layers are stored for at most ``samples`` samples of
    one client, and for ``samples`` of all clients together.

    Raises:
        UsageError: data do not fit.
    """

    def judge(parts: Sequence[Part]) -> tuple[Score, list[Score]]:
        x, y = (np.concatenate([getattr(p, name) for p in parts]) for name in "xy")
        groups = None
        if all(part.groups is not None for part in parts):
            groups = nested_groups(part.groups for part in parts)
        value, error = scatter_ratio(x, y, measurement.seed, groups)
        return Score(value, error, len(y), ""), []

    estimator = "traces, jackknife error"
    return pooled_rows("separability", judge, estimator, measurement, options)


@metric(
    description="how often the clients' models predict different classes for the same samples, without labels",
    direction="higher = more different predictions; 0 = the same",
    how="all pairs of clients, at the last layer; also the distance of the probabilities",
    variants=("classes", "probabilities", "chance"),
    look={
        "label": "mean disagreement with the others",
        "meaning": "0 = same predictions",
    },
    pairs=True,
    distance=True,
    requires="samples",
    classes=True,
    needs_all_layers=True,
)
def output_disagreement(measurement: Measurement, options: CommonSamples) -> list[Row]:
    """Return three rows a pair of clients on how their predictions differ, at the last layer that is used.

    * ``classes``: the share of samples whose predicted classes differ, in [0, 1]
    * ``probabilities``: the mean over samples of (1/2) sum_c |p_c - q_c|, in [0, 1],
      for the clients' probabilities p and q of the classes
    * ``chance``, the null of ``classes``: what predictions of the same frequencies f and g give if they do not depend
      on the sample, 1 - sum_c f_c g_c

    Two models with different numbers of classes have no value.

    Memory: the probabilities of all clients for the probe samples.

    Raises:
        UsageError: the probe does not fit the models.
    """
    subjects, rows = measurement.subjects, []
    layers = measurement.layers
    last_layer = ([layer for layer in layers if layer.used] or layers)[-1]
    similarity_options = SimilarityOptions(options.probe, options.samples)
    comparison = LayerComparison("output_disagreement", measurement, similarity_options)

    def probabilities(z: Tensor) -> Tensor:
        if not z.isfinite().all():
            raise NoValue("not finite")
        return measurement.loss.logits(z).double().softmax(1)

    outputs, faults = comparison.sides(probabilities, [""], flattened)
    no_outputs = torch.full((1, 0), torch.nan)  # of no classes
    for a, b in itertools.combinations(range(len(subjects)), 2):
        p, q = (outputs.get(("", client), no_outputs) for client in (a, b))
        by_variant = dict.fromkeys(("classes", "probabilities", "chance"), no_outputs)
        reason = faults.get(("", a), faults.get(("", b), "outputs of other classes"))
        if p.shape == q.shape != no_outputs.shape:
            reason, (classes_p, classes_q) = "", (z.argmax(1) for z in (p, q))
            f, g = (
                c.bincount(minlength=p.shape[1]) / len(p)
                for c in (classes_p, classes_q)
            )
            by_variant = {
                "classes": (classes_p != classes_q).double(),
                "probabilities": (p - q).abs().sum(1) / 2,
                "chance": (1 - f.double() @ g.double()).reshape(1),
            }
        for variant, values in by_variant.items():
            error = None
            if len(values) > 1:
                error = float(values.std()) / len(values) ** 0.5
            rows.append(
                row_or_reason(
                    comparison.metric,
                    float(values.mean()),
                    reason,
                    variant=variant,
                    stderr=error,
                    estimator="full",
                    layer=last_layer.name,
                    n_samples=len(comparison.x),
                    client=subjects[a].client,
                    client_b=subjects[b].client,
                )
            )
    return rows
