"""Replay races that differ in which arms train to the end: ``python -m figures.decision.kept RUNS``.

``REGISTERED_KEPT.md`` defines every number. ``RUNS`` is the folder of the ten races' run directories.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedlayers.studies.race import forecast, judged_round
from figures.decision import finished
from fl_core.statistics import mean_interval
from fl_core.stopping import best_round, moving_mean

HERE = Path(__file__).parent
ARMS, PROBE = ("nothing", "half", "all_but_last", "all"), "all_but_last"
RULES: dict[str, tuple[int, tuple[str, ...], str]] = {
    "today": (4, ARMS, "forecast"),
    "all ends": (4, ARMS, "forecast and all"),
    "ranks judge": (4, ARMS, "ranks"),
    "loss judge": (4, ARMS, "loss"),
    "four arms": (4, ARMS, ""),
    "three arms": (4, ("nothing", PROBE, "all"), ""),
    "three rates": (3, ("nothing", PROBE, "all"), ""),
}
"""The number of rates, the arms, and what judges."""
ROUNDS, PATIENCE = 60, 10
Line = dict[str, Any]


def race(runs: pd.DataFrame, rule: str, at: int) -> Line:
    """Return the named run's line, with the rounds of the whole race.

    Args:
        runs: index arm, place of the rate. Columns ``loss`` and ``rounds`` of the finished run, ``curve``, and others.
        at: the judged round; 0 without a judge.
    """
    count, arms, judge = RULES[rule]
    trials = [(PROBE, k) for k in range(count) if (PROBE, k) in runs.index]
    rate = runs.loc[trials, "loss"].idxmin()[1]
    racing = [(arm, rate) for arm in arms if (arm, rate) in runs.index]
    ending = set(racing)
    if judge and at:
        ending = {_kept(runs.loc[racing], judge, at)}
        if judge.endswith("all"):
            ending |= {(arm, rate) for arm in ("all",) if (arm, rate) in runs.index}
    done = dict.fromkeys([*trials, *(run for run in racing if run in ending)])
    stopped = [run for run in racing if run not in done]
    rounds = runs.loc[list(done), "rounds"].sum() + at * len(stopped)
    sound = runs.loc[list(done)].dropna(subset=["loss"])
    return {**sound.loc[sound["loss"].idxmin()], "rounds": rounds}


def _kept(runs: pd.DataFrame, judge: str, at: int) -> Any:
    if judge.startswith("forecast"):
        curves = [
            curves["macro_f1"].loc[:at].to_numpy(float) for curves in runs["curves"]
        ]
        return runs.index[int(forecast(curves).sum(axis=1).argmax())]
    names = {"ranks": ("macro_f1", "loss"), "loss": ("tempered",)}[judge]
    lines = []
    for curves in runs["curves"]:
        seen = {name: curves[name].loc[:at].to_dict() for name in curves}
        best = best_round({"macro_f1": seen["macro_f1"], "loss": seen["loss"]})
        smooth = {name: moving_mean(values) for name, values in seen.items()}
        lines.append([smooth[name][best] for name in names])
    table = pd.DataFrame(lines, index=runs.index, columns=names)
    if "macro_f1" in table:
        table["macro_f1"] *= -1
    return table.rank().sum(axis=1).idxmin()


# --- A: nine federations ------------------------------------------------------------------------------------------


def nine() -> Iterator[Line]:
    """Yield a line for each federation, seed and rule."""
    frame = pd.read_parquet(HERE / "selection.parquet")
    frame = frame.join(
        frame["run"].str.partition("@")[[0, 2]].set_axis(["name", "lr"], axis=1)
    )
    at = judged_round(ROUNDS, 2)
    for (name, _), part in frame.groupby(["name", "seed"], sort=False):
        rates = sorted(part["lr"].unique(), key=float)
        if len(rates) < 4:
            continue
        base = part[(part["metric"] == "base_rate") & (part["split"] == "test")]
        lines = {}
        for (arm, lr), own in part[part["variant"].isin(ARMS)].groupby(
            ["variant", "lr"]
        ):
            table = own.pivot_table(
                index="round", columns=["split", "metric"], values="value"
            )
            if len(table) < ROUNDS // 2:
                continue
            lines[arm, rates.index(lr)] = _ended(table)
        runs = pd.DataFrame.from_dict(lines, orient="index")
        runs.index = pd.MultiIndex.from_tuples(runs.index)
        for rule in RULES:
            yield {
                "name": name,
                "rule": rule,
                "base": base["value"].iloc[0],
                **race(runs, rule, at),
            }


def _ended(table: pd.DataFrame) -> Line:
    """Return a run's scores at its best round, by the product's rule of stopping."""
    curves = {
        name: table["validation"][name] for name in ("macro_f1", "loss", "tempered")
    }
    best, rounds = 0, list(table.index)
    for end in range(1, len(rounds) + 1):
        seen = {
            name: curves[name].iloc[:end].to_dict() for name in ("macro_f1", "loss")
        }
        best = best_round(seen) or best
        if end - 1 - rounds.index(best) >= PATIENCE:
            break
    smooth = moving_mean(curves["tempered"].to_dict())
    loss = smooth.get(best, curves["tempered"][best])
    test = {
        f"test_{name}": table["test"][name].get(best, np.nan)
        for name in ("tempered", "auroc", "macro_f1")
    }
    return {"curves": curves, "loss": loss, "rounds": rounds[end - 1], **test}


# --- B: ten tables ------------------------------------------------------------------------------------------------


def ten(folder: Path) -> Iterator[Line]:
    """Yield a line for each table and rule without another judge."""
    frame = pd.read_parquet(HERE / "races.parquet")
    rates = sorted(frame["lr"].dropna().unique())
    for name, part in frame.groupby("table", sort=False):
        base = part[part["arm"] == "base_rate"].iloc[0]
        reference = part[(part["seed"] == 0) & part["lr"].notna()]
        reference = reference.drop_duplicates(["arm", "lr"])
        lines = {}
        for line in reference.to_dict("records"):
            run = folder / str(name) / "reference" / f"{line['arm']}-0-{line['lr']:g}"
            lines[line["arm"], rates.index(line["lr"])] = {
                "loss": line["validation_loss"],
                "test_tempered": line["test_loss"],
                "test_auroc": line["test_auroc"],
                "test_macro_f1": line["test_macro_f1"],
                **_stored(run),
            }
        runs = pd.DataFrame.from_dict(lines, orient="index")
        runs.index = pd.MultiIndex.from_tuples(runs.index)
        for rule, (_, _, judge) in RULES.items():
            if judge in ("ranks", "loss"):
                continue
            at = judged_round(100, 2)
            named = race(runs, rule, at)
            if rule == "today":
                own = part[part["arm"] == "named"].iloc[0]
                named["replayed"] = named["test_tempered"]
                scores = ("tempered", "auroc", "macro_f1")
                names = ("test_loss", "test_auroc", "test_macro_f1")
                for to, score in zip(scores, names, strict=True):
                    named[f"test_{to}"] = own[score]
            yield {"name": name, "rule": rule, "base": base["test_loss"], **named}


def _stored(run: Path) -> Line:
    """Return the rounds of a stored run, and its validation curve of macro-F1."""
    records = map(json.loads, (run / "rows.jsonl").read_text().splitlines()[1:])
    wanted = [
        line
        for line in records
        if line["metric"] == "macro_f1"
        and line["split"] == "validation"
        and line["model"] != "local"
        and line["round"] > 0
    ]
    table = pd.DataFrame(wanted).dropna(subset=["value"])
    last = table[table["round"] == table["round"].max()]
    model = "personal" if (last["model"] == "personal").any() else "global"
    of_round = table[table["model"] == model].groupby("round")
    curve = of_round.apply(
        lambda x: np.average(x["value"], weights=x["n_train"]), include_groups=False
    )
    return {"rounds": table["round"].max(), "curves": {"macro_f1": curve}}


# --- C: 29 federations --------------------------------------------------------------------------------------------


def many() -> Iterator[Line]:
    """Yield a line for each federation, seed and rule without another judge."""
    for each in finished.federations():
        for seed in each.runs.index.levels[0]:
            own = each.runs.loc[seed]
            rates = list(own.index.levels[1])
            lines = {}
            for (cut, lr), run in own.iterrows():
                if finished.CUTS[cut] not in ARMS or not isinstance(
                    run["curve"], pd.Series
                ):
                    continue
                lines[finished.CUTS[cut], rates.index(lr)] = {
                    "loss": -run["validation"],
                    "test_macro_f1": run["held_out"],
                    "rounds": run["curve"].index.max(),
                    "curves": {"macro_f1": run["curve"]},
                }
            runs = pd.DataFrame.from_dict(lines, orient="index")
            runs.index = pd.MultiIndex.from_tuples(runs.index)
            for rule, (_, _, judge) in RULES.items():
                if judge not in ("ranks", "loss"):
                    at = judged_round(each.rounds, finished.EVERY)
                    yield {
                        "name": each.family,
                        "federation": each.name,
                        "rule": rule,
                        **race(runs, rule, at),
                    }


# --- E and F: the confirmation ------------------------------------------------------------------------------------


def confirmed() -> Iterator[Line]:
    """Yield a line for each table, seed and rule. F has the seeds of which all shares are there."""
    frame = pd.read_parquet(HERE / "kept.parquet")
    rare = frame["table"].str.startswith("rare")
    whole = frame[rare].groupby("seed")["table"].nunique() == 3
    frame = frame[~rare | frame["seed"].isin(whole.index[whole])]
    for (name, seed), part in frame.groupby(["table", "seed"]):
        base = part[part["arm"] == "base_rate"].iloc[0]
        trained = part[part["arm"] != "base_rate"]
        rates = sorted(trained.loc[trained["arm"] == PROBE, "lr"].unique())
        lines = {}
        for line in trained.to_dict("records"):
            curve = pd.Series(
                line["curve"], index=range(2, 2 * len(line["curve"]) + 1, 2)
            )
            lines[line["arm"], rates.index(line["lr"])] = {
                "loss": line["validation_loss"],
                "above": line["validation_above"],
                "rounds": line["rounds"],
                "test_tempered": line["test_loss"],
                "test_auroc": line["test_auroc"],
                "test_macro_f1": line["test_macro_f1"],
                "curves": {"macro_f1": curve},
            }
        runs = pd.DataFrame.from_dict(lines, orient="index")
        runs.index = pd.MultiIndex.from_tuples(runs.index)
        for rule in ("today", "three arms", "three rates"):
            named = race(runs, rule, 14)
            if named["above"] > 0:  # nothing is named
                named |= {"test_tempered": base["test_loss"], "test_auroc": 0.5}
                named["test_macro_f1"] = base["test_macro_f1"]
            key = f"{name}-{seed}"
            yield {"name": key, "rule": rule, "base": base["test_loss"], **named}


def summary(found: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each rule: its differences to today's, over federations."""
    keys = [key for key in ("rule", "name", "federation") if key in found]
    means = found.groupby(keys, sort=False).mean(numeric_only=True)
    today, lines = means.loc["today"], []
    for rule in found["rule"].unique():
        own = means.loc[rule]
        line: Line = {"rule": rule}
        for name in ("tempered", "auroc", "macro_f1"):
            if f"test_{name}" not in own:
                continue
            gap = (own[f"test_{name}"] - today[f"test_{name}"]).dropna()
            gap = gap.groupby("name").mean()
            value, low, high = mean_interval(gap)
            line[name] = f"{value:+.4f} [{low:+.4f}, {high:+.4f}] of {len(gap)}"
        if "base" in own:
            line["above"] = int((own["test_tempered"] > own["base"]).sum())
        ratio = (own["rounds"] / today["rounds"]).groupby("name").mean()
        line["cost"] = f"{ratio.mean():.3f}"
        lines.append(line)
    return pd.DataFrame(lines)


def main(folder: str) -> None:
    """Print the three tables."""
    found = pd.DataFrame(confirmed()).drop(columns="curves")
    for name, own in found.groupby(found["name"].str.startswith("rare")):
        print("F" if name else "E", own["name"].nunique())
        print(summary(own).to_string(index=False))
    for name, lines in (("A", nine()), ("B", ten(Path(folder))), ("C", many())):
        found = pd.DataFrame(lines)
        print(name, found["name"].nunique(), "families or tables")
        print(summary(found.drop(columns="curves")).to_string(index=False))
        if name == "B":
            columns = ["test_tempered", "replayed"]
            print(found.loc[found["rule"] == "today", ["name", *columns]].to_string())


if __name__ == "__main__":
    main(sys.argv[1])
