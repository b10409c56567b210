"""Diagnose and decide over sites by the command line: what is measured there is selected from and federated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from diagnostics.null import NULLS
from diagnostics.report import Report
from fedlayers.cli import superlinks
from fedlayers.cli.main import main
from fedlayers.remote.codec import decode
from fedlayers.remote.federation import federate
from fedlayers.remote.in_memory import InMemoryTransport
from fedlayers.remote.policy import Policy
from fedlayers.remote.rpc import RefusedError, traffic_by_site
from fedlayers.remote.site import Site
from fedlayers.remote.site_data import SiteDataset
from fedlayers.studies.choice import Choice
from fedlayers.studies.choose import choose
from fedlayers.studies.federation_report import KINDS
from fedlayers.studies.site_backend import Federations
from fedlayers.studies.training_job import TrainingJob, train
from fl_core import rows
from fl_core.config import RunConfig
from fl_core.data import load
from fl_core.errors import CorruptError, UsageError
from fl_core.plan import LayerPlan
from fl_core.records.store import Run

HOSPITALS = tuple(client.name for client in load("heart").clients)
AT = ("--superlink", "fed.example.org:8443")
HALF_WAY = "examples.algorithms.half_way:HalfWay"


def hospitals(folder: Path, **policies: Policy) -> InMemoryTransport:
    return InMemoryTransport(
        {name: Site(SiteDataset(name, "heart"), folder / name, policies.get(name)) for name in HOSPITALS}
    )


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InMemoryTransport:
    """The heart dataset's hospitals behind ``--superlink``, and a folder that is the current one."""
    link = hospitals(tmp_path / "sites")
    connect(link, monkeypatch)
    monkeypatch.chdir(tmp_path)
    return link


def connect(link: InMemoryTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def linked(self: superlinks.Sites, names: tuple[str, ...] = ()) -> Iterator[InMemoryTransport]:
        yield link

    monkeypatch.setattr(superlinks.Sites, "connect_sites", linked)


def fedlayers(*words: str) -> None:
    main(words)


def same_rows(one: Path, other: Path) -> None:
    frames = [Run(path).rows()[1].drop(columns="run") for path in (one, other)]
    pd.testing.assert_frame_equal(*frames, check_exact=True)


def test_what_the_sites_measure_is_selected_from_and_federated(
    sites: InMemoryTransport, capsys: pytest.CaptureFixture[str]
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
    fedlayers("federation", "run", *what, *AT, "--out", "there")
    fedlayers("run", *what, "--stack", "off", "--out", "here")
    same_rows(Path("there"), Path("here"))
    assert Run("there").config["given"]["shared"] == list(plan.shared)


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of an algorithm from outside, which sites allow, stopped after one of two rounds."""
    link = hospitals(tmp_path / "sites", **dict.fromkeys(HOSPITALS, Policy(code=(HALF_WAY,))))
    connect(link, monkeypatch)
    config = RunConfig(dataset="heart", algorithm=HALF_WAY, rounds=2, checkpoint_every=1)
    federate(config, link, tmp_path / "run", progress=False, until=1)
    return tmp_path / "run"


@pytest.mark.filterwarnings("ignore:client")
def test_a_run_with_own_code_is_resumed_if_it_is_allowed(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        fedlayers("federation", "run", "--resume", str(stopped))
    assert f"--allow-code {HALF_WAY}" in capsys.readouterr().err
    fedlayers("federation", "run", "--resume", str(stopped), "--allow-code", HALF_WAY)
    assert Run(stopped).rounds[-1] == 2


@pytest.mark.parametrize(
    "flags", ["--rounds 9", "--option mu=1", "--model-option sizes=4", "--loss-option gamma=1", "--out other"]
)
def test_a_run_is_resumed_as_it_began(stopped: Path, capsys: pytest.CaptureFixture[str], flags: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        fedlayers("federation", "run", "--resume", str(stopped), "--allow-code", HALF_WAY, *flags.split())
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{stopped} must be resumed as it began; got {flags.split()[0]}." in said
    assert Run(stopped).rounds[-1] == 1


def test_a_new_run_needs_no_permission_for_its_code(
    sites: InMemoryTransport, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        fedlayers("federation", "run", "--algorithm", "fedper", "--allow-code", HALF_WAY)
    assert "--allow-code is for --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--metrics cka", "got cka"),
        ("--metrics grad_norm --null clients", "got clients"),
        ("--partition iid", "--partition"),
        ("--resamples 4", "--resamples"),
        ("--min-sites 2", "--timeout"),
    ],
)
def test_what_sites_cannot_measure_is_refused_before_any_is_asked(
    sites: InMemoryTransport, capsys: pytest.CaptureFixture[str], words: str, says: str
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
        ("--dataset heart --keys k", "--keys"),
        (f"runs/x {' '.join(AT)}", "--superlink"),
        ("", "directory"),
    ],
)
def test_flags_of_a_federation_go_together(
    sites: InMemoryTransport, capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    with pytest.raises(SystemExit):
        fedlayers("diagnose", *words.split())
    assert says in capsys.readouterr().err


# --- choosing ----------------------------------------------------------------------------------------------------

RACE = RunConfig(dataset="heart", rounds=2, epochs=1, eval_every=1, stack="off")
ARMS = ("half", "fedavg")
SEEDS = (0, 1)


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Choice, Choice]:
    """A folder with the same choice made twice: ``here`` in one process, ``there`` over sites."""
    folder = tmp_path_factory.mktemp("choices")
    here = choose(RACE, folder / "here", arms=ARMS, seeds=SEEDS)
    there = choose(RACE, folder / "there", arms=ARMS, seeds=SEEDS, link=hospitals(folder / "sites"))
    return folder, here, there


def decided(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "choice.json").read_text())
    return {key: value for key, value in found.items() if key not in ("seconds", "foreseen", "measured")}


def test_a_choice_over_sites_is_that_of_one_process(chosen: tuple[Path, Choice, Choice]) -> None:
    folder, here, there = chosen
    assert decided(folder / "there") == decided(folder / "here")
    assert there.inference.above_chance == here.inference.above_chance
    assert not pd.isna(there.inference.above_chance.value)
    pd.testing.assert_frame_equal(there.standing.rounds, here.standing.rounds, check_exact=True)
    runs = sorted(path.parent.relative_to(folder / "here") for path in (folder / "here").glob("*/*/config.json"))
    assert len(runs) == len(ARMS) * len(SEEDS)
    for run in runs:
        same_rows(folder / "there" / run, folder / "here" / run)
    assert there.cost.n_bytes == here.cost.n_bytes
    assert there.measured.n_bytes == here.measured.n_bytes
    plans = [choice.plan and choice.plan.shared for choice in (here, there)]
    assert plans[0] == plans[1]


def test_over_sites_runs_stop_and_rates_are_tuned_as_in_one_process(tmp_path: Path) -> None:
    config = RunConfig(dataset="heart", rounds=6, eval_every=1, epochs=1, patience=2, stack="off")
    asked: dict[str, Any] = {"arms": ("nothing", "all_but_last"), "tune_rates": 2}
    here = choose(config, tmp_path / "here", **asked)
    there = choose(config, tmp_path / "there", link=hospitals(tmp_path / "sites"), **asked)
    assert here.rates is not None
    assert there.rates is not None
    pd.testing.assert_frame_equal(there.rates.table, here.rates.table, check_exact=True)
    assert there.standing.best == here.standing.best
    runs = sorted(path.name for path in (tmp_path / "here" / "arms").iterdir())
    assert len(runs) == 3
    for name in runs:
        same_rows(tmp_path / "there" / "arms" / name, tmp_path / "here" / "arms" / name)


def test_a_choice_that_was_stopped_goes_on_over_the_sites(chosen: tuple[Path, Choice, Choice], tmp_path: Path) -> None:
    class Stopped(InMemoryTransport):
        """Whose sites go away in the middle of the second arm."""

        def ask(self, requests: Mapping[str, bytes], timeout: float | None = None, grace: Any = None) -> Any:
            if sum(decode(each).head["kind"] == "train" for each in requests.values()):
                self.rounds = getattr(self, "rounds", 0) + 1
                if self.rounds == 4:
                    raise KeyboardInterrupt
            return super().ask(requests, timeout)

    sites = hospitals(tmp_path / "sites")._sites
    with pytest.raises(KeyboardInterrupt):
        choose(RACE, tmp_path / "out", arms=ARMS, seeds=SEEDS, link=Stopped(sites))
    done = [Run(path).rounds for path in sorted((tmp_path / "out" / "arms").iterdir())]
    assert len(done) == 2
    assert done != [[2], [2]]
    again = choose(RACE, tmp_path / "out", arms=ARMS, seeds=SEEDS, link=InMemoryTransport(sites))
    _, here, _ = chosen
    pd.testing.assert_frame_equal(again.standing.rounds, here.standing.rounds, check_exact=True)
    assert again.winner.name == here.winner.name


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Policy(algorithms=("fedper",)), "'fedavg'.*fedper"),
        (Policy(never_send=("fc4",)), "layer 'fc4'"),
    ],
)
def test_what_a_site_does_not_allow_is_refused_before_a_race(tmp_path: Path, policy: Policy, says: str) -> None:
    link = hospitals(tmp_path / "sites", va=policy)
    with pytest.raises(RefusedError, match=says):
        choose(RACE, tmp_path / "out", arms=ARMS, link=link)
    assert not (tmp_path / "out").exists()


def test_other_data_than_a_choice_began_with_is_refused(tmp_path: Path) -> None:
    place = Federations(hospitals(tmp_path))
    data = place.task(RACE).data
    changed = [{**facts, "digest": "5f"} if facts["name"] == "va" else facts for facts in place.facts]
    place.facts = changed
    with pytest.raises(UsageError, match="'va'"):
        train([TrainingJob(tmp_path / "run", RACE)], place, progress=False)
    assert data.weights == load("heart").weights


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--workers 2", "--workers"),
        ("--backend local:2", "--backend"),
        ("--clients 3", "--clients"),
    ],
)
def test_what_a_choice_over_sites_cannot_have_is_refused(
    sites: InMemoryTransport, capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    with pytest.raises(SystemExit):
        fedlayers("choose", *AT, *words.split())
    assert says in capsys.readouterr().err
    assert not any(sites.sent.values())


def test_choose_prints_what_left_the_sites(sites: InMemoryTransport, capsys: pytest.CaptureFixture[str]) -> None:
    fedlayers("choose", *AT, *["--rounds", "2", "--eval-every", "1", "--arms", "half", "fedavg", "--out", "out"])
    said = capsys.readouterr().out
    table = traffic_by_site(*sorted(Path("out/arms").iterdir()))
    assert table.to_string() in said
    asked_apart = {name: sites.received[name] - table["all"][name] for name in HOSPITALS}  # hello and race
    assert all(0 < n < 2000 for n in asked_apart.values())


def test_three_seeds_over_sites_are_those_of_one_process(tmp_path: Path) -> None:
    """Each site answers for a third split of its data, as it may by default for five."""
    asked: dict[str, Any] = {"arms": ARMS, "seeds": (0, 1, 2), "complete": False}
    here = choose(RACE, tmp_path / "here", **asked)
    there = choose(RACE, tmp_path / "there", **asked, link=hospitals(tmp_path / "sites"))
    pd.testing.assert_frame_equal(there.standing.rounds, here.standing.rounds, check_exact=True)
    assert sorted(there.standing.judged["seed"].unique()) == [0, 1, 2]
    pd.testing.assert_frame_equal(there.inference.pairs, here.inference.pairs, check_exact=True)
    assert there.winner.name == here.winner.name


def test_a_site_that_answers_for_two_splits_refuses_the_third_seed(tmp_path: Path) -> None:
    link = hospitals(tmp_path / "sites", va=Policy(splits=2))
    with pytest.raises(RefusedError, match=r"'va'.*splits"):
        choose(RACE, tmp_path / "out", arms=ARMS, seeds=(0, 1, 2), link=link)


# --- what left the sites -----------------------------------------------------------------------------------------


def table_of(page: str) -> dict[str, dict[str, str]]:
    """A table of a page, by its first column and its head."""
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    return {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[1:]}


def test_the_report_of_a_run_shows_what_left_each_site(
    sites: InMemoryTransport, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path("run")
    fedlayers("federation", "run", *AT, "--algorithm", "playerfl", "--rounds", "1", "--out", str(out))
    assert f"report: {out / 'report.html'}" in capsys.readouterr().out
    page = (out / "report.html").read_text()
    shown, scores = (table_of(part) for part in page.split("<table>")[1:])
    lines = [json.loads(line) for line in (out / "left.jsonl").read_text().splitlines()]
    for site in HOSPITALS:
        for kind in KINDS:
            n = sum(int(line["value"]) for line in lines if (line["client"], line["variant"]) == (site, kind))
            assert shown[site].get(KINDS[kind], "0") == f"{n:,}", kind
        assert shown[site]["all"] == f"{sites.received[site]:,}"
    assert list(scores) == list(HOSPITALS)
    assert (out / "plan.json").exists()
    assert "fc2, fc3, fc4" in page


@pytest.mark.parametrize("line", ["{", "[1]", "[" * 1000, '{"value": 1}', -1.0, 1e300, "NaN"])
def test_a_forged_list_of_what_left_is_refused_in_one_line(line: Any, tmp_path: Path) -> None:
    known = rows.row("bytes_left", 1.0, client="va", variant="join")
    text = line if isinstance(line, str) and line != "NaN" else rows.dumps({**known, "value": line})
    (tmp_path / "left.jsonl").write_text(f"{rows.dumps(known)}\n{text}\n")
    with pytest.raises(CorruptError, match=r"left\.jsonl.* is damaged"):
        traffic_by_site(tmp_path)
