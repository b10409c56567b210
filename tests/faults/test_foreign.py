"""A run directory of somebody else: no file outside it is used, no pipe blocks, and no foreign file is accepted."""

import json
import os
import shutil
import threading
from inspect import signature
from pathlib import Path

import pytest

import fedlayers as fl
from fl_core import plan, rows, storage
from fl_core.config import RunConfig
from fl_core.errors import CorruptError
from fl_core.records import store, writing
from fl_core.records.store import Run
from fl_core.rounds import recorder
from fl_core.run import runner
from tests.conftest import refuses
from tests.faults.injected import contents, forge, read_all

ROUNDS = 4
CONFIG = RunConfig(
    algorithm="fedper", rounds=ROUNDS, epochs=1, checkpoint_every=1, eval_every=2
)


def made(path, **changes):
    runner.run(CONFIG.with_keys(**changes), path)
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A finished run that nobody touches."""
    return made(tmp_path_factory.mktemp("sound") / "run")


@pytest.fixture(
    scope="module",
    params=[{"seed": 1}, {"epochs": 2}],
    ids=["another seed", "other training"],
)
def other(request, tmp_path_factory):
    """A finished run that differs in one respect."""
    return made(tmp_path_factory.mktemp("other") / "run", **request.param)


@pytest.fixture
def run(sound, tmp_path):
    """A copy of a run that stopped after its third round, whose last checkpoint was being written."""
    path = Path(shutil.copytree(sound, tmp_path / "run"))
    (path / f"checkpoints/{ROUNDS:06d}.json").unlink()
    lines = [
        line
        for line in (path / "timing.jsonl").read_text().splitlines()
        if json.loads(line)["round"] < ROUNDS
    ]
    (path / "timing.jsonl").write_text("\n".join(lines) + "\n")
    return path


def resume(path):
    runner.resume(path)


FILES = [
    *(
        "lock",
        "config.json",
        "partition.safetensors",
        "rows.jsonl",
    ),
    *("timing.jsonl", "checkpoints/000003.json"),
]


@pytest.mark.parametrize("name", [*FILES, "blobs", "checkpoints"])
def test_a_link_out_of_the_directory_is_not_followed(run, tmp_path, name):
    """The link leads to the same files elsewhere. A run that followed it would change them there."""
    elsewhere = tmp_path / "outside"
    outside = elsewhere / name
    outside.parent.mkdir(parents=True)
    shutil.move(run / name, outside)
    (run / name).symlink_to(outside)
    if name == "blobs":
        for mine in (
            "0" * 64 + ".safetensors",
            "mine.safetensors",
            "1" * 64 + ".7.part",
        ):
            (outside / mine).write_bytes(b"mine")
    before = contents(elsewhere, ())
    with refuses(rf"run/{name} .*link", CorruptError):
        resume(run)
    assert contents(elsewhere, ()) == before
    assert (run / name).is_symlink()


def test_a_link_out_of_the_folder_of_a_study_is_not_followed(tmp_path):
    """No run is read or written through it, and nothing is trained."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    arguments = {"algorithms": ["fedavg"], "seeds": [0], "search": {"lr": "0.1,1"}}
    for study in (fl.choose, fl.compare, fl.study, fl.tune):
        parameters = signature(study).parameters if study is not fl.choose else ()
        study_arguments = {
            key: value for key, value in arguments.items() if key in parameters
        }
        for name in ("arms", "runs/fedavg-0", "arms/fedavg-0", "plan.json"):
            out = tmp_path / f"{study.__name__} {name.replace('/', ' ')}"
            (out / name).parent.mkdir(parents=True)
            (out / name).symlink_to(elsewhere)
            with refuses(rf"{out}/{name} .*link", CorruptError):
                study(CONFIG, out=out, **study_arguments)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("name", [*FILES, "blobs", "checkpoints"])
def test_a_pipe_is_not_waited_for(run, name):
    path, failed = run / name, []
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.mkfifo(path)

    def going():
        with pytest.raises(CorruptError) as caught:
            resume(run)
        failed.append(str(caught.value))

    thread = threading.Thread(target=going, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits for somebody to write"
    assert str(path) in failed[0]
    assert "regular" in failed[0]


def test_a_file_that_is_also_elsewhere_is_not_written_to(run, tmp_path):
    """A backup may be such a copy of hard links."""
    copies = [tmp_path / name for name in ("rows.jsonl", "timing.jsonl")]
    for copy in copies:
        os.link(run / copy.name, copy)
    before = [copy.read_bytes() for copy in copies]
    resume(run)
    assert [copy.read_bytes() for copy in copies] == before
    assert Run(run).verify()


def test_a_name_leads_nowhere_else(run):
    folder = storage.Folder(run)
    long = ("a" * 300, "a/" * 3000 + "b", "a\0", "\ud800")
    for blob in ("../../outside", "/etc/passwd", ".", "a/../../b", "", *long):
        for act in (folder.read, folder.remove, folder.has):
            with refuses("below", CorruptError):
                act(f"blobs/{blob}")


def test_only_tensors_that_no_checkpoint_names_are_swept(run, sound):
    """They are of an unfinished checkpoint. Files of other names stay."""

    def blobs():
        return {path.name for path in (run / "blobs").iterdir()}

    mine = {"blobs/thesis.safetensors": b"mine", "blobs/notes.part": b"mine"}
    for name, data in mine.items():
        (run / name).write_bytes(data)
    before, stored_run = blobs(), Run(run)
    with writing.reopen(run) as writer:
        assert writer.rewind(read_all) == ROUNDS - 1
    states = [
        s for k in stored_run.rounds for s in stored_run.manifest(k)["states"].values()
    ]
    named = {f"{state['blob']}.safetensors" for state in states if state["blob"]}
    assert blobs() == named | {"thesis.safetensors", "notes.part"} < before
    resume(run)
    assert contents(run) == {**contents(sound), **mine}
    assert Run(run).verify()


def test_nothing_is_swept_if_a_damaged_checkpoint_may_name_it(run):
    (run / "checkpoints/000001.json").write_bytes(b"{}")
    before = {path.name for path in (run / "blobs").iterdir()}
    with writing.reopen(run) as writer:
        writer.rewind(read_all)
    assert {path.name for path in (run / "blobs").iterdir()} == before


def test_parts_of_files_are_swept(run):
    blob = "blobs/" + "a" * 64 + ".safetensors"
    names = ("rows.jsonl", "config.json", "checkpoints/000004.json", blob)
    ours = [f"{name}.77.part" for name in names]
    users = ["thesis.part", "thesis.tex.77.part", "blobs/mine.part"]
    users.append("checkpoints/notes.1.part")
    for name in (*ours, *users):
        (run / name).write_bytes(b"half")
    with writing.reopen(run):
        pass
    assert [name for name in ours if (run / name).exists()] == []
    assert [name for name in users if (run / name).exists()] == users


COVERED = [
    *("rows.jsonl", "partition.safetensors"),
    *(f"checkpoints/{k:06d}.json" for k in range(1, ROUNDS + 1)),
]


@pytest.mark.parametrize("name", COVERED)
def test_verify_names_the_file_that_is_another_runs(sound, other, tmp_path, name):
    path = Path(shutil.copytree(sound, tmp_path / "run"))
    if (path / name).read_bytes() == (other / name).read_bytes():
        assert name == "partition.safetensors", "the two share it"
        return
    shutil.copy(other / name, path / name)
    with pytest.raises(CorruptError) as caught:
        Run(path).verify()
    assert str(caught.value).startswith(f"{path / name} ")


@pytest.mark.parametrize("name", [COVERED[-1], "config.json"])
def test_resume_refuses_another_runs_manifest_and_changes_nothing(
    sound, other, tmp_path, name
):
    path = Path(shutil.copytree(sound, tmp_path / "run"))
    shutil.copy(other / name, path / name)
    shutil.copytree(other / "blobs", path / "blobs", dirs_exist_ok=True)
    before = contents(path)
    with refuses(str(path), CorruptError):
        resume(path)
    assert contents(path) == before


def other_versions(current):
    """A newer and an older format, each with what to do."""
    kind, _, number = current.rpartition("/")
    return [
        (f"{kind}/{int(number) + 1}", "update yours"),
        (f"{kind}/{int(number) - 1}", "train again"),
    ]


@pytest.mark.parametrize(("other", "remedy"), other_versions(store.FORMAT))
def test_a_run_of_another_version_is_refused_by_name(run, other, remedy):
    forge(run / "config.json", lambda found: found.update(format=other))
    before = contents(run)
    message = rf"run.*{store.FORMAT}.*{other}.*{remedy}"
    for reader in (resume, lambda path: Run(path).config):
        with refuses(message):
            reader(run)
    assert contents(run) == before


def test_rows_and_plans_of_other_versions_are_refused_by_name(run, tmp_path):
    path, newer = tmp_path / "rows.jsonl", rows.SCHEMA + 1
    text = (run / "rows.jsonl").read_text()
    schema = f'"schema":{rows.SCHEMA}', f'"schema":{newer}'
    path.write_text(text.replace(*schema, 1))
    with refuses(rf"rows\.jsonl.*rows/{newer}.*update yours"):
        rows.read(path)
    data, path = Run(run).plan(), tmp_path / "plan.json"
    for other, remedy in other_versions(plan.FORMAT):
        path.write_text(json.dumps({**data, "format": other}))
        with refuses(rf"plan\.json.*{other}.*{remedy}"):
            plan.LayerPlan.load(path)


@pytest.mark.parametrize(
    "name",
    ["blobs", "rows.jsonl", "checkpoints/000002.json", "timing.jsonl"],
)
def test_verify_and_reading_follow_none_either(run, tmp_path, name):
    shutil.move(run / name, tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    with refuses(rf"{name} .*link", CorruptError):
        recorder.read_pace(run / name) if name == "timing.jsonl" else Run(run).verify()


def test_the_directory_itself_may_be_a_link(run, sound, tmp_path):
    (tmp_path / "by name").mkdir()
    named = tmp_path / "by name" / "run"
    named.symlink_to(run)
    resume(named)
    assert Run(named).verify()
    assert contents(run) == contents(sound)
