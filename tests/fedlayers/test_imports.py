"""Imports go down only, and in no circle."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORDER = ("fl_core", "diagnostics", "fedlayers", "figures", "notebooks")
"""From the bottom up."""


def modules():
    """Return all modules of the packages by name."""
    trees = {}
    for package in ORDER:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            trees[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return trees


MODULES = modules()


@cache
def imported(module):
    """Return the modules that a module imports: at once, within functions, or for types."""
    targets = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = (
                module.split(".")
                if MODULES[module].name == "__init__.py"
                else module.split(".")[:-1]
            )
            base = package[: len(package) - node.level + 1] if node.level else []
            home = ".".join([*base, *filter(None, [node.module])])
            names = [f"{home}.{alias.name}" for alias in node.names]
            targets |= {
                name if name in MODULES else home for name in names
            }  # a submodule, or what a module defines
    return {name for name in targets if name in MODULES} - {module}


ROOMS = {
    "fl_core": (
        "display errors seeds",
        "buffers formats kinds progress registry rows statistics storage",
        "tree",
        "layers plan",
        "models",
        "data",
        "config keys",
        "training",
        "algorithms",
        "records",
        "rounds",
        "run",
    ),
    "diagnostics": (
        "measurement",
        "curvature label_shift layer_work load_weights null representation tuning",
        "gradients",
        "sensitivity",
        "metrics",
        "curve request",
        "inputs plots",
        "regret report",
        "diagnosis select",
        "cross_scores groups report_page",
        "measure",
        "through_time",
    ),
    "fedlayers": (
        "backends monitor run_result runs",
        "decision rule_benchmark",
        "cli flower",
    ),
}
"""Rooms of each package from the bottom up: a room imports rooms of its own floor and below, never from above."""


def test_the_page_on_the_code_has_these_floors():
    page = (ROOT / "docs/code.md").read_text(encoding="utf-8")
    for package, floors in ROOMS.items():
        _, _, table = page.partition(f"| floor | rooms of `{package}` |")
        rows = re.findall(r"(?m)^\| (\d+) \| (.+?) \|", table.partition("\n\n")[0])
        rooms = {int(floor): {*re.findall(r"`(\w+)/?`", cell)} for floor, cell in rows}
        assert rooms == {k: {*names.split()} for k, names in enumerate(floors, 1)}


def room(module):
    """Return the folder or module right below the package; an empty text for the package itself."""
    return ".".join(module.split(".")[1:2])


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_downwards_only(package):
    """Imports within functions count as well, and those for types."""
    floors = {
        name: floor
        for floor, names in enumerate(ROOMS[package])
        for name in names.split()
    }
    package_modules = [
        module
        for module in MODULES
        if module.partition(".")[0] == package and room(module) != "__main__"
    ]
    assert {room(module) for module in package_modules} - {""} == set(floors)
    upward = [
        f"{module} imports {target}"
        for module in package_modules
        if room(module)
        for target in imported(module)
        if target.partition(".")[0] == package and room(target)
        if floors[room(target)] > floors[room(module)]
    ]
    assert not upward


@pytest.mark.parametrize("package", ORDER)
def test_imports_go_down_only(package):
    above = ORDER[ORDER.index(package) + 1 :]
    upward = [
        f"{module} imports {target}"
        for module in MODULES
        if module.partition(".")[0] == package
        for target in imported(module)
        if target.partition(".")[0] in above
    ]
    assert not upward


def test_no_circle_of_imports():
    """Imports within functions count as well, and those for types. A package's own table of names does not."""
    graph = {module: imported(module) - set(ORDER) for module in MODULES}
    done = set()

    def visit(module, path):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in sorted(MODULES):
        visit(module, ())


@pytest.mark.parametrize("package", ["fl_core", "diagnostics"])
def test_errors_name_arguments_and_no_flags(package):
    """The command line, which has the flags, writes them where it shows an error."""
    flags = [
        f"{path}: {part.value}"
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and re.search(r"--[a-z]", str(part.value))
    ]
    assert not flags


def test_the_graph_is_seen():
    """The reading finds imports of a file's head, within functions and for types."""
    assert "diagnostics.report" in imported("diagnostics.diagnosis")
    assert "fl_core.run.runner" in imported("fedlayers.runs")
    assert "fl_core.rounds.recorder" in imported("fedlayers.runs")


def test_a_run_imports_neither_a_compiler_nor_what_draws(tmp_path):
    """Training, counting and scoring do without them. They cost seconds and 100 MB; threads that wait yield a core."""
    script = """
import os, sys, fedlayers.__main__
sys.argv = ["fedlayers", "run", "--dataset", "heart", "--rounds", "1", "--out", "run"]
fedlayers.__main__.main()
print([name for name in ("torch._dynamo", "sympy", "matplotlib.pyplot", "seaborn", "sklearn", "scipy.stats")
       if name in sys.modules], os.environ["OMP_WAIT_POLICY"])
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    env.pop("OMP_WAIT_POLICY", None)
    command = [sys.executable, "-c", script]
    printed = subprocess.check_output(command, cwd=tmp_path, env=env, text=True)
    assert printed.splitlines()[-1] == "[] PASSIVE"
