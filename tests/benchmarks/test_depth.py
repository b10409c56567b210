"""The study of depth: which samples a seed draws, which blocks an arm shares, and what stays frozen."""

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks import depth
from benchmarks.depth import Job


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
