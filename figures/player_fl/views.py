"""PLayer-FL's Figs. 1-4 and A.1-A.10, drawn from the study of its networks' layers.

Each figure has two rows. The upper one is the default's definition. The lower one is the computation behind the
published picture, with the published ranges that were read off. What differs between the two is said in
``player_fl_what_figures_rest_on.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from diagnostics.plots.drawing import COLOURS, set_scale
from figures import items, layerwise, names
from figures.forms import Band, Line, curves, key_above, sheet
from figures.items import Drawing, Finding, Item
from figures.layerwise import (
    BY_LAYER,
    SENSITIVITY,
    by_layer,
    dissimilarity,
    lines_beside,
    read_off,
)
from figures.page import missing_runs, seeds_behind
from figures.player_fl.expectations import (
    OFFSET,
    correlates,
    kink,
    later_layers,
    no_cliff,
    offset,
    rises,
    spikes,
)
from figures.player_fl.layers import (
    ALONE,
    FEDERATED,
    FIRST,
    NAME,
    NETWORKS,
    Network,
    run_of,
)
from figures.player_fl.released import FIGURE_BATCH
from figures.recipe import where

EVERY = tuple(NETWORKS)
MOMENT = {
    FIRST: "after one epoch",
    ALONE: "final local model",
    FEDERATED: "final federated model",
}
COLOUR = {FIRST: COLOURS[0], ALONE: COLOURS[0], FEDERATED: COLOURS[1]}
PRINTED, LESS = "published, range over sites", f"published less {OFFSET}"
LESS_LOOK: dict[str, Any] = {
    "facecolor": "none",
    "edgecolor": "0.35",
    "hatch": "//////",
    "linewidth": 0.6,
}
_CENTRED: dict[str, Any] = {
    "ha": "center",
    "va": "center",
    "fontsize": 7,
    "color": "0.4",
}
COLUMNS = (
    "dataset",
    "moment",
    *(name for name in items.COLUMNS if name != "threshold"),
)
Expect = Callable[[Network, str, pd.DataFrame, pd.DataFrame], list[Finding]]


@dataclass(frozen=True)
class Way:
    """One definition of a quantity, drawn as a row of panels.

    Attributes:
        metric, variant: metric and variant of the rows.
        what: the metric in words, for tables and findings.
        label: the label of the axis.
        expect: what is expected of its curves.
        relative_to: ``first`` or ``min``, see :func:`figures.layerwise.curves`.
        published: the quantity of the published ranges that it is comparable with.
        log: whether the axis is logarithmic.
    """

    metric: str
    variant: str
    what: str
    label: str
    expect: Expect
    relative_to: str = ""
    published: str = ""
    log: bool = True

    @property
    def quantity(self) -> str:
        """Return the quantity's name in the table."""
        name_parts = filter(None, [self.metric, self.relative_to])
        return self.published or " / ".join(name_parts)

    def curves(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return one run's curves, layers x (seed, client); no columns if it was not measured."""
        rows = where(frame, metric=self.metric, variant=self.variant)
        if rows.empty:
            return pd.DataFrame()
        if self.metric in ("cka", "procrustes"):
            return dissimilarity(rows, self.metric)
        return layerwise.curves(rows, self.metric, self.variant, self.relative_to)


_BATCH = f"one batch of {FIGURE_BATCH}"
_TO_FIRST, _TO_LEAST = "first layer = 1", "smallest layer = 1"
VARIANCE = (
    Way("grad_variance", "epoch", "gradient variance of all samples",
        f"gradient variance,\nall samples,\n{_TO_FIRST}", rises, "first"),
    Way("grad_variance", "batch", f"gradient variance of {_BATCH}",
        f"gradient variance,\n{_BATCH},\n{_TO_LEAST}", rises, "min", "grad_variance / min"),
)  # fmt: skip
CURVATURE = (
    Way("hessian_trace", "per_parameter", "the Hessian's trace per parameter",
        f"Hessian's trace\nper parameter,\n{_TO_FIRST}", rises, "first"),
    Way("hessian_trace", "released", "the nuclear norm of one product H v", f"nuclear norm of H v,\n{_TO_LEAST}",
        rises, "min", "hessian_nuclear / min"),
)  # fmt: skip
APART = (
    Way("cka", "flatten", "1 - CKA", "dissimilarity (1 − CKA),\nmean to the others", no_cliff, log=False),
    Way("procrustes", "released", "the Procrustes angle", "Procrustes angle, rad,\nmean to the others", offset,
        published="procrustes_angle", log=False),
)  # fmt: skip
_ONE = Way(
    SENSITIVITY,
    "figure",
    f"S of {_BATCH}",
    f"federation sensitivity S,\n{_BATCH},\n{_TO_FIRST}",
    kink,
    published=SENSITIVITY,
)
S_FIRST = (
    Way(
        SENSITIVITY,
        "training",
        "S of the epoch's batches",
        f"federation sensitivity S,\nepoch's batches,\n{_TO_FIRST}",
        kink,
    ),
    _ONE,
)
S_FINAL = (
    Way(
        SENSITIVITY,
        "after",
        "S of all samples",
        f"federation sensitivity S,\nall samples,\n{_TO_FIRST}",
        kink,
    ),
    _ONE,
)


@dataclass(frozen=True)
class Shown:
    """The curves of one network at one moment, by one definition.

    Attributes:
        dataset: the network's dataset.
        moment: the moment of its runs.
        network: as it is at this moment.
        values: layers x (seed, client).
        published: range of each layer; empty where nothing was published.
    """

    dataset: str
    moment: str
    network: Network
    values: pd.DataFrame
    published: pd.DataFrame

    @property
    def banded(self) -> bool:
        """Return whether a range was published."""
        return bool(self.published["low"].notna().any())

    @property
    def drawn(self) -> list[pd.DataFrame]:
        """Return all values that are drawn, with a row for each layer."""
        tables = [self.values]
        if self.banded:
            tables.append(self.published[["low", "high"]].astype(float))
        return [table.reset_index(drop=True) for table in tables]

    def bands(self, way: Way) -> list[Band]:
        """Return the published range, and where a constant was added to it also the range without."""
        if not self.banded:
            return []
        bands = [Band(self.published, PRINTED)]
        if way.metric == "procrustes" and self.network.last_conv:
            shifted_range = self.published[["low", "high"]].astype(float) - OFFSET
            dense_layers = [
                layer for layer in shifted_range.index if layer.startswith("fc")
            ]
            bands.append(
                Band(
                    shifted_range.loc[dense_layers].reindex(shifted_range.index),
                    LESS,
                    LESS_LOOK,
                )
            )
        return bands

    def lines(self) -> list[Line]:
        """Return a thin line for each client and seed, and their median."""
        colour, layer_values = COLOUR[self.moment], self.values.reset_index(drop=True)
        thin_look = {"color": colour, "linewidth": 0.5, "alpha": 0.35, "marker": ""}
        bold_look = {
            "color": colour,
            "linewidth": 1.8,
            "marker": "o",
            "markersize": 3.5,
        }
        return [
            Line(layer_values, look=thin_look),
            Line(layer_values.median(axis=1), look=bold_look),
        ]


def shown(
    frame: pd.DataFrame, way: Way, dataset: str, moments: Sequence[str]
) -> list[Shown]:
    """Return the curves of one network, of each moment at which the quantity was measured."""
    network, shown_curves = NETWORKS[dataset], []
    for moment in moments:
        layer_curves = way.curves(frame[frame["run"] == run_of(dataset, moment)])
        if layer_curves.empty:
            continue
        quantity = ""
        if moment == FIRST:
            quantity = way.published
        published = read_off(network.published, quantity, list(layer_curves.index))
        title = f"{network.title} ({MOMENT[moment]})"
        titled_network = replace(network.at(moment), title=title)
        shown_curves.append(
            Shown(dataset, moment, titled_network, layer_curves, published)
        )
    return shown_curves


def _draw(
    header: Mapping[str, Any],
    frame: pd.DataFrame,
    *,
    ways: Sequence[Way],
    moments: Sequence[str],
    joint_checks: Sequence[
        Callable[[pd.DataFrame, Mapping[str, Network]], Finding]
    ] = (),
) -> Drawing:
    table_rows: list[dict[str, Any]] = []
    findings: list[Finding] = []
    range_labels: set[str] = set()
    with sheet(7.2, 4.4) as figure:
        axes_grid = figure.subplots(len(ways), len(EVERY), squeeze=False, sharey="row")
        for row_axes, way in zip(axes_grid, ways, strict=True):
            panels = [shown(frame, way, dataset, moments) for dataset in EVERY]
            for ax, panel in zip(row_axes, panels, strict=True):
                range_labels |= _panel(ax, way, panel)
            row_curves = list(chain.from_iterable(panels))
            for shown_curves in row_curves:
                sample_text = f"{shown_curves.values.shape[1]} clients and seeds"
                label_columns = {
                    "dataset": shown_curves.dataset,
                    "moment": MOMENT[shown_curves.moment],
                }
                layer_rows = lines_beside(
                    way.quantity,
                    way.what,
                    shown_curves.published,
                    shown_curves.values,
                    sample_text,
                )
                table_rows += [label_columns | table_row for table_row in layer_rows]
                findings += way.expect(
                    shown_curves.network,
                    way.what,
                    shown_curves.values,
                    shown_curves.published,
                )
            tables = list(
                chain.from_iterable(shown_curves.drawn for shown_curves in row_curves)
            )
            set_scale(row_axes[0], pd.concat(tables, axis=1), way.log)
            if not way.log:
                row_axes[0].set_ylim(bottom=0)
            row_axes[0].set_ylabel(way.label, fontsize=7)
        for ax, dataset in zip(axes_grid[0], EVERY, strict=True):
            ax.set_title(NETWORKS[dataset].title)
        key_above(figure, 4, handles=list(_legend(moments, range_labels)))
    table = pd.DataFrame(table_rows, columns=list(COLUMNS))
    networks = {
        run_of(dataset, FIRST): NETWORKS[dataset].at(FIRST) for dataset in EVERY
    }
    findings += [check(frame, networks) for check in joint_checks]
    caption = _caption(header, frame, ways, moments, bool(range_labels))
    return Drawing(figure, table, caption, tuple(findings), _medians(table))


def _panel(ax: Axes, way: Way, panel: Sequence[Shown]) -> set[str]:
    """Draw one network's curves of all moments; return the labels of the published ranges."""
    if not panel:
        ax.text(0.5, 0.5, "not in the paper", transform=ax.transAxes, **_CENTRED)
        ax.set_xticks([])
        return set()
    bands = list(chain.from_iterable(shown_curves.bands(way) for shown_curves in panel))
    curves(
        ax,
        chain.from_iterable(shown_curves.lines() for shown_curves in panel),
        bands=bands,
    )
    layers = list(panel[0].values.index)
    ax.set_xticks(range(len(layers)), layers, rotation=90, fontsize=6.5)
    ax.set_xlim(-0.4, len(layers) - 0.6)
    ax.tick_params(axis="y", labelsize=6.5)
    return {band.label for band in bands}


def _medians(table: pd.DataFrame) -> str:
    """Return the medians by layer, in a table for each dataset."""
    moment_heading = {}
    if table["moment"].nunique() > 1:
        moment_heading = {"moment": "model"}
    tables = [
        by_layer(
            dataset_rows, {"definition": NETWORKS[str(dataset)].title} | moment_heading
        )
        for dataset, dataset_rows in table.groupby("dataset", sort=False)
    ]
    return "\n\n".join([BY_LAYER, *tables])


def _legend(moments: Sequence[str], range_labels: set[str]) -> Iterator[Any]:
    """Yield what the legend shows: both kinds of lines of each moment, and the published ranges."""
    for moment in moments:
        colour = COLOUR[moment]
        bold_look: dict[str, Any] = {"linewidth": 1.8, "marker": "o", "markersize": 3.5}
        thin_look: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.6}
        median_label = f"median, {MOMENT[moment]}"
        yield Line2D([], [], color=colour, label=median_label, **bold_look)
        yield Line2D([], [], color=colour, label="one client in one seed", **thin_look)
    if PRINTED in range_labels:
        yield Patch(facecolor="0.85", edgecolor="0.55", label=PRINTED)
    if LESS in range_labels:
        look = {key: value for key, value in LESS_LOOK.items() if key != "linewidth"}
        yield Patch(label=LESS, **look)


def _caption(
    header: Mapping[str, Any],
    frame: pd.DataFrame,
    ways: Sequence[Way],
    moments: Sequence[str],
    banded: bool,
) -> str:
    """Return the caption: both definitions, whether published ranges are drawn, and the sizes behind each panel."""
    texts = [_sizes(header, frame, ways, moments, dataset) for dataset in EVERY]
    runs = runs_of(moments)
    upper_quantity, lower_quantity = (way.what for way in ways)
    seeds_text = seeds_behind(header, runs)
    ranges_text = "Its ranges are grey" if banded else "No values of it were read off"
    sizes_text, missing_text = " ".join(texts), missing_runs(header, runs)
    return (
        f"Top: {upper_quantity}. Bottom: {lower_quantity}. The published picture rests on the lower one. "
        f"{ranges_text}. "
        f"Rows have {seeds_text} seeds a network. The airline tweets stand for Sent-140 and have its network. "
        "EMNIST's 62 "
        f"classes and MIMIC-III cannot be had. {sizes_text}{missing_text}"
    )


def runs_of(moments: Sequence[str]) -> list[str]:
    """Return the names of all networks' runs of some moments."""
    runs = []
    for dataset in EVERY:
        runs += [run_of(dataset, moment) for moment in moments]
    return runs


def _sizes(
    header: Mapping[str, Any],
    frame: pd.DataFrame,
    ways: Sequence[Way],
    moments: Sequence[str],
    dataset: str,
) -> str:
    """Return the sizes of the runs behind one column of panels, in words."""
    runs = [run_of(dataset, moment) for moment in moments]
    run_rows = frame[frame["run"].isin(runs)]
    config = header["runs"][runs[0]]["config"]
    clients = run_rows[["seed", "client", "n_train"]].dropna().drop_duplicates()
    sample_total = clients.groupby("seed")["n_train"].sum().astype(float).mean()
    measured_sizes = {
        way.metric: run_rows.loc[run_rows["metric"] == way.metric, "n_samples"].max()
        for way in ways
    }
    most_text = " and ".join(
        dict.fromkeys(f"{size}" for size in measured_sizes.values() if pd.notna(size))
    )
    title, network_text = NETWORKS[dataset].title, names.network(config["model"])
    if width := config["model_options"].get("width"):
        network_text = f"{network_text} of width {width}"
    rounds_text = ""
    if FIRST not in moments:
        rounds_text = f" in {config['rounds']} rounds"
    return (
        f"{title[0].upper()}{title[1:]}: {run_rows['client'].nunique()} clients with {sample_total:,.0f} "
        "training samples. They "
        f"train {network_text}{rounds_text} with lr {config['lr']:g} and batch {config['batch_size']}. They "
        f"measure up to {most_text} "
        "samples."
    )


FINAL = {ALONE: ", trained alone", FEDERATED: ", federated"}
_V, _C, _S = "Gradient variance", "Curvature", "Federation sensitivity"
_A = "Dissimilarity of representations"
_FIRST = "after one epoch"
FIGURES: dict[str, tuple[str, Sequence[Way], Sequence[str]]] = {
    "fig4": (f"{_S} by layer {_FIRST}", S_FIRST, (FIRST,)),
    "figA1": (f"{_V} by layer {_FIRST}", VARIANCE, (FIRST,)),
    "figA2": (f"{_V} of the final models{FINAL[ALONE]}", VARIANCE, (ALONE,)),
    "figA3": (f"{_V} of the final models{FINAL[FEDERATED]}", VARIANCE, (FEDERATED,)),
    "figA4": (f"{_C} by layer {_FIRST}", CURVATURE, (FIRST,)),
    "figA5": (f"{_C} of the final models{FINAL[ALONE]}", CURVATURE, (ALONE,)),
    "figA6": (f"{_C} of the final models{FINAL[FEDERATED]}", CURVATURE, (FEDERATED,)),
    "figA7": (f"{_A} by layer {_FIRST}", APART, (FIRST,)),
    "figA8": (f"{_A} of the final models", APART, (ALONE, FEDERATED)),
    "figA9": (f"{_S} of the final models{FINAL[ALONE]}", S_FINAL, (ALONE,)),
    "figA10": (f"{_S} of the final models{FINAL[FEDERATED]}", S_FINAL, (FEDERATED,)),
}
"""By figure of the paper its title, both definitions, and the moments of its runs."""
ALSO = {"figA1": "fig1", "figA4": "fig2", "figA7": "fig3"}
"""Figures of the appendix, and those of the main text that show some of their networks."""
TOGETHER = {"figA7": (later_layers,), "fig4": (spikes, correlates)}
"""What is asked of all networks of a figure together."""

for _name, (_title, _ways, _moments) in FIGURES.items():
    _names = [_name]
    _word = "Fig."
    if _name in ALSO:
        _names = [ALSO[_name], _name]
        _word = "Figs."
    _places = " and ".join(
        name.removeprefix("fig").replace("A", "A.") for name in _names
    )
    items.register(
        Item(
            f"player_fl.{_name}",
            f"{_title} (PLayer-FL, {_word} {_places})",
            source=NAME,
            draw=partial(
                _draw,
                ways=_ways,
                moments=_moments,
                joint_checks=TOGETHER.get(_name, ()),
            ),
            shown=runs_of(_moments),
            also=tuple(f"player_fl.{name}" for name in _names[:-1]),
        )
    )
