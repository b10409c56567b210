"""PLayer-FL's Tables A.1, A.3 and A.4 next to this project's: data sets, learning rates and their search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from figures import items
from figures.items import Drawing, Item, View
from figures.player_fl.runs import (
    ABSENT,
    BESIDE,
    CASES,
    METHODS,
    NAME,
    STAND_IN,
    STUDY,
    config,
)
from figures.recipe import labels
from figures.settings import Setting, agreement, drawing, option
from fl_core import rows, runner
from fl_core.data import datasets
from fl_core.errors import listing

CLASSES, CLIENTS, ALPHA, SAMPLES = (
    "classes",
    "clients",
    "Dirichlet's α",
    "training samples",
)
PRINTED = {CLASSES: "classes", CLIENTS: "clients", ALPHA: "dirichlet alpha"}
"""The quantities of Table A.1 by their names here."""
LOSSES = {
    **dict.fromkeys(("fashion_mnist", "emnist", "cifar10", "sent140"), "cross_entropy"),
    **dict.fromkeys(("fed_isic", "heart", "mimic"), "player_focal"),
}
"""Table A.4's losses, cross-entropy and multiclass focal, by the names that they have here."""
GRID, RATE = "lr of the grid", "learning rate"
EVALUATED = {**METHODS, **BESIDE}
STAND = f"Tweets to airlines stand for {listing(STAND_IN.values())}. {' and '.join(ABSENT.values())} are not available."


def _lines() -> dict[str, tuple[str, str]]:
    """Every dataset of the paper: its title with the name here, if it has one, and its printed name."""
    own = {
        name: (
            case.title + (f" ({STAND_IN[name]})" if name in STAND_IN else ""),
            case.printed,
        )
        for name, case in CASES.items()
    }
    return {**own, **{name: (title, name) for name, title in ABSENT.items()}}


# --- the data sets (Table A.1) ---------------------------------------------------------------------------------


def _describe(task: runner.Task, run: str) -> pd.DataFrame:
    """Record the number of classes and clients, Dirichlet's parameter, and each client's training samples."""
    named, recipe = labels(task), datasets()[str(task.config.data.dataset)]
    clients = task.data.clients
    lines = [
        rows.row(CLASSES, len(task.data.classes), **named),
        rows.row(CLIENTS, len(clients), **named),
        *(
            rows.row(SAMPLES, len(each.train), client=each.name, **named)
            for each in clients
        ),
    ]
    if recipe.partition == "dirichlet":
        lines.append(rows.row(ALPHA, recipe.alpha, **named))
    return rows.frame(lines)


def _draw_data(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    printed = items.published("player_fl")
    printed = printed[printed["place"] == "Table A.1"].set_index(
        ["dataset", "quantity"]
    )["value"]
    settings = []
    for name, (title, dataset) in _lines().items():
        own = frame[frame["run"] == name]
        for of, quantity in PRINTED.items():
            paper = (
                (printed[dataset, quantity],) if (dataset, quantity) in printed else ()
            )
            settings.append(
                Setting(title, of, paper, tuple(own.loc[own["metric"] == of, "value"]))
            )
        held = own.loc[own["metric"] == SAMPLES, "value"]
        settings.append(
            Setting(
                title,
                f"{SAMPLES} a client",
                (),
                tuple(sorted({held.min(), held.max()} if len(held) else ())),
            )
        )
    caption = (
        "Classes, clients and Dirichlet's parameter of the data sets. The training samples are the fewest and most of "
        f"a client in `{NAME}`. {STAND} A natural federation has no α."
    )
    expected = "the data sets except the tweets have the paper's classes, clients and α"
    known = [
        each
        for each in settings
        if each.what not in {_lines()[name][0] for name in STAND_IN}
    ]
    return drawing(
        settings, caption, [agreement(expected, known)], line="data set", shared=False
    )


# --- learning rates (Table A.3) --------------------------------------------------------------------------------


def _rates(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[Setting]:
    """Every method's printed learning rate on every available dataset, next to the rate used here."""
    printed = items.published_table("player_fl", "Table A.3")
    for name, case in CASES.items():
        for method, title in EVALUATED.items():
            known = method in printed.index
            paper = (float(printed.loc[method, case.printed]),) if known else ()
            here = configs.get(f"{name}.{method}")
            yield Setting(
                title, case.title, paper, option(here, "lr") if here else (), ""
            )


def _draw_rates(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    settings = list(
        _rates({run: about["config"] for run, about in header["runs"].items()})
    )
    full = list(_rates({run: each.to_json() for run, each in STUDY.paper.items()}))
    alike = {case.title for name, case in CASES.items() if name not in STAND_IN}
    findings = (
        agreement(
            "at the paper's scale every method has its printed rate",
            [each for each in full if each.of in alike],
        ),
        agreement(
            "the stored runs have the printed rates",
            [each for each in settings if each.of in alike],
            ""
            if items.at_paper(header)
            else "smaller networks and data, one rate for all but Fed-Heart",
        ),
    )
    caption = (
        f"Learning rates by method and data set. Runs here have up to {header['seeds']} seeds. {STAND} The paper has "
        "no rate for FedLP, FedLAMA, pFedLA and PLayer-FL-Random. pFedMe's rate is that of its outer step."
    )
    return drawing(settings, caption, findings, line="method", quantity="learning rate")


# --- how rates were sought (Table A.4) -------------------------------------------------------------------------


def _draw_grid(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    printed = items.published("player_fl")
    printed = printed[printed["place"] == "Table A.4"]
    settings = []
    for name, (title, dataset) in _lines().items():
        own = [run for run in header["runs"] if run.partition(".")[0] == name]
        configs = [header["runs"][run]["config"] for run in own]
        numbers = (
            printed[printed["dataset"] == dataset]
            .groupby("quantity")["value"]
            .agg(tuple)
        )
        for of, quantity, key in ((RATE, GRID, "lr"), ("rounds", "rounds", "rounds")):
            here = tuple(
                sorted({value for each in configs for value in option(each, key)})
            )
            settings.append(Setting(title, of, numbers[quantity], here, ""))
        seeds = tuple(sorted({len(header["had"][run]) for run in own}))
        settings.append(Setting(title, "runs", numbers["runs"], seeds))
        losses = tuple(sorted({str(each["loss"]) for each in configs}))
        settings.append(Setting(title, "loss", (LOSSES[dataset],), losses))
    counted = [each for each in settings if each.of != RATE]
    far = "" if items.at_paper(header) else "fewer rounds and seeds"
    findings = (
        agreement(
            "each data set has the paper's loss",
            [each for each in counted if each.of == "loss"],
        ),
        agreement(
            "each data set has the paper's numbers of rounds and runs",
            [each for each in counted if each.of != "loss"],
            far,
        ),
    )
    caption = (
        "The paper's grid of learning rates and the rates of all methods here, with the rounds and runs of each data "
        f"set. Runs here have at most {header['seeds']} seeds. {STAND} The paper multiplies pFedMe's rates by 100. The "
        "authors' released code has 100, 100, 60, 20 and 50 rounds for these data sets."
    )
    return drawing(settings, caption, findings, line="data set", shared=False)


TABLE_A1 = items.register(Item(
    "player_fl.tableA1", "The data sets and their clients (PLayer-FL, Table A.1)",
    {name: config(name, "fedavg", items.QUICK) for name in CASES}, seeds=1,
    budget="some seconds; nothing is trained", measure=_describe, draw=_draw_data,
    paper={name: config(name, "fedavg", "paper") for name in CASES}, paper_seeds=1,
))  # fmt: skip
TABLE_A3 = items.register(View(
    "player_fl.tableA3", "Learning rates by method and data set (PLayer-FL, Table A.3)", NAME, _draw_rates,
    settings=True,
))  # fmt: skip
TABLE_A4 = items.register(View(
    "player_fl.tableA4", "Grid of learning rates, losses, rounds and runs (PLayer-FL, Table A.4)", NAME, _draw_grid,
    settings=True,
))  # fmt: skip
