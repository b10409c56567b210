"""How the code reads: conditional expressions, comprehensions, code in texts and vague names, counted in the syntax.

python -m tests.form              # a line for each part
python -m tests.form FILE...      # each place in a file
"""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("fl_core", "diagnostics", "fedlayers", "figures", "benchmarks")
VAGUE = {
    *("found", "each", "own", "kept", "told", "given"),
    *("asked", "held", "made", "said", "known", "taken"),
}
"""Names that say that something was found, and not what it is."""
FORMATS = {
    *("listing", "plural", "spelled", "len", "str", "repr", "round"),
    *("min", "max", "abs", "sum", "int", "float"),
}
"""Functions that a text may call."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def is_choice(node):
    """Tell whether an expression chooses a value: by if, by ``a and "b" or c``, or from ``{True: a, False: b}``."""
    if isinstance(node, ast.IfExp):
        return True
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        first = node.values[0]
        return isinstance(first, ast.BoolOp) and isinstance(
            first.values[-1], ast.Constant | ast.JoinedStr | ast.List | ast.Dict
        )
    if isinstance(node, ast.Subscript):
        keys = getattr(node.value, "keys", [])
        of_truth = [isinstance(getattr(key, "value", None), bool) for key in keys]
        chosen = isinstance(node.slice, ast.Compare | ast.BoolOp)
        of_values = isinstance(node.value, ast.List | ast.Tuple | ast.Constant)
        return any(of_truth) or (chosen and of_values)
    return False


def loops(node):
    """Return how many loops a comprehension has; a product counts as two."""
    products = [
        part.iter
        for part in node.generators
        if isinstance(part.iter, ast.Call) and "product" in ast.unparse(part.iter.func)
    ]
    return len(node.generators) + len(products)


def is_code(value):
    """Tell whether a replacement field of a text has code: a choice, a loop, or a call that does not format."""
    for node in ast.walk(value):
        if is_choice(node) or isinstance(node, (*COMPREHENSIONS, ast.BoolOp)):
            return True
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name not in FORMATS:
                return True
    return False


def dodging_names(source):
    """Return the places (line, name) that bind a name whose last underscore only tells it from another one."""
    places = []
    for node in ast.walk(ast.parse(source)):
        name = ""
        if isinstance(node, ast.Name | ast.Attribute):
            if isinstance(node.ctx, ast.Store):
                name = getattr(node, "id", getattr(node, "attr", ""))
        elif isinstance(node, ast.arg | ast.alias):
            name = getattr(node, "asname", None) or getattr(node, "arg", "")
        if name.strip("_") and name.endswith("_") and not name.endswith("__"):
            places.append((node.lineno, name))
    return places


def local_names(function):
    """Return the names that a function's body binds."""
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, ast.Store)}


def measure(source):
    """Return counts over a source, and its places to mend: (line, what)."""
    counts, places = Counter(), []
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not text:
            counts["statements"] += 1
        if isinstance(node, ast.expr) and is_choice(node):
            counts["conditional"] += 1
            if any(is_choice(part) for part in ast.walk(node) if part is not node):
                counts["nested"] += 1
                places.append((node.lineno, "a choice within a choice"))
        if isinstance(node, COMPREHENSIONS) and loops(node) > 1:
            counts["two for"] += 1
            places.append((node.lineno, "a comprehension with two for"))
        if isinstance(node, ast.FormattedValue) and is_code(node.value):
            counts["code in text"] += 1
            places.append((node.lineno, f"code in a text: {ast.unparse(node.value)}"))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = local_names(node)
            counts["locals"] += len(names)
            counts["vague"] += len(names & VAGUE)
            places += [(node.lineno, f"{node.name}: {n}") for n in names & VAGUE]
    return counts, sorted(places)


def files(part):
    """Return the modules of a part, without what git does not list."""
    command = ["git", "ls-files", f"{part}/**.py"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file()]


def densities(paths):
    """Return the counts of some files together, with conditional and vague ones in a hundred."""
    counts = Counter()
    for path in paths:
        counts += measure(path.read_text(encoding="utf-8"))[0]
    return {
        "conditional": 100 * counts["conditional"] / max(1, counts["statements"]),
        "nested": counts["nested"],
        "two for": counts["two for"],
        "code in text": counts["code in text"],
        "vague": 100 * counts["vague"] / max(1, counts["locals"]),
    }


def main(names):
    """Print a line for each part, or each place in some files."""
    for name in names:
        for line, what in measure(Path(name).read_text(encoding="utf-8"))[1]:
            print(f"{name}:{line}: {what}")
    if not names:
        for part in PARTS:
            line = "  ".join(f"{k} {v:.3g}" for k, v in densities(files(part)).items())
            print(f"{part:12}{line}")


if __name__ == "__main__":
    main(sys.argv[1:])
