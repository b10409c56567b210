"""A federation on this machine: superlink and sites as real processes on 127.0.0.1, which end with this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from fedlayers.remote import keys
from fl_core.errors import RunError

PATIENCE = 300.0
"""Seconds until a process must report that it is ready."""


class Local:
    """The processes of one federation, with keys, logs and states in one folder.

    Args:
        folder: new or empty.
        sites: names.
        memory: the superlink keeps its messages in memory; it then cannot be restarted.
        hosts: names under which sites reach the superlink.
    """

    def __init__(
        self, folder: Path, sites: Sequence[str], memory: bool = True, hosts: Sequence[str] = ("127.0.0.1",)
    ) -> None:
        self.folder, self.names, self.memory = folder.absolute(), tuple(sites), memory
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.place = "127.0.0.1:0"
        keys.make(self.folder / "keys", hosts, sites)

    def __enter__(self) -> Local:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def server_keys(self) -> Path:
        """The folder for ``fedlayers federation run --keys``."""
        return self.folder / "keys" / "server"

    def site_keys(self, name: str) -> Path:
        """Return the folder of keys for a site."""
        return self.folder / "keys" / "sites" / name

    def start_superlink(self) -> str:
        """Start the superlink, at its former address if it has one. Return host:port."""
        flags = ["--port", self.place.rpartition(":")[2], *(["--memory"] if self.memory else [])]
        self.start("superlink", [*FEDLAYERS, "federation", "superlink", str(self.server_keys), *flags])
        line = self.until("superlink", "superlink on https://")
        self.place = line.split("https://")[1].split()[0]
        return self.place

    def connection(self, name: str) -> str:
        """Return the table ``[connection]`` of a site's file, valid in any folder."""
        files = {"ca": self.site_keys(name) / "ca.crt", "key": self.site_keys(name) / "key"}
        lines = [f'superlink = "{self.place}"', *(f"{key} = {json.dumps(str(file))}" for key, file in files.items())]
        return "\n".join(["[connection]", *lines, ""])

    def start_site(self, name: str, command: Sequence[str], wait: bool = True) -> None:
        """Start a site with its command, and wait until it is connected."""
        self.start(name, command)
        if wait:
            self.until(name, "is connected to")

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a process whose output goes to ``NAME.log``."""
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                start_new_session=True,  # Ctrl-C ends this process, which ends the others in order
            )

    def log(self, name: str) -> str:
        """Return the output of a process."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def until(self, name: str, said: str, patience: float = PATIENCE) -> str:
        """Wait until a process prints a text. Return the line.

        Raises:
            RunError: the process ended first, or printed no such line in time.
        """
        end = time.monotonic() + patience
        while time.monotonic() < end:
            ended = self.processes[name].poll() is not None
            found = [line for line in self.log(name).splitlines() if said in line]
            if found:
                return found[-1]
            if ended:
                raise RunError(f"{name} ended: {self.log(name).strip()[-500:] or 'its log is empty'}")
            time.sleep(0.1)
        raise RunError(f"{name} must log {said!r} within {patience:g} s; got: {self.log(name).strip()[-500:]}")

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End a process, by default at once, and wait until it has ended."""
        process = self.processes.pop(name)
        process.send_signal(how)
        process.wait()

    def close(self) -> None:
        """End all processes: first the sites, which say goodbye, then the superlink."""
        last = self.processes.pop("superlink", None)
        _end(list(self.processes.values()))
        _end([last] if last else [])
        self.processes.clear()


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


FEDLAYERS = (sys.executable, "-m", "fedlayers")
"""The command ``fedlayers`` of this Python."""
