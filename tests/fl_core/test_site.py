"""One place where clients run: jobs in, results out, nothing left behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_core import runner, tree
from fl_core.algorithms import Message, Round, State
from fl_core.errors import NonFiniteError, UsageError
from fl_core.execution.site import OPTIMIZER_TREE, SCORE_BATCH, FinishJob, ScoreJob, Site, TrainJob
from fl_core.training import evaluate
from fl_core.training.losses import build
from tests.conftest import CONFIG, TOY, federation, network, site_of


def ready(kind: str = "plain", **changes: Any) -> tuple[Site, tree.Tree]:
    """A site with its algorithm loaded, and the common start."""
    task = runner.assemble(replace(CONFIG, **changes), data=TOY, model=network(kind))
    site = site_of(task)
    site.algorithm = task.algorithm(task.plan)
    return site, tree.of(task.model)


def job(start: tree.Tree, client: int = 0, **options: Any) -> TrainJob:
    return TrainJob(client, Round(0), Message({"model": start}), State({"model": {}}), **options)


def test_a_site_without_an_algorithm_says_so() -> None:
    site, start = ready()
    site.algorithm = None
    with pytest.raises(RuntimeError, match="no algorithm was loaded"):
        site.run(job(start))


@pytest.mark.parametrize("kind", ["plain", "drop", "norm"])
def test_what_a_job_gives_does_not_depend_on_the_jobs_before_it(kind: str) -> None:
    site, start = ready(kind)
    first = site.run(job(start, score=("test",)))
    for other in (job(start, client=2), FinishJob(1, 3, start), ScoreJob(3, start, ("train",))):
        site.run(other)
    with torch.no_grad():
        for tensor in tree.live(site.workspace.model).values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 9)
    again = site.run(job(start, score=("test",)))
    assert tree.digest(first.message.trees["model"]) == tree.digest(again.message.trees["model"])
    assert first.scores == again.scores
    assert first.work == again.work


def test_a_job_leaves_what_it_was_given_untouched() -> None:
    site, start = ready("norm", keep_optimizer=True, momentum=0.9)
    before = tree.digest(start)
    given = job(start)
    given.state.trees["extra"] = {"x": torch.ones(2)}
    result = site.run(given)
    assert tree.digest(start) == before
    assert given.state.trees.keys() == {"model", "extra"}
    assert result.state.trees.keys() == {"model", "extra", OPTIMIZER_TREE}
    assert result.state.trees["model"] == {}


def test_the_trained_model_comes_back_only_when_asked() -> None:
    site, start = ready()
    assert site.run(job(start)).tree is None
    kept = site.run(job(start, keep_local=True))
    assert kept.tree is not None
    assert tree.digest(kept.tree) == tree.digest(kept.message.trees["model"])


def test_one_thread_trains_and_the_setting_comes_back() -> None:
    site, start = ready()
    seen: list[int] = []
    site.workspace.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        site.run(job(start))
        broken = {name: torch.full_like(value, torch.nan) for name, value in start.items()}
        with pytest.raises(NonFiniteError):
            site.run(job(broken))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


@pytest.mark.parametrize("kind", ["plain", "drop", "norm"])
def test_scores_are_those_of_the_tree_in_evaluation_mode(kind: str) -> None:
    site, _ = ready(kind)
    model = network(kind, seed=5)
    found = site.run(ScoreJob(1, tree.of(model), ("train", "validation", "test"))).scores
    model.eval()
    for name, scores in found.items():
        split = TOY.clients[1].split(name)
        assert scores == evaluate.scores(model(split.x), split.y, build("cross_entropy"))


def test_scores_of_a_broken_tree_say_whose_they_are() -> None:
    site, start = ready()
    start["fc3.bias"][0] = torch.inf
    where = r"^fedavg, round 7, client 'c', scoring the personal model on validation: \d+ of \d+ samples have logits"
    with pytest.raises(NonFiniteError, match=where):
        site.run(ScoreJob(2, start, ("validation",), "personal", 7))


def test_scoring_without_statistics_never_meets_a_batch_of_one() -> None:
    """Batches are normalised by their own statistics then: one sample alone would have no variance."""
    sizes = [int(np.ceil((SCORE_BATCH + 1) / 0.2))] * 2
    data = federation(sizes=sizes, shape=(1, 6, 6))
    assert len(data.clients[0].test) == SCORE_BATCH + 1
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    task = runner.assemble(replace(CONFIG, bn="drop"), data=data, model=model)
    found = site_of(task).run(ScoreJob(0, tree.of(task.model), ("test",))).scores["test"]
    assert 0 <= found["accuracy"] <= 1


def test_an_incomplete_tree_is_refused() -> None:
    site, start = ready()
    with pytest.raises(UsageError, match=r"only in the model: fc2\.bias"):
        site.run(job({name: value for name, value in start.items() if name != "fc2.bias"}))


def test_fine_tuning_ignores_the_kept_optimiser() -> None:
    """A copy is fine-tuned with a new optimiser, whatever the client keeps."""
    results = []
    for keep in (False, True):
        site, start = ready(algorithm="local_adaptation", keep_optimizer=keep, momentum=0.9)
        found = site.run(FinishJob(0, 3, start)).tree
        assert found is not None
        results.append(tree.digest(found))
    assert results[0] == results[1]


def test_an_error_in_fine_tuning_says_after_which_round() -> None:
    """There is no round after the last one to name."""
    site, start = ready(algorithm="local_adaptation")
    start["fc1.weight"][0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"local_adaptation, after round 3, client 'a', phase 'finetune'.*'fc1'"):
        site.run(FinishJob(0, 3, start))
