"""What ``diagnose`` cannot measure is refused in one line by name, before anything is measured."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, TensorDataset

from diagnostics import diagnosis
from diagnostics.measure import diagnose
from diagnostics.request import RARE
from tests.conftest import refuses
from tests.made import Wired, labelled, mlp, normal

X, Y = normal(40, 4), torch.arange(40) % 3


def model():
    return mlp(4, 8, 3)


def checkpointed(m, x):
    """A layer whose activation is computed anew in the backward pass."""
    return checkpoint(lambda z: m.layer(z).relu(), x, use_reentrant=True)


def last(form):
    """Return a network whose output has another form."""
    return Wired(lambda m, x: form(m.net(x)), net=model())


UNREAD = ConcatDataset([TensorDataset(X[:2, :k], Y[:2]) for k in (1, 2)])


OF_MODELS = (
    (
        model(),
        {"north": (X, Y), "south": (X.long(), Y)},
        r"^client 'south': .*int64 \[4\].*x\.float\(\).*'0', a Linear, .*int64 \[2, 4\]",
    ),
    (model(), (X > 0, Y), r"'client_0': .*bool \[4\].*x\.float\(\)"),
    (
        [model(), model()],
        [(X, Y), (torch.randn(9, 5), Y[:9])],
        r"^client 'client_1': .*float32 \[5\].*'0', a Linear, .*float32 \[2, 5\]: .*mat1",
    ),
    (
        nn.Sequential(nn.Linear(4, 8), nn.Linear(9, 3)),
        (X, Y),
        r"'1', a Linear.*\[2, 8\]",
    ),
    (model().forward, (X, Y), "'forward', a method"),
    (nn.Linear, (X, Y), r"Linear\(\.\.\.\)"),
    (
        nn.Sequential(Wired(checkpointed, layer=nn.Linear(4, 8)), nn.Linear(8, 3)),
        (X, Y),
        "must have gradients: .*use_reentrant=False",
    ),
    (last(lambda z: None), (X, Y), "'client_0': .*NoneType"),
    (
        last(lambda z: z.sum()),
        (X, Y),
        r"'client_0': .*an entry for each.*\[\] for 2 samples",
    ),
    (last(lambda z: z > 0), (X, Y), "floating numbers.*got torch.bool"),
    (last(lambda z: z.to_sparse()), (X, Y), "floating numbers.*sparse"),
    (last(lambda z: z[:, 0]), (X, Y), "from 0 to 0.*name another loss"),
    (last(lambda z: 1 / 0), (X, Y), "cannot take samples.*division by zero"),
    (torch.jit.trace(model(), X), (X, Y), "Python code"),
    (model(), [(X, Y), (X, Y + 5 * (X[:, 0] > 1))], "'client_1': .*from 0 to 2"),
    (model(), (X, Y.to(torch.cfloat)), "labels must be real"),
    (model(), UNREAD, "'client_0': data: all samples must have one shape"),
    (model(), {"a": [(X[0], Y[0])]}, "batch_size"),
    (model(), (X, nn.functional.one_hot(Y).float()), r"argmax\(1\)"),
    (model(), {"a": (X.tolist(), Y.tolist())}, "'a': data must be"),
)


PAIR, ONE = labelled(12), model()
POSITIONS, LABELS = normal(12, 3, 4), torch.arange(36).reshape(12, 3) % 3
COMPLEX = nn.Module()
COMPLEX.w = nn.Parameter(torch.zeros(2, dtype=torch.cfloat))
OF_ARGUMENTS = (
    ({"metrics": ["grad_varience"]}, "mean 'grad_variance'"),
    ({"layers": ["40"]}, "layer '40'"),
    ({"metrics": ["federation_sensitivity"], "layers": ["40"]}, "layer '40'"),
    ({"by": "blocks"}, "mean 'block'"),
    ({"mode": "evaluation"}, "mode"),
    ({"batch": 0}, "batch.*0"),
    ({"loss": "cross_entrop"}, "mean 'cross_entropy'"),
    ({"loss": "mes"}, "mean 'mse'"),
    ({"loss": nn.CrossEntropyLoss}, "CrossEntropyLoss"),
    ({"loss": nn.CrossEntropyLoss}, "got <class"),
    ({"loss": nn.MSELoss()}, "MSELoss"),
    ({"loss": lambda z, y: z.mean(0).square().sum()}, "for each sample"),
    ({"options": {"ckaa": {}}}, "mean 'cka'"),
    ({"options": {"cka": {"estimater": "full"}}}, "mean 'estimator'"),
    ({"metrics": ["cka"], "options": {"grad_norm": {}}}, "options 'grad_norm'"),
    ({"batch": 3, "options": {"cka": {"estimator": "minibatch"}}}, "least 4"),
    ({"context": {"metric": "x"}}, "context"),
    ({"models": []}, "no models"),
    ({"data": []}, "no data"),
    ({"models": [ONE, "net"]}, "str"),
    ({"models": [ONE] * 3, "data": [PAIR] * 2}, "3 models .*2"),
    ({"models": {"a": ONE}, "data": {"b": PAIR}}, "data 'a'"),
    (
        {"models": {"a": ONE}, "data": dict.fromkeys("bcd", PAIR)},
        "client with data 'a'",
    ),
    ({"models": [ONE, nn.Linear(4, 3)]}, "'client_0'"),
    ({"models": COMPLEX}, "must be real"),
    ({"models": {"a": ONE}, "n_train": {"b": 1}}, "n_train 'a'"),
    ({"models": {"a": ONE}, "n_train": {"a": "5"}}, "n_train of a.*'5'"),
    ({"n_train": 5}, "n_train must be dict.*5"),
    ({"data": (PAIR[0], PAIR[1] + 3)}, "label"),
    ({"data": (PAIR[0] * torch.nan, PAIR[1])}, "NaN"),
    ({"data": labelled(0)}, "samples"),
    ({"data": (POSITIONS, LABELS)}, "options={'class_axis': 1}"),
    ({"data": (POSITIONS, LABELS[:, :2])}, r"\[n, \*positions, C\]"),
    (
        {
            "models": ONE,
            "data": {"a": {"x": PAIR[0], "labels": PAIR[1], "b": PAIR[0][:5]}},
        },
        "'a'.*one entry",
    ),
)


@pytest.mark.parametrize(("arguments", "words"), OF_ARGUMENTS)
def test_bad_arguments_are_named(arguments, words, monkeypatch):
    monkeypatch.setattr(diagnosis, "one_pass", None)
    metrics = ["grad_norm", *arguments.get("options", {})]
    how = {"models": [ONE, model()], "data": PAIR, "metrics": metrics, **arguments}
    options = how.pop("options", {})
    options |= {name: how.pop(name) for name in RARE if name in how}
    with refuses(words) as caught:
        diagnose(**how, options=options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("models", "data", "words"), OF_MODELS)
def test_what_cannot_be_measured_is_refused_by_name(models, data, words, monkeypatch):
    monkeypatch.setattr(diagnosis, "one_pass", None)
    with refuses(words) as caught:
        diagnose(models, data, ["grad_norm"])
    assert "\n" not in str(caught.value)


def test_classes_of_positions_may_have_their_own_axis():
    axis = {"class_axis": -1}
    assert diagnose(ONE, (POSITIONS, LABELS), "grad_norm", options=axis)


def test_targets_and_outputs_of_numbers_are_one_a_sample():
    """Else each output would be held against every target, or an output against the target of another sample."""
    one = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    metrics = ["grad_norm", "grad_noise", "hessian_trace", "hessian_spectrum"]
    how = {"loss": "mse"}
    for n in (3, 40):
        x, y = X[:n], X[:n].sum(1)
        assert set(diagnose(one, (x, y), metrics, **how).frame["status"]) == {"ok"}
        for targets in (y, Y[:n]):
            for metric in metrics:
                with refuses(r"\[n, 1\]"):
                    diagnose(model(), (x, targets), metric, **how)
