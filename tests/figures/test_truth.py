"""Plans of the truth are trained again: a change of code that moves a stored score is seen."""

import inspect
import os

import pytest

from diagnostics import regret
from figures.decision import known, truth, truth_again
from fl_core.data.registry import DATASETS, ROOT_VARIABLE
from tests.identities.digests import machine

PROCESSOR = "1dbe22fe1f5dccd2"
"""The digest of a model on the processor that trained the plans again, by ``tests.identities.digests``."""
FAST = [("heart", "fc1+fc4"), ("heart", "fc1+fc2+fc4"), ("known_inputs", "fc1+fc3")]
"""Plans whose fine-tuning is another one if validation samples are halved otherwise."""
FARTHEST = {
    "digits": 5.0,
    "heart": 20.0,
    "activity": 5.0,
    "fashion": 20.0,
    "tweets_adapters": 5.0,
}
"""Points that a score may move on another processor: at least twice the largest move that was measured."""


def trained_again(federation, shared):
    """Train a plan again, and hold its scores against the stored ones: all digits, on the same processor."""
    rows = truth_again.read().set_index(["federation", "shared", "instructions"])
    row = rows.loc[(federation, shared, "avx2")]
    score = truth_again.again(federation, shared)
    if machine()["model"] == PROCESSOR:
        stored = f"{row['accuracy']:.3f}", f"{row['loss']:.4f}"
        assert truth_again.written(score) == stored
    moved = abs(score.accuracy - row["accuracy_truth"])
    assert moved <= FARTHEST[regret.source_of(federation)]


@pytest.mark.parametrize(("federation", "shared"), FAST)
def test_a_plan_of_the_truth_trains_to_its_score(federation, shared):
    trained_again(federation, shared)


@pytest.mark.skipif(
    machine()["model"] != PROCESSOR, reason="rounds otherwise: no digit is held"
)
def test_another_choice_of_fine_tuning_is_seen(monkeypatch):
    halves = truth.halves

    def otherwise(groups, clients, seed):
        return halves(groups, clients, seed + 1)

    monkeypatch.setattr(truth, "halves", otherwise)
    with pytest.raises(AssertionError):
        trained_again(*FAST[0])


@pytest.mark.slow
@pytest.mark.parametrize("federation", truth.SEEDS)
def test_plans_of_each_federation_train_to_their_scores(federation):
    """All plans of three or four layers, and two of a larger network."""
    needs_files = "data_root" in inspect.signature(DATASETS[federation].open).parameters
    if needs_files and not os.environ.get(ROOT_VARIABLE):
        pytest.skip(f"needs files below {ROOT_VARIABLE}")
    plans = [*truth_again.rows_of(federation)["shared"]]
    if len(regret.read_truth().query("federation == @federation and seed == 0")) > 16:
        plans = plans[:2]
    for shared in plans:
        trained_again(federation, shared)


def test_no_row_of_the_truth_is_stale():
    """The stored rows alone, on any processor: the truth was trained with other instructions."""
    rows = truth_again.read()
    assert {*rows["federation"]} == {*truth.SEEDS}
    for federation, part in rows.groupby("federation"):
        plans = len(truth_again.rows_of(federation))
        counts = part["instructions"].value_counts().to_dict()
        assert counts == dict.fromkeys(truth_again.INSTRUCTIONS, plans)
        moved = (part["accuracy"] - part["accuracy_truth"]).abs()
        assert moved.max() <= FARTHEST[regret.source_of(federation)]
    vectors = rows[rows["instructions"] == "avx2"]
    same = vectors[vectors["federation"].isin(["heart", "activity"])]
    assert (same["accuracy"] == same["accuracy_truth"]).all()
    assert (same["loss"] == same["loss_truth"]).all()


def test_the_tests_have_the_instructions_of_the_stored_rows():
    assert truth_again.INSTRUCTIONS["avx2"].items() <= os.environ.items()


def test_moves_by_hand_and_the_page_s_sentences():
    rows = truth_again.read()
    found = truth_again.moves().set_index(["source", "instructions"])
    mine = rows[(rows["federation"] == "heart") & (rows["instructions"] == "default")]
    moved = (mine["accuracy"] - mine["accuracy_truth"]).abs()
    line = found.loc[("heart", "default")]
    assert (line["plans"], line["mean"], line["largest"]) == (
        len(mine), pytest.approx(moved.mean()), moved.max(),
    )  # fmt: skip
    points = mine.set_index("shared")["accuracy"]
    assert line["again"] == pytest.approx(points.max() - points["fc1+fc2+fc3"])
    assert line["truth"] == regret.truth_of("heart", 0).head_local
    page = " ".join(known.PAGE.read_text(encoding="utf-8").split())
    for source in ("heart", "activity", "tweets_adapters"):
        assert found.loc[(source, "avx2"), "largest"] == 0
    digits, heart = found.loc[("digits", "avx2")], found.loc[("heart", "default")]
    fashion = found.loc[("fashion", "avx2"), "largest"]
    assert f"A plan of digits moves by up to {digits['largest']:.1f} points" in page
    assert f"one of Fashion-MNIST by up to {fashion:.1f}." in page
    assert f"heart patients moves by up to {heart['largest']:.1f} points" in page
    for line in (digits, heart):
        assert f"from {line['truth']:.2f} to {line['again']:.2f} points" in page
