"""Items that are kept run by run: tiny recipes run, resume, stop at their budget, are refused, and are drawn."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from figures import differences, items, learning, recipe
from figures.__main__ import main
from fl_core import rows, runner
from fl_core.algorithms import find, registry
from fl_core.algorithms.base import ALGORITHMS
from fl_core.algorithms.contract import make_config
from fl_core.errors import CorruptError, UsageError
from fl_core.recorder import Recorder
from tests.figures.conftest import TINY, made, page, small

RECIPES = {
    name: item
    for name, item in items.REGISTRY.items()
    if isinstance(item, recipe.Recipe)
}
pytestmark = pytest.mark.filterwarnings("ignore:client")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> recipe.Recipe:
    runs = {
        name: TINY.with_keys(algorithm=name, samples_per_client=None)
        for name in ("local", "fedavg", "fedper")
    }
    return small(monkeypatch, learning.ITEM, runs)


@pytest.mark.usefixtures("check")
def test_runs_are_made_once_and_a_partial_table_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / learning.NAME, ["--out", str(tmp_path)]
    main([learning.NAME, "--train", "--only", "local", "fedavg", "--seeds", "1", *out])
    assert made(folder) == {"local-0", "fedavg-0"}
    before = {path: path.read_bytes() for path in folder.iterdir()}
    text = page(learning.NAME, tmp_path)
    assert "of seed 0 fedper; of seed 1 all" in text
    assert "no order" in text
    assert re.search(r"personalised methods .*\| open \|", text)
    assert (
        f"{learning.NAME} --train --only local fedavg"
        in capsys.readouterr().out.replace(" --seeds 1", "")
    )
    main([learning.NAME, "--train", *out])
    assert made(folder) == {
        f"{name}-{seed}" for name in ("local", "fedavg", "fedper") for seed in (0, 1)
    }
    assert all(path.read_bytes() == kept for path, kept in before.items())
    assert "Missing" not in page(learning.NAME, tmp_path)
    for name in ("assemble", "run"):
        monkeypatch.setattr(runner, name, None)  # nothing is left to make
    main([learning.NAME, "--train", *out])


def test_stored_rows_are_small_and_resolve_to_the_run(
    check: recipe.Recipe, tmp_path: Path
) -> None:
    folder = tmp_path / learning.NAME
    recipe.train(
        check, folder, only=["fedper"], seeds=1, command="typed", progress=False
    )
    header, frame = rows.read(folder / "fedper-0.jsonl")
    assert (header["run"], header["seed"], header["command"]) == ("fedper", 0, "typed")
    assert "/" not in json.dumps(header["about"]["config"])
    final = frame[frame["metric"] == "accuracy"]
    assert set(final["model"]) == {"personal"}
    assert final["client"].nunique() == len(final) == 2
    engine = runner.run(
        check.runs["fedper"], instruments=recipe.measure.instruments(), progress=False
    )
    fresh = engine.listener(Recorder).frame()
    fresh = fresh[
        (fresh["metric"] == "accuracy")
        & (fresh["split"] == "test")
        & (fresh["model"] == "personal")
    ]
    assert final["value"].tolist() == fresh[fresh["round"] == 1]["value"].tolist()
    counted = frame[frame["model"] == ""].set_index(["metric", "variant"])["value"]
    assert counted[learning.STEPS] == np.mean(
        [math.ceil(n / 16) for n in final["n_train"]]
    )
    assert (
        counted[learning.WORK]
        == engine.listener(Recorder)
        .frame()
        .query("metric == 'flops' and variant == ''")["value"]
        .mean()
    )
    assert counted[learning.TUNING] == 0


def test_budget_stops_between_runs(
    check: recipe.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, clock = tmp_path / learning.NAME, [0.0]
    measure = check.measure

    def ten_minutes(*args: object) -> pd.DataFrame:
        clock[0] += 600
        return measure(*args)

    monkeypatch.setattr(recipe.time, "perf_counter", lambda: clock[0])
    slow = replace(check, measure=ten_minutes)
    recipe.train(slow, folder, budget=15, progress=False)
    assert made(folder) == {
        "local-0",
        "fedavg-0",
    }  # the second began at 10 of 15 minutes
    recipe.train(slow, folder, budget=5, progress=False)
    assert made(folder) == {
        "local-0",
        "fedavg-0",
        "fedper-0",
    }  # of local and fedavg 10 minutes are known
    with pytest.raises(UsageError, match="budget"):
        recipe.train(slow, folder, budget=0, progress=False)


def test_an_interrupted_run_leaves_nothing_and_the_others_stay(
    check: recipe.Recipe, tmp_path: Path
) -> None:
    folder = tmp_path / learning.NAME
    measure = check.measure

    def failing(task: runner.Task, run: str, to: Path) -> pd.DataFrame:
        if run == "fedavg":
            raise KeyboardInterrupt
        return measure(task, run, to)

    with pytest.raises(KeyboardInterrupt):
        recipe.train(replace(check, measure=failing), folder, progress=False)
    assert made(folder) == {"local-0"}


def test_a_diverged_run_is_kept_with_its_reason_and_the_others_go_on(
    check: recipe.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / learning.NAME
    runs = {**check.runs, "fedavg": check.runs["fedavg"].with_keys(lr=1e30, epochs=3)}
    item = small(monkeypatch, check, runs)
    recipe.train(item, folder, seeds=1, progress=False)
    assert made(folder) == {"local-0", "fedavg-0", "fedper-0"}
    _, frame = rows.read(folder / "fedavg-0.jsonl")
    assert frame["value"].isna().all()
    header, frame = item.read(folder)
    assert list(header["failed"]) == ["fedavg 0"]
    assert set(frame["run"]) == {"local", "fedper"}
    assert "fedavg 0" not in header["missing"]
    items.redraw(item, folder, tmp_path)
    assert ": fedavg, round 1" in page(learning.NAME, tmp_path)
    for name in ("local", "fedper"):
        recipe.rows_file(folder, name, 0).unlink()
    with pytest.raises(UsageError, match="finished"):
        item.read(folder)


def test_packed_runs_are_read_resumed_and_packed_again(
    check: recipe.Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, whole = tmp_path / learning.NAME, tmp_path / f"{learning.NAME}.parquet"
    pack = [learning.NAME, "--pack", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        main(pack)
    assert "to pack" in capsys.readouterr().err
    recipe.train(check, folder, only=["local", "fedavg"], progress=False)
    header, frame = check.read(folder)
    main(pack)
    assert whole.is_file()
    assert not folder.exists()
    first = whole.read_bytes()
    packed, same = check.read(folder)
    assert json.dumps(packed) == json.dumps(header)
    rounded = frame.assign(value=frame["value"].astype("float32").astype("float64"))
    pd.testing.assert_frame_equal(same, rounded, check_exact=True)
    recipe.train(check, folder, progress=False)
    assert made(folder) == {"fedper-0", "fedper-1"}, "packed runs are not trained again"
    pd.testing.assert_frame_equal(
        check.read(folder)[1].query("run != 'fedper'"), rounded, check_exact=True
    )
    main(pack)
    assert recipe.headers(folder).keys() == set(check.planned())
    recipe.packed_file(folder).write_bytes(first)
    main(pack)
    assert whole.read_bytes() == first
    other = replace(
        check, runs={**check.runs, "local": check.runs["local"].with_keys(lr=0.1)}
    )
    with pytest.raises(UsageError, match=r"\.parquet: local, seed 0, .* another lr"):
        recipe.train(other, folder, progress=False)


def test_a_default_that_rows_spell_out_is_the_same_configuration(
    check: recipe.Recipe, tmp_path: Path
) -> None:
    recipe.train(
        check,
        tmp_path / "rows",
        only=["local"],
        seeds=1,
        command="typed",
        progress=False,
    )
    for scale, same in (("none", True), ("standard", False)):
        changed = replace(
            check,
            runs={name: run.with_keys(scale=scale) for name, run in check.runs.items()},
        )
        with (
            nullcontext() if same else pytest.raises(UsageError, match="another scale")
        ):
            recipe.train(
                changed,
                tmp_path / "rows",
                only=["local"],
                seeds=1,
                command="typed",
                progress=False,
            )


def test_another_configuration_and_damaged_rows_are_refused(
    check: recipe.Recipe, tmp_path: Path
) -> None:
    folder = tmp_path / learning.NAME
    recipe.train(check, folder, only=["local"], seeds=1, progress=False)
    other = replace(
        check, runs={**check.runs, "local": check.runs["local"].with_keys(lr=0.1)}
    )
    with pytest.raises(UsageError, match=r"local-0.jsonl: .* another lr"):
        recipe.train(other, folder, progress=False)
    with pytest.raises(UsageError, match="mean 'fedper'"):
        recipe.train(check, folder, only=["fedpr"], progress=False)
    with pytest.raises(UsageError, match="at least 1"):
        recipe.train(check, folder, seeds=0, progress=False)
    with pytest.raises(UsageError, match="--train"):
        check.read(tmp_path)
    path = recipe.rows_file(folder, "local", 0)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(CorruptError, match="line"):
        check.read(folder)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_name_what_there_is(name: str) -> None:
    for config in (*RECIPES[name].runs.values(), *RECIPES[name].paper.values()):
        if config.federation.algorithm in registry():
            make_config(find(config.federation.algorithm), config.federation.options)
    assert RECIPES[name].planned(1) == [(run, 0) for run in RECIPES[name].runs]


def test_learning_check_has_every_algorithm_but_those_of_depth() -> None:
    checked = {config.federation.algorithm for config in learning.ITEM.runs.values()}
    own = set(ALGORITHMS.own)  # another test may have added one from outside
    assert checked & own == {name for name in own if not find(name).needs_blocks}


@pytest.mark.parametrize(
    ("value", "spread", "reference", "expected"),
    [
        *(
            (2, 1, 0, "above"),
            (-2, 1, 0, "below"),
            (1, 1, 0, "level"),
            (89.8, 0.7, 89.1, "level"),
        ),
        *((1, math.nan, 0, "above"), (1, 1, math.nan, "")),
    ],
)
def test_claim(value: float, spread: float, reference: float, expected: str) -> None:
    assert learning.claim(value, spread, reference) == expected


def test_outcome_and_verdicts() -> None:
    values = pd.DataFrame(
        {0: [0.1, 0.0], 1: [0.12, 0.0], 2: [0.11, 0.0]}, index=["x", "y"]
    )
    assert differences.outcome(*differences.against(values, "x", "y")) == "above"
    assert differences.outcome(*differences.against(values, "y", "x")) == "below"
    assert differences.outcome(*differences.against(values, "y", "y")) == "equal"
    assert differences.outcome(*differences.against(values.iloc[:, :2], "x", "y")) == ""
    assert differences.outcome(*differences.against(values, "x", "z")) == ""
    assert [learning.came_out("above", found) for found in ("above", "below", "undecided", "")] == [
        "yes", "no", "open", "open"
    ]  # fmt: skip
    assert learning.came_out("level", "above") == ""
    assert str(items.Finding("x", "y", None)).startswith("open: ")
