"""Every model on every client's samples: the scores by hand, and who is shown to gain by whose model."""

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, log_loss
from torch import nn

import fedlayers as fl
from tests.conftest import refuses

NAMES = ("a", "b", "c")


def linear(column, sign=1.0):
    """Return a model whose label is the sign of a column."""
    model = nn.Linear(4, 2)
    weight = torch.zeros(2, 4)
    weight[1, column] = 2.0 * sign
    model.load_state_dict({"weight": weight, "bias": torch.zeros(2)})
    return model


def samples(seed=0, n=80):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=draw)
    return x, (x[:, 0] + torch.randn(n, generator=draw) > 0).long()


def test_scores_are_those_by_hand_and_the_better_model_is_named():
    models = dict(zip(NAMES, (linear(0), linear(0, -1.0), linear(1)), strict=True))
    data = {name: samples(seed) for seed, name in enumerate(NAMES)}
    before = {
        name: linear_model.weight.clone() for name, linear_model in models.items()
    }
    crossed = fl.cross_scores(models, data)
    for name, model in models.items():
        assert model.weight.equal(before[name])
        for client, (x, y) in data.items():
            p = model(x).softmax(1).detach().numpy()
            f1 = f1_score(y, p.argmax(1), average="macro")
            assert crossed.matrix().loc[name, client] == pytest.approx(f1)
            loss = crossed.matrix("loss").loc[name, client]
            assert loss == pytest.approx(log_loss(y, p), rel=1e-5)
    pairs = set(crossed.better[["model", "client"]].itertuples(index=False, name=None))
    assert {("a", "b"), ("a", "c")} <= pairs
    assert all(client != "a" for _, client in pairs)
    assert "b: the model of a" in repr(crossed)


@pytest.mark.parametrize(("score", "high"), [("", 1.0), ("loss", None)])
def test_the_picture_shows_the_matrix(score, high):
    """Models down, clients across; the colours end at 1, or at the largest number."""
    models = dict(zip(NAMES, (linear(0), linear(0, -9.0), linear(1)), strict=True))
    crossed = fl.cross_scores(models, {n: samples(k) for k, n in enumerate(NAMES)})
    matrix = crossed.matrix(score)
    assert matrix.to_numpy().tolist() != matrix.T.to_numpy().tolist()
    ax = crossed.plot(score)
    (mesh,) = ax.collections
    shown = np.reshape(mesh.get_array(), matrix.shape)
    np.testing.assert_array_equal(shown, matrix)
    assert mesh.get_clim() == (0, high or matrix.max(axis=None))
    assert ax.get_xlabel() == "samples of"
    assert ax.get_ylabel() == "model of"
    for ticks in (ax.get_xticklabels(), ax.get_yticklabels()):
        assert [tick.get_text() for tick in ticks] == list(NAMES)
    assert ax.figure.axes[-1].get_ylabel() == (score or crossed.score)
    assert len({text.get_text() for text in ax.texts}) > 3


def test_models_that_are_alike_are_named_in_few_draws():
    named = 0
    for seed in range(20):
        torch.manual_seed(seed)
        data = {name: samples(100 * seed + k, 20) for k, name in enumerate(NAMES)}
        noise = 0.3 * torch.randn(3)
        models = {
            name: linear(0, 1 + float(shift))
            for name, shift in zip(NAMES, noise, strict=True)
        }
        same = dict.fromkeys(NAMES, models["a"])
        assert fl.cross_scores(same, data).better.empty
        named += len(fl.cross_scores(models, data).better) > 0
    assert named <= 5


def test_alike_clients_are_those_whose_models_do_as_well_on_each_others_samples():
    """Two kinds of clients; the log loss has one temperature for all pairs, so that sure models do not decide."""
    names = [f"ward {k}" for k in range(6)]
    models = {name: linear(0, 30.0 * (-1) ** k) for k, name in enumerate(names)}
    data = {}
    for k, name in enumerate(names):
        x, y = samples(k)
        data[name] = x, y if k % 2 == 0 else 1 - y
    crossed = fl.cross_scores(models, data)
    assert crossed.losses.shape == (6, 480)
    assert crossed.losses.max() < 20 < crossed.matrix("loss").max(axis=None)
    alike = crossed.alike()
    assert alike.leads.loc["ward 0", "ward 1"] > 1
    assert list(alike.groups.values()) == [1, 2] * 3
    assert "ward 0, ward 2, ward 4; ward 1, ward 3, ward 5" in alike.text()
    assert [alike.groups[name] for name in alike.order] in (
        [1] * 3 + [2] * 3,
        [2] * 3 + [1] * 3,
    )
    ax = alike.plot()
    shown = [label.get_text() for label in ax.get_xticklabels()]
    assert shown == alike.order
    assert alike.text() in repr(alike)


def test_a_result_brings_its_test_samples():
    result = fl.run(dataset="heart", rounds=1)
    crossed = fl.cross_scores(result)
    wanted = result.scores.loc["global"]["macro_f1"]
    diagonal = np.diag(crossed.matrix())
    np.testing.assert_allclose(diagonal, wanted[crossed.matrix().index])


@pytest.mark.parametrize(
    ("models", "data", "how", "said"),
    [
        ({"a": linear(0)}, {"a": samples()}, {}, "at least 2 clients"),
        (linear(0), dict.fromkeys("ab", samples()), {"score": "f1"}, "unknown score"),
    ],
)
def test_bad_input_is_one_line(models, data, how, said):
    with refuses(said) as error:
        fl.cross_scores(models, data, **how)
    assert "\n" not in str(error.value)
