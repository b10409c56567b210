"""Bytes that pFedLA's messages have by the number of retained layers, next to its Table 3."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from figures import items
from figures.items import Drawing, Finding, Item
from figures.names import dataset as titled
from figures.page import markdown, means, numbers
from figures.pfedla import methods, overlap
from figures.recipe import labels
from fl_core import rows, tree
from fl_core.algorithms.base import Message, Round
from fl_core.algorithms.pfedla import PFedLA
from fl_core.run import runner

NAME = "pfedla.costs"
RETAINED = {"mnist": ("fc3", "fc1"), "cifar10": ("fc1", "conv2.conv", "fc3")}
"""Units that are retained one after another: those with which the paper's numbers of bytes come out."""
CALLED = {"mnist": "emnist", "cifar10": "cifar10"}
"""The paper's word for images of that size: its EMNIST has 10 classes, as MNIST has, and so the same network."""
PARAMETERS = "parameters"
ROUNDS, CLIENTS = overlap.PAPER_ROUNDS, 10
BASE = overlap.BASE.with_keys(rounds=ROUNDS, clients=CLIENTS)


RUNS = {}
for _dataset, _units in RETAINED.items():
    _plain = BASE.with_keys(dataset=_dataset, algorithm="pfedla")
    RUNS[f"{_dataset}.0"] = _plain
    for _k in range(1, len(_units) + 1):
        RUNS[f"{_dataset}.{_k}"] = _plain.with_keys(
            algorithm="heurpfedla", options={"k": _k}
        )


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record the parameters of each unit, and the bytes of real messages over the whole run."""
    dataset, _, k = run.rpartition(".")
    retained_units = RETAINED[dataset][: int(k)]
    algorithm = task.algorithm(task.plan)
    if not isinstance(algorithm, PFedLA):
        raise TypeError(f"{run} is a run of {algorithm.name}")
    model = tree.state_dict(task.model)
    unit_sizes = {
        unit.name: sum(model[name].numel() for name in unit.parameters)
        for unit in algorithm.units
    }
    label_columns = labels(task)
    table_rows = [
        rows.row(PARAMETERS, n, layer=name, n_params=n, **label_columns)
        for name, n in unit_sizes.items()
    ]
    message_columns = {
        "variant": " + ".join(retained_units),
        "estimator": "always the same retained layers",
        **label_columns,
    }
    server, first_round = algorithm.server_state(model), Round(0)
    download = Message(
        {
            "model": algorithm.mixture(
                server, 0, first_round, skip=frozenset(retained_units)
            )
        }
    )
    upload = Message({"model": tree.select(model, algorithm.uploaded(first_round, 0))})
    message_count = int(task.config.federation.rounds or 0) * len(
        task.task_info.n_train
    )
    for metric_name, message in (("bytes_down", download), ("bytes_up", upload)):
        table_rows.append(
            rows.row(
                metric_name,
                message_count * message.bytes,
                unit="byte",
                **message_columns,
            )
        )
    return rows.frame(table_rows)


def lines(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each column of Table 3: MBytes (2^20) published and really sent, and the accuracy."""
    published_rows = items.published("pfedla")
    published_rows = published_rows[published_rows["place"] == "Table 3"].set_index(
        ["dataset", "setting", "quantity"]
    )["value"]
    network_rows = frame[frame["layer"] == ""]
    megabytes = (
        network_rows.pivot(index="run", columns="metric", values="value") / 2**20
    )
    retained_names = network_rows.groupby("run")["variant"].first()
    table_rows = []
    for run in (run for run in STUDY.runs if run in megabytes.index):
        dataset, _, k = run.partition(".")
        published_values = published_rows[CALLED[dataset]][
            f"non-iid 1, 10 clients, {k} retained"
        ]
        table_rows.append({
            "dataset": CALLED[dataset], "retained": int(k), "layers": retained_names[run],
            "published": published_values["communication, MB"], "down": megabytes.loc[run, "bytes_down"],
            "up": megabytes.loc[run, "bytes_up"], "moved": megabytes.loc[run].sum(),
            "published_accuracy": published_values["accuracy"],
        })  # fmt: skip
    return pd.DataFrame(table_rows)


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    cost_table = lines(STUDY.read(STUDY.path())[1])
    accuracies = methods.scores(frame)
    caption = (
        f"Communication of {ROUNDS} rounds with {CLIENTS} clients by k, the number of retained layers. A client does "
        "not download its retained layers. They are the same in every round, and those with which the paper's numbers "
        "come out. Moved: the messages' 32-bit floats. Running statistics are not sent. EMNIST's network has 10 "
        "classes and takes grey images of 28 x 28. MBytes are of 2^20."
    )
    return Drawing(
        None,
        cost_table,
        caption,
        _findings(cost_table, frame),
        _page(cost_table, accuracies),
    )


def _findings(table: pd.DataFrame, frame: pd.DataFrame) -> tuple[Finding, ...]:
    ratios = table["moved"] / table["published"]
    bytes_each = 4 * ROUNDS * CLIENTS
    return (
        Finding(
            "a run sends as many bytes as Table 3 says",
            f"it sends {ratios.min():.3f} to {ratios.max():.3f} times as many. With 4 bytes a number, {ROUNDS} rounds "
            f"of {CLIENTS} clients send {bytes_each} bytes a parameter and direction. The table has an eighth of that",
            bool((ratios - 1).abs().max() < 0.01),
        ),
        *(methods.compromises(frame, quantity) for quantity in methods.QUANTITIES),
        methods.costs_little(frame),
        methods.number_matters_little(frame),
    )


def _page(table: pd.DataFrame, accuracies: pd.DataFrame) -> str:
    run_keys = [
        methods.retaining(row.retained) if row.dataset == "cifar10" else ("", "")
        for row in table.itertuples()
    ]
    return markdown(
        {
            "dataset": list(map(titled, table["dataset"])),
            "k": list(table["retained"]),
            "retained": [unit_names or "–" for unit_names in table["layers"]],
            "published MB": numbers(table["published"]),
            "moved MB": numbers(table["moved"], ",.0f"),
            "published accuracy %": numbers(table["published_accuracy"]),
            "accuracy here, before local training %": means(accuracies, run_keys),
        }
    )


STUDY = items.register(Item(
    NAME, "What pFedLA's runs send, by the number of retained layers", RUNS, seeds=1,
    budget="some seconds; nothing is trained", measure=_measure,
))  # fmt: skip
items.register(
    Item(
        "pfedla.table3",
        "Bytes, and accuracy on CIFAR-10, by the number of retained layers (pFedLA, Table 3)",
        source=overlap.NAME,
        draw=_draw,
        shown=["pfedla", *overlap.RETAINING.values()],
    )
)
