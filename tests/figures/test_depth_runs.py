"""The study of depth: samples of a seed, blocks of an arm, what stays frozen, and the order of jobs."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch

from figures.decision import depth_runs as depth
from figures.decision.depth_runs import Job


def test_seeds_share_test_samples_that_no_run_trains_on(
    monkeypatch,
):
    n = 28 * 400
    x = np.arange(n, dtype=np.uint16).view(np.uint8).reshape(n, 1, 2)
    y, style = np.arange(n) % 7, np.arange(n) // 7 % 4
    monkeypatch.setattr(depth, "pictures", lambda _: (x, y, style, list("abcdefg")))
    monkeypatch.setattr(depth, "turned", lambda x, degrees: x)
    first, doses = depth.federation("pacs", 0.5, 0)
    again, _ = depth.federation("pacs", 0.5, 1)
    assert doses["styles"] == pytest.approx(3 / 8)
    train = [set(map(bytes, each.x[each.is_train])) for each in (first, again)]
    test = [list(map(bytes, each.x[~each.is_train])) for each in (first, again)]
    assert test[0] == test[1]
    assert len(set(test[0])) == 4 * depth.TEST["pacs"]
    assert train[0] != train[1]
    assert len(train[0]) == 4 * 240
    assert not (train[0] | train[1]) & set(test[0])


def test_arms_share_whole_blocks_and_statistics_stay():
    net = depth.network(3)
    before = {name: each.clone() for name, each in net.state_dict().items()}
    net.train()(torch.randn(4, 3, 64, 64)).sum().backward()
    assert all(torch.equal(before[name], each) for name, each in net.named_buffers())
    assert all(each.grad is not None for each in net.parameters())
    plans = {
        arm: depth.plan_of(Job("pacs", 0.5, arm, 0), net, pd.DataFrame())
        for arm in ("0", "6", "last 6", "all")
    }
    blocks = [f"features.{k}" for k in range(19)]
    assert not plans["0"].shared
    assert len(plans["all"].shared) == 20
    assert plans["6"].shared == tuple(blocks[:7])
    assert plans["last 6"].shared == tuple(blocks[12:])
    held = {name for layer in plans["6"].layers for name in layer.tensors}
    assert held == set(net.state_dict())


def test_a_folded_network_computes_the_same_function(monkeypatch):
    net = depth.network(3).double()
    for each in net.buffers():
        if each.is_floating_point():
            each.uniform_(0.5, 2)
    monkeypatch.setattr(depth, "folded", lambda module: module)
    plain = depth.network(3).double().eval()
    plain.load_state_dict(net.state_dict())
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(net.eval()(x), plain(x), rtol=1e-9, atol=1e-9)


def test_a_job_reads_rows_of_earlier_stages_only():
    stages = [list(group) for _, group in itertools.groupby(depth.jobs(), depth.stage)]
    place = {job: k for k, group in enumerate(stages) for job in group}
    assert len(place) == 544
    assert max(place[job] for job in list(depth.jobs())[:332]) == 1
    for job, k in place.items():
        if job.arm == "cosine":
            assert place[job._replace(arm=depth.ONE, lr=None)] < k
        if job.lr is None:
            arm = "all" if job.arm == depth.ONE else job.arm
            middle = depth.DOSES[job.source][0]
            rates = [
                Job(job.source, middle, arm, depth.TUNING, lr) for lr in depth.RATES
            ]
            assert max(place[rate] for rate in rates) < k


def test_stored_jobs_are_skipped_whatever_rate_was_theirs(tmp_path):
    done = list(depth.jobs())[::40]
    rates = [job.lr or (None if job.seed == 2 else 0.0003) for job in done]
    rows = pd.DataFrame(done).assign(lr=rates, curve=[[0.1, 0.2]] * len(done))
    rows.to_parquet(tmp_path / "rows.parquet")
    rows = pd.read_parquet(tmp_path / "rows.parquet")
    assert depth.stored(rows) == set(done)
    again = {**rows.iloc[3].to_dict(), "curve": [0.1, 0.2], "seconds": 1.0}
    assert depth.differences(again, rows.iloc[3].to_dict()) == []
    again["curve"] = [0.1, np.nextafter(0.2, 1)]
    assert depth.differences(again, rows.iloc[3].to_dict()) == ["curve"]
