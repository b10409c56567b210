"""Count the tokens of the code of each part: without docstrings and comments.

python -m benchmarks.lines           # the parts, next to the stored numbers
python -m benchmarks.lines --store   # make budget: lower the stored numbers to today's, which a test holds

Neither dense lines nor short lines change the number of tokens. A stored number never rises by this command.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
STORED = Path(__file__).with_name("budget.json")
PARTS = ("fl_core", "diagnostics", "fedlayers", "figures", "tests")
PACKAGES = PARTS[:3]
DESIGN = {
    "fl_core": 157_000,
    "diagnostics": 86_000,
    "fedlayers": 53_000,
    "figures": 90_000,
    "tests": 300_000,
    "all else": 40_000,
    "packages": 296_000,
    "files": 140,
}
"""What each part may have in the end: tokens, and files of the three packages."""
OTHERS = ("benchmarks", "docs", "examples", "notebooks")
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def tokens(source: str) -> int:
    '''Return the number of tokens of code.

    A text that stands alone is a docstring, also that of a constant. An f-string is one token in every Python.

    >>> tokens('"""Add."""\\n\\nSTEP = 1  # metres\\n"""One step."""\\n')
    3
    '''
    alone = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    found = inside = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        found += not (inside or token.type in _NO_CODE or token.start[0] in alone)
        inside += (kind == "FSTRING_START") - (kind == "FSTRING_END")
    return found


def counts() -> dict[str, int]:
    """Return the tokens of each part of the project, and the tokens and files of the three packages."""
    found = Counter(dict.fromkeys(DESIGN, 0))
    for name in (*PARTS, *OTHERS):
        for path in (ROOT / name).rglob("*.py"):
            own = tokens(path.read_text(encoding="utf-8"))
            found[name if name in PARTS else "all else"] += own
            if name in PACKAGES:
                found["packages"] += own
                found["files"] += path.name != "__init__.py"
    return found


def lowered(limits: dict[str, int], found: dict[str, int]) -> dict[str, int]:
    """Return the limits, lowered to what is found, but not below the design's numbers, which leave room.

    >>> lowered({"figures": 95_000, "tests": 299_000}, {"figures": 80_000, "tests": 310_000})
    {'figures': 90000, 'tests': 299000}
    """
    return {
        name: min(limit, max(DESIGN[name], found[name]))
        for name, limit in limits.items()
    }


def stored() -> dict[str, int]:
    """Return the stored tokens of each part."""
    return dict(json.loads(STORED.read_text(encoding="utf-8")))


def main() -> None:
    """Print the tokens of each part, or store them."""
    found = counts()
    if sys.argv[1:] == ["--store"]:
        text = json.dumps(lowered(stored(), found), indent=1)
        STORED.write_text(f"{text}\n", encoding="utf-8")
    limits = stored()
    for name, count in found.items():
        print(f"{name:12} {count:8,}, at most {limits[name]:8,}")


if __name__ == "__main__":
    main()
