"""Counts the product's lines of code: without docstrings, comments and blank lines.

python -m benchmarks.lines
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("fl_core", "diagnostics", "fedlayers")
FLOWER = ROOT / "fedlayers" / "remote" / "flower"
NAMED = re.compile(r"(from|import) .*\bflower\b|\b(FlowerLink|server\.Superlink|superlink\.serve)\(")
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines(source: str) -> int:
    '''Return the number of lines with code.

    A text that stands alone is a docstring, also that of a constant.

    >>> lines('"""Add."""\\n\\nSTEP = 1  # metres\\n"""One step."""\\nTEXT = """two\\nlines"""\\n')
    3
    '''
    alone = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    with_code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            with_code.update(range(token.start[0], token.end[0] + 1))
    return len(with_code - alone)


def counts() -> dict[str, int]:
    """Return the lines of code of each package of the product."""
    files = {name: sorted((ROOT / name).rglob("*.py")) for name in PACKAGES}
    return {name: sum(lines(path.read_text(encoding="utf-8")) for path in paths) for name, paths in files.items()}


def of_flower() -> int:
    """Return the lines that serve Flower alone: its package, and the lines of other modules that name it."""
    count = 0
    for path in sorted((ROOT / "fedlayers").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if path.parent == FLOWER:
            count += lines(source)
        else:
            count += sum(bool(NAMED.search(line)) for line in source.splitlines())
    return count


def main() -> None:
    """Print the lines of each package, their sum, and the lines for Flower."""
    found = counts()
    for name, count in {**found, "together": sum(found.values()), "for Flower": of_flower()}.items():
        print(f"{name:12} {count:6,}")


if __name__ == "__main__":
    main()
