"""What a study comes to: its lead sentence on data whose answer is known, and the baselines that it is held against."""

from __future__ import annotations

from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.preprocessing import StandardScaler

from fedlayers.studies import summary
from fedlayers.studies.answers import NO, OPEN, YES, Answers
from fedlayers.studies.baselines import BASELINES, PENALTIES, baseline_rows
from fedlayers.studies.comparison import Comparison
from fedlayers.studies.study import Outcome, study
from fl_core import rows, runner
from fl_core.config import RunConfig


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
RACE = Answers("Federate a; keep b local.", ("one", "two"), YES, "decided", YES)
UNLEARNED = RACE._replace(which="nothing learned", guessing=NO)


@pytest.mark.parametrize(
    ("found", "fedavg", "local", "chosen", "guessing", "warned"),
    [
        (RACE, FAIR, FAIR, GOOD, YES, ()),
        (RACE, NOISY, NOISY, GOOD, YES, ()),
        (RACE, GOOD, BAD, [0.87, 0.88, 0.86], YES, ("fedavg",)),
        (RACE, GOOD, GOOD, FAIR, YES, ("fedavg", "local")),
        (RACE, BAD, BAD, [0.3, 0.5, 0.6], OPEN, ()),
        (RACE, FAIR, FAIR, [0.40, 0.41, 0.405], NO, ("fedavg", "local")),
        (UNLEARNED, FAIR, FAIR, GOOD, NO, ()),
    ],
)
def test_the_lead_claims_what_the_scores_support(
    found, fedavg, local, chosen, guessing, warned
) -> None:
    """FAIR is above the majority class in macro-F1 and below its accuracy, by which nothing is judged."""
    table = summary.gains(
        comparison(choose=chosen, fedavg=fedavg, local=local, base_rate=BAD), "choose"
    )
    lead = summary.lead(found, table, 3)
    assert lead.codes == {**found.codes, "guessing": guessing}
    assert (lead.head == found.head) == (guessing != NO or found is UNLEARNED)
    assert {*found.lines, found.head} <= {lead.head, *lead.answers}
    for name in ("fedavg", "local"):
        assert any(summary.AGAINST[name] in line for line in lead.answers) == (
            name in warned
        )


def test_a_gain_in_the_main_score_is_no_loss_for_lower_accuracy() -> None:
    table = summary.gains(
        comparison(choose=FAIR, fedavg=BAD, local=BAD, base_rate=BAD), "choose"
    )
    against = table[table["against"] == "base_rate"].set_index("metric")
    assert against["sign"].to_dict() == {"macro_f1": "higher", "accuracy": "lower"}
    assert summary.lead(RACE, table, 3).head == RACE.head
    assert "accuracy" in summary.lead(RACE, table, 3).gains[-1]


def test_the_gain_is_judged_by_the_comparisons_score() -> None:
    """By accuracy FAIR is below the majority class, and there is no second line of it; of a loss less is better."""
    found = comparison(choose=FAIR, fedavg=BAD, local=BAD, base_rate=BAD)
    table = summary.gains(Comparison(found.frame, score="accuracy"), "choose")
    assert table["metric"].tolist() == ["accuracy"] * 3
    assert summary.lead(RACE, table, 3).codes["guessing"] != YES
    frame = found.frame.copy()
    loss = (frame["metric"] == "loss") & (frame["algorithm"] == "choose")
    frame.loc[loss, "value"] = [0.30, 0.31, 0.32]
    table = summary.gains(Comparison(frame, score="loss"), "choose")
    assert table[["metric", "sign", "better"]].iloc[0].tolist() == [
        "loss",
        "lower",
        YES,
    ]


def test_a_rule_is_answered_by_test_samples_alone() -> None:
    table = summary.gains(
        comparison(choose=GOOD, fedavg=FAIR, local=NOISY, base_rate=BAD), "choose"
    )
    found = summary.lead(
        summary.of_rule("federate a; keep b local", table, 3), table, 3
    )
    assert found.codes == {"split": OPEN, "which": "", "guessing": YES}
    assert found.head == "Federate a; keep b local."
    sure = summary.gains(
        comparison(choose=GOOD, fedavg=FAIR, local=FAIR, base_rate=BAD), "choose"
    )
    assert summary.of_rule("federate a", sure, 3).split == YES


def test_one_seed_gives_a_decision_without_intervals() -> None:
    table = summary.gains(
        comparison(choose=[0.9], fedavg=[0.6], local=[0.5], base_rate=[0.4]), "choose"
    )
    found = summary.lead(
        RACE._replace(split=OPEN, which="one race", guessing=OPEN), table, 1
    )
    assert found.codes == {"split": OPEN, "which": "one race", "guessing": OPEN}
    assert "+30.0 points" in found.gains[0]
    assert not any("[" in gain for gain in found.gains)


def test_the_intervals_hold_together() -> None:
    """Student's t at 0.025 over as many comparisons as there are: four."""
    table = summary.gains(
        comparison(choose=GOOD, fedavg=NOISY, local=FAIR, base_rate=BAD), "choose"
    )
    assert list(zip(table["against"], table["metric"], strict=True)) == [
        *((name, "macro_f1") for name in summary.AGAINST),
        ("base_rate", "accuracy"),
    ]
    difference = np.array(GOOD) - NOISY
    half = stats.t.ppf(1 - 0.025 / 4, 2) * difference.std(ddof=1) / np.sqrt(3)
    assert table[["value", "low", "high"]].iloc[0].to_numpy() == pytest.approx(
        [difference.mean(), difference.mean() - half, difference.mean() + half]
    )


@pytest.mark.parametrize("class_weights", ["none", "balanced", "1,3,1,2,4"])
def test_linear_baselines_are_what_scikit_learn_says(class_weights: str) -> None:
    task = runner.assemble(
        RunConfig(dataset="heart", class_weights=class_weights, loss="cross_entropy")
    )
    train = [client.train for client in task.data.clients]
    x, y = (torch.cat([getattr(s, part) for s in train]).numpy() for part in "xy")
    weights: Any = {
        "none": None,
        "balanced": "balanced",
        "1,3,1,2,4": dict(enumerate((1.0, 3.0, 1.0, 2.0, 4.0))),
    }[class_weights]
    scale, known = StandardScaler().fit(x), []
    for penalty in PENALTIES:
        pooled = LogisticRegression(C=penalty, max_iter=1000, class_weight=weights)
        pooled.fit(scale.transform(x), y)
        known.append(
            [
                balanced_accuracy_score(
                    client.test.y.numpy(),
                    pooled.predict(scale.transform(client.test.x.numpy())),
                )
                for client in task.data.clients
            ]
        )
    found = rows.frame(baseline_rows(task)).query(
        "algorithm == 'linear_pooled' and split == 'test' and metric == 'balanced_accuracy'"
    )
    assert any(found["value"].tolist() == pytest.approx(each) for each in known)


def test_baselines_of_texts_and_of_one_class_have_values(tmp_path: Path) -> None:
    words = [
        "good film",
        "bad film",
        "very good",
        "very bad",
        "good good",
        "bad bad",
    ] * 10
    table = pd.DataFrame(
        {"text": words, "label": ["no" if "bad" in text else "yes" for text in words]}
    )
    table["client"] = np.arange(len(words)) % 12 // 6
    table.to_csv(tmp_path / "films.csv", index=False)
    found = rows.frame(
        baseline_rows(runner.assemble(RunConfig(dataset=str(tmp_path / "films.csv"))))
    )
    pooled = found[
        (found["algorithm"] == "linear_pooled") & (found["metric"] == "accuracy")
    ]
    assert (pooled["value"] == 1.0).all()
    task = runner.assemble(RunConfig(dataset="heart"))
    alike = [
        replace(c, train=replace(c.train, y=c.train.y * 0)) for c in task.data.clients
    ]
    found = rows.frame(
        baseline_rows(replace(task, data=replace(task.data, clients=tuple(alike))))
    )
    assert (
        found.loc[found["metric"].isin(["accuracy", "macro_f1"]), "status"] == "ok"
    ).all()
    assert set(found["algorithm"]) == set(BASELINES)


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


@pytest.mark.slow
def test_an_imbalanced_table_of_noise_gains_nothing(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    silos = {
        name: (random.normal(size=(160, 5)), (random.random(160) < 0.15).astype(int))
        for name in "abc"
    }
    found = studied(tmp_path, silos, rounds=2, checkpoint_every=2)
    table = found.comparison.table.set_index("algorithm")
    assert table.loc["base_rate", "accuracy"] > 0.8
    assert found.lead.codes["guessing"] != YES
    page = unescape((tmp_path / "out" / "report.html").read_text())
    assert f'<p class="lead"><strong>{found.lead.head}</strong></p>' in page
    for line in found.lead.answers:
        assert f"<li>{line}</li>" in page


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies write no page, which takes most of their time here."""
    monkeypatch.setattr(
        "fedlayers.studies.study_page.write_page", lambda out, *rest: out
    )


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


@pytest.mark.usefixtures("unpainted")
@pytest.mark.slow
def test_clients_that_are_alike_gain_nothing_over_sharing_all(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    silos = {}
    for name in "abcd":
        x = random.normal(size=(40, 12))
        silos[name] = (x, (x.sum(axis=1) > 0).astype(int))
    found = studied(tmp_path, silos)
    worth = summary.gains(found.comparison, "choose").set_index(["against", "metric"])
    assert worth.loc[("fedavg", "macro_f1"), "sign"] != "higher"
    assert found.choice.inference.remaining[0] != "nothing"
