"""SCAFFOLD and FedDyn against the same arithmetic written plainly, and against what they are at their limits.

Everything is in float64, over several rounds, with some or all of the clients taking part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_core import models, seeds, tree
from fl_core.algorithms import Round, State, TaskInfo, Update, find
from fl_core.client_runner import ClientRunner, TrainRequest
from fl_core.clients import Serial
from fl_core.data import FederatedData
from fl_core.engine import sampled_clients
from fl_core.layers import layers_of
from fl_core.training.losses import build
from fl_core.training.phases import Training
from tests.conftest import TOY, federation, network
from tests.identities.test_references import double

SEED, LR, ROUNDS = 3, 0.05, 3
Tree = dict[str, Tensor]
UNEVEN, EQUAL = double(TOY), double(federation(sizes=(40, 40, 40, 40)))


class Run:
    """The real thing after each of some rounds: ``servers[k]``, ``clients[k]`` and ``local[k]`` after k rounds."""

    def __init__(
        self,
        algorithm: str,
        data: FederatedData,
        training: Training,
        participation: float = 1.0,
        rounds: int = ROUNDS,
        **options: Any,
    ) -> None:
        model = network("plain").double()
        layers = layers_of(model, models.example(TOY.shape).double())
        self.data, self.participation = data, participation
        chosen = find(algorithm)(
            TaskInfo(layers, frozenset(), data.weights, training.epochs, SEED),
            None,
            options,
        )
        serial = Serial(
            ClientRunner(model, data, training, build("cross_entropy"), layers, {})
        )
        serial.use(chosen)
        server = chosen.server_state(initial())
        clients = [chosen.client_state(initial(), c) for c in range(len(data.clients))]
        self.servers, self.clients, self.local = (
            [_copy(server)],
            [[_copy(c) for c in clients]],
            [{}],
        )
        for index in range(rounds):
            rnd = Round(index, "train", self.sampled(index))
            jobs = (
                TrainRequest(
                    c,
                    rnd,
                    chosen.server_message(server, c, rnd),
                    state=clients[c],
                    keep=True,
                )
                for c in rnd.sampled
            )
            updates = []
            self.local.append({})
            for result in serial.run(jobs):
                clients[result.client] = result.state
                self.local[-1][result.client] = result.models["local"]
                updates.append(
                    Update(result.client, data.weights[result.client], result.message)
                )
            chosen.aggregate(server, updates, rnd)
            self.servers.append(_copy(server))
            self.clients.append([_copy(c) for c in clients])

    def sampled(self, index: int) -> tuple[int, ...]:
        return sampled_clients(SEED, index, len(self.data.clients), self.participation)

    def model(self, done: int) -> Tree:
        return self.servers[done].trees["model"]


def _copy(state: State) -> State:
    return State(
        {name: tree.clone(t) for name, t in state.trees.items()}, dict(state.meta)
    )


def initial() -> Tree:
    return tree.state_dict(network("plain").double())


def plain_steps(
    data: FederatedData,
    client: int,
    index: int,
    start: Tree,
    training: Training,
    bend: Callable[[str, Tensor], Tensor],
) -> tuple[Tree, int]:
    """SGD with w <- w - lr (gradient + bend(name, w)), and the number of steps."""
    weights, steps = dict(start), 0
    x, y = data.clients[client].train.x, data.clients[client].train.y
    draws = seeds.torch_generator(SEED, "batches", index, client, "main")
    for _ in range(training.epochs):
        for chosen in torch.randperm(len(y), generator=draws).split(
            training.batch_size
        ):
            leaves = {
                name: value.clone().requires_grad_() for name, value in weights.items()
            }
            hidden = x[chosen].flatten(1)
            for fc in ("fc1", "fc2", "fc3"):
                hidden = hidden @ leaves[f"{fc}.weight"].T + leaves[f"{fc}.bias"]
                hidden = hidden if fc == "fc3" else hidden.clamp(min=0)
            loss = -hidden.log_softmax(1)[torch.arange(len(chosen)), y[chosen]].mean()
            grads = dict(
                zip(
                    leaves,
                    torch.autograd.grad(loss, list(leaves.values())),
                    strict=True,
                )
            )
            weights = {
                n: w - training.lr * (grads[n] + bend(n, w)) for n, w in weights.items()
            }
            steps += 1
    return weights, steps


def check_close(found: Tree, wanted: Tree, atol: float = 1e-12) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == torch.float64
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=atol)


def mean(trees: list[Tree]) -> Tree:
    return {name: torch.stack([t[name] for t in trees]).mean(0) for name in trees[0]}


def zeros() -> Tree:
    return {name: torch.zeros_like(value) for name, value in initial().items()}


TRAINING = Training(epochs=2, batch_size=8, lr=LR)


@pytest.mark.parametrize(
    ("participation", "rate"), [(1.0, 1.0), (0.5, 1.0), (0.5, 0.7)]
)
def test_scaffold_is_the_papers_option_two(participation: float, rate: float) -> None:
    """c_i+ = c_i - c + (x - y_i) / (K lr), c <- c + mean over all N, x <- x + rate mean over the sampled."""
    run = Run("scaffold", UNEVEN, TRAINING, participation, server_lr=rate)
    x, c, own = initial(), zeros(), [zeros() for _ in UNEVEN.clients]
    for index in range(ROUNDS):
        moved, changed = [], []
        for client in run.sampled(index):
            before = own[client]
            y, steps = plain_steps(
                UNEVEN,
                client,
                index,
                x,
                TRAINING,
                lambda n, w, c=c, before=before: c[n] - before[n],
            )
            after = {n: before[n] - c[n] + (x[n] - y[n]) / (steps * LR) for n in x}
            moved.append({n: y[n] - x[n] for n in x})
            changed.append({n: after[n] - before[n] for n in x})
            own[client] = after
        x = {n: x[n] + rate * step for n, step in mean(moved).items()}
        c = {
            n: c[n] + len(changed) / len(own) * step
            for n, step in mean(changed).items()
        }
        check_close(run.model(index + 1), x)
        check_close(run.servers[index + 1].trees["variate"], c)
        for state, wanted in zip(run.clients[index + 1], own, strict=True):
            check_close(state.trees["variate"], wanted)
    assert any(value.abs().max() > 1e-3 for value in c.values())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_scaffold_with_one_step_of_equal_clients_is_fedavg(optimizer: str) -> None:
    """With everyone taking part the corrections of one gradient cancel in the mean; adaptive steps are not linear."""
    training = Training(epochs=1, batch_size=64, lr=LR, optimizer=optimizer)
    found, wanted = Run("scaffold", EQUAL, training), Run("fedavg", EQUAL, training)
    check_close(found.model(1), wanted.model(1), 1e-10)
    apart = tree.distance(found.model(3), wanted.model(3))
    assert apart < 1e-10 if optimizer == "sgd" else apart > 1e-6
    assert tree.distance(wanted.model(3), initial()) > 1e-2


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("alpha", [0.01, 0.5])
def test_feddyn_is_the_papers(alpha: float, participation: float) -> None:
    run = Run("feddyn", UNEVEN, TRAINING, participation, alpha=alpha)
    theta, s, own = initial(), zeros(), [zeros() for _ in UNEVEN.clients]
    for index in range(ROUNDS):
        trained = []
        for client in run.sampled(index):
            dual, start = own[client], theta
            found, _ = plain_steps(
                UNEVEN,
                client,
                index,
                start,
                TRAINING,
                lambda n, w, dual=dual, start=start: alpha * (w - start[n]) - dual[n],
            )
            trained.append(found)
            own[client] = {n: dual[n] - alpha * (found[n] - start[n]) for n in found}
        step = mean(trained)
        s = {
            n: s[n] - alpha * len(trained) / len(own) * (step[n] - theta[n]) for n in s
        }
        theta = {n: step[n] - s[n] / alpha for n in s}
        check_close(run.model(index + 1), theta)
        for state, wanted in zip(run.clients[index + 1], own, strict=True):
            check_close(state.trees["variate"], wanted)


def test_feddyns_first_round_is_fedproxs() -> None:
    """Without a dual yet, local training is FedProx's with mu = alpha, and so is the mean with equal clients."""
    dyn = Run("feddyn", EQUAL, TRAINING, rounds=1, alpha=0.3)
    prox = Run("fedprox", EQUAL, TRAINING, rounds=1, mu=0.3)
    for client, found in dyn.local[1].items():
        check_close(found, prox.local[1][client])
    check_close(mean(list(dyn.local[1].values())), prox.model(1), 1e-10)
