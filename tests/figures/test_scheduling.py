"""Layer scheduling's runs: tiny runs are measured when they are reported, and a table says what is missing."""

from dataclasses import replace

import pytest

from figures import recipe, training
from figures.scheduling import runs as scheduling
from figures.scheduling.runs import MEAN, POOLED, SIZES, SMALL, STUDY, Column
from fl_core.run import runner

pytestmark = pytest.mark.filterwarnings("ignore:client")
LITTLE = {
    name: Column("large_digits", 120, (1, 2, 3), (0, 1, 2), 1, size.papers)
    for name, size in SIZES.items()
}


@pytest.mark.slow
def test_a_run_is_measured_when_it_is_reported(tmp_path):
    base = SMALL.with_keys(clients=3, participation=0.7, batch_size=16)
    runs = scheduling.recipes(LITTLE, base)
    item = replace(STUDY, runs=runs, seeds=1, own_seeds={})
    folder, name = tmp_path / item.name, "mnist.vanilla"
    training.train(item, folder, only=["mnist.fedavg", name])
    _, frame = item.read(folder)
    out = tmp_path / "long.run"
    runner.run(runs[name], out, instruments=recipe.measure.instruments, until=1)
    _, whole = recipe.trained(runner.assemble(runs[name]), out)
    assert not out.exists(), "an interrupted run went on to its end"
    tested = recipe.tested(whole)
    tested = tested[tested["model"] == "personal"]
    pooled, means = scheduling.scores(frame, POOLED), scheduling.scores(frame, MEAN)
    assert list(tested["round"].unique()) == list(pooled.loc[name].index)[1:]
    for done, part in tested.groupby("round"):
        right = (part["value"] * part["n_samples"].astype(float)).sum()
        share = right / part["n_samples"].sum()
        assert pooled.loc[(name, done), 0] == pytest.approx(share, abs=1e-12)
        assert means.loc[(name, done), 0] == pytest.approx(part["value"].mean())
    run_rows = frame[frame["run"] == name]
    sent = whole[whole["metric"] == "bytes_up"]["value"].sum()
    assert run_rows[run_rows["metric"] == "bytes_up"]["value"].item() == sent
