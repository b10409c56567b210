"""The tests read nothing of the user's shell, and start no more processes than the machine holds."""

import os
import runpy

from tests import conftest


def test_a_strange_shell_and_a_large_machine(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    workers = runpy.run_path(conftest.__file__)["pytest_xdist_auto_num_workers"]
    assert "https_proxy" not in os.environ
    for cores, gib, most in ((64, 23, 11), (4, 64, 4), (8, 1, 1)):
        sizes = {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": gib * 2**18}
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: range(n))
        monkeypatch.setattr(os, "sysconf", sizes.get)
        assert workers() == most
