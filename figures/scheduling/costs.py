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
    paper_task = replace(
        task, task_info=replace(task.task_info, n_train=(SAMPLES,) * CLIENTS)
    )
    label_columns = {**labels(task), "estimator": "each round from here on"}
    parameter_counts = {
        parameter_name: parameter.numel()
        for parameter_name, parameter in task.model.named_parameters()
    }
    table_rows: list[rows.Row] = []
    for layer in task.layers:
        for parameter_name in layer.parameters:
            table_rows.append(
                rows.row(
                    PARAMETERS,
                    parameter_counts[parameter_name],
                    n_params=parameter_counts[parameter_name],
                    layer=layer.name,
                    variant=parameter_name.rpartition(".")[2],
                    algorithm=label_columns["algorithm"],
                )
            )
    round_costs = cost_steps({run: paper_task}).set_index("round")
    for kind, unit in UNITS.items():
        unit_costs = round_costs[kind]
        for round_number, cost in unit_costs[unit_costs != unit_costs.shift()].items():
            table_rows.append(
                rows.row(
                    COST,
                    cost,
                    round=int(round_number),
                    variant=kind,
                    unit=unit,
                    **label_columns,
                )
            )
    algorithm, previous_tensors = paper_task.algorithm(paper_task.plan), None
    for round_index in range(algorithm.task_info.rounds):
        phases = algorithm.phases(Round(round_index), 0)
        trained_tensors = set(chain.from_iterable(phase.train for phase in phases))
        if trained_tensors != previous_tensors:
            for trained_layer in task.layers:
                is_trained = float(
                    not trained_tensors.isdisjoint(trained_layer.tensors)
                )
                table_rows.append(
                    rows.row(
                        TRAINED,
                        is_trained,
                        round=round_index + 1,
                        layer=trained_layer.name,
                        **label_columns,
                    )
                )
        previous_tensors = trained_tensors
    return rows.frame(table_rows)


def by_round(frame: pd.DataFrame, run: str, metric_name: str) -> pd.DataFrame:
    """Return a run's values in every round, rounds x (layer or variant). A row holds until the next row's round."""
    run_rows = where(frame, run=run, metric=metric_name)
    column = "variant"
    if metric_name == TRAINED:
        column = "layer"
    round_values = run_rows.pivot(index="round", columns=column, values="value")
    round_values = round_values[list(run_rows[column].unique())]
    round_values.index = round_values.index.astype(int)
    rounds = STUDY.runs[run].federation.rounds or 0
    return round_values.reindex(range(1, rounds + 1)).ffill()


def _setting(header: Mapping[str, Any]) -> str:
    config = header["runs"][f"{DATASETS[0]}.vanilla"]["config"]
    thaw_text = ", ".join(map(str, config["options"]["unfreeze"]))
    network_name = names.network(config["model"])
    dataset_name = names.dataset(DATASETS[0])
    return (
        f"All {CLIENTS} clients train {network_name} for {dataset_name} in "
        f"{config['rounds']} rounds. They have {SAMPLES} samples each and batches of {config['batch_size']}. "
        f"Layers are unfrozen after {thaw_text} rounds."
    )


# --- the schedules (Fig. 1) ------------------------------------------------------------------------------------


def _draw_schedules(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    tables_by_algorithm = {
        algorithm: by_round(frame, f"{DATASETS[0]}.{algorithm}", TRAINED)
        for algorithm in ("vanilla", "anti")
    }
    with sheet(7.0, 4.4) as figure:
        axes = figure.subplots(2, 1)
        for ax, (algorithm, round_table) in zip(
            axes, tables_by_algorithm.items(), strict=True
        ):
            stage_table = stages(round_table)
            matrix(
                ax,
                stage_table.astype(float),
                texts=stage_table.map({True: "trains", False: "frozen"}.get),
                colours=list(SHADES.values()),
                high=1,
                vmin=0,
            )
            ax.set_title(names.title(algorithm))
        axes[-1].set_xlabel("rounds, counted from 1")
    table_rows = []
    for algorithm, round_table in tables_by_algorithm.items():
        for layer, layer_rounds in round_table.items():
            columns = {
                "algorithm": algorithm,
                "layer": layer,
                "from_round": _first(layer_rounds),
            }
            table_rows.append({**columns, "rounds": int(layer_rounds.sum())})
    *body_layers, head_layer = tables_by_algorithm["vanilla"].columns
    starts_by_algorithm = {
        algorithm: [_first(round_table[layer]) for layer in body_layers]
        for algorithm, round_table in tables_by_algorithm.items()
    }
    is_mirrored = (
        starts_by_algorithm["vanilla"]
        == starts_by_algorithm["anti"][::-1]
        == sorted(starts_by_algorithm["vanilla"])
    )
    is_head_frozen = not any(
        round_table[head_layer].any() for round_table in tables_by_algorithm.values()
    )
    order_texts = []
    for algorithm, starts in starts_by_algorithm.items():
        layer_starts = zip(body_layers, starts, strict=True)
        order_text = ", ".join(
            f"{body_layer} in round {k}" for body_layer, k in layer_starts
        )
        algorithm_title = names.title(algorithm)
        order_texts.append(f"{algorithm_title} {order_text}")
    findings = (
        Finding(
            "Vanilla unfreezes the body from the input on and Anti in the reverse order",
            "; ".join(order_texts),
            is_mirrored,
        ),
        Finding(
            "the head trains in no round before fine-tuning",
            f"{head_layer}: never" if is_head_frozen else "it does",
            is_head_frozen,
        ),
    )
    setting_text = _setting(header)
    caption = f"The layers that train in each round. {setting_text}"
    return Drawing(figure, pd.DataFrame(table_rows), caption, findings)


def stages(table: pd.DataFrame) -> pd.DataFrame:
    """Return whether each layer trains in each span of rounds between changes, layers x spans.

    Args:
        table: whether each layer trains, rounds x layers.
    """
    is_trained = table.astype(bool)
    spans = (is_trained != is_trained.shift(fill_value=False)).any(axis=1).cumsum()
    columns = {}
    for _, span in is_trained.groupby(spans):
        columns[f"{span.index[0]}-{span.index[-1]}"] = span.iloc[0]
    return pd.DataFrame(columns)


def _first(values: pd.Series) -> int:
    """Return the first training round of a layer, 0 if it never trains."""
    if values.any():
        return int(values.idxmax())
    return 0


# --- sizes of layers (Table 3) ---------------------------------------------------------------------------------


def sizes(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the parameters of every tensor and of all together, tensors x datasets."""
    parameter_rows = where(frame, metric=PARAMETERS, algorithm=ALGORITHMS[0])
    parameter_rows = parameter_rows.assign(
        dataset=parameter_rows["run"].str.partition(".")[0],
        tensor=parameter_rows["layer"] + "." + parameter_rows["variant"],
    )
    size_table = parameter_rows.pivot(
        index="tensor", columns="dataset", values="value"
    ).astype(int)
    size_table = size_table.loc[parameter_rows["tensor"].unique(), list(DATASETS)]
    size_table.loc["total"] = size_table.sum()
    return size_table


def _draw_sizes(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    published_sizes = items.published("scheduling")
    published_sizes = published_sizes[published_sizes["place"] == "Table 3"].set_index(
        "layer"
    )["value"]
    sizes_table = sizes(frame).loc[list(published_sizes.index)]
    measured_sizes = sizes_table[DATASETS[0]]
    table = sizes_table.melt(
        var_name="dataset", value_name="parameters", ignore_index=False
    )
    table = table.reset_index()[["dataset", "tensor", "parameters"]]
    table["published"] = (
        table["tensor"].map(published_sizes).where(table["dataset"] == DATASETS[0])
    )
    is_equal = measured_sizes == published_sizes
    finding = Finding(
        "the network for MNIST has the paper's number of parameters in every tensor",
        f"{sum(is_equal)} of {len(is_equal)} numbers agree, in all {measured_sizes['total']:,}",
        all(is_equal),
    )
    columns = {
        "tensor": list(published_sizes.index),
        "published": numbers(published_sizes, ",.0f"),
    }
    for dataset in DATASETS:
        columns[names.dataset(dataset)] = numbers(sizes_table[dataset], ",")
    caption = (
        "Parameters of the schedules' CNN. It grows with images and classes. The paper prints MNIST's network only. "
        "The network for CIFAR-100 would be that for Tiny-ImageNet at 32 x 32 pixels with 100 classes."
    )
    return Drawing(None, table, caption, (finding,), markdown(columns))


# --- costs (Table 4) -------------------------------------------------------------------------------------------


def totals(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per dataset and algorithm: naive and flops x 10^9, moved in GB, each also over FedAvg's."""
    table_rows = []
    for run in STUDY.runs:
        dataset, _, algorithm = run.partition(".")
        costs = by_round(frame, run, COST).sum() / 1e9
        table_rows.append(
            {"dataset": dataset, "algorithm": algorithm, **costs[list(UNITS)]}
        )
    cost_table = pd.DataFrame(table_rows)
    for kind in UNITS:
        fedavg_costs = cost_table.groupby("dataset")[kind].transform(
            "first"
        )  # FedAvg's
        cost_table[f"{kind}_share"] = cost_table[kind] / fedavg_costs
    published_costs = items.published_table("scheduling", "Table 4").iloc[:, 0]
    is_paper_network = cost_table["dataset"] == DATASETS[0]  # the paper's network
    cost_table.insert(
        2,
        "published",
        cost_table["algorithm"].map(published_costs).where(is_paper_network),
    )
    return cost_table


def _findings(table: pd.DataFrame) -> tuple[Finding, ...]:
    paper_rows = table[table["published"].notna()].set_index("algorithm")
    is_equal = [
        f"{row.naive:.2f}" == f"{row.published:.2f}" for row in paper_rows.itertuples()
    ]
    naive_costs = paper_rows["naive"].rename(names.title)
    shares = {kind: paper_rows[f"{kind}_share"] for kind in UNITS}
    texts = {}
    for kind, unit_shares in shares.items():
        titles = unit_shares.rename(lambda name: names.title(str(name))).items()
        texts[kind] = ", ".join(f"{title} {share:.3f}" for title, share in titles)
    is_cheapest = {
        kind: bool(
            unit_shares["vanilla"] < min(unit_shares["anti"], unit_shares["fedbabu"])
        )
        for kind, unit_shares in shares.items()
    }
    return (
        Finding(
            "the naive count gives the four numbers of Table 4",
            f"{sum(is_equal)} of {len(is_equal)} agree to two decimals: "
            + ", ".join(f"{title} {cost:.3f}" for title, cost in naive_costs.items()),
            all(is_equal),
        ),
        Finding(
            "by the naive count Vanilla is the cheapest",
            f"of FedAvg's: {texts['naive']}",
            is_cheapest["naive"],
        ),
        Finding(
            "in floating-point operations (forward and backward) Vanilla is the cheapest as well",
            f"of FedAvg's: {texts['flops']}; errors pass back through all that is frozen above the first layer",
            is_cheapest["flops"],
        ),
        Finding(
            "in bytes sent Vanilla is the cheapest as well",
            f"of FedAvg's: {texts['moved']}",
            is_cheapest["moved"],
        ),
    )


COUNTED = (
    "The naive count sums the trained parameters over batches. The paper calls it FLOPs. FLOPs here are counted by "
    "PyTorch for the forward and backward pass of every sample. Bytes are sent down and up. Frozen layers are not "
    "sent, because both sides know their values. The paper's Algorithm 1 sends them too and so needs as many bytes as "
    "FedBABU. Fine-tuning is not counted."
)


def _draw_costs(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    cost_table = totals(frame)
    columns = {
        "network for": list(map(names.dataset, cost_table["dataset"])),
        "algorithm": list(map(names.title, cost_table["algorithm"])),
        "published": numbers(cost_table["published"]),
        "naive, 10^9": numbers(cost_table["naive"]),
        "TFLOP": [f"{operations / 1e3:,.1f}" for operations in cost_table["flops"]],
        "GB sent": numbers(cost_table["moved"], ",.1f"),
    }
    for kind in UNITS:
        columns[f"{kind} / FedAvg's"] = numbers(cost_table[f"{kind}_share"], ".3f")
    setting_text = _setting(header)
    caption = f"Cost of a whole run relative to FedAvg's. {setting_text} {COUNTED}"
    return Drawing(None, cost_table, caption, _findings(cost_table), markdown(columns))


# --- costs by round (Fig. 7) -----------------------------------------------------------------------------------


def _draw_rounds(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    costs_by_algorithm = {
        algorithm: by_round(frame, f"{DATASETS[0]}.{algorithm}", COST)
        for algorithm in ALGORITHMS
    }
    round_costs = pd.concat(costs_by_algorithm, names=["run"]).reset_index()
    with sheet(7.2, 3.3) as figure:
        draw_steps(round_costs.assign(run=round_costs["run"].map(names.title)), figure)
    change_rows = round_costs[
        (round_costs[list(UNITS)].diff() != 0).any(axis=1) | (round_costs["round"] == 1)
    ]
    setting_text = _setting(header)
    caption = f"Cost of each round for all clients together. {setting_text} {COUNTED}"
    return Drawing(figure, change_rows, caption, _findings(totals(frame))[1:])


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
