"""The algorithms from outside: named by their place, run, resumed, verified, and equal to what they contain."""

import pytest

from fl_core import tree
from fl_core.algorithms.base import ALGORITHMS
from fl_core.config import RunConfig
from fl_core.records import store
from fl_core.run import runner
from fl_core.run.restore import load_models
from tests.conftest import play, refuses
from tests.faults.injected import contents, cut_back

HALF_WAY = "examples.algorithms.half_way:HalfWay"
HEART = RunConfig(dataset="heart", rounds=3, epochs=1, eval_every=1, checkpoint_every=1)


@pytest.mark.filterwarnings("ignore:client")
def test_it_runs_is_verified_and_goes_on_to_the_same_bits(tmp_path):
    whole = tmp_path / "whole" / "run"
    engine = runner.run(HEART.with_keys(algorithm=HALF_WAY), whole)
    assert {
        row["algorithm"] for row in store.Run(whole).rows()[1].to_dict("records")
    } == {engine.algorithm.name}
    assert engine.algorithm.name == ALGORITHMS[HALF_WAY].name
    (tmp_path / "part").mkdir()
    part = cut_back(whole, tmp_path / "part", after=1)
    refusal = rf"'{HALF_WAY}'.*allow_code=\['{HALF_WAY}'\]"
    with refuses(refusal):
        runner.resume(part)
    with refuses(refusal):
        load_models(part, which="personal")
    assert runner.resume(part, allow_code=[HALF_WAY]).done == 3
    assert store.Run(part).verify() == store.Run(whole).verify()
    assert contents(part) == contents(whole)
    (ours, _), (theirs, _) = (
        load_models(run, which="personal", allow_code=HALF_WAY) for run in (whole, part)
    )
    assert {k: tree.digest(tree.state_dict(m)) for k, m in ours.items()} == {
        k: tree.digest(tree.state_dict(m)) for k, m in theirs.items()
    }


@pytest.mark.parametrize("kind", ["plain", "unused"])
def test_its_limits_are_fedavg_and_local(kind):
    received, local = (
        play(
            algorithm=HALF_WAY,
            options={"share": share},
            model=kind,
            momentum=0.9,
            weight_decay=0.05,
        )
        for share in (0, 1)
    )
    assert (
        received.server()
        == play(
            algorithm="fedavg", model=kind, momentum=0.9, weight_decay=0.05
        ).server()
    )
    assert (
        local.evaluated()
        == play(
            algorithm="local", model=kind, momentum=0.9, weight_decay=0.05
        ).evaluated()
    )
