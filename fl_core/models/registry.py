"""The registry of models, and the options that build one."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
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


PRETRAINED = "pretrained"
"""The option that loads weights. Only the user's own command or call may set it."""
_FETCHING = {
    "pretrained",
    "weights",
    "download",
    "fetch",
    "cache",
    "hub",
    "load",
    "url",
    "checkpoint",
    "path",
}
"""Words within the names of options by which a model may load something."""
_DEEP, _MANY, _LARGE = 4, 10_000, 1_000_000
"""Limits of an option's value: nested lists, values of a list, and size. Libraries loop over a depth of any size."""
_PLAIN = f"must be a number of at most {_LARGE:,}, true, false, or a list of these"


def check_stored(
    where: str,
    model: str,
    options: Mapping[str, Any],
    said: Collection[str] = (),
    weights: bool = False,
) -> None:
    """Check that a file or a server chooses only options for sizes and rates.

    Args:
        where: the source of the options, for the message.
        said: options that the user has confirmed, as :func:`format_option` writes them.
        weights: whether tensors replace the pretrained weights, which then are not loaded.

    Raises:
        UsageError: an option is not allowed. The message names the first, and how to allow it.
    """
    for key, value in options.items():
        if format_option(key, value) in said or (weights and key == PRETRAINED):
            continue
        if key == PRETRAINED and str(value).lower() != "false":
            rule = "pretrained weights must be the wish of whoever runs this"
        elif not _is_plain(value):
            rule = f"option {key!r} of model {model!r} {_PLAIN}"
        elif value and _FETCHING & set(key.split("_")):
            rule = f"option {key!r} of model {model!r} must be false, as it may load a file"
        else:
            continue
        raise UsageError(
            f"{where}: {rule}; got {format_option(key, value)[:120]}. Allow it with --allow-code KEY=VALUE."
        )


def format_option(key: str, value: Any) -> str:
    """Return an option as ``KEY=VALUE``, as a user confirms it.

    >>> format_option("pretrained", True), format_option("activation", "relu")
    ('pretrained=true', 'activation=relu')
    """
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def without_weights(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without timm's option that loads weights, for a model that receives trained ones."""
    return {
        key: value
        for key, value in options.items()
        if not (model.startswith("timm:") and key == PRETRAINED)
    }


def wants_weights(model: str | None, options: Mapping[str, Any]) -> bool:
    """Return whether building a model with these options would load pretrained weights."""
    return (
        str(model).startswith("timm:")
        and str(options.get(PRETRAINED, False)).lower() != "false"
    )


def _is_plain(value: Any, deep: int = 0) -> bool:
    """Return whether a value is None, a number that is not too large, a truth value, or a short list of these."""
    if isinstance(value, list | tuple):
        return (
            deep < _DEEP
            and len(value) <= _MANY
            and all(_is_plain(each, deep + 1) for each in value)
        )
    return value is None or (isinstance(value, int | float) and abs(value) <= _LARGE)
