"""Personal models that a network on the server mixes from the clients' models, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_core import seeds, tree
from fl_core.algorithms import (
    Message,
    Observation,
    Round,
    State,
    Tree,
    Update,
    register,
)
from fl_core.algorithms.fedamp import Mixing
from fl_core.algorithms.pfedhn import PURPOSE, apply_linear, draw_linear, pull_back
from fl_core.bounds import Count
from fl_core.errors import UsageError
from fl_core.layers import Layer

CHUNK = 1 << 16  # entries of a tensor in one batch of inner products


@register
class PFedLA(Mixing):
    """Layer-wise mixtures of all clients' models, with weights that a small network learns for each client.

    The method is Alg. 1 and Eq. 6-11 of Ma et al. 2022. On the server client i has an embedding v and a network psi.
    The network is three times (Linear, ReLU) of width ``hidden``, then one Linear head for each unit. A softmax over
    all clients j gives the weights alpha[l, j] of unit l.

    The client receives bar theta_i = sum_j alpha[l, j] theta_j and trains it. It replies with the result theta_i. That
    enters the other mixtures from the next round on. The change Delta = theta_i - bar theta_i updates v and psi by lr
    J^T Delta. This step lowers the client's loss. All mixtures of a round use the models from before the round.

    The evaluated model is bar theta_i, mixed after the round and before training (the output of Alg. 1). Rows with
    model ``local`` are about the trained model. All models are equal in the first round, so the weights first change in
    the second.

    Options beyond the paper's text:

    - ``lr``: the default 0.5 separates similar from different clients within tens of rounds on the paper's CIFAR-10
      model. Public re-implementations use 0.005, and the weights stay uniform.
    - ``weights``: how weights are chosen. Without the network, ``self`` means no federation and ``samples`` means
      FedAvg's weights.

    A unit is a module with weight and bias, and each normalisation alone. Buffers that travel are mixed with their
    unit. The paper keeps running statistics local, as ``batchnorm=local`` does.

    Raises:
        UsageError: an unknown choice, or a width of 0.
    """

    name = "pfedla"
    paper = "Ma et al. 2022"
    travels = "a mixture down, its model up"

    @dataclass(frozen=True)
    class Config:
        lr: float = 0.5
        embedding: Count = 100
        hidden: Count = 100
        weights: Literal["learned", "self", "samples"] = "learned"

    def setup(self) -> None:
        self._units = tuple(_modules(self.task_info.layers))

    @property
    def units(self) -> tuple[Layer, ...]:
        return self._units

    def network(self, server: State, client: int) -> Tree:
        """Return a client's embedding and hypernetwork: the trained ones, or their random start."""
        trained = server.trees.get(_slot(client))
        return self._drawn(client) if trained is None else trained

    def alpha(self, net: Mapping[str, Tensor]) -> Tensor:
        """Return the aggregation weights of a client's hypernetwork, [units, clients]. Each row sums to 1."""
        hidden = net["embedding"]
        for k in range(3):
            hidden = apply_linear(net, f"trunk.{k}", hidden).relu()
        shape = (len(self.units), len(self.task_info.n_train))
        return apply_linear(net, "heads", hidden).view(shape).softmax(1)

    def _given(self, net: Tree) -> Tree:
        return {"alpha": self.alpha(net)}

    def weights(self, server: State, client: int, rnd: Round) -> Tensor:
        with tree.one_thread(), torch.no_grad():
            if self.config.weights == "learned":
                return self.alpha(self.network(server, client))
            clients = range(len(self.task_info.n_train))
            sizes = torch.tensor(
                [self.task_info.weight(each) for each in clients], dtype=torch.float64
            )
            fixed = (
                _one_hot(client, len(sizes))
                if self.config.weights == "self"
                else sizes / sizes.sum()
            )
            return fixed.expand(len(self.units), -1)

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        replies = list(updates)
        learned = {}
        if self.config.weights == "learned":
            with tree.one_thread():
                learned = dict(self._train_hypernetworks(server, replies, rnd))
        super().aggregate(server, replies, rnd)
        server.trees |= learned

    def _train_hypernetworks(
        self, server: State, replies: list[Update], rnd: Round
    ) -> Iterator[tuple[str, Tree]]:
        """Train the hypernetwork of each client that replied by one step, and yield the results."""
        changes = []
        for update in replies:
            sent = self.server_message(server, update.client, rnd).trees["model"]
            changes.append(
                {
                    name: update.message.trees["model"][name] - value
                    for name, value in sent.items()
                }
            )
        along = torch.stack(
            [self._along(server, unit, changes) for unit in self.units]
        )  # [units, replies, clients]
        for k, update in enumerate(replies):
            net, client = self.network(server, update.client), update.client
            # every row of weights sums to 1, so a constant in a row of the cotangent has no effect but on rounding
            cotangent = (along[:, k] - along[:, k, client, None]).to(
                net["embedding"].dtype
            )
            step = pull_back(self._given, net, {"alpha": cotangent})
            yield (
                _slot(client),
                {
                    name: tensor + self.config.lr * step[name]
                    for name, tensor in net.items()
                },
            )

    def _along(self, server: State, unit: Layer, changes: list[Tree]) -> Tensor:
        """Return <theta_j - theta^0, Delta_k> over a unit's parameters, [replies, clients].

        This is how much alpha_j gains from Delta_k. Differences are taken from the common start, so a client that has
        not changed counts exactly 0. A unit that was not sent to a client gives no gradient.
        """
        clients = range(len(self.task_info.n_train))
        products = torch.zeros(len(changes), len(clients), dtype=torch.float64)
        for name in unit.parameters:
            start = server.trees["model"][name]
            moves = [
                (j, self.last_upload(server, j)[name] - start)
                for j in clients
                if self.heard(server, j)
            ]
            changed = [
                (k, change[name]) for k, change in enumerate(changes) if name in change
            ]
            for at in range(0, start.numel() if moves and changed else 0, CHUNK):
                part = slice(at, at + CHUNK)
                left, right = (
                    torch.stack([t.flatten()[part].double() for _, t in each])
                    for each in (changed, moves)
                )
                rows, columns = (
                    [number for number, _ in each] for each in (changed, moves)
                )
                products[torch.tensor(rows)[:, None], torch.tensor(columns)] += (
                    left @ right.T
                )
        return products

    def _drawn(self, client: int) -> Tree:
        draw = seeds.torch_generator(self.task_info.seed, PURPOSE, client)
        outputs = len(self.units) * len(self.task_info.n_train)
        net: Tree = {"embedding": torch.randn(self.config.embedding, generator=draw)}
        for k in range(3):
            net |= draw_linear(
                self.config.hidden if k else self.config.embedding,
                self.config.hidden,
                f"trunk.{k}",
                draw,
            )
        heads = draw_linear(self.config.hidden, outputs, "heads", draw)
        return net | heads


@register
class HeurpFedLA(PFedLA):
    """pFedLA with each client keeping its k most self-weighted units (Ma et al. 2022, Alg. 2, Eq. 12).

    The units R_i are the ``k`` units with the largest weight of the client on itself. Ties go to the earlier unit.
    These units are not sent down: the client continues from its own. It uploads everything. Its hypernetwork learns
    from the other units only. The traffic down is P - ``|R_i|``. With k = 0 this is pFedLA.

    - ``warmup``: rounds before the first units are kept. The default 0 is the paper's. Early choices are between nearly
      equal weights.

    Raises:
        UsageError: as :class:`PFedLA`, or more units to keep than there are.
    """

    name = "heurpfedla"
    static_traffic = False
    travels, keeps, cost = (
        "a mixture but k units down, its model up",
        "its model",
        "2P - k units",
    )

    @dataclass(frozen=True)
    class Config(PFedLA.Config):
        k: int = 1
        warmup: int = 0

    def setup(self) -> None:
        super().setup()
        if self.config.k > len(self.units):
            raise UsageError(
                f"{self.name}: k must be at most {len(self.units)}, the model's units; got {self.config.k}."
            )

    def local_tensors(self, rnd: Round, client: int) -> frozenset[str]:
        return self.task_info.tensors

    def retained_units(self, server: State, client: int, rnd: Round) -> frozenset[str]:
        """Return the names of the units that a client keeps in this round."""
        if rnd.index < self.config.warmup:
            return frozenset()
        itself = self.weights(server, client, rnd)[:, client].tolist()
        ranked = sorted(
            range(len(self.units)), key=lambda unit: -itself[unit]
        )  # stable: the earlier of equal ones
        return frozenset(self.units[unit].name for unit in ranked[: self.config.k])

    def server_message(self, server: State, client: int, rnd: Round) -> Message:
        return Message(
            {
                "model": self.mixture(
                    server, client, rnd, skip=self.retained_units(server, client, rnd)
                )
            }
        )

    def observations(self, server: State, rnd: Round) -> Iterator[Observation]:
        """Record the aggregation weights, and whether each client keeps each unit (1) or receives it (0)."""
        yield from super().observations(server, rnd)
        for client in range(len(self.task_info.n_train)):
            retained = self.retained_units(server, client, rnd)
            yield from (
                Observation(
                    "retained", float(unit.name in retained), client, layer=unit.name
                )
                for unit in self.units
            )


def _slot(client: int) -> str:
    return f"{PURPOSE}/{client}"


def _one_hot(client: int, count: int) -> Tensor:
    return torch.eye(count)[client]


def _modules(layers: Iterable[Layer]) -> Iterator[Layer]:
    """Split each layer by the modules that own its tensors. A layer of one module keeps its name."""
    for layer in layers:
        owners = {name: name.rpartition(".")[0] for name in layer.tensors}
        paths = list(dict.fromkeys(owners.values()))
        for path in paths:
            parameters, buffers = (
                tuple(name for name in kind if owners[name] == path)
                for kind in (layer.parameters, layer.buffers)
            )
            yield (
                layer
                if len(paths) == 1
                else Layer(path or layer.name, parameters, buffers)
            )
