"""One place where clients run: jobs in, results out, nothing left behind."""

import pytest
import torch

from fl_core import runner, tree
from fl_core.algorithms import Message, Round, State
from fl_core.clients import (
    OPTIMIZER_TREE,
    TUNED,
    FinetuneRequest,
    ScoreRequest,
    TrainRequest,
)
from fl_core.errors import NonFiniteError
from tests.conftest import CONFIG, TOY, client_runner_of, network


def ready(kind="plain", **changes):
    """A client_runner with its algorithm loaded, and the common start."""
    task = runner.assemble(CONFIG.with_keys(**changes), data=TOY, model=network(kind))
    client_runner = client_runner_of(task)
    client_runner.algorithm = task.algorithm(task.plan)
    return client_runner, tree.state_dict(task.model)


def job(start, client=0, **options):
    return TrainRequest(
        client,
        Round(0),
        Message({"model": start}),
        state=State({"model": {}}),
        **options,
    )


@pytest.mark.parametrize("kind", ["plain", "drop", "norm"])
def test_what_a_job_gives_does_not_depend_on_the_jobs_before_it(kind):
    client_runner, start = ready(kind)
    first = client_runner.run(job(start, score=("test",)))
    for other in (
        job(start, client=2),
        FinetuneRequest(1, 3, models={TUNED: start}),
        ScoreRequest(3, 0, models={"global": start}),
    ):
        client_runner.run(other)
    with torch.no_grad():
        for tensor in tree.named_tensors(client_runner.workspace.model).values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 9)
    again = client_runner.run(job(start, score=("test",)))
    assert tree.digest(first.message.trees["model"]) == tree.digest(
        again.message.trees["model"]
    )
    assert first.scores == again.scores
    assert first.work == again.work


def test_a_job_leaves_what_it_was_given_untouched():
    client_runner, start = ready("norm", keep_optimizer=True, momentum=0.9)
    before = tree.digest(start)
    given = job(start)
    given.state.trees["extra"] = {"x": torch.ones(2)}
    result = client_runner.run(given)
    assert tree.digest(start) == before
    assert given.state.trees.keys() == {"model", "extra"}
    assert result.state.trees.keys() == {"model", "extra", OPTIMIZER_TREE}
    assert result.state.trees["model"] == {}


def test_one_thread_trains_and_the_setting_comes_back():
    client_runner, start = ready()
    seen = []
    client_runner.workspace.model.register_forward_pre_hook(
        lambda *_: seen.append(torch.get_num_threads())
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        client_runner.run(job(start))
        broken = {
            name: torch.full_like(value, torch.nan) for name, value in start.items()
        }
        with pytest.raises(NonFiniteError):
            client_runner.run(job(broken))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
