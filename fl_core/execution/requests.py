"""Requests to a client and its replies, as the engine, a client's backend and its workers pass them on.

A backend adds to a request what its workers need of the client, and removes from the reply what must stay there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fl_core.algorithms.base import Message, Observation, Round, State
from fl_core.algorithms.model_template import ModelTemplate
from fl_core.tree import Tree

LOCAL = "local"  # the name of the model after local training
TUNED = "personal"  # the name of a fine-tuned model
SCORED = ("validation", "test")


@dataclass(frozen=True)
class TrainRequest:
    """A request to take part in one exchange.

    Attributes:
        score: splits on which to score the locally trained model.
        keep: keep that model, under ``local``.
        lost: the reply will not arrive, so the training's changes at the client are undone.
        state: the client's state, which its backend adds for a worker.
    """

    client: int
    rnd: Round
    message: Message
    score: tuple[str, ...] = ()
    keep: bool = False
    lost: bool = False
    state: State = field(default_factory=State)


@dataclass(frozen=True)
class FinetuneRequest:
    """A request to fine-tune a copy of one of the client's models after ``done`` rounds. It is kept as ``personal``.

    For a worker the client's backend fills the template with the client's tensors.
    """

    client: int
    done: int
    template: ModelTemplate
    model: str


@dataclass(frozen=True)
class ScoreRequest:
    """A request to score the client's models on validation and test samples after ``done`` rounds.

    The reply also carries observations. For a worker the client's backend fills the template as for fine-tuning.
    """

    client: int
    done: int
    template: ModelTemplate


ClientRequest = TrainRequest | FinetuneRequest | ScoreRequest


@dataclass
class ClientReply:
    """A client's reply: messages and numbers. Fields that do not apply stay empty.

    Attributes:
        missing: no reply came in time.
        state: the client's new state, which its backend takes out.
        models: models that the backend takes out and keeps, by name.
    """

    client: int
    message: Message = field(default_factory=Message)
    scores: dict[str, dict[str, dict[str, float]]] = field(
        default_factory=dict
    )  # model -> split -> metric -> value
    work: dict[str, float] = field(default_factory=dict)
    observations: list[Observation] = field(default_factory=list)
    missing: bool = False
    state: State = field(default_factory=State)
    models: dict[str, Tree] = field(default_factory=dict)
