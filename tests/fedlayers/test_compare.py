"""Comparisons: the table against sums written out, and runs that are reused, resumed or refused."""

import math
import re
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t
from torch.nn.functional import cross_entropy

from fedlayers.decision.compare import compare, compared_jobs, table_of
from fedlayers.decision.comparison import Comparison, display_name, headline
from fedlayers.decision.losses import SeedLosses
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.errors import RunError
from fl_core.plan import Evidence, LayerPlan
from fl_core.records import store
from fl_core.rows import CLASSIFICATION
from fl_core.run import runner
from tests.conftest import refuses
from tests.fedlayers import command

HEART = RunConfig(dataset="heart", rounds=2)
QUIET = {"progress": False}


def frame_of(scores, n_train, models=None):
    """Rows of finished runs of 2 rounds from ``scores[algorithm][seed][client]``, with rows that must not count."""
    lines = []
    for algorithm, by_seed in scores.items():
        model = (models or {}).get(algorithm, "personal")
        counted = {"round": 2, "model": model, "split": "test"}
        others = [{"round": 1}, {"split": "validation"}, {"model": "local"}]
        if model == "personal":
            others.append({"model": "global"})
        for (seed, client), value in np.ndenumerate(np.array(by_seed)):
            run = {"algorithm": algorithm, "seed": seed, "client": f"c{client}"}
            run["n_train"] = n_train[client]
            values = {"macro_f1": value, "accuracy": value / 2, "loss": 1 - value}
            for metric, number in values.items():
                lines.append(rows.row(metric, number, **run, **counted))
                for other in others:
                    lines.append(rows.row(metric, -9.0, **run, **counted | other))
            lines.append(rows.row("bytes_up", 100.0, round=2, split="train", **run))
    return rows.frame(lines)


@pytest.mark.parametrize("draw", range(8))
def test_table_equals_sums_written_out(draw):
    """Of up to four seeds and clients, with ties."""
    rng = np.random.default_rng(draw)
    seeds, clients = rng.integers(1, 5, 2)
    n_train = rng.integers(1, 65, clients)
    scores = {
        name: rng.integers(0, 9, (seeds, clients)) / 8
        for name in ("local", "fedavg", "playerfl")
    }
    table = Comparison(frame_of(scores, n_train, {"fedavg": "global"})).table
    combined = pd.DataFrame(
        {name: values @ n_train / n_train.sum() for name, values in scores.items()}
    )
    ranks = combined.round(9).rank(axis=1, ascending=False).mean()
    means = {name: values.mean(axis=0) for name, values in scores.items()}
    beaten = means["playerfl"] > np.maximum(means["local"], means["fedavg"])
    for line in table.to_dict("records"):
        name = line["algorithm"]
        mean, half = combined[name].mean(), math.nan
        if seeds > 1:
            half = t.ppf(0.975, seeds - 1) * combined[name].std() / math.sqrt(seeds)
        expected = {
            "macro_f1": mean,
            "macro_f1_low": mean - half,
            "macro_f1_high": mean + half,
            "accuracy": mean / 2,
            "loss": 1 - mean,
            "fairness": means[name].var(),
            "incentive": beaten.mean() if name == "playerfl" else math.nan,
            "rank": ranks[name],
        }
        for key, value in expected.items():
            assert line[key] == pytest.approx(value, abs=1e-12, nan_ok=True), key


def test_algorithms_are_ranked_by_the_score_that_is_asked_for():
    """By one of which lower is better, and by one that only some rows have."""
    scores = {"local": [[0.2, 0.8]], "fedavg": [[0.5, 0.5]], "playerfl": [[0.6, 0.9]]}
    frame = frame_of(scores, [1, 1], {"fedavg": "global"})
    comparison = Comparison(frame, score="loss")
    assert comparison.table["rank"].tolist() == [2.5, 2.5, 1.0]
    assert comparison.table["incentive"].tolist()[2] == 1.0
    with refuses(r"score .*'auroc'"):
        Comparison(frame, score="auroc")
    auroc = frame[frame["metric"] == "loss"].assign(metric="auroc")
    further = Comparison(pd.concat([frame, auroc]), score="auroc")
    assert further.table["auroc"].tolist() == comparison.table["loss"].tolist()


def test_without_a_value_there_are_no_ranks_and_the_table_says_why():
    scores = {"local": [[0.2, 0.8], [0.3, 0.7]], "fedavg": [[0.5, 0.5], [0.6, 0.4]]}
    frame = frame_of(scores, [1, 1], {"fedavg": "global"})
    assert Comparison(frame).unranked == ""
    gap = "algorithm == 'local' and seed == 0 and metric == 'macro_f1'"
    frame.loc[frame.query(gap).index, "value"] = np.nan
    comparison = Comparison(frame)
    assert "local in seed 0 (1 missing)" in comparison.unranked
    assert comparison.unranked in comparison.text()
    assert "nan" not in comparison.text()
    assert comparison.table["rank"].isna().all()
    assert display_name(comparison.table)["rank"].tolist() == ["–", "–"]
    with refuses("test scores"):
        Comparison(frame[frame["split"] != "test"])


def test_a_client_without_a_score_in_one_seed_leaves_fairness_and_incentive_open():
    scores = {
        "local": [[0.1, 0.2], [0.3, 0.4]],
        "fedavg": [[0.2, 0.3]] * 2,
        "playerfl": [[0.5, 0.6]] * 2,
    }
    frame = frame_of(scores, [5, 5], {"fedavg": "global"})
    gap = "algorithm == 'playerfl' and seed == 1 and client == 'c1' and metric == 'macro_f1'"
    frame.loc[frame.query(gap).index, "value"] = np.nan
    comparison = Comparison(frame)
    table = comparison.table.set_index("algorithm")
    assert table.loc["playerfl", ["fairness", "incentive"]].isna().all()
    assert "no fairness and no incentive of playerfl" in comparison.legend
    alone = Comparison(frame[frame["algorithm"] != "fedavg"])
    assert "it needs fedavg" in alone.legend
    assert table.loc["local", "fairness"] == pytest.approx(0.0025)


def test_models_are_scored_at_their_best_round_or_their_last():
    """Test scores say which round they are of. Only the personal model knows its best one."""
    lines = []
    for done in range(6):
        at = {"algorithm": "x", "seed": 3, "client": "a", "n_train": 3, "round": done}
        for metric in ("accuracy", "macro_f1", "loss"):
            lines.append(rows.row(metric, done, split="test", model="personal", **at))
    last = headline(rows.frame(lines), best=True)
    assert set(last["round"]) == {5}
    lines.append(rows.row("best_round", 4, **at | {"model": "personal", "client": ""}))
    best = headline(rows.frame(lines), best=True)
    assert set(best["round"]) == {4}
    assert set(best["model"]) == {"personal@best_val"}
    line = Comparison(rows.frame(lines), best=True)
    assert line.table["accuracy"].tolist() == [4.0]
    assert "best round" in line.text()


def test_runs_that_stop_are_scored_at_their_best_rounds(tmp_path):
    patient = HEART.with_keys(rounds=4, eval_every=1, patience=2)
    comparison = compare(patient, ["fedavg", "fedbabu"], [0], tmp_path, progress=False)
    assert comparison.table["model"].tolist() == [
        "global@best_val",
        "personal@best_val",
    ]


def test_pretty_table_says_the_numbers():
    scores = {"local": [[0.2, 0.8]], "fedavg": [[0.5, 0.5]], "playerfl": [[0.6, 0.6]]}
    line = display_name(Comparison(frame_of(scores, [1, 3])).table).iloc[2]
    shown = line.iloc[[0, 3, 6, 7]].tolist()  # one seed: no interval
    assert shown == ["playerfl", "60.0", "0.0e+00", "50"]
    two = Comparison(frame_of({"local": [[0.2], [0.4]], "a": [[0.1], [0.2]]}, [1]))
    assert "30.0\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}127.1" in two.text()
    assert re.search(r"^a & -15\.0 & .* & 2\.0 ", two.latex(), re.MULTILINE)
    dots = two.plot().lines[0].get_xdata()
    assert list(dots) == pytest.approx([0.3, 0.15])


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison on heart, made by the command line."""
    out = tmp_path_factory.mktemp("compare") / "out"
    line = "compare --dataset heart --algorithms fedprox ditto fedrep --option fedprox.mu=0.5 --option ditto.lam=0.25"
    command(f"{line} --seeds 2 --rounds 2 --out {out}")
    return out


OPTIONS = {"fedprox": {"mu": 0.5}, "ditto": {"lam": 0.25}}
NAMES = ("fedprox", "ditto", "fedrep")


def stamps(out):
    return {
        path: path.stat().st_mtime_ns
        for path in Path(out).rglob("*")
        if path.is_file() and "runs" in path.parts
    }


def test_comparison_leaves_runs_rows_table_and_pictures(compared):
    files = {path.name for path in compared.iterdir()}
    assert files == {
        "runs",
        "rows.jsonl",
        "table.csv",
        "comparison.png",
        "clients.png",
        "learning.png",
    }
    runs = {f"{name}-{seed}": name for name in NAMES for seed in (0, 1)}
    assert {path.name for path in (compared / "runs").iterdir()} == set(runs)
    for path in compared.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    for run, name in runs.items():
        options = store.Run(compared / "runs" / run).config["options"]
        assert options == OPTIONS.get(name, {})


def test_scores_of_the_task_are_all_recorded_and_what_is_missing_says_why(compared):
    _, frame = rows.read(compared / "rows.jsonl")
    task_scores = set(rows.scores_of(CLASSIFICATION))
    assert task_scores <= set(frame["metric"])
    assert task_scores <= set(pd.read_csv(compared / "table.csv"))
    lacking = frame[frame["metric"].isin(task_scores) & frame["value"].isna()]
    assert lacking.empty  # though heart's clients lack some of the five classes


def test_table_and_rows_are_those_of_the_runs(compared):
    _, frame = rows.read(compared / "rows.jsonl")
    parts = [
        store.Run(compared / "runs" / f"{name}-{seed}").rows()[1]
        for seed in (0, 1)
        for name in NAMES
    ]
    parts = pd.concat(parts, ignore_index=True)
    calibrated = frame["metric"] == "loss"
    run_rows = frame[~calibrated].replace({"metric": {"training_loss": "loss"}})
    pd.testing.assert_frame_equal(run_rows.reset_index(drop=True), parts)
    bench = SeedLosses(runner.assemble(HEART.with_keys(seed=0)))
    models = bench.load(compared / "runs" / "fedrep-0").models
    one = bench.of_models("fedrep", models)
    heat, weight = bench.calibration(one)
    calibrated_rows = frame[calibrated].query("algorithm == 'fedrep' and seed == 0")
    calibrated_rows = calibrated_rows[calibrated_rows["split"] == "test"].set_index(
        "client"
    )["value"]
    for client, y in bench.labels["test"].items():
        logits = one.outputs["test"][client] / heat + weight * bench.bases[client]
        assert calibrated_rows[client] == pytest.approx(float(cross_entropy(logits, y)))
    table = pd.read_csv(compared / "table.csv")
    pd.testing.assert_frame_equal(table, Comparison(frame).table)


def test_differences_are_those_of_the_table_of_losses(compared):
    """Paired by test samples, and over seeds whose test samples overlap."""
    jobs = compared_jobs(HEART, NAMES, (0, 1), compared, OPTIONS)
    table, frame, failed = table_of(jobs, "macro_f1", "test")
    assert not failed
    benches = [SeedLosses(runner.assemble(HEART.with_keys(seed=k))) for k in (0, 1)]
    for seed, bench in enumerate(benches):
        for name in NAMES:
            models = bench.load(compared / "runs" / f"{name}-{seed}").models
            scores = bench.scores(bench.of_models(name, models), "test")
            mean = table.parts[seed, name, "test"].mean
            assert mean == pytest.approx(scores["macro_f1"], abs=1e-9)
    assert table.overlap["test"] == benches[1].overlap(benches[0], "test")
    comparison = Comparison(frame, losses=table)
    means = comparison.table.set_index("algorithm")["macro_f1"]
    for name, mean in means.items():
        assert mean == pytest.approx(table.mean(str(name), "test"), abs=1e-6)
    best = str(means.idxmax())
    shown = comparison.shown().set_index("algorithm")[f"against {best}"]
    for name in set(NAMES) - {best}:
        value, low, high = re.findall(r"-?\d+\.\d", shown[name])
        gain = table.gain(name, best, "test")
        for text, end in zip((low, high), gain.interval(2)[1:], strict=True):
            assert float(text) == pytest.approx(100 * end, abs=0.06)
        printed = [round(100 * means[algorithm], 1) for algorithm in (name, best)]
        assert float(value) == pytest.approx(printed[0] - printed[1], abs=1e-9)


def test_the_runs_of_a_seed_start_alike(compared):
    starts = set()
    for seed in (0, 1):
        runs = [store.Run(compared / "runs" / f"{name}-{seed}") for name in NAMES]
        headers = [run.rows()[0] for run in runs]
        (start,) = {(header["data"], header["checkpoint"]) for header in headers}
        starts.add(start)
    assert len(starts) == 2


def test_a_second_call_reads_what_is_finished(compared):
    before, table = stamps(compared), (compared / "table.csv").read_bytes()
    compare(HEART, NAMES, (0, 1), compared, options=OPTIONS, **QUIET)
    assert stamps(compared) == before
    assert (compared / "table.csv").read_bytes() == table


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"config": HEART.with_keys(rounds=3)}, "rounds=2.*3"),
        ({"config": HEART.with_keys(loss="focal")}, "loss='player_focal'.*'focal'"),
        ({"options": {}}, "options="),
        ({"plan": True}, "another plan"),
    ],
)
def test_another_configuration_is_refused_before_any_work(compared, changed, said):
    if "plan" in changed:
        layers = runner.assemble(HEART).layers
        changed = {"plan": LayerPlan.prefix(layers, 1)}
    arguments = {"config": HEART, "algorithms": NAMES, "seeds": (2, 0, 1)}
    before = sorted(compared.rglob("*"))
    with refuses(said):
        compare(out=compared, **arguments | {"options": OPTIONS} | changed, **QUIET)
    assert sorted(compared.rglob("*")) == before


def test_other_data_under_the_same_name_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3
    np.savez("own.npz", x=x, y=y, client=np.arange(60) % 2)
    config = RunConfig(dataset="own.npz", rounds=1)
    compare(config, ("fedavg",), (0,), "out", **QUIET)
    np.savez("own.npz", x=x + 1, y=y, client=np.arange(60) % 2)
    with refuses("other data"):
        compared_jobs(config, ("fedavg",), (0,), "out")


def test_plans_reach_the_algorithms_that_obey_one():
    plan = LayerPlan.prefix(runner.assemble(HEART).layers, 2)
    names = ("fedavg", "fedper", "fedrep")
    jobs = compared_jobs(HEART, names, (0,), None, plan=plan)
    assert [job.plan for job in jobs] == [None, plan, plan]
    auto = compared_jobs(HEART.with_keys(plan="auto"), names[:2], (0,), None)
    assert [job.config.federation.plan for job in auto] == [None, "auto"]
    with refuses("fedavg, local"):
        compared_jobs(HEART, ("fedavg", "local"), (0,), None, plan=plan)


@pytest.mark.parametrize(
    ("seeds", "evidence", "said"),
    [
        ((0, 1, 2), {}, "of seeds 1, 2;"),
        ((1,), {}, "of seed 1;"),
        ((0,), {}, None),
        ((0, 1), {"seed": None}, None),
        ((0, 1), {"data": "of something else"}, None),
    ],
)
def test_a_plan_that_has_seen_test_samples_is_told(seeds, evidence, said):
    task = runner.assemble(HEART)
    why = Evidence(**{"seed": 0, "data": task.data.digest, **evidence})
    plan = LayerPlan.prefix(task.layers, 1, why)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        compared_jobs(HEART, ("local", "fedper", "fedrep"), seeds, None, plan=plan)
    assert [said in str(note.message) for note in notes] == [True] * (said is not None)


def test_a_run_that_fails_ends_the_comparison_and_keeps_the_others(tmp_path):
    config, options = HEART.with_keys(optimizer="sgd"), {"fedprox": {"mu": 1e30}}
    seen = []
    for _ in range(
        2
    ):  # starting again fails at the same place, and trains nothing twice
        with refuses("fedprox, round 1", RunError):
            compare(
                config, ("fedavg", "fedprox"), (0,), tmp_path, options=options, **QUIET
            )
        seen.append(stamps(tmp_path / "runs" / "fedavg-0"))
        assert store.Run(tmp_path / "runs" / "fedavg-0").rounds == [2]
        assert not (tmp_path / "table.csv").exists()
    assert seen[0] == seen[1]
