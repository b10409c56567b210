"""What a run moves and computes, against formulas."""

import pytest

from fl_core.layers import sizes
from fl_core.plan import LayerPlan
from fl_core.run import runner
from fl_core.run.costs import cost_steps, training_flops
from fl_core.training.workspace import Workspace
from tests.conftest import CONFIG, TOY, network, play, refuses

CLIENTS = [client.name for client in TOY.clients]
LAYERS = runner.assemble(CONFIG, data=TOY, model=network("plain")).layers
SIZES = sizes(LAYERS, network("plain"))
P, FIRST = 4 * sum(SIZES.values()), 4 * SIZES["fc1"]
BODY = FIRST + 4 * SIZES["fc2"]
LAST = P - BODY
MASK = -(-P // 32)  # one bit a parameter


def moved(played, variant=""):
    """(down, up) of every round, the same for every client."""
    down, up = (
        played.values(metric, variant=variant) for metric in ("bytes_down", "bytes_up")
    )
    rounds = sorted({k for k, _ in down})
    sent = []
    for k in rounds:
        pairs = {(down[k, client], up.get((k, client), 0.0)) for client in CLIENTS}
        assert len(pairs) == 1
        sent.append(pairs.pop())
    return sent


@pytest.mark.parametrize(
    ("name", "rounds", "options"),
    [
        *(
            (name, [(P, P)] * 3, {})
            for name in (
                *("fedavg", "fedprox", "local_adaptation", "ditto", "fedbn"),
                *("feddyn", "pfedsd", "fedamp", "heurfedamp", "pfedhn", "pfedla"),
            )
        ),
        ("local", [(0, 0)] * 3, {}),
        *((name, [(BODY, BODY)] * 3, {}) for name in ("fedper", "fedrep", "fedbabu")),
        ("lg_fedavg", [(LAST, LAST)] * 3, {}),
        ("scaffold", [(2 * P, 2 * P)] * 3, {}),
        ("fedcac", [(P, P + MASK)] * 3, {}),
        ("fedfomo", [(0, P), *[(2 * P, P + 4 * 2)] * 2], {"downloads": 2}),
        ("fedfomo", [(0, P), *[(3 * P, P + 4 * 3)] * 2], {}),
        ("heurpfedla", [(0, P)] * 3, {"k": 3}),
    ],
)
def test_bytes_of_a_client_in_a_round(name, rounds, options):
    played = play(algorithm=name, options=options, eval_every=3)
    assert moved(played) == rounds
    sizes = [row for row in played.rows if row["metric"].startswith("bytes")]
    assert {row["unit"] for row in sizes} == {"byte"}


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("playerfl", FIRST),
        ("playerfl_minus", FIRST),
        ("playerfl_plus", BODY),
        ("playerfl_random", BODY),
    ],
)
def test_playerfl_downloads_all_once_and_uploads_one_number_a_layer(name, shared):
    played = play(algorithm=name, eval_every=3)
    plan = played.engine.algorithm.plan
    assert 4 * sum(SIZES[layer.name] for layer in plan.body) == shared
    assert moved(played) == [
        (P, 4 * len(LAYERS) + shared),
        (shared, shared),
        (shared, shared),
    ]
    with_plan = play(
        algorithm="playerfl", plan=LayerPlan.prefix(LAYERS, 1), eval_every=3
    )
    assert moved(with_plan) == [(FIRST, FIRST)] * 3


def test_a_measured_plan_is_charged_beside_the_run():
    played = play(algorithm="fedper", config_plan="auto", eval_every=3)
    with_plan = play(
        algorithm="fedper", plan=played.engine.algorithm.plan, eval_every=3
    )
    assert moved(played, "plan") == [(P, 4 * len(LAYERS))]
    assert moved(played) == moved(with_plan) == [(FIRST, FIRST)] * 3
    for metric in ("steps", "flops"):
        assert played.values(metric, variant="") == with_plan.values(metric, variant="")
        charged = played.values(metric, variant="plan")
        assert charged.keys() == {(0, client) for client in CLIENTS}
        assert all(
            charged[0, c] == with_plan.values(metric, variant="")[1, c] for c in CLIENTS
        )


@pytest.mark.parametrize("bn", ["global", "local", "drop"])
def test_running_statistics_travel_unless_they_stay_and_counters_never_do(
    bn,
):
    """4 + 8 means and as many variances, in float32; variates are of parameters only."""
    sizes = {name: p.numel() for name, p in network("norm").named_parameters()}
    weights, statistics = sum(sizes.values()), 2 * (4 + 8) if bn == "global" else 0
    norms = sum(size for name, size in sizes.items() if name.startswith("bn"))
    for name, sent in (
        ("fedavg", weights + statistics),
        ("scaffold", 2 * weights + statistics),
        ("fedbn", weights - norms),
        ("pfedhn", weights),
    ):
        played = play(algorithm=name, model="norm", batchnorm=bn, rounds=1)
        assert moved(played) == [(4 * sent, 4 * sent)]


A, B, C = 36 * 8, 8 * 6, 6 * 3  # multiply-adds of the three layers
FORWARD = 2 * (A + B + C)


def full(*layers):
    """FLOPs of training these layers, of one sample."""
    names = frozenset(
        f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")
    )
    return training_flops(Workspace(network("plain")), TOY.shape, names)


def test_flops_of_a_perceptron_by_hand():
    """Errors go down to the first output that trains, also through frozen layers."""
    for trained, backward in (
        ((), 0),
        (("fc1", "fc2", "fc3"), (A + B + C) + (B + C)),
        (("fc2", "fc3"), (B + C) + C),
        (("fc3",), C),
        (("fc1",), A + (B + C)),
        (("fc1", "fc3"), A + C + (B + C)),
    ):
        assert full(*trained) == FORWARD + 2 * backward


@pytest.mark.parametrize(
    "name",
    [
        *("fedavg", "ditto", "fedper", "fedrep", "fedbabu", "vanilla", "anti"),
        *("playerfl", "inclusivefl"),
    ],
)
def test_costs_of_rounds_are_what_a_run_records(name):
    """Clients of little depth compute and send their blocks alone."""
    plan = LayerPlan.prefix(LAYERS, 2) if name == "playerfl" else None
    options = {"depths": (3, 2, 1, 1)} if name == "inclusivefl" else {}
    played = play(algorithm=name, plan=plan, options=options)
    costs = cost_steps({"a": played.task, "b": played.task})
    assert costs["run"].tolist() == [*"aaabbb"]
    flops, down, up, steps = (
        played.values(metric, variant="")
        for metric in ("flops", "bytes_down", "bytes_up", "steps")
    )
    for cost in costs.itertuples():
        keys = [(cost.round, client) for client in CLIENTS]
        if name == "fedavg":
            assert cost.naive == sum(SIZES.values()) * sum(steps[key] for key in keys)
        assert cost.flops == pytest.approx(sum(flops[key] for key in keys), rel=1e-12)
        assert cost.moved == sum(down[key] + up[key] for key in keys)


@pytest.mark.parametrize(
    "name", ["fedfomo", "fedlama", "heurpfedla", "pfedme", "per_fedavg"]
)
def test_costs_that_only_a_run_can_tell_are_refused(name):
    task = runner.assemble(
        CONFIG.with_keys(algorithm=name), data=TOY, model=network("plain")
    )
    with refuses(rf"{name}.*bytes_up"):
        cost_steps({name: task})
