"""Predictors next to the base rate: its definition, who is refused, and a recommendation on rare outcomes."""

import numpy as np
import pandas as pd
import pytest
import torch

from fedlayers.studies.baselines import predictors
from fedlayers.studies.choose import choose
from fedlayers.studies.first_screen import NONE_SHOWN, NOTHING_BETTER
from fedlayers.studies.harmless import TEST, VALIDATION, Bench
from fl_core.config import RunConfig
from fl_core.data import from_clients
from fl_core.run import runner

READ = RunConfig(
    dataset="rare", label_column="died", client_column="unit", impute="mean"
)


UNITS = ("A", "B", "C", "D")
COLUMNS, INFORMATIVE = 70, 12


def rare_table(share, seed=0):
    """Draw a table of four units with an outcome that a given share of the rows has.

    Seventy correlated columns of numbers have a tenth of gaps. Twelve of them matter, in part not linearly. Their
    effects differ between units a little, so that pooling helps a little.
    """
    draw = np.random.default_rng(seed)
    unit = np.sort(draw.choice(len(UNITS), 3000, p=(0.4, 0.3, 0.2, 0.1)))
    mixed = draw.normal(size=(3000, 20)) @ draw.normal(size=(20, COLUMNS)) / 20**0.5
    x = 0.7 * mixed + 0.7 * draw.normal(size=(3000, COLUMNS))
    x += 0.3 * draw.normal(size=(len(UNITS), COLUMNS))[unit]
    effects = draw.normal(size=INFORMATIVE)
    effects = effects + 0.3 * draw.normal(size=(len(UNITS), INFORMATIVE))
    risk = (effects[unit] * x[:, :INFORMATIVE]).sum(axis=1)
    risk += x[:, 0] * x[:, 1] + 1.5 * np.abs(x[:, 2]) + 2 * (x[:, 3] > 1)
    risk = 1.6 * (risk - risk.mean()) / risk.std() + draw.logistic(size=3000)
    died = risk > np.quantile(risk, 1 - share)
    x[draw.random(x.shape) < 0.1] = np.nan
    table = pd.DataFrame(x.round(3), columns=[f"v{k}" for k in range(COLUMNS)])
    return table.assign(unit=np.array(UNITS)[unit], died=np.where(died, "yes", "no"))


@pytest.fixture(scope="module", name="bench")
def _bench():
    return Bench(runner.assemble(READ, data=rare_table(0.14)))


def test_the_base_rate_is_each_clients_smoothed_share_and_is_fitted_as_a_model(bench):
    base = bench.base_rate
    temperature, weight = bench.calibration(base)
    losses, sizes = [], []
    for client in bench.task.data.clients:
        n = np.bincount(client.train.y.numpy(), minlength=2)
        shares = (n + 1) / (n.sum() + 2)
        torch.testing.assert_close(
            base.outputs[TEST][client.name][0].exp(), torch.from_numpy(shares)
        )
        powers = shares ** (1 / temperature + weight)
        losses.append(-np.log(powers / powers.sum())[client.test.y.numpy()].mean())
        sizes.append(n.sum())
    assert bench.scores(base)["loss"] == pytest.approx(
        np.average(losses, weights=sizes)
    )


def test_noise_is_above_the_base_rate_and_the_truth_below(bench):
    draw = torch.Generator().manual_seed(0)
    base = bench.base_rate
    loud = bench.predictor(
        "noise", lambda _, x: 5 * torch.randn(len(x), 2, generator=draw)
    )
    assert bench.difference(loud, base, VALIDATION).value > 0
    assert bench.difference(base, base, VALIDATION).value == 0
    best = {one.name: one for one in predictors(bench)}["linear_pooled"]
    assert bench.difference(best, base, TEST).interval().high < 0


def test_the_temperature_is_cross_fitted(bench):
    """Each half of the federation's samples has the temperature of the other half, also with a sample a client."""
    one = bench.predictor("one", lambda client, x: x[:, :2].double())
    found = torch.cat([*bench.losses(one, VALIDATION).values()])
    labels = bench.labels[VALIDATION]
    outputs = torch.cat([*one.outputs[VALIDATION].values()])
    y = torch.cat([*labels.values()])
    sizes = [len(own) for own in labels.values()]
    base = torch.stack([bench.bases[name] for name in labels])
    base = base.repeat_interleave(torch.tensor(sizes), dim=0)
    for half in (0, 1):
        temperature, weight = bench.calibration(one, 1 - half)
        part = torch.from_numpy(bench.halves == half)
        hot = (outputs / temperature + weight * base)[part]
        expected = torch.nn.functional.cross_entropy(hot, y[part], reduction="none")
        torch.testing.assert_close(found[part], expected)


@pytest.mark.parametrize(
    ("classes", "seeds"),
    [
        (2, 1),
        *(
            pytest.param(classes, seeds, marks=pytest.mark.slow)
            for classes in (2, 5, 20, 60, 200)
            for seeds in (1, 3)
            if (classes, seeds) != (2, 1)
        ),
    ],
)
def test_on_pure_noise_nothing_is_recommended(classes, seeds, tmp_path):
    draw, n = np.random.default_rng(classes), max(120, 3 * classes)
    wards = {
        ward: (
            draw.normal(size=(n, 12)),
            np.r_[:classes, draw.integers(0, classes, n - classes)],
        )
        for ward in ("north", "south", "west")
    }
    config = RunConfig(rounds=20, lr=0.01, model="mlp", patience=0, eval_every=5)
    how = {"seeds": range(seeds), "baselines": False, "progress": False}
    choice = choose(config, tmp_path, data=from_clients(wards), **how)
    assert choice.answers.head.startswith((NOTHING_BETTER, NONE_SHOWN))
    assert choice.answers.useless
    assert "base_rate" in choice.text()
    assert set(choice.evidence["name"]) >= {"nothing", "all", "base_rate"}


def test_on_rare_outcomes_the_model_is_below_the_base_rate(tmp_path):
    """The loss of the recommended model was 0.46 to 1.1 here, that of the base rate about 0.4."""
    config = READ.with_keys(rounds=24, patience=4)
    table, how = rare_table(0.14, seed=1), {"tune_rates": 0, "baselines": False}
    choice = choose(config, tmp_path, data=table, arms=["nothing", "all"], **how)
    assert choice.run is not None
    bench = Bench(runner.assemble(config, data=table))
    model = bench.of_models("model", bench.load(choice.run).models)
    assert bench.scores(model)["loss"] < bench.scores(bench.base_rate)["loss"]
