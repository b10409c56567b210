"""Layer scheduling before any training: sizes of layers (Table 3), and three ways to count costs (Table 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from figures import items, names
from figures.items import Drawing, Finding, Item
from figures.page import markdown
from figures.recipe import labels
from fl_core import rows, runner
from fl_core.config import RunConfig
from fl_core.costs.layers import cost_steps

NAME = "scheduling.costs"
COST, PARAMETERS = "round_cost", "parameters"
CLIENTS, SAMPLES = 100, 500
"""Table 4 counts clients with so many training samples each, all of whom take part in every round."""
UNFREEZE = (0, 100, 200)
ALGORITHMS = ("fedavg", "fedbabu", "vanilla", "anti")
DATASETS = ("mnist", "cifar10", "tiny_imagenet32")
"""Whose images and classes give the network its sizes; the paper counts the first only."""
UNITS = {"naive": "scalar x batch", "flops": "FLOP", "moved": "byte"}

BASE = RunConfig(
    partition="iid", clients=CLIENTS, max_samples=CLIENTS * SAMPLES, model="scheduling_cnn",
    rounds=300, epochs=1, batch_size=10, lr=0.005, optimizer="sgd",
    keep_optimizer=False,
)  # fmt: skip


def _runs() -> dict[str, RunConfig]:
    runs = {}
    for dataset in DATASETS:
        for name in ALGORITHMS:
            options: dict[str, Any] = (
                {"unfreeze": UNFREEZE} if name in ("vanilla", "anti") else {}
            )
            runs[f"{dataset}.{name}"] = BASE.with_keys(
                dataset=dataset, algorithm=name, options=options
            )
    return runs


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record tensor sizes and, at each round that changes it, what a round costs."""
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
            what: dict[str, Any] = {
                "layer": layer.name,
                "variant": name.rpartition(".")[2],
                "algorithm": named["algorithm"],
            }
            lines.append(
                rows.row(PARAMETERS, sizes[name], n_params=sizes[name], **what)
            )
    table = cost_steps({run: paper}).set_index("round")
    for kind, unit in UNITS.items():
        values = table[kind]
        for done, value in values[values != values.shift()].items():
            lines.append(
                rows.row(COST, value, round=int(done), variant=kind, unit=unit, **named)
            )
    return rows.frame(lines)


def total_costs(frame: pd.DataFrame, rounds: int) -> pd.Series:
    """Return each cost of a whole run: the value of a row holds until the next row's round."""
    table = frame[frame["metric"] == COST].pivot(
        index="round", columns="variant", values="value"
    )
    table.index = table.index.astype(int)
    return table.reindex(range(1, rounds + 1)).ffill().sum()


# --- sizes of layers (Table 3) ---------------------------------------------------------------------------------


def sizes(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the parameters of every tensor and of all together, tensors x datasets."""
    own = frame[(frame["metric"] == PARAMETERS) & (frame["algorithm"] == ALGORITHMS[0])]
    own = own.assign(
        dataset=own["run"].str.partition(".")[0],
        tensor=own["layer"] + "." + own["variant"],
    )
    table = own.pivot(index="tensor", columns="dataset", values="value").astype(int)
    table = table.loc[own["tensor"].unique(), list(DATASETS)]
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
    same = mine == printed
    finding = Finding(
        "the network for MNIST has the paper's number of parameters in every tensor",
        f"{sum(same)} of {len(same)} numbers agree, in all {mine['total']:,}",
        all(same),
    )
    cells = {
        "tensor": list(printed.index),
        "published": [f"{value:,.0f}" for value in printed],
    }
    for name in DATASETS:
        cells[names.dataset(name)] = [f"{count:,}" for count in wide[name]]
    caption = (
        "Parameters of the schedules' CNN. It grows with images and classes. The paper prints MNIST's network only. "
        "The network for CIFAR-100 would be that for Tiny-ImageNet at 32 x 32 pixels with 100 classes."
    )
    return Drawing(None, table, caption, (finding,), markdown(cells))


# --- costs (Table 4) -------------------------------------------------------------------------------------------


def totals(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per dataset and algorithm: naive and flops x 10^9, moved in GB, each also over FedAvg's."""
    lines = []
    for run, config in STUDY.runs.items():
        dataset, _, algorithm = run.partition(".")
        own = frame[frame["run"] == run]
        costs = total_costs(own, config.federation.rounds or 0) / 1e9
        lines.append({"dataset": dataset, "algorithm": algorithm, **costs[list(UNITS)]})
    table = pd.DataFrame(lines)
    for kind in UNITS:
        first = table.groupby("dataset")[kind].transform("first")  # FedAvg's
        table[f"{kind}_share"] = table[kind] / first
    known = items.published_table("scheduling", "Table 4").iloc[:, 0]
    counted = table["dataset"] == DATASETS[0]  # the paper's network
    table.insert(2, "published", table["algorithm"].map(known).where(counted))
    return table


def _findings(table: pd.DataFrame) -> tuple[Finding, ...]:
    paper = table[table["published"].notna()].set_index("algorithm")
    agree = [f"{row.naive:.2f}" == f"{row.published:.2f}" for row in paper.itertuples()]
    share = {kind: paper[f"{kind}_share"] for kind in UNITS}
    told = {
        kind: ", ".join(
            f"{names.title(str(name))} {value:.3f}" for name, value in values.items()
        )
        for kind, values in share.items()
    }
    cheap = {
        kind: bool(values["vanilla"] < min(values["anti"], values["fedbabu"]))
        for kind, values in share.items()
    }
    return (
        Finding(
            "the naive count gives the four numbers of Table 4",
            f"{sum(agree)} of {len(agree)} agree to two decimals: "
            + ", ".join(
                f"{names.title(row.Index)} {row.naive:.3f}"
                for row in paper.itertuples()
            ),
            all(agree),
        ),
        Finding(
            "by the naive count Vanilla is the cheapest",
            f"of FedAvg's: {told['naive']}",
            cheap["naive"],
        ),
        Finding(
            "in floating-point operations (forward and backward) Vanilla is the cheapest as well",
            f"of FedAvg's: {told['flops']}; errors pass back through all that is frozen above the first layer",
            cheap["flops"],
        ),
        Finding(
            "in bytes sent Vanilla is the cheapest as well",
            f"of FedAvg's: {told['moved']}",
            cheap["moved"],
        ),
    )


def _draw_costs(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    table = totals(frame)
    cells = {
        "network for": list(map(names.dataset, table["dataset"])),
        "algorithm": list(map(names.title, table["algorithm"])),
        "published": [
            "–" if pd.isna(value) else f"{value:.2f}" for value in table["published"]
        ],
        "naive, 10^9": [f"{value:.2f}" for value in table["naive"]],
        "TFLOP": [f"{value / 1e3:,.1f}" for value in table["flops"]],
        "GB sent": [f"{value:,.1f}" for value in table["moved"]],
    }
    for kind in UNITS:
        cells[f"{kind} / FedAvg's"] = [
            f"{value:.3f}" for value in table[f"{kind}_share"]
        ]
    config = header["runs"][f"{DATASETS[0]}.vanilla"]["config"]
    thaws = ", ".join(map(str, config["options"]["unfreeze"]))
    caption = (
        f"Cost of a whole run relative to FedAvg's. All {CLIENTS} clients train {names.network(config['model'])} for "
        f"{names.dataset(DATASETS[0])} in {config['rounds']} rounds. They have {SAMPLES} samples each and batches of "
        f"{config['batch_size']}. Layers are unfrozen after {thaws} rounds. "
        "The naive count sums the trained parameters over batches. The paper calls it FLOPs. FLOPs here are counted "
        "by PyTorch for the forward and backward pass of every sample. Bytes are sent down and up. Frozen layers are "
        "not sent, because both sides know their values. The paper's Algorithm 1 sends them too and so needs as many "
        "bytes as FedBABU. Fine-tuning is not counted."
    )
    return Drawing(None, table, caption, _findings(table), markdown(cells))


STUDY = items.register(Item(
    NAME, "What schedules cost, counted before any training", _runs(), seeds=1,
    budget="a minute; nothing is trained", measure=_measure,
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
