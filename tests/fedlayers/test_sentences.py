"""The sentences of a race, of a study and of a report's first page, on scores whose truth is known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedlayers.studies import harmless
from fedlayers.studies.comparison import Comparison
from fedlayers.studies.harmless import predict
from fedlayers.studies.inference import Answers
from fedlayers.studies.report import overview
from fedlayers.studies.study import (
    AGAINST,
    YES,
    Outcome,
    gains,
    of_rule,
    study,
    with_gains,
)
from fl_core import rows, runner
from fl_core.config import RunConfig
from fl_core.errors import UsageError
from fl_core.plan import LayerPlan

HEART = RunConfig(dataset="heart", rounds=2)


def comparison(**macro_f1: list[float]) -> Comparison:
    """One client's scores: macro-F1 as given, a value a seed; accuracy the same, but the base rate's 0.85."""
    found = [
        rows.row(
            metric,
            value,
            algorithm=name,
            seed=seed,
            round=1,
            model="m",
            split="test",
            client="c",
            n_train=1,
        )
        for name, values in macro_f1.items()
        for seed, f1 in enumerate(values)
        for metric, value in (
            ("macro_f1", f1),
            ("accuracy", 0.85 if name == "base_rate" else f1),
            ("loss", 1.0),
        )
    ]
    return Comparison(rows.frame({**each, "model": "personal"} for each in found))


GOOD, FAIR, BAD = [0.90, 0.91, 0.89], [0.60, 0.62, 0.61], [0.46, 0.46, 0.46]
NOISY = [0.99, 0.80, 0.92]
RACE = Answers("Federate a; keep b local.", ("one", "two"))


def test_the_lead_claims_what_the_scores_support() -> None:
    """FAIR is above the base rate in macro-F1 and below its accuracy, by which nothing is judged."""
    for fedavg, local, chosen, useless, warned in (
        (FAIR, FAIR, GOOD, False, ()),
        (NOISY, NOISY, GOOD, False, ()),
        (GOOD, BAD, [0.87, 0.88, 0.86], False, ("fedavg",)),
        (GOOD, GOOD, FAIR, False, ("fedavg", "local")),
        (BAD, BAD, [0.3, 0.5, 0.6], False, ("base_rate",)),
        (FAIR, FAIR, [0.40, 0.41, 0.405], True, ("fedavg", "local")),
        (BAD, BAD, FAIR, False, ()),
    ):
        scores = {"choose": chosen, "fedavg": fedavg, "local": local, "base_rate": BAD}
        table = gains(comparison(**scores), "choose")
        lead = with_gains(RACE, table, 3)
        assert lead.useless == useless
        assert (lead.head == RACE.head) != useless
        assert {*RACE.lines, RACE.head} <= {lead.head, *lead.lines}
        for name, words in AGAINST.items():
            assert any(words in line for line in lead.lines) == (name in warned)
    assert with_gains(RACE._replace(useless=True), table, 3).useless


def test_the_gain_is_judged_by_the_comparisons_score() -> None:
    """By accuracy FAIR is below the base rate, and there is no second line of it; of a loss less is better."""
    found = comparison(choose=FAIR, fedavg=BAD, local=BAD, base_rate=BAD)
    against = gains(found, "choose").query("against == 'base_rate'").set_index("metric")
    assert against["sign"].to_dict() == {"macro_f1": "higher", "accuracy": "lower"}
    table = gains(Comparison(found.frame, score="accuracy"), "choose")
    assert table["metric"].tolist() == ["accuracy"] * 3
    assert with_gains(RACE, table, 3).useless
    frame = found.frame.copy()
    loss = (frame["metric"] == "loss") & (frame["algorithm"] == "choose")
    frame.loc[loss, "value"] = [0.30, 0.31, 0.32]
    first = gains(Comparison(frame, score="loss"), "choose").iloc[0]
    assert first[["metric", "sign", "better"]].tolist() == ["loss", "lower", YES]


def test_a_rule_and_a_single_seed_have_no_uncertainty() -> None:
    found = of_rule("federate a; keep b local", 1)
    assert found.head == "Federate a; keep b local."
    assert len(found.lines) == 2
    table = gains(comparison(choose=[0.9], fedavg=[0.6], base_rate=[0.4]), "choose")
    lead = with_gains(found, table, 1, "rule selects")
    assert "+30.0 points" in lead.gains[0]
    assert not any("[" in gain for gain in lead.gains)
    assert lead.text().splitlines()[0] == lead.head
    assert "the rule selects. One seed" in lead.about


def test_the_intervals_hold_together() -> None:
    """Student's t at 0.025 over as many comparisons as there are: four."""
    table = gains(
        comparison(choose=GOOD, fedavg=NOISY, local=FAIR, base_rate=BAD), "choose"
    )
    assert list(zip(table["against"], table["metric"], strict=True)) == [
        *((name, "macro_f1") for name in AGAINST),
        ("base_rate", "accuracy"),
    ]
    difference = np.array(GOOD) - NOISY
    half = stats.t.ppf(1 - 0.025 / 4, 2) * difference.std(ddof=1) / np.sqrt(3)
    assert table[["value", "low", "high"]].iloc[0].to_numpy() == pytest.approx(
        [difference.mean(), difference.mean() - half, difference.mean() + half]
    )


def lines(verdict: str, shared: int = 2, seeds: int = 5, **found: Any) -> list[str]:
    task = runner.assemble(HEART)
    plan = LayerPlan(task.layers, ()).with_first(shared)
    seen = SimpleNamespace(verdict=verdict, seeds=seeds)
    winner = SimpleNamespace(name="half", algorithm="fedper")
    choice: Any = SimpleNamespace(inference=seen, winner=winner, cost_line="48 rounds.")
    lead = Answers("Federate fc1.", ("An answer.",), gains=("against x: +3",), **found)
    return overview(task, lead, choice, plan)


def test_predictions_that_cannot_be_made_are_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **own: Any) -> None:
        raise UsageError("client 'a' held a part of the model")

    monkeypatch.setattr(harmless, "predictions_of", refuse)
    assert "part of the model" in str(predict(tmp_path, HEART))
    assert "not compared" in str(predict(tmp_path / "none", HEART))
    assert "Nothing" in str(predict(None, HEART))


def studied(
    tmp_path: Path, silos: dict[str, tuple[np.ndarray, np.ndarray]], **changes
) -> Outcome:
    x, y = (np.concatenate([pair[k] for pair in silos.values()]) for k in (0, 1))
    client = np.repeat(list(silos), [len(pair[1]) for pair in silos.values()])
    np.savez(tmp_path / "data.npz", x=x.astype(np.float32), y=y, client=client)
    how = {
        "rounds": 6,
        "eval_every": 1,
        "checkpoint_every": 6,
        "batch_size": 16,
        "lr": 0.02,
        "optimizer": "adamw",
    }
    config = RunConfig(
        dataset=str(tmp_path / "data.npz"),
        model="mlp",
        loss="cross_entropy",
        **{**how, **changes},
    )
    return study(
        config, ("local", "fedavg"), (0, 1, 2), tmp_path / "out", progress=False
    )


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies write no page, which takes most of their time here."""
    monkeypatch.setattr("fedlayers.studies.report.write_page", lambda out, *rest: out)


@pytest.mark.usefixtures("unpainted")
@pytest.mark.slow
def test_clients_whose_inputs_are_turned_share_nothing(tmp_path: Path) -> None:
    """Each reads its label in a direction of its own, and a first layer of two units cannot keep four of them."""
    random = np.random.default_rng(2)
    silos = {}
    for name in "abcd":
        x = random.normal(size=(240, 8))
        turn = np.linalg.qr(random.normal(size=(8, 8)))[0]
        silos[name] = (x @ turn, (x[:, 0] > 0).astype(int))
    found = studied(tmp_path, silos, lr=0.03, model_options={"sizes": [2, 8]})
    assert found.choice.winner.name == "nothing"
    assert found.choice.inference.verdict in ("decided", "no significant difference")
    assert found.lead.gains[0].endswith("higher")
