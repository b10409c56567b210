"""Checks before calling a user's function: its named parameters, and its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from fl_core.errors import UsageError, check_known


def parameters_of(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """Return a function's named parameters with whether each is required, and whether it takes any other name.

    It is empty for a callable that Python cannot inspect.

    >>> parameters_of(lambda n_classes, *, width=1: None)
    ({'n_classes': True, 'width': False}, False)
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}, False
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {p.name: p.default is inspect.Parameter.empty for p in parameters if p.kind in by_name}
    return named, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def check_options(what: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Check that a function or class takes all given options.

    Args:
        what: has the options, as in messages: ``model 'mlp'``.

    Raises:
        UsageError: an option is unknown. The message names it, the nearest known one, and all known ones.
    """
    known = sorted(known)
    for option in options:
        if not known:
            raise UsageError(f"{what} must have no options; got {option!r}. Leave it out.")
        check_known(f"option of {what}", option, known)
