"""Three methods against numbers of their authors' own code, which ``authors.json`` has with inputs and corrections.

The file names the repository and commit of each. ``tests/identities/authors.py`` of commit 8b6dbd72 made it.
"""

import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fl_core.algorithms import Round
from fl_core.data import ClientData, Split
from tests.conftest import CONFIG, federation, play

STORED = json.loads(Path(__file__).with_name("authors.json").read_text("utf-8"))
TOLERANCE = 2e-6
"""The largest difference of a number. The authors' code rounds in another order, in float32."""


def data_of():
    """Return the training samples of each client."""
    client_arrays = STORED["inputs"]["clients"]
    parts = [
        Split(*(torch.tensor(arrays[k][: arrays["train"]]) for k in "xy"))
        for arrays in client_arrays
    ]
    plain = federation(sizes=(9,) * len(parts), shape=(4,))
    clients = tuple(
        ClientData(old.name, part, part, part)
        for old, part in zip(plain.clients, parts, strict=True)
    )
    return replace(plain, clients=clients)


def network(weights):
    """Return linear layers of these weights without biases, with ReLU between them."""
    parts = OrderedDict()
    for name, value in weights.items():
        outputs, width = torch.tensor(value).shape
        parts[name.partition(".")[0]] = nn.Linear(width, outputs, bias=False)
        if name != "fc.weight":
            parts["relu"] = nn.ReLU()
    model = nn.Sequential(parts)
    model.load_state_dict({n: torch.tensor(value) for n, value in weights.items()})
    return model


def played(name, weights="weights"):
    stored = STORED["algorithms"][name]
    config = CONFIG.with_keys(algorithm=name, options=stored["options"])
    return play(
        config.with_keys(rounds=len(stored["outputs"]), lr=0.5, batch_size=100),
        data=data_of(),
        model=network(STORED["inputs"][weights]),
    )


def check(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(
                ours[name].numpy(), value, rtol=0, atol=TOLERANCE
            )


@pytest.mark.parametrize("name", ["fedala", "mr_mtl"])
def test_every_round_leaves_the_authors_models(name):
    for checkpoint, wanted in zip(
        played(name).checkpoints,
        STORED["algorithms"][name]["outputs"],
        strict=True,
    ):
        check(
            [state.trees["model"] for state in checkpoint.clients.values()],
            wanted["models"],
        )


def test_apfl_has_its_authors_mixtures_and_shares():
    done = played("apfl", "linear")
    for checkpoint, wanted in zip(
        done.checkpoints, STORED["algorithms"]["apfl"]["outputs"], strict=True
    ):
        states, rnd = checkpoint.clients.values(), Round(checkpoint.round)
        shares = [float(state.trees["share"]["alpha"]) for state in states]
        np.testing.assert_allclose(shares, wanted["alpha"], rtol=0, atol=TOLERANCE)
        models = [
            done.engine.algorithm.models(checkpoint.server, state, rnd)["personal"]
            for state in states
        ]
        check(models, wanted["models"])
    assert len(set(shares)) == len(shares)
