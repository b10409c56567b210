"""A server's view of a client: names in place of tensors, and plain data of the beginning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fl_core.algorithms import Algorithm, Round, State, TaskInfo
from fl_core.algorithms.model_template import (
    ClientTensorRef,
    ModelTemplate,
    StateSchema,
    make_template,
    models_of,
)
from fl_core.errors import PrivateError
from fl_core.layers import Layer
from fl_core.tree import Tree

LAYERS = (Layer("body", ("body.w",)), Layer("head", ("head.w",)))
PROBLEM = TaskInfo(LAYERS, frozenset({"head.w"}), (4, 4), 1, 0)
SERVER = State({"model": {"body.w": torch.ones(2), "head.w": torch.zeros(2)}})
CLIENT = State(
    {
        "model": {"head.w": torch.full((2,), 7.0)},
        "share": {"alpha": torch.tensor(0.25)},
    },
    {"n": 1},
)
RND = Round(3)


def seen(state: State = CLIENT, begun: dict[str, Any] | None = None) -> State:
    begun = state.meta if begun is None else begun
    return StateSchema.from_state(state, begun).state(begun)


def test_a_model_is_merged_by_name_where_the_client_is() -> None:
    offered = make_template(Algorithm(PROBLEM), SERVER, seen(), RND)
    assert isinstance(offered.models["global"]["head.w"], ClientTensorRef)
    assert offered.models["global"]["body.w"] is SERVER.trees["model"]["body.w"]
    assert offered.server is None
    made = models_of(Algorithm(PROBLEM), offered, CLIENT, RND)["global"]
    assert made["head.w"].tolist() == [7.0, 7.0]
    assert made["body.w"].tolist() == [1.0, 1.0]


class Mixing(Algorithm):
    """Predicts with a mixture of the server's and the client's own, by a share that the client keeps."""

    name, evaluates = "mixing_of_a_test", "personal"

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        share = float(client.trees["share"]["alpha"])
        own = torch.lerp(
            server.trees["model"]["head.w"], client.trees["model"]["head.w"], share
        )
        return {"personal": {**server.trees["model"], "head.w": own}}


def test_what_computes_with_a_clients_own_is_computed_where_the_client_is() -> None:
    offered = make_template(Mixing(PROBLEM), SERVER, seen(), RND)
    assert offered == ModelTemplate(server=SERVER)
    assert models_of(Mixing(PROBLEM), offered, CLIENT, RND)["personal"][
        "head.w"
    ].tolist() == [1.75, 1.75]


class Turning(Algorithm):
    """Reads plain data of the client that change."""

    name = "turning_of_a_test"

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        factor = client.meta.get("n", 0)
        return {
            "global": {
                name: factor * each for name, each in server.trees["model"].items()
            }
        }


@pytest.mark.parametrize(
    ("begun", "known"), [({"n": 1}, True), ({"n": 0}, False), ({}, False)]
)
def test_plain_data_are_known_as_long_as_they_are_those_of_the_beginning(
    begun: dict[str, int], known: bool
) -> None:
    offered = make_template(Turning(PROBLEM), SERVER, seen(begun=begun), RND)
    assert (offered.server is None) == known
    assert models_of(Turning(PROBLEM), offered, CLIENT, RND)["global"][
        "body.w"
    ].tolist() == [1.0, 1.0]


OWN = ClientTensorRef("model", "head.w")


@pytest.mark.parametrize(
    "reaching",
    [
        lambda: OWN.shape,
        lambda: OWN.clone(),
        lambda: OWN + 1,
        lambda: 2 * OWN,
        lambda: bool(OWN),
        lambda: OWN == 0,
        lambda: float(OWN),  # type: ignore[arg-type]
        lambda: OWN[0],
        lambda: torch.stack([OWN]),  # type: ignore[list-item]
        lambda: torch.lerp(torch.ones(2), OWN, 0.5),  # type: ignore[call-overload]
        lambda: seen(begun={}).meta["n"],
        lambda: "n" in seen(begun={}).meta,
        lambda: dict(seen(begun={}).meta.items()),
        lambda: list(seen(begun={}).meta),
    ],
)
def test_a_clients_own_cannot_be_reached(reaching: Callable[[], Any]) -> None:
    with pytest.raises(PrivateError, match="client"):
        reaching()
