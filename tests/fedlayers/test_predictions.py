"""Each client's test scores with intervals, against a run's own rows."""

import pytest

from fedlayers.studies.harmless import Bench
from fl_core import statistics
from fl_core.config import RunConfig
from fl_core.records import store
from fl_core.run import runner


def test_the_table_of_clients_has_the_scores_of_the_runs_rows(tmp_path):
    config = RunConfig(dataset="heart", algorithm="fedper", rounds=2, eval_every=1)
    task = runner.assemble(config)
    runner.run(config, tmp_path / "run")
    bench = Bench(task)
    table = bench.of_clients(
        {"model": bench.of_models("run", bench.load(tmp_path / "run").models)}
    )
    table = table.set_index("client")
    frame = store.Run(tmp_path / "run").rows()[1]
    frame = frame[
        (frame["round"] == 2)
        & (frame["split"] == "test")
        & (frame["model"] == "personal")
    ]
    for name in ("macro_f1", "accuracy"):
        own = frame[frame["metric"] == name].set_index("client")["value"]
        assert table[name].to_dict() == pytest.approx(own.to_dict())
    for line in table.itertuples():
        right = round(line.accuracy * line.test)
        interval = statistics.share_interval(right, line.test)
        assert (line.accuracy_low, line.accuracy_high) == interval[1:]
