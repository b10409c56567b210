"""The page of the confirmation has the tables of the stored rows."""

import numpy as np
import pandas as pd
import pytest

from figures.decision import confirmation as study, tuned_on
from fl_core.statistics import mean_interval


def test_the_page_has_the_tables_of_the_rows():
    text = study.PAGE.read_text(encoding="utf-8")
    for table in (*study.results().values(), tuned_on.results()):
        assert f"{table}\n<!-- end -->" in text


def test_the_claims_are_judged_by_the_table():
    table = study.regrets()
    assert len(table) == len(study.FEDERATIONS)
    first, second, third = study.verdict(table).splitlines()
    assert first.startswith("1. Does not hold. ")
    readme = (study.PAGE.parents[2] / "README.md").read_text(encoding="utf-8")
    means = table[["policy", "fedavg"]].mean()
    assert f"lost {means['policy']:.3f} nats" in readme
    assert (
        f"FedAvg for everyone {means['fedavg']:.3f}: a difference within chance"
        in readme
    )
    gap = mean_interval((table["policy"] - table["fedavg"]).to_numpy(float))
    assert gap.low < 0 < gap.high
    assert second.startswith("2. Not shown. ")
    assert "No client was named harmed" in third
    pacs = table.loc["pacs"]
    assert pacs["named"] == "linear_local"
    assert pacs["policy"] == table["policy"].max()
    better = table.assign(policy=table[list(study.RIVALS)].min(axis=1) - 1)
    first, second, _ = study.verdict(better).splitlines()
    assert first.startswith("1. Holds. ")
    assert second.startswith("2. Holds. ")
    assert study.verdict(table.iloc[:3]).startswith("**Not decided yet: 3 of 10")


def test_regret_is_against_the_best_competing_way():
    rows = pd.read_csv(study.ROWS).query("split == 'test'")
    for name, line in study.regrets().iterrows():
        means = rows[rows["federation"] == name].groupby("way")["loss"].mean()
        least = means.reindex(study.COMPETING).min()
        assert line["fedavg"] == pytest.approx(means["fedavg"] - least)
        assert line["policy"] == pytest.approx(means[line["named"]] - least)
        assert np.isfinite(line["earlier choose"])


def test_each_way_of_an_earlier_choice_has_a_name_here():
    simple = "A simple model is better: use gradient boosting per client."
    assert (
        study.way_of_earlier({"winner": "all", "answers": [simple]}) == "boosting_local"
    )
    assert study.way_of_earlier({"winner": "nothing", "answers": ["x"]}) == "local"
    assert study.way_of_earlier({"winner": None, "answers": []}) == "base_rate"


def test_the_rows_of_tuned_federations_are_as_the_page_says():
    rows = pd.read_csv(tuned_on.ROWS).set_index("federation")
    assert set(rows.index) <= set(tuned_on.federations())
    assert not rows.index.duplicated().any()
    natural = rows[rows["kind"] == "natural"]
    assert len(natural) + 7 + 2 == len(pd.read_csv(tuned_on.TABLES))
    assert natural["policy"].idxmax() == "part_time"
    assert natural.loc["part_time", "named"] == "base_rate"
    known_rows = rows[rows["kind"] == "known"]
    assert (
        mean_interval((known_rows["policy"] - known_rows["fedavg"]).to_numpy()).high < 0
    )
    for rival in ("fedavg", "linear"):
        gap = mean_interval((natural["policy"] - natural[rival]).to_numpy())
        assert gap.low < 0 < gap.high
