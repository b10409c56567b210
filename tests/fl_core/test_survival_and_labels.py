"""Survival and several labels: losses and scores against dense references, reading of targets, and refusals."""

import math

import numpy as np
import pytest
import torch

import fl_core.data as datasets
from fl_core.algorithms.base import registry
from fl_core.config import RunConfig
from fl_core.data.loading import as_data
from fl_core.data.reading import Reading
from fl_core.data.sources import Source
from fl_core.errors import UsageError
from fl_core.rounds.recorder import Recorder
from fl_core.run.runner import run
from fl_core.training import losses
from fl_core.training.evaluate import concordance, scores
from tests.conftest import refuses
from tests.made import TASKS, targets

COX, LABELS = losses.build("cox"), losses.build("multilabel_bce")


def sample(n=60, seed=0):
    """Return log hazards [n, 1] and times with events [n, 2], many of them tied, in float64."""
    draw = torch.Generator().manual_seed(seed)
    time = torch.randint(0, 12, (n,), generator=draw).double()
    event = torch.randint(0, 2, (n,), generator=draw).double()
    return torch.randn(n, 1, generator=draw, dtype=torch.float64), torch.stack(
        [time, event], 1
    )


def breslow(z, time, event):
    """Return each sample's term of the negative log partial likelihood, from its definition."""
    samples = zip(z, time, event, strict=True)
    return np.array(
        [
            seen * (math.log(np.exp(z[time >= t]).sum()) - risk)
            for risk, t, seen in samples
        ]
    )


def test_the_cox_loss_is_the_dense_partial_likelihood_with_ties():
    z, y = sample()
    dense = breslow(z[:, 0].numpy(), *y.T.numpy())
    np.testing.assert_allclose(
        COX.per_sample(z, y).numpy(), dense, rtol=1e-12, atol=1e-12
    )
    assert float(COX(z, y)) == pytest.approx(dense.mean(), rel=1e-12)
    assert torch.autograd.gradcheck(lambda a: COX(a, y), z.requires_grad_())
    far = COX(
        torch.tensor([[1000.0], [-1000.0]]), torch.tensor([[1.0, 1.0], [2.0, 1.0]])
    )
    assert float(far) == 0.0  # no exponential overflows
    assert (
        COX(z, y * torch.tensor([1.0, 0.0])).item() == 0.0
    )  # nothing but censored samples


FITTED = (-0.31025061592069914, -0.08598679757369757, -0.18393576509001583)
CONCORDANCE = 0.40601503759398494
"""Of scikit-survival 0.28.0: ``CoxPHSurvivalAnalysis(ties="breslow", tol=1e-12)``, ``concordance_index_censored``."""


def of_peer():
    """Return the features [80, 3] and targets on which scikit-survival was fitted."""
    return np.random.default_rng(0).normal(size=(80, 3)), sample(80)[1]


def test_the_coefficients_of_scikit_survival_are_the_zero_of_our_gradient():
    x, y = of_peer()
    coefficients = torch.tensor(FITTED, dtype=torch.float64)[:, None].requires_grad_()
    (gradient,) = torch.autograd.grad(
        COX(torch.tensor(x) @ coefficients, y), coefficients
    )
    assert float(gradient.abs().max()) < 1e-8


def test_the_concordance_is_that_of_all_pairs_and_of_scikit_survival():
    z, y = sample()
    risk = z[:, 0].round(decimals=1).numpy()  # with ties
    time, event = y.T.numpy()
    pairs = [
        0.5 if risk[i] == risk[j] else float(risk[i] > risk[j])
        for i in range(len(risk))
        for j in range(len(risk))
        if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j]))
    ]
    assert concordance(risk, time, event) == pytest.approx(np.mean(pairs), rel=1e-12)
    assert scores(z, y, COX)["c_index"] == concordance(z[:, 0].numpy(), time, event)
    assert math.isnan(concordance(risk, time, event * 0))
    assert concordance(risk, time, event) == pytest.approx(CONCORDANCE, rel=1e-12)


def test_labels_have_the_mean_of_binary_losses_and_areas():
    from sklearn.metrics import average_precision_score, roc_auc_score

    draw = torch.Generator().manual_seed(0)
    z = torch.randn(50, 4, generator=draw).round(decimals=1)
    y = (torch.rand(50, 4, generator=draw) < 0.4).float()
    p = z.double().sigmoid().numpy()
    dense = -(y.numpy() * np.log(p) + (1 - y.numpy()) * np.log(1 - p)).mean(axis=1)
    np.testing.assert_allclose(
        LABELS.per_sample(z.double(), y).numpy(), dense, rtol=1e-12
    )
    y[:, 3] = 1.0  # a label of one value has no area
    scored = scores(z, y, LABELS)
    assert scored["macro_auroc"] == pytest.approx(
        roc_auc_score(y[:, :3], z[:, :3]), rel=1e-12
    )
    assert scored["macro_auprc"] == pytest.approx(
        average_precision_score(y[:, :3], z[:, :3]), rel=1e-12
    )
    assert math.isnan(scores(z, y * 0, LABELS)["macro_auroc"])


SCORE = {"survival": "c_index", "multilabel": "macro_auroc"}


@pytest.mark.parametrize("task", TASKS)
def test_a_file_and_a_frame_are_read_alike(task, tmp_path):
    targets().to_csv(tmp_path / "t.csv", index=False)
    loaded = datasets.load(tmp_path / "t.csv", task=task, **TASKS[task])
    source = as_data(targets(), Reading(task=task, **TASKS[task]))
    assert loaded.task == source.task == task
    assert source.y.shape == (160, 2)
    assert source.columns == tuple("abcd")
    assert torch.equal(
        datasets.load(source).clients[0].train.y, loaded.clients[0].train.y
    )
    assert loaded.classes == (("cough", "fever") if task == "multilabel" else ())


@pytest.mark.parametrize(
    ("task", "start"),
    [
        pytest.param(task, start, marks=[pytest.mark.slow] * (start != quick))
        for quick, task in enumerate(TASKS)
        for start in range(4)
    ],
)
def test_every_algorithm_learns_or_refuses_in_one_line(task, start):
    refused, messages = set(), []
    names = sorted(registry())[start::4]
    for name in names:
        config = RunConfig(
            algorithm=name, task=task, rounds=1, patience=0, model="mlp", **TASKS[task]
        )
        try:
            result = run(config, data=targets())
        except UsageError as error:
            refused.add(name)
            messages.append(str(error))
        else:
            rows = result.listener(Recorder).frame()
            assert rows.loc[rows["metric"] == SCORE[task], "status"].eq("ok").all(), (
                name
            )
    assert {"fedrod", "pfedsd", "depthfl"} & {*names} <= refused
    assert not any("\n" in message for message in messages)


def test_a_label_named_samples_is_counted_apart_from_the_samples():
    y = np.array([[0, 1], [1, 1], [1, 1]])
    counts = Source("toy", np.zeros((3, 1)), y, ("samples", "b")).counts()
    assert counts.loc["all"].to_dict() == {"samples": 3, "samples (label)": 2, "b": 3}


def test_wrong_targets_are_one_clear_line():
    for task, columns, message in (
        ("survival", "time", "must be TIME,EVENT"),
        ("survival", "event,time", "events must be 1, or 0"),
        ("multilabel", "cough", "must be LABEL,LABEL"),
        ("multilabel", "cough,time", "label 'time' must be 0 or 1"),
    ):
        with refuses(message):
            as_data(targets(), Reading(task=task, label_column=columns))
    days = targets()["time"].astype(int).astype(str) + " days"
    with refuses(r"table\['time'\] = pd.to_timedelta"):
        keys = {"task": "survival", "label_column": "time,event"}
        as_data(targets().assign(time=days), Reading(**keys))
    named = targets().rename(columns={"time": "followup", "event": "died"})
    with refuses("must be one of the 9 columns .* got 'time'. It has .*died"):
        as_data(named, Reading(task="survival", label_column="time,event"))
    for task, columns in (("survival", "time,event"), ("multilabel", "cough,fever")):
        with refuses(f"task='{task}'"):
            as_data(targets(), Reading(label_column=columns))
        words = targets().replace({columns.split(",")[1]: {0: "no", 1: "yes"}})
        with refuses(r"got '(no|yes)'.* Write .*0"):
            as_data(words, Reading(task=task, label_column=columns))
    x, y = np.zeros((4, 2)), np.array([[1.0, 0], [2, 1], [3, 0], [3, 1]])
    for task, wrong, message in (
        ("survival", y[:, 0], "a time and an event"),
        ("survival", y * [1, 0], "must be an event"),
        ("survival", -y, "at least 0"),
        ("survival", y + np.array([2e9, 0]), "differ in float32"),
    ):
        with refuses(message):
            as_data((x, wrong), Reading(task=task))
