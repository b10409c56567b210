"""FedSelect and kNN-Per: methods of the leaderboard that are named as classes.

``fedlayers run --algorithm benchmarks.leaderboard.algorithms:FedSelect`` trains one in a checkout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fl_core import models, tree
from fl_core.algorithms import (
    Algorithm,
    Batch,
    Context,
    Message,
    Phase,
    Round,
    Shape,
    State,
    Steps,
    Tree,
    Update,
)
from fl_core.errors import Count, Positive, Share
from fl_core.models.extended import split_head

MASK = "personal entries"


class FedSelect(Algorithm):
    """A client keeps the entries that its training changed most, and shares the rest (FedSelect; Tamirisa et al. 2024).

    Each client has a mask m of its personal entries, empty at first. A round has these steps:

    1. Training starts from the client's own values where m is set, and from the received ones elsewhere. 2. The
    personal entries train for the round's epochs, then the shared ones. What does not train stays as it is. 3. The
    server averages each entry over the clients that share it, weighted by training samples. An entry that no client
    shares stays unchanged. 4. In each tensor the fraction ``rate`` of the shared entries with the largest |w - w_start|
    becomes personal. This
       ends where more than the fraction ``limit`` of the tensor is personal.

    With rate = 0 this is FedAvg, bit for bit. With rate = limit = 1 every client trains alone after the first round.
    A message has zeros in the place of personal entries, so they never leave the client.

    The released code keeps biases shared, and weights all clients equally. It compares a round's end with the end of
    the round before. An entry that becomes personal receives the average once more there; here it keeps its value. The
    released code alternates the two trainings by epoch.
    """

    name = "fedselect"
    paper = "Tamirisa et al. 2024"
    trains = "personal entries, then shared ones"
    travels, keeps = (
        "shared entries, and a mask of one bit a parameter up",
        "its model and its mask",
    )
    cost = "2P + P/32"
    evaluates = "personal"

    @dataclass(frozen=True)
    class Config:
        rate: Share = 0.05
        limit: Share = 0.5

    def client_state(self, initial: Tree, client: int) -> State:
        names = (
            self.shared(Round(0), client)
            & self.task_info.parameters - self.task_info.frozen
        )
        mask = {
            name: torch.zeros_like(initial[name], dtype=torch.bool) for name in names
        }
        return State({"model": tree.clone(initial), MASK: mask})

    def local_tensors(self, rnd: Round, client: int) -> frozenset[str]:
        return self.submodel(rnd, client)

    def client_start(
        self, state: State, message: Message, ctx: Context, rnd: Round, client: int
    ) -> Tree:
        return merge_personal(
            state.trees["model"], message.trees["model"], state.trees[MASK]
        )

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        everything, epochs = self.submodel(rnd, client), self.task_info.epochs
        personal = Phase("personal", everything, epochs, step="personal_step")
        return (personal, Phase("train", everything, epochs, step="shared_step"))

    def personal_step(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """Take one step of the personal entries."""
        self._step(steps, batch, ctx.trees[MASK])

    def shared_step(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """Take one step of the shared entries."""
        self._step(
            steps, batch, {name: ~each for name, each in ctx.trees[MASK].items()}
        )

    def _step(self, steps: Steps, batch: Batch, moves: Mapping[str, Tensor]) -> None:
        moves = {name: each for name, each in moves.items() if name in steps.params}
        if not any(each.any() for each in moves.values()):
            return
        before = {
            name: steps.params[name].detach().clone()
            for name, each in moves.items()
            if not each.all()
        }
        steps.descend(steps.gradients(batch))
        with torch.no_grad():
            for name, value in before.items():
                steps.params[name].copy_(
                    torch.where(moves[name], steps.params[name], value)
                )

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        received = {name: tensor.cpu() for name, tensor in ctx.reference.items()}
        start, own, mask = (
            merge_personal(state.trees["model"], received, state.trees[MASK]),
            trained["model"],
            {},
        )
        message = super().client_update(state, trained, ctx, rnd, client)
        for name, before in state.trees[MASK].items():
            mask[name] = before | self.choose_personal(
                (own[name] - start[name]).abs(), before
            )
        used = {
            name: each
            for name, each in state.trees[MASK].items()
            if name in message.trees["model"]
        }
        message.trees["model"] |= {
            n: own[n].masked_fill(each, 0) for n, each in used.items()
        }
        message.trees[MASK] = used
        state.trees[MASK] = mask
        return message

    def choose_personal(self, change: Tensor, personal: Tensor) -> Tensor:
        """Return the shared entries that become personal, as a bool tensor of the shape of ``change``."""
        free = change[~personal]
        count = (
            0
            if personal.double().mean() > self.config.limit
            else round(self.config.rate * free.numel())
        )
        least = free.sort(descending=True).values[count - 1] if count else torch.inf
        return (change >= least) & ~personal

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        values, shares = tree.Mean(), tree.Mean()
        for update in updates:
            values.add(update.message.trees["model"], update.weight)
            shares.add(
                {
                    name: (~each).float()
                    for name, each in update.message.trees[MASK].items()
                },
                update.weight,
            )
        found, shared = values.result(), shares.result()
        for name, part in shared.items():
            found[name] = torch.where(
                part > 0, found[name] / part, server.trees["model"][name]
            )
        server.trees["model"].update(found)

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        travels = self.shared(rnd, 0)
        received = tree.select(
            server.trees["model"], travels & server.trees["model"].keys()
        )
        return {
            self.evaluates: merge_personal(
                client.trees["model"], received, client.trees[MASK]
            )
        }


def merge_personal(
    own: Mapping[str, Tensor],
    received: Mapping[str, Tensor],
    mask: Mapping[str, Tensor],
) -> Tree:
    """Return the received values, with the client's own where its mask is set or nothing was received."""
    return {
        **own,
        **{
            n: torch.where(mask[n], own[n], t) if n in mask else t
            for n, t in received.items()
        },
    }


class Memory(nn.Module):
    """Stored features and their classes; rows without a class are free.

    Attributes:
        keys: features [capacity, d].
        values: classes [capacity, C] as rows with a single 1, or of zeros.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, capacity: int, width: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(capacity, width))
        self.register_buffer("values", torch.zeros(capacity, classes))

    def forward(self, features: Tensor, k: int, scale: float) -> Tensor:
        """Return the classes' shares [n, C] among the k nearest entries, each weighted by exp(-distance / scale)."""
        stored = self.values.any(1)
        near = torch.cdist(features, self.keys[stored]).topk(
            min(k, int(stored.sum())), largest=False
        )
        weights = (-near.values / scale).softmax(1)
        return (weights[:, :, None] * self.values[stored][near.indices]).sum(1)


class WithNeighbours(nn.Module):
    """A model whose prediction is mixed with that of the nearest stored samples.

    Training, an empty store and ``lam`` = 0 leave the model's logits as they are.

    Args:
        lam: weight of the neighbours, 0 to 1.
        k: number of neighbours.
        scale: of distances.
        capacity: samples that can be stored.
    """

    def __init__(
        self,
        body: nn.Module,
        head: nn.Linear,
        lam: float,
        k: int,
        scale: float,
        capacity: int,
    ) -> None:
        super().__init__()
        self.body, self.head = body, head
        self.memory = Memory(capacity, head.in_features, head.out_features).to(
            head.weight
        )
        self.lam, self.k, self.scale = lam, k, scale

    def forward(self, x: Tensor, features: bool = False) -> Tensor:
        """Return logits [n, C], or the input [n, d] of the last layer."""
        found = self.body(x)
        if features:
            return found
        logits: Tensor = self.head(found)
        if self.training or self.lam == 0 or not self.memory.values.any():
            return logits
        shares = self.memory(found, self.k, self.scale)
        mixture = self.lam * shares + (1 - self.lam) * logits.softmax(1)
        return mixture.clamp(min=torch.finfo(mixture.dtype).tiny).log()


class KNNPer(Algorithm):
    """FedAvg whose clients also ask their own most similar training samples (kNN-Per; Marfoq et al. 2022).

    Let z be the input of the last layer. After training a client stores z and the label of at most ``capacity`` of its
    training samples. For a new sample it finds the ``k`` nearest of them by Euclidean distance d. The personal
    prediction is

        lam kNN + (1 - lam) softmax(global),  kNN_c = sum_{neighbours of class c} exp(-d / scale) / sum exp(-d / scale)

    With lam = 0 it is the global model's. The global model is FedAvg's bit for bit. The authors choose lam on
    validation samples. Their released code has exp(-d^2 / (size of z x scale)).

    Nothing but the global model travels. Under a stopping rule samples are stored after each evaluated round.
    """

    name = "knn_per"
    needs_logits = True
    paper = "Marfoq et al. 2022"
    trains, keeps, cost = (
        "all",
        "features of its training samples, at the end",
        "2P; P at the end",
    )
    evaluates = "global"
    added_modules: ClassVar[Mapping[str, str]] = {"memory": "personal"}

    @dataclass(frozen=True)
    class Config:
        lam: Share = 0.5
        k: Count = 10
        scale: Positive = 1.0
        capacity: Count = 1000

    @classmethod
    def wrap_model(
        cls, model: nn.Module, config: Any, *, shape: Shape, n_classes: int, seed: int
    ) -> nn.Module:
        body, head = split_head(model, models.example(shape))
        return WithNeighbours(
            body, head, config.lam, config.k, config.scale, config.capacity
        )

    def finetuning(self, done: int, client: int) -> tuple[Phase, ...]:
        if not self.task_info.may_end(done):
            return ()
        names = frozenset(
            name
            for name in self.task_info.tensors
            if name.startswith(("head.", "memory."))
        )
        return (Phase("remember", names, 1, batch_stream="finetune", step="remember"),)

    def remember(self, steps: Steps, batch: Batch, ctx: Context) -> None:
        """Store features and labels of a batch; nothing trains."""
        x, y = batch
        keys, values = steps.live["memory.keys"], steps.live["memory.values"]
        used = int(values.sum())
        room = len(keys) - used
        if room > 0:
            features = ctx.infer(steps.live, x[:room], features=True)
            keys[used : used + len(features)] = features
            values[used : used + len(features), :] = torch.nn.functional.one_hot(
                y[:room], values.shape[1]
            ).float()
