"""Sites with tables of their own, as docs/federation.md shows them from start to end; here over the loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedlayers.cli import superlinks
from fedlayers.cli.main import main
from fedlayers.remote.in_memory import InMemoryTransport
from fedlayers.remote.site_config import SiteFile
from fl_core.records.store import Run
from tests.federation.own_tables import SITES, same_as_in_one_process, section, write_tables

AT = ("--superlink", "fed.example.org:8443", "--keys", "keys/server")


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InMemoryTransport:
    """Two hospitals with the page's site file, behind ``--superlink``; the current folder is the server's."""
    page = section()
    write_tables(tmp_path, page.header)
    sites = {}
    for name in SITES:
        file = tmp_path / name / "site.toml"
        file.write_text(page.site.replace('"north"', f'"{name}"'))
        sites[name] = SiteFile.read(file).site()
    link = InMemoryTransport(sites)

    @contextmanager
    def linked(self: superlinks.Sites, names: tuple[str, ...] = ()) -> Iterator[InMemoryTransport]:
        yield link

    monkeypatch.setattr(superlinks.Sites, "connect_sites", linked)
    monkeypatch.chdir(tmp_path)
    return link


def test_hospitals_with_own_tables_train_as_the_page_says(link: InMemoryTransport, tmp_path: Path) -> None:
    main(section().command("federation run", {"20": "3"}))
    config = Run("runs/patients").config
    assert (config["model"], config["loss"], config["algorithm"]) == ("mlp", "cross_entropy", "fedper")
    same_as_in_one_process(tmp_path / "runs/patients", tmp_path / "whole.csv")


def test_own_tables_are_diagnosed_and_chosen_on_without_a_dataset(link: InMemoryTransport) -> None:
    main(["diagnose", *AT, "--metrics", "federation_sensitivity"])
    assert Path("rows.jsonl").is_file()
    main(["choose", *AT, "--rounds", "2", "--arms", "nothing", "all", "--out", "choice"])
    assert Run(next(Path("choice/arms").iterdir())).config["dataset"] == "own"


def test_another_dataset_than_the_sites_have_is_refused(
    link: InMemoryTransport, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["federation", "run", "--dataset", "digits", *AT])
    assert "'digits'" in capsys.readouterr().err
    assert not Path("runs").exists()
