"""What local training consists of: its settings, its phases, and what a client knows during them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from fl_core.config import TrainingConfig
from fl_core.errors import ABOVE_0, check_fields
from fl_core.layers import Layer
from fl_core.training.losses import Loss
from fl_core.tree import Tree

Batch = tuple[Tensor, Tensor]
"""Samples [b, ...] and their labels [b, ...]."""


def _eager(kind: type[torch.optim.Optimizer]) -> type[Any]:
    """Return a subclass of an optimiser without the wrappers of ``torch.compile``.

    The wrappers import 750 modules, and slow each step.
    """
    names = ("add_param_group", "zero_grad", "step")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    methods["step"] = torch.no_grad()(methods["step"])
    return type(kind.__name__, (kind,), methods)


_OPTIMIZERS = {
    "sgd": (_eager(torch.optim.SGD), "momentum"),
    "adam": (_eager(torch.optim.Adam), "amsgrad"),
    "adamw": (_eager(torch.optim.AdamW), "amsgrad"),
}


@dataclass(frozen=True)
class Training:
    """The settings of a client's training: optimiser, rates, batch size and clipping.

    Attributes:
        epochs: passes over the client's training data in a round.
        batch_size: samples in a step. The last, smaller batch is used too. Reported losses weight it by its samples.
        lr: learning rate.
        optimizer: ``sgd``, ``adam`` (coupled L2) or ``adamw`` (decoupled).
        momentum: momentum of SGD.
        weight_decay, amsgrad: as in PyTorch.
        max_grad_norm: largest Euclidean norm of a gradient over all that the phase trains. A longer gradient is
            scaled down to it. None = never.
        keep_optimizer: keep the optimiser's state with the client from round to round instead of a new one each. A
            run's default is yes for adam and adamw, whose second moments need more steps than a round has, and no for
            sgd, with momentum too, as FedAvg has it. The state takes one to three times the size of the trained
            tensors, in memory and in every checkpoint (:mod:`fl_core.training.loop`). Fine-tuning always begins with a
            new optimiser.
        precision: ``bf16`` computes a step's forward pass and loss under torch's autocast. All else is float32.
        rates: (part of a tensor's name, factor of its learning rate) pairs, such as
            ("lora_B", 16). The first pair whose part is in the name counts.
    """

    epochs: int = 1
    batch_size: int = 32
    lr: float = 0.01
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    amsgrad: bool = False
    max_grad_norm: float | None = None
    keep_optimizer: bool = False
    precision: str = "float32"
    rates: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, config: TrainingConfig) -> Training:
        """Return the settings of a resolved configuration."""
        names = {field.name for field in fields(cls)}
        return cls(**{key: v for key, v in vars(config).items() if key in names})

    @property
    def description(self) -> str:
        """Return the optimiser, the learning rate and whether the optimiser's state is kept, for tables and reports.

        >>> Training(optimizer="adamw", lr=0.001, amsgrad=True, keep_optimizer=True).description
        'adamw (amsgrad), lr 0.001, optimiser state kept between rounds'
        """
        options = [
            f"{name} {value:g}"
            for name in ("momentum", "weight_decay")
            if (value := getattr(self, name))
        ]
        options += ["amsgrad"] * self.amsgrad
        state_text = "new in each round"
        if self.keep_optimizer:
            state_text = "kept between rounds"
        optimizer_text = self.optimizer
        if options:
            options_text = ", ".join(options)
            optimizer_text = f"{self.optimizer} ({options_text})"
        return (
            f"{optimizer_text}, lr {self.lr:g}, optimiser state {state_text}".replace(
                "_", " "
            )
        )

    def build(
        self, parameters: list[Tensor] | list[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        """Return a new optimiser of these tensors or groups of tensors. Adam and AdamW ignore the momentum."""
        optimizer_class, momentum = _OPTIMIZERS[self.optimizer]
        options = {
            name: getattr(self, name) for name in ("lr", "weight_decay", momentum)
        }
        return optimizer_class(parameters, fused=True, **options)


@dataclass(frozen=True)
class Group:
    """Tensors of a phase with a learning rate of their own.

    Attributes:
        train: names of the tensors.
        lr: the learning rate. None means the phase's rate divided by ``lr_divisor``.
        lr_divisor: divisor of the phase's rate.
    """

    train: frozenset[str]
    lr: float | None = None
    lr_divisor: float = 1.0


_OWN = ("lr", "momentum", "weight_decay", "optimizer", "max_grad_norm")


@dataclass(frozen=True)
class Phase:
    """One stretch of local training: the trained tensors, its length, and its loss.

    Attributes:
        name: name of the phase, for messages and rows.
        train: names of the tensors that move (parameters, and the buffers of their normalisations); the rest has no
            gradient, is in no optimiser, and its normalisations run in evaluation mode.
        epochs: passes over the training data.
        state_key: name of the client's tree that is trained.
        loss: name of the algorithm's method that gives the objective.
        batch_stream: name of the stream of batches. Phases that have FedAvg or Local as a limit use ``main``.
        observe: names of observers that receive parameters and gradients of every step of the first pass. These are the
            loss's gradients before clipping. With a ``step`` they are the gradients that the step follows.
        lr, momentum, weight_decay, optimizer, max_grad_norm: settings that replace the run's; None keeps the run's.
        groups: tensors among those that train with learning rates of their own; no tensor is in two groups.
        steps: the largest number of batches, if ``epochs`` passes have more.
        step: name of the algorithm's method that makes the step of a batch; default the optimiser's own step along
            the gradient of the loss. See :class:`fl_core.training.loop.Steps`.

    Raises:
        UsageError: ``max_grad_norm`` is not above 0.
    """

    name: str
    train: frozenset[str]
    epochs: int
    state_key: str = "model"
    loss: str = "loss"
    batch_stream: str = "main"
    observe: tuple[str, ...] = ()
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    optimizer: str | None = None
    max_grad_norm: Annotated[float | None, ABOVE_0] = None
    groups: tuple[Group, ...] = ()
    steps: int | None = None
    step: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "train", frozenset(self.train))

    def length(self, batches: int) -> int:
        """Return the number of steps of the phase if a pass over the training data has this number of batches."""
        n_steps = self.epochs * batches
        if self.steps is None:
            return n_steps
        return min(self.steps, n_steps)

    def settings(self, training: Training) -> Training:
        """Return the settings of this phase: the run's, with the phase's own in their place."""
        overrides = {name: getattr(self, name) for name in _OWN}
        return replace(
            training, **{k: v for k, v in overrides.items() if v is not None}
        )


class Observer(Protocol):
    """An accumulator that receives each step of a phase's first epoch.

    Its result goes to the client's context (:attr:`Context.observed`). By default it is sent
    in the client's reply.
    """

    def update(self, params: Tree, grads: Tree) -> None:
        """Add one step, before the optimiser changes the parameters.

        Args:
            params: all parameters of the model by name.
            grads: gradients of the parameters that train, by name.
        """

    def result(self) -> dict[str, Any]:
        """Return the measurement, as numbers and lists that JSON can store."""


Observers = Mapping[str, Callable[[tuple[Layer, ...]], Observer]]
"""Makers of observers for a model's layers, by name."""


def _not_here(*args: Any, **options: Any) -> Any:
    raise RuntimeError(
        "this context must belong to a client; got one without data and models. Use it in a client's hook."
    )


@dataclass
class Context:
    """The facts and functions of a client, for hooks that run in the client's process.

    Attributes:
        algorithm: the algorithm's name.
        round: the 0-based round. In fine-tuning it is the number of completed rounds.
        client: the client's position.
        client_name: the client's name, for messages.
        n_train: number of the client's training samples.
        criterion: the run's loss of the model's outputs and labels.
        forward: (parameters, x [n, ...]) -> logits [n, C] in the mode of the moment, which is training in
            ``client_start`` and in phases; see :meth:`fl_core.training.workspace.Workspace.forward`.
        infer: as ``forward``, in evaluation mode and without gradients, for a whole tree of parameters.
        features: (parameters, x [n, ...]) -> the input [n, d] of the last linear layer, in the mode of the moment.
        batches: (stream, share=1.0) -> batches of the run's size of that share of the client's training samples,
            drawn without replacement from a stream of that name, which is another one in each round and client.
        score: (whole tree, words for messages) -> its scores on the client's validation split by name: ``loss``, and
            those of the task.
        reference: the tensors that the client received, or else began with, on the training device.
        labels: labels of the client's training samples, [n_train, ...], on the training
            device.
        trees: further trees that it received or has in its state, on the training device; empty until training begins.
        submodel: names of the tensors that the client has; None means all.
        finetuning: whether the client fine-tunes after ``round`` rounds, in place of training in the next one.
        observed: results of the observers, by their names.
        work: steps, samples and mean loss, by "phase/quantity".
        scratch: trees that an algorithm's steps store during the phases, without gradients.
        parts: parts of a phase's loss by name, summed over its samples.
    """

    algorithm: str
    round: int
    client: int
    client_name: str
    n_train: int
    criterion: Loss
    forward: Callable[..., Any]
    reference: Tree
    labels: Tensor
    trees: dict[str, Tree] = field(default_factory=dict)
    infer: Callable[..., Tensor] = _not_here
    features: Callable[..., Tensor] = _not_here
    batches: Callable[..., Iterator[tuple[Tensor, Tensor]]] = _not_here
    score: Callable[[Tree, str], dict[str, float]] = _not_here
    submodel: frozenset[str] | None = None
    finetuning: bool = False
    observed: dict[str, Any] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)
    scratch: dict[str, Tree] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)

    def part(self, name: str, loss: Tensor, samples: int) -> Tensor:
        """Record a part of the phase's loss, and return it unchanged.

        Args:
            name: name of the part.
            loss: its mean over a batch, a scalar.
            samples: number of samples of the batch.
        """
        self.parts[name] = self.parts.get(name, 0.0) + loss.item() * samples
        return loss

    def location(self, phase: str) -> str:
        """Return the algorithm, round, client and phase, for an error message."""
        if self.finetuning:
            round_text = f"after round {self.round}"
        else:
            round_text = f"round {self.round + 1}"
        return f"{self.algorithm}, {round_text}, client {self.client_name!r}, phase {phase!r}"
