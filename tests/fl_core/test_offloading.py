"""Trees beyond the memory they may take, and what a federation of many clients holds."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fl_core import runner, tree
from fl_core.algorithms import registry
from fl_core.algorithms.averaging import FedAvg
from fl_core.algorithms.base import State
from fl_core.errors import UsageError
from fl_core.execution import batched_clients, offloading
from fl_core.execution.offloading import OBJECT, ClientStates, OffloadedTrees
from fl_core.plan import LayerPlan
from fl_core.records import store, writing
from tests.conftest import CONFIG, Played, federation, network, play

SIZES = [14 + k % 5 for k in range(20)]
MANY = federation(SIZES)


def a_tree(seed: int, n: int = 100) -> tree.Tree:
    return {
        "w": torch.randn(n, generator=torch.Generator().manual_seed(seed)),
        "n": torch.tensor(seed),
    }


def size(n: int = 100) -> int:
    return 4 * n + 8 + 2 * OBJECT


class AsADictionary(RuleBasedStateMachine):
    """Spilling trees are a dictionary of trees, whatever fits into its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.trees, self.wanted = (
            OffloadedTrees(bound=3 * size()),
            dict[str, tree.Tree](),
        )

    @rule(
        name=st.sampled_from("abcdefgh"),
        seed=st.integers(0, 99),
        n=st.sampled_from([0, 1, 100, 1000]),
    )
    def put(self, name: str, seed: int, n: int) -> None:
        self.trees[name] = self.wanted[name] = a_tree(seed, n)

    @rule(name=st.sampled_from("abcdefgh"))
    def take_out(self, name: str) -> None:
        assert (self.trees.pop(name, None) is None) == (
            self.wanted.pop(name, None) is None
        )

    @rule(name=st.sampled_from("abcdefgh"))
    def look(self, name: str) -> None:
        if name in self.wanted:
            assert tree.digest(self.trees[name]) == tree.digest(self.wanted[name])
        else:
            with pytest.raises(KeyError):
                self.trees[name]

    @invariant()
    def holds_what_it_may(self) -> None:
        assert self.trees.held <= self.trees.bound
        assert sorted(self.trees) == sorted(self.wanted)
        assert len(self.trees) == len(self.wanted)

    def teardown(self) -> None:
        for name, value in self.wanted.items():
            assert tree.digest(self.trees[name]) == tree.digest(value)


TestAsADictionary = AsADictionary.TestCase
TestAsADictionary.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None
)


def test_the_scratch_file_has_no_name_and_does_not_grow(tmp_path: Path) -> None:
    held = OffloadedTrees(tmp_path, bound=0)
    for seed in range(30):
        for name in "abc":
            held[name] = a_tree(seed)
            assert held.held == 0
        assert tree.digest(held["b"]) == tree.digest(a_tree(seed))
    assert list(tmp_path.iterdir()) == []
    assert held._end < 4 * (size() + 200)


def test_what_is_read_but_not_set_is_not_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = OffloadedTrees(bound=2 * size())
    for k in range(6):
        held[str(k)] = a_tree(k)
    for k in range(6):
        assert int(held[str(k)]["n"]) == k
    monkeypatch.setattr(OffloadedTrees, "_write", None)
    for k in (0, 3, 2, 5, 4, 1, 0):
        assert int(held[str(k)]["n"]) == k


def test_a_part_of_a_larger_memory_is_kept_alone() -> None:
    whole = torch.arange(1000.0)
    held = OffloadedTrees()
    held["a"] = {"part": whole[10:12], "turned": whole[:4].view(2, 2).T}
    for key, tensor in held["a"].items():
        assert tensor.untyped_storage().nbytes() == 4 * tensor.numel(), key
        assert tensor.is_contiguous()
    whole.zero_()
    assert held["a"]["part"].tolist() == [10.0, 11.0]


def test_clients_begin_where_they_are_told_and_note_what_changes() -> None:
    asked: list[str] = []

    def beginning(name: str) -> State:
        asked.append(name)
        return State({"model": {"w": torch.zeros(1)}})

    clients = ClientStates(["b", "a", "c"], beginning, bound=0)
    assert list(clients) == ["b", "a", "c"]
    assert clients.changed == {"a", "b", "c"}
    clients.changed.clear()
    assert clients["a"].trees["model"]["w"].tolist() == [0.0]
    clients["a"] = State(
        {"model": {}, "personal": {"w": torch.ones(2)}}, {"n": [1, None]}
    )
    assert clients["a"].trees.keys() == {"model", "personal"}
    assert clients["a"].trees["model"] == {}
    assert clients["a"].trees["personal"]["w"].tolist() == [1.0, 1.0]
    assert clients["a"].meta == {"n": [1, None]}
    clients["a"] = State({"model": {}})
    assert clients["a"] == State({"model": {}})
    assert clients.changed == {"a"}
    assert asked == ["a"]
    for name in ("d", ""):
        with pytest.raises(KeyError):
            clients[name]
        with pytest.raises(KeyError):
            clients[name] = State()
    with pytest.raises(UsageError, match="a tree"):
        clients["b"] = State({"mo|del": {"w": torch.ones(1)}})


def spilled(monkeypatch: pytest.MonkeyPatch, bound: int = 0) -> list[int]:
    """Let all that spills hold so much; what is written beyond it, in bytes."""
    written: list[int] = []
    write = OffloadedTrees._write

    def noting(self: OffloadedTrees, data: bytes) -> tuple[int, int]:
        written.append(len(data))
        return write(self, data)

    monkeypatch.setattr(
        offloading.OffloadedTrees.__init__, "__defaults__", (None, bound)
    )
    monkeypatch.setattr(offloading.ClientStates.__init__, "__defaults__", (None, bound))
    monkeypatch.setattr(OffloadedTrees, "_write", noting)
    return written


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedbabu", "ditto", "playerfl"])
def test_a_run_beyond_its_memory_has_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "algorithm": name,
        "participation": 0.5,
        "keep_optimizer": name == "ditto",
    }
    usual = play(CONFIG, **options)
    written = spilled(monkeypatch)
    again = play(CONFIG, **options)
    assert again.everything() == usual.everything()
    assert again.rows == usual.rows
    assert written, "local models at least"


@pytest.mark.parametrize("name", ["fedper", "ditto"])
def test_a_run_beyond_its_memory_can_be_resumed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {
        "data": MANY,
        "model": network("plain"),
        "progress": False,
    }
    usual, broken = tmp_path / "a" / "run", tmp_path / "b" / "run"
    made = CONFIG.with_keys(
        algorithm=name,
        participation=0.3,
        optimizer="adamw",
        lr=0.01,
        keep_optimizer=True,
    )
    made = made.with_keys(eval_every=3)
    runner.run(made, usual, **config)
    written = spilled(monkeypatch, bound=5000)
    runner.run(made, broken, **config)
    for which in (2, 3):
        (broken / "checkpoints" / f"{which:06d}.json").unlink()
    runner.resume(broken, **config)
    assert written
    for each in ("rows.jsonl", *(f"checkpoints/{k:06d}.json" for k in (1, 2, 3))):
        assert (usual / each).read_bytes() == (broken / each).read_bytes()
    store.Run(broken).verify()
    assert {f.name for f in (usual / "blobs").iterdir()} == {
        f.name for f in (broken / "blobs").iterdir()
    }


class Watching(FedAvg):
    """FedAvg that counts the bytes of all tensors there are as it takes in a round's last reply."""

    name = "watching"
    most = 0

    def aggregate(self, server: State, updates: Iterable[Any], rnd: Any) -> None:
        def watched() -> Iterable[Any]:
            for update in updates:
                if update.client == rnd.sampled[-1]:
                    type(self).most = max(type(self).most, alive())
                yield update

        super().aggregate(server, watched(), rnd)


def alive() -> int:
    """Bytes of all tensors, each memory once."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("stack", "counts"),
    [
        ("off", (10, 25)),
        pytest.param(
            "on",
            (batched_clients.TOGETHER, 3 * batched_clients.TOGETHER),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_memory_of_a_global_model_does_not_grow_with_the_clients(
    stack: str, counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry()
    from fl_core.algorithms import base

    monkeypatch.setitem(base.ALGORITHMS._members, Watching.name, Watching)
    data, most = {count: federation([14] * count) for count in counts}, {}
    for count in data:
        gc.collect()
        before, Watching.most = alive(), 0
        config = CONFIG.with_keys(algorithm="watching", rounds=1, stack=stack)
        runner.run(config, data=data[count], model=network("plain"), progress=False)
        most[count] = Watching.most - before
    assert most[counts[1]] == most[counts[0]] > 0


def test_a_client_holds_its_personal_layers_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[int] = []
    monkeypatch.setattr(OffloadedTrees, "_shrink", lambda self: held.append(self.held))
    plan = LayerPlan.all_but_last(
        runner.assemble(CONFIG, data=MANY, model=network("plain")).layers
    )
    engine = play(CONFIG, data=MANY, algorithm="fedper", plan=plan, rounds=1).engine
    head = 4 * (6 * 3 + 3) + 2 * OBJECT
    assert engine.clients.states._trees.held == len(MANY.clients) * head
    nothing = play(CONFIG, data=MANY, algorithm="fedavg", rounds=1).engine
    assert nothing.clients.states._trees.held == len(nothing.clients.states._trees) == 0


def test_a_checkpoint_keeps_only_so_many_local_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fl_core.engine.LOCAL_MODELS", 3)
    engine = runner.run(
        CONFIG.with_keys(rounds=1),
        tmp_path / "run",
        data=MANY,
        model=network("plain"),
        progress=False,
    )
    assert (
        list(store.Run(tmp_path / "run").checkpoint().models["local"])
        == engine.names[:3]
    )
    monkeypatch.undo()
    everyone: Played = play(CONFIG, data=MANY, rounds=1)
    assert len(everyone.checkpoints[0].models["local"]) == len(MANY.clients)


def test_clients_that_do_not_change_cost_nothing_at_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = CONFIG.with_keys(algorithm="fedper", participation=0.2)
    monkeypatch.setattr("fl_core.engine.LOCAL_MODELS", 0)
    put: list[State] = []
    original = writing.Writer._put

    def noting(self: writing.Writer, state: State) -> dict[str, Any]:
        put.append(state)
        return original(self, state)

    monkeypatch.setattr(writing.Writer, "_put", noting)
    out, common = (
        tmp_path / "run",
        {"data": MANY, "model": network("plain"), "progress": False},
    )
    runner.run(made, out, **common)  # type: ignore[arg-type]
    assert len(put) == (1 + 20) + 2 * (1 + 4), (
        "the server each time, everyone once, and whoever took part"
    )
    (out / "checkpoints" / "000003.json").unlink()
    put.clear()
    runner.resume(out, **common)  # type: ignore[arg-type]
    assert len(put) == 1 + 4
