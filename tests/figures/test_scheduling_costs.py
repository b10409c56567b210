"""Layer scheduling before training: the paper's counts come out exactly, of the committed rows."""

import pandas as pd

from figures.scheduling import costs


def test_stored_rows_have_the_papers_numbers():
    _, frame = costs.STUDY.read(costs.STUDY.path())
    total = costs.sizes(frame).loc["total"]
    assert total.tolist() == [582_026, 878_538, 924_708]
    published = costs.totals(frame).dropna(subset="published")
    assert published["naive"].round(2).tolist() == published["published"].tolist()


def test_rounds_are_joined_between_changes():
    table = pd.DataFrame({"a": [1, 1, 1, 1], "b": [0, 0, 1, 1]}, index=range(1, 5))
    spans = costs.stages(table)
    assert list(spans) == ["1-2", "3-4"]
    assert spans.loc["a"].tolist() == [True, True]
    assert spans.loc["b"].tolist() == [False, True]
