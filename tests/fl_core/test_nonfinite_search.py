"""An error about NaN or infinity names what was not finite first, whatever the cause and wherever clients run."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_core import runner, tree
from fl_core.algorithms import Message, Round, State, registry
from fl_core.algorithms.averaging import LocalAdaptation
from fl_core.algorithms.model_template import ModelTemplate
from fl_core.errors import NonFiniteError
from fl_core.execution.batched_clients import BatchedClients
from fl_core.execution.client_runner import ClientRunner
from fl_core.execution.requests import TUNED, FinetuneRequest, ScoreRequest, TrainRequest
from fl_core.training.context import Context
from fl_core.training.phases import Phase
from fl_core.training.prefix import has_hooks
from fl_core.tree import Tree
from tests.conftest import CONFIG, TOY, client_runner_of, play
from tests.networks import Wired

Loss = Callable[[Mapping[str, Tensor], Tensor], Tensor]


def network(function: Callable[[Tensor], Tensor] = torch.relu) -> nn.Module:
    """Three linear layers with a function after the first; a plain perceptron, which is stacked, if that is ReLU."""
    between = nn.ReLU() if function is torch.relu else Wired(lambda m, x: function(x))
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(
            flat=nn.Flatten(),
            fc1=nn.Linear(36, 8),
            between=between,
            fc2=nn.Linear(8, 6),
            relu=nn.ReLU(),
            fc3=nn.Linear(6, 3),
        )
    )


@dataclass(frozen=True)
class Cause:
    """What is wrong, and what the error must say of it.

    Attributes:
        start: changes the weights that clients receive. x: makes features of features. between: what the model does
            after its first layer. loss: makes another loss of the parameters and the usual loss. changes: of the run.
    """

    said: str
    start: Callable[[Tree], None] = lambda start: None
    x: Callable[[Tensor], Tensor] = lambda x: x
    between: Callable[[Tensor], Tensor] = torch.relu
    loss: Loss | None = None
    changes: dict[str, Any] = field(default_factory=dict)


def planted(name: str, value: float) -> Callable[[Tree], None]:
    """Put a value into the first entry of a tensor."""

    def change(start: Tree) -> None:
        start[name].view(-1)[0] = value

    return change


def filled(name: str, value: float) -> Callable[[Tree], None]:
    """Give all entries of a tensor one value."""

    def change(start: Tree) -> None:
        start[name].fill_(value)

    return change


def with_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0, 0, 0] = math.nan
    return x


FORWARD = "at step 1, first not finite in the forward pass is the output of module"
BACKWARD = ", and first not finite in the backward pass is the gradient of"
LOSS = "at step 1, all outputs are finite, and the loss is"
CAUSES = {
    "a weight of the first layer": Cause(
        "before the first step, 'fc1.weight' (layer 'fc1') is not finite", planted("fc1.weight", math.nan)
    ),
    "a weight of the last layer": Cause(
        "before the first step, 'fc3.bias' (layer 'fc3') is not finite", planted("fc3.bias", math.inf)
    ),
    "features": Cause("at step 1, the batch has features that are not finite", x=with_nan),
    "huge features": Cause(f"{FORWARD} 'fc1' (layer 'fc1')", filled("fc1.weight", 1e9), lambda x: 1e30 * x.abs()),
    "a layer amid": Cause(f"{FORWARD} 'fc2' (layer 'fc2')", filled("fc2.weight", 3e38), lambda x: 10 * x),
    "the last layer": Cause(f"{FORWARD} 'fc3' (layer 'fc3')", filled("fc3.weight", 3e38), lambda x: 100 * x),
    "an activation": Cause(
        f"{FORWARD} 'between' (after layer 'fc1')", filled("fc1.weight", 100.0), torch.abs, between=torch.exp
    ),
    "log of a negative number": Cause(f"{FORWARD} 'between' (after layer 'fc1')", between=torch.log),
    "log of 0 in the loss": Cause(f"{LOSS} inf", loss=lambda params, loss: loss - (0 * loss).log()),
    "0 / 0 in the loss": Cause(f"{LOSS} nan", loss=lambda params, loss: 0 * loss / (0 * loss)),
    "a gradient of the last layer": Cause(
        f"{BACKWARD} 'fc3.bias' (layer 'fc3')", loss=lambda params, loss: loss + (0 * params["fc3.bias"]).sqrt().sum()
    ),
    "a gradient of a layer amid": Cause(
        f"{BACKWARD} 'fc2.bias' (layer 'fc2')", loss=lambda params, loss: loss + (0 * params["fc2.bias"]).sqrt().sum()
    ),
    "a gradient that an activation breaks": Cause(
        f"{BACKWARD} 'fc1.bias' (layer 'fc1')", between=lambda x: (0 * x).sqrt()
    ),
    "a gradient that overflows": Cause(
        f"{BACKWARD} 'fc3.weight' (layer 'fc3')",
        between=lambda x: 1e4 * x,
        loss=lambda params, loss: 1e38 * (loss - loss.detach()),
    ),
    "a step": Cause(
        "at step 1, the step leaves 'fc1.weight' (layer 'fc1') not finite",
        loss=lambda params, loss: 1e4 * loss,
        changes={"lr": 1e38},
    ),
    "what a step led to": Cause("at step 2, first not finite in the forward pass is", changes={"lr": 1e30}),
}
STACKED = [name for name, cause in CAUSES.items() if cause.loss is None and cause.between is torch.relu]


class Own(LocalAdaptation):
    """FedAvg with fine-tuning whose loss and way of taking steps a test chooses."""

    name = "own"
    objective: Loss | None = None
    step = ""

    def loss(self, params: Mapping[str, Tensor], batch: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        loss = super().loss(params, batch, ctx)
        return loss if self.objective is None else self.objective(params, loss)

    def phases(self, rnd: Round, client: int) -> tuple[Phase, ...]:
        return tuple(replace(phase, step=self.step) for phase in super().phases(rnd, client))

    def usual(self, steps: Any, batch: Any, ctx: Context) -> None:
        steps.descend(steps.gradients(batch))


def client_runner_for(cause: Cause, step: str | None = "") -> tuple[ClientRunner, Tree]:
    """Where the cause's clients run, and the start that they receive; with the plain algorithm if ``step`` is None."""
    clients = tuple(
        replace(c, **{name: replace(c.split(name), x=cause.x(c.split(name).x)) for name in ("train", "validation")})
        for c in TOY.clients
    )
    config = replace(CONFIG, algorithm="local_adaptation", **cause.changes)
    task = runner.assemble(config, data=replace(TOY, clients=clients), model=network(cause.between))
    made = {"objective": staticmethod(cause.loss) if cause.loss else None, "step": step}
    client_runner = client_runner_of(task)
    client_runner.use(task.algorithm(None) if step is None else type("Own", (Own,), made)(task.task_info))
    start = tree.state_dict(task.model)
    cause.start(start)
    return client_runner, start


def job(start: Tree, client: int = 2) -> TrainRequest:
    return TrainRequest(client, Round(4), Message({"model": start}), state=State({"model": {}}))


@pytest.mark.parametrize("step", ["", "usual"])
@pytest.mark.parametrize("name", CAUSES)
def test_the_error_says_who_and_when_and_what_was_not_finite_first(name: str, step: str) -> None:
    client_runner, start = client_runner_for(CAUSES[name], step)
    with pytest.raises(NonFiniteError) as caught:
        client_runner.run(job(start))
    assert str(caught.value).startswith("own, round 5, client 'c', phase 'train': ")
    assert CAUSES[name].said in str(caught.value)
    assert not any(has_hooks(module) for module in client_runner.workspace.model.modules()), (
        "nothing watches any longer"
    )


@pytest.mark.parametrize("name", STACKED)
def test_it_does_so_of_clients_that_are_trained_together(name: str) -> None:
    client_runner, start = client_runner_for(CAUSES[name], None)
    with pytest.raises(NonFiniteError) as caught:
        list(BatchedClients(client_runner).run([job(start), job(start, 3)]))
    assert str(caught.value).startswith("local_adaptation, round 5, client 'c', phase 'train': ")
    assert CAUSES[name].said in str(caught.value)


@pytest.mark.parametrize("name", sorted(registry()))
def test_it_does_so_in_every_algorithm(name: str) -> None:
    """Whatever its phases and steps are, they are gone through again: the first batch with a bad sample is named."""
    clients = tuple(replace(c, train=replace(c.train, x=with_nan(c.train.x))) for c in TOY.clients)
    with pytest.raises(NonFiniteError, match=r"phase '\w+': .*step 1.*features"):
        play(algorithm=name, data=replace(TOY, clients=clients), rounds=1)


def test_it_does_so_of_fine_tuning() -> None:
    cause = CAUSES["a layer amid"]
    client_runner, start = client_runner_for(cause)
    with pytest.raises(NonFiniteError, match=r"^own, .*round 3, client 'b', phase 'finetune': .*step 1") as caught:
        client_runner.run(FinetuneRequest(1, 3, ModelTemplate({TUNED: start}), TUNED))
    assert cause.said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "x", "what"),
    [
        (filled("fc2.weight", 3e38), None, "the output of module 'fc2' (layer 'fc2')"),
        (planted("fc3.bias", math.inf), None, "'fc3.bias' (layer 'fc3')"),
        (None, with_nan, "the input of module 'flat'"),
    ],
)
def test_it_does_so_of_scores(change: Any, x: Any, what: str) -> None:
    client_runner, start = client_runner_for(Cause("", change or (lambda start: None), x or (lambda x: 10 * x)))
    with pytest.raises(NonFiniteError) as caught:
        client_runner.run(ScoreRequest(2, 7, ModelTemplate({"personal": start})))
    whose = "own, round 7, client 'c', scoring the personal model on validation: "
    assert str(caught.value).startswith(whose)
    assert str(caught.value).endswith(
        f"have logits that are NaN or infinite; first not finite in the forward pass is {what}"
    )


def test_what_goes_well_when_it_is_run_again_is_reported_as_it_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose sums have no fixed order: the first error stands."""
    client_runner, start = client_runner_for(CAUSES["features"])
    broken = client_runner.data
    monkeypatch.setattr(client_runner, "cause", lambda job, error: runs_well(job, error))

    def runs_well(again: TrainRequest, error: NonFiniteError) -> NonFiniteError:
        client_runner.data = TOY
        return ClientRunner.cause(client_runner, again, error)

    with pytest.raises(NonFiniteError, match=r"phase 'train': .*step 1.*\bnan$"):
        client_runner.run(job(start))
    assert client_runner.data is not broken
