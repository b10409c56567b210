"""Plant layers that differ, and count which end of each metric's scale shows them: the test of ``differs``.

The clients of a federation label random inputs by a network of their own. All have the same one, except for the weights
of one layer, which each client draws anew in part. Training starts from the common network. So clients differ at that
layer alone, and it is known. Both networks are ones that the benchmark of rules lacks.

A row of ``planted.csv`` has one network, seed and metric. It counts the layers at which the metric's curve is higher,
and lower, if clients differ there than if they differ elsewhere: the mean over federations with another planted layer.
A seed is right if this holds at most layers. A metric declares an end of its scale that is right in 8 of 10 seeds of
each network (:func:`ends`). Rows that exist are not made again: ``python -m figures.decision.planted``.
"""

from __future__ import annotations

import copy
import csv
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
import tyro
from torch import Tensor, nn

import fedlayers as fl
from diagnostics.curve import curve_of, layers_in
from diagnostics.metrics.base import METRICS
from fl_core.errors import RunError, UsageError
from fl_core.progress import say
from fl_core.seeds import seed_of, torch_generator, torch_seeded

ROWS = Path(__file__).with_name("planted.csv")
COLUMNS = ("network", "seed", "metric", "higher", "lower")
SEEDS, RIGHT = 10, 8
"""Seeds of each network, and how many of them must be right."""
CLIENTS, SAMPLES, GAIN = 4, 160, 2.5
"""Clients, samples of each, and the factor of the common network's default weights, so that labels vary."""


class Network(NamedTuple):
    """A network, the shape of a sample, and the places of its layers with weights."""

    build: Callable[[], nn.Sequential]
    shape: tuple[int, ...]
    places: tuple[int, ...]


def dense() -> nn.Sequential:
    """Return four dense layers with smooth activations."""
    return nn.Sequential(
        nn.Linear(12, 16), nn.Tanh(),
        nn.Linear(16, 16), nn.Tanh(),
        nn.Linear(16, 16), nn.Tanh(),
        nn.Linear(16, 4),
    )  # fmt: skip


def sequence() -> nn.Sequential:
    """Return two convolutions over a sequence and two dense layers."""
    return nn.Sequential(
        nn.Conv1d(2, 6, 3), nn.GELU(),
        nn.Conv1d(6, 6, 3), nn.GELU(),
        nn.Flatten(),
        nn.Linear(36, 12), nn.GELU(),
        nn.Linear(12, 4),
    )  # fmt: skip


NETWORKS = {
    "dense": Network(dense, (12,), (0, 2, 4, 6)),
    "sequence": Network(sequence, (2, 10), (0, 2, 5, 7)),
}


def federation(
    network_name: str, seed: int, planted: int
) -> tuple[nn.Sequential, dict[str, tuple[Tensor, Tensor]]]:
    """Return the common network, and the samples of clients that differ at one layer.

    Args:
        planted: the number of the layer, from 0. The other layers' weights are common.
    """
    network = NETWORKS[network_name]
    with torch_seeded(seed_of(seed, "common network", network_name)):
        common_network = network.build()
    samples = {}
    with torch.no_grad():
        for layer_place in network.places:
            common_network[layer_place].get_parameter("weight").mul_(GAIN)
        for client in range(CLIENTS):
            generator = torch_generator(seed, "planted layer", client)
            client_network = copy.deepcopy(common_network)
            weight = client_network[network.places[planted]].get_parameter("weight")
            random_weight = weight.std() * torch.randn(
                weight.shape, generator=generator
            )
            weight.copy_((weight + random_weight) / 2**0.5)
            x = torch.randn(SAMPLES, *network.shape, generator=generator)
            output = client_network(x)
            y = ((output - output.mean(0)) / output.std(0)).argmax(1)
            samples[f"client {client + 1}"] = x, y
    return common_network, samples


def curves(
    network_name: str, seed: int, planted: int, metrics: Sequence[str]
) -> dict[str, list[float]]:
    """Return the curve [4] of each metric after a round of FedAvg, without those that have none."""
    common, samples = federation(network_name, seed, planted)
    curve_by_metric = {}
    with TemporaryDirectory() as folder:
        result = fl.run(
            data=samples,
            model=common,
            algorithm="fedavg",
            rounds=1,
            epochs=5,
            lr=3e-3,
            batch_size=16,
            patience=0,
            seed=seed,
            out=folder,
            progress=False,
        )
        for is_shared in (False, True):
            readable_metrics = [
                metric_name
                for metric_name in metrics
                if METRICS[metric_name].shared == is_shared
            ]
            if not readable_metrics:
                continue
            report = fl.diagnose(result, metrics=readable_metrics, progress=False)
            layers, pairs = layers_in(report.header), report.header["pairs"]
            for curve_metric in readable_metrics:
                try:
                    curve = curve_of(layers, report.table, curve_metric, None, pairs)
                except (RunError, UsageError):  # of the whole network, or no value
                    continue
                curve_by_metric[curve_metric] = curve.combined
    return curve_by_metric


def counts(
    network_name: str, seed: int, metrics: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """Return at how many layers a metric's own value is higher, and lower, where clients differ."""
    layers = range(len(NETWORKS[network_name].places))
    curves_by_layer = [curves(network_name, seed, layer, metrics) for layer in layers]
    counts_by_metric = {}
    for metric_name in metrics:
        if not all(metric_name in network_curves for network_curves in curves_by_layer):
            continue
        curve_matrix = np.array(
            [network_curves[metric_name] for network_curves in curves_by_layer]
        )
        own_values = curve_matrix.diagonal()
        elsewhere_means = (curve_matrix.sum(0) - own_values) / (len(layers) - 1)
        higher, lower = (
            int((own_values > elsewhere_means).sum()),
            int((own_values < elsewhere_means).sum()),
        )
        kind = METRICS[metric_name]
        if kind.pairs and not kind.distance:  # a curve has 1 - value of a similarity
            higher, lower = lower, higher
        counts_by_metric[metric_name] = higher, lower
    return counts_by_metric


def ends(rows: pd.DataFrame) -> dict[str, str]:
    """Return the end of each metric's scale at which clients differ: ``high``, ``low`` or empty."""
    end_by_metric = {}
    for metric_name, metric_rows in rows.groupby("metric", sort=False):
        end_by_metric[str(metric_name)] = ""
        for column, scale_end in (("higher", "high"), ("lower", "low")):
            right_counts = (
                (metric_rows[column] > 2).groupby(metric_rows["network"]).sum()
            )
            if len(right_counts) == len(NETWORKS) and (right_counts >= RIGHT).all():
                end_by_metric[str(metric_name)] = scale_end
    return end_by_metric


def read_rows() -> pd.DataFrame:
    """Return the stored counts."""
    return pd.read_csv(ROWS)


def main() -> None:
    """Measure the networks and seeds without rows."""
    torch.set_num_threads(1)
    if not ROWS.exists():
        ROWS.write_text(",".join(COLUMNS) + "\n")
    rows = read_rows()
    done_keys = {*zip(rows["network"], rows["seed"], strict=True)}
    metrics = [
        network_name for network_name in METRICS if network_name != "clients_differ"
    ]
    for seed, network_name in itertools.product(range(SEEDS), NETWORKS):
        if (network_name, seed) in done_keys:
            continue
        counts_by_metric = counts(network_name, seed, metrics)
        with ROWS.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows(
                (network_name, seed, metric_name, *n)
                for metric_name, n in counts_by_metric.items()
            )
        say(f"{network_name}, seed {seed}: {len(counts_by_metric)} metrics")


if __name__ == "__main__":
    tyro.cli(main)
