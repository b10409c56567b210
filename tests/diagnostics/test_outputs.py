"""Models of several inputs and outputs, and losses of any kind, against dense references."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from diagnostics.measure import diagnose
from fl_core.models.adapter import IGNORED, output_of
from tests.conftest import refuses
from tests.diagnostics.dense import CE, block
from tests.made import Wired, mlp


def last(net, form):
    """Return a network whose output has another form, or the classes at another axis."""
    return Wired(lambda m, x: form(m.net(x)), net=net)


def references(model, batches, loss):
    """The trace of each layer's dense Hessian of the whole data's loss, in float64."""
    model, traces = model.double(), {}
    total = sum(len(y) for _, y in batches)

    def of(output, y):
        return loss(output_of(output, model), double(y))

    for name, _ in model.named_parameters():
        for x, y in batches:
            share = (1 if loss.reduction == "sum" else len(y)) / total
            dense = block(model, (double(x), y), [name], of)
            layer = name.rpartition(".")[0]
            traces[layer] = traces.get(layer, 0.0) + share * float(dense.trace())
    return traces


def double(part):
    return part.double() if part.is_floating_point() else part


def cases():
    """The kinds of test cases of curvlinops: batches, losses, reductions, forms of outputs."""
    networks = {}
    g = torch.Generator().manual_seed(1)

    def two(*shape, y):
        return [(torch.rand(n, *shape, generator=g), y(n)) for n in (3, 4)]

    def labels(*shape):
        return lambda n: torch.randint(3, (n, *shape), generator=g)

    def soft(n):
        return torch.rand(n, 3, generator=g).softmax(1)

    def numbers(*shape):
        return lambda n: torch.rand(n, *shape, generator=g)

    for reduction, act in (("mean", nn.ReLU), ("mean", nn.Tanh), ("sum", nn.ReLU)):
        ce, bce, mse, huber = (
            kind(reduction=reduction)
            for kind in (
                nn.CrossEntropyLoss,
                nn.BCEWithLogitsLoss,
                nn.MSELoss,
                nn.HuberLoss,
            )
        )
        net, one, two_outputs = (mlp(10, 5, n, act=act) for n in (3, 1, 2))
        first = last(net, lambda z: z.movedim(-1, 1))
        of = {
            "classes": (net, two(10, y=labels()), ce),
            "soft classes": (net, two(10, y=soft), ce),
            "one output": (one, two(10, y=numbers(1)), bce),
            "numbers": (net, two(10, y=numbers(3)), mse),
            "pixels": (first, two(4, 2, 10, y=labels(4, 2)), ce),
            "positions": (two_outputs, two(5, 10, y=numbers(5, 2)), bce),
            "huber": (net, two(10, y=numbers(3)), huber),
            "logits": (last(net, lambda z: {"logits": z}), two(10, y=labels()), ce),
            "tuple": (last(net, lambda z: (z, z * 0)), two(10, y=labels()), ce),
        }
        networks |= {
            f"{name}, {reduction}, {act.__name__}": copy.deepcopy(case)
            for name, case in of.items()
        }
    return networks


def test_traces_are_those_of_the_dense_hessian_for_every_kind_of_output():
    different = {}
    networks = cases()
    for name, (model, data, loss) in networks.items():
        wanted = references(model, data, loss)
        options = {"hessian_trace": {"estimator": "auto", "probes": 8}}
        report = diagnose(
            model,
            {"a": data},
            "hessian_trace",
            loss=loss,
            options=options,
        ).frame
        rows = report[report["variant"] == "absolute"].set_index("layer")
        for layer, value in wanted.items():
            row = rows.loc[layer]
            room = 1e-9 + 1e-9 * abs(value) + 5 * row["stderr"]
            if row["status"] != "ok" or abs(row["value"] - value) > room:
                different[name, layer] = row["value"], value, row["status"]
    assert not different


def test_positions_that_do_not_count_have_no_loss():
    """Against the mean over samples of the mean over a sample's positions that count."""
    model, x, y = mlp(5, 4, 3), torch.randn(12, 7, 5), torch.randint(3, (12, 7))
    y[:, 4:] = IGNORED
    y[:5, 2:] = IGNORED

    def by_sample(z, y):
        of = [
            nn.functional.cross_entropy(a[b >= 0], b[b >= 0])
            for a, b in zip(z, y, strict=True)
        ]
        return torch.stack(of).mean()

    by_sample.reduction = "mean"
    wanted = references(copy.deepcopy(model), [(x, y)], by_sample)
    two = y.masked_fill(y == IGNORED, -7), {"options": {"ignore_index": -7}}
    for labels, how in ((y, {}), (y, {"loss": nn.CrossEntropyLoss()}), two):
        data = x.masked_fill((labels < 0)[..., None], 9.0), labels
        frame = diagnose(model, data, "hessian_trace", **how).frame
        traces = frame[frame["variant"] == "absolute"].set_index("layer")["value"]
        assert traces.to_dict() == pytest.approx(wanted, rel=1e-4)


def test_tasks_are_read_from_labels_and_what_needs_classes_says_so():
    x = torch.randn(20, 5)
    coded = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 5))
    for model, y, loss in (
        (mlp(5, 4, 1), x[:, 0], "mse"),
        (mlp(5, 4, 1), x[:, :1], "mse"),
        (coded, x, "mse"),
        (mlp(5, 4, 3), np.arange(20) % 3, "cross_entropy"),
    ):
        report = diagnose(model, (x, y), ["grad_norm", "linear_probe"])
        probes = report.frame[report.frame["metric"] == "linear_probe"]["status"]
        assert report.header["loss"] == loss
        assert probes.str.startswith("not applicable").all() == (loss == "mse")


class Twice(nn.Module):
    """A network that uses one layer twice, as a module of two names or as two modules."""

    def __init__(self, same):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c = nn.Linear(5, 5), nn.Linear(5, 3)
        self.b = self.a if same else nn.Linear(5, 5)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()))


def test_a_module_of_two_names_is_measured_as_one_tensor():
    """Against the dense Hessian in the shared tensor, and the loss with the other's."""
    x, y = torch.randn(12, 5), torch.arange(12) % 3
    other = Twice(True)
    with torch.no_grad():
        other.a.weight.mul_(2)
    dense = block(Twice(True).double(), (x.double(), y), ("a.weight", "a.bias"))
    expected = {"top1": float(torch.linalg.eigvalsh(dense)[-1])}
    before, after = (float(CE(model(x), y)) for model in (Twice(True), other))
    expected["swap"] = after - before
    for same in (True, False):
        models = {"a": Twice(same), "b": other}
        how = ["layer_swap", "hessian_spectrum"]
        frame = diagnose(models, (x, y), how).frame
        layer_rows = frame[(frame["client"] == "a") & (frame["layer"] == "a")]
        values = layer_rows.set_index("variant")["value"]
        assert values[[*expected]].to_dict() == pytest.approx(
            expected, rel=1e-4, abs=1e-6
        )


def test_losses_of_torch_with_weights_and_without_second_derivatives():
    model, data = mlp(5, 4, 3), (torch.randn(12, 5), torch.arange(12) % 3)
    weight = torch.tensor([1.0, 2.0, 5.0])

    def mean(z, y):  # over samples, each by its class's weight
        values = nn.functional.cross_entropy(z, y, reduction="none")
        return (weight.double()[y] * values).mean()

    mean.reduction = "mean"
    wanted = references(copy.deepcopy(model), [data], mean)
    how = {"metrics": "hessian_trace"}
    weighted = nn.CrossEntropyLoss(weight=weight)
    frame = diagnose(model, data, loss=weighted, **how).frame
    traces = frame[frame["variant"] == "absolute"].set_index("layer")["value"]
    assert traces.to_dict() == pytest.approx(wanted, rel=1e-4)
    frame = diagnose(model, data, loss=nn.MultiMarginLoss(), **how).frame
    assert frame["status"].str.contains("no second derivative").all()


def test_samples_and_budget_bound_a_measurement():
    model, data = mlp(5, 4, 3), (torch.randn(40, 5), torch.arange(40) % 3)
    some = diagnose(model, data, ["grad_norm", "hessian_trace"], samples=8)
    assert set(some.frame["n_samples"]) == {8}
    with refuses("budget"):
        diagnose(model, data, "cka", budget=-1)


def test_models_of_other_architectures_are_compared_at_layers_of_one_name():
    data = torch.randn(30, 5), torch.arange(30) % 3
    models = {"a": mlp(5, 4, 3), "b": mlp(5, 20, 3)}
    metrics = ["cka", "rbf_cka", "cca", "svcca", "procrustes"]
    frame = diagnose(models, data, metrics).frame
    assert set(frame["status"]) == {"ok"}
    with refuses("same shape"):
        diagnose(models, data, ["cka", "grad_norm"])
