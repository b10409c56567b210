"""What asks or is mistaken is answered at once: which modules that takes, how long, and how much memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diagnostics.measure import diagnose_run
from fedlayers.cli.app import COMMANDS
from fedlayers.cli.options import STORED
from fl_core.config import RunConfig
from fl_core.data.named import small
from fl_core.run import runner
from tests.conftest import with_slow

HEAVY = {
    "torch",
    "sklearn",
    "pandas",
    "numpy",
    "scipy",
    "matplotlib",
    "seaborn",
    "PIL",
    "safetensors",
    "timm",
}
PROBE = """
import json, sys
before, answers = set(sys.modules), []
for words in {lines!r}:
    sys.argv = ["fedlayers", *words.split()]
    try:
        {code}
        status = 0
    except SystemExit as end:
        status = end.code or 0
    roots = {{name.partition(".")[0] for name in set(sys.modules) - before}}
    answers.append([status, sorted(roots - set(sys.stdlib_module_names))])
print("\\n" + json.dumps(answers))
"""
MAIN = "from fedlayers.cli.app import main; main()"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, with the rows of a diagnosis next to it."""
    path = tmp_path_factory.mktemp("startup") / "run"
    runner.run(RunConfig(rounds=1), path, progress=False)
    diagnose_run(path, ["weight_magnitude"]).write(path.with_name("rows.jsonl"))
    return path


def loaded(*lines, code=MAIN, cwd):
    """The exit code of each command, and the top-level modules from elsewhere that one process has by then."""
    script = PROBE.format(lines=lines or ("",), code=code)
    command = [sys.executable, "-c", script]
    printed = subprocess.check_output(command, text=True, cwd=cwd)
    answers = json.loads(printed.splitlines()[-1])
    return [(status, set(modules)) for status, modules in answers]


def test_help_and_the_package_import_nothing_but_this(tmp_path):
    modules = loaded("", "--help", "runn", cwd=tmp_path)
    code = "import fedlayers as fl; dir(fl); fl.RunConfig(rounds=3); fl.__version__"
    modules += loaded(code=code, cwd=tmp_path)
    assert modules == [(code, {"fedlayers", "fl_core"}) for code in (0, 0, 2, 0)]


FITS = {"matplotlib", "seaborn", "sklearn", "scipy", "timm", "triton"}
"""What draws, fits and compiles."""
TABLE = Path(small.__file__).with_name("heart.csv")
CASES = {
    "a table": (
        [f"check {TABLE} --client-column hospital --label-column num --impute mean"],
        0,
        HEAVY - {"numpy", "pandas"},
    ),
    "help": (
        [f"{name} --help" for name in ("run", "choose", "diagnose")],
        0,
        {*HEAVY, "typeguard"},
    ),
    "a run": (["run --rounds 1"], 0, FITS),
    "a diagnosis": (["diagnose {run}"], 0, FITS | {"sympy"}),
    "lists": ([f"list {what}" for what in json.loads(STORED.read_text())], 0, HEAVY),
    "digests": (["verify {run}"], 0, HEAVY - {"safetensors"}),
    "rows": (["runs {run}", "plot {run}"], 0, {"torch"}),
    "a diagnosis's rows": (["plot {run}/../rows.jsonl"], 0, {"timm", "triton"}),
    "mistakes": (
        [
            *(f"{name}{' x' * (name == 'list')} --unknown-flag" for name in COMMANDS),
            "list metric",
            "run --loss focall",
            "resume nowhere",
            "run --rounds 0",
            "compare --seeds 0",
        ],
        2,
        HEAVY,
    ),
}
"""What is asked -> commands, their exit code, and modules that none of them imports."""


@pytest.mark.parametrize(
    "what", with_slow(CASES, ("a diagnosis", "a diagnosis's rows"))
)
def test_a_command_imports_no_more_than_it_needs(what, tmp_path, run):
    lines, code, never = CASES[what]
    imported = loaded(*(line.format(run=run) for line in lines), cwd=tmp_path)
    for line, (status, modules) in zip(lines, imported, strict=True):
        assert status == code, line
        assert not modules & never, line


def test_what_draws_and_fits_is_not_imported_before_a_study_s_first_lines(tmp_path):
    [(status, modules)] = loaded(code="import fedlayers.decision.study", cwd=tmp_path)
    assert not status
    assert not modules & FITS
