"""Benchmarks J1 (Hessian trace), J2 (CKA) and J3 (gradient metrics) against the packages in use for them."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import io
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.pairs import PAIRS, Measured, compare, judged, memory, peak_from_now
from diagnostics.curvature.trace import TraceResult, hessian_trace
from diagnostics.gradients import one_pass
from diagnostics.measurement import ClientModel, Measurement
from diagnostics.metrics.base import METRICS
from diagnostics.metrics.of_features import Cka, cka
from diagnostics.metrics.of_gradients import GradVariance
from diagnostics.representation.features import collect
from diagnostics.sensitivity import Sensitivity
from fl_core.data import DATASETS
from fl_core.data.loading import recipe
from fl_core.layers import Layer, layers_of
from fl_core.seeds import torch_generator
from fl_core.training import losses

LOSS = losses.build("cross_entropy")
SAMPLES = 1000
BATCH = 100
CLIENTS = 10
ERROR = 0.05  # the relative standard error at which estimators are compared


@cache
def images() -> tuple[Tensor, Tensor]:
    """Return 20,000 images of Fashion-MNIST, normalised float tensors [n, 1, 28, 28], and their labels [n]."""
    defaults = recipe("fashion_mnist")
    raw_source = DATASETS["fashion_mnist"].open(None, False)
    source = replace(raw_source, mean=defaults.mean, std=defaults.std)
    row_numbers = torch.arange(20_000).numpy()
    return source.tensor(row_numbers), torch.from_numpy(source.y[row_numbers])


def network(activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return the CNN with 582,026 parameters: 2 conv + 2 fc."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5), activation(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), activation(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(1024, 512), activation(), nn.Linear(512, 10)),
    )


def trained(model: nn.Module, steps: int = 150, client: int | None = None) -> nn.Module:
    """Return the network after some steps of SGD on data of a client with three of the ten classes."""
    x, y = images()
    allowed_rows = torch.arange(SAMPLES, len(y))
    if client is not None:
        allowed_rows = allowed_rows[((y[allowed_rows] - client) % 10) < 3]
    generator = torch_generator(0, "benchmark", -1 if client is None else client)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        sample_rows = allowed_rows[
            torch.randint(len(allowed_rows), (64,), generator=generator)
        ]
        optimizer.zero_grad()
        F.cross_entropy(model(x[sample_rows]), y[sample_rows]).backward()
        optimizer.step()
    return model.eval()


def held_out(n: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Return samples to measure metrics on; no model was trained on them."""
    x, y = images()
    return x[:n].clone(), y[:n].clone()


def ten_clients() -> tuple[
    list[nn.Module], tuple[Tensor, Tensor], tuple[Layer, ...], list[ClientModel]
]:
    """Return ten clients' models, their common samples, the layers and the clients as metrics take them."""
    models = [
        trained(copy.deepcopy(trained(network())), 20, client=client)
        for client in range(CLIENTS)
    ]
    x, y = held_out()
    client_models = [
        ClientModel(f"client_{client}", model, (x, y), len(y))
        for client, model in enumerate(models)
    ]
    return models, (x, y), layers_of(models[0], x[:2]), client_models


def plain_pass(model: nn.Module, x: Tensor, y: Tensor, batch: int = BATCH) -> None:
    """Do one forward and backward pass over the data and nothing else."""
    parameters = list(model.parameters())
    for start in range(0, len(y), batch):
        torch.autograd.grad(
            F.cross_entropy(model(x[start : start + batch]), y[start : start + batch]),
            parameters,
        )


# --- J1 --------------------------------------------------------------------------------------------------------------


def traces(pairs: int = PAIRS) -> list[Measured]:
    """Time the Hessian trace of each layer on 1,000 samples."""
    torch.set_num_threads(1)
    model, (x, y) = trained(network()), held_out()
    layers = layers_of(model, x[:2])

    def trace(**options: Any) -> list[TraceResult]:
        return hessian_trace(model, (x, y), layers, loss=LOSS, batch=BATCH, **options)

    def floor() -> None:
        plain_pass(model, x, y)

    baseline = f"one forward and backward pass of the data, batches of {BATCH}"
    rows = [
        compare("J1", "exact trace", trace, baseline, floor, at_most=5, pairs=pairs),
        compare(
            "J1",
            "two probes",
            lambda: trace(estimator="activation", probes=2),
            baseline,
            floor,
            at_most=10,
            pairs=pairs,
        ),
    ]
    probes = _probes_needed(trace(backend="pyhessian", probes=64))
    print(f"PyHessian's probes for a standard error of {ERROR:.0%}: {probes}")
    rows.append(_against_pyhessian(trace, layers, probes, pairs))
    rows.extend(_against_backpack(trace, model, x, y, pairs))
    return rows


def _probes_needed(traces: list[TraceResult]) -> dict[str, int]:
    """Return each layer's number of probes for the relative standard error :data:`ERROR`, from the spread of traces."""
    drawn_count = int(traces[0].estimator.split("=")[1].rstrip(")"))
    return {
        result.layer: max(
            2, math.ceil(drawn_count * (result.stderr / result.trace / ERROR) ** 2)
        )
        for result in traces
    }


def _against_pyhessian(
    trace: Callable[..., list[TraceResult]],
    layers: tuple[Layer, ...],
    probes: dict[str, int],
    pairs: int,
) -> Measured:
    """Compare with PyHessian's time: its setup, and probes per layer extrapolated to the number needed."""
    ratios, own_seconds, pyhessian_seconds = [], [], []
    model, (x, y) = trained(network()), held_out()
    for _ in range(pairs):
        start = time.perf_counter()
        trace()
        own_seconds.append(time.perf_counter() - start)
        total_seconds = 0.0
        for layer in layers:
            seconds_by_count = {}
            for probe_count in (2, 6):
                start = time.perf_counter()
                hessian_trace(
                    model,
                    (x, y),
                    [layer],
                    loss=LOSS,
                    batch=len(y),
                    backend="pyhessian",
                    probes=probe_count,
                )
                seconds_by_count[probe_count] = time.perf_counter() - start
            probe_seconds = max(0.0, seconds_by_count[6] - seconds_by_count[2]) / 4
            total_seconds += seconds_by_count[2] + probe_seconds * max(
                0, probes[layer.name] - 2
            )
        pyhessian_seconds.append(total_seconds)
        ratios.append(total_seconds / own_seconds[-1])
    counts_text = "/".join(map(str, probes.values()))
    baseline = f"PyHessian 0.1 at {ERROR:.0%} standard error, {counts_text} probes, from 2 and 6"
    return judged(
        "J1",
        "exact trace",
        baseline,
        ratios,
        at_least=30,
        seconds=statistics.median(own_seconds),
        baseline_seconds=statistics.median(pyhessian_seconds),
    )


def _against_backpack(
    trace: Callable[..., list[TraceResult]],
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    pairs: int,
) -> list[Measured]:
    try:
        from backpack import backpack, extend
        from backpack.extensions import DiagGGNExact
    except ImportError:
        print(
            "J1: BackPACK is not installed (pip install backpack-for-pytorch), so it is left out"
        )
        return []
    extended_model = network()
    extended_model.load_state_dict(model.state_dict())
    extended_model, loss = (
        extend(extended_model),
        extend(nn.CrossEntropyLoss(reduction="sum")),
    )

    def diagonal() -> list[float]:
        sums = [0.0] * len(list(extended_model.parameters()))
        for start in range(0, len(y), BATCH):
            extended_model.zero_grad()
            with backpack(DiagGGNExact()):
                loss(
                    extended_model(x[start : start + BATCH]), y[start : start + BATCH]
                ).backward()
            sums = [
                t + float(p.diag_ggn_exact.sum())
                for t, p in zip(sums, extended_model.parameters(), strict=True)
            ]
        return [t / len(y) for t in sums]

    parameter_sums = diagonal()
    for result, value in zip(
        trace(),
        (a + b for a, b in zip(parameter_sums[::2], parameter_sums[1::2], strict=True)),
        strict=True,
    ):
        if not math.isclose(result.trace, value, rel_tol=1e-3):
            raise RuntimeError(
                f"BackPACK has {value} for layer {result.layer}, fedlayers {result.trace}"
            )
    baseline = f"BackPACK 1.7.1, DiagGGNExact, batches of {BATCH}"
    return [
        compare("J1", "exact trace", trace, baseline, diagonal, at_least=3, pairs=pairs)
    ]


def peak_memory(repeats: int = 6) -> list[Measured]:
    """Return rise of the peak memory by the trace, each in a fresh process, against PyHessian's."""
    program = "from benchmarks.measurements import peak; peak({!r})"

    def peaks(package: str) -> list[float]:
        command = [sys.executable, "-c", program.format(package)]
        return [
            float(
                subprocess.run(
                    command, capture_output=True, text=True, check=True
                ).stdout
            )
            for _ in range(repeats)
        ]

    own_peaks, pyhessian_peaks = peaks("fedlayers"), peaks("pyhessian")
    ratios = [b / a for a, b in zip(own_peaks, pyhessian_peaks, strict=True)]
    pyhessian_median = statistics.median(pyhessian_peaks)
    baseline = f"PyHessian 0.1, all samples at once, {pyhessian_median:.0f} MB"
    own_median = statistics.median(own_peaks)
    title = f"exact trace, {own_median:.0f} MB"
    return [
        judged("J1", title, baseline, ratios, at_least=1.5, unit="peak extra memory")
    ]


def peak(package: str) -> None:
    """Print how many MB a trace needs at its peak, above what the process had before.

    Args:
        package: ``fedlayers`` or ``pyhessian``.
    """
    torch.set_num_threads(1)
    model, (x, y) = trained(network(), steps=5), held_out()
    layers = layers_of(model, x[:2])
    if package == "pyhessian":
        import pyhessian  # noqa: F401  (its import is no part of the measurement)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # small freed blocks would stay otherwise
    megabytes_before = peak_from_now()
    options: dict[str, Any] = {"batch": BATCH}
    if package == "pyhessian":
        options = {"batch": len(y), "backend": "pyhessian", "probes": 2}
    hessian_trace(model, (x, y), layers, loss=LOSS, **options)
    print(memory("VmHWM") - megabytes_before)


def coverage(repeats: int = 1000) -> list[Measured]:
    """Return by layer the share of the estimate's 95 % intervals that contain the exact trace."""
    torch.set_num_threads(1)
    model, (x, y) = trained(network()), held_out()
    layers = layers_of(model, x[:2])
    exact_traces = {
        result.layer: result.trace
        for result in hessian_trace(model, (x, y), layers, loss=LOSS, batch=BATCH)
    }
    rows = []
    for probes in (2, 8):
        hit_counts = dict.fromkeys(exact_traces, 0)
        for seed in range(repeats):
            for estimate in hessian_trace(
                model,
                (x, y),
                layers,
                loss=LOSS,
                batch=BATCH,
                estimator="activation",
                probes=probes,
                seed=seed,
            ):
                hit_counts[estimate.layer] += (
                    abs(estimate.trace - exact_traces[estimate.layer])
                    <= 1.96 * estimate.stderr
                )
        for layer, hit_count in hit_counts.items():
            rows.append(covered(hit_count, repeats, probes, layer))
            print(rows[-1])
    return rows


def covered(count: int, repeats: int, probes: int, layer: str) -> Measured:
    """Return the share of seeds whose interval holds the exact trace; both its ends must meet the target."""
    share = count / repeats
    half_width = 1.96 * math.sqrt(share * (1 - share) / repeats)
    low, high = share - half_width, share + half_width
    target, holds = "0.93 to 0.97", low >= 0.93 and high <= 0.97
    title = f"{probes} probes, layer {layer}"
    baseline = f"exact trace, {repeats} seeds"
    return Measured(
        "J1",
        title,
        baseline,
        share,
        low,
        high,
        target,
        "yes" if holds else "no",
        unit="coverage",
    )


# --- J2 --------------------------------------------------------------------------------------------------------------


def similarities(pairs: int = PAIRS) -> list[Measured]:
    """Time linear CKA between ten clients: 45 pairs, 4 layers, 1,000 samples."""
    from torch_cka import CKA

    torch.set_num_threads(1)
    models, (x, y), layers, client_models = ten_clients()
    layer_paths = [layer.output for layer in layers]
    n_pairs = CLIENTS * (CLIENTS - 1) // 2
    rows = []
    for batch in (100, 1000):

        def ours(batch: int = batch) -> list[Any]:
            return cka(
                Measurement(client_models, layers, batch=batch),
                Cka(probe=(x, y), estimator="minibatch"),
            )

        def one_pair(batch: int = batch) -> Any:
            loader = torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(x, y), batch_size=batch
            )
            comparison = CKA(
                models[0], models[1], "a", "b", layer_paths, layer_paths, device="cpu"
            )
            comparison.compare(loader)
            return comparison.export()["CKA"]

        baseline = (
            f"torch-cka 0.21, one pair of clients, times {n_pairs}, batches of {batch}"
        )
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
            least_speedup = 14 if batch == 100 else 20
            rows.append(
                compare(
                    "J2",
                    "45 pairs",
                    ours,
                    baseline,
                    one_pair,
                    at_least=least_speedup,
                    pairs=pairs,
                    scale=n_pairs,
                )
            )
        rows.append(_error(ours(), models, layer_paths, x, batch))
    return rows


def _error(
    similarities: list[Any],
    models: list[nn.Module],
    paths: list[str],
    x: Tensor,
    batch: int,
) -> Measured:
    """Return the largest difference from plain float64 arithmetic on the same features."""
    grams = []
    for model in models:
        data = x, torch.zeros(len(x), dtype=torch.long)
        layer_features = collect(model, paths, data, batch=batch).x
        layer_batches = [layer_features[path].double().split(batch) for path in paths]
        batches = [
            list(batch_values) for batch_values in zip(*layer_batches, strict=True)
        ]
        grams.append(
            [
                [features @ features.T for features in batch_features]
                for batch_features in batches
            ]
        )
    expected = {}
    for a, b in combinations(range(len(models)), 2):
        for index, path in enumerate(paths):
            sums = [
                sum(
                    _hsic(grams_a[index], grams_b[index])
                    for grams_a, grams_b in zip(grams[i], grams[j], strict=True)
                )
                for i, j in ((a, b), (a, a), (b, b))
            ]
            expected[f"client_{a}", f"client_{b}", path] = float(
                sums[0] / (sums[1] * sums[2]) ** 0.5
            )
    largest_error = max(
        abs(row["value"] - expected[row["client"], row["client_b"], row["layer"]])
        for row in similarities
    )
    meets_target = "yes" if largest_error <= 1e-8 else "no"
    return Measured(
        "J2",
        f"error, batches of {batch}",
        "float64",
        largest_error,
        largest_error,
        largest_error,
        "<= 1e-08",
        meets_target,
        unit="error",
    )


def _hsic(k: Tensor, m: Tensor) -> Tensor:
    """Return the unbiased HSIC of two Gram matrices [n, n] (Song et al. 2012, Eq. 5)."""
    n = len(k)
    k, m = k - k.diag().diag(), m - m.diag().diag()
    cross = (
        (k * m).sum()
        + k.sum() * m.sum() / ((n - 1) * (n - 2))
        - 2 * k.sum(0) @ m.sum(0) / (n - 2)
    )
    return cross / (n * (n - 3))


# --- J3 --------------------------------------------------------------------------------------------------------------


def gradient_metrics(pairs: int = PAIRS) -> list[Measured]:
    """Time gradient variance and federation sensitivity of ten clients with 1,000 samples each."""
    torch.set_num_threads(1)
    models, (x, y), layers, client_models = ten_clients()

    def floor() -> None:
        for model in models:
            plain_pass(model, x, y, 250)

    measurement = Measurement(client_models, layers, LOSS, batch=250)

    def measured(*metrics: Any) -> Callable[[], object]:
        return lambda: one_pass(measurement, list(metrics))

    baseline = "ten forward and backward passes, batches of 250"
    metric_options = (GradVariance(), Sensitivity())
    return [
        compare(
            "J3",
            "variance, sensitivity",
            measured(*metric_options),
            baseline,
            floor,
            at_most=1.10,
            pairs=pairs,
        ),
        compare(
            "J3",
            "variance, sensitivity, noise",
            lambda: (measured(*metric_options)(), METRICS["grad_noise"](measurement)),
            baseline,
            floor,
            at_most=2.2,
            pairs=pairs,
        ),
    ]


JOBS = {
    "j1": traces,
    "j1-memory": peak_memory,
    "j1-coverage": coverage,
    "j2": similarities,
    "j3": gradient_metrics,
}
