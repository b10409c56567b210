"""Whole runs in processes of this machine: the same files as in one, whatever happens to a process."""

import os
import sys
from dataclasses import replace

import pytest

import fedlayers as fl
from fedlayers.backends import cluster, local
from fedlayers.backends.local import (
    InProcessBackend,
    Local,
    carry_out,
    changed_files,
    write_files,
)
from fedlayers.decision.jobs import TrainingJob, check_stored, open_backend
from fl_core.config import RunConfig
from fl_core.errors import RunError, UsageError, WorkerError
from fl_core.records.store import Run
from fl_core.run.task import assemble
from fl_core.storage import Folder
from tests.conftest import refuses
from tests.faults.injected import contents
from tests.fedlayers.backends.works import Toy

CONFIG = RunConfig(dataset="heart", rounds=3, eval_every=1, checkpoint_every=1)
pytestmark = pytest.mark.filterwarnings("ignore:client")


@pytest.fixture(scope="module")
def two():
    """Two processes, started once."""
    with open_backend("local:2") as place:
        assert isinstance(place, Local)
        yield place


def toys(tmp_path, *given):
    works = [Toy(tmp_path / str(k), **fields) for k, fields in enumerate(given)]
    for work in works:
        work.path.mkdir()
    return works


def ended(place, works):
    results = {}
    carry_out(
        works,
        place,
        lambda r, _: results.update({r.work.path: r}),
        total=len(works),
    )
    return results


def test_results_errors_and_warnings_come_from_processes_of_one_thread(tmp_path, two):
    works = toys(
        tmp_path, {}, {"fails": "usage"}, {"fails": "run"}, {"fails": "other"}, {}
    )
    with pytest.warns(UserWarning, match="of note"):
        results = ended(two, works)
    errors = [results[work.path].error for work in works]
    assert [type(error) for error in errors] == [
        type(None),
        UsageError,
        RunError,
        KeyError,
        type(None),
    ]
    assert "in carry_out" in errors[3].__notes__[0]
    pid, threads = results[works[0].path].value
    assert pid != os.getpid()
    assert threads == "1"


def test_the_work_of_a_lost_process_is_begun_again_but_not_for_ever(
    tmp_path, two, monkeypatch
):
    monkeypatch.setattr(local, "TRIES", 2)
    works = toys(tmp_path, {"dies": 1}, {"dies": 9})
    with pytest.warns(UserWarning, match=r"code -9.*toy"):
        results = ended(two, works)
    assert results[works[0].path].error is None
    error = results[works[1].path].error
    assert isinstance(error, WorkerError)
    assert "toy was lost 2 times" in str(error)


def test_a_process_that_ends_itself_is_not_begun_again(tmp_path, two):
    (work,) = toys(tmp_path, {"fails": "exit"})
    error = ended(two, [work])[work.path].error
    assert isinstance(error, WorkerError)
    assert "toy: its process ended with exit code 7" in str(error)
    assert len(list(work.path.iterdir())) == 1


def test_what_raises_ends_the_others(tmp_path, two):
    def strict(result, _):
        if result.error:
            raise result.error

    with refuses("what is wrong"):
        carry_out(
            toys(tmp_path, {"fails": "usage"}, {}, {}),
            two,
            strict,
            total=3,
        )
    (tmp_path / "again").mkdir()
    (result,) = ended(two, toys(tmp_path / "again", {})).values()
    assert result.error is None


@pytest.mark.filterwarnings("ignore:of note")
@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_written_where_it_is_wanted(tmp_path, capsys, progress):
    how = {"total": 1, "progress": progress}
    carry_out(toys(tmp_path, {}), InProcessBackend(), lambda *_: None, **how)
    assert ("1 of 1 run" in capsys.readouterr().err) == progress


@pytest.mark.slow
def test_a_comparison_and_a_race_have_the_same_files_as_in_one_process(tmp_path, two):
    """PLayer-FL decides in its first round there, too."""
    for folder, on in (("here", ""), ("there", two)):
        fl.compare(
            CONFIG,
            ["local", "playerfl"],
            [0],
            tmp_path / folder,
            backend=on,
            command="typed",
        )
    assert contents(tmp_path / "here") == contents(tmp_path / "there")
    for name in ("local-0", "playerfl-0"):
        assert Run(tmp_path / "there/runs" / name).verify()[-1].startswith("3 of 3")


def test_a_job_asks_for_a_graphics_card_if_its_device_is_one(tmp_path):
    jobs = (TrainingJob(tmp_path, CONFIG.with_keys(device=d)) for d in ("cpu", "cuda"))
    assert [job.gpus for job in jobs] == [0, 1]


def test_a_job_for_another_machine_needs_nothing_of_the_study_s_folder(tmp_path):
    job = TrainingJob(tmp_path / "run", CONFIG, until=2)
    away = job.sent_to(None)
    assert (away.path, away.config, away.away) == (job.path, job.resolved, True)
    there = away.sent_to(tmp_path / "there")
    assert there == replace(away, path=tmp_path / "there")


# --- a run directory as bytes ----------------------------------------------------------------------------------


def test_a_run_that_is_carried_after_every_checkpoint_goes_on_anywhere(
    tmp_path,
):
    """Begun in one folder, carried, gone on with in a second from what arrived, carried back: the undisturbed bits."""
    whole, first, second, home = (
        tmp_path / folder / "run" for folder in ("whole", "first", "second", "home")
    )
    TrainingJob(whole, CONFIG).carry_out()
    TrainingJob(first, CONFIG, until=2).carry_out()
    for parcel in changed_files(first, {}, over=False):
        write_files(home, parcel)
    assert Run(home).verify()[-1].startswith("2 of 3")
    sent = {}
    for parcel in changed_files(home, sent, over=True):
        write_files(second, parcel)
    assert not list(changed_files(second, sent, over=False)), (
        "nothing has been written there"
    )
    TrainingJob(second, CONFIG).carry_out()
    for parcel in changed_files(second, sent, over=True):
        write_files(home, parcel)
    assert contents(home) == contents(whole)


def test_a_run_that_arrived_in_part_is_begun_or_goes_on(tmp_path):
    """The receiver is killed after each file. What it has can be sent on, and be trained to its end."""
    short = CONFIG.with_keys(rounds=1)
    TrainingJob(tmp_path / "run", short).carry_out()
    (parcel,) = changed_files(tmp_path / "run", {}, over=True)
    task = assemble(short)
    for count in range(len(parcel)):
        home, node = (
            TrainingJob(tmp_path / f"{place}{count}/run", short)
            for place in ("home", "node")
        )
        home.path.mkdir(parents=True)
        with Folder(home.path).locked():
            write_files(home.path, dict([*parcel.items()][:count]))
        for part in changed_files(home.path, {}, over=True):
            write_files(node.path, part)
        for job in (node, home):
            check_stored(job.path, task)
        home.carry_out()
        assert contents(home.path) == contents(tmp_path / "run")


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "blobs/x", "a.py"])
def test_what_is_no_file_of_a_run_is_not_written(tmp_path, name):
    with refuses("name of a file", RunError):
        write_files(tmp_path / "run", {name: b""})
    assert not list((tmp_path / "run").iterdir())


# --- by name ---------------------------------------------------------------------------------------------------


def test_places_by_name():
    with (
        open_backend("") as here,
        open_backend("local:1") as one,
        open_backend(here) as same,
        open_backend("", 3, parallel=True) as three,
    ):
        assert isinstance(one, InProcessBackend)
        assert (same is here, three.side_by_side) == (True, 3)
    with refuses("workers"), open_backend("local:2", 2):
        pass


def test_ray_is_asked_for_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with refuses(r"'fedlayers\[ray\]'"), open_backend("ray"):
        pass


def test_a_cluster_that_is_not_there_is_refused_at_once():
    pytest.importorskip("ray")
    with (
        refuses(r"127\.0\.0\.1:1"),
        open_backend("ray:127.0.0.1:1"),
    ):
        pass


class LateRay:
    """Ray, whose parts are late a number of times."""

    def __init__(self, late):
        self.late, self.ended = late, 0

    def is_initialized(self):
        return False

    def init(self, address, **_):
        self.late -= 1
        if self.late >= 0:
            raise Exception(
                "The current node timed out during startup.\nSecond line."
            )  # as Ray does

    def shutdown(self):
        self.ended += 1


@pytest.mark.parametrize(
    ("late", "address", "started"),
    [(2, "", True), (3, "", False), (1, "h:1", False)],
)
def test_a_late_cluster_is_started_again_and_given_up_in_one_line(
    late, address, started, monkeypatch
):
    ray = LateRay(late)
    monkeypatch.setattr(cluster, "reachable", lambda _: ray)
    if started:
        assert cluster.connect(address) == (ray, True)
    else:
        with refuses(r"^a Ray cluster .* timed out during startup\. Try .*\.$"):
            cluster.connect(address)
    assert ray.ended == late, "what is half started is ended"
