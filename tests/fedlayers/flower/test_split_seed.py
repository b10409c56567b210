"""A split seed over sites: the test samples stay, as on one machine."""

import fedlayers as fl
from fedlayers.flower.clients import Sites
from fedlayers.flower.federation import federated
from fl_core.run import runner
from tests.fedlayers.flower.grid import (
    PLAIN,
    WARDS,
    LocalGrid,
    assert_same,
    site_files,
)


def test_sites_split_as_one_machine_does(tmp_path):
    sites = Sites(LocalGrid(site_files(tmp_path)), 3)
    sites.connect()
    keys = {**PLAIN, "algorithm": "fedavg", "patience": 0, "stack": "off"}
    keys |= {"checkpoint_every": 1, "seed": 1}
    data = federated(sites.common(1, 0))
    assert data.partition.params["split_seed"] == 0
    config, out = fl.RunConfig(**keys), tmp_path / "run"
    runner.run(config, out, data=data, clients=sites.clients, progress=False)
    tables = ",".join(str(tmp_path / f"{ward}.csv") for ward in WARDS)
    home = {**keys, "dataset": tables, "scale": "none"}
    fl.run(out=tmp_path / "home", split_seed=0, **home)
    assert_same(out, tmp_path / "home")
    assert len({str(sites.common(*seeds)) for seeds in ((1, 0), (1, None))}) == 2
