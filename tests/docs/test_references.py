"""Every name that a docstring refers to exists."""

import ast
import builtins
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("fl_core", "diagnostics", "fedlayers", "figures", "benchmarks")
ROLE = re.compile(
    r":(?:func|class|meth|mod|data|attr|exc|obj):`[~!]?([\w.]+)(?:\(\))?`"
)
DOTTED = re.compile(rf"(?<![:\w])``?((?:{'|'.join(PACKAGES)})(?:\.\w+)+)(?:\(\))?``?")


@cache
def trees():
    """Return all modules by name."""
    modules = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts).removesuffix(".__init__")
            modules[name] = ast.parse(path.read_text(encoding="utf-8"))
    return modules


@cache
def bound(module):
    """Return the names that a module binds anywhere, attributes among them."""
    names = set()
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            names |= {getattr(node, "id", ""), getattr(node, "attr", "")}
    return names


@cache
def everywhere():
    """Return the names that any module binds: attributes may be inherited."""
    return set().union(*map(bound, trees()))


def exists(dotted):
    """Tell whether a module binds the first name behind its own; others may be inherited."""
    parts = dotted.split(".")
    for k in range(len(parts), 0, -1):
        module, rest = ".".join(parts[:k]), parts[k:]
        if module in trees():
            is_known = not rest or rest[0] in bound(module)
            return is_known and everywhere().issuperset(rest)
    return False


def resolves(target, module):
    package, first = module.rpartition(".")[0], target.partition(".")[0]
    if not first:
        places = {*trees(), *PACKAGES}
        return any(exists(place + target) for place in places)
    if any(map(exists, (target, f"{module}.{target}", f"{package}.{target}"))):
        return True
    if "." not in target:
        return target in everywhere() or hasattr(builtins, target)
    return first not in PACKAGES and find_spec(first) is not None


def texts():
    """Yield each module with its docstrings, those of attributes among them."""
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                yield module, str(node.value.value)


def test_references_of_docstrings_resolve():
    lost = [
        f"{module}: {target}"
        for module, text in texts()
        for target in (*ROLE.findall(text), *DOTTED.findall(text))
        if not resolves(target.rstrip("."), module)
    ]
    assert not lost, "\n".join(lost)
