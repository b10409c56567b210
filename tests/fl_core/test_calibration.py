"""The temperature of a model's probabilities: its definition, and its place in exports."""

import json

import numpy as np
import pytest
import torch

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

    def loss(temperature, weight):
        logits = outputs / temperature + weight * base
        return float((weights * evaluate.log_losses(logits, y)).sum())

    least = loss(*evaluate.fit(outputs, y, weights, base))
    for temperature in np.exp(np.linspace(-2, 3.9, 60)):
        for weight in np.linspace(0, 1, 11):
            assert least <= loss(temperature, weight) * (1 + 1e-6)
    labels = (torch.rand(200, 3, generator=draw) < (outputs / 4).sigmoid()).float()
    found = evaluate.fit(outputs, labels, torch.ones(200), torch.zeros(3))
    assert found[0] == pytest.approx(4, rel=0.3)


def test_an_export_has_the_temperature_of_its_run_and_predicts_by_it(
    tmp_path,
):
    keys = {"algorithm": "fedper", "model": "mlp", "model_options": {"sizes": (8, 6)}}
    fl.run(CONFIG, tmp_path / "run", data=TOY, **keys)
    made = fl.export(tmp_path / "run", tmp_path / "a.safetensors", client="a", data=TOY)
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

    def loss(temperature):
        means = [
            evaluate.log_losses(o / temperature + weight * base, y).mean()
            for o, y, base, _ in parts
        ]
        return float(np.average(means, weights=[n for *_, n in parts]))

    best = made.temperature
    offset = torch.tensor(made.about["base_rate"], dtype=torch.float64)
    weight = float((offset / parts[0][2])[0])
    assert best != 1.0
    assert loss(best) < min(loss(0.95 * best), loss(1.05 * best), loss(1.0))
    found = fl.predict(made.path, TOY.clients[0].test.x.numpy())
    again = (found.logits.double() / best + offset).softmax(1)
    torch.testing.assert_close(found.probabilities, again)


def test_a_base_rate_of_other_classes_is_refused(tmp_path):
    run = tmp_path / "run"
    config = RunConfig(dataset="heart", rounds=1)
    runner.run(config, run)
    exported = export(run, tmp_path / "model.safetensors", client="va")
    about = tmp_path / "model.safetensors.json"
    found = json.loads(about.read_bytes())
    found.pop("sha256")
    for base in ([0.0], [0.0] * 9):
        about.write_bytes(sign({**found, "base_rate": base}))
        with refuses("base_rate must have a number for each"):
            predict(exported.path, np.zeros((2, 10)))
