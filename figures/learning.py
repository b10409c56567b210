"""Check that every algorithm learns: all on the same real data, next to Local and FedAvg."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from diagnostics.plots.drawing import COLOURS, style
from diagnostics.plots.runs import comparison
from fedlayers.studies.comparison import main_model
from figures import items, names
from figures.differences import FEWEST, LEAST, UNDECIDED, against, joint, outcome
from figures.drawing import one_range
from figures.items import Drawing, Finding
from figures.page import markdown, percent, seeds_in_words
from figures.player_fl.runs import CASES
from figures.recipe import (
    PLAIN_SGD,
    Recipe,
    by_method,
    labels,
    newcomers,
    scored_at_end,
    tested,
    trained,
)
from fl_core import rows, runner, statistics
from fl_core.algorithms import find, registry
from fl_core.config import RunConfig

NAME = "algorithms.learning_check"
FAR = 0.05
"""A method that lies this far below Local, although its paper puts it above, needs an explanation."""
NOTE = (
    "Differences are to runs of the same network. FLOPs are those of the plain passes without FedPFT's views and keys "
    "and without pFedSD's teacher.\n\n"
    "Three runs are not compared with a paper. Each stage of Two-stage has half of the rounds, and in its paper each "
    "has all of them. FedPFT, 1+2 adapts for two epochs of three and not for one. FedCAC, 20 narrows a client's "
    "partners over 20 rounds and not over 100."
)
DEAR = 1.5
"""A method with more than so many times FedAvg's FLOPs is named."""
COUNTED = STEPS, WORK, TUNING = ("steps", ""), ("flops", ""), ("steps", "finish")
"""Metric and variant of a client's steps and FLOPs a round, and of its steps after the last one."""
REFERENCES, PROMPTED = ("local", "fedavg"), ("fedpft", "two_stage")

CNN = scored_at_end(RunConfig(
    dataset="fashion_mnist", max_samples=60_000, partition="fedpft_dirichlet", alpha=0.1, clients=20,
    samples_per_client=300, model="scheduling_cnn", rounds=60, epochs=1, batch_size=10, lr=0.005, **PLAIN_SGD,
))  # fmt: skip
"""Layer scheduling's network and local training; 30 steps a round, as everywhere in this check."""
RESNET = CNN.with_keys(model="resnet8", epochs=3, batch_size=30, lr=0.1, momentum=0.9)
"""FedPFT's network and rates; an epoch is 10 steps."""

_TWICE = {"batch_size": 20}  # two epochs a round, of half as many steps each
_TUNED = {"options": {"finetune_epochs": 10}}  # layer scheduling's
_WEIGHED = {"options": {"lr": 5.0}}
"""The hypernetwork's rate follows the length of the clients' steps: its 0.5 is for 130 of lr 0.01 a round. Chosen on a
seed that is not compared and by the weights alone: with 5 those on oneself rise through the run (fc1 0.28 after 20
rounds, 0.95 after 60) and those on others follow the classes in common (r = 0.31); with 20 fc1 and fc2 are above 0.9
after 10 rounds (r = 0.26)."""
OWN: dict[str, dict[str, Any]] = {
    "fedrep": _TWICE,
    "ditto": _TWICE,
    "pfedpt": {**_TWICE, "options": {"prompt_epochs": 1}},
    "local_adaptation": _TUNED,
    "fedbabu": _TUNED,
    "vanilla": _TUNED,
    "anti": _TUNED,
    "pfedla": _WEIGHED,
    "heurpfedla": _WEIGHED,
    "pfedgate": {
        "lr": 0.1
    },  # the authors', for the model and the gate: half of every weight is gated away at first
    "fedpft": {"options": {"feature_epochs": 2}},
}
"""What an algorithm is given beyond its own defaults.

pFedHN is not given its authors' momentum of 0.9 for local training: with it the loss was above 5,000 after two rounds.
"""
ASIDE: dict[str, RunConfig] = {
    "fedcac_20": CNN.with_keys(algorithm="fedcac", options={"until": 20}),
    "fedpft_1+2": RESNET.with_keys(algorithm="fedpft", options={"feature_epochs": 1}),
}
"""Further runs that say what something is owed to; no paper's number is of them. FedCAC narrows whom a client joins
over a third of the rounds, as in its paper, where its 100 are beyond the end. FedPFT has one epoch for features and two
for adapting; 2 + 1 is nearest to the 3 + 2 that its paper has for its most skewed data."""
MODELS = {"scheduling_cnn": "", "resnet8": "@resnet8"}
"""Networks, and what marks the references' runs on them."""
CITED = {
    "FedPFT, Table 7": ("fedpft", ["Table 7"], "cifar10", "dirichlet 0.1"),
    "pFedLA, Table 1": ("pfedla", ["Table 1"], "cifar10", "non-iid 1, 10 clients"),
    "layer scheduling, Table 2": ("scheduling", ["Table 2"], "cifar10", "300 rounds"),
    "PLayer-FL, Table A.7": ("player_fl", ["Table A.7"], "fashion_mnist", ""),
}
"""Columns of the papers' tables: paper, places, dataset, setting. The first one with a method speaks for it.

FedPFT's appendix E is not among them: each of Two-stage's stages has as many rounds there as other methods, here half.
"""
RETRAINED = "PLayer-FL, Table A.7"
"""Every model of this column, FedAvg's too, trained another epoch on its client before the test: no global model."""


def cited() -> pd.DataFrame:
    """Each method's accuracy in its paper: value and spread, with Local's and FedAvg's in ``local`` and ``fedavg``."""
    columns = []
    for where, (paper, places, dataset, setting) in CITED.items():
        printed = items.published(paper)
        printed = printed[
            printed["place"].isin(places) & (printed["quantity"] == "accuracy")
        ]
        printed = printed[
            (printed["dataset"] == dataset) & (printed["setting"] == setting)
        ].drop_duplicates("method")
        column = printed.set_index("method")[["value", "spread"]]
        beside = {
            name: column["value"].get(name, math.nan) for name in ("local", "fedavg")
        }
        if where == RETRAINED:
            beside["fedavg"] = math.nan
        columns.append(column.assign(place=where, **beside))
    table = pd.concat(columns).drop(index="fedavg")
    return table[~table.index.duplicated()]


def recipes() -> dict[str, RunConfig]:
    """Runs of every registered algorithm, of the references on FedPFT's network, and further ones.

    Methods stand in the order of the papers' tables, and after them by name, wherever they are registered. What needs a
    model of residual blocks, as clients of unequal depth do, is compared elsewhere.
    """
    places = list(cited().index)
    others = [
        name
        for name in registry()
        if name not in REFERENCES + PROMPTED and not find(name).needs_blocks
    ]
    others.sort(
        key=lambda name: (places.index(name) if name in places else len(places), name)
    )
    on_cnn = by_method(CNN, [*REFERENCES, *others], OWN)
    marked = {
        f"{name}{MODELS['resnet8']}": RESNET.with_keys(algorithm=name)
        for name in (*REFERENCES, "fedbn")
    }
    return on_cnn | marked | by_method(RESNET, PROMPTED, OWN) | ASIDE


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record each client's final accuracy, a client's steps and FLOPs per round, and steps of fine-tuning."""
    _, frame = trained(task)
    accuracy = tested(frame)
    final = accuracy[
        (accuracy["round"] == task.config.federation.rounds)
        & accuracy["model"].isin(["global", "personal"])
    ]
    counts = []
    for metric, variant in COUNTED:
        counted = frame[(frame["metric"] == metric) & (frame["variant"] == variant)][
            "value"
        ]
        nothing = (metric, variant) == TUNING and counted.empty
        mean, over = (
            (0.0, "") if nothing else (counted.mean(), "mean over rounds and clients")
        )
        counts.append(
            rows.row(
                metric,
                mean,
                variant=variant,
                estimator=over,
                split="train",
                **labels(task),
            )
        )
    return pd.concat([final, rows.frame(counts)], ignore_index=True)


# --- the table -------------------------------------------------------------------------------------------------


def scores(frame: pd.DataFrame, model: str | None = None) -> pd.DataFrame:
    """Mean accuracy over clients, runs x seeds, of the personal models (of the global one without any)."""
    final = frame[frame["metric"] == "accuracy"]
    if model is None:
        final = main_model(final, "run", "seed")
    else:
        final = final[final["model"] == model]
    means = final.groupby(["run", "seed"], sort=False)["value"].mean()
    return means.unstack("seed").sort_index(axis=1)


def claim(value: float, spread: float, reference: float) -> str:
    """A paper's claim against a reference: above or below it by more than the value's own spread, else level."""
    if math.isnan(value) or math.isnan(reference):
        return ""
    gap, spread = (
        round(value - reference, 6),
        0.0 if math.isnan(spread) else spread,
    )  # 89.8 - 89.1 is 0.7
    return "above" if gap > spread else "below" if gap < -spread else "level"


def came_out(expected: str, measured: str) -> str:
    """Return whether a paper's claim ``above`` was confirmed: yes, no or open; empty without such a claim."""
    if expected != "above":
        return ""
    return {"above": "yes", "below": "no"}.get(measured, "open")


def summary(header: Mapping[str, Any], frame: pd.DataFrame) -> pd.DataFrame:
    """A row per run: accuracy, differences to the references on the same network, and the papers' claims."""
    best, shared = scores(frame), scores(frame, "global")
    papers, personal = cited(), set(frame.loc[frame["model"] == "personal", "run"])
    counted = frame[frame["metric"].isin(["steps", "flops"])]
    counted = counted.pivot_table(
        values="value", index="run", columns=["metric", "variant"]
    )
    lines = []
    for run in best.index:
        config = header["runs"][run]["config"]
        name, mark = config["algorithm"], MODELS.get(config["model"], "")
        accuracies = best.loc[run].dropna()
        mean, low, high = statistics.mean_interval(accuracies)
        line = {
            "run": run,
            "algorithm": name,
            "model": config["model"],
            "seeds": len(accuracies),
        }
        line |= {
            "steps": counted.loc[run, STEPS],
            "tuning_steps": counted.loc[run, TUNING],
        }
        line["work"] = counted.loc[run, WORK] / counted[WORK].get(
            f"fedavg{mark}", math.nan
        )
        line |= {"accuracy": mean, "low": low, "high": high}
        line["global"] = shared.loc[run].mean() if run in shared.index else math.nan
        place = papers["place"].get(name, "")
        claims = (
            bool(place) and run not in ASIDE and (place != RETRAINED or run in personal)
        )
        for reference in ("local", "fedavg"):
            gap, pairs = against(best, run, f"{reference}{mark}")
            itself = name == reference
            line |= {
                f"{reference}_{end}": value
                for end, value in zip(("gap", "low", "high"), gap, strict=True)
            }
            line[f"found_{reference}"] = "" if itself else outcome(gap, pairs)
            line[f"paper_{reference}"] = (
                claim(*papers.loc[name, ["value", "spread", reference]])
                if claims and not itself
                else ""
            )
            line[f"came_out_{reference}"] = came_out(
                line[f"paper_{reference}"], line[f"found_{reference}"]
            )
        line["place"] = place if claims else ""
        lines.append(line)
    return pd.DataFrame(lines)


def _page(table: pd.DataFrame) -> str:
    def side(reference: str) -> list[str]:
        gaps = table[[f"{reference}_gap", f"{reference}_low", f"{reference}_high"]]
        return [
            percent(mean, low, high, "+") for mean, low, high in gaps.to_numpy(float)
        ]

    def words(name: str) -> list[str]:
        return [text or "–" for text in table[name]]

    return markdown(
        {
            "run": [
                names.title(run) + (", ResNet-8" if "@" in run else "")
                for run in table["run"]
            ],
            "seeds": list(table["seeds"]),
            "steps a round": [f"{value:.0f}" for value in table["steps"]],
            "FLOPs / FedAvg's": [
                "–" if math.isnan(value) else f"{value:.2f}" for value in table["work"]
            ],
            "steps at the end": [f"{value:.0f}" for value in table["tuning_steps"]],
            "personalised %": [
                percent(*each)
                for each in table[["accuracy", "low", "high"]].to_numpy(float)
            ],
            "global %": [
                percent(value, math.nan, math.nan) for value in table["global"]
            ],
            "− Local": side("local"),
            "paper": words("paper_local"),
            "came out": words("came_out_local"),
            "− FedAvg": side("fedavg"),
            "paper ": words("paper_fedavg"),
            "came out ": words("came_out_fedavg"),
            "place": words("place"),
        }
    )


# --- findings and picture --------------------------------------------------------------------------------------


def _findings(table: pd.DataFrame, frame: pd.DataFrame) -> tuple[Finding, ...]:
    personalised = set(frame.loc[frame["model"] == "personal", "run"])
    personal = table[
        table["run"].isin(personalised.difference(ASIDE))
        & (table["algorithm"] != "local")
    ]
    counts = personal["found_fedavg"].value_counts()
    decided = bool(len(personal)) and (personal["found_fedavg"] != "").all()
    not_above = personal[~personal["found_fedavg"].isin(["above", ""])]
    same = personal["found_fedavg"].eq("equal") & personal["algorithm"].eq("fedbn")
    above = Finding(
        "personalised methods lie above FedAvg's global model in personalised accuracy",
        ", ".join(
            f"{count} {word or 'with ' + FEWEST}" for word, count in counts.items()
        )
        + _listed(". Not above", not_above, "fedavg_gap"),
        _all_above(personal[~same]) if decided else None,
    )
    claimed = table[table["paper_local"] == "above"]
    far = claimed[claimed["local_gap"] < -FAR]
    apart = [_no_lower(each) for each in claimed.itertuples(index=False)]
    below = Finding(
        f"no method that its paper puts above Local lies more than {FAR:.0%} below it",
        f"by their 95 % intervals {apart.count(False)} of {len(claimed)} do and {apart.count(None)} are undecided"
        + _listed(". Below in the mean", far, "local_gap"),
        joint(apart),
    )
    others = table[(table["steps"] - table["steps"].median()).abs() > 0.5]
    dear = table[table["work"] > DEAR].sort_values("work", ascending=False)
    costs = ", ".join(
        f"{names.title(run)} {work:.1f}"
        for run, work in zip(dear["run"], dear["work"], strict=True)
    )
    budget = Finding(
        "every algorithm takes the same number of SGD steps a round (one batch each)",
        f"{table['steps'].median():g} steps"
        + "".join(
            f", {names.title(each.run)} {each.steps:g}"
            for each in others.itertuples(index=False)
        )
        + (
            f". Larger batches or more gradients a step (times FedAvg's FLOPs): {costs}"
            if costs
            else ""
        ),
        bool(others.empty),
    )
    return above, below, budget


def _all_above(table: pd.DataFrame) -> bool | None:
    """Return whether every run lies above FedAvg: False if one lies below, None if one is undecided."""
    return joint(
        [
            how == "above" or (None if how == UNDECIDED else False)
            for how in table["found_fedavg"]
        ]
    )


def _no_lower(line: Any) -> bool | None:
    """Return whether a run lies no more than :data:`FAR` below Local, by the 95 % interval of the difference."""
    if not line.found_local:
        return None
    return True if line.local_low > -FAR else False if line.local_high < -FAR else None


def _listed(title: str, table: pd.DataFrame, column: str) -> str:
    listed = ", ".join(
        f"{names.title(run)} {100 * gap:+.1f}"
        for run, gap in zip(table["run"], table[column], strict=True)
    )
    return f"{title}: {listed}" if listed else ""


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    table = summary(header, frame)
    missing, every = header["missing"], not header["missing"] and not header["failed"]
    ranked = every and (table["seeds"] >= LEAST).all()
    if ranked:
        table = table.sort_values(
            "accuracy", ascending=False, ignore_index=True, kind="stable"
        )
    groups = [
        (model, table[table["model"] == model]) for model in table["model"].unique()
    ]
    with style():
        deep = [len(part) + 2 for _, part in groups]
        figure = plt.figure(figsize=(8.4, 1.2 + 0.21 * sum(deep)), layout="constrained")
        grid = figure.subplots(
            len(groups), 2, squeeze=False, width_ratios=[1, 0.8], height_ratios=deep
        )
        for (left, right), (model, part) in zip(grid, groups, strict=True):
            shown = part.rename(columns={"accuracy": "value", "seeds": "n"}).assign(
                algorithm=part["run"].map(names.title)
            )
            _gaps(left, part)
            comparison(shown, "accuracy", right)
            right.set_yticks([])
            _in_percent(right)
            right.set_title(names.network(model), fontsize=8)
            for reference, colour, line in (
                ("local", COLOURS[1], "--"),
                ("fedavg", COLOURS[2], ":"),
            ):
                for value in part.loc[part["algorithm"] == reference, "accuracy"]:
                    right.axvline(
                        value, color=colour, linewidth=1.1, linestyle=line, zorder=1
                    )
        for column, bound in zip(grid.T, (math.inf, 1.0), strict=True):
            one_range(column, "x", -math.inf, bound)
    order = "sorted by accuracy" if ranked else "in no order because seeds are missing"
    left_out = (
        f" Missing: {len(missing)} of {len(missing) + _count(header)} runs (listed on the page)."
        if missing
        else ""
    )
    caption = (
        f"{_federation(header, frame)} and {seeds_in_words(header['seeds'])}{'' if every else ' at most'}. Runs are "
        f"{order}. Left: the difference to Local paired by seed. Right: the mean over clients after the last round "
        "with its 95 % interval over seeds. It is for personal models if there are any and otherwise for the global "
        f"model. Dashed lines are Local and dotted lines FedAvg. Axes of accuracy end at 0 and 100 %.{left_out}"
    )
    text = [_page(table)]
    text += [f"± is half the 95 % interval over seeds. With {FEWEST}. {NOTE}"]
    text += [
        f"{name} did not finish: {reason}." for name, reason in header["failed"].items()
    ]
    if missing:
        text.append(_missing(header))
    findings = _findings(table, frame)
    lead = "".join(
        f"**Personalised accuracy against FedAvg's global model: {each.measured.partition(';')[0]}.**"
        for each in findings[:1]
    )
    return Drawing(figure, table, caption, findings, "\n\n".join(text), lead)


def _in_percent(ax: Axes) -> None:
    """Show the shares of a comparison in percent: on the axis, and in the numbers next to it."""
    ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
    ax.set_xlabel(ax.get_xlabel().replace("accuracy", "accuracy, %"))
    for each in ax.texts:
        each.set_text(
            _SHARE.sub(lambda found: f"{100 * float(found[0]):.1f}", each.get_text())
        )


_SHARE = re.compile(r"\d\.\d{3}")


def _count(header: Mapping[str, Any]) -> int:
    return sum(map(len, header["had"].values()))


def _missing(header: Mapping[str, Any]) -> str:
    """A sentence that lists the missing runs by seed."""
    names = [name.rpartition(" ")[::2] for name in header["missing"]]
    every = {*header["runs"], *(run for run, _ in names)}
    parts = []
    for seed in dict.fromkeys(seed for _, seed in names):
        runs = [run for run, its in names if its == seed]
        parts.append(
            f"of seed {seed} {'all' if len(runs) == len(every) else ', '.join(runs)}"
        )
    return f"Missing: {'; '.join(parts)}."


def _federation(header: Mapping[str, Any], frame: pd.DataFrame) -> str:
    config = next(iter(header["runs"].values()))["config"]
    sizes = frame["n_train"].dropna()
    each = (
        f"{sizes.min()}"
        if sizes.min() == sizes.max()
        else f"{sizes.min()} to {sizes.max()}"
    )
    skew = "" if config["alpha"] is None else f" by Dirichlet({config['alpha']:g})"
    clients = frame.loc[frame["client"] != "", "client"].nunique()
    title = (
        CASES[config["dataset"]].title
        if config["dataset"] in CASES
        else config["dataset"]
    )
    return f"{title}: {clients} clients with {each} training samples{skew}, {config['rounds']} rounds"


def _gaps(ax: Axes, part: pd.DataFrame) -> None:
    """Draw each run's difference to Local in percentage points, with its interval."""
    y = np.arange(len(part))
    ax.axvline(0, color="0.6", linewidth=0.8, zorder=1)
    ax.hlines(
        y,
        100 * part["local_low"],
        100 * part["local_high"],
        color=COLOURS[0],
        linewidth=1.6,
    )
    ax.plot(
        100 * part["local_gap"],
        y,
        linestyle="none",
        marker="o",
        markersize=5,
        color=COLOURS[0],
    )
    ax.set_yticks(y, list(map(names.title, part["run"])), fontsize=7.5)
    ax.set(ylim=(len(part) - 0.4, -0.6), xlabel="personalised accuracy − Local, points")


RUNS = recipes()
ITEM = items.register(Recipe(
    NAME, "Every algorithm on Fashion-MNIST beside Local and FedAvg", RUNS, seeds=3, newcomers=newcomers(NAME, RUNS),
    budget="about 11 hours of one core, 5.5 of two; a run takes 2 to 4 minutes, pFedMe's and on ResNet-8 12 to 30",
    measure=_measure, draw=_draw,
))  # fmt: skip
