"""FedLAMA where all layers have the same interval: FedAvg with so many local steps."""

from __future__ import annotations

import pytest

from fl_core import tree
from fl_core.training.phases import Training
from tests.identities.test_variates import LR, UNEVEN, Run, check_close, initial

WHOLE = max(len(client.train) for client in UNEVEN.clients)


@pytest.mark.parametrize("tau", [2, 3])
def test_fedlama_with_one_interval_is_fedavg_with_as_many_local_steps(tau: int) -> None:
    """Under plain descent on whole training splits ``tau`` rounds of one step are a round of ``tau`` steps."""
    averaged = 2
    often = Run(
        "fedlama", UNEVEN, Training(1, WHOLE, LR), rounds=averaged * tau, tau=tau, phi=1
    )
    seldom = Run("fedavg", UNEVEN, Training(tau, WHOLE, LR), rounds=averaged)
    for k in range(averaged + 1):
        check_close(often.model(k * tau), seldom.model(k))
    for between in range(1, tau):
        check_close(often.model(between), initial(), 0)
        for client, found in often.local[between].items():
            assert (
                tree.distance(found, often.local[between - 1].get(client, initial()))
                > 1e-3
            )
    assert tree.distance(seldom.model(1), initial()) > 1e-2
