"""The probe samples that every model sees, and the positions of a model's outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fl_core.errors import UsageError, listing
from fl_core.seeds import seed_of, torch_seeded

from ..measurement import Batch, ClientModel, Data, batches

if TYPE_CHECKING:
    from fl_core.data import FederatedData

PROBE = 512
"""Samples of a probe set, all clients together."""
LEAST = 4
"""Samples that the unbiased HSIC needs."""
POSITIONS = ("flatten", "samples", "mean")
"""What becomes of an activation's positions: features of their own, rows beside the samples, or one mean."""

Place = tuple[int, int]
"""First and last sample (exclusive) of a batch of the probe."""

_CHANNELS_LAST = (nn.Linear, nn.LayerNorm)
_ONE_DIMENSIONAL = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d)


class NoValue(Exception):
    """Raised if no value can be computed from features. The reason becomes a status."""


# --- the samples -----------------------------------------------------------------------------------------------


def probe_set(data: FederatedData, n: int = PROBE) -> Batch:
    """Return the first validation samples of every client, equally many: (x [m, ...], y [m]).

    There are about ``n`` in all, m <= n. If ``n`` does not divide evenly, the first clients give one more. A client
    with fewer gives all that it has.

    Raises:
        UsageError: there are fewer samples than clients, or a client has no validation samples.
    """
    empty = [client.name for client in data.clients if not len(client.validation.y)]
    if empty:
        raise UsageError(
            f"each client must have validation samples to compare models on; got none for {listing(empty)}. "
            "Pass a probe, or measure other metrics."
        )
    return shared_probe(
        [(client.validation.x, client.validation.y) for client in data.clients], n
    )


def shared_probe(sources: Sequence[Data], n: int = PROBE) -> Batch:
    """Return the first samples of each of several data sets, equally many, ``n`` in all.

    A set given twice counts once.

    Raises:
        UsageError: there are fewer samples than sources, or samples have different shapes.
    """
    distinct = list({id(source): source for source in sources}.values())
    if n < len(distinct):
        raise UsageError(
            f"samples of the probe must be at least one of each client; got {n} samples over {len(distinct)} clients."
        )
    shares = [
        n // len(distinct) + (k < n % len(distinct)) for k in range(len(distinct))
    ]
    return _join(
        [
            pair
            for source, share in zip(distinct, shares, strict=True)
            for pair in _first(source, share)
        ]
    )


def probe_of(
    subjects: Sequence[ClientModel], probe: Data | None, samples: int, seed: int
) -> Tensor:
    """Return the samples that all models see, read once: ``probe``, else the first of the clients' own."""
    with torch_seeded(
        seed_of(seed, "diagnose", "probe")
    ):  # a shuffling loader draws its order
        if probe is None:
            return shared_probe(
                [subject.data for subject in subjects], max(samples, len(subjects))
            )[0]
        return _join(list(batches(probe, None)))[0]


def batch_bounds(n: int, batch: int) -> list[Place]:
    """Return first and last positions of batches for the unbiased HSIC.

    A last batch that is too small joins the one before it.

    Raises:
        UsageError: the batch is too small.
    """
    if batch < LEAST:
        raise UsageError(
            f"batch must be at least {LEAST} for minibatch CKA; got {batch}."
        )
    starts = list(range(0, n, batch))
    if len(starts) > 1 and n - starts[-1] < LEAST:
        starts.pop()
    return list(zip(starts, [*starts[1:], n], strict=True)) if n else []


def check_rows(n: int, what: str, least: int = 3) -> None:
    """Refuse too few samples to compare. Two centred samples lie on a line, so any two models would be the same.

    Raises:
        NoValue: there are fewer than ``least``.
    """
    if n < least:
        raise NoValue(f"{n} {what}, at least {least} are needed")


def _first(source: Data, count: int) -> Iterator[Batch]:
    for x, y in batches(source, count):
        yield x[:count], y[:count]
        count -= len(x)
        if count <= 0:
            return


def _join(pairs: Sequence[Batch]) -> Batch:
    shapes = sorted({tuple(x.shape[1:]) for x, _ in pairs})
    if len(shapes) > 1:
        raise UsageError(
            f"shapes of probe samples must be equal; got {shapes[0]} and {shapes[1]}."
        )
    x, y = zip(*pairs, strict=True)
    return torch.cat([part.to(x[0].device) for part in x]), torch.cat(
        [part.to(y[0].device) for part in y]
    )


# --- what the models put out -----------------------------------------------------------------------------------


def along_one(module: nn.Module) -> bool:
    """Return True if a module convolves in one dimension, so that its output with three axes is [n, d, positions]."""
    return any(isinstance(part, _ONE_DIMENSIONAL) for part in module.modules())


def by_position(module: nn.Module, output: Tensor) -> Tensor:
    """Return an output as [n, *positions, d], features last; without positions [n, d].

    With three axes the features are the last one (tokens). After a one-dimensional convolution or batch norm they are
    the second one. With more axes they are the second one (maps). After a Linear or LayerNorm they are the last one.
    """
    if output.ndim < 3:
        return output.reshape(len(output), -1)
    if output.ndim == 3:
        second = along_one(module)
    else:
        second = not isinstance(module, _CHANNELS_LAST)
    return output.movedim(1, -1) if second else output


def arrange_positions(module: nn.Module, output: Tensor, positions: str) -> Tensor:
    """Return an output with its positions treated: [n, d], or with ``"samples"`` [n, p, d] if it has positions."""
    if positions == "flatten" or output.ndim < 3:
        return output.flatten(1) if output.ndim > 1 else output[:, None]
    rows = by_position(module, output).flatten(1, -2)
    return (
        rows if positions == "samples" else rows.mean(1)
    )  # in half precision summed in float32, and rounded again


def check_features(total: Tensor, offset: Tensor, eps: float) -> Tensor:
    """Return the features' sum of squares around their mean; refuse values not finite or constant.

    Values within rounding of constant count as constant.

    Args:
        total: the sum of squares.
        offset: number of rows times the squared length of what was subtracted from each of them.
        eps: resolution of the features' type.
    """
    if not bool(torch.isfinite(total)):
        raise NoValue("not finite")
    if not bool(total > 0) or bool(total <= (8 * eps) ** 2 * offset):
        raise NoValue("constant over the probe")
    return total
