"""Gradient boosting as a module: scikit-learn's outputs, odd samples, and exports of a description alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor

import fedlayers as fl
from fedlayers.decision.boosting import MODEL, OPTIONS, fit_boosting
from fl_core import models, tree
from fl_core.layers import layers_of
from fl_core.run import stored_models
from fl_core.run.exported_model import describe_model
from tests.conftest import refuses
from tests.made import TASKS, targets

HOW = {"subsample": 0.5, "max_features": "sqrt"}
DRAW = np.random.default_rng(0)
X, NEW = (DRAW.normal(size=(n, 6)).astype(np.float32) for n in (200, 500))
NOISE = DRAW.normal(size=200)
CLASSES = (2 * X[:, 0] + NOISE).round().astype(int)


def outputs(module, x=NEW):
    return module(torch.from_numpy(x)).numpy()


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("weighted", [False, True])
def test_outputs_of_classes_are_those_of_scikit_learn(classes, weighted):
    y, weights = CLASSES % classes, None
    sample_weight = None
    if weighted:
        weights = torch.arange(1.0, classes + 1)
        sample_weight = weights.numpy()[y]
    module = fit_boosting(X, y, "classification", classes, weights, seed=3)
    model = GradientBoostingClassifier(**HOW, random_state=3)
    model.fit(X, y, sample_weight=sample_weight)
    raw = outputs(module)
    assert raw.dtype == np.float64
    shown = raw[:, 1] if classes == 2 else raw
    np.testing.assert_allclose(shown, model.decision_function(NEW), rtol=0, atol=1e-12)
    probabilities = torch.from_numpy(raw).softmax(1).numpy()
    np.testing.assert_allclose(probabilities, model.predict_proba(NEW), atol=1e-12)


def test_outputs_of_numbers_and_labels_are_those_of_scikit_learn():
    numbers = X[:, 1] ** 2 + NOISE
    model = GradientBoostingRegressor(**HOW, random_state=0).fit(X, numbers)
    raw = outputs(fit_boosting(X, numbers, "regression"))
    np.testing.assert_allclose(raw[:, 0], model.predict(NEW), rtol=0, atol=1e-12)
    labels = np.stack([X[:, 0] > NOISE, X[:, 1] > 0, X[:, 1] > 9], axis=1)
    raw = outputs(fit_boosting(X, labels.astype(np.float32), "multilabel", 3))
    for label in range(2):
        model = GradientBoostingClassifier(**HOW, random_state=0)
        wanted = model.fit(X, labels[:, label]).decision_function(NEW)
        np.testing.assert_allclose(raw[:, label], wanted, rtol=0, atol=1e-12)
    np.testing.assert_allclose(raw[:, 2], np.log(1 / 201))


def test_a_leaf_is_at_most_the_number_of_samples(monkeypatch):
    """Newton's step of scikit-learn has no bound where one sample is nearly certain and wrong."""
    y = CLASSES % 2
    sound = outputs(fit_boosting(X, y, "classification", 2))
    fit = GradientBoostingClassifier.fit

    def spoiled(model, *data, **how):
        tree_of_model = fit(model, *data, **how).estimators_[50, 0].tree_
        rarest = np.argmin(np.where(tree_of_model.feature < 0, tree_of_model.n_node_samples, 999))  # fmt: skip
        tree_of_model.value[rarest] = 5e9
        return model

    monkeypatch.setattr(GradientBoostingClassifier, "fit", spoiled)
    raw = outputs(fit_boosting(X, y, "classification", 2))
    same = np.isclose(raw[:, 1], sound[:, 1], rtol=0, atol=1e-9)
    assert 0.5 < same.mean() < 1
    assert np.abs(raw - sound).max() <= 0.1 * (len(X) + 10)


def test_classes_without_samples_have_their_smoothed_share():
    y = np.array([1, 3])[CLASSES % 2]
    raw = torch.from_numpy(outputs(fit_boosting(X, y, "classification", 5)))
    model = GradientBoostingClassifier(**HOW, random_state=0).fit(X, y)
    probabilities, shares = raw.softmax(1).numpy(), [1 / 205] * 3
    # the shares are added to probabilities whose sum is 1
    np.testing.assert_allclose(probabilities[:, [0, 2, 4]] * (1 + 3 / 205), [shares] * 500)  # fmt: skip
    present_shares = probabilities[:, [1, 3]] * (1 + 3 / 205)
    np.testing.assert_allclose(present_shares, model.predict_proba(NEW), atol=1e-12)
    alone = outputs(fit_boosting(X, np.full(200, 2), "classification", 3))
    np.testing.assert_allclose(np.exp(alone), [[1 / 203, 1 / 203, 201 / 203]] * 500)


@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(1, 12),
    columns=st.integers(1, 3),
    classes=st.integers(2, 4),
    seed=st.integers(0, 99),
)
def test_few_and_equal_samples_have_finite_outputs(n, columns, classes, seed):
    draw = np.random.default_rng(seed)
    x = draw.integers(0, 3, (n, columns)).astype(np.float32)
    for kind, y in (
        ("classification", draw.integers(0, classes, n)),
        ("multilabel", draw.integers(0, 2, (n, classes)).astype(np.float32)),
        ("regression", draw.integers(0, 2, n).astype(np.float32)),
    ):
        outputs_of = 0 if kind == "regression" else classes
        raw = outputs(fit_boosting(x, y, kind, outputs_of), x)
        assert raw.shape == (n, max(1, outputs_of))
        assert np.isfinite(raw).all()


@pytest.mark.parametrize("kind", ["classification", "multilabel", "regression"])
def test_a_stored_model_predicts_raw_samples_as_its_module(kind, tmp_path):
    """It is built again from its description and its tensors, one file for each client."""
    table, how = targets(), TASKS["multilabel"]
    if kind == "classification":
        how = {"label_column": "cough", "exclude_columns": ["time", "event", "fever"]}
    if kind == "regression":
        how = {"label_column": "time", "exclude_columns": ["event", "cough", "fever"]}
    task = fl.assemble(fl.RunConfig(task=kind, **how), data=table)
    data = task.data
    assert data.task == kind
    fitted = {}
    for client in data.clients:
        x, y = client.train.x.numpy(), client.train.y.numpy()
        if kind == "regression":
            y = (y - task.criterion.centre) / task.criterion.spread
        fitted[client.name] = fit_boosting(x, y, kind, data.n_classes)
    first = next(iter(fitted.values()))
    config = task.config.with_keys(model=MODEL, model_options=OPTIONS)
    layers = layers_of(first, models.example(data.shape))
    task = replace(task, config=config, layers=layers)
    run = {"id": "", "name": "", "algorithm": "boosting_local", "round": 0}
    about = describe_model(task, first, None, {**run, "model": "", "client": None})
    about |= {"temperature": 1.0, "base_rate": [0.0] * data.n_classes}
    bases = {name: torch.zeros(data.n_classes) for name in fitted}
    (tmp_path / "choice.json").write_text("{}")
    folder, name = tmp_path / "models", "boosting_local"
    stored_models.store(folder, name, about, fitted, bases, task)
    written = stored_models.export(tmp_path, tmp_path / "made", baseline=name)
    for client in data.clients:
        exported = written[client.name]
        assert exported.about["model"]["options"] == {"trees": 100, "depth": 3}
        module = exported.model()
        wanted = fitted[client.name](client.test.x)
        assert torch.equal(module(client.test.x), wanted)
        rows = data.partition.indices[client.name]["test"]
        predictions = fl.predict(exported.path, table.iloc[rows].drop(columns="client"))
        if kind == "regression":
            wanted = task.criterion.logits(wanted)
        assert torch.equal(predictions.outputs, wanted)
        assert tree.digest(tree.state_dict(module)) == exported.about["weights"]


def test_a_description_that_does_not_fit_is_refused_in_one_line():
    with refuses("rows of numbers.*1, 8, 8"):
        models.build(MODEL, (1, 8, 8), 2)
    with refuses("boosted_tree': did you mean 'boosted_trees'"):
        models.build("sklearn:boosted_tree", (4,), 2)
    with refuses("leaves"):
        models.build(MODEL, (4,), 2, options={"leaves": 8})
    for options in ({"depth": 10**6}, {"trees": -1}, {"trees": 10**9, "depth": 20}):
        with refuses("sklearn:boosted_trees"):
            models.build(MODEL, (4,), 2, options=options)
    with refuses("gradients train; got sklearn:boosted_trees"):
        fl.assemble(fl.RunConfig(model=MODEL))
    module = models.build(MODEL, (4,), 2)
    for odd in (torch.nan, 1e300, -7.0, 50.0):  # no feature of the samples
        forged = tree.state_dict(module)
        forged["nodes"][:] = odd
        tree.load(module, forged)
        with refuses("must fit samples of shape .4,.*out of bounds"):
            models.check_fit(MODEL, module, (4,), 2)
