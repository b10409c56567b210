"""The page of the confirmation has the tables of the stored rows."""

import numpy as np
import pandas as pd
import pytest

from figures.decision import confirmation as study


def test_the_page_has_the_tables_of_the_rows():
    text = study.PAGE.read_text(encoding="utf-8")
    for table in study.results().values():
        assert f"{table}\n<!-- end -->" in text
    done = pd.read_csv(study.ROWS)["federation"].nunique()
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")  # fmt: skip
    assert done == len(study.FEDERATIONS) or words[done] in text.split("**")[1]


def test_regret_is_against_the_best_competing_way():
    rows = pd.read_csv(study.ROWS).query("split == 'test'")
    for name, line in study.regrets().iterrows():
        means = rows[rows["federation"] == name].groupby("way")["loss"].mean()
        least = min(means[way] for way in study.COMPETING)
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
