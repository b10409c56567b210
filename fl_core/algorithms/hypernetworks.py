"""Personal models that a network on the server gives: their weights themselves, or how the clients' are mixed.

No graph lives between sending and receiving: gradients are taken anew from the state when the replies are in, which
needs nothing that a run directory does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fl_core import seeds, tree
from fl_core.algorithms.base import Algorithm, Message, Observation, Round, State, TaskInfo, Update, register
from fl_core.algorithms.fedamp import Mixing
from fl_core.errors import UsageError, check_known
from fl_core.layers import Layer
from fl_core.plan import LayerPlan
from fl_core.training.context import Context
from fl_core.training.phases import Phase
from fl_core.tree import Tree

PURPOSE = "hypernetwork"  # of its seeded streams, and the name of its tree
CHUNK = 1 << 16  # scalars of a tensor whose inner products with all clients' are taken at once


def pull_back(function: Callable[[Tree], Tree], at: Tree, cotangent: Tree) -> Tree:
    """J^T c: the gradient of sum_k <function(at)_k, c_k> by the entries of ``at``."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in at.items()}
    with torch.enable_grad():
        outputs = function(leaves)
        names = sorted(outputs)
        gradients = torch.autograd.grad(
            [outputs[name] for name in names], list(leaves.values()), [cotangent[name] for name in names]
        )
    return dict(zip(leaves, gradients, strict=True))


def _linear(n_in: int, n_out: int, name: str, draw: torch.Generator) -> Tree:
    """A fully connected layer with PyTorch's initial values: uniform within 1 / sqrt(n_in), weight and bias."""
    bound = 1 / math.sqrt(n_in)
    shapes: dict[str, tuple[int, ...]] = {"weight": (n_out, n_in), "bias": (n_out,)}
    return {f"{name}.{kind}": bound * (2 * torch.rand(shape, generator=draw) - 1) for kind, shape in shapes.items()}


def _apply(net: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return linear(x, net[f"{name}.weight"], net[f"{name}.bias"])


# --- a hypernetwork that gives the weights ---------------------------------------------------------------------


@register
class PFedHN(Algorithm):
    """One hypernetwork on the server maps a learned embedding of each client to its whole model (Shamsian et al. 2021).

    Embeddings of 1 + N // 4 numbers go through Linear and three times (ReLU, Linear), all of width ``hidden``, and one
    linear head for each parameter tensor. The client trains what it received and replies with its change,
    delta = before - after; the server takes one step of SGD on (embeddings, hypernetwork) with the gradient
    J^T delta, its norm clipped at ``clip``, client after client. ``lr``, ``momentum`` and ``weight_decay`` are the
    server's; the clients' are the run's (the authors: 0.005, 0.9 and 5e-5), their gradients clipped at
    ``local_clip``, not at the run's ``clip``. From the second client of a round on, J is that of the hypernetwork as
    the clients before have moved it.

    Buffers never travel, whatever ``bn`` says: the hypernetwork gives the parameters that train, and running
    statistics stay with their client, as do parameters that the model's author froze. ``begins``: ``drawn`` (default,
    the original) starts from random heads, so from other models than every other algorithm; ``common`` from heads that
    give the common initial model to every client.

    Raises:
        UsageError: hidden, lr or a clip is 0, or an unknown ``begins``.
    """

    name = "pfedhn"
    paper = "Shamsian et al. 2021"
    travels = "a generated model down, its change up"
    evaluates = "personal"

    @dataclass(frozen=True)
    class Config:
        lr: float = 0.01
        momentum: float = 0.9
        weight_decay: float = 1e-3
        clip: float = 50.0
        local_clip: float = 50.0
        hidden: int = 100
        begins: str = "drawn"

    def __init__(self, task_info: TaskInfo, plan: LayerPlan | None = None, config: Mapping[str, Any] | None = None):
        super().__init__(task_info, plan, config)
        check_known(f"start of {self.name}", self.config.begins, ("drawn", "common"))
        for key in ("lr", "clip", "local_clip", "hidden"):
            if not getattr(self.config, key) > 0:
                raise UsageError(f"{self.name}: {key} must be above 0")
        self.parameters = task_info.parameters - task_info.frozen

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        return self.parameters

    def server_state(self, initial: Tree) -> State:
        clients, width = len(self.task_info.n_train), self.config.hidden
        size = 1 + clients // 4
        draw = seeds.torch_generator(self.task_info.seed, PURPOSE)
        net: Tree = {"embeddings": torch.randn(clients, size, generator=draw)}
        for k in range(4):
            net |= _linear(width if k else size, width, f"trunk.{k}", draw)
        for name in sorted(self.parameters):
            head = _linear(width, initial[name].numel(), f"heads.{name}", draw)
            if self.config.begins == "common":
                head = {f"heads.{name}.weight": torch.zeros_like(head[f"heads.{name}.weight"])}
                head[f"heads.{name}.bias"] = initial[name].detach().flatten()
            net |= head
        dtype = next(initial[name].dtype for name in sorted(self.parameters))
        net = tree.clone({name: tensor.to(dtype) for name, tensor in net.items()})
        return State({"model": initial, PURPOSE: net, "momentum": {n: torch.zeros_like(t) for n, t in net.items()}})

    def generated(self, net: Mapping[str, Tensor], like: Mapping[str, Tensor], client: int) -> Tree:
        """The parameters that the hypernetwork generates for a client, shaped as in ``like``."""
        hidden = net["embeddings"][client]
        for k in range(4):
            hidden = _apply(net, f"trunk.{k}", hidden.relu() if k else hidden)
        return {name: _apply(net, f"heads.{name}", hidden).view_as(like[name]) for name in sorted(self.parameters)}

    def server_message(self, server: State, client: int, rnd: Round) -> Message:
        with tree.one_thread(), torch.no_grad():
            return Message({"model": self.generated(server.trees[PURPOSE], server.trees["model"], client)})

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        return (Phase("train", self.task_info.tensors, self.task_info.epochs, max_grad_norm=self.config.local_clip),)

    def client_update(self, state: State, trained: dict[str, Tree], ctx: Context, rnd: Round, client: int) -> Message:
        message = super().client_update(state, trained, ctx, rnd, client)
        began = {name: tensor.cpu() for name, tensor in ctx.reference.items()}
        return Message({"delta": tree.subtract(began, message.trees["model"])}, message.meta)

    def client_state(self, initial: Tree, client: int) -> State:
        state = super().client_state(initial, client)
        state.meta["client"] = client
        return state

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        like = server.trees["model"]
        replies = list(updates)  # all clients have been served before the first step
        net, speed = tree.clone(server.trees[PURPOSE]), tree.clone(server.trees["momentum"])
        for update in replies:  # in place: the network has a hundred times as many parameters as the model
            generated = partial(self.generated, like=like, client=update.client)
            grads = pull_back(generated, net, update.message.trees["delta"])
            scale = min(1.0, self.config.clip / (tree.dot(grads, grads) ** 0.5 + 1e-6))
            for name, tensor in net.items():
                speed[name].mul_(self.config.momentum).add_(grads[name], alpha=scale)
                speed[name].add_(tensor, alpha=self.config.weight_decay)
                tensor.sub_(speed[name], alpha=self.config.lr)
        server.trees |= {PURPOSE: net, "momentum": speed}

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        generated = self.server_message(server, client.meta["client"], rnd).trees["model"]
        return {self.evaluates: {**client.trees["model"], **generated}}


# --- hypernetworks that mix --------------------------------------------------------------------------------------


@register
class PFedLA(Mixing):
    """Each client's model is mixed unit by unit from all clients', with weights that a small network learns.

    Ma et al. 2022, Alg. 1, Eq. 6-11. On the server client i has an embedding v and a network psi: three times
    (Linear, ReLU) of width ``hidden``, and one Linear head a unit that gives the weights alpha[l, j] of all clients j
    on unit l, a softmax over j. It receives bar theta_i = sum_j alpha[l, j] theta_j, trains it, and replies with the
    result theta_i, which enters the others' mixtures from the next round on. Its change Delta = theta_i - bar theta_i
    moves v and psi by lr J^T Delta: along the change, which is downhill in the client's loss. All of a round's
    mixtures are of the models before it.

    The evaluated model is bar theta_i, mixed after the round and before training (Alg. 1's output); rows under
    ``local`` are the trained one's. At the first round all models are equal, so the weights first move in the second.

    A unit is a module's tensors (``unit=module``, the paper's: weight and bias together, a normalisation alone), with
    ``unit=layer`` one of the run's layers, with ``unit=model`` the whole model. Buffers that travel are mixed with
    their unit; the paper's running statistics stay local, which is ``bn=local``.

    Where the paper is silent: ``lr`` 0.5 was found to separate like from unlike clients within tens of rounds on its
    CIFAR-10 model, where the 0.005 of public re-implementations leaves the weights uniform; ``zero_heads`` starts
    exactly uniform; ``norm=relu_sum`` divides ReLU outputs by their sum, from heads within 0 and 1 (public
    re-implementations), an all-zero row being the client itself; ``reverse`` is those re-implementations' sign, which
    climbs the loss. ``weights`` can do without the network: ``self`` is no federation, ``samples`` the weights of
    FedAvg, ``similar`` the softmax over the clients of the cosine between a unit's parameters and theirs, divided by
    ``temperature`` (the toy example of the paper's Fig. 1, which does not name its similarity).

    Raises:
        UsageError: an unknown choice, a width or a temperature of 0.
    """

    name = "pfedla"
    paper = "Ma et al. 2022"
    travels = "a mixture down, its model up"

    @dataclass(frozen=True)
    class Config:
        lr: float = 0.5
        embedding: int = 100
        hidden: int = 100
        norm: str = "softmax"
        zero_heads: bool = False
        reverse: bool = False
        weights: str = "learned"
        unit: str = "module"
        temperature: float = 1.0

    def __init__(self, task_info: TaskInfo, plan: LayerPlan | None = None, config: Mapping[str, Any] | None = None):
        super().__init__(task_info, plan, config)
        check_known(f"norm of {self.name}", self.config.norm, ("softmax", "relu_sum"))
        check_known(f"weights of {self.name}", self.config.weights, ("learned", "self", "samples", "similar"))
        check_known(f"unit of {self.name}", self.config.unit, ("module", "layer", "model"))
        for key in ("embedding", "hidden"):
            if not getattr(self.config, key):
                raise UsageError(f"{self.name}: {key} must be at least 1")
        if not self.config.temperature > 0:
            raise UsageError(f"{self.name}: temperature must be above 0")
        by_unit = {"module": tuple(_modules(task_info.layers)), "layer": task_info.layers, "model": super().units}
        self._units = by_unit[self.config.unit]

    @property
    def units(self) -> tuple[Layer, ...]:
        return self._units

    def network(self, server: State, client: int) -> Tree:
        """A client's embedding and hypernetwork: as trained so far, else its random start."""
        trained = server.trees.get(_slot(client))
        return self._drawn(client) if trained is None else trained

    def alpha(self, net: Mapping[str, Tensor], client: int) -> Tensor:
        """Aggregation weights [units, clients] that a client's hypernetwork gives; rows sum to 1."""
        hidden = net["embedding"]
        for k in range(3):
            hidden = _apply(net, f"trunk.{k}", hidden).relu()
        shape = (len(self.units), len(self.task_info.n_train))
        scores = _apply(net, "heads", hidden).view(shape)
        if self.config.norm == "softmax":
            return scores.softmax(1)
        scores = scores.relu()
        total = scores.sum(1, keepdim=True)
        return torch.where(total > 0, scores / total.where(total > 0, 1.0), _one_hot(client, shape[1]))

    def _given(self, net: Tree, client: int) -> Tree:
        return {"alpha": self.alpha(net, client)}

    def weights(self, server: State, client: int, rnd: Round) -> Tensor:
        with tree.one_thread(), torch.no_grad():
            if self.config.weights == "learned":
                return self.alpha(self.network(server, client), client)
            if self.config.weights == "similar":
                return self._similar(server, client)
            clients = range(len(self.task_info.n_train))
            sizes = torch.tensor([self.task_info.weight(each) for each in clients], dtype=torch.float64)
            fixed = _one_hot(client, len(sizes)) if self.config.weights == "self" else sizes / sizes.sum()
            return fixed.expand(len(self.units), -1)

    def _similar(self, server: State, client: int) -> Tensor:
        """The softmax of cosines between what a client has trained and what all clients have [units, clients]."""
        cosines = []
        for unit in self.units:
            every = [self.trained(server, other, unit) for other in range(len(self.task_info.n_train))]
            cosines.append([tree.cosine(every[client], other) for other in every])
        return (torch.tensor(cosines, dtype=torch.float64) / self.config.temperature).softmax(1)

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        replies = list(updates)
        learned = {}
        if self.config.weights == "learned":
            with tree.one_thread():
                learned = dict(self._learned(server, replies, rnd))
        super().aggregate(server, replies, rnd)
        server.trees |= learned

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        mixed = self.server_message(server, client.meta["client"], rnd).trees["model"]
        return {self.evaluates: {**client.trees["model"], **mixed}}

    def _learned(self, server: State, replies: list[Update], rnd: Round) -> Iterator[tuple[str, Tree]]:
        """The hypernetworks of the clients that replied, each after one step of training."""
        changes = []
        for update in replies:
            sent = self.server_message(server, update.client, rnd).trees["model"]
            changes.append({name: update.message.trees["model"][name] - value for name, value in sent.items()})
        along = torch.stack([self._along(server, unit, changes) for unit in self.units])  # [units, replies, clients]
        for k, update in enumerate(replies):
            net, client = self.network(server, update.client), update.client
            # every row of weights sums to 1, so a constant in a row of the cotangent has no effect but on rounding
            cotangent = (along[:, k] - along[:, k, client, None]).to(net["embedding"].dtype)
            step = pull_back(partial(self._given, client=client), net, {"alpha": cotangent})
            rate = -self.config.lr if self.config.reverse else self.config.lr
            yield _slot(client), {name: tensor + rate * step[name] for name, tensor in net.items()}

    def _along(self, server: State, unit: Layer, changes: list[Tree]) -> Tensor:
        """<theta_j - theta^0, Delta_k> over a unit's parameters [replies, clients]: what alpha_j gains from Delta_k.

        Taken from the common start, so that clients who have not moved count exactly 0. A unit that was not sent to a
        client gives it nothing to learn.
        """
        clients = range(len(self.task_info.n_train))
        products = torch.zeros(len(changes), len(clients), dtype=torch.float64)
        for name in unit.parameters:
            start = server.trees["model"][name]
            moves = [(j, self.last(server, j)[name] - start) for j in clients if self.heard(server, j)]
            changed = [(k, change[name]) for k, change in enumerate(changes) if name in change]
            for at in range(0, start.numel() if moves and changed else 0, CHUNK):
                part = slice(at, at + CHUNK)
                left, right = (torch.stack([t.flatten()[part].double() for _, t in each]) for each in (changed, moves))
                rows, columns = ([number for number, _ in each] for each in (changed, moves))
                products[torch.tensor(rows)[:, None], torch.tensor(columns)] += left @ right.T
        return products

    def _drawn(self, client: int) -> Tree:
        draw = seeds.torch_generator(self.task_info.seed, PURPOSE, client)
        outputs = len(self.units) * len(self.task_info.n_train)
        net: Tree = {"embedding": torch.randn(self.config.embedding, generator=draw)}
        for k in range(3):
            net |= _linear(self.config.hidden if k else self.config.embedding, self.config.hidden, f"trunk.{k}", draw)
        heads = _linear(self.config.hidden, outputs, "heads", draw)
        if self.config.zero_heads:
            heads = {name: torch.zeros_like(tensor) for name, tensor in heads.items()}
        elif self.config.norm == "relu_sum":
            uniform = torch.rand(heads["heads.weight"].shape, generator=draw)
            heads = {"heads.weight": uniform, "heads.bias": torch.zeros(outputs)}
        return net | heads


@register
class HeurpFedLA(PFedLA):
    """pFedLA that keeps the k units of each client in which it trusts itself most (Ma et al. 2022, Alg. 2, Eq. 12).

    The units R_i with the ``k`` largest weights of the client on itself, of equal ones the earlier, are not sent to it:
    it goes on from its own last ones there, uploads everything, and its hypernetwork learns from the other units only.
    Down: P - |R_i|. Retention begins after ``warmup`` rounds (default 0, the paper's; the first choices are between
    nearly equal weights). With k = 0 it is pFedLA.

    Raises:
        UsageError: as :class:`PFedLA`, or more units to keep than there are.
    """

    name = "heurpfedla"
    static_traffic = False
    travels, keeps, cost = "a mixture but k units down, its model up", "its model", "2P - k units"

    @dataclass(frozen=True)
    class Config(PFedLA.Config):
        k: int = 1
        warmup: int = 0

    def __init__(self, task_info: TaskInfo, plan: LayerPlan | None = None, config: Mapping[str, Any] | None = None):
        super().__init__(task_info, plan, config)
        if self.config.k > len(self.units):
            raise UsageError(f"{self.name}: k is {self.config.k}, and the model has {len(self.units)} units to keep")

    def local_tensors(self, rnd: Round, client: int) -> frozenset[str]:
        return self.task_info.tensors

    def retained(self, server: State, client: int, rnd: Round) -> frozenset[str]:
        """Names of the units that a client keeps in this round."""
        if rnd.index < self.config.warmup:
            return frozenset()
        itself = self.weights(server, client, rnd)[:, client].tolist()
        ranked = sorted(range(len(self.units)), key=lambda unit: -itself[unit])  # stable: the earlier of equal ones
        return frozenset(self.units[unit].name for unit in ranked[: self.config.k])

    def server_message(self, server: State, client: int, rnd: Round) -> Message:
        return Message({"model": self.mixture(server, client, rnd, skip=self.retained(server, client, rnd))})

    def observations(self, server: State, rnd: Round) -> Iterator[Observation]:
        """The aggregation weights, and for every client and unit whether it is kept (1) or sent (0)."""
        yield from super().observations(server, rnd)
        for client in range(len(self.task_info.n_train)):
            retained = self.retained(server, client, rnd)
            yield from (
                Observation("retained", float(unit.name in retained), client, layer=unit.name) for unit in self.units
            )


def _slot(client: int) -> str:
    return f"{PURPOSE}/{client}"


def _one_hot(client: int, count: int) -> Tensor:
    return torch.eye(count)[client]


def _modules(layers: Iterable[Layer]) -> Iterator[Layer]:
    """Each layer taken apart by the modules that own its tensors; a layer of one module keeps its name."""
    for layer in layers:
        owners = {name: name.rpartition(".")[0] for name in layer.tensors}
        paths = list(dict.fromkeys(owners.values()))
        for path in paths:
            parameters, buffers = (
                tuple(name for name in kind if owners[name] == path) for kind in (layer.parameters, layer.buffers)
            )
            yield layer if len(paths) == 1 else Layer(path or layer.name, parameters, buffers)
