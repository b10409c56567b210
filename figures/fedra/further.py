"""FedRA's Tables 2, 4 and 6 on PACS. They change labels, depths or the places of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from diagnostics.plots.drawing import COLOURS, MARKERS, style
from figures import items
from figures.differences import difference
from figures.drawing import enumeration
from figures.fedra import nobody
from figures.fedra.depth import DEPTHS, PAPER_ROUNDS, TITLES, prepared
from figures.fedra.nobody import FAR, LAST_LAYER, SHORT, SMALL
from figures.items import Drawing, Finding, Item, View, set_apart
from figures.names import title
from figures.page import markdown, missing_runs, percent, span
from figures.recipe import tested, trained
from figures.verdicts import LEVEL, MARGIN, judged
from fl_core import runner
from fl_core.config import RunConfig
from fl_core.errors import UsageError, listing
from fl_core.statistics import mean_interval

NAME = "fedra.further"
PARTS = 3
"""Clients a style where labels differ too; in the paper five a domain."""
LIMITED: dict[str, Any] = {"depths": DEPTHS}
PLACES = {"both": ("attn.proj", "mlp.fc2"), "proj": ("attn.proj",), "fc2": ("mlp.fc2",)}
"""Layers that have adapters, by setting of Table 6."""
SPLIT = SMALL.with_keys(partition="natural_dirichlet", alpha=0.5, clients=PARTS * len(DEPTHS), max_samples=3000,
    rounds=10, eval_every=10, checkpoint_every=10,
)  # fmt: skip
"""Twelve clients with 250 images each: about 50 steps of SGD a client."""


def recipes() -> dict[str, RunConfig]:
    """Every method in every setting of the three tables, ``SETTING.METHOD``."""
    runs = {}
    for method in ("alllarge", "fedra", "depthfl", "inclusivefl", "allsmall"):
        # a style's clients come one after another, and depths in turn, so that every style has clients of several
        options: dict[str, Any] = (
            {} if method.startswith("all") else {"depths": DEPTHS * PARTS}
        )
        runs[f"labels.{method}"] = SPLIT.with_keys(algorithm=method, options=options)
    for method in ("alllarge", "fedra", "inclusivefl", "allsmall"):
        options = {} if method.startswith("all") else {"random_depths": True}
        runs[f"drawn.{method}"] = SMALL.with_keys(algorithm=method, options=options)
    for setting, targets in PLACES.items():
        for method in ("fedra", "inclusivefl"):
            runs[f"{setting}.{method}"] = SMALL.with_keys(
                algorithm=method, options={**LIMITED, "lora_targets": targets}
            )
    return runs


RUNS = recipes()


def _prepare(config: RunConfig, run: str, folder: Path) -> RunConfig:
    """Start from the weights of :mod:`figures.fedra.nobody`, pretrained first if they are missing."""
    shared = folder.parent / nobody.NAME
    shared.mkdir(exist_ok=True)
    return prepared(SHORT, config, run, shared)


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record the global model's accuracy at every client, at the start and at the end."""
    accuracy = tested(trained(task)[1])
    return accuracy[accuracy["model"] == "global"]


STUDY = items.register(Item(
    NAME, "Labels that differ too, depths that change, adapters in other places, on PACS (FedRA)", RUNS, seeds=3,
    budget="about half an hour of one core, and pretraining where fedra.nobody was not trained", prepare=_prepare,
    measure=_measure,
))  # fmt: skip


# --- Tables 2, 4 and 6 -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """One of the tables.

    Attributes:
        place: in the paper.
        what: in which way its clients are other than Table 1's.
        settings: its settings in words, by the beginning of its runs' names.
        printed: the same settings as the published numbers have them.
        data: the paper's data sets.
    """

    place: str
    what: str
    settings: Mapping[str, str]
    printed: Mapping[str, str]
    data: tuple[str, ...] = ("nico++",)

    @property
    def runs(self) -> list[str]:
        """Its runs, setting by setting."""
        return [run for run in RUNS if run.partition(".")[0] in self.settings]

    def published(self) -> pd.DataFrame:
        """The published means over domains, runs x data sets, as shares; of the transformer."""
        every = items.published("fedra")
        own = every[
            (every["place"] == self.place)
            & (every["client"] == "")
            & (every["model"] == "vit")
        ]
        values = own.set_index(["dataset", "setting", "method"])["value"] / 100
        return pd.DataFrame(
            {
                TITLES[data]: {
                    run: values[data, self.printed[setting], method]
                    for run in self.runs
                    for setting, _, method in (run.partition("."),)
                }
                for data in self.data
            }
        )

    def named(self, run: str) -> str:
        """A run in words: its method, and its setting if there are several."""
        setting, _, method = run.partition(".")
        return title(method) + (
            f", {self.settings[setting]}" if len(self.settings) > 1 else ""
        )


AT = "feature skew, [12,10,8,6,4,3], adapters at "
TABLES = {
    "fedra.table2": Table(
        "Table 2",
        f"Each style has {PARTS} clients, whose labels differ too (Dirichlet, α = {SPLIT.data.alpha:g})",
        {"labels": ""},
        {"labels": "feature and label skew, [12,10,8,6,4,3]*5"},
        ("domainnet", "nico++"),
    ),
    "fedra.table4": Table(
        "Table 4",
        "Every client draws a new depth of 1 to 12 blocks in every round",
        {"drawn": ""},
        {"drawn": "feature skew, 1 to 12 blocks, drawn each round"},
    ),
    "fedra.table6": Table(
        "Table 6",
        f"Adapters are at the attention's output or the MLP's second layer or at both. "
        f"The clients train at most {enumeration(DEPTHS)} blocks",
        {setting: " and ".join(targets) for setting, targets in PLACES.items()},
        {setting: AT + " and ".join(targets) for setting, targets in PLACES.items()},
    ),
}


def by_style(frame: pd.DataFrame, when: str) -> pd.DataFrame:
    """Accuracy at the ``start`` or the ``end``, (run, style) x seeds; of several clients a style their mean.

    Clients of a style are weighted by their test samples, as if the style's were one set.
    """
    own = frame[frame["metric"] == "accuracy"]
    edge = own.groupby(["run", "seed"])["round"].transform(
        "min" if when == "start" else "max"
    )
    own = own[own["round"] == edge]
    own = own.assign(
        style=own["client"].str.replace(r"_\d+$", "", regex=True),
        total=own["value"] * own["n_samples"].astype(float),
    )
    sums = own.groupby(["run", "style", "seed"], sort=False)[
        ["total", "n_samples"]
    ].sum()
    return (sums["total"] / sums["n_samples"].astype(float)).unstack("seed")


def _draw(header: Mapping[str, Any], frame: pd.DataFrame, table: Table) -> Drawing:
    frame = frame[frame["run"].isin(table.runs)]
    if frame.empty:
        raise UsageError(
            f"{NAME} must have runs of {listing(table.runs)}; got none. Train with --train."
        )
    styles = by_style(frame, "end")
    means, before = (
        each.groupby("run", sort=False)
        .mean()
        .reindex([run for run in table.runs if run in set(frame["run"])])
        for each in (styles, by_style(frame, "start"))
    )
    published = table.published()
    with style():
        figure = plt.figure(
            figsize=(7.6, 1.9 + 0.24 * len(means)), layout="constrained"
        )
        left, right = figure.subplots(1, 2, sharex=True, sharey=True)
        _here(left, means, before, table)
        for k, data in enumerate(published):
            right.plot(100 * published[data].reindex(means.index), range(len(means)), linestyle="none",
                       marker=MARKERS[k + 1], color=COLOURS[k + 1], label=data)  # fmt: skip
        right.set(xlabel="accuracy, %", title=f"published ({table.place})")
        figure.legend(loc="outside upper center", ncols=4, fontsize=7.5)
    config = header["runs"][means.index[0]]["config"]
    seeds = means.notna().sum(axis=1)
    caption = (
        f"Mean accuracy of the global model over the styles. {table.what}. The intervals (95 %) are over "
        f"{span([int(seeds.min()), int(seeds.max())])} seeds. The data are {config['max_samples']} images of PACS. "
        f"There are {config['rounds']} of {PAPER_ROUNDS} rounds with batches of {config['batch_size']}. "
        f"The transformer was pretrained on Tiny-ImageNet for {SHORT.federation.rounds} epochs. "
        f"The paper has ImageNet's weights.{missing_runs(header, table.runs)}"
    )
    text = _page(styles, means, published, table) + _weightings(frame, table)
    shown = (
        styles.stack().rename("value").reset_index()[["run", "style", "seed", "value"]]
    )
    compared = [_learns(means, before), *_findings(means, published, table)]
    if len(table.settings) > 1:
        compared.append(_only_the_head(means))
    level = Finding(
        f"accuracies are those of {table.place}", "see the table", None, FAR
    )
    findings = (*set_apart(compared, LAST_LAYER), level)
    return Drawing(figure, shown, caption, findings, text)


def _weightings(frame: pd.DataFrame, table: Table) -> str:
    """Name how clients are weighted where a style has several, and what other ways give for the first comparison."""
    last = frame[(frame["metric"] == "accuracy")]
    last = last[
        last["round"] == last.groupby(["run", "seed"])["round"].transform("max")
    ]
    if not last["client"].str.contains(r"_\d+$").any():
        return ""
    last = last.assign(total=last["value"] * last["n_samples"].astype(float))
    sums = last.groupby(["run", "seed"])[["total", "n_samples"]].sum()
    ways = {
        "every style alike, its clients by test samples (used here)": by_style(
            frame, "end"
        )
        .groupby("run")
        .mean(),
        "every client alike": last.groupby(["run", "seed"])["value"]
        .mean()
        .unstack("seed"),
        "every test sample alike": (
            sums["total"] / sums["n_samples"].astype(float)
        ).unstack("seed"),
    }
    compared = [
        f"{setting}.{name}"
        for setting in table.settings
        for name in ("fedra", "inclusivefl")
    ]
    if any(run not in means.index for means in ways.values() for run in compared):
        return ""
    cells = {"weighting of clients": list(ways)}
    cells["FedRA - InclusiveFL, points"] = [
        difference(means, *compared[:2]).text for means in ways.values()
    ]
    return f"\n\n{markdown(cells)}"


def _here(ax: Axes, means: pd.DataFrame, before: pd.DataFrame, table: Table) -> None:
    """Draw a dot and its interval for each run, and a line where accuracy was before training."""
    for y, run in enumerate(means.index):
        found = mean_interval(means.loc[run].dropna())
        ax.hlines(y, 100 * found.low, 100 * found.high, color=COLOURS[0], linewidth=1.4)
        ax.plot(
            100 * found.value,
            y,
            linestyle="none",
            color=COLOURS[0],
            marker=MARKERS[0],
            label="_" if y else "here",
        )
    ax.axvline(
        100 * before.mean(axis=None),
        color="0.6",
        linewidth=0.9,
        linestyle="--",
        label="before training",
    )
    ax.set_yticks(range(len(means)), [table.named(run) for run in means.index])
    ax.set(ylim=(len(means) - 0.5, -0.5), xlabel="accuracy, %", title="PACS, here")


def _learns(means: pd.DataFrame, before: pd.DataFrame) -> Finding:
    """Return whether FedRA ends above its start, in every setting."""
    own = [run for run in means.index if run.endswith(".fedra")]
    both = pd.concat({"end": means, "start": before})
    gaps = {run: difference(both.xs(run, level=1), "end", "start") for run in own}
    found = judged(
        {
            run.partition(".")[0] if len(gaps) > 1 else "": gap
            for run, gap in gaps.items()
        }
    )
    return Finding("FedRA learns", f"points gained {found.text}", found.held)


def _only_the_head(means: pd.DataFrame) -> Finding:
    """Return the findings of Tables 2 to 6: FedRA's accuracy seed by seed, for every place of its adapters."""
    own = means.loc[[run for run in means.index if run.endswith(".fedra")]].dropna(
        axis=1
    )
    apart = (
        100 * float((own.max() - own.min()).max())
        if len(own) > 1 and own.shape[1]
        else float("nan")
    )
    return Finding(
        "FedRA outperforms other methods in Tables 2 to 6",
        f"nothing but the head has learned: with adapters at {len(own)} places FedRA's accuracies differ by at most "
        f"{apart:.2f} points in {own.shape[1]} seeds",
        None,
    )


def _findings(
    means: pd.DataFrame, published: pd.DataFrame, table: Table
) -> list[Finding]:
    """FedRA against every other method of its setting as published; of places of adapters also against one another."""
    findings = []
    for setting, words in table.settings.items():
        control = f"{setting}.fedra"
        for run in (
            each
            for each in table.runs
            if each.startswith(f"{setting}.") and each != control
        ):
            wanted = published.loc[control] - published.loc[run]
            gap = difference(means, control, run)
            if (wanted > 0).all() or (wanted < 0).all():
                higher = bool((wanted > 0).all())
                where = f" ({words})" if words else ""
                findings.append(Finding(
                    f"FedRA lies {'above' if higher else 'below'} {title(run.partition('.')[2])}, as in "
                    f"{table.place}{where}",
                    f"points {gap.text}",
                    gap.above if higher or gap.above is None else not gap.above,
                ))  # fmt: skip
    if len(table.settings) > 1:
        gaps = {
            f"{table.settings[one]} - {table.settings[other]}": difference(
                means, f"{one}.fedra", f"{other}.fedra"
            )
            for one, other in combinations(table.settings, 2)
        }
        findings.append(Finding(
            f"FedRA is level within {100 * MARGIN:g} point wherever adapters sit, as in {table.place}",
                        f"points {judged(gaps, LEVEL).text}",
            judged(gaps, LEVEL).held,
        ))  # fmt: skip
    return findings


def _page(
    styles: pd.DataFrame, means: pd.DataFrame, published: pd.DataFrame, table: Table
) -> str:
    names = list(styles.index.get_level_values("style").unique())
    beside = {
        f"{data} (published)": [
            f"{100 * value:.2f}" for value in published[data].reindex(means.index)
        ]
        for data in published
    }
    cells: dict[str, Any] = {
        "method": [table.named(run) for run in means.index],
        "seeds": [int(means.loc[run].notna().sum()) for run in means.index],
        **{
            name.replace("_", " "): [
                percent(*mean_interval(styles.loc[(run, name)].dropna()))
                for run in means.index
            ]
            for name in names
        },
        "mean": [
            percent(*mean_interval(means.loc[run].dropna())) for run in means.index
        ],
        **beside,
    }
    return f"{markdown(cells)}\n\n± is half the 95 % interval over seeds. Published: ViT in FedRA's {table.place}."


WHAT = {
    "fedra.table2": "Clients whose features and labels differ",
    "fedra.table4": "Depths that change from round to round",
    "fedra.table6": "Adapters in other places",
}
for _name, _table in TABLES.items():
    _title = f"{WHAT[_name]}, PACS (FedRA, {_table.place})"
    items.register(
        View(_name, _title, NAME, partial(_draw, table=_table), runs=_table.runs)
    )
