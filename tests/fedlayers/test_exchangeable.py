"""Predictors of one truth are rarely called different, and better ones often, wherever a choice makes a claim."""

import math
from itertools import combinations, product
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from fedlayers.studies.choice import infer, over_samples
from fedlayers.studies.choose import beside_base_rate
from fedlayers.studies.harmless import TEST, VALIDATION, Bench, Predictor
from fl_core.data.federated import ClientData, Split
from fl_core.rows import CLASSIFICATION
from fl_core.training.losses import CrossEntropy

ARMS = ("all", "nothing", "head_local", "first_half_local")
CLIENTS = 8


def bench_of(samples, group=1):
    """Return the bench of a federation whose clients have some groups of samples in each split."""
    numbers = np.repeat(np.arange(samples), group)
    y = torch.arange(len(numbers)) % 2
    split = Split(torch.zeros(len(numbers), 1), y, numbers)
    clients = [ClientData(f"c{k}", split, split, split) for k in range(CLIENTS)]
    data = SimpleNamespace(
        task=CLASSIFICATION, clients=clients, n_classes=2, positive_index=1, absent=()
    )
    config = SimpleNamespace(federation=SimpleNamespace(monitor=None))
    return Bench(SimpleNamespace(data=data, criterion=CrossEntropy(), config=config))


def predictor_of(name, bench, losses):
    """Return a predictor with given losses: a line for each client."""
    split = dict(zip(bench.bases, torch.from_numpy(losses), strict=True))
    outputs = {client: torch.zeros(len(own), 2) for client, own in split.items()}
    both = (VALIDATION, TEST)
    known = {("losses", each): split for each in both}
    return Predictor(name, dict.fromkeys(both, outputs), known=known)


def losses_of(draw, samples, group, means):
    """Draw losses of predictors, clients and samples, of which those of one group are alike."""
    size = (len(means), CLIENTS, samples)
    found = 0.5 + 0.3 * draw.standard_gamma(1.0, size).repeat(group, axis=2)
    found = found + 0.2 * draw.standard_gamma(1.0, (CLIENTS, samples)).repeat(group, 1)
    found = found + 0.1 * draw.normal(size=found.shape)
    return found + np.array(means)[:, None, None]


def claims_of(bench, draw, samples, group, means=(0.0,) * 5, seeds=1, frames=False):
    """Return what a choice claims of arms, the first of which is the base rate, by the place of the claim."""
    benches, models, lines = {}, {}, []
    seed_noise = 0.02 * (seeds > 1)
    for seed in range(seeds):
        shifted = np.array(means) + seed_noise * draw.normal(size=len(means))
        losses = losses_of(draw, samples, group, shifted)
        base, *arms = (
            predictor_of(name, bench, each)
            for name, each in zip(("base_rate", *ARMS), losses, strict=True)
        )
        benches[seed] = SimpleNamespace(difference=bench.difference, base_rate=base)
        models[seed] = dict(zip(ARMS, arms, strict=True))
        for name, one in models[seed].items():
            above = bench.difference(one, base, VALIDATION).value
            lines.append((name, seed, above, -above, above))
    judged = pd.DataFrame(lines, columns=["arm", "seed", "loss", "score", "above"])
    sampled = over_samples(
        [
            {
                (one, other): bench.difference(by[one], by[other], VALIDATION)
                for one, other in combinations(ARMS, 2)
            }
            for by in models.values()
        ]
    )
    race = infer(judged, sampled, main="loss", overlap=0.0)
    beside = beside_base_rate(judged, models, benches, 0.0)
    if frames:
        return race.differences, beside
    # one run's model is compared by itself, so no seed shifts it
    names = ("base_rate", "model", "alone")
    losses = losses_of(draw, samples, group, means[:3])
    compared = {
        name: predictor_of(name, bench, each)
        for name, each in zip(names, losses, strict=True)
    }
    model = compared.pop("model")
    gains = bench.of_clients({"model": model, **compared})["gain"]
    return {
        "an arm is worse": race.differences["excluded"].any(),
        "an arm differs from the base rate": (beside["p_value"] <= 0.05).any(),
        "a client gains or loses": (gains != "").any(),
        "a baseline is better": bench.difference(model, compared["base_rate"], TEST)
        .interval()
        .low
        > 0,
    }


@pytest.mark.parametrize("draws", [3, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_exchangeable_predictors_are_rarely_called_different(draws, seeds):
    """At most 30 of 400 draws, with 1, 2, 5 and 30 samples a client, also in groups of five."""
    draw, wrong = np.random.default_rng(seeds), {}
    for samples, group in product((1, 2, 5, 30), (1, 5)):
        bench = bench_of(samples, group)
        for _ in range(draws):
            claims = claims_of(bench, draw, samples, group, seeds=seeds)
            for place, claimed in claims.items():
                wrong.setdefault(place, []).append(bool(claimed))
    most = 0.05 + 2.3 * math.sqrt(0.05 * 0.95 / min(8 * draws, 400))
    for place, claims in wrong.items():
        rates = np.array(claims).reshape(-1, min(8 * draws, 400)).mean(axis=1)
        assert (rates <= most).all(), (place, rates)


def test_a_useful_arm_is_kept_and_a_large_difference_is_shown():
    """An arm worth 0.064 nats at 30 samples in all, and one worth 0.3 nats at 100 samples."""
    draw, refused, shown = np.random.default_rng(0), [], []
    for _ in range(20):
        bench = bench_of(4)
        above = claims_of(bench, draw, 4, 1, (0.064, 0, 0, 0, 0), frames=True)[1]
        refused.append((above["low"] > 0).any())
        race, _ = claims_of(
            bench_of(12), draw, 12, 1, (0, 0.3, 0.3, 0.3, 0), frames=True
        )
        shown.append(race["excluded"].any())
    assert np.mean(refused) <= 0.05
    assert np.mean(shown) >= 0.4
