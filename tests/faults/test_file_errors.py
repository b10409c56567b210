"""Every system call that writes a run fails once: no committed round is lost, and the run resumes."""

import errno
import itertools
import shutil

import pytest
import torch

from fl_core import rows, storage
from fl_core.algorithms import State
from fl_core.records import writing
from fl_core.records.store import Checkpoint, Run
from tests.faults.injected import BEGUN, CALLS, FailingOS, contents, read_all

ROUNDS = 2
CODES = {
    "open": (errno.EMFILE, errno.ENOSPC),
    "mkdir": (errno.ENOSPC, errno.EROFS),
    "write": (errno.ENOSPC, errno.EDQUOT),
    "close": (
        errno.EIO,
    ),  # where a network's file system tells of what it could not write
    "fsync": (errno.EIO, errno.ESTALE),
    "replace": (errno.EXDEV, errno.EIO),
    "unlink": (errno.EACCES, errno.EIO),
    "stat": (errno.ESTALE,),
    "listdir": (errno.EIO,),
}
assert CODES.keys() == set(CALLS)


def state(*marks):
    return State(
        {"model": {"w": torch.tensor([float(mark) for mark in marks])}},
        {"marks": list(marks)},
    )


def write(path, committed, system=None):
    """A run as the engine has it written, from where it is to its end; only its tensors are made up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "os", system or FailingOS())
        written(path, ROUNDS, committed)


def written(path, until, committed):
    if (path / "config.json").exists():
        with writing.reopen(path) as writer:
            on(writer, writer.rewind(read_all), until, committed)
    else:
        config = {**BEGUN, "rounds": ROUNDS, "checkpoint_every": 1}
        before = config, {"0/train": torch.arange(5)}, {"version": "0"}
        with writing.create(path, *before) as writer:
            on(writer, 0, until, committed)


def on(writer, done, until, committed):
    for k in range(done + 1, until + 1):
        writer.add_rows(
            [
                rows.row("accuracy", k / 10, round=k, client=client)
                for client in ("a", "b")
            ]
        )
        clients = {"a": state(k), "b": state(7)}  # one of them does not change
        writer.checkpoint(
            Checkpoint(k, state(k, k), clients, {"local": {"a": {"w": torch.ones(k)}}})
        )
        committed.append(k)
        writer.add_timing({"round": k})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The files of a run that nothing disturbed."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    write(path, [])
    return contents(path)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run that was killed while it wrote its second checkpoint."""
    path = tmp_path_factory.mktemp("interrupted") / "run"
    write(path, [])
    (path / "checkpoints/000002.json").unlink()
    (path / f"blobs/{'0' * 64}.safetensors.7.part").write_bytes(b"half")
    return path


def cases():
    """Quick are those where something is made that lasts; the whole matrix takes a minute."""
    for call in CALLS:
        for start in ("new", "interrupted"):
            for done in (False, True):
                lasting = call in ("write", "fsync", "replace") or (
                    call in ("mkdir", "unlink") and start == "new"
                )
                marks = () if lasting and not done else pytest.mark.slow
                name = f"{call}-{start}" + "-done, and said to have failed" * done
                yield pytest.param(call, start, done, id=name, marks=marks)


@pytest.mark.parametrize(("call", "start", "done"), list(cases()))
def test_every_call_fails_once(tmp_path, undisturbed, interrupted, call, start, done):
    """The k-th call of its kind, for every k, in a new run and in one that resumes after a kill."""
    before = interrupted if start == "interrupted" else None
    for which in itertools.count(1):
        path = tmp_path / str(which)
        if before:
            shutil.copytree(before, path)
        code = CODES[call][which % len(CODES[call])]
        committed = [1] if before else []
        failing, reported = FailingOS(call, which, code, done), None
        try:
            write(path, committed, failing)
        except OSError as error:
            reported = error
        if not failing.failed:  # there is no such call any more
            assert reported is None
            assert which > 1 or (call, start) == ("mkdir", "interrupted"), (
                "a run that goes on has its folders"
            )
            break
        assert reported, "a failure passed unseen"
        assert reported.errno == code
        assert str(path) in str(reported), "the message names no path"
        if committed:
            assert set(committed) <= set(Run(path).rounds)
            assert Run(path).verify()
        write(path, [])
        assert contents(path) == undisturbed
        assert Run(path).verify()
        shutil.rmtree(path)


def test_the_file_layer_fails_when_it_is_told_to(tmp_path):
    """The layer sees all that the run writes."""
    counting = FailingOS()
    write(tmp_path / "run", [], counting)
    named = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and path.name not in ("lock", "timing.jsonl", "rows.jsonl")
    ]
    assert counting.counts["replace"] == len(named) + 1  # and once the rows' header
    assert counting.counts["fsync"] > counting.counts["replace"]
    assert not counting.failed
