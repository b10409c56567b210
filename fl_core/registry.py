"""Named things that anybody can add as one file: algorithms, metrics, rules, datasets and models.

A member is known by its name from one of four places: a file of the package's folder, which is found by reading the
folder and imported when the member is asked for; an installed package that announces it as an entry point of the
group ``fedlayers``; ``package.module:attribute``, said in place of a name; or a decorator that ran in this process.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

from fl_core.errors import UsageError, check_known

GROUP = "fedlayers"
Member = TypeVar("Member")


@dataclass(frozen=True)
class Entry:
    """A member as its source says it, without importing it.

    Attributes:
        module: where it is, importable; empty for an entry point that has not been imported.
        attribute: its name there.
        summary: the first line of its docstring.
        facts: what the decorator's keywords say, and a class's own attributes, as far as they are literals.
        bases: the names of a class's bases, as written.
    """

    name: str
    module: str
    attribute: str
    summary: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    bases: tuple[str, ...] = ()


class Registry(Generic[Member]):
    """The members of one kind by name.

    Args:
        kind: what a member is, as error messages and entry points say it: an entry point is called ``KIND.NAME``.
        package: whose modules hold the members, such as ``fl_core.algorithms``.
        marker: the decorator that makes a member, by which the source is searched.
        adopt: (an object from outside, the name that was given for it) -> a member; for what no decorator made one.

    >>> from fl_core.algorithms.base import ALGORITHMS
    >>> "fedavg" in ALGORITHMS.names()
    True
    >>> ALGORITHMS["fedprox"].__name__
    'FedProx'
    """

    def __init__(self, kind: str, package: str, marker: str, adopt: Callable[[Any, str], Member]) -> None:
        self.kind, self.package, self.marker, self.adopt = kind, package, marker, adopt
        self._members: dict[str, Member] = {}
        self._made_from: dict[tuple[str, str], str] = {}  # (module, qualified name) -> the member's name

    def add(self, name: str, member: Member, made_from: Any) -> None:
        """Make a member known; decorators call it.

        Args:
            made_from: the class or function under the decorator. The same one may come again, as when a notebook's
                cell is executed twice.

        Raises:
            UsageError: another one has that name.
        """
        origin = (made_from.__module__, made_from.__qualname__)
        taken = next((place for place, known in self._made_from.items() if known == name), origin)
        inside = self.inside.get(name)
        if inside is not None and (inside.module, inside.attribute) != origin:
            taken = (inside.module, inside.attribute)
        if taken != origin:
            raise UsageError(
                f"the name {name!r} is taken by another {self.kind}, {':'.join(taken)}; choose another name"
            )
        self._members[name] = member
        self._made_from[origin] = name

    @cached_property
    def inside(self) -> dict[str, Entry]:
        """What the package's own files hold, by name in sorted order, read without importing them."""
        entries = {entry.name: entry for entry in _read_package(self.package, self.marker)}
        return dict(sorted(entries.items()))

    @cached_property
    def announced(self) -> dict[str, Entry]:
        """What installed packages announce as entry points, read from their metadata."""
        found = {}
        for point in entry_points(group=GROUP):
            kind, _, name = point.name.partition(".")
            if kind == self.kind and name:
                found[name] = Entry(name, point.module, point.attr, f"from {point.value}")
        return found

    def entries(self) -> dict[str, Entry]:
        """All members that have a name, without importing any."""
        here = {
            name: Entry(name, *origin, (getattr(self._members[name], "__doc__", "") or "").strip().partition("\n")[0])
            for origin, name in self._made_from.items()
        }
        return {**self.announced, **here, **self.inside}

    def names(self) -> list[str]:
        """All names, the package's own first."""
        return list(dict.fromkeys([*self.inside, *self.announced, *self._members]))

    def __contains__(self, name: object) -> bool:
        return name in self.inside or name in self.announced or name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __getitem__(self, name: str) -> Member:
        """The member of that name, or that ``package.module:attribute`` is.

        Raises:
            UsageError: unknown, with the nearest name; nothing there to import; or no such thing.
        """
        if is_outside(name):
            return self._from_outside(name, imported(self.kind, name))
        if name not in self._members:
            entry = {**self.announced, **self.inside}.get(name)
            if entry is None:
                check_known(self.kind, name, self.names())
                raise AssertionError(name)
            made = imported(self.kind, f"{entry.module}:{entry.attribute}")
            if name not in self._members:  # an entry point whose object no decorator has made a member
                self._members[name] = self._from_outside(name, made)
        return self._members[name]

    def _from_outside(self, name: str, made: Any) -> Member:
        origin = (getattr(made, "__module__", ""), getattr(made, "__qualname__", ""))
        return self._members[self._made_from[origin]] if origin in self._made_from else self.adopt(made, name)

    def members(self) -> dict[str, Member]:
        """All members by name, each imported."""
        return {name: self[name] for name in self.names()}


def is_outside(name: str) -> bool:
    """Whether a name is the place of somebody's own code, ``package.module:attribute``."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def imported(kind: str, path: str) -> Any:
    """What ``package.module:attribute`` names; modules in the working directory count, after all that is installed.

    Raises:
        UsageError: there is no such module, or nothing of that name in it.
    """
    module_name, _, attributes = path.partition(":")
    if not is_outside(path):
        raise UsageError(f"{kind} {path!r} is not of the form package.module:name")
    if "" not in sys.path:
        sys.path.append("")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise UsageError(f"{kind} {path!r}: there is no module {error.name!r} to import") from error
    for part in attributes.split("."):
        if not hasattr(target, part):
            check_known(f"name in {module_name!r}", part, [name for name in dir(target) if not name.startswith("_")])
        target = getattr(target, part)
    return target


# --- reading a folder's sources --------------------------------------------------------------------------------


def _read_package(package: str, marker: str) -> Iterator[Entry]:
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in sorted(Path(folder).glob("*.py")):
            source = path.read_bytes()
            if marker.encode() in source:
                module = package if path.stem == "__init__" else f"{package}.{path.stem}"
                yield from _read_module(ast.parse(source), module, marker)


def _read_module(tree: ast.Module, module: str, marker: str) -> Iterator[Entry]:
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            for decorator in node.decorator_list:
                call = decorator if isinstance(decorator, ast.Call) else None
                if _last_name(call.func if call else decorator) == marker:
                    yield _entry(node, call, module)


def _entry(node: ast.ClassDef | ast.FunctionDef, call: ast.Call | None, module: str) -> Entry:
    facts = dict(_literals((k.arg, k.value) for k in call.keywords)) if call else {}
    bases: tuple[str, ...] = ()
    if isinstance(node, ast.ClassDef):
        bases = tuple(ast.unparse(base) for base in node.bases)
        facts |= dict(_literals(_assigned(node)))
    said = [ast.literal_eval(call.args[0])] if call and call.args and isinstance(call.args[0], ast.Constant) else []
    name = said[0] if said and isinstance(said[0], str) else facts.get("name", node.name)
    summary = (ast.get_docstring(node) or "").partition("\n")[0]
    return Entry(str(name), module, node.name, summary, facts, bases)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _assigned(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """The attributes that a class body sets, a chain or a tuple of names each by itself."""
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            yield statement.target.id, statement.value
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    yield target.id, statement.value
                elif isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                    names = [each.id for each in target.elts if isinstance(each, ast.Name)]
                    yield from zip(names, statement.value.elts, strict=False)


def _literals(pairs: Any) -> Iterator[tuple[str, Any]]:
    for key, value in pairs:
        if key is not None:
            try:
                yield key, ast.literal_eval(value)
            except ValueError:  # an expression: what it gives is only known to who imports it
                continue
