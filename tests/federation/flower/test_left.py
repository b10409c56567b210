"""What left the sites is added up over the sessions of a run, and shown by kind."""

from __future__ import annotations

from fedlayers.remote.flower import left
from fedlayers.remote.sites import Tally


def test_sessions_of_a_run_are_added_up(tmp_path):
    assert left.table(tmp_path).empty
    for _ in range(2):
        tally = Tally()
        tally.add("b", "train", 100)
        tally.add("b", "train", 10)
        tally.add("a", "hello", 5)
        left.keep(tmp_path, tally)
    found = left.table(tmp_path)
    assert list(found.columns) == ["site", "hello", "training", "all"]
    assert found.to_numpy().tolist() == [["a", 10, 0, 10], ["b", 0, 220, 220]]
