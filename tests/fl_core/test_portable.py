"""What Linux alone has, or not every operating system, is done without: its absence is simulated."""

from __future__ import annotations

import torch

from fl_core import limits
from fl_core.execution import shared_memory
from fl_core.execution.shared_memory import SharedBlock


def test_without_a_folder_in_memory_bytes_are_shared_in_a_file(
    tmp_path, monkeypatch, recwarn
):
    monkeypatch.setattr(shared_memory, "MEMORY", tmp_path / "nowhere")
    monkeypatch.delattr(shared_memory.os, "posix_fallocate")
    monkeypatch.setattr(shared_memory, "_CHUNK", 7)
    found = SharedBlock(20)
    assert found.tensor.tolist() == [0] * 20
    found.tensor[-1] = 7
    assert torch.equal(found.tensor[-2:], torch.tensor([0, 7], dtype=torch.uint8))
    assert not recwarn.list


def test_a_system_that_does_not_tell_its_memory_refuses_no_file(monkeypatch):
    def unknown(name):
        raise ValueError(name)

    monkeypatch.setattr(limits.os, "sysconf", unknown)
    limits.check_size("data.csv", 1 << 60)
