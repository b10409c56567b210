"""The sentences of a race, of a study and of a report's first page, on scores whose truth is known."""

from fedlayers.studies.choice import Answers
from fedlayers.studies.comparison import Comparison
from fedlayers.studies.study import AGAINST, with_gains
from tests.fedlayers.made import frame_of


def comparison(**macro_f1):
    """Return one client's scores: macro-F1 as given, a value a seed."""
    scores = {name: [[value] for value in values] for name, values in macro_f1.items()}
    return Comparison(frame_of(scores, [1]))


GOOD, FAIR, BAD = [0.90, 0.91, 0.89], [0.60, 0.62, 0.61], [0.46, 0.46, 0.46]
NOISY = [0.99, 0.80, 0.92]
RACE = Answers("Federate a; keep b local.", ("one", "two"))


def combined(found, seeds=3):
    return with_gains(RACE, found.gains("choose", tuple(AGAINST)), seeds, found.score)


def test_the_lead_claims_what_the_scores_support():
    """A gain is shown where its interval leaves 0 out."""
    for fedavg, local, chosen, useless, shown in (
        (FAIR, FAIR, GOOD, False, set(AGAINST)),
        (NOISY, NOISY, GOOD, False, {"base_rate"}),
        (GOOD, BAD, [0.87, 0.88, 0.86], False, set(AGAINST)),
        (BAD, BAD, [0.3, 0.5, 0.6], False, set()),
        (FAIR, FAIR, [0.40, 0.41, 0.405], True, set(AGAINST)),
    ):
        scores = {"choose": chosen, "fedavg": fedavg, "local": local, "base_rate": BAD}
        lead = combined(comparison(**scores))
        assert lead.useless == useless
        assert (lead.head == RACE.head) != useless
        assert {*RACE.lines, RACE.head} <= {lead.head, *lead.lines}
        for name, words in AGAINST.items():
            (line,) = (each for each in lead.lines if f"over {words}:" in each)
            assert ("no significant" in line) == (name not in shown)


def test_the_gain_is_judged_by_the_comparisons_score():
    """By accuracy FAIR is below the base rate."""
    found = comparison(choose=FAIR, fedavg=BAD, local=BAD, base_rate=BAD)
    assert not combined(found).useless
    base = found.frame.eval("algorithm == 'base_rate' and metric == 'accuracy'")
    frame = found.frame.assign(value=found.frame["value"].mask(base, 0.85))
    assert combined(Comparison(frame, score="accuracy")).useless


def test_a_single_seed_has_no_uncertainty():
    lead = combined(comparison(choose=[0.9], fedavg=[0.6], base_rate=[0.4]), 1)
    assert "+30.0 points" in lead.lines[2]
    assert not any("[" in line for line in lead.lines)
    assert lead.text().splitlines()[0] == lead.head
    assert "One seed" in lead.lines[-1]
