"""Restoring of a run directory: its task, and checks that a checkpoint, the packages and the user's own code fit it.

Digests show damage, not forgery.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import platform
import re
import subprocess
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from fl_core import tree
from fl_core.algorithms.base import Algorithm, State
from fl_core.config import AUTO, Mark, RunConfig, absolute, in_memory, marked
from fl_core.data import FederatedData, Partition
from fl_core.data.preprocessing import Preprocessing
from fl_core.errors import PACKAGES, CorruptError, UsageError, about, as_list, damaged
from fl_core.models import is_code
from fl_core.models.registry import check_stored, format_option, without_weights
from fl_core.plan import LayerPlan
from fl_core.records.store import Checkpoint, Run, changed_parts
from fl_core.registry import import_object, is_outside
from fl_core.storage import sha
from fl_core.task import Task, assemble

_BESIDE = [
    "shape",
    "classes",
    "words",
    "preprocessing",
    "table",
    "given",
    "in_force",
    "command",
    "code",
    "own",
]
"""What a run's config.json has next to the configuration."""


def stored_config(stored: Mapping[str, Any]) -> tuple[RunConfig, LayerPlan | None]:
    """Return the configuration of a run and the plan given to it, from its ``config.json``."""
    rest = {name: value for name, value in stored.items() if name not in _BESIDE}
    plan = None if stored["given"] is None else LayerPlan.from_json(stored["given"])
    config = RunConfig(**rest)
    return (config.with_keys(plan=None) if plan is not None else config), plan


def task_of(
    run: Run, trained: bool = False, data_root: Path | str | None = None, **given: Any
) -> Task:
    """Rebuild the task of a run directory, with its initial weights and partition.

    Args:
        trained: whether its model gets trained weights, so that no others are loaded for it.
        data_root: the folder of the datasets' files, in place of the stored one.
        given: the user's own data and model.

    Raises:
        CorruptError: its files are damaged or have other contents.
        UsageError: something that they name does not exist here or does not fit.
    """
    path, stored, start = run.path / "config.json", run.task_config(), run.start()
    with damaged(path, UsageError):
        config, plan = stored_config(stored)
    for key, has in (("plan", plan), ("init", start)):
        if config.value(key) not in (None, AUTO) and has is None:
            raise CorruptError(
                f"{path} is damaged: it names the {key} {config.value(key)!r} and has none"
            )
    if data_root is not None:
        config = config.with_keys(data_root=absolute("data_root", data_root))
    config = in_memory(config.with_keys(download=False), given["data"], given["model"])
    own = isinstance(config.own_data, FederatedData)
    dealt = {} if own else _dealt(run, stored)
    if trained:
        options = without_weights(str(config.model.model), config.model.model_options)
        config = config.with_keys(model_options=options)
    with about(str(run.path)):
        return assemble(config, **dealt, plan=plan, start=start)


def _dealt(run: Run, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored partition and the fitted preprocessing, as :func:`assemble` takes them."""
    with damaged(run.path / "partition.safetensors", UsageError):
        partition = Partition.from_tree(run.partition())
    fitted = stored.get("preprocessing")
    with damaged(run.path / "config.json", UsageError):
        made = None if fitted is None else Preprocessing.from_json(fitted)
    return {"partition": partition, "preprocessing": made}


def check(run: Run, checkpoint: Checkpoint, task: Task) -> Algorithm:
    """Read all states of a checkpoint, and check that its clients, plan and models are those of this task.

    Returns:
        The algorithm with its plan at that checkpoint.

    Raises:
        CorruptError: names the checkpoint.
    """
    run.stopping_rule()  # which checks what is stored of it
    initial, names = (
        tree.state_dict(task.model),
        [client.name for client in task.data.clients],
    )
    with damaged(run.checkpoint_path(checkpoint.round), UsageError):
        algorithm = _under_its_plan(task, checkpoint.server)
        stranger = next(iter(set(checkpoint.clients) ^ set(names)), None)
        if stranger is not None:
            raise UsageError(
                f"clients must be the same as in the run; got a difference in {stranger!r}. Give the data of the run."
            )
        states = chain([checkpoint.server], checkpoint.clients.values())
        kept = (
            each for models in checkpoint.models.values() for each in models.values()
        )
        for stored in chain((state.trees.get("model", {}) for state in states), kept):
            known = {name: initial[name] for name in stored if name in initial}
            tree.check_same(known, stored, "the model", "the checkpoint")
    return algorithm


def _under_its_plan(task: Task, server: State) -> Algorithm:
    algorithm = task.algorithm(task.plan)
    if "plan" not in server.meta:
        if task.plan is None and (
            task.config.federation.plan == AUTO or algorithm.decides
        ):
            raise UsageError(
                f"the plan must be there, since {algorithm.name} chose it in its first round; got none."
            )
        return algorithm
    plan = LayerPlan.from_json(server.meta["plan"])
    plan.check_tensors(algorithm.task_info.tensors)
    return algorithm.with_plan(plan)


# --- permission to resume here ------------------------------------------------------------------------------------


def code_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the user's own code that a configuration names, ``package.module:name``, by the configuration's key."""
    named = {key: config.get(key) for key in marked(Mark.CODE)}
    named |= {f"option {key}": value for key, value in config["options"].items()}
    code = {
        key: value
        for key, value in named.items()
        if isinstance(value, str) and is_outside(value)
    }
    return {**code, "model": config["model"]} if is_code(str(config["model"])) else code


def allowed_by(config: RunConfig) -> set[str]:
    """Return the code and the model options that a command's own configuration allows a stored run to use."""
    return {
        *code_of(config.to_json()).values(),
        *(
            format_option(key, value)
            for key, value in config.model.model_options.items()
        ),
    }


def own_parts(config: RunConfig) -> dict[str, Any]:
    """Return what a command's own configuration allows and passes, as :func:`fl_core.runner.resume` takes it."""
    own = {kind: getattr(config, f"own_{kind}") for kind in ("data", "model")}
    return {"allow_code": allowed_by(config), **own}


def allowed_code(allow_code: str | Collection[str]) -> set[str]:
    """Return the code that a caller allows as a set of names; one name may come without a list."""
    return set(as_list("allow_code", allow_code, empty=True))


def check_own(
    path: Path,
    stored: Mapping[str, Any],
    allow_code: str | Collection[str],
    weights: bool,
    **given: Any,
) -> None:
    """Check that a run is resumed with its own data and model from Python, and with permission for its code.

    Args:
        weights: whether stored tensors replace pretrained weights.
    """
    check_given(path, stored, **given)
    code = allowed_code(allow_code)
    passed = {"model": given["model"] is not None, "dataset": given["data"] is not None}
    check_code(
        path,
        {key: name for key, name in code_of(stored).items() if not passed.get(key)},
        code,
    )
    if not passed["model"]:
        model, options = str(stored["model"]), stored["model_options"]
        check_stored(str(path), model, options, code, weights)


def check_given(path: Path, stored: Mapping[str, Any], **given: Any) -> None:
    """Refuse to continue a run without its own data or model from Python.

    Raises:
        UsageError: one is missing. The message names its argument.
    """
    for kind in stored["own"]:
        if given[kind] is None:
            raise UsageError(
                f"{path} must be resumed with its own {kind}; got none. Pass the same again, {kind}=..."
            )


def changed_code(run: Run, task: Task) -> list[str]:
    """Return the parts of a run's own code that were edited since it trained."""
    return changed_parts(run.code(), digests(task))


def check_code(path: Path, needed: Mapping[str, str], code: Collection[str]) -> None:
    """Check that the user allows all code that a file names, before it is imported.

    Args:
        needed: ``package.module:name`` by its key in the file.
        code: the allowed names.

    Raises:
        UsageError: code is not allowed. The message names the file, the code, and how to allow it.
    """
    for key, name in needed.items():
        if name not in code:
            raise UsageError(
                f"{path} uses custom code {name!r} as its {key}. Pass --allow-code {' '.join(needed.values())} to "
                f"allow it (allow_code={list(needed.values())} in Python)."
            )


def check_same_start(task: Task, path: Path, weights: bool) -> None:
    """Check that data and initial model equal the ones in the rows' header."""
    began = Run(path).header()
    now = task.header("")
    names = [
        [
            [layer["name"], *layer["parameters"], *layer["buffers"]]
            for layer in each["layers"]
        ]
        for each in (began, now)
    ]
    for same, what, got in (
        (began["data"] == now["data"], "data", "other data"),
        (names[0] == names[1], "model", "other layers"),
        (
            not weights or began["checkpoint"] == now["checkpoint"],
            "model",
            "other weights",
        ),
    ):
        if not same:
            raise UsageError(
                f"{path} must be resumed with the same {what}; got {got}. Choose another directory for a new run."
            )


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
