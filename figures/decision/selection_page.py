"""Replay rules of selection on the stored evaluations: ``python -m figures.decision.selection_page``.

``REGISTERED_SCORE.md`` defines every number, and has the table. The best rounds are those of the package's own rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedlayers.studies.race import with_score
from figures.decision.selection import (
    ARMS,
    BASE,
    FACTORS,
    SETS,
    SPREAD,
    TEMPERED,
)
from figures.page import markdown
from fl_core.statistics import mean_interval
from fl_core.stopping import best_round, moving_mean

ROWS = Path(__file__).with_name("selection.parquet")
PATIENCE = 10
MAIN_CUT = "all_but_last"
MEASURED = ("macro_f1", "accuracy", "loss", TEMPERED, "auroc")
MACRO_F1, TWO_RANKS = "macro-F1", "two ranks"
TAKEN = "two ranks, then tempered"
Curves = Mapping[str, Mapping[int, float]]
"""Validation scores of a run by name and round."""


def stopped(curves: Curves, choose: Callable[[Curves], int | None]) -> int:
    """Return the best round of a run that stops when it is :data:`PATIENCE` evaluations old."""
    rounds = list(next(iter(curves.values())))
    best = rounds[0]
    for end in range(1, len(rounds) + 1):
        seen = {
            name: {done: values[done] for done in rounds[:end]}
            for name, values in curves.items()
        }
        best = choose(seen) or best
        if sum(done > best for done in rounds[:end]) >= PATIENCE:
            break
    return best


def by_ranks(*names: str) -> Callable[[Curves], int | None]:
    """Return the package's rule for these scores. The tempered log loss stands as ``loss``."""
    known = {TEMPERED: "loss"}
    return lambda curves: best_round(
        {known.get(name, name): curves[name] for name in names}
    )


def within_error(curves: Curves) -> int | None:
    """Return the highest macro-F1 within a standard error of the least tempered log loss; only the newest replaces."""
    smooth = {name: moving_mean(values) for name, values in curves.items()}
    best: int | None = None
    seen: list[int] = []
    for done in smooth[TEMPERED]:
        seen.append(done)
        least = min(seen, key=smooth[TEMPERED].__getitem__)
        limit = smooth[TEMPERED][least] + smooth[SPREAD][least]
        level = [
            k for k in (best, done) if k is not None and smooth[TEMPERED][k] <= limit
        ]
        if level and max(level, key=smooth["macro_f1"].__getitem__) == done:
            best = done
    return best


@dataclass(frozen=True)
class Rule:
    """A rule of selection.

    Attributes:
        round: validation curves -> best round.
        runs: table of runs with their smoothed validation scores -> place of the best.
        rates: the same for the choice of a rate; default as ``runs``.
    """

    round: Callable[[Curves], int | None]
    runs: Callable[[pd.DataFrame], int]
    rates: Callable[[pd.DataFrame], int] | None = None


def _ranks(*names: str) -> Callable[[pd.DataFrame], int]:
    def first(table: pd.DataFrame) -> int:
        known = table.rename(columns={TEMPERED: "loss"} if TEMPERED in names else {})
        known = known.loc[:, ~known.columns.duplicated(keep="last")].assign(seed=0)
        by = ["loss" if name == TEMPERED else name for name in names]
        scored = with_score(known, by)
        order = scored.sort_values(
            ["score", "macro_f1"], ascending=False, kind="stable"
        )
        return int(order.index[0])

    return first


def _z(table: pd.DataFrame) -> int:
    def z(values: pd.Series) -> pd.Series:
        spread = values.std(ddof=0)
        return (values - values.mean()) / spread if spread > 1e-12 else values * 0

    return int((z(table["macro_f1"]) - z(table["loss"])).idxmax())


def _tempered_ties(table: pd.DataFrame) -> int:
    least = table[TEMPERED].idxmin()
    level = table[
        table[TEMPERED] <= table.loc[least, TEMPERED] + table.loc[least, SPREAD]
    ]
    return int(level["macro_f1"].idxmax())


RULES: dict[str, Rule] = {
    MACRO_F1: Rule(by_ranks("macro_f1"), _ranks("macro_f1")),
    "z": Rule(by_ranks("macro_f1"), _z, _ranks("macro_f1")),
    "tempered": Rule(by_ranks(TEMPERED), _ranks(TEMPERED)),
    "tempered, ties": Rule(within_error, _tempered_ties),
    TWO_RANKS: Rule(by_ranks("macro_f1", "loss"), _ranks("macro_f1", "loss")),
    "AUROC": Rule(by_ranks("auroc"), _ranks("auroc")),
    "log loss": Rule(by_ranks("loss"), _ranks("loss")),
    "two ranks, tempered": Rule(
        by_ranks("macro_f1", TEMPERED), _ranks("macro_f1", TEMPERED)
    ),
    TAKEN: Rule(by_ranks("macro_f1", "loss"), _ranks(TEMPERED)),
}
"""The registered rules, in their order, and the one that was added after seed 0."""


def federations(frame: pd.DataFrame) -> Iterator[tuple[str, int, float, pd.DataFrame]]:
    """Yield each federation and seed of which all rates have ended: the base rate's test loss, and the runs' scores."""
    frame = frame.assign(federation=frame["run"].str.partition("@")[0])
    for (name, seed), part in frame.groupby(["federation", "seed"], sort=False):
        if part["run"].nunique() < len(FACTORS):
            continue
        of_base = part["metric"] == BASE
        base = float(part[of_base & (part["split"] == "test")]["value"].iloc[0])
        scores = part[~of_base].pivot_table(
            index=["run", "variant", "round"],
            columns=["split", "metric"],
            values="value",
        )
        yield str(name), int(seed), base, scores


def replay(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what each rule selects in each federation and seed, with its test scores and the base rate's loss."""
    lines = []
    for name, seed, base, table in federations(frame):
        for rule_name, rule in RULES.items():
            chosen = _selected(table, rule)
            lines.append({
                "rule": rule_name, "federation": name, "family": SETS[name].family,
                "seed": seed, "rare": SETS[name].rare, BASE: base, **chosen,
            })  # fmt: skip
    return pd.DataFrame(lines)


def _selected(table: pd.DataFrame, rule: Rule) -> dict[str, Any]:
    """Return the test scores of the run that a rule selects: four rates of one cut, then the other cuts."""

    def finished(run: str, arm: str) -> dict[str, Any]:
        own = table.loc[(run, arm)].sort_index()
        curves = {
            str(name): own["validation"][name].to_dict() for name in own["validation"]
        }
        best = stopped(curves, rule.round)
        smooth = {name: moving_mean(v) for name, v in curves.items()}
        at = {
            name: values.get(best, curves[name][best])
            for name, values in smooth.items()
        }
        test = {f"test {name}": float(own["test"][name][best]) for name in MEASURED}
        return {"run": run, "arm": arm, "best": best, **at, **test}

    runs = list(dict.fromkeys(table.index.get_level_values(0)))
    rates = pd.DataFrame([finished(run, MAIN_CUT) for run in runs])
    rate = rates.loc[(rule.rates or rule.runs)(rates), "run"]
    others = [finished(rate, arm) for arm in ARMS if arm != MAIN_CUT]
    whole = pd.concat([rates, pd.DataFrame(others)], ignore_index=True)
    return dict(whole.loc[rule.runs(whole)])


def summary(found: pd.DataFrame) -> pd.DataFrame:
    """Return a line per rule: its differences to macro-F1 and federations above the base rate."""
    names = ["federation", "family", "rare", "rule"]
    means = found.groupby(names, sort=False).mean(numeric_only=True).reset_index()
    first = means[means["rule"] == MACRO_F1].set_index("family")
    lines = []
    for rule, own in means.groupby("rule", sort=False):
        own = own.set_index("family")
        line: dict[str, Any] = {"rule": rule}
        for kind, rare in (("rare", True), ("balanced", False)):
            these = own[own["rare"] == rare]
            for name in MEASURED:
                gain = these[f"test {name}"] - first.loc[these.index, f"test {name}"]
                value, low, high = mean_interval(gain)
                line |= {
                    f"{kind} {name}": value,
                    f"{kind} {name} low": low,
                    f"{kind} {name} high": high,
                }
            line[f"{kind} {TEMPERED} level"] = these[f"test {TEMPERED}"].mean()
        above = own[f"test {TEMPERED}"] > own[BASE]
        line["above"] = int(above.sum())
        line["above raw"] = int((own["test loss"] > own[BASE]).sum())
        lines.append(line)
    return pd.DataFrame(lines)


def table() -> str:
    """Return the published table of the stored runs."""
    lines = [line for _, line in summary(replay(pd.read_parquet(ROWS))).iterrows()]

    def interval(line: pd.Series, name: str, scale: float, digits: int) -> str:
        value, low, high = (
            f"{scale * line[name + end]:+.{digits}f}" for end in ("", " low", " high")
        )
        return f"{value} [{low}, {high}]"

    return markdown(
        {
            "rule": [str(line["rule"]) for line in lines],
            "above the base rate": [
                f"{line['above']} of {len(SETS)}" for line in lines
            ],
            "rare: log loss": [
                f"{line[f'rare {TEMPERED} level']:.3f}" for line in lines
            ],
            "rare: to macro-F1": [
                interval(line, f"rare {TEMPERED}", 1, 3) for line in lines
            ],
            "balanced: points of macro-F1": [
                interval(line, "balanced macro_f1", 100, 1) for line in lines
            ],
        }
    )


if __name__ == "__main__":
    print(table())
