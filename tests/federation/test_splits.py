"""Attacks by differences: a site answers for few splits of its data, and the same each time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch

from fedlayers.remote import federation, site_data
from fedlayers.remote.codec import Packet, decode, encode
from fedlayers.remote.in_memory import InMemoryTransport
from fedlayers.remote.policy import Policy
from fedlayers.remote.rpc import RefusedError, RpcClient
from fedlayers.remote.site import Site
from fedlayers.remote.site_data import Moments, PresplitData, SiteDataset
from fl_core import models
from fl_core.algorithms.base import State
from fl_core.algorithms.model_template import ModelTemplate
from fl_core.config import RunConfig
from fl_core.data.partitions import SPLITS
from fl_core.data.partitions.base import split_of
from fl_core.data.recipes import SHARES
from fl_core.errors import CorruptError
from fl_core.execution.requests import ScoreRequest
from tests.conftest import TOY

ROWS, FEATURES = 40, 3
X = np.random.default_rng(0).standard_normal((ROWS, FEATURES)).astype(np.float32)
CONFIG = RunConfig(dataset="toy", model="mlp", model_options={"sizes": []}, rounds=1, batch_size=8)


def table(path: Path, x: np.ndarray[Any, Any] = X) -> Path:
    lines = [f"{','.join(map(str, row))},{('ill', 'well')[row[0] > 0]}" for row in x.tolist()]
    path.write_text("\n".join(["a,b,c,label", *lines]))
    return path


def hospital(folder: Path, x: np.ndarray[Any, Any] = X, **policy: Any) -> Site:
    """A site of that table, as it is when it starts again: only its folder remembers."""
    folder.mkdir(exist_ok=True)
    silo = SiteDataset("north", table(folder / "own.csv", x), scale="standard", classes=["ill", "well"])
    return Site(silo, folder / "state", Policy(**policy))


def ask(site: Site, head: dict[str, Any]) -> dict[str, Any]:
    return decode(site.answer(encode(Packet({**head, "session": "s", "seq": 1})))).head


def moments(site: Site, seed: int, number: int = 0) -> Moments | None:
    """What the site tells of a split; None: it refuses."""
    found = ask(site, {"kind": "moments", "number": number, "seed": seed})
    if found["kind"] == "refused":
        return None
    return Moments(found["count"], *(tuple(found[name]) for name in ("present", "mean", "squares")))


def split(seed: int, name: str = "train", rows: int = ROWS) -> np.ndarray[Any, Any]:
    """Where a split takes its samples from, which anybody can compute who knows how many there are: 0 or 1 a row."""
    taken = split_of("north", 0, np.arange(rows), None, SHARES, seed)[SPLITS.index(name)]
    return np.isin(np.arange(rows), taken).astype(float)


def rebuilt(tell: Callable[[int], Moments | None], seeds: range) -> tuple[int, np.ndarray[Any, Any]]:
    """How many sums were told, and the rows that follow from them by least squares."""
    told = {seed: found for seed in seeds if (found := tell(seed)) is not None}
    sums = np.array([np.array(each.mean) * each.count for each in told.values()])
    return len(told), np.linalg.lstsq(np.array([split(seed) for seed in told]), sums, rcond=None)[0]


def test_moments_of_many_seeds_do_not_give_the_rows(tmp_path: Path) -> None:
    site = hospital(tmp_path)
    n, rows = rebuilt(lambda seed: site.holding.moments(0, seed), range(60))
    assert n == 60
    np.testing.assert_allclose(rows, X, atol=1e-5, err_msg="the attack works where all are answered")
    n, rows = rebuilt(lambda seed: moments(site, seed), range(60))
    assert n == site.policy.splits == 5
    assert np.abs(rows - X).max() > 1
    assert (np.abs(rows - X).max(axis=1) > 0.05).all(), "no single row is found"
    assert all(moments(site, 0, number) is None for number in range(1, 60)), "the number draws a split as a seed does"
    again = hospital(tmp_path)
    assert rebuilt(lambda seed: moments(again, seed), range(60))[0] == 5, "also when it has started again"


def test_moments_are_answered_once_a_seed_and_repeated_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = moments(hospital(tmp_path), 3)
    again = hospital(tmp_path)
    monkeypatch.setattr(again.holding, "moments", lambda *_: pytest.fail("computed again"))
    assert moments(again, 3) == first is not None


def test_splits_that_nearly_agree_do_not_give_two_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_data, "FEWEST", 1)  # another rule, which refuses so small a table
    rows = X[:12]
    site = hospital(tmp_path, rows)
    close = next(
        pair
        for pair in combinations(range(200), 2)
        if np.abs(split(pair[0], rows=12) - split(pair[1], rows=12)).sum() == 2
    )
    one, other = (site.holding.moments(0, seed) for seed in close)
    gap = np.subtract(one.mean, other.mean) * one.count  # x - y, and from the sums of squares x + y
    squares = [np.array(each.squares) + each.count * np.square(each.mean) for each in (one, other)]
    found = (gap + (squares[0] - squares[1]) / gap) / 2
    assert np.abs(rows - found).max(axis=1).min() < 1e-3, "the attack works"
    assert moments(site, close[0]) is not None
    assert moments(site, close[1]) is None


# --- scores --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    from safetensors.torch import save_file

    model = models.build("mlp", (FEATURES,), 2, options={"sizes": []})
    path = tmp_path_factory.mktemp("weights") / "start.safetensors"
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, path)
    return path, tensors


def losses(site: Site, weights: tuple[Path, dict[str, torch.Tensor]], seeds: range) -> Iterator[tuple[int, float, int]]:
    """The loss of one and the same model on the test samples of each seed's split, where the site tells it."""
    for seed in seeds:
        line = RpcClient(InMemoryTransport({"north": site}))
        config = replace(CONFIG, seed=seed, init=str(weights[0]))
        try:
            facts = federation.request_site_facts(line)
            task = federation.task_of(config, federation.server_view(facts, "toy"), None)
            home = federation.join(line, task, facts, uuid4().hex)
        except RefusedError:
            continue
        home.begin(task.algorithm(None))
        (reply,) = home.run([ScoreRequest(0, 0, ModelTemplate(server=State({"model": weights[1]})))])
        yield seed, reply.scores["global"]["test"]["loss"], facts[0]["sizes"]["test"]


def test_scores_of_many_seeds_do_not_give_each_samples_loss(
    tmp_path: Path, weights: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    silo = SiteDataset("north", table(tmp_path / "own.csv"), classes=["ill", "well"])
    model = models.build("mlp", (FEATURES,), 2, options={"sizes": []})
    model.load_state_dict(weights[1])
    with torch.no_grad():
        logits = model(torch.from_numpy(X))
        own = torch.nn.functional.cross_entropy(logits, torch.from_numpy(X[:, 0] > 0).long(), reduction="none").numpy()

    def solved(told: list[tuple[int, float, int]]) -> np.ndarray[Any, Any]:
        sums = [loss * count for _, loss, count in told]
        return np.linalg.lstsq(np.array([split(seed, "test") for seed, _, _ in told]), np.array(sums), rcond=None)[0]

    free = Site(silo, tmp_path / "free", Policy(splits=1000))
    np.testing.assert_allclose(solved(list(losses(free, weights, range(50)))), own, atol=1e-3)
    site = Site(silo, tmp_path / "site")
    told = list(losses(site, weights, range(20)))
    assert [seed for seed, _, _ in told] == [0, 1, 2, 3, 4]
    assert np.median(np.abs(solved(told) - own)) > 0.05


def test_all_kinds_of_answers_share_the_splits(tmp_path: Path, weights: tuple[Path, dict[str, torch.Tensor]]) -> None:
    silo = SiteDataset("north", table(tmp_path / "own.csv"), classes=["ill", "well"])
    site = Site(silo, tmp_path / "site", Policy(splits=2))
    race = {"kind": "race", "number": 0, "arms": []}
    assert ask(site, {**race, "seed": 7})["kind"] == "counted"
    assert [seed for seed, _, _ in losses(site, weights, range(3))] == [0]
    assert ask(site, {**race, "seed": 0})["kind"] == "counted"
    refused = ask(site, {**race, "seed": 1})
    assert refused["kind"] == "refused"
    assert "splits" in refused["reason"]
    lines = [json.loads(line) for line in (tmp_path / "site" / "audit.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["seed"]) for line in lines] == [
        ("race", 7), ("hello", None), ("join", 0), ("score", 0), ("race", 0)
    ]  # fmt: skip
    assert {line["data"] for line in lines} == {silo.facts()["digest"]}


def test_data_that_are_split_already_have_one_split(tmp_path: Path) -> None:
    site = Site(PresplitData(TOY, "a"), tmp_path, Policy(splits=1))
    for seed in range(10):
        assert ask(site, {"kind": "race", "number": seed, "seed": seed, "arms": []})["kind"] == "counted"
    assert len((tmp_path / "audit.jsonl").read_text().splitlines()) == 1


# --- changed data --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "needed"), [(0, 10), (12, 12)])
def test_changed_data_are_answered_for_when_enough_rows_have_changed(tmp_path: Path, least: int, needed: int) -> None:
    def told(x: np.ndarray[Any, Any]) -> Moments | None:
        return moments(hospital(tmp_path, x, least_samples=least), 0)

    more = np.random.default_rng(1).standard_normal((needed, FEATURES)).astype(np.float32)
    first = told(X)
    assert first is not None
    assert told(X[1:]) is None
    assert told(X[::-1]) is None, "another order alone is no change"
    assert told(np.concatenate([X, more[1:]])) is None
    edited = X.copy()
    edited[: needed - 1] = more[1:]
    assert told(edited) is None
    assert told(np.concatenate([X, more])) is not None
    assert told(X) == first
    assert told(np.concatenate([X, more])[1:]) is None, "compared with all data that were answered for"


def test_a_damaged_audit_is_no_reason_to_answer_anew(tmp_path: Path) -> None:
    assert moments(hospital(tmp_path), 0) is not None
    (tmp_path / "state" / "audit.jsonl").write_text('{"kind": "moments"}\n')
    site = hospital(tmp_path)
    with pytest.raises(CorruptError, match=r"audit\.jsonl"):
        site.audit.check(0, 1)
    assert ask(site, {"kind": "moments", "number": 0, "seed": 1})["kind"] == "failed"


def test_least_samples_are_checked_at_join(tmp_path: Path) -> None:
    line = RpcClient(InMemoryTransport({"a": (site := Site(PresplitData(TOY, "a"), tmp_path))}))
    facts = federation.request_site_facts(line)
    task = federation.task_of(replace(CONFIG, model_options={}), federation.server_view(facts, "toy"), None)
    site.policy = Policy(least_samples=31)
    with pytest.raises(RefusedError, match="got 30"):
        federation.join(line, task, facts, uuid4().hex)
