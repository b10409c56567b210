"""What is easily misread: pictures with channels last, labels of -1, a plan or a model that is of other data."""

import warnings

import numpy as np
import pytest
import torch

from fl_core import tree
from fl_core.config import RunConfig
from fl_core.data import load
from fl_core.data.federated import digest_of
from fl_core.data.inputs import Inputs
from fl_core.plan import LayerPlan
from fl_core.run import runner


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("count", [1, 3, 4])
def test_pictures_with_channels_last_are_turned_and_said_so(tmp_path, count):
    x = np.random.default_rng(0).random((40, 9, 7, count), dtype=np.float32)
    y = np.arange(40) % 2
    path = save(tmp_path / "last.npz", x=x, y=y)
    with pytest.warns(
        UserWarning, match=rf"{9}, {7}, {count}.*\[n, {count}, {9}, {7}\]"
    ):
        data = load(path, clients=1, partition="iid")
    assert data.shape == (count, 9, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = load(
            save(tmp_path / "first.npz", x=np.moveaxis(x, -1, 1), y=y),
            clients=1,
            partition="iid",
        )
    assert torch.equal(first.clients[0].train.x, data.clients[0].train.x)
    with pytest.warns(UserWarning, match="turned"):
        assert Inputs.from_federation(first).samples(x).x.shape == (40, count, 9, 7)


def test_a_plan_that_was_measured_on_other_data_is_noted():
    config = RunConfig(dataset="heart", algorithm="fedper", rounds=1)
    task = runner.assemble(config)
    clients = {
        c.name: tree.digest({"x": c.train.x, "y": c.train.y}) for c in task.data.clients
    }
    for data_digest, noted in (
        ("", False),
        (task.data.digest, False),
        (digest_of(clients), False),
        (runner.assemble(config.with_keys(seed=1)).data.digest, True),
        ("0" * 64, True),
    ):
        plan = LayerPlan.prefix(task.layers, 1)
        assembled = runner.assemble(
            config, plan=plan.with_shared(plan.shared, data=data_digest)
        )
        notes = [note for note in assembled.notes() if "other data" in note]
        assert len(notes) == noted
