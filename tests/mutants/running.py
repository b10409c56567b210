"""Run mutants in a copy of the tree, and find the tests that reach them."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import cache_from_source
from itertools import accumulate
from pathlib import Path
from queue import Queue

from tests.mutants.changes import PACKAGES, Mutant, span

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).with_name("mutants.json")
LIMIT = 600
"""Seconds after which a mutant's tests are stopped."""
MOST_SECONDS = 10.0
"""Seconds that the chosen tests of a mutant may take together; one test is always chosen."""
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "out", "dist", "*.egg-info")
SLOW = (
    "tests/benchmarks/",
    "tests/docs/",
    "tests/examples/",
    "tests/faults/",
    "tests/figures/",
    "tests/notebooks/",
)
"""Tests that are not searched for those that reach a mutant."""
EXAMPLES = "tests/fedlayers/test_examples.py::test_examples_do_what_they_show"
REPORT = """
import os
seen = set()
def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("[")[0].partition(" (")[0]
    if test and (number, test) not in seen:
        seen.add((number, test))
        with open({path!r}, "a") as file:
            print(number, test, sep="\\t", file=file)
"""


@contextmanager
def copied_tree():
    """Give a copy of the tree without its environment; mutants are made there alone."""
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        yield copy


def pytest(tree, *arguments, limit=LIMIT):
    """Run pytest in a tree; return its exit code, or -1 if it took too long, and what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return -1, ""
    return done.returncode, done.stdout


def write(path, source):
    """Write a module, and remove its compiled file: the old one may have the same size and time."""
    path.write_text(source, encoding="utf-8")
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def exists(test, tree):
    """Tell whether a tree has a test, whatever its case in brackets."""
    file, _, name = test.partition("[")[0].partition("::")
    path = tree / file
    return path.is_file() and f"def {name.rpartition('::')[2]}(" in path.read_text(
        encoding="utf-8"
    )


def run(mutant, tree):
    """Return a mutant's state, and the test that failed.

    A mutant is killed or survived. It is gone if its code is no longer there, and untested if none of its tests is.
    It is stopped if its tests took too long or were ended from outside: that shows nothing. Its file is where its code
    stands today.
    """
    place = mutant.find(tree)
    if place is None:
        return "gone", ""
    tests = [test for test in mutant.tests if exists(test, tree)]
    if not tests:
        return "untested", ""
    path, source, function = place
    mutant.file = path.relative_to(tree).as_posix()
    if ">>> " in source:
        module = mutant.file.removesuffix(".py").replace("/", ".")
        tests.append(f"{EXAMPLES}[{module}]")
    write(path, mutant.applied(source, function))
    try:
        code, output = pytest(tree, "-x", *tests)
    finally:
        write(path, source)
    if code < 0:
        return "stopped", ""
    failed = re.search(r"^FAILED (.+?)(?: - |$)", output, re.M)
    return (
        ("survived", "") if code == 0 else ("killed", failed[1] if failed else tests[0])
    )


def run_all(mutants, trees):
    """Run mutants, one a tree at a time, and set their states; return whether none lives that was killed before.

    Such a mutant stays "killed", so that every run names it until a test kills it again.

    Raises:
        RuntimeError: a test that kills a mutant also fails without it.
    """
    free = Queue()
    for tree in trees:
        free.put(tree)

    def one(mutant):
        tree = free.get()
        try:
            return run(mutant, tree)
        finally:
            free.put(tree)

    killers = set()
    states = Counter()
    alive = 0
    with ThreadPoolExecutor(len(trees)) as pool:
        for mutant, (state, test) in zip(mutants, pool.map(one, mutants), strict=True):
            killers |= {test} - {""}
            states[mutant.file.partition("/")[0], state] += 1
            note = ""
            if mutant.state == "killed" and state not in ("killed", "gone"):
                alive, note = alive + 1, ", was killed before"
            else:
                mutant.state = state
            print(
                f"{state}{note}: {mutant.file} {mutant.function}: {mutant.old} -> {mutant.new}",
                flush=True,
            )
    code, output = (
        pytest(trees[0], *sorted(killers), limit=None) if killers else (0, "")
    )
    if code:
        raise RuntimeError(f"tests must pass without mutants; got\n{output[-2000:]}")
    for package in PACKAGES:
        print(
            f"{package:12} "
            + ", ".join(
                f"{n} {state}"
                for (of, state), n in sorted(states.items())
                if of == package
            )
        )
    return not alive


def likely(mutant, tree, most=2):
    """Return the test files that most likely reach a mutant: they are named as its module, or name its function."""
    module = Path(mutant.file).stem
    scores = {}
    for path in sorted((tree / "tests").rglob("test_*.py")):
        file, words = (
            path.relative_to(tree).as_posix(),
            set(re.findall(r"\w+", path.read_text(encoding="utf-8"))),
        )
        score = len(words & {module, *mutant.function.split(".")}) + 2 * (
            path.stem == f"test_{module}"
        )
        if score and not file.startswith(SLOW):
            scores[file] = score
    return sorted(scores, key=lambda file: -scores[file])[:most]


def reach(mutants, tree):
    """Set for each mutant the tests that reach its function: those of its module first, then the quickest.

    A statement at the top of each function reports the running test, also from processes that the test starts.
    """
    reports = tree / "reached.tsv"
    reports.touch()
    (tree / "mutants_reached.py").write_text(REPORT.format(path=str(reports)))
    files = set()
    for number, mutant in enumerate(mutants):
        place = mutant.find(tree)
        if place is not None:
            path, source, function = place
            write(
                path,
                with_call(
                    source, function, f"__import__('mutants_reached').hit({number})"
                ),
            )
            files |= set(likely(mutant, tree))
    _, output = pytest(
        tree, "-n", "2", "--durations=0", "-vv", *sorted(files), limit=None
    )
    seconds = defaultdict(float)
    for duration, test in re.findall(r"^([\d.]+)s \w+ +([^\s\[]+)", output, re.M):
        seconds[test] += float(duration)
    lines = sorted(set(reports.read_text().splitlines()))
    for number, mutant in enumerate(mutants):
        tests = [
            test
            for key, _, test in (line.partition("\t") for line in lines)
            if int(key) == number
        ]
        tests.sort(
            key=lambda test: (
                f"/test_{Path(mutant.file).stem}." not in test,
                seconds[test],
            )
        )
        sums = accumulate(seconds[test] for test in tests)
        mutant.tests = [
            test
            for test, total in zip(tests, sums, strict=True)
            if total <= MOST_SECONDS
        ] or tests[:1]


def with_call(source, function, call):
    """Return a source with a call at the top of a function, after its docstring."""
    body = function.body[ast.get_docstring(function) is not None :] or function.body
    first = span(source, body[0])[0]
    indent = source[source.rfind("\n", 0, first) + 1 : first]
    return (
        source[:first]
        + call
        + ("; " if indent.strip() else f"\n{indent}")
        + source[first:]
    )


def load():
    """Return the stored mutants."""
    return [Mutant(**entry) for entry in json.loads(STORED.read_text(encoding="utf-8"))]


def store(mutants):
    """Write the list of mutants with their states."""
    STORED.write_text(
        json.dumps([asdict(mutant) for mutant in mutants], indent=1) + "\n",
        encoding="utf-8",
    )
