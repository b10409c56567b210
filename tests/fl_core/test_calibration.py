"""The temperature of a model's probabilities: its definition, and its place in exports."""

import itertools
import json
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_wine
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

import fedlayers as fl
from fl_core.config import RunConfig
from fl_core.run import runner
from fl_core.run.exported_model import export, predict
from fl_core.run.restore import load_models
from fl_core.storage import sign
from fl_core.training import evaluate
from tests.conftest import CONFIG, TOY, refuses


def test_no_other_temperature_or_weight_of_the_base_rate_has_less_log_loss():
    draw = torch.Generator().manual_seed(0)
    outputs = 6 * torch.randn(200, 3, generator=draw).double()
    base = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log()
    shares = (outputs / 4 + 0.6 * base).softmax(1)
    y = torch.multinomial(shares, 1, generator=draw)[:, 0]
    weights = torch.rand(200, generator=draw, dtype=torch.float64)

    targets = evaluate.soft_targets(y, weights, 3)

    def loss(temperature, weight):
        logits = outputs / temperature + weight * base
        return float(-(weights[:, None] * targets * logits.log_softmax(1)).sum())

    least = loss(*evaluate.fit(outputs, y, weights, base))
    for temperature in np.exp(np.linspace(-2, 3.9, 60)):
        for weight in np.linspace(0, 1, 11):
            assert least <= loss(temperature, weight) * (1 + 1e-6)
    labels = (torch.rand(200, 3, generator=draw) < (outputs / 4).sigmoid()).float()
    fitted = evaluate.fit(outputs, labels, torch.ones(200), torch.zeros(3))
    assert fitted[0] == pytest.approx(4, rel=0.3)


def test_targets_are_softened_by_the_effective_number_of_samples():
    y, weights = torch.tensor([0, 1, 2]), torch.tensor([4.0, 2.0, 2.0])
    margin = 1 / (64 / 24 + 2)
    targets = evaluate.soft_targets(y, weights, 3)
    torch.testing.assert_close(
        targets.diagonal(), torch.full((3,), 1 - margin, dtype=torch.float64)
    )
    assert targets[0, 1].item() == pytest.approx(margin / 2)
    torch.testing.assert_close(targets.sum(1), torch.ones(3, dtype=torch.float64))
    labels = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    targets = evaluate.soft_targets(labels, torch.ones(2), 2)
    assert targets.tolist() == [[0.75, 0.25], [0.75, 0.75]]


def test_samples_of_one_class_tell_no_temperature():
    outputs, ones = torch.randn(5, 2).double(), torch.ones(5)
    assert evaluate.fit(outputs, ones.long(), ones, torch.zeros(2)) == (1.0, 0.0)


def test_few_samples_cost_less_than_no_calibration_on_fresh_ones():
    draw = torch.Generator().manual_seed(3)
    fitted, plain, sizes = [], [], torch.randint(10, 61, (50,), generator=draw)
    for n in sizes.tolist():
        truth = 3 * torch.randn(n + 500, 3, generator=draw).double()
        y = torch.multinomial(truth.softmax(1), 1, generator=draw)[:, 0]
        size = float(torch.randn(1, generator=draw).exp())
        outputs = size * (truth + torch.randn(truth.shape, generator=draw))
        heat, weight = evaluate.fit(outputs[:n], y[:n], torch.ones(n), torch.zeros(3))
        logits = evaluate.calibrated(outputs[n:], heat, weight, torch.zeros(3))
        fitted.append(float(evaluate.log_losses(logits, y[n:]).mean()))
        plain.append(float(evaluate.log_losses(outputs[n:], y[n:]).mean()))
    assert np.mean(fitted) <= np.mean(plain)


def _dealt(load, seed):
    """Return a table dealt to five clients of equal size: their training, validation and test rows."""
    table = load()
    order = np.random.default_rng(seed).permutation(len(table.target))
    x = StandardScaler().fit_transform(table.data)
    for k in range(5):
        rows = order[k::5]
        train, held_out = train_test_split(rows, train_size=0.6, random_state=seed)
        validation, test = np.array_split(held_out, 2)
        yield [(x[part], table.target[part]) for part in (train, validation, test)]


def _logits(model, x):
    """Return a fitted model's logits, [n, C], before any rounding to probabilities of 0 and 1."""
    if isinstance(model, MLPClassifier):
        (into, out), (bias, last) = model.coefs_, model.intercepts_
        logits = np.maximum(x @ into + bias, 0) @ out + last
    else:
        logits = model.decision_function(x).reshape(len(x), -1)
    return np.pad(logits, ((0, 0), (1, 0))) if logits.shape[1] == 1 else logits


@pytest.mark.parametrize("load", [load_breast_cancer, load_wine])
def test_a_model_that_is_mostly_right_keeps_a_low_loss(load):
    kinds = [
        LogisticRegression(C=1e4, max_iter=2000),
        LogisticRegression(C=0.03),
        MLPClassifier((16,), solver="lbfgs", max_iter=300),
    ]
    unsure = 0
    for seed, kind in itertools.product(range(5), range(len(kinds))):
        validation, test, labels, actual = [], [], [], []
        for train, held_out, last in _dealt(load, seed):
            with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
                model = clone(kinds[kind]).fit(*train)
            validation.append(_logits(model, held_out[0]))
            test.append(_logits(model, last[0]))
            labels.append(held_out[1])
            actual.append(last[1])
        outputs, scored = (
            torch.from_numpy(np.concatenate(part)) for part in (validation, test)
        )
        y, truth = (torch.from_numpy(np.concatenate(part)) for part in (labels, actual))
        base = torch.zeros(outputs.shape[1])
        heat, weight = evaluate.fit(outputs, y, torch.ones(len(y)), base)
        losses = evaluate.log_losses(
            evaluate.calibrated(scored, heat, weight, base), truth
        )
        right = float((scored.argmax(1) == truth).double().mean())
        assert right < 0.89 or float(losses.mean()) < 0.7
        if kind == 1 and right >= 0.89:  # it is right, and its outputs are unsure
            assert heat < 1
            unsure += 1
    assert unsure


def test_an_export_has_the_temperature_of_its_run_and_predicts_by_it(
    tmp_path,
):
    keys = {"algorithm": "fedper", "model": "mlp", "model_options": {"sizes": (8, 6)}}
    fl.run(CONFIG, tmp_path / "run", data=TOY, **keys)
    exported = fl.export(
        tmp_path / "run", tmp_path / "a.safetensors", client="a", data=TOY
    )
    models, task = load_models(tmp_path / "run", which="personal", data=TOY)
    parts = [
        (
            evaluate.predict(models[c.name], c.validation.x),
            c.validation.y,
            evaluate.base_outputs(task.data, task.criterion, c.name),
            len(c.train),
        )
        for c in task.data.clients
    ]
    weights = torch.cat([torch.full((len(y),), n / len(y)) for _, y, _, n in parts])
    y = torch.cat([y for _, y, _, _ in parts])
    sizes = [len(y) for _, y, _, _ in parts]
    classes = parts[0][0].shape[1]
    targets = evaluate.soft_targets(y, weights, classes).split(sizes)

    def loss(temperature):
        means = [
            -(soft * (o / temperature + weight * base).log_softmax(1)).sum(1).mean()
            for soft, (o, _, base, _) in zip(targets, parts, strict=True)
        ]
        return float(np.average(means, weights=[n for *_, n in parts]))

    best = exported.temperature
    offset = torch.tensor(exported.about["base_rate"], dtype=torch.float64)
    weight = float((offset / parts[0][2])[0])
    assert best != 1.0
    assert loss(best) < min(loss(0.95 * best), loss(1.05 * best), loss(1.0))
    predictions = fl.predict(exported.path, TOY.clients[0].test.x.numpy())
    again = (predictions.logits.double() / best + offset).softmax(1)
    torch.testing.assert_close(predictions.probabilities, again)


def test_a_base_rate_of_other_classes_is_refused(tmp_path):
    run = tmp_path / "run"
    config = RunConfig(dataset="heart", rounds=1)
    runner.run(config, run)
    exported = export(run, tmp_path / "model.safetensors", client="va")
    about = tmp_path / "model.safetensors.json"
    description = json.loads(about.read_bytes())
    description.pop("sha256")
    for base in ([0.0], [0.0] * 9):
        about.write_bytes(sign({**description, "base_rate": base}))
        with refuses("base_rate must have a number for each"):
            predict(exported.path, np.zeros((2, 10)))
