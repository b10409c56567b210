"""Clients that hold some of the blocks: what they hold, train, send and cost, and how the server puts it together."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.nn import functional as F

from fl_core import models, tree
from fl_core.algorithms import Round, registry
from fl_core.algorithms.base import Message, Update
from fl_core.algorithms.fedra import LimitedDepth, draw_cover
from fl_core.models.extended import Exits, hold, tensors_below, with_optional_blocks
from fl_core.run import runner
from fl_core.seeds import torch_seeded
from fl_core.training.workspace import Workspace
from tests.conftest import (
    BLOCKS,
    CONFIG,
    TOY,
    every_other,
    federation,
    network,
    play,
    refuses,
)
from tests.made import Wired

DEPTH = sorted(name for name, kind in registry().items() if kind.needs_blocks)
LIMITED = sorted(
    name for name, kind in registry().items() if issubclass(kind, LimitedDepth)
)
SEVERAL = {"depths": (3, 2, 1, 1)}
EVERYONE = tuple(range(len(TOY.clients)))
X = models.example(TOY.shape)


def task(name, kind="vit", **options):
    return runner.assemble(
        CONFIG.with_keys(algorithm=name, options=options), data=TOY, model=network(kind)
    )


def made(name, **options):
    return task(name, **options).algorithm(None)


def blocks_in(names, found):
    """Positions of the blocks of which a tensor is named."""
    return [
        k for k, path in enumerate(found.task_info.blocks) if tensors_below(names, path)
    ]


def test_fixed_depths_must_cover_the_blocks_where_all_are_asked_for():
    def setup(**options):
        config = CONFIG.with_keys(algorithm="fedra", options=options)
        two = federation((30, 40))
        runner.assemble(config, data=two, model=network("vit")).algorithm(None)

    few = {"depths": (1, 1)}
    with refuses("sum to at least 3 blocks with allocation=cover; got 2"):
        setup(**few, allocation="cover")
    setup(**few)
    setup(depths=(2, 1), allocation="cover")
    setup(random_depths=True, allocation="cover")


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("kept", [(0, 1, 2), (0, 2), (1,), ()], ids=str)
def test_a_model_without_some_blocks_is_the_shallower_model(kind, kept):
    whole, shallow = (with_optional_blocks(network(kind).eval(), X) for _ in range(2))
    shallow.blocks = nn.Sequential(
        *(shallow.get_submodule(f"blocks.{k}") for k in kept)
    )
    names = set(tree.named_tensors(whole))
    gone = [f"blocks.{k}" for k in range(3) if k not in kept]
    hold(whole, names.difference(*(tensors_below(names, path) for path in gone)))
    for path in gone:
        for parameter in whole.get_submodule(path).parameters():
            nn.init.constant_(parameter, math.nan)
    assert torch.equal(whole(X), shallow(X))
    hold(whole)
    assert not torch.isfinite(whole(X)).all() or not gone


@pytest.mark.parametrize("kind", ["vit", pytest.param("mixer", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", every_other(DEPTH, start=1))
def test_no_forward_pass_reads_what_was_not_sent(name, kind, monkeypatch):
    """A skeleton full of NaN gives the same bits: rows, costs, states."""
    limits = SEVERAL if name in LIMITED else {}
    common = {
        "algorithm": name,
        "model": kind,
        "rounds": 2,
        "options": limits,
    }
    wanted, load = play(**common), Workspace.load

    def forget(self, source, held=None):
        with torch.no_grad():
            for tensor in self.live.values():
                tensor.fill_(math.nan)
        load(self, source, held)

    monkeypatch.setattr(Workspace, "load", forget)
    played_run = play(**common)
    assert played_run.everything() == wanted.everything()
    assert played_run.rows == wanted.rows


depths_of_some = st.lists(st.integers(1, 6), min_size=1, max_size=6)


@given(depths_of_some, st.integers(0, 50), st.integers(0, 3))
def test_a_covering_allocation_respects_depths_and_leaves_out_what_it_must(
    depths, index, seed
):
    blocks = draw_cover(tuple(enumerate(depths)), 6, seed, index)
    assert [len(blocks[client]) for client in range(len(depths))] == depths
    for positions in blocks.values():
        assert list(positions) == sorted(set(positions))
        assert set(positions) <= set(range(6))
    assert len(set().union(*blocks.values())) == min(6, sum(depths))


@pytest.mark.parametrize("random", [False, True], ids=["fixed", "random"])
@pytest.mark.parametrize("name", LIMITED)
def test_clients_never_hold_more_blocks_than_their_depth(name, random):
    options = {"random_depths": True} if random else SEVERAL
    variants = [{}, {"allocation": "cover"}] if name == "fedra" else [{}]
    for variant in variants:
        algorithm = made(name, **options, **variant)
        seen = set()
        for index in range(12):
            rnd = Round(index, sampled=EVERYONE)
            for client in EVERYONE:
                names, depth = (
                    algorithm.submodel(rnd, client),
                    algorithm.depth(rnd, client),
                )
                assert len(blocks_in(names, algorithm)) == depth
                assert depth == SEVERAL["depths"][client] or random
                assert name == "fedra" or blocks_in(names, algorithm) == list(
                    range(depth)
                )
                assert (
                    algorithm.uploaded(rnd, client)
                    <= algorithm.shared(rnd, client)
                    <= names
                )
                assert {
                    name
                    for phase in algorithm.phases(rnd, client)
                    for name in phase.train
                } <= names
                seen.add((client, *blocks_in(names, algorithm)))
        assert (len(seen) > len(EVERYONE)) == (random or name == "fedra")


def replies(found, server, rnd, generator):
    """What clients might send: the server's model and noise on what trains."""
    return [
        Update(
            client,
            found.task_info.n_train[client],
            Message(
                {
                    "model": {
                        name: server[name]
                        + torch.randn(server[name].shape, generator=generator)
                        for name in sorted(found.uploaded(rnd, client))
                    }
                }
            ),
        )
        for client in rnd.sampled
    ]


@pytest.mark.parametrize("kind", BLOCKS)
def test_an_early_classifier_reads_what_a_shallower_model_would(kind):
    model = Exits(
        with_optional_blocks(network(kind).eval(), X),
        (1, 2),
        ensemble=True,
        seed=0,
        example=X,
    ).eval()
    logits = model(X, every=True)
    assert logits.shape == (3, len(X), 3)
    assert torch.allclose(model(X), logits.mean(0))
    shallow = network(kind).eval()
    assert torch.equal(logits[-1], shallow(X))
    for k in (1, 2):
        shallow = network(kind).eval()
        shallow.blocks = shallow.blocks[:k]
        shallow.head = model.exits[str(k)]
        assert torch.allclose(logits[k - 1], shallow(X), atol=1e-6)
    model.ensemble = False
    assert torch.equal(model(X), logits[-1])


@pytest.mark.parametrize(
    ("index", "weight", "depth"),
    [(0, math.exp(-5), 1), (5, math.exp(-1.25), 3), (99, 1.0, 3)],
)
def test_classifiers_teach_each_other_by_the_formula(index, weight, depth):
    depth_task = task(
        "depthfl", depths=(depth,), ramp=10, distillation=2, lora_dropout=0
    )
    algorithm = depth_task.algorithm(None)
    client_runner = depth_task.client_runner()
    client_runner.algorithm = algorithm
    names = algorithm.submodel(Round(index), 0)
    client_runner.workspace.load(
        tree.select(tree.state_dict(depth_task.model), names), names
    )
    ctx = client_runner._context(0, index, {})
    x, y = TOY.clients[0].train.x[:6], TOY.clients[0].train.y[:6]
    params = client_runner.workspace.params
    loss = algorithm.loss(params, (x, y), ctx)
    heads = [
        params[name]
        for name in sorted(names)
        if name.endswith("weight") and ("exits" in name or "head" in name)
    ]
    grads = torch.autograd.grad(loss, heads)
    logits = client_runner.workspace.forward(params, x, every=True)
    wanted = torch.stack([F.cross_entropy(z, y) for z in logits]).sum()
    for k, student in enumerate(logits):
        for j, teacher in enumerate(logits):
            if j != k:
                kl = F.kl_div(
                    student.log_softmax(1),
                    teacher.detach().softmax(1),
                    reduction="batchmean",
                )
                wanted = wanted + 2 * weight * kl / (depth - 1)
    assert torch.allclose(loss, wanted)
    for ours, theirs in zip(grads, torch.autograd.grad(wanted, heads), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(
    "sampled",
    [((0, 1, 2, 3), (0, 1, 2, 3)), ((0, 2), (0, 1, 3)), ((1,), (2, 3)), ((2,), (0,))],
)
def test_momentum_is_the_formula(sampled):
    """Against sums written out tensor by tensor in float64."""
    depths, beta = (3, 2, 1, 1), 0.3
    algorithm = made("inclusivefl", depths=depths, beta=beta, lora_targets="none")
    start = tree.state_dict(task("inclusivefl", lora_targets="none").model)
    server = algorithm.server_state(tree.clone(start))
    draws, last = torch.Generator().manual_seed(1), {}
    for index, clients in enumerate(sampled):
        rnd = Round(index, sampled=clients)
        before = {n: t.double() for n, t in server.trees["model"].items()}
        updates = replies(algorithm, server.trees["model"], rnd, draws)
        algorithm.aggregate(server, updates, rnd)
        groups = {
            d: [u for u in updates if depths[u.client] == d]
            for d in {depths[c] for c in clients}
        }
        weight = {d: sum(u.weight for u in updates) for d, updates in groups.items()}
        change = {
            d: {
                n: sum(u.weight * u.message.trees["model"][n].double() for u in updates)
                / weight[d]
                - before[n]
                for n in updates[0].message.trees["model"]
            }
            for d, updates in groups.items()
        }
        moved = {d: dict(tensors) for d, tensors in change.items()}
        for d in groups:
            deeper = min((r for r in last if r > d), default=None)
            if deeper is not None:
                for n in tensors_below(change[d], f"blocks.{d - 1}"):
                    rest = n.removeprefix(f"blocks.{d - 1}.")
                    others = [
                        last[deeper][f"blocks.{k}.{rest}"] for k in range(d - 1, deeper)
                    ]
                    mean = sum(others) / len(others)
                    moved[d][n] = (1 - beta) * change[d][n] + beta * mean
        for n, now in server.trees["model"].items():
            holders = [d for d in groups if n in moved[d]]
            wanted = before[n]
            if holders:
                total = sum(weight[d] for d in holders)
                wanted = wanted + sum(weight[d] * moved[d][n] for d in holders) / total
            assert torch.allclose(now.double(), wanted, atol=1e-6), n
        last = change


# --- blocks that normalise over batches ------------------------------------------------------------------------


def normalising():
    """A small model of three residual blocks, each with a batch normalisation."""

    def block():
        parts = {
            "conv": nn.Conv2d(4, 4, 3, padding=1, bias=False),
            "norm": nn.BatchNorm2d(4),
        }
        return Wired(lambda own, x: x + own.norm(own.conv(x)).relu(), **parts)

    with torch_seeded(0):
        blocks = nn.Sequential(block(), block(), block())
        parts = {"stem": nn.Conv2d(1, 4, 3), "blocks": blocks, "head": nn.Linear(64, 3)}
        return Wired(
            lambda own, x: own.head(own.blocks(own.stem(x)).flatten(1)), **parts
        )


def test_inclusivefls_momentum_is_of_parameters_and_running_statistics_are_averaged():
    options = {"lora_targets": "none", "depths": "1,2,3"}
    plays = [
        play(
            algorithm="inclusivefl",
            model=normalising(),
            options=options | {"beta": beta},
            rounds=2,
        )
        for beta in (0, 0.9)
    ]
    first, second = (played.checkpoints[-1].server.trees["model"] for played in plays)
    averaged = [name for name in first if "running" in name or "tracked" in name]
    assert len(averaged) == 9
    assert all(torch.equal(first[name], second[name]) for name in averaged)
    assert not torch.equal(
        first["blocks.0.conv.weight"], second["blocks.0.conv.weight"]
    )


@pytest.mark.parametrize("name", ["fedra", "inclusivefl"])
def test_statistics_that_stay_local_wait_at_a_client_for_their_block(name):
    """A client that has other blocks in every round has the statistics of all of them, moved by its own training."""
    options = {"lora_targets": "none", "random_depths": True}
    played = play(
        algorithm=name,
        model=normalising(),
        batchnorm="local",
        options=options,
        rounds=4,
    )
    algorithm, before = (
        played.engine.algorithm,
        {client: tree.state_dict(normalising()) for client in range(4)},
    )
    submodels = [
        [algorithm.submodel(Round(k), client) for k in range(4)] for client in range(4)
    ]
    assert any(len(set(of_client)) > 1 for of_client in submodels)
    for index, checkpoint in enumerate(played.checkpoints):
        for client, state in enumerate(checkpoint.clients.values()):
            client_model = state.trees["model"]
            assert client_model.keys() == algorithm.task_info.never_sent
            moved = {
                key
                for key in client_model
                if not torch.equal(client_model[key], before[client][key])
            }
            assert moved == client_model.keys() & submodels[client][index]
            before[client] = client_model
