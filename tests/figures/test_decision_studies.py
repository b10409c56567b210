"""Studies held against runs of every cut: what is kept of a study, and when its claims count as borne out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from fedlayers.studies.inference import DECIDED, LEVEL_ARMS, NOTHING_LEARNED
from fedlayers.studies.summary import Headline
from figures.decision import studies
from figures.differences import difference
from fl_core import rows
from fl_core.errors import UsageError
from tests.fedlayers.test_summary import BAD, FAIR, GOOD, comparison
from tests.figures.conftest import drawn


def outcome_of(which: str, winners: tuple[str, ...]) -> Any:
    entries = {seed: SimpleNamespace(arm=SimpleNamespace(name=name)) for seed, name in enumerate(winners)}
    return SimpleNamespace(
        lead=Headline("Federate a.", ("Sure.",), "", (), "", {"split": "yes", "which": which, "guessing": "yes"}),
        choice=SimpleNamespace(of_seed=entries),
        comparison=comparison(choose=GOOD, fedavg=FAIR, local=[0.99, 0.80, 0.92], majority=BAD),
    )


def test_what_a_study_says_is_kept() -> None:
    lines = rows.frame(studies.said(outcome_of(DECIDED, ("half", "nothing", "half"))))
    by = lines.set_index(["metric", "variant"])
    assert by.loc[(studies.DECIDED, "Federate a. Sure."), "value"] == 1
    assert by.loc[studies.WON]["value"].to_dict() == {"half": 2, "nothing": 1}
    gains = by.loc[studies.GAIN]
    assert gains["estimator"].to_dict() == {
        "fedavg": "higher",
        "local": "no significant difference",
        "majority": "higher",
    }
    assert gains.loc["fedavg", "value"] == pytest.approx(0.29)
    undecided = rows.frame(studies.said(outcome_of(LEVEL_ARMS, ("all",))))
    assert undecided.iloc[0]["value"] == 0


@pytest.mark.parametrize(
    ("lead", "answers"),
    [
        ("Not decided between half, all. More.", ["open", LEVEL_ARMS, "yes"]),
        ("Not decided: no gain over always guessing.", ["open", NOTHING_LEARNED, "open"]),
        ("Share nothing: every client trains alone.", ["no", DECIDED, "yes"]),
    ],
)
def test_a_former_lead_stands_for_three_answers(lead: str, answers: list[str]) -> None:
    stored = rows.frame([rows.row(studies.DECIDED, 0.0, variant=lead)])
    assert list(studies.answered(stored).values()) == answers


def test_a_former_lead_without_answers_is_refused() -> None:
    with pytest.raises(UsageError, match="lead"):
        studies.answered(rows.frame([rows.row(studies.DECIDED, 0.0, variant="Federate a.")]))


def every_cut(half: float, seeds: int = 4) -> pd.DataFrame:
    scores = {"nothing": 0.5, "half": half, "all": 0.6}
    return rows.frame(
        rows.row("macro_f1", value + 0.01 * seed + 0.001 * (seed * len(cut) % 3), run="pacs", seed=seed, variant=cut,
                 split=split, estimator=studies.TRAINED)
        for seed in range(seeds)
        for split in (studies.HELD_OUT, "validation")
        for cut, value in scores.items()
    )  # fmt: skip


@pytest.mark.parametrize(("half", "signs"), [(0.7, [True, True]), (0.55, [False, True]), (0.6, [None, True])])
def test_a_claim_is_borne_out_by_the_sign_of_the_runs_of_every_cut(half, signs) -> None:
    gaps = studies.known(every_cut(half), "pacs", {"half": 3.0})
    assert gaps["fedavg"].interval.value == pytest.approx(half - 0.6, abs=2e-3)
    assert [studies.borne_out("higher", gaps[name]) for name in studies.AGAINST] == signs
    assert [studies.borne_out("lower", gaps[name]) for name in studies.AGAINST] == [
        None if sign is None else not sign for sign in signs
    ]
    assert studies.borne_out("not told apart", gaps["local"]) is None
    mixed = studies.known(every_cut(half), "pacs", {"half": 2.0, "nothing": 1.0})
    assert mixed["local"].interval.value == pytest.approx(2 / 3 * (half - 0.5), abs=2e-3)


def test_two_runs_decide_nothing() -> None:
    scores = pd.DataFrame({0: [0.9, 0.1], 1: [0.9, 0.1]}, index=["a", "b"])
    assert studies.borne_out("higher", difference(scores, "a", "b")) is None


@pytest.mark.parametrize(("half", "held"), [(0.7, True), (0.55, False), (0.6, None)])
def test_the_page_has_the_three_answers_and_judges_the_claims(monkeypatch: pytest.MonkeyPatch, half, held) -> None:
    source = SimpleNamespace(path=lambda: None, read=lambda path: ({}, every_cut(half)))
    find = studies.items.find
    monkeypatch.setattr(studies.items, "find", lambda name: source if name == studies.RUNS else find(name))
    lines = studies.said(outcome_of(DECIDED, ("half",)))
    frame = rows.frame({**line, "run": "pacs", "seed": 0} for line in lines)
    drawing = drawn(studies.NAME, {"missing": [], "failed": {}}, frame)
    assert "| PACS | yes | decided | yes |" in drawing.text
    assert [finding.held for finding in drawing.findings] == [held]
    assert "+29.0" in drawing.text
