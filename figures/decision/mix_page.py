"""Draw the study of mixtures, and of one run instead of four. ``REGISTERED_MIX.md`` defines every number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from diagnostics.plots.drawing import COLOURS, style
from figures import items, packing
from figures.decision import finished_regret as regret
from figures.decision.finished import DITTO, STUDY
from figures.decision.finished_runs import CUTS, HELD_OUT, LOGS, NAME as FINISHED, ROWS, STEPS, VALIDATION
from figures.decision.finished_ways import ARMS, Array, Part, best, parts_of
from figures.decision.mix import ARM, CONTINUED, DEPTH, EQUAL, FITTED, MIXTURE, NAME, SCALED, STITCH, STITCHED
from figures.drawing import Drawing, Finding
from figures.page import markdown

LOSS, F1 = "loss", "macro_f1"
MIXED, PICK, RANDOM = "mixture, fitted", "pick", "a random cut"
KEPT = {
    MIXED: (MIXTURE, FITTED), "mixture, equal": (MIXTURE, EQUAL), DITTO: (STITCH, DITTO),
    STITCHED: (STITCH, STITCHED), CONTINUED: (STITCH, CONTINUED),
}  # fmt: skip
"""Estimator and variant of the ways that are rows of their own."""
POINT, MOST_SHARE, MOST_END = 0.01, 0.25, 0.6
Scores = Mapping[tuple[str, str], float]
"""The mean over clients of one score on one split, by estimator and variant."""


@dataclass(frozen=True)
class Seed:
    """A run's regrets against the best fixed cut, in macro-F1 and nats. A regret below 0 is better.

    Attributes:
        equal: for each arm, whether its macro-F1 equals the stored one.
    """

    name: str
    seed: int
    f1: Mapping[str, float]
    loss: Mapping[str, float]
    equal: tuple[bool, ...]


def seeds_of(frame: pd.DataFrame) -> list[Seed]:
    """Return every run that is there, held against the stored rows of the finished study."""
    found = []
    for name in dict.fromkeys(frame["run"]):
        stored = packing.read(items.ROWS / FINISHED / f"{name}{ROWS}")
        (part,) = parts_of(pd.concat([rows for _, rows in stored]))
        losses = log_losses(part, pd.read_parquet(items.ROWS / FINISHED / f"{name}{LOGS}"))
        own = frame[frame["run"] == name]
        found += [_seed(part, losses, int(seed), rows) for seed, rows in own.groupby("seed")]
    return found


def log_losses(part: Part, logs: pd.DataFrame) -> Array:
    """Return the log loss of each stored run of cuts: [seeds, cuts, rates]. A diverged run has its seed's worst.

    It is the mean over clients by training samples. Held-out samples have other shares.
    """
    sizes = _sizes(part.name)
    columns = logs.filter(like="class_").to_numpy(float) / STEPS
    lost = logs[["run", "seed", "what", "client"]].assign(lost=-columns[np.arange(len(logs)), logs["label"]])
    means = lost.groupby(["run", "seed", "what", "client"], observed=True)["lost"].mean()
    found = np.full(part.cuts.held_out.shape, np.nan)
    for (run, seed, what), own in means.groupby(level=["run", "seed", "what"], observed=True):
        rate = STUDY[part.name].rates.index(float(str(run).partition("@")[2]))
        cut = part.cut(str(what).removeprefix(f"{CUTS}, "))
        weights = [sizes[int(seed)][client] for client in own.index.get_level_values("client")]
        found[int(seed), cut, rate] = np.average(own, weights=weights)
    worst = np.nanmax(found, axis=(1, 2), keepdims=True)
    return np.where(np.isnan(found), worst, found)


def _sizes(name: str) -> dict[int, list[int]]:
    """Return each client's training samples by seed, in the clients' order."""
    rows = pd.concat([frame for _, frame in packing.read(items.ROWS / FINISHED / f"{name}{ROWS}")])
    rows = rows[(rows["metric"] == "accuracy") & (rows["split"] == HELD_OUT)]
    return {int(seed): [int(n) for n in own.drop_duplicates("client")["n_train"]] for seed, own in rows.groupby("seed")}


def _seed(part: Part, losses: Array, seed: int, rows: pd.DataFrame) -> Seed:
    held = {metric: _means(rows, metric, HELD_OUT) for metric in (F1, LOSS)}
    seen = _means(rows, F1, VALIDATION)
    arms = [arm for arm in ARMS if (ARM, arm) in seen]
    picked = arms[best(np.array([seen[ARM, arm] for arm in arms]))]
    named = {**KEPT, PICK: (ARM, picked), "pick, scaled": (SCALED, picked)}
    rates = [part.cuts.rate(seed, k) for k in range(len(part.cuts.variants))]
    cuts = range(len(rates))
    others = [other for other in part.seeds if other != seed]
    found = {}
    for metric, values, sign in ((F1, part.cuts.held_out, 1), (LOSS, losses, -1)):
        first = best(np.array([sign * values[others, k, rates[k]].mean() for k in cuts]))
        reference = values[seed, first, rates[first]]
        worst = sign * (sign * values[seed]).min()
        scores = {way: held[metric].get(key, worst) for way, key in named.items()}
        scores[RANDOM] = float(np.mean([values[seed, k, rates[k]] for k in part.inner]))
        found[metric] = {way: float(sign * (reference - score)) for way, score in scores.items()}
    equal = tuple(abs(held[F1][ARM, arm] - part.cuts.tuned(seed, part.cut(arm))) < 1e-9 for arm in arms)
    return Seed(part.name, seed, found[F1], found[LOSS], equal)


def _means(rows: pd.DataFrame, metric: str, split: str) -> Scores:
    own = rows[(rows["metric"] == metric) & (rows["split"] == split)]
    own = own.assign(product=own["value"] * own["n_train"])
    sums = own.groupby(["estimator", "variant"], observed=True)[["product", "n_train"]].sum()
    return {(str(a), str(b)): float(value) for (a, b), value in (sums["product"] / sums["n_train"]).items()}


# --- the numbers -----------------------------------------------------------------------------------------------


def by_family(seeds: Sequence[Seed], of: Callable[[Seed], float]) -> Array:
    """Return the mean over each family's federations of the mean over their seeds."""
    lines = pd.DataFrame([(STUDY[each.name].family, each.name, of(each)) for each in seeds])
    return lines.groupby([0, 1])[2].mean().groupby(level=0).mean().to_numpy()


def table(seeds: Sequence[Seed], metric: str, draws: int = regret.DRAWS) -> pd.DataFrame:
    """Return a line for each way: its regret and its share of a random cut's, with ``_low`` and ``_high``."""

    def value(way: str) -> Array:
        return by_family(seeds, lambda each: (each.f1 if metric == F1 else each.loss)[way])

    random = value(RANDOM)
    sample = regret.drawn(len(random), draws)
    lines = []
    for way in (*KEPT, PICK, "pick, scaled", RANDOM):
        own = value(way)
        mean, share = regret.interval(own, sample), regret.ratio(own, random, sample)
        above, below, p = regret.sign_test(own)
        lines.append({
            "way": way, "regret": mean.value, "low": mean.low, "high": mean.high, "share": share.value,
            "share_low": share.low, "share_high": share.high, "median": float(np.median(own)), "worse": above,
            "better": below, "p": p,
        })  # fmt: skip
    return pd.DataFrame(lines)


def gain(seeds: Sequence[Seed], metric: str, first: str, second: str) -> Any:
    """Return how far the first way's regret lies below the second's: mean over families with its interval."""

    def of(each: Seed) -> float:
        scores = each.f1 if metric == F1 else each.loss
        return scores[second] - scores[first]

    values = by_family(seeds, of)
    return regret.interval(values, regret.drawn(len(values)))


def findings(seeds: Sequence[Seed]) -> tuple[Finding, ...]:
    """Return the registered targets with their outcomes."""
    loss, f1 = (table(seeds, metric).set_index("way") for metric in (LOSS, F1))
    line = loss.loc[MIXED]
    found = [Finding("The mixture's log loss lies below that of the best fixed cut", _share(line), _below(line))]
    for what, metric, first, second in (
        ("The mixture's log loss lies below that of the pick with a temperature", LOSS, MIXED, "pick, scaled"),
        ("The fitted weights have a lower log loss than equal ones", LOSS, MIXED, "mixture, equal"),
        ("FedPer's last rounds raise the macro-F1 of the stitched models", F1, CONTINUED, STITCHED),
    ):
        mean = gain(seeds, metric, first, second)
        decided = True if mean.low > 0 else False if mean.high < 0 else None
        unit, scale = ("points", 100) if metric == F1 else ("nats", 1)
        told = f"{scale * mean.value:+.3g} {unit} [{scale * mean.low:+.3g}, {scale * mean.high:+.3g}]"
        found.append(Finding(what, told, decided))
    line, random = f1.loc[CONTINUED], f1.loc[RANDOM, "regret"]
    few = random < POINT
    value, high = (line["regret"], line["high"]) if few else (line["share"], line["share_high"])
    most, end = (0.003, 0.006) if few else (MOST_SHARE, MOST_END)
    limit = "0.3 points" if few else "25 % of a random cut"
    told = _points(line) if few else _share(line)
    found.insert(1, Finding(f"One run of Ditto, stitched and trained on, loses at most {limit}", told,
                            bool(value <= most and high <= end)))  # fmt: skip
    return tuple(found)


def _below(line: Any) -> bool | None:
    return True if line["share_high"] < 0 else False if line["share_low"] > 0 else None


def _share(line: Any) -> str:
    return (
        f"{100 * line['share']:.0f} % [{100 * line['share_low']:.0f}, {100 * line['share_high']:.0f}] of a random cut"
    )


def _points(line: Any) -> str:
    return f"{100 * line['regret']:+.1f} points [{100 * line['low']:+.1f}, {100 * line['high']:+.1f}]"


# --- the page --------------------------------------------------------------------------------------------------


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    seeds = seeds_of(frame)
    tables = {metric: table(seeds, metric) for metric in (LOSS, F1)}
    names = dict.fromkeys(each.name for each in seeds)
    lacking = [STUDY[name].title for name in STUDY if name not in names]
    differ = [same for each in seeds for same in each.equal]
    natural = [each for each in seeds if STUDY[each.name].natural]
    text = [
        "The analysis was [registered](../decision/REGISTERED_MIX.md) before the first scored run.",
        f"{len(seeds)} of {3 * len(STUDY)} runs are there: {len(names)} of {len(STUDY)} federations. "
        f"Without any: {', '.join(lacking) or 'none'}.",
        "The mixture is in the package: `fedlayers choose --mix`. One run in place of four is not.",
        "## Log loss",
        markdown(_cells(tables[LOSS], 1, "nats")),
        "## Macro-F1",
        markdown(_cells(tables[F1], 100, "points")),
        "Distance from the best fixed cut, mean over data families with 95 % intervals. Below 0 is better than that "
        "cut. `worse` and `better` count families. `p` is of the sign test.",
        "## Natural clients alone: log loss",
        markdown(_cells(table(natural, LOSS), 1, "nats")),
        "## Natural clients alone: macro-F1",
        markdown(_cells(table(natural, F1), 100, "points")),
        "## Checks",
        f"{len(differ) - sum(differ)} of {len(differ)} arms have another macro-F1 than the stored run. "
        f"The chosen depths, in layers: {_depths(frame)}.",
    ]
    caption = (
        "Log loss above that of the best fixed cut, in nats: bars are 95 % intervals over "
        f"{len(by_family(seeds, lambda each: 0.0))} data families. {len(seeds)} runs of {len(names)} federations. "
        "Weights and temperatures are fitted on validation samples, and scored on others."
    )
    everything = pd.concat([each.assign(score=metric) for metric, each in tables.items()])
    found = findings(seeds)
    scaled = tables[LOSS].set_index("way").loc["pick, scaled"]
    lead = (
        f"**{found[0].expected}: {found[0].measured}. One model with a temperature has {_share(scaled)}.** "
        f"One run in place of four has {found[1].measured} in macro-F1; below 0 is better than the best fixed cut."
    )
    return Drawing(_picture(tables[LOSS]), everything, caption, found, "\n\n".join(text), lead)


def _cells(found: pd.DataFrame, scale: int, unit: str) -> dict[str, list[str]]:
    lines = list(found.itertuples())
    digits = 1 if scale == 100 else 3
    return {
        "way": [str(line.way) for line in lines],
        unit: [
            f"{scale * line.regret:+.{digits}f} [{scale * line.low:+.{digits}f}, {scale * line.high:+.{digits}f}]"
            for line in lines
        ],
        "% of a random cut": [
            "–" if np.isnan(line.share) else f"{100 * line.share:.0f} [{100 * line.share_low:.0f}, "
            f"{100 * line.share_high:.0f}]" for line in lines
        ],
        "median": [f"{scale * line.median:+.{digits}f}" for line in lines],
        "worse / better": [f"{line.worse} / {line.better}" for line in lines],
        "p": [f"{line.p:.2f}" for line in lines],
    }  # fmt: skip


def _depths(frame: pd.DataFrame) -> str:
    counts = frame[frame["metric"] == DEPTH]["value"].astype(int).value_counts().sort_index()
    return ", ".join(f"{depth} in {count} runs" for depth, count in counts.items())


def _picture(found: pd.DataFrame) -> plt.Figure:
    with style():
        figure = plt.figure(figsize=(6.4, 3.0), layout="constrained")
        ax = figure.subplots()
        spread = [found["regret"] - found["low"], found["high"] - found["regret"]]
        ax.errorbar(found["regret"], range(len(found)), xerr=spread, fmt="o", color=COLOURS[0], lw=1.1, markersize=5)
        ax.axvline(0, color="0.5", lw=0.9, zorder=0)
        ax.set_yticks(range(len(found)), list(found["way"]))
        ax.invert_yaxis()
        ax.set(xlabel="log loss above the best fixed cut, nats")
    return figure


MIX = items.register(
    items.View("decision.mixture", "A mixture of four cuts, and one run in place of four", NAME, _draw)
)
