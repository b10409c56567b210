"""Averaging of some layers less often than others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fl_core import tree
from fl_core.algorithms import (
    Algorithm,
    Context,
    Message,
    Observation,
    Round,
    State,
    Tree,
    Update,
    register,
)
from fl_core.algorithms.contract import Count
from fl_core.layers import Layer

PENDING = "pending"  # at a client: layers trained since last sent; at the server: their names, by client
DUE = "due"
INTERVALS, DISCREPANCY = "intervals", "discrepancy"


@register
class FedLAMA(Algorithm):
    """FedAvg that averages a layer less often if clients agree on it (Lee et al. 2023, Algorithms 1 and 2).

    The paper's unit of time is tau' local steps. Here it is the local training of ``tau`` rounds. Layer l is averaged
    every tau_l rounds, where tau_l is tau or phi tau. Each average measures the layer's discrepancy

        d_l = mean_i ||w_il - mean_l||^2 / (tau_l dim_l)

    Every phi tau rounds all layers are due and the intervals are chosen again (:func:`long_layers`). The last round of
    a run averages all layers.

    A layer that is not due stays with its client. The client continues to train it. This holds even if other clients
    have averaged it since, so no local work is lost. With partial participation a client's layer may therefore start
    from an older average. A client sends the layers that are due. It receives layers that it has not trained since it
    last sent them. With phi = 1 and tau = 1 this is FedAvg.

    A layer here is weight and bias. The released code considers kernels only. Frozen parameters do not count. A layer
    that is frozen as a whole is always long.

    - ``crossing``: also make the layer long at which the two curves cross, as in the released code (default). Otherwise
      a model with one dominant layer has no other long layer.
    """

    name = "fedlama"
    static_traffic = False
    paper = "Lee et al. 2023"
    travels, keeps, cost = (
        "the layers that are due",
        "layers that are not due",
        "from 2P / phi to 2P, with tau = 1",
    )

    @dataclass(frozen=True)
    class Config:
        tau: Count = 1
        phi: Count = 2
        crossing: bool = True

    def due_layers(self, server: State, rnd: Round) -> list[str]:
        """Return the names of the layers that are averaged at the end of this round."""
        intervals, done = server.meta.get(INTERVALS, {}), rnd.index + 1
        every = [
            (layer.name, intervals.get(layer.name, self.config.tau))
            for layer in self.task_info.layers
        ]
        return [
            name
            for name, interval in every
            if done % interval == 0 or done == self.task_info.rounds
        ]

    def observations(self, server: State, rnd: Round) -> Iterator[Observation]:
        """Record ``averaging_interval``: the rounds between two averages of each layer, as chosen last."""
        intervals = server.meta.get(INTERVALS, {})
        for layer in self.task_info.layers:
            yield Observation(
                "averaging_interval",
                intervals.get(layer.name, self.config.tau),
                layer=layer.name,
            )

    def of_layers(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names of all tensors of the given layers."""
        chosen = set(names)
        return frozenset(
            n
            for layer in self.task_info.layers
            if layer.name in chosen
            for n in layer.tensors
        )

    def server_message(self, server: State, client: int, rnd: Round) -> Message:
        pending = self.of_layers(server.meta.get(PENDING, {}).get(str(client), ()))
        names = self.shared(rnd, client) - pending
        return Message(
            {"model": tree.select(server.trees["model"], names)},
            {DUE: self.due_layers(server, rnd)},
        )

    def client_start(
        self, state: State, message: Message, ctx: Context, rnd: Round, client: int
    ) -> Tree:
        state.meta[DUE] = message.meta[DUE]
        return {
            **super().client_start(state, message, ctx, rnd, client),
            **state.trees.pop(PENDING, {}),
        }

    def client_update(
        self,
        state: State,
        trained: dict[str, Tree],
        ctx: Context,
        rnd: Round,
        client: int,
    ) -> Message:
        due, travelling = self.of_layers(state.meta.pop(DUE)), self.shared(rnd, client)
        message = super().client_update(state, trained, ctx, rnd, client)
        message.trees["model"] = tree.select(trained["model"], travelling & due)
        state.trees[PENDING] = tree.select(trained["model"], travelling - due)
        return message

    def aggregate(self, server: State, updates: Iterable[Update], rnd: Round) -> None:
        due, replies = self.due_layers(server, rnd), list(updates)
        super().aggregate(server, replies, rnd)
        waiting = [layer for layer in self.task_info.layers if layer.name not in due]
        pending = dict(server.meta.get(PENDING, {}))
        for (
            update
        ) in replies:  # of the pending layers a client keeps those that it was given
            travelling = self.shared(rnd, update.client)
            pending[str(update.client)] = [
                each.name for each in waiting if not travelling.isdisjoint(each.tensors)
            ]
        server.meta[PENDING] = {
            client: names for client, names in pending.items() if names
        }
        self._note(server, due, [update.message.trees["model"] for update in replies])
        if (rnd.index + 1) % (self.config.phi * self.config.tau) == 0:
            self._adjust(server)

    def _note(self, server: State, due: Sequence[str], trees: Sequence[Tree]) -> None:
        noted, intervals = (
            server.meta.setdefault(DISCREPANCY, {}),
            server.meta.get(INTERVALS, {}),
        )
        for layer in self.task_info.layers:
            names = [name for name in self._trained(layer) if name in trees[0]]
            if layer.name in due and names:
                mean = tree.select(server.trees["model"], names)
                apart = sum(
                    tree.distance(tree.select(each, names), mean) ** 2 for each in trees
                ) / len(trees)
                interval = intervals.get(layer.name, self.config.tau)
                noted[layer.name] = apart / (
                    interval * sum(mean[name].numel() for name in names)
                )

    def _adjust(self, server: State) -> None:
        noted: Mapping[str, float] = server.meta[DISCREPANCY]
        sizes = {
            layer.name: sum(
                server.trees["model"][name].numel() for name in self._trained(layer)
            )
            for layer in self.task_info.layers
            if layer.name in noted
        }
        frozen = [layer.name for layer in self.task_info.layers if layer.is_frozen]
        long = {*long_layers(noted, sizes, crossing=self.config.crossing), *frozen}
        server.meta[INTERVALS] = {
            name: self.config.tau * (self.config.phi if name in long else 1)
            for name in (*sizes, *frozen)
        }

    def _trained(self, layer: Layer) -> list[str]:
        return [name for name in layer.parameters if name not in self.task_info.frozen]


def long_layers(
    discrepancy: Mapping[str, float], sizes: Mapping[str, int], crossing: bool = True
) -> list[str]:
    """Return the layers to average less often by the cut criterion of FedLAMA.

    Layers are taken by ascending discrepancy. The share delta_k of all discrepancy in the first k layers is the loss.
    Here each layer's discrepancy is multiplied by its size. Their share lambda_k of all parameters is the saving.
    Layers up to the first k with delta_k > 1 - lambda_k are long. Without ``crossing`` only the layers before it are.

    Args:
        discrepancy: d_l, per parameter and round, at least 0. If all are 0, no layer is long.
        sizes: parameters of each layer.
    """
    order = sorted(
        discrepancy, key=lambda name: discrepancy[name]
    )  # ties: the layer nearer to the input first
    lost = list(accumulate(discrepancy[name] * sizes[name] for name in order))
    saved = list(accumulate(sizes[name] for name in order))
    if not order or not lost[-1] > 0:
        return []
    all_lost, all_saved = lost[-1], saved[-1]
    parts = zip(lost, saved, strict=True)
    first = next(
        k
        for k, (at, part) in enumerate(parts)
        if at * all_saved > (all_saved - part) * all_lost
    )
    return order[: first + crossing]
