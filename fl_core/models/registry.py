"""The registry of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fl_core.errors import UsageError
from fl_core.registry import Registry

if TYPE_CHECKING:
    from torch import nn

Builder = Callable[..., "nn.Module"]
Function = TypeVar("Function", bound=Builder)

LIBRARIES = {
    "timm:NAME": "any timm model, fresh or pretrained; channels, classes and image size follow the data",
    "torchvision:NAME": "any torchvision classification model with fresh weights; images of 3 channels",
}
"""Libraries by the beginning of a model's name, apart from the user's own code."""
_OWN = {
    "package.module:callable": "your own: called with shape= and n_classes= if it has parameters of these names"
}


def _adopt(builder: Any, name: str) -> Builder:
    is_module = hasattr(builder, "state_dict") and not isinstance(
        builder, type
    )  # a module is callable too
    if not callable(builder) or is_module:
        raise UsageError(
            f"model {name!r} must be a function or class that makes a model; got a {type(builder).__name__}."
        )
    return builder


MODELS: Registry[Builder] = Registry("model", "fl_core.models", _adopt)


def model(builder: Function) -> Function:
    """Register ``builder(shape, n_classes, *, options...)`` as a model under its function's name, as a decorator.

    The first line of its docstring describes it in the list of models. Its keyword-only parameters are its options. For
    an unsuitable shape it should raise a UsageError that names the suitable ones.

    >>> from torch import nn
    >>> from fl_core import models
    >>> @models.model
    ... def linear_of_an_example(shape, n_classes):
    ...     '''Multinomial logistic regression; tables.'''
    ...     return nn.Linear(shape[0], n_classes)
    >>> models.build("linear_of_an_example", shape=(4,), n_classes=3)
    Linear(in_features=4, out_features=3, bias=True)

    Raises:
        UsageError: another model has that name.
    """
    MODELS.add(builder.__name__, builder, builder)
    return builder


def is_code(name: str) -> bool:
    """Return whether building a model by this name would import and call the user's own code."""
    source, colon, _ = name.partition(":")
    return bool(colon) and f"{source}:NAME" not in LIBRARIES


def describe() -> dict[str, str]:
    """Return the names of all models with a line of description each.

    >>> describe()["heart_mlp"]
    '4 fc for Fed-Heart (PLayer-FL); tables.'
    """
    return {**MODELS.summaries(), **LIBRARIES, **_OWN}
