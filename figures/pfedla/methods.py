"""pFedLA's Table 1 on CIFAR-10 with ten clients, and the accuracies of its Table 3 by retained layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from figures import items
from figures.differences import Difference, last_evaluations, settled
from figures.forms import beside_paper, key_above, marks, sheet
from figures.items import Drawing, Finding, Item
from figures.names import title
from figures.page import markdown, means, missing_runs, numbers, seeds_in_words, span
from figures.pfedla import overlap
from figures.recipe import by_method, labels, mean_accuracy, trained, where
from figures.verdicts import LEVEL, MARGIN, TRAIL, judged, points
from fl_core import rows
from fl_core.run import runner
from fl_core.statistics import mean_interval

NAME = "pfedla.methods"
BASE = overlap.BASE
INNER = 5
"""Steps of pFedMe's personal model on a batch."""
OURS = "pfedla"
RUNS = by_method(
    BASE, ("per_fedavg", "pfedme", "pfedhn", "fedbn", "fedrep", "fedfomo"),
    {"pfedme": {"epochs": int(BASE.training.epochs or 0) // INNER}},
)  # fmt: skip
"""The methods that :mod:`figures.pfedla.overlap` has not, with its data, rounds and rate. pFedMe has a fifth of the
epochs, for each of its batches takes five steps: all but Per-FedAvg, with two gradients a step, do as much work."""
METHODS = (
    "local",
    "fedavg",
    "per_fedavg",
    "pfedme",
    "pfedhn",
    "fedbn",
    "fedrep",
    "fedfomo",
    OURS,
    "heurpfedla",
)
"""Table 1's, in its order."""
UNFINISHED = ("per_fedavg",)
"""Methods whose model after local training is not one to be used: Per-FedAvg's has still to be adapted."""
BEFORE, AFTER = "before", "after"
QUANTITIES = {BEFORE: "before local training", AFTER: "after it"}


# --- measuring -------------------------------------------------------------------------------------------------


def measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record the clients' mean accuracy through training, before and after local training."""
    _, frame = trained(task)
    return rows.frame(list(mean_accuracy(frame, labels(task))))


STUDY = items.register(Item(
    NAME, "Accuracy of the methods that pFedLA is compared with, CIFAR-10", RUNS, seeds=6,
    budget="some three hours of one core; a run takes 5 to 15 minutes", measure=measure,
))  # fmt: skip


def joined(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of this study, and those of :mod:`figures.pfedla.overlap`: pFedLA, HeurpFedLA, Local and FedAvg."""
    stored = overlap.ITEM.read(overlap.ITEM.path())[1]
    return pd.concat([frame, stored], ignore_index=True)


def scores(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the mean accuracy of the last three evaluations, (run, quantity) x seeds."""
    means_of = {
        quantity: last_evaluations(of_quantity)
        for quantity, of_quantity in curves(frame).items()
    }
    return pd.concat(means_of, names=["quantity"]).reorder_levels(["run", "quantity"])


def retaining(k: int, quantity: str = BEFORE) -> tuple[str, str]:
    """Return the run with k retained layers, and the quantity that is shown of it."""
    return {0: OURS, **overlap.RETAINING}[k], quantity


def curves(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return accuracy through training by quantity, (run, round) x seeds.

    Before local training the personal model counts, or the global one of a method that has no other.
    """
    accuracy = frame[
        (frame["metric"] == "accuracy")
        & frame["model"].isin(["global", "personal", "local"])
    ]
    table = accuracy.pivot(
        index=["run", "round", "seed"], columns="model", values="value"
    )
    table = table.reindex(columns=["global", "personal", "local"])
    unfinished = table.index.get_level_values("run").isin(UNFINISHED)
    curves_of = {
        BEFORE: table["personal"].fillna(table["global"]),
        AFTER: table["local"].mask(unfinished),
    }
    return {
        quantity: values.dropna().unstack("seed")
        for quantity, values in curves_of.items()
    }


def compromises(frame: pd.DataFrame, quantity: str) -> Finding:
    """Return a finding on whether retaining one, two and three layers costs accuracy, as the paper says of CIFAR-10."""
    learnt = curves(frame)[quantity]
    table = where(
        items.published("pfedla"),
        place="Table 3",
        dataset="cifar10",
        quantity="accuracy",
    )
    theirs = table["value"].to_numpy() / 100
    if quantity == AFTER:  # the paper has no such numbers
        theirs = theirs + math.nan
    verdict = judged(
        {
            f"k = {k}": settled(learnt, run, OURS, printed=theirs[k] - theirs[0])
            for k, run in overlap.RETAINING.items()
        },
        TRAIL,
    )
    return verdict.finding(
        f"{quantity} local training retaining one, two or three layers compromises accuracy",
        "points against none ",
    )


def costs_little(frame: pd.DataFrame) -> Finding:
    """Return whether one retained layer costs no more accuracy than the paper prints, which it calls negligible."""
    learnt = curves(frame)[BEFORE]
    theirs = printed()[OURS, BEFORE] - printed()["heurpfedla", BEFORE]
    run, _ = retaining(1)
    loss = settled(learnt, OURS, run)
    room = judged({"": replace(loss, each=theirs - loss.each)})
    loss_text = points(loss.interval)
    return Finding(
        f"before local training one retained layer costs no more than the printed {100 * theirs:.1f} points",
        f"points lost {loss_text}",
        room.held,
        room.incomparable,
    )


def number_matters_little(frame: pd.DataFrame) -> Finding:
    """Return whether accuracy with two and three retained layers is that with one, as the paper says in Sec. 4.5."""
    learnt = curves(frame)[BEFORE]
    table = where(
        items.published("pfedla"),
        place="Table 3",
        dataset="cifar10",
        quantity="accuracy",
    )
    theirs = table["value"].to_numpy() / 100
    one, _ = retaining(1)
    gaps = {}
    for k in (2, 3):
        run, _ = retaining(k)
        gaps[f"k = {k}"] = settled(learnt, run, one, printed=theirs[k] - theirs[1])
    return judged(gaps, LEVEL).finding(
        f"before local training two and three retained layers are within {100 * MARGIN:g} point of one",
        "points against one ",
    )


# --- Table 1 ---------------------------------------------------------------------------------------------------


def printed() -> pd.Series:
    """Table 1's published accuracies on CIFAR-10 with ten clients, as shares by (method, before local training)."""
    every = items.published("pfedla")
    of_table = where(
        every, place="Table 1", dataset="cifar10", setting="non-iid 1, 10 clients"
    )
    return pd.Series(
        {(line.method, BEFORE): line.value / 100 for line in of_table.itertuples()}
    )


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    frame = joined(frame)
    values, published = scores(frame), printed()
    lines = {
        method: title(method) for method in METHODS if (method, BEFORE) in values.index
    }
    order = pd.MultiIndex.from_product([lines, QUANTITIES])
    values = values.reindex(order).dropna(how="all")
    with sheet(6.4, 0.8 + 0.33 * len(lines)) as figure:
        marks(
            figure.subplots(),
            beside_paper(values, published, lines, QUANTITIES),
            list(lines.values()),
            factor=100,
            xlabel="accuracy, %",
        )
        key_above(figure, 3, size=7.5)
    setting_text = overlap.setting(header)
    seeds_text = seeds_in_words(span(values.notna().sum(axis=1))).capitalize()
    missing_text = missing_runs(header, lines)
    caption = (
        "Mean test accuracy of the clients before and after local training, the mean of the last three evaluations. "
        "Intervals (95 %) are over seeds. Before local training "
        f"a client has the model that it receives or mixes. Hollow marks are published in Table 1. "
        f"{setting_text} {seeds_text}. The paper has "
        f"{overlap.PAPER_ROUNDS} rounds. It does not give the number of images a client.{missing_text}"
    )
    shown = pd.DataFrame([
        {
            "method": lines[method], "quantity": QUANTITIES[quantity], **mean_interval(score.dropna())._asdict(),
            "seeds": int(score.notna().sum()), "published": published.get((method, quantity)),
        }
        for (method, quantity), score in values.iterrows()
    ])  # fmt: skip
    page_text = _page(values, published, lines)
    rates_text = of_rates(frame)
    return Drawing(
        figure,
        shown,
        caption,
        _findings(curves(frame)[BEFORE]),
        f"{page_text}\n\nBefore local training, by the rate of the hypernetwork, three seeds:\n\n"
        f"{rates_text}",
    )


def _findings(learnt: pd.DataFrame) -> tuple[Finding, ...]:
    """Return the claims of Table 1, before local training, as the paper seems to have tested."""
    others = [method for method in METHODS if method != OURS]
    gaps = {method: lead(learnt, method) for method in others}
    best = judged({title(method): gap for method, gap in gaps.items()})
    whole = judged({"": gaps["fedfomo"]})
    return (
        best.finding(
            f"before local training pFedLA lies above the other {len(others)} methods, as in Table 1",
            "points more: ",
        ),
        whole.finding(
            "before local training pFedLA lies above FedFomo, which weighs whole models",
            "points more: ",
        ),
    )


def lead(learnt: pd.DataFrame, other: str) -> Difference:
    """Return pFedLA's lead over another method, before local training, with the printed lead."""
    theirs = printed().xs(BEFORE, level=1)
    return settled(learnt, OURS, other, printed=theirs[OURS] - theirs[other])


def of_rates(frame: pd.DataFrame) -> str:
    """Return the table of the hypernetwork's rates before local training, over the seeds that all rates have."""
    others = overlap.RATES.read(overlap.RATES.path())[1]
    of_both_rates = frame[frame["seed"].isin(others["seed"])]
    score = last_evaluations(curves(pd.concat([of_both_rates, others]))[BEFORE])
    runs = {"0.5": OURS} | {run.partition("_")[2]: run for run in overlap.RATES.runs}
    leads = {
        "minus " + title(other): [
            points(mean_interval(score.loc[run] - score.loc[other]))
            for run in runs.values()
        ]
        for other in ("local", "fedavg", "fedfomo")
    }
    of_both_rates = numbers(100 * score.loc[[*runs.values()]].mean(axis=1))
    return markdown({"rate": [*runs], "pFedLA %": of_both_rates, **leads})


def _page(values: pd.DataFrame, published: pd.Series, lines: Mapping[str, str]) -> str:
    theirs = [100 * published.get((method, BEFORE), math.nan) for method in lines]
    table = markdown({
        "": list(lines.values()),
        **{
            f"{words} %": means(values, [(method, quantity) for method in lines])
            for quantity, words in QUANTITIES.items()
        },
        "published %": numbers(theirs),
    })  # fmt: skip
    note = (
        "± is half the 95 % interval over seeds.\n\n"
        "The paper does not say whether its models were trained locally before the test. Its FedAvg is far below "
        "Local, so it was not. Its FedBN is as good as Local and may have been. The only learning rate that it gives "
        "is 0.01.\n\n"
        f"Here pFedMe has lambda 15 and {INNER} steps of rate 0.01 on a batch. It has a fifth of the epochs and so "
        "the same amount of work as the others. First-order Per-FedAvg takes two gradients a step, which is twice the "
        "work. It is tested after its adaptation step only. FedRep trains its head for nine of ten epochs. FedFomo "
        "downloads five models and has its own validation split."
    )
    return f"{table}\n\n{note}"


items.register(
    Item(
        "pfedla.table1",
        "Accuracy of ten methods on CIFAR-10, ten clients (pFedLA, Table 1)",
        source=NAME,
        draw=_draw,
        shown=[run for run in RUNS if run in METHODS],
    )
)
