"""Diagnose and decide over sites by the command line: what is measured there is selected from and federated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from fedlayers.cli import superlinks
from fedlayers.cli.main import main
from fedlayers.diagnostics.null import NULLS
from fedlayers.diagnostics.report import Report
from fedlayers.remote.holdings import Silo
from fedlayers.remote.loopback import Loopback
from fedlayers.remote.site import Site
from fl_core.data import load
from fl_core.plan import LayerPlan
from fl_core.records.store import Run

HOSPITALS = tuple(client.name for client in load("heart").clients)
AT = ("--superlink", "fed.example.org:8443")


def hospitals(folder: Path) -> Loopback:
    return Loopback({name: Site(Silo(name, "heart"), folder / name) for name in HOSPITALS})


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loopback:
    """The heart dataset's hospitals behind ``--superlink``, and a folder that is the current one."""
    link = hospitals(tmp_path / "sites")

    @contextmanager
    def linked(self: superlinks.Sites, names: tuple[str, ...] = ()) -> Iterator[Loopback]:
        yield link

    monkeypatch.setattr(superlinks.Sites, "linked", linked)
    monkeypatch.chdir(tmp_path)
    return link


def fedlayers(*words: str) -> None:
    main(words)


def same_rows(one: Path, other: Path) -> None:
    frames = [Run(path).rows()[1].drop(columns="run") for path in (one, other)]
    pd.testing.assert_frame_equal(*frames, check_exact=True)


def test_what_the_sites_measure_is_selected_from_and_federated(
    sites: Loopback, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = ["--metrics", "federation_sensitivity", "grad_norm"]
    nulls = ["--null", "labels_within", "fresh"]
    fedlayers("diagnose", "--dataset", "heart", *AT, *metrics, *nulls, "--out", "there.jsonl")
    there = Report.read("there.jsonl")
    assert list(there.header["left"]) == list(HOSPITALS)
    assert there.header["left"] == sites.received
    assert f"{HOSPITALS[0]} {sites.received[HOSPITALS[0]]:,}" in capsys.readouterr().out
    fedlayers("diagnose", "--dataset", "heart", *metrics, "--out", "here.jsonl")
    keys = ["metric", "variant", "layer", "client"]
    frames = [Report.read(name).frame.sort_values(keys, ignore_index=True) for name in ("there.jsonl", "here.jsonl")]
    pd.testing.assert_frame_equal(*frames, check_exact=True)

    capsys.readouterr()
    fedlayers("select", "there.jsonl", "--out", "plan.json")
    said = capsys.readouterr().out
    assert all(NULLS[name].title in said for name in nulls[1:])
    plan = LayerPlan.load("plan.json")
    assert plan.shared
    what = ["--dataset", "heart", "--algorithm", "fedper", "--rounds", "2", "--plan", "plan.json"]
    fedlayers("federate", *what, *AT, "--out", "there")
    fedlayers("run", *what, "--stack", "off", "--out", "here")
    same_rows(Path("there"), Path("here"))
    assert Run("there").config["given"]["shared"] == list(plan.shared)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--metrics cka", "cka compares clients"),
        ("--metrics grad_norm --null clients", "null clients takes what all clients have together"),
        ("--partition iid", "--partition cannot be said over sites"),
        ("--resamples 4", "--resamples cannot be said over sites"),
        ("--least 2", "--least and --timeout belong together"),
    ],
)
def test_what_sites_cannot_measure_is_refused_before_any_is_asked(
    sites: Loopback, capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        fedlayers("diagnose", "--dataset", "heart", *AT, *words.split())
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert len(said) == 1
    assert says in said[0]
    assert not any(sites.sent.values())
    assert not Path("rows.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--dataset heart --keys k", "--keys is of a federation over sites: name its --superlink"),
        (f"runs/x {' '.join(AT)}", "--superlink goes with --dataset"),
        (" ".join(AT), "needs a run directory"),
    ],
)
def test_flags_of_a_federation_go_together(
    sites: Loopback, capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    with pytest.raises(SystemExit):
        fedlayers("diagnose", *words.split())
    assert says in capsys.readouterr().err
