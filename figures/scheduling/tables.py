"""Layer scheduling's Table 2, and its studies of thawing (Sec. 5.3) and of the wrapped method (Sec. 5.4)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
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
    HUNDRED,
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
    TITLES,
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
from fl_core.errors import listing
from fl_core.statistics import mean_interval


def interval(
    values: pd.DataFrame, row_key: Hashable
) -> tuple[int, float, float, float]:
    """Return a row's number of seeds, its mean in percent, and the ends of its 95 % interval; NaN without runs."""
    if row_key not in values.index or values.loc[row_key].isna().all():
        return 0, math.nan, math.nan, math.nan
    row_scores = values.loc[row_key].dropna()
    mean, low, high = mean_interval(row_scores)
    return len(row_scores), 100 * mean, 100 * low, 100 * high


# --- Table 2 ---------------------------------------------------------------------------------------------------


def table2(
    header: Mapping[str, Any], pooled: pd.DataFrame, client_means: pd.DataFrame
) -> pd.DataFrame:
    """Return a row per dataset, number of rounds and method: measured with its interval over seeds, and published.

    Args:
        pooled, means: scores of all samples together, and means over clients.
    """
    published_scores = items.published("scheduling")
    published_scores = published_scores[
        published_scores["place"] == "Table 2"
    ].set_index(["dataset", "setting", "method"])["value"]
    table_rows = []
    for dataset, column in columns(header).items():
        for rounds, paper_rounds in zip(column.at, column.papers, strict=True):
            for method in METHODS:
                run = f"{dataset}.{method}"
                seed_count, mean, low, high = interval(pooled, (run, rounds))
                table_rows.append(
                    {
                        "dataset": dataset, "trained_on": column.dataset, "rounds": rounds,
                        "paper_rounds": paper_rounds, "method": method, "seeds": seed_count,
                        "accuracy": mean, "low": low, "high": high,
                        "mean_of_clients": interval(client_means, (run, rounds))[1],
                        "published": published_scores.get((dataset, f"{paper_rounds} rounds", method), math.nan),
                    }
                )  # fmt: skip
    return pd.DataFrame(table_rows)


def printed_lead(dataset: str, method: str, rival: str, rounds: int) -> float:
    """Return a lead by Table 2 after so many rounds, as a share; NaN where it is not printed."""
    published_scores = items.published("scheduling")
    published_scores = where(
        published_scores, place="Table 2", dataset=dataset, setting=f"{rounds} rounds"
    ).set_index("method")["value"]
    return (
        published_scores.get(method, math.nan) - published_scores.get(rival, math.nan)
    ) / 100


def over(
    values: pd.DataFrame,
    dataset: str,
    method: str,
    rounds: int,
    rivals: Sequence[str] = OTHERS,
) -> dict[str, Difference]:
    """Return a method's leads over others on a dataset, with the printed leads after the paper's rounds."""
    return {
        f"{dataset}.{rival}": settled(
            values,
            f"{dataset}.{method}",
            f"{dataset}.{rival}",
            rounds,
            printed_lead(dataset, method, rival, rounds),
        )
        for rival in rivals
    }


def at_the_end(
    header: Mapping[str, Any],
    values: pd.DataFrame,
    dataset: str,
    method: str,
    rival: str,
) -> Difference:
    """Return a lead after the last round, which is the one that the paper quotes.

    Args:
        values: from :func:`figures.scheduling.runs.scores`.
    """
    column = columns(header)[dataset]
    last_scores = values.xs(column.at[-1], level="round")
    lead = difference(last_scores, f"{dataset}.{method}", f"{dataset}.{rival}")
    published_lead = printed_lead(dataset, method, rival, column.papers[-1])
    return replace(lead, printed=published_lead)


def _findings(
    header: Mapping[str, Any], frame: pd.DataFrame, final_scores: pd.DataFrame
) -> Iterator[Finding]:
    """Yield the paper's claims on the table; ``final_scores`` are its scores."""
    finished_scores = finished(frame)

    def gaps(dataset: str, method: str) -> dict[str, Difference]:
        return over(
            finished_scores, dataset, method, columns(header)[dataset].papers[-1]
        )

    for dataset in ("cifar100", "tiny_imagenet"):
        for method in SCHEDULES:
            verdict, title = judge(gaps(dataset, method)), names.title(method)
            yield verdict.finding(
                f"{TITLES[dataset]}, mean of the last three evaluations: {title} lies above the paper's six other "
                "methods",
                reason=incomparable(header, final_scores, dataset, [*OTHERS, method]),
            )
    own_datasets = own_images(header)
    replaced_titles = [
        NAMES[dataset] for dataset in columns(header) if dataset not in own_datasets
    ]
    place_text = "on every dataset"
    if replaced_titles:
        replaced_text = " and ".join(replaced_titles)
        place_text += f" of the paper's own images (without {replaced_text})"
    place_text += " (after the last round)"
    shorter_texts = []
    for dataset in own_datasets:
        column = columns(header)[dataset]
        if column.at[-1] < column.papers[-1]:
            shorter_texts.append(
                f"{NAMES[dataset]}: {column.at[-1]} of {column.papers[-1]} rounds, "
                f"the last layers begin at {column.unfreeze[-1]}"
            )
    shorter_text = "; ".join(shorter_texts)
    yield from _beside_fedbabu(
        header, final_scores, own_datasets, place_text, shorter_text
    )
    verdict = judge(
        {
            NAMES[own_dataset]: at_the_end(
                header, final_scores, own_dataset, "vanilla", "anti"
            )
            for own_dataset in own_datasets
        },
        LEVEL,
    )
    yield verdict.finding(
        f"Vanilla and Anti are level {place_text}", reason=shorter_text
    )


def _beside_fedbabu(
    header: Mapping[str, Any],
    values: pd.DataFrame,
    datasets: Sequence[str],
    place: str,
    reason: str,
) -> Iterator[Finding]:
    """Judge both schedules against FedBABU after the last round."""
    for method, position, check in (
        ("vanilla", f"no more than {100 * MARGIN:g} point below", NO_LOWER),
        ("anti", "above", LEAD),
    ):
        verdict = judge(
            {
                NAMES[dataset]: at_the_end(header, values, dataset, method, "fedbabu")
                for dataset in datasets
            },
            check,
        )
        title = names.title(method)
        yield verdict.finding(f"{title} lies {position} FedBABU {place}", reason=reason)


def _draw_table2(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    pooled_scores = scores(frame)
    table = table2(header, pooled_scores, scores(frame, MEAN))
    with sheet(8.4, 3.6) as figure:
        panels = figure.subplots(1, len(columns(header)), sharey=True)
        for ax, (dataset, dataset_rows) in zip(
            panels, table.groupby("dataset", sort=False), strict=True
        ):
            marks(
                ax,
                _leads(header, pooled_scores, str(dataset), _same_data(dataset_rows)),
                list(map(names.title, OTHERS)),
                factor=100,
                level=0,
            )
            ax.set_xscale("symlog", linthresh=10)
            ax.set_xticks([-10, 0, 10, 50])
            ax.xaxis.set_major_formatter("{x:g}")
            ax.set_xlim(-20, 70)
            ax.set_xlabel(
                f"points above it\nafter {dataset_rows['rounds'].max()} rounds"
            )
            ax.set_title(_title(dataset_rows), fontsize=8)
        key_above(figure, 3, panel=panels[0])
    text = "\n\n".join(
        _page(dataset_rows) for _, dataset_rows in table.groupby("dataset", sort=False)
    )
    text += "\n\nA cell has our value ± half its 95 % interval over seeds. The paper's value is in brackets."
    text += f" With {FEWEST}."
    missing_text = missing_runs(header, plain(*columns(header)))
    setting_text = setting(header, frame, *columns(header))
    caption = (
        "How far both schedules lie above each of the paper's other methods: accuracy on all clients' own test samples "
        "(fine-tuned if the method is), paired by seed, with 95 % intervals. The axis is logarithmic beyond 10 points. "
        "Published leads are shown where the data "
        "have the paper's name. In tables, LocalAdaptation is FedAvg with the same "
        f"fine-tuning.{missing_text} {setting_text}"
    )
    return Drawing(
        figure, table, caption, tuple(_findings(header, frame, pooled_scores)), text
    )


def _title(dataset_rows: pd.DataFrame) -> str:
    """Name the dataset of a panel's runs, and the one that it replaces."""
    title = names.dataset(str(dataset_rows["trained_on"].iloc[0]))
    if _same_data(dataset_rows):
        return title
    replaced_title = NAMES[str(dataset_rows["dataset"].iloc[0])]
    return f"{title}\nin the place of {replaced_title}"


def _same_data(dataset_rows: pd.DataFrame) -> bool:
    return has_images(
        str(dataset_rows["trained_on"].iloc[0]), str(dataset_rows["dataset"].iloc[0])
    )


def _leads(
    header: Mapping[str, Any], values: pd.DataFrame, dataset: str, has_published: bool
) -> list[Kind]:
    """Return both schedules' leads over the paper's six other methods after the last round.

    Args:
        has_published: whether the published leads are of the same data.
    """
    measured_marks, published_marks = [], []
    for method, offset, label in zip(
        SCHEDULES, (-0.15, 0.15), ("published", ""), strict=True
    ):
        leads = [at_the_end(header, values, dataset, method, rival) for rival in OTHERS]
        intervals = [lead.interval for lead in leads]
        measured_marks.append(with_intervals(intervals, names.title(method), offset))
        if has_published:
            published_leads = [lead.printed for lead in leads]
            published_marks.append(from_paper(published_leads, label, offset))
    return [*measured_marks, *published_marks]


def _page(dataset_rows: pd.DataFrame) -> str:
    columns: dict[str, list[str]] = {
        _title(dataset_rows).replace("\n", " "): list(map(names.title, METHODS))
    }
    for (rounds, paper_rounds), method_rows in dataset_rows.groupby(
        ["rounds", "paper_rounds"], sort=False
    ):
        method_rows = method_rows.set_index("method").loc[list(METHODS)]
        title = f"{rounds} rounds"
        if rounds != paper_rounds:
            title += f" (paper: {paper_rounds})"
        columns[title] = []
        for row in method_rows.itertuples():
            cell = percent(row.accuracy / 100, row.low / 100, row.high / 100)
            if _same_data(dataset_rows) and not math.isnan(row.published):
                cell += f" ({row.published:.2f})"
            columns[title].append(cell)
    columns["seeds"] = [str(seed_count) for seed_count in method_rows["seeds"]]
    return markdown(columns)


# --- when layers are unfrozen (Sec. 5.3), and over what a schedule is laid (Sec. 5.4) ---------------------------


def accuracies(
    values: pd.DataFrame, runs: Mapping[str, Mapping[str, Any]]
) -> pd.DataFrame:
    """Return a row per run with what it is named by: its accuracy in percent.

    Args:
        values: accuracy as a share, runs x seeds.
    """
    table_rows = []
    for run, label_columns in runs.items():
        seed_count, mean, low, high = interval(values, run)
        score_columns = {
            "seeds": seed_count,
            "accuracy": mean,
            "low": low,
            "high": high,
        }
        table_rows.append({**label_columns, **score_columns})
    return pd.DataFrame(table_rows)


def _draw_thawed(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    published_rows = items.published("scheduling")
    published_rows = published_rows[
        published_rows["place"].isin(["Sec. 5.3", "Table 2"])
    ].set_index(["dataset", "setting", "method"])["value"]
    ((dataset, column),) = columns(header).items()
    rounds, runs, published_scores = column.at[-1], {}, []
    for method in SCHEDULES:
        for suffix, divisor in (("", 1), (EARLY, 2)):
            unfreeze_text = listed([start // divisor for start in column.unfreeze])
            runs[f"{dataset}.{method}{suffix}"] = {
                "dataset": dataset,
                "method": method,
                "unfreeze": unfreeze_text,
            }
            setting_name = f"{rounds} rounds, unfrozen at {unfreeze_text}"
            published_scores.append(
                published_rows.get((dataset, setting_name, method), math.nan)
            )
    for method in RIVALS:
        runs[f"{dataset}.{method}"] = {
            "dataset": dataset,
            "method": method,
            "unfreeze": "–",
        }
        published_scores.append(published_rows[dataset, f"{rounds} rounds", method])
    finished_scores, final_scores = finished(frame), scores(frame)
    table = accuracies(last_evaluations(finished_scores), runs)
    table["published"] = published_scores
    early_gaps = {
        f"{dataset}.{method}": settled(
            finished_scores,
            f"{dataset}.{method}{EARLY}",
            f"{dataset}.{method}",
            printed=(float(early_score) - float(late_score)) / 100,
        )
        for method, late_score, early_score in zip(
            SCHEDULES, published_scores[:4:2], published_scores[1:4:2], strict=True
        )
    }
    loss_verdict, margin_verdict = judge(early_gaps, TRAIL), judge(early_gaps, NO_LOWER)
    findings = [
        loss_verdict.finding(
            f"{NAMES[dataset]}: unfreezing twice as early costs both schedules accuracy (paper: 0.3 to 1 point)",
            "early − late, in points: ",
            reason=incomparable(header, final_scores, dataset, SCHEDULES),
        ),
        margin_verdict.finding(
            f"{NAMES[dataset]}: unfreezing twice as early costs no schedule more than {100 * MARGIN:g} point",
            "early − late, in points: ",
            reason=incomparable(header, final_scores, dataset, SCHEDULES),
        ),
    ]
    for rivals, rivals_text in (
        (RIVALS[:1], "FedBABU, on which it builds"),
        (RIVALS, "FedBABU and FedPer, two of the paper's six other methods"),
    ):
        findings.append(
            judge(over(finished_scores, dataset, "anti", rounds, rivals)).finding(
                f"{NAMES[dataset]}: Anti lies above {rivals_text}",
                reason=incomparable(header, final_scores, dataset, ["anti", *rivals]),
            )
        )
    findings += [
        judge(
            over(finished_scores, dataset, "vanilla", rounds, RIVALS[:1]), NO_LOWER
        ).finding(
            f"{NAMES[dataset]}: Vanilla lies no more than {100 * MARGIN:g} point below FedBABU",
            reason=incomparable(header, final_scores, dataset, ["vanilla", "fedbabu"]),
        ),
        judge(in_early_rounds(header, frame, dataset), TRAIL).finding(
            f"{NAMES[dataset]}: until all layers are unfrozen both schedules lie below FedBABU before fine-tuning",
            f"mean up to round {column.unfreeze[-1]}, in points: ",
            reason=incomparable(header, final_scores, dataset, ["fedbabu", *SCHEDULES]),
        ),
        judge(in_last_rounds(frame, dataset), NO_LOWER).finding(
            f"{NAMES[dataset]}: at the end both schedules lie no more than {100 * MARGIN:g} point below FedBABU "
            "before fine-tuning",
            "mean of the last three evaluations, in points: ",
            reason=incomparable(header, final_scores, dataset, ["fedbabu", *SCHEDULES]),
        ),
    ]
    missing_text = missing_runs(header, list(THAW.runs))
    setting_text = setting(header, frame, dataset)
    caption = (
        "Accuracy after fine-tuning, with 95 % intervals. It is the mean of the last three evaluations. The labels "
        f"give the rounds at which layers are unfrozen.{missing_text} {setting_text}"
    )
    text = lines(table, ("dataset", "method", "unfreeze"))
    return Drawing(None, table, caption, tuple(findings), text)


def in_early_rounds(
    header: Mapping[str, Any], frame: pd.DataFrame, dataset: str
) -> dict[str, Difference]:
    """Return both schedules' leads over FedBABU while layers are frozen, before fine-tuning, as means over rounds."""
    methods = ("fedbabu", *SCHEDULES)
    curve_rows = learnt(frame, dataset, methods).astype({"seed": int, "round": int})
    thaw_round = columns(header)[dataset].unfreeze[-1]
    early_rows = curve_rows[
        (curve_rows["round"] > 0) & (curve_rows["round"] <= thaw_round)
    ]
    mean_scores = (
        early_rows.groupby(["algorithm", "seed"])["value"].mean().unstack("seed")
    )
    return {
        f"{dataset}.{method} − fedbabu": difference(mean_scores, method, "fedbabu")
        for method in SCHEDULES
    }


def in_last_rounds(frame: pd.DataFrame, dataset: str) -> dict[str, Difference]:
    """Return both schedules' leads over FedBABU in the last three evaluations, before fine-tuning."""
    curve_rows = learnt(frame, dataset, ("fedbabu", *SCHEDULES))
    round_scores = curve_rows.astype({"seed": int, "round": int}).pivot(
        index=["algorithm", "round"], columns="seed", values="value"
    )
    return {
        f"{dataset}.{method} − fedbabu": settled(
            round_scores.astype(float), method, "fedbabu"
        )
        for method in SCHEDULES
    }


def _draw_wrapped(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    runs, finished_scores = {}, finished(frame)
    gaps = {}
    for method in BELOW:
        base_run, wrapped_run = f"{WRAPPED}.{method}", f"{WRAPPED}.anti_{method}"
        runs[base_run] = {"method": method, "schedule": "none"}
        runs[wrapped_run] = {"method": method, "schedule": "anti"}
        gaps[f"{WRAPPED}.anti over {method}"] = settled(
            finished_scores, wrapped_run, base_run
        )
    findings = (
        judge(gaps, NO_HIGHER).finding(
            f"Anti improves no method that trains its head by more than {100 * MARGIN:g} point"
        ),
        judge(gaps, TRAIL).finding(
            "a method under Anti lies clearly below the method alone"
        ),
    )
    table = accuracies(last_evaluations(finished_scores), runs)
    missing_text = missing_runs(header, list(OVER.runs))
    setting_text = setting(header, frame, WRAPPED)
    caption = (
        "Accuracy of methods that train their head, alone and under Anti. It is the mean of the last three "
        "evaluations. LG-FedAvg is left out: it shares its last layer only, and a schedule unfreezes nothing there. "
        f"The paper gives no numbers.{missing_text} {setting_text}"
    )
    return Drawing(None, table, caption, findings, lines(table, ("method", "schedule")))


CLASSES = {"cifar10": 10, "cifar100": 100}
"""Of the datasets of :func:`_draw_whole`."""


def _draw_whole(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    """Draw both schedules beside the other methods of a study after its last round."""
    ((dataset, column),) = columns(header).items()
    published_scores = items.published("scheduling")
    published_scores = where(
        published_scores,
        place="Table 2",
        dataset=dataset,
        setting=f"{column.papers[-1]} rounds",
    ).set_index("method")["value"]
    all_scores = scores(frame)
    last_scores = all_scores.xs(column.at[-1], level="round")
    all_methods = [run.partition(".")[2] for run in header["had"]]
    others = [method for method in all_methods if method not in SCHEDULES]
    methods = [*others, *SCHEDULES]
    table = accuracies(
        last_scores, {f"{dataset}.{method}": {"method": method} for method in methods}
    )
    table["published"] = list(published_scores[methods])
    score_pairs = zip(table["accuracy"] / 100, table["published"] / 100, strict=True)
    levels, chance = dict(zip(methods, score_pairs, strict=True)), 1 / CLASSES[dataset]

    def far(*compared_methods: str) -> str:
        levels_of_them = {names.title(m): levels[m] for m in compared_methods}
        return little_learned(levels_of_them, (chance, chance))

    place_text = f"on {NAMES[dataset]} (after the last round)"
    findings = list(
        _beside_fedbabu(
            header, all_scores, [dataset], place_text, far("fedbabu", *SCHEDULES)
        )
    )
    if len(others) > 1:
        gaps = {
            f"{dataset}.{schedule} over {method}": at_the_end(
                header, all_scores, dataset, schedule, method
            )
            for schedule, method in product(SCHEDULES, others)
        }
        other_names = listing(list(map(names.title, others)))
        findings.append(
            judge(gaps).finding(
                f"both schedules lie above {other_names} {place_text}",
                reason=far(*methods),
            )
        )
    missing_text = missing_runs(header, list(header["runs"]))
    setting_text = setting(header, frame, dataset)
    caption = f"Accuracy after fine-tuning, after the last round, with 95 % intervals.{missing_text} {setting_text}"
    return Drawing(None, table, caption, tuple(findings), lines(table, ("method",)))


def lines(table: pd.DataFrame, key_columns: Sequence[str]) -> str:
    """Return a table of :func:`accuracies` in Markdown; the keys name a row."""
    columns = {
        column: [names.dataset(names.titles(str(value))) for value in table[column]]
        for column in key_columns
    }
    shares = table[["accuracy", "low", "high"]].to_numpy() / 100
    columns["accuracy %"] = [percent(*share_ends) for share_ends in shares]
    if "published" in table:
        columns["published"] = numbers(table["published"])
    columns["seeds"] = [str(seeds) for seeds in table["seeds"]]
    note = f"± is half the 95 % interval over seeds. With {FEWEST}."
    return "\n\n".join([markdown(columns), note])


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
items.register(Item(
    "scheduling.cifar100", f"Both schedules beside three methods, {NAMES['cifar100']} (Table 2)",
    source=HUNDRED, draw=_draw_whole, partial=True,
))  # fmt: skip
