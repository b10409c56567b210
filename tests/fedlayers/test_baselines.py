"""Baselines that need no federation: they are scikit-learn's, and have values for a single class."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.preprocessing import StandardScaler

from fedlayers.studies.baselines import BASELINES, PENALTIES, baseline_rows
from fedlayers.studies.harmless import Bench
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.run import runner


@pytest.mark.parametrize("class_weights", ["none", "balanced", "1,3,1,2,4"])
def test_linear_baselines_are_what_scikit_learn_says(class_weights):
    task = runner.assemble(
        RunConfig(dataset="heart", class_weights=class_weights, loss="cross_entropy")
    )
    train = [client.train for client in task.data.clients]
    x, y = (torch.cat([getattr(s, part) for s in train]).numpy() for part in "xy")
    weights = {
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
    found = rows.frame(baseline_rows(Bench(task))).query(
        "algorithm == 'linear_pooled' and split == 'test' and metric == 'balanced_accuracy'"
    )
    assert any(found["value"].tolist() == pytest.approx(each) for each in known)


TEXTS = {
    site: (
        [f"{word} {k} said {site}" for k, word in enumerate(["good", "bad"] * 20)],
        ["up", "down"] * 20,
    )
    for site in ("north", "south")
}


def test_every_kind_of_sample_has_a_linear_model_and_one_class_the_base_rate(tmp_path):
    text = pd.concat(
        pd.DataFrame({"text": texts, "label": labels, "site": site})
        for site, (texts, labels) in TEXTS.items()
    )
    text.to_csv(tmp_path / "said.csv", index=False)
    config = RunConfig(dataset=str(tmp_path / "said.csv"), client_column="site")
    tasks = {
        "texts": runner.assemble(config.with_keys(text_column="text")),
        "images": runner.assemble(RunConfig(dataset="digits", max_samples=300)),
    }
    for name, task in tasks.items():
        found = rows.frame(baseline_rows(Bench(task)))
        score = found[(found["metric"] == "loss") & (found["split"] == "test")]
        means = score.groupby("algorithm")["value"].mean()
        assert set(means.index) == {"base_rate", "linear_own", "linear_pooled"}
        assert means["linear_pooled"] < 0.7 * means["base_rate"], name
    task = runner.assemble(RunConfig(dataset="heart"))
    alike = [
        replace(c, train=replace(c.train, y=c.train.y * 0)) for c in task.data.clients
    ]
    found = rows.frame(
        baseline_rows(
            Bench(replace(task, data=replace(task.data, clients=tuple(alike))))
        )
    )
    assert (
        found.loc[found["metric"].isin(["accuracy", "macro_f1"]), "status"] == "ok"
    ).all()
    assert set(found["algorithm"]) == set(BASELINES)
