"""Analyse and draw the study of depth: how many blocks to share, and whether the first round can see it.

``REGISTERED_DEPTH.md`` defines the four tests and when a verdict may be drawn. :data:`RUNS` made the rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from diagnostics.plots.drawing import COLOURS, MARKERS, style
from figures import items
from figures.drawing import Drawing, Finding
from figures.page import markdown, numbers, percent
from fl_core.config import RunConfig
from fl_core.errors import CorruptError, UsageError
from fl_core.statistics import holm, mean_interval

ROWS = Path(__file__).with_name("depth.parquet")
RUNS = "figures/decision/depth_runs.py of commit e377e6b5"
"""What made the rows."""
CLIENTS, TRAIN, VALIDATION = 4, 160, 80
DOSES: dict[str, tuple[float, ...]] = {
    "cifar10": (0.5, 100.0, 0.1),
    "pacs": (0.5, 0.0, 1.0),
    "fashion": (30.0, 0.0, 90.0),
    "isic": (0.0,),
}
"""Of each source the middle dose first: alpha, the share of pictures in the client's own style, degrees."""
RATES, HEAD_RATES = (0.00003, 0.0001, 0.0003), (0.0003, 0.001, 0.003, 0.01)
TUNING, SEEDS = 90, (0, 1, 2, 3)
HEADS = ("head", "shared head")
"""A classifier on frozen features, local or shared. The others are arms."""
FIRST = ("0", "6", "12", "all", "last 6")
LATER = ("3", "9", "15", "cosine")
ONE = "one round"
"""The clients' models after the first round, measured. They are the same in all arms of a rate."""
SECONDS = 40 * 3600
"""Processor time after which no further job began."""
DATA = {
    "cifar10": ("cifar10", "CIFAR-10, classes", "labels"),
    "pacs": ("pacs", "PACS, styles", "styles"),
    "fashion": ("fashion_mnist", "Fashion-MNIST, turned", "turned"),
    "isic": ("fed_isic", "Fed-ISIC, hospitals", "labels"),
}
"""Of each source its data set, its title, and the column of its measured dose."""
DEPTHS = {"0": 0, "3": 3, "6": 6, "9": 9, "12": 12, "15": 15, "all": 18}
"""Shared blocks of an arm. The head is the last one."""
RACE = ("0", "6", "12", "all")
MARKS = {"last 6": 21, "cosine": 23}
"""Arms that are no first blocks, and where the picture has them."""
TUNED = "all, fine-tuned"
BLOCKS = [f"features.{k}" for k in range(7, 13)]
FEDERATION, KEYS = ["source", "dose"], ["source", "dose", "seed"]
SKEW, EQUAL, WORSE, ALPHA = 0.05, 0.02, 0.015, 0.05
PERMUTATIONS = 10_000
GAP_AT = 5
"""The place of round 10 on a curve, which has every second round from 0 on."""
FIRST_JOBS = 332
"""Jobs up to the last seed of the first arms."""
HYPOTHESES = (
    "P1. The first 6 and the last 6 blocks are worth the same, within 2 points",
    "P2. The best depth falls or rises with the dose",
    "P3. The gradient cosine of round 1 orders what deeper sharing gains",
    "P4. A rule by label skew is not worse than a race by 1.5 points",
)


# --- rows ------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """A run: its federation, its arm, its seed and its rate. Without a rate it has the tuned one."""

    source: str
    dose: float
    arm: str
    seed: int
    lr: float | None = None


def jobs() -> Iterator[Job]:
    """Yield all jobs in the order of the registration."""
    middle = [(source, doses[0]) for source, doses in DOSES.items()]
    every = [(source, dose) for source, doses in DOSES.items() for dose in doses]
    for arms in (HEADS, FIRST, LATER):
        rates = HEAD_RATES if arms is HEADS else RATES
        for at in middle:
            if arms is LATER:
                yield Job(*at, ONE, TUNING)
            yield from (Job(*at, arm, TUNING, lr) for arm in arms for lr in rates)
        for seed in SEEDS if arms is not HEADS else ():
            for at in every:
                for arm in (ONE, *arms) if arms is FIRST else arms:
                    yield Job(*at, arm, seed)


def stored(rows: pd.DataFrame) -> set[Job]:
    """Return the jobs with a row. A rate stands in those of several rates only."""
    its = {Job(*row) for row in rows[list(Job._fields)].itertuples(index=False)}
    several = {job for job in jobs() if job.lr}
    return {job if job in several else job._replace(lr=None) for job in its}


def whole_seeds(rows: pd.DataFrame) -> list[int]:
    """Return the scored seeds that have every row of the first arms."""
    done = stored(rows)
    lacking = {
        job.seed for job in jobs() if job.arm in (ONE, *FIRST) and job not in done
    }
    return [seed for seed in SEEDS if seed not in lacking]


def decided(rows: pd.DataFrame) -> bool:
    """Return whether a verdict may be drawn: the first arms are done, or the hours are over."""
    seeds = whole_seeds(rows)
    return len(seeds) == len(SEEDS) or (bool(seeds) and rows["seconds"].sum() > SECONDS)


def scores(rows: pd.DataFrame) -> pd.DataFrame:
    """Return macro-F1 on test samples, the mean over clients: a line for each federation and seed, a column an arm.

    A run that diverged has 0. A seed without a row of an arm is NaN, and an arm without any row has no column.
    ``all, fine-tuned`` is of the row of ``all``.
    """
    arms = [*DEPTHS, *MARKS]
    its = rows[rows["arm"].isin(arms) & (rows["seed"] != TUNING)].set_index(KEYS)

    def mean(column: str) -> pd.Series[float]:
        return its[column].map(np.mean, na_action="ignore").astype(float).fillna(0.0)

    found = its.assign(score=mean("test_macro_f1"))
    wide = found.pivot(columns="arm", values="score")
    wide = wide[[arm for arm in arms if arm in wide]]
    return wide.assign(**{TUNED: mean("tuned_test_macro_f1")[its["arm"] == "all"]})


def doses(rows: pd.DataFrame) -> pd.Series[float]:
    """Return the measured dose of each federation."""
    means = rows.groupby(FEDERATION)[["labels", "styles", "turned"]].mean()
    values = {at: line[DATA[at[0]][2]] for at, line in means.iterrows()}
    return pd.Series(values).rename_axis(FEDERATION)


def measured(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the metrics of round 1, means over blocks 7 to 12: a line a federation and seed, a column a metric.

    The disagreement of outputs has one value, of the head.
    """
    lines = []
    for _, line in rows[(rows["arm"] == ONE) & (rows["seed"] != TUNING)].iterrows():
        names = ["metric", "variant", "round", "layer", "value"]
        found = pd.DataFrame(json.loads(line["measured"]), columns=names)
        inner = found["layer"].isin(BLOCKS) | (found["metric"] == "output_disagreement")
        name = found["metric"] + ", " + found["variant"]
        means = found[inner].groupby(name)["value"].mean()
        lines.append({**line[KEYS], **means})
    return pd.DataFrame(lines).set_index(KEYS)


def per_federation(values: Any) -> Any:
    """Return the means over seeds."""
    return values.groupby(FEDERATION).mean()


def choices(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the arms that the rule and the race take, a line for each federation and seed."""
    its = rows[rows["arm"].isin(RACE) & (rows["seed"] != TUNING)]
    order = ["validation_macro_f1", "validation_loss"]
    best = its.sort_values(order, ascending=[False, True]).groupby(KEYS)["arm"].first()
    skew = its.groupby(KEYS)["skew"].first()
    return pd.DataFrame({"rule": np.where(skew < SKEW, "all", "12"), "race": best})


# --- the registered tests --------------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """A value with its standard error, degrees of freedom and p."""

    value: float
    error: float
    freedom: int
    p: float

    @property
    def half(self) -> float:
        """Return half the width of a 95 % interval."""
        return float(stats.t.ppf(0.975, self.freedom) * self.error)


def beyond(distance: float, error: float, freedom: int) -> float:
    """Return the one-sided p of a distance above 0 by Student's t."""
    return float(stats.t.sf(distance / error, freedom)) if error else float(distance <= 0)  # fmt: skip


def centred(values: pd.Series[float]) -> pd.Series[float]:
    """Return the residuals of federations from the means of their sources."""
    return values - values.groupby("source").transform("mean")


def mean_difference(values: pd.Series[float]) -> tuple[float, float, int]:
    """Return the mean over federations, its standard error from residuals, and n - S degrees of freedom."""
    freedom = len(values) - values.index.unique("source").size
    error = np.sqrt((centred(values) ** 2).sum() / freedom / len(values))
    return float(values.mean()), float(error), freedom


def equality(difference: pd.Series[float]) -> Estimate:
    """Return P1: two one-sided tests of a mean within :data:`EQUAL`; the larger p."""
    found = mean_difference(difference)
    return Estimate(*found, beyond(EQUAL - abs(found[0]), *found[1:]))


def dose_slope(depth: pd.Series[float], dose: pd.Series[float]) -> Estimate:
    """Return P2: the slope of the best depth on the dose, in blocks from 0 to the largest dose of a source."""
    several = depth.groupby("source").transform("size") > 1
    share = dose / dose.groupby("source").transform("max")
    x, y = centred(share[several]), centred(depth[several])
    value = (x * y).sum() / (x**2).sum()
    freedom = len(x) - x.index.unique("source").size - 1
    error = np.sqrt(((y - value * x) ** 2).sum() / freedom / (x**2).sum())
    p = min(1.0, 2 * beyond(abs(value), error, freedom))
    return Estimate(float(value), float(error), freedom, p)


def rank_correlation(x: pd.Series[float], y: pd.Series[float]) -> Estimate:
    """Return P3: Spearman's correlation, with its two-sided p by permutations of federations."""
    a, b = (stats.zscore(stats.rankdata(each)) for each in (x, y))
    draw = np.random.default_rng(0)
    drawn = draw.permuted(np.tile(b, (PERMUTATIONS, 1)), axis=1) @ a / len(a)
    value = float(a @ b / len(a))
    extreme = (abs(drawn) >= abs(value) - 1e-9).sum()
    return Estimate(value, np.nan, len(a) - 2, float(1 + extreme) / (1 + PERMUTATIONS))


def harmlessness(difference: pd.Series[float]) -> Estimate:
    """Return P4: a one-sided test of a mean above minus :data:`WORSE`."""
    found = mean_difference(difference)
    return Estimate(*found, beyond(found[0] + WORSE, *found[1:]))


def best_depth(score: pd.DataFrame, arms: Sequence[str] = RACE) -> pd.Series[float]:
    """Return the depth of the best arm of each federation; of equal ones the smaller."""
    return per_federation(score)[list(arms)].idxmax(axis=1).map(DEPTHS)


def confirmatory(rows: pd.DataFrame) -> list[Estimate]:
    """Return the four registered tests over the whole seeds."""
    score, chosen = scores(rows), choices(rows)
    taken = {
        way: pd.Series([score.loc[at, arm] for at, arm in arms.items()], arms.index)
        for way, arms in chosen.items()
    }
    mean = per_federation(score)
    cosine = per_federation(measured(rows)["grad_similarity, cosine"])
    return [
        equality(mean["6"] - mean["last 6"]),
        dose_slope(best_depth(score), doses(rows)),
        rank_correlation(cosine, (mean["12"] - mean["6"])[cosine.index]),
        harmlessness(per_federation(taken["rule"] - taken["race"])),
    ]


def findings(rows: pd.DataFrame) -> tuple[Finding, ...]:
    """Return the verdicts on the hypotheses, together at :data:`ALPHA` by Holm. One that is not shown is open."""
    equal, slope, order, rule = found = confirmatory(rows)
    adjusted = holm([each.p for each in found])
    words = [
        f"{100 * equal.value:+.1f} ± {100 * equal.half:.1f} points",
        f"{slope.value:+.1f} ± {slope.half:.1f} blocks from no dose to a source's largest",
        f"Spearman's correlation {order.value:+.2f}",
        f"{100 * rule.value:+.1f} ± {100 * rule.half:.1f} points",
    ]
    return tuple(
        Finding(asked, f"{text}, p {each.p:.2g}, by Holm {p:.2g}", True if p <= ALPHA else None)
        for asked, text, each, p in zip(HYPOTHESES, words, found, adjusted, strict=True)
    )  # fmt: skip


# --- the page --------------------------------------------------------------------------------------------------


def picture(rows: pd.DataFrame) -> Figure:
    """Draw a panel for each source: what sharing gains over sharing nothing, by depth and dose."""
    score, dose = scores(rows), doses(rows)
    gain = 100 * score.sub(score["0"], axis=0)
    places = {arm: at for arm, at in (DEPTHS | MARKS).items() if arm in score}
    told = {"last 6": "last\n6", "cosine": "cos\n≥ 0"}
    with style():
        figure = plt.figure(figsize=(7.4, 5.0), layout="constrained")
        axes = figure.subplots(2, 2, sharex=True).ravel()
        for ax, (source, (_, title, unit)) in zip(axes, DATA.items(), strict=True):
            for k, (setting, amount) in enumerate(dose[source].sort_values().items()):
                own = gain.loc[source, setting].dropna(axis=1, how="all")
                arms = [arm for arm in places if arm in own]
                means = [mean_interval(own[arm].dropna()) for arm in arms]
                x = np.array([places[arm] for arm in arms]) + 0.25 * (k - 1)
                y = np.array([each.value for each in means])
                half = np.array([each.high - each.value for each in means])
                line = [arm in DEPTHS for arm in arms]
                ax.plot(x[line], y[line], color=COLOURS[k], lw=1.2)
                ax.errorbar(
                    x, y, yerr=np.nan_to_num(half), fmt=MARKERS[k], color=COLOURS[k],
                    lw=0.9, markersize=4, label=f"{unit} {amount:.2f}",
                )  # fmt: skip
            ax.axhline(0, color="0.5", lw=0.9, zorder=0)
            ax.axvline(19.5, color="0.8", lw=0.9, zorder=0)
            ax.set_title(title, fontsize=9)
            low, high = ax.get_ylim()
            ax.set_ylim(low, high + 0.15 * (high - low))
            ax.legend(fontsize=7, loc="upper left", ncols=3, columnspacing=1)
        ticks = [told.get(arm, str(at)) for arm, at in places.items()]
        axes[0].set_xticks(list(places.values()), ticks)
        axes[0].set_xlim(-1, max(places.values()) + 1.5)
        figure.supylabel("points of macro-F1 over sharing nothing", fontsize=9)
        for ax in axes[2:]:
            ax.set_xlabel("first blocks that are shared")
    return figure


def gains(rows: pd.DataFrame) -> str:
    """Return a table: the score of ``0``, and what the other arms gain, means over seeds with half an interval."""
    score, dose = scores(rows), doses(rows)
    gain = score.sub(score["0"], axis=0)
    order = [
        at for source in DATA for at in dose.sort_values().index if at[0] == source
    ]

    def cell(values: pd.Series[float], sign: str) -> str:
        there = values.dropna()
        return percent(*mean_interval(there), sign) if len(there) else "–"

    columns = {"federation": [DATA[source][1] for source, _ in order]}
    columns["dose"] = [f"{dose[at]:.2f}" for at in order]
    columns["0"] = [cell(score.loc[at]["0"], "") for at in order]
    for arm in score.columns.drop("0"):
        columns[arm] = [cell(gain.loc[at][arm], "+") for at in order]
    whole = score.columns[score.notna().all()]
    best = best_depth(score, [arm for arm in DEPTHS if arm in whole])
    columns["best depth"] = [str(best[at]) for at in order]
    return markdown(columns)


def correlations(rows: pd.DataFrame) -> str:
    """Return a table: Spearman's correlations of what the first rounds show with what sharing gains."""
    score = scores(rows)
    mean = per_federation(score)
    first = rows[rows["arm"].isin(["0", "all"]) & (rows["seed"] != TUNING)]
    curve = first.set_index([*KEYS, "arm"])["curve"].dropna().str[GAP_AT].unstack()
    known = per_federation(measured(rows)).assign(**{
        "label skew": per_federation(first.set_index(KEYS)["skew"]),
        "Local - FedAvg on validation, round 10": per_federation(curve["0"] - curve["all"]),
    })  # fmt: skip
    asked = {
        "12 over 6": mean["12"] - mean["6"],
        "all over 0": mean["all"] - mean["0"],
        "best depth": best_depth(score),
    }
    columns = {"known": list(known)}
    for name, outcome in asked.items():
        rho = known.corrwith(outcome, method="spearman")
        columns[name] = numbers(rho, "+.2f")
    return markdown(columns)


def costs(rows: pd.DataFrame) -> str:
    """Return a table: runs, rounds and seconds of each arm."""
    its = rows[rows["seed"] != TUNING]
    arms = [arm for arm in (ONE, *FIRST, *LATER) if (its["arm"] == arm).any()]
    by_arm = its.groupby("arm")
    seconds = its[its["device"] == "cpu"].groupby("arm")["seconds"].mean()
    return markdown({
        "arm": arms,
        "runs": by_arm.size()[arms],
        "rounds": numbers(by_arm["rounds"].mean()[arms], ".0f"),
        "best round": numbers(by_arm["best"].mean()[arms], ".0f"),
        "seconds of one core": numbers(seconds.reindex(arms), ".0f"),
    })  # fmt: skip


def counts(rows: pd.DataFrame) -> str:
    """Return a table: how many jobs of each seed have a row."""
    every, done = list(jobs()), stored(rows)
    seeds = [TUNING, *SEEDS]
    columns: dict[str, list[Any]] = {"seed": seeds}
    for name, part in (("first arms", every[:FIRST_JOBS]), ("later arms", every[FIRST_JOBS:])):  # fmt: skip
        of_seed = [{job for job in part if job.seed == seed} for seed in seeds]
        columns[name] = [f"{len(own & done)} of {len(own)} rows" for own in of_seed]
    return markdown(columns)


def draw(header: Any, rows: pd.DataFrame) -> Drawing:
    """Return the page: counts alone before a verdict may be drawn, else the tests and what is exploratory."""
    seeds, scored = whole_seeds(rows), rows["seed"].isin(SEEDS)
    caption = (
        "Ten federations of four sources train MobileNetV2 with the first blocks shared. "
        "Points of macro-F1 on test samples over sharing nothing, means over seeds with 95 % intervals of paired "
        "differences."
    )
    parts = [
        "Hypotheses, tests, power and stop were [registered](../decision/REGISTERED_DEPTH.md) before the runs. "
        "[The folder of the data](../decision/depth_data/README.md) describes the rows.",
        "## What was run",
        counts(rows),
    ]
    if not decided(rows):
        lead = (
            f"**Not yet: {len(stored(rows))} of {len(list(jobs()))} rows.** No verdict is drawn before the last "
            "seed of the first arms, and no score on test samples is shown."
        )
        asked = markdown({"hypothesis": HYPOTHESES, "verdict": ["not yet"] * 4})
        return Drawing(None, pd.DataFrame(), "The runs go on.", (), "\n\n".join([asked, *parts]), lead)  # fmt: skip
    ours = rows[~scored | rows["seed"].isin(seeds)]
    diverged = ours[ours["device"].isna() & ours["rounds"].isna()]
    parts += [
        f"The whole seeds are {', '.join(map(str, seeds))}. Runs that diverged: "
        f"{', '.join(diverged['source'] + ' ' + diverged['arm']) or 'none'}.",
        "All that follows is exploratory.",
        "## What sharing gains",
        gains(ours),
        "The score of sharing nothing in %, and points over it.",
        "## What the first rounds know",
        correlations(ours),
        "Spearman's correlations over federations. Metrics are of round 1, means over blocks 7 to 12.",
        "## Cost",
        costs(ours),
        "Seconds are those of runs on a CPU.",
    ]
    table = scores(ours).reset_index()
    return Drawing(picture(ours), table, caption, findings(ours), "\n\n".join(parts))


@dataclass(frozen=True)
class Study(items.Item):
    """The study as an item. Its rows are one table without headers."""

    @property
    def state(self) -> str:
        """Return ``ready`` if all jobs have a row, else their number, or what is wrong with the rows."""
        try:
            missing = self.read(self.path())[0]["missing"]
        except UsageError:
            return "no rows"
        except CorruptError:
            return "damaged"
        every = len(list(jobs()))
        return f"{every - len(missing)} of {every} runs" if missing else "ready"

    @property
    def command(self) -> str:
        """Return the command that makes the rows."""
        return RUNS

    def path(self, folder: Path | None = None) -> Path:
        """Return the path next to which the table is, :data:`ROWS` by default."""
        return ROWS.with_suffix("") if folder is None else super().path(folder)

    def read(self, path: Path) -> tuple[dict[str, Any], pd.DataFrame]:
        """Return a header as other items have it, and the rows.

        Raises:
            UsageError: no rows are stored; CorruptError: they are damaged.
        """
        file = items.packed_file(path)
        if not file.is_file():
            raise UsageError(
                f"rows of {self.name} must be at {file}; got none. Make them ({self.budget}): {self.command}"
            )
        try:
            rows = pd.read_parquet(file)
            done = stored(rows)
        except (OSError, ValueError, LookupError) as error:
            raise CorruptError(
                f"{file} must be the study's table; got {error!r}. The command: {self.command}"
            ) from error
        header = {
            "item": self.name,
            "command": self.command,
            "seeds": len(SEEDS),
            "seconds": rows["seconds"].sum(),
            "runs": {name: {"config": each.flat()} for name, each in self.runs.items()},
            "had": {name: list(SEEDS) for name in self.runs},
            "missing": [str(job) for job in jobs() if job not in done],
        }
        return header, rows


def refuse(*of_run: object) -> NoReturn:
    """Refuse to train a run here.

    Raises:
        UsageError: always, with the command that trains.
    """
    raise UsageError(
        f"{ITEM.name} must be trained by its own command; got --train. Run {ITEM.command}."
    )


ITEM = items.register(Study(
    "decision.depth", "Depth of sharing on images",
    {
        source: RunConfig(
            dataset=name, model="MobileNetV2", algorithm="fedper", clients=CLIENTS,
            samples_per_client=TRAIN + VALIDATION, rounds=60, epochs=1, batch_size=32, optimizer="adamw",
        )
        for source, (name, *_) in DATA.items()
    },
    seeds=len(SEEDS), budget="40 hours of one core", measure=refuse, prepare=refuse, draw=draw, partial=True,
))  # fmt: skip
