"""What is installed: a wheel with the packages and nothing else, which works by itself in an empty folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("fl_core", "diagnostics", "fedlayers")


def told(*command, cwd):
    """What a command prints, of an environment that knows no checkout."""
    unknown = ("PYTHONPATH", "FEDLAYERS_DATA_ROOT")
    env = {name: value for name, value in os.environ.items() if name not in unknown}
    words = [str(word) for word in command]
    return subprocess.check_output(words, cwd=cwd, env=env, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that is built of the sdist that is built of the checkout."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package,
            source / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for beside in (
        "figures",
        "tests",
        "notebooks",
        "benchmarks",
    ):  # what a checkout has and an installation has not
        (source / beside).mkdir()
        (source / beside / "__init__.py").touch()
    told(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        folder / "dist",
        source,
        cwd=folder,
    )
    assert len(list((folder / "dist").glob("*.tar.gz"))) == 1
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A fresh environment that holds the wheel; what that depends on is lent by this one."""
    folder = tmp_path_factory.mktemp("environment")
    told(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    here = told(
        python,
        "-c",
        "import sysconfig; print(sysconfig.get_path('purelib'))",
        cwd=folder,
    ).strip()
    lent = [path for path in sys.path if path.endswith("site-packages")]
    Path(here, "lent.pth").write_text("\n".join(lent) + "\n")
    told(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        wheel,
        cwd=folder,
    )
    return folder / "bin"


def test_a_wheel_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert tops == set(PACKAGES)
    for package in PACKAGES:
        there = (ROOT / package).rglob("*.*")
        expected = {
            str(path.relative_to(ROOT)) for path in there if path.suffix != ".pyc"
        }
        assert {name for name in names if name.startswith(f"{package}/")} == expected


SMOKE = """
import diagnostics, fedlayers as fl
from diagnostics.report import Report
assert Report is fl.Report
assert all(getattr(fl, name) for name in fl.__all__)
print(fl.__file__)
"""


def test_an_installation_works_in_an_empty_folder(installed, tmp_path):
    assert str(ROOT) not in told(installed / "python", "-c", SMOKE, cwd=tmp_path)
    table = "fl_core/data/named/heart.csv --label-column num --impute median"
    for line, printed in (
        ("--help", "  choose    "),
        ("run --algorithm playerfl --rounds 2 --out run", "2 rounds of playerfl"),
        ("verify run", "all files are unchanged"),
        (f"check {table}", "hospital"),
    ):
        words = line.split()
        assert printed in told(installed / "fedlayers", *words, cwd=tmp_path), line


@pytest.mark.slow
def test_an_installation_shows_the_demo(installed, tmp_path):
    printed = told(installed / "fedlayers", "demo", cwd=tmp_path)
    for words in ("Share all layers.", "Keep fc3 local", "Do not federate"):
        assert words in printed
