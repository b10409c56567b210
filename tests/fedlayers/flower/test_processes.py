"""Federations of real processes: a superlink, supernodes, TLS, a key for each site, and kills."""

import json
import os
import re
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from examples.four_hospitals import hospital_files, server_file as hospital_run
from examples.local_federation import LocalFederation
from fl_core.errors import RunError
from fl_core.records.store import Run
from tests.fedlayers.flower.grid import PLAIN, WARDS, assert_same, at_home, site_files

LONGEST = 500.0


@contextmanager
def federation(tmp_path, sites=3):
    files = site_files(tmp_path / "sites")
    named = dict(list(zip(WARDS, files, strict=True))[:sites])
    with LocalFederation(tmp_path / "f", named) as running:
        yield running


def server_file(out, algorithm, more="", rounds=2, sites=3):
    file = out.with_suffix(".toml")
    config = {**PLAIN, "algorithm": algorithm, "rounds": rounds}
    lines = [
        f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}"
        for key, value in config.items()
    ]
    text = "\n".join([f'out = "{out}"', f"sites = {sites}", more, "[config]", *lines])
    file.write_text(text)
    return file


def until(done):
    end = time.monotonic() + LONGEST
    while not done():
        assert time.monotonic() < end
        time.sleep(0.3)


def has_round(out, number):
    return (out / "checkpoints" / f"{number:06d}.json").exists()


@pytest.mark.federation
def test_a_real_round_of_two_sites_has_the_bits_of_one_process(tmp_path):
    file = server_file(tmp_path / "run", "fedper", rounds=1, sites=2)
    with federation(tmp_path, sites=2) as running:
        running.run(file)
    tables = ",".join(str(tmp_path / "sites" / f"{ward}.csv") for ward in WARDS[:2])
    home = {"algorithm": "fedper", "rounds": 1, "dataset": tables}
    at_home(tmp_path / "sites", tmp_path / "home", **home)
    assert_same(tmp_path / "run", tmp_path / "home")


@pytest.fixture(scope="module")
def wards(tmp_path_factory):
    """Three sites and their superlink, which the tests below share."""
    with federation(tmp_path_factory.mktemp("wards")) as running:
        yield running


@pytest.mark.federation
def test_an_error_in_the_servers_file_is_shown_once(wards, tmp_path):
    (tmp_path / "bad.toml").write_text('ot = "x"')
    with pytest.raises(RunError) as caught:
        wards.run(tmp_path / "bad.toml")
    shown = str(caught.value)
    assert shown.count("unknown key 'ot': did you mean 'out'?") == 1, shown
    assert "line " not in shown


@pytest.mark.federation
def test_a_round_goes_on_without_a_site_that_stands_still(wards, tmp_path):
    out = tmp_path / "run"
    file = server_file(out, "fedper", "timeout = 40\nmin_sites = 2")
    wards.start("run", wards.command(file))
    until(lambda: has_round(out, 1))
    os.killpg(wards.processes["west"].pid, signal.SIGSTOP)
    try:
        until(lambda: "no reply within 40 s from west" in wards.log("run"))
    finally:
        os.killpg(wards.processes["west"].pid, signal.SIGCONT)
    until(lambda: has_round(out, 2))
    rows = Run(out).rows()[1]
    lost = rows[rows["metric"] == "reply_lost"]
    assert set(lost["client"]) == {"west"}
    assert set(lost["variant"]) == {"timeout"}


@pytest.mark.federation
def test_kills_of_a_supernode_and_of_the_server_change_no_bit(wards, tmp_path):
    out = tmp_path / "run"
    file = server_file(out, "fedper", rounds=3)
    wards.start("run", wards.command(file))
    until(lambda: has_round(out, 1))
    wards.kill("north")
    wards.restart_site("north")
    until(lambda: has_round(out, 2))
    wards.kill("superlink")
    wards.kill("run")
    assert not has_round(out, 3)
    wards.start_superlink()
    wards.run(file)
    sites = wards.folder.parent / "sites"
    at_home(sites, tmp_path / "home", algorithm="fedper", rounds=3)
    assert_same(out, tmp_path / "home")


@pytest.mark.federation
def test_four_sites_decide_over_the_network(tmp_path):
    """All ways, and both questions for sums of losses."""
    out = tmp_path / "choice"
    file = tmp_path / "server.toml"
    keys = f'out = "{out}"\nsites = 4\narms = []\nseeds = [0]\n'
    file.write_text(f"{keys}[config]\nrounds = 1\nlr = 0.1\n")
    with LocalFederation(tmp_path / "f", hospital_files(tmp_path)) as running:
        shown = running.run(file)
    assert (out / "choice.json").exists(), shown
    choice = json.loads((out / "choice.json").read_text())
    ways = {line["way"] for line in choice["table"]}
    assert ways == {"fedavg", "local", "head_local", "linear_fedavg", "base_rate"}
    assert choice["seeds"] == [0]
    ends = [line["low"] for line in choice["table"][1:]]
    assert all(end is not None for end in ends)  # they need query.products
    assert len(list((out / "arms").iterdir())) == 4


@pytest.mark.federation
def test_a_stage_of_four_sites_costs_little_more_than_empty_messages(tmp_path):
    """With ``-s`` it prints the seconds that the page on federations states."""
    with LocalFederation(tmp_path / "f", hospital_files(tmp_path)) as running:
        running.run(hospital_run(tmp_path, "fedavg", rounds=4))
        app = str(Path(__file__).parent / "empty_app")
        shown = running.call(["flwr", "run", app, "here", "--stream"])
    empty = [float(digits) for digits in re.findall(r"empty messages: (\S+) s", shown)]
    timing = pd.read_json(tmp_path / "fedavg" / "timing.jsonl", lines=True)
    seconds = timing[["train", "evaluate"]].median()
    print(f"\nempty {np.median(empty)}", seconds.to_string(), sep="\n")
    assert len(empty) == 4
    assert seconds.max() < 8 * np.median(empty)
