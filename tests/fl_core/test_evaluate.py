import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    mean_absolute_error,
    mean_squared_error,
    r2_score,
    roc_auc_score,
)
from torch import nn

from fl_core import statistics, tree
from fl_core.errors import NonFiniteError, UsageError
from fl_core.training import losses
from fl_core.training.evaluate import BINS, predict, scores
from tests.conftest import refuses
from tests.made import normal

CE = losses.build("cross_entropy")


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 300),
    n_classes=st.integers(2, 70),
    seen=st.integers(1, 70),
    ties=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_scores_of_classes_are_those_of_scikit_learn(n, n_classes, seen, ties, seed):
    """Also without a sample of some classes, or of all but one, which has no area. Calibration is against a loop."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(min(seen, n_classes), (n,), generator=generator)
    logits = 3 * torch.randn(n, n_classes, generator=generator).double()
    logits += 2 * torch.eye(n_classes)[y]
    if ties:
        logits = logits[torch.randint(n, (n,), generator=generator)]
    scored, p, labels = scores(logits, y, CE), logits.softmax(1).numpy(), y.numpy()
    predicted, present = logits.argmax(1), sorted(set(y.tolist()))
    assert scored["accuracy"] == accuracy_score(y, predicted)
    assert scored["macro_f1"] == f1_score(
        y, predicted, average="macro", zero_division=0
    )
    assert scored["loss"] == pytest.approx(float(CE(logits, y)), rel=1e-5, abs=1e-7)
    curves = [1] if n_classes == 2 else present
    for score, area in (("auroc", roc_auc_score), ("auprc", average_precision_score)):
        if len(present) < 2:
            assert math.isnan(scored[score])
        else:
            areas = [area(labels == k, p[:, k]) for k in curves]
            assert scored[score] == pytest.approx(np.mean(areas), abs=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of predictions of a class without a sample
        balanced = balanced_accuracy_score(labels, predicted)
    assert scored["balanced_accuracy"] == pytest.approx(balanced)
    top, right = p.max(1), p.argmax(1) == labels
    inside = [(low / BINS < top) & (top <= (low + 1) / BINS) for low in range(BINS)]
    gaps = [
        abs(right[some].mean() - top[some].mean()) * some.mean()
        for some in inside
        if some.any()
    ]
    assert scored["ece"] == pytest.approx(sum(gaps), abs=1e-9)


def test_one_output_scores_as_its_two_logits_and_the_positive_class_may_be_either():
    z = normal(50, 1)
    y = (torch.arange(50) % 5 == 0).long()
    two, bce = torch.cat([torch.zeros_like(z), z], 1), losses.build("bce")
    assert scores(z, y, bce) == scores(z, y, bce, 1)
    for positive in (0, 1):
        one = scores(z, y, bce, positive)
        assert one == pytest.approx(scores(two, y, CE, positive), rel=1e-6)
        p, wanted = (2 * positive - 1) * z[:, 0].numpy(), y == positive
        areas = roc_auc_score(wanted, p), average_precision_score(wanted, p)
        assert (one["auroc"], one["auprc"]) == pytest.approx(areas, abs=1e-12)
        assert one["accuracy"] == float(((z[:, 0] > 0) == y).double().mean())


def test_scores_of_numbers_are_those_of_scikit_learn():
    z = normal(40, 1)
    y = z[:, 0] + 0.3 * normal(40, seed=1)
    scored = scores(z, y, losses.build("mae"))
    target, predicted = y.double().numpy(), z[:, 0].double().numpy()
    expected = {
        "loss": mean_absolute_error(target, predicted),
        "mse": mean_squared_error(target, predicted),
        "mae": mean_absolute_error(target, predicted),
        "r2": r2_score(target, predicted),
    }
    assert scored == pytest.approx(expected, rel=1e-6)
    assert math.isnan(scores(z, torch.ones(40), losses.build("mse"))["r2"])


def test_scores_refuse():
    labels, two = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3)
    for logits, y in (
        (two[:0], labels[:0]),
        (two, labels[[0, 0, 0]]),
        (two[0], labels),
        (two, labels + 3),
        (two, labels - 1),
        (two, labels.float()),
    ):
        with pytest.raises(UsageError):
            scores(logits, y, CE)
    for value in (math.nan, math.inf):
        with pytest.raises(NonFiniteError):
            scores(two + torch.tensor([0, value, 0]), labels, CE)


def test_predict_in_batches():
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)
    )
    model[2].eval()  # a mode of its own, that must come back
    x = torch.randn(7, 4)
    modes = [module.training for module in model.modules()]
    before = tree.digest(tree.state_dict(model))
    outputs = [predict(model, x, batch) for batch in (1, 3, 7, 100)]
    with pytest.raises(RuntimeError):
        predict(model, torch.zeros(2, 5))
    assert [module.training for module in model.modules()] == modes
    assert tree.digest(tree.state_dict(model)) == before
    assert not outputs[0].requires_grad
    for logits in outputs:
        torch.testing.assert_close(logits, model.eval()(x))
    with refuses("samples"):
        predict(model, x[:0])


# statistics


def frame(rows, **names):
    return pd.DataFrame(
        rows,
        index=[f"A{i}" for i in range(len(rows))],
        columns=[f"D{j}" for j in range(len(rows[0]))],
        **names,
    )


def test_bad_requests():
    one, gap = [1.0], frame([[1.0, math.nan], [2.0, 3.0]])
    for call, arguments in (
        (statistics.combine, ([], [])),
        (statistics.combine, ([1.0, 2.0], one)),
        (statistics.combine, ([1.0, 2.0], [0, 0])),
        (statistics.combine, ([1.0, 2.0], [2, math.nan])),
        (statistics.mean_interval, ([1.0, 2.0], 1, 1.0)),
        (statistics.mean_interval, ([],)),
        (statistics.fairness, ([one, one],)),
        (statistics.incentive, ([], [], [], True)),
        (statistics.ranks, (pd.DataFrame(), True)),
        (statistics.ranks, (gap, True)),
    ):
        with pytest.raises(UsageError):
            call(*arguments)
