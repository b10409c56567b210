"""The tuned and finished study: what was run, and the arithmetic of regret on simulated rows."""

import re
from itertools import product

import pandas as pd
import pytest

from figures.__main__ import main
from figures.decision import finished, finished_regret, finished_ways
from figures.decision.finished import (
    CUTS,
    DECISION,
    DITTO,
    FORGETFUL,
    MAIN_CUT,
    PERSONALISED,
    RESTARTS,
    STUDY,
)
from figures.decision.finished_ways import RANDOM

pytestmark = pytest.mark.filterwarnings("ignore:client")
NAMES = ("nothing", "quarter", "half", MAIN_CUT, "all")


# --- the plan --------------------------------------------------------------------------------------------------


def test_its_rows_are_all_there_and_nothing_trains_it_again(tmp_path, capsys):
    header, _ = finished.ITEM.read(finished.ITEM.path())
    assert header["missing"] == []
    with pytest.raises(SystemExit):
        main(
            [
                finished.NAME,
                "--train",
                "--only",
                "chile@0.003+ditto",
                "--out",
                str(tmp_path),
            ]
        )
    assert re.search(
        r"decision\.finished .*stored rows.*Commit [0-9a-f]{8} has",
        capsys.readouterr().err,
    )


# --- regret on simulated rows ----------------------------------------------------------------------------------


def simulated():
    """Packed rows in which a score is ``plain(cut, rate)``, in two clients of unequal size."""
    lines = []
    for name, seed in product(("chile", "smoking", "loans"), range(3)):
        for job in finished.jobs(name):
            place = STUDY[name].rates.index(job.config.training.lr)
            variants = {
                RESTARTS: ["start 1", "start 2", "start 3"],
                DITTO: [DITTO],
            }.get(job.kind, list(NAMES))
            ends = [(job.kind, variant) for variant in variants]
            ends += [(PERSONALISED, "1 epochs")] if job.kind == CUTS else []
            for kind, variant in ends:
                about = {
                    "run": job.name,
                    "seed": seed,
                    "variant": variant,
                    "estimator": kind,
                }
                cut = variant if variant in NAMES else MAIN_CUT
                lines.append({**about, "metric": "stopped after", "value": 40.0})
                if kind in (CUTS, FORGETFUL):
                    lines.append(
                        {
                            **about,
                            "metric": "shared layers",
                            "value": float(NAMES.index(variant)),
                        }
                    )
                for split in ("validation", "held_out"):
                    value = plain(cut, place)
                    for client, step, n_train in (("a", 0.3, 10), ("b", -0.1, 30)):
                        own = {
                            "client": client,
                            "n_train": n_train,
                            "split": split,
                            "metric": "macro_f1",
                        }
                        lines.append({**about, **own, "value": value + step})
            if (
                job.kind == CUTS
                and job.config.training.lr == STUDY[name].config.training.lr
            ):
                about = {
                    "run": job.name,
                    "seed": seed,
                    "variant": "sensitivity_ratio",
                    "estimator": "",
                }
                lines.append({**about, "metric": DECISION, "value": 2.0})
    return pd.DataFrame(lines)


LEVEL = {"nothing": 0.4, "quarter": 0.5, "half": 0.6, MAIN_CUT: 0.7, "all": 0.3}


def plain(cut, rate):
    """The main cut is best, and the third rate by a tenth."""
    return LEVEL[cut] + 0.1 * (rate == 2)


def test_regrets_of_known_scores_are_exact():
    parts = finished_ways.parts_of(simulated())
    assert [part.name for part in parts] == [
        "smoking",
        "chile",
        "loans",
    ]  # in the study's order
    assert parts[0].cuts.held_out[0, 3] == pytest.approx([0.7, 0.7, 0.8, 0.7])
    table = finished_regret.table(parts).set_index("way")
    expected = {
        RANDOM: 0.1, "mean of all cuts": 0.2, "nothing": 0.3, "half": 0.1, MAIN_CUT: 0.0, "all": 0.4,
        f"{MAIN_CUT}, rate not tuned": 0.1, "sensitivity_ratio": 0.1, "its network's usual cut": 0.1,
        "race of four, tuned": 0.0, "race of four, tuned: its plan": 0.0, "four cuts, one rate": 0.1,
        "four rates, one cut": 0.0, "four starts, one cut": 0.1, "every cut at every rate": 0.0,
        **dict.fromkeys(finished_regret.LATER, 0.0),
    }  # fmt: skip
    assert table["regret"].to_dict() == pytest.approx(expected)
    assert table.loc["all", "share"] == pytest.approx(4)
    assert table.loc["all", ["above", "below", "p"]].tolist() == [3, 0, 0.25]
    assert table.loc[MAIN_CUT, ["above", "below"]].tolist() == [0, 3]
    worth = finished_regret.worth(parts).set_index("what")["gain"]
    assert worth.tolist() == pytest.approx([0.1, 0, 0.1, 0, 0, 0, 0, 0, 0, 0])
    main = finished_regret.compared(parts, finished_regret.MAIN_COMPARISONS)
    assert main["gain"].tolist() == pytest.approx([0.1, 0, 0.1, 0.1])
    assert main[["above", "below"]].iloc[0].tolist() == [3, 0]
    assert set(finished_regret.winners(parts)["best"]) == {MAIN_CUT}
    assert set(finished_regret.winners(parts)["rate"]) == {1e-2}
    assert finished_regret.at_edge(parts) == 0
    costs = finished_regret.costs(parts).iloc[
        0
    ]  # every simulated run stops after as many rounds
    assert costs.to_dict() == {
        f"{MAIN_CUT}, rate not tuned": 1, MAIN_CUT: 5, "race of four, tuned": 20, "four cuts, one rate": 4,
        "four rates, one cut": 4, "four starts, one cut": 4, "every cut at every rate": 20,
        "four rates, then cuts at the best": 7, "four rates, then cuts at the best two": 10,
    }  # fmt: skip
    assert finished_regret.unstopped(parts) == 0
