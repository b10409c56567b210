"""The run directory: what goes in comes out, the same bits, and what does not fit is refused by name."""

import os
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fl_core import rows, storage, tree
from fl_core.algorithms.base import State
from fl_core.errors import CorruptError
from fl_core.records import writing
from fl_core.records.store import Checkpoint, Run
from fl_core.storage import Folder
from tests.conftest import refuses
from tests.faults.injected import BEGUN, read_all

CONFIG = {**BEGUN, "name": "Zürich/北京"}
PARTITION = {
    "meta": torch.arange(5, dtype=torch.uint8),
    "0/train": torch.tensor([0, 2, 4]),
}
HEADER = {"run": "r", "layers": []}

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="|"), max_size=12)
KEYS = st.text(
    st.characters(codec="utf-8"), max_size=12
)  # of tensors: anything goes, the separator too
META = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=3,
)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = (
        torch.randn(
            shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
        )
        * 9
    )
    return values.to(draw(st.sampled_from(DTYPES)))


TREES = st.dictionaries(KEYS, tensors(), max_size=3)
STATES = st.builds(State, st.dictionaries(NAMES, TREES, max_size=3), META)


BEFORE = (CONFIG, PARTITION, HEADER)


@pytest.fixture
def begun(tmp_path):
    """A writer of a run that has begun."""
    with writing.create(tmp_path / "run", *BEFORE) as writer:
        yield writer


def a_row(done):
    return rows.row(
        "accuracy", 0.5, round=done, client="é", model="global", split="test"
    )


def checkpoint(done=1, clients=("a",), value=1.0):
    model = {"fc.weight": torch.full((2, 2), value)}
    states = {
        name: State({"model": {"head/bias": torch.full((2,), value + i)}})
        for i, name in enumerate(clients)
    }
    return Checkpoint(done, State({"model": model}, {"plan": None}), states, {})


def same_states(ours, theirs):
    assert ours.meta == theirs.meta
    assert ours.trees.keys() == theirs.trees.keys()
    for name, expected in theirs.trees.items():
        assert ours.trees[name].keys() == expected.keys()
        assert tree.digest(ours.trees[name]) == tree.digest(
            expected
        )  # types, shapes, and bits


def blobs(run):
    return {path.stem for path in (run.path / "blobs").glob("*")}


@pytest.mark.parametrize("files", range(5))
def test_a_run_killed_before_it_began_is_none(tmp_path, monkeypatch, files):
    written, write = [], Folder.write

    def dying(self, name, data, **how):
        if len(written) == files:
            raise OSError("killed")
        written.append(name)
        write(self, name, data, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write", dying)
        with (
            nullcontext() if files == 4 else pytest.raises(OSError, match="killed"),
            writing.create(tmp_path, *BEFORE, start=PARTITION),
        ):
            pass
    if files < 4:
        with refuses("run must be"):
            Run(tmp_path)
        with writing.create(tmp_path, *BEFORE):
            pass
    assert Run(tmp_path).verify()[-1].startswith("0 of")


@settings(max_examples=30, deadline=None)
@given(
    server=STATES,
    clients=st.dictionaries(KEYS, STATES, max_size=3),
    models=st.dictionaries(
        st.sampled_from(["local", "personal"]),
        st.dictionaries(KEYS, TREES, min_size=1, max_size=2),
        max_size=2,
    ),
)
def test_any_states_come_back(tmp_path_factory, server, clients, models):
    path = tmp_path_factory.mktemp("run")
    with writing.create(path, CONFIG, {}, HEADER) as writer:
        writer.checkpoint(Checkpoint(7, server, clients, models))
    checkpoint = Run(path).checkpoint()
    assert checkpoint.round == 7
    same_states(checkpoint.server, server)
    assert checkpoint.clients.keys() == clients.keys()
    for name, state in clients.items():
        same_states(checkpoint.clients[name], state)
    assert {kind: set(trees) for kind, trees in checkpoint.models.items()} == {
        k: set(v) for k, v in models.items()
    }
    for kind, trees in models.items():
        for name, expected in trees.items():
            assert tree.digest(checkpoint.models[kind][name]) == tree.digest(expected)
    Run(path).verify()


def test_what_is_not_contiguous_or_shares_memory(begun):
    base = torch.arange(6.0).reshape(2, 3)
    trees = {
        "a": {"t": base.T, "one": base},
        "b": {"one": base, "row": base[1], "wide": base[:, :1].expand(2, 4)},
    }
    begun.checkpoint(Checkpoint(1, State(trees), {}, {}))
    server = begun.run.checkpoint().server
    same_states(server, State(trees))
    server.trees["a"]["one"].zero_()  # they come back apart
    assert torch.equal(server.trees["b"]["one"], base)


def test_unchanged_states_are_stored_once(begun):
    begun.checkpoint(checkpoint(1))
    first = blobs(begun.run)
    begun.checkpoint(checkpoint(2))
    assert blobs(begun.run) == first
    begun.checkpoint(checkpoint(3, value=2.0))
    assert len(blobs(begun.run)) == 2 * len(first)


def test_a_damaged_blob_is_written_anew(begun):
    begun.checkpoint(checkpoint(1))
    for path in (begun.path / "blobs").iterdir():
        path.write_bytes(b"x" + path.read_bytes()[1:])
    (begun.path / "checkpoints" / "000001.json").unlink()
    with store_again(begun) as writer:
        writer.rewind(read_all)
        writer.checkpoint(checkpoint(1))
    begun.run.verify()


def store_again(writer):
    """A second writer of a directory whose first is still held by the fixture: as after a kill."""
    os.unlink(writer.path / "lock")
    return writing.reopen(writer.path)


def test_rewind_cuts_to_the_last_checkpoint(begun):
    begun.add_rows([a_row(1)])
    begun.checkpoint(checkpoint(1))
    whole = (begun.path / "rows.jsonl").read_bytes()
    begun.add_rows([a_row(2)])
    with (begun.path / "rows.jsonl").open("ab") as file:
        file.write(b'{"run":"r","torn')
    assert begun.run.rows()[1]["round"].tolist() == [1, 2], (
        "readable while a line is being written"
    )
    with store_again(begun) as writer:
        assert writer.rewind(read_all) == 1
        assert (begun.path / "rows.jsonl").read_bytes() == whole
        writer.add_rows([a_row(2)])
        writer.checkpoint(checkpoint(2))
    run = Run(begun.path)
    assert run.rows()[1]["round"].tolist() == [1, 2]
    assert "not covered" not in run.verify()[-2]


def test_rows_are_on_the_disk_before_the_manifest_that_covers_them(begun, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    target = (begun.path / "rows.jsonl").stat().st_ino

    def noting_fsync(handle):
        order.append("rows" if os.fstat(handle).st_ino == target else "")
        fsync(handle)

    def noting_replace(source, to, **folders):
        order.append("manifest" if to.name == "000001.json" else "")
        replace(source, to, **folders)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    begun.add_rows([a_row(1)])
    begun.checkpoint(checkpoint(1))
    assert order.index("rows") < order.index("manifest")


def test_a_folder_without_a_run_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with refuses(rf"run.*{path}"):
            Run(path)
        with refuses(rf"run.*{path}"), writing.reopen(path):
            pass
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_are_found_by_their_rounds(begun):
    with refuses("checkpoint"):
        begun.run.checkpoint()
    with refuses("checkpoint"):
        assert begun.run.early_round
    for done in (2, 10, 4):
        begun.checkpoint(checkpoint(done, value=float(done)))
    run = begun.run
    assert run.rounds == [2, 4, 10]
    assert run.early_round == 10
    for which, done in ((2, 2), ("4", 4), ("last", 10)):
        loaded = run.checkpoint(which)
        assert float(loaded.server.trees["model"]["fc.weight"][0, 0]) == loaded.round
        assert loaded.round == done
    for which in (1, 3, -1, "5"):
        with refuses(rf"2, 4, 10.*got {which}"):
            run.checkpoint(which)


def test_a_tree_whose_name_has_the_separator(begun):
    with refuses(r"'mo\|del'"):
        begun.checkpoint(Checkpoint(1, State({"mo|del": {"w": torch.ones(1)}}), {}, {}))
    assert begun.run.rounds == []


def test_meta_that_is_no_json(begun):
    with pytest.raises(TypeError, match=r"Tensor.*JSON"):
        begun.checkpoint(Checkpoint(1, State({}, {"t": torch.ones(1)}), {}, {}))
    with pytest.raises(ValueError, match="JSON compliant"):
        begun.checkpoint(Checkpoint(1, State({}, {"x": float("nan")}), {}, {}))
    assert begun.run.rounds == []


SIGNED = storage.sign({"rounds": 3, "name": "a"})


def test_signed_json_is_read_with_its_own_bytes_alone(tmp_path):
    folder = Folder(tmp_path)
    folder.write("a.json", SIGNED)
    assert folder.read_signed("a.json") == {"rounds": 3, "name": "a"}
    digest = storage.sha(b"")
    for changed in (
        SIGNED.replace(b"3", b"4"),
        SIGNED.replace(b" ", b"  "),
        SIGNED + b"\n",
        storage.json_bytes({"rounds": 3, "name": "a", "sha256": digest}),
    ):
        folder.write("a.json", changed)
        with refuses("do not match its digest", CorruptError):
            folder.read_signed("a.json")
    folder.write("a.json", storage.json_bytes({"rounds": 3}))
    with refuses("it has no digest", CorruptError):
        folder.read_signed("a.json")
