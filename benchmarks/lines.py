"""Count the tokens of the code of each part: without docstrings and comments.

python -m benchmarks.lines           # the parts, next to the stored numbers
python -m benchmarks.lines --store   # make budget: store today's numbers, which a test holds

Neither dense lines nor short lines change the number of tokens.
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

    A text that stands alone is a docstring, also that of a constant.

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
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        token.type not in _NO_CODE and token.start[0] not in alone for token in found
    )


def counts() -> dict[str, int]:
    """Return the tokens of each part of the project. The smaller parts are together."""
    found: Counter[str] = Counter()
    for name in (*PARTS, *OTHERS):
        for path in (ROOT / name).rglob("*.py"):
            found[name if name in PARTS else "all else"] += tokens(
                path.read_text(encoding="utf-8")
            )
    return dict(found)


def stored() -> dict[str, int]:
    """Return the stored tokens of each part."""
    return dict(json.loads(STORED.read_text(encoding="utf-8")))


def main() -> None:
    """Print the tokens of each part, or store them."""
    found = counts()
    if sys.argv[1:] == ["--store"]:
        STORED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    limits = stored()
    for name, count in found.items():
        print(f"{name:12} {count:8,} tokens, at most {limits[name]:8,}")


if __name__ == "__main__":
    main()
