"""Scores of pooled features tell whether classes and clients stand apart."""

from figures.planes import scored
from tests.diagnostics.made import parted


def test_the_scores_tell_what_stands_apart():
    value_of = {row["metric"]: row["value"] for row in scored(parted(), {})}
    assert value_of["silhouette_class"] > 0.7
    assert value_of["purity_class"] == 1
    assert abs(value_of["silhouette_client"]) < 0.1
    assert 0.35 < value_of["purity_client"] < 0.65
    alone = parted()
    alone.clients[:] = "a"
    values = {row["metric"]: row["value"] for row in scored(alone, {})}
    assert values["silhouette_client"] is values["purity_client"] is None
