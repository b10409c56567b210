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
    runs_of = {
        name: RunConfig(
            dataset=name, model=NETWORKS.get(name), rounds=1, keep_optimizer=False
        )
        for name in CASES
    }
    runs_of["airline_tweets"] = runs_of["airline_tweets"].with_keys(
        model_options={"width": 768}
    )
    return {name: config.with_keys(**SIZES[name]) for name, config in runs_of.items()}


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

    def usual(self, way: Any) -> tuple[str, int]:
        """Return a threshold's most frequent last shared layer, and its number of seeds; of ties the earlier layer."""
        row = self.counts.loc[way]
        return str(row.idxmax()), int(row.max())

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
    way = Definition(dataset, "training", "", True, COLOURS[0])
    combined = way.combined(frame)
    counts = cuts(combined)
    jumps = combined.apply(
        lambda row: combined.columns[largest_jump(row.tolist()) - 1], axis=1
    )
    counts.loc[JUMP] = jumps.value_counts().reindex(counts.columns, fill_value=0)
    rows = published("player_fl")
    of_dataset = where(rows, quantity="shared layers", dataset=CASES[dataset].printed)
    of_dataset = of_dataset[
        (of_dataset["method"] == "playerfl") & of_dataset["place"].isin(list(LISTS))
    ]
    lists = dict(zip(of_dataset["place"], of_dataset["layer"], strict=True))
    return Decisions(dataset, tuple(combined.columns), combined, counts, lists)


COLOURS_APART = plt.get_cmap("PuOr")
"""Orange for fewer layers than the paper's list has, violet for more."""


# --- drawing ---------------------------------------------------------------------------------------------------


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    decided = [decisions(frame, name) for name in CASES]
    with sheet(7.4, 4.4) as figure:
        _matrix(figure.subplots(), decided)
        keys = [
            Patch(facecolor=COLOURS_APART(0.25), label="fewer layers than Table A.2"),
            Patch(facecolor=COLOURS_APART(0.75), label="more"),
        ]
        key_above(figure, 2, handles=keys, size=7.5)
    sizes = []
    for decision in decided:
        config = header["runs"][decision.dataset]["config"]
        of_clients = frame[(frame["run"] == decision.dataset) & (frame["client"] != "")]
        counts = of_clients.groupby("client")["n_train"].median()
        title = CASES[decision.dataset].title
        sizes.append(
            f"{title[0].upper()}{title[1:]}: {len(counts)} clients × {counts.min():.0f}-{counts.max():.0f} training "
            f"samples in batches of {config['batch_size']} ({decision.seeds} seeds)."
        )
    stand = ", ".join(
        f"{CASES[name].title} for {title}" for name, title in STAND_IN.items()
    )
    sizes_text = " ".join(sizes)
    absent_names = " and ".join(ABSENT.values())
    missing_text = missing_runs(header)
    caption = (
        f"The last federated layer after one epoch on the paper's networks. A row is a threshold on the ratio of "
        f"consecutive federation sensitivities. A cell is the most frequent decision with its share of the seeds. "
        f"Colour: layers fewer (orange) or more (violet) than Table A.2. {sizes_text} Replacements: {stand}. "
        f"{absent_names} are not available.{missing_text}"
    )
    exclusions = {name: f"not {title}" for name, title in STAND_IN.items()} | FEW
    return Drawing(
        figure,
        _table(decided),
        caption,
        (_printed(), *_findings(decided, exclusions)),
        _page(decided),
    )


def _matrix(ax: Axes, decided: list[Decisions]) -> None:
    texts, remarks = {}, {}
    ways = [*LISTS, *decided[0].counts.index]
    for decision in decided:
        names, gaps = [], []
        for way in ways:
            listed = decision.lists.get(str(way), "–"), 0
            layer, count = listed if way in LISTS else decision.usual(way)
            names.append(f"{layer}  {count}/{decision.seeds}" if count else layer)
            gaps.append(decision.layers_later(layer))
        texts[decision.dataset], remarks[_title(decision.dataset)] = names, gaps
    thresholds = (f"threshold {way:g}" for way in ways if isinstance(way, float))
    table = pd.DataFrame(remarks, [*LISTS.values(), *thresholds, JUMP], dtype=float)
    matrix(
        ax,
        table.fillna(0),
        texts=pd.DataFrame(texts),
        colours=COLOURS_APART,
        vmin=-6,
        high=6,
        size=8,
        linewidths=0,
        annot_kws={"fontsize": 7, "color": "black"},
    )
    ax.hlines([len(LISTS), len(ways) - 1], 0, len(decided), color="0.2", linewidth=1)
    ax.tick_params(top=False, labeltop=True, labelbottom=False)


def _title(dataset: str) -> str:
    return CASES[dataset].title + (
        f"\n(list: {STAND_IN[dataset]})" if dataset in STAND_IN else ""
    )


# --- table, page and findings ----------------------------------------------------------------------------------


def _table(decided: list[Decisions]) -> pd.DataFrame:
    """Every threshold's decisions, and the ratios of consecutive layers here and in the paper's Fig. 4."""
    rows = published("player_fl")
    ratios = rows[rows["quantity"] == f"{SENSITIVITY} / layer before"]
    last = "last shared layer"
    lines: list[dict[str, Any]] = []
    for decision in decided:
        printed = CASES[decision.dataset].printed
        named: dict[str, Any] = {
            "dataset": decision.dataset,
            "published_dataset": printed,
        }
        lines += [
            named | {"quantity": last, "published": layer, "place": place, "status": "published only"}
            for place, layer in decision.lists.items()
        ]  # fmt: skip
        named["seeds"] = decision.seeds
        lines += [
            named | {
                "quantity": f"seeds with this {last}", "layer": layer, "published": decision.lists.get(PRINTED),
                "place": PRINTED, "threshold": way, "measured": int(count), "status": "ok",
            }
            for (way, layer), count in decision.counts.stack().items()
        ]  # fmt: skip
        printed_ratios = ratios[ratios["dataset"] == printed].set_index("layer")
        values = decision.sensitivity.T
        for layer, before in zip(decision.layers[1:], decision.layers, strict=False):
            ratio = values.loc[layer] / values.loc[before]
            line = {"published": None, "place": None}
            if layer in printed_ratios.index:
                line = (
                    printed_ratios.loc[layer, ["value", "place"]]
                    .rename({"value": "published"})
                    .to_dict()
                )
            sound = bool(np.isfinite(ratio.median()))
            lines.append(named | line | {
                "quantity": "sensitivity / layer before", "layer": layer, "measured": ratio.median(),
                "low": ratio.min(), "high": ratio.max(), "status": "ok" if sound else "not finite",
            })  # fmt: skip
    for dataset, title in ABSENT.items():
        printed_ratios = where(
            rows, quantity="shared layers", dataset=dataset, place=PRINTED
        )
        lines.append({
            "quantity": last, "dataset": dataset, "published_dataset": dataset, "place": PRINTED,
            "published": printed_ratios["layer"].iloc[0], "status": f"{title} is not available",
        })  # fmt: skip
    return pd.DataFrame(lines, columns=list(COLUMNS))


COLUMNS = (
    "quantity", "dataset", "layer", "threshold", "published_dataset", "place", "published", "measured", "low", "high",
    "seeds", "status",
)  # fmt: skip


def _matches(decided: list[Decisions]) -> dict[Any, list[str]]:
    """For every threshold and the largest jump, the paper's datasets where the usual decision is that of Table A.2."""
    ways = decided[0].counts.index
    own_networks = [
        decision for decision in decided if decision.dataset not in STAND_IN
    ]
    return {
        way: [
            CASES[decision.dataset].title
            for decision in own_networks
            if decision.layers_later(decision.usual(way)[0]) == 0
        ]
        for way in ways
    }


def thresholds() -> pd.DataFrame:
    """Thresholds that give Table A.2's last shared layer by the ratios of the paper's own Fig. 4, by dataset.

    ``low`` is the largest ratio up to that layer, ``high`` the next layer's: any threshold from ``low`` to below
    ``high`` shares up to it.
    """
    rows = published("player_fl")
    ratios = rows[rows["quantity"] == f"{SENSITIVITY} / layer before"]
    lists = where(rows, quantity="shared layers", place=PRINTED).set_index("dataset")[
        "layer"
    ]
    limits_of = {}
    for dataset, of_dataset in ratios.groupby("dataset", sort=False):
        last = list(of_dataset["layer"]).index(lists[dataset])
        limits_of[dataset] = {
            "low": of_dataset["value"].iloc[: last + 1].max(),
            "high": of_dataset["value"].iloc[last + 1],
        }
    return pd.DataFrame(limits_of).T


def _printed() -> Finding:
    """Return whether the paper's own curves have a threshold that gives its own list."""
    limits = thresholds()
    titles = {
        case.printed: case.title
        for case in CASES.values()
        if case.printed not in STAND_IN
    }
    least, most = limits["high"].idxmin(), limits["low"].idxmax()
    ranges = []
    for name in (least, most):
        title = titles.get(name, name)
        low, high = limits.loc[name, "low"], limits.loc[name, "high"]
        ranges.append(f"{title} asks for {low:.3g} to {high:.3g}")
    return Finding(
        "one threshold on the ratios of the paper's Fig. 4 gives Table A.2's last shared layer on all seven datasets",
        " and ".join(ranges),
        bool(limits["low"].max() < limits["high"].min()),
    )


def stable(decisions: Decisions, thresholds: Sequence[float]) -> int:
    """Return the number of seeds with the same last shared layer at every threshold."""
    lines = decisions.sensitivity.to_numpy(dtype=np.float64)
    return sum(
        len({select.sensitivity_ratio(line.tolist(), way) for way in thresholds}) == 1
        for line in lines
    )


def _stable(decided: list[Decisions], far: Mapping[str, str]) -> Finding:
    """Return whether the transition point remains stable, on every dataset of the paper's that is comparable.

    The paper gives no range. Its own Fig. 4 has one for each dataset, in which its curves give its layer.
    """
    limits = thresholds()
    own_datasets = [
        decision
        for decision in decided
        if decision.dataset not in STAND_IN and decision.dataset not in far
    ]
    counts = {}
    for decision in own_datasets:
        low, high = limits.loc[CASES[decision.dataset].printed, ["low", "high"]]
        in_range = np.linspace(low + TOLERANCE, high - TOLERANCE, STEPS)
        name = f"{CASES[decision.dataset].title} from {low:.3g} to {high:.3g}"
        counts[name] = (stable(decision, in_range.tolist()), decision.seeds)
    return Finding(
        "the transition point is stable: in most seeds all thresholds in the range of Fig. 4 decide alike",
        ", ".join(
            f"{name} in {count} of {seeds} seeds"
            for name, (count, seeds) in counts.items()
        )
        + f" ({len(own_datasets)} parts)",
        joint(of_parts([of_share(*count) for count in counts.values()])),
    )


def _findings(decided: list[Decisions], far: Mapping[str, str]) -> tuple[Finding, ...]:
    """Return the findings on the decisions by thresholds.

    Args:
        far: reasons why a dataset is not comparable with the paper's.
    """
    enough = all(decision.seeds >= LEAST_SEEDS for decision in decided)
    matches = _matches(decided)
    limits = [way for way in matches if way != JUMP]
    most = max(len(matches[way]) for way in limits)
    titles = [
        CASES[decision.dataset].title
        for decision in decided
        if decision.dataset not in STAND_IN
    ]
    best = dict.fromkeys(
        listing(matches[way]) for way in limits if len(matches[way]) == most
    )
    limits_of = {
        names: [f"{way:g}" for way in limits if listing(matches[way]) == names]
        for names in best
    }
    choices = [(names or "none", ways) for names, ways in limits_of.items()]
    choices_text = "; ".join(f"{names} at {listing(ways)}" for names, ways in choices)
    ours = matches[select.THRESHOLD]
    small = [
        CASES[decision.dataset].title
        for decision in decided
        if decision.dataset in far and decision.dataset not in STAND_IN
    ]
    remark = f"{listing(small)} are too small here"
    ours_text = listing(ours) or "none"
    findings = [
        _stable(decided, far),
        Finding(
            "a single threshold gives Table A.2's last shared layer on every available dataset of the paper",
            f"at best {most} of {len(titles)}: {choices_text}. The largest jump gives {len(matches[JUMP])}",
            most == len(titles) if enough else None,
            remark,
        ),
        Finding(
            f"the default threshold {select.THRESHOLD:g} gives Table A.2's layer on most of them",
            f"on {len(ours)} of {len(titles)}: {ours_text}",
            len(ours) > len(titles) / 2 if enough else None,
            remark,
        ),
    ]
    for decision in decided:
        decisions = [decision.usual(way)[0] for way in limits]
        spread = Counter(decisions)
        findings.append(
            Finding(
                f"on {CASES[decision.dataset].title} every threshold from {limits[0]:g} to {limits[-1]:g} "
                "decides alike",
                ", ".join(f"{layer} at {count}" for layer, count in spread.items())
                + f" of {len(limits)} thresholds",
                len(spread) == 1 if decision.seeds >= LEAST_SEEDS else None,
                far.get(decision.dataset, ""),
            )
        )
    return tuple(findings)


def _page(decided: list[Decisions]) -> str:
    columns: dict[str, list[str]] = {
        "decision": [
            *LISTS.values(),
            *(
                f"{w:g}" if isinstance(w, float) else str(w)
                for w in decided[0].counts.index
            ),
        ]
    }
    for decision in decided:
        usual_decisions = [decision.usual(way) for way in decision.counts.index]
        columns[_title(decision.dataset).replace("\n", " ")] = [
            *(decision.lists.get(place, "–") for place in LISTS),
            *(
                f"{layer} ({count} of {decision.seeds})"
                for layer, count in usual_decisions
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
