"""pFedSD: who teaches, what is learnt from it, and what stays as it was."""

import pytest
import torch
from torch import nn

from fl_core import tree
from fl_core.algorithms import Round
from fl_core.run import runner
from fl_core.seeds import torch_seeded
from tests.conftest import CONFIG, TOY, client_runner_of, network


def prepared(kind, **options):
    """A student in training, its context with another model as the teacher, and that model alone; in float64."""
    config = CONFIG.with_keys(algorithm="pfedsd", options=options)
    task = runner.assemble(config, data=TOY, model=network(kind))
    task.model.double()
    client_runner, algorithm = client_runner_of(task), task.algorithm(None)
    client_runner.algorithm = algorithm
    start, teacher = tree.state_dict(task.model), network(kind, seed=5).double()
    ctx = client_runner._context(0, 1, start)
    ctx.trees = {"teacher": tree.state_dict(teacher)}
    client_runner.workspace.load(start)
    return algorithm, client_runner.workspace, ctx, teacher.eval()


def batch():
    train = TOY.clients[0].train
    return train.x[:9].double(), train.y[:9]


def objective(algorithm):
    """What a client's training minimises."""
    (phase,) = algorithm.phases(Round(0), 0)
    return algorithm.method(phase, "loss")


@pytest.mark.parametrize(("lam", "temperature"), [(0.5, 3.0), (2.0, 1.0)])
def test_the_loss_is_the_papers(lam, temperature):
    algorithm, space, ctx, teacher = prepared("plain", lam=lam, temperature=temperature)
    (x, y), student = batch(), network("plain").double()
    p = (teacher(x) / temperature).softmax(1).detach()
    logits = student(x)
    q = (logits / temperature).softmax(1)
    wanted = (
        nn.functional.cross_entropy(logits, y)
        + lam * temperature**2 * (p * (p / q).log()).sum(1).mean()
    )
    loss = objective(algorithm)(space.params, (x, y), ctx)
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-12)
    grads = torch.autograd.grad(loss, list(space.params.values()))
    for ours, theirs in zip(
        grads, torch.autograd.grad(wanted, list(student.parameters())), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["drop", "norm"])
def test_the_teacher_is_in_evaluation_mode_and_leaves_no_trace(kind):
    """The student's statistics move as without it, its dropout draws the same, and the teacher stays what it was."""
    after = []
    for lam in (0.0, 0.5):
        algorithm, space, ctx, _ = prepared(kind, lam=lam)
        before = tree.clone(ctx.trees["teacher"])
        with space.trains(algorithm.task_info.tensors), torch_seeded(3):
            loss = objective(algorithm)(space.params, batch(), ctx)
            modes = [module.training for module in space.model.modules()]
            after.append(
                (tree.digest(space.read()), torch.get_rng_state(), loss.item())
            )
        assert all(modes)
        assert tree.digest(ctx.trees["teacher"]) == tree.digest(before)
    (plain, drawn, loss), (taught, drawn_taught, loss_taught) = after
    assert plain == taught
    assert torch.equal(drawn, drawn_taught)
    assert loss_taught > loss
