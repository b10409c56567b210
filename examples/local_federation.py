"""A superlink and sites as real processes on 127.0.0.1, with throw-away certificates and keys."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_core.errors import RunError

APP = Path(__file__).parents[1] / "fedlayers" / "flower" / "app"
BIN = Path(sys.executable).parent
PATIENCE = 300.0
"""Seconds until a process must print that it is ready."""


class LocalFederation:
    """The processes of one federation. They end with its block.

    Args:
        folder: new or empty, for certificates, logs and Flower's own files. sites: the TOML file of each, by name.
    """

    def __init__(self, folder: Path, sites: Mapping[str, Path]) -> None:
        self.folder, self.sites = folder.absolute(), dict(sites)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.port = free_port()
        self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> LocalFederation:
        self._make_certificates()
        home = self._home("server")
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{self.folder / "ca.crt"}"\n'
        )
        self.start_superlink()
        for name in self.sites:
            self.start_site(name)
        return self

    def __exit__(self, *error: object) -> None:
        for name in reversed(list(self.processes)):
            self.kill(name, signal.SIGTERM)

    def start_superlink(self) -> None:
        """Start the superlink. It keeps the registered key of each site in a database, for the next start."""
        own = ("ca-certfile", "ca.crt"), ("certfile", "tls.crt"), ("keyfile", "tls.key")
        files = [part for flag, name in own for part in (f"--ssl-{flag}", name)]
        known = (self.folder / "superlink.db").exists()
        place = ["--host", "127.0.0.1", "--port", str(self.port)]
        place += ["--database", "superlink.db"]
        safe = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        self.start("superlink", ["flower-superlink", *place, *safe, *files])
        self.wait_until_open(self.port)
        for name in () if known else self.sites:
            self.call(["flwr", "supernode", "register", f"{name}.key.pub", "here"])

    def start_site(self, name: str) -> None:
        """Start the supernode of a site."""
        address = ["--superlink", f"127.0.0.1:{self.port}", "--port", str(free_port())]
        key = ["--auth-supernode-private-key", f"{name}.key"]
        node = ["--node-config", f'site="{self.sites[name].absolute()}"']
        command = ["flower-supernode", "--root-certificates", "ca.crt"]
        self.start(name, [*command, *address, *key, *node])

    def restart_site(self, name: str) -> None:
        """Start the supernode of a site again after a kill, until the superlink takes it."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            self.start_site(name)
            while self.processes[name].poll() is None:
                if "SuperNode ID" in self.log(name):
                    return
                time.sleep(0.2)
        raise RunError(f"the superlink must take {name}; got: {self.log(name)[-500:]}")

    def run(self, server_file: Path) -> str:
        """Run the app with a server's file, wait for its end, and return what Flower prints."""
        return self.call(self.command(server_file))

    def command(self, server_file: Path) -> list[str]:
        """Return the command that runs the app with a server's file."""
        text = f'server="{server_file.absolute()}"'
        return ["flwr", "run", str(APP), "here", "--run-config", text, "--stream"]

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a process whose output goes to NAME.log."""
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self._environment("server" if command[0] == "flwr" else name),
                start_new_session=True,
            )

    def call(self, command: Sequence[str]) -> str:
        """Run a command of Flower to its end, and return what it prints.

        Raises:
            RunError: it failed.
        """
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            cwd=self.folder,
            env=self._environment("server"),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or "Exit Code:" in done.stdout:
            raise RunError(
                f"{' '.join(command[:3])} failed: {done.stdout}{done.stderr}"
            )
        return done.stdout

    def wait_until_open(self, port: int) -> None:
        """Wait until a process listens on a port."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.processes["superlink"].poll() is None:
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        raise RunError(
            f"the superlink must listen; got: {self.log('superlink')[-500:]}"
        )

    def log(self, name: str) -> str:
        """Return the output of a process."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End one process, and wait until it has ended."""
        process = self.processes.pop(name)
        process.send_signal(how)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _home(self, name: str) -> Path:
        return self.folder / f"{name}.flwr"

    def _environment(self, name: str) -> dict[str, str]:
        off = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        here = {
            "OMP_NUM_THREADS": "1",
            "no_proxy": "127.0.0.1",
            "NO_PROXY": "127.0.0.1",
        }
        home = {"FLWR_HOME": str(self._home(name))}
        path = {"PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
        return {**os.environ, **off, **here, **home, **path}

    def _make_certificates(self) -> None:
        """Make an authority and a certificate for 127.0.0.1 by openssl, and a key for each site by ssh-keygen."""
        new = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=throw-away"
        sign = "-addext subjectAltName=IP:127.0.0.1 -CA ca.crt -CAkey ca.key"
        commands = [
            f"{new} -keyout ca.key -out ca.crt",
            f"{new} {sign} -addext basicConstraints=CA:FALSE -keyout tls.key -out tls.crt",
            *(
                f"ssh-keygen -q -t ecdsa -b 384 -N '' -f {name}.key"
                for name in self.sites
            ),
        ]
        for command in commands:
            subprocess.run(
                command, shell=True, check=True, cwd=self.folder, capture_output=True
            )


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
