"""What crosses a process border arrives whole, whatever its size, and shares nothing where it is kept."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import pytest
import torch

from fl_core import tree
from fl_core.algorithms import Message, Round, State
from fl_core.execution.requests import (
    TUNED,
    ClientReply,
    FinetuneRequest,
    ScoreRequest,
    TrainRequest,
)
from fl_core.execution.transport import ALLOCATOR, Channel, Slot, allocator_settings
from fl_core.tree import Tree

ODD = {
    "mask": torch.tensor([True, False, True]),
    "half": torch.ones(3).half(),
    "count": torch.tensor(3),
    "nothing": torch.ones(0, 4),
    "fine": torch.randn(5, generator=torch.Generator().manual_seed(0)).double(),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
    "images": torch.arange(96.0)
    .reshape(2, 3, 4, 4)
    .to(memory_format=torch.channels_last),
}
NEEDED = 64 * 5 + 384  # five small tensors and the images


def messages() -> list[Any]:
    message = Message(
        {"model": ODD, "more": {"a": torch.full((7,), 2.0)}}, {"n": [1, None]}
    )
    state = State({"model": {}, "personal": ODD}, {"m": "x"})
    return [
        TrainRequest(
            3,
            Round(1, "train", (3, 4)),
            message,
            state=state,
            score=("test",),
            keep=True,
        ),
        FinetuneRequest(1, 2, models={TUNED: ODD}),
        ScoreRequest(0, 4, models={"personal": ODD}),
        ClientReply(
            2,
            message,
            {"local": {"test": {"loss": 0.5}}},
            state=state,
            models={"local": ODD, "more": ODD},
        ),
        ClientReply(2),
    ]


def parts(value: Any) -> dict[str, Any]:
    """Everything in a job or result, its trees by digest."""
    found: dict[str, Any] = {}
    for name, part in vars(value).items():
        if isinstance(part, (State, Message)):
            found |= {
                f"{name}/{key}": tree.digest(each) for key, each in part.trees.items()
            }
            found[f"{name}/meta"] = part.meta
        elif name in ("template", "models"):
            models = part if name == "models" else part.models
            found |= {
                f"{name}/{key}": tree.digest(each) for key, each in models.items()
            }
        else:
            found[name] = part
    return found


@pytest.mark.parametrize("room", [0, 64, NEEDED, NEEDED + 64, 2 * NEEDED, 1 << 16])
@pytest.mark.parametrize("which", range(len(messages())))
def test_everything_arrives_whatever_fits(which: int, room: int) -> None:
    value, slot = messages()[which], Slot.allocate(room)
    before = parts(value)
    packed = slot.store(value)
    for copy in (True, False):
        found = slot.take(packed, copy=copy)
        assert type(found) is type(value)
        assert parts(found) == before
    assert parts(value) == before


def test_what_fits_is_not_carried_as_bytes() -> None:
    value = FinetuneRequest(0, 0, models={TUNED: ODD})
    kinds = [
        type(Slot.allocate(room).store(value).models[TUNED]).__name__
        for room in (NEEDED - 64, NEEDED)
    ]
    assert kinds == ["bytes", "list"]


def test_a_copy_outlives_the_slots_next_contents_and_a_view_does_not() -> None:
    slot = Slot.allocate(1 << 12)
    first, second = ({"x": torch.full((4,), value)} for value in (1.0, 2.0))
    packed = slot.store(FinetuneRequest(0, 0, models={TUNED: first}))
    kept, seen = (
        slot.take(packed, copy=copy).models[TUNED]["x"] for copy in (True, False)
    )
    slot.store(FinetuneRequest(0, 0, models={TUNED: second}))
    assert kept.tolist() == first["x"].tolist()
    assert seen.tolist() == second["x"].tolist()


@pytest.mark.parametrize("repeats", [True, False])
def test_a_tensor_that_is_still_there_is_copied_once(repeats: bool) -> None:
    slot, model, own = (
        Slot.allocate(1 << 12, repeats),
        {"x": torch.ones(64)},
        {"x": torch.zeros(32)},
    )
    of_model, of_own = 256, 128

    def put(*trees: tuple[str, Tree]) -> int:
        before = slot.copied
        job = TrainRequest(0, Round(0), Message(dict(trees)), state=State())
        assert parts(slot.take(slot.store(job), copy=True)) == parts(job)
        return slot.copied - before

    assert put(("model", model)) == of_model
    assert put(("model", model)) == (0 if repeats else of_model)
    assert put(("model", model), ("own", own)) == (
        of_own if repeats else of_model + of_own
    )
    model["x"].add_(1)
    assert put(("model", model)) == of_model, "it has changed"
    assert put(("model", {"x": model["x"].clone()})) == of_model, "another one"
    assert put(("own", own)) == of_own, "now at the place of the model's first part"
    assert put(("model", model)) == of_model, "which was overwritten"
    personal = {**model, "head": own["x"]}
    assert put(("personal", personal)) == (0 if repeats else of_model + of_own), (
        "its head is where it was"
    )
    assert put(("personal", {**personal, "head": own["x"].clone()})) == (
        of_own if repeats else of_model + of_own
    )


def test_two_ends_of_a_channel() -> None:
    a, b = multiprocessing.Pipe()
    there, back = Slot.allocate(1 << 12), Slot.allocate(1 << 12)
    ours, theirs = (
        Channel(a, there, back, keeps=True),
        Channel(b, back, there, keeps=False),
    )
    error = KeyError("client")
    error.client = 3  # type: ignore[attr-defined]
    for kind, value in (("run", messages()[0]), ("ok", messages()[3])):
        for sender, receiver in ((ours, theirs), (theirs, ours)):
            sender.send((kind, value))
            found_kind, found = receiver.recv()
            assert found_kind == kind
            assert parts(found) == parts(value)
    theirs.send(("error", error))
    kind, found = ours.recv()
    assert (kind, str(found)) == ("error", str(error))
    theirs.close()
    with pytest.raises(EOFError):
        ours.recv()
    ours.close()


def test_the_allocators_settings_are_there_for_a_moment_and_never_replace_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, *others = ALLOCATOR
    for name in others:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(first, "7")
    before = dict(os.environ)

    def fail_inside() -> None:
        with allocator_settings():
            assert os.environ[first] == "7"
            assert {name: os.environ[name] for name in others} == {
                name: ALLOCATOR[name] for name in others
            }
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert dict(os.environ) == before
