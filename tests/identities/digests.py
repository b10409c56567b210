"""Digests of small runs of every algorithm: the server's model, the rows and the plan.

They show that a change of structure or of names changes no bit. Write the table with
``python -m tests.identities.digests``; a change that means to alter bits does so in a commit of its own.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fl_core import tree
from fl_core.algorithms import find, registry
from fl_core.config import RunConfig
from fl_core.engine import Engine
from tests.conftest import BLOCKS, CONFIG

TABLE = Path(__file__).with_name("digests.json")
TEN = (
    "fedavg", "fedprox", "scaffold", "fedper", "fedrep", "ditto", "pfedme", "fedpft", "fedamp", "playerfl",
)  # fmt: skip
"""Algorithms that also run with workers, after a pause, and over sites."""


def config_for(name: str, **changes: Any) -> RunConfig:
    """Return the configuration of an algorithm's small run."""
    config = replace(CONFIG, rounds=2, participation=0.75, stack="off", model="mlp", model_options={"sizes": (8, 6)})
    if find(name).needs_blocks:
        config = replace(config, model="vit", model_options=BLOCKS["vit"])
    return replace(config, algorithm=name, **changes)


def digests(engine: Engine, rows: Path | None = None) -> dict[str, str]:
    """Return the digests of a finished run; its rows are the engine's, or those of a file."""
    lines = engine.rows if rows is None else [json.loads(line) for line in rows.read_text("utf-8").splitlines()[1:]]
    trees = {name: tree.digest(each) for name, each in engine.server.trees.items()}
    plan = engine.algorithm.plan
    found = {"server": trees, "rows": [_values(row) for row in lines], "plan": plan.digest if plan else ""}
    return {name: _digest(value) for name, value in found.items()}


def machine() -> dict[str, str]:
    """Return what the bits depend on: the processor's instructions, and the bits of a fixed computation."""
    return {"cpu": torch.backends.cpu.get_cpu_capability(), "machine": platform.machine(), "torch": _probe()}


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the run's random name, and write each number with all its digits."""
    return {key: repr(value) if isinstance(value, float) else value for key, value in row.items() if key != "run"}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _probe() -> str:
    """Return the digest of a small training in plain PyTorch."""
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(40, 1, 6, 6), torch.arange(40) % 3
    torch.random.set_rng_state(state)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return tree.digest({name: each.detach() for name, each in net.named_parameters()})[:16]


def write(runs: Iterable[tuple[str, Engine]]) -> None:
    """Write the table of all runs."""
    table = {"machine": machine(), "runs": {name: digests(engine) for name, engine in runs}}
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run every algorithm and write the table."""
    from diagnostics.measure import instruments
    from fl_core import runner
    from tests.conftest import TOY

    names = sorted(registry())
    write((name, runner.run(config_for(name), data=TOY, instruments=instruments(), progress=False)) for name in names)


if __name__ == "__main__":
    main()
