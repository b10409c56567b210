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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_core.config import Mark, marked
from fl_core.errors import PACKAGES
from fl_core.models import is_code
from fl_core.registry import import_object, is_outside
from fl_core.storage import sha

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
    """Return the SHA-256 of own functions and classes as Python compiles them, and of all own code that they use.

    >>> digest_of([Path, len])
    ''
    """
    texts: dict[str, list[str]] = {}
    waiting = [*things]
    while waiting:
        thing = _definition(waiting.pop())
        name = f"{thing.__module__}.{thing.__qualname__}"
        if name in texts or not _is_own(thing):
            continue
        texts[name] = []
        members: dict[str, Any] = {"": thing}
        if isinstance(thing, type):
            members = dict(vars(thing))
            waiting += thing.__bases__
        for key, value in sorted(members.items()):
            inner = inspect.unwrap(getattr(value, "__func__", value))
            if isinstance(value, property):
                inner = value.fget
            if isinstance(inner, types.FunctionType):
                compiled, used = _compiled(inner)
                texts[name].append(f"{key}: {compiled}")
                waiting += used
            elif isinstance(value, _PLAIN) and not key.startswith("__"):
                texts[name].append(f"{key} = {_text(value)}")
    return sha(repr(sorted(texts.items())).encode()) if texts else ""


def _definition(thing: Any) -> Any:
    """Return the function or class behind a partial call, a method, a wrapper or an instance."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    thing = inspect.unwrap(getattr(thing, "__func__", thing))
    return thing if isinstance(thing, (type, types.FunctionType)) else type(thing)


def _is_own(thing: Any) -> bool:
    """Return whether code belongs to no installed package and not to this one."""
    module = str(thing.__module__)
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    known = {*PACKAGES, *sys.stdlib_module_names, "builtins"} - {"__main__"}
    return module.partition(".")[0] not in known and not _INSTALLED & {
        *Path(file).parts
    }


def _compiled(function: types.FunctionType) -> tuple[list[str], list[Any]]:
    """Return a function's compiled code with the plain values that it takes from outside, and what else it takes."""
    codes = [function.__code__]
    for code in codes:  # and the functions within it
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    texts = [
        f"{code.co_code.hex()} {code.co_names} {_text(code.co_consts)}"
        for code in codes
    ]
    names = {name for code in codes for name in code.co_names}
    taken = {key: v for key, v in function.__globals__.items() if key in names}
    taken |= inspect.getclosurevars(function).nonlocals
    used: list[Any] = []
    for name, value in sorted(taken.items()):
        if isinstance(value, _PLAIN):
            texts.append(f"{name} = {_text(value)}")
        elif isinstance(value, types.ModuleType):
            used += [vars(value).get(inner) for inner in names]
        else:
            used.append(value)
    return texts, [
        each for each in used if isinstance(each, (type, types.FunctionType))
    ]


def _text(value: Any) -> str:
    """Return a plain value as text: sets in one order, and without addresses."""
    if isinstance(value, frozenset):
        return repr(sorted(map(_text, value)))
    if isinstance(value, tuple):
        return repr([_text(each) for each in value])
    return _without_addresses(repr(value)) if isinstance(value, _PLAIN) else ""


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+", "0x", text)
