"""The one local trainer: what moves, what does not, and from which batches."""

import math
from dataclasses import replace

import pytest
import torch

from fl_core import tree
from fl_core.algorithms import TaskInfo, find
from fl_core.errors import NonFiniteError
from fl_core.run import runner
from fl_core.training.losses import build
from fl_core.training.phases import Context, Group, Phase, Training
from fl_core.training.workspace import Workspace
from tests.conftest import CONFIG, TOY, network
from tests.made import trained_by

CE = build("cross_entropy")
SGD = Training(epochs=2, batch_size=8, lr=0.05, momentum=0.9, weight_decay=0.1)


class Bench:
    """A workspace with all that one phase needs."""

    def __init__(self, kind, training=SGD, seed=0):
        self.model, self.training = network(kind), training
        layers = runner.assemble(CONFIG, data=TOY, model=self.model).layers
        self.space = Workspace(self.model)
        problem = TaskInfo(layers, frozenset(), TOY.weights, training.epochs, seed)
        self.algorithm = find("fedavg")(problem)
        self.start = tree.state_dict(self.model)

    def context(self, client=0, rnd=0):
        data = TOY.clients[client]
        return Context(
            "fedavg",
            rnd,
            client,
            data.name,
            len(data.train),
            CE,
            self.space.forward,
            self.start,
            data.train.y,
        )

    def phase(self, train=None, **options):
        names = self.algorithm.task_info.tensors if train is None else frozenset(train)
        return Phase("train", names, self.training.epochs, **options)

    def run(self, phase=None, start=None, ctx=None, split=None, kept=None):
        ctx = ctx or self.context()
        split = split or TOY.clients[ctx.client].train
        return trained_by(
            self.algorithm,
            self.space,
            phase or self.phase(),
            start or self.start,
            split,
            self.training,
            ctx,
            {},
            kept,
        )


def names_of(model, *prefixes):
    return {
        name for name in tree.named_tensors(model) if name.split(".")[0] in prefixes
    }


@pytest.mark.parametrize(
    ("weight", "feature", "cause"),
    [
        (math.nan, 1.0, r"weight is nan in 'fc2\.bias' \(layer 'fc2'\)\.$"),
        (0.0, math.inf, "features that are not finite"),
        (3e38, 1e38, r"2\.98e\+38 in 'fc2\.bias' .* Use a smaller lr\.$"),
    ],
)
def test_a_loss_that_is_not_finite_is_refused_with_its_step_and_its_cause(
    weight, feature, cause
):
    bench = Bench("plain")
    start, split = tree.clone(bench.start), TOY.clients[1].train
    start["fc2.bias"].view(-1)[0] = weight
    where = r"fedavg, round 5, client 'b', phase 'train': the loss of step [12] is (nan|inf)"
    with pytest.raises(NonFiniteError, match=f"{where}.*{cause}"):
        bench.run(
            start=start,
            ctx=bench.context(client=1, rnd=4),
            split=replace(split, x=feature * split.x),
        )


def test_a_kept_state_makes_two_phases_one():
    """Two phases with the state handed on move the weights exactly as torch's optimiser does in one go."""
    for options in (
        {"optimizer": "sgd", "momentum": 0.9},
        {"optimizer": "adam", "amsgrad": True},
        {"optimizer": "adamw", "amsgrad": True},
    ):
        keys = {"lr": 0.01, "weight_decay": 0.1, "keep_optimizer": True, **options}
        training = Training(1, 64, **keys)
        bench = Bench("plain", training)
        once, state = bench.run()
        before = tree.digest(state)
        twice, _ = bench.run(start=once, kept=state, ctx=bench.context())
        assert tree.digest(state) == before, "what was handed in must not change"
        fresh, _ = bench.run(start=once, kept={})
        assert tree.digest(twice) != tree.digest(fresh)
        model = network("plain")
        optimiser = training.build(list(model.parameters()))
        split = TOY.clients[0].train
        for _ in range(2):
            optimiser.zero_grad()
            CE(model(split.x), split.y).backward()
            optimiser.step()
        wanted = tree.state_dict(model)
        torch.testing.assert_close(twice, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("step", ["", "usual"])
@pytest.mark.parametrize("share", [0.5, 2.0, None])
def test_a_gradient_is_clipped_as_a_whole(step, share):
    """One step of plain descent on all samples, with a clip below and above the gradient's norm, and with none."""
    x, y = TOY.clients[0].train.x, TOY.clients[0].train.y
    model = network("plain").double()
    CE(model(x.double()), y).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = math.sqrt(sum(float((grad**2).sum()) for grad in grads.values()))
    lr, share_left = 0.1, min(share or 1.0, 1.0)
    clip = None if share is None else share * norm
    bench = Bench("plain", Training(1, 64, lr=lr, max_grad_norm=clip))
    bench.algorithm.usual = usual_step
    trained, _ = bench.run(bench.phase(step=step))
    for name, grad in grads.items():
        wanted = bench.start[name].double() - lr * share_left * grad
        torch.testing.assert_close(trained[name].double(), wanted, rtol=1e-5, atol=1e-6)
    clipped, _ = bench.run(bench.phase(step=step, max_grad_norm=0.1 * norm))
    way = tree.distance(clipped, bench.start)
    assert way == pytest.approx(0.1 * lr * norm, rel=1e-4), "a phase has its own clip"


def usual_step(steps, batch, ctx):
    """A step of an algorithm's own that does what training does without one."""
    steps.descend(steps.gradients(batch))


HARD = replace(SGD, weight_decay=0.05)


def hard(training=HARD, names=None, **own):
    """Return the model after a phase of client 1, and its work."""
    bench = Bench("plain", training)
    ctx = bench.context(1)
    return bench.run(bench.phase(names, **own), ctx=ctx)[0], ctx.work


def test_rates_of_a_phase_are_in_place_of_the_runs():
    plain, _ = hard()
    for settings in ({"lr": 0.01}, {"weight_decay": 0.2}, {"momentum": 0.0, "lr": 0.2}):
        by_phase, wanted = hard(**settings)[0], hard(replace(HARD, **settings))[0]
        assert tree.digest(by_phase) == tree.digest(wanted) != tree.digest(plain)


def test_a_group_trains_at_its_own_rates():
    """Layers do not meet in a last layer's own gradient: alone at its rate, it moves as in a group."""
    body, head = (names_of(network("plain"), *f) for f in (("fc1", "fc2"), ("fc3",)))
    both, _ = hard(groups=(Group(frozenset(head), lr=0.5),), steps=1)
    rest, _ = hard(names=body, steps=1)
    alone, _ = hard(replace(HARD, lr=0.5), names=head, steps=1)
    plain, _ = hard(steps=1)
    for name in both:
        assert torch.equal(both[name], (alone if name in head else rest)[name])
        assert torch.equal(both[name], plain[name]) == (name in body)
    slower, _ = hard(lr=0.6, groups=(Group(frozenset(head), lr_divisor=10),))
    as_much, _ = hard(lr=0.6, groups=(Group(frozenset(head), lr=0.06),))
    assert tree.digest(slower) == tree.digest(as_much)


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 5, 7, 99])
def test_a_phase_stops_after_its_steps(steps):
    trained, work = hard(steps=steps)
    whole, _ = hard()
    n = TOY.weights[1]
    per_epoch = -(-n // 8)
    epochs, rest = divmod(min(steps, 2 * per_epoch), per_epoch)
    assert work["train/steps"] == epochs * per_epoch + rest
    assert work["train/samples"] == epochs * n + rest * 8
    start = tree.state_dict(network("plain"))
    assert (tree.digest(trained) == tree.digest(start)) == (steps == 0)
    assert (tree.digest(trained) == tree.digest(whole)) == (steps >= 2 * per_epoch)
