"""What a run depends on: versions of packages, and the user's own code."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import platform
import re
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_core.config import Mark, marked
from fl_core.errors import PACKAGES
from fl_core.models import is_code
from fl_core.registry import import_object, is_outside
from fl_core.storage.files import sha

if TYPE_CHECKING:
    from torch import nn

    from fl_core.task import Task

RECORDED = (
    "fedlayers",
    "torch",
    "torchvision",
    "timm",
    "peft",
    "numpy",
    "scikit-learn",
)


def current_environment() -> dict[str, Any]:
    """Return versions, the platform, and the working directory's commit."""
    return {**versions(), "platform": platform.platform(), "commit": _commit()}


def versions() -> dict[str, Any]:
    """Return the versions of Python and the packages. A run's numbers depend on them."""
    return {
        "versions": {name: _version(name) for name in RECORDED},
        "python": platform.python_version(),
    }


def changes(began: Mapping[str, Any]) -> list[str]:
    """Return versions that differ from an earlier environment, such as ``torch 2.14.0 (now 2.14.1)``."""
    now = versions()
    pairs = {
        name: (old, now["versions"].get(name, ""))
        for name, old in began["versions"].items()
    }
    pairs["python"] = (began["python"], now["python"])
    return [
        f"{name} {old or 'missing'} (now {new or 'missing'})"
        for name, (old, new) in pairs.items()
        if old != new
    ]


@functools.cache
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Return the commit of the working directory's git repository, with a mark if it has changes.

    Without one it is empty.
    """
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


_PLAIN = (bool, int, float, complex, str, bytes, tuple, frozenset, types.NoneType)
_INSTALLED = {"site-packages", "dist-packages"}
_Function = types.FunctionType


def digests(task: Task) -> dict[str, str]:
    """Return the digest of a task's own code by part: its algorithm, model, dataset, partition, rule and options.

    A part without own code has none. ``layers`` is the digest of an own model as it is printed.
    """
    config = task.config
    named: dict[str, Any] = {key: config.value(key) for key in marked(Mark.CODE)}
    named |= {
        f"option {key}": value for key, value in config.federation.options.items()
    }
    parts = {
        key: [import_object(key, value)]
        for key, value in named.items()
        if isinstance(value, str) and is_outside(value)
    }
    parts.setdefault("algorithm", []).append(type(task.algorithm(None)))
    found = {key: digest_of(things) for key, things in parts.items()}
    found |= of_model(task.model, config.own_model, str(config.model.model))
    return {key: digest for key, digest in sorted(found.items()) if digest}


def of_model(model: nn.Module, given: Any, named: str) -> dict[str, str]:
    """Return the digests of a model's own code and of the printed model; none for a model that is not one's own.

    Args:
        given: the module or callable that was passed for it, or None. named: the model's name or place otherwise.
    """
    if given is None and is_code(named):
        given = import_object("model", named)
    code = digest_of([*map(type, model.modules()), *([] if given is None else [given])])
    printed = sha(_without_addresses(repr(model)).encode())
    return (
        {"layers": printed, **({"model": code} if code else {})}
        if code or given is not None
        else {}
    )


def digest_of(things: Iterable[Any]) -> str:
    """Return the SHA-256 of the source of own functions and classes, and of all own code that they use.

    >>> digest_of([Path, len])
    ''
    """
    sources: dict[str, str] = {}
    waiting = [_unwrapped(thing) for thing in things]
    while waiting:
        thing = waiting.pop()
        name = f"{thing.__module__}.{thing.__qualname__}"
        if name in sources or not _is_own(thing):
            continue
        functions = [thing] if isinstance(thing, _Function) else [*_functions(thing)]
        used = [used for function in functions for used in _used(function)]
        constants = [text for text, value in used if isinstance(value, _PLAIN)]
        sources[name] = "\n".join(
            [*_outline(thing), *map(_source, functions), *sorted(constants)]
        )
        waiting += [
            _unwrapped(value) for _, value in used if not isinstance(value, _PLAIN)
        ]
        waiting += thing.__bases__ if isinstance(thing, type) else ()
    return sha(repr(sorted(sources.items())).encode()) if sources else ""


def _unwrapped(thing: Any) -> Any:
    """Return the function or class behind a partial call, a method, a wrapper or an instance."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    thing = inspect.unwrap(getattr(thing, "__func__", thing))
    return thing if isinstance(thing, (type, _Function)) else type(thing)


def _is_own(thing: Any) -> bool:
    """Return whether code belongs to no installed package and not to this one."""
    module = str(thing.__module__)
    top, file = (
        module.partition(".")[0],
        getattr(sys.modules.get(module), "__file__", None) or "",
    )
    if (
        top in PACKAGES
        or top in sys.stdlib_module_names - {"__main__"}
        or top == "builtins"
    ):
        return False
    return not _INSTALLED & {*Path(file).parts}


def _functions(thing: type) -> Iterator[_Function]:
    """Yield the functions that a class has of its own, by name."""
    for _, value in sorted(vars(thing).items()):
        parts: tuple[Any, ...] = (value,)
        if isinstance(value, property):
            parts = (value.fget, value.fset, value.fdel)
        for part in parts:
            inner: Any = getattr(part, "__func__", getattr(part, "func", part))
            function = inspect.unwrap(inner)
            if (
                isinstance(function, _Function)
                and function.__code__.co_filename != "<string>"
            ):
                yield function


def _outline(thing: Any) -> list[str]:
    """Return what a class has next to its functions: its bases and plain values."""
    if not isinstance(thing, type):
        return []
    values = [
        f"{key} = {_text(value)}"
        for key, value in vars(thing).items()
        if isinstance(value, _PLAIN)
    ]
    skipped = ("__module__", "__firstlineno__", "__static_attributes__")
    bases = [base.__qualname__ for base in thing.__bases__]
    return [
        f"class {thing.__qualname__}{bases}",
        *sorted(text for text in values if not text.startswith(skipped)),
    ]


def _source(function: _Function) -> str:
    """Return a function's source from its file, or its compiled form: a notebook's cell has no file."""
    if Path(function.__code__.co_filename).is_file():
        return inspect.getsource(function)
    return "\n".join(
        f"{code.co_code.hex()} {code.co_names} {_constants(code)}"
        for code in _codes(function.__code__)
    )


def _constants(code: types.CodeType) -> list[str]:
    return [_text(value) for value in code.co_consts if isinstance(value, _PLAIN)]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of the functions within it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _used(function: _Function) -> Iterator[tuple[str, Any]]:
    """Yield the functions, classes and plain values that a function takes from outside, with their text."""
    names = [name for code in _codes(function.__code__) for name in code.co_names]
    known = dict(function.__globals__)
    for name, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        with suppress(ValueError):  # it is empty
            known[name] = cell.cell_contents
    for name in (*names, *function.__code__.co_freevars):
        value = known.get(name)
        found = (
            [vars(value).get(inner) for inner in names]
            if isinstance(value, types.ModuleType)
            else [value]
        )
        yield from (
            (name, each) for each in found if isinstance(each, (type, _Function))
        )
        if isinstance(value, _PLAIN) and value is not None:
            yield f"{name} = {_text(value)}", value


def _text(value: Any) -> str:
    """Return a plain value as text: sets in one order, and without addresses."""
    inner = sorted(map(_text, value)) if isinstance(value, frozenset) else value
    return _without_addresses(
        repr([*map(_text, inner)] if isinstance(value, (tuple, frozenset)) else value)
    )


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+", "0x", text)
