"""FedPFT's Origin, Probe and Match accuracy: how well a shared classifier fits a client's features (its Table 1)."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pandas as pd
import torch
from torch import Tensor, nn

from diagnostics.measurement import Batch, Data, NoValue, batches, to_device
from diagnostics.representation.features import collect
from diagnostics.representation.probes import accuracy_error
from fl_core import rows
from fl_core.errors import NonFiniteError, UsageError, check_known
from fl_core.layers import layers_of
from fl_core.seeds import seed_of, torch_generator, torch_seeded

ORIGIN, PROBE, MATCH = "origin_accuracy", "probe_accuracy", "match_accuracy"
KINDS = {
    ORIGIN: "the classifier as it is",
    PROBE: "new classifier, sgd, {} epochs",
    MATCH: "linear map before the classifier, sgd, {} epochs",
}
EPOCHS, BATCH, MOMENTUM = 100, 100, 0.9
RATES = {PROBE: 0.1, MATCH: 0.01}
"""The paper does not state the training. It is SGD here, without weight decay, on features as they are."""


def right_after(
    kind: str,
    train: Batch,
    test: Batch,
    head: nn.Module,
    *,
    epochs: int = EPOCHS,
    seed: int = 0,
) -> Tensor:
    """Return which test samples are right by one of :data:`KINDS`, [m].

    Origin is the classifier as it is. Probe is a new linear classifier, drawn with the seed: its accuracy shows what
    the features allow. Match is a Linear(d, d) before the classifier, at first the identity: its accuracy shows what a
    mere mismatch costs. If d >= classes, the map can do nearly all that a new classifier can. Match and Probe are then
    close for any model. Both are trained by cross-entropy on the client's own features, and all else stays fixed.

    Args:
        train, test: features [n, d] and labels [n].
        head: the classifier; it is copied.

    Raises:
        UsageError: features or labels do not fit.
        NonFiniteError: the training diverged.
    """
    classifier = nn.Sequential(nn.Identity(), copy.deepcopy(head).eval())
    classifier.requires_grad_(False)
    with torch.no_grad():
        classes = int(classifier(train[0][:1]).shape[-1])
    d = train[0].shape[-1]
    for x, y in (train, test):
        if x.ndim != 2 or x.shape[1] != d or y.shape != x.shape[:1] or not len(y):
            x_shape = tuple(x.shape)
            y_shape = tuple(y.shape)
            raise UsageError(
                f"features must be [n, {d}] and labels [n]; got {x_shape} and {y_shape}. Reshape them."
            )
        if int(y.min()) < 0 or int(y.max()) >= classes:
            raise UsageError(
                f"labels must be from 0 to {classes - 1}; got {int(y.min())} to {int(y.max())}. Renumber the classes."
            )
    if kind == PROBE:
        with torch_seeded(seed_of(seed, "probe", "init")):
            classifier[1] = nn.Linear(d, classes).to(train[0])
    elif kind == MATCH:
        linear_map = nn.Linear(d, d).to(train[0])
        nn.init.eye_(linear_map.weight)
        nn.init.zeros_(linear_map.bias)
        classifier[0] = linear_map
    if kind != ORIGIN:
        fit(classifier, train, RATES[kind], epochs, seed)
    with torch.no_grad():
        logits = classifier(test[0])
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteError(
            "the logits must be finite; got NaN or infinity. Train again with a smaller lr."
        )
    return (logits.argmax(1) == test[1]).cpu()


def fit(model: nn.Module, train: Batch, lr: float, epochs: int, seed: int) -> None:
    """Train what is not frozen of a model by cross-entropy, shuffling the samples in every epoch."""
    x, y = train
    free_parameters = [
        parameter for parameter in model.parameters() if parameter.requires_grad
    ]
    optimiser = torch.optim.SGD(free_parameters, lr=lr, momentum=MOMENTUM)
    for epoch in range(epochs):
        generator = torch_generator(seed, "probe", epoch)
        sample_order = torch.randperm(len(y), generator=generator).to(y.device)
        with torch.enable_grad():
            for batch_rows in sample_order.split(BATCH):
                optimiser.zero_grad()
                nn.functional.cross_entropy(
                    model(x[batch_rows]), y[batch_rows]
                ).backward()
                optimiser.step()


def mismatch(
    models: Mapping[str, nn.Module],
    train: Mapping[str, Data],
    test: Mapping[str, Data],
    *,
    epochs: int = EPOCHS,
    seed: int = 0,
) -> pd.DataFrame:
    """Return rows of Origin, Probe and Match accuracy of each client's model on the client's own samples.

    The features are the inputs of the last layer, the classifier, with the model in eval mode. The published number is
    the mean over the clients.

    Args:
        models, train, test: by client. Each client's extractor and classifier are its model's own.

    Raises:
        UsageError: a client has no data, or the classifier's input is not [n, d].
    """
    table_rows = []
    for client, model in models.items():
        for split_name, split_data in (("train", train), ("test", test)):
            check_known(f"client with {split_name} data", client, split_data)
        x, _ = next(batches(train[client], 2))
        used_layers = [
            layer for layer in layers_of(model, to_device(model, x[:2])) if layer.used
        ]
        path = used_layers[-1].output
        train_input, test_input = (
            classifier_input(model, path, split_data[client], seed=seed)
            for split_data in (train, test)
        )
        head = model.get_submodule(path)
        for kind, estimator in KINDS.items():
            accuracy: float | None = None
            status, stderr = "ok", None
            try:
                is_right = right_after(
                    kind, train_input, test_input, head, epochs=epochs, seed=seed
                )
                accuracy = float(is_right.double().mean())
                stderr = accuracy_error(is_right.numpy())
            except NonFiniteError as error:
                status = f"client {client!r}: {error}"
            table_rows.append(
                rows.row(
                    kind, accuracy, status=status, client=client, layer=path, split="test", stderr=stderr,
                    estimator=estimator.format(epochs), n_samples=len(test_input[1]), n_train=len(train_input[1]),
                    seed=seed,
                )
            )  # fmt: skip
    return rows.frame(table_rows)


def classifier_input(
    model: nn.Module, head: str, data: Data, *, seed: int = 0
) -> Batch:
    """Return the inputs of the module at ``head``: (features [n, d], labels [n]) on the model's device.

    Raises:
        UsageError: the path is unknown, or the module is not called or gets no finite tensors.
    """
    features = collect(model, [head], data, at="input", batch=256, seed=seed)
    try:
        x = torch.from_numpy(features.at(head))
    except NoValue as reason:
        raise UsageError(
            f"input of the classifier {head!r} must be features for each sample: {reason}."
        ) from reason
    x = to_device(model, x)
    return x, torch.from_numpy(features.y).to(x.device)
