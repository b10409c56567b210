"""The analysis of the study of depth, on made-up rows with a known truth."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from benchmarks.depth import FIRST, ONE, ROWS, jobs
from figures.decision import depth
from fl_core.statistics import holm
from tests.figures.conftest import check_picture

DOSE = {
    "cifar10": {100.0: 0.03, 0.5: 0.31, 0.1: 0.53},
    "pacs": {0.0: 0.0, 0.5: 0.38, 1.0: 0.75},
    "fashion": {0.0: 0.0, 30.0: 0.17, 90.0: 0.5},
    "isic": {0.0: 0.2},
}
COLUMN = {source: column for source, (_, _, column) in depth.DATA.items()}


def made_up(seed=0):
    """Rows of all jobs. The more clients differ, the fewer blocks are best; seeds and clients add noise."""
    draw, lines = np.random.default_rng(seed), []
    for job in jobs():
        amount = DOSE[job.source][job.dose]
        best = 18 - 20 * amount
        shared = {**depth.DEPTHS, "last 6": 6, "cosine": 12}.get(job.arm, 0)
        truth = 0.6 - 0.0005 * (shared - best) ** 2
        value = truth + draw.normal(0, 0.01)
        line = {
            **job._asdict(), "lr": job.lr or 1e-4, "device": "cpu", "seconds": 100.0, "rounds": 40.0, "best": 20.0,
            "labels": 0.0, "styles": 0.0, "turned": 0.0, "skew": amount if job.source == "cifar10" else 0.0,
            "validation_macro_f1": value, "validation_loss": 1 - value, "curve": [value] * 21,
        }  # fmt: skip
        line[COLUMN[job.source]] = amount
        if job.arm == ONE:
            names = [f"features.{k}" for k in range(19)]
            cosine = [
                ["grad_similarity", "cosine", None, name, 0.5 - amount]
                for name in names
            ]
            cosine[7][-1] = None
            line["measured"] = json.dumps(cosine)
        elif job.lr is None:
            line["test_macro_f1"] = list(value + draw.normal(0, 0.02, 4))
            if job.arm == "all":
                line["tuned_test_macro_f1"] = list(value + draw.normal(0.01, 0.02, 4))
        lines.append(line)
    rows = pd.DataFrame(lines)
    rows["measured"] = rows["measured"].str.replace("NaN", "null")
    return rows


@pytest.fixture(scope="module")
def rows():
    return made_up()


def test_the_registered_tests_are_those_of_plain_formulas(rows):
    equal, slope, order, rule = depth.confirmatory(rows)
    scored = rows[rows["seed"] != 90].itertuples()
    at = {(line.source, line.dose, line.seed, line.arm): line for line in scored}
    federations = [(source, dose) for source in DOSE for dose in DOSE[source]]

    def score(arm, seed=None):
        seeds = range(4) if seed is None else [seed]
        return [np.mean([np.mean(at[*f, s, arm].test_macro_f1) for s in seeds]) for f in federations]  # fmt: skip

    def error(values):
        of_source = np.split(np.array(values), [3, 6, 9])
        squares = sum(((own - own.mean()) ** 2).sum() for own in of_source)
        return np.sqrt(squares / 6 / 10)

    d = np.subtract(score("6"), score("last 6"))
    low, high = (d.mean() + 0.02) / error(d), (d.mean() - 0.02) / error(d)
    assert equal.p == pytest.approx(max(stats.t.sf(low, 6), stats.t.cdf(high, 6)))

    arms = ["0", "6", "12", "all"]
    best = np.argmax([score(arm) for arm in arms], axis=0) * 6
    z = [DOSE[s][d] / max(DOSE[s].values()) for s, d in federations]
    design = np.column_stack([z[:9], np.eye(3).repeat(3, axis=0)])
    found, (squares,), *_ = np.linalg.lstsq(design, best[:9].astype(float))
    deviation = np.sqrt(squares / 5 * np.linalg.inv(design.T @ design)[0, 0])
    assert slope.value == pytest.approx(found[0])
    assert slope.p == pytest.approx(2 * stats.t.sf(abs(found[0] / deviation), 5))
    assert slope.value < 0

    cosine = [0.5 - DOSE[s][d] for s, d in federations]
    gain = np.subtract(score("12"), score("6"))
    rho = stats.spearmanr(cosine, gain)
    assert order.value == pytest.approx(rho.statistic)
    assert order.p == pytest.approx(rho.pvalue, abs=0.01)

    lost = []
    for seed in range(4):
        for k, f in enumerate(federations):
            ruled = "all" if at[*f, seed, "0"].skew < 0.05 else "12"
            raced = max(arms, key=lambda arm: at[*f, seed, arm].validation_macro_f1)
            lost.append(score(ruled, seed)[k] - score(raced, seed)[k])
    mean = np.mean(np.reshape(lost, (4, 10)), axis=0)
    assert rule.p == pytest.approx(stats.t.sf((mean.mean() + 0.015) / error(mean), 6))

    told = depth.findings(rows)
    adjusted = holm([equal.p, slope.p, order.p, rule.p])
    assert [each.held for each in told] == [True if p <= 0.05 else None for p in adjusted]  # fmt: skip


def test_a_difference_at_the_margin_is_called_equal_in_a_twentieth():
    draw = np.random.default_rng(0)
    places = pd.MultiIndex.from_tuples(
        [(s, d) for s in DOSE for d in DOSE[s]], names=depth.FEDERATION
    )
    effects = pd.Series(places.get_level_values(0)).map({"cifar10": 1, "pacs": -1}).fillna(0)  # fmt: skip
    p, harm = [], []
    for _ in range(400):
        values = pd.Series(
            0.005 * effects.to_numpy() + draw.normal(0, 0.02, 10), places
        )
        p.append(depth.equality(values + depth.EQUAL).p)
        harm.append(depth.harmlessness(values - depth.WORSE).p)
    for each in (p, harm):
        assert 0.025 < np.mean(np.array(each) <= 0.05) < 0.08
    same = pd.Series(0.0, places)
    assert depth.harmlessness(same).p == 0
    assert depth.dose_slope(same + 6, pd.Series(range(10), places)).p == 1


def test_of_equal_arms_the_race_takes_the_lower_loss(rows):
    even = rows.assign(validation_macro_f1=0.5, validation_loss=1.0)
    even.loc[even["arm"] == "12", "validation_loss"] = 0.9
    assert set(depth.choices(even)["race"]) == {"12"}


def test_without_the_last_seed_there_are_counts_alone(rows):
    last = rows.index[(rows["seed"] == 3) & rows["arm"].isin(FIRST)][-1]
    fewer = rows.drop(index=last)
    drawing = depth.draw({}, fewer)
    assert drawing.findings == ()
    assert drawing.figure is None
    assert "543 of 544" in drawing.lead
    assert "59 of 60 rows" in drawing.text
    assert "P4. A rule by label skew is not worse than a race by 1.5 points | not yet" in drawing.text  # fmt: skip
    over = fewer.assign(seconds=1000.0)
    assert depth.decided(over)
    assert len(depth.draw({}, over).findings) == 4
    assert "seeds are 0, 1, 2." in depth.draw({}, over).text


def test_a_run_that_diverged_has_nothing_and_is_named(rows):
    place = rows.index[(rows["arm"] == "6") & (rows["seed"] == 1)][0]
    rows = rows.astype({"test_macro_f1": object})
    rows.loc[place, ["test_macro_f1", "device", "rounds", "lr"]] = None
    at = tuple(rows.loc[place, depth.KEYS])
    assert depth.scores(rows).loc[at, "6"] == 0
    assert "diverged: cifar10 6." in depth.draw({}, rows).text


@pytest.mark.parametrize("later", [True, False])
def test_the_picture_has_a_panel_for_each_source_with_or_without_later_arms(
    rows, later, tmp_path
):
    some = rows if later else rows.iloc[: depth.FIRST_JOBS]
    drawing = depth.draw({}, some)
    assert [len(ax.lines) for ax in drawing.figure.axes] == [8, 8, 8, 4]
    drawing.figure.savefig(tmp_path / "depth.png")
    check_picture(tmp_path / "depth.png")
    assert ("| cosine | 40 |" in drawing.text) == later


def test_the_folder_of_the_data_explains_every_column():
    readme = (ROWS.parent / "depth_data" / "README.md").read_text()
    cells = [line.split("|")[1] for line in readme.splitlines() if line[:3] == "| `"]
    named = re.findall(r"`(\w+)`", " ".join(cells))
    assert named == list(pd.read_parquet(ROWS).columns)
