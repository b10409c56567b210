"""FedRA's Tables 2 to 6 on PACS: other labels, depths and places of adapters, and clients that hold no whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from figures import items
from figures.differences import Difference, difference
from figures.drawing import enumeration
from figures.fedra.depth import (
    DEPTHS,
    PACS,
    PRETRAIN,
    PRETRAINING,
    TITLES,
    VIT,
    columns,
    prepared,
    pretrained,
)
from figures.forms import from_paper, marks, over_seeds, sheet, with_intervals
from figures.items import Drawing, Finding, Item, set_apart
from figures.names import title
from figures.page import markdown, missing_runs, numbers, span
from figures.recipe import labels, scored_at_end, tested, trained, where
from figures.verdicts import LEAD, LEVEL, MARGIN, TRAIL, judged
from fl_core import rows
from fl_core.algorithms.base import Round
from fl_core.config import RunConfig
from fl_core.run import runner

NAME, NOBODY = "fedra.further", "fedra.nobody"
PARTS = 3
"""Clients a style where labels differ too; in the paper five a domain."""
SHORT = PRETRAIN.with_keys(rounds=5, checkpoint_every=5)
"""A third of the pretraining behind Table 1."""
SMALL = scored_at_end(PACS.with_keys(max_samples=2500, batch_size=32, rounds=5))
"""A quarter of the images, in batches of 32: about 60 steps of SGD a client."""
SPLIT = SMALL.with_keys(partition="natural_dirichlet", alpha=0.5, clients=PARTS * len(DEPTHS), max_samples=3000,
    rounds=10, eval_every=10, checkpoint_every=10,
)  # fmt: skip
"""Twelve clients with 250 images each: about 50 steps of SGD a client."""
PLACES = {"both": ("attn.proj", "mlp.fc2"), "proj": ("attn.proj",), "fc2": ("mlp.fc2",)}
"""Layers that have adapters, by setting of Table 6."""
HELD = {"4": (4,), "6": (6,), "10": (10,), "mixed": (10, 10, 6, 4)}
"""Blocks of 12 that clients can hold in Tables 3 and 5; the paper's six clients are here four."""
COVER = {"allocation": "cover"}
BLOCKS = "blocks_held"
"""Metric of the rows that say what a client held in a round: the number of blocks, and as the variant which."""
LAST_LAYER = "the last layer alone learns in so few steps: FedRA's accuracies are the same wherever adapters sit"
"""Why methods are not compared with the paper either: what they do with the adapters does not show yet."""


def _runs() -> Iterator[tuple[str, RunConfig]]:
    """Yield every method in every setting of Tables 2, 4 and 6, ``SETTING.METHOD``."""
    for method in ("alllarge", "fedra", "depthfl", "inclusivefl", "allsmall"):
        # a style's clients come one after another, and depths in turn, so that every style has clients of several
        options: dict[str, Any] = {}
        if not method.startswith("all"):
            options = {"depths": DEPTHS * PARTS}
        yield f"labels.{method}", SPLIT.with_keys(algorithm=method, options=options)
    for method in ("alllarge", "fedra", "inclusivefl", "allsmall"):
        options = {}
        if not method.startswith("all"):
            options = {"random_depths": True}
        yield f"drawn.{method}", SMALL.with_keys(algorithm=method, options=options)
    for setting, targets in PLACES.items():
        for method in ("fedra", "inclusivefl"):
            options = {"depths": DEPTHS, "lora_targets": targets}
            yield f"{setting}.{method}", SMALL.with_keys(algorithm=method, options=options)  # fmt: skip


RUNS = dict(_runs())
OF_NOBODY = {PRETRAINING: SHORT}
for _setting, _depths in HELD.items():
    for _method, _options in {
        "inclusivefl": {},
        "fedra": {},
        "fedra_cover": COVER,
    }.items():
        OF_NOBODY[f"{_setting}.{_method}"] = SMALL.with_keys(
            algorithm=_method.partition("_")[0],
            options={"depths": _depths, **_options},
        )


def shared_start(config: RunConfig, run: str, folder: Path) -> RunConfig:
    """Start from the weights of the study :data:`NOBODY`, pretrained first if they are missing."""
    shared_folder = folder.parent / NOBODY
    shared_folder.mkdir(exist_ok=True)
    return prepared(SHORT, config, run, shared_folder)


def measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record the global model's accuracy at every client, at the start and at the end."""
    accuracy_rows = tested(trained(task)[1])
    return accuracy_rows[accuracy_rows["model"] == "global"]


def _measure_held(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record also the blocks of every client in every round."""
    if run == PRETRAINING:
        return pretrained(task, folder)
    engine, frame = trained(task)
    accuracy_rows = tested(frame)
    algorithm: Any = engine.algorithm
    all_clients, table_rows = tuple(range(len(engine.names))), []
    for round_index in range(int(task.config.federation.rounds or 0)):
        for client, client_name in enumerate(engine.names):
            client_blocks = algorithm.blocks_of(
                Round(round_index, sampled=all_clients), client
            )
            columns = {
                "client": client_name,
                "variant": ",".join(map(str, client_blocks)),
            }
            table_rows.append(
                rows.row(
                    BLOCKS,
                    len(client_blocks),
                    round=round_index + 1,
                    **columns,
                    **labels(task),
                )
            )
    return pd.concat(
        [accuracy_rows[accuracy_rows["model"] == "global"], rows.frame(table_rows)],
        ignore_index=True,
    )


items.register(Item(
    NAME, "Labels that differ too, depths that change, adapters in other places, on PACS (FedRA)", RUNS, seeds=3,
    budget="about half an hour of one core, and pretraining where fedra.nobody was not trained", prepare=shared_start,
    measure=measure,
))  # fmt: skip
NOBODYS = items.register(Item(
    NOBODY, "Federations in which nobody holds the whole model, on PACS (FedRA)", OF_NOBODY, seeds=3,
    own_seeds={PRETRAINING: 1}, budget="25 minutes of one core, a third of which is pretraining",
    prepare=shared_start, measure=_measure_held,
))  # fmt: skip


# --- Tables 2 to 6 ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """One of the tables.

    Attributes:
        place: the place in the paper.
        title: the title of the page.
        what: how its clients differ from those of Table 1.
        settings: its settings in words, by the beginning of its runs' names.
        printed: the same settings as the published numbers have them.
        methods: by the end of the runs' names, the end of the setting in the published numbers.
        data: the paper's data sets.
    """

    place: str
    title: str
    what: str
    settings: Mapping[str, str]
    printed: Mapping[str, str]
    methods: Mapping[str, str]
    data: tuple[str, ...] = ("nico++",)

    @property
    def runs(self) -> list[str]:
        """Return its runs, setting by setting."""
        runs = []
        for setting in self.settings:
            runs += [f"{setting}.{method}" for method in self.methods]
        return runs

    def published(self) -> pd.DataFrame:
        """Return the published means over domains, runs x data sets, as shares; of the transformer."""
        published_rows = items.published("fedra")
        table_rows = where(published_rows, place=self.place, client="")
        table_rows = table_rows[table_rows["model"].isin(["vit", ""])]
        published_shares = (
            table_rows.set_index(["dataset", "setting", "method"])["value"] / 100
        )
        columns: dict[str, dict[str, float]] = {
            TITLES[dataset]: {} for dataset in self.data
        }
        for setting, setting_text in self.printed.items():
            for method, method_end in self.methods.items():
                for dataset in self.data:
                    row_key = (
                        dataset,
                        f"feature {setting_text}{method_end}",
                        method.partition("_")[0],
                    )
                    columns[TITLES[dataset]][f"{setting}.{method}"] = published_shares[
                        row_key
                    ]
        return pd.DataFrame(columns)

    def named(self, run: str) -> str:
        """Return a run in words: its method, and its setting if there are several."""
        setting, _, method = run.partition(".")
        if len(self.settings) == 1:
            return title(method)
        return ", ".join([title(method), self.settings[setting]])

    def by_setting(self, compare: Callable[[str], Difference]) -> dict[str, Difference]:
        """Return differences in each setting, by its words; a single setting needs none."""
        gaps = {
            setting_text: compare(setting)
            for setting, setting_text in self.settings.items()
        }
        if len(gaps) == 1:
            return dict(zip([""], gaps.values(), strict=True))
        return gaps

    def gaps(
        self, run_scores: pd.DataFrame, method: str, other_method: str
    ) -> dict[str, Difference]:
        """Return differences between two methods, setting by setting."""
        return self.by_setting(
            lambda setting: difference(
                run_scores, f"{setting}.{method}", f"{setting}.{other_method}"
            )
        )


def _plain(*methods: str) -> dict[str, str]:
    return dict.fromkeys(methods, "")


DEPTH = "skew, [12,10,8,6,4,3]"
AT = {setting: " and ".join(targets) for setting, targets in PLACES.items()}
WITHOUT: tuple[str, Mapping[str, str], Mapping[str, str]] = (
    "No client can hold all blocks",
    {"4": "4 each", "6": "6 each", "10": "10 each", "mixed": "10/10/6/4"},
    {"4": "skew, [4]*6", "6": "skew, [6]*6", "10": "skew, [10]*6", "mixed": "skew, [10,10,6,6,4,4]"},
)  # fmt: skip
_BLOCKS = enumeration(DEPTHS)
TABLES = {
    "fedra.table2": Table(
        "Table 2", "Clients whose features and labels differ",
        f"Each style has {PARTS} clients, whose labels differ too (Dirichlet, α = {SPLIT.data.alpha:g})",
        {"labels": ""}, {"labels": "and label skew, [12,10,8,6,4,3]*5"},
        _plain("alllarge", "fedra", "depthfl", "inclusivefl", "allsmall"), ("domainnet", "nico++"),
    ),
    "fedra.table3": Table("Table 3", "Nobody holds the whole model", *WITHOUT, _plain("fedra", "inclusivefl")),
    "fedra.table4": Table(
        "Table 4", "Depths that change from round to round",
        "Every client draws a new depth of 1 to 12 blocks in every round", {"drawn": ""},
        {"drawn": "skew, 1 to 12 blocks, drawn each round"}, _plain("alllarge", "fedra", "inclusivefl", "allsmall"),
    ),
    "fedra.table5": Table(
        "Table 5", "Layers that no client holds: two ways",
        f"{WITHOUT[0]}. By `cover`, Eq. 3, every block has a client", *WITHOUT[1:],
        {"fedra": ", Eq. 2", "fedra_cover": ", Eq. 3"},
    ),
    "fedra.table6": Table(
        "Table 6", "Adapters in other places",
        "Adapters are at the attention's output or the MLP's second layer or at both. "
        f"The clients train at most {_BLOCKS} blocks",
        AT, {setting: f"{DEPTH}, adapters at {words}" for setting, words in AT.items()}, _plain("fedra", "inclusivefl"),
    ),
}  # fmt: skip


def by_style(frame: pd.DataFrame, moment: str) -> pd.DataFrame:
    """Return accuracy at the ``start`` or the ``end``, (run, style) x seeds; of several clients a style their mean.

    Clients of a style are weighted by their test samples, as if the style's were one set.
    """
    accuracy_rows = frame[frame["metric"] == "accuracy"]
    edge_rounds = accuracy_rows.groupby(["run", "seed"])["round"].transform(
        "min" if moment == "start" else "max"
    )
    accuracy_rows = accuracy_rows[accuracy_rows["round"] == edge_rounds]
    accuracy_rows = accuracy_rows.assign(
        style=accuracy_rows["client"].str.replace(r"_\d+$", "", regex=True),
        total=accuracy_rows["value"] * accuracy_rows["n_samples"].astype(float),
    )
    sums = accuracy_rows.groupby(["run", "style", "seed"], sort=False)[
        ["total", "n_samples"]
    ].sum()
    return (sums["total"] / sums["n_samples"].astype(float)).unstack("seed")


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    """Draw every line of the five tables, ours next to the published ones, and judge each table by itself."""
    nobody_header, nobody_rows = NOBODYS.read(NOBODYS.path())
    frame = pd.concat([frame, nobody_rows], ignore_index=True)
    runs = {**header["runs"], **nobody_header["runs"]}
    styles = by_style(frame, "end")
    run_scores, start_means = (
        table.groupby("run", sort=False).mean()
        for table in (styles, by_style(frame, "start"))
    )
    findings: list[Finding] = []
    sections = []
    for table in TABLES.values():
        scores = run_scores.reindex(table.runs)
        published = table.published()
        judged_findings = set_apart(
            _findings(scores, start_means, published, table), LAST_LAYER
        )
        for finding in judged_findings:
            if table.place not in finding.expected:
                finding = replace(
                    finding, expected=f"{table.place}: {finding.expected}"
                )
            findings.append(finding)
        if "fedra_cover" in table.methods:
            findings.append(_covered(frame[frame["run"].isin(table.runs)]))
        config = runs[table.runs[0]]["config"]
        sections += [
            f"## {table.title} ({table.place})",
            f"{table.what}. {config['max_samples']} images, {config['rounds']} of 100 rounds, batches of "
            f"{config['batch_size']}.",
            _page(styles, scores, published, table),
        ]
    findings += set_apart([_only_the_head(run_scores)], LAST_LAYER)
    pretraining_rows = frame[
        (frame["run"] == PRETRAINING) & (frame["metric"] == "accuracy")
    ]
    pretrained_accuracy = pretraining_rows.sort_values("round")["value"].iloc[-1]
    drawn_runs = list(chain.from_iterable(table.runs for table in TABLES.values()))
    seeds_text = span(run_scores.loc[drawn_runs].notna().sum(axis=1))
    missing_text = missing_runs(header) + missing_runs(nobody_header)
    caption = (
        "Mean accuracy of the global model over PACS's styles, with 95 % intervals over "
        f"{seeds_text} seeds. Hollow marks are the paper's, of ViT and NICO++. The "
        "dashed line is the mean before training. The transformer was pretrained on Tiny-ImageNet for "
        f"{SHORT.federation.rounds} epochs. Its accuracy there is {100 * pretrained_accuracy:.1f} % of 100 "
        "classes. The paper has "
        f"ImageNet's weights.{missing_text}"
    )
    note = "± is half the 95 % interval over seeds. Published: ViT."
    drawn_table = (
        styles.stack().rename("value").reset_index()[["run", "style", "seed", "value"]]
    )
    return Drawing(
        _lines_of_tables(run_scores, start_means),
        drawn_table,
        caption,
        tuple(findings),
        "\n\n".join([*sections, note]),
    )


def _lines_of_tables(run_scores: pd.DataFrame, start_means: pd.DataFrame) -> Figure:
    """Draw a panel for each table, with a line for each setting and method."""
    with sheet(7.6, 6.6) as figure:
        panels = figure.subplot_mosaic(
            [["Table 2", "Table 3"], ["Table 4", "Table 5"], ["Table 6", "Table 5"]],
            height_ratios=[5, 4, 6],
            sharex=True,
        )
        for table in TABLES.values():
            ax, runs = panels[table.place], table.runs
            published = table.published()[TITLES["nico++"]]
            kinds = [
                with_intervals(over_seeds(run_scores, runs)),
                from_paper(published.reindex(runs)),
            ]
            marks(
                ax,
                kinds,
                list(map(table.named, runs)),
                factor=100,
                level=start_means.reindex(runs).mean(axis=None),
                level_look={"linestyle": "--", "zorder": 2},
                size=6.5,
            )
            ax.set_title(
                f"{table.place}: {table.title[0].lower()}{table.title[1:]}",
                fontsize=7.5,
                loc="right",
            )
        for table_place in ("Table 5", "Table 6"):
            panels[table_place].set_xlabel("accuracy, %")
    return figure


def _findings(
    run_scores: pd.DataFrame,
    start_means: pd.DataFrame,
    published: pd.DataFrame,
    table: Table,
) -> Iterator[Finding]:
    """Yield whether FedRA learns, and how it compares with each method as published, all settings together."""
    start_and_end = pd.concat({"end": run_scores, "start": start_means}).swaplevel()
    gains = table.by_setting(
        lambda setting: difference(
            start_and_end.loc[f"{setting}.fedra"], "end", "start"
        )
    )
    verdict = judged(gains)
    yield verdict.finding("FedRA learns", "points gained ")
    for other_method in table.methods:
        published_gaps = pd.concat(
            [
                published.loc[f"{setting}.fedra"] - published.loc[f"{setting}.{other_method}"]
                for setting in table.settings
            ]
        )  # fmt: skip
        gaps, other_title = (
            table.gaps(run_scores, "fedra", other_method),
            title(other_method),
        )
        if other_method == "fedra_cover":
            verdict = judged(gaps, LEVEL)
            yield verdict.finding(
                f"the two ways are level within {100 * MARGIN:g} point in every setting, as in {table.place}",
                "Eq. 2 - Eq. 3 ",
            )
        elif (published_gaps > 0).all():
            expected = f"FedRA lies above {other_title}, as in {table.place}"
            yield judged(gaps, LEAD).finding(expected, "points ")
        elif (published_gaps < 0).all():
            expected = f"FedRA lies below {other_title}, as in {table.place}"
            yield judged(gaps, TRAIL).finding(expected, "points ")
    if table.place == "Table 6":
        gaps = {
            f"{AT[place_a]} - {AT[place_b]}": difference(run_scores, f"{place_a}.fedra", f"{place_b}.fedra")
            for place_a, place_b in combinations(table.settings, 2)
        }  # fmt: skip
        verdict = judged(gaps, LEVEL)
        yield verdict.finding(
            f"FedRA is level within {100 * MARGIN:g} point wherever adapters sit, as in {table.place}",
            "points ",
        )


def _only_the_head(run_scores: pd.DataFrame) -> Finding:
    """Return the findings of Tables 2 to 6: FedRA's accuracy seed by seed, for every place of its adapters."""
    scores = run_scores.loc[[f"{setting}.fedra" for setting in PLACES]].dropna(axis=1)
    largest_spread = 100 * float((scores.max() - scores.min()).max())
    return Finding(
        "FedRA outperforms other methods in Tables 2 to 6",
        f"nothing but the head has learned: with adapters at {len(scores)} places FedRA's accuracies differ by at most "
        f"{largest_spread:.2f} points in {scores.shape[1]} seeds",
        None,
    )


def _covered(frame: pd.DataFrame) -> Finding:
    """Return whether Eq. 3 leaves no block without a client in any round."""
    block_rows = frame[frame["metric"] == BLOCKS]
    block_rows = block_rows.assign(
        method=block_rows["run"].str.partition(".")[2],
        block=block_rows["variant"].str.split(","),
    )
    block_groups = block_rows.explode("block").groupby(
        ["method", "run", "seed", "round"]
    )["block"]
    uncovered_blocks = VIT["depth"] - block_groups.nunique()
    keep_counts, cover_counts = (
        uncovered_blocks.loc["fedra"],
        uncovered_blocks.loc["fedra_cover"],
    )
    return Finding(
        "by Eq. 3 every block has a client in every round, by Eq. 2 not",
        f"of {VIT['depth']} blocks {keep_counts.mean():.2f} have none by Eq. 2, {cover_counts.mean():.2f} by Eq. 3",
        bool((cover_counts == 0).all() and (keep_counts > 0).any()),
    )


def _page(
    styles: pd.DataFrame,
    run_scores: pd.DataFrame,
    published: pd.DataFrame,
    table: Table,
) -> str:
    published_columns = {
        f"{dataset} (published)": numbers(
            100 * published[dataset].reindex(run_scores.index)
        )
        for dataset in published
    }
    style_scores = styles.rename(lambda style: style.replace("_", " "), level="style")
    return markdown(
        columns(style_scores, run_scores, "method", table.named) | published_columns
    )


items.register(Item(
    "fedra.settings", "Five smaller tables of accuracy, PACS (FedRA, Tables 2 to 6)", source=NAME, draw=_draw,
    also=tuple(TABLES),
))  # fmt: skip
