"""Mixtures at the limits of their weights: alone, and with those of FedAvg."""

import pytest
import torch

from tests.conftest import TOY, play
from tests.identities.test_limits import local, run, settings

ALONE = {
    "pfedla, itself": ("pfedla", {"weights": "self"}),
    "heurpfedla, itself": ("heurpfedla", {"weights": "self", "k": 2}),
    "fedamp, no pull": ("fedamp", {"lam": 0}),
    "heurfedamp, itself, no pull": ("heurfedamp", {"self_weight": 1, "lam": 0}),
    "heurfedamp, itself, no pull, from the cloud": (
        "heurfedamp",
        {"self_weight": 1, "lam": 0, "start": "cloud"},
    ),
}


@settings(1)
@pytest.mark.parametrize("limit", ALONE)
def test_who_weighs_only_itself_is_alone_bit_for_bit(limit, setting):
    algorithm, options = ALONE[limit]
    assert (
        run(setting, algorithm, options=options).evaluated()
        == local(setting).evaluated()
    )


def test_pfedla_with_the_weights_of_fedavg_is_fedavg():
    """Up to the order of float32 sums, which differs."""
    for kind in ("plain", "norm"):
        ours = play(algorithm="pfedla", model=kind, options={"weights": "samples"})
        theirs = play(algorithm="fedavg", model=kind)
        wanted = theirs.engine.server.trees["model"]
        for client in range(len(TOY.clients)):
            found = ours.engine.models(client)["personal"]
            for name in wanted.keys() & ours.engine.task_info.parameters:
                torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-5)
