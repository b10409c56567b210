"""Requests to a client and its replies, as the engine, a client's backend and its workers pass them on.

A backend adds to a request what its workers need of the client, and removes from the reply what must stay there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fl_core.algorithms.base import Message, Observation, Round, State
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
        state: the client's state, which its backend adds for a worker.
    """

    client: int
    rnd: Round
    message: Message
    score: tuple[str, ...] = ()
    keep: bool = False
    state: State = field(default_factory=State)


@dataclass(frozen=True)
class FinetuneRequest:
    """A request to fine-tune a copy of the client's evaluated model after ``done`` rounds. It is kept as ``personal``.

    Attributes:
        server: the server's state. The client's backend makes models of it for a worker.
        models: these models. received: bytes of the server's tensors in them.
    """

    client: int
    done: int
    server: State = field(default_factory=State)
    models: dict[str, Tree] = field(default_factory=dict)
    received: int = 0


@dataclass(frozen=True)
class ScoreRequest:
    """A request to score the client's models on validation and test samples after ``done`` rounds.

    The reply also carries observations. The fields are those of :class:`FinetuneRequest`.
    """

    client: int
    done: int
    server: State = field(default_factory=State)
    models: dict[str, Tree] = field(default_factory=dict)
    received: int = 0


ClientRequest = TrainRequest | FinetuneRequest | ScoreRequest


@dataclass
class ClientReply:
    """A client's reply: messages and numbers. Fields that do not apply stay empty.

    Attributes:
        message: None if it was lost on its way. The client has then returned to its state before the request.
        received: bytes of the server's tensors in the models that were scored or tuned.
        state: the client's new state, which its backend takes out.
        models: models that the backend takes out and keeps, by name.
    """

    client: int
    message: Message | None = field(default_factory=Message)
    scores: dict[str, dict[str, dict[str, float]]] = field(
        default_factory=dict
    )  # model -> split -> metric -> value
    work: dict[str, float] = field(default_factory=dict)
    observations: list[Observation] = field(default_factory=list)
    received: int = 0
    state: State = field(default_factory=State)
    models: dict[str, Tree] = field(default_factory=dict)
