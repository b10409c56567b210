"""The whole loop on one dataset: what it leaves, what its report says, and that it goes on where it stopped."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from diagnostics.decide import select
from diagnostics.decide.evidence import in_words
from diagnostics.report import Report
from fedlayers.studies.baselines import BASELINES
from fedlayers.studies.comparison import Comparison
from fedlayers.studies.inference import VERDICTS
from fedlayers.studies.study import CHOSEN, NULLS, OWN, study
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.plan import LayerPlan
from fl_core.records import store
from tests.fedlayers import command

NAMES = ("local", "fedavg", "fedbabu", "playerfl", "playerfl_random")
PICTURES = (
    *(
        "partition",
        "grad_variance",
        "hessian_trace",
        "cka",
        "federation_sensitivity",
        "cka_matrices",
        "plan",
    ),
    *("comparison", "clients", "learning"),
)


RULED = "study --rounds 2 --seeds 2 --rule sensitivity_ratio --out"
RACED = "study --rounds 4 --seeds 2 --algorithms local fedavg --out"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A study of heart that a rule decides, made by the command line."""
    path = tmp_path_factory.mktemp("study") / "heart"
    plt.close("all")  # of other tests
    command(f"{RULED} {path}")
    return path


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    """A study of heart that a race decides, as it is by default, made by the command line."""
    path = tmp_path_factory.mktemp("study") / "raced"
    command(f"{RACED} {path}")
    return path


@pytest.fixture(scope="module")
def html(out):
    return (out / "report.html").read_text()


def files(folder):
    return {
        path: path.stat().st_mtime_ns
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def test_study_leaves_report_rows_plan_runs_and_pictures(out):
    named = {
        "report.html",
        "rows.jsonl",
        "plan.json",
        "comparison",
        *(f"{name}.png" for name in PICTURES),
    }
    assert {path.name for path in out.iterdir()} == named
    assert {p.name for p in (out / "comparison").iterdir()} == {
        "runs",
        "rows.jsonl",
        "table.csv",
    }
    assert {p.name for p in (out / "comparison" / "runs").iterdir()} == {
        f"{n}-{s}" for n in NAMES for s in (0, 1)
    }
    for name in PICTURES:
        assert plt.imread(out / f"{name}.png").std() > 0.01, f"{name} is blank"
    assert not plt.get_fignums(), "figures stay open"


def test_rows_give_the_plan(out):
    report = Report.read(out / "rows.jsonl")
    assert set(report.frame["metric"]) == {
        "grad_variance",
        "hessian_trace",
        "cka",
        "federation_sensitivity",
    }
    assert report.header["command"].startswith("fedlayers study --rounds 2")
    plan = LayerPlan.load(out / "plan.json")
    assert select.select(out / "rows.jsonl") == plan
    assert plan.why.variant == "training"
    assert set(plan.why.detail["null"]) == set(NULLS)


def test_every_run_decides_on_its_own_seed_and_the_first_as_the_study_does(out):
    """The plan of another seed would have seen test samples of this one."""
    runs = out / "comparison" / "runs"
    theirs, ours = (
        LayerPlan.load(runs / "playerfl-0" / "plan.json"),
        LayerPlan.load(out / "plan.json"),
    )
    assert (theirs.shared, theirs.why.values) == (ours.shared, ours.why.values)
    for seed in (0, 1):
        config = {name: store.Run(runs / f"{name}-{seed}").config for name in NAMES}
        assert (
            config["playerfl"]["given"]
            is config["playerfl_random"]["given"]
            is config["local"]["given"]
            is None
        )
        assert (
            LayerPlan.from_json(config["fedbabu"]["given"]).why.rule == "all_but_last"
        )
        own = LayerPlan.load(runs / f"playerfl-{seed}" / "plan.json")
        drawn = LayerPlan.load(runs / f"playerfl_random-{seed}" / "plan.json")
        assert own.why.seed == drawn.why.seed == seed
        assert own.why.values == drawn.why.values
        assert own.shared != drawn.shared
        kept = (
            store.Run(runs / f"playerfl-{seed}")
            .checkpoint()
            .clients["va"]
            .trees["model"]
        )
        assert set(kept) == own.head_tensors


@pytest.mark.slow
def test_the_recommended_arm_and_each_seeds_own_winner_are_compared(raced):
    """The plan of all seeds together was chosen on some seeds' test samples, so each own winner stands apart."""
    kept = json.loads((raced / "race" / "choice.json").read_text())
    assert kept["verdict"] in VERDICTS
    head = (raced / "report.html").read_text().split("<h2>")[0]
    assert head.count("<li>") >= 2
    frame = rows.read(raced / "comparison" / "rows.jsonl")[1]
    assert set(frame["algorithm"]) == {CHOSEN, OWN, "local", "fedavg", *BASELINES}
    judged = pd.DataFrame(kept["judged"])
    judged = judged[~judged["arm"].isin(kept["refused"])]
    for seed, part in judged.groupby("seed"):
        won = part[part["arm"] == kept["winner"]]["run"].item()
        best = part.loc[part["score"].idxmax(), "run"]
        for name, run in ((CHOSEN, won), (OWN, best)):
            own = store.Run(raced / "race" / "arms" / run)
            assert own.rounds[-1] == 4
            theirs = frame[(frame["algorithm"] == name) & (frame["seed"] == seed)]
            assert theirs["value"].equals(own.rows()[1]["value"].set_axis(theirs.index))
    plan = LayerPlan.load(raced / "plan.json")
    assert (plan.why.rule, plan.why.race.verdict) == ("race", kept["verdict"])


def test_report_needs_nothing_else(html):
    assert html.count('src="data:image/png;base64,') == len(PICTURES)
    assert not re.search(r'(src|href)="(?!data:)', html)
    assert "http" not in re.sub(r'<meta http-equiv="[^>]*>', "", html)
    assert "<script" not in html


def test_report_says_the_decision_the_scores_and_how_it_was_made(out, html):
    plan = LayerPlan.load(out / "plan.json")
    head = html[: html.index("<h2>")]
    assert f"federate {', '.join(plan.shared)}; keep" in head.lower()
    assert "permuted labels" in head
    for note in in_words(
        plan.why.detail["null"], plan.why.variant, full=True
    ).splitlines()[1:]:
        assert escape(note.strip(), quote=True) in html
    table = Comparison(rows.read(out / "comparison" / "rows.jsonl")[1]).table
    for line in table.itertuples():
        assert f"<td>{line.algorithm}</td>" in html
        assert f"{100 * line.macro_f1:.1f}\N{NO-BREAK SPACE}±" in html
    assert "fedlayers study --rounds 2 --seeds 2" in html
    assert plan.digest[:16] in html
    assert "seeds: 0, 1" in html
    assert "nan" not in re.sub(r"base64,[^\"]*", "", html)


@pytest.mark.slow
def test_what_could_not_be_measured_is_in_the_report_with_its_reason(tmp_path):
    """One client has nobody to be compared with."""
    config = RunConfig(dataset="digits", max_samples=200, clients=1, rounds=1)
    found = study(config, ("fedper", "playerfl"), (0,), tmp_path, progress=False)
    html = found.page.read_text()
    missing = found.report.frame[found.report.frame["status"] != "ok"]
    assert set(missing["metric"]) == {"cka"}
    assert "could not be computed" in html
    assert missing["status"].iloc[0] in html
    assert "no interval" in html
    assert not (tmp_path / "cka_matrices.png").exists()


@pytest.mark.parametrize("changed", ["rounds", "threshold", "lr"])
def test_another_configuration_is_refused_and_changes_nothing(out, changed, capsys):
    before = files(out)
    with pytest.raises(SystemExit) as end:
        command(f"{RULED} {out} --{changed} 3")
    assert end.value.code == 2
    assert f" {changed}=" in capsys.readouterr().err.splitlines()[-1]
    assert files(out) == before
