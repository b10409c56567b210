"""The papers' numbers: one schema, known names, and every number that is printed twice agrees with itself."""

import csv
import math
import re

import numpy as np
import pytest

from figures.papers import (
    COLUMNS,
    KEY,
    NUMBERS,
    PAPERS,
    PUBLISHED,
    published,
    published_table,
)
from fl_core.algorithms import registry
from fl_core.data import DATASETS
from fl_core.models.building import MODELS
from tests.conftest import refuses

WITHOUT = "fedpft w/o l_con"
OTHER_METHODS = {
    "fedpft": {
        WITHOUT, "fedpft, no prompts", "fedpft, classification prompts", "fedpft, contrastive prompts",
        "i", "ii", "iii", "iv", "v", "vi", "vii", "viii",
    },
}  # fmt: skip
OTHER_DATASETS = {"sent140", "mimic", "tiny_imagenet", "domainnet", "nico++"}
DOMAINS = {
    "domainnet": ["clipart", "infograph", "painting", "quickdraw", "real", "sketch"],
    "nico++": ["autumn", "dim", "grass", "outdoor", "rock", "water"],
}
CNN3, CNN5 = (
    ["conv1", "conv2", "conv3", "fc1", "fc2"],
    ["conv1", "conv2", "conv3", "conv4", "conv5", "fc1", "fc2"],
)
TEXT = ["embedding", "attention", "fc1", "fc2"]
LAYERS = {
    "fashion_mnist": CNN3, "emnist": CNN3, "cifar10": CNN5, "fed_isic": CNN5, "sent140": TEXT, "mimic": TEXT,
    "heart": ["fc1", "fc2", "fc3", "fc4"],
}  # fmt: skip


def chosen(paper, **wanted):
    frame = published(paper)
    for column, name in wanted.items():
        frame = frame[frame[column] == name]
    assert len(frame)
    return frame


@pytest.mark.parametrize("paper", PAPERS)
def test_schema(paper):
    with (PUBLISHED / f"{paper}.csv").open(encoding="utf-8", newline="") as file:
        stored = list(csv.DictReader(file))
    assert tuple(stored[0]) == COLUMNS
    assert all(
        value == value.strip() and None not in row
        for row in stored
        for value in row.values()
    )
    frame = published(paper)
    assert tuple(frame.columns) == COLUMNS
    assert len(frame) == len(stored)
    for name in NUMBERS:  # read as they stand in the file
        assert frame[name].dtype == np.float64
        expected = [float(row[name]) if row[name] else math.nan for row in stored]
        np.testing.assert_array_equal(frame[name], expected)
    assert not frame.duplicated(list(KEY)).any()
    assert (frame[["place", "how", "quantity"]] != "").all().all()
    assert (
        frame["place"]
        .str.fullmatch(
            r"(Table|Fig\.|Sec\.) [A-Z0-9.]+[a-z]?|recomputed|authors' code, \w+ \d{4}"
        )
        .all()
    )
    printed = frame["place"].str.match("Table|Sec") | (frame["place"] == "Fig. 5b")
    assert (
        frame.loc[printed, "how"]
        .isin(["printed", "printed in the authors' repository"])
        .all()
    )
    assert (
        frame.loc[frame["place"].str.match(r"Fig\. (?!5b)"), "how"]
        .str.startswith("read off, ")
        .all()
    )


@pytest.mark.parametrize("paper", PAPERS)
def test_every_row_has_its_number(paper):
    frame = published(paper)
    single, ranged = frame["value"].notna(), frame["low"].notna()
    dash = frame["note"].str.startswith("printed as a dash")
    assert (single.astype(int) + ranged + dash == 1).all()
    assert (frame["low"].notna() == frame["high"].notna()).all()
    assert (frame["low"] <= frame["high"])[ranged].all()
    assert single[frame["spread"].notna()].all()
    assert (frame["spread"].dropna() >= 0).all()
    percent = frame["quantity"].str.fullmatch(r"(\w+_)?accuracy|macro_f1|\w+ incentive")
    assert frame.loc[percent, "value"].dropna().between(0, 100).all()
    assert (frame["value"].dropna() >= 0).all()


@pytest.mark.parametrize("paper", PAPERS)
def test_names_are_the_registries_or_listed(paper):
    frame = published(paper)
    methods = set(frame["method"]) - {""}
    assert methods <= set(registry()) | OTHER_METHODS.get(paper, set())
    assert set(frame["dataset"]) - {""} <= set(DATASETS) | OTHER_DATASETS
    assert set(frame["model"]) - {""} <= set(MODELS)
    assert set(frame["client"]) - {""} <= {
        name for names in DOMAINS.values() for name in names
    }
    assert not any(
        re.search(r"[A-Z]", name) for name in methods | set(frame["dataset"])
    )


def test_read_off_curves_name_all_layers_in_order():
    frame = published("player_fl")
    curves = frame[frame["low"].notna() & (frame["layer"] != "")]
    for (_, dataset, _), curve in curves.groupby(["place", "dataset", "quantity"]):
        assert list(curve["layer"]) == LAYERS[dataset]
    ends = frame[frame["quantity"] == "shared layers"]
    assert len(ends)
    for row in ends.itertuples():
        assert LAYERS[row.dataset][int(row.value) - 1] == row.layer


def test_fedra_prints_the_mean_of_the_domains():
    tables = ["place", "setting", "dataset", "model", "method"]
    frame = published("fedra").set_index(tables)
    for key, group in frame[frame["client"] != ""].groupby(level=tables):
        assert list(group["client"]) == DOMAINS[key[2]]
        whole = frame[frame["client"] == ""].loc[[key], "value"].item()
        assert group["value"].mean() == pytest.approx(whole, abs=0.0101), key


def test_what_is_printed_twice_is_the_same():
    """FedPFT alone prints values twice."""
    frame = published("fedpft")
    printed = frame["place"].str.match("Table|Fig") & frame["value"].notna()
    other = ("mean rank", "friedman p")  # each table's own
    frame = frame[printed & ~frame["quantity"].isin(other)]
    places = frame.groupby(list(KEY[1:]))["value"].agg(["size", "nunique"])
    assert (places["nunique"] == 1).all()
    assert (places["size"] > 1).sum() >= 26


@pytest.mark.parametrize(
    ("paper", "one", "other"),
    [
        ("fedra", {"place": "Table 1", "model": "vit", "dataset": "nico++", "method": "fedra"},
         {"place": "Table 6", "method": "fedra",
          "setting": "feature skew, [12,10,8,6,4,3], adapters at attn.proj and mlp.fc2"}),
        *(("fedra", {"place": "Table 3", "model": "vit", "method": "fedra", "setting": f"feature skew, {clients}"},
           {"place": "Table 5", "setting": f"feature skew, {clients}, Eq. 2"})
          for clients in ("[4]*6", "[6]*6", "[10]*6", "[10,10,6,6,4,4]")),
        *(("pfedla", {"place": "Table 1", "method": method, "dataset": dataset, "setting": "non-iid 1, 10 clients"},
           {"place": "Table 3", "quantity": "accuracy", "dataset": dataset,
            "setting": f"non-iid 1, 10 clients, {k} retained"})
          for dataset in ("emnist", "cifar10") for k, method in enumerate(("pfedla", "heurpfedla"))),
        *(("player_fl", {"place": "Table 2", "quantity": f"{what} mean rank"},
           {"place": place, "quantity": "mean rank"})
          for what, place in (("fairness", "Table A.5"), ("incentive", "Table A.6"))),
    ],
)  # fmt: skip
def test_tables_of_the_same_runs_agree(paper, one, other):
    here, there = (
        chosen(paper, **columns).set_index(["method", "dataset", "client"])["value"]
        for columns in (one, other)
    )
    assert there.loc[here.index].tolist() == here.tolist()


def test_what_is_not_there_is_refused():
    with refuses("mean 'Table 1'"):
        published_table("fedra", "Table 11")
    with refuses(r"method .*Table 4"):
        published_table("fedra", "Table 4", method="depthfl")
