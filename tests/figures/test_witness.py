"""The second witness: with a checkout of PFLlib it has our scores, and without one nothing is trained."""

import os
from pathlib import Path

import pytest

from figures import pfllib, witness
from figures.recipe import PLAIN_SGD
from fl_core.config import RunConfig
from fl_core.run import runner
from tests.conftest import refuses

TINY = RunConfig(
    dataset="digits", max_samples=900, partition="fedpft_dirichlet", alpha=0.3, clients=3, samples_per_client=60,
    batch_size=60, rounds=2, epochs=2, lr=0.05, model="mlp", model_options={"sizes": [8]}, **PLAIN_SGD, eval_every=1,
)  # fmt: skip


def measured(algorithm):
    task = runner.assemble(TINY.with_keys(algorithm=algorithm))
    return witness._measure(task, algorithm, Path())


def test_a_path_without_pfllib_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(pfllib.VARIABLE, str(tmp_path))
    with refuses("PFLlib"):
        measured("fedavg")


@pytest.mark.skipif(
    pfllib.VARIABLE not in os.environ, reason="no checkout of PFLlib (PFLLIB)"
)
@pytest.mark.parametrize("algorithm", pfllib.SERVERS)
def test_with_a_checkout_every_score_is_ours(algorithm):
    """Every batch is all of a client's samples, so their order changes nothing."""
    frame = measured(algorithm)
    scores = frame.pivot(index=["round", "client"], columns="variant", values="value")
    assert len(scores) == 3 * 3
    assert (scores[witness.OURS] - scores[witness.THEIRS]).abs().max() < 1e-3
