"""FedRA's Table 1 from runs on PACS: how much of the full model's accuracy each method keeps."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from fedlayers.diagnostics.pictures.drawing import COLOURS, MARKERS, style
from figures import items
from figures.differences import UNDECIDED, against, outcome
from figures.fedra.depth import DEPTHS, FAR, NAME, TITLES, accuracies, columns, described
from figures.items import Drawing, Finding, View
from figures.page import markdown, missing_runs, percent, seeds_in_words
from fl_core.errors import UsageError, listing

METHODS = ("alllarge", "fedra", "inclusivefl", "depthfl", "allsmall")
"""The methods in the order of the paper's means, on both of its data sets with the transformer."""
WHOLE = METHODS[0]


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    styles = accuracies(frame)
    means = styles.groupby("run", sort=False).mean()
    if WHOLE not in means.index:
        raise UsageError(f"{NAME} has no run of {WHOLE}, by which the others are measured")
    means = means.reindex([run for run in METHODS if run in means.index])
    published = {title: _published(dataset) for dataset, title in TITLES.items()}
    kept = pd.DataFrame({"PACS, here": (means / means.loc[WHOLE]).mean(axis=1)})
    for title, table in published.items():
        kept[f"{title}, published"] = table["mean"] / table.loc[WHOLE, "mean"]  # of the methods that were run
    with style():
        figure = plt.figure(figsize=(5.6, 3.2), layout="constrained")
        ax = figure.subplots()
        for k, (where, shares) in enumerate(kept.items()):
            ax.plot(100 * shares, range(len(means)), linestyle="none", marker=MARKERS[k], color=COLOURS[k], label=where)
        ax.set_yticks(range(len(means)), means.index)
        ax.set(ylim=(len(means) - 0.5, -0.5), xlabel=f"accuracy, % of {WHOLE}'s")
        ax.legend(fontsize=6.5, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(kept.columns))
    depths, seeds = ", ".join(map(str, DEPTHS)), int(means.notna().sum(axis=1).min())
    caption = (
        f"Accuracy of the global model, mean of the domains, as a share of {WHOLE}'s. {described(header)}, "
        f"{seeds_in_words(seeds)}; depths of the clients {depths}, in the paper "
        "12, 10, 8, 6, 4, 3. The paper starts from ImageNet's weights, this from a pretraining on "
        f"Tiny-ImageNet. The paper's MLP-Mixer was not run.{missing_runs(header, METHODS)}"
    )
    table = pd.concat([kept[name].rename("share").to_frame().assign(where=name) for name in kept])
    return Drawing(figure, table.rename_axis("method").reset_index(), caption, (_order(means),), _page(styles, means))


def _published(dataset: str) -> pd.DataFrame:
    """The published accuracy, methods x domains and their mean, as shares."""
    printed = items.published_table("fedra", "Table 1", model="vit", dataset=dataset)
    return printed.rename(columns={"": "mean"}).reindex(METHODS) / 100


def _order(means: pd.DataFrame) -> Finding:
    """The number of pairs of methods in the paper's order; ``means`` lists the methods in that order."""
    words = {"above": "as there", UNDECIDED: UNDECIDED, "equal": "equal", "below": "the other way round"}
    words[""] = "with too few seeds"
    told: dict[str, list[str]] = {key: [] for key in words}
    for better, worse in combinations(means.index, 2):
        gap, pairs = against(means, better, worse)
        told[outcome(gap, pairs)].append(f"{better} - {worse} {percent(*gap, sign='+')}")
    said = []
    for key, word in words.items():
        if told[key]:
            said.append(f"{len(told[key])} {word}" + ("" if key == "above" else f" ({listing(told[key])})"))
    wrong, open_ = told["below"] or told["equal"], told[UNDECIDED] or told[""]
    return Finding(
        f"each pair of methods lies as on {' and '.join(TITLES.values())}",
        "; ".join(said),
        False if wrong else None if open_ else True,
        FAR,
    )


def _page(styles: pd.DataFrame, means: pd.DataFrame) -> str:
    tables = [f"PACS, here:\n\n{markdown(columns(styles, means))}"]
    for dataset, title in TITLES.items():
        known = 100 * _published(dataset)
        cells = {name: [f"{value:.2f}" for value in known[name]] for name in known}
        tables.append(f"{title}, published:\n\n{markdown({'run': METHODS, **cells})}")
    return "\n\n".join([*tables, "± is half the 95 % interval over seeds. Published: FedRA, Table 1, ViT."])


TABLE1 = items.register(
    View("fedra.table1", "Accuracy by domain where the clients' features differ, PACS", NAME, _draw)
)
