"""Site files, and data that a silo reads alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedlayers.remote import federation
from fedlayers.remote.holdings import Silo
from fedlayers.remote.loopback import Loopback
from fedlayers.remote.privacy import Privacy
from fedlayers.remote.site import Site
from fedlayers.remote.sitefile import SiteFile
from fedlayers.remote.sites import RefusedError
from fl_core import data, runner, tree
from fl_core.config import RunConfig
from fl_core.errors import UsageError

HEART = data.load("heart", seed=5)
NAMES = [client.name for client in HEART.clients]


@pytest.mark.parametrize("number", range(len(NAMES)))
def test_a_silo_alone_has_the_split_that_it_has_in_the_whole(number: int) -> None:
    whole, silo = HEART.clients[number], Silo(NAMES[number], "heart")
    alone = silo.drawn(number, seed=5)
    for split in ("train", "validation", "test"):
        assert torch.equal(alone.split(split).x, whole.split(split).x), split
        assert torch.equal(alone.split(split).y, whole.split(split).y), split
        assert silo.sizes[split] == len(whole.split(split))
    other = silo.drawn(number + 1, seed=5)
    assert not torch.equal(other.train.x, alone.train.x)


def test_sites_with_a_hospital_each_run_as_all_of_them_together(tmp_path: Path) -> None:
    config = RunConfig(dataset="heart", algorithm="playerfl", rounds=2, seed=5, participation=0.75, stack="off")
    from fedlayers.diagnostics.measure import instruments

    wanted = runner.run(config, instruments=instruments(), progress=False)
    link = Loopback({name: Site(Silo(name, "heart"), tmp_path / name) for name in NAMES})
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
    silo = Silo("north", path, classes=["dead", "ill", "well"])
    assert silo.facts()["classes"] == ["dead", "ill", "well"]
    assert sorted(np.unique(silo.drawn(0, 0).train.y.numpy())) == [1, 2]
    assert silo.facts()["columns"] == ["a", "b"]
    with pytest.raises(UsageError, match="well"):
        Silo("north", path, classes=["dead", "ill"])


def test_of_a_file_with_clients_a_silo_is_one(tmp_path: Path) -> None:
    path = table(tmp_path / "both.csv", ["ill", "well"] * 16, client=True)
    assert sum(Silo("n", path).sizes.values()) == 16
    with pytest.raises(UsageError, match="unknown client"):
        Silo("north", path)
    with pytest.raises(UsageError, match="names no clients"):
        Silo("n", table(tmp_path / "one.csv", ["ill", "well"] * 8), client="n")
    for key in ({"scale": "minmax"}, {"impute": "mean"}):
        with pytest.raises(UsageError, match="fitted on all sites' samples"):
            Silo("n", path, **key)


def test_tables_are_scaled_by_what_all_sites_tell_of_theirs(tmp_path: Path) -> None:
    path = table(tmp_path / "both.csv", ["ill", "well", "well"] * 20, client=True)
    whole = data.load(path, scale="standard", seed=3)
    line = Loopback({name: Site(Silo(name, path, scale="standard"), tmp_path / name) for name in "ns"})
    config = RunConfig(dataset="toy", model="mlp", rounds=1, seed=3, batch=8)
    federation.federate(config, line, progress=False)
    for name in "ns":
        (joined,) = line._sites[name]._joined.values()  # type: ignore[attr-defined]
        alone = joined.task.data.client(name)
        for split in ("train", "validation", "test"):
            torch.testing.assert_close(alone.split(split).x, whole.client(name).split(split).x)
    together = torch.cat([line._sites[n]._joined.popitem()[1].task.data.client(n).train.x for n in "ns"])  # type: ignore[attr-defined]
    torch.testing.assert_close(together.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    mixed = {"n": Site(Silo("n", path), tmp_path / "n"), "s": Site(Silo("s", path, scale="standard"), tmp_path / "s")}
    with pytest.raises(UsageError, match="site 's' has scale standard, site 'n' has none"):
        federation.federate(config, Loopback(mixed), progress=False)
    told = Privacy(1.0, 1.0, 1.0)
    hiding = {name: Site(Silo(name, path, scale="standard"), tmp_path / name, privacy=told) for name in "ns"}
    with pytest.raises(RefusedError, match="sends nothing without noise"):
        federation.federate(config, Loopback(hiding), progress=False)


GOOD = 'name = "va"\n[data]\ndataset = "heart"\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name = ", "is no TOML"),
        ('name = "va"\n', "needs a dataset"),
        ('[data]\ndataset = "heart"\n', "name must be the site's"),
        ('name = "a/b"\n[data]\ndataset = "heart"\n', "without a slash"),
        (GOOD + "labels = 3\n", "unknown key of .data. 'labels'"),
        (GOOD + "[polcy]\n", "did you mean 'policy'"),
        (GOOD + '[policy]\nalgorithm = ["fedavg"]\n', "did you mean 'algorithms'"),
        (GOOD + '[policy]\nalgorithms = "fedavg"\n', "must be a list of names"),
        (GOOD + '[policy]\nleast_samples = "all"\n', "must be int"),
        ("device = 3\n" + GOOD, "device must be text"),
        (GOOD.replace("heart", "nothing.csv"), "there is no dataset or file"),
        (GOOD + "[policy]\nleast_samples = 131\n", "130 samples, and its policy asks for at least 131"),
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
