"""What is known before training: the label skew, what it meant elsewhere, and the cost."""

import math

import numpy as np
import pytest

import fedlayers as fl
from diagnostics.label_shift import cramers_v
from fedlayers.studies.hint import cost_in_words, in_words
from tests.conftest import refuses


def test_a_hint_has_the_sentence_the_counts_and_the_cost_of_the_race(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    found = fl.hint(dataset="heart", rounds=3, eval_every=1)
    assert found.counts.loc["va"].tolist() == [17, 25, 18, 19, 4]
    counts = found.counts.to_numpy(float)
    exact = cramers_v(counts, 12 / (counts.sum() - 1))  # of independent samples
    assert found.skew.value == pytest.approx(exact, abs=0.005)
    assert 0 < found.skew.low < exact < found.skew.high
    assert not list(tmp_path.iterdir())
    told = list[str]()
    config = fl.RunConfig(dataset="heart", rounds=3, eval_every=1)
    fl.choose(config, tmp_path / "out", progress=told.append, baselines=False)
    assert told[1] == in_words(found.skew) == found.text().splitlines()[0]
    assert told[0].partition(", ")[0] == found.text().splitlines()[1].partition(", ")[0]
    with refuses("other data"):
        fl.choose(config.with_keys(max_samples=300), tmp_path / "out", progress=False)


def test_without_classes_there_is_a_cost_alone_and_wrong_keys_are_refused():
    wards = {name: (np.ones((40, 2)), np.arange(40.0)) for name in ("a", "b")}
    found = fl.hint(data=wards, model="mlp", task="regression", rounds=2, lr=0.1)
    assert (math.isnan(found.skew.value), len(found.counts)) == (True, 0)
    assert found.text() == cost_in_words(*found.cost)
    with refuses(r"'round'.*'rounds'"):
        fl.hint(dataset="heart", round=1)
