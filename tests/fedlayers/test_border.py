"""What a diagnosis accepts, everything that trains accepts: tokens, positions, pixels, several numbers, lists."""

import pytest
import torch
from sklearn.metrics import accuracy_score, jaccard_score
from torch import nn
from torch.nn import functional as F

import fedlayers as fl
from fl_core.config import with_own
from fl_core.run import runner
from fl_core.tree import digest
from tests.conftest import refuses

N, IGNORED = 20, -100
QUIET = {"epochs": 1, "batch_size": 8, "patience": 0}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Language(nn.Sequential):
    """The next token, by this module's own positions."""

    def __init__(self):
        super().__init__(nn.Embedding(11, 8), nn.Linear(8, 11))


class TinyForCausalLM(Language):
    """The same by its name: labels are the inputs, and the loss moves them."""


class Listed(nn.Linear):
    """One input, which is a list."""

    def forward(self, parts):
        return super().forward(torch.cat(parts, 1))


class Several(nn.Linear):
    """Two outputs, and the likeness of the samples of a batch."""

    def forward(self, x):
        a, b = super().forward(x).tensor_split(2, 1)
        return {"a": a, "b": b, "alike": a @ a.T}


class Pair(Several):
    def forward(self, x):
        return tuple([*super().forward(x).values()][:2])


def each(output, y):
    return F.cross_entropy(output, y, reduction="none")


def half(output, y):
    """The loss of each sample, of some of its outputs."""
    return (output[:, :2] - y).square().mean(1)


def both(output, y):
    """The loss of each sample, of two outputs by name or by position."""
    a, b, *_ = output.values() if isinstance(output, dict) else output
    return each(a, y) + b.square().sum(1)


def positions(output, y):
    """The mean over samples of the mean over positions that count."""
    classes_last = output.shape[-1] != y.shape[-1]
    output = output.movedim(-1, 1) if classes_last else output
    values = F.cross_entropy(output, y, reduction="none", ignore_index=IGNORED)
    counts = (y != IGNORED).flatten(1).sum(1)
    return (values.flatten(1).sum(1) / counts).mean()


def next_tokens(output, y):
    return positions(output[:, :-1], y[:, 1:])


def table(*outputs):
    return lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, *outputs))


def ids(*_):
    return torch.randint(11, (N, 6))


def rows(*shape):
    return torch.randn(N, *(shape or (5,)))


def labels(*shape, classes=3):
    return lambda x: torch.randint(classes, (N, *shape))


def masked(x):
    return x.masked_fill(torch.arange(6) < 3, IGNORED)


def pixels():
    return nn.Conv2d(2, 3, 3, padding=1)


def bce(z, y):
    return F.binary_cross_entropy_with_logits(z[:, 0], y.reshape(-1).float())


LOGITS = nn.BCEWithLogitsLoss()
KINDS = {  # module, inputs, labels, loss, reference
    "next tokens": (TinyForCausalLM, ids, torch.clone, None, next_tokens),
    "ignored positions": (Language, ids, masked, None, positions),
    "a torch loss": (Language, ids, masked, nn.CrossEntropyLoss(), positions),
    "a callable": (table(3), rows, labels(), each, each),
    "other outputs": (table(4), rows, lambda x: rows(2), half, half),
    "outputs by name": (lambda: Several(5, 4), rows, labels(classes=2), both, both),
    "outputs by position": (lambda: Pair(5, 4), rows, labels(classes=2), both, both),
    "pixels": (pixels, lambda: rows(2, 6, 6), labels(6, 6), None, positions),
    "numbers": (table(4), rows, lambda x: rows(4), None, F.mse_loss),
    "logits of integers": (table(1), rows, labels(classes=2), LOGITS, bce),
    "floats in a column": (table(1), rows, lambda x: torch.randint(2, (N, 1)).float(), "bce", bce),
    "a list": (lambda: Listed(7, 3), lambda: (rows(), rows(2)), labels(), None, each),
}  # fmt: skip


def made(kind):
    """Return a kind's data of two clients, its module, and its loss as a keyword."""
    build, inputs, targets, loss, _ = KINDS[kind]
    torch.manual_seed(0)
    data = {}
    for client in ("north", "south"):
        x = inputs()
        data[client] = (x, targets(x))
    return data, build(), {} if loss is None else {"loss": loss}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_measured_also_trains(kind):
    """The loss of the rows, at a client's own model, is the plain one of its test samples."""
    data, model, how = made(kind)
    fresh = dict.fromkeys(data, model)
    assert fl.diagnose(fresh, data, "grad_norm", **how)
    assert len(fl.tsne(fresh, data, iterations=250, perplexity=3.0, **how))
    result = fl.run(data=data, model=model, algorithm="local", rounds=1, **how, **QUIET)
    scores = result.scores
    for client in result.engine.data.clients:
        client_model = result.models[client.name].eval()
        x, y = client.test.x, client.test.y
        if isinstance(data[client.name][0], tuple):
            x = (list(x.float().split((5, 2), 1)),)
        output = client_model(*x) if isinstance(x, tuple) else client_model(x)
        mine = scores.loc[("personal", client.name)]
        plain = float(KINDS[kind][4](output, y).mean())
        assert mine["loss"] == pytest.approx(plain, rel=1e-5)
        if kind == "ignored positions":
            counts = y != IGNORED
            guesses, truth = output.argmax(-1)[counts], y[counts]
            present = sorted({*guesses.tolist(), *truth.tolist()})
            pair, log = (truth, guesses), F.cross_entropy(output[counts], truth)
            wanted = {
                "mean_iou": jaccard_score(*pair, labels=present, average="macro"),
                "position_accuracy": accuracy_score(*pair),
                "perplexity": float(log.exp()),
            }
            assert mine[[*wanted]].to_dict() == pytest.approx(wanted, rel=1e-5)
    again = fl.diagnose(result, metrics="grad_norm")
    assert (again.frame["status"] == "ok").all()


def test_an_own_loss_trains_a_named_model_as_a_named_loss_does():
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    arguments = {"data": {"a": (x, y), "b": (x, y)}, "model": "mlp", "rounds": 1}

    def own(z, y):
        return F.cross_entropy(z, y, reduction="none")

    states = [
        fl.run(**arguments, **QUIET, loss=loss).models["a"].state_dict()
        for loss in ("cross_entropy", own, torch.nn.CrossEntropyLoss())
    ]
    for other in states[1:]:
        torch.testing.assert_close(other, states[0])


def test_class_weights_are_refused_for_labels_at_positions():
    data, model, _ = made("ignored positions")
    with refuses("class_weights must be left out for labels at positions"):
        fl.run(data=data, model=model, class_weights="1,2,3", **QUIET)


@pytest.mark.parametrize(
    ("kind", "named"), [("outputs by name", ""), ("pixels", ""), ("a callable", "mlp")]
)
def test_every_command_takes_them_and_a_loss_is_needed_again(kind, named, tmp_path):
    data, model, how = made(kind)
    model = named or model
    arguments = {"data": data, "model": model, **how}
    keys = {"epochs": 1, "batch_size": 8, "rounds": 2}
    whole = fl.run(**arguments, **keys, patience=0)
    config, from_python = with_own(None, **arguments, **keys, patience=0)
    runner.run(config, tmp_path / "run", **from_python, until=1)
    if how:
        with refuses("loss from Python must be passed"):
            fl.resume(tmp_path / "run", data=data, model=model)
        arguments["loss"] = lambda z, y: 2 * how["loss"](z, y)
        with refuses("other code of its loss"):
            fl.resume(tmp_path / "run", **arguments)
        arguments |= how
    else:
        with refuses("a module of your own"):
            fl.run(data=data, model="mlp")
        with refuses("must have a model"):
            fl.run(data=data, loss=both)
        with refuses("one input and one label"):
            fl.export(tmp_path / "run", tmp_path / "a.safetensors", **arguments)
    again = fl.resume(tmp_path / "run", **arguments)
    assert fl.load_models(tmp_path / "run", which="global", **arguments)
    servers = (result.engine.server.trees["model"] for result in (again, whole))
    assert len({digest(server) for server in servers}) == 1
    measured = (tmp_path / "run", "grad_norm", data)
    series = fl.through_time(*measured, own_model=model, model="global", **how)
    assert (series.frame["status"] == "ok").all()
    keys |= {"seeds": [0]}
    names = ["fedavg", "local"]
    compared = fl.compare(algorithms=names, **arguments, **keys, out=tmp_path / "two")
    assert set(compared.table["algorithm"]) == set(names)
    answer = fl.choose(**arguments, **keys, tune_rates=0, out=tmp_path / "choice")
    assert set(names) <= set(answer.table["way"])
