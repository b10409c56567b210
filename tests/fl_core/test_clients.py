"""What a federation of many clients holds in memory and writes."""

from __future__ import annotations

import gc

import pytest
import torch

from fl_core import tree
from fl_core.algorithms import Message, Round, State, registry
from fl_core.algorithms.averaging import FedAvg
from fl_core.records import writing
from fl_core.rounds import batched
from fl_core.rounds.clients import (
    OPTIMIZER_TREE,
    TUNED,
    FinetuneRequest,
    ScoreRequest,
    TrainRequest,
)
from fl_core.run import runner
from tests.conftest import CONFIG, TOY, client_runner_of, federation, network

SIZES = [14 + k % 5 for k in range(20)]
MANY = federation(SIZES)


class Watching(FedAvg):
    """FedAvg that counts the bytes of all tensors there are as it takes in a round's last reply."""

    name = "watching"
    most = 0

    def aggregate(self, server, updates, rnd):
        def watched():
            for update in updates:
                if update.client == rnd.sampled[-1]:
                    type(self).most = max(type(self).most, alive())
                yield update

        super().aggregate(server, watched(), rnd)


def alive():
    """Bytes of all dense tensors, each memory once. Sparse ones of other tests may be alive, too."""
    storages = {}
    for thing in gc.get_objects():
        dense = type(thing) in (torch.Tensor, torch.nn.Parameter)
        if dense and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("stack", "counts"),
    [
        ("off", (10, 26)),
        pytest.param(
            "on",
            (batched.TOGETHER, 3 * batched.TOGETHER),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_memory_of_a_global_model_does_not_grow_with_the_clients(
    stack, counts, monkeypatch
):
    registry()
    from fl_core.algorithms import base

    monkeypatch.setitem(base.ALGORITHMS._members, Watching.name, Watching)
    monkeypatch.setattr("fl_core.rounds.engine.LOCAL_MODELS", 0)
    data, most = {count: federation([14] * count) for count in counts}, {}
    for count in data:
        gc.collect()
        before, Watching.most = alive(), 0
        config = CONFIG.with_keys(algorithm="watching", rounds=1, stack=stack)
        runner.run(config, data=data[count], model=network("plain"))
        most[count] = Watching.most - before
    assert most[counts[1]] == most[counts[0]] > 0


def test_clients_that_do_not_change_cost_nothing_at_a_checkpoint(tmp_path, monkeypatch):
    config = CONFIG.with_keys(algorithm="fedper", participation=0.2)
    monkeypatch.setattr("fl_core.rounds.engine.LOCAL_MODELS", 0)
    put = []
    original = writing.Writer._put

    def noting(self, state):
        put.append(state)
        return original(self, state)

    monkeypatch.setattr(writing.Writer, "_put", noting)
    out, common = (
        tmp_path / "run",
        {"data": MANY, "model": network("plain")},
    )
    runner.run(config, out, **common)
    assert len(put) == (1 + 20) + 2 * (1 + 4), (
        "the server each time, everyone once, and whoever took part"
    )
    (out / "checkpoints" / "000003.json").unlink()
    put.clear()
    runner.resume(out, **common)
    assert len(put) == 1 + 4


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
    request = job(start)
    request.state.trees["extra"] = {"x": torch.ones(2)}
    result = client_runner.run(request)
    assert tree.digest(start) == before
    assert request.state.trees.keys() == {"model", "extra"}
    assert result.state.trees.keys() == {"model", "extra", OPTIMIZER_TREE}
    assert result.state.trees["model"] == {}
