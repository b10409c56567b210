"""LG-FedAvg, FedBN and FedLP: which part of a model is shared."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from fl_core import tree
from fl_core.algorithms import Round
from fl_core.seeds import torch_seeded
from tests.conftest import TOY, network, play

CLIENTS = [client.name for client in TOY.clients]


def disguised():
    """Normalisations under names that say nothing, a layer whose name says too much, and one of another kind."""
    with torch_seeded(0):
        return nn.Sequential(
            OrderedDict(
                conv=nn.Conv2d(1, 4, 3),
                downsample=nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)),
                flat=nn.Flatten(),
                bn_linear=nn.Linear(64, 8),
                group=nn.LayerNorm(8),
                head=nn.Linear(8, 3),
            )
        )


@pytest.mark.parametrize("by", ["block", "module"])
def test_batch_normalisations_are_found_by_their_type(by):
    played = play(
        algorithm="fedbn",
        model=disguised(),
        layer_granularity=by,
        rounds=2,
        eval_every=2,
    )
    algorithm = played.engine.algorithm
    local_names = {
        f"downsample.1.{key}"
        for key in (
            "weight",
            "bias",
            "running_mean",
            "running_var",
            "num_batches_tracked",
        )
    }
    assert algorithm.task_info.norms == local_names
    assert algorithm.task_info.tensors - algorithm.shared(Round(0), 0) == local_names
    for checkpoint in played.checkpoints:
        trees = [
            algorithm.models(checkpoint.server, state, Round(checkpoint.round))[
                "personal"
            ]
            for state in checkpoint.clients.values()
        ]
        for name in trees[0]:
            same = all(torch.equal(trees[0][name], other[name]) for other in trees[1:])
            assert same == (name not in local_names) or name.endswith(
                "num_batches_tracked"
            ), name


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_a_layer_is_averaged_over_those_that_sent_it_and_stays_where_nobody_did(
    participation,
):
    options = {"keep": 0.3}
    played = play(
        algorithm="fedlp",
        model="norm",
        rounds=6,
        participation=participation,
        options=options,
        eval_every=9,
    )
    algorithm, server = played.engine.algorithm, tree.state_dict(network("norm"))
    nobody = some = 0
    for checkpoint in played.checkpoints:
        local = {
            CLIENTS.index(name): t for name, t in checkpoint.models["local"].items()
        }
        rnd = Round(checkpoint.round - 1)
        for layer in algorithm.task_info.layers:
            senders = [
                c for c in local if set(layer.tensors) <= algorithm.uploaded(rnd, c)
            ]
            assert all(
                algorithm.uploaded(rnd, c).isdisjoint(layer.tensors)
                for c in local
                if c not in senders
            )
            nobody, some = (
                nobody + (not senders),
                some + (0 < len(senders) < len(local)),
            )
            if senders:
                trees = [tree.select(local[c], layer.tensors) for c in senders]
                server |= tree.mean(trees, [TOY.weights[c] for c in senders])
        assert tree.digest(checkpoint.server.trees["model"]) == tree.digest(server)
    assert nobody
    assert some
