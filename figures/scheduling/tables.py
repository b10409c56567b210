"""Layer scheduling's Table 2, and its studies of thawing (Sec. 5.3) and of the wrapped method (Sec. 5.4)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from figures import items, names
from figures.differences import (
    FEWEST,
    Difference,
    difference,
    last_evaluations,
    settled,
)
from figures.forms import Kind, from_paper, key_above, marks, sheet, with_intervals
from figures.items import Drawing, Finding, Item
from figures.page import markdown, missing_runs, numbers, percent
from figures.recipe import where
from figures.scheduling.runs import (
    BELOW,
    EARLY,
    HEADS,
    MEAN,
    METHODS,
    NAME,
    NAMES,
    OTHERS,
    OVER,
    RIVALS,
    SCHEDULES,
    SIZES,
    THAW,
    THAWING,
    WHOLE,
    WRAPPED,
    columns,
    finished,
    has_images,
    incomparable,
    judge,
    learnt,
    listed,
    own_images,
    plain,
    scores,
    setting,
)
from figures.verdicts import (
    LEAD,
    LEVEL,
    MARGIN,
    NO_HIGHER,
    NO_LOWER,
    TRAIL,
    little_learned,
)
from fl_core.statistics import mean_interval


def interval(values: pd.DataFrame, line: Hashable) -> tuple[int, float, float, float]:
    """Number of seeds of a line, mean in percent, and the ends of its 95 % interval; NaN without runs."""
    if line not in values.index or values.loc[line].isna().all():
        return 0, math.nan, math.nan, math.nan
    scores_of_line = values.loc[line].dropna()
    mean, low, high = mean_interval(scores_of_line)
    return len(scores_of_line), 100 * mean, 100 * low, 100 * high


# --- Table 2 ---------------------------------------------------------------------------------------------------


def table2(
    header: Mapping[str, Any], pooled: pd.DataFrame, means: pd.DataFrame
) -> pd.DataFrame:
    """Return a row per dataset, number of rounds and method: measured with its interval over seeds, and published.

    Args:
        pooled, means: scores of all samples together, and means over clients.
    """
    printed = items.published("scheduling")
    printed = printed[printed["place"] == "Table 2"].set_index(
        ["dataset", "setting", "method"]
    )["value"]
    table = []
    for dataset, column in columns(header).items():
        for done, papers in zip(column.at, column.papers, strict=True):
            for method in METHODS:
                run = f"{dataset}.{method}"
                seeds, mean, low, high = interval(pooled, (run, done))
                table.append(
                    {
                        "dataset": dataset, "trained_on": column.dataset, "rounds": done, "paper_rounds": papers,
                        "method": method, "seeds": seeds, "accuracy": mean, "low": low, "high": high,
                        "mean_of_clients": interval(means, (run, done))[1],
                        "published": printed.get((dataset, f"{papers} rounds", method), math.nan),
                    }
                )  # fmt: skip
    return pd.DataFrame(table)


def printed_lead(dataset: str, method: str, other: str, rounds: int) -> float:
    """Return a lead by Table 2 after so many rounds, as a share; NaN where it is not printed."""
    printed = items.published("scheduling")
    printed = where(
        printed, place="Table 2", dataset=dataset, setting=f"{rounds} rounds"
    ).set_index("method")["value"]
    return (printed.get(method, math.nan) - printed.get(other, math.nan)) / 100


def over(
    values: pd.DataFrame,
    dataset: str,
    method: str,
    rounds: int,
    others: Sequence[str] = OTHERS,
) -> dict[str, Difference]:
    """Return a method's leads over others on a dataset, with the printed leads after the paper's rounds."""
    return {
        f"{dataset}.{other}": settled(
            values,
            f"{dataset}.{method}",
            f"{dataset}.{other}",
            rounds,
            printed_lead(dataset, method, other, rounds),
        )
        for other in others
    }


def at_the_end(
    header: Mapping[str, Any],
    values: pd.DataFrame,
    dataset: str,
    method: str,
    other: str,
) -> Difference:
    """Return a lead after the last round, which is the one that the paper quotes.

    Args:
        values: from :func:`figures.scheduling.runs.scores`.
    """
    column = columns(header)[dataset]
    last = values.xs(column.at[-1], level="round")
    lead = difference(last, f"{dataset}.{method}", f"{dataset}.{other}")
    theirs = printed_lead(dataset, method, other, column.papers[-1])
    return replace(lead, printed=theirs)


def _findings(
    header: Mapping[str, Any], frame: pd.DataFrame, final: pd.DataFrame
) -> Iterator[Finding]:
    """Yield the paper's claims on the table; ``final`` are its scores."""
    values = finished(frame)

    def gaps(dataset: str, method: str) -> dict[str, Difference]:
        return over(values, dataset, method, columns(header)[dataset].papers[-1])

    for dataset in ("cifar100", "tiny_imagenet"):
        for method in SCHEDULES:
            verdict, title = judge(gaps(dataset, method)), names.title(method)
            yield verdict.finding(
                f"{NAMES[dataset]}, mean of the last three evaluations: {title} lies above the paper's six other "
                "methods",
                apart=incomparable(header, final, dataset, [*OTHERS, method]),
            )
    own_data = own_images(header)
    other_data = [
        NAMES[dataset] for dataset in columns(header) if dataset not in own_data
    ]
    place = "on every dataset"
    if other_data:
        far_names = " and ".join(other_data)
        place += f" of the paper's own images (without {far_names})"
    place += " (after the last round)"
    parts = []
    for dataset in own_data:
        column = columns(header)[dataset]
        if column.at[-1] < column.papers[-1]:
            parts.append(
                f"{NAMES[dataset]}: {column.at[-1]} of {column.papers[-1]} rounds, "
                f"the last layers begin at {column.unfreeze[-1]}"
            )
    shorter = "; ".join(parts)
    yield from _beside_fedbabu(header, final, own_data, place, shorter)
    verdict = judge(
        {NAMES[d]: at_the_end(header, final, d, "vanilla", "anti") for d in own_data},
        LEVEL,
    )
    yield verdict.finding(f"Vanilla and Anti are level {place}", apart=shorter)


def _beside_fedbabu(
    header: Mapping[str, Any],
    values: pd.DataFrame,
    datasets: Sequence[str],
    where: str,
    apart: str,
) -> Iterator[Finding]:
    """Judge both schedules against FedBABU after the last round."""
    for method, words, check in (
        ("vanilla", f"no more than {100 * MARGIN:g} point below", NO_LOWER),
        ("anti", "above", LEAD),
    ):
        verdict = judge(
            {
                NAMES[d]: at_the_end(header, values, d, method, "fedbabu")
                for d in datasets
            },
            check,
        )
        title = names.title(method)
        yield verdict.finding(f"{title} lies {words} FedBABU {where}", apart=apart)


def _draw_table2(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    values = scores(frame)
    table = table2(header, values, scores(frame, MEAN))
    with sheet(8.4, 3.6) as figure:
        panels = figure.subplots(1, len(columns(header)), sharey=True)
        for ax, (dataset, part) in zip(
            panels, table.groupby("dataset", sort=False), strict=True
        ):
            marks(
                ax,
                _leads(header, values, str(dataset), _same_data(part)),
                list(map(names.title, OTHERS)),
                factor=100,
                level=0,
            )
            ax.set_xscale("symlog", linthresh=10)
            ax.set_xticks([-10, 0, 10, 50])
            ax.xaxis.set_major_formatter("{x:g}")
            ax.set_xlim(-20, 70)
            ax.set_xlabel(f"points above it\nafter {part['rounds'].max()} rounds")
            ax.set_title(_title(part), fontsize=8)
        key_above(figure, 3, panel=panels[0])
    text = "\n\n".join(_page(part) for _, part in table.groupby("dataset", sort=False))
    text += "\n\nA cell has our value ± half its 95 % interval over seeds. The paper's value is in brackets."
    text += f" With {FEWEST}."
    missing = missing_runs(header, plain(*columns(header)))
    sizes = setting(header, frame, *columns(header))
    caption = (
        "How far both schedules lie above each of the paper's other methods: accuracy on all clients' own test samples "
        "(fine-tuned if the method is), paired by seed, with 95 % intervals. The axis is logarithmic beyond 10 points. "
        "Published leads are shown where the data "
        f"have the paper's name. In tables, LocalAdaptation is FedAvg with the same fine-tuning.{missing} {sizes}"
    )
    return Drawing(
        figure, table, caption, tuple(_findings(header, frame, values)), text
    )


def _title(part: pd.DataFrame) -> str:
    """Name the dataset of a panel's runs, and the one that it replaces."""
    shown = names.dataset(str(part["trained_on"].iloc[0]))
    if _same_data(part):
        return shown
    replaced = NAMES[str(part["dataset"].iloc[0])]
    return f"{shown}\nin the place of {replaced}"


def _same_data(part: pd.DataFrame) -> bool:
    return has_images(str(part["trained_on"].iloc[0]), str(part["dataset"].iloc[0]))


def _leads(
    header: Mapping[str, Any], values: pd.DataFrame, dataset: str, printed: bool
) -> list[Kind]:
    """Return both schedules' leads over the paper's six other methods after the last round.

    Args:
        printed: whether the published leads are of the same data.
    """
    ours, theirs = [], []
    for method, offset, label in zip(
        SCHEDULES, (-0.15, 0.15), ("published", ""), strict=True
    ):
        leads = [at_the_end(header, values, dataset, method, other) for other in OTHERS]
        intervals = [lead.interval for lead in leads]
        ours.append(with_intervals(intervals, names.title(method), offset))
        if printed:
            papers = [lead.printed for lead in leads]
            theirs.append(from_paper(papers, label, offset))
    return [*ours, *theirs]


def _page(part: pd.DataFrame) -> str:
    cells: dict[str, list[str]] = {
        _title(part).replace("\n", " "): list(map(names.title, METHODS))
    }
    for (done, papers), lines in part.groupby(["rounds", "paper_rounds"], sort=False):
        lines = lines.set_index("method").loc[list(METHODS)]
        title = f"{done} rounds"
        if done != papers:
            title += f" (paper: {papers})"
        cells[title] = []
        for row in lines.itertuples():
            cell = percent(row.accuracy / 100, row.low / 100, row.high / 100)
            if _same_data(part) and not math.isnan(row.published):
                cell += f" ({row.published:.2f})"
            cells[title].append(cell)
    cells["seeds"] = [str(count) for count in lines["seeds"]]
    return markdown(cells)


# --- when layers are unfrozen (Sec. 5.3), and over what a schedule is laid (Sec. 5.4) ---------------------------


def accuracies(
    values: pd.DataFrame, runs: Mapping[str, Mapping[str, Any]]
) -> pd.DataFrame:
    """Return a row per run with what it is named by: its accuracy in percent.

    Args:
        values: accuracy as a share, runs x seeds.
    """
    table = []
    for run, named in runs.items():
        seeds, mean, low, high = interval(values, run)
        ends = {"seeds": seeds, "accuracy": mean, "low": low, "high": high}
        table.append({**named, **ends})
    return pd.DataFrame(table)


def _draw_thawed(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    printed_values = items.published("scheduling")
    printed_values = printed_values[
        printed_values["place"].isin(["Sec. 5.3", "Table 2"])
    ].set_index(["dataset", "setting", "method"])["value"]
    ((dataset, column),) = columns(header).items()
    rounds, runs, published = column.at[-1], {}, []
    for method in SCHEDULES:
        for suffix, parts in (("", 1), (EARLY, 2)):
            unfreeze = listed([since // parts for since in column.unfreeze])
            runs[f"{dataset}.{method}{suffix}"] = {
                "dataset": dataset,
                "method": method,
                "unfreeze": unfreeze,
            }
            printed = f"{rounds} rounds, unfrozen at {unfreeze}"
            published.append(printed_values.get((dataset, printed, method), math.nan))
    for method in RIVALS:
        runs[f"{dataset}.{method}"] = {
            "dataset": dataset,
            "method": method,
            "unfreeze": "–",
        }
        published.append(printed_values[dataset, f"{rounds} rounds", method])
    values, final = finished(frame), scores(frame)
    table = accuracies(last_evaluations(values), runs)
    table["published"] = published
    sooner = {
        f"{dataset}.{method}": settled(
            values,
            f"{dataset}.{method}{EARLY}",
            f"{dataset}.{method}",
            printed=(float(early) - float(late)) / 100,
        )
        for method, late, early in zip(
            SCHEDULES, published[:4:2], published[1:4:2], strict=True
        )
    }
    losing, timing = judge(sooner, TRAIL), judge(sooner, NO_LOWER)
    findings = [
        losing.finding(
            f"{NAMES[dataset]}: unfreezing twice as early costs both schedules accuracy (paper: 0.3 to 1 point)",
            "early − late, in points: ",
            apart=incomparable(header, final, dataset, SCHEDULES),
        ),
        timing.finding(
            f"{NAMES[dataset]}: unfreezing twice as early costs no schedule more than {100 * MARGIN:g} point",
            "early − late, in points: ",
            apart=incomparable(header, final, dataset, SCHEDULES),
        ),
    ]
    for others, words in (
        (RIVALS[:1], "FedBABU, on which it builds"),
        (RIVALS, "FedBABU and FedPer, two of the paper's six other methods"),
    ):
        findings.append(
            judge(over(values, dataset, "anti", rounds, others)).finding(
                f"{NAMES[dataset]}: Anti lies above {words}",
                apart=incomparable(header, final, dataset, ["anti", *others]),
            )
        )
    findings += [
        judge(over(values, dataset, "vanilla", rounds, RIVALS[:1]), NO_LOWER).finding(
            f"{NAMES[dataset]}: Vanilla lies no more than {100 * MARGIN:g} point below FedBABU",
            apart=incomparable(header, final, dataset, ["vanilla", "fedbabu"]),
        ),
        judge(in_early_rounds(header, frame, dataset), TRAIL).finding(
            f"{NAMES[dataset]}: until all layers are unfrozen both schedules lie below FedBABU before fine-tuning",
            f"mean up to round {column.unfreeze[-1]}, in points: ",
            apart=incomparable(header, final, dataset, ["fedbabu", *SCHEDULES]),
        ),
        judge(in_last_rounds(frame, dataset), NO_LOWER).finding(
            f"{NAMES[dataset]}: at the end both schedules lie no more than {100 * MARGIN:g} point below FedBABU "
            "before fine-tuning",
            "mean of the last three evaluations, in points: ",
            apart=incomparable(header, final, dataset, ["fedbabu", *SCHEDULES]),
        ),
    ]
    missing = missing_runs(header, list(THAW.runs))
    sizes = setting(header, frame, dataset)
    caption = (
        "Accuracy after fine-tuning, with 95 % intervals. It is the mean of the last three evaluations. The labels "
        f"give the rounds at which layers are unfrozen.{missing} {sizes}"
    )
    text = lines(table, ("dataset", "method", "unfreeze"))
    return Drawing(None, table, caption, tuple(findings), text)


def in_early_rounds(
    header: Mapping[str, Any], frame: pd.DataFrame, dataset: str
) -> dict[str, Difference]:
    """Return both schedules' leads over FedBABU while layers are frozen, before fine-tuning, as means over rounds."""
    methods = ("fedbabu", *SCHEDULES)
    shown = learnt(frame, dataset, methods).astype({"seed": int, "round": int})
    last = columns(header)[dataset].unfreeze[-1]
    early = shown[(shown["round"] > 0) & (shown["round"] <= last)]
    values = early.groupby(["algorithm", "seed"])["value"].mean().unstack("seed")
    return {
        f"{dataset}.{method} − fedbabu": difference(values, method, "fedbabu")
        for method in SCHEDULES
    }


def in_last_rounds(frame: pd.DataFrame, dataset: str) -> dict[str, Difference]:
    """Return both schedules' leads over FedBABU in the last three evaluations, before fine-tuning."""
    shown = learnt(frame, dataset, ("fedbabu", *SCHEDULES))
    values = shown.astype({"seed": int, "round": int}).pivot(
        index=["algorithm", "round"], columns="seed", values="value"
    )
    return {
        f"{dataset}.{method} − fedbabu": settled(
            values.astype(float), method, "fedbabu"
        )
        for method in SCHEDULES
    }


def _draw_wrapped(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    runs, values = {}, finished(frame)
    gaps = {}
    for below in BELOW:
        alone, run = f"{WRAPPED}.{below}", f"{WRAPPED}.anti_{below}"
        runs[alone] = {"method": below, "schedule": "none"}
        runs[run] = {"method": below, "schedule": "anti"}
        gaps[f"{WRAPPED}.anti over {below}"] = settled(values, run, alone)
    findings = (
        judge(gaps, NO_HIGHER).finding(
            f"Anti improves no method that trains its head by more than {100 * MARGIN:g} point"
        ),
        judge(gaps, TRAIL).finding(
            "a method under Anti lies clearly below the method alone"
        ),
    )
    table = accuracies(last_evaluations(values), runs)
    missing = missing_runs(header, list(OVER.runs))
    sizes = setting(header, frame, WRAPPED)
    caption = (
        "Accuracy of methods that train their head, alone and under Anti. It is the mean of the last three "
        "evaluations. LG-FedAvg is left out: it shares its last layer only, and a schedule unfreezes nothing there. "
        f"The paper gives no numbers.{missing} {sizes}"
    )
    return Drawing(None, table, caption, findings, lines(table, ("method", "schedule")))


def _draw_whole(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    ((dataset, column),) = columns(header).items()
    printed = items.published("scheduling")
    printed = where(
        printed, place="Table 2", dataset=dataset, setting=f"{column.at[-1]} rounds"
    ).set_index("method")["value"]
    values = scores(frame)
    last = values.xs(column.at[-1], level="round")
    methods = ("fedbabu", *SCHEDULES)
    table = accuracies(
        last, {f"{dataset}.{method}": {"method": method} for method in methods}
    )
    table["published"] = list(printed[list(methods)])
    learned = zip(table["accuracy"] / 100, table["published"] / 100, strict=True)
    exclusion = little_learned(
        dict(zip(map(names.title, methods), learned, strict=True)), (0.1, 0.1)
    )
    place = f"on {NAMES[dataset]} (after the last round)"
    findings = tuple(_beside_fedbabu(header, values, [dataset], place, exclusion))
    missing = missing_runs(header, list(header["runs"]))
    sizes = setting(header, frame, dataset)
    caption = f"Accuracy after fine-tuning, after the last round, with 95 % intervals.{missing} {sizes}"
    return Drawing(None, table, caption, findings, lines(table, ("method",)))


def lines(table: pd.DataFrame, keys: Sequence[str]) -> str:
    """Return a table of :func:`accuracies` in Markdown; the keys name a row."""
    cells = {
        key: [names.dataset(names.titles(str(value))) for value in table[key]]
        for key in keys
    }
    ends = table[["accuracy", "low", "high"]].to_numpy() / 100
    cells["accuracy %"] = [percent(*interval) for interval in ends]
    if "published" in table:
        cells["published"] = numbers(table["published"])
    cells["seeds"] = [str(count) for count in table["seeds"]]
    note = f"± is half the 95 % interval over seeds. With {FEWEST}."
    return "\n\n".join([markdown(cells), note])


items.register(Item(
    "scheduling.table2", "Accuracy of layer scheduling and others, Tiny-ImageNet in the place of CIFAR-100",
    source=NAME, draw=_draw_table2, shown=plain(*SIZES),
))  # fmt: skip
items.register(Item(
    "scheduling.sec53", "When layers are unfrozen: earlier against later", source=THAWING, draw=_draw_thawed,
    partial=True,
))  # fmt: skip
items.register(Item(
    "scheduling.sec54", f"Anti over methods that train their head, {NAMES[WRAPPED]}",
    source=HEADS, draw=_draw_wrapped, partial=True,
))  # fmt: skip
items.register(Item(
    "scheduling.size", f"Both schedules at the paper's size, {NAMES[WRAPPED]}",
    source=WHOLE, draw=_draw_whole, partial=True,
))  # fmt: skip
