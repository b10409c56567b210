"""The first step of a run equals ten lines of torch, for the losses of torch.nn with their options."""

from __future__ import annotations

import copy
import inspect
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fedlayers as fl
from fl_core.training.border import fit_loss
from fl_core.training.evaluate import scores
from tests.made import normal

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

N, C, LR = 24, 3, 0.1
WEIGHTS = torch.tensor([1.0, 10.0, 0.1])


CLASSES = torch.arange(N) % C
SHARES = normal(N, C, seed=1).softmax(1)
BITS = (normal(N, C, seed=2) > 0).float()
SIGNS = 2 * BITS - 1
NUMBERS = normal(N, C, seed=3)
COUNTS = normal(N, C, seed=4).abs().mul(3).round()
LISTS = torch.tensor([[0, 2, -1], [1, -1, -1]]).repeat(N // 2, 1)


class Ended(nn.Module):
    """A linear layer and a function of its outputs."""

    def __init__(self, end: Any) -> None:
        super().__init__()
        self.linear, self.end = nn.Linear(5, C), end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.linear(x))


class Case(NamedTuple):
    """A loss with its targets, and the end of a model that it fits."""

    loss: Any
    y: torch.Tensor
    end: Any = torch.nn.Identity()


LOG_SHARES = nn.LogSoftmax(1)
CASES = {
    "CrossEntropyLoss": {
        "weight": Case(nn.CrossEntropyLoss(weight=WEIGHTS), CLASSES),
        "ignore_index": Case(nn.CrossEntropyLoss(ignore_index=0), CLASSES),
        "sum": Case(nn.CrossEntropyLoss(reduction="sum"), CLASSES),
        "smoothing": Case(nn.CrossEntropyLoss(label_smoothing=0.2), CLASSES),
        "smoothing and weight": Case(
            nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2), CLASSES
        ),
        "soft labels": Case(nn.CrossEntropyLoss(), SHARES),
        "soft labels and weight": Case(nn.CrossEntropyLoss(WEIGHTS), SHARES),
    },
    "NLLLoss": {
        "plain": Case(nn.NLLLoss(), CLASSES, LOG_SHARES),
        "weight": Case(nn.NLLLoss(WEIGHTS), CLASSES, LOG_SHARES),
        "ignore_index": Case(nn.NLLLoss(ignore_index=1), CLASSES, LOG_SHARES),
    },
    "MultiMarginLoss": {
        "plain": Case(nn.MultiMarginLoss(), CLASSES),
        "weight": Case(nn.MultiMarginLoss(weight=WEIGHTS, p=2), CLASSES),
    },
    "BCEWithLogitsLoss": {
        "pos_weight": Case(nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), BITS),
        "weight": Case(nn.BCEWithLogitsLoss(WEIGHTS), SHARES),
    },
    "BCELoss": {"weight": Case(nn.BCELoss(WEIGHTS), BITS, nn.Sigmoid())},
    "MultiLabelSoftMarginLoss": {
        "weight": Case(nn.MultiLabelSoftMarginLoss(WEIGHTS), BITS),
    },
    "MultiLabelMarginLoss": {"plain": Case(nn.MultiLabelMarginLoss(), LISTS)},
    "KLDivLoss": {
        "mean": Case(nn.KLDivLoss(), SHARES, LOG_SHARES),
        "batchmean": Case(nn.KLDivLoss(reduction="batchmean"), SHARES, LOG_SHARES),
        "log_target": Case(
            nn.KLDivLoss(reduction="batchmean", log_target=True),
            SHARES.log(),
            LOG_SHARES,
        ),
    },
    "PoissonNLLLoss": {
        "log_input": Case(nn.PoissonNLLLoss(), COUNTS),
        "rates": Case(nn.PoissonNLLLoss(log_input=False, full=True), COUNTS, nn.Softplus()),
    },
    "SoftMarginLoss": {"plain": Case(nn.SoftMarginLoss(), SIGNS)},
    "HingeEmbeddingLoss": {"margin": Case(nn.HingeEmbeddingLoss(margin=2.0), SIGNS)},
    "MSELoss": {
        "mean": Case(nn.MSELoss(), NUMBERS),
        "sum": Case(nn.MSELoss(reduction="sum"), NUMBERS),
    },
    "L1Loss": {"sum": Case(nn.L1Loss(reduction="sum"), NUMBERS)},
    "SmoothL1Loss": {"beta": Case(nn.SmoothL1Loss(beta=0.3), NUMBERS)},
    "HuberLoss": {"delta": Case(nn.HuberLoss(delta=0.3), NUMBERS)},
}  # fmt: skip
"""Losses of outputs and targets, with their options."""
OTHER_INPUTS = {
    "AdaptiveLogSoftmaxWithLoss",
    "CTCLoss",
    "CosineEmbeddingLoss",
    "GaussianNLLLoss",
    "LinearCrossEntropyLoss",
    "MarginRankingLoss",
    "TripletMarginLoss",
    "TripletMarginWithDistanceLoss",
}
"""Losses of more than outputs and targets. A function of the user's calls them."""
FAMILY = [(name, option) for name, options in CASES.items() for option in options]


def test_all_losses_of_torch_are_here() -> None:
    losses = {
        name
        for name, kind in vars(nn).items()
        if inspect.isclass(kind) and name.endswith("Loss")
    }
    assert losses == CASES.keys() | OTHER_INPUTS


@pytest.mark.parametrize(("name", "option"), FAMILY)
def test_the_first_step_equals_torch(name: str, option: str) -> None:
    loss, y, end = CASES[name][option]
    torch.manual_seed(0)
    model = Ended(end)
    plain_model = copy.deepcopy(model)
    x = normal(N, 5, seed=5)
    result = fl.run(
        data={"a": (x, y), "b": (x.flip(0), y.flip(0))}, model=model, loss=loss,
        algorithm="local", optimizer="sgd", lr=LR, batch_size=N, epochs=1, rounds=1,
        patience=0, progress=False, **({"task": "multilabel"} if y is BITS else {}),
    )  # fmt: skip
    split = result.engine.data.clients[0].train
    loss(plain_model(split.x), split.y).backward()
    with torch.no_grad():
        for parameter in plain_model.parameters():
            parameter -= LR * parameter.grad
    trained = result.models["a"]
    for mine, right in zip(trained.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(OTHER_INPUTS))
def test_losses_of_other_inputs_are_refused(name: str) -> None:
    kind = getattr(nn, name)
    sizes = {"in_features": C, "num_classes": C, "n_classes": C, "cutoffs": [1]}
    parameters = inspect.signature(kind).parameters
    loss = kind(**{key: size for key, size in sizes.items() if key in parameters})
    data = {"a": (normal(N, 5, seed=5), NUMBERS)}
    with pytest.raises(fl.UsageError, match="loss"):
        fl.diagnose(
            {"a": nn.Linear(5, C)}, data, "grad_norm", loss=loss, progress=False
        )


@pytest.mark.parametrize("option", ["weight", "ignore_index", "sum"])
def test_a_mean_that_is_not_over_samples_has_a_note(option: str) -> None:
    loss, y, _ = CASES["CrossEntropyLoss"][option]
    data = {"a": (normal(N, 5, seed=5), y)}
    with pytest.warns(UserWarning, match=f"CrossEntropyLoss with .*{option}"):
        fl.diagnose(
            {"a": nn.Linear(5, C)}, data, "grad_norm", loss=loss, progress=False
        )


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("CrossEntropyLoss", "soft labels"),
        ("KLDivLoss", "mean"),
        ("KLDivLoss", "log_target"),
        ("BCEWithLogitsLoss", "weight"),
        ("PoissonNLLLoss", "log_input"),
    ],
)
def test_predictions_are_scored_in_the_targets_unit(name: str, option: str) -> None:
    loss, y, end = CASES[name][option]
    shares = y.exp() if option == "log_target" else y
    perfect = shares.clamp_min(1e-9).log()
    if name == "BCEWithLogitsLoss":
        perfect = shares.logit()
    torch.manual_seed(0)
    result = fl.run(
        data={"a": (normal(N, 5, seed=5), y), "b": (normal(N, 5, seed=6), y)}, model=Ended(end), loss=loss,
        rounds=1, patience=0, progress=False,
    )  # fmt: skip
    fitted = fit_loss(loss, nn.Identity(), perfect, y, lambda: perfect[:1])
    scored = scores(perfect, y, fitted)
    assert scored["r2"] == pytest.approx(1, abs=1e-6)
    assert scored["mse"] == pytest.approx(0, abs=1e-6)
    assert scored.get("accuracy", 1.0) == 1.0
    assert ("accuracy" in scored) == (name in ("CrossEntropyLoss", "KLDivLoss"))
    assert "accuracy" in result.scores or name not in ("CrossEntropyLoss", "KLDivLoss")
