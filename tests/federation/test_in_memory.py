"""Every algorithm over sites that keep their data and their states, against the same run in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diagnostics.measure import instruments
from fedlayers.remote import federation
from fedlayers.remote.in_memory import InMemoryTransport
from fedlayers.remote.site import Site
from fedlayers.remote.site_data import PresplitData
from fl_core import runner, tree
from fl_core.algorithms import Algorithm, AlgorithmWrapper, find, registry
from fl_core.config import RunConfig
from fl_core.data import FederatedData
from fl_core.engine import Engine
from fl_core.plan import LayerPlan
from fl_core.rows import Row
from fl_core.task import Task, assemble
from tests.conftest import BLOCKS, CONFIG, TOY, every_other

NAMES = [client.name for client in TOY.clients]
SHORT = replace(CONFIG, rounds=2, participation=0.75, stack="off", model="mlp", model_options={"sizes": (8, 6)})


def link(folder: Path, data: FederatedData = TOY, **options: Any) -> InMemoryTransport:
    return InMemoryTransport({name: Site(PresplitData(data, name), folder / name, **options) for name in NAMES})


def config_for(name: str, **changes: Any) -> RunConfig:
    config = replace(SHORT, algorithm=name, **changes)
    if find(name).needs_blocks:
        config = replace(config, model="vit", model_options=BLOCKS["vit"])
    return config


def here(config: RunConfig, out: Path | None = None) -> Engine:
    return runner.run(config, out, data=TOY, instruments=instruments(), progress=False)


def comparable(rows: list[Row]) -> list[Row]:
    return [{**row, "run": ""} for row in rows]


def server(engine: Engine) -> dict[str, str]:
    return {name: tree.digest(each) for name, each in engine.server.trees.items()}


def test_pfedsd_trains_over_sites_after_its_untrained_model(tmp_path: Path) -> None:
    config = config_for("pfedsd")
    wanted, found = here(config), federation.federate(config, link(tmp_path), progress=False)
    assert comparable(found.rows) == comparable(wanted.rows)


def observes(algorithm: type[Algorithm]) -> bool:
    """Whether an algorithm, or the one that it wraps, makes observations at its clients."""
    hooks = (Algorithm.client_observations, AlgorithmWrapper.client_observations)
    return algorithm.client_observations not in hooks


@pytest.mark.parametrize("name", every_other(sorted(registry()), of=3))
def test_every_algorithm_gives_the_same_rows_and_server_over_sites(name: str, tmp_path: Path) -> None:
    config = config_for(name)
    wanted, found = here(config), federation.federate(config, link(tmp_path), progress=False)
    assert comparable(found.rows) == comparable(wanted.rows)
    assert server(found) == server(wanted)


OBSERVING = [name for name, each in sorted(registry().items()) if observes(each)]


@pytest.mark.parametrize("name", OBSERVING)
def test_a_server_takes_what_an_algorithm_observes_at_its_clients(name: str, tmp_path: Path) -> None:
    config = config_for(name, participation=1.0, rounds=1)
    found = federation.federate(config, link(tmp_path), progress=False)
    seen = {row["metric"] for row in found.rows if row["metric"] in found.algorithm.observes}
    assert seen == set(find(name).observes)
    assert find("vanilla")(found.task_info, None, {"base": name}).observes == find(name).observes


@pytest.mark.parametrize("adapt", [None, "lora:r=2"])
def test_a_site_whose_torch_draws_other_weights_starts_from_the_server_s_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapt: str | None
) -> None:
    """Heads that an algorithm adds come from the server, too, and so does the frozen base of adapters."""
    drawn: list[str] = []

    def assembled(config: RunConfig, **rest: Any) -> Task:
        task = assemble(config, **rest)
        with torch.no_grad():
            for tensor in (*task.model.parameters(), *task.model.buffers()):
                tensor.add_(1.0)
        drawn.append(tree.digest(tree.state_dict(task.model)))
        return task

    config = config_for("fedrod", participation=1.0, adapt=adapt)
    wanted = here(config)
    monkeypatch.setattr("fedlayers.remote.joined_run.assemble", assembled)
    found = federation.federate(config, link(tmp_path), progress=False)
    assert len(drawn) == len(NAMES)
    assert tree.digest(wanted.initial) not in drawn
    assert comparable(found.rows) == comparable(wanted.rows)
    assert server(found) == server(wanted)


def test_replies_that_a_trace_loses_are_lost_over_sites_too(tmp_path: Path) -> None:
    (tmp_path / "lost.csv").write_text(f"round,client\n2,{NAMES[0]}\n2,{NAMES[1]}\n")
    config = config_for("fedper", participation=1.0, dropout_trace=str(tmp_path / "lost.csv"))
    wanted, found = here(config), federation.federate(config, link(tmp_path), progress=False)
    assert sum(row["metric"] == "reply_lost" and row["value"] == 1 for row in found.rows) == 2
    assert comparable(found.rows) == comparable(wanted.rows)
    assert server(found) == server(wanted)


def test_a_plan_that_shares_nothing_is_noted_over_sites_too(tmp_path: Path) -> None:
    plan = LayerPlan(assemble(SHORT, data=TOY).layers, ())
    with pytest.warns(UserWarning, match=r"manual.*alone"):
        federation.federate(config_for("fedper", rounds=1), link(tmp_path), plan=plan, progress=False)


def test_a_new_site_joins_with_the_shared_layers_of_a_stopped_run(tmp_path: Path) -> None:
    """Three sites train. Then the run that begins with its shared layers has four, and sends them to all."""
    config = config_for("fedper", participation=1.0)
    three = InMemoryTransport({name: Site(PresplitData(TOY, name), tmp_path / name) for name in NAMES[:3]})
    before = federation.federate(config, three, tmp_path / "run", until=1, progress=False)
    with pytest.warns(UserWarning, match="kept their own"):
        after = federation.federate(replace(config, init=str(tmp_path / "run")), link(tmp_path), progress=False)
    plan = before.algorithm.plan
    assert plan is not None
    for name in plan.body_tensors:
        assert torch.equal(after.initial[name], before.server.trees["model"][name])
    assert {row["client"] for row in after.rows if row["metric"] == "macro_f1"} == set(NAMES)
