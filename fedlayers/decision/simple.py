"""Ways without a federation: simple models of each client's samples, and of all clients' together."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlayers.backends.local import no_progress
from fedlayers.decision.boosting import MOST_ROWS, fit_boosting, why_not_boosting
from fedlayers.decision.losses import Predictor, SeedLosses
from fedlayers.decision.table import BASE_RATE, VALIDATION
from fl_core import models, rows
from fl_core.errors import NonFiniteError, UsageError
from fl_core.registry import first_line
from fl_core.rows import (
    MULTILABEL,
    OF_CLASS,
    REGRESSION,
    SURVIVAL,
    Row,
    why_missing,
)
from fl_core.training import evaluate
from fl_core.training.losses import Standardised

PENALTIES = (0.01, 0.1, 1.0)
"""Inverse strengths C of the linear models' penalty; the one with the least validation loss is used."""
STEPS = 300
"""Steps of the fit of a logistic regression, at most."""
BASELINES = {
    BASE_RATE: "no features: the share of each class, or the mean target, of a client's training samples",
    "linear_local": "a linear model on each client's own training samples",
    "linear_pooled": "a linear model on all clients' training samples: centralised",
    "boosting_local": "gradient boosting on each client's own training samples",
    "boosting_pooled": "gradient boosting on all clients' training samples: centralised",
}
"""The baselines by name, in words. Linear models are ``linear`` of :mod:`fl_core.models`; boosting is for tables."""
Array = NDArray[Any]
Weights = tuple[Array, Array]
"""The slopes [C, d] and the constants [C] of a linear model."""


def predictors(
    losses: SeedLosses,
    failed: Callable[[str], None] = no_progress,
    *,
    pooled: bool = True,
) -> Iterator[Predictor]:
    """Fit the baselines of a federation. Settings are chosen by validation loss.

    If all training samples of a fit have the same label, it predicts the base rate. The
    base rate is the only baseline of samples with several inputs, and of data that set
    the ``kind`` of task, such as classes at positions. Boosting is for tables alone.

    Args:
        losses: the samples of a seed.
        pooled: also fit models of all clients' training samples together.
        failed: receives a line for each baseline that cannot be fitted. It is left out.
            A boosting of samples that are no table is left out without a line.
    """
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    yield losses.base_rate
    data = losses.task.data
    if getattr(data.shape, "layout", None) or data.kind:
        return
    kinds = [_linear]
    rows = max(len(client.train) for client in data.clients)
    reason_against_boosting = why_not_boosting(data.shape, losses.kind, rows)
    if reason_against_boosting and "table" not in reason_against_boosting:
        failed(f"boosting_local failed: {reason_against_boosting}")
    if not reason_against_boosting and data.words is None:
        kinds.append(_boosting)
    names = [client.name for client in data.clients]
    for kind in kinds:
        groupings = {"local": [[name] for name in names]}
        if pooled:
            groupings["pooled"] = [names]
        for suffix, groups in groupings.items():
            largest = sum(map(len, (c.train for c in data.clients)))
            if kind is _boosting and suffix == "pooled" and largest > MOST_ROWS:
                failed(f"boosting_pooled failed: a fit has {largest:,} rows")
                continue
            name = f"{kind.__name__[1:]}_{suffix}"
            try:
                with warnings.catch_warnings(action="ignore"), threadpool_limits(1):
                    predictor = kind(losses, name, groups)
            except (UsageError, NonFiniteError, ValueError, ArithmeticError) as error:
                reason = first_line(str(error))
                failed(f"{name} failed: {reason}")
            else:
                yield predictor


def _samples(losses: SeedLosses, names: Sequence[str]) -> tuple[Tensor, Array]:
    """Return the training samples of some clients: x [n, ...] and labels [n, ...]."""
    parts = [
        client.train for client in losses.task.data.clients if client.name in names
    ]
    return torch.cat([split.x for split in parts]), torch.cat(
        [p.y for p in parts]
    ).numpy()


# --- linear models: modules, so that they can be exported -----------------------------------------------------


def _linear(
    losses: SeedLosses, name: str, groups: Sequence[Sequence[str]]
) -> Predictor:
    """Fit one linear model for each group of clients, and return their predictor.

    Of the penalties, the one with the least validation loss is used for all groups.

    Args:
        losses: the samples of the seed.
        name: name of the predictor.
        groups: the names of the clients in each group.
    """
    data, modules_by_penalty = (
        losses.task.data,
        [dict[str, nn.Module]() for _ in PENALTIES],
    )
    outputs = max(1, data.n_classes)
    template = models.build("linear", data.shape, outputs, trial=False)
    for clients in groups:
        x, y = _samples(losses, clients)
        features, centre, scale = _scaled_features(template, x, data.words is None)
        for penalty, modules in zip(PENALTIES, modules_by_penalty, strict=True):
            weights = None
            if losses.kind == MULTILABEL or np.ptp(y, axis=0).any():
                weights = _fit(losses, features, y, penalty)
            for client in clients:
                modules[client] = _module(
                    losses, template, weights, client, centre, scale
                )
    candidates = [_of_modules(losses, name, modules) for modules in modules_by_penalty]
    return min(candidates, key=lambda one: losses.scores(one, VALIDATION)["loss"])


def _of_modules(
    losses: SeedLosses, name: str, modules: Mapping[str, nn.Module]
) -> Predictor:
    """Return the predictor of simple models, given by client."""

    def predict(client: str, x: Tensor) -> Tensor:
        outputs = evaluate.predict(modules[client], x)
        numbers = losses.kind == REGRESSION
        if numbers:
            return losses.task.criterion.logits(outputs)
        return outputs

    return replace(losses.predictor(name, predict), models=modules)


def _scaled_features(
    template: nn.Module, x: Tensor, scaled: bool
) -> tuple[Any, Array, Array]:
    """Return the inputs of the linear layer [n, d], and their centre and scale.

    Args:
        template: the linear model, whose features are computed.
        x: the samples [n, ...].
        scaled: whether to standardise the inputs. If not, as for counts of words, they
            are a sparse matrix, the centre is 0 and the scale 1.
    """
    from scipy import sparse

    layer = template.get_submodule("features")
    feature_batches = [layer(batch).numpy() for batch in x.split(1024)]
    if not scaled:
        matrix = sparse.vstack([sparse.csr_matrix(batch) for batch in feature_batches])
        return matrix, np.zeros(1), np.ones(1)
    features = np.concatenate(feature_batches)
    centre, scale = (
        features.mean(axis=0, dtype=float),
        features.std(axis=0, dtype=float),
    )
    scale[scale == 0] = 1
    return (features - centre) / scale, centre, scale


def _fit(losses: SeedLosses, x: Any, y: Array, penalty: float) -> Weights:
    """Fit the linear model of the task to scaled features, and return its weights.

    Args:
        losses: the samples of the seed.
        x: the features [n, d].
        y: the labels [n, ...].
        penalty: inverse strength of the ridge penalty.
    """
    from sklearn.linear_model import Ridge

    if losses.kind == SURVIVAL:
        return _cox(losses, x, y, penalty), np.zeros(1)
    if losses.kind == REGRESSION:
        if isinstance(criterion := losses.task.criterion, Standardised):
            y = (y - criterion.centre) / criterion.spread
        ridge = Ridge(alpha=1 / penalty).fit(x, y)
        return ridge.coef_[None], np.array([ridge.intercept_])
    if losses.kind == MULTILABEL:
        labels = [_logistic(x, label_y, 2, penalty) for label_y in y.T.astype(int)]
        rows_of = [(weights[1] - weights[0], b[1] - b[0]) for weights, b in labels]
        weights, constants = zip(*rows_of, strict=True)
        return np.stack(weights), np.array(constants)
    return _logistic(x, y, losses.task.data.n_classes, penalty, losses.class_weights)


def _logistic(
    x: Any, y: Array, classes: int, penalty: float, weights: Tensor | None = None
) -> Weights:
    """Fit a logistic regression, and return its weights.

    An absent class has slopes of 0, and as its constant the logarithm of its smoothed
    share. The same holds for all classes if only one is present.
    """
    from sklearn.linear_model import LogisticRegression

    present_classes = np.unique(y)
    coefficients = np.zeros((classes, x.shape[1]))
    constants = np.log((np.bincount(y, minlength=classes) + 1) / (len(y) + classes))
    if len(present_classes) > 1:
        sample_weights = None if weights is None else weights.numpy()[y]
        model = LogisticRegression(C=penalty, max_iter=STEPS)
        model.fit(x, y, sample_weight=sample_weights)
        fitted_coefficients, constant = model.coef_, model.intercept_
        if len(present_classes) == 2:  # one line for both
            fitted_coefficients = (
                np.concatenate([-fitted_coefficients, fitted_coefficients]) / 2
            )
            constant = np.concatenate([-constant, constant]) / 2
        coefficients[present_classes], constants[present_classes] = (
            fitted_coefficients,
            constant,
        )
    return coefficients, constants


def _module(
    losses: SeedLosses,
    template: nn.Module,
    weights: Weights | None,
    client: str,
    centre: Array,
    scale: Array,
) -> nn.Module:
    """Return a linear model of unscaled samples.

    Args:
        losses: the samples of the seed.
        template: the model that is copied.
        weights: weights for scaled inputs. With None the model predicts the base rate.
        client: the client whose base rate is meant.
        centre, scale: of the inputs, as :func:`_scaled_features` returns them.
    """
    module = copy.deepcopy(template).eval()
    layer: Any = module.get_submodule("fc")
    if weights is None:
        base_outputs, criterion = losses.bases[client].numpy(), losses.task.criterion
        if isinstance(criterion, Standardised):
            base_outputs = (base_outputs - criterion.centre) / criterion.spread
        weights = np.zeros(layer.weight.shape), base_outputs
    slopes = weights[0] / scale
    constant = weights[1] - (slopes * centre).sum(axis=1)
    values = {"weight": slopes, "bias": constant}
    layer.load_state_dict({k: torch.from_numpy(v) for k, v in values.items()})
    return module


def _cox(losses: SeedLosses, x: Array, y: Array, penalty: float) -> Array:
    """Fit a linear Cox model with the loss of training and a ridge penalty.

    The result has the slopes, [1, d]. They are 0 if no sample has an event.
    """
    inputs, targets = torch.from_numpy(x).double(), torch.from_numpy(y).double()
    weights = nn.Parameter(torch.zeros(x.shape[1], 1, dtype=torch.float64))
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=200, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        mean_loss = losses.task.criterion(inputs @ weights, targets)
        loss = mean_loss + (weights**2).sum() / (2 * penalty * len(y))
        loss.backward()
        return loss

    if y[:, 1].any():
        optimizer.step(closure)
    return weights.detach().numpy().T


# --- gradient boosting ----------------------------------------------------------------------------------------


def _boosting(
    losses: SeedLosses, name: str, groups: Sequence[Sequence[str]]
) -> Predictor:
    """Fit gradient boosting for each group of clients, as a module (:mod:`fedlayers.decision.boosting`)."""
    modules: dict[str, nn.Module] = {}
    data, criterion = losses.task.data, losses.task.criterion
    for clients in groups:
        x, y = _samples(losses, clients)
        if isinstance(criterion, Standardised):
            y = (y - criterion.centre) / criterion.spread
        model = fit_boosting(
            x.numpy(), y, losses.kind, data.n_classes, losses.class_weights
        )
        modules |= dict.fromkeys(clients, model)
    return _of_modules(losses, name, modules)


# --- rows -----------------------------------------------------------------------------------------------------


def baseline_rows(losses: SeedLosses, one: Predictor) -> Iterator[Row]:
    """Yield the rows of a baseline on a federation's data, in the form of a run's rows after its last round.

    >>> import fedlayers as fl
    >>> losses = SeedLosses(fl.assemble(fl.RunConfig(dataset="heart", rounds=3)))
    >>> frames = [rows.frame(baseline_rows(losses, one)) for one in predictors(losses)]
    >>> [frame["algorithm"][0] for frame in frames]
    ['base_rate', 'linear_local', 'linear_pooled', 'boosting_local', 'boosting_pooled']
    """
    temperature = losses.calibration(one)[0]
    note = f"{BASELINES[one.name]}, temperature {temperature:.2f}"
    last_round = int(losses.task.config.federation.rounds or 1)
    model = "personal"
    if one.name.endswith("pooled"):
        model = "global"
    return rows_of(losses, one, one.name, last_round, model, note)


def rows_of(
    losses: SeedLosses, one: Predictor, name: str, done: int, model: str, said: str
) -> Iterator[Row]:
    """Yield the rows of a predictor, in the form of a run's rows.

    They are on validation and test samples. Their loss is calibrated if the outputs are
    probabilities. For other tasks it is that of training.

    Args:
        losses: the samples of the seed.
        one: the predictor.
        name: the algorithm in the rows.
        done: the round in the rows.
        model: the kind of the models in the rows, such as ``personal``.
        said: how the predictor's settings were obtained, for the column ``estimator``.
    """
    columns: dict[str, Any] = {
        "algorithm": name,
        "seed": losses.task.config.execution.seed,
        "round": done,
        "model": model,
        "estimator": said,
    }
    for split, labels in losses.labels.items():
        for client, values in losses.by_client(one, split).iterrows():
            size = len(labels[str(client)])
            columns |= {"n_samples": size, "n_train": losses.sizes[str(client)]}
            for metric, value in values.items():
                yield rows.row(
                    str(metric),
                    value,
                    **columns,
                    split=split,
                    client=client,
                    variant=losses.task.data.positive if metric in OF_CLASS else "",
                    status=why_missing(str(metric), value),
                )
