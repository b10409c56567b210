"""PLayer-FL's tables: the study's configurations, what its rows become, tests of the printed cells, drawing."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from figures import items, recipe
from figures.__main__ import main
from figures.papers import published_table
from figures.player_fl import runs as study
from figures.player_fl.captions import evenness, order
from figures.player_fl.scores import (
    DEFAULT,
    FAIRNESS,
    INCENTIVE,
    LINE,
    RELEASED,
    SCORE,
    Table,
    by_seed,
    cells,
    clients,
)
from figures.player_fl.tables import TABLES
from figures.ranking import Ranking, first_shares
from fl_core import rows, statistics
from fl_core.algorithms import registry
from fl_core.defaults import resolve

EVERY = (*study.METHODS, *study.BESIDE)
pytestmark = pytest.mark.filterwarnings("ignore:client")


def scored(
    run: str, seed: int, values: list[float], model: str, metric: str = "macro_f1"
) -> list[rows.Row]:
    """Test scores of clients with 10, 20, ... training samples."""
    method = run.partition(".")[2]
    return [
        rows.row(metric, value, algorithm=method, seed=seed, run=run, round=1, model=model, split="test",
                 client=f"c{k}", n_train=10 * (k + 1))
        for k, value in enumerate(values)
    ]  # fmt: skip


def frame_of(
    seeds: int,
    datasets: tuple[str, ...] = tuple(study.CASES),
    skip: tuple[str, ...] = (),
) -> pd.DataFrame:
    """Scores of every method: personal models get better from method to method, trained ones worse."""
    made = []
    for dataset in datasets:
        for k, method in enumerate(EVERY):
            for seed in range(seeds):
                run, noise = f"{dataset}.{method}", 0.001 * seed
                if run not in skip:
                    kind = "global" if method == "fedavg" else "personal"
                    made += scored(
                        run,
                        seed,
                        [0.3 + 0.02 * k + noise, 0.5 + 0.02 * k + noise],
                        kind,
                    )
                    made += scored(
                        run,
                        seed,
                        [0.6 - 0.02 * k + noise, 0.8 - 0.02 * k + noise],
                        "local",
                    )
    return rows.frame(made)


def test_every_method_is_an_algorithm_and_runs_on_every_dataset_at_both_scales() -> (
    None
):
    assert set(EVERY) <= set(registry())
    names = {f"{dataset}.{method}" for dataset in study.CASES for method in EVERY}
    assert set(study.STUDY.runs) == set(study.STUDY.paper) == names
    for scale in (study.STUDY.runs, study.STUDY.paper):
        for run, config in scale.items():
            done = resolve(config)
            assert (done.data.dataset, done.federation.algorithm) == tuple(
                run.split(".")
            )
            assert done.training.keep_optimizer
            assert done.execution.eval_every == done.federation.rounds
            assert done.training.optimizer == (
                "sgd" if done.federation.algorithm == "pfedme" else "adamw"
            )
    wanted = study.STUDY.planned()
    assert {seed for run, seed in wanted if run == "heart.fedavg"} == set(range(10))
    assert {seed for run, seed in wanted if run == "cifar10.fedavg"} == {0, 1, 2}


def test_rates_are_the_papers_and_the_same_for_all_where_runs_are_cut_down() -> None:
    printed = published_table("player_fl", "Table A.3", quantity="lr")
    for column, dataset in enumerate(list(study.CASES)[:4]):
        for method in printed.index.intersection(list(study.RATES)):
            assert study.RATES[method][column] == printed.loc[method, dataset], (
                method,
                dataset,
            )
            assert (
                study.STUDY.paper[f"{dataset}.{method}"].training.lr
                == printed.loc[method, dataset]
            )
    for dataset, case in study.CASES.items():
        own = {
            study.STUDY.runs[f"{dataset}.{name}"].training.lr
            for name in EVERY
            if name != "pfedme"
        }
        assert (own == {None}) == bool(case.quick)
        if not case.quick:
            assert all(
                study.STUDY.runs[f"{dataset}.{m}"]
                == study.STUDY.paper[f"{dataset}.{m}"]
                for m in EVERY
            )


def test_quantities_agree_with_their_definitions() -> None:
    generator = np.random.default_rng(0)
    values = {name: generator.random((3, 4)) for name in EVERY}
    made = [row for name in EVERY for seed in range(3)
            for row in scored(f"heart.{name}", seed, values[name][seed].tolist(), "personal")]  # fmt: skip
    tables = {
        kind: Table("Table 1", kind, "macro_f1")
        for kind in (SCORE, FAIRNESS, INCENTIVE)
    }
    found = {
        kind: by_seed(clients(rows.frame(made), DEFAULT), table)
        for kind, table in tables.items()
    }
    weights = np.array([10, 20, 30, 40]) / 100
    for name in EVERY:
        for seed in range(3):
            got = {
                k: t[(t["method"] == name) & (t["seed"] == seed)]["value"].item()
                for k, t in found.items()
            }
            x = values[name][seed]
            assert got[SCORE] == pytest.approx(100 * weights @ x)
            assert got[FAIRNESS] == pytest.approx(((x - x.mean()) ** 2).mean())
            better = (x > values["local"][seed]) & (x > values["fedavg"][seed])
            assert got[INCENTIVE] == pytest.approx(100 * better.mean())
    cell = cells(rows.frame(made), tables[SCORE]).cells.loc[("heart", "fedlp")]
    own = np.sort(100 * values["fedlp"] @ weights)
    assert (cell["value"], cell["n"]) == (pytest.approx(own[1]), 3)
    assert own[0] <= cell["low"] <= cell["value"] <= cell["high"] <= own[2]


def test_incentive_without_its_baselines_says_so() -> None:
    frame = frame_of(1, ("heart",), skip=("heart.fedavg",))
    table = TABLES["tableA6"]
    found = cells(frame, table)
    assert found.cells["value"].isna().all()
    assert found.ranking.ranks.isna().all()


def test_released_reading_takes_trained_models_and_minus_one_for_random() -> None:
    frame = frame_of(2)
    table = TABLES["table1"]
    ours, code = cells(frame, table, DEFAULT), cells(frame, table, RELEASED)
    k = list(EVERY).index
    assert (
        ours.cells.loc[("heart", "playerfl_random"), "value"]
        > ours.cells.loc[("heart", "playerfl"), "value"]
    )
    for name, stands in (
        ("fedavg", "fedavg"),
        ("playerfl", "playerfl"),
        ("playerfl_random", "playerfl_minus"),
    ):
        value = 100 * (
            np.array([1, 2]) / 3 @ np.array([0.6, 0.8]) - 0.02 * k(stands) + 0.0005
        )
        assert code.cells.loc[("heart", name), "value"] == pytest.approx(value)
    assert ours.ranking.ranks.idxmin() == "playerfl_random"
    assert code.ranking.ranks.idxmin() == "local"


@pytest.mark.parametrize(
    ("name", "right", "transposed"),
    [
        ("table1", 0.0126, 7.0e-10),
        ("tableA5", 0.60, 1.0e-9),
        ("tableA6", 0.067, 0.019),
        ("tableA7", 0.0013, 6.6e-11),
        ("tableA8", 0.032, 2.7e-10),
        ("tableA9", 0.019, 0.0024),
        ("tableA10", 0.00097, 6.8e-12),
        ("tableA11", 0.11, 3.9e-10),
        ("tableA12", 0.027, 0.083),
    ],
)
def test_friedmans_test_of_the_printed_cells(
    name: str, right: float, transposed: float
) -> None:
    found = TABLES[name].printed_ranking()
    assert found.blocks.shape == (len(TABLES[name].methods), 7)
    assert found.friedman.p_value == pytest.approx(right, rel=0.05)
    assert found.transposed.p_value == pytest.approx(transposed, rel=0.05)


def test_a_ranking_leaves_incomplete_datasets_out() -> None:
    table = pd.DataFrame(
        {"x": [3.0, 2, 1], "y": [3.0, 1, 2], "z": [1.0, math.nan, 2]},
        index=["a", "b", "c"],
    )
    found = Ranking(table, True, "a")
    assert list(found.blocks) == ["x", "y"]
    assert found.ranks.to_dict() == {"a": 1.0, "b": 2.5, "c": 2.5}
    assert found.friedman == statistics.friedman(table[["x", "y"]])
    assert found.transposed == statistics.friedman(table[["x", "y"]].T)
    assert "2 datasets" in found.says
    none = Ranking(table[["z"]], True, "a")
    assert none.ranks.isna().all()
    assert math.isnan(none.critical)
    assert "empty" in none.says


def test_no_order_of_fewer_than_three_seeds_nor_of_ranks_that_a_test_joins() -> None:
    table = TABLES["table1"]
    held = [
        [each.held for each in order(table, cells(frame_of(n), table))] for n in (2, 3)
    ]
    assert held[0] == [None, None, None]  # paired differences need three seeds as well
    assert held[1][0] is None  # second of twelve: not told apart from the first
    assert held[1][1] is True
    lead = order(table, cells(frame_of(3), table))[1].measured
    assert (
        lead.count("a tie") == 2
    )  # of Fed-ISIC and Fed-Heart, which the paper's ± covers
    twisted = frame_of(3)
    best = twisted["run"].str.endswith(".playerfl") & (twisted["model"] == "personal")
    twisted.loc[best, "value"] += 0.2
    first = order(table, cells(twisted, table))[0]
    assert (
        first.held is None
    )  # first everywhere, and yet so few data sets cannot tell a lead of 1.5 ranks
    assert "critical difference" in first.measured
    assert "first in 100%" in first.measured
    twisted.loc[best, "value"] -= 0.5
    last = order(table, cells(twisted, table))[0]
    assert last.held is False
    assert "not significant" not in last.measured


def test_the_share_of_resamples_in_which_a_method_is_first() -> None:
    draws = np.random.default_rng(3)
    values = {
        "a": draws.normal(0.6, 0.1, 8),
        "b": draws.normal(0.6, 0.1, 8),
        "c": np.full(8, 0.1),
    }
    each = pd.DataFrame([
        {"dataset": data, "method": name, "seed": seed, "value": value}
        for data in ("x", "y", "z") for name, own in values.items() for seed, value in enumerate(own)
    ])  # fmt: skip
    medians = each.groupby(["method", "dataset"])["value"].median().unstack("dataset")
    shares = first_shares(each, Ranking(medians, True, "a"), resamples=400)
    assert shares.sum() == pytest.approx(1)
    assert shares["c"] == 0
    assert 0 < shares["a"] < 1
    assert first_shares(each, Ranking(-medians, False, "a"), 50).sum() == pytest.approx(
        1
    )
    pd.testing.assert_series_equal(
        shares, first_shares(each, Ranking(medians, True, "a"), resamples=400)
    )


def test_gains_are_compared_client_by_client() -> None:
    def findings(even: bool) -> list[bool | None]:
        made = []
        for data, seed, client in itertools.product(
            ("fashion_mnist", "fed_isic"), range(4), range(5)
        ):
            gain = (
                0.05 + 0.001 * seed
                if even
                else 0.06 * (client - 2) + 0.001 * seed * client
            )
            other = (
                0.06 * (client - 2) + 0.002 * seed * client
                if even
                else 0.05 + 0.001 * seed
            )
            for method, value in (
                ("local", 0.5),
                ("playerfl", 0.5 + gain),
                ("ditto", 0.5 + other),
            ):
                model = "global" if method == "fedavg" else "personal"
                named = {
                    "run": f"{data}.{method}",
                    "seed": seed,
                    "client": f"c{client}",
                    "model": model,
                }
                made.append(
                    {**named, "metric": "macro_f1", "value": value, "n_train": 10}
                )
        return [each.held for each in evenness(pd.DataFrame(made), {})]

    assert findings(True) == [True, True]
    assert findings(False) == [False, False]


def stored(folder: Path, frame: pd.DataFrame) -> None:
    """Rows of made-up runs, as the study stores its own."""
    folder.mkdir()
    for (run, seed), part in frame.groupby(["run", "seed"]):
        config = resolve(study.STUDY.runs[str(run)]).to_json()
        about = {"config": config, "layers": [], "data": {str(seed): "0"}}
        header = {
            "item": study.NAME,
            "run": run,
            "seed": int(seed),
            "seconds": 1.0,
            "asked": {},
            "about": about,
        }
        rows.write(
            recipe.rows_file(folder, str(run), int(seed)), header, items.records(part)
        )


def drawn(name: str, out: Path) -> tuple[pd.DataFrame, str]:
    item = items.find(name)
    drawing = items.redraw(item, item.path(out), out)
    assert drawing.findings
    with Image.open(out / f"{name}.png") as picture:
        assert min(picture.size) > 480
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 30
    return pd.read_csv(out / f"{name}.csv"), (out / f"{name}.md").read_text()


@pytest.mark.parametrize("name", ["player_fl.table2", "player_fl.tableA5"])
def test_tables_have_published_beside_measured(name: str, tmp_path: Path) -> None:
    stored(tmp_path / study.NAME, frame_of(1, skip=("cifar10.ditto",)))
    table, page = drawn(name, tmp_path)
    assert list(table) == list(LINE)
    assert set(table["definition"]) == {"default", "released"}
    if name == "player_fl.table2":
        assert set(table["quantity"]) == {"fairness mean rank", "incentive mean rank"}
        return
    ours = table[table["definition"] == "default"]
    gone = ours[ours["dataset"].isin(list(study.ABSENT))]
    assert gone["measured"].isna().all()
    assert gone["status"].str.contains("not available").all()
    assert gone.loc[gone["method"].isin(list(study.METHODS)), "published"].notna().all()
    lost = ours[(ours["dataset"] == "cifar10") & (ours["method"] == "ditto")].iloc[0]
    assert math.isnan(lost["measured"])
    assert lost["status"] == "no run"
    ranked = ours[ours["quantity"] == "mean rank"]
    assert (ranked["datasets"] == 4).all()  # cifar10 has not all methods
    assert ranked["measured"].notna().all()
    assert (ours.loc[ours["status"] == "ok", "measured"].notna()).all()
    assert "friedman p" in set(ours["quantity"])
    assert "over 4 datasets" in page
    assert "PLayer-FL−1" in page


def test_trained_with_tiny_settings_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {
        f"heart.{m}": study.config("heart", m, "quick").with_keys(
            rounds=1, eval_every=1
        )
        for m in EVERY
    }
    tiny = replace(study.STUDY, runs=runs, seeds=1, more_seeds={}, paper={})
    monkeypatch.setitem(items.REGISTRY, study.NAME, tiny)
    main(["player_fl.table1", "--train", "--out", str(tmp_path)])
    assert len(list((tmp_path / study.NAME).glob("*.jsonl"))) == len(EVERY)
    assert "PLayer-FL" in capsys.readouterr().out
    header, frame = tiny.read(tmp_path / study.NAME)
    assert not header["failed"]
    assert not header["missing"]
    plans = frame[frame["metric"] == study.LAST].set_index("run")
    assert set(plans.index) == {
        f"heart.{m}"
        for m in ("fedbabu", *(m for m in EVERY if m.startswith("playerfl")))
    }
    assert plans.loc["heart.fedbabu", "layer"] == "fc3"
    assert plans.loc["heart.playerfl_plus", "value"] == min(
        3, plans.loc["heart.playerfl", "value"] + 1
    )
    assert (
        plans.loc["heart.playerfl_random", "value"]
        != plans.loc["heart.playerfl", "value"]
    )
    assert set(frame.loc[frame["model"] == "local", "run"]) == set(runs)
    table, page = drawn("player_fl.table1", tmp_path)
    own = table[(table["definition"] == "default") & (table["dataset"] == "heart")]
    assert own["measured"].between(0, 100).all()
    assert (own["seeds"] == 1).all()
    assert "2 datasets" in page
