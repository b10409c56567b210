"""What asks or is mistaken is answered at once: which modules that takes, how long, and how much memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from fedlayers.cli.main import COMMANDS
from fl_core import runner
from fl_core.config import RunConfig
from tests.conftest import every_other

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
TIMES_PASS = 15  # of the CPU time of an empty program; measured beside it: about 3
PEAK = 80 * 2**20
PROBE = """
import json, sys
before = set(sys.modules)
sys.argv = ["fedlayers", *{words!r}]
try:
    {code}
except SystemExit as end:
    code = end.code or 0
else:
    code = 0
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print("\\n" + json.dumps([code, sorted(loaded - set(sys.stdlib_module_names))]))
"""
MAIN = "from fedlayers.cli.main import main; main()"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run."""
    path = tmp_path_factory.mktemp("startup") / "run"
    runner.run(RunConfig(rounds=1), path, progress=False)
    return path


def loaded(*words: str, code: str = MAIN, cwd: Path) -> tuple[int, set[str]]:
    """The exit code of a command, and the top-level modules outside the standard library that it imported."""
    script = PROBE.format(words=words, code=code)
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        cwd=cwd,
    )
    status, modules = json.loads(done.stdout.splitlines()[-1])
    return status, set(modules)


def test_help_imports_nothing_but_this(tmp_path):
    assert loaded("--help", cwd=tmp_path) == (0, {"fedlayers", "fl_core"})
    assert loaded(cwd=tmp_path) == (0, {"fedlayers", "fl_core"})
    assert loaded("runn", cwd=tmp_path) == (2, {"fedlayers", "fl_core"})


def test_importing_the_package_imports_nothing_but_this(tmp_path):
    code = "import fedlayers as fl; dir(fl)"
    assert loaded(code=code, cwd=tmp_path) == (0, {"fedlayers", "fl_core"})
    code = "import fedlayers as fl; fl.RunConfig(rounds=3); fl.__version__"
    assert loaded(code=code, cwd=tmp_path) == (0, {"fedlayers", "fl_core"})


def test_help_of_a_command_needs_nothing_heavy(tmp_path):
    for name in ("run", "choose", "diagnose"):
        status, modules = loaded(name, "--help", cwd=tmp_path)
        assert status == 0
        assert not modules & {*HEAVY, "typeguard"}


@pytest.mark.parametrize("name", every_other(COMMANDS))
def test_unknown_flags_need_nothing_heavy(tmp_path, name):
    status, modules = loaded(
        *name.split(), *["x"] * (name == "list"), "--unknown-flag", cwd=tmp_path
    )
    assert status == 2
    assert not modules & HEAVY


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("list metric", 2),
        ("run --loss focall", 2),
        ("run --model own.py", 2),
        ("resume nowhere", 2),
        ("run --rounds 0", 2),
        ("compare --seeds 0", 2),
    ],
)
def test_wrong_words_need_nothing_heavy(tmp_path, line, status):
    code, modules = loaded(*line.split(), cwd=tmp_path)
    assert code == status
    assert not modules & HEAVY


def test_verify_needs_nothing_that_trains(tmp_path, run):
    status, modules = loaded("verify", str(run), cwd=tmp_path)
    assert status == 0
    assert modules & HEAVY == {"safetensors"}


def test_what_draws_and_fits_is_not_imported_before_a_study_s_first_lines(tmp_path):
    status, modules = loaded(code="import fedlayers.studies.study", cwd=tmp_path)
    assert status == 0
    assert not modules & {"matplotlib", "seaborn", "sklearn", "scipy", "timm"}


MEASURED = """
import resource, subprocess, sys
done = subprocess.run([sys.executable, *sys.argv[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
assert done.returncode in (0, 2), done
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
"""


def usage(*words: str) -> tuple[float, float]:
    """CPU seconds and peak bytes of a Python process, started by a small one: a child's peak begins at its parent's."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *words],
        check=True,
        capture_output=True,
        text=True,
    )
    seconds, peak = map(float, done.stdout.split())
    return seconds, peak


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "fedlayers", "--help"),
        ("-c", "import fedlayers"),
        ("-m", "fedlayers", "verify", "RUN"),
        ("-m", "fedlayers", "runn"),
    ],
)
def test_what_only_asks_or_is_mistaken_is_cheap(words, run):
    words = [str(run) if word == "RUN" else word for word in words]
    pairs = [(usage(*words), usage("-c", "pass")) for _ in range(3)]
    assert median(asked[0] for asked, _ in pairs) < TIMES_PASS * median(
        empty[0] for _, empty in pairs
    )
    assert max(asked[1] for asked, _ in pairs) < PEAK
