"""pFedLA's Table 2 on CIFAR-10 with ten clients: half of a client's samples have two classes, the rest any other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from figures import items
from figures.differences import settled
from figures.forms import beside_paper, key_above, marks, sheet
from figures.items import Drawing, Item, set_apart
from figures.names import title
from figures.page import markdown, means, missing_runs, numbers, seeds_behind
from figures.pfedla.methods import (
    BEFORE,
    INNER,
    METHODS,
    OURS,
    QUANTITIES,
    curves,
    measure,
    scores,
)
from figures.pfedla.overlap import BASE, PAPER_ROUNDS
from figures.recipe import by_method, where
from figures.verdicts import judged, little_learned
from fl_core.statistics import mean_interval

NAME = "pfedla.table2"
GUESSING = 0.1
RUNS = by_method(
    BASE.with_keys(partition="non_iid_2", classes_per_client=2),
    METHODS,
    {"pfedme": {"epochs": int(BASE.training.epochs or 0) // INNER}},
)


def printed() -> pd.Series:
    """Return Table 2's accuracies on CIFAR-10 with ten clients, as shares by (method, before local training)."""
    table_rows = where(
        items.published("pfedla"),
        place="Table 2",
        dataset="cifar10",
        setting="non-iid 2, 10 clients",
    )
    return pd.Series(
        {(row.method, BEFORE): row.value / 100 for row in table_rows.itertuples()}
    )


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    accuracy_curves, published = curves(frame), printed()
    values = scores(frame)
    titles = {method: title(method) for method in METHODS}
    with sheet(6.4, 0.8 + 0.33 * len(titles)) as figure:
        marks(
            figure.subplots(),
            beside_paper(values, published, titles, QUANTITIES),
            list(titles.values()),
            factor=100,
            xlabel="accuracy, %",
        )
        key_above(figure, 3, size=7.5)
    gaps = {
        titles[method]: settled(
            accuracy_curves[BEFORE], OURS, method, PAPER_ROUNDS,
            published[OURS, BEFORE] - published[method, BEFORE],
        )
        for method in METHODS
        if method != OURS
    }  # fmt: skip
    levels = {
        titles[method]: (values.loc[method, BEFORE].mean(), published[method, BEFORE])
        for method in METHODS
        if (method, BEFORE) in values.index
    }
    finding = judged(gaps).finding(
        "before local training pFedLA lies above the other nine methods, as in Table 2",
        "points more: ",
    )
    table = pd.DataFrame([
        {"method": titles[method], "quantity": QUANTITIES[quantity], **mean_interval(score.dropna())._asdict(),
         "seeds": int(score.notna().sum()), "published": published.get((method, quantity), math.nan)}
        for (method, quantity), score in values.iterrows()
    ])  # fmt: skip
    n_seeds, missing_text = seeds_behind(header), missing_runs(header)
    caption = (
        "Mean test accuracy of the clients before and after local training, the mean of the last three evaluations, "
        "with 95 % intervals over seeds. Hollow marks are published in Table 2. CIFAR-10: 10 clients with 600 images "
        "each, half of them of two classes, which is our reading. They train for 40 of 600 rounds. "
        f"{n_seeds} seeds.{missing_text}"
    )
    before = [(method, BEFORE) for method in METHODS]
    text = markdown({
        "": list(titles.values()),
        **{f"{words} %": means(values, [(m, name) for m in METHODS]) for name, words in QUANTITIES.items()},
        "published %": numbers(100 * published[before]),
    })  # fmt: skip
    return Drawing(
        figure,
        table,
        caption,
        set_apart([finding], little_learned(levels, (GUESSING, GUESSING))),
        text,
    )


items.register(Item(
    NAME, "Accuracy of ten methods on CIFAR-10, ten clients, non-IID 2 (pFedLA, Table 2)", RUNS, seeds=3,
    budget="some four hours of one core; a run takes 1 to 15 minutes", measure=measure, draw=_draw, partial=True,
))  # fmt: skip
