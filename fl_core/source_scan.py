"""Reading of a package's sources without importing it: defined names, first lines and plain values."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Entry:
    """A registry member described from its source, without importing it.

    Attributes:
        module: its importable module; empty for an entry point that has not been imported.
        attribute: its name there.
        summary: the first line of its docstring.
        facts: the decorator's keywords and a class's attributes, own and inherited ones, if they are literals. For an
            inner class, such as ``Config``, these are its fields with their defaults.
        bases: the names of a class's bases, as written.
        family: the first line of its module's docstring.
    """

    name: str
    module: str
    attribute: str
    summary: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    bases: tuple[str, ...] = ()
    family: str = ""


def first_line(text: str | None) -> str:
    """Return the first line of a docstring, or an empty text."""
    return (text or "").strip().partition("\n")[0]


def read_package(package: str, marker: str) -> Iterator[Entry]:
    """Yield the definitions under the decorator ``marker`` in a package's modules, in the order of files and lines."""
    sources = Sources(package)
    for module in sources.modules:
        if marker in sources.text(module):
            for node in sources.tree(module).body:
                if isinstance(node, Definition):
                    for decorator in node.decorator_list:
                        call = decorator if isinstance(decorator, ast.Call) else None
                        if _last_name(call.func if call else decorator) == marker:
                            yield sources.entry(module, node, call)


class Sources:
    """The modules of a package as syntax trees, each read on first use."""

    def __init__(self, package: str) -> None:
        self.package = package
        self._texts: dict[str, str] = {}
        self._trees: dict[str, ast.Module] = {}
        self._values: dict[str, dict[str, ast.expr]] = {}

    @cached_property
    def modules(self) -> dict[str, Path]:
        """Return each module's file by the module's name, in the order of the files' names."""
        folder = _path(self.package)
        found = (
            {path.stem: path for path in sorted(folder.glob("*.py"))}
            if folder.is_dir()
            else {}
        )
        return {
            self.package if stem == "__init__" else f"{self.package}.{stem}": p
            for stem, p in found.items()
        }

    def text(self, module: str) -> str:
        """Return a module's source; empty if it does not exist or belongs to another package."""
        if module not in self._texts:
            ours = module.partition(".")[0] == self.package.partition(".")[0]
            path = self.modules.get(module) or (
                _path(module).with_suffix(".py") if ours else Path()
            )
            self._texts[module] = (
                path.read_text(encoding="utf-8") if path.is_file() else ""
            )
        return self._texts[module]

    def tree(self, module: str) -> ast.Module:
        """Return a module's syntax tree."""
        if module not in self._trees:
            self._trees[module] = ast.parse(self.text(module))
        return self._trees[module]

    def summary(self, module: str, name: str) -> str:
        """Return the first line of a definition's docstring, or an empty text."""
        nodes = [
            node
            for node in self.tree(module).body
            if isinstance(node, Definition) and node.name == name
        ]
        return first_line(ast.get_docstring(nodes[0])) if nodes else ""

    def entry(self, module: str, node: Definition, call: ast.Call | None) -> Entry:
        """Return the description of a decorated definition, with the decorator's arguments from ``call``."""
        facts: dict[str, Any] = {}
        bases: tuple[str, ...] = ()
        if isinstance(node, ast.ClassDef):
            bases = tuple(ast.unparse(base) for base in node.bases)
            facts = self._attributes(module, node)
        if call:
            facts |= self._plain(
                module, {k.arg: k.value for k in call.keywords if k.arg}
            )
        said = call.args[0] if call and call.args else None
        named = (
            said.value
            if isinstance(said, ast.Constant) and isinstance(said.value, str)
            else None
        )
        name = named or facts.get("name") or node.name
        family = first_line(ast.get_docstring(self.tree(module)))
        return Entry(
            str(name),
            module,
            node.name,
            first_line(ast.get_docstring(node)),
            facts,
            bases,
            family,
        )

    # --- classes ---

    def _attributes(self, module: str, node: ast.ClassDef) -> dict[str, Any]:
        """Return the plain attributes of a class, and of its base classes in this package."""
        facts: dict[str, Any] = {}
        for place, each in reversed(self._lineage(module, node)):
            for name in (
                item.name for item in each.body if isinstance(item, Definition)
            ):
                facts.pop(name, None)
            values = _assignments(each)
            facts = {
                name: value for name, value in facts.items() if name not in values
            } | self._plain(place, values)
            for inner in (item for item in each.body if isinstance(item, ast.ClassDef)):
                facts[inner.name] = self._fields(place, inner)
        return facts

    def _fields(self, module: str, node: ast.ClassDef) -> dict[str, Any]:
        """Return the fields of a dataclass with their defaults.

        A default that is not a literal is given as source text.
        """
        fields: dict[str, Any] = {}
        for place, each in reversed(self._lineage(module, node)):
            values = _assignments(each, fields=True)
            fields |= {
                name: ast.unparse(value) for name, value in values.items()
            } | self._plain(place, values)
        return fields

    def _lineage(
        self, module: str, node: ast.ClassDef
    ) -> list[tuple[str, ast.ClassDef]]:
        """Return a class and its bases in the order of attribute look-up."""
        found = [(module, node)]
        for base in node.bases:
            located = self._class(module, ast.unparse(base))
            found += self._lineage(*located) if located else []
        return [each for k, each in enumerate(found) if each not in found[k + 1 :]]

    def _class(self, module: str, path: str) -> tuple[str, ast.ClassDef] | None:
        """Return the class that a name in a module refers to, also as ``Outer.Inner``."""
        name, _, inner = path.partition(".")
        for node in self.tree(module).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                if not inner:
                    return module, node
                nested = [
                    each
                    for _, owner in self._lineage(module, node)
                    for each in owner.body
                ]
                return next(
                    (
                        (module, n)
                        for n in nested
                        if isinstance(n, ast.ClassDef) and n.name == inner
                    ),
                    None,
                )
        home, there = self._origin(module, name)
        return (
            self._class(home, ".".join(filter(None, (there, inner)))) if home else None
        )

    def _origin(self, module: str, name: str) -> tuple[str, str]:
        """Return the module from which a module imports a name, and the name there. Both are empty for other names."""
        package = module if module == self.package else module.rpartition(".")[0]
        imports = [
            node for node in self.tree(module).body if isinstance(node, ast.ImportFrom)
        ]
        for node in imports:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return resolve_name(
                        "." * node.level + (node.module or ""), package
                    ), alias.name
        return "", ""

    # --- values ---

    def _plain(self, module: str, values: Mapping[str, ast.expr]) -> dict[str, Any]:
        """Return values that are literals, or made of names that stand for literals."""
        plain = {}
        for name, value in values.items():
            try:
                plain[name] = ast.literal_eval(_Filled(self, module).visit(value))
            except (
                ValueError
            ):  # an expression, whose value is unknown without an import
                continue
        return plain

    def constant(self, module: str, name: str) -> ast.expr | None:
        """Return the value that a module assigns to a name or imports under it."""
        if module not in self._values:
            self._values[module] = _assignments(self.tree(module))
        if name in self._values[module]:
            return self._values[module][name]
        home, there = self._origin(module, name)
        return self.constant(home, there) if home else None


class _Filled(ast.NodeTransformer):
    """A transformer that replaces the names of a module's constants by their values."""

    def __init__(self, sources: Sources, module: str) -> None:
        self.sources, self.module = sources, module

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self.sources.constant(self.module, node.id)
        return node if value is None else value


def _path(module: str) -> Path:
    """Return a module's folder, or its file without the suffix. The top-level package is found without an import."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    folders = spec.submodule_search_locations if spec else None
    return Path(*folders[:1], *rest) if folders else Path(module)


def _last_name(node: ast.expr) -> str:
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def _assignments(
    node: ast.ClassDef | ast.Module, fields: bool = False
) -> dict[str, ast.expr]:
    """Return the names that a class or module body assigns, with their values, or only the fields of a dataclass."""
    values: dict[str, ast.expr] = {}
    for statement in node.body:
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and statement.value
        ):
            if not (fields and "ClassVar" in ast.unparse(statement.annotation)):
                values[statement.target.id] = statement.value
        elif isinstance(statement, ast.Assign) and not fields:
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    values[target.id] = statement.value
                elif isinstance(target, ast.Tuple) and isinstance(
                    statement.value, ast.Tuple
                ):
                    names = [
                        each.id for each in target.elts if isinstance(each, ast.Name)
                    ]
                    values |= dict(zip(names, statement.value.elts, strict=False))
    return values
