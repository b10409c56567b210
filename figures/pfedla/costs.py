"""Bytes that pFedLA sends by the number of retained layers (Table 3): by a fitted count, and in real messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from figures import items
from figures.items import Drawing, Finding, Item
from figures.names import dataset as titled
from figures.page import markdown, means, numbers
from figures.pfedla import methods, overlap
from figures.recipe import labels
from fl_core import rows, runner, tree
from fl_core.algorithms.base import Message, Round
from fl_core.algorithms.pfedla import PFedLA
from fl_core.config import RunConfig
from fl_core.errors import check_known

NAME = "pfedla.costs"
RETAINED = {"mnist": ("fc3", "fc1"), "cifar10": ("fc1", "conv2.conv", "fc3")}
"""Units that are retained one after another: those with which the paper's numbers of bytes come out."""
CALLED = {"mnist": "emnist", "cifar10": "cifar10"}
"""The paper's word for images of that size: its EMNIST has 10 classes, as MNIST has, and so the same network."""
PARAMETERS, LEDGER = "parameters", "ledger"
ROUNDS, CLIENTS = overlap.PAPER_ROUNDS, 10
NEAR = 1e-4
"""Within such a part of the printed number a count is near it."""

PFEDLA_BYTES = 3000
"""Bytes for a parameter sent one way in pFedLA's Table 3, for its run of 600 rounds with 10 clients.

A float for each of them would be 24,000 bytes. The table is an eighth of that.
"""

BASE = overlap.BASE.with_keys(algorithm="pfedla", rounds=ROUNDS, clients=CLIENTS)


def retention_ledger(
    parameters: Mapping[str, int], retained: Iterable[str] = ()
) -> float:
    """Return the MiB sent in a run of HeurpFedLA, counted as in pFedLA's Table 3 (Ma et al. 2022).

    This is u (2 P - sum of ``|l|`` over the retained layers) with u = :data:`PFEDLA_BYTES` / 2^20. Retained layers are
    always the same and not downloaded. The actual traffic of a run is in its rows ``bytes_down`` and ``bytes_up``.

    Args:
        parameters: scalars of each layer.
        retained: names of the layers that the clients keep.

    Raises:
        UsageError: a retained layer is not among them.
    """
    kept = sum(parameters[check_known("layer", name, parameters)] for name in retained)
    return PFEDLA_BYTES * (2 * sum(parameters.values()) - kept) / 2**20


def _runs() -> dict[str, RunConfig]:
    runs = {}
    for dataset, units in RETAINED.items():
        for k in range(len(units) + 1):
            options: dict[str, Any] = (
                {"algorithm": "heurpfedla", "options": {"k": k}} if k else {}
            )
            runs[f"{dataset}.{k}"] = BASE.with_keys(dataset=dataset, **options)
    return runs


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record the parameters of each unit, the fitted count, and the bytes of real messages over the whole run."""
    dataset, _, k = run.rpartition(".")
    kept = RETAINED[dataset][: int(k)]
    algorithm = task.algorithm(task.plan)
    if not isinstance(algorithm, PFedLA):
        raise TypeError(f"{run} is a run of {algorithm.name}")
    model = tree.state_dict(task.model)
    sizes = {
        unit.name: sum(model[name].numel() for name in unit.parameters)
        for unit in algorithm.units
    }
    named = labels(task)
    lines = [
        rows.row(PARAMETERS, n, layer=name, n_params=n, **named)
        for name, n in sizes.items()
    ]
    what = {
        "variant": " + ".join(kept),
        "estimator": "always the same retained layers",
        **named,
    }
    lines.append(rows.row(LEDGER, retention_ledger(sizes, kept), unit="MiB", **what))
    server, rnd = algorithm.server_state(model), Round(0)
    down = Message({"model": algorithm.mixture(server, 0, rnd, skip=frozenset(kept))})
    up = Message({"model": tree.select(model, algorithm.uploaded(rnd, 0))})
    messages = int(task.config.federation.rounds or 0) * len(task.task_info.n_train)
    for metric, message in (("bytes_down", down), ("bytes_up", up)):
        lines.append(rows.row(metric, messages * message.bytes, unit="byte", **what))
    return rows.frame(lines)


def lines(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each column of Table 3: MBytes (2^20) published, counted and really sent, and the accuracy."""
    table3 = items.published("pfedla")
    table3 = table3[table3["place"] == "Table 3"].set_index(
        ["dataset", "setting", "quantity"]
    )["value"]
    values = frame[frame["layer"] == ""].pivot(
        index="run", columns="metric", values="value"
    )
    kept = frame[frame["metric"] == LEDGER].set_index("run")["variant"]
    table_lines = []
    for dataset, units in RETAINED.items():
        for k in range(len(units) + 1):
            run, setting = f"{dataset}.{k}", f"non-iid 1, 10 clients, {k} retained"
            if run not in values.index:
                continue
            own, printed = values.loc[run], table3[CALLED[dataset]][setting]
            table_lines.append({
                "dataset": CALLED[dataset], "retained": k, "layers": kept[run],
                "published": printed["communication, MB"], "counted": own[LEDGER],
                "down": own["bytes_down"] / 2**20, "up": own["bytes_up"] / 2**20,
                "moved": (own["bytes_down"] + own["bytes_up"]) / 2**20, "published_accuracy": printed["accuracy"],
            })  # fmt: skip
    table = pd.DataFrame(table_lines)
    table["off"] = table["counted"] / table["published"] - 1
    table["moved_by_counted"] = table["moved"] / table["counted"]
    return table


def _draw(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    table, learnt = lines(frame), methods.with_pfedla()
    accuracies = methods.scores(learnt)
    caption = (
        f"Communication of {ROUNDS} rounds with {CLIENTS} clients by k, the number of retained layers. A client does "
        "not download its retained layers. They are the same in every round. The paper prints no formula. The count's "
        f"two constants are inferred from its numbers: {PFEDLA_BYTES} bytes a parameter and direction in the whole "
        "run, and MBytes of 2^20. Moved: the messages' 32-bit floats. Running statistics are not sent. EMNIST's "
        "network has 10 classes and takes grey images of 28 x 28."
    )
    return Drawing(
        None, table, caption, _findings(table, learnt), _page(table, accuracies)
    )


def _findings(table: pd.DataFrame, learnt: pd.DataFrame) -> tuple[Finding, ...]:
    exact = [
        f"{row.counted:.2f}" == f"{row.published:.2f}" for row in table.itertuples()
    ]
    exact_counts = {
        name: sum(own)
        for name, own in pd.Series(exact).groupby(table["dataset"], sort=False)
    }
    counts = table["dataset"].value_counts()
    ratios = table["moved_by_counted"]
    near = int((table["off"].abs() <= NEAR).sum())
    return (
        Finding(
            "Table 3's MBytes follow from a count of the parameters sent",
            "the paper prints no formula. Two constants were inferred from these very numbers "
            f"({PFEDLA_BYTES} bytes a parameter and direction, MBytes of 2^20). The retained layers were chosen to "
            f"fit. Agreement is no evidence: {near} of {len(table)} within {100 * NEAR:g} %, to two decimals "
            + ", ".join(
                f"{titled(name)} {n} of {counts[name]}"
                for name, n in exact_counts.items()
            )
            + f", at most {100 * table['off'].abs().max():.4f} % off",
            None,
        ),
        Finding(
            "a run sends as many bytes as Table 3 says",
            f"it sends {ratios.min():.3f} to {ratios.max():.3f} times as many. With 4 bytes a number, {ROUNDS} rounds "
            f"of {CLIENTS} clients send {4 * ROUNDS * CLIENTS} bytes a parameter and direction, not {PFEDLA_BYTES}",
            bool((ratios - 1).abs().max() < 0.01),
        ),
        *(methods.compromises(learnt, quantity) for quantity in methods.QUANTITIES),
    )


def _page(table: pd.DataFrame, accuracies: pd.DataFrame) -> str:
    keys = [
        methods.retaining(line.retained) if line.dataset == "cifar10" else ("", "")
        for line in table.itertuples()
    ]
    return markdown(
        {
            "dataset": list(map(titled, table["dataset"])),
            "k": list(table["retained"]),
            "retained": [name or "–" for name in table["layers"]],
            "published MB": numbers(table["published"]),
            "counted MB": numbers(table["counted"], ".3f"),
            "moved MB": numbers(table["moved"], ",.0f"),
            "published accuracy %": numbers(table["published_accuracy"]),
            "accuracy here, before local training %": means(accuracies, keys),
        }
    )


STUDY = items.register(Item(
    NAME, "What pFedLA's runs send, by the number of retained layers", _runs(), seeds=1,
    budget="some seconds; nothing is trained", measure=_measure,
))  # fmt: skip
TABLE3 = items.register(
    Item(
        "pfedla.table3",
        "Bytes, and accuracy on CIFAR-10, by the number of retained layers (pFedLA, Table 3)",
        source=NAME,
        draw=_draw,
        beside=overlap.NAME,
    )
)
