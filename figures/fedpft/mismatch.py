"""FedPFT's Origin, Probe and Match accuracy: how well a shared classifier fits a client's features (its Table 1)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from diagnostics.measurement import Batch, Data, batches, to_device
from diagnostics.plots.drawing import (
    COLOURS,
    MARKERS,
    canvas,
    missing_notes,
    with_notes,
)
from diagnostics.representation.features import NoValue, collect
from diagnostics.representation.probes import accuracy_error, logistic
from fl_core import rows
from fl_core.errors import NonFiniteError, UsageError, check_known
from fl_core.layers import layers_of
from fl_core.names import in_order
from fl_core.seeds import seed_of, torch_generator, torch_seeded

SOLVERS = ("sgd", "lbfgs")
KINDS = ("origin_accuracy", "probe_accuracy", "match_accuracy")


@dataclass(frozen=True, eq=False)
class Outcome:
    """Accuracy on the test samples of a module trained on a client's features.

    Attributes:
        accuracy: after the last epoch, from 0 to 1. This is the result.
        best: after the best epoch, chosen on the test samples themselves. It is too optimistic, never below
            ``accuracy``.
        right: [m], which test samples are right after the last epoch.
        module: the trained module.
    """

    accuracy: float
    best: float
    right: Tensor
    module: nn.Module | None


def origin_accuracy(features: Tensor, y: Tensor, head: nn.Module) -> float:
    """Return the accuracy, 0 to 1, of the model's own classifier.

    It compares the arg max of ``head(features [n, d])`` with ``y`` [n].
    """
    return float(_right(_frozen(head), features, y).double().mean())


def probe_accuracy(
    train: Batch,
    test: Batch,
    classes: int,
    *,
    solver: str = "sgd",
    lr: float = 0.1,
    momentum: float = 0.9,
    batch: int = 100,
    epochs: int = 100,
    seed: int = 0,
) -> Outcome:
    """Train a new linear classifier on the features; return its accuracy (FedPFT, Table 1: Probe).

    The accuracy shows what the features allow. A Linear(d, classes), drawn with the seed, is trained by cross-entropy
    on the client's own features. The extractor stays fixed. The paper does not state the training. The defaults are SGD
    with momentum, no weight decay, and features as they are.

    Args:
        train, test: features [n, d] and labels [n].
        solver: ``"sgd"``, or ``"lbfgs"`` for the regularised optimum on standardised features
            (:func:`diagnostics.representation.probes.logistic`, C = 1). The other options do not apply to the
            latter.

    Raises:
        UsageError: features or labels do not fit.
        NonFiniteError: the training diverged.
    """
    _check(train, test, classes)
    if check_known("solver", solver, SOLVERS) == "lbfgs":
        x, y, others = (t.cpu().numpy() for t in (*train, test[0]))
        right = torch.from_numpy(logistic(x, y, others) == test[1].cpu().numpy())
        accuracy = float(right.double().mean())
        return Outcome(accuracy, accuracy, right, None)
    with torch_seeded(seed_of(seed, "probe", "init")):
        new = nn.Linear(train[0].shape[1], classes).to(train[0])
    return _trained(new, nn.Identity(), train, test, lr, momentum, batch, epochs, seed)


def match_accuracy(
    train: Batch,
    test: Batch,
    head: nn.Module,
    *,
    lr: float = 0.01,
    momentum: float = 0.9,
    batch: int = 100,
    epochs: int = 100,
    seed: int = 0,
) -> Outcome:
    """Train a linear map before the old classifier; return the accuracy (FedPFT, Table 1: Match).

    The accuracy shows what a mere mismatch costs. A Linear(d, d), at first the identity, is trained by cross-entropy
    between the features and ``head``. Both stay fixed. If d >= classes, the map can do nearly all that a new classifier
    can. Match and Probe are then close for any model. Origin falls short of both by the mismatch. The rest is as in
    :func:`probe_accuracy`.

    Raises:
        UsageError: features or labels do not fit.
        NonFiniteError: the training diverged.
    """
    frozen = _frozen(head)
    with torch.no_grad():
        logits = frozen(train[0][:1])
    _check(train, test, logits.shape[-1])
    d = train[0].shape[1]
    new = nn.Linear(d, d).to(train[0])
    with torch.no_grad():
        new.weight.copy_(torch.eye(d))
        new.bias.zero_()
    return _trained(new, frozen, train, test, lr, momentum, batch, epochs, seed)


def mismatch(
    models: Mapping[str, nn.Module],
    train: Mapping[str, Data],
    test: Mapping[str, Data],
    head: str | None = None,
    *,
    batch: int = 100,
    epochs: int = 100,
    seed: int = 0,
    probe: Mapping[str, Any] | None = None,
    match: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Return rows of Origin, Probe and Match accuracy of each client's model on the client's own samples.

    The features are the classifier's inputs, with the model in eval mode. The published number is the mean over the
    clients.

    Args:
        models, train, test: by client. Each client's extractor and classifier are its model's own.
        head: path of the classifier. Default: the last layer.
        probe, match: further options of :func:`probe_accuracy` and :func:`match_accuracy`.

    Raises:
        UsageError: a client has no data, the path is unknown, or the classifier's input is not [n, d].
    """
    table = []
    for client, model in models.items():
        for name, data in (("train", train), ("test", test)):
            check_known(f"client with {name} data", client, data)
        if head is None:
            x, _ = next(batches(train[client], 2))
            path = [
                layer.output
                for layer in layers_of(model, to_device(model, x[:2]))
                if layer.used
            ][-1]
        else:
            path = head
        fitted, tested = (
            classifier_input(model, path, data[client], seed=seed)
            for data in (train, test)
        )
        module = model.get_submodule(path)
        with torch.no_grad():
            classes = int(_frozen(module)(fitted[0][:1]).shape[-1])
        how: dict[str, Any] = {"batch": batch, "epochs": epochs, "seed": seed}
        for kind in KINDS:
            value: float | None = None
            status, estimator, stderr = "ok", "the classifier as it is", None
            try:
                if kind == "origin_accuracy":
                    right = _right(_frozen(module), *tested)
                elif kind == "probe_accuracy":
                    right = probe_accuracy(
                        fitted, tested, classes, **how, **(probe or {})
                    ).right
                    solver = (probe or {}).get("solver", "sgd")
                    estimator = f"new classifier, {solver}" + (
                        f", {epochs} epochs" if solver == "sgd" else ""
                    )
                else:
                    right = match_accuracy(
                        fitted, tested, module, **how, **(match or {})
                    ).right
                    estimator = (
                        f"linear map before the classifier, sgd, {epochs} epochs"
                    )
                value, stderr = (
                    float(right.double().mean()),
                    accuracy_error(right.numpy()),
                )
            except NonFiniteError as error:
                status = f"client {client!r}: {error}"
            table.append(
                rows.row(
                    kind, value, status=status, client=client, layer=path, split="test", stderr=stderr,
                    estimator=estimator, n_samples=len(tested[1]), n_train=len(fitted[1]), seed=seed,
                )
            )  # fmt: skip
    return rows.frame(table)


def classifier_input(
    model: nn.Module,
    head: str,
    data: Data,
    *,
    batch: int = 256,
    seed: int = 0,
    mode: str = "eval",
) -> Batch:
    """Return the inputs of the module at ``head``: (features [n, d], labels [n]) on the model's device.

    Raises:
        UsageError: the path is unknown, or the module is not called or gets no finite tensors.
    """
    features = collect(
        model, [head], data, at="input", batch=batch, seed=seed, mode=mode
    )
    try:
        x = torch.from_numpy(features.at(head))
    except NoValue as reason:
        raise UsageError(
            f"input of the classifier {head!r} must be features for each sample: {reason}."
        ) from reason
    x = to_device(model, x)
    return x, torch.from_numpy(features.y).to(x.device)


# --- training --------------------------------------------------------------------------------------------------


def _frozen(head: nn.Module) -> nn.Module:
    return copy.deepcopy(head).eval().requires_grad_(False)


def _check(train: Batch, test: Batch, classes: int) -> None:
    for x, y in (train, test):
        if x.ndim != 2 or y.ndim != 1 or len(x) != len(y) or not len(y):
            raise UsageError(
                f"features must be [n, d] and labels [n]; got {tuple(x.shape)} and {tuple(y.shape)}. Reshape them."
            )
        if int(y.min()) < 0 or int(y.max()) >= classes:
            raise UsageError(
                f"labels must be from 0 to {classes - 1}; got {int(y.min())} to {int(y.max())}. Renumber the classes."
            )
    if train[0].shape[1] != test[0].shape[1]:
        raise UsageError(
            f"features of train and test must be equally many; got {train[0].shape[1]} and {test[0].shape[1]}. "
            "Take both from the same layer."
        )


def _right(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        logits = module(x)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            raise UsageError(
                "the classifier must give logits [n, C] for features [n, d]; got others. Pass the last layer."
            )
        if not bool(torch.isfinite(logits).all()):
            raise NonFiniteError(
                "the logits must be finite; got NaN or infinity. Train again with a smaller lr."
            )
        return (logits.argmax(1) == y).cpu()


def _trained(
    new: nn.Module,
    after: nn.Module,
    train: Batch,
    test: Batch,
    lr: float,
    momentum: float,
    batch: int,
    epochs: int,
    seed: int,
) -> Outcome:
    """Train ``new`` in ``after(new(x))`` by cross-entropy, shuffling the samples in every epoch."""
    if batch < 1 or epochs < 1:
        raise UsageError(
            f"batch and epochs must be at least 1; got batch={batch}, epochs={epochs}."
        )
    x, y = train
    whole = nn.Sequential(new, after)
    optimiser = torch.optim.SGD(new.parameters(), lr=lr, momentum=momentum)
    curve: list[float] = []
    right = torch.empty(0)
    for epoch in range(epochs):
        order = torch.randperm(
            len(y), generator=torch_generator(seed, "probe", epoch)
        ).to(y.device)
        with torch.enable_grad():
            for some in order.split(batch):
                optimiser.zero_grad()
                nn.functional.cross_entropy(whole(x[some]), y[some]).backward()
                optimiser.step()
        right = _right(whole, *test)
        curve.append(float(right.double().mean()))
    return Outcome(curve[-1], float(np.max(curve)), right, new)


def summary(frame: pd.DataFrame, names: Sequence[str] = KINDS) -> pd.Series:
    """Return the mean of each accuracy over clients, as the paper reports it; NaN if a client lacks it."""
    table = frame.pivot(index="client", columns="metric", values="value")
    return table.reindex(columns=list(names)).mean(skipna=False)


def picture(frame: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Draw each client's Origin, Probe and Match accuracy and their means: the cost of mismatched features.

    Args:
        frame: from :func:`mismatch`.

    Raises:
        UsageError: the frame lacks an accuracy.
    """
    kinds = {
        "origin_accuracy": "Origin: classifier as it is",
        "match_accuracy": "Match: linear map before it",
    }
    kinds["probe_accuracy"] = "Probe: new classifier"
    for kind in kinds:
        check_known("metric", kind, frame["metric"].unique())
    shown_rows = frame[frame["metric"].isin(list(kinds))]
    names = in_order(shown_rows["client"].unique())
    notes = ["× " + note for note in missing_notes(shown_rows, "metric")]
    with canvas(ax, float(np.clip(4.2 + 0.3 * len(names), 5, 10)), 3.0) as axes:
        for k, (kind, label) in enumerate(kinds.items()):
            of_kind = (
                shown_rows[shown_rows["metric"] == kind]
                .set_index("client")
                .reindex(names)
            )
            at = np.arange(len(names)) + 0.18 * (k - 1)
            axes.errorbar(
                at,
                of_kind["value"],
                of_kind["stderr"],
                fmt=MARKERS[k],
                color=COLOURS[k],
                elinewidth=1.0,
                label=label,
            )
            mean = of_kind["value"].mean(skipna=False)
            axes.errorbar(
                [len(names) + 0.18 * (k - 1)],
                [mean],
                fmt=MARKERS[k],
                color=COLOURS[k],
                markersize=7,
            )
        axes.axvline(len(names) - 0.5, color="0.7", linewidth=0.8)
        shown = [*names, "mean"]
        long = sum(len(name) + 2 for name in shown) > 5 * len(shown) + 10
        axes.set_xticks(range(len(shown)), shown, rotation=90 if long else 0)
        axes.set_xlim(-0.5, len(shown) - 0.5)
        axes.set(
            ylabel="accuracy on own test samples", xlabel=with_notes("client", notes)
        )
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(1.01, 1.02),
            borderaxespad=0,
            alignment="left",
        )
    return axes
