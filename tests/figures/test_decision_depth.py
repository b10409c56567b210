"""The analysis of the study of depth, on made-up rows with a known truth."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from figures.decision import depth
from figures.decision.depth import DOSES, FIRST, ONE, ROWS, jobs
from tests.figures.conftest import check_picture

AMOUNTS = dict(zip(
    [(source, dose) for source, doses in DOSES.items() for dose in doses],
    [0.31, 0.03, 0.53, 0.38, 0.0, 0.75, 0.17, 0.0, 0.5, 0.2], strict=True,
))  # fmt: skip
PLACES = pd.MultiIndex.from_tuples(AMOUNTS, names=depth.FEDERATION)


@pytest.fixture(scope="module")
def rows():
    """Rows of all jobs. The more clients differ, the fewer blocks are best; seeds and clients add noise."""
    draw, lines = np.random.default_rng(0), []
    for job in jobs():
        amount = AMOUNTS[job.source, job.dose]
        shared = {**depth.DEPTHS, "last 6": 6, "cosine": 12}.get(job.arm, 0)
        value = 0.6 - 0.0005 * (shared - 18 + 20 * amount) ** 2 + draw.normal(0, 0.01)
        line = {
            **job._asdict(), "lr": job.lr or 1e-4, "device": "cpu", "seconds": 100.0, "rounds": 40.0, "best": 20.0,
            **dict.fromkeys(["labels", "styles", "turned"], amount), "skew": amount * (job.source == "cifar10"),
            "validation_macro_f1": value, "validation_loss": 1 - value, "curve": [value] * 21,
        }  # fmt: skip
        if job.arm == ONE:
            about = ["grad_similarity", "cosine", None]
            cosines = [[*about, f"features.{k}", 0.5 - amount] for k in range(8, 19)]
            line["measured"] = json.dumps([[*about, "features.7", None], *cosines])
        elif job.lr is None:
            line["test_macro_f1"] = list(value + draw.normal(0, 0.02, 4))
            line["tuned_test_macro_f1"] = line["test_macro_f1"]
        lines.append(line)
    return pd.DataFrame(lines)


def test_the_registered_tests_are_those_of_plain_formulas(rows):
    equal, slope, order, rule = depth.confirmatory(rows)
    amounts = np.array(list(AMOUNTS.values()))
    scored = rows[rows["test_macro_f1"].notna()]

    def table(column, arm):  # federations x seeds
        values = scored.loc[scored["arm"] == arm, column].map(np.mean)
        return values.to_numpy().reshape(4, 10).T

    score = {arm: table("test_macro_f1", arm) for arm in FIRST}
    mean = {arm: values.mean(axis=1) for arm, values in score.items()}

    def error(values):
        parts = np.split(values, [3, 6, 9])
        return np.sqrt(sum(part.var() * len(part) for part in parts) / 6 / 10)

    d = mean["6"] - mean["last 6"]
    low, high = (d.mean() + 0.02) / error(d), (d.mean() - 0.02) / error(d)
    assert equal.p == pytest.approx(max(stats.t.sf(low, 6), stats.t.cdf(high, 6)))

    best = np.argmax([mean[arm] for arm in depth.RACE], axis=0)[:9] * 6.0
    dose = amounts[:9].reshape(3, 3)
    z = (dose / dose.max(axis=1, keepdims=True)).ravel()
    design = np.column_stack([z, np.eye(3).repeat(3, axis=0)])
    found, (squares,), *_ = np.linalg.lstsq(design, best)
    deviation = np.sqrt(squares / 5 * np.linalg.inv(design.T @ design)[0, 0])
    assert slope.value == pytest.approx(found[0])
    assert slope.p == pytest.approx(2 * stats.t.sf(-found[0] / deviation, 5))

    rho = stats.spearmanr(amounts, mean["6"] - mean["12"])
    assert order.value == pytest.approx(rho.statistic)
    assert order.p == pytest.approx(rho.pvalue, abs=0.01)

    raced = np.argmax([table("validation_macro_f1", arm) for arm in depth.RACE], axis=0)
    won = np.choose(raced, [score[arm] for arm in depth.RACE])
    skewed = (np.arange(10) < 3) & (amounts > 0.05)
    d = (np.where(skewed[:, None], score["12"], score["all"]) - won).mean(axis=1)
    assert rule.p == pytest.approx(stats.t.sf((d.mean() + 0.015) / error(d), 6))

    held = [each.held for each in depth.findings(rows)]
    adjusted = depth.holm([equal.p, slope.p, order.p, rule.p])
    assert held == [True if p <= 0.05 else None for p in adjusted]


def test_a_difference_at_the_margin_is_called_equal_in_a_twentieth():
    draw = np.random.default_rng(0)
    p = []
    for _ in range(400):
        noise = pd.Series(np.repeat([0, 1, 2, 3], [3, 3, 3, 1]) * 0.01, PLACES)
        noise += draw.normal(-noise.mean(), 0.02, 10)
        margins = noise + depth.EQUAL, noise - depth.WORSE
        p.append((depth.equality(margins[0]).p, depth.harmlessness(margins[1]).p))
    assert np.mean(np.array(p) <= 0.05, axis=0) == pytest.approx(0.05, abs=0.03)
    same = pd.Series(0.0, PLACES)
    assert depth.harmlessness(same).p == 0
    assert depth.dose_slope(same + 6, pd.Series(AMOUNTS.values(), PLACES)).p == 1


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
    assert depth.scores(rows).loc[tuple(rows.loc[place, depth.KEYS]), "6"] == 0
    assert "diverged: cifar10 6." in depth.draw({}, rows).text


def test_the_picture_has_a_panel_for_each_source_without_later_arms(rows, tmp_path):
    drawing = depth.draw({}, rows.iloc[: depth.FIRST_JOBS])
    assert [len(ax.lines) for ax in drawing.figure.axes] == [8, 8, 8, 4]
    drawing.figure.savefig(tmp_path / "depth.png", dpi=90)
    check_picture(tmp_path / "depth.png")


def test_the_folder_of_the_data_explains_every_column():
    readme = (ROWS.parent / "depth_data" / "README.md").read_text()
    cells = [line.split("|")[1] for line in readme.splitlines() if line[:3] == "| `"]
    named = re.findall(r"`(\w+)`", " ".join(cells))
    assert named == list(pd.read_parquet(ROWS).columns)
