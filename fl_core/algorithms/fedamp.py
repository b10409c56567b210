"""Personal models that are mixtures of the clients' models, with weights or critical parameters of each client."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from fl_core import seeds, tree
from fl_core.algorithms import (
    Context,
    Message,
    Observation,
    Round,
    State,
    Tree,
    Update,
    register,
)
from fl_core.algorithms.averaging import OwnModel, ProximalTerm, ServerMade
from fl_core.errors import (
    INSIDE,
    NUMBER,
    Count,
    Positive,
    Share,
    UsageError,
    validate,
)
from fl_core.layers import Layer

AGGREGATION_WEIGHT = "aggregation_weight"
PAIRS = 50_000
"""The most aggregation weights in an evaluation. Above it only each client's weight on itself is recorded."""


class Mixing(ServerMade):
    """Base of algorithms whose server keeps each client's last upload and mixes a model for each client from them.

    A client that has not replied yet counts with the common initial model. An algorithm defines its :attr:`units`, by
    default the whole model. Its :meth:`weights` give each client's weights on all clients for each unit.
    """

    evaluates = "personal"

    @property
    def units(self) -> tuple[Layer, ...]:
        """Return the groups of tensors that have aggregation weights of their own. Default: the whole model."""
        layers = self.task_info.layers
        parameters = chain.from_iterable(layer.parameters for layer in layers)
        buffers = chain.from_iterable(layer.buffers for layer in layers)
        return (Layer("", tuple(parameters), tuple(buffers)),)

    def trained(self, server: State, client: int, unit: Layer) -> Tree:
        """Return the parameters of a unit that train, from a client's last upload (:meth:`last_upload`).

        Frozen parameters are the same everywhere and left out.
        """
        return tree.select(
            self.last_upload(server, client),
            set(unit.parameters) - self.task_info.frozen,
        )

    def weights(self, server: State, client: int, rnd: Round) -> Tensor:
        """Return a client's aggregation weights, [units, clients]. They are at least 0 and each row sums to 1.

        An algorithm must define them; here it raises NotImplementedError.
        """
        raise NotImplementedError

    def observations(self, server: State, rnd: Round) -> Iterator[Observation]:
        """Yield the present aggregation weights of receivers (``client``) on senders (``client_b``).

        All weights are recorded if there are at most :data:`PAIRS` of them. In larger federations only the weight of
        each client on itself is recorded.
        """
        clients = self.task_info.clients
        records_all = len(self.units) * len(clients) ** 2 <= PAIRS
        for client in clients:
            for unit, row in zip(
                self.units, self.weights(server, client, rnd).tolist(), strict=True
            ):
                for peer in clients if records_all else (client,):
                    yield Observation(
                        AGGREGATION_WEIGHT, row[peer], client, peer, unit.name
                    )

    def heard(self, server: State, client: int) -> bool:
        """Return whether the server has an upload of this client."""
        return _slot(client) in server.trees

    def last_upload(self, server: State, client: int) -> Tree:
        """Return the tensors of a client's last upload by name, not copied.

        For a client that has not replied yet it is the common initial model.
        """
        if self.heard(server, client):
            return server.trees[_slot(client)]
        return server.trees["model"]

    def mixture(
        self, server: State, client: int, rnd: Round, skip: frozenset[str] = frozenset()
    ) -> Tree:
        """Return the tensors that a client receives: sum_j weight_j theta_j, with the last uploads theta_j.

        Sums are taken in float64. Buffers follow their rules (:mod:`fl_core.buffers`).

        Args:
            server: the server's state.
            client: the client's position.
            rnd: the round.
            skip: names of the units that are left out.
        """
        travels = self.shared(rnd, client)
        with tree.one_thread():
            mixed_model: Tree = {}
            for unit, row in zip(
                self.units, self.weights(server, client, rnd).tolist(), strict=True
            ):
                if unit.name not in skip:
                    mixed_model |= self._mix(
                        server, [name for name in unit.tensors if name in travels], row
                    )
        return {
            name: mixed_model[name]
            for name in server.trees["model"]
            if name in mixed_model
        }

    def _mix(self, server: State, names: list[str], row: list[float]) -> Tree:
        mean = tree.Mean(self.task_info.buffers)
        unheard_weight = sum(
            weight for peer, weight in enumerate(row) if not self.heard(server, peer)
        )
        if unheard_weight > 0:
            mean.add(tree.select(server.trees["model"], names), unheard_weight)
        for peer, weight in enumerate(row):
            if weight > 0 and self.heard(server, peer):
                mean.add(tree.select(self.last_upload(server, peer), names), weight)
        return mean.result()

    def model_for(self, server: State, client: int, rnd: Round) -> Tree:
        return self.mixture(server, client, rnd)

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        # messages depend on all uploads of the round before, so none changes until every client has been served
        server.trees |= {
            _slot(update.client): update.message.trees["model"]
            for update in list(updates)
        }


def _slot(client: int) -> str:
    return f"client/{client}"


@register
class Grouped(Mixing):
    """FedAvg in each group of clients: a client receives the weighted mean of its group's last models.

    With one group, and all clients in every round, it is FedAvg. With a group for each client it is local training.

    - ``groups``: the number of each client's group, in the order of clients. The default is one group.

    Raises:
        UsageError: ``groups`` has another length than the number of clients.
    """

    name = "grouped"
    paper = "McMahan et al. 2017, in each group"
    travels = "a mean of its group down, its model up"

    @dataclass(frozen=True)
    class Config:
        groups: tuple[Count, ...] = ()

    def setup(self) -> None:
        n_clients = len(self.task_info.clients)
        self.groups = torch.tensor(self.config.groups or [1] * n_clients)
        if len(self.groups) != n_clients:
            raise UsageError(
                f"groups must be one for each of {n_clients} clients; got {len(self.groups)}."
            )

    def weights(self, server: State, client: int, rnd: Round) -> Tensor:
        info = self.task_info
        sizes = torch.tensor([*map(info.weight, info.clients)], dtype=torch.float64)
        row = sizes * (self.groups == self.groups[client])
        return (row / row.sum())[None]


class Keeping(OwnModel, Mixing):
    """Base of algorithms that mix whole models while clients keep their own model between rounds."""

    travels, keeps = "a mixture down, its model up", "its model"


@register
class FedAMP(ProximalTerm, Keeping):
    """A pull of every client to its own cloud model, mixed by the similarity of models (Huang et al. 2021).

    Client i minimises loss(w) + lam / (2 alpha_k) ||w - u_i||^2 with u_i = sum_j xi_ij w_j. The weights are xi_ij =
    (alpha_k / sigma) exp(-||w_i - w_j||^2 / sigma) for j != i. That is alpha_k times the derivative of
    A(d) = 1 - exp(-d / sigma) at the squared distance of the parameters. The rest to 1 is xi_ii.

    In round k, counted from 0, alpha_k is alpha * decay^(k // decay_every). It is at most sigma / (N - 1) for N
    clients, so no weight is negative. Public code has no such limit. Its pull starts at lam / 10^4, hardly a
    federation.

    The evaluated model is w_i after local training. The penalty is the squared norm with a gradient. Some public code
    penalises detached weights, so that it trains without federation.

    The pull grows as alpha_k falls. Gradient steps diverge once lr lam / alpha_k is above 2. With lr 0.1 and the
    defaults this happens from round 180 on. With ``decay=1`` alpha_k stays constant.

    - ``start``: ``own`` trains from the client's last model (default, as in most public code). With ``cloud`` training
      starts from u_i.

    Raises:
        UsageError: alpha, decay or sigma is 0, decay_every is 0, or an unknown start.
    """

    name = "fedamp"
    paper = "Huang et al. 2021"
    trains = "all, with a pull to the mixture"
    limited = True

    @dataclass(frozen=True)
    class Config:
        lam: float = 1.0
        alpha: Positive = 1e4
        decay: Positive = 0.1
        decay_every: Count = 30
        sigma: Positive = 100.0
        start: Literal["own", "cloud"] = "own"

    def weights(self, server: State, client: int, rnd: Round) -> Tensor:
        with tree.one_thread():
            parameters = self._parameters(server, client)
            row = torch.zeros(len(self.task_info.clients), dtype=torch.float64)
            for peer in range(len(row)):
                if peer != client:
                    squared_distance = (
                        tree.distance(parameters, self._parameters(server, peer)) ** 2
                    )
                    row[peer] = (
                        self._alpha(rnd.index)
                        / self.config.sigma
                        * math.exp(-squared_distance / self.config.sigma)
                    )
            row[client] = max(0.0, 1 - float(row.sum()))
        return row[None]

    def client_start(
        self, state: State, message: Message, ctx: Context, rnd: Round, client: int
    ) -> Tree:
        own_model = state.trees["model"]
        cloud = message.trees["model"]
        if self.config.start == "own":
            return own_model
        return {**own_model, **cloud}

    def pull(self, index: int) -> float:
        return float(self.config.lam / self._alpha(index))

    def _alpha(self, index: int) -> float:
        """Return a round's step size alpha_k.

        If the algorithm is ``limited``, it is at most sigma / (N - 1) for N clients.
        Then no client's weight on itself is negative.
        """
        config = self.config
        step = float(config.alpha * config.decay ** (index // config.decay_every))
        n_others = max(1, len(self.task_info.clients) - 1)
        if self.limited:
            return min(step, config.sigma / n_others)
        return step

    def _parameters(self, server: State, client: int) -> Tree:
        return self.trained(server, client, self.units[0])


@register
class HeurFedAMP(FedAMP):
    """FedAMP with a fixed weight on the client itself and cosine similarities (Huang et al. 2021, section 5).

    The weight xi_ii is ``self_weight``, by default 1 / N for N clients. The rest is spread over the other clients as
    the softmax of sigma cos(w_i, w_j). Distances between deep networks are far beyond FedAMP's sigma, so that every
    client would be alone. Directions remain comparable.

    There is no limit on alpha_k. As in the public code that the defaults come from,
    ``start`` is ``cloud`` by default. With these defaults the pull is weak. A client
    that starts from its own model hardly learns from others.

    Raises:
        UsageError: as :class:`FedAMP`, or self_weight above 1.
    """

    name = "heurfedamp"
    limited = False

    @dataclass(frozen=True)
    class Config(FedAMP.Config):
        sigma: Positive = 25.0
        start: Literal["own", "cloud"] = "cloud"
        self_weight: Share | None = None

    def weights(self, server: State, client: int, rnd: Round) -> Tensor:
        n_clients = len(self.task_info.clients)
        self_weight = self.config.self_weight
        if self_weight is None:
            self_weight = 1 / n_clients
        with tree.one_thread():
            parameters = self._parameters(server, client)
            similarities = [
                tree.cosine(parameters, self._parameters(server, peer))
                for peer in range(n_clients)
            ]
            scores = self.config.sigma * torch.tensor(similarities, dtype=torch.float64)
            scores[client] = -math.inf
            row = (1 - self_weight) * scores.softmax(0)
            row[client] = self_weight if n_clients > 1 else 1.0
        return row[None]


@register
class FedFomo(Keeping):
    """Mixtures of a few other clients' models by how much they lower the validation loss (Zhang et al. 2021).

    Each round client i receives up to ``downloads`` models of clients that have replied before. It weighs them by

        w_j = (L_i(theta_i) - L_i(theta_j)) / ||theta_j - theta_i||

    L_i is the mean loss on its validation split in evaluation mode. Its own last model is theta_i. The positive weights
    are divided by their sum and give theta_i + sum_j w_j (theta_j - theta_i). Without a positive weight the client
    keeps theta_i. Then it trains as usual.

    The client uploads its model and the weights. The server divides the weights by the
    sum of their absolute values, since their plain sum can be near 0. It adds them to
    the client's affinities. The models of highest affinity are sent, with ties broken
    at random. Each place is filled at random with probability ``epsilon``. This
    probability falls by ``epsilon_step`` a round, down to 0. Nothing is sent down in
    the first round.

    The released code divides by the sum of absolute differences instead of the paper's distance.

    The personal model is the mixture, before local training. Rows with model ``local`` record the trained model.

    Raises:
        UsageError: downloads is 0, or a client's reply has other weights than one number for each model that it
            received.
    """

    name = "fedfomo"
    static_traffic = False
    paper = "Zhang et al. 2021"
    travels, cost = "others' models down, its own up", "P + downloads P"

    @dataclass(frozen=True)
    class Config:
        downloads: Count = 5
        epsilon: float = 0.3
        epsilon_step: float = 0.05

    def server_message(self, server: State, client: int, rnd: Round) -> Message:
        shared_names = self.shared(rnd, client)
        peers = self._peers(server, client, rnd)
        return Message(
            {
                str(peer): tree.select(self.last_upload(server, peer), shared_names)
                for peer in peers
            }
        )

    def client_start(
        self, state: State, message: Message, ctx: Context, rnd: Round, client: int
    ) -> Tree:
        own_model = state.trees["model"]
        models = {
            "own": own_model,
            **{
                peer: {**own_model, **peer_model}
                for peer, peer_model in message.trees.items()
            },
        }
        if message.trees:
            losses = {
                name: ctx.score(model, name)["loss"] for name, model in models.items()
            }
        else:
            losses = {}
        parameters = set(self.units[0].parameters) - self.task_info.frozen
        weights = {}
        for peer, peer_model in message.trees.items():
            distance = tree.distance(
                tree.select(peer_model, parameters), tree.select(own_model, parameters)
            )
            weights[peer] = (
                (losses["own"] - losses[peer]) / distance if distance > 0 else 0.0
            )
        state.meta["weights"] = weights
        positive_weights = {
            peer: weight for peer, weight in weights.items() if weight > 0
        }
        return {
            **own_model,
            **tree.mean(
                [message.trees[peer] for peer in positive_weights],
                positive_weights.values(),
                self.task_info.buffers,
            ),
        }

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        message = super().client_update(state, trained, ctx, rnd, client)
        state.trees["mixed"] = tree.clone(
            {name: tensor.cpu() for name, tensor in ctx.reference.items()}
        )
        message.meta["weights"] = state.meta["weights"]
        return message

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        replies = list(updates)
        # before the server changes, since it chooses by its state
        peers_by_client = {
            update.client: map(str, self._peers(server, update.client, rnd))
            for update in replies
        }
        super().aggregate(server, replies, rnd)
        weights, affinity = (
            server.meta.setdefault(key, {}) for key in ("weights", "affinity")
        )
        for update in replies:
            used_weights: Any = update.message.meta.get("weights")
            form = dict.fromkeys(peers_by_client[update.client], NUMBER)
            fault = validate(used_weights, form, "weights")
            if fault or used_weights.keys() != form.keys():
                raise UsageError(
                    f"client {update.name!r}: weights must be a number for each model that it received; "
                    f"got {used_weights!s:.80}."
                )
            weights[str(update.client)] = used_weights
            total_weight = sum(map(abs, used_weights.values()))
            client_affinity = affinity.setdefault(str(update.client), {})
            for peer, weight in used_weights.items():
                client_affinity[peer] = client_affinity.get(peer, 0.0) + (
                    weight / total_weight if total_weight else 0.0
                )

    def weights(self, server: State, client: int, rnd: Round) -> Tensor:
        """Return the aggregation weights that the client last used to mix models, [1, clients].

        They are at least 0 and sum to 1. A client that has mixed none has weight 1 on itself.
        """
        row = torch.zeros(len(self.task_info.clients), dtype=torch.float64)
        for peer, weight in server.meta.get("weights", {}).get(str(client), {}).items():
            row[int(peer)] = max(weight, 0.0)
        if not row.any():
            row[client] = 1.0
        return (row / row.sum())[None]

    def models(self, server: State, client: State, rnd: Round) -> dict[str, Tree]:
        return {self.evaluates: client.trees.get("mixed", client.trees["model"])}

    def _peers(self, server: State, client: int, rnd: Round) -> list[int]:
        peers = [
            c for c in self.task_info.clients if c != client and self.heard(server, c)
        ]
        affinity = server.meta.get("affinity", {}).get(str(client), {})
        generator = seeds.numpy_generator(
            self.task_info.seed, "downloads", rnd.index, client
        )
        exploration = max(
            0.0, self.config.epsilon - self.config.epsilon_step * rnd.index
        )
        peers = [
            peers[k] for k in generator.permutation(len(peers))
        ]  # equal affinities: in random order
        peers.sort(key=lambda peer: -affinity.get(str(peer), 0.0))
        chosen_peers: list[int] = []
        while peers and len(chosen_peers) < self.config.downloads:
            chosen_peers.append(
                peers.pop(
                    int(generator.integers(len(peers)))
                    if generator.random() < exploration
                    else 0
                )
            )
        return sorted(chosen_peers)


NEGLIGIBLE = 1e-10
COLLABORATORS = "collaborators"
CHUNK = 2**20  # entries of a tensor that are compared at once


@register
class FedCAC(ServerMade):
    """Averages of critical parameters among clients that have them in the same places (FedCAC; Wu et al. 2023).

    After training from w_start a client marks its critical parameters (:func:`critical_mask`). In every tensor these
    are the fraction ``critical`` with the largest ``|(w - w_start) w|``. It sends model and mask, and the server stores
    both.

    The server computes the overlap O_ij = 1 - ||M_i - M_j||_1 / (2 ||M_i||_1) of all known masks. Client i collaborates
    with the clients whose overlap reaches

        mean + min(t / until, 1) (max - mean)

    where t counts rounds from 1. The choice grows stricter. After ``until`` rounds only the closest clients remain.

    Client i receives one merged model. Its critical parameters are the mean over its collaborators and itself, with
    equal weights. The other parameters and the buffers are the mean of this round's clients, weighted by training
    samples. The evaluated model is the merged one. A client that never took part has the global model.
    """

    name = "fedcac"
    paper = "Wu et al. 2023"
    travels = "all, and a mask of one bit a parameter up"
    cost = "2P + P/32"

    @dataclass(frozen=True)
    class Config:
        critical: Annotated[float, INSIDE] = 0.5
        until: Count = 100

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        message = super().client_update(state, trained, ctx, rnd, client)
        message.trees["mask"] = {
            name: critical_mask(
                trained["model"][name],
                ctx.reference[name].to("cpu"),
                self.config.critical,
            )
            for name in sorted(self.shared(rnd, client) & self.task_info.parameters)
        }
        return message

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        # the stored models must not change before every client has received its own
        replies = list(updates)
        super().aggregate(server, replies, rnd)
        for update in replies:
            server.trees |= {
                f"{tree_name}/{update.client}": entry
                for tree_name, entry in update.message.trees.items()
            }
        masks = {
            c: server.trees[f"mask/{c}"]
            for c in self.task_info.clients
            if f"mask/{c}" in server.trees
        }
        progress = min((rnd.index + 1) / self.config.until, 1.0)
        server.meta[COLLABORATORS] = {
            str(c): peers for c, peers in collaborators(masks, progress).items()
        }

    def model_for(self, server: State, client: int, rnd: Round) -> Tree:
        """Return a client's merged model: critical parameters from similar clients, the others from all.

        A client without a mask has not taken part yet. It gets the global model.
        """
        average_model = tree.select(server.trees["model"], self.shared(rnd, client))
        mask = server.trees.get(f"mask/{client}")
        if mask is None:
            return average_model
        collaborator_models = [
            server.trees[f"model/{c}"] for c in server.meta[COLLABORATORS][str(client)]
        ]
        near_mean = tree.mean(
            [
                tree.select(model, mask.keys() & model.keys())
                for model in collaborator_models
            ],
            [1] * len(collaborator_models),
            self.task_info.buffers,
        )
        merged_model = {
            **average_model,
            **{
                name: torch.where(mask_of_tensor, near_mean[name], average_model[name])
                for name, mask_of_tensor in mask.items()
            },
        }
        self.task_info.buffers.renew(merged_model)
        return merged_model


def critical_mask(after: Tensor, before: Tensor, fraction: float) -> Tensor:
    """Mark the parameters that changed most for their size, as a bool tensor.

    These are the largest ``fraction`` of ``|(after - before) after|``. Ties with the last one are marked too. If the
    last one is at most 1e-10, every parameter with a product above 0 is marked. If the fraction rounds to no parameter,
    none is marked.

    >>> after, before = torch.tensor([1.0, 4.0, 2.0, 3.0]), torch.tensor([0.0, 4.1, 2.0, 1.0])
    >>> critical_mask(after, before, 0.5), critical_mask(after, before, 0.1).any()
    (tensor([ True, False, False,  True]), tensor(False))
    >>> critical_mask(after, before, 1.0), critical_mask(before, before, 0.5).any()
    (tensor([ True,  True, False,  True]), tensor(False))

    Args:
        after, before: a tensor's values after and before training.
        fraction: share of the values that are marked, from 0 to 1.
    """
    scores = ((after - before) * after).abs()
    n_critical = round(fraction * scores.numel())
    if n_critical == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = scores.flatten().topk(n_critical).values[-1]
    if threshold > NEGLIGIBLE:
        return scores >= threshold
    return scores > 0


def collaborators(masks: Mapping[int, Tree], progress: float) -> dict[int, list[int]]:
    """Return for each client the clients whose critical parameters overlap enough with its own.

    The result is {client: clients}, in the order of ``masks``. Every client is in its own list.

    Args:
        masks: bool trees of critical parameters (:func:`critical_mask`) by client.
            Overlaps are taken over all ordered pairs of different clients.
        progress: 0 puts the threshold at the mean overlap, 1 at the largest.
    """
    clients = list(masks)
    overlap = _overlaps(list(masks.values()))
    pair_overlaps = overlap[~torch.eye(len(clients), dtype=torch.bool)]
    if not len(pair_overlaps):
        return {client: [client] for client in clients}
    largest_overlap = pair_overlaps.max()
    # rounding can lift the mean of equal overlaps above them
    mean_overlap = pair_overlaps.mean().clamp(max=largest_overlap)
    threshold = (
        largest_overlap
        if progress >= 1
        else mean_overlap + progress * (largest_overlap - mean_overlap)
    )
    is_collaborator = (overlap >= threshold) | torch.eye(len(clients), dtype=torch.bool)
    return {
        client: [clients[k] for k in row.nonzero().flatten()]
        for client, row in zip(clients, is_collaborator, strict=True)
    }


def _overlaps(masks: list[Tree]) -> Tensor:
    """Return the overlaps 1 - ||M_i - M_j||_1 / (2 ||M_i||_1), [n, n] in float64; 0 for an empty M_i."""
    common_counts = torch.zeros((len(masks), len(masks)), dtype=torch.float64)
    for name in sorted({*chain.from_iterable(masks)}):
        empty_mask = torch.zeros_like(
            next(mask[name] for mask in masks if name in mask)
        )
        flat_masks = torch.stack(
            [mask.get(name, empty_mask).flatten() for mask in masks]
        )
        for chunk in flat_masks.split(CHUNK, dim=1):
            marks = chunk.float()  # counts below 2^24 are exact
            common_counts += (marks @ marks.T).double()
    mask_sizes = common_counts.diagonal()
    differences = mask_sizes[:, None] + mask_sizes[None, :] - 2 * common_counts
    return torch.where(
        mask_sizes[:, None] > 0,
        1 - differences / (2 * mask_sizes[:, None]).clamp(min=1),
        0.0,
    )
