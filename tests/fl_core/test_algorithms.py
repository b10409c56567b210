"""Every algorithm of the registry: what is trained, what travels, what stays, and what is evaluated."""

from dataclasses import replace

import pytest
import torch

from fl_core import models, tree
from fl_core.algorithms import Round, TaskInfo, find, registry
from fl_core.algorithms.base import Message
from fl_core.layers import Layer, layers_of
from fl_core.plan import Evidence, LayerPlan, shift_plan
from fl_core.rounds.clients import Part
from fl_core.run import runner
from tests.bounds import forbidden
from tests.conftest import (
    CONFIG,
    TOY,
    client_runner_of,
    every_other,
    kind_for,
    network,
    play,
    refuses,
)

ALL = sorted(registry())
SPLITTING = sorted(name for name, kind in registry().items() if kind.uses_plan)
HARD = {
    "momentum": 0.9,
    "weight_decay": 0.05,
    "lr": 0.1,
}  # what moves a tensor that is not frozen


def layers(kind="plain"):
    return layers_of(network(kind), models.example(TOY.shape))


def problem(kind="plain", **changes):
    listed = layers(kind)
    return replace(TaskInfo(listed, frozenset(), TOY.weights, 1, 0), **changes)


def adopted(name, plan, **changes):
    return find(name)(problem(**changes)).resolve_plan(plan)


def prefix(count, kind="plain", **why):
    return LayerPlan.prefix(layers(kind), count, Evidence(**why))


@pytest.mark.parametrize("name", ALL)
def test_every_algorithm_says_what_it_is(name):
    kind = find(name)
    assert kind.name == name
    assert kind.paper
    assert kind.trains
    assert kind.travels
    assert kind.keeps
    assert kind.cost
    assert kind.evaluates in ("global", "personal")


def test_a_value_that_an_option_s_annotation_forbids_is_refused():
    count = 0
    for name in ALL:
        for option, value in forbidden(find(name).Config):
            with refuses(option) as caught:
                find(name)(problem(), None, {option: value})
            assert "\n" not in str(caught.value)
            count += 1
    assert count > 380


def test_one_layer_more_or_less():
    for cut, by, count, status in (
        (1, 1, 2, "ok"),
        (2, -1, 1, "ok"),
        (1, -1, 1, "clipped from 0 to 1 of 3 layers"),
        (3, 1, 2, "clipped from 4 to 2 of 3 layers"),
        (0, -1, 1, "clipped from -1 to 1 of 3 layers"),
    ):
        for before in ("ok", "client 'a' has no vote"):
            shifted = shift_plan(prefix(cut, rule="r", status=before), by)
            why = [note for note in (before, status) if note != "ok"]
            assert (shifted.cut, shifted.why.rule) == (count, f"r {by:+d}")
            assert shifted.why.status == ("; ".join(why) or "ok")


def test_the_random_prefix_is_neither_the_plan_nor_all_and_depends_on_the_seed():
    deep = tuple(Layer(f"l{k}", (f"l{k}.weight",)) for k in range(7))
    for cut in (0, 3, 6, 7):
        drawn = {
            adopted(
                "playerfl_random", LayerPlan.prefix(deep, cut), layers=deep, seed=seed
            ).cut
            for seed in range(60)
        }
        assert drawn == set(range(1, 7)) - {cut}


@pytest.mark.parametrize(
    "kind", [pytest.param("plain", marks=pytest.mark.slow), "norm"]
)
@pytest.mark.parametrize("name", ALL)
def test_a_phase_moves_its_own_tensors_only(name, kind):
    """Parameters and running statistics, with momentum and weight decay on, phase by phase."""
    plan = prefix(1, kind) if name in SPLITTING else None
    config = CONFIG.with_keys(algorithm=name, **HARD)
    task = runner.assemble(
        config, data=TOY, model=network(kind_for(name, kind)), plan=plan
    )
    client_runner, algorithm = client_runner_of(task), task.algorithm(task.plan)
    client_runner.algorithm = algorithm
    client = 1
    every = algorithm.submodel(Round(1), client)
    start = tree.select(tree.state_dict(task.model), every)
    server = algorithm.server_state(tree.state_dict(task.model))
    received = (
        algorithm.client_state(start, client).trees
        | algorithm.server_message(server, client, Round(1)).trees
    )
    for mask in received.get("personal entries", {}).values():
        mask.view(-1)[::2] = True  # both phases have something to train
    for phase in (
        *algorithm.phases(Round(1), client),
        *algorithm.finetuning(algorithm.task_info.rounds, client),
    ):
        ctx = client_runner._context(client, 1, start)
        ctx.trees, ctx.submodel = received, every
        found, _ = client_runner.phase(Part(phase, start, ctx, {}))
        assert found.keys() == every
        moved = {n for n in every if not torch.equal(found[n], start[n])}
        stored = {
            n for n in phase.train if n.startswith("memory.")
        }  # samples that one phase stores; it trains nothing
        trained = phase.train - stored - algorithm.task_info.frozen
        assert moved == (stored if phase.name == "remember" else trained)
        assert phase.train or not phase.epochs


@pytest.mark.parametrize("name", every_other(ALL, 1, of=3))
def test_whatever_follows_a_gradient_is_clipped(name):
    """With a clip of next to nothing nobody moves in the first round, in which nothing but gradients can move."""
    ways = {}
    for clip in (None, 1e-8):
        played = play(algorithm=name, rounds=1, max_grad_norm=clip, eval_every=1)
        initial, ways[clip] = tree.state_dict(played.task.model), 0.0
        for client, trained in enumerate(
            played.checkpoints[0].models["local"].values()
        ):
            client_model = played.engine.algorithm.client_state(
                initial, client
            ).trees.get("model", {})  # prompts are each client's own
            begin = tree.select({**initial, **client_model}, trained)
            ways[clip] = max(ways[clip], tree.distance(begin, trained))
    assert ways[None] > 1e-3
    if name in ("pfedhn", "pfedgate"):  # which have their own
        assert ways[1e-8] == ways[None]
    else:
        assert ways[1e-8] < 1e-5


@pytest.mark.parametrize("name", ["fedbabu", "local_adaptation", "vanilla", "anti"])
def test_fine_tuning_works_on_copies(name):
    """With or without fine-tuning the rest of the run is the same, and the copies start at the global model."""
    without, tuned = (
        play(algorithm=name, options={"finetune_epochs": n}) for n in (0, 2)
    )
    assert tuned.server() == without.server()
    assert tuned.evaluated() == without.evaluated()
    for client, state in without.checkpoints[-1].clients.items():
        personal = without.checkpoints[-1].models["personal"][client]
        model = without.engine.algorithm.models(
            without.checkpoints[-1].server, state, Round(3)
        )["global"]
        assert tree.digest(personal) == tree.digest(model)
        assert tree.digest(
            tuned.checkpoints[-1].models["personal"][client]
        ) != tree.digest(model)


def client_models(played, which):
    """For each round: client -> its model of that name."""
    algorithm = played.engine.algorithm
    return [
        {
            name: algorithm.models(c.server, state, Round(c.round))[which]
            for name, state in c.clients.items()
        }
        for c in played.checkpoints
    ]


@pytest.mark.parametrize("bn", ["global", "local", "drop"])
@pytest.mark.parametrize("name", ["fedavg", "fedper", "ditto", "playerfl"])
def test_running_statistics_are_shared_kept_or_dropped(name, bn):
    changes = {"model": "norm", "batchnorm": bn, "rounds": 2, "eval_every": 2}
    played = play(algorithm=name, **changes)
    statistics = {
        f"{m}.{key}" for m in ("bn1", "bn2") for key in ("running_mean", "running_var")
    }
    algorithm = played.engine.algorithm
    if bn == "drop":
        assert not statistics & algorithm.task_info.tensors
        return
    shared = algorithm.shared(Round(1), 0)
    for by_client in client_models(played, algorithm.evaluates):
        first, *others = by_client.values()
        for statistic in statistics:
            same = all(
                torch.equal(first[statistic], other[statistic]) for other in others
            )
            assert same == (statistic in shared), statistic
            assert not same or bn == "global"


@pytest.mark.parametrize("name", ALL)
def test_messages_hold_what_is_shared_and_nothing_else(name):
    plan = prefix(2) if name in SPLITTING else None
    task = runner.assemble(
        CONFIG.with_keys(algorithm=name),
        data=TOY,
        model=network(kind_for(name, "plain")),
        plan=plan,
    )
    algorithm = task.algorithm(task.plan)
    initial = tree.state_dict(task.model)
    message = algorithm.server_message(algorithm.server_state(initial), 0, Round(1))
    for received in message.trees.values():
        if (
            name == "heurpfedla"
        ):  # what a client keeps in a round is the server's choice
            assert received.keys() < algorithm.shared(Round(1), 0)
        else:
            assert received.keys() == algorithm.shared(Round(1), 0)
    assert message.trees or name == "fedfomo"
    state = algorithm.client_state(initial, 0)
    client_runner = client_runner_of(task)
    client_runner.use(algorithm)
    begun = algorithm.client_start(
        state, message, client_runner._context(0, 1, {}), Round(1), 0
    )
    assert begun.keys() == algorithm.submodel(Round(1), 0)


def test_bytes_count_floats_masks_and_numbers():
    message = Message(
        {
            "model": {
                "w": torch.zeros(3, 2),
                "half": torch.zeros(5).half(),
                "steps": torch.tensor(7),
            }
        },
        {
            "measured": {"layers": ["a", "b"], "importance": [0.5, 1.5, None]},
            "flag": True,
            "n": 3,
        },
    )
    assert message.bytes == 4 * 6 + 2 * 5 + 4 * 3
    assert Message({"mask": {"m": torch.ones(9, dtype=torch.bool)}}).bytes == 2
    assert Message().bytes == 0
