"""Sums in place of losses: differences, errors and temperatures against those of the samples themselves."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fedlayers.decision.losses import SeedLosses
from fedlayers.decision.sums import (
    TEMPERATURES,
    Calibration,
    calibration,
    group_sums,
    labels_of_halves,
    other_losses,
    sums_of_halves,
    weights_of_halves,
)
from fedlayers.decision.table import Part, SumPart
from fl_core.config import RunConfig
from fl_core.data.federated import Split
from fl_core.rounds.clients import SCORED
from fl_core.run.task import assemble
from fl_core.training import evaluate
from tests.conftest import TOY, refuses

CLIENTS = 4


def drawn(seed, clients=CLIENTS, most=9):
    """Return the losses of three ways [3, n] with clients, groups and weights; some clients have one group."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, most, clients)
    client = np.repeat(np.arange(clients), sizes)
    group = 100 * client + draw.integers(0, 4, len(client))
    weight = draw.random(len(client)) + 0.1
    losses = draw.random((3, len(client))) + draw.random((3, 1))
    return losses, client, group, weight


def summed(losses, client, group, weight, clients=CLIENTS):
    """Return the parts of the ways from sums over the groups of each client."""
    draws, sums, products = [], [], []
    for number in range(clients):
        of_client = client == number
        rows = []
        for name in np.unique(group[of_client]):
            inside = of_client & (group == name)
            columns = [*losses[:, inside], np.ones(inside.sum())]
            rows.append([float(weight[inside] @ column) for column in columns])
        table = np.array(rows)
        draws.append(len(table))
        sums.append(table.sum(0))
        products.append(table.T @ table)
    sums_of_clients = np.array(draws, float), np.array(sums), np.array(products)
    means = losses @ weight / weight.sum()
    return [
        SumPart(means[k], len(client), k, *sums_of_clients) for k in range(len(losses))
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_sums_over_groups_give_the_estimates_of_the_samples(seed):
    losses, client, group, weight = drawn(seed)
    share = weight / weight.sum()
    parts = [Part(float(v @ share), v, share, group, client) for v in losses]
    others = summed(losses, client, group, weight)
    for number in (None, *range(CLIENTS)):
        plain = parts[0].above(parts[1], number)
        estimate = others[0].above(others[1], number)
        assert estimate == pytest.approx(plain, rel=1e-5, abs=1e-8, nan_ok=True)
        same = others[2].above(others[2], number)
        assert same.value == 0
        assert np.isnan(same.error)


def test_a_client_without_samples_has_no_estimate():
    losses, client, group, weight = drawn(0)
    (one, other, _) = summed(losses, client, group, weight)
    none = one._replace(draws=np.array([0.0, *one.draws[1:]]))
    assert none.above(other, 0) is None
    part = Part(0.0, losses[0], weight, group, client)
    assert part.above(part, CLIENTS) is None


@pytest.mark.parametrize("several", [False, True])
def test_the_temperature_has_the_least_softened_loss(several):
    draw = torch.Generator().manual_seed(0)
    outputs = 6 * torch.randn(40, 3, generator=draw).double()
    y = outputs.argmax(1)
    y[:9] = torch.arange(9) % 3
    if several:
        y = (outputs + 2 * torch.randn(40, 3, generator=draw) > 0).long()
    weights = torch.rand(40, generator=draw).double()
    half = np.arange(40) % 2
    sums = np.zeros((2, len(TEMPERATURES), 2))
    wanted = []
    for number in (0, 1):
        in_half = torch.from_numpy(half == number)
        w, soft = (
            weights[in_half],
            evaluate.soft_targets(y[in_half], weights[in_half], 3),
        )
        means = []
        for place, temperature in enumerate(TEMPERATURES):
            logits = outputs[in_half] / temperature
            label = evaluate.log_losses(logits, y[in_half])
            others = other_losses(logits, y[in_half], label)
            sums[number, place] = float(w @ label), float(w @ others)
            plain = -(soft * logits.log_softmax(1)).sum(1)
            if several:
                plain = -(
                    soft * logits.sigmoid().log()
                    + (1 - soft) * (-logits).sigmoid().log()
                ).mean(1)
            means.append(float(w @ plain))
        wanted.append(TEMPERATURES[int(np.argmin(means))])
    totals = [
        [float(weights[half == k].sum()), float((weights[half == k] ** 2).sum())]
        for k in (0, 1)
    ]
    temperatures, loss = calibration(sums, np.array(totals), [[0, 1, 2]] * 2)
    assert (temperatures.second, temperatures.first) == tuple(wanted)
    assert min(wanted) <= temperatures.test <= max(wanted)
    fitted = torch.tensor([temperatures.first, temperatures.second]).double()[
        torch.from_numpy(half)
    ]
    scored = evaluate.log_losses(outputs / fitted[:, None], y)
    assert loss == pytest.approx(float(weights @ scored / weights.sum()))


def test_one_half_alone_is_not_made_sharper_and_one_class_says_nothing():
    sums = np.zeros((2, len(TEMPERATURES), 2))
    sums[0, :, 0] = np.arange(len(TEMPERATURES))
    alone = np.array([[4.0, 4.0], [0.0, 0.0]])
    assert calibration(sums, alone, [[0, 1], []]) == (Calibration(), 1.0)
    both = np.array([[4.0, 4.0], [4.0, 4.0]])
    temperatures, _ = calibration(sums + sums[::-1], both, [[0], [0, 1]])
    assert temperatures == Calibration(0.25, 1.0, 0.25)


def seed_losses(validation, test, groups):
    """Return the samples of client a, which has these groups or numbers of samples in its splits."""
    x, y = torch.zeros(20, 1, 6, 6), torch.arange(20) % 3

    def split(sizes):
        names = np.repeat(np.arange(len(sizes)), sizes)
        n = len(names)
        return Split(x[:n], y[:n], names if groups else None)

    clients = [
        replace(client, validation=split(validation), test=split(test))
        for client in TOY.clients
    ]
    config = RunConfig(model="mlp", rounds=1)
    task = assemble(config, data=replace(TOY, clients=tuple(clients)))
    return SeedLosses(task, only="a")


@pytest.mark.parametrize("split", SCORED)
@pytest.mark.parametrize(
    ("sizes", "groups", "draws", "halves"),
    [
        # sizes of groups, draws, samples in the halves of a client of even number
        ((2,), False, 1, (2, 0)),
        ((3,), False, 3, (3, 0)),
        ((4,), False, 4, (2, 2)),
        ((2,), True, 1, (2, 0)),
        ((1, 3), True, 1, (4, 0)),
        ((2, 2), True, 2, (2, 2)),
        ((1, 1, 1), True, 3, (3, 0)),
    ],
)
def test_each_sum_that_leaves_a_client_is_over_two_samples_or_more(
    split, sizes, groups, draws, halves
):
    parts = {name: sizes if name == split else () for name in SCORED}
    losses = seed_losses(parts["validation"], parts["test"], groups)
    base = losses.base_rate
    sent = group_sums(losses, split, "a", [(base, Calibration())])
    assert sent["draws"] == draws
    assert sent["sums"][-1] == pytest.approx(losses.sizes["a"])
    sums = np.array(sums_of_halves(losses, base, "a"))
    if split == "test":
        assert not sums.any()
        return
    weights = np.array(weights_of_halves(losses, "a"))
    counts = [float(total**2 / squares) if total else 0 for total, squares in weights]
    assert sorted(counts, reverse=True) == pytest.approx(halves)
    assert [labels != [] for labels in labels_of_halves(losses, "a")] == [
        count > 0 for count in counts
    ]
    assert (sums[:, :, 0].max(1) > 0).tolist() == [count > 0 for count in counts]


@pytest.mark.parametrize("split", SCORED)
def test_a_single_sample_of_a_split_is_refused(split):
    parts = {name: (1,) if name == split else (4,) for name in SCORED}
    losses = seed_losses(parts["validation"], parts["test"], False)
    base = losses.base_rate
    for call in (
        partial(sums_of_halves, losses, base, "a"),
        partial(group_sums, losses, split, "a", [(base, Calibration())]),
    ):
        with refuses(f"^{split} samples of client 'a' must be at least 2"):
            call()
