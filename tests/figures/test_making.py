"""Items are made elsewhere as here: what is sent can be sent, and the same rows come back."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from fedlayers.backends.base import (
    Backend,
    Result,
    Results,
    Watch,
    answer_job,
    no_progress,
)
from figures import items, learning, recipe
from figures.__main__ import main
from figures.making import Making
from fl_core import rows
from tests.figures.conftest import TINY, small

ITEMS = {each.study.name: each.study for each in items.REGISTRY.values()}


@pytest.mark.parametrize("name", sorted(ITEMS))
def test_every_item_can_be_sent(name: str) -> None:
    item, run = ITEMS[name], next(iter(ITEMS[name].runs))
    sent = pickle.loads(pickle.dumps(Making(item, run, 0, Path("rows"))))
    assert (sent.item.name, sent.item.runs[run]) == (name, item.runs[run])


class Elsewhere(Backend):
    """Another machine with a folder of its own, one work after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def results(self, works, watch: Watch = no_progress) -> Results:  # type: ignore[no-untyped-def]
        for work in works:
            sent: dict[str, str] = {}
            there = pickle.loads(pickle.dumps(work.sent_to(None))).sent_to(self.folder)
            for parcel in work.outgoing(sent):
                there.accept(parcel)
            answer = answer_job(there)
            for parcel in there.incoming(sent, over=True):
                work.accept(parcel)
            yield Result(work, answer.value, answer.error)


@pytest.mark.filterwarnings("ignore:client")
def test_a_recipe_made_elsewhere_has_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {
        name: TINY.with_keys(algorithm=name, samples_per_client=None)
        for name in ("local", "fedavg")
    }
    check = small(monkeypatch, learning.ITEM, runs)
    for folder, on in (("here", ""), ("there", Elsewhere(tmp_path / "node"))):
        (tmp_path / folder).mkdir()
        recipe.train(
            check, tmp_path / folder / check.name, seeds=1, backend=on, progress=False
        )
    here, there = (
        rows.read(tmp_path / f / check.name / "local-0.jsonl")
        for f in ("here", "there")
    )
    assert here[1].equals(there[1])
    assert json.dumps({**here[0], "seconds": 0}) == json.dumps(
        {**there[0], "seconds": 0}
    )
    assert not list((tmp_path / "node").glob("*.jsonl")), (
        "rows are written where they were asked for"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "local:2"], "--train"),
        (["--train", "--backend", "locl:2"], "got 'locl:2'"),
    ],
)
def test_places_that_cannot_be_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([learning.NAME, *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
