"""A stranger's files in the working directory are neither imported nor run, whatever their names are."""

import os
import subprocess
import sys
from importlib.util import find_spec
from operator import methodcaller
from pathlib import Path

import matplotlib as mpl
import pytest

from diagnostics.plots.drawing import style
from fl_core.models import token_files
from fl_core.records.store import commit
from fl_core.rounds.workers import Child

TOKENIZER = b'{"model": {"type": "BPE", "vocab": {"<pad>": 0, "a": 1}, "merges": []}}'
PACKAGES = (
    "fl_core",
    "fedlayers",
    "numpy",
    "torch",
    "tokenizers",
    "safetensors",
    "pandas",
)
LATER = ("sitecustomize", "usercustomize", "hf_xet", "cupy", "jax")
"""Modules that are imported where they are found."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory: it has a module of each name, which leaves its name in the folder of marks."""
    folder = tmp_path / "stranger"
    folder.mkdir()
    (tmp_path / "marks").mkdir()
    for name in sys.stdlib_module_names.union(PACKAGES, LATER):
        mark = tmp_path / "marks" / name
        (folder / f"{name}.py").write_text(
            f"open({str(mark)!r}, 'w')\nraise SystemExit\n"
        )
    monkeypatch.chdir(folder)
    return folder


def marks(folder):
    return sorted(path.name for path in (folder.parent / "marks").iterdir())


@pytest.mark.skipif(
    find_spec("tokenizers") is None, reason="tokenizers is not installed"
)
@pytest.mark.parametrize("place", ["working directory", "path", "script"])
def test_the_process_that_tries_a_tokenizer(place, folder, monkeypatch):
    if place == "path":
        monkeypatch.setattr(sys, "path", ["", str(folder), *sys.path])
    if place == "script":
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
        monkeypatch.setattr(
            sys.modules["__main__"], "__file__", str(folder / "run.py"), raising=False
        )
        monkeypatch.chdir("/")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    token_files._facts.cache_clear()
    found = token_files.facts(TOKENIZER)
    assert found == {"tokens": 2, "pad": 0, "length": token_files.LENGTH}
    assert marks(folder) == []


def test_a_worker_process(folder):
    child = Child(methodcaller("sendall", b"1"), {})
    assert child.link.recv(1) == b"1"
    assert child.end(20) == 0
    assert marks(folder) == []
    assert "PYTHONSAFEPATH" not in os.environ


def git(*command):
    names = ("user.name=a", "user.email=a@b", "init.defaultBranch=main")
    options = [part for name in names for part in ("-c", name)]
    return subprocess.run(
        ["git", *options, *command], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """The working directory: a repository whose configuration names programs for all that git does."""
    folder = tmp_path / "stranger"
    folder.mkdir()
    (tmp_path / "marks").mkdir()
    monkeypatch.chdir(folder)
    git("init", "--quiet", ".")
    (folder / "notes.txt").write_text("a")
    (folder / "other.txt").write_text("b")
    (folder / ".gitattributes").write_text(
        "notes.txt filter=a=b diff=x\nother.txt filter=long\n"
    )
    git("add", "--all")
    git("commit", "--quiet", "--message", "first")

    def program(name):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\ntouch {tmp_path}/marks/{name}\ncat\n")
        path.chmod(0o755)
        return str(path)

    for key in (
        *(
            "core.fsmonitor",
            "filter.a=b.clean",
            "filter.a=b.smudge",
            "filter.long.process",
        ),
        *(
            "diff.external",
            "diff.x.textconv",
            "diff.x.command",
            "core.pager",
            "core.sshCommand",
        ),
        *("core.editor", "core.askPass", "remote.origin.uploadpack", "core.gitProxy"),
    ):
        git("config", key, program(key.replace("=", "")))
    for name in ("post-index-change", "fsmonitor-watchman", "reference-transaction"):
        (folder / ".git/hooks").mkdir(exist_ok=True)
        Path(program(name)).rename(folder / ".git/hooks" / name)
    git("config", "remote.origin.url", str(folder))
    git("config", "remote.origin.promisor", "true")
    git("config", "extensions.partialClone", "origin")
    git("config", "core.repositoryFormatVersion", "1")
    return folder


def later(folder):
    """Touch the files: git must compare what they contain."""
    for name in ("notes.txt", "other.txt"):
        os.utime(folder / name, (1, 1))
    for path in (folder.parent / "marks").iterdir():
        path.unlink()


def test_the_commit_of_a_stranger_s_repository(repository):
    head = git("rev-parse", "HEAD")
    later(repository)
    assert commit() == head
    (repository / "notes.txt").write_text("changed")
    later(repository)
    assert commit() == f"{head}-dirty"
    assert marks(repository) == []


def test_the_commit_of_a_repository_that_would_fetch(repository):
    head = git("rev-parse", "HEAD")
    tree = git("rev-parse", "HEAD^{tree}")
    (repository / ".git/objects" / tree[:2] / tree[2:]).unlink()
    later(repository)
    assert commit() == f"{head}-dirty"
    assert marks(repository) == []


def test_a_folder_without_a_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert commit() == ""
    git("init", "--quiet", ".")
    assert commit() == ""


def test_settings_of_pictures():
    """A folder's ``matplotlibrc`` is read by matplotlib. It must not start LaTeX."""
    with mpl.rc_context({"text.usetex": True}), style():
        assert not mpl.rcParams["text.usetex"]
