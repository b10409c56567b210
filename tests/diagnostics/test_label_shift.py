"""Label shift: no more than chance gives, 1 if classes are apart, and one sentence that its interval allows."""

import math

import numpy as np
import pytest

import fedlayers as fl
from diagnostics.label_shift import cramers_v
from tests.conftest import refuses

SIMILAR = (
    "Clients have similar label distributions (Cramér's V 0.00). "
    "This does not rule out concept shift or feature shift."
)


def clients_of(labels):
    """Return clients' samples with these labels [clients, n]."""
    return {f"c{k}": (np.zeros((len(y), 1)), y) for k, y in enumerate(labels)}


def test_the_shift_is_nothing_by_chance_and_one_if_clients_have_own_classes():
    draw = np.random.default_rng(0)
    tables = draw.multinomial(60, [0.5, 0.3, 0.2], (200, 5))
    values = [cramers_v(table, 8 / 299) for table in tables]
    raw = tables[0]
    expected = np.outer(raw.sum(1), raw.sum(0)) / raw.sum()
    plain = ((raw - expected) ** 2 / expected).sum() / raw.sum() / 2
    assert np.mean(values) < 0.06 < math.sqrt(plain) + 0.05
    assert np.median(values) < 0.05
    assert cramers_v(np.eye(4) * 9, 9 / 35) == pytest.approx(1.0)
    assert cramers_v(np.array([[5.0, 0.0], [7.0, 0.0]]), 0) == 0.0


@pytest.mark.parametrize("grouped", [False, True])
def test_no_shift_is_shown_for_samples_that_are_dealt_at_random(grouped):
    """Groups are five equal labels each. Without them, these count as five samples: a shift is shown too often."""
    draw, shown = np.random.default_rng(0), 0
    for _ in range(40):
        labels = draw.integers(0, 3, (6, 12)).repeat(5, axis=1)
        groups = {f"c{k}": np.arange(12).repeat(5) for k in range(6)}
        samples = fl.from_clients(clients_of(labels), groups=groups if grouped else None)  # fmt: skip
        shown += fl.label_shift(samples).cramers_v.low > 0
    assert shown <= 4 if grouped else shown > 20


def test_the_sentence_follows_from_the_interval():
    draw = np.random.default_rng(1)
    even = np.tile(np.arange(2), (3, 2000))
    many = fl.label_shift(clients_of(even))
    assert many.text() == SIMILAR
    few = fl.label_shift(clients_of(draw.random((3, 20)) < [[0.4], [0.5], [0.6]]))
    assert few.text().startswith("No difference between clients' label distributions is shown")  # fmt: skip
    apart = fl.label_shift(clients_of(draw.random((3, 300)) < [[0.1], [0.5], [0.9]]))
    ends = "{:.2f} [{:.2f}, {:.2f}]".format(*apart.cramers_v)
    wanted = f"Clients have different label distributions (Cramér's V {ends})."
    assert apart.text() == wanted
    assert str(apart).startswith(wanted)
    assert apart.counts.loc["c0"].sum() == 192


def test_the_value_is_that_of_independent_samples():
    shift = fl.label_shift(fl.load("heart"))
    counts = shift.counts.to_numpy(float)
    exact = cramers_v(counts, 12 / (counts.sum() - 1))
    assert shift.cramers_v.value == pytest.approx(exact, abs=0.005)
    assert 0 < shift.cramers_v.low < exact < shift.cramers_v.high


def test_data_without_classes_or_clients_are_refused():
    with refuses("must have classes.*got task regression"):
        fl.label_shift(fl.from_clients(clients_of(np.ones((2, 9))), task="regression"))
    with refuses("at least 2 clients.*got 1"):
        fl.label_shift(clients_of(np.arange(40).reshape(1, -1) % 2))
    with refuses("data must be"):
        fl.label_shift("heart")
