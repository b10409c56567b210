"""Write the tables of the page "What each command sees" from the rows of :mod:`figures.decision.known_runs`.

    python -m figures.decision.known

A table stands between ``<!-- rows:NAME -->`` and ``<!-- end -->``. The rest of the page stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from diagnostics.plots.drawing import COLOURS, style
from figures.decision import alike, exact, rules, truth_again
from figures.decision.known_runs import (
    ADAPTED,
    CHOSEN,
    CONFIRMED,
    CONVOLUTIONAL,
    DEALT,
    FACTOR_A,
    KNOWN,
    ROWS,
    at_chance,
    depth,
    ends,
    subsets,
)
from figures.page import markdown, numbers
from fl_core.statistics import SIGNIFICANCE, mean_interval

PAGE = Path(__file__).parents[2] / "docs/results/what_each_command_sees.md"
BLOCK = re.compile(r"(<!-- rows:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
ALIKE = "known_neither"
DIFFER, TOO_FEW = "differ", "too few samples to tell"
"""Verdicts of the second rule, as the rows have them."""
MADE = {
    "small": "small data sets, dealt",
    "unequal": "equal validation, unequal training sets, dealt",
    "seeds": "three seeds, dealt",
    "dealt": "20 federations, dealt",
    "alike": "`known_neither`",
    "known": "the other known data sets",
    "unseen": "unseen federations",
}
"""The kinds of the test's rows. The first five differ in nothing but their samples."""
PLANS = ("clients_differ", "all", "head local", "first half local", "nothing")
SMALLER = (20, 30, 40, 60, 80, 120, 160)
"""Training and validation samples of a client of smaller known data sets."""


def read() -> pd.DataFrame:
    """Return the rows, with what a job found as a dict."""
    rows = pd.read_parquet(ROWS)
    return rows.assign(found=rows["found"].map(json.loads))


def of(rows: pd.DataFrame, arm: str, dealt: bool = False) -> dict[Any, Any]:
    """Return what jobs of an arm found, by federation, seed and draw. Of failed ones nothing is known."""
    arm_rows = rows[(rows["arm"] == arm) & ((rows["draw"] > 0) == dealt)]
    job_keys = zip(
        arm_rows["federation"], arm_rows["seed"], arm_rows["draw"], strict=True
    )
    return dict(zip(job_keys, arm_rows["found"], strict=True))


def count(
    jobs: dict[Any, Any], score: str, names: Collection[str], verdict: str = DIFFER
) -> str:
    """Return how many jobs of some federations have a verdict, of how many."""
    verdict_key = f"verdict, {score}"
    verdicts = [
        answer[verdict_key]
        for job, answer in jobs.items()
        if job[0] in names and verdict_key in answer
    ]
    if verdicts:
        n_equal = verdicts.count(verdict)
        return f"{n_equal} of {len(verdicts)}"
    return "–"


def tested() -> pd.DataFrame:
    """Return the rows of the exact test, with whether clients are called different."""
    rows = pd.read_parquet(exact.ROWS)
    is_alike = rows["federation"] == ALIKE
    kinds = rows["kind"].mask(is_alike & (rows["kind"] == "known"), "alike")
    return rows.assign(kind=kinds, differ=rows["p"] <= SIGNIFICANCE)


def whether(rows: pd.DataFrame) -> str:
    """Return how often clients are called different, by the test and by the second rule."""
    answers, dealt_answers = of(rows, "differ"), of(rows, "differ", dealt=True)
    second_rule_counts = {
        "dealt": count(dealt_answers, "loss", DEALT),
        "alike": count(answers, "loss", [ALIKE]),
        "known": count(
            answers, "loss", [federation for federation in KNOWN if federation != ALIKE]
        ),
        "unseen": count(answers, "loss", CONFIRMED),
    }
    test_counts = tested().groupby("kind")["differ"].agg(["sum", "count"])
    table_rows = []
    for kind, title in MADE.items():
        if kind in test_counts.index:
            different_count, run_count = test_counts.loc[kind]
            table_rows.append(
                [
                    title,
                    f"{different_count} of {run_count}",
                    second_rule_counts.get(kind, "–"),
                ]
            )
    columns = ["federations", "called different", "by the second rule"]
    return markdown(pd.DataFrame(table_rows, columns=columns))


def groups(rows: pd.DataFrame) -> str:
    """Return how often groups of clients are claimed, and exactly those that were made. The rows are others."""
    claims = pd.read_csv(alike.ROWS, dtype={"groups": str})
    planted_texts = {
        federation: "".join(map(str, planted_groups))
        for federation, planted_groups in alike.PLANTED.items()
    }
    claims["right"] = claims["groups"] == claims["federation"].map(planted_texts)
    table_rows = []
    for federation in (*planted_texts, *sorted(set(CHOSEN) - set(planted_texts))):
        row_cells = []
        for method in (alike.METHOD, "updates"):
            federation_claims = claims[
                (claims["federation"] == federation) & (claims["method"] == method)
            ]
            right_text = "–"
            if federation in planted_texts:
                right_text = str(federation_claims["right"].sum())
            row_cells += [
                f"{federation_claims['claimed'].sum()} of {len(federation_claims)}",
                right_text,
            ]
        table_rows.append([f"`{federation}`", *row_cells])
    columns = ["data set", "claimed", "exactly those made"]
    columns += ["claimed by first updates", "exactly those made by first updates"]
    return markdown(pd.DataFrame(table_rows, columns=columns))


def score(rows: pd.DataFrame, federation: str, seed: int, arm: str) -> float:
    """Return an arm's accuracy on test samples in points; NaN without its row."""
    if arm in ("all", "nothing"):
        entry = of(rows, "whether").get((federation, seed, 0), {}).get(arm, {})
    else:
        entry = of(rows, arm).get((federation, seed, 0), {})
    return 100 * float(entry.get("test", np.nan))


def arms(layers: int) -> dict[str, list[str]]:
    """Return the local layers of each kind of plan, by number: the first ones, or the last ones."""
    cuts = subsets(layers)
    return {
        "all": ["all"],
        "before": [cut for cut in cuts if cut.startswith("0")],
        "head": [cut for cut in cuts if cut.endswith(str(layers - 1))],
        "nothing": ["nothing"],
    }


def plans_of(rows: pd.DataFrame, federation: str) -> pd.DataFrame:
    """Return the accuracy of each kind of plan on a known federation (column), a line for each seed.

    Of the plans of a kind it is the one with the best mean.
    """
    scores_by_run = of(rows, "whether")
    run_keys = [run_key for run_key in of(rows, "1") if run_key[0] == federation]
    seeds = [
        run_key[1] for run_key in run_keys if not at_chance(scores_by_run[run_key])
    ]
    best_by_kind = {}
    for kind, kind_arms in arms(depth(federation)).items():
        scores_by_arm = pd.DataFrame(
            {
                arm: [score(rows, federation, seed, arm) for seed in seeds]
                for arm in kind_arms
            }
        )
        best_by_kind[kind] = scores_by_arm[max(kind_arms, key=scores_by_arm.mean().get)]
    return pd.DataFrame(best_by_kind)


def truth(rows: pd.DataFrame) -> str:
    """Return the accuracy of each kind of plan on known federations, means over seeds, and the better end."""
    table_rows = []
    for federation in (*KNOWN, *CONVOLUTIONAL):
        plan_scores = plans_of(rows, federation)
        gap, low, high = mean_interval(plan_scores["head"] - plan_scores["before"])
        better_end = "level"
        if low > 0:
            better_end = "head"
        elif high < 0:
            better_end = "before"
        table_rows.append(
            {
                "federation": f"`{federation}`",
                **dict(
                    zip(plan_scores, numbers(plan_scores.mean(), ".1f"), strict=True)
                ),
                "head minus before, 95 %": f"{gap:.1f} [{low:.1f}, {high:.1f}]",
                "better end": better_end,
                "seeds": len(plan_scores),
            }
        )
    return markdown(pd.DataFrame(table_rows))


def decisions(rows: pd.DataFrame) -> str:
    """Return what ``choose`` named, its accuracy on test samples, and the best arm of the truth, means over seeds."""
    table_rows = []
    for name, arm in (*product(CHOSEN, ["choose"]), ("known_inputs", "choose 60")):
        choices = {
            seed: choice
            for (federation, seed, _), choice in of(rows, arm).items()
            if federation == name
        }
        if not choices:
            continue
        way_counts = pd.Series(
            [choice["named"] for choice in choices.values()]
        ).value_counts()
        accuracy = 100 * np.mean([choice["test"] for choice in choices.values()])
        prices = [choice["price"] for choice in choices.values()]
        arm_means = {
            local: np.mean([score(rows, name, seed, local) for seed in choices])
            for local in ("all", "nothing", *subsets(3))
        }
        best_mean = np.nan if arm != "choose" else max(arm_means.values())
        mean_price = np.mean(prices)
        table_rows.append(
            {
                "federation": f"`{name}`"
                + arm.replace("choose", ", at").removesuffix(", at"),
                "named, of seeds": ", ".join(
                    f"`{way}` {way_count}" for way, way_count in way_counts.items()
                ),
                "accuracy": f"{accuracy:.1f}",
                "best of the truth": numbers([best_mean], ".1f")[0],
                "undecided": sum(
                    len(choice["left"]) > 1 for choice in choices.values()
                ),
                "runs": f"{mean_price:.1f}",
            }
        )
    return markdown(pd.DataFrame(table_rows))


def picture(rows: pd.DataFrame) -> Figure:
    """Draw of three known data sets what each layer alone recovers, and the score of each plan."""
    columns = {
        "known_labels": "labels coded",
        "known_inputs": "inputs changed",
        "known_neither": "nothing differs",
    }
    with style():
        figure, axes = plt.subplots(
            2, 3, figsize=(7.2, 3.6), sharey="row", layout="constrained"
        )
        for (federation, title), (signal_ax, score_ax) in zip(
            columns.items(), axes.T, strict=True
        ):
            answer_text = said(federation)
            signal_ax.set_title(f"{title}\nclients: {answer_text}", fontsize=8)
            recovered_losses = of(rows, "profile")[federation, 0, 0]["layer_tuning"]
            layers = [f"fc{k + 1}" for k in range(len(recovered_losses))]
            signal_ax.bar(layers, recovered_losses, color=COLOURS[0], width=0.6)
            plan_scores = plans_of(rows, federation)
            for k, kind in enumerate(plan_scores):
                mean, low, high = mean_interval(plan_scores[kind])
                bounds = [[mean - low], [high - mean]]
                score_ax.errorbar(
                    [k], [mean], bounds, fmt="o", color=COLOURS[1], capsize=2
                )
            score_ax.set_xticks(
                range(plan_scores.shape[1]),
                ["all\nshared", "first\nlocal", "head\nlocal", "all\nlocal"],
            )
        axes[0, 0].set_ylabel("tuning it alone\nrecovers, nats")
        axes[1, 0].set_ylabel("accuracy, %")
    return figure


def algorithms(_: pd.DataFrame) -> str:
    """Return a line for each data set and algorithm: both plans, and the paired difference over seeds."""
    table_rows = []
    rows = pd.read_parquet(ROWS.with_name("known_plans.parquet"))
    for (federation, algorithm), pair_rows in rows.groupby(
        ["data", "algorithm"], sort=False
    ):
        plan_scores = 100 * pair_rows.pivot(
            index="seed", columns="plan", values="value"
        )
        gap = mean_interval(plan_scores["known"] - plan_scores["default"])
        table_rows.append(
            {
                "federation": f"`{federation}`",
                "algorithm": f"`{algorithm}`",
                "default plan": f"{plan_scores['default'].mean():.1f}",
                "plan of the known answer": f"{plan_scores['known'].mean():.1f}",
                "difference, 95 %": f"{gap[0]:+.1f} [{gap[1]:+.1f}, {gap[2]:+.1f}]",
            }
        )
    return markdown(pd.DataFrame(table_rows))


def said(federation: str) -> str:
    """Return the answer of ``clients_differ`` on a federation, seed 0."""
    rows = tested()
    rows = rows[
        (rows["federation"] == federation) & (rows["draw"] == 0) & (rows["seed"] == 0)
    ]
    p = float(rows[rows["kind"].isin(["alike", "known", "unseen"])]["p"].iloc[0])
    answer_text = DIFFER if p <= SIGNIFICANCE else "not shown"
    return f"{answer_text} (p = {p:.3f})".replace("0.", ".")


def plans(rows: pd.DataFrame, federation: str, seed: int = 0) -> list[float]:
    """Return the scores of all, head local, first half local and nothing."""
    return [
        score(rows, federation, seed, arm)
        for arm in ("all", *ends(federation), "nothing")
    ]


def natural(rows: pd.DataFrame) -> str:
    """Return the second rule's verdicts and plans of the natural federations that are done."""
    table_rows = []
    for (federation, *_), answer in of(rows, "differ").items():
        if "natural" in federation:
            scores = numbers(plans(rows, federation), ".1f")
            table_rows.append([federation, answer["verdict, loss"], *scores])
    columns = ["federation", "second rule", *PLANS[1:]]
    return markdown(pd.DataFrame(table_rows, columns=columns))


def confirmation(rows: pd.DataFrame) -> str:
    """Return answers and plans of the unseen federations that are done."""
    test_rows = tested()
    federations = [
        federation
        for federation in CONFIRMED
        if federation in set(test_rows["federation"][test_rows["kind"] == "unseen"])
    ]
    table_rows = [
        [federation, said(federation), *numbers(plans(rows, federation), ".1f")]
        for federation in federations
    ]
    return markdown(pd.DataFrame(table_rows, columns=["federation", *PLANS]))


def adapters(rows: pd.DataFrame) -> str:
    """Return verdicts and plans of tweets with adapters, and the end that the profile names."""
    table_rows = []
    for (federation, seed, _), answer in of(rows, "whether").items():
        if federation in ADAPTED:
            head_answer, first_answer = (
                of(rows, arm)[federation, seed, 0] for arm in ends(federation)
            )
            *body_signals, head_signal = answer["layer_tuning"]
            named_end = "first half"
            if head_signal > max(body_signals):
                named_end = "head"
            named_answer = first_answer
            if named_end == "head":
                named_answer = head_answer
            better_answer = min(
                head_answer, first_answer, key=lambda candidate: candidate["validation"]
            )
            points_lost = 100 * (named_answer["test"] - better_answer["test"])
            scores = [
                *plans(rows, federation, seed),
                score(rows, federation, seed, FACTOR_A),
                points_lost,
            ]
            row_cells = named_end, *numbers(scores, ".1f")
            table_rows.append(
                [federation.split()[2], seed, answer["verdict, loss"], *row_cells]
            )
    columns = ["what differs", "seed", "second rule", "the profile names", *PLANS[1:]]
    columns += ["lora_A", "named against both"]
    return markdown(pd.DataFrame(table_rows, columns=columns))


def sizes(rows: pd.DataFrame) -> str:
    """Return what the second rule says of known data sets with fewer samples."""
    table_rows = []
    for size in SMALLER:
        answers = of(rows, f"size {size}")
        row_cells = [
            count(answers, "loss", [federation]) for federation in (KNOWN[0], ALIKE)
        ]
        table_rows.append((size, *row_cells, count(answers, "loss", KNOWN, TOO_FEW)))
    columns = ["samples a client", "labels coded", "nothing differs", "too few to tell"]
    return markdown(pd.DataFrame(table_rows, columns=columns))


def seen(rows: pd.DataFrame) -> str:
    """Return what each command says of the known data sets, seed 0."""
    answers = of(rows, "commands")
    answer_cells = pd.DataFrame(
        {federation: answer for (federation, *_), answer in answers.items()}
    )
    answer_table = answer_cells.map(lambda cell: cell[0])
    answer_table["seconds"] = numbers(
        answer_cells.map(lambda cell: cell[1]).mean(axis=1), ".1f"
    )
    answer_table.loc["clients_differ"] = [*map(said, answer_cells), "–"]
    return markdown(answer_table.reset_index(names="command"))


def lines(rows: pd.DataFrame) -> str:
    """Return the benchmark's line of each metric, rule and number of rounds, the best on the public half first."""
    return rules.table()


def judged(rows: pd.DataFrame) -> str:
    """Return what the held-out half says of the five best lines of the public half."""
    return rules.judged_table()


def moved(rows: pd.DataFrame) -> str:
    """Return how far the benchmark's scores move with other instructions of the processor."""
    return truth_again.table()


def ledger(rows: pd.DataFrame) -> str:
    """Return what the benchmark of rules cost."""
    return rules.ledger()


def hours(rows: pd.DataFrame) -> str:
    """Return the rows and their core-hours."""
    return f"{len(rows)} rows, {rows['seconds'].sum() / 3600:.2f} core-hours.\n"


TABLES = {
    function.__name__: function
    for function in (
        whether,
        groups,
        sizes,
        seen,
        truth,
        decisions,
        algorithms,
        confirmation,
        natural,
        adapters,
        lines,
        judged,
        moved,
        ledger,
        hours,
    )
}


def written(page: str) -> str:
    """Return a page with its tables made from the rows."""
    rows = read()

    def filled(match: re.Match[str]) -> str:
        table_text = TABLES[match[2]](rows).rstrip()
        return f"{match[1]}{table_text}\n{match[3]}"

    return BLOCK.sub(filled, page)


if __name__ == "__main__":
    picture(read()).savefig(PAGE.with_name("known_plans.png"), dpi=160)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
