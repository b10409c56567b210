"""Personal models that a network on the server generates, or mixes layer by layer.

No autograd graph is kept between sending and receiving. Gradients are computed again from the state after the replies
have arrived. A run directory therefore stores all that is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from fl_core import seeds, tree
from fl_core.algorithms import (
    Context,
    Message,
    Observation,
    Phase,
    Round,
    State,
    Tree,
    Update,
    register,
)
from fl_core.algorithms.averaging import ServerMade
from fl_core.algorithms.fedamp import Mixing
from fl_core.buffers import RENEWED
from fl_core.errors import Count, Positive, UsageError
from fl_core.layers import Layer, is_inside

CHUNK = 1 << 16  # entries of a tensor in one batch of inner products
PURPOSE = "hypernetwork"  # the purpose of its seeded streams and the name of its tree


def pull_back(function: Callable[[Tree], Tree], at: Tree, cotangent: Tree) -> Tree:
    """Return J^T c, the gradient of sum_k <function(at)_k, c_k> with respect to the entries of ``at``.

    Args:
        function: a differentiable function from tree to tree, with the Jacobian J.
        at: the tree at which J is taken. The gradient has its names and shapes.
        cotangent: c, with the names and shapes of the function's result.
    """
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
    """Draw a fully connected layer with PyTorch's initialisation: weight and bias uniform within 1 / sqrt(n_in).

    Args:
        n_in, n_out: the layer's widths.
        name: the layer's name. The result has ``<name>.weight`` and ``<name>.bias``.
        draw: the generator.
    """
    bound = 1 / math.sqrt(n_in)
    shapes: dict[str, tuple[int, ...]] = {"weight": (n_out, n_in), "bias": (n_out,)}
    return {
        f"{name}.{tensor_name}": bound * (2 * torch.rand(shape, generator=draw) - 1)
        for tensor_name, shape in shapes.items()
    }


def apply_linear(net: Tree, name: str, x: Tensor) -> Tensor:
    return linear(x, net[f"{name}.weight"], net[f"{name}.bias"])


@register
class PFedHN(ServerMade):
    """A hypernetwork on the server that maps each client's embedding to its whole model (Shamsian et al. 2021).

    An embedding has 1 + N // 4 numbers for N clients. It passes through Linear and then three times (ReLU, Linear). All
    these layers have width ``hidden``. One linear head follows for each parameter tensor.

    The client trains the received model and replies with its change, delta = before - after. For each reply in turn the
    server takes one SGD step on the embeddings and the hypernetwork. The gradient is J^T delta with its norm clipped at
    ``clip``. From the second client on, J is taken at the hypernetwork that the clients before have updated.

    The hypernetwork generates only the parameters that train. Running statistics and frozen parameters stay with their
    client, whatever ``batchnorm`` is. Only buffers that follow from the parameters are sent down with them, such as
    the vectors of a spectral norm.

    - ``lr``, ``momentum``, ``weight_decay``: of the server's optimiser. The clients use the run's options (the authors:
      0.005, 0.9 and 5e-5).
    - ``local_clip``: the norm at which the clients' gradients are clipped, instead of the run's ``max_grad_norm``.

    The heads are drawn at random, so each client starts from another model. The initial values of these parameters are
    not used.

    Raises:
        UsageError: hidden, lr or a clip is 0.
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

    def setup(self) -> None:
        self.parameters = self.task_info.parameters - self.task_info.frozen
        rules = self.task_info.buffers.by_name
        self.renewed = {name for name, rule in rules.items() if rule == RENEWED}

    def shared(self, rnd: Round, client: int) -> frozenset[str]:
        return self.parameters | self.renewed

    def server_state(self, initial: Tree) -> State:
        n_clients = len(self.task_info.clients)
        width = self.config.hidden
        embedding_width = 1 + n_clients // 4
        generator = seeds.torch_generator(self.task_info.seed, PURPOSE)
        net: Tree = {
            "embeddings": torch.randn(n_clients, embedding_width, generator=generator)
        }
        for k in range(4):
            net |= draw_linear(
                width if k else embedding_width, width, f"trunk.{k}", generator
            )
        for name in sorted(self.parameters):
            net |= draw_linear(width, initial[name].numel(), f"heads.{name}", generator)
        dtype = next(initial[name].dtype for name in sorted(self.parameters))
        net = tree.clone({name: tensor.to(dtype) for name, tensor in net.items()})
        return State(
            {
                "model": initial,
                PURPOSE: net,
                "momentum": {n: torch.zeros_like(t) for n, t in net.items()},
            }
        )

    def generate(self, net: Tree, like: Tree, client: int) -> Tree:
        """Return the parameters that the hypernetwork generates for a client, by name.

        Args:
            net: the tensors of the hypernetwork and the embeddings, by name.
            like: the parameters' shapes, as tensors of these names.
            client: the client's position.
        """
        hidden = net["embeddings"][client]
        for k in range(4):
            hidden = apply_linear(net, f"trunk.{k}", hidden.relu() if k else hidden)
        return {
            name: apply_linear(net, f"heads.{name}", hidden).view_as(like[name])
            for name in sorted(self.parameters)
        }

    def model_for(self, server: State, client: int, rnd: Round) -> Tree:
        """Return the generated parameters, and the buffers that follow from them."""
        model = server.trees["model"]
        with tree.one_thread(), torch.no_grad():
            whole_model = {
                **model,
                **self.generate(server.trees[PURPOSE], model, client),
            }
            self.task_info.buffers.renew(whole_model)
        return tree.select(whole_model, self.shared(rnd, client))

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
        reference = tree.select(ctx.reference, self.parameters)
        start_params = {name: tensor.cpu() for name, tensor in reference.items()}
        end_params = tree.select(message.trees["model"], self.parameters)
        return Message({"delta": tree.subtract(start_params, end_params)}, message.meta)

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        model = server.trees["model"]
        replies = list(updates)  # all clients have been served before the first step
        net = tree.clone(server.trees[PURPOSE])
        velocity = tree.clone(server.trees["momentum"])
        for update in (
            replies
        ):  # in place: the network has a hundred times as many parameters as the model
            generate_model = partial(self.generate, like=model, client=update.client)
            grads = pull_back(generate_model, net, update.message.trees["delta"])
            scale = min(1.0, self.config.clip / (tree.dot(grads, grads) ** 0.5 + 1e-6))
            for name, tensor in net.items():
                velocity[name].mul_(self.config.momentum).add_(grads[name], alpha=scale)
                velocity[name].add_(tensor, alpha=self.config.weight_decay)
                tensor.sub_(velocity[name], alpha=self.config.lr)
        server.trees |= {PURPOSE: net, "momentum": velocity}


@register
class PFedLA(Mixing):
    """Layer-wise mixtures of all clients' models, with weights that a small network learns for each client.

    The method is Alg. 1 and Eq. 6-11 of Ma et al. 2022. On the server client i has a
    network psi and an embedding v of ``embedding`` numbers. The network is three times
    (Linear, ReLU) of width ``hidden``, then one Linear head for each unit. A softmax
    over all clients j gives the weights alpha[l, j] of unit l.

    The client receives bar theta_i = sum_j alpha[l, j] theta_j and trains it. It replies with the result theta_i. That
    enters the other mixtures from the next round on. The change Delta = theta_i - bar theta_i updates v and psi by lr
    J^T Delta. To first order this lowers the client's loss. All mixtures of a round use the models from before it.

    The evaluated model is bar theta_i, mixed after the round and before training (the output of Alg. 1). Rows with
    model ``local`` are about the trained model. All models are equal in the first round, so the weights first change in
    the second.

    The default ``lr`` of 0.5 separates similar from different clients within tens of rounds on the paper's CIFAR-10
    model. Public re-implementations use 0.005, and the weights stay uniform.

    A unit is a module with weight and bias, and each normalisation alone. Buffers that travel are mixed with their
    unit. The paper keeps running statistics local, as ``batchnorm=local`` does.

    Raises:
        UsageError: a width of 0.
    """

    name = "pfedla"
    paper = "Ma et al. 2022"
    travels = "a mixture down, its model up"

    @dataclass(frozen=True)
    class Config:
        lr: float = 0.5
        embedding: Count = 100
        hidden: Count = 100

    def setup(self) -> None:
        frozen_names = self.task_info.frozen
        renewed_paths = [renewal.path for renewal in self.task_info.buffers.renewals]
        units = _modules(self.task_info.layers, renewed_paths)
        self._units = tuple(unit for unit in units if set(unit.tensors) - frozen_names)

    @property
    def units(self) -> tuple[Layer, ...]:
        return self._units

    def network(self, server: State, client: int) -> Tree:
        """Return a client's embedding and hypernetwork as a tree: the trained tensors, or their random start."""
        trained_network = server.trees.get(_slot(client))
        if trained_network is None:
            return self._drawn(client)
        return trained_network

    def alpha(self, net: Tree) -> Tensor:
        """Return the aggregation weights of a client's hypernetwork, [units, clients]. Each row sums to 1.

        Args:
            net: the client's tensors, as :meth:`network` returns them.
        """
        hidden = net["embedding"]
        for k in range(3):
            hidden = apply_linear(net, f"trunk.{k}", hidden).relu()
        shape = (len(self.units), len(self.task_info.clients))
        return apply_linear(net, "heads", hidden).view(shape).softmax(1)

    def weights(self, server: State, client: int, rnd: Round) -> Tensor:
        with tree.one_thread(), torch.no_grad():
            return self.alpha(self.network(server, client))

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        replies = list(updates)
        with tree.one_thread():
            trained_networks = dict(self._train_hypernetworks(server, replies, rnd))
        super().aggregate(server, replies, rnd)
        server.trees |= trained_networks

    def _train_hypernetworks(
        self, server: State, replies: list[Update], rnd: Round
    ) -> Iterator[tuple[str, Tree]]:
        """Yield the hypernetwork of each client that replied, after one step.

        It is a pair: the name of the client's tree at the server, and the new network.
        The server's state stays unchanged.
        """
        changes = []
        for update in replies:
            sent_model = self.model_for(server, update.client, rnd)
            received_model = tree.select(update.message.trees["model"], sent_model)
            changes.append(
                {name: received_model[name] - sent_model[name] for name in sent_model}
            )
        # [units, replies, clients]
        products = torch.stack(
            [self._along(server, unit, changes) for unit in self.units]
        )
        for k, update in enumerate(replies):
            net = self.network(server, update.client)
            client = update.client
            # every row of weights sums to 1, so a constant in a row of the cotangent has no effect but on rounding
            cotangent = (products[:, k] - products[:, k, client, None]).to(
                net["embedding"].dtype
            )
            gradient = pull_back(
                lambda net: {"alpha": self.alpha(net)}, net, {"alpha": cotangent}
            )
            yield (
                _slot(client),
                {
                    name: tensor + self.config.lr * gradient[name]
                    for name, tensor in net.items()
                },
            )

    def _along(self, server: State, unit: Layer, changes: list[Tree]) -> Tensor:
        """Return <theta_j - theta^0, Delta_k> over a unit's parameters, [replies, clients].

        This is how much alpha_j gains from Delta_k. Differences are taken from the common start, so a client that has
        not changed counts exactly 0. A unit that was not sent to a client gives no gradient.
        """
        clients = self.task_info.clients
        products = torch.zeros(len(changes), len(clients), dtype=torch.float64)
        for name in unit.parameters:
            if name in self.task_info.frozen:
                continue
            start_tensor = server.trees["model"][name]
            client_moves = [
                (j, self.last_upload(server, j)[name] - start_tensor)
                for j in clients
                if self.heard(server, j)
            ]
            reply_changes = [
                (k, change[name]) for k, change in enumerate(changes) if name in change
            ]
            for chunk_start in range(
                0, start_tensor.numel() if client_moves and reply_changes else 0, CHUNK
            ):
                chunk = slice(chunk_start, chunk_start + CHUNK)
                change_rows, move_rows = (
                    torch.stack([t.flatten()[chunk].double() for _, t in entries])
                    for entries in (reply_changes, client_moves)
                )
                rows, columns = (
                    [number for number, _ in entries]
                    for entries in (reply_changes, client_moves)
                )
                products[torch.tensor(rows)[:, None], torch.tensor(columns)] += (
                    change_rows @ move_rows.T
                )
        return products

    def _drawn(self, client: int) -> Tree:
        generator = seeds.torch_generator(self.task_info.seed, PURPOSE, client)
        n_outputs = len(self.units) * len(self.task_info.clients)
        net: Tree = {
            "embedding": torch.randn(self.config.embedding, generator=generator)
        }
        for k in range(3):
            net |= draw_linear(
                self.config.hidden if k else self.config.embedding,
                self.config.hidden,
                f"trunk.{k}",
                generator,
            )
        heads = draw_linear(self.config.hidden, n_outputs, "heads", generator)
        return net | heads


@register
class HeurpFedLA(PFedLA):
    """pFedLA with each client keeping its k most self-weighted units (Ma et al. 2022, Alg. 2, Eq. 12).

    The units R_i are the ``k`` units with the largest weight of the client on itself. Ties go to the earlier unit.
    These units are not sent down: the client continues from its own. It uploads everything. Its hypernetwork learns
    from the other units only. The traffic down is P - ``|R_i|``. With k = 0 this is pFedLA.

    Raises:
        UsageError: as :class:`PFedLA`, or more units to keep than there are.
    """

    name = "heurpfedla"
    static_traffic = False
    travels = "a mixture but k units down, its model up"
    keeps = "its model"
    cost = "2P - k units"

    @dataclass(frozen=True)
    class Config(PFedLA.Config):
        k: int = 1

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
        self_weights = self.weights(server, client, rnd)[:, client].tolist()
        # stable: the earlier of equal ones
        ranked_units = sorted(
            range(len(self.units)), key=lambda unit: -self_weights[unit]
        )
        return frozenset(
            self.units[unit].name for unit in ranked_units[: self.config.k]
        )

    def model_for(self, server: State, client: int, rnd: Round) -> Tree:
        skipped_units = self.retained_units(server, client, rnd)
        return self.mixture(server, client, rnd, skip=skipped_units)

    def observations(self, server: State, rnd: Round) -> Iterator[Observation]:
        """Yield the aggregation weights, and ``retained``: 1 if a client keeps a unit, 0 if it receives the unit."""
        yield from super().observations(server, rnd)
        for client in self.task_info.clients:
            retained_units = self.retained_units(server, client, rnd)
            yield from (
                Observation(
                    "retained",
                    float(unit.name in retained_units),
                    client,
                    layer=unit.name,
                )
                for unit in self.units
            )


def _slot(client: int) -> str:
    return f"{PURPOSE}/{client}"


def _modules(layers: Iterable[Layer], renewed: Sequence[str] = ()) -> Iterator[Layer]:
    """Yield the parts of each layer, one for each module that owns tensors of it.

    A part has the module's path as its name. A layer of a single module is left
    unchanged.

    Args:
        layers: the layers to split.
        renewed: paths of modules whose buffers follow from their other tensors, so that all are in one unit.
    """
    for layer in layers:
        path_by_tensor = {}
        for name in layer.tensors:
            renewed_paths = [path for path in renewed if is_inside(name, path)]
            path_by_tensor[name] = (
                renewed_paths[0] if renewed_paths else name.rpartition(".")[0]
            )
        paths = list(dict.fromkeys(path_by_tensor.values()))
        for path in paths:
            parameters, buffers = (
                tuple(name for name in tensor_names if path_by_tensor[name] == path)
                for tensor_names in (layer.parameters, layer.buffers)
            )
            yield (
                layer
                if len(paths) == 1
                else Layer(path or layer.name, parameters, buffers)
            )
