"""Numbers that a round of FedPFT sends, counted without training (Table 10)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from figures import items
from figures.items import Drawing, Finding, Item
from figures.page import markdown
from figures.recipe import labels
from fl_core import rows, tree
from fl_core.algorithms.base import Round
from fl_core.config import RunConfig
from fl_core.run import runner

NETWORKS, ALGORITHMS = ("resnet8", "resnet10"), ("fedavg", "fedpft")
PARTS = ("extractor", "transform", "classifier", "projection")
PARAMETERS, STATE, SENT = "parameters", "numbers", "numbers_sent"
INCREASE = "more parameters than FedAvg, %"
HOLDERS = {
    "body": "extractor",
    "transform": "transform",
    "head": "classifier",
    "fc": "classifier",
    "projection": "projection",
    "prompts": "prompts",
    "contrast_prompts": "prompts",
}
"""The module that a tensor belongs to, by the first part of its name; all others are the extractor's."""

SIZED = RunConfig(
    dataset="tiny_imagenet32", partition="fedpft_dirichlet", alpha=0.1, clients=2, samples_per_client=100,
    rounds=1, epochs=5, batch_size=100, keep_optimizer=False,
)  # fmt: skip
"""Images and classes are CIFAR-100's in number and size, which give the networks theirs."""


def _count(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Count the entries of each module: trained, in all, and sent by the server to a client."""
    model = tree.state_dict(task.model)
    algorithm = task.algorithm(task.plan)
    message = algorithm.server_message(algorithm.server_state(model), 0, Round(0))
    label_columns = labels(task)
    trained_names, tensor_sizes = (
        task.task_info.parameters,
        pd.Series(
            {tensor_name: tensor.numel() for tensor_name, tensor in model.items()}
        ),
    )
    module_names = pd.Series(
        {
            tensor_name: HOLDERS.get(tensor_name.partition(".")[0], "extractor")
            for tensor_name in model
        }
    )
    table_rows = []
    for module, module_sizes in tensor_sizes.groupby(module_names):
        parameters = int(
            module_sizes[
                [tensor_name in trained_names for tensor_name in module_sizes.index]
            ].sum()
        )
        table_rows.append(
            rows.row(
                PARAMETERS,
                parameters,
                layer=str(module),
                n_params=parameters,
                **label_columns,
            )
        )
        table_rows.append(
            rows.row(
                STATE,
                int(module_sizes.sum()),
                layer=str(module),
                n_params=parameters,
                **label_columns,
            )
        )
    tensors = chain.from_iterable(
        message_tree.values() for message_tree in message.trees.values()
    )
    sent_count = sum(tensor.numel() for tensor in tensors)
    table_rows.append(
        rows.row(
            SENT,
            sent_count,
            estimator="the server's message to a client",
            **label_columns,
        )
    )
    table_rows.append(
        rows.row(
            "bytes_down",
            message.bytes,
            unit="byte",
            estimator="the server's message to a client",
            **label_columns,
        )
    )
    return rows.frame(table_rows)


def as_printed(count: float, note: str) -> str:
    """Format a count with the digits and the letter of a printed one: 1235401 for ``printed 1.24M`` is ``1.24M``.

    Raises:
        ValueError: the note has no printed number.
    """
    match = re.search(r"printed \d+\.(\d+)([KM])", note)
    if match is None:
        raise ValueError(f"no printed number in {note!r}")
    digits, letter = match.groups()
    return f"{count / {'K': 1e3, 'M': 1e6}[letter]:.{len(digits)}f}{letter}"


def _lines(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each number of Table 10: published, counted, and counted without running statistics."""
    published_rows = items.published("fedpft")
    published_rows = published_rows[published_rows["place"] == "Table 10"].set_index(
        ["model", "method", "layer"]
    )
    counted_values = frame.pivot(
        index=["run", "layer"], columns="metric", values="value"
    )
    table_rows = []
    for network in NETWORKS:
        module_values = counted_values.loc[f"{network}.fedpft"]
        totals = {
            method: counted_values.loc[(f"{network}.{method}", ""), SENT]
            for method in ALGORITHMS
        }
        values_by_method = {
            method: counted_values.loc[f"{network}.{method}"].drop(
                ["", "prompts"], errors="ignore"
            )
            for method in ALGORITHMS
        }
        for module in PARTS:
            cell = published_rows.loc[(network, "", module)]
            table_rows.append(
                (
                    network,
                    module,
                    cell,
                    module_values.loc[module, STATE],
                    module_values.loc[module, PARAMETERS],
                )
            )
        for method, title in zip(ALGORITHMS, ("FedAvg", "FedPFT"), strict=True):
            cell = published_rows.loc[(network, method, "total")]
            table_rows.append(
                (
                    network,
                    title,
                    cell,
                    totals[method],
                    values_by_method[method][PARAMETERS].sum(),
                )
            )
        increase_cell = published_rows.loc[(network, "fedpft", "")]
        trained_totals = [
            values_by_method[method][PARAMETERS].sum() for method in ALGORITHMS
        ]
        table_rows.append(
            (
                network,
                INCREASE,
                increase_cell,
                _increase(*totals.values()),
                _increase(*trained_totals),
            )
        )
    count_table = pd.DataFrame(
        [
            (network, quantity, cell["value"], counted, parameters)
            for network, quantity, cell, counted, parameters in table_rows
        ],
        columns=["model", "what", "published", "counted", "trained"],
    )
    notes = [cell["note"] for _, _, cell, _, _ in table_rows]
    is_share = count_table["what"] == INCREASE
    count_table["counted_as_printed"] = [
        f"{counted:.2f}" if in_percent else as_printed(counted, note)
        for counted, note, in_percent in zip(
            count_table["counted"], notes, is_share, strict=True
        )
    ]
    count_table["printed"] = [
        f"{value:.2f}" if in_percent else as_printed(value, note)
        for value, note, in_percent in zip(
            count_table["published"], notes, is_share, strict=True
        )
    ]
    return count_table


def _increase(fedavg_count: float, fedpft_count: float) -> float:
    return 100 * (fedpft_count / fedavg_count - 1)


def _draw_sent(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    count_table = _lines(frame)
    is_equal = count_table["printed"] == count_table["counted_as_printed"]
    is_module = count_table["what"].isin(PARTS)
    other_rows = count_table[~is_module & ~is_equal]
    different_text = ", ".join(
        f"{row.what} of {row.model} is {row.counted_as_printed}, printed {row.printed}"
        for row in other_rows.itertuples()
    )
    findings = (
        Finding(
            "each module has as many numbers as Table 10 prints, running statistics counted",
            f"{int(is_equal[is_module].sum())} of {int(is_module.sum())} agree in all printed digits",
            bool(is_equal[is_module].all()),
        ),
        Finding(
            "so have the sums and the increases",
            f"{int(is_equal[~is_module].sum())} of {int((~is_module).sum())} agree"
            + (
                f"; {different_text}: these two follow from the rounded entries of the modules"
                if different_text
                else ""
            ),
            bool(is_equal[~is_module].all()),
        ),
    )
    columns = {
        "network": list(count_table["model"]),
        "what": list(count_table["what"]),
        "published": list(count_table["printed"]),
        "counted": [
            _readable(row.counted, row.what) for row in count_table.itertuples()
        ],
        "parameters alone": [
            _readable(row.trained, row.what) for row in count_table.itertuples()
        ],
    }
    caption = (
        "Numbers that a client sends or receives in a round, with 100 classes. The modules include running statistics "
        "and their counters, as in the server's message. Prompts stay with the client."
    )
    return Drawing(None, count_table, caption, findings, markdown(columns))


def _readable(value: float, quantity: str) -> str:
    if quantity == INCREASE:
        return f"{value:.2f}"
    return f"{value:,.0f}"


RUNS = {}
for _network in NETWORKS:
    for _name in ALGORITHMS:
        RUNS[f"{_network}.{_name}"] = SIZED.with_keys(model=_network, algorithm=_name)
items.register(Item(
    "fedpft.table10", "Parameters sent a round", RUNS, seeds=1,
    budget="some seconds; nothing is trained", measure=_count, draw=_draw_sent,
))  # fmt: skip
