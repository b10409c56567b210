"""Federations of the heart dataset's hospitals over real processes, as the tests of Flower share them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from examples.local_federation import FEDLAYERS, Local
from fedlayers import runs
from fl_core.config import RunConfig
from fl_core.data import load
from fl_core.records.store import Run

HOSPITALS = tuple(client.name for client in load("heart").clients)


def site_file(local: Local, name: str, more: str = "") -> Path:
    """The file of a hospital's site, with its own silo alone."""
    folder = local.folder / "sites" / name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "site.toml"
    own = f'name = "{name}"\n[data]\ndataset = "heart"\n{more}\n'
    file.write_text(own + local.connection(name))
    return file


def start_site(local: Local, name: str, wait: bool = True, module: str = "") -> None:
    """Start a hospital's site: the command, or a module of the tests that takes the same file."""
    command = [sys.executable, "-m", module] if module else [*FEDLAYERS, "federation", "site"]
    local.start_site(name, [*command, str(site_file(local, name))], wait=wait)


def start(local: Local, module: str = "") -> Local:
    """Start the superlink and all sites."""
    local.start_superlink()
    for name in local.names:
        start_site(local, name, wait=False, module=module)
    for name in local.names:
        local.until(name, "is connected to")
    return local


def server(local: Local, *flags: str, command: str = "federation run") -> list[str]:
    """The command ``fedlayers federation run``, or another that reaches the sites, with these flags."""
    return [*FEDLAYERS, *command.split(), *flags, "--superlink", local.place, "--keys", str(local.server_keys)]


def at_home(
    out: Path, names: Sequence[str], algorithm: str, rounds: int = 2, options: Mapping[str, Any] | None = None
) -> Path:
    """The run directory of ``fedlayers run --stack off`` on these hospitals alone."""
    heart = load("heart")
    data = replace(heart, clients=tuple(heart.client(name) for name in names))
    config = RunConfig(dataset="heart", algorithm=algorithm, rounds=rounds, stack="off", options=dict(options or {}))
    runs.run(config, out, data=data, progress=False)
    return out


def same(run: Path, other: Path) -> None:
    """Assert that two run directories hold the same rows and the same server, bit for bit."""
    found, expected = (Run(path).rows()[1].drop(columns="run") for path in (run, other))
    pd.testing.assert_frame_equal(found, expected, check_exact=True)
    states = [Run(path).checkpoint().server for path in (run, other)]
    assert without_digests(states[0].meta) == without_digests(states[1].meta)
    assert set(states[0].trees) == set(states[1].trees)
    for tree in states[0].trees:
        for name, tensor in states[0].trees[tree].items():
            assert tensor.equal(states[1].trees[tree][name]), f"{tree} {name}"


def without_digests(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What a server keeps, but the digest of the data in a plan: that of a federation is over its sites' digests."""
    meta = dict(meta)
    if meta.get("plan"):
        plan = {**meta["plan"], "sha256": None}
        meta["plan"] = {**plan, "why": {**plan["why"], "data": None}}
    return meta
