"""Workers, a run in two parts and sites give the bits of the table of digests; stacks give them up to rounding.

``make test`` has each way for a part of the runs of the table, by turns; ``-m slow`` has the rest.
"""

import numpy as np
import pytest

from fedlayers.flower.server_app import UNUSED, ServerFile, federate
from fl_core import tree
from fl_core.rounds.batched import BatchedClients, stacks
from fl_core.rounds.recorder import Recorder
from fl_core.rounds.workers import Workers
from fl_core.run import runner
from tests.conftest import CONFIG, TOY, client_runner_of, every_other, network, samples
from tests.fedlayers.flower.grid import LocalGrid
from tests.identities.digests import OWN, config_for, digests, played, stored

STORED = stored()[0]["runs"]


@pytest.fixture(scope="module")
def workers():
    """Two processes for all runs, since new ones start slowly."""

    class Shared(Workers):
        def close(self):
            """Stay for the next run."""

    task = runner.assemble(CONFIG, data=TOY, model=network("plain"))
    pool = Shared(client_runner_of(task), 2)
    yield pool
    Workers.close(pool)


@pytest.mark.parametrize("run", every_other(STORED, 9, of=12))
def test_workers(run, workers):
    def shared(client_runner):
        workers.serve(client_runner)
        return workers

    assert digests(played(run, shared)) == STORED[run]


@pytest.mark.parametrize("run", every_other(STORED, 3, of=12))
def test_two_parts(run, tmp_path):
    out = tmp_path / "run"
    runner.run(config_for(run), out, until=1, **OWN)
    assert digests(runner.resume(out, **OWN), out) == STORED[run]


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """Return the site files of the four clients, each with its own samples."""
    folder, source = tmp_path_factory.mktemp("sites"), samples()
    files = [folder / f"{name}.toml" for name in source.owner_names]
    for k, file in enumerate(files):
        of_site = source.owner == k
        np.savez(file.with_suffix(".npz"), x=source.x[of_site], y=source.y[of_site])
        file.write_text(f'name = "{file.stem}"\npath = "{file.stem}.npz"\n')
    return files


@pytest.mark.parametrize("run", every_other(STORED, 11, of=12))
def test_sites(run, sites, tmp_path):
    keys = config_for(run).to_json()
    keys = {key: keys[key] for key in keys.keys() - UNUSED}
    file = ServerFile(str(tmp_path / "run"), len(sites), config=keys)
    result = federate(LocalGrid(sites), file)
    assert digests(result.engine, tmp_path / "run") == STORED[run]


@pytest.mark.parametrize("run", every_other(STORED, 1, of=12))
def test_stacks(run):
    """Sums of a stack round in another order. What is no perceptron is not stacked."""
    stacked, alone = played(run, BatchedClients), played(run)
    if not stacks(runner.assemble(config_for(run), data=TOY).model, "cpu"):
        assert digests(stacked) == STORED[run]
    models = (engine.server.trees["model"] for engine in (stacked, alone))
    assert tree.distance(*models) == pytest.approx(0, abs=1e-4)
    rows = (engine.listener(Recorder).rows for engine in (stacked, alone))
    for ours, theirs in zip(*rows, strict=True):
        assert ours | {"value": 0} == theirs | {"value": 0}
        assert ours["value"] == pytest.approx(theirs["value"], rel=1e-4, abs=1e-5)
