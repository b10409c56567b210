"""Every name that a docstring refers to exists."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("fl_core", "diagnostics", "fedlayers", "figures", "benchmarks")
ROLE = re.compile(
    r":(?:func|class|meth|mod|data|attr|exc|obj):`[~!]?([\w.]+)(?:\(\))?`"
)
DOTTED = re.compile(rf"(?<![:\w])``?((?:{'|'.join(PACKAGES)})(?:\.\w+)+)(?:\(\))?``?")


@cache
def trees() -> dict[str, ast.Module]:
    paths = [
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    ]
    dotted = {
        path: ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path in paths
    }
    return {
        name: ast.parse((ROOT / path).read_text(encoding="utf-8"))
        for path, name in dotted.items()
    }


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for tree in trees().values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def bound(parts: list[ast.stmt]) -> Iterator[str]:
    """Names that statements bind, also inside ``if``, ``try`` and ``with``, and the attributes that methods set."""
    for node in parts:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from bound(node.body)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        for part in ast.walk(node) if not isinstance(node, ast.ClassDef) else ():
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                yield part.attr
            elif (
                isinstance(part, ast.Name)
                and isinstance(part.ctx, ast.Store)
                and not hasattr(node, "args")
            ):
                yield part.id


@cache
def attributes(own: ast.ClassDef) -> set[str]:
    """Names that a class or one of its bases in this project binds."""
    bases = [
        base.id
        for base in own.bases
        if isinstance(base, ast.Name) and base.id != own.name
    ]
    return set(bound(own.body)).union(
        *(attributes(base) for name in bases for base in classes().get(name, []))
    )


@cache
def known() -> frozenset[str]:
    found = set(trees())
    for module, tree in trees().items():
        found |= {f"{module}.{name}" for name in bound(tree.body)}
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found |= {f"{module}.{node.name}.{name}" for name in attributes(node)}
    return frozenset(found)


def texts(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Docstrings of modules, classes, functions and attributes, with the class around them."""
    around = {
        part: node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        for part in (
            getattr(node, "body", [])
            if isinstance(getattr(node, "body", []), list)
            else []
        ):
            if (
                isinstance(part, ast.Expr)
                and isinstance(part.value, ast.Constant)
                and isinstance(part.value.value, str)
            ):
                yield around.get(part, ""), part.value.value


def resolves(target: str, module: str, owner: str) -> bool:
    if target.startswith("."):
        return any(name.endswith(target) for name in known())
    package = module.rpartition(".")[0]
    if {
        target,
        f"{module}.{target}",
        f"{module}.{owner}.{target}",
        f"{package}.{target}",
    } & known():
        return True
    *path, own, attribute = ["", *target.split(".")]
    if (
        own in classes()
        and {".".join([*path, own]).lstrip("."), f"{module}.{own}"} & known()
    ):  # of another module
        return any(attribute in attributes(node) for node in classes()[own])
    first = target.partition(".")[0]
    if first in PACKAGES or "." not in target:
        return hasattr(builtins, target)
    return find_spec(first) is not None


@pytest.mark.parametrize("package", PACKAGES)
def test_references_of_docstrings_resolve(package: str) -> None:
    lost = [
        f"{module}: {target}"
        for module, tree in trees().items()
        if module.partition(".")[0] == package
        for owner, text in texts(tree)
        for target in (*ROLE.findall(text), *DOTTED.findall(text))
        if not resolves(target.rstrip("."), module, owner)
    ]
    assert not lost, "\n".join(lost)


def test_sections_of_docstrings_are_not_empty() -> None:
    empty = re.compile(
        r"^( *)(Args|Attributes|Returns|Raises):\n(?=\s*(\n\1\S|$))", re.M
    )
    lost = [
        f"{module}: {text[:60]}"
        for module, tree in trees().items()
        for _, text in texts(tree)
        if empty.search(text)
    ]
    assert not lost, "\n".join(lost)


@pytest.mark.parametrize(
    ("target", "right"),
    [
        ("fl_core.layers.layers_of", True),
        (".layers.layers_of", True),
        ("fl_core.layers.layers_at", False),
        (".against.against_nulls", False),
        ("diagnostics.measure.diagnose", True),
        ("diagnostics.diagnose", False),
        ("fl_core.layers.Layer.weights", True),
        ("fl_core.layers.Layer.heights", False),
        ("torch.nn.Linear", True),
        ("nobody", False),
    ],
)
def test_a_reference_that_leads_nowhere_is_found(target: str, right: bool) -> None:
    assert resolves(target, "diagnostics.measure", "") == right
