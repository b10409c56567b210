"""Copies of a shared model that clients tune, and what is said of their differences."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fedlayers as fl
from diagnostics.measurement import ClientModel, Measurement, NoValue
from diagnostics.metrics.base import METRICS
from diagnostics.plots.maps import panels_of
from diagnostics.tuning.copies import Held, Tuner, crosswise
from diagnostics.tuning.differ import (
    comparable_losses,
    compared,
    cross_losses,
    fine_tuned,
    neighbours,
)
from diagnostics.tuning.permutation import blocks, permutation_test
from diagnostics.tuning.profile import Gain, Profile
from fl_core import seeds, tree
from fl_core.data.federated import Split
from fl_core.errors import NonFiniteError
from fl_core.layers import layers_of
from fl_core.models.building import batch_norms
from fl_core.statistics import halves
from fl_core.training import losses
from fl_core.training.phases import Training
from tests.conftest import refuses
from tests.made import Wired

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
    held = {name: test_part for name, (_, test_part) in parts.items()}
    return {"test": held, "training": TRAINING, "round": 7, **others}


def by_hand(model, client, names, epochs):
    """Tune the named tensors of a copy, and return its validation logits. Other norms keep their statistics."""
    train, validation = list(PARTS.values())[client]
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
        return model.eval()(validation.x)


def test_a_plain_loop_gives_the_same_rows():
    """Falls by layer and of all: epochs are chosen on one half for the other, one number for all clients."""
    model = network()
    rows = METRICS["layer_tuning"](measurement(model), **options())
    value_of = {(r["layer"], r["variant"], r["client"]): r["value"] for r in rows}
    y = torch.cat([validation.y for _, validation in PARTS.values()])
    client = np.repeat([0, 1], [14, 9])
    half = halves(np.arange(23), client, 5)
    weight = np.repeat([30 / 51 / 14, 21 / 51 / 9], [14, 9])
    layers = {layer.name: layer.tensors for layer in measurement(model).layers}
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
            assert value_of[name, variant, who] == pytest.approx(
                fall[client == k].mean(), abs=2e-5
            )
        assert value_of[name, variant, ""] == pytest.approx(fall @ weight, abs=2e-5)
    assert ("", "fall, statistics", "") in value_of


def test_a_plain_loop_gives_the_same_leads():
    """Losses of every model at every sample at one temperature of at least 1, and the leads by their definition."""
    draw, sizes, trained = np.random.default_rng(0), [8, 12, 6], [3, 1, 2]
    samples = Held.of([split(n, k) for k, n in enumerate(sizes)], trained)
    outputs = torch.from_numpy(9 * draw.normal(size=(2, 3, 26, 3)))
    outputs += 9 * torch.nn.functional.one_hot(samples.y, 3)
    losses = cross_losses(LOSS, samples, [range(3)], outputs.flatten(1, 2))
    hot = np.geomspace(1, 20, 400)
    for kind in range(2):
        e = 1 / (3 * 26 + 2)
        y = torch.nn.functional.one_hot(samples.y, 3).double()
        soft = (1 - e) * y + e / 2 * (1 - y)
        tried = [
            float(-(soft * (outputs[kind] / t).log_softmax(-1)).sum(-1).mean())
            for t in hot
        ]
        best = hot[int(np.argmin(tried))]
        table = -(outputs[kind] / best).log_softmax(-1)[:, range(26), samples.y].numpy()
        assert 1.5 < best < 19
        np.testing.assert_allclose(losses.losses[kind], table, rtol=0.05)
    result = permutation_test([losses])
    for kind, lead in enumerate(result.leads):
        value = 0.0
        for k in range(3):
            of_client = samples.client == k
            others = np.delete(losses.losses[kind], k, axis=0)[:, of_client].mean()
            gap = others - losses.losses[kind, k, of_client].mean()
            value += trained[k] / 6 * gap
        assert lead == pytest.approx(value)


def test_two_clients_with_opposite_labels_differ_however_sure_their_models_are():
    """Half of all pairs are wrong, so a free temperature would leave no difference between the losses."""
    samples = Held.of([split(30, 0), split(30, 1)], [1, 1])
    right = 40.0 * torch.nn.functional.one_hot(samples.y, 3).double()
    wrong = right.roll(1, dims=1)
    first = torch.from_numpy(samples.client == 0)[:, None]
    outputs = torch.stack(
        [torch.where(first, right, wrong), torch.where(first, wrong, right)]
    )
    result = permutation_test(
        [cross_losses(LOSS, samples, [[0, 1]], outputs.flatten(0, 1)[None])]
    )
    assert result.shown
    assert result.lead == pytest.approx(2.0)  # 40 / 20


def test_blocks_leave_the_pairs_between_them_unknown():
    sizes = [2] * 11
    samples = Held.of([split(2, k) for k in range(11)], sizes)
    parts = blocks(11, 4)
    near = neighbours(parts)
    assert {len(block) for block in near} == {3, 4}
    outputs = torch.randn(1, 2 * sum(map(len, near)), 3).double()
    losses = cross_losses(LOSS, samples, parts, outputs).losses[0]
    for k, block in enumerate(near):
        assert k in block
        of_block = np.isin(samples.client, block)
        assert np.isfinite(losses[k, of_block]).all()
        assert np.isnan(losses[k, ~of_block]).all()


def test_class_weights_and_other_tasks_take_part():
    """Rare classes count more within a client; numbers and survival times have no temperature."""
    samples = Held.of([split(9, 0), split(7, 1)], [2, 1])
    weighted = losses.ClassWeighted(LOSS, (1.0, 2.0, 5.0))
    outputs = torch.randn(1, 32, 3).double()
    crossed = cross_losses(weighted, samples, [range(2)], outputs)
    assert crossed.weight.tolist() == [(1.0, 2.0, 5.0)[k] for k in samples.y]
    numbers, z = torch.randn(10), torch.randn(10, 1)
    squared = comparable_losses(losses.build("mse"), z, numbers, [6, 4])
    assert squared == pytest.approx(((z[:, 0] - numbers) ** 2).numpy(), rel=1e-6)
    times = torch.stack([torch.rand(10) + 0.1, torch.ones(10)], dim=1)
    cox = losses.build("cox")
    joint = comparable_losses(cox, z, times, [6, 4])
    assert joint[:6] == pytest.approx(cox.per_sample(z[:6], times[:6]).numpy())


def test_models_that_clients_trained_alone_are_a_kind_of_their_own():
    starts = [tree.state_dict(network()) for _ in PARTS]
    arguments = {
        "model": network(),
        "loss": LOSS,
        "training": TRAINING,
        "clients": [*PARTS.values()],
        "seed": 5,
        "round": 7,
    }
    plain, kinds = fine_tuned(**arguments)
    assert kinds == ["fine-tuning"] * 6
    both, kinds = fine_tuned(starts, **arguments)
    assert kinds[-1] == "local training"
    np.testing.assert_allclose(both.losses[:6], plain.losses)
    start = Tuner(**arguments, near=[[0, 1], [0, 1]]).start
    alone = comparable_losses(
        LOSS, start, torch.cat([s.y for _, s in PARTS.values()] * 2), [23, 23]
    )
    np.testing.assert_allclose(both.losses[6].ravel(), alone)
    answer = compared(starts, **arguments)
    assert answer == permutation_test([both], seed=5)


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
    measured = measurement(model)
    if after > 0:
        name = "layer_tuning" if after > 3 else "clients_differ"
        with pytest.raises(KeyError, match="a pass"):
            METRICS[name](measured, **options())
    else:
        rows = [
            METRICS[name](measured, **options())
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


def _unused():
    return Wired(lambda m, x: m.net(x), net=network(), other=nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("model", "parts", "status"),
    [
        (_unused(), PARTS, "the layer is not used"),
        (_frozen(), PARTS, "no weight of the layer trains"),
        (_infinite(), PARTS, "not finite"),
        (network(), {k: (s, split(0, 0)) for k, (s, _) in PARTS.items()}, "needs validation samples"),
    ],
    ids=["unused", "frozen", "infinite", "no validation"],
)  # fmt: skip
def test_what_cannot_be_tuned_has_a_status(model, parts, status):
    rows = METRICS["layer_tuning"](measurement(model, parts), **options(parts))
    assert any(status in row["status"] for row in rows)


def test_local_models_must_be_of_all_clients_with_validation_samples():
    arguments = options(alone={"a": network(), "c": network()})
    with refuses("alone must have a model for each client.*got none for b"):
        METRICS["clients_differ"](measurement(), **arguments)


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
        answer = frame[frame["metric"] == "clients_differ"].set_index("variant")
        assert answer["value"]["differ"] == differs
        assert (answer["value"]["p"] <= 0.05) == bool(differs)
        shown = answer["value"]["fine-tuning, nats"] > answer["value"]["smallest, nats"]
        assert shown == bool(differs)
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
    samples = Held(torch.zeros(0), each // 24, np.ones(len(each)), each // 2)
    tuner = SimpleNamespace(
        held=samples, seed=0, training=TRAINING, train=[0] * clients
    )
    share = Profile(tuner).share(*(Gain(gain.ravel(), each) for gain in (part, whole)))
    ratios = []
    for _ in range(1500):
        rows = np.arange(clients)[:, None], draw.integers(12, size=(clients, 12))
        rows = draw.integers(clients, size=clients) if clients > 7 else rows
        ratios.append(part[rows].mean() / whole[rows].mean())
    low, high = np.quantile(ratios, (0.025, 0.975))
    assert share.error == pytest.approx((high - low) / 4, rel=0.12)


def test_a_choice_is_scored_on_the_half_that_it_never_saw():
    """A candidate that is best on its own half alone gains nothing."""
    samples = Held.of([split(40, 1), split(20, 2)], [3, 1])
    assert samples.weight.sum() == pytest.approx(1)
    half = halves(samples.group, samples.client, 0)
    values = np.stack([np.ones(60), np.where(half == 0, 0.0, 3.0)])

    def losses(one, fitted, scored):
        chosen_values = values[int(one[0, 0])]
        return chosen_values[fitted], chosen_values[scored]

    candidates = torch.arange(2.0)[:, None, None].expand(2, 60, 3)
    choice, before, after = crosswise(losses, candidates, samples.weight, half)
    assert choice.tolist() == (half == 1).astype(int).tolist()
    assert (after - before)[half == 1].tolist() == [2.0] * int((half == 1).sum())
    values[1, 7] = np.nan
    with refuses("loss is not finite", NonFiniteError):
        crosswise(losses, candidates, samples.weight, half)


def test_new_statistics_are_refused_if_not_finite_and_leave_the_momentum():
    tuner = Tuner(network(), LOSS, TRAINING, [*PARTS.values()], 5, 7)
    (norm,) = batch_norms(tuner.workspace.model).values()
    assert tuner.with_new_statistics().isfinite().all()
    tuner.starts = [{**tuner.starts[0], "5.bias": torch.full((3,), torch.inf)}] * 2
    with refuses("output is not finite", NonFiniteError):
        tuner.with_new_statistics()

    def check():
        raise NoValue("the budget is spent")

    tuner.clock = SimpleNamespace(check=check)
    with refuses("budget is spent", NoValue):
        tuner.with_new_statistics()
    assert norm.momentum == 0.1


def test_starts_of_clients_are_their_own():
    """Own epochs of personal models begin with each client's weights."""
    model, other = network(), network()
    other[5].bias.data += 1
    starts = [tree.state_dict(start) for start in (model, other)]
    outputs = Tuner(model, LOSS, TRAINING, [*PARTS.values()], 5, 7, starts).start
    for k, (start, (_, validation)) in enumerate(
        zip((model, other), PARTS.values(), strict=True)
    ):
        assert torch.allclose(
            outputs[14 * k : 14 + 9 * k], start.eval()(validation.x), atol=1e-6
        )
