"""The registry of models; listing them imports nothing."""

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
"""Where names with such a beginning lead, beside the user's own code."""
_OWN = {"package.module:callable": "your own: called with shape= and n_classes= if it has parameters of these names"}


def _adopt(builder: Any, name: str) -> Builder:
    is_module = hasattr(builder, "state_dict") and not isinstance(builder, type)  # which is callable too
    if not callable(builder) or is_module:
        raise UsageError(f"model {name!r} is a {type(builder).__name__}; name a function or class that makes a model")
    return builder


MODELS: Registry[Builder] = Registry("model", "fl_core.models", "model", _adopt)


def model(builder: Function) -> Function:
    """Decorator that makes ``builder(shape, n_classes, *, options...)`` a model under its function's name.

    The first line of its docstring is its line in the list of models; its keyword-only parameters are its options.
    A shape that it cannot take is a UsageError that says which it can.

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


register = model


def is_code(name: str) -> bool:
    """Whether building a model by this name would import and call the user's own code."""
    source, colon, _ = name.partition(":")
    return bool(colon) and f"{source}:NAME" not in LIBRARIES


def describe() -> dict[str, str]:
    """Names of all models with a line of description each; nothing is imported for it.

    >>> describe()["heart_mlp"]
    '4 fc for Fed-Heart (PLayer-FL); tables.'
    """
    return {**{name: entry.summary for name, entry in MODELS.entries().items()}, **LIBRARIES, **_OWN}
