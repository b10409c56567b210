"""Trained models and tuned settings by the command line: what is typed, and what each mistake is answered with."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedlayers as fl
from fl_core.data.named.small import COLUMNS
from fl_core.errors import CorruptError
from fl_core.storage import sign


def test_a_choice_gives_models_to_all_clients_without_its_tables(fedlayers):
    """The folder of models predicts a folder of tables, each client by its own model."""
    wards = Path("wards")
    wards.mkdir()
    draw = np.random.default_rng(0)
    for name in ("north", "south 1"):
        x = draw.normal(size=(60, 3))
        table = pd.DataFrame(x, columns=["a", "b", "c"])
        table.assign(died=np.where(x[:, 0] > 0, "yes", "no")).to_csv(
            wards / f"{name}.csv", index=False
        )
    race = "--label-column died --rounds 2 --lr 0.01 --seeds 1 --out out"
    fedlayers(f"choose --dataset wards {race}")
    wards.rename("new")
    fedlayers("export out --baseline linear_local --out simple")
    assert fedlayers("predict simple --data new").startswith("120 predictions")
    predictions = pd.read_csv("predictions.csv")
    assert predictions.groupby("client")["sample"].count().to_dict() == {
        "north": 60,
        "south 1": 60,
    }
    of_simple = fl.predict("simple/south_1.safetensors", "new/south 1.csv")
    part = predictions.loc[predictions["client"] == "south 1", "probability yes"]
    np.testing.assert_allclose(part, of_simple.probabilities[:, 1])
    truth = pd.read_csv("new/south 1.csv")["died"]
    assert (pd.Series(of_simple.labels) == truth).mean() > 0.9
    assert json.loads(Path("out/choice.json").read_text())["way"]
    fedlayers("export out --client north --out north.safetensors")
    tables = {name: pd.read_csv(f"new/{name}.csv") for name in ("north", "south 1")}
    rows = pd.concat(tables, names=["client"]).reset_index("client")
    rows.to_csv("rows.csv", index=False)
    stored = Path("out/models/linear_local.json")
    description = json.loads(stored.read_text())
    del description["sha256"]
    for key in ("about", "clients"):
        stored.with_stem(key).write_bytes(sign({**description, key: {}}))
        with pytest.raises(CorruptError, match=rf"{key}\.json is damaged"):
            fl.export("out", "b", baseline=key)
    for line, message in (
        ("export out --baseline base_rate --out b", "linear_local"),
        (
            "export out --baseline linear_local --round 1 --out b",
            "--round VALUE must be left",
        ),
        ("export out --baseline linear_local --out b.safetensors", "--client"),
        ("export simple --baseline linear_local --out b", "fedlayers predict simple"),
        ("predict simple/north.safetensors --data new --out said.csv", "got 'south 1'"),
        (
            "predict simple --data rows.csv --id-columns client --out said.csv",
            "--id-columns must be without client",
        ),
        ("predict simple --data new/north.csv --out said.csv", "the column 'client'"),
    ):
        assert message in fedlayers.refused(line), line


def test_a_model_leaves_its_run_and_labels_new_rows(fedlayers):
    fedlayers("run --algorithm fedper --rounds 1 --out run")
    assert "va.safetensors.json" in fedlayers(
        "export run --client va --out va.safetensors"
    )
    heads = list(COLUMNS)
    pd.DataFrame([[0.5] * 10, [-0.5] * 10], columns=heads).to_csv(
        "new.csv", index=False
    )
    for scores, columns in (("probability", 7), ("logit", 7), ("none", 2)):
        assert "2 predictions: said.csv" in fedlayers(
            f"predict va.safetensors --data new.csv --scores {scores} --out said.csv"
        )
        predictions = pd.read_csv("said.csv", dtype={"predicted": str})
        assert predictions.shape == (2, columns)
        assert predictions["predicted"].tolist() == list(
            fl.predict("va.safetensors", "new.csv").labels
        )
        assert predictions["sample"].tolist() == [0, 1]
    for line, message in (
        ("export run --client va --out va.safetensors", "va.safetensors"),
        ("export run --model persnal --client va --out b", "mean 'personal'"),
        (
            "predict va.safetensors --data new.csv --out new.csv",
            "predictions; got new.csv",
        ),
        ("predict va.safetensors --data new.csv --out run", "new file"),
        (
            "predict va.safetensors --data new.csv --scores logits",
            "mean 'logit'",
        ),
        (
            "predict run --data new.csv",
            "exported model must be what fedlayers export wrote",
        ),
    ):
        assert message in fedlayers.refused(line), line
    assert Path("new.csv").read_text().startswith("age,sex")
