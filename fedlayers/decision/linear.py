"""The linear layer that clients train together, on the samples that the network sees."""

from __future__ import annotations

from typing import Any

from fl_core.data import FederatedData
from fl_core.models.adapter import PackedShape
from fl_core.models.tokens import TokenShape

MODEL = "linear"
COUNTS = 1024
"""The number of word counts over sites.

Words are hashed to them, so a larger vocabulary does not make messages larger.
"""


def linear_model_of(data: FederatedData) -> dict[str, Any] | str:
    """Return the options of the model ``linear`` for a federation's samples, or why it cannot be built.

    Its inputs are a table's columns, other numbers flattened, pixels averaged down to at most 32 x 32, or counts of
    words.

    >>> import fedlayers as fl
    >>> linear_model_of(fl.load("heart"))
    {}
    """
    shape = data.shape
    if data.kind:
        return "it gives one prediction a sample, and the loss takes others"
    if isinstance(shape, PackedShape):
        return "it takes one input, and a sample has several"
    if isinstance(shape, TokenShape):
        if shape.tokenizer or data.integers:
            return "it counts words, and samples are token ids"
        if data.elsewhere:
            return {"counts": COUNTS}
        return {}
    return {}
