"""The jobs that ``scale`` measures: growing sizes, each with the exponent of growth by theory."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.training import TINY, federation, rounds
from diagnostics.measure import diagnose
from fl_core.config import RunConfig
from fl_core.data import FederatedData
from fl_core.models import build
from fl_core.records.store import Run
from fl_core.run import runner

Work = Callable[[], object]
BATCH = 16
FEATURES = 64
WIDTH = 128


@dataclass(frozen=True)
class Curve:
    """One kind of work at several sizes.

    Attributes:
        title: what is done, and what grows.
        axis: what the sizes count.
        sizes: ascending.
        job: makes the work of one size, ready to be timed; what it needs is closed when the context ends.
        time, memory: the exponents in theory, of CPU time and of the memory that the work itself takes.
        why: where they come from.
    """

    title: str
    axis: str
    sizes: tuple[int, ...]
    job: Callable[[int, ExitStack], Work]
    time: float
    memory: float
    why: str


# --- training --------------------------------------------------------------------------------------------------


def _round(config: RunConfig, data: FederatedData, stack: ExitStack) -> Work:
    return stack.enter_context(
        rounds(config.with_keys(participation=1.0, batch_size=BATCH), data)
    ).step


def _widths(parameters: int) -> tuple[int, int]:
    """Return the two equal widths w of hidden layers with about this many parameters, 64 w + w^2 + 10 w."""
    end_sizes = FEATURES + 10
    return (round((math.sqrt(end_sizes**2 + 4 * parameters) - end_sizes) / 2),) * 2


def _mlp(sizes: Sequence[int]) -> RunConfig:
    return TINY.with_keys(model="mlp", model_options={"sizes": tuple(sizes)})


def _small(clients: int = 4) -> FederatedData:
    return federation(clients, BATCH, (10,), classes=5)


def _clients(count: int, stack: ExitStack) -> Work:
    return _round(TINY, _small(count), stack)


def _parameters(count: int, stack: ExitStack) -> Work:
    return _round(
        _mlp(_widths(count)).with_keys(stack="off"),
        federation(2, BATCH, (FEATURES,)),
        stack,
    )


def _depth(layers: int, stack: ExitStack) -> Work:
    return _round(
        _mlp([WIDTH] * (layers - 1)).with_keys(stack="off"),
        federation(4, 4 * BATCH, (FEATURES,)),
        stack,
    )


# --- diagnoses -------------------------------------------------------------------------------------------------


def _diagnosis(
    metrics: Sequence[str],
    clients: int = 2,
    samples: int = 256,
    layers: int = 4,
    probe: int = 256,
    classes: int = 10,
) -> Work:
    shape, generator = (FEATURES,), torch.Generator().manual_seed(0)
    models = [
        build("mlp", shape, classes, options={"sizes": (WIDTH,) * (layers - 1)}, seed=k)
        for k in range(clients)
    ]
    x = torch.randn(max(samples, probe), *shape, generator=generator)
    y = torch.arange(len(x)) % classes
    data, probe_data = (x[:samples], y[:samples]), (x[:probe], y[:probe])
    return lambda: diagnose(
        models, data, metrics, progress=False, options={"probe": probe_data}
    )


# --- stored runs -----------------------------------------------------------------------------------------------


@contextmanager
def _stored(count: int, interval: int = 1) -> Iterator[Path]:
    """Yield the folder of a run that stopped after ``count`` rounds, one before its last.

    Args:
        interval: rounds between checkpoints, and between evaluations.
    """
    config = TINY.with_keys(
        batch_size=BATCH,
        rounds=count + 1,
        eval_every=interval,
        checkpoint_every=interval,
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        runner.run(config, out, data=_small(), progress=False, until=count)
        yield out


def _run(count: int, stack: ExitStack) -> Work:
    return lambda: stack.enter_context(_stored(count, interval=100))


def _verify(count: int, stack: ExitStack) -> Work:
    return Run(stack.enter_context(_stored(count))).verify


def _resume(count: int, stack: ExitStack) -> Work:
    out, data = stack.enter_context(_stored(count)), _small()
    return lambda: runner.resume(out, data=data, progress=False)


CURVES: dict[str, Curve] = {
    "round-clients": Curve(
        "a round against clients", "clients, all in the round", (10, 100, 1_000, 10_000), _clients, 1, 0,
        "one step each; replies are mixed as they come, so that none is kept",
    ),
    "round-parameters": Curve(
        "a round against parameters", "parameters", (500_000, 5_000_000, 20_000_000, 86_000_000, 100_000_000),
        _parameters, 1, 1,
        "two clients, one step each of an MLP; every parameter is read and written, and kept some times over",
    ),
    "round-depth": Curve(
        "a round against depth", f"layers of width {WIDTH}", (4, 8, 16, 32, 64), _depth, 1, 1,
        "a layer more is as many operations, parameters and activations more",
    ),
    "gradients-samples": Curve(
        "gradient metrics against samples", "samples of a client", (500, 2_000, 8_000, 32_000),
        lambda n, stack: _diagnosis(("grad_variance", "federation_sensitivity"), samples=n), 1, 0,
        "a pass over the samples, a batch at a time",
    ),
    "trace-samples": Curve(
        "exact Hessian trace against samples", "samples of a client", (500, 2_000, 8_000, 32_000),
        lambda n, stack: _diagnosis(("hessian_trace",), samples=n), 1, 0,
        "as many passes as classes, a batch at a time",
    ),
    "trace-classes": Curve(
        "exact Hessian trace against classes", "classes", (10, 50, 250, 500),
        lambda n, stack: _diagnosis(("hessian_trace",), classes=n), 1, 1,
        "as many passes as classes",
    ),
    "cka-clients": Curve(
        "CKA against clients", "clients, all pairs", (12, 25, 50, 100),
        lambda n, stack: _diagnosis(("cka",), clients=n), 2, 1,
        "a pass and a summary for each client, an inner product and a row for each pair",
    ),
    "cka-samples": Curve(
        "CKA against samples", "samples of the probe", (250, 500, 1_000, 2_000, 4_000),
        lambda n, stack: _diagnosis(("cka",), clients=4, probe=n), 1, 1,
        "features are kept where they are fewer than samples, as here, and Gram matrices (exponent 2) elsewhere",
    ),
    "diagnosis-layers": Curve(
        "the default diagnosis against layers", f"layers of width {WIDTH}", (4, 8, 16, 32, 64),
        lambda n, stack: _diagnosis(("grad_variance", "hessian_trace", "cka", "federation_sensitivity"), layers=n),
        1, 1, "a layer more is as many operations and values more",
    ),
    "run-rounds": Curve(
        "a run against rounds", "rounds, each hundredth with a checkpoint", (100, 1_000, 5_000), _run, 1, 0,
        "a round costs the same, however many went before; rows and checkpoints are written as they come",
    ),
    "verify-rounds": Curve(
        "verify against rounds", "rounds with a checkpoint each", (8, 32, 128, 512), _verify, 1, 0,
        "every byte of every checkpoint is read, one after the other",
    ),
    "resume-rounds": Curve(
        "resume and one more round against rounds", "rounds with a checkpoint each", (8, 32, 128, 512), _resume,
        1, 1,
        "every checkpoint's manifest is read, for it says which files are the run's, and the rows are written anew",
    ),
}  # fmt: skip
