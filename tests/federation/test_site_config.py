"""Site files, and data that a silo reads alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlayers.remote import federation
from fedlayers.remote.codec import Packet, PacketError
from fedlayers.remote.in_memory import InMemoryTransport
from fedlayers.remote.privacy import Privacy
from fedlayers.remote.rpc import RefusedError
from fedlayers.remote.site import Site
from fedlayers.remote.site_config import SiteFile
from fedlayers.remote.site_data import SiteDataset
from fl_core import data, runner, tree
from fl_core.config import RunConfig
from fl_core.errors import UsageError

HEART = data.load("heart", seed=5)
NAMES = [client.name for client in HEART.clients]


@pytest.mark.parametrize("number", range(len(NAMES)))
def test_a_silo_alone_has_the_split_that_it_has_in_the_whole(number: int) -> None:
    whole, silo = HEART.clients[number], SiteDataset(NAMES[number], "heart")
    alone = silo.drawn(number, seed=5)
    for split in ("train", "validation", "test"):
        assert torch.equal(alone.split(split).x, whole.split(split).x), split
        assert torch.equal(alone.split(split).y, whole.split(split).y), split
        assert silo.sizes[split] == len(whole.split(split))
    other = silo.drawn(number + 1, seed=5)
    assert not torch.equal(other.train.x, alone.train.x)


def test_sites_with_a_hospital_each_run_as_all_of_them_together(tmp_path: Path) -> None:
    config = RunConfig(dataset="heart", algorithm="playerfl", rounds=2, seed=5, participation=0.75, stack="off")
    from diagnostics.measure import instruments

    wanted = runner.run(config, instruments=instruments(), progress=False)
    link = InMemoryTransport({name: Site(SiteDataset(name, "heart"), tmp_path / name) for name in NAMES})
    found = federation.federate(config, link, progress=False)
    assert [{**row, "run": ""} for row in found.rows] == [{**row, "run": ""} for row in wanted.rows]
    assert tree.digest(found.server.trees["model"]) == tree.digest(wanted.server.trees["model"])
    assert found.algorithm.plan is not None
    assert found.algorithm.plan.shared == wanted.algorithm.plan.shared  # type: ignore[union-attr]


def table(path: Path, labels: list[str], client: bool = False) -> Path:
    head = "a,b,label" + ",client" * client
    lines = [f"{k}.5,{k % 7},{label}" + f",{'ns'[k % 2]}" * client for k, label in enumerate(labels)]
    path.write_text("\n".join([head, *lines]))
    return path


def test_a_silo_may_lack_a_class_of_its_federation(tmp_path: Path) -> None:
    path = table(tmp_path / "north.csv", ["ill", "well"] * 8)
    silo = SiteDataset("north", path, classes=["dead", "ill", "well"])
    assert silo.facts()["classes"] == ["dead", "ill", "well"]
    assert sorted(np.unique(silo.drawn(0, 0).train.y.numpy())) == [1, 2]
    assert silo.facts()["columns"] == ["a", "b"]
    with pytest.raises(UsageError, match="well"):
        SiteDataset("north", path, classes=["dead", "ill"])


def test_of_a_file_with_clients_a_silo_is_one(tmp_path: Path) -> None:
    path = table(tmp_path / "both.csv", ["ill", "well"] * 16, client=True)
    assert sum(SiteDataset("n", path).sizes.values()) == 16
    with pytest.raises(UsageError, match="unknown client"):
        SiteDataset("north", path)
    with pytest.raises(UsageError, match="no clients"):
        SiteDataset("n", table(tmp_path / "one.csv", ["ill", "well"] * 8), client="n")
    for key in ({"scale": "minmax"}, {"impute": "median"}):
        with pytest.raises(UsageError, match="all sites"):
            SiteDataset("n", path, **key)


def test_tables_are_scaled_by_what_all_sites_tell_of_theirs(tmp_path: Path) -> None:
    path = table(tmp_path / "both.csv", ["ill", "well", "well"] * 20, client=True)
    whole = data.load(path, scale="standard", seed=3)
    line = InMemoryTransport({name: Site(SiteDataset(name, path, scale="standard"), tmp_path / name) for name in "ns"})
    config = RunConfig(dataset="toy", model="mlp", rounds=1, seed=3, batch_size=8)
    federation.federate(config, line, progress=False)
    for name in "ns":
        (joined,) = line._sites[name]._joined.values()  # type: ignore[attr-defined]
        alone = joined.task.data.client(name)
        for split in ("train", "validation", "test"):
            torch.testing.assert_close(alone.split(split).x, whole.client(name).split(split).x)
    together = torch.cat([line._sites[n]._joined.popitem()[1].task.data.client(n).train.x for n in "ns"])  # type: ignore[attr-defined]
    torch.testing.assert_close(together.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    mixed = {
        "n": Site(SiteDataset("n", path), tmp_path / "n"),
        "s": Site(SiteDataset("s", path, scale="standard"), tmp_path / "s"),
    }
    with pytest.raises(UsageError, match=r"'s'.*'n'.*none.*standard"):
        federation.federate(config, InMemoryTransport(mixed), progress=False)
    told = Privacy(1.0, 1.0, 1.0)
    hiding = {name: Site(SiteDataset(name, path, scale="standard"), tmp_path / name, privacy=told) for name in "ns"}
    with pytest.raises(RefusedError, match="noise"):
        federation.federate(config, InMemoryTransport(hiding), progress=False)


class Lying(Site):
    """A site whose moments are changed."""

    def __init__(self, change: dict[str, Any], path: Path, folder: Path) -> None:
        super().__init__(SiteDataset("s", path, scale="standard"), folder)
        self.change = change

    def _moments(self, packet: Packet) -> Packet:
        found = super()._moments(packet)
        return Packet({**found.head, **self.change}, found.trees)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"count": 10**15}, "of its 19 samples"),
        ({"present": [20, 19]}, "of its 19 samples"),
        ({"mean": [0.0]}, "of 2 features"),
        ({"mean": [1e300, 0.0]}, "32-bit"),
        ({"squares": [0.0, 1e300]}, "32-bit"),
        ({"squares": [-1.0, 1.0]}, "32-bit"),
    ],
)
def test_moments_that_cannot_be_are_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = table(tmp_path / "both.csv", ["ill", "well", "well"] * 20, client=True)
    honest = Site(SiteDataset("n", path, scale="standard"), tmp_path / "n")
    line = InMemoryTransport({"n": honest, "s": Lying(change, path, tmp_path / "s")})
    with pytest.raises(PacketError, match=rf"moments of site 's' .*{reason}"):
        federation.federate(RunConfig(dataset="toy", model="mlp", rounds=1, batch_size=8), line, progress=False)


@pytest.mark.parametrize("scale", ["none", "standard"])
def test_missing_values_are_filled_with_the_mean_over_all_sites(scale: str, tmp_path: Path) -> None:
    """The south has no value of b at all; what is filled, and the run, are those of one process."""
    draw = np.random.default_rng(1)
    lines = []
    for k in range(120):
        a = "" if k % 5 == 0 else f"{draw.normal(50, 9):.6}"
        b = "" if k % 2 or k % 3 == 0 else f"{draw.normal():.6}"
        lines.append(f"{a},{b},{'ny'[k % 3 == 0]},{'ns'[k % 2]}")
    path = tmp_path / "both.csv"
    path.write_text("\n".join(["a,b,label,client", *lines]))
    config = RunConfig(dataset=str(path), rounds=2, seed=3, stack="off", scale=scale, impute="mean", patience=0)
    wanted = runner.run(config, progress=False)
    line = InMemoryTransport(
        {name: Site(SiteDataset(name, path, scale=scale, impute="mean"), tmp_path / name) for name in "ns"}
    )
    found = federation.federate(replace(config, dataset="both", scale="none", impute="none"), line, progress=False)
    for name in "ns":
        (joined,) = line._sites[name]._joined.values()  # type: ignore[attr-defined]
        for split in ("train", "validation", "test"):
            x = joined.task.data.client(name).split(split).x
            assert torch.equal(x, wanted.data.client(name).split(split).x)
            assert not x.isnan().any()
    assert [{**row, "run": ""} for row in found.rows] == [{**row, "run": ""} for row in wanted.rows]
    assert tree.digest(found.server.trees["model"]) == tree.digest(wanted.server.trees["model"])


def test_a_column_without_a_value_anywhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "both.csv"
    path.write_text("\n".join(["a,dose,label,client", *(f"{k},,{'xy'[k // 2 % 2]},{'ns'[k % 2]}" for k in range(80))]))
    line = InMemoryTransport({name: Site(SiteDataset(name, path, impute="mean"), tmp_path / name) for name in "ns"})
    with pytest.raises(UsageError, match="dose"):
        federation.federate(RunConfig(dataset="own", rounds=1), line, progress=False)


def test_a_missing_value_at_a_site_is_answered_with_what_a_site_can_do(tmp_path: Path) -> None:
    path = tmp_path / "north.csv"
    path.write_text("\n".join(["a,b,label", "1,,x", *(f"{k},{k},{'xy'[k % 2]}" for k in range(40))]))
    with pytest.raises(UsageError, match='impute = "mean"') as refused:
        SiteDataset("north", path)
    assert "--" not in str(refused.value)
    assert "median" not in str(refused.value)
    assert SiteDataset("north", path, impute="mean").facts()["impute"] == "mean"


def test_the_mean_of_few_values_does_not_leave_a_site(tmp_path: Path) -> None:
    path = tmp_path / "north.csv"
    path.write_text("\n".join(["a,rare,label", *(f"{k},{k if k < 4 else ''},{'xy'[k % 2]}" for k in range(60))]))
    with pytest.raises(UsageError, match="rare"):
        SiteDataset("north", path, impute="mean").moments(0, 0)
    assert SiteDataset("north", path, impute="mean", exclude_columns=["rare"]).moments(0, 0).present == (38,)


def test_only_means_leave_a_site_that_does_not_scale(tmp_path: Path) -> None:
    path = table(tmp_path / "north.csv", ["ill", "well"] * 20)
    assert SiteDataset("north", path, impute="mean").moments(0, 0).squares == (0.0, 0.0)
    assert min(SiteDataset("north", path, impute="mean", scale="standard").moments(0, 0).squares) > 0


def test_the_name_and_the_defaults_of_a_run_are_those_of_the_sites_data(tmp_path: Path) -> None:
    heart = [SiteDataset(name, "heart").facts() for name in NAMES]
    path = table(tmp_path / "both.csv", ["ill", "well"] * 40, client=True)
    own = [SiteDataset(name, path).facts() for name in "ns"]
    assert federation.data_of(heart, RunConfig.dataset).name == "heart"
    assert federation.data_of(own, RunConfig.dataset).name == "own"
    assert federation.data_of(own, "wards").name == "wards"
    for facts in (heart, own):
        with pytest.raises(UsageError, match="digits"):
            federation.data_of(facts, "digits")
    assert federation.task_of(RunConfig(), federation.data_of(own, RunConfig.dataset), None).config.model == "mlp"
    assert str(tmp_path) not in str(own)


GOOD = 'name = "va"\n[data]\ndataset = "heart"\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name = ", "TOML"),
        ('name = "va"\n', "dataset"),
        ('[data]\ndataset = "heart"\n', "name"),
        ('name = "a/b"\n[data]\ndataset = "heart"\n', "slash"),
        (GOOD + "labels = 3\n", "'labels'"),
        (GOOD + "[polcy]\n", "'policy'"),
        (GOOD + '[policy]\nalgorithm = ["fedavg"]\n', "'algorithms'"),
        (GOOD + '[policy]\nalgorithms = "fedavg"\n', "list.*names"),
        (GOOD + '[policy]\nleast_samples = "all"\n', "int"),
        ("device = 3\n" + GOOD, "device"),
        (GOOD.replace("heart", "nothing.csv"), r"nothing\.csv"),
        (GOOD + "[policy]\nleast_samples = 131\n", r"131.*130"),
        (GOOD.replace('"va"', '"vb"'), "unknown client"),
    ],
)
def test_a_site_file_is_refused_by_the_key_that_is_wrong(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=reason) as refused:
        SiteFile.read(path).site()
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)


def test_paths_of_a_site_file_are_beside_it(tmp_path: Path) -> None:
    table(tmp_path / "north.csv", ["ill", "well"] * 8)
    (tmp_path / "site.toml").write_text('name = "north"\nfolder = "kept"\n[data]\ndataset = "north.csv"\n')
    found = SiteFile.read(tmp_path / "site.toml")
    assert found.folder == tmp_path / "kept"
    assert found.site().name == "north"
    assert SiteFile.read(tmp_path / "site.toml").connection == {}
