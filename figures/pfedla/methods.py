"""pFedLA's Table 1 on CIFAR-10 with ten clients, and the accuracies of its Table 3 by retained layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

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
    """Return the rows of this study and of :mod:`figures.pfedla.overlap`: pFedLA, HeurpFedLA, Local and FedAvg."""
    stored_rows = overlap.ITEM.read(overlap.ITEM.path())[1]
    return pd.concat([frame, stored_rows], ignore_index=True)


def scores(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the mean accuracy of the last three evaluations, (run, quantity) x seeds."""
    means_by_quantity = {
        quantity: last_evaluations(quantity_curves)
        for quantity, quantity_curves in curves(frame).items()
    }
    return pd.concat(means_by_quantity, names=["quantity"]).reorder_levels(
        ["run", "quantity"]
    )


def retaining(k: int, quantity: str = BEFORE) -> tuple[str, str]:
    """Return the run with k retained layers, and the quantity that is shown of it."""
    return {0: OURS, **overlap.RETAINING}[k], quantity


def curves(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return accuracy through training by quantity, (run, round) x seeds.

    Before local training the personal model counts, or the global one of a method that has no other.
    """
    accuracy_rows = frame[
        (frame["metric"] == "accuracy")
        & frame["model"].isin(["global", "personal", "local"])
    ]
    accuracy_table = accuracy_rows.pivot(
        index=["run", "round", "seed"], columns="model", values="value"
    )
    accuracy_table = accuracy_table.reindex(columns=["global", "personal", "local"])
    is_unfinished = accuracy_table.index.get_level_values("run").isin(UNFINISHED)
    curves_by_quantity = {
        BEFORE: accuracy_table["personal"].fillna(accuracy_table["global"]),
        AFTER: accuracy_table["local"].mask(is_unfinished),
    }
    return {
        quantity: seed_curves.dropna().unstack("seed")
        for quantity, seed_curves in curves_by_quantity.items()
    }


def printed_retaining() -> NDArray[np.float64]:
    """Return Table 3's accuracies on CIFAR-10 with 0, 1, 2, ... retained layers, as shares."""
    table_rows = where(
        items.published("pfedla"),
        place="Table 3",
        dataset="cifar10",
        quantity="accuracy",
    )
    accuracies: NDArray[np.float64] = table_rows["value"].to_numpy() / 100
    return accuracies


def compromises(frame: pd.DataFrame, quantity: str) -> Finding:
    """Return a finding on whether retaining one, two and three layers costs accuracy, as the paper says of CIFAR-10."""
    accuracy_curves = curves(frame)[quantity]
    published_accuracies = printed_retaining()
    if quantity == AFTER:  # the paper has no such numbers
        published_accuracies = published_accuracies + math.nan
    verdict = judged(
        {
            f"k = {k}": settled(
                accuracy_curves,
                run,
                OURS,
                printed=published_accuracies[k] - published_accuracies[0],
            )
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
    accuracy_curves = curves(frame)[BEFORE]
    published_loss = printed()[OURS, BEFORE] - printed()["heurpfedla", BEFORE]
    run, _ = retaining(1)
    accuracy_loss = settled(accuracy_curves, OURS, run)
    room_verdict = judged(
        {"": replace(accuracy_loss, each=published_loss - accuracy_loss.each)}
    )
    loss_text = points(accuracy_loss.interval)
    return Finding(
        f"before local training one retained layer costs no more than the printed {100 * published_loss:.1f} points",
        f"points lost {loss_text}",
        room_verdict.held,
        room_verdict.incomparable,
    )


def number_matters_little(frame: pd.DataFrame) -> Finding:
    """Return whether accuracy with two and three retained layers is that with one, as the paper says in Sec. 4.5."""
    accuracy_curves = curves(frame)[BEFORE]
    published_accuracies = printed_retaining()
    reference_run, _ = retaining(1)
    gaps = {}
    for k in (2, 3):
        run, _ = retaining(k)
        gaps[f"k = {k}"] = settled(
            accuracy_curves,
            run,
            reference_run,
            printed=published_accuracies[k] - published_accuracies[1],
        )
    return judged(gaps, LEVEL).finding(
        f"before local training two and three retained layers are within {100 * MARGIN:g} point of one",
        "points against one ",
    )


# --- Table 1 ---------------------------------------------------------------------------------------------------


def printed() -> pd.Series:
    """Return Table 1's accuracies on CIFAR-10 with ten clients, as shares by (method, before local training)."""
    published_rows = items.published("pfedla")
    table_rows = where(
        published_rows,
        place="Table 1",
        dataset="cifar10",
        setting="non-iid 1, 10 clients",
    )
    return pd.Series(
        {
            (table_row.method, BEFORE): table_row.value / 100
            for table_row in table_rows.itertuples()
        }
    )


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    frame = joined(frame)
    accuracies, published = scores(frame), printed()
    titles = {
        method: title(method)
        for method in METHODS
        if (method, BEFORE) in accuracies.index
    }
    row_index = pd.MultiIndex.from_product([titles, QUANTITIES])
    accuracies = accuracies.reindex(row_index).dropna(how="all")
    with sheet(6.4, 0.8 + 0.33 * len(titles)) as figure:
        marks(
            figure.subplots(),
            beside_paper(accuracies, published, titles, QUANTITIES),
            list(titles.values()),
            factor=100,
            xlabel="accuracy, %",
        )
        key_above(figure, 3, size=7.5)
    setting_text = overlap.setting(header)
    seeds_text = seeds_in_words(span(accuracies.notna().sum(axis=1))).capitalize()
    missing_text = missing_runs(header, titles)
    caption = (
        "Mean test accuracy of the clients before and after local training, the mean of the last three evaluations. "
        "Intervals (95 %) are over seeds. Before local training "
        f"a client has the model that it receives or mixes. Hollow marks are published in Table 1. "
        f"{setting_text} {seeds_text}. The paper has "
        f"{overlap.PAPER_ROUNDS} rounds. It does not give the number of images a client.{missing_text}"
    )
    drawn_table = pd.DataFrame([
        {
            "method": titles[method], "quantity": QUANTITIES[quantity], **mean_interval(score.dropna())._asdict(),
            "seeds": int(score.notna().sum()), "published": published.get((method, quantity)),
        }
        for (method, quantity), score in accuracies.iterrows()
    ])  # fmt: skip
    page_text = _page(accuracies, published, titles)
    rates_text = of_rates(frame)
    return Drawing(
        figure,
        drawn_table,
        caption,
        _findings(curves(frame)[BEFORE]),
        f"{page_text}\n\nBefore local training, by the rate of the hypernetwork, three seeds:\n\n"
        f"{rates_text}",
    )


def _findings(accuracy_curves: pd.DataFrame) -> tuple[Finding, ...]:
    """Return the claims of Table 1, before local training, as the paper seems to have tested."""
    other_methods = [method for method in METHODS if method != OURS]
    gaps = {method: lead(accuracy_curves, method) for method in other_methods}
    all_verdict = judged({title(method): gap for method, gap in gaps.items()})
    fedfomo_verdict = judged({"": gaps["fedfomo"]})
    return (
        all_verdict.finding(
            f"before local training pFedLA lies above the other {len(other_methods)} methods, as in Table 1",
            "points more: ",
        ),
        fedfomo_verdict.finding(
            "before local training pFedLA lies above FedFomo, which weighs whole models",
            "points more: ",
        ),
    )


def lead(accuracy_curves: pd.DataFrame, other_method: str) -> Difference:
    """Return pFedLA's lead over another method, before local training, with the printed lead."""
    published_accuracies = printed().xs(BEFORE, level=1)
    return settled(
        accuracy_curves,
        OURS,
        other_method,
        printed=published_accuracies[OURS] - published_accuracies[other_method],
    )


def of_rates(frame: pd.DataFrame) -> str:
    """Return the table of the hypernetwork's rates before local training, over the seeds that all rates have."""
    rate_rows = overlap.RATES.read(overlap.RATES.path())[1]
    common_rows = frame[frame["seed"].isin(rate_rows["seed"])]
    final_accuracies = last_evaluations(
        curves(pd.concat([common_rows, rate_rows]))[BEFORE]
    )
    runs = {"0.5": OURS} | {run.partition("_")[2]: run for run in overlap.RATES.runs}
    leads = {
        "minus " + title(other_method): [
            points(
                mean_interval(
                    final_accuracies.loc[run] - final_accuracies.loc[other_method]
                )
            )
            for run in runs.values()
        ]
        for other_method in ("local", "fedavg", "fedfomo")
    }
    accuracies = numbers(100 * final_accuracies.loc[[*runs.values()]].mean(axis=1))
    return markdown({"rate": [*runs], "pFedLA %": accuracies, **leads})


def _page(values: pd.DataFrame, published: pd.Series, titles: Mapping[str, str]) -> str:
    published_values = [
        100 * published.get((method, BEFORE), math.nan) for method in titles
    ]
    table_text = markdown({
        "": list(titles.values()),
        **{
            f"{quantity_text} %": means(values, [(method, quantity) for method in titles])
            for quantity, quantity_text in QUANTITIES.items()
        },
        "published %": numbers(published_values),
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
    return f"{table_text}\n\n{note}"


items.register(
    Item(
        "pfedla.table1",
        "Accuracy of ten methods on CIFAR-10, ten clients (pFedLA, Table 1)",
        source=NAME,
        draw=_draw,
        shown=[run for run in RUNS if run in METHODS],
    )
)
