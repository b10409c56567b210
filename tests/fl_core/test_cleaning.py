"""Runs on less disk: their rows are packed, equal files of several are one, and each can still be read by itself."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest

from fedlayers.cli.app import main
from fl_core import limits, rows, runner
from fl_core.config import RunConfig
from fl_core.errors import CorruptError
from fl_core.records.store import Run
from fl_core.records.writing import clean
from fl_core.storage import files
from fl_core.storage.files import compress_bytes
from tests.faults.injected import contents

CONFIG = RunConfig(
    dataset="heart",
    algorithm="fedper",
    rounds=2,
    epochs=1,
    checkpoint_every=1,
    stack="off",
)
PACKED = "rows.jsonl.gz"
pytestmark = pytest.mark.filterwarnings("ignore:client 'switzerland' has")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run after its first of two rounds, and a whole one with the same seed. Nobody touches them."""
    path = tmp_path_factory.mktemp("made")
    runner.run(CONFIG, path / "half", progress=False, until=1)
    runner.run(CONFIG, path / "whole", progress=False)
    return path


@pytest.fixture
def study(made, tmp_path):
    """A copy of both, to be cleaned."""
    return Path(shutil.copytree(made, tmp_path / "study"))


def one_file(*paths):
    return len({(path.stat().st_dev, path.stat().st_ino) for path in paths}) == 1


def blobs(run):
    return {path.name: path for path in (run / "blobs").iterdir()}


# --- packed rows -----------------------------------------------------------------------------------------------


def test_packed_rows_are_read_as_plain_ones_are(study):
    run = Run(study / "whole")
    plain, size = run.rows(), (run.path / "rows.jsonl").stat().st_size
    clean(run.path)
    assert not (run.path / "rows.jsonl").exists()
    assert (run.path / PACKED).stat().st_size < size / 4
    assert run.header() == plain[0]
    assert run.rows()[1].equals(plain[1])
    for path in (run.path / "rows.jsonl", run.path / PACKED):
        assert rows.read(path)[1].equals(plain[1])
    assert run.verify()


def test_a_run_with_packed_rows_resumes_to_the_same_bytes(study):
    clean(study / "half")
    runner.resume(study / "half", progress=False)
    assert not (study / "half" / PACKED).exists()
    found, expected = Run(study / "half").rows()[1], Run(study / "whole").rows()[1]
    assert found.drop(columns="run").equals(expected.drop(columns="run"))
    assert Run(study / "half").verify()


@pytest.mark.parametrize("damage", ["short", "flipped", "other", "bomb", "link"])
def test_damaged_packed_rows_are_refused_by_name(study, damage):
    run = study / "whole"
    clean(run)
    data = bytearray((run / PACKED).read_bytes())
    (run / PACKED).unlink()
    if damage == "short":
        (run / PACKED).write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
        (run / PACKED).write_bytes(data)
    elif damage == "other":
        (run / PACKED).write_bytes(compress_bytes(b'{"schema":1}\n'))
    elif damage == "bomb":
        (run / PACKED).write_bytes(compress_bytes(bytes(1 << 22)))
    else:
        (run.parent / "outside").write_bytes(data)
        (run / PACKED).symlink_to(run.parent / "outside")
    for read in (Run(run).verify, lambda: runner.resume(run, progress=False)):
        with pytest.raises(CorruptError, match=PACKED):
            read()


@pytest.mark.parametrize("pack_it", [True, False])
def test_a_check_says_how_many_rows_no_checkpoint_covers(study, pack_it):
    run, name = study / "whole", PACKED if pack_it else "rows.jsonl"
    if pack_it:
        clean(run)
    more = (
        (run / "rows.jsonl").read_bytes()
        if not pack_it
        else gzip.decompress((run / PACKED).read_bytes())
    )
    more = more.splitlines(keepends=True)[-1]
    with (run / name).open("ab") as file:
        file.write(compress_bytes(more) if pack_it else more)
    assert any(f"{len(more):,} bytes after" in line for line in Run(run).verify())


def test_what_unpacks_to_far_more_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "UNPACKED", 1 << 16)
    (tmp_path / PACKED).write_bytes(
        compress_bytes(b'{"schema":1}\n' + b" " * (1 << 22))
    )
    with pytest.raises(CorruptError, match=f"{PACKED}.*100 times"):
        rows.read(tmp_path / PACKED)


def test_incomplete_files_of_a_killed_writer_are_removed(study):
    parts = [study / "half" / f"{name}.1.part" for name in ("cleaned.json", PACKED)]
    for part in (*parts, study / "half" / "mine.1.part"):
        part.write_text("half")
    clean(study / "half")
    assert [path.name for path in (study / "half").glob("*.part")] == ["mine.1.part"]


def test_a_run_of_a_newer_version_stops_no_other(study, capsys):
    shutil.copytree(study / "whole", study / "newer")
    manifest = files.Folder(study / "newer").read_signed("manifest.json")
    files.Folder(study / "newer").write(
        "manifest.json", files.sign({**manifest, "format": "fedlayers.run/9"})
    )
    before = contents(study / "newer")
    main(["clean", str(study)])
    assert "newer" in capsys.readouterr().out
    assert contents(study / "newer") == before
