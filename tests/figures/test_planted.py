"""The end of a metric's scale at which clients differ, held against layers that were planted to differ."""

import pytest
import torch

from diagnostics.metrics.base import METRICS
from figures.decision import planted


def test_each_metric_declares_what_the_planted_layers_showed():
    ends = planted.ends(planted.read_rows())
    assert {*ends.values()} == {"", "high"}
    for name, metric in METRICS.members().items():
        if metric.compute.__module__.startswith("diagnostics."):
            assert metric.differs == ends.get(name, ""), name


def test_rows_are_whole():
    rows = planted.read_rows()
    seeds = rows.groupby(["network", "metric"])["seed"].nunique()
    assert (seeds == planted.SEEDS).all()
    assert len(seeds) == len(planted.NETWORKS) * rows["metric"].nunique()
    assert (rows["higher"] + rows["lower"] <= 4).all()


@pytest.mark.parametrize("right", [7, 8])
def test_an_end_must_be_right_in_eight_of_ten_seeds_of_each_network(right):
    rows = planted.read_rows()
    rows = rows[rows["metric"] == "grad_norm"].copy()
    wrong = (rows["network"] == "dense") & (rows["seed"] >= right)
    rows.loc[wrong, ["higher", "lower"]] = 2
    assert planted.ends(rows) == {"grad_norm": "high" if right == 8 else ""}


def test_clients_differ_at_the_planted_layer_alone():
    """Equal networks label equal inputs alike, so what is planted is all that differs."""
    common, samples = planted.federation("dense", 0, 2)
    assert [*common.state_dict()] == [
        f"{k}.{p}" for k in (0, 2, 4, 6) for p in ("weight", "bias")
    ]
    other, again = planted.federation("dense", 0, 2)
    for name, tensor in common.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    for client, (x, y) in samples.items():
        assert torch.equal(y, again[client][1])
        assert len(x) == planted.SAMPLES
        assert len({*y.tolist()}) == 4


def test_the_counts_of_a_seed_are_made_again():
    metrics = ["grad_variance", "weight_divergence", "weight_magnitude"]
    rows = planted.read_rows()
    stored = rows[(rows["network"] == "dense") & (rows["seed"] == 0)]
    stored = stored.set_index("metric")[["higher", "lower"]]
    for name, counts in planted.counts("dense", 0, metrics).items():
        assert counts == tuple(stored.loc[name])
