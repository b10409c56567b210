"""Predictions of a model, their scores and their calibration.

Nothing here trains or changes a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_core import tree
from fl_core.errors import NonFiniteError, UsageError
from fl_core.rows import (
    CLASSIFICATION,
    MULTILABEL,
    OWN,
    POSITIONS,
    REGRESSION,
    SURVIVAL,
    scores_of,
)
from fl_core.training.border import FittedLoss
from fl_core.training.losses import ClassWeighted, Loss
from fl_core.tree import in_mode

if TYPE_CHECKING:
    from fl_core.data import FederatedData

Array = NDArray[Any]

SCORE_BATCH = 1024
"""Samples of a batch when models predict and are scored."""
BINS = 15
"""Intervals of equal width from 0 to 1 into which the calibration error sorts samples by their top probability."""


def scores(
    outputs: Tensor,
    y: Tensor,
    loss: Loss,
    positive: int = 1,
    absent: Sequence[int] = (),
) -> dict[str, float]:
    """Return the scores of a model's outputs by name. A score without a value is NaN.

    The task of the loss decides which scores there are. :data:`fl_core.rows.TABLE` has their directions, and why a
    value may be missing. Each sample's loss is computed in the outputs' type, and all else in float64. ``loss`` is the
    mean over samples.

    **Classes**: logits [n, C] (or the loss's own form of them) and labels [n], with p =
    softmax(logits). All of these scores lie between 0 and 1.

    - ``accuracy``: the share of right predictions. Of equal logits the lowest class is the prediction.
    - ``macro_f1``: the mean F1 of the classes among the labels or predictions (PLayer-FL, Eq. A.4). A class that is
      never predicted right has 0. Classes ``absent`` from all of the federation are left out.
    - ``balanced_accuracy``: the mean recall of the classes among the labels.
    - ``auroc``: the probability that a sample of a class has a higher p of it than another sample (Hanley and McNeil
      1982). Ties count a half.
    - ``auprc``: average precision, sum_k (R_k - R_{k-1}) P_k over the distinct thresholds.
    - ``ece``: expected calibration error, ``sum_b (n_b / n) |accuracy_b - mean top p_b|``,
      over 15 intervals of equal width of the top probability (Guo et al. 2017).

    With two classes ``auroc`` and ``auprc`` describe ``positive``. With more they are the mean over the classes among
    the labels, each against the rest. They are NaN if all labels are equal. Samples are ranked by differences of
    logits, so equal p tie exactly.

    **Numbers**: outputs z [n, 1] and targets y [n], or k of them a sample. Soft labels
    are compared with probabilities, and counts with rates. For soft labels ``accuracy``
    is the share of samples whose largest probability is at the largest label. A loss
    from Python of other outputs has no score but its own.

    - ``mse``, ``mae``: the mean squared and absolute error.
    - ``r2``: 1 - sum (y - z)^2 / sum (y - mean y)^2, at most 1. It is NaN if all targets are equal.

    **Survival**: log hazards [n, 1], and times with events [n, 2].

    - ``c_index``: Harrell's concordance, 0 to 1. A pair is comparable if the earlier time has an event, or of equal
      times exactly one. It is concordant if the sample with that event has the higher hazard. Equal hazards count a
      half. It is NaN without comparable pairs.

    **Labels at positions**, such as next tokens or pixels; those that are ignored do not count.

    - ``position_accuracy``: the share of right positions. ``perplexity``: exp of the mean -log p of their labels.
    - ``mean_iou``: the mean over classes of ``|both| / |label or prediction|``
      (Jaccard).

    All three are NaN if no position counts.

    **Several labels**: outputs and labels of 0 and 1, both [n, C].

    - ``macro_auroc``, ``macro_auprc``: the mean of each label's area, over labels with both values. NaN without any.

    Args:
        outputs: a model's outputs, [n, outputs].
        y: the samples' labels or targets, [n, ...] in the form of the loss's task.
        loss: the loss. It decides the task and converts outputs to logits.
        positive: index of the class that ``auroc`` and ``auprc`` of two classes describe.
        absent: indices of the classes that no client has.

    Raises:
        UsageError: there are no samples, shapes do not agree, or labels have another kind or lie outside the C classes.
        NonFiniteError: an output is NaN or infinite.
    """
    outputs, y = outputs.detach().cpu(), y.detach().cpu()
    loss.check_batch(outputs, y)
    is_finite = torch.isfinite(outputs).all(1)
    if not is_finite.all():
        raise NonFiniteError(
            f"{int((~is_finite).sum())} of {len(y)} samples have logits that are NaN or infinite"
        )
    value = float(loss.per_sample(outputs, y).double().mean())
    if loss.task == OWN:
        return {"loss": value}
    if isinstance(loss, FittedLoss) and loss.task == POSITIONS:
        return {"loss": value, **_of_positions(outputs, loss.labels(y), loss)}
    logits = loss.logits(outputs).double().numpy()
    if loss.task == REGRESSION:
        fitted_loss = None
        if isinstance(loss, FittedLoss):
            fitted_loss = loss
        target = (fitted_loss.targets(y) if fitted_loss else y).double().numpy()
        predictions = logits.reshape(y.shape)
        class_scores: dict[str, float] = {}
        if fitted_loss and fitted_loss.has_classes:
            hits = predictions.argmax(axis=1) == target.argmax(axis=1)
            class_scores = {"accuracy": float(hits.mean())}
        return {**class_scores, "loss": value, **_number_scores(predictions, target)}
    if loss.task == MULTILABEL:
        return {"loss": value, **_of_labels(logits, y.numpy() > 0)}
    if loss.task == SURVIVAL:
        return {
            "loss": value,
            "c_index": concordance(logits[:, 0], *y.double().numpy().T),
        }
    labels = y.numpy()
    predictions = logits.argmax(axis=1)
    classes = logits.shape[1]
    counts = np.bincount(labels * classes + predictions, minlength=classes**2).reshape(
        classes, classes
    )
    correct_counts, label_counts = counts.diagonal(), counts.sum(axis=1)
    involved_counts = counts.sum(axis=0) + label_counts  # 2 TP + FP + FN of a class
    is_present = involved_counts > 0
    is_present[list(absent)] = False
    metrics = {
        "accuracy": float(correct_counts.sum() / len(labels)),
        "macro_f1": float(
            (2 * correct_counts[is_present] / involved_counts[is_present]).mean()
        ),
        "loss": value,
    }
    # p up to a factor, which is 1 / p of the prediction
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    top_probabilities = 1 / shares.sum(axis=1)
    bins = np.ceil(top_probabilities * BINS).astype(np.int64)
    gaps = np.bincount(bins, weights=(predictions == labels) - top_probabilities)
    auroc, auprc = (math.nan, math.nan)
    # so that each class among the labels has samples, and so has its rest
    if np.count_nonzero(label_counts) > 1:
        counted_classes = (
            label_counts.nonzero()[0] if classes > 2 else np.array([positive])
        )
        auroc, auprc = _areas(*_rank(logits, counted_classes), labels, counted_classes)
    return metrics | {
        "auroc": auroc,
        "auprc": auprc,
        "balanced_accuracy": float(
            (correct_counts[label_counts > 0] / label_counts[label_counts > 0]).mean()
        ),
        "ece": float(np.abs(gaps).sum() / len(labels)),
    }


def _rank(logits: Array, classes: Array) -> tuple[Array, Array]:
    """Order samples by their p of each class, the highest first, and mark the last of each group of equal p.

    With two classes the difference of their logits decides, exactly. With more it is log p = (z - max z) - log(1 + r),
    where r sums exp(z_j - max z) over the others. Both its parts come from the sorted differences of logits, so that
    samples of equal p have equal numbers to the last bit.

    Args:
        logits: logits [n, C].
        classes: indices of the K classes, [K].

    Returns:
        The order and the marks, both [K, n].
    """
    gaps = logits - logits.max(axis=1, keepdims=True)
    class_gaps = gaps[:, classes].T
    if logits.shape[1] == 2:
        return _sort(class_gaps - gaps[:, 1 - classes].T)
    sorted_gaps = -np.sort(-gaps, axis=1)
    # the least first, and in that order of all samples
    terms = np.exp(sorted_gaps[:, :0:-1].T.copy())
    log_sums = np.log1p(terms.sum(axis=0))
    return _sort(class_gaps - log_sums)


def _sort(key: Array) -> tuple[Array, Array]:
    """Order samples by each row of a key [K, n], the largest first, and mark ties.

    Returns:
        The order and the marks, both [K, n]. The last of equal keys has a mark.
    """
    order = np.argsort(-key, axis=1)
    sorted_keys = np.take_along_axis(key, order, axis=1)
    is_last = np.ones(order.shape, dtype=bool)
    is_last[:, :-1] = sorted_keys[:, 1:] != sorted_keys[:, :-1]
    return order, is_last


def _number_scores(predicted: Array, target: Array) -> dict[str, float]:
    """Return ``mse``, ``mae`` and ``r2`` of predicted numbers, [n] or [n, ...].

    For constant targets ``r2`` is NaN.
    """
    errors = predicted - target
    spread = float(((target - target.mean(axis=0)) ** 2).sum())
    scores = {"mse": float((errors**2).mean()), "mae": float(np.abs(errors).mean())}
    if spread == 0:
        return {**scores, "r2": math.nan}
    return {**scores, "r2": 1 - float((errors**2).sum()) / spread}


def _areas(
    order: Array, ends: Array, labels: Array, classes: Array
) -> tuple[float, float]:
    """Return the area under the ROC curve and the average precision: the means over some classes.

    Args:
        order, ends: the order and the marks that :func:`_rank` returns, both [K, n].
        labels: the samples' classes, [n].
        classes: indices of the K classes. Each has samples of its own and others.
    """
    n = len(labels)
    positive = labels[order] == classes[:, None]  # [K, n], the highest p first
    hits = positive.cumsum(axis=1)
    n_positive = hits[:, -1]
    positions = np.arange(n)
    hits_reached = hits
    hits_above = hits - positive
    if not ends.all():  # samples of the same p are reached together
        starts = np.roll(ends, 1, axis=1)
        first_positions = np.maximum.accumulate(np.where(starts, positions, 0), axis=1)
        last_positions = np.where(ends, positions, n - 1)[:, ::-1]
        positions = np.minimum.accumulate(last_positions, axis=1)[:, ::-1]
        hits_reached = np.take_along_axis(hits, positions, axis=1)
        hits_above = np.take_along_axis(hits_above, first_positions, axis=1)
    precision = (positive * (hits_reached / (positions + 1))).sum(axis=1) / n_positive
    area = (~positive * (hits_above + hits_reached)).sum(axis=1) / (
        2 * n_positive * (n - n_positive)
    )
    return float(area.mean()), float(precision.mean())


def _of_positions(outputs: Tensor, y: Tensor, loss: FittedLoss) -> dict[str, float]:
    """Return the scores of labels at positions. Each position that counts is a sample.

    They are NaN if no position counts.

    Args:
        outputs: flat outputs, [n, outputs].
        y: labels, [n, ...].
        loss: the loss, which names the label of positions that do not count.
    """
    z, y = outputs.reshape(y.numel(), -1), y.reshape(-1)
    is_counted = y != loss.ignored
    z, y = z[is_counted], y[is_counted]
    if not len(y):
        return dict.fromkeys(scores_of(POSITIONS)[1:], math.nan)
    predictions = z.argmax(1)
    hits, label_counts, predicted_counts = (
        torch.bincount(classes, minlength=z.shape[1]).double()
        for classes in (y[predictions == y], y, predictions)
    )
    union = label_counts + predicted_counts - hits
    mean_loss = log_losses(z, y).double().mean()
    return {
        "position_accuracy": float(hits.sum() / len(y)),
        "perplexity": float(mean_loss.exp()),
        "mean_iou": float((hits / union)[union > 0].mean()),
    }


def concordance(risk: Array, time: Array, event: Array) -> float:
    """Return Harrell's concordance index of risks with times and events, each [n]; see :func:`scores`.

    A higher risk predicts an earlier event. An event is 1 if it was seen at its time,
    and 0 if the sample was censored then. The index is NaN without comparable pairs.

    >>> concordance(np.array([3.0, 2.0, 2.0]), np.array([1.0, 5.0, 5.0]), np.array([1, 1, 0]))
    0.8333333333333334
    """
    n_concordant, n_pairs = 0.0, 0
    for i in np.flatnonzero(event):
        later_risks = risk[(time > time[i]) | ((time == time[i]) & (event == 0))]
        n_concordant += np.count_nonzero(later_risks < risk[i])
        n_concordant += np.count_nonzero(later_risks == risk[i]) / 2
        n_pairs += len(later_risks)
    if n_pairs:
        return float(n_concordant / n_pairs)
    return math.nan


def _of_labels(logits: Array, positive: Array) -> dict[str, float]:
    """Return ``macro_auroc`` and ``macro_auprc``, the mean areas over several labels.

    Labels without both values, 0 and 1, are left out. Without any label both are NaN.

    Args:
        logits: logits [n, C].
        positive: whether each label is 1, [n, C].
    """
    areas = []
    for k in np.flatnonzero(positive.any(axis=0) & ~positive.all(axis=0)):
        order, ends = _sort(logits[:, k][None])
        labels = positive[:, k].astype(np.int64)
        areas.append(_areas(order, ends, labels, np.array([1])))
    means = np.mean(areas, axis=0) if areas else (math.nan, math.nan)
    return dict(zip(("macro_auroc", "macro_auprc"), map(float, means), strict=True))


def predict(model: nn.Module, x: Tensor, batch: int = SCORE_BATCH) -> Tensor:
    """Return a model's outputs for samples [n, ...], such as logits [n, C].

    They have no gradients. Model, samples and outputs are on one device. At most
    ``batch`` samples are computed at a time. The module predicts in evaluation mode and
    gets its modes back.

    Raises:
        UsageError: there are no samples.
    """
    if len(x) == 0:
        raise UsageError("there must be samples to predict; got none.")
    with torch.no_grad(), in_mode(model, False):
        return torch.cat([model(batch_x) for batch_x in x.split(batch)])


COLDEST, HOTTEST = 1e-3, 1e12
"""The smallest and the largest temperature of a calibration.

At the largest nothing is left of the outputs."""


def base_outputs(
    data: FederatedData, criterion: Loss, client: str | None = None
) -> Tensor:
    """Return constant outputs that predict without features, float64 [outputs].

    They come from training samples. For classes they are the logarithms of the shares
    (n_k + 1) / (n + C), times the weights in the loss. For several labels they are the
    log odds of (n_k + 1) / (n + 2). For survival they are 0. For numbers they have the
    least loss (:meth:`Loss.base_rate`): the mean for ``mse``, the median for ``mae``. A
    :class:`~fl_core.training.border.FittedLoss` has those of its ``base_rate``, too,
    unless the labels are classes.

    Args:
        data: the federation with the training samples.
        criterion: the loss.
        client: name of a client; None for all clients together.

    Raises:
        UsageError: there is no such client.
    """
    clients = data.clients if client is None else (data.client(client),)
    y, task = torch.cat([member.train.y for member in clients]), data.task
    is_fitted = isinstance(criterion, FittedLoss) and task != CLASSIFICATION
    if is_fitted or task == REGRESSION:
        return criterion.base_rate(y)
    if task == MULTILABEL:
        return ((y.double().sum(0) + 1) / (len(y) + 2)).logit()
    if task != CLASSIFICATION:
        return torch.zeros(1, dtype=torch.float64)
    counts = torch.bincount(y, minlength=data.n_classes).double() + 1
    if isinstance(criterion, ClassWeighted):
        counts = counts * torch.tensor(criterion.weights)
    return (counts / counts.sum()).log()


def log_losses(logits: Tensor, y: Tensor) -> Tensor:
    """Return each sample's log loss, [n].

    It is float64 if the logits are.

    Args:
        logits: logits of classes or labels, [n, C].
        y: classes [n], or labels of 0 and 1 [n, C], whose losses are averaged.
    """
    if y.ndim == 1:
        return nn.functional.cross_entropy(logits, y.long(), reduction="none")
    return nn.functional.binary_cross_entropy_with_logits(
        logits, y.double(), reduction="none"
    ).mean(dim=1)


def soft_targets(y: Tensor, weights: Tensor, n_outputs: int) -> Tensor:
    """Return the softened targets to calibrate outputs by, float64 [n, C].

    A sample's class has 1 - e, each other class e / (C - 1). Labels of 1 have 1 - e, those of 0 have e. The margin is
    e = 1 / (n + 2), with the effective number of samples n = (sum w)^2 / sum w^2. It keeps probabilities from 0 and 1
    where no sample is predicted wrongly (Platt 1999, for unweighted samples of two classes).

    >>> soft_targets(torch.tensor([0, 1]), torch.ones(2), 2).tolist()
    [[0.75, 0.25], [0.25, 0.75]]

    Args:
        y: classes [n], or labels of 0 and 1 [n, C].
        weights: weights of the samples, [n], not negative.
        n_outputs: the number C of classes or labels.
    """
    weights = weights.double()
    n_effective = float(weights.sum() ** 2 / (weights**2).sum())
    margin = 1 / (n_effective + 2)
    if y.ndim > 1:
        return margin + (1 - 2 * margin) * y.double()
    other_share = margin / (n_outputs - 1)
    one_hot = nn.functional.one_hot(y.long(), n_outputs).double()
    return other_share + (1 - margin - other_share) * one_hot


def fit(
    outputs: Tensor, y: Tensor, weights: Tensor, base: Tensor
) -> tuple[float, float]:
    """Return the pair (temperature, weight of the base rate) with the least weighted mean log loss.

    The logits are ``outputs / temperature + weight * base``. A temperature alone (Guo et al. 2017) draws rare classes
    to equal shares. With a weight of 1 and the largest temperature only the base rate is left. The loss is that of
    softened targets (:func:`soft_targets`), so that few samples without an error do not make a model sure. It is convex
    in the inverse temperature and the weight. Samples of a single class give 1 and 0.

    >>> sure = torch.tensor([[0.0, 9.0], [0.0, 9.0], [9.0, 0.0], [9.0, 0.0]])
    >>> found = fit(sure, torch.tensor([1, 0, 0, 0]), torch.ones(4), torch.zeros(2))
    >>> round(found[0], 1)
    13.0
    >>> misleading = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> temperature, weight = fit(misleading, torch.arange(2), torch.ones(2), misleading)
    >>> temperature > 1e9, weight  # nothing is left
    (True, 0.0)

    Args:
        outputs: logits of classes or labels, [n, C].
        y: classes [n], or labels of 0 and 1 [n, C].
        weights: weights of the samples, [n], not negative.
        base: the base rate's logits (:func:`base_outputs`), [C], or [n, C] if samples have different ones.

    Returns:
        The temperature, from :data:`COLDEST` to :data:`HOTTEST`, and the weight, from 0 to 1.

    Raises:
        UsageError: there are no samples, or an output is not finite.
    """
    if not len(y) or not torch.isfinite(outputs).all():
        raise UsageError(
            f"outputs must be finite numbers of at least one sample to be calibrated; got {len(y)} samples. "
            "Add validation samples, or lower lr."
        )
    if len(torch.unique(y)) == 1:
        return 1.0, 0.0
    from scipy.optimize import minimize  # a study prints its first lines before

    outputs = outputs.double()
    targets = soft_targets(y, weights, outputs.shape[1])
    weights = weights / weights.sum()

    def loss(point: Array) -> tuple[float, Array]:
        factors = torch.tensor(point, requires_grad=True)
        logits = outputs * factors[0] + base * factors[1]
        value = (weights * _soft_losses(logits, targets, y.ndim > 1)).sum()
        (gradient,) = torch.autograd.grad(value, factors)
        return float(value.detach()), gradient.numpy()

    bounds = ((1 / HOTTEST, 1 / COLDEST), (0.0, 1.0))
    with tree.one_thread():
        solution = minimize(
            loss, (1.0, 0.0), jac=True, bounds=bounds, method="L-BFGS-B"
        )
    return float(1 / solution.x[0]), float(solution.x[1])


def _soft_losses(logits: Tensor, targets: Tensor, several: bool) -> Tensor:
    """Return each sample's log loss of targets that are shares, [n]; of ``several`` labels their mean."""
    if several:
        return nn.functional.binary_cross_entropy_with_logits(
            logits, targets, reduction="none"
        ).mean(dim=1)
    return nn.functional.cross_entropy(logits, targets, reduction="none")


def calibrated(
    logits: Tensor, temperature: float, weight: float, base: Tensor
) -> Tensor:
    """Return the calibrated logits, logits / temperature + weight * base, float64 [n, C].

    Args:
        logits: logits of classes or labels, [n, C].
        temperature, weight: the numbers that :func:`fit` returns.
        base: the base rate's logits (:func:`base_outputs`), [C] or [n, C].
    """
    return logits.double() / temperature + weight * base


def calibration_of(
    data: FederatedData,
    criterion: Loss,
    models: Mapping[str, nn.Module],
    bases: tree.Tree,
) -> tuple[float, float]:
    """Return one temperature and one weight of base rates (:func:`fit`) for all clients' models.

    They are fitted on the clients' validation samples. Each client's samples together have the weight of its number of
    training samples. Both are neutral, 1 and 0, if the task has no probabilities, no client with a model has validation
    samples, or a model's output is not finite.

    Args:
        data: the federation.
        criterion: the loss, which converts outputs to logits.
        models: models by the client's name. Clients without one are left out.
        bases: the base rate's logits [C] (:func:`base_outputs`) by the client's name.
    """
    clients = [
        client
        for client in data.clients
        if client.name in models and len(client.validation)
    ]
    if data.task not in (CLASSIFICATION, MULTILABEL) or not clients:
        return 1.0, 0.0
    with tree.one_thread():
        outputs = [
            criterion.logits(predict(models[client.name], client.validation.x))
            for client in clients
        ]
    sizes = [len(client.validation) for client in clients]
    weights = [
        torch.full((n,), len(client.train) / n, dtype=torch.float64)
        for client, n in zip(clients, sizes, strict=True)
    ]
    all_logits = torch.cat(outputs)
    y = torch.cat([c.validation.y for c in clients])
    if not torch.isfinite(all_logits).all():
        return 1.0, 0.0
    base = torch.cat(
        [bases[c.name].expand(n, -1) for c, n in zip(clients, sizes, strict=True)]
    )
    return fit(all_logits, y, torch.cat(weights), base)
