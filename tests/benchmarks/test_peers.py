"""Sides beside each other: every one takes the job's steps and ends with the same weights; who is absent is named."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from benchmarks import pairs, peers
from benchmarks.peers import PEERS, Peer
from benchmarks.sides import Job, Plain, Side, remote
from fl_core.config import RunConfig
from fl_core.errors import RunError, UsageError

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


def network() -> nn.Sequential:
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


@contextmanager
def fake(job: Job, checkout: Path | None) -> Iterator[Side]:
    """A peer that takes the job's steps and does nothing."""
    yield Plain(lambda: job.steps, lambda: [torch.full((2,), float(job.clients))])


@contextmanager
def faulty(job: Job, checkout: Path | None) -> Iterator[Side]:
    """A peer that leaves a step out, and then fails."""
    left = [job.steps - 1] + [job.steps] * (job.rounds - 1)
    yield Plain(lambda: left.pop(), lambda: [torch.full((2,), float(job.clients))])


def reference(job: Job) -> list[Tensor]:
    """Every client's step from the start, and their mean, in float64."""
    data = job.data()
    sums: list[Tensor] = []
    for client in data.clients:
        model = job.model(data).double()
        optimizer = job.optimizer(model.parameters())
        nn.functional.cross_entropy(
            model(client.train.x.double()), client.train.y
        ).backward()
        optimizer.step()
        now = [parameter.detach() for parameter in model.parameters()]
        sums = (
            [total + each for total, each in zip(sums, now, strict=True)]
            if sums
            else now
        )
    return [total / len(data.clients) for total in sums]


@pytest.mark.parametrize(
    "name",  # a cluster takes its time to begin
    [
        pytest.param(name, marks=[pytest.mark.slow] * ("ray" in peer.needs))
        for name, peer in SIDES.items()
    ],
)
@pytest.mark.parametrize("job", ONE_STEP, ids=lambda job: job.name)
def test_a_round_of_one_step_is_the_mean_of_the_steps(job: Job, name: str) -> None:
    """The public packages where they are installed; the sources of PFLlib by the environment's PFLLIB."""
    checkout = (
        peers.sources(Path(os.environ["PFLLIB"])) if "PFLLIB" in os.environ else None
    )
    peer = SIDES[name]
    if why := peer.missing(checkout):
        pytest.skip(why)
    with contextlib.ExitStack() as stack:
        if peer.needs:  # whose threads and settings are to end with it
            side: Any = stack.enter_context(remote({name: peer.open}, job, checkout))[
                name
            ]
            run = side.turn
        else:
            side = stack.enter_context(peer.open(job, checkout))
            run = side.round
        start = [weight.detach().clone() for weight in side.weights()]
        run()
        found = [weight.detach().double() for weight in side.weights()]
    torch.testing.assert_close(found, reference(job), rtol=0, atol=2e-5)
    assert (
        max(float((b - a).abs().max()) for a, b in zip(start, found, strict=True))
        > 20 * 2e-5
    )


def test_this_package_and_the_loop_take_the_jobs_steps() -> None:
    assert SHARED.steps == 2 * 2
    for start in (peers.ours, peers.bare):
        with start(SHARED, None) as side:
            assert side.round() == SHARED.steps
            assert side.round() == SHARED.steps


@pytest.mark.slow
def test_every_peer_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = {
        "fake": Peer(fake, reach={"some": 1e9}),
        "not there": Peer(fake, needs=("no_such_package",), reach={"some": 2.0}),
        "not given": Peer(fake, checkout=True),
    }
    found = {row.baseline: row for row in peers.measure(SHARED, chosen, 2)}
    assert list(found) == list(chosen)
    fast = found["fake"]
    assert fast.pairs == 2
    assert fast.holds == "no"
    assert fast.seconds is not None
    assert fast.seconds > (fast.baseline_seconds or 0) > 0  # it does nothing
    assert 0 < fast.ratio < 1
    printed = capsys.readouterr().out
    for name, why, target in (
        ("not there", "not measured: not installed: no_such_package", ">= 2"),
        ("not given", "not measured: no path to its sources was given", ""),
    ):
        assert math.isnan(found[name].ratio)
        assert (found[name].holds, found[name].target, found[name].pairs) == (
            why,
            target,
            0,
        )
        assert f"{name}: {why}" in printed


@pytest.mark.slow
def test_a_side_that_differs_or_fails_stops_the_run() -> None:
    with remote({"faulty": faulty}, SHARED) as sides:
        torch.testing.assert_close(
            sides["faulty"].weights(), [torch.tensor([4.0, 4.0])]
        )
        with pytest.raises(RunError, match=r"12 .*faulty .*11"):
            sides["faulty"].turn()
        with pytest.raises(RunError, match=r"faulty (.|\n)*pop from empty"):
            sides["faulty"].turn()
        with pytest.raises(RunError, match=r"faulty .*ended"):
            sides["faulty"].turn()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"samples": 9}, "9"),
        ({"config": SGD.with_keys(optimizer="adam")}, "optimizer 'adam'"),
        ({"config": SGD.with_keys(momentum=0.9)}, "momentum"),
        ({"config": SGD.with_keys(weight_decay=0.1)}, "momentum"),
        ({"config": SGD.with_keys(epochs=2)}, "epochs .*2"),
        ({"config": SGD.with_keys(lr=None)}, "lr"),
    ],
)
def test_jobs_that_a_side_would_run_otherwise_are_refused(
    change: dict, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        replace(ONE_STEP[0], **change)


WITH_TARGETS = [
    path
    for path in sorted(pairs.RESULTS.glob("*.csv"))
    if not path.stem.startswith("commands-")
]


@pytest.mark.parametrize("path", WITH_TARGETS, ids=lambda path: path.stem)
def test_a_committed_target_holds_when_the_intervals_worse_end_does(path: Path) -> None:
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
def test_coverage_holds_when_the_intervals_worse_end_does(
    count: int, probes: int, holds: str
) -> None:
    from benchmarks.measurements import (
        covered,
    )  # which imports the packages that are compared

    row = covered(count, 1000, probes, "0")
    assert row.low < row.ratio == count / 1000 < row.high
    assert row.holds == holds


@pytest.mark.parametrize(
    ("line", "error", "said", "code"),
    [
        ("j9", None, "unknown benchmark 'j9': did you mean 'j", 2),
        ("j1 --pflib .", None, "--pflib", 2),
        ("broken", RunError("no more steps"), "no more steps", 1),
    ],
)
def test_a_failure_is_one_line_without_a_traceback(
    line: str,
    error: Exception | None,
    said: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from benchmarks import __main__ as benchmarks

    def broken() -> None:
        raise error or AssertionError

    monkeypatch.setitem(benchmarks.JOBS, "broken", broken)
    with pytest.raises(SystemExit) as left:
        benchmarks.command(line.split())
    assert left.value.code == code
    (only,) = capsys.readouterr().err.splitlines()
    assert only.startswith(f"benchmarks: {said}")


def test_a_path_has_to_be_a_checkout(tmp_path: Path) -> None:
    from benchmarks.__main__ import main  # which imports the other benchmarks

    with pytest.raises(UsageError, match="PFLlib"):
        peers.sources(tmp_path)
    with pytest.raises(UsageError, match="peers"):
        main(("j1",), pflib=tmp_path)
    servers = tmp_path / "system" / "flcore" / "servers"
    servers.mkdir(parents=True)
    (servers / "serveravg.py").touch()
    assert peers.sources(tmp_path) == tmp_path / "system"
    assert peers.sources(None) is None


def test_compare_is_two_sides_of_it() -> None:
    """The ratio, with a factor on the baseline, from a clock that only they move."""
    now = 0.0

    def spend(seconds: float) -> None:
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
    assert (row.ratio, row.low, row.high, row.seconds, row.baseline_seconds) == (
        6.0,
        6.0,
        6.0,
        2.0,
        12.0,
    )
    assert (row.holds, row.pairs) == ("yes", 6)
