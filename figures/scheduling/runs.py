"""Layer scheduling's runs (Jang and Choi 2024), at a scale for two cores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedlayers.decision.comparison import main_model
from figures import items, names
from figures.differences import Difference
from figures.items import Item
from figures.page import seeds_behind, seeds_in_words, span
from figures.recipe import PLAIN_SGD, labels, tested, trained, where
from figures.verdicts import LEAD, Check, JointVerdict, judged, little_learned
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.run import runner

NAME = "scheduling.runs"
HEADS = "scheduling.heads"
"""The study of Sec. 5.4."""
THAWING = "scheduling.thawing"
"""The study of Sec. 5.3."""
WHOLE = "scheduling.full"
"""The study of the paper's size."""
HUNDRED = "scheduling.hundred"
"""The study of Table 2's CIFAR-100."""
EARLY = "_early"
"""The end of a run's name whose layers are unfrozen twice as early."""
ACCURACY = "accuracy"
POOLED, MEAN = "pooled", "mean"
"""Accuracy over all clients' test samples together, which the paper's base code prints; and the mean over clients."""
SUMS = {"bytes_down": "byte", "bytes_up": "byte", "flops": "FLOP", "steps": ""}
SCHEDULES = ("vanilla", "anti")
TUNED = ("local_adaptation", "fedbabu", *SCHEDULES)
"""Scored after fine-tuning; ``local_adaptation``, FedAvg fine-tuned alike, is not in the paper."""
METHODS = (
    "fedavg",
    "local_adaptation",
    "fedper",
    "lg_fedavg",
    "fedrep",
    "fedrod",
    "fedbabu",
    *SCHEDULES,
)
IN_TABLE2 = tuple(method for method in METHODS if method != "local_adaptation")
"""The methods of the paper's Table 2."""
OTHERS = tuple(method for method in IN_TABLE2 if method not in SCHEDULES)
BELOW = ("fedavg", "fedper", "fedrep", "fedrod")
"""Methods that schedules are laid over in Sec. 5.4. LG-FedAvg shares its last layer only: there is nothing to thaw."""
WRAPPED = "cifar10"
RIVAL = "fedper"
"""The method that is compared with Anti in more seeds, for one can refute what is said of all."""
RIVALS = ("fedbabu", RIVAL)
"""The methods that have runs in the setting of Sec. 5.3. On FedBABU the schedules build."""
MANY_SEEDS = {"mnist": 5, "cifar10": 5}
"""Seeds of the quick runs on the paper's own images."""
CHANCE = 1 / 100, 1 / 200
"""Accuracy of guessing on Tiny-ImageNet: here it has half of the paper's classes."""
NAMES = {
    name: names.DATASETS[name]
    for name in ("mnist", "cifar10", "cifar100", "tiny_imagenet")
}
TITLES = {**NAMES, "cifar100": f"Tiny-ImageNet in the place of {NAMES['cifar100']}"}
"""Names of the images behind each dataset of Table 2."""


@dataclass(frozen=True)
class Column:
    """A dataset of Table 2.

    Attributes:
        dataset: registered name of what is trained on.
        pool: images that are dealt.
        at: numbers of rounds after which accuracies are reported; the last is the length of the runs.
        unfreeze: when each of the three layers of the body is unfrozen.
        every: rounds between evaluations; divides all of ``at``.
        papers: the paper's numbers of rounds.
    """

    dataset: str
    pool: int
    at: tuple[int, ...]
    unfreeze: tuple[int, ...]
    every: int
    papers: tuple[int, ...]


UNFREEZE = (0, 100, 200)
"""The paper's."""
SIZES = {
    "mnist": Column("mnist", 4000, (20, 40, 60), (0, 20, 40), 5, (100, 200, 300)),
    "cifar10": Column("cifar10", 4000, (20, 40, 60), (0, 20, 40), 5, (100, 200, 300)),
    "cifar100": Column("tiny_imagenet32", 4000, (50, 100, 150), (0, 10, 20), 10, (500, 1000, 1500)),
    "tiny_imagenet": Column("tiny_imagenet32", 5000, (300, 500, 1000), UNFREEZE, 25, (300, 500, 1000)),
}  # fmt: skip
"""Rounds are a fifth of the paper's for the first two, a tenth in CIFAR-100's place, for thawing and for the end alike.
The last has the paper's rounds."""
HEADS_COLUMN = Column("cifar10", 4000, (100, 200, 300), UNFREEZE, 25, (100, 200, 300))
"""Sec. 5.4 has the paper's rounds, for the differences still changed after a fifth of them."""
FULL_COLUMN = replace(HEADS_COLUMN, pool=50_000)
THAWED = Column("tiny_imagenet32", 10_000, (250, 275, 300), UNFREEZE, 25, (300,))
"""Sec. 5.3 has the paper's rounds. Twice the images of Table 2 give its clients more to learn from."""
HUNDRED_COLUMN = Column("cifar100", 10_000, (300,), UNFREEZE, 25, (500,))
"""The images and rounds of Sec. 5.3. The paper's first number of rounds is 500."""
COLUMNS = {
    NAME: SIZES,
    HEADS: {WRAPPED: HEADS_COLUMN},
    THAWING: {"tiny_imagenet": THAWED},
    WHOLE: {WRAPPED: FULL_COLUMN},
    HUNDRED: {"cifar100": HUNDRED_COLUMN},
}
"""The datasets of each study."""

FULL = RunConfig(
    partition="capped_dirichlet", alpha=0.1, clients=100, participation=0.1,
    model="scheduling_cnn", epochs=1, batch_size=10, lr=0.005, **PLAIN_SGD,
)  # fmt: skip
"""The paper's federation and local training.

It leaves open local epochs (1 here), fine-tuning (10), optimiser and the share kept for testing."""
SMALL = FULL.with_keys(clients=20, participation=0.2, lr=0.02)
"""A fifth of the clients and four times the rate, for fewer and shorter rounds; at 0.05 Vanilla diverges on MNIST."""
FINETUNE = 5
"""Epochs."""


def recipes(columns: Mapping[str, Column], base: RunConfig) -> dict[str, RunConfig]:
    """Return every run of Table 2 by name: DATASET.METHOD."""
    runs = {}
    for dataset, column in columns.items():
        for method in METHODS:
            runs[f"{dataset}.{method}"] = _run(base, column, method)
    return runs


def over_thawing(dataset: str, column: Column, base: RunConfig) -> dict[str, RunConfig]:
    """Return the runs of Sec. 5.3: DATASET.SCHEDULE, twice as early DATASET.SCHEDULE_early, and two other methods."""
    early_column = replace(
        column, unfreeze=tuple(start // 2 for start in column.unfreeze)
    )
    runs = {}
    for method in SCHEDULES:
        runs[f"{dataset}.{method}"] = _run(base, column, method)
        runs[f"{dataset}.{method}{EARLY}"] = _run(base, early_column, method)
    for method in RIVALS:
        runs[f"{dataset}.{method}"] = _run(base, column, method)
    return runs


def _run(base: RunConfig, column: Column, method: str) -> RunConfig:
    """Return a method on a column's data. Fine-tuned models are scored at the column's numbers of rounds."""
    options: dict[str, Any]
    if method in TUNED:
        options = {"finetune_epochs": FINETUNE, "finetune_at": column.at[:-1]}
    else:
        options = {}
    if method in SCHEDULES:
        options |= {"unfreeze": column.unfreeze}
    return _sized(base, column).with_keys(algorithm=method, options=options)


def _sized(base: RunConfig, column: Column) -> RunConfig:
    """Return the base with a column's data and rounds."""
    return base.with_keys(
        dataset=column.dataset,
        max_samples=column.pool,
        rounds=column.at[-1],
        eval_every=column.every,
        checkpoint_every=column.at[-1],
    )


def over_heads(column: Column, base: RunConfig) -> dict[str, RunConfig]:
    """Return the runs of Sec. 5.4 by name: DATASET.METHOD, and under Anti DATASET.anti_METHOD."""
    shared_config, runs = _sized(base, column), {}
    for method in BELOW:
        runs[f"{WRAPPED}.{method}"] = shared_config.with_keys(algorithm=method)
        options = {"base": method, "unfreeze": column.unfreeze}
        runs[f"{WRAPPED}.anti_{method}"] = shared_config.with_keys(
            algorithm="anti", options=options
        )
    return runs


def plain(*datasets: str, methods: Sequence[str] = METHODS) -> list[str]:
    """Return the runs that compare the methods on these datasets, without the variants of Secs. 5.3 and 5.4."""
    runs = []
    for dataset in datasets:
        runs += [f"{dataset}.{method}" for method in methods]
    return runs


# --- rows ------------------------------------------------------------------------------------------------------


def _measure(task: runner.Task, run: str, folder: Path) -> pd.DataFrame:
    """Record all clients' mean accuracy at every evaluation, each client's at the end, and the run's cost.

    A run of the paper's size is kept while it trains, and goes on after an interruption.
    """
    label_columns, is_full_size = (
        labels(task),
        task.config.data.clients == FULL.data.clients,
    )
    run_folder = None
    if is_full_size:
        run_folder = folder / f"{run}-{label_columns['seed']}.run"
    _, frame = trained(task, run_folder)
    accuracy_rows = tested(frame)
    accuracy_rows = accuracy_rows[accuracy_rows["model"] != "local"]
    table_rows: list[rows.Row] = []
    for (round_number, model), group_rows in accuracy_rows.groupby(["round", "model"]):
        sample_counts = group_rows["n_samples"].astype(float)
        columns: dict[str, Any] = {
            "round": int(round_number),
            "model": model,
            "split": "test",
            "n_samples": int(sample_counts.sum()),
        }
        for variant, accuracy in (
            (POOLED, np.average(group_rows["value"], weights=sample_counts)),
            (MEAN, group_rows["value"].mean()),
        ):
            table_rows.append(
                rows.row(
                    ACCURACY, accuracy, variant=variant, **columns, **label_columns
                )
            )
    for metric_name, unit in SUMS.items():
        metric_rows = frame[frame["metric"] == metric_name]
        for variant, group_rows in metric_rows.groupby("variant"):
            columns = {
                "variant": variant,
                "unit": unit,
                "estimator": "sum over rounds and clients",
            }
            table_rows.append(
                rows.row(
                    metric_name, group_rows["value"].sum(), **columns, **label_columns
                )
            )
    last_rows = accuracy_rows[accuracy_rows["round"] == task.config.federation.rounds]
    return pd.concat(
        [rows.frame(table_rows), main_model(last_rows, "algorithm")], ignore_index=True
    )


def scores(frame: pd.DataFrame, variant: str = POOLED) -> pd.DataFrame:
    """Return the reported accuracy of all clients together, (run, round) x seeds."""
    accuracy_rows = where(frame, metric=ACCURACY, variant=variant, client="")
    main_rows = main_model(accuracy_rows, "run", "seed", "round").astype(
        {"seed": int, "round": int}
    )
    return (
        main_rows.set_index(["run", "round", "seed"])["value"]
        .unstack("seed")
        .sort_index(axis=1)
    )


def finished(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the reported accuracy as :func:`scores`; of a run that is fine-tuned only the rounds at which it was."""
    accuracy_rows = where(frame, metric=ACCURACY, variant=POOLED, client="")
    return scores(main_model(accuracy_rows, "run"))


def learnt(frame: pd.DataFrame, dataset: str, methods: Sequence[str]) -> pd.DataFrame:
    """Return rows of accuracy by round without fine-tuned models, to be drawn with one algorithm per method."""
    accuracy_rows = where(frame, metric=ACCURACY, variant=POOLED, client="")
    frames = []
    for method in methods:
        method_rows = accuracy_rows[accuracy_rows["run"] == f"{dataset}.{method}"]
        if method in TUNED:
            method_rows = method_rows[method_rows["model"] == "global"]
        else:
            method_rows = main_model(method_rows, "run")
        frames.append(method_rows.assign(algorithm=method))
    return pd.concat(frames, ignore_index=True)


# --- what the figures say of their runs ------------------------------------------------------------------------


def columns(header: Mapping[str, Any]) -> Mapping[str, Column]:
    """Return the datasets of a study."""
    return COLUMNS[header["item"]]


def setting(header: Mapping[str, Any], frame: pd.DataFrame, *datasets: str) -> str:
    """Return text on the sizes of these datasets' runs, and how they differ from the paper's."""
    runs = [run for run in header["runs"] if run.partition(".")[0] in datasets]
    sentences = [
        _sizes(
            header,
            frame,
            dataset,
            next(run for run in runs if run.startswith(f"{dataset}.")),
        )
        for dataset in datasets
    ]
    config = header["runs"][runs[0]]["config"]
    clients_per_round = max(1, int(config["participation"] * config["clients"] + 1e-9))
    seeds_text = seeds_in_words(seeds_behind(header, runs))
    common_text = (
        f"Each run has {config['clients']} clients by Dirichlet({config['alpha']:g}), {clients_per_round} of "
        "them a round. "
        f"Batches have {config['batch_size']} samples and lr is {config['lr']:g}. Fine-tuning has {FINETUNE} epochs. "
        f"There are {seeds_text}."
    )
    paper_text = f"The paper has {FULL.data.clients} clients, 10 a round and lr {FULL.training.lr:g}."
    sentences_text = " ".join(sentences)
    return f"{sentences_text} {common_text} {paper_text}"


def _sizes(
    header: Mapping[str, Any], frame: pd.DataFrame, dataset: str, run: str
) -> str:
    """Describe one dataset's images, rounds and thawing."""
    config, column = header["runs"][run]["config"], columns(header)[dataset]
    sample_counts = frame.loc[
        frame["run"].str.startswith(f"{dataset}.") & (frame["client"] != ""), "n_train"
    ].dropna()
    sizes_text = (
        f"{sample_counts.min()} to {sample_counts.max()} training samples a client and "
    )
    dataset_name = names.dataset(config["dataset"])
    if has_images(config["dataset"], dataset):
        title = dataset_name
    else:
        title = f"{NAMES[dataset]}, in its place {dataset_name}"
    unfreeze_text = listed(column.unfreeze)
    usual_text = listed(UNFREEZE)
    return (
        f"{title}: {sizes_text}{column.at[-1]} rounds. Layers are unfrozen at rounds {unfreeze_text}. "
        f"The paper has {column.papers[-1]} rounds and unfreezes at {usual_text}."
    )


def listed(numbers: Sequence[int]) -> str:
    """Return numbers as text on one line."""
    return ", ".join(map(str, numbers))


def judge(differences: Mapping[str, Difference], check: Check = LEAD) -> JointVerdict:
    """Judge a claim by its parts. They are named after their methods or datasets."""
    return judged(
        {
            names.titles(part_name.partition(".")[2] or part_name): gap
            for part_name, gap in differences.items()
        },
        check,
    )


def has_images(trained_on: str, dataset: str) -> bool:
    """Return whether runs were trained on the dataset that the paper names, whatever its resolution."""
    return trained_on.startswith(dataset)


def own_images(header: Mapping[str, Any]) -> list[str]:
    """Return the datasets whose runs have the paper's own images."""
    return [
        dataset
        for dataset, column in columns(header).items()
        if column.dataset == dataset
    ]


def incomparable(
    header: Mapping[str, Any],
    values: pd.DataFrame,
    dataset: str,
    methods: Sequence[str] = IN_TABLE2,
) -> str:
    """Return evidence that a dataset's runs are not comparable with the paper's, with both levels.

    Other data are evidence. With the paper's data at another resolution it is a method that has learned little.

    Args:
        values: from :func:`scores`.
        methods: the methods that are compared.
    """
    trained_dataset, last_round = (
        columns(header)[dataset].dataset,
        columns(header)[dataset].at[-1],
    )
    if trained_dataset == dataset:
        return ""
    published_rows = items.published("scheduling")
    published_rows = published_rows[
        (published_rows["place"] == "Table 2")
        & (published_rows["dataset"] == dataset)
        & published_rows["method"].isin(methods)
    ]
    paper_rounds = columns(header)[dataset].papers[-1]
    published_final = published_rows[
        published_rows["setting"] == f"{paper_rounds} rounds"
    ].set_index("method")["value"]
    means = 100 * values.mean(axis=1)
    if has_images(trained_dataset, dataset):
        return little_learned({
            names.title(method): (
                means.get((f"{dataset}.{method}", last_round), math.nan) / 100, published_final[method] / 100,
            )
            for method in methods
        }, CHANCE)  # fmt: skip
    measured_scores = [
        means[f"{dataset}.{method}", last_round]
        for method in methods
        if (f"{dataset}.{method}", last_round) in means.index
    ]
    levels_text = ""
    if measured_scores:
        measured_span = span(map(round, measured_scores))
        published_span = span(map(round, published_final))
        levels_text = f", {measured_span} % where the paper has {published_span}"
    dataset_name = names.dataset(trained_dataset)
    return f"images of {dataset_name}{levels_text}"


RUNS = recipes(SIZES, SMALL)
STUDY = items.register(Item(
    NAME, "Layer scheduling: every run behind its tables and figures", RUNS, seeds=3,
    own_seeds={run: MANY_SEEDS[dataset] for run in RUNS if (dataset := run.partition(".")[0]) in MANY_SEEDS},
    budget="about nine hours of one core; a run takes 15 to 100 seconds, on Tiny-ImageNet ten minutes",
    measure=_measure,
))  # fmt: skip
OVER = items.register(Item(
    HEADS, "Layer scheduling over methods that train their head", over_heads(HEADS_COLUMN, SMALL), seeds=10,
    own_seeds={f"{WRAPPED}.{prefix}{RIVAL}": 30 for prefix in ("", "anti_")},
    budget="about four hours of one core; a run takes one to two minutes", measure=_measure,
))  # fmt: skip
THAW = items.register(Item(
    THAWING, "Layer scheduling with layers unfrozen earlier and later",
    over_thawing("tiny_imagenet", THAWED, SMALL), seeds=12,
    budget="about seven and a half hours of one core; a run takes four to nine minutes", measure=_measure,
))  # fmt: skip
items.register(Item(
    WHOLE, f"FedBABU and both schedules at the paper's size, {NAMES[WRAPPED]}",
    {
        f"{WRAPPED}.{method}": _run(FULL, FULL_COLUMN, method).with_keys(checkpoint_every=25)
        for method in ("fedbabu", "anti", "vanilla")
    },
    seeds=3, budget="about four hours of one core; an interrupted run goes on", measure=_measure,
))  # fmt: skip
items.register(Item(
    HUNDRED, f"Both schedules and three methods, {NAMES['cifar100']}",
    {
        f"cifar100.{method}": _run(SMALL, HUNDRED_COLUMN, method)
        for method in ("fedavg", RIVAL, "fedbabu", "vanilla", "anti")
    },
    seeds=3, budget="some 90 minutes of one core; a run takes 4 to 7 minutes", measure=_measure,
))  # fmt: skip
