"""Sides beside each other: every one takes the job's steps and ends with the same weights; who is absent is named."""

import contextlib
import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from torch import nn

from benchmarks import pairs, peers, transformer
from benchmarks.peers import PEERS, Peer
from benchmarks.sides import Job, remote
from fl_core.config import RunConfig

SGD = RunConfig(
    dataset="random",
    model="heart_mlp",
    epochs=1,
    batch_size=8,
    lr=0.1,
    optimizer="sgd",
    loss="cross_entropy",
)
ADAMW = SGD.with_keys(model=None, optimizer="adamw", lr=0.001, weight_decay=0.01)


SIDES = {peers.OURS: Peer(peers.ours), **PEERS}


def network():
    """Every kind of layer that the standard jobs have."""
    torch.manual_seed(0)
    convolution = (nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(
        *convolution, nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 4)
    )


ONE_STEP = (
    Job("sgd", SGD, 3, 8, (10,), classes=5),
    Job("adamw", ADAMW, 3, 8, (2, 6, 6), classes=4, network=network),
)  # a client's samples are one batch, so that no order of samples makes a difference
SHARED = Job(
    "some", SGD.with_keys(participation=0.5), 4, 16, (10,), classes=5, rounds=3
)


def reference(job):
    """Every client's step from the start, and their mean, in float64."""
    data = job.data()
    ends = []
    for client in data.clients:
        model = job.model(data).double()
        optimizer = job.optimizer(model.parameters())
        nn.functional.cross_entropy(
            model(client.train.x.double()), client.train.y
        ).backward()
        optimizer.step()
        ends.append([parameter.detach() for parameter in model.parameters()])
    return [torch.stack(gradients).mean(0) for gradients in zip(*ends, strict=True)]


@pytest.mark.parametrize(
    "name",  # a cluster takes its time to begin
    [
        pytest.param(name, marks=[pytest.mark.slow] * ("ray" in peer.needs))
        for name, peer in SIDES.items()
    ],
)
@pytest.mark.parametrize("job", ONE_STEP, ids=lambda job: job.name)
def test_a_round_of_one_step_is_the_mean_of_the_steps(job, name):
    """The public packages where they are installed; the sources of PFLlib by the environment's PFLLIB."""
    peer = SIDES[name]
    if why := peer.missing():
        pytest.skip(why)
    with contextlib.ExitStack() as stack:
        if peer.needs:  # whose threads and settings are to end with it
            side = stack.enter_context(remote({name: peer.open}, job))[name]
            run = side.turn
        else:
            side = stack.enter_context(peer.open(job))
            run = side.round
        start = [weight.detach().clone() for weight in side.weights()]
        run()
        found = [weight.detach().double() for weight in side.weights()]
    torch.testing.assert_close(found, reference(job), rtol=0, atol=2e-5)
    assert (
        max(float((b - a).abs().max()) for a, b in zip(start, found, strict=True))
        > 20 * 2e-5
    )


def test_this_package_and_the_loop_take_the_jobs_steps():
    for start in (peers.ours, peers.bare):
        with start(SHARED) as side:
            assert [side.round(), side.round()] == [SHARED.steps, 2 * 2]


@pytest.mark.slow  # a cluster takes its time to begin
@pytest.mark.parametrize("job", transformer.ON_DEVICE)
def test_what_is_measured_on_a_device_runs_on_a_cpu(job):
    """A row without a ratio says which package is missing."""
    small = replace(job, clients=4, samples=job.batch)
    missing = [
        peer.missing() for peer in transformer.NEXT_TO.values() if peer.missing()
    ]
    for row in transformer.on_device(small, "cpu", 1):
        assert row.ratio > 0 or row.holds.removeprefix("not measured: ") in missing


WITH_TARGETS = [
    path
    for path in sorted(pairs.RESULTS.glob("*.csv"))
    if ",target," in path.read_text()
]


@pytest.mark.parametrize("path", WITH_TARGETS, ids=lambda path: path.stem)
def test_a_committed_target_holds_when_the_intervals_worse_end_does(path):
    for row in (
        pd.read_csv(path, comment="#").dropna(subset=["target", "ratio"]).itertuples()
    ):
        least, most = -math.inf, math.inf
        match row.target.split():
            case ["=", _]:  # of a curve's growth: as theory, or said to be otherwise
                continue
            case [">=", number]:
                least = float(number)
            case ["<=" | "<", number]:
                most = float(number)
            case [number, "to", end]:
                least, most = float(number), float(end)
        assert (least, most) != (-math.inf, math.inf)
        assert row.holds == (
            "yes" if least <= row.low and row.high <= most else "no"
        ), row


@pytest.mark.parametrize(
    ("count", "probes", "holds"),
    [(939, 2, "no"), (948, 2, "yes"), (962, 2, "no")],
)
def test_coverage_holds_when_the_intervals_worse_end_does(count, probes, holds):
    # which imports the packages that are compared
    from benchmarks.measurements import covered

    row = covered(count, 1000, probes, "0")
    assert row.low < row.ratio == count / 1000 < row.high
    assert row.holds == holds


def test_compare_is_two_sides_of_it():
    """The ratio, with a factor on the baseline, from a clock that only they move."""
    now = 0.0

    def spend(seconds):
        nonlocal now
        now += seconds

    row = pairs.compare(
        "x",
        "a",
        lambda: spend(2.0),
        "b",
        lambda: spend(3.0),
        at_least=5.0,
        pairs=6,
        scale=4.0,
        clock=lambda: now,
    )
    assert row == pairs.Measured(
        "x", "a", "b", 6.0, 6.0, 6.0, ">= 5", "yes", 2.0, 12.0, 6
    )
