"""What Linux alone has, or not every operating system, is done without: its absence is simulated."""

from fl_core import storage


def test_a_system_that_does_not_tell_its_memory_refuses_no_file(monkeypatch):
    def unknown(name):
        raise ValueError(name)

    monkeypatch.setattr(storage.os, "sysconf", unknown)
    storage.check_size("data.csv", 1 << 60)
