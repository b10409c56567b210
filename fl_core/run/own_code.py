"""The user's own code in a run: what is allowed of it, and digests that show whether it was edited."""

from __future__ import annotations

import functools
import inspect
import json
import re
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from fl_core import models
from fl_core.config import Mark, RunConfig, marked
from fl_core.errors import PACKAGES, UsageError, as_list
from fl_core.models import is_code
from fl_core.models.adapter import OWN_LOSS
from fl_core.models.building import PRETRAINED
from fl_core.records.store import Run, changed_parts
from fl_core.registry import import_object, is_outside
from fl_core.run.task import Task
from fl_core.storage import sha

_CONSTANTS = (bool, int, float, complex, str, bytes, tuple, frozenset, types.NoneType)

_INSTALLED = {"site-packages", "dist-packages"}


def digests(task: Task) -> dict[str, str]:
    """Return the digests of the user's code in a task, by part.

    Parts are ``algorithm``, ``model``, ``loss``, ``dataset``, ``partition``, ``rule``
    and ``option NAME``. A part without the user's code has no entry. A loss from Python
    always has one, also one of torch, since its settings count. ``layers`` is the digest
    of the printed text of the user's model.
    """
    config = task.config
    objects_by_key = {
        key: [import_object(key, name)]
        for key, name in code_of(config.to_json()).items()
        if key != "model"
    }
    objects_by_key.setdefault("algorithm", []).append(type(task.algorithm(None)))
    code_digests = {key: digest_of(objects) for key, objects in objects_by_key.items()}
    code_digests |= of_model(task.model, task.own["model"], str(config.model.model))
    loss = getattr(task.own["model"], OWN_LOSS, None)
    if loss is not None:
        digest, state = digest_of([loss]), vars(loss)
        text = f"{digest} {loss!r} {state}"
        code_digests["loss"] = sha(_without_addresses(text).encode())
    return {key: digest for key, digest in sorted(code_digests.items()) if digest}


def of_model(model: nn.Module, model_given: object, named: str) -> dict[str, str]:
    """Return the digests ``model`` of a model's user code and ``layers`` of the printed model.

    The first is missing without the user's code, as for a module of a library's
    classes. Both are missing for a model of this package or of a library that the run
    names.

    Args:
        model: the built model.
        model_given: the module or callable that was passed for it, or None.
        named: the model's name, or ``package.module:name`` of its code.
    """
    if model_given is None and models.is_code(named):
        model_given = import_object("model", named)
    code = digest_of(
        [*map(type, model.modules()), *([] if model_given is None else [model_given])]
    )
    layers_digest = sha(_without_addresses(repr(model)).encode())
    if not code and model_given is None:
        return {}
    digests = {"layers": layers_digest}
    if code:
        digests["model"] = code
    return digests


def digest_of(things: Iterable[Any]) -> str:
    """Return the SHA-256 of the user's functions and classes as Python compiles them, with all user code they use.

    It is empty without the user's code.

    >>> digest_of([nn.Linear, Path, len, RunConfig])
    ''
    """
    texts: dict[str, list[str]] = {}
    pending = [*things]
    while pending:
        definition = _definition(pending.pop())
        name = f"{definition.__module__}.{definition.__qualname__}"
        if name in texts or not _is_own(definition):
            continue
        texts[name] = []
        members: dict[str, Any] = {"": definition}
        if isinstance(definition, type):
            members = dict(vars(definition))
            pending += definition.__bases__
        for key, value in sorted(members.items()):
            functions = _functions(value)
            for part, function in functions.items():
                code_texts, used_objects = _compiled(function)
                texts[name].append(f"{key}{part}: {code_texts}")
                pending += used_objects
            if functions or key.startswith("__"):
                continue
            if isinstance(value, _CONSTANTS):
                text = _text(value)
                texts[name].append(f"{key} = {text}")
            else:  # a class within the class, or an object
                pending.append(value)
    if texts:
        return sha(repr(sorted(texts.items())).encode())
    return ""


def _functions(member: Any) -> dict[str, types.FunctionType]:
    """Return the functions of a class's member by the ending of their names; empty for a value.

    The endings tell a property's setter and deleter from its getter.
    """
    if isinstance(member, property):
        functions = {"": member.fget, ".setter": member.fset, ".deleter": member.fdel}
    else:
        if isinstance(member, functools.cached_property):
            member = member.func
        functions = {"": inspect.unwrap(getattr(member, "__func__", member))}
    return {
        part: function
        for part, function in functions.items()
        if isinstance(function, types.FunctionType)
    }


def _definition(thing: Any) -> Any:
    """Return the function or class behind a partial call, a method, a wrapper or an instance."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    thing = inspect.unwrap(getattr(thing, "__func__", thing))
    if isinstance(thing, (type, types.FunctionType)):
        return thing
    return type(thing)


def _is_own(thing: object) -> bool:
    """Return whether code is the user's own.

    It is not if it belongs to this package, to an installed one or to Python's library.
    """
    module = str(thing.__module__)
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    packages = {*PACKAGES, *sys.stdlib_module_names, "builtins"} - {"__main__"}
    return module.partition(".")[0] not in packages and not _INSTALLED & {
        *Path(file).parts
    }


def _compiled(function: types.FunctionType) -> tuple[list[str], list[Any]]:
    """Return texts of a function's compiled code and constants, and what else it uses.

    The constants include plain values of its module and its closure. What else it uses
    are the functions and classes that it names.
    """
    codes = [function.__code__]
    for code in codes:  # and the functions within it
        codes += [
            constant
            for constant in code.co_consts
            if isinstance(constant, types.CodeType)
        ]
    texts = []
    for code in codes:
        constants = _text(code.co_consts)
        texts.append(f"{code.co_code.hex()} {code.co_names} {constants}")
    names = {*chain.from_iterable(code.co_names for code in codes)}
    outer_values = {key: v for key, v in function.__globals__.items() if key in names}
    outer_values |= inspect.getclosurevars(function).nonlocals
    used_objects: list[Any] = []
    for name, value in sorted(outer_values.items()):
        if isinstance(value, _CONSTANTS):
            text = _text(value)
            texts.append(f"{name} = {text}")
        elif isinstance(value, types.ModuleType):
            used_objects += [
                vars(value).get(name_in_module) for name_in_module in names
            ]
        else:
            used_objects.append(value)
    return texts, [
        used_object
        for used_object in used_objects
        if isinstance(used_object, (type, types.FunctionType))
    ]


def _text(value: object) -> str:
    """Return a plain value as text that is the same in every process.

    Sets are sorted, and addresses removed. The text of another value is empty.
    """
    if isinstance(value, frozenset):
        return repr(sorted(map(_text, value)))
    if isinstance(value, tuple):
        return repr([_text(item) for item in value])
    if isinstance(value, _CONSTANTS):
        return _without_addresses(repr(value))
    return ""


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+", "0x", text)


# --- permission ---------------------------------------------------------------------------------------------------


def code_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the user's own code that a configuration names, ``package.module:name``, by the configuration's key.

    An option's key is ``option NAME``.
    """
    named_values = {key: config.get(key) for key in marked(Mark.CODE)}
    named_values |= {f"option {key}": value for key, value in config["options"].items()}
    code = {
        key: value
        for key, value in named_values.items()
        if isinstance(value, str) and is_outside(value)
    }
    if is_code(str(config["model"])):
        return {**code, "model": config["model"]}
    return code


def code_in(config: RunConfig) -> set[str]:
    """Return the names of the user's code and the model options in a configuration, as ``allow_code`` takes them.

    A user who writes them into a configuration has thereby allowed them.
    """
    options = config.model.model_options.items()
    return {
        *code_of(config.to_json()).values(),
        *(format_option(key, value) for key, value in options),
    }


def allowed_code(allow_code: str | Collection[str]) -> set[str]:
    """Return the code that a caller allows as a set of names.

    A single name may come without a list. The set is empty if nothing is allowed.
    """
    return set(as_list("allow_code", allow_code, empty=True))


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
"""Limits of an option's value: depth of lists, length of a list, and absolute value.

They matter since libraries build networks of any size that an option names."""

_SIMPLE = f"must be a number of at most {_LARGE:,}, true, false, or a list of these"


def check_allowed_options(
    where: str,
    model: str,
    options: Mapping[str, Any],
    allowed: Collection[str] = (),
    weights: bool = False,
) -> None:
    """Check that a file or a server chooses only options for sizes and rates.

    Their values are numbers, truth values, None or short lists of these. An option
    whose name suggests that it loads something must be false, 0, None or an empty list.
    Pretrained weights must be false. Options in ``allowed`` may have any value.

    Args:
        where: the source of the options, for the message.
        model: the model's name, for the message.
        options: the model's options, by name.
        allowed: options that the user has confirmed, as :func:`format_option` writes them.
        weights: whether tensors replace the pretrained weights, which then are not loaded.

    Raises:
        UsageError: an option is not allowed. The message names the first, and how to allow it.
    """
    for key, value in options.items():
        if format_option(key, value) in allowed or (weights and key == PRETRAINED):
            continue
        if key == PRETRAINED and str(value).lower() != "false":
            rule = "pretrained weights must be the wish of whoever runs this"
        elif not _is_plain(value):
            rule = f"option {key!r} of model {model!r} {_SIMPLE}"
        elif value and _FETCHING & set(key.split("_")):
            rule = f"option {key!r} of model {model!r} must be false, as it may load a file"
        else:
            continue
        option_text = format_option(key, value)[:120]
        raise UsageError(
            f"{where}: {rule}; got {option_text}. Allow it: allow_code=['KEY=VALUE']."
        )


def format_option(key: str, value: object) -> str:
    """Return an option as ``KEY=VALUE``, as a user confirms it.

    >>> format_option("pretrained", True), format_option("activation", "relu")
    ('pretrained=true', 'activation=relu')
    """
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{key}={text}"


def _is_plain(value: object, deep: int = 0) -> bool:
    """Return whether an option's value is plain.

    It is None, a truth value, a number that is not too large, or a short list of these.
    Lists may be nested. ``deep`` is the number of lists around the value.
    """
    if isinstance(value, list | tuple):
        return (
            deep < _DEEP
            and len(value) <= _MANY
            and all(_is_plain(item, deep + 1) for item in value)
        )
    return value is None or (isinstance(value, int | float) and abs(value) <= _LARGE)


def changed_code(run: Run, task: Task) -> list[str]:
    """Return the parts of a run's own code that have changed since it trained.

    They were edited, added or removed.

    Args:
        run: the stored run.
        task: the task of the run as it is built now.
    """
    return changed_parts(run.code(), digests(task))


def check_code(path: Path, needed: Mapping[str, str], code: Collection[str]) -> None:
    """Check that the user allows all code that a file names, before it is imported.

    Args:
        path: the file, for the message.
        needed: ``package.module:name`` by its key in the file.
        code: the allowed names.

    Raises:
        UsageError: code is not allowed. The message names the file, the code, and how to allow it.
    """
    for key, name in needed.items():
        if name not in code:
            needed_names = list(needed.values())
            raise UsageError(
                f"{path} uses custom code {name!r} as its {key}. Pass allow_code={needed_names} to "
                "allow it."
            )
