"""FedRA's Table 1 from runs on PACS: accuracy, and how much of the full model's each method keeps."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pandas as pd

from figures import items
from figures.differences import difference
from figures.drawing import enumeration
from figures.fedra.depth import (
    DEPTHS,
    NAME,
    TITLES,
    accuracies,
    columns,
    described,
    far,
)
from figures.forms import PUBLISHED, Kind, key_above, marks, sheet
from figures.items import Drawing, Finding, Item
from figures.names import title
from figures.page import markdown, missing_runs, numbers, percent, seeds_in_words
from figures.verdicts import verdict
from fl_core.errors import listing
from fl_core.statistics import mean_interval

METHODS = ("alllarge", "fedra", "inclusivefl", "depthfl", "allsmall")
"""The methods in the order of the paper's means, on both of its data sets with the transformer."""
WHOLE = METHODS[0]
_NAME_OF_WHOLE = title(WHOLE)
AXES = {"accuracy": "accuracy, %", "share": f"accuracy, % of {_NAME_OF_WHOLE}'s"}
"""What either panel has along x."""
LOOKS = {
    f"{name}, published": {**PUBLISHED, "marker": marker}
    for name, marker in zip(TITLES.values(), ("D", "s"), strict=True)
}
"""The looks of the published values, by data set."""


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    styles = accuracies(frame)
    run_means = styles.groupby("run", sort=False).mean()
    run_means = run_means.reindex(METHODS)
    published = {
        dataset_title: _published(dataset)["mean"]
        for dataset, dataset_title in TITLES.items()
    }
    shares = {
        dataset_title: published_means / published_means[WHOLE]
        for dataset_title, published_means in published.items()
    }
    scores_by_quantity = {
        "accuracy": _scores(run_means, published),
        "share": _scores(run_means / run_means.loc[WHOLE], shares),
    }
    methods = run_means.index
    with sheet(7.6, 3.2) as figure:
        for ax, (quantity, table) in zip(
            figure.subplots(1, 2, sharey=True), scores_by_quantity.items(), strict=True
        ):
            kinds = []
            for source_name, scores in table.groupby("where", sort=False):
                published_means = scores.set_index("method").reindex(methods)[
                    ["value", "low", "high"]
                ]
                look = LOOKS.get(str(source_name), {})
                kinds.append(Kind(published_means, str(source_name), look=look))
            marks(
                ax, kinds, list(map(title, methods)), factor=100, xlabel=AXES[quantity]
            )
        key_above(figure, 3, panel=ax)
    depths_text, seed_count = (
        enumeration(DEPTHS),
        int(run_means.notna().sum(axis=1).min()),
    )
    whole_title = title(WHOLE)
    seeds_text = seeds_in_words(seed_count)
    setting_text = described(header)
    missing_text = missing_runs(header, METHODS)
    caption = (
        "Left: mean accuracy of the global model over the domains and the last three evaluations. "
        f"Right: the same as a share of {whole_title}'s. Our values have 95 % intervals over {seeds_text}. "
        f"{setting_text} Our clients train at most {depths_text} blocks. The paper's train 12, 10, 8, 6, 4 and 3. "
        "The paper starts from ImageNet's weights. Ours are pretrained on Tiny-ImageNet. "
        f"The paper's MLP-Mixer was not run.{missing_text}"
    )
    table = pd.concat(
        [
            source_scores.assign(quantity=quantity)
            for quantity, source_scores in scores_by_quantity.items()
        ]
    )
    table = table[["method", "where", "quantity", "value", "low", "high"]]
    return Drawing(
        figure, table, caption, (_order(run_means),), _page(styles, run_means)
    )


def _scores(
    measured: pd.DataFrame, published_by_place: Mapping[str, pd.Series]
) -> pd.DataFrame:
    """A row per place and method: value, and here its interval over seeds (``measured``: methods x seeds)."""
    table_rows: list[dict[str, Any]] = [
        {
            "method": run,
            "where": "PACS, here",
            **mean_interval(run_scores.dropna())._asdict(),
        }
        for run, run_scores in measured.iterrows()
        if run_scores.notna().any()  # of an accuracy of 0 there are no shares
    ]
    for dataset_title, run_scores in published_by_place.items():
        printed_values = run_scores.reindex(
            measured.index
        )  # of the methods that were run
        table_rows += [
            {
                "method": run,
                "where": f"{dataset_title}, published",
                "value": published_score,
            }
            for run, published_score in printed_values.items()
        ]
    return pd.DataFrame(table_rows)


def _published(dataset: str) -> pd.DataFrame:
    """The published accuracy, methods x domains and their mean, as shares."""
    published_scores = items.published_table(
        "fedra", "Table 1", model="vit", dataset=dataset
    )
    return published_scores.rename(columns={"": "mean"}).reindex(METHODS) / 100


def _order(run_means: pd.DataFrame) -> Finding:
    """The number of pairs of methods in the paper's order; ``run_means`` lists the methods in that order."""
    relation_texts = {"above": "as there", "below": "the other way round"}
    pairs_by_way: dict[str, list[str]] = {}
    for upper_run, lower_run in combinations(run_means.index, 2):
        gap = difference(run_means, upper_run, lower_run)
        points_text = percent(*gap.interval, sign="+")
        upper_title = title(upper_run)
        lower_title = title(lower_run)
        pairs_by_way.setdefault(gap.how, []).append(
            f"{upper_title} - {lower_title} {points_text}"
        )
    sentences = []
    for relation in sorted(pairs_by_way, key=lambda relation: relation != "above"):
        pair_texts = pairs_by_way[relation]
        sentence = " ".join(
            [str(len(pair_texts)), relation_texts.get(relation, relation)]
        )
        if relation != "above":
            sentence += f" ({listing(pair_texts)})"
        sentences.append(sentence)
    contrary_relations = {"below", "equal"} & set(pairs_by_way)
    domains_text = " and ".join(TITLES.values())
    return Finding(
        f"each pair of methods lies as on {domains_text}",
        "; ".join(sentences),
        verdict(set(pairs_by_way) == {"above"}, bool(contrary_relations)),
        far(run_means),
    )


def _page(styles: pd.DataFrame, run_means: pd.DataFrame) -> str:
    table_text = markdown(columns(styles, run_means))
    tables = [f"PACS, here:\n\n{table_text}"]
    for dataset, dataset_title in TITLES.items():
        published_scores = 100 * _published(dataset)
        score_columns = {
            column: numbers(published_scores[column]) for column in published_scores
        }
        published_text = markdown({"run": list(map(title, METHODS)), **score_columns})
        tables.append(f"{dataset_title}, published:\n\n{published_text}")
    return "\n\n".join(
        [
            *tables,
            "± is half the 95 % interval over seeds. Published: ViT in FedRA's Table 1.",
        ]
    )


items.register(Item(
    "fedra.table1", "Accuracy by domain where the clients' features differ, a transformer on PACS", source=NAME,
    draw=_draw,
))  # fmt: skip
