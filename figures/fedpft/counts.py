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
    named = labels(task)
    trained, sizes = (
        task.task_info.parameters,
        pd.Series({name: tensor.numel() for name, tensor in model.items()}),
    )
    holder = pd.Series(
        {name: HOLDERS.get(name.partition(".")[0], "extractor") for name in model}
    )
    lines = []
    for part, part_sizes in sizes.groupby(holder):
        parameters = int(
            part_sizes[[name in trained for name in part_sizes.index]].sum()
        )
        lines.append(
            rows.row(
                PARAMETERS, parameters, layer=str(part), n_params=parameters, **named
            )
        )
        lines.append(
            rows.row(
                STATE,
                int(part_sizes.sum()),
                layer=str(part),
                n_params=parameters,
                **named,
            )
        )
    tensors = chain.from_iterable(kind.values() for kind in message.trees.values())
    sent = sum(tensor.numel() for tensor in tensors)
    lines.append(
        rows.row(SENT, sent, estimator="the server's message to a client", **named)
    )
    lines.append(
        rows.row(
            "bytes_down",
            message.bytes,
            unit="byte",
            estimator="the server's message to a client",
            **named,
        )
    )
    return rows.frame(lines)


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
    printed = items.published("fedpft")
    printed = printed[printed["place"] == "Table 10"].set_index(
        ["model", "method", "layer"]
    )
    values = frame.pivot(index=["run", "layer"], columns="metric", values="value")
    lines = []
    for network in NETWORKS:
        parts = values.loc[f"{network}.fedpft"]
        totals = {
            name: values.loc[(f"{network}.{name}", ""), SENT] for name in ALGORITHMS
        }
        whole = {
            name: values.loc[f"{network}.{name}"].drop(["", "prompts"], errors="ignore")
            for name in ALGORITHMS
        }
        for part in PARTS:
            cell = printed.loc[(network, "", part)]
            lines.append(
                (
                    network,
                    part,
                    cell,
                    parts.loc[part, STATE],
                    parts.loc[part, PARAMETERS],
                )
            )
        for name, title in zip(ALGORITHMS, ("FedAvg", "FedPFT"), strict=True):
            cell = printed.loc[(network, name, "total")]
            lines.append(
                (network, title, cell, totals[name], whole[name][PARAMETERS].sum())
            )
        prompted = printed.loc[(network, "fedpft", "")]
        trained = [whole[name][PARAMETERS].sum() for name in ALGORITHMS]
        lines.append(
            (
                network,
                INCREASE,
                prompted,
                _increase(*totals.values()),
                _increase(*trained),
            )
        )
    table = pd.DataFrame(
        [
            (network, what, cell["value"], count, parameters)
            for network, what, cell, count, parameters in lines
        ],
        columns=["model", "what", "published", "counted", "trained"],
    )
    notes = [cell["note"] for _, _, cell, _, _ in lines]
    percent = table["what"] == INCREASE
    table["counted_as_printed"] = [
        f"{count:.2f}" if share else as_printed(count, note)
        for count, note, share in zip(table["counted"], notes, percent, strict=True)
    ]
    table["printed"] = [
        f"{value:.2f}" if share else as_printed(value, note)
        for value, note, share in zip(table["published"], notes, percent, strict=True)
    ]
    return table


def _increase(before: float, after: float) -> float:
    return 100 * (after / before - 1)


def _draw_sent(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    table = _lines(frame)
    agrees = table["printed"] == table["counted_as_printed"]
    parts = table["what"].isin(PARTS)
    others = table[~parts & ~agrees]
    differing = ", ".join(
        f"{row.what} of {row.model} is {row.counted_as_printed}, printed {row.printed}"
        for row in others.itertuples()
    )
    findings = (
        Finding(
            "each module has as many numbers as Table 10 prints, running statistics counted",
            f"{int(agrees[parts].sum())} of {int(parts.sum())} agree in all printed digits",
            bool(agrees[parts].all()),
        ),
        Finding(
            "so have the sums and the increases",
            f"{int(agrees[~parts].sum())} of {int((~parts).sum())} agree"
            + (
                f"; {differing}: these two follow from the rounded entries of the modules"
                if differing
                else ""
            ),
            bool(agrees[~parts].all()),
        ),
    )
    cells = {
        "network": list(table["model"]),
        "what": list(table["what"]),
        "published": list(table["printed"]),
        "counted": [_readable(row.counted, row.what) for row in table.itertuples()],
        "parameters alone": [
            _readable(row.trained, row.what) for row in table.itertuples()
        ],
    }
    caption = (
        "Numbers that a client sends or receives in a round, with 100 classes. The modules include running statistics "
        "and their counters, as in the server's message. Prompts stay with the client."
    )
    return Drawing(None, table, caption, findings, markdown(cells))


def _readable(value: float, what: str) -> str:
    if what == INCREASE:
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
