"""Sites with tables of their own, as docs/federation.md shows them from start to end; here with real processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from examples.local_federation import FEDLAYERS, Local
from tests.federation.own_tables import SITES, same_as_in_one_process, section, write_tables

pytestmark = pytest.mark.federation


def test_hospitals_with_own_tables_train_as_the_page_says(tmp_path: Path) -> None:
    page = section()
    whole = write_tables(tmp_path, page.header)
    with Local(tmp_path / "server", ()) as local:
        keys = tmp_path / "keys"
        local.start(
            "keys", [*FEDLAYERS, *page.command("federation keys", {"keys": str(keys), "fed.example.org": "127.0.0.1"})]
        )
        local.until("keys", "goes to the site")
        at_server = {"keys/server": str(keys / "server"), "0.0.0.0": "127.0.0.1", "8443": "0"}
        local.start("superlink", [*FEDLAYERS, *page.command("federation superlink", at_server)])
        local.place = local.until("superlink", "superlink on https://").split("https://")[1].split()[0]
        for name in SITES:
            for file in ("ca.crt", "key"):
                shutil.copy(keys / "sites" / name / file, tmp_path / name / file)
            text = page.site.replace('"north"', f'"{name}"').replace("fed.example.org:8443", local.place)
            (tmp_path / name / "site.toml").write_text(text)
            site = {"site.toml": str(tmp_path / name / "site.toml")}
            local.start_site(name, [*FEDLAYERS, *page.command("federation site", site)], wait=False)
        for name in SITES:
            local.until(name, "is connected to")
        out = tmp_path / "runs/patients"
        where = {"keys/server": str(keys / "server"), "fed.example.org:8443": local.place, "runs/patients": str(out)}
        local.start("server", [*FEDLAYERS, *page.command("federation run", {**where, "20": "3"})])
        local.until("server", "report: ", patience=900)
    same_as_in_one_process(out, whole)
