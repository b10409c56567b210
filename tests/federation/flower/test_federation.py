"""Federations of hospitals over real superlinks, supernodes and sites: the bits and rows of a run in one process."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd
import pytest

from diagnostics.report import Report
from examples.local_federation import Local
from fedlayers.cli.main import main
from fedlayers.remote.codec import decode
from fedlayers.remote.federation import federate
from fedlayers.remote.flower.server import FlowerLink
from fedlayers.remote.rpc import traffic_by_site
from fl_core.config import RunConfig
from fl_core.errors import RunError
from fl_core.records.store import Run
from tests.federation.flower import heart
from tests.processes import alive

TWO = ("cleveland", "hungarian")  # the first two, which have the same numbers in the whole federation
SLOW = "tests.federation.flower.slow_site"
OLD = "tests.federation.flower.old_site"
ALGORITHMS = ("fedavg", "fedper", "ditto", "scaffold", "fedpft", "pfedla", "playerfl")
OPTIONS = {"fedpft": {"contrast": False}}  # which compares views of images


def ended(local: Local, name: str, patience: float = 900) -> str:
    """Wait for a process of a federation to end; what it has said."""
    try:
        local.processes[name].wait(patience)
    except subprocess.TimeoutExpired:
        raise RunError(f"{name} did not end: {local.log(name)[-500:]}") from None
    del local.processes[name]
    return local.log(name)


def run(local: Local, name: str, algorithm: str, out: Path, rounds: int = 2) -> str:
    """``fedlayers federation run`` from its start to its end."""
    options = [f"--option={key}={json.dumps(value)}" for key, value in OPTIONS.get(algorithm, {}).items()]
    flags = ["--dataset", "heart", "--algorithm", algorithm, "--rounds", str(rounds), "--out", str(out)]
    local.start(name, heart.server(local, *flags, *options))
    return ended(local, name)


def test_two_hospitals_over_real_processes_get_the_bits_of_a_run(tmp_path):
    with Local(tmp_path / "net", TWO) as local:
        heart.start(local)
        expected = heart.at_home(tmp_path / "home", TWO, "playerfl", rounds=1)
        said = run(local, "server", "playerfl", tmp_path / "run", rounds=1)
        assert "(1 of 1 round" in said
        processes = dict(local.processes)
    assert all(process.poll() is not None for process in processes.values())
    heart.same(tmp_path / "run", expected)
    Run(tmp_path / "run").verify()
    table = traffic_by_site(tmp_path / "run")
    assert set(table.index) == set(TWO)
    assert (table["train"] > 1000).all()


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    with Local(tmp_path_factory.mktemp("net"), heart.HOSPITALS) as local:
        yield heart.start(local)
        processes = dict(local.processes)
    assert all(process.poll() is not None for process in processes.values())


@pytest.mark.federation
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_four_hospitals_get_the_bits_of_a_run(hospitals, tmp_path, algorithm):
    expected = heart.at_home(tmp_path / "home", heart.HOSPITALS, algorithm, options=OPTIONS.get(algorithm))
    run(hospitals, "server", algorithm, tmp_path / "run")
    heart.same(tmp_path / "run", expected)
    Run(tmp_path / "run").verify()
    table = traffic_by_site(tmp_path / "run")
    assert set(table.index) == set(heart.HOSPITALS)
    assert (table["train"] > 1000).all()


@pytest.mark.federation
def test_four_hospitals_get_the_model_of_a_run_in_a_secure_sum(hospitals, tmp_path):
    out = tmp_path / "run"
    flags = ["--algorithm", "fedavg", "--rounds", "1", "--out", str(out), "--secure-sum"]
    hospitals.start("server", heart.server(hospitals, *flags))
    said = ended(hospitals, "server")
    assert "1 rounds" in said or "1 round" in said, said
    rows, home = Run(out).rows()[1], Run(heart.at_home(tmp_path / "home", heart.HOSPITALS, "fedavg", rounds=1))
    assert rows.query("metric == 'secure_sum'")["value"].tolist() == [4.0] * 4
    models = [run.checkpoint().server.trees["model"] for run in (Run(out), home)]
    assert all(tensor.allclose(models[1][name], rtol=0, atol=1e-7) for name, tensor in models[0].items())


@pytest.mark.federation
def test_three_servers_at_once_use_the_same_sites(hospitals, tmp_path):
    for algorithm in ("local", "fedavg", "playerfl"):
        flags = ["--algorithm", algorithm, "--rounds", "2", "--out", str(tmp_path / algorithm)]
        hospitals.start(f"server-{algorithm}", heart.server(hospitals, *flags))
    for algorithm in ("local", "fedavg", "playerfl"):
        ended(hospitals, f"server-{algorithm}")
        heart.same(tmp_path / algorithm, heart.at_home(tmp_path / f"home-{algorithm}", heart.HOSPITALS, algorithm))


@pytest.mark.federation
@pytest.mark.parametrize(
    ("moment", "killed"),
    [("asked to train", TWO[:1]), ("training", TWO[:1]), ("has trained", TWO[:1]), ("training", TWO)],
)
def test_a_site_that_is_killed_trains_once_all_the_same(tmp_path, moment, killed):
    """In its second training; two at once, too."""
    with Local(tmp_path / "net", TWO, memory=False) as local:
        heart.start(local, SLOW)

        def kill() -> None:
            for name in killed:
                while local.log(name).count(moment) < 2:
                    time.sleep(0.02)
            for name in killed:
                local.kill(name)
            for name in killed:
                heart.start_site(local, name, wait=False, module=SLOW)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        run(local, "server", "fedper", tmp_path / "run", rounds=3)
        killer.join()
    heart.same(tmp_path / "run", heart.at_home(tmp_path / "home", TWO, "fedper", rounds=3))


@pytest.mark.federation
def test_a_superlink_that_is_killed_in_a_run_loses_nothing(tmp_path):
    with Local(tmp_path / "net", TWO, memory=False) as local:
        heart.start(local, SLOW)

        def kill() -> None:
            while local.log(TWO[0]).count("training") < 2:
                time.sleep(0.05)
            local.kill("superlink")
            time.sleep(3)
            local.start_superlink()

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        run(local, "server", "fedper", tmp_path / "run", rounds=3)
        killer.join()
    heart.same(tmp_path / "run", heart.at_home(tmp_path / "home", TWO, "fedper", rounds=3))


@pytest.mark.federation
def test_a_server_that_is_killed_while_saving_goes_on_bit_for_bit(tmp_path):
    out = tmp_path / "run"
    with Local(tmp_path / "net", TWO) as local:
        heart.start(local)
        flags = ["--algorithm", "playerfl", "--rounds", "6", "--out", str(out), "--checkpoint-every", "1"]
        local.start("server", heart.server(local, *flags))
        while not ((out / "checkpoints/000002.json").exists() and (out / "journal.jsonl").exists()):
            assert local.processes["server"].poll() is None, local.log("server")
        local.kill("server")
        done = Run(out).rounds
        assert max(done) < 6
        local.start("again", heart.server(local, "--resume", str(out)))
        assert "6 rounds" in ended(local, "again")
    heart.same(out, heart.at_home(tmp_path / "home", TWO, "playerfl", rounds=6))


@pytest.mark.federation
def test_a_late_site_is_waited_for(tmp_path):
    with Local(tmp_path / "net", TWO) as local:
        local.start_superlink()
        heart.start_site(local, TWO[0], wait=False)
        local.start(
            "server", heart.server(local, "--algorithm", "fedper", "--rounds", "2", "--out", str(tmp_path / "run"))
        )
        local.until("server", f"waiting for {TWO[1]}")
        heart.start_site(local, TWO[1], wait=False)
        ended(local, "server")
    heart.same(tmp_path / "run", heart.at_home(tmp_path / "home", TWO, "fedper"))


class Unreliable:
    """A link on which the first reply of each site is lost, so that all is asked twice."""

    def __init__(self, link: FlowerLink) -> None:
        self.link, self.sites, self.again = link, link.sites, 0

    def ask(
        self, requests: Mapping[str, bytes], timeout: float | None = None, grace: tuple[int, float] | None = None
    ) -> Iterator[tuple[str, bytes | None]]:
        lost = dict(self.link.ask(requests, timeout))
        for site, reply in self.link.ask(requests, timeout):
            if decode(requests[site]).head["kind"] == "train":
                assert reply == lost[site]
                self.again += 1
            yield site, reply
            yield site, lost[site]  # and then comes twice

    def close(self) -> None:
        self.link.close()


@pytest.mark.federation
def test_what_is_asked_and_answered_twice_is_trained_once(tmp_path):
    with Local(tmp_path / "net", TWO) as local:
        heart.start(local)
        link = Unreliable(FlowerLink(local.place, local.server_keys))
        federate(RunConfig(algorithm="fedper", rounds=2), link, tmp_path / "run", progress=False)
        link.close()
    assert link.again == 4
    heart.same(tmp_path / "run", heart.at_home(tmp_path / "home", TWO, "fedper"))


@pytest.mark.federation
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("version", "refuses: protocols of the server"),
        ("model", "refuses: layers"),
    ],
)
def test_another_version_or_model_is_refused_in_one_line(tmp_path, what, says):
    with Local(tmp_path / "net", TWO) as local:
        local.start_superlink()
        heart.start_site(local, TWO[0], wait=False)
        file = heart.site_file(local, TWO[1])
        local.start_site(TWO[1], [sys.executable, "-m", OLD, str(file), what], wait=False)
        local.start(
            "server", heart.server(local, "--algorithm", "fedper", "--rounds", "1", "--out", str(tmp_path / "run"))
        )
        process = local.processes["server"]
        said = ended(local, "server")
        assert process.returncode == 2
        assert [line for line in said.splitlines() if "refuses" in line] == [said.splitlines()[-1]]
        assert re.search(says, said)
        assert not (tmp_path / "run").exists()


@pytest.mark.federation
def test_ctrl_c_at_the_server_leaves_a_run_that_goes_on_and_no_process(tmp_path):
    out = tmp_path / "run"
    with Local(tmp_path / "net", TWO) as local:
        heart.start(local, SLOW)
        flags = ["--algorithm", "fedper", "--rounds", "3", "--checkpoint-every", "1", "--out", str(out)]
        local.start("server", heart.server(local, *flags))
        while local.log(TWO[0]).count("asked to train") < 2:
            assert local.processes["server"].poll() is None, local.log("server")
            time.sleep(0.1)
        process = local.processes["server"]
        process.send_signal(signal.SIGINT)
        said = ended(local, "server", 300)
        assert process.returncode == 130
        assert [line for line in said.splitlines() if line.startswith("fedlayers: ")] == [said.splitlines()[-1]]
        assert f"fedlayers federation run --resume {out}" in said.splitlines()[-1]
        assert "Traceback" not in said
        assert Run(out).rounds[-1] < 3
        assert not (out / "report.html").exists()
        for name in TWO:
            assert local.processes[name].poll() is None, "sites outlive the server"
        local.start("again", heart.server(local, "--resume", str(out)))
        assert "3 rounds" in ended(local, "again")
        processes = [*local.processes.values(), process]
        nodes = [pid for each in local.processes.values() for pid in children(each.pid)]
        assert len(nodes) >= len(TWO)
    assert all(each.poll() is not None for each in processes)
    assert not any(map(alive, nodes)), "supernodes end with their sites"
    heart.same(out, heart.at_home(tmp_path / "home", TWO, "fedper", rounds=3))


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.federation
def test_four_hospitals_diagnose_and_choose_as_one_process_does(hospitals, tmp_path):
    """And federate the plan that is selected from what they measured."""

    def reached(command: str, *flags: str) -> str:
        hospitals.start(command, heart.server(hospitals, *flags, command=command))
        return ended(hospitals, command)

    rows = ["--dataset", "heart", "--metrics", "federation_sensitivity", "--null", "labels_within", "fresh", "--out"]
    assert "left the" in reached("diagnose", *rows, str(tmp_path / "there.jsonl"))
    main(["diagnose", *rows, str(tmp_path / "here.jsonl")])
    keys = ["model", "metric", "variant", "layer", "client"]
    reports = [Report.read(tmp_path / f"{name}.jsonl") for name in ("there", "here")]
    frames = [report.table.sort_values(keys, ignore_index=True) for report in reports]
    pd.testing.assert_frame_equal(*frames, check_exact=True)

    main(["select", str(tmp_path / "there.jsonl"), "--out", str(tmp_path / "plan.json")])
    planned = ["--algorithm", "fedper", "--plan", str(tmp_path / "plan.json"), "--rounds", "1", "--out"]
    assert "1 round" in reached("federation run", *planned, str(tmp_path / "planned"))

    race = ["--rounds", "2", "--eval-every", "1", "--arms", "half", "fedavg", "--stack"]
    said = reached("choose", *race[:-1], "--out", str(tmp_path / "there"))
    assert "all runs" in said
    main(["choose", *race, "off", "--out", str(tmp_path / "here")])
    choices = [json.loads((tmp_path / name / "choice.json").read_text()) for name in ("there", "here")]
    for key in ("winner", "verdict", "judged", "until"):
        assert choices[0][key] == choices[1][key], key
    for run in (tmp_path / "here" / "arms").iterdir():
        heart.same(tmp_path / "there" / "arms" / run.name, run)
