"""The models that have a short name, and how options are checked against what a function takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from fl_core.errors import UsageError, check_known

Builder = Callable[..., nn.Module]
MODELS: dict[str, Builder] = {}


def register(builder: Builder) -> Builder:
    """Make ``builder(shape, n_classes, *, options...)`` a model under its function name.

    The first line of its docstring is its line in the list of models; its keyword-only parameters are its options.
    A shape that it cannot take is a UsageError that says which it can.
    """
    MODELS[builder.__name__] = builder
    return builder


def parameters_of(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """What can be given by name: each parameter with whether it must be given, and whether any other name can be.

    A callable that Python cannot look into has none.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}, False
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {each.name: each.default is inspect.Parameter.empty for each in parameters if each.kind in by_name}
    return named, any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def check_options(model: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Refuse an option that the model does not have.

    Raises:
        UsageError: names the option, the nearest known one, and all that are known.
    """
    known = sorted(known)
    for option in options:
        if not known:
            raise UsageError(f"model {model!r} takes no options, so not {option!r}")
        check_known(f"option of model {model!r}", option, known)
