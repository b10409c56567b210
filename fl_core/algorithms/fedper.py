"""A shared body and local heads: the algorithms that follow a layer plan, and FedRoD with two heads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fl_core import models, seeds, tree
from fl_core.algorithms import (
    Algorithm,
    Batch,
    Context,
    Message,
    Phase,
    Round,
    Shape,
    State,
    Tree,
    Update,
    register,
)
from fl_core.algorithms.averaging import FineTuned
from fl_core.errors import (
    NUMBER,
    RunError,
    Share,
    UsageError,
    about,
    check_known,
    validate,
)
from fl_core.layers import Layer
from fl_core.models.extended import TwoHeads, split_head
from fl_core.plan import LayerPlan, prefix_length, shift_plan, tensors_in

SENSITIVITY = "federation_sensitivity"
MEASURED = "measured"


class Partial(Algorithm):
    """Base of algorithms that share the body while each client keeps a local head."""

    uses_plan = True
    evaluates = "personal"
    travels, keeps, cost = "the body", "the head", "2 body"

    @property
    def body(self) -> frozenset[str]:
        """Return the names of the tensors of the shared layers.

        Raises:
            RunError: there is no plan yet.
        """
        return self._plan().body_tensors

    @property
    def head(self) -> frozenset[str]:
        """Return the names of the tensors of the local layers.

        Raises:
            RunError: there is no plan yet.
        """
        return self._plan().head_tensors

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        return self.body - self.task_info.not_sent(rnd)

    def finetuning(self, done: int, client: int) -> tuple[Phase, ...]:
        """Return the phase of fine-tuning that the plan asks for, if the run may end after ``done`` rounds.

        Without a plan, or if its decision names no epochs of fine-tuning, there is none.
        """
        epochs, rate = (0, 0.0) if self.plan is None else self.plan.fine_tuning
        if not epochs or not self.task_info.may_end(done):
            return ()
        tensors = self.task_info.tensors
        return (Phase("own", tensors, epochs, batch_stream="finetune", lr=rate),)

    def _plan(self) -> LayerPlan:
        if self.plan is None:
            raise RunError(f"{self.name} must have a plan by now; got none.")
        return self.plan


@register
class FedPer(Partial):
    """Joint training of body and head; only the body is averaged (Arivazhagan et al. 2019)."""

    name = "fedper"
    paper = "Arivazhagan et al. 2019"


@register
class LGFedAvg(Partial):
    """Local representations under a shared classifier, the opposite of FedPer (LG-FedAvg; Liang et al. 2020).

    All layers are trained together. Without a plan the last layer is shared. With a plan its shared layers are.
    """

    name = "lg_fedavg"
    paper = "Liang et al. 2020"
    travels = "the plan's shared layers: the last"
    keeps = "the other layers"
    cost = "2 shared"

    def default_plan(self, layers: tuple[Layer, ...]) -> LayerPlan:
        return LayerPlan.last(layers)


@register
class FedBN(Algorithm):
    """FedAvg with batch normalisations, running statistics included, that stay with each client (Li et al. 2021).

    They are found by the type of their module. Without any this is FedAvg.
    """

    name = "fedbn"
    paper = "Li et al. 2021 (FedBN)"
    travels = "all but batch normalisations"
    keeps = "its batch normalisations"
    cost = "2(P - norms)"
    evaluates = "personal"

    def notes(self) -> list[str]:
        note = "fedbn keeps batch normalisations with each client, and the model has none: it is FedAvg"
        if self.task_info.norms:
            return []
        return [note]

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        return super().shared(rnd, client) - self.task_info.norms


@register
class FedLP(Algorithm):
    """FedAvg whose clients upload each layer with probability ``keep`` (FedLP, homogeneous; Zhu et al. 2023).

    Each layer, client and round has one draw. A layer's weight and bias travel together. Each layer is averaged over
    the clients that sent it, weighted by training samples. A layer that no client sent stays unchanged. With keep = 1
    this is FedAvg. The paper's other form gives clients the first layers only. It is not implemented.
    """

    name = "fedlp"
    paper = "Zhu et al. 2023"
    travels, cost = "all down, random layers up", "P + keep P"

    @dataclass(frozen=True)
    class Config:
        keep: Share = 0.7

    def uploaded(self, rnd: Round, client: int) -> frozenset[str]:
        layers = self.task_info.layers
        draws = seeds.numpy_generator(
            self.task_info.seed, "sent layers", rnd.index, client
        ).random(len(layers))
        layers_with_draws = zip(layers, draws, strict=True)
        sent_layers = [
            layer for layer, draw in layers_with_draws if draw < self.config.keep
        ]
        return super().uploaded(rnd, client) & {*tensors_in(sent_layers)}


@register
class FedRep(Partial):
    """Training of the head with the body frozen, then of the body with the head frozen (Collins et al. 2021).

    The head trains for ``head_epochs`` epochs. By default these are all but one of the
    round's, as the authors have it, and at least one. The body trains for the rest, and
    for at least one epoch. So a round can be longer than the run's epochs. In a run of 0
    epochs the body does not train. If everything is shared this is FedAvg.
    """

    name = "fedrep"
    paper = "Collins et al. 2021"
    trains = "the head, then the body"

    @dataclass(frozen=True)
    class Config:
        head_epochs: int | None = None

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        epochs = self.task_info.epochs
        least_epochs = min(1, epochs)
        head_epochs = self.config.head_epochs
        if head_epochs is None:
            head_epochs = max(least_epochs, epochs - 1)
        body_epochs = epochs
        if self.head:
            body_epochs = max(least_epochs, epochs - head_epochs)
        return Phase("head", self.head, head_epochs, batch_stream="head"), Phase(
            "body", self.body, body_epochs
        )


@register
class FedBABU(FineTuned, Partial):
    """Federated training of the body under a random head that stays fixed until fine-tuning (Oh et al. 2022).

    All clients have the same head. It is random unless the run starts from given weights. Until the end the evaluated
    model is ``global``, the averaged body with that head. The ``personal`` model exists after every client has
    fine-tuned all layers of a copy.
    """

    name = "fedbabu"
    paper = "Oh et al. 2022"
    trains = "the body; at the end a copy of all"
    keeps = "the common head"
    cost = "2 body; body at the end"
    evaluates = "global"

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        return (Phase("body", self.body, self.task_info.epochs),)


@register
class LocalHead(Partial):
    """Training of each client's head alone, on a body that stays as the run starts with it.

    Started from a run of FedAvg (``init``) it fine-tunes the last layers. Yu et al. 2020 also freeze the base. If
    nothing is shared this is Local, bit for bit.
    """

    name = "local_head"
    paper = "Yu et al. 2020 (frozen base)"
    trains, travels, keeps, cost = "the head", "nothing", "its model", "0"

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        return frozenset()

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        if self.head:
            return (Phase("head", self.head, self.task_info.epochs),)
        return ()


@register
class PLayerFL(FedPer):
    """FedPer with a plan chosen in the first round from the gradients of its own training (PLayer-FL, Alg. 1-3).

    The first round has two exchanges:

    - ``stats``: each sampled client trains all layers from the common start. It replies with its federation
      sensitivities over the first epoch only. The server averages them, weighted by training samples, and chooses the
      plan.
    - ``upload``: these clients upload the chosen layers without training again. The first aggregation is already
      partial.

    With a given plan this is FedPer. If no reply of the first round arrives, the next round repeats it.
    """

    name = "playerfl"
    paper = "PLayer-FL (2025)"
    travels = "the body, chosen in the first round"
    cost = "2 body; first P, body and a number a layer"

    def default_plan(self, layers: tuple[Layer, ...]) -> LayerPlan | None:
        return None  # chosen in the first round

    def exchanges(self, index: int) -> tuple[str, ...]:
        if self.decides:
            return ("stats", "upload")
        return ("train",)

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        all_tensors = self.task_info.tensors - self.task_info.never_sent
        if self.plan is None:
            return all_tensors
        return super().shared(rnd, client)

    def server_message(self, server: State, client: int, rnd: Round) -> Message:
        if rnd.exchange == "upload":
            return Message()
        return super().server_message(server, client, rnd)

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        observers = (SENSITIVITY,) if rnd.exchange == "stats" else ()
        whole_phase = Phase(
            "train", self.task_info.tensors, self.task_info.epochs, observe=observers
        )
        if rnd.exchange == "upload":
            return ()
        return (whole_phase,)

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        if rnd.exchange != "stats":
            return super().client_update(state, trained, ctx, rnd, client)
        state.trees = trained
        return Message({}, {MEASURED: self.reported(ctx.observed[SENSITIVITY])})

    def reported(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a client's measurement that the server needs: its ``layers`` and their ``importance``."""
        return {name: measured[name] for name in ("layers", "importance")}

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        if rnd.exchange != "stats":
            return super().aggregate(server, updates, rnd)
        sizes = self.task_info.n_train
        server.meta[MEASURED] = [
            {
                **self.measured(update),
                "client": update.client,
                "weight": sizes[update.client],
            }
            for update in updates
        ]
        return None

    def measured(self, update: Update) -> dict[str, Any]:
        """Return a client's measurement from its reply, after a check.

        Returns:
            A dict with the names of the ``layers``, and the ``importance`` of each in the same order: a number from 0,
            or None.

        Raises:
            UsageError: a layer or a number is not possible. The message names the client.
        """
        measured: Any = update.message.meta.get(MEASURED)
        form = {"layers": [str], "importance": [(NUMBER, None)]}
        with about(f"client {update.name!r}"):
            if fault := validate(measured, form, MEASURED):
                raise UsageError(f"{fault}.")
            layers, importance = measured["layers"], measured["importance"]
            for name in layers:
                check_known(
                    "layer", name, [layer.name for layer in self.task_info.layers]
                )
            numbers = [0.0 if number is None else number for number in importance]
            distinct = len(set(layers)) == len(layers) == len(numbers)
            if not distinct or min(numbers, default=0.0) < 0:
                raise UsageError(
                    f"importance must be a number from 0 for each layer; got {importance!s:.80}."
                )
        return dict(measured)

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        # a client that measured and did not upload in time still has its own model
        shared_names = self.shared(rnd, 0)
        shared_tensors = {
            name: tensor
            for name, tensor in client.trees["model"].items()
            if name not in shared_names
        }
        return super().models(server, State({"model": shared_tensors}), rnd)


class Scout(PLayerFL):
    """The measuring exchange of PLayer-FL alone, for measurements outside a run. Replies hold whole measurements."""

    def reported(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        return dict(measured)


@register
class PLayerFLMinus(PLayerFL):
    """PLayer-FL with one shared layer less than the plan (at least one).

    Raises:
        UsageError: when the plan is chosen, if it shares other layers than the first.
    """

    name = "playerfl_minus"

    def resolve_plan(self, plan: LayerPlan) -> LayerPlan:
        return shift_plan(plan, -1)


@register
class PLayerFLPlus(PLayerFL):
    """PLayer-FL with one shared layer more than the plan (at most all but one).

    Raises:
        UsageError: when the plan is chosen, if it shares other layers than the first.
    """

    name = "playerfl_plus"

    def resolve_plan(self, plan: LayerPlan) -> LayerPlan:
        return shift_plan(plan, +1)


@register
class PLayerFLRandom(PLayerFL):
    """PLayer-FL with a random number of shared first layers, neither the plan's nor all.

    The number is drawn once for a run. All other numbers from 1 on have the same chance.

    Raises:
        UsageError: when the plan is chosen, if it shares other layers than the first, or if
            the model has too few layers for another number.
    """

    name = "playerfl_random"

    def resolve_plan(self, plan: LayerPlan) -> LayerPlan:
        given_length = prefix_length(plan)
        choices = [
            count for count in range(1, len(plan.trainable)) if count != given_length
        ]
        if not choices:
            raise UsageError(
                f"{self.name}: the model must have at least 3 layers; got {len(plan.trainable)}. Use a deeper model."
            )
        length = seeds.numpy_generator(self.task_info.seed, "random prefix").choice(
            choices
        )
        return plan.with_first(int(length), rule="random prefix")


@register
class FedRoD(Algorithm):
    """A generic head trained against the client's class frequencies, and a personal head for the rest.

    The method is FedRoD (Chen and Chao 2022). Let z be the features, G the generic head and P the personal head. The
    client has c_k training samples of class k. The objective is the sum of two losses:

    - loss(G(z) + gamma log c, y), the balanced softmax, for extractor and generic head.
    - loss(sg(G(z)) + P(sg(z)), y) for the personal head alone, where sg stops gradients.

    The personal model predicts by G + P and the global one by G. P starts at zero, so a
    client's first prediction is the generic head's. For a class without samples the
    term gamma log c is the logarithm of the smallest normal number of the type, for
    every gamma but 0.
    """

    name = "fedrod"
    needs_logits = True
    trains = "all, and a personal head"
    travels = "all but the personal head"
    keeps = "the personal head"
    cost = "2P, of the model with one head"
    paper = "FedRoD (Chen and Chao 2022)"
    evaluates = "personal"
    added_modules: ClassVar[Mapping[str, str]] = {"personal": "personal"}

    @dataclass(frozen=True)
    class Config:
        gamma: float = 1.0

    @classmethod
    def wrap_model(
        cls,
        model: nn.Module,
        config: object,
        *,
        shape: Shape,
        n_classes: int,
        seed: int,
    ) -> nn.Module:
        return TwoHeads(*split_head(model, models.example(shape)))

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Tensor:
        x, y = batch
        generic_logits, personal_logits = ctx.forward(params, x, both=True)
        counts = torch.bincount(ctx.labels, minlength=generic_logits.shape[-1]).to(
            generic_logits.dtype
        )
        prior = self.config.gamma * counts.clamp(min=1).log()
        if (
            self.config.gamma
        ):  # losses other than cross-entropy have no derivative at minus infinity
            prior[counts == 0] = math.log(torch.finfo(generic_logits.dtype).tiny)
        return ctx.criterion(generic_logits + prior, y) + ctx.criterion(
            personal_logits, y
        )

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        trees = super().models(server, client, rnd)
        unused_tensors = tree.select(
            server.trees["model"],
            [name for name in trees["personal"] if name.startswith("personal.")],
        )
        # the server's personal head stays at zero
        return trees | {"global": trees["personal"] | unused_tensors}
