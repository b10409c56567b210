"""Personal models that a network on the server generates.

No autograd graph is kept between sending and receiving. Gradients are computed again from the state after the replies
have arrived. A run directory therefore stores all that is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from fl_core import seeds, tree
from fl_core.algorithms import (
    Context,
    Message,
    Phase,
    Round,
    State,
    Tree,
    Update,
    register,
)
from fl_core.algorithms.averaging import ServerMade
from fl_core.bounds import Count, Positive

PURPOSE = "hypernetwork"  # the purpose of its seeded streams and the name of its tree


def pull_back(function: Callable[[Tree], Tree], at: Tree, cotangent: Tree) -> Tree:
    """Return J^T c, the gradient of sum_k <function(at)_k, c_k> with respect to the entries of ``at``."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in at.items()}
    with torch.enable_grad():
        outputs = function(leaves)
        names = sorted(outputs)
        gradients = torch.autograd.grad(
            [outputs[name] for name in names],
            list(leaves.values()),
            [cotangent[name] for name in names],
        )
    return dict(zip(leaves, gradients, strict=True))


def draw_linear(n_in: int, n_out: int, name: str, draw: torch.Generator) -> Tree:
    """Draw a fully connected layer with PyTorch's initialisation: weight and bias uniform within 1 / sqrt(n_in)."""
    bound = 1 / math.sqrt(n_in)
    shapes: dict[str, tuple[int, ...]] = {"weight": (n_out, n_in), "bias": (n_out,)}
    return {
        f"{name}.{kind}": bound * (2 * torch.rand(shape, generator=draw) - 1)
        for kind, shape in shapes.items()
    }


def apply_linear(net: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return linear(x, net[f"{name}.weight"], net[f"{name}.bias"])


@register
class PFedHN(ServerMade):
    """A hypernetwork on the server that maps each client's embedding to its whole model (Shamsian et al. 2021).

    An embedding has 1 + N // 4 numbers for N clients. It passes through Linear and then three times (ReLU, Linear). All
    these layers have width ``hidden``. One linear head follows for each parameter tensor.

    The client trains the received model and replies with its change, delta = before - after. For each reply in turn the
    server takes one SGD step on the embeddings and the hypernetwork. The gradient is J^T delta with its norm clipped at
    ``clip``. From the second client on, J is taken at the hypernetwork that the clients before have updated.

    Buffers never travel, whatever ``bn`` says. The hypernetwork generates only the parameters that train. Running
    statistics and frozen parameters stay with their client.

    - ``lr``, ``momentum``, ``weight_decay``: of the server's optimiser. The clients use the run's options (the authors:
      0.005, 0.9 and 5e-5).
    - ``local_clip``: the norm at which the clients' gradients are clipped, instead of the run's ``max_grad_norm``.
    - ``begins``: ``drawn`` (default, the original) starts from random heads, so from a model of its own. With
      ``common`` the heads give every client the common initial model.

    Raises:
        UsageError: hidden, lr or a clip is 0, or an unknown ``begins``.
    """

    name = "pfedhn"
    paper = "Shamsian et al. 2021"
    travels = "a generated model down, its change up"

    @dataclass(frozen=True)
    class Config:
        lr: Positive = 0.01
        momentum: float = 0.9
        weight_decay: float = 1e-3
        clip: Positive = 50.0
        local_clip: Positive = 50.0
        hidden: Count = 100
        begins: Literal["drawn", "common"] = "drawn"

    def setup(self) -> None:
        self.parameters = self.task_info.parameters - self.task_info.frozen

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        return self.parameters

    def server_state(self, initial: Tree) -> State:
        clients, width = len(self.task_info.n_train), self.config.hidden
        size = 1 + clients // 4
        draw = seeds.torch_generator(self.task_info.seed, PURPOSE)
        net: Tree = {"embeddings": torch.randn(clients, size, generator=draw)}
        for k in range(4):
            net |= draw_linear(width if k else size, width, f"trunk.{k}", draw)
        for name in sorted(self.parameters):
            head = draw_linear(width, initial[name].numel(), f"heads.{name}", draw)
            if self.config.begins == "common":
                head = {
                    f"heads.{name}.weight": torch.zeros_like(
                        head[f"heads.{name}.weight"]
                    )
                }
                head[f"heads.{name}.bias"] = initial[name].detach().flatten()
            net |= head
        dtype = next(initial[name].dtype for name in sorted(self.parameters))
        net = tree.clone({name: tensor.to(dtype) for name, tensor in net.items()})
        return State(
            {
                "model": initial,
                PURPOSE: net,
                "momentum": {n: torch.zeros_like(t) for n, t in net.items()},
            }
        )

    def generate(
        self, net: Mapping[str, Tensor], like: Mapping[str, Tensor], client: int
    ) -> Tree:
        """Return the parameters that the hypernetwork generates for a client, with the shapes of ``like``."""
        hidden = net["embeddings"][client]
        for k in range(4):
            hidden = apply_linear(net, f"trunk.{k}", hidden.relu() if k else hidden)
        return {
            name: apply_linear(net, f"heads.{name}", hidden).view_as(like[name])
            for name in sorted(self.parameters)
        }

    def server_message(self, server: State, client: int, rnd: Round) -> Message:
        with tree.one_thread(), torch.no_grad():
            return Message(
                {
                    "model": self.generate(
                        server.trees[PURPOSE], server.trees["model"], client
                    )
                }
            )

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        return (
            Phase(
                "train",
                self.task_info.tensors,
                self.task_info.epochs,
                max_grad_norm=self.config.local_clip,
            ),
        )

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        message = super().client_update(state, trained, ctx, rnd, client)
        began = {name: tensor.cpu() for name, tensor in ctx.reference.items()}
        return Message(
            {"delta": tree.subtract(began, message.trees["model"])}, message.meta
        )

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        like = server.trees["model"]
        replies = list(updates)  # all clients have been served before the first step
        net, speed = (
            tree.clone(server.trees[PURPOSE]),
            tree.clone(server.trees["momentum"]),
        )
        for update in (
            replies
        ):  # in place: the network has a hundred times as many parameters as the model
            generated = partial(self.generate, like=like, client=update.client)
            grads = pull_back(generated, net, update.message.trees["delta"])
            scale = min(1.0, self.config.clip / (tree.dot(grads, grads) ** 0.5 + 1e-6))
            for name, tensor in net.items():
                speed[name].mul_(self.config.momentum).add_(grads[name], alpha=scale)
                speed[name].add_(tensor, alpha=self.config.weight_decay)
                tensor.sub_(speed[name], alpha=self.config.lr)
        server.trees |= {PURPOSE: net, "momentum": speed}
