"""Three methods against numbers of their authors' own code. ``authors.json`` has them, ``authors.py`` makes them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fl_core.algorithms import Round
from fl_core.data import ClientData, FederatedData, Split
from tests.conftest import CONFIG, Played, federation, play
from tests.identities import authors

STORED = json.loads(authors.TABLE.read_text(encoding="utf-8"))
TOLERANCE = 2e-6
"""The largest difference of a number. The authors' code rounds in another order, in float32."""


def data_of() -> FederatedData:
    parts = [Split(x, y) for x, y in authors.samples(STORED["inputs"])]
    plain = federation(sizes=(9,) * len(parts), shape=(4,))
    clients = tuple(
        ClientData(old.name, part, part, part) for old, part in zip(plain.clients, parts, strict=True)
    )  # fmt: skip
    return replace(plain, clients=clients)


def played(name: str, weights: str = "weights") -> Played:
    options = STORED["algorithms"][name]["options"]
    return play(
        CONFIG.with_keys(algorithm=name, options=options, rounds=authors.ROUNDS),
        data=data_of(), model=authors.network(STORED["inputs"][weights]), lr=authors.LR, batch_size=100,
    )  # fmt: skip


def check(found: list[dict[str, torch.Tensor]], wanted: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_allclose(
                ours[name].numpy(), value, rtol=0, atol=TOLERANCE
            )


def test_the_stored_inputs_are_those_that_the_authors_code_was_given() -> None:
    assert STORED["inputs"] == authors.inputs()
    assert {
        name: each["code"] for name, each in STORED["algorithms"].items()
    } == authors.COMMITS
    assert {
        name: each["options"] for name, each in STORED["algorithms"].items()
    } == authors.OPTIONS


@pytest.mark.parametrize("name", ["fedala", "mr_mtl"])
def test_every_round_leaves_the_authors_models(name: str) -> None:
    for checkpoint, wanted in zip(
        played(name).checkpoints,
        STORED["algorithms"][name]["outputs"],
        strict=True,
    ):
        check(
            [state.trees["model"] for state in checkpoint.clients.values()],
            wanted["models"],
        )


def test_apfl_has_its_authors_mixtures_and_shares() -> None:
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
