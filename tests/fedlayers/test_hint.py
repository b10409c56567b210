"""What is known before training: the label skew, what it meant elsewhere, and the cost."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedlayers as fl
from fedlayers.studies.hint import cost_in_words, in_words, label_skew, skew_of
from fl_core.data.federated import Split
from fl_core.rows import CLASSIFICATION
from tests.conftest import refuses


def test_the_skew_is_nothing_by_chance_and_one_if_clients_have_own_classes():
    draw = np.random.default_rng(0)
    tables = draw.multinomial(60, [0.5, 0.3, 0.2], (200, 5))
    chance = [label_skew(table, 8 / 299) for table in tables]
    raw = tables[0]
    expected = np.outer(raw.sum(1), raw.sum(0)) / raw.sum()
    plain = ((raw - expected) ** 2 / expected).sum() / raw.sum() / 2
    assert np.mean(chance) < 0.06 < math.sqrt(plain) + 0.05
    assert np.median(chance) < 0.05
    assert label_skew(np.eye(4) * 9, 9 / 35) == pytest.approx(1.0)
    assert label_skew(np.array([[5.0, 0.0], [7.0, 0.0]]), 0) == 0.0


def test_rows_of_one_patient_are_no_skew():
    """Groups of five equal labels are dealt to six clients at random."""
    draw, shown = np.random.default_rng(0), 0
    for _ in range(40):
        labels = torch.from_numpy(draw.integers(0, 3, (6, 12))).repeat_interleave(5, 1)
        groups = np.arange(12).repeat(5)
        clients = [
            SimpleNamespace(train=Split(torch.zeros(60, 1), y, groups)) for y in labels
        ]
        data = SimpleNamespace(task=CLASSIFICATION, clients=clients, n_classes=3)
        shown += "not shown" not in in_words(skew_of(SimpleNamespace(data=data)))
    assert shown <= 4


def test_a_hint_has_the_sentence_the_counts_and_the_cost_of_the_race(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    found = fl.hint(dataset="heart", rounds=3, eval_every=1)
    assert found.counts.loc["va"].tolist() == [17, 25, 18, 19, 4]
    counts = found.counts.to_numpy(float)
    exact = label_skew(counts, 12 / (counts.sum() - 1))  # of independent samples
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
