"""A loss that is finite and far too large is noted, recorded, and refused where that is asked for."""

import math
import warnings

import torch
from torch import nn

from fl_core.records import store
from fl_core.rounds.steering import DIVERGENCE, TIMES, Divergence
from fl_core.run import runner
from tests.conftest import CONFIG, TOY

LARGE = CONFIG.with_keys(lr=1e6, rounds=4, optimizer="sgd", stack="off")


def model(depth=1):
    """Linear layers: one has losses as large as its steps, two have losses that grow from step to step."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(36, 36) for _ in range(depth - 1)),
            nn.Linear(36, 3),
        )


def run(config, out=None, depth=1, **how):
    """The run's notes on divergence."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner.run(config, out, data=TOY, model=model(depth), **how)
    return [
        str(warning.message) for warning in caught if "diverges" in str(warning.message)
    ]


def test_the_limit_is_the_larger_of_two_losses_times_a_number():
    limit = Divergence(None, 2.0)
    limit.begin("a", 1.0)
    limit.begin("b", 7.0)
    limit.begin("b", 5.0)  # another model's
    limit.begin("c", math.inf)
    for client, bound in (("a", 2.0), ("b", 7.0), ("unheard of", 2.0)):
        assert not limit.reason_for(client, TIMES * bound)
        assert limit.reason_for(client, TIMES * bound * 1.001)
    assert not limit.reason_for("c", 1e30), (
        "where the start was not finite nothing can be said"
    )
    assert not limit.reason_for("a", math.nan)
    assert not limit.reason_for("a", math.inf)
    assert not Divergence(None, 0.0).reason_for("a", 1e30)


def test_a_loss_that_grows_is_noted_at_once_and_recorded_with_its_rounds(
    tmp_path,
):
    (note,) = run(LARGE, tmp_path / "run")
    assert note.startswith("fedavg, round 1, client 'a': ")
    assert "smaller lr" in note
    _, table = store.Run(tmp_path / "run").rows()
    recorded = table[table["metric"] == DIVERGENCE]
    assert set(recorded["round"]) == {1, 2, 3, 4}
    assert recorded["value"].isna().all()
    assert (
        recorded["status"]
        .str.fullmatch(
            r"diverged: a loss of \S+, over 20 times the \S+ (of guessing|at the start)"
        )
        .all()
    )
    assert set(recorded["split"]) == {"train", "validation"}
    large = table[
        table["metric"].isin(["loss", "train_loss"])
        & (table["round"] > 0)
        & (table["split"] != "test")
    ]
    start = table[
        (table["metric"] == "loss")
        & (table["round"] == 0)
        & (table["split"] == "validation")
    ]
    limits = large["client"].map(
        start.groupby("client")["value"].max().clip(lower=math.log(3)) * TIMES
    )
    assert len(recorded) == (large["value"] > limits).sum()
