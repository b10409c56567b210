"""Find and make single changes in the source of a function."""

from __future__ import annotations

import ast
import random
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

PACKAGES = ("fl_core", "diagnostics", "fedlayers")
OPPOSITE = {
    ast.Lt: ("<", ">="), ast.GtE: (">=", "<"), ast.Gt: (">", "<="), ast.LtE: ("<=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
}  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Mutant:
    """One change: in ``function`` of ``file``, the text ``old`` becomes ``new``; ``tests`` reach the function."""

    file: str
    function: str
    old: str
    new: str
    tests: list[str]
    state: str = ""
    seed: int = 0
    note: str = ""
    """Why it is no mutant: it changes nothing that a caller sees."""

    def find(self, root):
        """Return the file that has the code today, its source, and the function; None if the code is gone."""
        others = (
            path
            for package in PACKAGES
            for path in sorted((root / package).rglob("*.py"))
        )
        for path in filter(Path.is_file, chain([root / self.file], others)):
            source = path.read_text(encoding="utf-8")
            for name, node in functions(source) if self.old in source else ():
                start, end = span(source, node)
                if name == self.function and source[start:end].count(self.old) == 1:
                    return path, source, node
        return None

    def applied(self, source, function):
        """Return the changed source."""
        start, end = span(source, function)
        return (
            source[:start]
            + source[start:end].replace(self.old, self.new)
            + source[end:]
        )


def functions(source):
    """Yield each function of a source with its qualified name."""

    def inside(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield prefix + child.name, child
            name = (
                f"{prefix}{child.name}."
                if isinstance(child, (Function, ast.ClassDef))
                else prefix
            )
            yield from inside(child, name)

    return inside(ast.parse(source), "")


def span(source, node):
    """Return the first and the last position of a node in its source."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def position(line, column):
        text = source[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(text.encode()[:column].decode())

    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return position(node.lineno, node.col_offset), position(
        node.end_lineno, node.end_col_offset
    )


def changes(source, function):
    """Yield (kind, old, new) for each change of one line; the old text stands once in the function.

    It is the changed expression itself, or else its line.
    """
    start, end = span(source, function)
    for node in nodes(function):
        low, high = span(source, node)
        first, last = source.rfind("\n", 0, low) + 1, source.find("\n", high)
        for kind, new in (
            changed(source, node)
            if low > start and "\n" not in source[low:high]
            else ()
        ):
            line = source[first:low] + new + source[high:last]
            for old, text in (
                (source[low:high], new),
                (source[first:last].strip(), line.strip()),
            ):
                if source[start:end].count(old) == 1 and old != text:
                    yield kind, old, text
                    break


def nodes(parent):
    """Yield the expressions and statements of a function, without those of functions and formatted texts inside."""
    for child in ast.iter_child_nodes(parent):
        if isinstance(child, (Function, ast.ClassDef, ast.JoinedStr)):
            continue
        if isinstance(child, (ast.expr, ast.stmt)):
            yield child
        yield from nodes(child)


def changed(source, node):
    """Yield (kind, text) for each change of a node."""
    low, high = span(source, node)
    match node:
        case (
            ast.Compare(left=left, ops=[op], comparators=[right])
            | ast.BinOp(left=left, op=op, right=right)
        ):
            if type(op) in OPPOSITE:
                before, after = span(source, left)[1], span(source, right)[0]
                swapped = source[before:after].replace(*OPPOSITE[type(op)])
                yield (
                    type(node).__name__,
                    source[low:before] + swapped + source[after:high],
                )
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield "BinOp", source[low:high].removeprefix("-").removeprefix("not ")
        case ast.Constant(value=bool(value)):
            yield "Constant", str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "Constant", repr(value + 1)
        case ast.Raise():
            yield "Raise", "pass"
        case ast.Return(value=ast.expr()):
            yield "Return", "return None"
        case ast.Call(args=args, keywords=keywords) if len(args) + len(keywords) > 1:
            *_, before, last = (
                span(source, argument)[1]
                for argument in (*args, *(keyword.value for keyword in keywords))
            )
            yield "Call", source[low:before] + source[last:high]


def draw(root, seed=0, files=None):
    """Yield a mutant of each function in random order.

    The kind of change is drawn first, among those that the function allows, then the change.

    Args:
        files: paths within the root that are drawn from. None means all of the packages.
    """
    paths = sorted(
        path for package in PACKAGES for path in (root / package).rglob("*.py")
    )
    pool = []
    for path in paths:
        file = path.relative_to(root).as_posix()
        if files is not None and file not in files:
            continue
        source = path.read_text(encoding="utf-8")
        pool += [(file, name, source, node) for name, node in functions(source)]
    generator = random.Random(seed)
    generator.shuffle(pool)
    for file, name, source, node in pool:
        kinds = {}
        for kind, old, new in changes(source, node):
            mutant = Mutant(file, name, old, new, [], seed=seed)
            if compiles(mutant.applied(source, node)):
                kinds.setdefault(kind, []).append(mutant)
        if kinds:
            yield generator.choice(kinds[generator.choice(sorted(kinds))])


def compiles(source):
    """Tell whether a source can be read."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
