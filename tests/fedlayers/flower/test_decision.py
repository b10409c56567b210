"""A decision over sites: that of one machine at the same temperatures, what leaves a site, and what is refused."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Message

import fedlayers as fl
from fedlayers.backends.local import InProcessBackend, no_progress
from fedlayers.decision.choose import answered
from fedlayers.decision.sums import TEMPERATURES
from fedlayers.decision.table import TEST, VALIDATION
from fedlayers.decision.training import make_question, train_ways
from fedlayers.flower.federation import packet_of
from fl_core.config import with_own
from fl_core.errors import UsageError
from fl_core.training import evaluate
from tests.conftest import refuses
from tests.fedlayers.flower.grid import (
    PLAIN,
    WARDS,
    LocalGrid,
    over_sites,
    site_files,
)

ELSEWHERE = {"fallback", "clients_differ", "who is alike"}


def coarse_fit(outputs, y, weights, base):
    """Return the stated temperature with the least softened loss, and no weight of the base rate."""
    if len(torch.unique(y)) == 1:
        return 1.0, 0.0
    soft = evaluate.soft_targets(y, weights, outputs.shape[1])
    means = []
    for temperature in TEMPERATURES:
        logits = (outputs / temperature).log_softmax(1)
        means.append(float(weights @ -(soft * logits).sum(1)))
    return TEMPERATURES[int(np.argmin(means))], 0.0


def patient_files(folder):
    """Write the wards' tables with several rows a patient, enough for halves of two samples or more."""
    files = site_files(folder, 'scale = "none"\ngroup_column = "patient"')
    for k, ward in enumerate(WARDS):
        table = pd.concat([pd.read_csv(folder / f"{ward}.csv")] * 2)
        patient = np.random.default_rng(k).integers(0, 14 - k, len(table))
        table = table.assign(patient=[f"{ward}{number:02}" for number in patient])
        table.loc[::5, "label"] = "ill"
        table.to_csv(folder / f"{ward}.csv", index=False)
    return files


@pytest.mark.slow
def test_sites_decide_as_one_machine_does(tmp_path, monkeypatch):
    """The same ways, temperatures and seeds give the same table, and the same answer."""
    files = patient_files(tmp_path)
    seeds, keys = [0, 1], {"algorithm": "fedper", "rounds": 3}
    over = over_sites(
        tmp_path / "sites", LocalGrid(files), arms=[], seeds=seeds, **keys
    )

    monkeypatch.setattr(evaluate, "fit", coarse_fit)
    tables = ",".join(str(tmp_path / f"{ward}.csv") for ward in WARDS)
    keys_of_run = {**PLAIN, **keys, "dataset": tables, "scale": "none", "patience": 0}
    config = fl.RunConfig(**keys_of_run, group_column="patient", stack="off")
    home = tmp_path / "home"
    question = make_question(*with_own(config), home, None, seeds, 0, True, no_progress)
    trained = train_ways(
        replace(question, simple=False), InProcessBackend(), no_progress
    )
    table, other = trained.table(), over.trained.table()
    assert set(table.ways) == set(other.ways)
    assert {"linear_fedavg", "base_rate"} < set(table.ways)
    assert table.overlap == other.overlap
    assert table.overlap[VALIDATION] < table.overlap[TEST] == 1
    for split in (VALIDATION, TEST):
        for one in table.ways:
            assert table.means(one, split) == pytest.approx(other.means(one, split))
            for way in set(table.ways) - {one}:
                plain, over_sites_result = (
                    losses.gain(one, way, split) for losses in (table, other)
                )
                assert over_sites_result == pytest.approx(plain, rel=1e-4, abs=1e-7)
                clients = [
                    losses.by_client(one, way, split) for losses in (table, other)
                ]
                assert clients[0].keys() == clients[1].keys() == set(WARDS)
                for ward in WARDS:
                    wanted = pytest.approx(clients[0][ward], rel=1e-4, abs=1e-7)
                    assert clients[1][ward] == wanted
    plain, over_sites_result = answered(trained).to_json(), over.to_json()
    changed = {"cost", "differ", "not_tried", "next", "fallback", "alike"}
    for key in plain.keys() - changed:
        assert over_sites_result[key] == plain[key], key
    assert trained.tuning == over.trained.tuning
    assert set(over_sites_result["not_tried"]) == ELSEWHERE
    assert "Not asked over sites: " in over.text()
    assert (tmp_path / "sites" / "choice.json").exists()
    assert not (tmp_path / "sites" / "models").exists()


def test_no_loss_of_a_sample_leaves_a_site(tmp_path):
    """The replies have as many numbers for a site of twice the samples, and no tensor. Three seeds are the default."""
    counts = {}
    for times, seeds in ((1, {}), (2, {"seeds": [0]})):
        files = site_files(tmp_path / str(times))
        for ward in WARDS:
            path = tmp_path / str(times) / f"{ward}.csv"
            table = pd.read_csv(path)
            pd.concat([table] * times).to_csv(path, index=False)
        sent = []

        def watch(asked, reply, sent=sent):
            kind = asked.metadata.message_type
            if kind in ("query.losses", "query.products"):
                packet = packet_of(reply.content, 10**9)
                assert not packet.trees
                sent.append((kind, numbers(packet.head)))
            return reply

        grid = LocalGrid(files, watch)
        keys = {"arms": [], "rounds": 1, **seeds}
        answer = over_sites(tmp_path / f"out{times}", grid, **keys)
        assert answer.seeds == tuple(seeds.get("seeds", (0, 1, 2)))
        counts[times] = sorted(set(sent))
    assert counts[1] == counts[2]
    assert len({kind for kind, _ in counts[1]}) == 2


def numbers(found):
    """Return how many numbers some JSON has, without the labels that a half has."""
    if isinstance(found, dict):
        return sum(numbers(value) for key, value in found.items() if key != "labels")
    if isinstance(found, list):
        return sum(map(numbers, found))
    return int(isinstance(found, (int, float)))


class Recorded(LocalGrid):
    """A grid that repeats a site's replies of a kind. One of them can be changed."""

    def __init__(self, files):
        super().__init__(files)
        self.replies: dict = {}
        self.lie = "", None
        self.records = False

    def _answer(self, message):
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        if not self.records or kind not in (LOSSES, PRODUCTS):
            return super()._answer(message)
        if (kind, node) not in self.replies:
            self.replies[kind, node] = super()._answer(message).content
        packet = packet_of(self.replies[kind, node], 10**9)
        if self.lie[0] == kind and node == 3:
            self.lie[1](packet.head)
        return Message(packet.records(), reply_to=message)


def sets(*path, value):
    """Return a change of the number at a path."""

    def change(head):
        for key in path[:-1]:
            head = head[key]
        head[path[-1]] = value

    return change


LOSSES, PRODUCTS = "query.losses", "query.products"
LIES = [
    ("finite number", LOSSES, sets("sums", 0, 0, 3, 1, value=float("nan"))),
    ("must have shape", LOSSES, sets("sums", 0, 0, value=[[1.0, 1.0]])),
    ("at most 1e", LOSSES, sets("base", 1, 2, 0, value=1e300)),
    ("must be those of the run", LOSSES, sets("run", value="0" * 64)),
    ("must be those of the run", LOSSES, sets("sums", value=[])),
    ("weights must add up", LOSSES, sets("weights", 0, 0, value=1e6)),
    ("weights and losses", LOSSES, sets("weights", 0, 1, value=-1.0)),
    ("weights and losses", LOSSES, sets("excess", value=1e300)),
    ("labels must be two", LOSSES, sets("labels", 0, value=[2])),
    ("whole number", LOSSES, sets("labels", 0, value=[-1])),
    ("sums is missing", LOSSES, lambda head: head.pop("sums")),
    ("groups must be", PRODUCTS, sets("validation", "draws", value=10**6)),
    ("groups must be", PRODUCTS, sets("test", "draws", value=0)),
    ("groups must be", PRODUCTS, sets("test", "shared", value=10**6)),
    ("sums must be those", PRODUCTS, sets("test", "sums", value=[1.0])),
    ("sums must be those", PRODUCTS, sets("test", "products", 0, value=[1.0])),
    ("fit each other", PRODUCTS, sets("validation", "products", 0, 0, value=-1.0)),
    ("fit each other", PRODUCTS, sets("validation", "products", 0, 1, value=1e9)),
    ("fit each other", PRODUCTS, sets("test", "sums", -1, value=0.0)),
    ("finite number", PRODUCTS, sets("test", "sums", 0, value=float("inf"))),
    ("test is missing", PRODUCTS, lambda head: head.pop("test")),
]
"""What a site can send that is refused, by words of the message."""


def test_sums_that_no_site_has_are_refused_by_its_name(tmp_path):
    grid = Recorded(site_files(tmp_path))
    keys = {"arms": [], "seeds": [0], "rounds": 1}
    trained = over_sites(tmp_path / "out", grid, **keys).trained
    losses, run = trained.question.losses[0], trained.runs["local"][0]
    named = {"base_rate": losses.base_rate, "local": run.tuned[trained.tuning["local"]]}
    grid.records = True
    losses.finish(run.job, list(run.tuned))
    losses.parts(named, VALIDATION, "loss")
    stages = {
        LOSSES: lambda: losses.finish(run.job, list(run.tuned)),
        PRODUCTS: lambda: losses.parts(named, VALIDATION, "loss"),
    }
    for words, kind, change in LIES:
        grid.lie = kind, change
        with pytest.raises(UsageError) as caught:
            stages[kind]()
        text = str(caught.value)
        assert words in text, text
        assert "'west'" in text
    grid.lie = LOSSES, sets("sums", 1, value=None)
    tuned = losses.finish(run.job, list(run.tuned)).tuned
    assert len(tuned) == len(run.tuned) - 1  # it diverged at one site


def test_what_sites_cannot_decide_is_refused_before_training(tmp_path):
    grid = LocalGrid(site_files(tmp_path))
    keys = {"arms": [], "algorithm": "fedper"}
    for fault, more in (
        ("monitor must be left out", {"monitor": "auroc"}),
        ("patience must be 0", {"patience": 2}),
        ("its own plans", {"plan": "auto"}),
        ("unknown way", {"arms": ["nose"]}),
    ):
        with refuses(fault):
            over_sites(tmp_path / "out", grid, **{**keys, **more})
    path = tmp_path / "west.csv"
    pd.read_csv(path).head(5).to_csv(path, index=False)
    with refuses("samples of client 'west' must be at least"):
        over_sites(tmp_path / "out", grid, **keys)
    assert set(grid.asked) == {"query.facts", "query.describe", "query.clipped"}
