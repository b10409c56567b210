"""Copies of a model that clients train for a few epochs, and the choice of one of them.

A copy is chosen on other samples than those that score it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_core import seeds, tree
from fl_core.data.arrays import nested_groups
from fl_core.data.federated import Split
from fl_core.errors import NonFiniteError
from fl_core.models.building import batch_norms
from fl_core.rows import CLASSIFICATION, MULTILABEL, Row, row
from fl_core.statistics import Estimate
from fl_core.training import evaluate
from fl_core.training.loop import batch_slices, clip_gradients
from fl_core.training.losses import Loss
from fl_core.training.phases import Training
from fl_core.training.workspace import Workspace, memory_format
from fl_core.tree import Tree, in_mode

from ..measurement import NO_LIMIT, Clock

EPOCHS = (1, 2, 4)
"""Epochs after which a copy is scored."""
SAMPLES = 200
"""The default maximum number of training samples of a client."""
STREAM = "layer_tuning"
Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Losses = Callable[[Tensor, Mask, Mask], tuple[Array, Array]]
"""A function (outputs [n, C], fitted, scored) -> losses of the samples in both masks [n].

If it fits something, it fits it on the first set of samples.
"""


@dataclass(frozen=True, eq=False)
class Held:
    """The validation samples of all clients, one client after another.

    Attributes:
        y: labels of the samples, [n, ...].
        client: the number of each sample's client, int64 [n].
        weight: weight of each sample, float64 [n]. A client's weights sum to its share
            of the training samples of all clients with validation samples.
        group: the number of each sample's group, such as a patient, int64 [n]. A group has one client.
    """

    y: Tensor
    client: NDArray[np.int64]
    weight: Array
    group: NDArray[np.int64]

    @classmethod
    def of(cls, splits: Sequence[Split], n_train: Sequence[int]) -> Held:
        """Join the clients' validation samples, client after client.

        If a client's samples have no groups, every sample of the federation is a group.

        Args:
            splits: each client's validation samples. A client may have none.
            n_train: each client's number of training samples, which gives its weight.
        """
        sizes = [len(split) for split in splits]
        total = sum(n for n, size in zip(n_train, sizes, strict=True) if size)
        client = np.repeat(np.arange(len(sizes)), sizes)
        share = [
            n / total / max(1, size) for n, size in zip(n_train, sizes, strict=True)
        ]
        group_arrays = [split.groups for split in splits]
        group = np.arange(len(client))
        if not any(groups is None for groups in group_arrays):
            group = nested_groups(group_arrays)
        return cls(
            torch.cat([s.y for s in splits]), client, np.array(share)[client], group
        )

    def losses(self, loss: Loss, outputs: Tensor) -> Array:
        """Return the loss of each sample, float64 [n], or [P, n] for outputs [P, n, C].

        It is the log loss for classes and several labels, and the training loss for
        other tasks.

        Args:
            loss: the loss that trained the model.
            outputs: outputs for all samples, [n, C] or [P, n, C].
        """
        if outputs.ndim == 3:
            return np.stack([self.losses(loss, output) for output in outputs])
        if loss.task in (CLASSIFICATION, MULTILABEL):
            logits = loss.logits(outputs).double()
            return evaluate.log_losses(logits, self.y).numpy()
        return loss.per_sample(outputs, self.y).double().numpy()

    def right(self, outputs: Tensor) -> Array:
        """Return 1.0 for each sample whose class is predicted right, else 0.0: [..., n] for outputs [..., n, C].

        The labels must be classes.
        """
        return (outputs.argmax(-1) == self.y).double().numpy()


class Tuner:
    """A trainer of copies of a model at each client, with the run's optimiser and loss.

    A client's batches are the same whatever part of the model is trained.

    Args:
        model: the model that all clients begin with.
        loss: the run's, without an algorithm's own terms.
        training: the run's settings.
        clients: each client's training and validation samples.
        seed, round: seed and round of the run. With the client's number they seed batches and dropout.
        starts: each client's initial weights, all tensors by name. Default: the model's
            own.
        samples: maximum number of training samples of a client, the first ones. None
            means all.
        near: for each client the numbers of the sets of samples that its copy predicts. Default: its validation
            samples.
        beside: further sets of samples, numbered after the clients' validation samples.
        numbers: the clients' numbers in the federation, which seed batches and dropout. Default: their positions in
            ``clients``.
        clock: the time budget. Default: no limit.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        training: Training,
        clients: Sequence[tuple[Split, Split]],
        seed: int,
        round: int,
        starts: Sequence[Tree] | None = None,
        samples: int | None = SAMPLES,
        near: Sequence[Sequence[int]] | None = None,
        beside: Sequence[Split] = (),
        numbers: Sequence[int] = (),
        clock: Clock = NO_LIMIT,
    ) -> None:
        self.clock = clock
        example = clients[0][0].x[:2]
        self.workspace = Workspace(model, memory=memory_format(model, example))
        self.loss, self.training, self.seed, self.round = loss, training, seed, round
        self.starts = starts or [tree.clone(tree.state_dict(model))] * len(clients)
        train = [_first(split, samples) for split, _ in clients]
        self.train = [(s.x, self.workspace.place(s.x), s.y) for s in train]
        validation = [s for _, s in clients]
        self.scored = [(s.x, self.workspace.place(s.x)) for s in (*validation, *beside)]
        self.numbers = numbers or range(len(clients))
        self.near = near or [[k] for k in range(len(clients))]
        self.held = Held.of(validation, [len(s) for s, _ in clients])

    @cached_property
    def start(self) -> Tensor:
        """Return the outputs without further training, [n, C], as :meth:`outputs` orders them.

        Raises:
            NonFiniteError: an output is not finite.
            NoValue: the budget is spent.
        """
        outputs = []
        with tree.one_thread():
            for client, weights in enumerate(self.starts):
                self.workspace.load(weights)
                outputs.append(self._outputs(client))
        return _finite(torch.cat(outputs))

    def outputs(
        self, names: frozenset[str], rate: float, epochs: Sequence[int] = EPOCHS
    ) -> Tensor:
        """Return the outputs [E, n, C] of the validation samples after training the named tensors alone.

        They are in the order of the clients. With ``near`` n counts every pair of a
        client's model and a sample that it predicts.

        Args:
            names: names of the tensors that are trained; the others stay as they are.
            rate: learning rate.
            epochs: E numbers of epochs in ascending order, each at least 1.

        Raises:
            NonFiniteError: a loss or an output is not finite.
            NoValue: the budget is spent.
        """
        with tree.one_thread():
            client_outputs = [
                torch.stack([*self._tune(client, names, rate, epochs)])
                for client in self.clock.turns(range(len(self.train)))
            ]
        return _finite(torch.cat(client_outputs, dim=1))

    def parts(self, outputs: Tensor) -> dict[tuple[int, int], Tensor]:
        """Split outputs [n, ...], as :meth:`outputs` has them for one epoch, by client and set of samples.

        Returns:
            {(client's position, number of the set): outputs of the set's samples}.
        """
        order: list[tuple[int, int]] = []
        for k, sets in enumerate(self.near):
            order += [(k, place) for place in sets]
        sizes = [len(self.scored[place][0]) for _, place in order]
        return dict(zip(order, outputs.split(sizes), strict=True))

    def tuned(
        self, client: int, names: frozenset[str], rate: float, epochs: int
    ) -> Tree:
        """Return a client's weights after fine-tuning, all tensors by name.

        Args:
            client: its position in ``clients``.
            names: names of the tensors that are trained; the others stay as they are.
            rate: learning rate.
            epochs: number of epochs, at least 1.

        Raises:
            NonFiniteError: a loss is not finite.
            NoValue: the budget is spent.
        """
        with tree.one_thread():
            for _ in self._tune(client, names, rate, (epochs,)):
                pass
        return self.workspace.read()

    def with_new_statistics(self) -> Tensor:
        """Return the outputs [n, C] with all batch statistics taken again from each client's training samples.

        No weight is trained. The order is that of :meth:`outputs`.

        Raises:
            NonFiniteError: an output is not finite.
            NoValue: the budget is spent.
        """
        workspace, outputs = self.workspace, []
        norms = [
            norm
            for norm in batch_norms(workspace.model).values()
            if isinstance(norm, nn.modules.batchnorm._BatchNorm)
        ]
        momentum = [norm.momentum for norm in norms]
        try:
            for client, (_, x, y) in enumerate(self.train):
                workspace.load(self.starts[client])
                for norm in norms:
                    norm.reset_running_stats()
                    norm.momentum = None  # the mean over all batches
                slices = batch_slices(
                    len(y), self.training.batch_size, workspace.couples
                )
                with (
                    tree.one_thread(),
                    torch.no_grad(),
                    in_mode(workspace.model, False),
                ):
                    for norm in norms:
                        norm.train()
                    for part in slices:
                        workspace.model(x[part])
                outputs.append(self._outputs(client))
        finally:
            for norm, momentum_before in zip(norms, momentum, strict=True):
                norm.momentum = momentum_before
        return _finite(torch.cat(outputs))

    def _tune(
        self, client: int, names: frozenset[str], rate: float, epochs: Sequence[int]
    ) -> Iterator[Tensor]:
        """Yield a client's outputs [n, C] after each number of epochs in ``epochs``.

        The model of the workspace is trained in place.

        Raises:
            NonFiniteError: a loss is not finite.
            NoValue: the budget is spent.
        """
        self.clock.check()
        workspace, settings = self.workspace, self.training
        samples, x, y = self.train[client]
        parts = self.seed, STREAM, self.round, self.numbers[client]
        draws = seeds.torch_generator(*parts)
        slices = batch_slices(len(y), settings.batch_size, workspace.couples)
        workspace.load(self.starts[client])
        modules = seeds.seed_of(*parts, "modules")
        with workspace.trains(names) as trained_names, seeds.torch_seeded(modules):
            params = {name: workspace.params[name] for name in trained_names}
            optimizer = replace(settings, lr=rate).build([*params.values()])
            frozen_outputs = workspace.frozen_outputs(client, samples, x)
            near_frozen_outputs = [
                workspace.frozen_outputs(~k, *self.scored[k]) for k in self.near[client]
            ]
            for epoch in range(1, max(epochs) + 1):
                order = torch.randperm(len(y), generator=draws)
                for sample_numbers in (order[part] for part in slices):
                    self.clock.check()
                    batch = x[sample_numbers]
                    if frozen_outputs is not None:
                        workspace.continue_from(batch, frozen_outputs[sample_numbers])
                    loss = self.loss(
                        workspace.forward(workspace.params, batch), y[sample_numbers]
                    )
                    if not math.isfinite(loss.item()):
                        raise NonFiniteError(
                            "The loss is not finite. Use a smaller lr."
                        )
                    optimizer.zero_grad()
                    loss.backward(inputs=[*params.values()])
                    if settings.max_grad_norm is not None:
                        grads = {
                            n: p.grad for n, p in params.items() if p.grad is not None
                        }
                        clipped = clip_gradients(grads, settings.max_grad_norm)
                        for name, grad in clipped.items():
                            params[name].grad = grad
                    optimizer.step()
                if epoch in epochs:
                    yield self._outputs(client, near_frozen_outputs)

    def _outputs(
        self, client: int, frozen_outputs: Sequence[Tensor | None] = ()
    ) -> Tensor:
        """Return the outputs [n, C] of the samples that a client's model predicts.

        Args:
            client: its position in ``clients``.
            frozen_outputs: for each set of samples the outputs of the frozen first
                layers, or None to compute them. It may be empty.

        Raises:
            NoValue: the budget is spent.
        """
        workspace, outputs = self.workspace, []
        sets = self.near[client]
        with torch.no_grad(), in_mode(workspace.model, False):
            for k, set_outputs in zip(
                sets, frozen_outputs or [None] * len(sets), strict=True
            ):
                _, x = self.scored[k]
                slices = batch_slices(len(x), evaluate.SCORE_BATCH, workspace.couples)
                for part in slices or [slice(0, 0)]:
                    self.clock.check()
                    batch = x[part]
                    if set_outputs is not None:
                        workspace.continue_from(batch, set_outputs[part])
                    outputs.append(workspace.forward(workspace.params, batch))
        return torch.cat(outputs)


def _finite(outputs: Tensor) -> Tensor:
    if not outputs.isfinite().all():
        raise NonFiniteError("An output is not finite. Use a smaller lr.")
    return outputs


def _first(split: Split, most: int | None) -> Split:
    """Return at most ``most`` first samples of a split, or all for None.

    The order of a split has no meaning.
    """
    if split.groups is None:
        groups = None
    else:
        groups = split.groups[:most]
    return Split(split.x[:most], split.y[:most], groups)


def crosswise(
    losses: Losses,
    candidates: Tensor,
    weight: Array,
    half: NDArray[np.int64],
) -> tuple[NDArray[np.int64], Array, Array]:
    """Choose the best candidate on each half of the samples, and score it on the other half.

    Args:
        losses: (outputs [n, C] of a candidate, samples to choose on, samples to score on) -> the losses on both.
            Samples are boolean masks [n].
        candidates: outputs [P, n, C]. Of equally good ones the first is taken.
        weight: weight of each sample [n].
        half: the half of each sample, 0 or 1, [n].

    Returns:
        The number of the candidate that was chosen for each sample, the losses of the first candidate, and those of the
        chosen one, each [n].

    Raises:
        NonFiniteError: a loss of a candidate is not finite.
    """
    choice = np.zeros(len(half), dtype=np.int64)
    first_losses, best_losses = np.zeros(len(half)), np.zeros(len(half))
    for number in (0, 1):
        is_scored, is_fitted = half == number, half != number
        pairs = [losses(candidate, is_fitted, is_scored) for candidate in candidates]
        if not all(np.isfinite(np.concatenate(pair)).all() for pair in pairs):
            raise NonFiniteError("A loss is not finite. Use a smaller lr.")
        means = [
            float(candidate_losses @ weight[is_fitted]) for candidate_losses, _ in pairs
        ]
        choice[is_scored] = int(np.argmin(means))
        first_losses[is_scored], best_losses[is_scored] = (
            pairs[0][1],
            pairs[choice[is_scored][0]][1],
        )
    return choice, first_losses, best_losses


def estimated(
    metric: str, variant: str, mean: Estimate, factor: float, **columns: Any
) -> Row:
    """Return the row of a mean over validation samples, with its standard error if it is known.

    Args:
        metric, variant: columns of the row.
        mean: the mean and its standard error, NaN if unknown.
        factor: by which the mean and its error are multiplied, such as 100 for points.
        columns: further columns of the row.
    """
    if math.isnan(mean.error):
        error = None
    else:
        error = factor * mean.error
    columns |= {"stderr": error, "variant": variant, "split": "validation"}
    return row(metric, factor * mean.value, **columns)
