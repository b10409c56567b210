"""Layer scheduling before any training: the schedules, sizes of layers, and three ways to count costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from diagnostics.plots.costs import cost_steps as draw_steps
from diagnostics.plots.drawing import COLOURS, style
from figures import items, names
from figures.items import Drawing, Finding, Item, View
from figures.page import markdown
from figures.recipe import labels
from fl_core import rows, runner
from fl_core.algorithms.base import Round
from fl_core.config import RunConfig
from fl_core.costs.layers import cost_steps

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
    """Record tensor sizes and, at each round that changes them, what trains and what a round costs."""
    paper = replace(
        task, task_info=replace(task.task_info, n_train=(SAMPLES,) * CLIENTS)
    )
    named = {**labels(task), "estimator": "each round from here on"}
    lines: list[rows.Row] = []
    for layer, kind, count in _sizes(task):
        lines.append(
            rows.row(
                PARAMETERS,
                count,
                layer=layer,
                variant=kind,
                n_params=count,
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
        moving = {
            name for phase in algorithm.phases(Round(index), 0) for name in phase.train
        }
        if moving != before:
            for part in task.layers:
                on = float(not moving.isdisjoint(part.tensors))
                lines.append(
                    rows.row(TRAINED, on, round=index + 1, layer=part.name, **named)
                )
        before = moving
    return rows.frame(lines)


def _sizes(task: runner.Task) -> Iterator[tuple[str, str, int]]:
    """Layer, kind of tensor (weight or bias), and number of entries."""
    sizes = {
        name: parameter.numel() for name, parameter in task.model.named_parameters()
    }
    for layer in task.layers:
        for name in layer.parameters:
            yield layer.name, name.rpartition(".")[2], sizes[name]


# --- rows back to rounds ---------------------------------------------------------------------------------------


def by_round(frame: pd.DataFrame, rounds: int) -> pd.DataFrame:
    """Values of one run's rows in every round, rounds x (layer or variant): each holds until the next."""
    column = "layer" if (frame["layer"] != "").all() else "variant"
    table = frame.pivot(index="round", columns=column, values="value")[
        list(frame[column].unique())
    ]
    table.index = table.index.astype(int)
    return table.reindex(range(1, rounds + 1)).ffill()


def costs(header: Mapping[str, Any], frame: pd.DataFrame, dataset: str) -> pd.DataFrame:
    """Return the costs of one dataset's network. The column run names the algorithm."""
    parts = []
    for name in ALGORITHMS:
        run = f"{dataset}.{name}"
        own = frame[(frame["run"] == run) & (frame["metric"] == COST)]
        parts.append(
            by_round(own, header["runs"][run]["config"]["rounds"])
            .reset_index()
            .assign(run=name)
        )
    return pd.concat(parts, ignore_index=True)


def _setting(header: Mapping[str, Any], dataset: str) -> str:
    config = header["runs"][f"{dataset}.vanilla"]["config"]
    thaws = ", ".join(map(str, config["options"]["unfreeze"]))
    return (
        f"All {CLIENTS} clients train {names.network(config['model'])} for {names.dataset(dataset)} in "
        f"{config['rounds']} rounds. They have {SAMPLES} samples each and batches of {config['batch_size']}. "
        f"Layers are unfrozen after {thaws} rounds."
    )


def total_parameters(frame: pd.DataFrame, dataset: str) -> int:
    """Parameters of one dataset's network."""
    own = frame[
        (frame["run"] == f"{dataset}.{ALGORITHMS[0]}") & (frame["metric"] == PARAMETERS)
    ]
    return int(own["value"].sum())


# --- the schedules (Fig. 1) ------------------------------------------------------------------------------------


def _draw_schedules(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    dataset = DATASETS[0]
    lines, tables = [], {}
    with style():
        figure = plt.figure(figsize=(7.0, 4.4), layout="constrained")
        axes = figure.subplots(2, 1, sharex=True)
        for ax, name in zip(axes, ("vanilla", "anti"), strict=True):
            run = f"{dataset}.{name}"
            own = frame[(frame["run"] == run) & (frame["metric"] == TRAINED)]
            tables[name] = by_round(own, header["runs"][run]["config"]["rounds"])
            _spans(ax, tables[name])
            ax.set_title(names.title(name))
            lines += [
                {
                    "algorithm": name,
                    "layer": layer,
                    "from_round": _first(values),
                    "rounds": int(values.sum()),
                }
                for layer, values in tables[name].items()
            ]
        axes[-1].set_xlabel("round, counted from 1")
        keys = [Patch(facecolor=colour, label=text) for text, colour in SHADES.items()]
        figure.legend(handles=keys, loc="outside upper center", ncols=2, fontsize=8)
    body = list(tables["vanilla"].columns[:-1])
    thaws = {
        name: [_first(table[layer]) for layer in body] for name, table in tables.items()
    }
    mirrored = thaws["vanilla"] == thaws["anti"][::-1] == sorted(thaws["vanilla"])
    never = not any(table.iloc[:, -1].any() for table in tables.values())
    findings = (
        Finding(
            "Vanilla unfreezes the body from the input on and Anti in the reverse order",
            "; ".join(
                f"{names.title(name)} {', '.join(f'{part} in round {k}' for part, k in zip(body, starts, strict=True))}"
                for name, starts in thaws.items()
            ),
            mirrored,
        ),
        Finding(
            "the head trains in no round before fine-tuning",
            f"{tables['anti'].columns[-1]}: never" if never else "it does",
            never,
        ),
    )
    caption = f"The layers that train in each round. {_setting(header, dataset)}"
    return Drawing(figure, pd.DataFrame(lines), caption, findings)


def _spans(ax: Axes, table: pd.DataFrame) -> None:
    """Draw the training rounds of each layer, with the first one written at its bar."""
    still, moving = SHADES.values()
    for k, (_, values) in enumerate(table.items()):
        trains = values.astype(bool)
        ax.barh(k, len(trains), left=0.5, height=0.8, color=still)
        for _, part in trains[trains].groupby((~trains).cumsum()):
            ax.barh(k, len(part), left=part.index[0] - 0.5, height=0.8, color=moving)
            ax.text(
                part.index[0] + 0.01 * len(trains),
                k,
                f"from {part.index[0]}",
                va="center",
                color="w",
                fontsize=8,
            )
    ax.set_yticks(range(table.shape[1]), list(table.columns), fontsize=8)
    ax.set(
        ylim=(table.shape[1] - 0.5, -0.5), xlim=(0.5, len(table) + 0.5), ylabel="layer"
    )
    ax.grid(False)


def _first(values: pd.Series) -> int:
    """The first training round of a layer, 0 if it never trains."""
    return int(values.idxmax()) if values.any() else 0


# --- sizes of layers (Table 3) ---------------------------------------------------------------------------------


def _draw_sizes(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    printed = items.published("scheduling")
    printed = printed[printed["place"] == "Table 3"].set_index("layer")["value"]
    lines = []
    for dataset in DATASETS:
        sizes = frame[
            (frame["run"] == f"{dataset}.{ALGORITHMS[0]}")
            & (frame["metric"] == PARAMETERS)
        ]
        counted = {
            f"{row.layer}.{row.variant}": int(row.value) for row in sizes.itertuples()
        }
        counted["total"] = sum(counted.values())
        lines += [
            {
                "dataset": dataset,
                "tensor": name,
                "parameters": count,
                "published": printed.get(name) if dataset == "mnist" else None,
            }
            for name, count in counted.items()
        ]
    table = pd.DataFrame(lines)
    wide = table.pivot(index="tensor", columns="dataset", values="parameters").loc[
        list(printed.index), list(DATASETS)
    ]
    with style():
        figure = plt.figure(figsize=(6.0, 3.1), layout="constrained")
        ax = figure.subplots()
        left = pd.Series(0, index=wide.columns)
        for layer in dict.fromkeys(name.partition(".")[0] for name in wide.index[:-1]):
            share = wide[wide.index.str.startswith(f"{layer}.")].sum()
            ax.barh(range(len(share)), share, left=left, label=layer)
            left = left + share
        for k, total in enumerate(wide.loc["total"]):
            ax.text(1.01 * total, k, f"{total:,}", va="center", fontsize=7.5)
        ax.set_yticks(range(len(DATASETS)), list(map(names.dataset, DATASETS)))
        ax.set(
            xlim=(0, 1.22 * left.max()),
            xlabel="parameters",
            ylim=(len(DATASETS) - 0.4, -0.6),
        )
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        ax.grid(axis="y", visible=False)
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4)
    mine = wide[DATASETS[0]]
    same = {name: mine[name] == value for name, value in printed.items()}
    findings = (
        Finding(
            "the network for MNIST has the paper's number of parameters in every tensor",
            f"{sum(same.values())} of {len(same)} numbers agree, in all {mine['total']:,}",
            all(same.values()),
        ),
    )
    cells = {
        "tensor": list(printed.index),
        "published": [f"{value:,.0f}" for value in printed],
    }
    text = markdown(
        {
            **cells,
            **{
                names.dataset(name): [f"{count:,}" for count in wide[name]]
                for name in DATASETS
            },
        }
    )
    caption = (
        "Parameters of the schedules' CNN. It grows with images and classes. The paper prints MNIST's network only. "
        "The network for CIFAR-100 would be that for Tiny-ImageNet at 32 x 32 pixels with 100 classes."
    )
    return Drawing(figure, table, caption, findings, text)


# --- costs (Table 4, Fig. 7) -----------------------------------------------------------------------------------


def _totals(header: Mapping[str, Any], frame: pd.DataFrame) -> pd.DataFrame:
    """A row per dataset and algorithm: naive and flops x 10^9, moved in GB, each also relative to FedAvg's."""
    lines = []
    for dataset in DATASETS:
        sums = (
            costs(header, frame, dataset).groupby("run", sort=False)[list(UNITS)].sum()
            / 1e9
        )
        shares = sums / sums.loc["fedavg"]
        lines.append(
            sums.join(shares.add_suffix("_share"))
            .rename_axis("algorithm")
            .reset_index()
            .assign(dataset=dataset)
        )
    table = pd.concat(lines, ignore_index=True)
    known = items.published_table("scheduling", "Table 4").iloc[:, 0]
    counted = table["dataset"] == DATASETS[0]  # the paper's network
    table["published"] = table["algorithm"].map(known).where(counted)
    return table[
        [
            "dataset",
            "algorithm",
            "published",
            *(c for c in table if c.partition("_")[0] in UNITS),
        ]
    ]


def _findings(table: pd.DataFrame) -> tuple[Finding, ...]:
    paper = table[table["published"].notna()].set_index("algorithm")
    agree = [f"{row.naive:.2f}" == f"{row.published:.2f}" for row in paper.itertuples()]
    share = {kind: paper[f"{kind}_share"] for kind in UNITS}

    def told(kind: str) -> str:
        return ", ".join(
            f"{names.title(str(name))} {value:.3f}"
            for name, value in share[kind].items()
        )

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
            f"of FedAvg's: {told('naive')}",
            cheap["naive"],
        ),
        Finding(
            "in floating-point operations (forward and backward) Vanilla is the cheapest as well",
            f"of FedAvg's: {told('flops')}; errors pass back through all that is frozen above the first layer",
            cheap["flops"],
        ),
        Finding(
            "in bytes sent Vanilla is the cheapest as well",
            f"of FedAvg's: {told('moved')}",
            cheap["moved"],
        ),
    )


def _page(table: pd.DataFrame) -> str:
    return markdown(
        {
            "network for": list(map(names.dataset, table["dataset"])),
            "algorithm": list(map(names.title, table["algorithm"])),
            "published": [
                "–" if pd.isna(value) else f"{value:.2f}"
                for value in table["published"]
            ],
            "naive, 10^9": [f"{value:.2f}" for value in table["naive"]],
            "TFLOP": [f"{value / 1e3:,.1f}" for value in table["flops"]],
            "GB sent": [f"{value:,.1f}" for value in table["moved"]],
            **{
                f"{kind} / FedAvg's": [
                    f"{value:.3f}" for value in table[f"{kind}_share"]
                ]
                for kind in UNITS
            },
        }
    )


COUNTED = (
    "The naive count sums the trained parameters over batches. The paper calls it FLOPs. FLOPs here are counted by "
    "PyTorch for the forward and backward pass of every sample. Bytes are sent down and up. Frozen layers are not "
    "sent, because both sides know their values. The paper's Algorithm 1 sends them too and so needs as many bytes as "
    "FedBABU. Fine-tuning is not counted."
)


def _draw_costs(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    table = _totals(header, frame)
    titles = {
        "naive": "naive count",
        "flops": "FLOPs, forward and backward",
        "moved": "bytes sent",
    }
    with style():
        figure = plt.figure(figsize=(7.2, 3.1), layout="constrained")
        for ax, (kind, title) in zip(
            figure.subplots(1, 3, sharey=True), titles.items(), strict=True
        ):
            for k, dataset in enumerate(DATASETS):
                own = table[table["dataset"] == dataset]
                ax.bar(
                    [x + 0.27 * (k - 1) for x in range(len(own))],
                    own[f"{kind}_share"],
                    0.25,
                    label=names.dataset(dataset),
                )
            ax.set_xticks(
                range(len(ALGORITHMS)), list(map(names.title, ALGORITHMS)), fontsize=7.5
            )
            ax.set_title(title)
            ax.grid(axis="x", visible=False)
            ax.axhline(1, color="0.5", linewidth=0.8, linestyle="--")
        figure.axes[0].set_ylabel("cost / FedAvg's")
        figure.legend(
            *ax.get_legend_handles_labels(),
            loc="outside upper center",
            ncols=3,
            title="network for",
        )
    caption = f"Cost of a whole run relative to FedAvg's. {_setting(header, DATASETS[0])} {COUNTED}"
    return Drawing(figure, table, caption, _findings(table), _page(table))


def _draw_rounds(header: Mapping[str, Any], frame: pd.DataFrame) -> Drawing:
    table = costs(header, frame, DATASETS[0])
    with style():
        figure = plt.figure(figsize=(7.2, 3.3), layout="constrained")
        draw_steps(table.assign(run=table["run"].map(names.title)), figure)
    changes = table[
        table.groupby("run")["round"].transform(
            lambda r: r.isin(_changed(table.loc[r.index]))
        )
    ]
    totals = _totals(header, frame)
    caption = f"Cost of each round for all clients together. {_setting(header, DATASETS[0])} {COUNTED}"
    return Drawing(figure, changes, caption, _findings(totals)[1:])


def _changed(table: pd.DataFrame) -> pd.Series:
    """The rounds of one run whose cost differs from the round before."""
    values = table[list(UNITS)]
    return table.loc[(values != values.shift()).any(axis=1), "round"]


STUDY = items.register(Item(
    NAME, "What schedules cost, counted before any training", _runs(), seeds=1,
    budget="a minute; nothing is trained", measure=_measure,
))  # fmt: skip
FIG1 = items.register(
    View("scheduling.fig1", "Which layers train in which round", NAME, _draw_schedules)
)
FIG7 = items.register(
    View(
        "scheduling.fig7",
        "What a round costs: naive count, FLOPs and bytes",
        NAME,
        _draw_rounds,
    )
)
TABLE3 = items.register(
    View("scheduling.table3", "Parameters of each layer", NAME, _draw_sizes)
)
TABLE4 = items.register(
    View(
        "scheduling.table4",
        "What a run costs: naive count, FLOPs and bytes",
        NAME,
        _draw_costs,
    )
)
