"""Registries of named members that anybody can add as one file: algorithms, metrics, rules, datasets and models.

A member comes from one of three places:

- A module of the registry's package, or its single module. All are imported when a
  registry is first read.
- A module of the user, if ``package.module:attribute`` is given in place of a name.
- A decorator that ran in this process.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from fl_core.display import Displayed, Summary
from fl_core.errors import UsageError, check_known

Member = TypeVar("Member")


class Registry(Displayed, Generic[Member]):
    """The members of one kind by name.

    Args:
        kind: the kind of a member in error messages.
        package: the package with the modules of the members, such as ``fl_core.algorithms``, or a single module.
        adopt: a function (object, name) -> member, for objects from outside without the
            decorator. It refuses an object of another kind by a UsageError.

    >>> from fl_core.algorithms.base import ALGORITHMS
    >>> "fedavg" in ALGORITHMS
    True
    >>> ALGORITHMS["fedprox"].__name__
    'FedProx'
    """

    of_kind: ClassVar[dict[str, Registry[Any]]] = {}
    """The registries that this process has loaded, by their kind."""

    def __init__(
        self, kind: str, package: str, adopt: Callable[[Any, str], Member]
    ) -> None:
        self.kind = kind
        self.package = package
        self.adopt = adopt
        self.of_kind[kind] = self
        self._members: dict[str, Member] = {}
        self._origins: dict[str, tuple[str, str]] = {}
        self._complete = False

    def add(self, name: str, member: Member, made_from: Any) -> None:
        """Register a member. Decorators call this.

        Args:
            name: the member's name.
            member: the member.
            made_from: the class or function under the decorator. The same one may be added again, for instance by a
                notebook's cell that is executed twice.

        Raises:
            UsageError: another member has that name.
        """
        origin = (made_from.__module__, made_from.__qualname__)
        if not self._is_own(origin):
            self._import_package()
        owner = self._origins.get(name, origin)
        if owner != origin:
            owner_name = ":".join(owner)
            raise UsageError(
                f"{self.kind} must have a name of its own; got {name!r}, the name of {owner_name}. Choose another."
            )
        self._members[name] = member
        self._origins[name] = origin

    def _is_own(self, origin: tuple[str, str]) -> bool:
        return f"{origin[0]}.".startswith(f"{self.package}.")

    def _import_package(self) -> None:
        """Import the package's modules once. Their decorators add the members."""
        if self._complete:
            return
        self._complete = True
        try:
            from pkgutil import iter_modules

            package = importlib.import_module(self.package)
            for module in iter_modules(getattr(package, "__path__", ())):
                importlib.import_module(f"{self.package}.{module.name}")
        except BaseException:
            self._complete = False
            raise

    @property
    def own(self) -> dict[str, Member]:
        """Return the members in the package's own files, by sorted name."""
        self._import_package()
        return {
            name: self._members[name]
            for name in sorted(self._members)
            if self._is_own(self._origins.get(name, ("", "")))
        }

    def names(self) -> list[str]:
        """Return all names, the package's own first."""
        return list(dict.fromkeys([*self.own, *self._members]))

    def __contains__(self, name: object) -> bool:
        self._import_package()
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __getitem__(self, name: str) -> Member:
        """Return the member of a name, or the attribute at ``package.module:attribute``.

        Raises:
            UsageError: the name is unknown (the message has the nearest one), cannot be
                imported, or names an object of another kind. Or it is no text, such as
                the member itself.
        """
        if not isinstance(name, str):
            proper_name = getattr(name, "name", getattr(name, "__name__", "its name"))
            raise UsageError(
                f"{self.kind} must be a name; got {name!r}. Write {proper_name!r}."
            )
        file = name.partition(":")[0]
        if is_outside(name) or file.endswith(".py"):  # a file's name is answered there
            return self._from_outside(name, import_object(self.kind, name))
        self._import_package()
        check_known(self.kind, name, self._members)
        return self._members[name]

    def _from_outside(self, name: str, member: object) -> Member:
        origin = (
            getattr(member, "__module__", ""),
            getattr(member, "__qualname__", ""),
        )
        names = [
            key
            for key, member_origin in self._origins.items()
            if member_origin == origin
        ]
        if names:
            return self._members[names[0]]
        return self.adopt(member, name)

    def summary(self) -> Summary:
        """Return a table of the names, with one line of description for each member."""
        lines = list(self.summaries().items())
        lead = f"{len(lines)} {self.kind}s"
        return Summary(lead, [self.kind, ""], lines)

    def name_of(self, member: Any) -> str:
        """Return the name by which a configuration finds a class with a ``name``.

        A class in a module that can be imported is named ``package.module:Class``. A class in a script or a notebook's
        cell is registered under its own name in this process.

        Raises:
            UsageError: the class is not of this registry's kind, or another member has its
                name.
        """
        module, path = member.__module__, member.__qualname__
        self.adopt(member, path)
        if member in self.own.values():
            return str(member.name)
        attribute = getattr(sys.modules[module], path, None)
        if module != "__main__" and attribute is member:
            return f"{module}:{path}"
        self.add(member.name, member, member)
        return str(member.name)

    def members(self) -> dict[str, Member]:
        """Return all members by name."""
        return {name: self[name] for name in self.names()}

    def summaries(self) -> dict[str, str]:
        """Return a line about each member by name: its ``summary``, or the first line of its docstring."""
        return {
            name: getattr(member, "summary", "") or first_line(member.__doc__)
            for name, member in self.members().items()
        }

    def families(self) -> dict[str, list[str]]:
        """Return lists of the members' names by the first line of their module's docstring.

        The lists are in the order of the modules' names. The names of one module are
        sorted. Members of modules without a docstring are listed under
        ``From other packages``.
        """
        origins = {name: self._origins.get(name, ("", "")) for name in self.names()}
        names_by_subject: dict[str, list[str]] = {}
        for name in sorted(origins, key=lambda name: (origins[name][0], name)):
            module = sys.modules.get(origins[name][0])
            names_by_subject.setdefault(
                first_line(getattr(module, "__doc__", "")) or "From other packages", []
            ).append(name)
        return names_by_subject


def first_line(text: str | None) -> str:
    """Return the first line of a docstring, or an empty text if there is none."""
    return (text or "").strip().partition("\n")[0]


def is_outside(name: str) -> bool:
    """Return whether a name has the form ``package.module:attribute``, as the user's own code has.

    Nothing is imported. So a name such as ``timm:resnet18`` has this form, too.
    """
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(
        part.isidentifier() for part in (*module.split("."), *attribute.split("."))
    )


def _way(kind: str, path: str) -> str:
    """Return advice on a path such as ``models.py:net``, or on a model's name with a value, such as ``mlp:64``.

    The advice is empty for other paths.
    """
    file, _, name = path.partition(":")
    if kind == "model" and file in Registry.of_kind.get(kind, ()):
        value = name if name.isdecimal() else "VALUE"
        return f" Write model='{file}', model_options={{'NAME': {value}}}."
    module = file.removesuffix(".py").strip("./").replace("/", ".")
    if file.endswith(".py"):
        shown_name = name or "NAME"
        return f" Name the module without .py: {module}:{shown_name}."
    return ""


def import_object(kind: str, path: str) -> Any:
    """Return the object at ``package.module:attribute``. Modules in the working directory are found last.

    Errors in the imported module itself keep their types.

    Args:
        kind: the word for the object in messages, such as ``model``.
        path: the text ``package.module:attribute``.

    Raises:
        UsageError: the text has another form, or there is no such module, or no such attribute in it.
    """
    module_name, _, attributes = path.partition(":")
    if not is_outside(path):
        hint = _way(kind, path)
        raise UsageError(
            f"{kind} must have the form package.module:name; got {path!r}.{hint}"
        )
    if "" not in sys.path:
        sys.path.append("")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but an import of it does not
        advice = _way(kind, path) or " Correct its name, or start in its folder."
        raise UsageError(
            f"{kind} {path!r} must be in a module that Python finds; got {error.name!r}, which does not exist.{advice}"
        ) from error
    for attribute in attributes.split("."):
        if not hasattr(target, attribute):
            check_known(
                f"name in {module_name!r}",
                attribute,
                [name for name in dir(target) if not name.startswith("_")],
            )
        target = getattr(target, attribute)
    return target


def parameters_of(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """Return a function's named parameters with whether each is required, and whether it takes any other name.

    A callable that Python cannot inspect has no parameters here.

    >>> parameters_of(lambda n_classes, *, width=1: None)
    ({'n_classes': True, 'width': False}, False)
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}, False
    named_kinds = (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    is_required = {
        p.name: p.default is inspect.Parameter.empty
        for p in parameters
        if p.kind in named_kinds
    }
    return is_required, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def attach(
    package: str, file: str, wrap: Callable[[Any], Any] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package whose names live in other modules.

    Importing the package is then fast. A name's module is imported when the name is first used. The name stays in the
    package from then on. The names are the package's imports for type checkers.

    Args:
        package: the package's ``__name__``.
        file: its ``__file__``. The imports below its ``if TYPE_CHECKING:`` are read.
        wrap: a function that wraps each function of the package for its users.

    >>> import fl_core.models
    >>> look_up, names, public = attach("fl_core.models", fl_core.models.__file__)
    >>> look_up("MODELS").kind, "build" in names(), public == fl_core.models.__all__
    ('model', True, True)
    """
    blocks = [
        node
        for node in ast.parse(Path(file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If)
    ]
    module_by_name: dict[str, str] = {}
    for node in chain.from_iterable(block.body for block in blocks):
        if isinstance(node, ast.ImportFrom):
            module_by_name |= {alias.name: str(node.module) for alias in node.names}

    def look_up(name: str) -> Any:
        if name not in module_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(module_by_name[name])
        if hasattr(module, name):
            value = getattr(module, name)
        else:
            value = import_module(f"{module_by_name[name]}.{name}")
        if inspect.isfunction(value) and wrap is not None:
            value = wrap(value)
            value.__module__ = package  # where pickle finds it
        vars(sys.modules[package]).setdefault(name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_by_name})

    return look_up, names, sorted(module_by_name)
