"""PLayer-FL's Table A.2: the last layer that the rule shares, by threshold, and the list chosen by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from diagnostics import select
from diagnostics.plots.drawing import COLOURS
from figures import items
from figures.differences import LEAST_SEEDS, joint
from figures.forms import key_above, matrix, sheet
from figures.items import Drawing, Finding, Item
from figures.layerwise import SENSITIVITY, Definition, Epoch, cuts
from figures.page import markdown, missing_runs
from figures.papers import published
from figures.player_fl.runs import ABSENT, CASES, NETWORKS, STAND_IN
from figures.recipe import where
from figures.verdicts import TOLERANCE, of_parts, of_share
from fl_core.config import RunConfig
from fl_core.errors import listing
from fl_core.run import runner

NAME = "player_fl.tableA2"
PRINTED = "Table A.2"
LISTS = {
    PRINTED: "Table A.2",
    "authors' code, December 2024": "code 2024",
    "authors' code, May 2025": "code 2025",
}
"""Where the paper's choice is written down, and how it is shown."""
JUMP = "largest jump"
STEPS = 9
"""Thresholds that are asked within a range."""
SIZES: dict[str, dict[str, Any]] = {
    "fashion_mnist": {"max_samples": 4000, "batch_size": 64},
    "cifar10": {"max_samples": 1500, "batch_size": 32},
    "fed_isic": {"max_samples": 400, "batch_size": 32},
    "heart": {},
    "airline_tweets": {"max_samples": 2000, "batch_size": 32},
}
"""Fewer samples than the paper's, and smaller batches, so that a client still takes several steps."""
FEW = {
    name: f"{SIZES[name]['max_samples']:,} images and at most 8 steps a client"
    for name in ("cifar10", "fed_isic")
}
"""Why a dataset is too far from the paper's for a verdict."""


def recipes() -> dict[str, RunConfig]:
    """Return runs of the paper's networks by dataset; also of the transformer at the paper's width."""
    configs = {
        dataset: RunConfig(
            dataset=dataset, model=NETWORKS.get(dataset), rounds=1, keep_optimizer=False
        )
        for dataset in CASES
    }
    configs["airline_tweets"] = configs["airline_tweets"].with_keys(
        model_options={"width": 768}
    )
    return {
        dataset: config.with_keys(**SIZES[dataset])
        for dataset, config in configs.items()
    }


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record every client's federation sensitivity over its first epoch, from which PLayer-FL decides."""
    return Epoch(task).sensitivity("training")


# --- decisions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decisions:
    """The rule's decisions on one dataset.

    Attributes:
        layers: names, input to output.
        sensitivity: S of all clients together, seeds x layers.
        counts: seeds in which each layer is the last shared one; thresholds and :data:`JUMP` x layers.
        lists: the last shared layer that the paper or its code has, by place.
    """

    dataset: str
    layers: tuple[str, ...]
    sensitivity: pd.DataFrame
    counts: pd.DataFrame
    lists: Mapping[str, str]

    @property
    def seeds(self) -> int:
        return len(self.sensitivity)

    def usual(self, threshold: Any) -> tuple[str, int]:
        """Return a threshold's most frequent last shared layer, and its number of seeds; of ties the earlier layer."""
        seed_counts = self.counts.loc[threshold]
        return str(seed_counts.idxmax()), int(seed_counts.max())

    def layers_later(self, layer: str) -> int | None:
        """Count how many layers later than Table A.2's a decision is; None without a decision."""
        if layer in self.layers:
            return self.layers.index(layer) - self.layers.index(self.lists[PRINTED])
        return None


def largest_jump(values: Sequence[float]) -> int:
    """Return argmax_l S_{l+1} / S_l, the number of layers before the largest jump; the first of equals."""
    jumps = select.ratios(values)
    return jumps.index(max(jumps)) + 1


def decisions(frame: pd.DataFrame, dataset: str) -> Decisions:
    """Return the rule's decisions on the rows of a dataset."""
    definition = Definition(dataset, "training", "", True, COLOURS[0])
    sensitivity = definition.combined(frame)
    cut_counts = cuts(sensitivity)
    jumps = sensitivity.apply(
        lambda row: sensitivity.columns[largest_jump(row.tolist()) - 1], axis=1
    )
    cut_counts.loc[JUMP] = jumps.value_counts().reindex(
        cut_counts.columns, fill_value=0
    )
    published_rows = published("player_fl")
    dataset_rows = where(
        published_rows, quantity="shared layers", dataset=CASES[dataset].printed
    )
    dataset_rows = dataset_rows[
        (dataset_rows["method"] == "playerfl") & dataset_rows["place"].isin(list(LISTS))
    ]
    layer_by_place = dict(
        zip(dataset_rows["place"], dataset_rows["layer"], strict=True)
    )
    return Decisions(
        dataset, tuple(sensitivity.columns), sensitivity, cut_counts, layer_by_place
    )


COLOURS_APART = plt.get_cmap("PuOr")
"""Orange for fewer layers than the paper's list has, violet for more."""


# --- drawing ---------------------------------------------------------------------------------------------------


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    all_decisions = [decisions(frame, dataset_name) for dataset_name in CASES]
    with sheet(7.4, 4.4) as figure:
        _matrix(figure.subplots(), all_decisions)
        legend_patches = [
            Patch(facecolor=COLOURS_APART(0.25), label="fewer layers than Table A.2"),
            Patch(facecolor=COLOURS_APART(0.75), label="more"),
        ]
        key_above(figure, 2, handles=legend_patches, size=7.5)
    size_texts = []
    for decision in all_decisions:
        config = header["runs"][decision.dataset]["config"]
        client_rows = frame[
            (frame["run"] == decision.dataset) & (frame["client"] != "")
        ]
        sample_counts = client_rows.groupby("client")["n_train"].median()
        title = CASES[decision.dataset].title
        size_texts.append(
            f"{title[0].upper()}{title[1:]}: {len(sample_counts)} clients × "
            f"{sample_counts.min():.0f}-{sample_counts.max():.0f} training "
            f"samples in batches of {config['batch_size']} ({decision.seeds} seeds)."
        )
    stand_ins_text = ", ".join(
        f"{CASES[dataset_name].title} for {title}"
        for dataset_name, title in STAND_IN.items()
    )
    sizes_text = " ".join(size_texts)
    absent_text = " and ".join(ABSENT.values())
    missing_text = missing_runs(header)
    caption = (
        f"The last federated layer after one epoch on the paper's networks. A row is a threshold on the ratio of "
        f"consecutive federation sensitivities. A cell is the most frequent decision with its share of the seeds. "
        f"Colour: layers fewer (orange) or more (violet) than Table A.2. {sizes_text} Replacements: {stand_ins_text}. "
        f"{absent_text} are not available.{missing_text}"
    )
    exclusions = {
        dataset_name: f"not {title}" for dataset_name, title in STAND_IN.items()
    } | FEW
    return Drawing(
        figure,
        _table(all_decisions),
        caption,
        (_printed(), *_findings(all_decisions, exclusions)),
        _page(all_decisions),
    )


def _matrix(ax: Axes, all_decisions: list[Decisions]) -> None:
    cell_texts, layer_gaps = {}, {}
    row_keys = [*LISTS, *all_decisions[0].counts.index]
    for decision in all_decisions:
        layer_texts, gaps = [], []
        for row_key in row_keys:
            listed_layer = decision.lists.get(str(row_key), "–"), 0
            layer, seed_count = (
                listed_layer if row_key in LISTS else decision.usual(row_key)
            )
            layer_texts.append(
                f"{layer}  {seed_count}/{decision.seeds}" if seed_count else layer
            )
            gaps.append(decision.layers_later(layer))
        cell_texts[decision.dataset], layer_gaps[_title(decision.dataset)] = (
            layer_texts,
            gaps,
        )
    threshold_titles = (
        f"threshold {row_key:g}" for row_key in row_keys if isinstance(row_key, float)
    )
    gap_table = pd.DataFrame(
        layer_gaps, [*LISTS.values(), *threshold_titles, JUMP], dtype=float
    )
    matrix(
        ax,
        gap_table.fillna(0),
        texts=pd.DataFrame(cell_texts),
        colours=COLOURS_APART,
        vmin=-6,
        high=6,
        size=8,
        linewidths=0,
        annot_kws={"fontsize": 7, "color": "black"},
    )
    ax.hlines(
        [len(LISTS), len(row_keys) - 1], 0, len(all_decisions), color="0.2", linewidth=1
    )
    ax.tick_params(top=False, labeltop=True, labelbottom=False)


def _title(dataset: str) -> str:
    return CASES[dataset].title + (
        f"\n(list: {STAND_IN[dataset]})" if dataset in STAND_IN else ""
    )


# --- table, page and findings ----------------------------------------------------------------------------------


def _table(all_decisions: list[Decisions]) -> pd.DataFrame:
    """Return every threshold's decisions, and the ratios of consecutive layers here and in the paper's Fig. 4."""
    published_rows = published("player_fl")
    published_ratios = published_rows[
        published_rows["quantity"] == f"{SENSITIVITY} / layer before"
    ]
    quantity = "last shared layer"
    table_rows: list[dict[str, Any]] = []
    for decision in all_decisions:
        published_dataset = CASES[decision.dataset].printed
        shared_columns: dict[str, Any] = {
            "dataset": decision.dataset,
            "published_dataset": published_dataset,
        }
        table_rows += [
            shared_columns | {"quantity": quantity, "published": layer, "place": list_place, "status": "published only"}
            for list_place, layer in decision.lists.items()
        ]  # fmt: skip
        shared_columns["seeds"] = decision.seeds
        table_rows += [
            shared_columns | {
                "quantity": f"seeds with this {quantity}", "layer": layer, "published": decision.lists.get(PRINTED),
                "place": PRINTED, "threshold": threshold, "measured": int(seed_count), "status": "ok",
            }
            for (threshold, layer), seed_count in decision.counts.stack().items()
        ]  # fmt: skip
        printed_ratios = published_ratios[
            published_ratios["dataset"] == published_dataset
        ].set_index("layer")
        layer_sensitivity = decision.sensitivity.T
        for layer, previous_layer in zip(
            decision.layers[1:], decision.layers, strict=False
        ):
            ratio = layer_sensitivity.loc[layer] / layer_sensitivity.loc[previous_layer]
            published_columns = {"published": None, "place": None}
            if layer in printed_ratios.index:
                published_columns = (
                    printed_ratios.loc[layer, ["value", "place"]]
                    .rename({"value": "published"})
                    .to_dict()
                )
            is_finite = bool(np.isfinite(ratio.median()))
            table_rows.append(shared_columns | published_columns | {
                "quantity": "sensitivity / layer before", "layer": layer, "measured": ratio.median(),
                "low": ratio.min(), "high": ratio.max(), "status": "ok" if is_finite else "not finite",
            })  # fmt: skip
    for dataset, title in ABSENT.items():
        printed_ratios = where(
            published_rows, quantity="shared layers", dataset=dataset, place=PRINTED
        )
        table_rows.append({
            "quantity": quantity, "dataset": dataset, "published_dataset": dataset, "place": PRINTED,
            "published": printed_ratios["layer"].iloc[0], "status": f"{title} is not available",
        })  # fmt: skip
    return pd.DataFrame(table_rows, columns=list(COLUMNS))


COLUMNS = (
    "quantity", "dataset", "layer", "threshold", "published_dataset", "place", "published", "measured", "low", "high",
    "seeds", "status",
)  # fmt: skip


def _matches(all_decisions: list[Decisions]) -> dict[Any, list[str]]:
    """Return, by threshold and for the largest jump, the paper's datasets whose usual decision is that of Table A.2."""
    row_keys = all_decisions[0].counts.index
    paper_decisions = [
        decision for decision in all_decisions if decision.dataset not in STAND_IN
    ]
    return {
        row_key: [
            CASES[decision.dataset].title
            for decision in paper_decisions
            if decision.layers_later(decision.usual(row_key)[0]) == 0
        ]
        for row_key in row_keys
    }


def thresholds() -> pd.DataFrame:
    """Thresholds that give Table A.2's last shared layer by the ratios of the paper's own Fig. 4, by dataset.

    ``low`` is the largest ratio up to that layer, ``high`` the next layer's: any threshold from ``low`` to below
    ``high`` shares up to it.
    """
    rows = published("player_fl")
    ratios = rows[rows["quantity"] == f"{SENSITIVITY} / layer before"]
    printed_layers = where(rows, quantity="shared layers", place=PRINTED).set_index(
        "dataset"
    )["layer"]
    limits_by_dataset = {}
    for dataset, dataset_ratios in ratios.groupby("dataset", sort=False):
        last_index = list(dataset_ratios["layer"]).index(printed_layers[dataset])
        limits_by_dataset[dataset] = {
            "low": dataset_ratios["value"].iloc[: last_index + 1].max(),
            "high": dataset_ratios["value"].iloc[last_index + 1],
        }
    return pd.DataFrame(limits_by_dataset).T


def _printed() -> Finding:
    """Return whether the paper's own curves have a threshold that gives its own list."""
    limits = thresholds()
    titles = {
        case.printed: case.title
        for case in CASES.values()
        if case.printed not in STAND_IN
    }
    lowest_dataset, highest_dataset = limits["high"].idxmin(), limits["low"].idxmax()
    ranges = []
    for dataset in (lowest_dataset, highest_dataset):
        title = titles.get(dataset, dataset)
        low, high = limits.loc[dataset, "low"], limits.loc[dataset, "high"]
        ranges.append(f"{title} asks for {low:.3g} to {high:.3g}")
    return Finding(
        "one threshold on the ratios of the paper's Fig. 4 gives Table A.2's last shared layer on all seven datasets",
        " and ".join(ranges),
        bool(limits["low"].max() < limits["high"].min()),
    )


def stable(decisions: Decisions, thresholds: Sequence[float]) -> int:
    """Return the number of seeds with the same last shared layer at every threshold."""
    sensitivity_rows = decisions.sensitivity.to_numpy(dtype=np.float64)
    return sum(
        len(
            {
                select.sensitivity_ratio(row.tolist(), threshold)
                for threshold in thresholds
            }
        )
        == 1
        for row in sensitivity_rows
    )


def _stable(all_decisions: list[Decisions], reasons: Mapping[str, str]) -> Finding:
    """Return whether the transition point remains stable, on every dataset of the paper's that is comparable.

    The paper gives no range. Its own Fig. 4 has one for each dataset, in which its curves give its layer.
    """
    limits = thresholds()
    comparable_decisions = [
        decision
        for decision in all_decisions
        if decision.dataset not in STAND_IN and decision.dataset not in reasons
    ]
    counts_by_title = {}
    for decision in comparable_decisions:
        low, high = limits.loc[CASES[decision.dataset].printed, ["low", "high"]]
        range_thresholds = np.linspace(low + TOLERANCE, high - TOLERANCE, STEPS)
        title = f"{CASES[decision.dataset].title} from {low:.3g} to {high:.3g}"
        counts_by_title[title] = (
            stable(decision, range_thresholds.tolist()),
            decision.seeds,
        )
    return Finding(
        "the transition point is stable: in most seeds all thresholds in the range of Fig. 4 decide alike",
        ", ".join(
            f"{title} in {count} of {seeds} seeds"
            for title, (count, seeds) in counts_by_title.items()
        )
        + f" ({len(comparable_decisions)} parts)",
        joint(of_parts([of_share(*count) for count in counts_by_title.values()])),
    )


def _findings(
    all_decisions: list[Decisions], reasons: Mapping[str, str]
) -> tuple[Finding, ...]:
    """Return the findings on the decisions by thresholds.

    Args:
        reasons: reasons why a dataset is not comparable with the paper's.
    """
    has_enough_seeds = all(decision.seeds >= LEAST_SEEDS for decision in all_decisions)
    matches = _matches(all_decisions)
    threshold_values = [threshold for threshold in matches if threshold != JUMP]
    most_matches = max(len(matches[threshold]) for threshold in threshold_values)
    titles = [
        CASES[decision.dataset].title
        for decision in all_decisions
        if decision.dataset not in STAND_IN
    ]
    best_texts = dict.fromkeys(
        listing(matches[threshold])
        for threshold in threshold_values
        if len(matches[threshold]) == most_matches
    )
    thresholds_by_titles = {
        titles_text: [
            f"{threshold:g}"
            for threshold in threshold_values
            if listing(matches[threshold]) == titles_text
        ]
        for titles_text in best_texts
    }
    best_choices = [
        (titles_text or "none", threshold_texts)
        for titles_text, threshold_texts in thresholds_by_titles.items()
    ]
    choices_text = "; ".join(
        f"{titles_text} at {listing(threshold_texts)}"
        for titles_text, threshold_texts in best_choices
    )
    default_titles = matches[select.THRESHOLD]
    small_titles = [
        CASES[decision.dataset].title
        for decision in all_decisions
        if decision.dataset in reasons and decision.dataset not in STAND_IN
    ]
    remark = f"{listing(small_titles)} are too small here"
    default_text = listing(default_titles) or "none"
    findings = [
        _stable(all_decisions, reasons),
        Finding(
            "a single threshold gives Table A.2's last shared layer on every available dataset of the paper",
            f"at best {most_matches} of {len(titles)}: {choices_text}. The largest jump gives {len(matches[JUMP])}",
            most_matches == len(titles) if has_enough_seeds else None,
            remark,
        ),
        Finding(
            f"the default threshold {select.THRESHOLD:g} gives Table A.2's layer on most of them",
            f"on {len(default_titles)} of {len(titles)}: {default_text}",
            len(default_titles) > len(titles) / 2 if has_enough_seeds else None,
            remark,
        ),
    ]
    for decision in all_decisions:
        usual_layers = [decision.usual(threshold)[0] for threshold in threshold_values]
        layer_counts = Counter(usual_layers)
        findings.append(
            Finding(
                f"on {CASES[decision.dataset].title} every threshold from {threshold_values[0]:g} to "
                f"{threshold_values[-1]:g} "
                "decides alike",
                ", ".join(
                    f"{layer} at {threshold_count}"
                    for layer, threshold_count in layer_counts.items()
                )
                + f" of {len(threshold_values)} thresholds",
                len(layer_counts) == 1 if decision.seeds >= LEAST_SEEDS else None,
                reasons.get(decision.dataset, ""),
            )
        )
    return tuple(findings)


def _page(all_decisions: list[Decisions]) -> str:
    columns: dict[str, list[str]] = {
        "decision": [
            *LISTS.values(),
            *(
                f"{key:g}" if isinstance(key, float) else str(key)
                for key in all_decisions[0].counts.index
            ),
        ]
    }
    for decision in all_decisions:
        usual_decisions = [decision.usual(row_key) for row_key in decision.counts.index]
        columns[_title(decision.dataset).replace("\n", " ")] = [
            *(decision.lists.get(list_place, "–") for list_place in LISTS),
            *(
                f"{layer} ({seed_count} of {decision.seeds})"
                for layer, seed_count in usual_decisions
            ),
        ]
    table_text = markdown(columns)
    return (
        f"{table_text}\n\nThe paper gives no threshold and its code computes none. Its layers are lists that "
        f"were chosen by hand. Rows with numbers are thresholds of the rule on ratios of consecutive layers. "
        "They span what the paper's Fig. 4 asks for."
    )


ITEM = items.register(Item(
    NAME, "Transition points by threshold and the paper's lists (PLayer-FL, Table A.2)",
    recipes(), seeds=3, own_seeds={"heart": 10}, budget="about 6 minutes of one core",
    measure=_measure, draw=_draw,
))  # fmt: skip
