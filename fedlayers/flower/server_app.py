"""The ServerApp: an ordinary run whose clients are at the sites of a grid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedlayers.cli.runs import print_result
from fedlayers.flower.clients import SiteClients, Sites
from fedlayers.flower.federation import federated
from fedlayers.flower.packets import read_keys
from fedlayers.run_result import RunResult
from fedlayers.runs import resume, run
from fl_core import runner
from fl_core.client_runner import ClientRunner
from fl_core.clients import Executor
from fl_core.config import RunConfig
from fl_core.errors import UsageError
from fl_core.task import Task

RUN_KEY = "server"
"""The key of the run config that names the server's TOML file."""
app = ServerApp()


@dataclass(frozen=True)
class ServerFile:
    """The keys of the server's TOML file."""

    out: str
    """The run directory. If a run is there, it continues."""
    sites: int
    """Sites to wait for."""
    timeout: float | None = None
    """Seconds to wait for the replies of a stage. Default: for ever."""
    min_sites: int = 1
    """Replies without which a stage ends the run."""
    config: dict[str, Any] | None = None
    """The run's configuration: keys of fl.RunConfig, apart from those about data."""


@contextmanager
def clients_at(sites: Sites) -> Iterator[None]:
    """Let the clients of every run in the block be at sites."""

    def make(
        task: Task, run: str, client_runner: ClientRunner, pool: Executor
    ) -> SiteClients:
        clients = SiteClients(sites, task, run or uuid4().hex)
        clients.join(sites.common(task.config.execution.seed))
        return clients

    token = runner.CLIENTS.set(make)
    try:
        yield
    finally:
        runner.CLIENTS.reset(token)


def federate(grid: Grid, file: ServerFile) -> RunResult:
    """Do what the server's file says over the sites of a grid.

    The run saves in every round, because a site keeps a client's states of two rounds only.
    """
    out = Path(file.out)
    config = RunConfig(**(file.config or {})).with_keys(checkpoint_every=1, stack="off")
    if config.training.class_weights == "balanced":
        raise UsageError(
            "class_weights must be numbers over sites; got balanced. Give one for each class."
        )
    sites = Sites(grid, file.sites, file.timeout, file.min_sites)
    sites.connect()
    data = federated(sites.common(config.execution.seed))
    with clients_at(sites):
        if (out / "config.json").exists():
            result = resume(out, data=data, progress=False)
        else:
            result = run(config, out, data=data, progress=False)
    print_result(result.engine, out)
    return result


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the run config names. An error is one line."""
    try:
        path = Path(str(context.run_config.get(RUN_KEY, "")))
        federate(grid, read_keys(path.absolute(), ServerFile))
    except (UsageError, RuntimeError, OSError) as error:
        raise SystemExit(f"fedlayers: {error}") from error
