"""Predictions of new samples: outputs, probabilities and classes, and their table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fl_core.data.columns import BETWEEN
from fl_core.errors import UsageError, check_known
from fl_core.scores import MULTILABEL


@dataclass(frozen=True, eq=False)
class Predictions:
    """A model's predictions for new samples.

    Attributes:
        samples: numbers from 0 in a table, array or list; paths within a folder of images.
        classes: names of the C classes. Empty means that the model predicts a number.
        outputs: the model's, float32 [n, C]. They are [n, 1] for a predicted number, or for one logit of the second of
            two classes.
        ids: columns of a table that name its records, by column.
        task: of :data:`fl_core.scores.TASKS`. For survival the output is the log relative hazard: higher is earlier.
            For multilabel the classes are labels, each with a logit of its own.
        temperature: divides the logits before they become probabilities. It changes no predicted class.
    """

    samples: tuple[str, ...]
    classes: tuple[str, ...]
    outputs: Tensor
    ids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    task: str = ""
    temperature: float = 1.0

    @cached_property
    def logits(self) -> Tensor:
        """Return a logit for each class, [n, C].

        These are the outputs. For a single output of two classes they are 0 and the output.

        Raises:
            UsageError: the model predicts a number.
        """
        if not self.classes:
            raise UsageError(
                "the model must predict classes; got a number. Use the outputs."
            )
        return (
            self.outputs
            if self.task == MULTILABEL
            else class_logits(self.outputs, len(self.classes))
        )

    @cached_property
    def probabilities(self) -> Tensor:
        """Return the softmax of the logits over the temperature, float64 [n, C]. Labels have the sigmoid of theirs."""
        logits = self.logits.double() / self.temperature
        return logits.sigmoid() if self.task == MULTILABEL else logits.softmax(dim=1)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Return the class with the largest logit, for ties the first. Of labels, all above 0, joined by commas."""
        if self.task == MULTILABEL:
            return tuple(
                BETWEEN.join(compress(self.classes, row))
                for row in (self.outputs > 0).tolist()
            )
        return tuple(
            self.classes[k] for k in self.logits.double().numpy().argmax(axis=1)
        )

    def frame(self, scores: str = "probability") -> pd.DataFrame:
        """Return a table with a line for each sample.

        Its columns are ``sample``, the ids, ``predicted``, and ``SCORE CLASS`` for each class.

        Args:
            scores: of :data:`SCORES`: ``probability``, ``logit`` or ``none``. Predicted numbers have none.

        Raises:
            UsageError: ``scores`` is unknown.
        """
        check_known("kind of scores", scores, SCORES)
        names = {"sample": self.samples, **self.ids}
        if not self.classes:
            return pd.DataFrame({**names, "predicted": self.outputs[:, 0].numpy()})
        values = SCORES[scores](self)
        lines = pd.DataFrame({**names, "predicted": self.labels})
        if values is None:
            return lines
        columns = [f"{scores} {name}" for name in self.classes]
        return pd.concat(
            [lines, pd.DataFrame(np.asarray(values), columns=columns)], axis=1
        )


SCORES: dict[str, Callable[[Predictions], Tensor | None]] = {
    "probability": lambda made: made.probabilities,
    "logit": lambda made: made.logits,
    "none": lambda made: None,
}


def class_logits(outputs: Tensor, n_classes: int) -> Tensor:
    """Return a logit for each class, [n, C], of the outputs of a model of classes.

    >>> class_logits(torch.tensor([[2.0]]), 2)
    tensor([[0., 2.]])
    """
    single = outputs.shape[1] == 1 and n_classes == 2
    return torch.cat([torch.zeros_like(outputs), outputs], dim=1) if single else outputs
