"""The second witness: what is recorded without a checkout of PFLlib, and with one that it has our scores."""

import os
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from figures import pfllib, witness
from fl_core import runner
from tests.conftest import refuses

TINY = witness.BASE.with_keys(
    dataset="digits", max_samples=900, clients=3, samples_per_client=60, batch_size=60, rounds=2,
    epochs=2,
    model_options={"sizes": [8]}, checkpoint_every=2,
)  # fmt: skip


def drawn(frame):
    header = {"runs": {"fedavg": {"config": TINY.to_json()}}, "seeds": 1}
    drawing = witness._draw(header, frame)
    plt.close(drawing.figure)
    return drawing


def test_without_a_checkout_the_row_says_absent(
    monkeypatch,
):
    monkeypatch.delenv(pfllib.VARIABLE, raising=False)
    frame = witness._measure(
        runner.assemble(TINY.with_keys(algorithm="fedper")), "fedper", Path()
    ).assign(run="fedper")
    absent = frame[frame["variant"] == witness.THEIRS]
    assert absent["status"].tolist() == [witness.ABSENT]
    assert absent["value"].isna().all()
    assert (
        len(witness.side(frame, "fedper", witness.OURS)) == 3
    )  # at the start and after each round
    drawing = drawn(frame)
    assert {finding.held for finding in drawing.findings} == {None}
    assert "| FedPer | PFLlib | 0 | absent | – |" in drawing.text


def test_a_path_without_pfllib_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(pfllib.VARIABLE, str(tmp_path))
    with refuses("PFLlib"):
        pfllib.checkout()


@pytest.mark.skipif(
    pfllib.VARIABLE not in os.environ, reason="no checkout of PFLlib (PFLLIB)"
)
@pytest.mark.parametrize(
    "config", [pytest.param(each, id=name) for name, each in witness.recipes().items()]
)
def test_with_a_checkout_every_score_is_ours(config):
    federation = config.federation
    options = {k: v for k, v in federation.options.items() if k != "finetune_at"}
    name = federation.algorithm
    task = runner.assemble(TINY.with_keys(algorithm=name, options=options))
    frame = witness._measure(task, name, Path()).assign(run=name)
    which = witness.REPAIRED if name in witness.DEPARTS else witness.THEIRS
    assert witness.largest_difference(frame, name, which) < witness.TOLERANCE
