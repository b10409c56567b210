"""A site runs with the packages of site.lock and PyTorch alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("slim_site.py")
LOCK = ROOT / "site.lock"
TORCH = "torch==2.13.0"
"""The oldest version that the project takes. Of a version pip prefers a CPU build, where one is offered."""
MOST_BYTES = 1.5e9


def check(said: str) -> None:
    """Both federations have scores of each site, and a metric that needs scikit-learn was refused."""
    found = json.loads(said.splitlines()[-1])
    assert found["scores"] == [12, 12]
    assert found["measured"] > 10
    assert "'sklearn'" in found["refused"]


def test_a_site_answers_with_the_packages_of_its_lock_alone(tmp_path: Path) -> None:
    names = set(re.findall(r"^([\w.-]+)==", LOCK.read_text(), re.MULTILINE))
    builds = {each.name for each in distributions() if re.match("torch$|triton|nvidia-|cuda-", each.name)}
    packages, work = tmp_path / "packages", tmp_path / "work"
    packages.mkdir()
    work.mkdir()
    for name in names | builds:
        home = distribution(name)
        for top in {file.parts[0] for file in home.files or ()} - {"..", "__pycache__", "bin"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(home.locate_file(top))))
    words = [sys.executable, "-I", "-S", str(SCRIPT), str(ROOT), str(packages)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=work)
    assert done.returncode == 0, done.stderr
    check(done.stdout)


@pytest.mark.slow
def test_the_real_environment_of_a_site_is_small_and_works(tmp_path: Path) -> None:
    """Takes packages from the registry that pip is set up for."""
    venv.create(tmp_path / "site", with_pip=True)
    python = tmp_path / "site/bin/python"
    wheels = tmp_path / "wheels"
    words = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(ROOT)]
    subprocess.run(words, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    for what in ([TORCH], ["-r", str(LOCK)], [str(wheel)]):
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *what], check=True)
    if subprocess.run([python, "-c", "import torch; assert not torch.version.cuda"], capture_output=True).returncode:
        pytest.skip(f"pip finds no CPU build of {TORCH} here")
    assert sum(file.lstat().st_size for file in (tmp_path / "site").rglob("*")) < MOST_BYTES
    done = subprocess.run([python, "-I", str(SCRIPT)], capture_output=True, text=True, cwd=wheels)
    assert done.returncode == 0, done.stderr
    check(done.stdout)
