"""FedRA's Tables 3 and 5 on PACS: federations without a client that can hold the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from diagnostics.plots.drawing import COLOURS, MARKERS, style
from figures import items
from figures.differences import Difference, difference
from figures.fedra.depth import (
    PACS,
    PAPER_ROUNDS,
    PRETRAIN,
    PRETRAINING,
    VIT,
    accuracies,
    columns,
    prepared,
    pretrained,
)
from figures.items import Drawing, Finding, Item, View, set_apart
from figures.names import title
from figures.page import markdown, missing_runs, seeds_in_words, span
from figures.recipe import labels, scored_at_end, tested, trained
from figures.verdicts import LEAD, LEVEL, MARGIN, Check, JointVerdict, judged
from fl_core import rows, runner
from fl_core.algorithms.base import Round
from fl_core.config import RunConfig
from fl_core.errors import UsageError, listing
from fl_core.statistics import mean_interval

NAME = "fedra.nobody"
DEPTHS = {"4": (4,), "6": (6,), "10": (10,), "mixed": (10, 10, 6, 4)}
"""Blocks of 12 that the clients can hold; the paper's six clients are here four."""
PRINTED = {"4": "[4]*6", "6": "[6]*6", "10": "[10]*6", "mixed": "[10,10,6,6,4,4]"}
"""The same settings as the paper writes them."""
HERE = {"4": "4 each", "6": "6 each", "10": "10 each", "mixed": "10/10/6/4"}
METHODS: dict[str, dict[str, Any]] = {
    "inclusivefl": {},
    "fedra": {},
    "fedra_cover": {"allocation": "cover"},
}
"""Options by method: Table 3 has the first two, Table 5 FedRA's two allocations."""
BLOCKS = "blocks_held"
"""Metric of the rows that say what a client held in a round: the number of blocks, and as the variant which."""

SHORT = PRETRAIN.with_keys(rounds=5, checkpoint_every=5)
"""A third of the pretraining behind Table 1."""
SMALL = scored_at_end(PACS.with_keys(max_samples=2500, batch_size=32, rounds=5))
"""A quarter of the images, in batches of 32: about 60 steps of SGD a client."""


def recipes() -> dict[str, RunConfig]:
    """The pretraining, and every method in every setting, ``SETTING.METHOD``."""
    runs = {PRETRAINING: SHORT}
    for setting, depths in DEPTHS.items():
        for method, own in METHODS.items():
            options: dict[str, Any] = {"depths": depths, **own}
            runs[f"{setting}.{method}"] = SMALL.with_keys(
                algorithm=method.partition("_")[0], options=options
            )
    return runs


RUNS = recipes()


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record each style's accuracy at the start and at the end, and the blocks of every client in every round."""
    if run == PRETRAINING:
        return pretrained(task, folder)
    engine, frame = trained(task)
    accuracy = tested(frame)
    held = list(_held(engine.algorithm, engine.names, task))
    return pd.concat(
        [accuracy[accuracy["model"] == "global"], rows.frame(held)], ignore_index=True
    )


def _held(algorithm: Any, names: list[str], task: runner.Task) -> Iterator[rows.Row]:
    everyone = tuple(range(len(names)))
    for index in range(int(task.config.federation.rounds or 0)):
        for client, name in enumerate(names):
            blocks = algorithm.blocks_of(Round(index, sampled=everyone), client)
            which = ",".join(map(str, blocks))
            yield rows.row(
                BLOCKS,
                len(blocks),
                round=index + 1,
                client=name,
                variant=which,
                **labels(task),
            )


STUDY = items.register(Item(
    NAME, "Federations in which nobody holds the whole model, on PACS (FedRA)", RUNS, seeds=3,
    one_seed=frozenset({PRETRAINING}),
    budget="25 minutes of one core, a third of which is pretraining",
    prepare=partial(prepared, RUNS[PRETRAINING]), measure=_measure,
))  # fmt: skip


# --- Tables 3 and 5 --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Two methods that a table compares in every setting.

    Attributes:
        place: in the paper.
        printed: by method, the end of its setting's name in the published numbers.
    """

    place: str
    printed: Mapping[str, str]

    @property
    def methods(self) -> tuple[str, str]:
        first, second = self.printed
        return first, second

    def published(self) -> pd.DataFrame:
        """The published means over domains, settings x methods, as shares."""
        all_of_it = items.published("fedra")
        own = all_of_it[
            (all_of_it["place"] == self.place) & (all_of_it["client"] == "")
        ]
        own = (
            own[own["model"].isin(["vit", ""])].set_index(["setting", "method"])[
                "value"
            ]
            / 100
        )
        return pd.DataFrame(
            {
                method: {
                    setting: own[
                        f"feature skew, {PRINTED[setting]}{end}",
                        method.partition("_")[0],
                    ]
                    for setting in DEPTHS
                }
                for method, end in self.printed.items()
            }
        )


TABLES = {
    "fedra.table3": Table("Table 3", {"fedra": "", "inclusivefl": ""}),
    "fedra.table5": Table("Table 5", {"fedra": ", Eq. 2", "fedra_cover": ", Eq. 3"}),
}


def _draw(header: Mapping[str, Any], frame: pd.DataFrame, table: Table) -> Drawing:
    wanted = [f"{setting}.{method}" for setting in DEPTHS for method in table.methods]
    styles = accuracies(frame)
    styles = styles[styles.index.get_level_values("run").isin(wanted)]
    if styles.empty:
        raise UsageError(
            f"{NAME} must have runs of {listing(wanted)}; got none. Train with --train."
        )
    means = styles.groupby("run", sort=False).mean()
    means = means.reindex([run for run in wanted if run in means.index])
    start = frame[
        (frame["metric"] == "accuracy")
        & (frame["round"] == 0)
        & frame["run"].isin(wanted)
    ]
    before = (
        start.groupby(["run", "seed"])["value"]
        .mean()
        .unstack("seed")
        .reindex_like(means)
    )
    published = table.published()
    with style():
        figure = plt.figure(figsize=(7.6, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2, sharex=True, sharey=True)
        _panel(left, means, table)
        left.axvline(
            100 * before.mean(axis=None),
            color="0.6",
            linewidth=0.9,
            linestyle="--",
            label="before training",
        )
        left.set(
            xlabel="accuracy, %",
            ylabel="blocks that each client can hold",
            title="PACS, here",
        )
        _panel(right, published.stack().swaplevel(), table)
        right.set(xlabel="accuracy, %", title=f"NICO++, published ({table.place})")
        figure.legend(
            *left.get_legend_handles_labels(),
            loc="outside upper center",
            ncols=3,
            fontsize=7.5,
        )
    seeds = int(means.notna().sum(axis=1).min())
    learnt = frame[(frame["run"] == PRETRAINING) & (frame["metric"] == "accuracy")]
    reached = (
        f"{100 * learnt.loc[learnt['round'].idxmax(), 'value']:.1f} %"
        if len(learnt)
        else ""
    )
    weights = f" Its accuracy there is {reached} of 100 classes." if reached else ""
    config = next(
        run["config"] for name, run in header["runs"].items() if name != PRETRAINING
    )
    caption = (
        "Mean accuracy of the global model over the styles and the last three evaluations. No client can hold all "
        "blocks. "
        f"The intervals (95 %) are over {span([seeds, header['seeds']])} seeds. The data are {config['max_samples']} "
        f"images of PACS and each client has one style. There are {config['rounds']} of {PAPER_ROUNDS} rounds with "
        f"batches of {config['batch_size']}. The transformer was pretrained on Tiny-ImageNet for "
        f"{SHORT.federation.rounds} epochs.{weights} The paper has ImageNet's weights.{missing_runs(header, wanted)}"
    )
    compared, others = (
        _order(means, before) if table.place == "Table 3" else _level(means, frame)
    )
    findings = (*set_apart(compared, LAST_LAYER), *others)
    shown = (
        styles.stack().rename("value").reset_index().rename(columns={"client": "style"})
    )
    return Drawing(
        figure,
        shown[["run", "style", "seed", "value"]],
        caption,
        findings,
        _page(styles, means, table),
    )


def _panel(ax: Axes, values: pd.Series | pd.DataFrame, table: Table) -> None:
    """Draw a dot for each setting and method, with its interval if there are several seeds."""
    for k, method in enumerate(table.methods):
        for y, setting in enumerate(DEPTHS):
            at: dict[str, Any] = {
                "color": COLOURS[k],
                "marker": MARKERS[k],
                "label": "_" if y else _named(method),
            }
            height = y + 0.16 * (2 * k - 1)
            if isinstance(values, pd.DataFrame):
                run = f"{setting}.{method}"
                found = (
                    mean_interval(values.loc[run].dropna())
                    if run in values.index
                    else None
                )
                if found is not None:
                    ax.hlines(
                        height,
                        100 * found.low,
                        100 * found.high,
                        color=COLOURS[k],
                        linewidth=1.4,
                    )
                ax.plot(
                    100 * found.value if found is not None else [float("nan")],
                    height,
                    linestyle="none",
                    **at,
                )
            else:
                ax.plot(100 * values[method, setting], height, linestyle="none", **at)
    ax.set_yticks(range(len(DEPTHS)), list(HERE.values()))
    ax.set_ylim(len(DEPTHS) - 0.5, -0.5)


def _named(method: str) -> str:
    return {"fedra": "FedRA", "fedra_cover": "FedRA, every block held"}.get(
        method, title(method)
    )


def _judged(gaps: Mapping[str, Difference], check: Check = LEAD) -> JointVerdict:
    return judged({HERE[setting]: gap for setting, gap in gaps.items()}, check)


def _order(
    means: pd.DataFrame, before: pd.DataFrame
) -> tuple[list[Finding], list[Finding]]:
    """Findings on what FedRA gains and on how it compares with InclusiveFL, and apart from them on its level."""
    gaps = {
        setting: difference(means, f"{setting}.fedra", f"{setting}.inclusivefl")
        for setting in DEPTHS
    }
    gains = {
        setting: difference(
            pd.concat({"end": means, "start": before}).xs(f"{setting}.fedra", level=1),
            "end",
            "start",
        )
        for setting in DEPTHS
        if f"{setting}.fedra" in means.index
    }
    return [
        Finding(
            "FedRA learns where no client holds the whole model",
            f"points gained {_judged(gains).text}",
            _judged(gains).held,
        ),
        Finding(
            "FedRA lies above InclusiveFL in every setting, as in Table 3",
            f"points {_judged(gaps).text}",
            _judged(gaps).held,
        ),
    ], [Finding("accuracies are those of Table 3", "see the table", None, FAR)]


def _level(
    means: pd.DataFrame, frame: pd.DataFrame
) -> tuple[list[Finding], list[Finding]]:
    """A finding on whether the two ways to assign blocks are level, and one on blocks that no client held."""
    gaps = {
        setting: difference(means, f"{setting}.fedra", f"{setting}.fedra_cover")
        for setting in DEPTHS
    }
    keep, cover = (without_client(frame, method) for method in ("fedra", "fedra_cover"))
    return [
        Finding(
            f"the two ways are level within {100 * MARGIN:g} point in every setting, as in Table 5",
            f"Eq. 2 - Eq. 3 {_judged(gaps, LEVEL).text}",
            _judged(gaps, LEVEL).held,
        )
    ], [
        Finding(
            "by Eq. 3 every block has a client in every round, by Eq. 2 not",
            f"of {VIT['depth']} blocks {keep.mean():.2f} have none by Eq. 2, {cover.mean():.2f} by Eq. 3",
            bool((cover == 0).all() and (keep > 0).any())
            if len(keep) and len(cover)
            else None,
        )
    ]


def without_client(frame: pd.DataFrame, method: str) -> pd.Series:
    """Count the blocks that no client had, by run, seed and round."""
    own = frame[
        (frame["metric"] == BLOCKS) & (frame["run"].str.partition(".")[2] == method)
    ]
    held = own.assign(block=own["variant"].str.split(",")).explode("block")
    return VIT["depth"] - held.groupby(["run", "seed", "round"])["block"].nunique()


FAR = "PACS from a short pretraining on Tiny-ImageNet, few images and rounds; the paper: NICO++, ImageNet's weights"
"""Why accuracies are not comparable with the paper's."""
LAST_LAYER = "the last layer alone learns in so few steps: FedRA's accuracies are the same wherever adapters sit"
"""Why methods are not compared with the paper either: what they do with the adapters does not show yet."""


def _page(styles: pd.DataFrame, means: pd.DataFrame, table: Table) -> str:
    cells = columns(styles, means)
    names = [run.partition(".") for run in means.index]
    published = table.published()
    own = {
        "clients": [HERE[setting] for setting, _, _ in names],
        "method": [_named(method) for _, _, method in names],
        **{name: values for name, values in cells.items() if name != "run"},
        "NICO++ (published)": [
            f"{100 * published.loc[setting, method]:.2f}"
            for setting, _, method in names
        ],
    }
    seeds = seeds_in_words(means.shape[1])
    return f"{markdown(own)}\n\n± is half the 95 % interval over {seeds}. Published: ViT in FedRA's {table.place}."


for _name, _table in TABLES.items():
    _title = (
        "Nobody holds the whole model"
        if _table.place == "Table 3"
        else "Layers that no client holds: two ways"
    )
    items.register(
        View(
            _name,
            f"{_title}, PACS (FedRA, {_table.place})",
            NAME,
            partial(_draw, table=_table),
        )
    )
