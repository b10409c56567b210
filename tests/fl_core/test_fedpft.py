"""FedPFT and its two-stage baseline: who learns from what, MoCo's queue, what stays, what is recorded."""

from dataclasses import replace

import pytest
import torch

from fl_core import tree
from fl_core.algorithms import Round
from fl_core.algorithms.fedpft import ContrastiveBatch, FedPFT
from fl_core.data.augment import MoCoViews
from fl_core.rounds.clients import Part, TrainRequest
from fl_core.run import runner
from tests.conftest import CONFIG, TOY, client_runner_of, network

PARTS = ("body", "transform", "head", "projection", "prompts", "contrast_prompts")


def client_runner(algorithm="fedpft", kind="norm", **options):
    task = runner.assemble(
        CONFIG.with_keys(algorithm=algorithm, epochs=2, options=options),
        data=TOY,
        model=network(kind),
    )
    built = client_runner_of(task)
    built.algorithm = task.algorithm(task.plan)
    return built


def job(where, client=1, index=0):
    algorithm, initial = where.algorithm, tree.state_dict(where.workspace.model)
    assert algorithm is not None
    rnd = Round(index, "train", (client,))
    message = algorithm.server_message(
        algorithm.server_state(tree.clone(initial)), client, rnd
    ).clone()
    return TrainRequest(
        client, rnd, message, state=algorithm.client_state(initial, client), keep=True
    )


def test_views_undo_the_normalisation_of_the_data():
    info = replace(client_runner().algorithm.task_info, mean=(0.1,), std=(0.2,))
    assert FedPFT(info).views == MoCoViews((0.1,), (0.2,))


ROUTES = {  # phase -> part -> the losses that move it (FedPFT, Eq. 5 and 6)
    "features": {
        "body": "K",
        "transform": "CK",
        "head": "",
        "projection": "K",
        "prompts": "C",
        "contrast_prompts": "",
    },
    "adapt": {
        "body": "C",
        "transform": "C",
        "head": "C",
        "projection": "",
        "prompts": "",
        "contrast_prompts": "K",
    },
    "train": {
        "body": "CK",
        "transform": "CK",
        "head": "C",
        "projection": "K",
        "prompts": "C",
        "contrast_prompts": "K",
    },
}


@pytest.mark.parametrize("phase", ROUTES)
def test_gradients_go_where_the_paper_sends_them(phase, monkeypatch):
    """The two losses alone, by scaling the other one to nothing, for all six parts."""
    where = client_runner(alternate=phase != "train")
    algorithm = where.algorithm
    assert isinstance(algorithm, FedPFT)
    chosen = next(
        candidate
        for candidate in algorithm.phases(Round(0), 1)
        if candidate.name == phase
    )
    paths = dict.fromkeys(PARTS, "")
    for letter, silent in (("C", "contrast_loss"), ("K", "classify")):
        reached = {}

        def note(
            steps,
            batch,
            ctx,
            reached=reached,
        ):
            seen = algorithm.draw_views(steps, batch, ctx)
            for name, grad in steps.gradients(seen).items():
                part = name.partition(".")[0]
                reached[part] = max(reached.get(part, 0.0), float(grad.abs().max()))
            algorithm.enqueue(
                seen, ctx
            )  # the first batch has no negatives, and so no gradient

        with monkeypatch.context() as patch:
            loss = getattr(FedPFT, silent)
            patch.setattr(FedPFT, silent, lambda *a, loss=loss, **k: 0 * loss(*a, **k))
            algorithm.note = note
            ctx = where._context(1, 0, {})
            ctx.trees = job(where).state.trees
            where.phase(
                Part(
                    replace(chosen, step="note"),
                    tree.state_dict(where.workspace.model),
                    ctx,
                    {},
                )
            )
        for part, size in reached.items():
            paths[part] += letter * (size > 0)
    assert paths == ROUTES[phase]
    assert {name.partition(".")[0] for name in chosen.train} == {
        part for part in PARTS if ROUTES[phase][part]
    }


def watched(where, **changes):
    """The batches that a client's training saw, the queue after each, and the result."""
    seen = []
    queues = []
    algorithm = where.algorithm
    assert isinstance(algorithm, FedPFT)
    enqueue = algorithm.enqueue

    def spy(each, ctx):
        enqueue(each, ctx)
        seen.append(each)
        queues.append(tree.clone(ctx.scratch["queue"]))

    algorithm.enqueue = spy
    return seen, queues, where.run(job(where, **changes))


def test_the_queue_holds_the_latest_keys_wherever_it_wraps():
    where = client_runner(queue=21)  # of batches of 8, and of a last one of 5
    began = job(where).state.trees["queue"]["keys"]
    seen, queues, result = watched(where)
    keys = torch.cat([batch.keys for batch in seen])
    torch.testing.assert_close(keys.norm(dim=1), torch.ones(len(keys)))
    ring, at = began.clone(), 0
    for batch, queue in zip(seen, queues, strict=True):
        for key in batch.keys:
            ring[at % 21] = key
            at += 1
        assert torch.equal(queue["keys"], ring)
        assert int(queue["at"]) == at % 21
        assert int(queue["filled"]) == min(at, 21)
    assert at % 21
    assert torch.equal(result.state.trees["queue"]["keys"], ring)
    assert result.state.trees.keys() == {"model", "queue"}, "the key branch is not kept"
    assert not any(batch.keys.requires_grad for batch in seen)


def test_the_contrastive_loss_is_a_softmax_over_the_queue():
    where = client_runner(queue=30, temperature=0.2)
    algorithm, space = where.algorithm, where.workspace
    assert isinstance(algorithm, FedPFT)
    draw = torch.Generator().manual_seed(0)
    keys, own_keys = (
        torch.nn.functional.normalize(torch.randn(n, 128, generator=draw))
        for n in (30, 4)
    )
    ctx = where._context(0, 0, {})
    ctx.scratch["queue"] = {
        "keys": keys,
        "at": torch.tensor(11),
        "filled": torch.tensor(11),
    }
    x, y = TOY.clients[0].train.x[:4], TOY.clients[0].train.y[:4]
    space.model.eval()
    loss = algorithm.contrast_loss(
        space.params, ContrastiveBatch(x, y, x, own_keys, {}), ctx
    )
    with torch.no_grad():
        queries = space.model(x, task="contrast").double()
    torch.testing.assert_close(queries.norm(dim=1), torch.ones(4, dtype=torch.float64))
    total = 0.0
    for q, k in zip(queries, own_keys.double(), strict=True):
        others = [float(torch.exp(q @ other.double() / 0.2)) for other in keys[:11]]
        right = float(torch.exp(q @ k / 0.2))
        total -= float(torch.log(torch.tensor(right / (right + sum(others)))))
    assert loss.item() == pytest.approx(total / 4, rel=1e-5)


def test_the_key_branch_follows_the_query_branch():
    """It starts at what was received, and each step moves it by 1 - m towards the query branch before it encodes."""
    where = client_runner(queue=16, momentum=0.9, kind="plain")
    algorithm = where.algorithm
    assert isinstance(algorithm, FedPFT)
    start = {name: value.clone() for name, value in where.workspace.live.items()}
    wanted = {}
    seen_step = algorithm.draw_views

    def spy(steps, batch, ctx):
        wanted.update(
            {
                n: 0.9 * wanted.get(n, steps.live[n].detach())
                + 0.1 * steps.live[n].detach()
                for n in steps.live
            }
        )
        views = seen_step(steps, batch, ctx)
        for name, value in ctx.scratch["key"].items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-7)
        return views

    algorithm.draw_views = spy
    where.run(job(where))
    assert any(
        not torch.allclose(wanted[name], start[name], atol=1e-4) for name in start
    )
