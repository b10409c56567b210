"""What Linux alone has, or not every operating system, is done without: its absence is simulated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fl_core import limits
from fl_core.errors import BusyError, CorruptError
from fl_core.execution import shared
from fl_core.execution.shared import Shared
from fl_core.storage import locks
from fl_core.storage.files import Folder

ROOT = Path(__file__).parents[2]
WITHOUT = """
import sys
sys.modules["fcntl"] = sys.modules["resource"] = None  # importing them fails
from fl_core.errors import BusyError
from fl_core.storage.files import Folder
import fl_core.limits
try:
    with Folder(sys.argv[1]).locked():
        print("free", flush=True)
        sys.stdin.read()
except BusyError as error:
    print(error)
"""


@pytest.fixture
def other(tmp_path):
    """Start another process that locks the folder, and return what it says first."""
    processes = []

    def start() -> str:
        command = [sys.executable, "-c", WITHOUT, str(tmp_path)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        processes.append(process)
        assert process.stdout is not None
        return process.stdout.readline()

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_without_fcntl_one_process_locks_a_folder(tmp_path, other, monkeypatch):
    monkeypatch.setattr(locks, "fcntl", None)
    with Folder(tmp_path).locked():
        with pytest.raises(BusyError), Folder(tmp_path).locked():
            pass
        assert "another process" in other()
    assert other() == "free\n"
    with pytest.raises(BusyError), Folder(tmp_path).locked():
        pass


def test_without_fcntl_a_lock_ends_with_its_process(tmp_path, other, monkeypatch):
    monkeypatch.setattr(locks, "fcntl", None)
    assert other() == "free\n"
    script = f"import os, signal; os.kill({(tmp_path / 'lock').read_text()}, signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert other() == "free\n"


def test_without_fcntl_a_link_is_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "fcntl", None)
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "run" / "lock.sqlite").symlink_to(tmp_path / "outside")
    with pytest.raises(CorruptError, match=r"lock\.sqlite"), Folder(tmp_path / "run").locked():
        pass


def test_without_fcntl_a_damaged_lock_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "fcntl", None)
    (tmp_path / "lock.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(CorruptError, match=r"lock\.sqlite"), Folder(tmp_path).locked():
        pass


def test_without_a_folder_in_memory_bytes_are_shared_in_a_file(tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(shared, "MEMORY", tmp_path / "nowhere")
    monkeypatch.delattr(shared.os, "posix_fallocate")
    monkeypatch.setattr(shared, "_CHUNK", 7)
    found = Shared(20)
    assert found.tensor.tolist() == [0] * 20
    found.tensor[-1] = 7
    assert torch.equal(found.tensor[-2:], torch.tensor([0, 7], dtype=torch.uint8))
    assert not recwarn.list


def test_a_system_that_does_not_tell_its_memory_refuses_no_file(monkeypatch):
    def unknown(name):
        raise ValueError(name)

    monkeypatch.setattr(limits.os, "sysconf", unknown)
    limits.check_size("data.csv", 1 << 60)
