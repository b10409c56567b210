"""Baselines that need no federation: a linear model and gradient boosting, of each client and of all together."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedlayers.studies.harmless import BASE_RATE, VALIDATION, Bench, Predictor
from fl_core import rows
from fl_core.data.federated import FederatedData
from fl_core.rows import (
    CLASSIFICATION,
    MULTILABEL,
    OF_CLASS,
    REGRESSION,
    SURVIVAL,
    Row,
    why_missing,
)
from fl_core.task import Task
from fl_core.training import evaluate

PENALTIES = (0.01, 0.1, 1.0)
"""Inverse strengths C of the linear models' penalty; the one with the least validation loss is used."""
BASELINES = {
    BASE_RATE: "no features: the share of each class, or the mean target, of a client's training samples",
    "linear_own": "a linear model on each client's own training samples",
    "linear_pooled": "a linear model on all clients' training samples: centralised",
    "boosting_own": "gradient boosting on each client's own training samples",
    "boosting_pooled": "gradient boosting on all clients' training samples: centralised",
}
"""The baselines by name, in words. All but the first are for tables."""
Array = NDArray[Any]
Predict = Callable[[Array], Array]
"""Samples [n, d] -> outputs [n, C]."""


def is_table(data: FederatedData) -> bool:
    """Return whether samples are rows of numbers."""
    return len(data.shape) == 1 and data.words is None


def predictors(bench: Bench) -> Iterator[Predictor]:
    """Fit the baselines of a federation. Settings are chosen by validation loss.

    A client with training samples of one class only has its base rate. Without a table there is the base rate alone.
    """
    yield bench.base_rate
    if not is_table(bench.task.data):
        return
    kinds = ("linear",) if bench.kind == SURVIVAL else ("linear", "boosting")
    for kind in kinds:
        for pooled in (False, True):
            name = f"{kind}_{'pooled' if pooled else 'own'}"
            penalties = PENALTIES if kind == "linear" else PENALTIES[:1]
            tried = [_fitted(bench, name, kind, pooled, each) for each in penalties]
            yield min(tried, key=lambda one: bench.scores(one, VALIDATION)["loss"])


def _fitted(
    bench: Bench, name: str, kind: str, pooled: bool, penalty: float
) -> Predictor:
    data = bench.task.data
    groups = [list(data.clients)] if pooled else [[client] for client in data.clients]
    models: dict[str, Predict | None] = {}
    for clients in groups:
        x, y = (
            torch.cat([getattr(client.train, part) for client in clients]).numpy()
            for part in "xy"
        )
        model = _model(bench, kind, x, y, penalty)
        models |= {client.name: model for client in clients}

    def predict(client: str, x: Tensor) -> Tensor:
        model = models[client]
        if model is None:
            return bench.bases[client].expand(len(x), -1)
        return torch.from_numpy(np.ascontiguousarray(model(x.numpy())))

    return bench.predictor(name, predict)


def _model(
    bench: Bench, kind: str, x: Array, y: Array, penalty: float
) -> Predict | None:
    """Fit one model; None where the training samples have a single class or value."""
    from sklearn import ensemble, linear_model
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    def estimator() -> Any:
        numbers = bench.kind == REGRESSION
        if kind == "boosting":
            early = len(y) >= 50  # it sets samples of each class aside
            if bench.kind == CLASSIFICATION:
                early &= np.unique(y, return_counts=True)[1].min() > 1
            suffix = "Regressor" if numbers else "Classifier"
            boosting = getattr(ensemble, f"HistGradientBoosting{suffix}")
            return boosting(max_iter=100, early_stopping=early, random_state=0)
        linear = linear_model.LogisticRegression(C=penalty, max_iter=1000)
        if numbers:
            linear = linear_model.Ridge(alpha=1 / penalty)
        return make_pipeline(StandardScaler(), linear)

    classes = bench.task.data.n_classes
    with warnings.catch_warnings(action="ignore"), threadpool_limits(1):
        if bench.kind == SURVIVAL:
            return _cox(bench, x, y, penalty)
        if bench.kind == MULTILABEL:
            labels = [_of_classes(estimator(), x, each, 2) for each in y.T.astype(int)]
            return lambda new: np.column_stack(
                [np.diff(label(new))[:, 0] for label in labels]
            )
        if np.ptp(y) == 0:
            return None
        if bench.kind == REGRESSION:
            model = estimator().fit(x, y)
            return lambda new: model.predict(new)[:, None]
        return _of_classes(estimator(), x, y, classes, bench.class_weights)


def _of_classes(
    model: Any, x: Array, y: Array, classes: int, weights: Tensor | None = None
) -> Predict:
    """Return log-probabilities of all classes. A class that is absent, or alone, has its smoothed share."""
    present = np.unique(y)
    shares = (np.bincount(y, minlength=classes) + 1) / (len(y) + classes)
    if len(present) > 1:
        step = "logisticregression__" if hasattr(model, "steps") else ""
        own = {} if weights is None else {f"{step}sample_weight": weights.numpy()[y]}
        model.fit(x, y, **own)

    def predict(new: Array) -> Array:
        found = np.tile(shares, (len(new), 1))
        if len(present) > 1:
            found[:, present] = model.predict_proba(new)
        return np.log(np.maximum(found, 1e-6))

    return predict


def _cox(bench: Bench, x: Array, y: Array, penalty: float) -> Predict | None:
    """Fit a linear Cox model with the loss of training and a ridge penalty."""
    if not y[:, 1].any():
        return None
    mean, spread = x.mean(axis=0), x.std(axis=0) + 1e-9
    inputs = torch.from_numpy((x - mean) / spread).double()
    targets = torch.from_numpy(y).double()
    weights = nn.Parameter(torch.zeros(x.shape[1], 1, dtype=torch.float64))
    search = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        fit = bench.task.criterion(inputs @ weights, targets)
        loss = fit + (weights**2).sum() / (2 * penalty * len(y))
        loss.backward()
        return loss

    search.step(closure)
    found = weights.detach().numpy()
    return lambda new: ((new - mean) / spread) @ found


def baseline_rows(task: Task) -> list[Row]:
    """Return the rows of every baseline on a task's data, as of a run after its last round.

    >>> import fedlayers as fl
    >>> found = rows.frame(baseline_rows(fl.assemble(fl.RunConfig(dataset="heart", rounds=3))))
    >>> sorted(found["algorithm"].unique())
    ['base_rate', 'boosting_own', 'boosting_pooled', 'linear_own', 'linear_pooled']
    """
    bench, criterion = Bench(task), task.criterion.of_logits()
    found = []
    for one in predictors(bench):
        calibration = bench.calibration(one)
        columns: dict[str, Any] = {
            "algorithm": one.name,
            "seed": task.config.execution.seed,
            "round": task.config.federation.rounds,
            "model": "global" if one.name.endswith("pooled") else "personal",
            "estimator": f"{BASELINES[one.name]}, temperature {calibration[0]:.2f}",
        }
        for split, outputs in one.outputs.items():
            scores = bench.by_client(one, split)
            for client, own in outputs.items():
                y, base = bench.labels[split][client], bench.bases[client]
                sizes = {"n_samples": len(y), "n_train": bench.sizes[client]}
                values = scores.loc[client].to_dict()
                hot = evaluate.calibrated(own, *calibration, base)
                values["loss"] = float(criterion.per_sample(hot, y).mean())
                for metric, value in values.items():
                    found.append(
                        rows.row(
                            metric,
                            value,
                            **columns,
                            **sizes,
                            split=split,
                            client=client,
                            variant=task.data.positive if metric in OF_CLASS else "",
                            status=why_missing(metric, value),
                        )
                    )
    return found
