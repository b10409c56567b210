"""FedLAMA where all layers have the same interval: FedAvg with so many local steps."""

import pytest

from fl_core import tree
from tests.conftest import TOY
from tests.identities.plainly import check_close, initial, played


@pytest.mark.parametrize("tau", [2, 3])
def test_fedlama_with_one_interval_is_fedavg_with_as_many_local_steps(tau):
    """Under plain descent on whole training splits ``tau`` rounds of one step are a round of ``tau`` steps."""
    whole, options = max(TOY.weights), {"tau": tau, "phi": 1}
    often = played("fedlama", 2 * tau, epochs=1, batch_size=whole, options=options)
    seldom = played("fedavg", 2, epochs=tau, batch_size=whole)
    ours, theirs = (
        [initial(), *(c.server.trees["model"] for c in run.checkpoints)]
        for run in (often, seldom)
    )
    for k in range(3):
        check_close(ours[k * tau], theirs[k])
    for between in range(1, tau):
        check_close(ours[between], initial(), 0)
    local = [checkpoint.models["local"]["a"] for checkpoint in often.checkpoints]
    assert tree.distance(local[0], local[1]) > 1e-3
    assert tree.distance(theirs[1], initial()) > 1e-2
