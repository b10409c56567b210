"""The knowledge and tools of a client, for the hooks that run where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fl_core.training.losses import Loss
from fl_core.tree import Tree


def _not_here(*args: Any, **options: Any) -> Any:
    raise RuntimeError(
        "this context must belong to a client; got one without data and models. Use it in a client's hook."
    )


@dataclass
class Context:
    """The knowledge and tools of a client, for the hooks that run where it is.

    Attributes:
        algorithm: its name. round: 0-based. client: its position. n_train: its training samples.
        criterion: the run's loss of logits and labels.
        forward: (parameters, x [n, ...]) -> logits [n, C] in the mode of the moment, which is training in
            ``client_start`` and in phases; see :meth:`fl_core.training.workspace.Workspace.forward`.
        infer: the same in evaluation mode and without gradients, of a whole tree.
        features: (parameters, x [n, ...]) -> the input [n, d] of the last linear layer, in the mode of the moment.
        batches: (stream, share=1.0) -> batches of the run's size of that share of the client's training samples,
            drawn without replacement from a stream of that name, which is another one in each round and client.
        score: (whole tree, what it is) -> its ``loss``, ``accuracy`` ... on the client's validation split.
        reference: what the client received, or else began with, on the training device.
        labels: of the client's training samples, int64 [n_train], on the training device.
        trees: what else it received or kept, there too; empty until training begins.
        submodel: names of the tensors that the client has at all; None = all.
        finetuning: whether this is fine-tuning after so many rounds, instead of training in the next.
        observed: what observers measured, by their names.
        work: steps, samples and mean loss, by "phase/quantity".
        scratch: trees that steps keep: the client's own when all phases are done, without gradients.
        parts: of a phase's loss, by name, summed over its samples.
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
        """Record a loss, a mean over ``samples`` samples, as a part of the phase's. Return it unchanged."""
        self.parts[name] = self.parts.get(name, 0.0) + loss.item() * samples
        return loss

    def location(self, phase: str) -> str:
        """Algorithm, round, client and phase, for an error message."""
        when = (
            f"after round {self.round}"
            if self.finetuning
            else f"round {self.round + 1}"
        )
        return f"{self.algorithm}, {when}, client {self.client_name!r}, phase {phase!r}"
