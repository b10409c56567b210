"""The whole loop on one dataset: what it leaves, what its report says, and that it goes on where it stopped."""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from fedlayers.studies.baselines import BASELINES
from fedlayers.studies.comparison import Comparison
from fedlayers.studies.first_screen import DECIDED, NOTHING, UNDECIDED, UNSHOWN
from fedlayers.studies.study import CHOSEN, OWN
from fl_core import rows
from fl_core.plan import LayerPlan
from fl_core.records import store
from tests.fedlayers import command

PICTURES = (
    *("answer", "clients_alone", "partition", "race"),
    *("comparison", "clients", "learning"),
)
RACED = "study --rounds 4 --seeds 2 --algorithms local fedavg --arms half all --out"


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    """A study of heart, made by the command line."""
    path = tmp_path_factory.mktemp("study") / "raced"
    plt.close("all")  # of other tests
    command(f"{RACED} {path}")
    return path


def files(folder):
    return {
        path: path.stat().st_mtime_ns
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def test_study_leaves_report_plan_runs_and_pictures(raced):
    pictures = {f"{name}.png" for name in PICTURES}
    named = {"report.html", "plan.json", "comparison", "race", *pictures}
    assert {path.name for path in raced.iterdir()} == named
    names = {path.name for path in (raced / "comparison").rglob("*-[01]")}
    assert names == {
        f"{name}-{seed}" for name in ("local", "fedavg") for seed in (0, 1)
    }
    for name in pictures:
        assert plt.imread(raced / name).std() > 0.01, f"{name} is blank"
    assert not plt.get_fignums(), "figures stay open"


def test_the_recommended_arm_and_each_seeds_own_winner_are_compared(raced):
    """The plan of all seeds together was chosen on some seeds' test samples, so each own winner stands apart."""
    kept = json.loads((raced / "race" / "choice.json").read_text())
    assert kept["verdict"] in (DECIDED, UNDECIDED, UNSHOWN, NOTHING)
    head = (raced / "report.html").read_text().split("<details>")[0]
    assert "What to do next" in head
    frame = rows.read(raced / "comparison" / "rows.jsonl")[1]
    assert set(frame["algorithm"]) == {CHOSEN, OWN, "local", "fedavg", *BASELINES}
    judged = pd.DataFrame(kept["judged"])
    judged = judged[~judged["arm"].isin(kept["refused"])]
    lines = judged.set_index("run")
    for seed, part in judged.groupby("seed"):
        won = part[part["arm"] == kept["winner"]]["run"].item()
        best = part.loc[part["score"].idxmax(), "run"]
        for name, run in ((CHOSEN, won), (OWN, best)):
            own = store.Run(raced / "race" / "arms" / run)
            assert own.rounds[-1] == 4
            theirs = frame[(frame["algorithm"] == name) & (frame["seed"] == seed)]
            values = own.rows()[1]["value"]
            if lines.loc[run, "epochs"]:  # the one point after them
                assert theirs["estimator"].str.contains("own epoch").all()
                assert theirs["round"].eq(4).all()
            else:
                assert theirs["value"].equals(values.set_axis(theirs.index))
    plan = LayerPlan.load(raced / "plan.json")
    assert (plan.why.rule, list(plan.why.race[2:])) == ("race", kept["answers"])


def test_report_needs_nothing_else_and_says_the_scores_and_how_it_was_made(raced):
    html = (raced / "report.html").read_text()
    assert html.count('src="data:image/png;base64,') == len(PICTURES)
    assert not re.search(r'(src|href)="(?!data:)', html)
    assert "http" not in re.sub(r'<meta http-equiv="[^>]*>', "", html)
    assert "<script" not in html
    table = Comparison(rows.read(raced / "comparison" / "rows.jsonl")[1]).table
    for line in table.itertuples():
        assert f"<td>{line.algorithm}</td>" in html
        assert f"{100 * line.macro_f1:.1f}\N{NO-BREAK SPACE}±" in html
    assert "fedlayers study --rounds 4 --seeds 2" in html
    assert "seeds: 0, 1" in html
    assert "nan" not in re.sub(r"base64,[^\"]*", "", html)


@pytest.mark.parametrize("changed", ["rounds", "lr"])
def test_another_configuration_is_refused_and_changes_nothing(raced, changed, capsys):
    before = files(raced)
    with pytest.raises(SystemExit) as end:
        command(f"{RACED.replace('--rounds 4', '')} {raced} --{changed} 3")
    assert end.value.code == 2
    assert f"--{changed} " in capsys.readouterr().err.splitlines()[-1]
    assert files(raced) == before
