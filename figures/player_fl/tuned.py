"""PLayer-FL's Table 1 with every method tuned alike: a learning rate by method and dataset, chosen on validation.

Written before it was run. Every method tries the same number of learning rates on a dataset (:data:`GRIDS`). Each is
trained in full with the same two seeds, and the table does not use them. The best macro-F1 on validation samples wins
(:func:`fedlayers.decision.compare.tune`). The methods are then trained with their rates over :data:`SEEDS` seeds, eight
or more. They are judged on test samples. Tuning never reads these. All else is as in :mod:`figures.player_fl.runs`.
Those runs have the authors' rates on Fed-Heart and one rate for all methods elsewhere.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from fedlayers.decision.compare import APART, tune
from figures import items
from figures.items import Drawing, Finding, Item
from figures.page import markdown, missing_runs, numbers
from figures.player_fl import runs as untuned
from figures.player_fl.captions import NAMES
from figures.player_fl.runs import BESIDE, CASES, METHODS
from figures.player_fl.tables import TABLES, draw
from figures.recipe import labels
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.errors import UsageError
from fl_core.rows import CLASSIFICATION, MAIN
from fl_core.run import runner

NAME, TUNING, SCORE = untuned.TUNED, "player_fl.tuning", MAIN[CLASSIFICATION]
GRIDS = {
    "heart": (1e-3, 5e-3, 1e-2, 5e-2, 1e-1, 5e-1),
    "fashion_mnist": (3e-4, 1e-3, 3e-3, 1e-2),
    "fed_isic": (3e-4, 1e-3, 3e-3, 1e-2),
}
"""Learning rates that are tried, by dataset: on Fed-Heart the paper's grid (Table A.4), to which 1e-3 was added when
nine of fourteen methods had chosen its least, 5e-3; its others are of full networks and more steps, and the cut ones
here want larger rates too. The last two datasets of the evaluation are too far from the paper's for a verdict
(:data:`figures.player_fl.runs.FAR`) and are not tuned."""
PFEDME = (5e-3, 1e-2, 5e-2, 1e-1, 5e-1, 1.0)
"""Of pFedMe, whose outer step is no step of AdamW: the paper gives it other rates too. As many as each other method's,
from the least."""
SEEDS = {"heart": 80}
"""Seeds of a dataset's runs where they are not eight."""
CHOSEN = "chosen_lr"
"""Metric of the row that says which rate was chosen."""


def base(dataset: str, method: str) -> RunConfig:
    """Return the configuration of one method on one dataset, without a learning rate."""
    return untuned.config(dataset, method).with_keys(lr=None)


def grid(dataset: str, method: str) -> tuple[float, ...]:
    """Return the learning rates that a method tries, the same number for each method."""
    grid_values = GRIDS[dataset]
    if method == "pfedme":
        return PFEDME[: len(grid_values)]
    return grid_values


def _tune(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Try a method's learning rates; a row for each with its score on validation samples, and one for the chosen."""
    config, dataset = task.config, str(task.config.data.dataset)
    method = str(config.federation.algorithm)
    untuned_config = base(dataset, method).with_keys(
        rounds=config.federation.rounds,
        eval_every=max(1, (config.federation.rounds or 1) // 10),
        data_root=config.data.data_root,
        options={},
    )
    with tempfile.TemporaryDirectory() as temporary_folder:
        tuning = tune(
            untuned_config,
            [method],
            {"lr": ",".join(f"{rate:g}" for rate in grid(dataset, method))},
            temporary_folder,
            trials=len(GRIDS[dataset]),
            seeds=(APART, APART + 1),
            options={method: dict(config.federation.options)},
        )
    label_columns = labels(task)
    table_rows = []
    for _, trial in tuning.table.iterrows():
        status = {"status": trial["failed"]} if trial["failed"] else {}
        table_rows.append(
            rows.row(
                SCORE,
                trial["value"],
                split="validation",
                variant=f"lr={trial['lr']:g}",
                **status,
                **label_columns,
            )
        )
    chosen_rate = tuning.settings[method]["lr"]
    return rows.frame([*table_rows, rows.row(CHOSEN, chosen_rate, **label_columns)])


def _with_its_rate(config: RunConfig, run: str, folder: Path) -> RunConfig:
    """Return the configuration with the learning rate that tuning chose for this method on this dataset."""
    stored_part = SEARCH.parts(folder.parent / TUNING).get((run, 0))
    if stored_part is None:
        raise UsageError(
            f"{run} must be tuned first. Run {SEARCH.command} --only {run}."
        )
    frame = stored_part[1]
    return config.with_keys(
        lr=float(frame.loc[frame["metric"] == CHOSEN, "value"].iloc[0])
    )


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    """Return the score of every method and learning rate; the best is in bold."""
    trial_rows = frame[frame["metric"] == SCORE]
    rates = trial_rows["variant"].str.removeprefix("lr=").astype(float)
    validation_scores = (
        100 * trial_rows.set_index([trial_rows["run"], rates.rename("lr")])["value"]
    )
    table_rows, end_choices, sections, choice_count = [], [], [], 0
    for dataset, dataset_rates in GRIDS.items():
        columns: dict[str, list[str]] = {CASES[dataset].title: []}
        columns |= {f"{rate:g}": [] for rate in dataset_rates}
        for method in (*METHODS, *BESIDE):
            if (run := f"{dataset}.{method}") not in validation_scores.index:
                continue
            scores = validation_scores[run].reindex(list(grid(dataset, method)))
            best_index, choice_count = int(scores.argmax()), choice_count + 1
            if best_index in (0, len(scores) - 1):
                end_choices.append(f"{NAMES[method]} on {CASES[dataset].title}")
            run_columns = {"dataset": dataset, "method": method}
            table_rows += [
                {
                    **run_columns,
                    "lr": rate,
                    "measured": score,
                    "chosen": k == best_index,
                }
                for k, (rate, score) in enumerate(scores.items())
            ]
            score_texts = numbers(scores, ".1f")
            score_texts[best_index] = f"**{score_texts[best_index]}**"
            for column, text in zip(
                columns.values(), [NAMES[method], *score_texts], strict=True
            ):
                column.append(text)
        sections.append(markdown(columns))
    pfedme = " / ".join(f"{rate:g}" for rate in PFEDME)
    missing_text = missing_runs(header)
    caption = (
        f"Macro-F1 % on validation samples by method and learning rate. The best rate is bold. The runs of the table "
        f"use it with other seeds. Values are means over clients (by training samples), two seeds and the last three "
        "of ten evaluations. Methods with fine-tuning at the end have one evaluation. pFedMe's rates are those of its "
        f"outer step: {pfedme}.{missing_text}"
    )
    ends_text = ", ".join(end_choices)
    measured_text = f"none of {choice_count} does"
    if end_choices:
        measured_text = f"{len(end_choices)} of {choice_count} do: {ends_text}"
    finding = Finding(
        "no chosen rate lies at an end of its grid", measured_text, not end_choices
    )
    return Drawing(
        None, pd.DataFrame(table_rows), caption, (finding,), "\n\n".join(sections)
    )


RUNS = {}
for _dataset in GRIDS:
    for _name in (*METHODS, *BESIDE):
        RUNS[f"{_dataset}.{_name}"] = base(_dataset, _name)
SEARCH = items.register(Item(
    TUNING, "Learning rates of PLayer-FL's methods, tuned alike", RUNS, seeds=1,
    budget="some five hours of one core, four of them for Fed-ISIC", measure=_tune, draw=_draw,
))  # fmt: skip
STUDY = items.register(Item(
    NAME, "Test macro-F1 on three of the seven data sets, every method tuned alike (PLayer-FL, Table 1)", RUNS, seeds=8,
    own_seeds={run: SEEDS[dataset] for run in RUNS if (dataset := run.partition(".")[0]) in SEEDS},
    budget="some five hours of one core, three and a half of them for Fed-ISIC", measure=untuned.measure,
    prepare=_with_its_rate, draw=partial(draw, table=TABLES["table1"]),
))  # fmt: skip
