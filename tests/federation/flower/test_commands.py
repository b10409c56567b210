"""What the commands refuse, each in one line and before anything is written or started."""

from __future__ import annotations

import re
import socket
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from examples.local_federation import Local
from fedlayers.cli.main import main
from fedlayers.remote import flower, keys
from fedlayers.remote.flower.site_process import Connection, check_address
from fedlayers.remote.site_config import SiteFile
from fl_core.errors import UsageError
from tests.fedlayers.test_imports import MODULES, imported


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A folder, made the current one, with keys for sites a and b."""
    monkeypatch.chdir(tmp_path)
    keys.make(tmp_path / "keys", ["127.0.0.1"], ["a", "b"])
    return tmp_path


def refused(capsys, *words):
    """The one line with which a command ends."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert len(said) == 1
    return said[0]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("federation keys keys --host x", "--host"),
        ("federation keys keys --sites a", "site 'a'"),
        ("federation keys keys --sites c c", "c twice"),
        ("federation keys keys/sites/a --own a", "overwritten"),
        (
            "federation keys keys --sites d --own b",
            "--own",
        ),
        ("federation keys keys --host x --own b", "--host"),
        ("federation keys keys --renew --own b", "--renew"),
        ("federation keys nowhere --renew", "nowhere/server/ca.key"),
        ("federation status --keys nowhere", "ca.crt"),
        ("federation allow nowhere.toml", "nowhere.toml"),
        ("federation run --grace 5", "--min-sites"),
        ("federation superlink nowhere", "ca.crt"),
        ("federation superlink keys/server --port 70000", "70000"),
        ("federation run --keys nowhere", "ca.crt"),
        ("federation run --superlink https://x", "host:port"),
        ("federation run --min-sites 2", "--timeout"),
        ("federation run --algorithm fedavgg", "'fedavg'"),
        ("federation run --workers 2", "--workers"),
        ("federation run --out keys", "keys"),
        ("federation run --resume nowhere", "nowhere"),
        ("federation site nowhere.toml", "nowhere.toml"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(made, capsys, words, says):
    before = sorted(made.rglob("*"))
    assert says in refused(capsys, *words.split())
    assert sorted(made.rglob("*")) == before


def test_the_status_names_sites_and_runs(made, capsys, monkeypatch):
    from fedlayers.remote import log
    from fedlayers.remote.flower import server

    class Superlink:
        def __init__(self, place, keys):
            assert place == "127.0.0.1:8000"

        def connected(self):
            return {"a": "2026-01-01", "b": ""}

        def close(self):
            pass

    monkeypatch.setattr(server, "Superlink", Superlink)
    main(["run", "--dataset", "heart", "--algorithm", "fedavg", "--rounds", "1", "--out", "run"])
    log.note("run", round=1, missing=["b"], error="site 'b' refuses\x1b[2J")
    capsys.readouterr()
    main(["federation", "status", "run"])
    first, second, third = capsys.readouterr().out.splitlines()
    assert "2026" in first
    assert "not" in second
    assert all(word in third for word in ("1 of 1", "missing: b", "refuses\\x1b"))


def test_nobody_listens_and_somebody_does(made, capsys):
    port = free_port()
    assert f"127.0.0.1:{port}" in refused(capsys, "federation", "run", "--superlink", f"127.0.0.1:{port}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refused(capsys, "federation", "superlink", "keys/server", "--port", str(port))
    assert not (made / "keys/server/superlink.db").exists()


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"superlink": "x:1", "ca": "ca.crt", "kee": "key"}, "'kee'.*'key'"),
        ({"superlink": "x:1", "ca": "ca.crt"}, r"\[connection\].*\bkey\b"),
        ({"superlink": "x:1", "ca": "ca.crt", "key": 3}, r"\[connection\].*\bkey\b"),
        ({"superlink": "x:1", "ca": "ca.crt", "key": "none"}, "key.*none"),
        ({"superlink": "x", "ca": "ca.crt", "key": "key"}, "host:port"),
    ],
)
def test_a_connection_that_cannot_be(made, table, says):
    with pytest.raises(UsageError, match=says):
        Connection.from_table(table, made / "keys/sites/a")


def test_a_local_federation_in_a_relative_folder_has_site_files_that_find_their_keys(made):
    local = Local(Path("out"), ["a"])
    file = made / "out/sites/a/site.toml"
    file.parent.mkdir(parents=True)
    file.write_text(f'name = "a"\n[data]\ndataset = "heart"\n{local.connection("a")}'.replace(":0", ":1"))
    found = Connection.from_table(SiteFile.read(file).connection, file.parent)
    assert found.key.read_bytes() == (made / "out/keys/sites/a/key").read_bytes()


def test_the_site_file_of_the_documentation_is_one(made):
    page = (Path(flower.__file__).parents[3] / "docs/federation.md").read_text()
    text = next(block for block in page.split("```toml\n") if "[privacy]" in block).partition("```")[0]
    file = made / "keys/sites/a/site.toml"
    file.write_text(text)
    found = SiteFile.read(file)
    assert (found.name, found.policy.never_send, found.privacy.noise) == ("cleveland", ("fc4",), 6.0)
    assert Connection.from_table(found.connection, file.parent).superlink == "fed.example.org:8443"


@pytest.mark.parametrize("place", ["x", "x:", ":1", "x:0", "x:99999", "https://x:1", "x:y"])
def test_an_address_that_is_none(place):
    with pytest.raises(UsageError, match="host:port"):
        check_address(place)


@pytest.mark.parametrize("found", ["1.40.2", "1.43.0", "none"])
def test_another_flower_or_none_is_one_line(monkeypatch, found):
    def version(name):
        if found == "none":
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(flower, "version", version)
    with pytest.raises(UsageError, match=rf"1\.41.*1\.42.*{found}.*fedlayers\[flower\]"):
        flower.require()


def test_only_this_folder_imports_flower():
    root = Path(flower.__file__).parents[3]
    importing = [
        path.relative_to(root).as_posix()
        for path in root.glob("f*/**/*.py")
        if any(line.strip().startswith(("import flwr", "from flwr")) for line in path.read_text().splitlines())
    ]
    assert importing
    assert all(path.startswith("fedlayers/remote/flower/") for path in importing)


def test_the_package_imports_without_flower():
    """Neither its folder's package nor a module outside always imports one that imports it."""
    folder = "fedlayers.remote.flower"
    assert not re.search(r"^\s*(import|from) flwr", MODULES[folder].read_text(), re.MULTILINE)
    for name in MODULES:
        if not name.startswith(f"{folder}."):
            assert not any(each.startswith(f"{folder}.") for each in imported(name, always=True)), name
