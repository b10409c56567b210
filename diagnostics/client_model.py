"""The input of every metric: the clients as subjects, and the settings that all metrics share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from torch import Tensor, nn

from fl_core.bounds import OneOf
from fl_core.errors import UsageError
from fl_core.layers import Layer
from fl_core.scores import CLASSIFICATION
from fl_core.training import losses
from fl_core.training.evaluate import check_targets
from fl_core.training.losses import Loss

from .activation_cache import ActivationCache
from .capture import Batch, Data, batches, full_batch

TENSORS = ("weights", "all")
"""A layer's tensors that a metric reads: parameters without biases, or all parameters."""
Tensors = Annotated[str, OneOf("choice of tensors", TENSORS)]
"""The type of an option that is one of :data:`TENSORS`."""

Tick = Callable[[str], None]
"""Called with a client's name when that client is done."""


@dataclass(frozen=True)
class ClientModel:
    """One client as a metric sees it: its model and data.

    Attributes:
        client: the client's name in the rows.
        model: the client's model.
        data: a pair (x [n, ...], y [n]), an object with such ``x`` and ``y``, or a re-iterable loader of pairs.
        n_train: training samples of the client, its weight when clients are combined.
    """

    client: str
    model: nn.Module
    data: Data
    n_train: int


def no_progress(client: str) -> None:
    """Do nothing: the progress function of a measurement without a progress bar."""


@dataclass(frozen=True)
class Measurement:
    """The settings that all metrics share: the clients, the layers, the loss and others.

    Attributes:
        subjects: the clients. A metric of pairs compares them.
        layers: of every subject's model, from input to output.
        loss: the loss that trained the models. Default: cross-entropy.
        batch: samples at a time of a pair. None means all. A loader keeps its own batches.
        seed: seed of all random draws.
        mode: ``"eval"`` or ``"train"``. A metric restores the model's own mode.
        tick: function to call with a client's name when that client is done. It moves the progress bar.
        kept: forward passes shared with other metrics. None: no other metric reads them.
    """

    subjects: Sequence[ClientModel]
    layers: Sequence[Layer]
    loss: Loss = field(default_factory=lambda: losses.build("cross_entropy"))
    batch: int | None = 256
    seed: int = 0
    mode: str = "eval"
    tick: Tick = no_progress
    kept: ActivationCache | None = None


# --- a subject's data and model --------------------------------------------------------------------------------


def tensors_of(layer: Layer, tensors: str) -> tuple[str, ...]:
    """Return the names of the layer's parameters to read: its weights, or all of them."""
    return layer.weights if tensors == "weights" else layer.parameters


def to_device(model: nn.Module, x: Tensor) -> Tensor:
    """Move samples to the model's device, and to its type if they are floating."""
    like = next((p for p in model.parameters() if p.is_floating_point()), x)
    return x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)


def place_data(subject: ClientModel) -> Data:
    """Move a subject's data to its model's device and type.

    A pair moves at once. A loader's batches move as they come.
    """
    pair = full_batch(subject.data)
    if pair is None:
        return _PlacedLoader(subject)
    x = to_device(subject.model, pair[0])
    return x, pair[1].to(x.device)


class _PlacedLoader:
    """A loader's batches, moved to the device and type of the subject's model."""

    def __init__(self, subject: ClientModel) -> None:
        self._subject = subject

    def __iter__(self) -> Iterator[Batch]:
        for x, y in batches(self._subject.data):
            x = to_device(self._subject.model, x)
            yield x, y.to(x.device)


def logits(model: nn.Module, x: Tensor, y: Tensor, loss: Loss | None = None) -> Tensor:
    """Return the model's output for ``x``, checked to be logits [n, C] that fit the labels ``y`` [n].

    Args:
        loss: the loss that the output must fit. It may take numbers, or two classes and one output. None: a single
            output fits any labels.

    Raises:
        UsageError: the output has another shape, or labels are not class indices from 0 to C - 1. For a loss of
            another task, labels must have its shape.
    """
    z = model(x)
    if not isinstance(z, Tensor) or z.ndim != 2 or len(z) != len(x):
        output = (
            f"a tensor {tuple(z.shape)}" if isinstance(z, Tensor) else type(z).__name__
        )
        raise UsageError(
            f"{type(model).__name__} must return logits [n, C]; got {output} for {len(x)} samples."
        )
    if loss is not None and loss.task != CLASSIFICATION:
        check_targets(z, y, loss.task)
        return z
    if loss is None and z.shape[1] == 1 and y.ndim == 1:
        return z
    if y.ndim != 1 or y.is_floating_point():
        raise UsageError(
            f"labels must be class indices [n]; got {y.dtype} {tuple(y.shape)}."
        )
    classes = (z if loss is None else loss.logits(z)).shape[1]
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= classes:
        raise UsageError(
            f"labels must be from 0 to {classes - 1}; got label {low if low < 0 else high}."
        )
    return z
