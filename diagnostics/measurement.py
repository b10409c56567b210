"""The input of every metric: clients, their data, their outputs, and settings shared by all metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from fl_core.errors import OneOf, UsageError, at_least, check_value, listing
from fl_core.layers import Layer
from fl_core.models.adapter import Adapter
from fl_core.models.building import normalises_batches
from fl_core.rows import Row, row
from fl_core.seeds import seed_of, torch_seeded
from fl_core.training import losses
from fl_core.training.losses import Loss
from fl_core.tree import is_finite

Batch = tuple[Tensor, Tensor]
Item = TypeVar("Item")
Data = Any  # a pair (x, y) of tensors, an object with such x and y (a client's split), or a re-iterable loader of pairs


def batches(
    data: Data, batch: int | None = None, model: nn.Module | None = None
) -> Iterator[Batch]:
    """Yield batches (x [n, ...], y [n, ...]) of data in order.

    Integer and boolean labels are converted to int64.

    Args:
        data: a pair (x, y) of tensors, an object with such ``x`` and ``y``, or a re-iterable loader of pairs.
        batch: samples per batch of a pair. None means all at once. A loader keeps its own batches.
        model: the model that takes the batches. They are moved to its device and type.
            If it normalises over a batch, a single sample joins the batch before it, as
            in training. Without a model they stay as they are.

    Raises:
        UsageError: the data are neither a pair nor a loader, or an iterator that can be
            read only once. There are no samples, lengths differ, labels are complex, or
            values are not finite. Or the model normalises over a batch, and there is
            one sample.
    """
    if batch is not None:
        check_value("batch", batch, at_least(1))
    pair = full_batch(data)
    if pair is not None:
        x, y = pair
        size = batch or len(x)
        parts: Iterator[Batch] = (
            (x[k : k + size], y[k : k + size]) for k in range(0, len(x), size)
        )
    elif not isinstance(data, Iterable):
        data_type = type(data).__name__
        raise UsageError(
            f"data must be a pair (x, y) or a loader of such pairs; got {data_type}."
        )
    elif isinstance(data, Iterator):
        raise UsageError(
            "data must be readable more than once; got an iterator. Pass the pair or the loader itself."
        )
    else:
        parts = _load_batch(data)
    if model is None:
        return parts
    return as_taken(parts, model)


def whole_groups(data: Data, groups: NDArray[np.int64], batch: int) -> list[Batch]:
    """Return batches of about ``batch`` samples, and keep the samples of a group, such as a patient, in one batch.

    >>> pair = torch.arange(5.0), torch.arange(5)
    >>> [y.tolist() for _, y in whole_groups(pair, np.array([7, 8, 7, 9, 8]), 2)]
    [[0, 2], [1, 4], [3]]

    Args:
        data: a pair (x, y) of tensors, or an object with such ``x`` and ``y``.
        groups: the number of each sample's group, [n].
        batch: number of samples of a batch; a batch ends at the next end of a group.
    """
    pair = full_batch(data)
    assert pair is not None
    order = np.argsort(groups, kind="stable")
    _, starts = np.unique(groups[order], return_index=True)
    places = np.searchsorted(starts, np.arange(batch, len(order), batch))
    cuts = np.unique(starts[places[places < len(starts)]])
    rows = map(torch.from_numpy, np.split(order, cuts))
    return [(pair[0][k], pair[1][k]) for k in rows]


def as_taken(parts: Iterable[Batch], model: nn.Module) -> Iterator[Batch]:
    """Yield batches as a model takes them: on its device and in its type.

    If the model normalises over a batch, each single sample joins the batch before it. This is the rule of training
    (:func:`fl_core.training.loop.batch_slices`).

    Raises:
        UsageError: the model normalises over a batch, and there is one sample in all.
    """
    placed_batches = (_placed(model, x, y) for x, y in parts)
    if not normalises_batches(model, model.training):
        yield from placed_batches
        return
    waiting_batch = next(placed_batches)
    for x, y in placed_batches:
        if len(x) == 1 or len(waiting_batch[0]) == 1:
            waiting_batch = (
                torch.cat([waiting_batch[0], x]),
                torch.cat([waiting_batch[1], y]),
            )
        else:
            yield waiting_batch
            waiting_batch = x, y
    if len(waiting_batch[0]) == 1:
        model_class = type(model).__name__
        raise UsageError(
            f"samples must be at least 2, since {model_class} normalises over a batch; got 1."
        )
    yield waiting_batch


def full_batch(data: Data) -> Batch | None:
    """Return (x, y) if the data are a pair of tensors; None for a loader.

    Raises:
        UsageError: as :func:`batches`.
    """
    if hasattr(data, "x") and hasattr(data, "y"):
        data = (data.x, data.y)
    if (
        isinstance(data, (tuple, list))
        and len(data) == 2
        and any(isinstance(part, Tensor) for part in data)
    ):
        return _check_batch(data, "the data")
    return None


def _load_batch(loader: Iterable[Any]) -> Iterator[Batch]:
    number = -1
    for number, pair in enumerate(loader):
        yield _check_batch(pair, f"batch {number} of the loader")
    if number < 0:
        raise UsageError(
            "the loader must give a batch; got none. Pass one with samples."
        )


def _check_batch(pair: Any, where: str) -> Batch:
    if not (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and all(isinstance(part, Tensor) for part in pair)
    ):
        parts = ""
        if isinstance(pair, (tuple, list)):
            part_types = listing(type(part).__name__ for part in pair)
            parts = f" of {part_types}"
        pair_type = type(pair).__name__
        raise UsageError(
            f"{where} must be a pair (x, y) of tensors; got {pair_type}{parts}. Convert the data to pairs of "
            "tensors or arrays."
        )
    x, y = pair
    if x.ndim == 0 or y.ndim == 0:
        raise UsageError(
            f"{where} must have samples in batches; got one sample. Give the loader a batch_size."
        )
    if len(x) == 0:
        raise UsageError(f"{where} must have samples; got none. Leave it out.")
    if len(x) != len(y):
        raise UsageError(
            f"{where} must have a label for each sample; got {len(x)} samples and {len(y)} labels."
        )
    if y.is_complex():
        y_kind = kind_of(y)
        raise UsageError(f"{where}: the labels must be real; got {y_kind}.")
    for name, tensor in (("samples", x), ("labels", y)):
        if not is_finite(tensor):
            raise UsageError(
                f"{where}: the {name} must be finite; got NaN or infinity."
            )
    # losses take no other integers
    return (
        x,
        y if y.is_floating_point() else y.long(),
    )


TENSORS = ("weights", "all")
"""A layer's tensors that a metric reads: parameters without biases, or all parameters."""
Tensors = Annotated[str, OneOf("choice of tensors", TENSORS)]
"""The type of an option that is one of :data:`TENSORS`."""

SPENT = "left out: the budget was spent"
"""The status of what the budget did not reach."""

Tick = Callable[[str], None]
"""A function of a text. ``tick`` receives the name of a client that is done."""
READING = 0.9
"""Share of a budget in which clients are read, if a metric compares them afterwards."""
FEW, LONG = 4, 5.0
"""The number of turns after which the remaining time is estimated.

It is estimated earlier if half of the work is done. More than :data:`LONG` seconds are
reported.
"""


class NoValue(Exception):
    """The reason why a metric has no value, for instance at a layer or a client.

    A metric raises it, or returns it in place of the number of one variant. The row of
    the metric has no value then, and the text as its status.
    """


def no_progress(text: str) -> None:
    """Ignore a line of progress. It stands in for a progress bar."""


class Clock:
    """The time of a metric: when its budget ends, and how long the rest takes.

    >>> from unittest.mock import patch
    >>> with patch("diagnostics.measurement.time") as clock:
    ...     clock.monotonic.side_effect = range(0, 999, 3)
    ...     for client in Clock("cka", tell=print).turns("abcdef", 6):
    ...         pass
    cka: about 18 s more

    Args:
        name: name of the metric, for the line that ``tell`` receives.
        until: the time at which the budget ends, as of ``time.monotonic``.
        tell: function to call with a line for the user.
    """

    def __init__(
        self, name: str = "", until: float = math.inf, tell: Tick = no_progress
    ) -> None:
        self.name = name
        self.tell = tell
        self.until = self._end = until
        self._began = time.monotonic()
        self._told = 0
        self._part = 1.0  # that a loop is of those around it, if it is the first to run

    @property
    def over(self) -> bool:
        """Return whether the budget is spent, or the share of it that the current part of the work has."""
        return time.monotonic() > self.until

    def check(self) -> None:
        """Raise an error if the whole budget is spent. Shares of it do not count.

        Raises:
            NoValue: the budget is spent.
        """
        if time.monotonic() > self._end:
            raise NoValue(SPENT)

    @contextmanager
    def within(self, share: float) -> Iterator[None]:
        """Give the ``with`` block a share of the remaining budget. The rest is left to later work.

        >>> clock = Clock(until=time.monotonic() + 100)
        >>> with clock.within(0.9):
        ...     round(clock.until - time.monotonic())
        90

        Args:
            share: the block's share of the remaining budget, 0 to 1.
        """
        until = self.until
        began = time.monotonic()
        self.until = began + share * (until - began)
        try:
            yield
        finally:
            self.until = until

    def turns(
        self,
        items: Iterable[Item],
        total: float = 0,
        size: Callable[[Item], float] = lambda item: 1,
        share: bool = False,
    ) -> Iterator[Item]:
        """Yield the items of a loop, and report once how long the rest takes.

        Loops may be nested. The inner one then reports, in the first turn of the outer ones, and counts all of their
        turns. The first turn may take longer, and is timed separately.

        If a loop is left early, the rest of its budget is free for the next one:

        >>> clock = Clock(until=time.monotonic() + 100)
        >>> for client in clock.turns("abcd", share=True):
        ...     round(clock.until - time.monotonic())
        ...     break
        25
        >>> round(clock.until - time.monotonic())
        100

        Args:
            items: the items. Without a ``total`` they are counted, so they must be
                re-iterable.
            total: expected sum of the items' sizes. Default: the number of items.
            size: a function that returns an item's size. Time is assumed proportional to it.
            share: whether each item gets a share of the remaining budget, by size.
        """
        part = self._part
        until = self.until
        reports_before = self._told
        first_seconds = first_size = done_size = 0.0
        total = total or len([*items])
        for count, item in enumerate(items, 1):
            item_size, item_began = size(item), time.monotonic()
            self._part = part * item_size / total if count == 1 else 0.0
            if share:
                self.until = item_began + (until - item_began) * item_size / max(
                    item_size, total - done_size
                )
            try:
                yield item
            finally:  # also if the loop is left
                self._part = part
                self.until = until
            done_size += item_size
            elapsed = time.monotonic() - self._began
            reports_now = count == FEW or 2 * done_size >= total
            if part and reports_now and self._told == reports_before:
                rate = (elapsed - first_seconds) / (done_size - first_size)
                remaining = (elapsed + rate * (total - done_size)) / part - elapsed
                self._told += 1
                if remaining > LONG:
                    self.tell(f"{self.name}: about {remaining:.0f} s more")
            if count == 1:
                first_seconds = elapsed
                first_size = done_size
        if self._told > reports_before:
            self._began = time.monotonic()


NO_LIMIT = Clock()
"""The clock of a measurement without a budget. It reports no progress."""


@dataclass(frozen=True)
class ClientModel:
    """The model and the data of one client, for a metric.

    Attributes:
        client: the client's name in the rows.
        model: the client's model.
        data: a pair (x [n, ...], y [n, ...]), an object with such ``x`` and ``y``, or a
            re-iterable loader of pairs.
        n_train: training samples of the client, its weight when clients are combined.
        groups: the number of each sample's group, such as a patient, int64 [n]; None without groups.
    """

    client: str
    model: nn.Module
    data: Data
    n_train: int
    groups: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Measurement:
    """The settings that all metrics share: the clients, the layers, the loss and others.

    Attributes:
        subjects: the clients. A metric of pairs compares them.
        layers: the layers of every subject's model, from input to output.
        loss: the loss that trained the models. Default: cross-entropy.
        batch: samples at a time of a pair. None means all. A loader keeps its own batches.
        seed: seed of all random draws.
        mode: ``"eval"`` or ``"train"``. A metric restores the model's own mode.
        resamples: number of resamples of each client's batches to add (:mod:`diagnostics.null`).
        tick: function to call with a client's name when that client is done. It moves the progress bar.
        clock: the metric's time budget. ``clock.over`` tells whether it is spent.
    """

    subjects: Sequence[ClientModel]
    layers: Sequence[Layer]
    loss: Loss = field(default_factory=lambda: losses.build("cross_entropy"))
    batch: int | None = 256
    seed: int = 0
    mode: str = "eval"
    resamples: int = 0
    tick: Tick = no_progress
    clock: Clock = NO_LIMIT

    def turns(self, share: bool = False) -> Iterator[ClientModel]:
        """Yield each client, and call ``tick`` when it is done.

        Args:
            share: whether each client gets a share of the remaining time budget, by its number of training samples.
        """
        total = sum(subject.n_train for subject in self.subjects)
        for subject in self.clock.turns(
            self.subjects, total, lambda subject: subject.n_train, share
        ):
            yield subject
            self.tick(subject.client)

    def settings(self, options: Any) -> dict[str, Any]:
        """Return the arguments of a curvature function: a metric's options, and loss, batch, seed, mode and clock.

        Args:
            options: the metric's options, an object with attributes.
        """
        names = "loss", "batch", "seed", "mode", "clock"
        return vars(options) | {name: getattr(self, name) for name in names}


def row_or_reason(metric: str, value: float | None, why: str, **columns: Any) -> Row:
    """Return a metric's row with its value, or without one if ``why`` gives a reason.

    Args:
        metric: name of the metric.
        value: the value; ignored if there is a reason.
        why: why there is no value, the row's status; empty if there is one.
        columns: further columns of the row, as for :func:`fl_core.rows.row`.
    """
    if why:
        value = columns["stderr"] = None
    return row(metric, value, status=why or "ok", **columns)


# --- a subject's data and model --------------------------------------------------------------------------------


@contextmanager
def one_line(what: str | Callable[[Exception], str]) -> Iterator[None]:
    """Turn a failure of code from elsewhere, such as a model's, into an error of one line.

    Args:
        what: the beginning of the line, or a function that returns it for the exception.

    Raises:
        UsageError: the ``with`` block failed. Its own usage errors and a lack of GPU memory are raised unchanged.
    """
    try:
        yield
    except (UsageError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        beginning = what if isinstance(what, str) else what(error)
        raise UsageError(f"{beginning}: {lines[0]:.300}") from error


def cannot_take(model: nn.Module, x: Tensor) -> str:
    """Return the beginning of an error: the model cannot take samples of this shape and type."""
    model_class = type(model).__name__
    x_kind = kind_of(x)
    x_shape = list(x.shape[1:])
    return f"{model_class} cannot take samples {x_kind} {x_shape}"


def kind_of(tensor: Tensor) -> str:
    """Return the name of a tensor's type, such as float32."""
    return str(tensor.dtype).removeprefix("torch.")


def tensors_of(layer: Layer, tensors: str) -> tuple[str, ...]:
    """Return the names of the layer's parameters to read: its weights if ``tensors`` is ``weights``, else all."""
    if tensors == "weights":
        return layer.weights
    return layer.parameters


def why_unreadable(layer: Layer, tensors: str, reached: bool) -> str:
    """Return why a layer can have no value from gradients, or "".

    Args:
        layer: the layer.
        tensors: the tensors that are read, ``weights`` or ``all``.
        reached: whether a gradient reached one of them.
    """
    if not layer.used:
        return "unused in the forward pass"
    if not tensors_of(layer, tensors):
        if tensors == "weights":
            return "the layer has no weights"
        return "the layer has no parameters"
    if reached:
        return ""
    return "no gradient reaches the layer"


def to_device(model: nn.Module, x: Tensor) -> Tensor:
    """Return samples on the model's device, and in its type if they are floating.

    Samples for a model with several packed inputs keep their type.
    """
    reference = next((p for p in model.parameters() if p.is_floating_point()), x)
    is_packed = isinstance(model, Adapter) and model.layout is not None
    casts = x.is_floating_point() and not is_packed
    return x.to(reference.device, reference.dtype if casts else x.dtype)


def _placed(model: nn.Module, x: Tensor, y: Tensor) -> Batch:
    x = to_device(model, x)
    return x, y.to(x.device)


def example(model: nn.Module, data: Data, seed: int) -> Batch:
    """Return a batch (x, y) of the first two samples of data, or the only one, on the model's device.

    Floating-point samples get the model's type, except for models with packed inputs.

    Args:
        seed: the run's seed. It fixes the order of a loader that shuffles with torch's global generator.

    Raises:
        UsageError: as :func:`batches`.
    """
    with torch_seeded(seed_of(seed, "diagnose", "example")):
        x, y = next(batches(data, 2))
    return _placed(model, x[:2], y[:2])


def call_with(model: nn.Module, tensors: Mapping[str, Tensor], x: Tensor) -> Any:
    """Return a model's output with some of its tensors replaced.

    A tensor that several modules share is replaced in all of them. The model is left as
    it was.

    Args:
        model: the model.
        tensors: {name: tensor}, names as in ``named_parameters`` and ``named_buffers``.
            Other names are ignored.
        x: the samples, [n, ...].
    """
    named_tensors = (*model.named_parameters(), *model.named_buffers())
    name_of = {id(tensor): name for name, tensor in named_tensors}
    all_tensors = {}
    for path, module in model.named_modules():
        for local, tensor in (module._parameters | module._buffers).items():
            name = name_of.get(id(tensor), "")
            if name in tensors:
                all_tensors[f"{path}.{local}" if path else local] = tensors[name]
    return functional_call(model, all_tensors, (x,), tie_weights=False)
