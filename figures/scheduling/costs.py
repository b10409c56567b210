"""Layer scheduling before any training: the schedules, sizes of layers, and three ways to count costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from diagnostics.plots.drawing import COLOURS
from diagnostics.plots.runs import cost_steps as draw_steps
from figures import items, names
from figures.forms import matrix, sheet
from figures.items import Drawing, Finding, Item
from figures.page import markdown, numbers
from figures.recipe import labels, where
from fl_core import rows
from fl_core.algorithms.base import Round
from fl_core.config import RunConfig
from fl_core.run import runner
from fl_core.run.costs import cost_steps

NAME = "scheduling.costs"
COST, TRAINED, PARAMETERS = "round_cost", "trained", "parameters"
CLIENTS, SAMPLES = 100, 500
"""Table 4 counts clients with so many training samples each, all of whom take part in every round."""
UNFREEZE = (0, 100, 200)
ALGORITHMS = ("fedavg", "fedbabu", "vanilla", "anti")
DATASETS = ("mnist", "cifar10", "tiny_imagenet32")
"""Whose images and classes give the network its sizes; the paper counts the first only."""
UNITS = {"naive": "scalar x batch", "flops": "FLOP", "moved": "byte"}
SHADES = {"frozen": "0.88", "trains": COLOURS[0]}
"""What a layer does in a round, and its colour."""

BASE = RunConfig(
    partition="iid", clients=CLIENTS, max_samples=CLIENTS * SAMPLES, model="scheduling_cnn",
    rounds=300, epochs=1, batch_size=10, lr=0.005, optimizer="sgd",
    keep_optimizer=False,
)  # fmt: skip


RUNS = {}
for _dataset in DATASETS:
    _sized = BASE.with_keys(dataset=_dataset)
    for _name in ("fedavg", "fedbabu"):
        RUNS[f"{_dataset}.{_name}"] = _sized.with_keys(algorithm=_name)
    for _name in ("vanilla", "anti"):
        RUNS[f"{_dataset}.{_name}"] = _sized.with_keys(
            algorithm=_name, options={"unfreeze": UNFREEZE}
        )


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record tensor sizes and, at each round that changes them, what trains and what a round costs."""
    paper = replace(
        task, task_info=replace(task.task_info, n_train=(SAMPLES,) * CLIENTS)
    )
    named = {**labels(task), "estimator": "each round from here on"}
    sizes = {
        name: parameter.numel() for name, parameter in task.model.named_parameters()
    }
    lines: list[rows.Row] = []
    for layer in task.layers:
        for name in layer.parameters:
            lines.append(
                rows.row(
                    PARAMETERS,
                    sizes[name],
                    n_params=sizes[name],
                    layer=layer.name,
                    variant=name.rpartition(".")[2],
                    algorithm=named["algorithm"],
                )
            )
    table = cost_steps({run: paper}).set_index("round")
    for kind, unit in UNITS.items():
        values = table[kind]
        for done, value in values[values != values.shift()].items():
            lines.append(
                rows.row(COST, value, round=int(done), variant=kind, unit=unit, **named)
            )
    algorithm, before = paper.algorithm(paper.plan), None
    for index in range(algorithm.task_info.rounds):
        phases = algorithm.phases(Round(index), 0)
        moving = set(chain.from_iterable(phase.train for phase in phases))
        if moving != before:
            for part in task.layers:
                is_moving = float(not moving.isdisjoint(part.tensors))
                lines.append(
                    rows.row(
                        TRAINED, is_moving, round=index + 1, layer=part.name, **named
                    )
                )
        before = moving
    return rows.frame(lines)


def by_round(frame: pd.DataFrame, run: str, metric: str) -> pd.DataFrame:
    """Values of a run in every round, rounds x (layer or variant): those of a row hold until the next row's round."""
    of_run = where(frame, run=run, metric=metric)
    column = "variant"
    if metric == TRAINED:
        column = "layer"
    table = of_run.pivot(index="round", columns=column, values="value")
    table = table[list(of_run[column].unique())]
    table.index = table.index.astype(int)
    rounds = STUDY.runs[run].federation.rounds or 0
    return table.reindex(range(1, rounds + 1)).ffill()


def _setting(header: Mapping[str, Any]) -> str:
    config = header["runs"][f"{DATASETS[0]}.vanilla"]["config"]
    thaws = ", ".join(map(str, config["options"]["unfreeze"]))
    network_name = names.network(config["model"])
    dataset_name = names.dataset(DATASETS[0])
    return (
        f"All {CLIENTS} clients train {network_name} for {dataset_name} in "
        f"{config['rounds']} rounds. They have {SAMPLES} samples each and batches of {config['batch_size']}. "
        f"Layers are unfrozen after {thaws} rounds."
    )


# --- the schedules (Fig. 1) ------------------------------------------------------------------------------------


def _draw_schedules(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    tables = {
        name: by_round(frame, f"{DATASETS[0]}.{name}", TRAINED)
        for name in ("vanilla", "anti")
    }
    with sheet(7.0, 4.4) as figure:
        axes = figure.subplots(2, 1)
        for ax, (name, table) in zip(axes, tables.items(), strict=True):
            training = stages(table)
            matrix(
                ax,
                training.astype(float),
                texts=training.map({True: "trains", False: "frozen"}.get),
                colours=list(SHADES.values()),
                high=1,
                vmin=0,
            )
            ax.set_title(names.title(name))
        axes[-1].set_xlabel("rounds, counted from 1")
    lines = []
    for name, table in tables.items():
        for layer, values in table.items():
            line = {"algorithm": name, "layer": layer, "from_round": _first(values)}
            lines.append({**line, "rounds": int(values.sum())})
    *body, head = tables["vanilla"].columns
    thaws = {
        name: [_first(table[layer]) for layer in body] for name, table in tables.items()
    }
    mirrored = thaws["vanilla"] == thaws["anti"][::-1] == sorted(thaws["vanilla"])
    never = not any(table[head].any() for table in tables.values())
    orders = []
    for name, starts in thaws.items():
        pairs = zip(body, starts, strict=True)
        order = ", ".join(f"{part} in round {k}" for part, k in pairs)
        algorithm_title = names.title(name)
        orders.append(f"{algorithm_title} {order}")
    findings = (
        Finding(
            "Vanilla unfreezes the body from the input on and Anti in the reverse order",
            "; ".join(orders),
            mirrored,
        ),
        Finding(
            "the head trains in no round before fine-tuning",
            f"{head}: never" if never else "it does",
            never,
        ),
    )
    setting_text = _setting(header)
    caption = f"The layers that train in each round. {setting_text}"
    return Drawing(figure, pd.DataFrame(lines), caption, findings)


def stages(table: pd.DataFrame) -> pd.DataFrame:
    """Return whether each layer trains in each span of rounds between changes, layers x spans.

    Args:
        table: whether each layer trains, rounds x layers.
    """
    trains = table.astype(bool)
    spans = (trains != trains.shift(fill_value=False)).any(axis=1).cumsum()
    columns = {}
    for _, part in trains.groupby(spans):
        columns[f"{part.index[0]}-{part.index[-1]}"] = part.iloc[0]
    return pd.DataFrame(columns)


def _first(values: pd.Series) -> int:
    """The first training round of a layer, 0 if it never trains."""
    if values.any():
        return int(values.idxmax())
    return 0


# --- sizes of layers (Table 3) ---------------------------------------------------------------------------------


def sizes(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the parameters of every tensor and of all together, tensors x datasets."""
    parameters = where(frame, metric=PARAMETERS, algorithm=ALGORITHMS[0])
    parameters = parameters.assign(
        dataset=parameters["run"].str.partition(".")[0],
        tensor=parameters["layer"] + "." + parameters["variant"],
    )
    table = parameters.pivot(index="tensor", columns="dataset", values="value").astype(
        int
    )
    table = table.loc[parameters["tensor"].unique(), list(DATASETS)]
    table.loc["total"] = table.sum()
    return table


def _draw_sizes(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    printed = items.published("scheduling")
    printed = printed[printed["place"] == "Table 3"].set_index("layer")["value"]
    wide = sizes(frame).loc[list(printed.index)]
    mine = wide[DATASETS[0]]
    table = wide.melt(var_name="dataset", value_name="parameters", ignore_index=False)
    table = table.reset_index()[["dataset", "tensor", "parameters"]]
    table["published"] = (
        table["tensor"].map(printed).where(table["dataset"] == DATASETS[0])
    )
    agrees = mine == printed
    finding = Finding(
        "the network for MNIST has the paper's number of parameters in every tensor",
        f"{sum(agrees)} of {len(agrees)} numbers agree, in all {mine['total']:,}",
        all(agrees),
    )
    cells = {
        "tensor": list(printed.index),
        "published": numbers(printed, ",.0f"),
    }
    for name in DATASETS:
        cells[names.dataset(name)] = numbers(wide[name], ",")
    caption = (
        "Parameters of the schedules' CNN. It grows with images and classes. The paper prints MNIST's network only. "
        "The network for CIFAR-100 would be that for Tiny-ImageNet at 32 x 32 pixels with 100 classes."
    )
    return Drawing(None, table, caption, (finding,), markdown(cells))


# --- costs (Table 4) -------------------------------------------------------------------------------------------


def totals(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per dataset and algorithm: naive and flops x 10^9, moved in GB, each also over FedAvg's."""
    lines = []
    for run in STUDY.runs:
        dataset, _, algorithm = run.partition(".")
        costs = by_round(frame, run, COST).sum() / 1e9
        lines.append({"dataset": dataset, "algorithm": algorithm, **costs[list(UNITS)]})
    table = pd.DataFrame(lines)
    for kind in UNITS:
        first = table.groupby("dataset")[kind].transform("first")  # FedAvg's
        table[f"{kind}_share"] = table[kind] / first
    printed = items.published_table("scheduling", "Table 4").iloc[:, 0]
    counted = table["dataset"] == DATASETS[0]  # the paper's network
    table.insert(2, "published", table["algorithm"].map(printed).where(counted))
    return table


def _findings(table: pd.DataFrame) -> tuple[Finding, ...]:
    paper = table[table["published"].notna()].set_index("algorithm")
    agree = [f"{row.naive:.2f}" == f"{row.published:.2f}" for row in paper.itertuples()]
    naive = paper["naive"].rename(names.title)
    share = {kind: paper[f"{kind}_share"] for kind in UNITS}
    texts = {}
    for kind, values in share.items():
        titles = values.rename(lambda name: names.title(str(name))).items()
        texts[kind] = ", ".join(f"{title} {value:.3f}" for title, value in titles)
    cheap = {
        kind: bool(values["vanilla"] < min(values["anti"], values["fedbabu"]))
        for kind, values in share.items()
    }
    return (
        Finding(
            "the naive count gives the four numbers of Table 4",
            f"{sum(agree)} of {len(agree)} agree to two decimals: "
            + ", ".join(f"{title} {n:.3f}" for title, n in naive.items()),
            all(agree),
        ),
        Finding(
            "by the naive count Vanilla is the cheapest",
            f"of FedAvg's: {texts['naive']}",
            cheap["naive"],
        ),
        Finding(
            "in floating-point operations (forward and backward) Vanilla is the cheapest as well",
            f"of FedAvg's: {texts['flops']}; errors pass back through all that is frozen above the first layer",
            cheap["flops"],
        ),
        Finding(
            "in bytes sent Vanilla is the cheapest as well",
            f"of FedAvg's: {texts['moved']}",
            cheap["moved"],
        ),
    )


COUNTED = (
    "The naive count sums the trained parameters over batches. The paper calls it FLOPs. FLOPs here are counted by "
    "PyTorch for the forward and backward pass of every sample. Bytes are sent down and up. Frozen layers are not "
    "sent, because both sides know their values. The paper's Algorithm 1 sends them too and so needs as many bytes as "
    "FedBABU. Fine-tuning is not counted."
)


def _draw_costs(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    table = totals(frame)
    cells = {
        "network for": list(map(names.dataset, table["dataset"])),
        "algorithm": list(map(names.title, table["algorithm"])),
        "published": numbers(table["published"]),
        "naive, 10^9": numbers(table["naive"]),
        "TFLOP": [f"{value / 1e3:,.1f}" for value in table["flops"]],
        "GB sent": numbers(table["moved"], ",.1f"),
    }
    for kind in UNITS:
        cells[f"{kind} / FedAvg's"] = numbers(table[f"{kind}_share"], ".3f")
    setting_text = _setting(header)
    caption = f"Cost of a whole run relative to FedAvg's. {setting_text} {COUNTED}"
    return Drawing(None, table, caption, _findings(table), markdown(cells))


# --- costs by round (Fig. 7) -----------------------------------------------------------------------------------


def _draw_rounds(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    tables = {
        name: by_round(frame, f"{DATASETS[0]}.{name}", COST) for name in ALGORITHMS
    }
    table = pd.concat(tables, names=["run"]).reset_index()
    with sheet(7.2, 3.3) as figure:
        draw_steps(table.assign(run=table["run"].map(names.title)), figure)
    changes = table[
        (table[list(UNITS)].diff() != 0).any(axis=1) | (table["round"] == 1)
    ]
    setting_text = _setting(header)
    caption = f"Cost of each round for all clients together. {setting_text} {COUNTED}"
    return Drawing(figure, changes, caption, _findings(totals(frame))[1:])


STUDY = items.register(Item(
    NAME, "What schedules cost, counted before any training", RUNS, seeds=1,
    budget="a minute; nothing is trained", measure=_measure,
))  # fmt: skip
items.register(Item(
    "scheduling.fig1", "Which layers train in which round", source=NAME, draw=_draw_schedules,
))  # fmt: skip
items.register(Item(
    "scheduling.fig7", "What a round costs: naive count, FLOPs and bytes", source=NAME, draw=_draw_rounds,
))  # fmt: skip
items.register(Item("scheduling.table3", "Parameters of each layer", source=NAME, draw=_draw_sizes))  # fmt: skip
items.register(
    Item(
        "scheduling.table4",
        "What a run costs: naive count, FLOPs and bytes",
        source=NAME,
        draw=_draw_costs,
    )
)
