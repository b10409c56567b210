"""Studies of runs that stop by themselves: what arms and trials are judged by."""

import numpy as np
import pytest

from fedlayers.studies.compare import compare
from fl_core.config import RunConfig
from fl_core.records import store

PATIENT = RunConfig(
    dataset="heart", rounds=14, eval_every=1, epochs=1, lr=0.05, patience=2
)


def test_a_comparison_scores_best_rounds_by_default(tmp_path):
    names = ["fedavg", "fedbabu"]
    found = compare(PATIENT, names, [0], tmp_path, progress=False)
    assert set(found.table["model"]) == {"global@best_val", "personal@best_val"}
    table = found.table.set_index("algorithm")
    for name, model in (("fedavg", "global"), ("fedbabu", "personal")):
        run = store.Run(tmp_path / "runs" / f"{name}-0")
        rows = run.rows()[1].query(
            f"round == {run.best_round(model)} and model == '{model}'"
        )
        rows = rows[(rows["split"] == "test") & (rows["metric"] == "macro_f1")]
        wanted = np.average(rows["value"], weights=rows["n_train"])
        assert table.loc[name, "macro_f1"] == pytest.approx(wanted)
