"""Items that are kept run by run: tiny recipes run, resume, stop at their budget, are refused, and are drawn."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.nn.functional import avg_pool2d

from figures import items, learning, paired, pieces
from figures.__main__ import main
from figures.fedra import depth
from figures.pfedla import overlap
from figures.pfedla import weights as weights_by_layer
from fl_core import models, rows, runner
from fl_core.algorithms import find, registry
from fl_core.algorithms.options import configured
from fl_core.config import RunConfig
from fl_core.errors import CorruptError, UsageError
from fl_core.models import weights

PIECES = {name: item for name, item in items.REGISTRY.items() if isinstance(item, pieces.Pieces)}
TINY = RunConfig(
    dataset="digits", model="mlp", clients=2, samples=120, rounds=1, epochs=1, batch=16, lr=0.05, optimizer="sgd"
)
pytestmark = pytest.mark.filterwarnings("ignore:client")


def small(monkeypatch: pytest.MonkeyPatch, item: pieces.Pieces, runs: dict[str, RunConfig]) -> pieces.Pieces:
    """The item with other runs, registered under its name."""
    tiny = replace(item, runs=runs, seeds=2)
    monkeypatch.setitem(items.REGISTRY, item.name, tiny)
    return tiny


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> pieces.Pieces:
    runs = {name: replace(TINY, algorithm=name, samples_per_client=None) for name in ("local", "fedavg", "fedper")}
    return small(monkeypatch, learning.ITEM, runs)


def made(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.jsonl")}


def page(name: str, out: Path) -> str:
    with Image.open(out / f"{name}.png") as picture:
        assert min(picture.size) > 400
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 50
    assert len(pd.read_csv(out / f"{name}.csv")) > 0
    return (out / f"{name}.md").read_text()


# --- made in parts ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("check")
def test_runs_are_made_once_and_a_partial_table_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / learning.NAME, ["--out", str(tmp_path)]
    main([learning.NAME, "--train", "--only", "local", "fedavg", "--seeds", "1", *out])
    assert made(folder) == {"local-0", "fedavg-0"}
    before = {path: path.read_bytes() for path in folder.iterdir()}
    text = page(learning.NAME, tmp_path)
    assert "Missing: of seed 0 fedper; of seed 1 all." in text
    assert "in no order of merit" in text
    assert "open: personalised methods" in text
    assert f"{learning.NAME} --train --only local fedavg" in capsys.readouterr().out.replace(" --seeds 1", "")
    main([learning.NAME, "--train", *out])
    assert made(folder) == {f"{name}-{seed}" for name in ("local", "fedavg", "fedper") for seed in (0, 1)}
    assert all(path.read_bytes() == kept for path, kept in before.items())
    assert "Missing" not in page(learning.NAME, tmp_path)
    for name in ("assemble", "run"):
        monkeypatch.setattr(runner, name, None)  # nothing is left to make
    main([learning.NAME, "--train", *out])


def test_stored_rows_are_small_and_resolve_to_the_run(check: pieces.Pieces, tmp_path: Path) -> None:
    folder = tmp_path / learning.NAME
    pieces.train(check, folder, only=["fedper"], seeds=1, command="typed", progress=False)
    header, frame = rows.read(folder / "fedper-0.jsonl")
    assert (header["run"], header["seed"], header["command"]) == ("fedper", 0, "typed")
    assert "/" not in json.dumps(header["about"]["config"])
    final = frame[frame["metric"] == "accuracy"]
    assert set(final["model"]) == {"personal"}
    assert final["client"].nunique() == len(final) == 2
    engine = runner.run(check.runs["fedper"], instruments=pieces.measure.instruments(), progress=False)
    fresh = runner.frame(engine)
    fresh = fresh[(fresh["metric"] == "accuracy") & (fresh["split"] == "test") & (fresh["model"] == "personal")]
    assert final["value"].tolist() == fresh[fresh["round"] == 1]["value"].tolist()
    counted = frame[frame["model"] == ""].set_index(["metric", "variant"])["value"]
    assert counted[learning.STEPS] == np.mean([math.ceil(n / 16) for n in final["n_train"]])
    assert counted[learning.WORK] == runner.frame(engine).query("metric == 'flops' and variant == ''")["value"].mean()
    assert counted[learning.TUNING] == 0


def test_budget_stops_between_runs(check: pieces.Pieces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, clock = tmp_path / learning.NAME, [0.0]
    measure = check.measure

    def ten_minutes(*args: object) -> pd.DataFrame:
        clock[0] += 600
        return measure(*args)

    monkeypatch.setattr(pieces.time, "perf_counter", lambda: clock[0])
    slow = replace(check, measure=ten_minutes)
    pieces.train(slow, folder, budget=15, progress=False)
    assert made(folder) == {"local-0", "fedavg-0"}  # the second began at 10 of 15 minutes
    pieces.train(slow, folder, budget=5, progress=False)
    assert made(folder) == {"local-0", "fedavg-0", "fedper-0"}  # of local and fedavg 10 minutes are known
    with pytest.raises(UsageError, match="leaves no time"):
        pieces.train(slow, folder, budget=0, progress=False)


def test_an_interrupted_run_leaves_nothing_and_the_others_stay(check: pieces.Pieces, tmp_path: Path) -> None:
    folder = tmp_path / learning.NAME
    measure = check.measure

    def failing(task: runner.Task, run: str, to: Path) -> pd.DataFrame:
        if run == "fedavg":
            raise KeyboardInterrupt
        return measure(task, run, to)

    with pytest.raises(KeyboardInterrupt):
        pieces.train(replace(check, measure=failing), folder, progress=False)
    assert made(folder) == {"local-0"}


def test_a_diverged_run_is_kept_with_its_reason_and_the_others_go_on(
    check: pieces.Pieces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / learning.NAME
    runs = {**check.runs, "fedavg": replace(check.runs["fedavg"], lr=1e30, epochs=3)}
    item = small(monkeypatch, check, runs)
    pieces.train(item, folder, seeds=1, progress=False)
    assert made(folder) == {"local-0", "fedavg-0", "fedper-0"}
    _, frame = rows.read(folder / "fedavg-0.jsonl")
    assert frame["value"].isna().all()
    header, frame = item.read(folder)
    assert list(header["failed"]) == ["fedavg 0"]
    assert set(frame["run"]) == {"local", "fedper"}
    assert "fedavg 0" not in header["missing"]
    items.redraw(item, folder, tmp_path)
    assert "fedavg 0 did not come to its end: fedavg, round 1" in page(learning.NAME, tmp_path)
    for name in ("local", "fedper"):
        pieces.piece(folder, name, 0).unlink()
    with pytest.raises(UsageError, match=r"no run in .* came to its end"):
        item.read(folder)


def test_another_configuration_and_damaged_rows_are_refused(check: pieces.Pieces, tmp_path: Path) -> None:
    folder = tmp_path / learning.NAME
    pieces.train(check, folder, only=["local"], seeds=1, progress=False)
    other = replace(check, runs={**check.runs, "local": replace(check.runs["local"], lr=0.1)})
    with pytest.raises(UsageError, match=r"local-0.jsonl was made with another lr"):
        pieces.train(other, folder, progress=False)
    with pytest.raises(UsageError, match="did you mean 'fedper'"):
        pieces.train(check, folder, only=["fedpr"], progress=False)
    with pytest.raises(UsageError, match="at least 1"):
        pieces.train(check, folder, seeds=0, progress=False)
    with pytest.raises(UsageError, match="--train makes them"):
        check.read(tmp_path)
    path = pieces.piece(folder, "local", 0)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(CorruptError, match="line"):
        check.read(folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([learning.NAME, "--only", "fedper"], "go with --train"),
        (["player_fl.heart_sensitivity", "--train", "--budget", "3"], "kept run by run"),
        (["gallery", "--budget", "3"], "made as a whole"),
        ([learning.NAME, "--train", "--data-root", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_requests_that_cannot_be_met(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
    assert not made(tmp_path / learning.NAME)


@pytest.mark.parametrize("name", PIECES)
def test_recipes_name_what_there_is(name: str) -> None:
    for config in (*PIECES[name].runs.values(), *PIECES[name].paper.values()):
        if config.algorithm in registry():
            configured(find(config.algorithm), config.options)
    assert PIECES[name].wanted(1) == [(run, 0) for run in PIECES[name].runs]


# --- the learning check ----------------------------------------------------------------------------------------


def test_learning_check_has_every_algorithm_but_those_of_depth() -> None:
    checked = {config.algorithm for config in learning.ITEM.runs.values()}
    assert checked == set(registry()) - set(learning.DEPTH)


def accuracies(values: dict[str, list[float]]) -> tuple[dict[str, object], pd.DataFrame]:
    lines = []
    for run, seeds in values.items():
        for seed, value in enumerate(seeds):
            for client, each in (("a", value - 0.1), ("b", value + 0.1)):
                model = "global" if run in ("fedavg", "fedprox") else "personal"
                lines.append(rows.row("accuracy", each, run=run, seed=seed, client=client, model=model))
            work = 5 if run == "pfedme" else 1
            for (metric, variant), count in zip(learning.COUNTED, (30, 1e6 * work, 0), strict=True):
                lines.append(rows.row(metric, count, variant=variant, run=run, seed=seed))
    runs = {run: {"config": {"algorithm": run, "model": "scheduling_cnn"}} for run in values}
    return {"runs": runs, "missing": [], "failed": {}, "seeds": 3}, rows.frame(lines)


def test_summary_pairs_by_seed_and_claims_nothing_below_three() -> None:
    header, frame = accuracies(
        {
            "local": [0.5, 0.6, 0.7],
            "fedavg": [0.4, 0.5, 0.65],
            "fedper": [0.6, 0.7, 0.8],
            "ditto": [0.52, 0.59, 0.7],
            "pfedgate": [0.3, 0.4],
            "pfedme": [0.5, 0.6, 0.7],
            "fedprox": [0.3, 0.4, 0.5],
            "fedpft_1+2": [0.3, 0.4, 0.5],
        }
    )
    header["runs"]["fedpft_1+2"]["config"]["algorithm"] = "fedpft"  # type: ignore[index]
    table = learning.summary(header, frame).set_index("run")
    assert table.loc["fedper", "accuracy"] == pytest.approx(0.7)
    assert table.loc["fedper", "local_gap"] == pytest.approx(0.1)
    assert table.loc["fedper", "local_high"] == pytest.approx(0.1)  # every seed differs alike
    assert table.loc["fedper", ["paper_local", "found_local", "came_out_local"]].tolist() == ["above", "above", "yes"]
    assert table.loc["ditto", ["paper_local", "found_local"]].tolist() == ["level", "level"]
    assert table.loc["pfedgate", ["paper_local", "found_local", "came_out_local"]].tolist() == ["above", "", "open"]
    assert math.isnan(table.loc["local", "global"])
    assert table.loc["fedavg", "global"] == table.loc["fedavg", "accuracy"]
    assert table.loc["pfedme", "work"] == 5
    assert table.loc["fedprox", ["paper_local", "place"]].tolist() == ["", ""], (
        "its paper's number is no global model's"
    )
    assert table.loc["ditto", ["paper_fedavg", "place"]].tolist() == ["", learning.RETRAINED]
    assert table.loc["fedpft_1+2", ["paper_local", "paper_fedavg", "place"]].tolist() == ["", "", ""]
    above, below, budget = learning._findings(table.reset_index(), frame)
    assert above.held is None
    assert below.held is None
    assert budget.held
    assert "pfedme 5.0" in budget.measured
    assert "pfedgate -20.0" in below.measured
    assert "fedpft" not in above.measured + below.measured


@pytest.mark.parametrize(
    ("value", "spread", "reference", "expected"),
    [
        *((2, 1, 0, "above"), (-2, 1, 0, "below"), (1, 1, 0, "level"), (89.8, 0.7, 89.1, "level")),
        *((1, math.nan, 0, "above"), (1, 1, math.nan, "")),
    ],
)
def test_claim(value: float, spread: float, reference: float, expected: str) -> None:
    assert learning.claim(value, spread, reference) == expected


def test_outcome_and_verdicts() -> None:
    values = pd.DataFrame({0: [0.1, 0.0], 1: [0.12, 0.0], 2: [0.11, 0.0]}, index=["x", "y"])
    assert paired.outcome(*paired.against(values, "x", "y")) == "above"
    assert paired.outcome(*paired.against(values, "y", "x")) == "below"
    assert paired.outcome(*paired.against(values, "y", "y")) == "equal"
    assert paired.outcome(*paired.against(values.iloc[:, :2], "x", "y")) == ""
    assert paired.outcome(*paired.against(values, "x", "z")) == ""
    assert [learning.came_out("above", found) for found in ("above", "below", "level", "")] == [
        "yes", "no", "open", "open"
    ]  # fmt: skip
    assert learning.came_out("level", "above") == ""
    assert str(items.Finding("x", "y", None)).startswith("open: ")


# --- pFedLA's overlap ------------------------------------------------------------------------------------------


def test_overlap_and_correlations() -> None:
    counts = pd.DataFrame([[3, 1, 0], [2, 0, 2], [0, 0, 5]], index=list("abc"), columns=["0", "1", "2"])
    shared = overlap.overlap(counts)
    assert shared.to_numpy().tolist() == [[1, 0.5, 0], [0.5, 1, 0.5], [0, 1, 1]]
    assert overlap.chosen_pairs(shared) == [("c", "b"), ("a", "c")]
    for found in overlap.correlations(0.2 * shared + 0.1, shared):
        assert found == pytest.approx(1)
    assert overlap.correlations(shared * 0 + 1 / 3, shared) == (None, None)


def test_overlap_runs_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = replace(
        TINY, clients=3, partition="non_iid_1", classes_per_client=4, samples_per_client=40, samples=None, rounds=3,
        eval_every=1,
    )  # fmt: skip
    small(monkeypatch, overlap.ITEM, {name: replace(base, algorithm=name) for name in overlap.RUNS})
    main([overlap.NAME, "--train", "--out", str(tmp_path)])
    assert made(tmp_path / overlap.NAME) == {
        *(f"{name}-{seed}" for name in ("local", "fedavg", "pfedla") for seed in (0, 1)),
        "heurpfedla-0",
    }
    header, frame = rows.read(tmp_path / overlap.NAME / "pfedla-0.jsonl")
    weights_ = frame[frame["metric"] == overlap.WEIGHT]
    layers = weights_["layer"].nunique()
    assert len(weights_[weights_["round"] == 3]) == 9 * layers
    assert len(weights_[weights_["round"] == 2]) == 5 * layers
    start = frame[(frame["metric"] == overlap.CORRELATION) & (frame["round"] == 1)]
    assert header["about"]["config"]["algorithm"] == "pfedla"
    assert frame.loc[frame["metric"] == overlap.OVERLAP, "value"].between(0, 1).all()
    assert len(start) == 2 * (layers + 1)
    text = page(overlap.NAME, tmp_path)
    assert "open: pFedLA's mixture before local training lies above local" in text
    assert "of pFedLA's" in text
    for name in ("pfedla.fig5", "pfedla.fig6", "pfedla.fig7"):
        assert "open: " in page(name, tmp_path)
        assert "held" not in page(name, tmp_path), f"{name} claims an order from two seeds"
    pairs = pd.read_csv(tmp_path / "pfedla.fig6.csv")
    sums = pairs.groupby(["layer", "receiver"])["value"].sum()
    assert len(sums) == 3 * layers
    assert sums.to_numpy() == pytest.approx(1)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [([0, 1, 2, 3], [None, *weights_by_layer.PERIODS]), ([0, 6, 12], [None, *weights_by_layer.PERIODS[1:]])],
)
def test_periods(rounds: list[int], expected: list[str | None]) -> None:
    found = weights_by_layer.periods(pd.Series(rounds))
    assert [None if pd.isna(each) else each for each in found] == expected


# --- depth -----------------------------------------------------------------------------------------------------


def test_stretched_patches_see_the_means_of_two_by_two() -> None:
    options = {"depth": 2, "embed_dim": 16, "num_heads": 2}
    little = models.build(depth.MODEL, (3, 32, 32), 5, options={**options, "patch_size": 8})
    large = models.build(depth.MODEL, (3, 64, 64), 7, options=options)
    large.load_state_dict(depth.doubled(little.state_dict(), 7))
    little.eval(), large.eval()
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(large.forward_features(x), little.forward_features(avg_pool2d(x, 2)))
    assert not large(x).any()


def images(path: Path, side: int, classes: int, domains: int) -> str:
    draw = np.random.default_rng(0)
    y = np.arange(20 * domains) % classes
    extra = {"domain": np.repeat(np.arange(domains), 20), "domain_names": np.array(["sketch", "photo"])}  # not sorted
    x = draw.integers(0, 256, (len(y), side, side, 3), dtype=np.uint8)
    names = np.array([f"class {k}" for k in range(classes)])
    np.savez(path, x=x, y=y, classes=names, **(extra if domains > 1 else {}))
    return str(path)


def test_depth_pretrains_runs_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"depth": 4, "embed_dim": 8, "num_heads": 2}
    changes = {"rounds": 1, "batch": 8, "eval_every": 1, "checkpoint_every": 1}
    pretrain = {"dataset": images(tmp_path / "little.npz", 32, 5, 1), "model_options": {**options, "patch_size": 8}}
    styles = {"dataset": images(tmp_path / "styles.npz", 64, 7, 2), "model_options": options}
    runs = {}
    for name in (depth.PRETRAINING, "alllarge", "fedra", "inclusivefl", "fedra_3"):
        config = depth.RUNS[name]
        own = pretrain if name == depth.PRETRAINING else styles
        limited = {"options": {"depths": (4, 2)}} if config.options.get("depths") == depth.DEPTHS else {}
        runs[name] = replace(config, **own, **changes, **limited)
    monkeypatch.setattr(depth, "DEPTHS", (4, 2))
    monkeypatch.setattr(depth, "RUNS", runs)
    item = small(monkeypatch, depth.ITEM, runs)
    main([depth.NAME, "--train", "--seeds", "1", "--out", str(tmp_path)])
    folder = tmp_path / depth.NAME
    assert made(folder) == {f"{name}-0" for name in runs}
    stored = weights.read(folder / depth.WEIGHTS)
    assert stored["head.weight"].shape == (7, 8)
    assert not stored["head.weight"].any()
    header, frame = rows.read(folder / "fedra-0.jsonl")
    assert header["about"]["config"]["init"] == depth.WEIGHTS
    assert set(frame.loc[frame["metric"] == "accuracy", "client"]) == {"photo", "sketch"}
    text = page(depth.NAME, tmp_path)
    assert "| fedra | 1 |" in text
    assert "open: alllarge lies above fedra" in text
    assert "- held: no client holds more blocks than its depth. Measured: at most fedra 4, 2; inclusivefl 4, 2" in text
    assert "FedRA learns with every k" in text
    assert "FedRA learns with every k. Measured: points gained: k = 3 " in page("fedra.fig4", tmp_path)
    (folder / depth.WEIGHTS).unlink()  # they are not kept with the rows, and made again when a run needs them
    pieces.train(item, folder, only=["fedra"], seeds=2, progress=False)
    again = weights.read(folder / depth.WEIGHTS)
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.items())
    assert made(folder) >= {"fedra-0", "fedra-1"}


def test_what_lacks_its_runs_after_a_part_was_trained_is_named_and_the_rest_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, there = tmp_path / depth.NAME, items.ROWS / depth.NAME
    own.mkdir()
    shutil.copy(pieces.piece(there, "allsmall", 0), own)
    monkeypatch.setattr(pieces, "train", lambda *_, **__: 0.0)
    main([depth.NAME, "--train", "--only", "allsmall", "--out", str(tmp_path)])
    assert "fedra.fig4 is not drawn yet: algorithms.pacs_depth has none of the runs" in capsys.readouterr().out
    assert (tmp_path / f"{depth.NAME}.png").is_file()
    with pytest.raises(SystemExit):
        main([depth.NAME, "--train", "--out", str(tmp_path)])
