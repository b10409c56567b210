"""FedCAC: which parameters are critical, who collaborates, and what each client is sent."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from fl_core import tree
from fl_core.algorithms import Round
from fl_core.algorithms.fedamp import COLLABORATORS, collaborators, critical_mask
from tests.conftest import TOY, network, play

CLIENTS = [client.name for client in TOY.clients]


def masks(*rows):
    """Masks from strings of 0 and 1, the first two entries in a tensor of their own."""
    flat = {k: torch.tensor([c == "1" for c in row]) for k, row in enumerate(rows)}
    return {k: {"a": row[:2], "b": row[2:].reshape(2, -1)} for k, row in flat.items()}


def overlap(one, other):
    a, b = (
        np.concatenate([t[n].numpy().ravel() for n in sorted(t)]).astype(float)
        for t in (one, other)
    )
    return 1 - np.abs(a - b).sum() / (2 * a.sum()) if a.any() else 0.0


@given(
    st.integers(2, 7),
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.3, 0.5, 0.99, 1.0, 1.0]),
)
def test_collaborators_are_those_of_the_definition(count, seed, progress):
    drawn = np.random.default_rng(seed).random((count, 10)) < 0.5
    drawn_masks = masks(*("".join("01"[int(c)] for c in row) for row in drawn))
    pairs = {
        (i, j): overlap(drawn_masks[i], drawn_masks[j])
        for i in drawn_masks
        for j in drawn_masks
        if i != j
    }
    mean, most = np.mean(list(pairs.values())), max(pairs.values())
    least = mean + progress * (most - mean)
    lists = collaborators(drawn_masks, progress)
    for i in drawn_masks:
        assert i in lists[i]
        assert lists[i] == sorted(lists[i])
        for j in set(drawn_masks) - {i}:
            if abs(pairs[i, j] - least) > 1e-9 or progress == 1:
                assert (j in lists[i]) == (
                    pairs[i, j] >= least - (1e-12 if progress == 1 else 0)
                )


SETTINGS = {
    "all": {"options": {"until": 3}},
    "half the clients": {
        "participation": 0.5,
        "rounds": 5,
        "options": {"until": 4, "critical": 0.3},
    },
    "batch norm, local": {
        "model": "norm",
        "batchnorm": "local",
        "options": {"until": 2},
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_client_is_sent_its_critical_parameters_of_like_clients_over_the_average(
    setting,
):
    """Two or more rounds by hand, from the models that local training gave."""
    run = play(algorithm="fedcac", momentum=0.9, eval_every=9, **SETTINGS[setting])
    algorithm = run.engine.algorithm
    initial = tree.state_dict(network(SETTINGS[setting].get("model", "plain")))
    travelling = algorithm.shared(Round(0), 0)
    parameters = travelling & algorithm.task_info.parameters
    server, sent = (
        tree.select(initial, travelling),
        {c: tree.select(initial, travelling) for c in range(len(CLIENTS))},
    )
    models = {}
    uploads = {}
    for index, checkpoint in enumerate(run.checkpoints):
        local = {
            CLIENTS.index(name): t for name, t in checkpoint.models["local"].items()
        }
        for c, after in local.items():
            models[c] = after
            uploads[c] = {
                n: critical_mask(after[n], sent[c][n], algorithm.config.critical)
                for n in parameters
            }
        server |= tree.mean(
            [tree.select(t, travelling) for t in local.values()],
            [TOY.weights[c] for c in local],
        )
        near = collaborators(
            {c: uploads[c] for c in sorted(uploads)},
            min((index + 1) / algorithm.config.until, 1),
        )
        assert checkpoint.server.meta[COLLABORATORS] == {
            str(c): others for c, others in near.items()
        }
        for c in range(len(CLIENTS)):
            wanted = dict(server)
            for n in parameters if c in uploads else ():
                mean = tree.mean(
                    [{n: models[other][n]} for other in near[c]], [1] * len(near[c])
                )[n]
                wanted[n] = torch.where(uploads[c][n], mean, server[n])
            sent[c] = algorithm.server_message(
                checkpoint.server, c, Round(index + 1)
            ).trees["model"]
            assert tree.digest(sent[c]) == tree.digest(wanted)
            evaluated = algorithm.models(
                checkpoint.server, checkpoint.clients[CLIENTS[c]], Round(index + 1)
            )["personal"]
            assert tree.digest(tree.select(evaluated, travelling)) == tree.digest(
                wanted
            )
    assert any(
        not torch.equal(sent[0][n], sent[c][n]) for n in parameters for c in uploads
    ), "clients must differ"
