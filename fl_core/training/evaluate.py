"""Predictions of a model and the scores of one set of predictions. Nothing here trains or changes a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from fl_core.errors import NonFiniteError, UsageError
from fl_core.training.losses import Loss

SCORES = {"accuracy": True, "macro_f1": True, "loss": False}
"""What :func:`scores` returns, and whether higher is better."""


def scores(logits: Tensor, y: Tensor, loss: Loss) -> dict[str, float]:
    """Accuracy, macro-F1 and mean loss of logits [n, C] against labels [n]; n must be at least 1.

    ``accuracy``: the fraction predicted right, 0 to 1; of equal logits the lowest class is the prediction.
    ``macro_f1``: the mean of the F1 scores of the classes that are present among the labels or the predictions, 0
    to 1 (PLayer-FL, Eq. A.4); a class that is never predicted right has 0, one that is absent from both is left out.
    ``loss``: the mean over samples, so a short last batch weighs no more than its samples do.

    Raises:
        UsageError: no samples, shapes that do not agree, or labels outside the C classes.
        NonFiniteError: a logit is NaN or infinite: its prediction would be arbitrary.
    """
    logits, y = logits.detach().cpu(), y.detach().cpu()
    if logits.ndim != 2 or y.shape != logits.shape[:1] or len(y) == 0:
        raise UsageError(f"scores need logits [n, C] and labels [n], not {tuple(logits.shape)} and {tuple(y.shape)}")
    if y.is_floating_point() or int(y.min()) < 0 or int(y.max()) >= logits.shape[1]:
        raise UsageError(f"labels must be integers from 0 to {logits.shape[1] - 1}")
    finite = torch.isfinite(logits).all(dim=1)
    if not bool(finite.all()):
        raise NonFiniteError(f"{int((~finite).sum())} of {len(y)} samples have logits that are NaN or infinite")
    labels, predicted, classes = y.numpy(), logits.double().numpy().argmax(axis=1), logits.shape[1]
    counts = np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)
    right, involved = counts.diagonal(), counts.sum(axis=0) + counts.sum(axis=1)  # involved: 2 TP + FP + FN of a class
    present = involved > 0
    return {
        "accuracy": float(right.sum() / len(labels)),
        "macro_f1": float((2 * right[present] / involved[present]).mean()),
        "loss": float(loss.per_sample(logits, y).double().mean()),
    }


def predict(model: Callable[[Tensor], Tensor], x: Tensor, batch: int = 1024) -> Tensor:
    """Logits [n, C] of all samples [n, *shape], in batches and without gradients, on the device of the samples.

    A module predicts in evaluation mode and gets its modes back; a plain callable is called as it is.

    Raises:
        UsageError: no samples, or a batch size below 1.
    """
    if len(x) == 0:
        raise UsageError("no samples to predict")
    if batch < 1:
        raise UsageError(f"a batch of {batch} samples; it must be at least 1")
    with torch.no_grad(), _evaluating(model):
        return torch.cat([model(part) for part in x.split(batch)])


@contextmanager
def _evaluating(model: object) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()} if isinstance(model, nn.Module) else {}
    try:
        if isinstance(model, nn.Module):
            model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training
