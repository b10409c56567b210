"""Copies of a shared model that clients tune, and what is said of their differences."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedlayers as fl
from diagnostics.measurement import ClientModel, Measurement
from diagnostics.metrics.base import METRICS
from diagnostics.plots.maps import panels_of
from diagnostics.tuning.copies import Held, Tuner, crosswise
from diagnostics.tuning.differ import OWN, gains, neighbours, verdict
from diagnostics.tuning.profile import Gain, Profile
from fl_core import seeds, tree
from fl_core.data.federated import Split
from fl_core.layers import layers_of
from fl_core.statistics import halves
from fl_core.training import losses
from fl_core.training.phases import Training
from tests.conftest import refuses

LOSS, TRAINING = losses.build("cross_entropy"), Training(batch_size=8, lr=0.05)


def split(n, seed, code=0, groups=None):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 4, 4, generator=draw)
    y = (x.flatten(1)[:, :3].argmax(1) + code) % 3
    return Split(x, y, groups)


def network():
    with seeds.torch_seeded(3):
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2),
            nn.Flatten(), nn.Linear(64, 3),
        )  # fmt: skip


PARTS = {"a": (split(30, 0), split(14, 1)), "b": (split(21, 2, 1), split(9, 3, 1))}


def measurement(model=None, parts=PARTS, **how):
    model = network() if model is None else model
    subjects = [ClientModel(k, model, s, len(s)) for k, (s, _) in parts.items()]
    layers = layers_of(model, torch.zeros(2, 1, 4, 4), by="block")
    return Measurement(subjects, layers, LOSS, seed=5, **how)


def options(parts=PARTS, **others):
    held = {name: each for name, (_, each) in parts.items()}
    return {"test": held, "training": TRAINING, "round": 7, **others}


def by_hand(model, client, names, epochs):
    """Tune the named tensors of a copy, and return its validation logits. Other norms keep their statistics."""
    train, held = list(PARTS.values())[client]
    model = copy.deepcopy(model).to(memory_format=torch.channels_last).train()
    model[1].train("1.weight" in names)
    params = [p for name, p in model.named_parameters() if name in names]
    optimizer = torch.optim.SGD(params, lr=0.15)
    draws = seeds.torch_generator(5, "layer_tuning", 7, client)
    with seeds.torch_seeded(seeds.seed_of(5, "layer_tuning", 7, client, "modules")):
        for _ in range(epochs):
            for rows in torch.randperm(len(train), generator=draws).split(8):
                optimizer.zero_grad()
                cross_entropy(model(train.x[rows]), train.y[rows]).backward()
                optimizer.step()
    with torch.no_grad():
        return model.eval()(held.x)


def test_a_plain_loop_gives_the_same_rows():
    """Falls by layer and of all: epochs are chosen on one half for the other, one number for all clients."""
    model = network()
    rows = METRICS["layer_tuning"](measurement(model), **options())
    found = {(r["layer"], r["variant"], r["client"]): r["value"] for r in rows}
    y = torch.cat([held.y for _, held in PARTS.values()])
    client = np.repeat([0, 1], [14, 9])
    half = halves(np.arange(23), client, 5)
    weight = np.repeat([30 / 51 / 14, 21 / 51 / 9], [14, 9])
    layers = {each.name: each.tensors for each in measurement(model).layers}
    layers[""] = sum(layers.values(), ())
    for name, tensors in layers.items():
        tried = [
            torch.cat([by_hand(model, k, tensors, epochs) for k in (0, 1)])
            for epochs in (0, 1, 2, 4)
        ]
        table = np.stack([cross_entropy(z, y, reduction="none").numpy() for z in tried])
        fall = np.zeros(23)
        for number in (0, 1):
            best = (table[:, half != number] @ weight[half != number]).argmin()
            fall[half == number] = (table[0] - table[best])[half == number]
        variant = "fall" if name else "fall, all"
        for k, who in enumerate(PARTS):
            assert found[name, variant, who] == pytest.approx(
                fall[client == k].mean(), abs=2e-5
            )
        assert found[name, variant, ""] == pytest.approx(fall @ weight, abs=2e-5)
    assert ("", "fall, statistics", "") in found


def test_a_plain_loop_gives_the_same_leads():
    """How much better own models are at own samples than other clients' models, by pairs of clients."""
    draw, sizes, trained = np.random.default_rng(0), [8, 12, 6], [3, 1, 2]
    held = Held.of([split(n, k) for k, n in enumerate(sizes)], trained)
    tuned = torch.from_numpy(
        draw.normal(size=(2, 3, 26, 3))
    )  # candidate, model, sample
    half, near = halves(held.group, held.client, 0), neighbours(3, 0)
    assert near == [[0, 1, 2]] * 3
    flat = tuned.flatten(1, 2)
    found = {
        (what, score): each
        for what, score, each in gains(LOSS, held, near, flat[0], flat, flat[0], 0)
    }
    wrong = (tuned.argmax(-1) != held.y).double().numpy()
    leads, pairs = np.zeros((2, 26)), 0.0
    for k in range(3):
        for j in {0, 1, 2} - {k}:
            pairs += trained[j] * trained[k]
            own = held.client == k
            leads[:, own] += trained[j] * (wrong[:, j] - wrong[:, k])[:, own]
    leads *= held.weight / pairs * sum(trained)
    best = [leads[:, half != number].sum(1).argmax() for number in (0, 1)]
    value = sum(leads[best[number], half == number].sum() for number in (0, 1))
    assert found["own epochs, others", "accuracy"].value == pytest.approx(value)
    alone = found["training alone, others", "accuracy"].value
    assert alone == pytest.approx(leads[0].sum())


def test_a_lead_over_others_is_not_that_of_better_training():
    """Models that differ in quality alone have no lead, however unequal the clients; neighbours are mutual."""
    draw, sizes = np.random.default_rng(1), [400, 4000, 1200]
    held = Held.of([split(n, k) for k, n in enumerate(sizes)], [90, 10, 40])
    noise = torch.from_numpy(draw.normal(size=(3, sum(sizes), 3)))
    quality = torch.tensor([0.0, 1.0, 6.0])[:, None, None]
    outputs = noise + quality * torch.nn.functional.one_hot(held.y, 3)
    flat = outputs.flatten(0, 1)
    given = LOSS, held, neighbours(3, 0), flat, flat[None], None, 0
    for what, _, each in gains(*given):
        if "others" in what:
            assert abs(each.value) < 3 * each.error
    for clients in (2, 9, 10, 23):
        near = neighbours(clients, 4)
        assert all(k in near[j] for k, others in enumerate(near) for j in others)
        assert {len(others) for others in near} == {min(clients, 9)}


class Raises(nn.Identity):
    """Raises in the pass of a number, or never."""

    left = -1

    def forward(self, x):
        self.left -= 1
        if self.left == 0:
            raise KeyError("a pass")
        return x


@pytest.mark.parametrize("after", [-1, 3, 40])
def test_models_and_random_state_are_as_before_and_rows_repeat(after):
    """Weights, buffers, modes, gradients and torch's generator, also if a pass raises. Rows repeat."""
    model = network().train()
    model[3] = Raises()
    model[3].left = after
    model[1].momentum = 0.3
    model[1].eval()
    model[5].weight.grad = torch.ones(3, 64)

    def state():
        weights = tree.digest(tree.state_dict(model))
        modes = [module.training for module in model]
        return weights, modes, torch.get_rng_state().tolist()

    before = state()
    given = measurement(model)
    if after > 0:
        name = "layer_tuning" if after > 3 else "clients_differ"
        with pytest.raises(KeyError, match="a pass"):
            METRICS[name](given, **options())
    else:
        rows = [
            METRICS[name](given, **options())
            for name in ("layer_tuning", "clients_differ") * 2
        ]
        assert rows[:2] == rows[2:]
    assert model[1].momentum == 0.3
    assert state() == before
    assert torch.equal(model[5].weight.grad, torch.ones(3, 64))


def _frozen():
    model = network()
    model[5].requires_grad_(False)
    return model


def _infinite():
    model = network()
    model[5].weight.data.fill_(float("inf"))
    return model


@pytest.mark.parametrize(
    ("model", "parts", "status"),
    [
        (_frozen(), PARTS, "no weight of the layer trains"),
        (_infinite(), PARTS, "not finite"),
        (network(), {k: (s, split(0, 0)) for k, (s, _) in PARTS.items()}, "needs validation samples"),
    ],
    ids=["frozen", "infinite", "no validation"],
)  # fmt: skip
def test_what_cannot_be_tuned_has_a_status(model, parts, status):
    rows = METRICS["layer_tuning"](measurement(model, parts), **options(parts))
    assert any(status in row["status"] for row in rows)


def test_clients_without_validation_samples_and_single_layers_are_measured():
    parts = {**PARTS, "c": (split(20, 8), split(0, 9))}
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    rows = METRICS["layer_tuning"](measurement(model, parts), **options(parts))
    assert {row["client"] for row in rows} == {"a", "b", ""}
    one, whole = (
        next(r["value"] for r in rows if r["variant"] == name and not r["client"])
        for name in ("fall", "fall, all")
    )
    assert one == whole


@pytest.mark.parametrize(("kind", "differs"), [("labels", 1.0), ("neither", 0.0)])
def test_a_run_says_whether_its_clients_differ(kind, differs, tmp_path):
    """The server's model is read, without being named; other metrics beside are refused in one line."""
    config = {"dataset": f"known_{kind}", "rounds": 10}
    result = fl.run(
        **config, out=tmp_path / "run", measure=["clients_differ"], measure_every=10
    )
    rows = fl.diagnose(result, metrics=["clients_differ", "layer_tuning"]).frame
    for frame in (rows, result.to_frame()):
        assert frame[frame["variant"] == "differ"]["value"].tolist() == [differs]
    shares = rows[rows["variant"] == "share"]
    assert shares["value"].notna().all() == bool(differs)
    with refuses("must be measured at the server's model"):
        fl.diagnose(result, metrics=["cka", "layer_tuning"])
    if differs:  # else no share is claimed, and there is nothing to draw
        report = fl.through_time(result, ["layer_tuning"], rounds=[10])
        (panel,) = panels_of(report.layers, report.table)
        drawn = shares[shares["layer"].isin(panel.values)]["value"]
        assert panel.values.loc[10].tolist() == drawn.tolist()
        later = report.frame[report.frame["variant"] == "fall"]["value"]
        assert later.tolist() == rows[rows["variant"] == "fall"]["value"].tolist()


@pytest.mark.parametrize("clients", [3, 9])
def test_the_error_of_a_share_is_that_of_a_plain_bootstrap(clients):
    """Draws take groups of each client; from eight clients on they take clients."""
    draw = np.random.default_rng(0)
    whole = draw.normal(1 + np.arange(clients)[:, None, None] / 4, 1, (clients, 12, 2))
    part = draw.normal(0.5 * whole, 1)
    each = np.arange(whole.size)
    held = Held(torch.zeros(0), each // 24, np.ones(len(each)), each // 2)
    tuner = SimpleNamespace(held=held, seed=0, training=TRAINING, train=[0] * clients)
    found = Profile(tuner).share(*(Gain(gain.ravel(), each) for gain in (part, whole)))
    ratios = []
    for _ in range(1500):
        rows = np.arange(clients)[:, None], draw.integers(12, size=(clients, 12))
        rows = draw.integers(clients, size=clients) if clients > 7 else rows
        ratios.append(part[rows].mean() / whole[rows].mean())
    low, high = np.quantile(ratios, (0.025, 0.975))
    assert found.error == pytest.approx((high - low) / 4, rel=0.12)


def test_a_choice_is_scored_on_the_half_that_it_never_saw():
    """Of equal predictions nothing is claimed; a candidate that is best on its own half alone gains nothing."""
    held = Held.of([split(40, 1), split(20, 2)], [3, 1])
    assert held.weight.sum() == pytest.approx(1)
    shared, near = torch.zeros(120, 3), neighbours(2, 0)
    found = {
        (what, name): each
        for what, name, each in gains(LOSS, held, near, shared, shared[None], shared, 0)
    }
    assert verdict(found, "loss") != "differ"
    assert found[OWN, "loss"].value == 0
    half = halves(held.group, held.client, 0)
    values = np.stack([np.ones(60), np.where(half == 0, 0.0, 3.0)])

    def losses(one, fitted, scored):
        own = values[int(one[0, 0])]
        return own[fitted], own[scored]

    candidates = torch.arange(2.0)[:, None, None].expand(2, 60, 3)
    choice, before, after = crosswise(losses, candidates, held.weight, half)
    assert choice.tolist() == (half == 1).astype(int).tolist()
    assert (after - before)[half == 1].tolist() == [2.0] * int((half == 1).sum())


def test_starts_of_clients_are_their_own():
    """Own epochs of personal models begin with each client's weights."""
    model, other = network(), network()
    other[5].bias.data += 1
    starts = [tree.state_dict(each) for each in (model, other)]
    outputs = Tuner(model, LOSS, TRAINING, [*PARTS.values()], 5, 7, starts).start
    for k, (each, (_, held)) in enumerate(
        zip((model, other), PARTS.values(), strict=True)
    ):
        assert torch.allclose(
            outputs[14 * k : 14 + 9 * k], each.eval()(held.x), atol=1e-6
        )
