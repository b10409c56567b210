"""The cost of a decision's runs: an estimate by hand, and the rows and clocks that measure it."""

import json
import math
from types import SimpleNamespace

import pandas as pd
import pytest

from fedlayers.decision import price
from fl_core.config import RunConfig
from fl_core.run import runner

KEYS = {"dataset": "heart", "rounds": 10, "epochs": 2, "batch_size": 16}


@pytest.fixture(scope="module")
def tasks():
    """A run of FedAvg, one that also trains a local model, and one that stops by its patience."""
    return {
        "fedavg": runner.assemble(RunConfig(**KEYS)),
        "ditto": runner.assemble(RunConfig(**KEYS, algorithm="ditto")),
        "patient": runner.assemble(RunConfig(**KEYS, patience=2, eval_every=2)),
        "half": runner.assemble(RunConfig(**KEYS, participation=0.5)),
    }


def jobs(*pairs):
    return [SimpleNamespace(arm=arm, until=until) for arm, until in pairs]


def batches(task):
    """Steps of one epoch at all clients."""
    return sum(math.ceil(len(client.train) / 16) for client in task.data.clients)


def size(task):
    """Bytes of the model once."""
    return sum(4 * p.numel() for p in task.model.parameters())


def test_bytes_and_steps_of_a_round(tasks):
    clients = len(tasks["fedavg"].data.clients)
    for arm, share in (("fedavg", 1.0), ("half", 0.5), ("ditto", 1.0)):
        moved = price.bytes_a_round(tasks[arm])
        assert moved == share * 2 * clients * size(tasks[arm])
    steps = 2 * batches(tasks["fedavg"])
    assert price.round_steps(tasks["fedavg"]) == steps
    assert price.round_steps(tasks["half"]) == steps / 2
    assert price.round_steps(tasks["ditto"]) > steps


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_an_estimate_counts_rounds_bytes_and_steps(workers, tasks):
    planned = jobs(("fedavg", 4), ("fedavg", None), ("ditto", None))
    cost = price.estimate_cost(tasks, planned, workers, tuning_epochs=3, step=0.5)
    rounds = (4, 10, 10)
    assert (cost.runs, cost.rounds, cost.most) == (3, sum(rounds), sum(rounds))
    assert cost.full_runs == pytest.approx((sum(rounds) + 3 / 2) / 10)
    arms = [tasks[job.arm] for job in planned]
    moved = [
        price.bytes_a_round(task) * n for task, n in zip(arms, rounds, strict=True)
    ]
    assert cost.n_bytes == sum(moved)
    steps = [price.round_steps(task) * n for task, n in zip(arms, rounds, strict=True)]
    alone = 3 * batches(tasks["fedavg"])
    seconds = 0.5 * (sum(steps) / min(workers, 3) + alone)
    assert cost.seconds == pytest.approx(seconds)


def test_a_run_with_patience_is_taken_to_improve_as_long_as_it_waits(tasks):
    cost = price.estimate_cost(
        tasks, jobs(("patient", None), ("patient", 3)), 1, step=1
    )
    assert (cost.rounds, cost.most) == (8 + 3, 10 + 3)
    assert "about 11 rounds, at most 13 (1.1 full runs); " in cost.text()


def test_a_step_is_timed_by_default(tasks):
    cost = price.estimate_cost(tasks, jobs(("fedavg", 1)), 1)
    step = cost.seconds / price.round_steps(tasks["fedavg"])
    assert 0 < step < 1
    assert cost.text().startswith("1 run, 1 round (0.1 full runs); ")


def test_a_measured_cost_is_read_from_rows_and_clocks(tasks, tmp_path):
    table = pd.DataFrame({
        "metric": ["bytes_down", "bytes_up", "bytes_evaluation", "accuracy"],
        "value": [100.0, 20.0, 7.0, 0.5],
    })  # fmt: skip
    ran = []
    for name, seconds in (
        ("a", (1.0, 2.0)),
        ("b", (4.0,)),
        ("none", None),
        ("begun", ()),
    ):
        (tmp_path / name).mkdir()
        lines = [
            json.dumps(dict.fromkeys(price.recorder._TIMING, 0.0) | {"round": n, "train": spent})
            for n, spent in enumerate(seconds or (), 1)
        ]  # fmt: skip
        if seconds is not None:
            text = "".join(f"{line}\n" for line in lines)
            (tmp_path / name / "timing.jsonl").write_text(text)
        ran.append(SimpleNamespace(path=tmp_path / name, rows=table))
    for workers, together in ((1, 1), (2, 2), (8, 4)):
        cost = price.measured_cost(tasks["fedavg"], ran, workers, tuning_epochs=4)
        assert (cost.runs, cost.rounds, cost.n_bytes) == (4, 3, 360.0)
        assert cost.seconds == pytest.approx(7 / together)
        assert cost.full_runs == pytest.approx((3 + 4 / 2) / 10)


def test_times_have_the_unit_that_fits():
    for seconds, text in (
        (0, "< 0.1 s"), (0.0999, "< 0.1 s"), (0.1, "0.1 s"), (9.94, "9.9 s"), (9.95, "10 s"),
        (89.9, "90 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h"), (36000, "10.0 h"),
    ):  # fmt: skip
        assert price.format_seconds(seconds) == text
