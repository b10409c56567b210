"""Registries of named members that anybody can add as one file: algorithms, metrics, rules, datasets and models.

A member's name comes from one of four places:

- A file of the package's folder. The folder is read, and the file imported when the member is used.
- An installed package that announces it as an entry point of the group ``fedlayers``.
- ``package.module:attribute`` in place of a name.
- A decorator that ran in this process.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from fl_core.errors import UsageError, check_known
from fl_core.source_scan import Entry, first_line, read_package

GROUP = "fedlayers"
Member = TypeVar("Member")


class Registry(Generic[Member]):
    """The members of one kind by name.

    Args:
        kind: the kind of a member in error messages. An entry point is called ``KIND.NAME``.
        package: has the modules of the members, such as ``fl_core.algorithms``.
        marker: the decorator that makes a member. The sources are searched for it.
        adopt: (an object from outside, its name) -> a member. It is called for objects without the decorator.

    >>> from fl_core.algorithms.base import ALGORITHMS
    >>> "fedavg" in ALGORITHMS.names()
    True
    >>> ALGORITHMS["fedprox"].__name__
    'FedProx'
    """

    of_kind: ClassVar[dict[str, Registry[Any]]] = {}
    """The registries that this process has loaded."""

    def __init__(
        self, kind: str, package: str, marker: str, adopt: Callable[[Any, str], Member]
    ) -> None:
        self.kind, self.package, self.marker, self.adopt = kind, package, marker, adopt
        self.of_kind[kind] = self
        self._members: dict[str, Member] = {}
        self._made_from: dict[
            tuple[str, str], str
        ] = {}  # (module, qualified name) -> the member's name

    def add(self, name: str, member: Member, made_from: Any) -> None:
        """Register a member. Decorators call this.

        Args:
            made_from: the class or function under the decorator. The same one may come again, as when a notebook's cell
                is executed twice.

        Raises:
            UsageError: another member has that name.
        """
        origin = (made_from.__module__, made_from.__qualname__)
        taken = next(
            (place for place, known in self._made_from.items() if known == name), origin
        )
        inside = self.inside.get(name)
        if inside is not None and (inside.module, inside.attribute) != origin:
            taken = (inside.module, inside.attribute)
        if taken != origin:
            raise UsageError(
                f"{self.kind} must have a name of its own; got {name!r}, the name of {':'.join(taken)}. Choose another."
            )
        self._members[name] = member
        self._made_from[origin] = name

    @cached_property
    def inside(self) -> dict[str, Entry]:
        """Return the members in the package's own files, by sorted name, without importing them."""
        entries = {
            entry.name: entry for entry in read_package(self.package, self.marker)
        }
        return dict(sorted(entries.items()))

    @cached_property
    def entry_points(self) -> dict[str, Entry]:
        """Return the members that installed packages announce as entry points, from their metadata."""
        entries = {}
        for point in entry_points(GROUP):
            kind, _, name = point.name.partition(".")
            if kind == self.kind and name:
                entries[name] = Entry(
                    name, point.module, point.attr, f"from {point.value}"
                )
        return entries

    def entries(self) -> dict[str, Entry]:
        """Return all named members without importing any, in sorted order with the package's own first."""
        here = {
            name: _entry(name, *origin, self._members[name])
            for origin, name in self._made_from.items()
        }
        others = {
            name: entry
            for name, entry in {**self.entry_points, **here}.items()
            if name not in self.inside
        }
        return {**self.inside, **others}

    def names(self) -> list[str]:
        """Return all names, the package's own first."""
        return list(dict.fromkeys([*self.inside, *self.entry_points, *self._members]))

    def __contains__(self, name: object) -> bool:
        return name in self.inside or name in self.entry_points or name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __getitem__(self, name: str) -> Member:
        """Return the member of a name, or the attribute at ``package.module:attribute``.

        Raises:
            UsageError: the name is unknown (the message has the nearest one), cannot be imported, or is not such a
                member.
        """
        if is_outside(name):
            return self._from_outside(name, import_object(self.kind, name))
        if name not in self._members:
            entry = {**self.entry_points, **self.inside}.get(name)
            if entry is None:
                check_known(self.kind, name, self.names())
                raise AssertionError(name)
            made = import_object(self.kind, f"{entry.module}:{entry.attribute}")
            if (
                name not in self._members
            ):  # an entry point whose object has no decorator
                self._members[name] = self._from_outside(name, made)
        return self._members[name]

    def _from_outside(self, name: str, made: Any) -> Member:
        origin = (getattr(made, "__module__", ""), getattr(made, "__qualname__", ""))
        return (
            self._members[self._made_from[origin]]
            if origin in self._made_from
            else self.adopt(made, name)
        )

    def members(self) -> dict[str, Member]:
        """Import all members and return them by name."""
        return {name: self[name] for name in self.names()}


def entry_points(group: str) -> Any:
    """Return the entry points of installed packages. The module that reads them is imported only when needed."""
    from importlib.metadata import entry_points

    return entry_points(group=group)


def _entry(name: str, module: str, attribute: str, member: Any) -> Entry:
    """Return the description of a member made in this process, from its plain attributes."""
    facts: dict[str, Any] = {}
    for key in (key for key in dir(member) if not key.startswith("_")):
        value = getattr(member, key)
        if isinstance(value, type) and is_dataclass(value):
            facts[key] = {field.name: field.default for field in fields(value)}
        elif value is None or isinstance(value, (str, int, float, tuple)):
            facts[key] = value
    family = first_line(getattr(sys.modules.get(module), "__doc__", ""))
    return Entry(
        name,
        module,
        attribute,
        first_line(getattr(member, "__doc__", "")),
        facts,
        (),
        family,
    )


def is_outside(name: str) -> bool:
    """Return whether a name is the place of the user's own code, ``package.module:attribute``."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(
        part.isidentifier() for part in (*module.split("."), *attribute.split("."))
    )


def _way(path: str) -> str:
    """Return what to write instead of a file's name with a name in it."""
    file, _, name = path.partition(":")
    module = file.removesuffix(".py").strip("./").replace("/", ".")
    return (
        f" Name the module without .py: {module}:{name or 'NAME'}."
        if file.endswith(".py")
        else ""
    )


def import_object(kind: str, path: str) -> Any:
    """Import ``package.module:attribute``. Modules in the working directory are found last.

    Raises:
        UsageError: there is no such module, or no such attribute in it.
    """
    module_name, _, attributes = path.partition(":")
    if not is_outside(path):
        raise UsageError(
            f"{kind} must have the form package.module:name; got {path!r}.{_way(path)}"
        )
    if "" not in sys.path:
        sys.path.append("")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but an import of it does not
        way = _way(path) or " Correct its name, or start in its folder."
        raise UsageError(
            f"{kind} {path!r} must be in a module that Python finds; got {error.name!r}, which does not exist.{way}"
        ) from error
    for part in attributes.split("."):
        if not hasattr(target, part):
            check_known(
                f"name in {module_name!r}",
                part,
                [name for name in dir(target) if not name.startswith("_")],
            )
        target = getattr(target, part)
    return target


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
    named = {
        p.name: p.default is inspect.Parameter.empty
        for p in parameters
        if p.kind in by_name
    }
    return named, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
